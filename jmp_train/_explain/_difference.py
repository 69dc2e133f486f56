"""What changes between two plans of one program.

Decides which operations of two lists are the same one: those of one primitive, source line, scope and pass (forward or
backward), in order. These suffice, because autocast changes how a program runs, but not its recorded equations.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .._text import columns, short_source
from ._operations import Operation


@dataclasses.dataclass(frozen=True)
class Difference:
    """What `Explanation.diff` returns.

    Attributes:
      numbers: `(name, before, after)` of the totals that differ.
      changed: `(before, after)` of the operations whose rule, dtype or result dtype differs.
      only_before: operations that the second program does not have.
      only_after: operations that the first program does not have.
    """

    numbers: tuple[tuple[str, Any, Any], ...]
    changed: tuple[tuple[Operation, Operation], ...]
    only_before: tuple[Operation, ...]
    only_after: tuple[Operation, ...]

    def __bool__(self) -> bool:
        return bool(self.numbers or self.changed or self.only_before or self.only_after)

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as dictionaries, lists, strings and numbers."""
        changed = [{"before": dataclasses.asdict(a), "after": dataclasses.asdict(b)} for a, b in self.changed]
        return {
            "numbers": {name: {"before": before, "after": after} for name, before, after in self.numbers},
            "changed": changed,
            "only_before": list(map(dataclasses.asdict, self.only_before)),
            "only_after": list(map(dataclasses.asdict, self.only_after)),
        }

    def __str__(self) -> str:
        if not self:
            return "No difference."
        lines = [f"{name}: {before} -> {after}" for name, before, after in self.numbers]
        rows = [
            (a.primitive, _pair(a.rule, b.rule), _pair(a.dtype, b.dtype), a.scope, short_source(a.source), b.reason)
            for a, b in self.changed
        ]
        rows += [(op.primitive, "gone", "", op.scope, short_source(op.source), "") for op in self.only_before]
        rows += [(op.primitive, "new", "", op.scope, short_source(op.source), "") for op in self.only_after]
        if rows:
            lines.append(columns(("primitive", "rule", "dtype", "scope", "source", "reason"), rows))
        return "\n".join(lines)


def _pair(before: str | None, after: str | None) -> str:
    return before or "" if before == after else f"{before} -> {after}"


def compare(
    numbers: dict[str, Any], other_numbers: dict[str, Any], ops: Sequence[Operation], others: Sequence[Operation]
) -> Difference:
    names = dict.fromkeys([*numbers, *other_numbers])
    pairs = [(name, numbers.get(name, 0), other_numbers.get(name, 0)) for name in names]
    before, after = _keyed(ops), _keyed(others)
    both = [(before[key], after[key]) for key in before if key in after]
    return Difference(
        numbers=tuple(pair for pair in pairs if pair[1] != pair[2]),
        changed=tuple((a, b) for a, b in both if (a.rule, a.dtype, a.result) != (b.rule, b.dtype, b.result)),
        only_before=tuple(op for key, op in before.items() if key not in after),
        only_after=tuple(op for key, op in after.items() if key not in before),
    )


def _keyed(ops: Sequence[Operation]) -> dict[tuple, Operation]:
    """The operations by what they are, with a running number for those that are alike."""
    seen: Counter[tuple] = Counter()
    keyed = {}
    for op in ops:
        key = (op.primitive, op.source, op.scope, op.backward)
        keyed[(*key, seen[key])] = op
        seen[key] += 1
    return keyed
