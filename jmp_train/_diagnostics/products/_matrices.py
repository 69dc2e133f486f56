"""Dots and convolutions as matrix products: how large, and how well they fit Tensor Cores.

Decides what M, N and K are and which of them are misaligned. Does not decide what that costs; see `_tensor_cores.py`.

Reference: NVIDIA, Matrix Multiplication Background User's Guide, and Convolutional Layers User's Guide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax import lax

from ..._jaxpr import Node
from ..._values import as_count

Shape = Sequence[int]

MULTIPLES = {"8 bits": 16, "16 bits": 8, "tf32": 4}
"""What the sizes of a product must be multiples of, by the arithmetic: 16 bytes."""


def round_up(n: int, multiple: int = 8) -> int:
    """Returns the least multiple of `multiple` that is not below `n`: the size to pad a vocabulary or a layer to.

    Tensor Cores want every size of a product to be a multiple of 8 in 16 bits, of 16 in 8 bits; large ones run best at
    multiples of 64.

    Args:
      n: a size, at least 0.
      multiple: at least 1.

    Raises:
      ValueError: either is no such integer.

    >>> round_up(50257), round_up(50257, 64), round_up(768)
    (50264, 50304, 768)
    """
    n, multiple = as_count("n", n, 0), as_count("multiple", multiple)
    return -(-n // multiple) * multiple


class Matrix(NamedTuple):
    """A product as `batch` products of `[m, k]` by `[k, n]`.

    `sizes` are those that must be aligned, by name: M, N and K, or the channels of a convolution.
    """

    batch: int
    m: int
    n: int
    k: int
    sizes: Mapping[str, int]
    is_depthwise: bool = False


def matrix_of(node: Node, left: Shape, right: Shape, result: Shape, backward: bool) -> Matrix:
    """The matrix product that a dot, a ragged dot or a convolution is.

    Args:
      node: the operation.
      left, right, result: shapes of its operands and its result.
      backward: whether it belongs to a backward pass, where a convolution may be the gradient of a kernel.
    """
    if node.name == "conv_general_dilated":
        return _of_convolution(node.params, left, right, result, backward)
    if node.name == "dot_general":
        contracted, batched = node.params["dimension_numbers"]
    else:
        contracted, batched = node.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    batch = math.prod(left[d] for d in batched[0])
    k = math.prod(left[d] for d in contracted[0])
    m = math.prod(left) // max(batch * k, 1)
    # The right side of a ragged dot has one matrix for each group of rows; one of them counts.
    groups = set(range(len(right))) - {*batched[1], *contracted[1]}
    if node.name != "dot_general":
        groups -= set(node.params["ragged_dot_dimension_numbers"].rhs_group_dimensions)
    n = math.prod(right[d] for d in groups)
    return Matrix(batch, m, n, k, {"M": m, "N": n, "K": k})


def _of_convolution(params: Mapping[str, Any], left: Shape, right: Shape, result: Shape, backward: bool) -> Matrix:
    numbers = params["dimension_numbers"]
    groups = max(params["feature_group_count"], params["batch_group_count"])
    batch, features, *spatial = numbers.out_spec
    positions = math.prod(result[d] for d in spatial)
    window = math.prod(right[d] for d in numbers.rhs_spec[2:])
    inner = right[numbers.rhs_spec[1]]
    outer = result[features] // groups
    if backward and window > positions:
        # The gradient of a kernel: the result is the kernel, and the sum runs over examples and positions.
        inputs = result[batch]
        return _grouped(groups, inputs * positions, outer, inner * window, inputs, outer)
    return _grouped(groups, result[batch] * positions, outer, inner * window, inner, outer)


def _grouped(groups: int, m: int, n: int, k: int, inputs: int, outputs: int) -> Matrix:
    sizes = {"input channels": inputs, "output channels": outputs}
    return Matrix(groups, m, n, k, sizes, is_depthwise=groups > 1 and min(inputs, outputs) == 1)


def is_strict(precision: Any) -> bool:
    """Whether a product's `precision` forbids rounding float32 operands to TF32."""
    found = precision if isinstance(precision, tuple | list) else (precision,)
    names = {getattr(each, "name", str(each)) for each in found if each is not None}
    return bool(names & {lax.Precision.HIGHEST.name, "F32_F32_F32", "F64_F64_F64"})
