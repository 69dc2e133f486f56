"""`Found`: what `find_overflow` returns. Values first, text second.

Decides how the culprit and its operands are described. Does not decide who it is; see `_find_overflow.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._text import count
from ..interpreter import Loop
from ._source_lines import through, user_line
from ._taint import is_inexact
from ._verdict import Captured, Verdict


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayRange:
    """The values of an operand or a result.

    Attributes:
      shape, dtype: of the array.
      min, max, abs_max: of its finite elements (of complex ones the real parts, and the modulus); `None` without any.
      infs, nans: how many elements are infinite, and NaN.
      zeros: how many are zero.
    """

    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    abs_max: float | None
    infs: int
    nans: int
    zeros: int

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}"
        if self.min is not None:
            text += f" {self.min:.4g}" if self.min == self.max else f" from {self.min:.4g} to {self.max:.4g}"
        counts = {"infinite": self.infs, "NaN": self.nans, "zero": self.zeros}
        return ", ".join([text, *(f"{number} {name}" for name, number in counts.items() if number)])


@dataclasses.dataclass(frozen=True)
class Found:
    """What `find_overflow` found: a value to read, to test and to print. False if nothing was to blame.

    Attributes:
      operations: how many operations ran.
      not_entered: primitives that hold programs but ran as one operation.
      primitive: the culprit's name, `None` (as all that follows is, or empty) if nothing was to blame.
      file, line, function, text: the user's own line that recorded it.
      through: what stands between that line and the operation: the library's own `file:line (function)`, or a rule.
      scope: its `jax.named_scope` path.
      backward: whether it belongs to a backward pass, or computes a derivative that only the backward pass reads.
      loops: the iterations of the loops around it, outermost first: `(primitive, iteration from 0, length or None)`.
      device: inside `shard_map` and `pmap`, the device that it ran on: `(axis, position)` for each axis of the mesh.
      operands, results: what it read and made; of a collective the operands of all devices along a new first axis.
      verdict: a `Verdict`.
      why, cure: the reason for it, and the line to paste.
      loss_scale: the loss scale of the call, if it had one above 1.
      fitting_loss_scale: the largest power of two under which the call is finite, for `Verdict.LOWER_SCALE`.
      reached: paths of the results that became non-finite.
    """

    operations: int
    not_entered: tuple[str, ...] = ()
    primitive: str | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = None
    text: str = ""
    through: str | None = None
    scope: str = ""
    backward: bool = False
    loops: tuple[Loop, ...] = ()
    device: tuple[tuple[str, int], ...] = ()
    operands: tuple[ArrayRange, ...] = ()
    results: tuple[ArrayRange, ...] = ()
    verdict: Verdict | None = None
    why: str = ""
    cure: str = ""
    loss_scale: float | None = None
    fitting_loss_scale: float | None = None
    reached: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.primitive is not None

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as dictionaries, lists, strings and numbers, none of them infinite."""
        values = dataclasses.asdict(self)
        values["device"] = {str(axis): position for axis, position in self.device}
        values["loops"] = [loop._asdict() for loop in self.loops]
        values["verdict"] = None if self.verdict is None else str(self.verdict)
        return _as_lists(values)

    def __str__(self) -> str:
        not_entered = [f"Not looked into: {', '.join(self.not_entered)}"] if self.not_entered else []
        if not self:
            return "\n".join([f"No operation of {self.operations} is to blame for an infinity or NaN.", *not_entered])
        infs, nans = sum(x.infs for x in self.results), sum(x.nans for x in self.results)
        lines = [
            f"{self.primitive} made {count(infs, 'infinity').replace('infinitys', 'infinities')} and {nans} NaN",
            f"  at      {self.file}:{self.line} ({self.function})",
            f"          {self.text}",
            f"  in      {self._place()}",
            *(f"  operand {operand}" for operand in self.operands),
            *(f"  result  {result}" for result in self.results),
            f"  reached {', '.join(self.reached[:4])}{', ...' if len(self.reached) > 4 else ''}",
            f"Verdict: {_TITLES[self.verdict]}. {self.why}" if self.verdict else "",
            f"Cure: {self.cure}",
        ]
        if self.through:
            lines.insert(3, f"  through {self.through}")
        return "\n".join([*lines, *not_entered])

    def _place(self) -> str:
        parts = ["the backward pass" if self.backward else "the forward pass", self.scope]
        parts += [f"device {position} of {axis}" for axis, position in self.device]
        for loop in self.loops:
            of = "" if loop.length is None else f" of {loop.length}"
            parts.append(f"{loop.primitive} iteration {loop.iteration}{of}")
        return ", ".join(filter(None, parts))


_TITLES = {
    Verdict.LOWER_SCALE: "lower the loss scale",
    Verdict.KEEP_FLOAT32: "keep this operation in float32",
    Verdict.MODEL: "a fault of the model",
    Verdict.INPUT: "a fault of the data",
    Verdict.UNKNOWN: "unknown",
}


def describe(found: Captured, **others: Any) -> Found:
    """The report on an operation as it ran."""
    own = user_line(found.site)
    return Found(
        primitive=found.site.primitive,
        file=own.file if own else None,
        line=own.number if own else None,
        function=own.function if own else None,
        text=own.text if own else "",
        through=through(found.site),
        scope=found.site.scope,
        backward=found.site.backward or found.site.derivative,
        loops=found.site.loops,
        device=found.site.device,
        operands=_ranges(found.operands),
        results=_ranges(found.results),
        **others,
    )


def _ranges(arrays: Sequence[Any]) -> tuple[ArrayRange, ...]:
    return tuple(_range(array) for array in arrays if hasattr(array, "dtype"))


def _range(array: Any) -> ArrayRange:
    shape, name = tuple(array.shape), getattr(array.dtype, "name", str(array.dtype))
    if not is_inexact(array):
        return ArrayRange(shape, name, None, None, None, 0, 0, 0)
    numbers = np.asarray(array)
    finite = numbers[np.isfinite(numbers)]
    real = np.real(finite).astype(np.float64)
    low, high, largest = (float(real.min()), float(real.max()), float(np.abs(finite).max())) if finite.size else _NONE
    infs, nans, zeros = (int(np.sum(of)) for of in (np.isinf(numbers), np.isnan(numbers), numbers == 0))
    return ArrayRange(shape, name, low, high, largest, infs, nans, zeros)


_NONE = (None, None, None)


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    return [_as_lists(item) for item in value] if isinstance(value, tuple | list) else value
