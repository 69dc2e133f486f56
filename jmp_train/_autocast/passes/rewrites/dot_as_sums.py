"""A product written as multiplications and additions.

    c:f32[m,n] = dot_general a:f32[m,2] b:f32[2,n]    ->    c = a[:,0] * b[0,:] + a[:,1] * b[1,:]

A product that contracts a few numbers, or whose result is one number or vector, does not fill a Tensor Core: as a dot
it is a kernel of its own, which rounds its operands to TF32 on GPUs that have it. Written as multiplications and
additions it fuses with its readers, in float32.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._jaxpr import Node
from ...._sizes import is_less
from ...analysis.dot_sizes import TENSOR_CORE_DEPTH, DotSizes
from ...analysis.wide_product import Cause, WideProduct
from ...ir import Equation, Program
from .rewrite import Computation

_MOST_TERMS = 16  # of a sum that is written out, two operations each; a longer one is one `reduce_sum`


def dot_as_sums(program: Program, equation: Equation) -> Computation | None:
    entry = equation.entry
    if not isinstance(entry, WideProduct) or entry.cause not in (Cause.SHORT, Cause.INNER):
        return None
    # With explicit mesh axes JAX takes no single numbers of a split axis, and a dot says how its result is split.
    specs = [program.avals[number].sharding.spec for number in equation.node.ins]
    if any([axes is not None for spec in specs for axes in spec.partitions]):
        return None
    if entry.of_derivative:
        # If it is short as well, or one long sum: a reduction whose operand XLA multiplies in the same kernel, such as
        # the gradient of weights that multiply coordinates.
        sizes = DotSizes.of(program.recorded, equation.node)
        if sizes is None or TENSOR_CORE_DEPTH <= sizes.contracted <= sizes.result:
            return None
    return multiply_and_add


def multiply_and_add(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """Computes a `dot_general` of float32 operands: `[batch..., left..., right...]`, float32.

    >>> eqn = jax.make_jaxpr(lambda x, y: x @ y)(np.ones((2, 3)), np.ones((3, 4))).eqns[0]
    >>> node = Node(eqn, (), (), None, False)
    >>> multiply_and_add(node, [np.full((2, 3), 2.0), np.ones((3, 4))])[0].shape
    (2, 4)
    """
    left, right = map(_Operand.of, operands, *node.params["dimension_numbers"])
    start = len(left.batch)
    if is_less(math.prod(left.x.shape[axis] for axis in left.contracted), _MOST_TERMS + 1):
        one, other = left.aligned(0, len(right.free)), right.aligned(len(left.free), 0)
        places = itertools.product(*(range(left.x.shape[axis]) for axis in left.contracted))
        # With `lax`, which records the same equations as the operators of `jax.numpy` with fewer calls.
        terms = (lax.mul(_taken(one, start, at), _taken(other, start, at)) for at in places)
        return [functools.reduce(lax.add, terms)]
    # As one reduction of a product that has its axes in the order of the larger operand: compilers keep the order, and
    # read that operand in its layout in memory. Its free axes are the result's last; those of a left one are moved.
    if left.x.size <= right.x.size:
        return [_reduced(left, right)]
    total, middle = _reduced(right, left), start + len(right.free)
    return [lax.transpose(total, (*range(start), *range(middle, total.ndim), *range(start, middle)))]


class _Operand(NamedTuple):
    """A float32 operand of a dot, and which of its axes are contracted, which a batch, and which are free."""

    x: jax.Array
    contracted: Sequence[int]
    batch: Sequence[int]
    free: Sequence[int]

    @staticmethod
    def of(x: Any, contracted: Sequence[int], batch: Sequence[int]) -> "_Operand":
        x = lax.convert_element_type(x, np.float32)  # from integers and literals, too
        free = [axis for axis in range(x.ndim) if axis not in contracted and axis not in batch]
        return _Operand(x, contracted, batch, free)

    def aligned(self, before: int, after: int, leading: bool = True) -> jax.Array:
        """`[batch..., contracted..., before..., free..., after...]`, or with the contracted axes last.

        As many axes of size one stand before and after the free ones as the other operand has there.
        """
        order = (*self.batch, *self.contracted, *self.free) if leading else (*self.batch, *self.free, *self.contracted)
        start = len(self.batch) + (len(self.contracted) if leading else 0)
        end = start + before + len(self.free)
        return lax.expand_dims(lax.transpose(self.x, order), [*range(start, start + before), *range(end, end + after)])


def _reduced(smaller: _Operand, larger: _Operand) -> jax.Array:
    """The sum of products as one reduction, `[batch..., smaller's free..., larger's free...]`."""
    # The contracted axes stand before the free ones or behind them, as they do in the larger operand.
    leading = bool(larger.free) and min(larger.contracted) < min(larger.free)
    one, other = smaller.aligned(0, len(larger.free), leading), larger.aligned(len(smaller.free), 0, leading)
    first = len(larger.batch) + (0 if leading else len(smaller.free) + len(larger.free))
    return jnp.sum(one * other, tuple(range(first, first + len(larger.contracted))))


def _taken(x: jax.Array, axis: int, place: Sequence[int]) -> jax.Array:
    """The numbers of `x` at one place of its contracted axes, the first of which is `axis`."""
    for index in place:
        x = lax.index_in_dim(x, index, axis, keepdims=False)
    return x
