"""How large a `dot_general` is, and which precision it was recorded with.

Decides these from its parameters and shapes. Does not decide what they mean for its dtype; see `causes.py` in
`whole_program`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._jaxpr import FlatJaxpr, Node
from ..._sizes import assumed_shape

# Tensor Cores contract 16 numbers of 16 bits at a time (`mma.m16n8k16`); with fewer they mostly multiply padding.
TENSOR_CORE_DEPTH = 16
# A result this many times smaller than an operand costs next to nothing in float32: 2 more bytes for each of its
# numbers are less than a hundredth of the operand's bytes in 16 bits.
_SMALL = 128

# The presets whose products have the digits of float32: computed in float32, or as sums of products of parts of the
# operands. One pass in TF32 has as many digits as float16, one in bfloat16 fewer.
_FLOAT32_PRESETS = frozenset(
    "F32_F32_F32 F64_F64_F64 TF32_TF32_F32_X3 BF16_BF16_F32_X3 BF16_BF16_F32_X6 BF16_BF16_F32_X9".split()
)


class DotSizes(NamedTuple):
    """How many numbers a `dot_general` contracts, how many free ones each side has, and the sizes of its values."""

    contracted: int
    left: int
    right: int
    operands: tuple[int, int]
    result: int

    @staticmethod
    def of(program: FlatJaxpr, node: Node) -> "DotSizes | None":
        """The sizes of a node, a symbolic dimension taken for a large one.

        `None` where one is zero, and of any other primitive.
        """
        if node.name != "dot_general":
            return None
        (contracted, _), (batch, _) = node.params["dimension_numbers"]
        left, right, result = [assumed_shape(program.avals[number]) for number in (*node.ins, *node.outs)]
        one, other = math.prod(left), math.prod(right)
        if not one or not other:
            return None
        depth = math.prod([left[axis] for axis in contracted])
        shared = depth * math.prod([left[axis] for axis in batch])
        return DotSizes(depth, one // shared, other // shared, (one, other), math.prod(result))


def leaves_small_result(program: FlatJaxpr, node: Node, are_parameters: Sequence[bool]) -> bool:
    """Whether a product's result is so small beside its operands that it costs nothing in float32.

    A weight times a vector, as in a power iteration, does not count: other products read its result, and in float32
    that would cost bytes.
    """
    sizes = DotSizes.of(program, node)
    if sizes is None:
        return False
    larger = max(sizes.operands)
    weight_times_vector = min(sizes.left, sizes.right) == 1 and are_parameters[sizes.operands.index(larger)]
    return sizes.result * _SMALL <= larger and not weight_times_vector


def asks_for_float32(precision: Any, policys: str | None) -> bool:
    """Whether a product was recorded with a precision of float32 that is not the policy's own.

    Args:
      precision: the product's parameter: `None`, two of `jax.lax.Precision`, a preset or a `DotAlgorithm`.
      policys: the policy's `matmul_precision`, under which the program was traced.
    """
    if precision is None:  # as most are
        return False
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        return precision.name in _FLOAT32_PRESETS and precision.name != policys
    if isinstance(precision, jax.lax.DotAlgorithm):
        return precision.lhs_precision_type == np.float32
    return jax.lax.Precision.HIGHEST in precision and policys != "highest"
