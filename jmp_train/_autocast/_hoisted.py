"""Weights that a dot reads in every iteration of a loop, cast once before it.

XLA does not move the cast out of the loop: a recurrent network would read its float32 weights and write their copies
at every step. Cast outside, though, a weight would have its gradient accumulated over the iterations in 16 bits, if
someone differentiates the loop. So the loop is given both, and the copy's derivative is that of a cast inside.

Decides which arguments of a body these are. Does not decide that they are read in the compute dtype; see `_plan.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import FLOAT32
from .._sizes import is_static
from ._evaluate import evaluate
from ._flow import DOTS
from ._steps import Plan


def read_by_dots(plan: Plan, positions: Mapping[int, int]) -> dict[int, int]:
    """Those of a body's arguments that come in float32 and that a dot reads in the compute dtype.

    Args:
      plan: of the body.
      positions: the arguments to choose from, and where each is among the operands of the loop.
    """
    dtypes = dict(zip(plan.program.inputs, plan.in_dtypes, strict=True))
    read = {
        number
        for step in plan.steps
        if step.node.name in DOTS and not step.unread
        for number, dtype, far in zip(step.node.ins, step.reads, step.far, strict=True)
        if dtype == plan.low and not far
    }
    return {number: at for number, at in positions.items() if dtypes[number] == FLOAT32 and number in read}


class Copies:
    """The copies of the weights of a loop: made when it is, before the loop; read in its body.

    Args:
      plan: of the body.
      weights: for each of the body's arguments that is read so, its position among the operands of the loop.
      operands: of the loop.
    """

    def __init__(self, plan: Plan, weights: Mapping[int, int], operands: Sequence[Any]):
        self._plan = plan
        self._values = {number: operands[position] for number, position in weights.items()}
        self._copies = {
            number: lax.stop_gradient(lax.convert_element_type(value, plan.low))
            for number, value in self._values.items()
        }

    def body(self, out_dtypes: Sequence[np.dtype | None]) -> Callable[[list[Any]], list[Any]]:
        """The body as a function of its arguments, reading the copies."""
        return lambda values: evaluate(self._plan, values, out_dtypes, copies=self.inside())

    def inside(self) -> dict[int, jax.Array]:
        """The copies, by number of the argument, for one trace of the body."""
        return {number: _copy(self._values[number], copy) for number, copy in self._copies.items()}


def run_scan(
    params: Mapping[str, Any],
    operands: Sequence[Any],
    consts: int,
    carry: int,
    body: Callable[[list[Any]], list[Any]],
) -> list[Any]:
    """Runs a `scan` with the `length`, `reverse` and `unroll` of `params`, whose `body` is given all its arguments."""

    rows, length = list(operands[consts + carry :]), params["length"]

    def iteration(state: list[Any], row: Any) -> tuple[list[Any], list[Any]]:
        results = body([*operands[:consts], *state, *(row if rows else ())])
        return results[:carry], results[carry:]

    start, xs = list(operands[consts : consts + carry]), rows
    if not is_static((length,)):  # accepted as the size of rows only
        xs, length = rows or jnp.zeros((length, 0)), None
    last, stacked = lax.scan(iteration, start, xs, length, params["reverse"], params["unroll"])
    return [*last, *stacked]


@jax.custom_jvp
def _copy(value: jax.Array, copy: jax.Array) -> jax.Array:
    """`copy`, with the derivative of a cast of `value`, so that its gradient accumulates in the dtype of `value`."""
    del value
    return copy


@_copy.defjvp
def _copy_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[1], lax.convert_element_type(tangents[0], primals[1].dtype)
