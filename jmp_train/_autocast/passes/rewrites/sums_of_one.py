"""A sum over axes of one number each, written as the change of shape that it is.

    b:f32[8] = reduce_sum[axes=(0,)] a:f32[1,8]    ->    b = squeeze a

JAX records it where it differentiates a broadcast, as that of a bias. No kernel sums there, and a rounding of `a` is
one of `b`: as a sum it would part what stands before it from what stands behind.
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
    operand: Any = node.eqn.invars[0].aval
    return _ENTRY if all([operand.shape[axis] == 1 for axis in node.params["axes"]]) else None


def sums_of_one(program: Program, equation: Equation) -> Computation | None:
    return drop_axes if equation.entry is _ENTRY else None


def drop_axes(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """What a `reduce_sum` over axes of size one does to an operand."""
    return [lax.squeeze(operands[0], node.params["axes"])]
