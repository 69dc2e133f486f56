"""`Sensitivity`: what `sensitivity` returns. Values first, text second.

Decides how the ranking is told and which line to paste. Does not decide the ranking; see `_sensitivity.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from ..._autocast import DEFAULT_RULES, Rules
from ..._text import columns, count

_OVERFLOW = (
    "The gradient overflows under the policy: it holds infinities or NaN. Lower the loss scale; if that does not help, "
    "find_overflow(fn)(*args), with the step's gradient function and its arguments, finds the operation."
)
_OUT_OF_REACH = (
    "Rules cannot reach the tolerance. What remains comes from low_precision regions, from code that casts by hand or "
    "from the loss scale."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Contribution:
    """What one part of the program does to the gradient. Errors are relative, and infinite for overflow.

    Attributes:
      scope: a glob over scope paths, or primitives with commas between them.
      operations: how many operations in it round to 16 bits.
      alone: the error with only this part in 16 bits.
      without: the error with only this part kept in float32.
      share: how much of the squared error is due to it, from 0 to 1; see `sensitivity`.
      finer: of how many finer scopes it consists that were not looked into.
    """

    scope: str
    operations: int
    alone: float
    without: float
    share: float
    finer: int


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """Which parts of a program cost the accuracy of its gradient, and which to keep in float32.

    Errors are relative, |g - g32| / |g32| over all gradients together, and infinite where one of them is not finite.

    Attributes:
      policy: the policy, as text.
      by: "scope" or "primitive".
      tolerance: the error that is asked for.
      error: the error under the policy.
      floor: the error with every part kept in float32, the least that rules can reach.
      rows: a `Contribution` for each part, the worst first. No operation is in two of them.
      base: the rules that were measured.
      kept: what to keep in float32: globs, or names of primitives.
      proposal: the rules to use, `base` with these edits.
      proposal_error: the error under `proposal`, measured.
      gradients: how many gradients were compiled.
    """

    policy: str
    by: str
    tolerance: float
    error: float
    floor: float
    rows: tuple[Contribution, ...]
    base: Rules
    kept: tuple[str, ...]
    proposal: Rules
    proposal_error: float
    gradients: int

    @property
    def met(self) -> bool:
        """Whether the proposal meets the tolerance."""
        return self.proposal_error <= self.tolerance

    @property
    def line(self) -> str:
        """The argument to give to `value_and_grad`, as Python; `rules` in it are those that `sensitivity` was given."""
        start = "rules=" + ("jmp.DEFAULT_RULES" if self.base == DEFAULT_RULES else "rules")
        method, value = (".with_scopes", "float32") if self.by == "scope" else (".replace", "recorded")
        return start + (f"{method}({json.dumps(dict.fromkeys(self.kept, value))})" if self.kept else "")

    def as_dict(self) -> dict[str, Any]:
        """Returns dictionaries, lists, strings and numbers, ready for JSON; `None` for an infinite error."""
        names = ("policy", "by", "tolerance", "error", "floor", "met", "proposal_error", "gradients", "line")
        values = {name: _finite(getattr(self, name)) for name in names} | {"kept": list(self.kept)}
        rows = [dataclasses.asdict(row) for row in self.rows]
        return values | {"rows": [{name: _finite(value) for name, value in row.items()} for row in rows]}

    def __str__(self) -> str:
        lines = [
            f"The gradient's relative error is {_text(self.error)}, the tolerance {_text(self.tolerance)} "
            f"({self.policy})."
        ]
        if math.isinf(self.error):
            lines.append(_OVERFLOW)
        if self.rows:
            named = "scope" if self.by == "scope" else "primitives"
            cells = [
                (row.scope, str(row.operations), _text(row.alone), _text(row.without), f"{row.share:.0%}")
                for row in self.rows
            ]
            lines.append(columns((named, "operations", "alone", "without it", "share"), cells))
        return "\n".join([*lines, *self._advice()])

    def _advice(self) -> list[str]:
        lines = []
        if self.floor > self.tolerance:
            lines.append(f"{_OUT_OF_REACH} The least is {_text(self.floor)}.")
        if self.kept:
            what = count(len(self.kept), "scope" if self.by == "scope" else "primitive")
            lines.append(f"Keep {what} in float32 for an error of {_text(self.proposal_error)}:\n  {self.line}")
        elif self.met:
            lines.append("Nothing has to be kept in float32.")
        return lines


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value


def _text(error: float) -> str:
    return "infinite" if math.isinf(error) else f"{error:.3g}"
