"""A product written as the multiplications and additions that it is.

    c:f32[m,n] = dot_general a:f32[m,2] b:f32[2,n]    ->    c = a[:,0] * b[0,:] + a[:,1] * b[1,:]

What contracts a few numbers fills no Tensor Core: as a dot it is a kernel of its own, and one that rounds its operands
to TF32 on GPUs that have it. Written out it fuses with whatever reads it, in float32.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._jaxpr import Node
from ...._sizes import is_less
from ...analysis.wide_product import WideProduct
from ...ir import Equation, Program
from .rewrite import Computation

_MOST_TERMS = 16  # of a sum that is written out: more are reduced


def dot_as_sums(program: Program, equation: Equation) -> Computation | None:
    as_sums = isinstance(equation.entry, WideProduct) and equation.entry.as_sums
    return multiply_and_add if as_sums and program.low not in equation.reads else None


def multiply_and_add(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """What a `dot_general` does to float32 operands: `[batch..., left..., right...]`, float32.

    >>> eqn = jax.make_jaxpr(lambda x, y: x @ y)(np.ones((2, 3)), np.ones((3, 4))).eqns[0]
    >>> node = Node(eqn, (), (), None, False)
    >>> multiply_and_add(node, [np.full((2, 3), 2.0), np.ones((3, 4))])[0].shape
    (2, 4)
    """
    left, right = (lax.convert_element_type(operand, np.float32) for operand in operands)  # from integers, too
    contracted, batch = node.params["dimension_numbers"]
    lefts, rights = left.ndim - len(batch[0]) - len(contracted[0]), right.ndim - len(batch[1]) - len(contracted[1])
    terms, axis = math.prod(left.shape[i] for i in contracted[0]), len(batch[0])
    written_out = is_less(terms, _MOST_TERMS + 1)
    # Compilers keep the order of axes: that of the larger operand, its free axes after those of the other one.
    swapped = not written_out and left.size > right.size
    larger = (contracted[0], batch[0], left) if swapped else (contracted[1], batch[1], right)
    leading = written_out or _precede(*larger)
    one = _aligned(left, batch[0], contracted[0], *((rights, 0) if swapped else (0, rights)), leading)
    other = _aligned(right, batch[1], contracted[1], *((0, lefts) if swapped else (lefts, 0)), leading)
    if written_out:
        places = itertools.product(*(range(left.shape[i]) for i in contracted[0]))
        return [functools.reduce(operator.add, (_taken(one, axis, at) * _taken(other, axis, at) for at in places))]
    axis += 0 if leading else lefts + rights
    total = jnp.sum(one * other, tuple(range(axis, axis + len(contracted[0]))))
    if not swapped:
        return [total]
    start, middle = len(batch[0]), len(batch[0]) + rights
    return [lax.transpose(total, (*range(start), *range(middle, middle + lefts), *range(start, middle)))]


def _precede(contracted: Sequence[int], batch: Sequence[int], x: Any) -> bool:
    """Whether the contracted axes of an operand stand before its free ones."""
    free = [axis for axis in range(x.ndim) if axis not in contracted and axis not in batch]
    return bool(free) and min(contracted) < min(free)


def _aligned(
    x: Any, batch: Sequence[int], contracted: Sequence[int], before: int, after: int, leading: bool
) -> jax.Array:
    """An operand as `[batch..., contracted..., before..., free..., after...]`, its size one along the other's axes.

    Args:
      x, batch, contracted: the operand and its axes.
      before, after: how many free axes of the other operand stand before and after its own.
      leading: whether the contracted axes come before the free ones, or last.
    """
    free = [axis for axis in range(x.ndim) if axis not in contracted and axis not in batch]
    order = (*batch, *contracted, *free) if leading else (*batch, *free, *contracted)
    start = len(batch) + (len(contracted) if leading else 0)
    end = start + before + len(free)
    return lax.expand_dims(lax.transpose(x, order), [*range(start, start + before), *range(end, end + after)])


def _taken(x: jax.Array, axis: int, place: Sequence[int]) -> jax.Array:
    """The numbers of `x` at one place of its contracted axes, the first of which is `axis`."""
    for index in place:
        x = lax.index_in_dim(x, index, axis, keepdims=False)
    return x
