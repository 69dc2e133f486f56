"""A sum over axes of one number each, written as the change of shape that it is.

    b:f32[8] = reduce_sum[axes=(0,)] a:f32[1,8]    ->    b = squeeze a

JAX records such a sum as the derivative of a broadcast along an axis of size one, as of a bias. It sums nothing. But
the passes take a sum for a kernel of its own, and store what it reads. As a squeeze it fuses with what is around it,
and `a` may be in 16 bits: a rounding of `a` is one of `b`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from ...._jaxpr import Node
from ...ir import Equation, Program
from ...primitives import Entry, Rule
from .rewrite import Computation

_ENTRY = Entry(Rule.SHAPE, "a sum of one number")


def entry_of_sum(node: Node) -> Entry | None:
    """The rule of a squeeze for a sum over axes of size one; `None` for other sums."""
    operand: Any = node.eqn.invars[0].aval
    return _ENTRY if all([operand.shape[axis] == 1 for axis in node.params["axes"]]) else None


def sums_of_one(program: Program, equation: Equation) -> Computation | None:
    return drop_axes if equation.entry is _ENTRY else None


def drop_axes(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """What a `reduce_sum` over axes of size one does to an operand."""
    return [lax.squeeze(operands[0], node.params["axes"])]
