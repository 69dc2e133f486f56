"""Runs a plan: read each operand in its planned dtype, run the operation, store what comes out.

Decides nothing. Every cast is made once per value and dtype, and a value is dropped after its last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax

from .._dtypes import FLOAT32
from .._jaxpr import bind, context
from ._recompute import sources

if TYPE_CHECKING:
    from ._steps import Plan, Step


def evaluate(
    plan: Plan,
    args: Sequence[Any],
    out_dtypes: Sequence[np.dtype | None],
    captured: Sequence[Any] | None = None,
    copies: Mapping[int, Any] | None = None,
) -> list[Any]:
    """Runs `plan` on `args`.

    Args:
      plan: the planned program.
      args: its arguments; floating ones in any width are brought to the planned one.
      out_dtypes: the dtype of each result; `None` leaves a result that was not recorded in float32 alone.
      captured: other values for the program's captured arrays, in the order of `captured_arrays(plan)`.
      copies: copies in the compute dtype that are there already, by the number of the argument.
    """
    store = _Store(plan)
    for number, copy in (copies or {}).items():
        store.add_copy(number, copy)
    for number, dtype, arg in zip(plan.program.inputs, plan.in_dtypes, args, strict=True):
        store.write(number, cast(arg, dtype))
    if captured is not None:
        for number, value in zip(sorted(plan.program.captured), captured, strict=True):
            store.write(number, value)
    for step, dying in zip(plan.steps, _last_reads(plan), strict=True):
        if step.unread:
            continue
        with context(step.node):
            operands = list(map(store.read, step.node.ins, step.reads, step.far))
            results = step.run(operands) if step.run else bind(step.node.eqn, operands, **step.params)
            for number, result, dtype in zip(step.node.outs, results, step.casts or [None] * len(results), strict=True):
                store.write(number, cast(result, dtype))
        for number in dying:
            store.drop(number)
    return [store.read(number, dtype, False) for number, dtype in zip(plan.program.outputs, out_dtypes, strict=True)]


def captured_arrays(plan: Plan) -> list[Any]:
    return [plan.program.known[number] for number in sorted(plan.program.captured)]


def recorded_dtypes(plan: Plan) -> list[np.dtype | None]:
    """The dtype that each float32 result was recorded in, for callers who must not see the plan."""
    return [FLOAT32 if plan.program.avals[n].dtype == FLOAT32 else None for n in plan.program.outputs]


def cast(value: Any, dtype: np.dtype | None) -> Any:
    if dtype is None or value.dtype == dtype:
        return value
    return lax.convert_element_type(value, dtype)


class _Store:
    """The values of a running program, with the copies in other dtypes that were asked for so far."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._low = plan.low
        self._known = plan.program.known
        self._values: dict[int, Any] = {}
        self._copies: dict[tuple[int, np.dtype | None, bool], Any] = {}
        self._keys: dict[int, list[tuple[int, np.dtype | None, bool]]] = {}

    def write(self, number: int, value: Any) -> None:
        self._values[number] = value

    def add_copy(self, number: int, copy: Any) -> None:
        self._remember((number, self._low, False), lambda: copy)

    def read(self, number: int, dtype: np.dtype | None, far: bool) -> Any:
        if far:
            return self._remember((number, dtype, far), lambda: self._far(number, dtype))
        value = self._values[number] if number in self._values else self._known[number]
        if dtype is None or getattr(value, "dtype", None) == dtype:
            return value
        if isinstance(value, np.ndarray | np.generic | float | int):
            with np.errstate(over="ignore"):  # infinite as quietly as on a device
                return np.asarray(value, dtype)
        return self._remember((number, dtype, far), lambda: self._cast(number, value, dtype))

    def _cast(self, number: int, value: Any, dtype: np.dtype | None) -> Any:
        """A value in another dtype; if it must stay rounded to the compute dtype, so that no compiler drops that."""
        if number not in self._plan.rounded or dtype != FLOAT32:
            return cast(value, dtype)
        # With float32's exponent: a narrower one would flush float16's subnormal numbers to zero.
        wide, low = jax.numpy.finfo(FLOAT32), jax.numpy.finfo(self._low)
        return lax.reduce_precision(cast(value, FLOAT32), wide.nexp, low.nmant)

    def _far(self, number: int, dtype: np.dtype | None) -> Any:
        """A value as the far side of a dot sees it: its stored copy behind a barrier, or computed again from such."""
        if number in self._plan.again:
            return self._cast(number, self._compute_again(self._plan.again[number]), dtype)
        if number in self._plan.barred:
            return lax.optimization_barrier(self.read(number, dtype, False))
        if dtype is not None and dtype != self._low:
            return cast(self.read(number, self._low, True), dtype)
        return lax.optimization_barrier(self.read(number, dtype, False))

    def _compute_again(self, step: Step) -> Any:
        plan = self._plan
        far = [number in plan.roots or number in plan.again or number in plan.barred for number in step.node.ins]
        operands = list(map(self.read, step.node.ins, step.reads, far))
        return (step.run(operands) if step.run else bind(step.node.eqn, operands, **step.params))[0]

    def _remember(self, key: tuple[int, np.dtype | None, bool], make: Callable[[], Any]) -> Any:
        if key not in self._copies:
            self._copies[key] = make()
            self._keys.setdefault(key[0], []).append(key)
        return self._copies[key]

    def drop(self, number: int) -> None:
        self._values.pop(number, None)
        for key in self._keys.pop(number, ()):
            del self._copies[key]


def _last_reads(plan: Plan) -> list[list[int]]:
    """For each step the values that nothing reads afterwards."""
    alive, seen = set(plan.program.outputs), set()
    dying: list[list[int]] = []
    for step in reversed(plan.steps):
        reads = set(step.node.outs)
        if not step.unread:
            for number, far in zip(step.node.ins, step.far, strict=True):
                reads.update({number}, sources(plan, number, far, seen))
        dying.append(list(reads - alive))
        alive |= reads
    return dying[::-1]


def as_jaxpr_function(plan: Plan, out_dtypes: Sequence[np.dtype | None]) -> tuple[Callable, list[Any]]:
    """`plan` as a function of its captured arrays and arguments, and abstract values of both to trace it on."""
    program, captured = plan.program, captured_arrays(plan)

    def run(*args: Any) -> list[Any]:
        return evaluate(plan, args[len(captured) :], out_dtypes, args[: len(captured)])

    recorded = zip((program.avals[number] for number in program.inputs), plan.in_dtypes, strict=True)
    planned = [aval if dtype is None else aval.update(dtype=dtype, weak_type=False) for aval, dtype in recorded]
    return run, [*map(jax.typeof, captured), *planned]
