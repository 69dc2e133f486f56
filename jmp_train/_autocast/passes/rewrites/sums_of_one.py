"""A sum over axes of size one, replaced by the change of shape that it is.

    b:f32[8] = reduce_sum[axes=(0,)] a:f32[1,8]    ->    b = squeeze a

JAX records such a sum as the derivative of a broadcast along an axis of size one, for example of a bias. It sums
nothing, but the passes treat a sum as a kernel of its own and store its operand. A squeeze fuses with the equations
around it, and `a` may be in 16 bits: a rounding of `a` is one of `b`.
"""

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
    """Computes a `reduce_sum` over axes of size one."""
    return [lax.squeeze(operands[0], node.params["axes"])]
