"""The parts of a program that can be kept in float32 one at a time: its named scopes, or groups of primitives.

Decides what a part is, which finer parts it has and which `Rules` keep it wide. Does not decide which parts are worth
it; see `_sensitivity.py`.
"""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Iterable, Sequence

from ..._autocast import Rule, Rules
from ..._autocast._flow import ROUNDS
from ..._autocast._table import TABLE
from ..._explain import Explanation
from ..._explain._operations import Operation


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What one entry of `Rules` keeps in float32.

    Attributes:
      name: a glob over scope paths, or primitives with commas between them.
      operations: how many operations in it round to 16 bits, those in finer parts included.
      primitives: the primitives; empty for a scope.
      finer: the parts that it consists of, empty where it can't be divided.
    """

    name: str
    operations: int
    primitives: tuple[str, ...] = ()
    finer: tuple[Part, ...] = ()


def keep_wide(rules: Rules, parts: Iterable[Part]) -> Rules:
    """Returns `rules` under which the operations of `parts` run as recorded."""
    parts = tuple(parts)
    edits: dict[str, Rule | str] = {name: Rule.RECORDED for part in parts for name in part.primitives}
    return rules.with_scopes({part.name: "float32" for part in parts if not part.primitives}).replace(edits)


def rounding_operations(plan: Explanation) -> list[Operation]:
    """The operations of a plan that make a rounding error, rather than move or compare values in 16 bits."""
    narrow = {plan.compute_dtype, plan.reduce_dtype} - {"float32", "float64"}
    return [op for op in plan.operations if op.recorded == "float32" and op.dtype in narrow and _rounds(op)]


def _rounds(op: Operation) -> bool:
    if op.holds_program or op.result == "bool":
        return False
    exact = TABLE[op.primitive].rule in (Rule.SHAPE, Rule.FOLLOW) and op.primitive not in ROUNDS
    return op.rule == Rule.LOW.value or not exact  # a LOW rule narrows operands before it moves them


def primitive_parts(operations: Sequence[Operation]) -> tuple[Part, ...]:
    """The primitives among `operations`, those that stand together in the table of rules as one part."""
    groups: dict[str, list[Operation]] = {}
    for op in operations:
        groups.setdefault(TABLE[op.primitive].reason, []).append(op)
    parts = []
    for group in groups.values():
        names = tuple(dict.fromkeys(op.primitive for op in group))
        parts.append(Part(", ".join(names), len(group), primitives=names))
    return tuple(parts)


def scope_parts(operations: Sequence[Operation]) -> tuple[Part, ...]:
    """The outermost scopes of `operations`, with a part `.` for what stands in none."""
    return _below((), [tuple(filter(None, op.scope.split("/"))) for op in operations])


def _below(prefix: tuple[str, ...], found: Sequence[tuple[str, ...]]) -> tuple[Part, ...]:
    inside: dict[str, list[tuple[str, ...]]] = {}
    for path in found:
        inside.setdefault(path[len(prefix)] if len(path) > len(prefix) else "", []).append(path)
    parts = []
    for segment, below in inside.items():
        path = (*prefix, segment or ".")
        finer = _below(path, below) if segment else ()
        # A scope with one part only is that part.
        finer = finer[0].finer if len(finer) == 1 else finer
        parts.append(Part(_written(path), len(below), finer=finer))
    return tuple(parts)


def _written(path: tuple[str, ...]) -> str:
    return glob.escape("/".join(path))


def first_level(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Opens the outermost part as long as no other can be opened: a model's name tells nothing of its layers."""
    while len(divisible := [part for part in parts if part.finer]) == 1:
        parts = tuple(inner for part in parts for inner in (part.finer if part is divisible[0] else (part,)))
    return parts


def at_most(limit: int, parts: tuple[Part, ...]) -> tuple[Part, ...] | None:
    """Returns `parts`, if they are too many those of one kind (`Block_0`, `Block_1`, ...) as one, or else `None`."""
    if len(parts) <= limit:
        return parts
    kinds: dict[str, list[Part]] = {}
    for part in parts:
        kinds.setdefault(part.name if part.primitives else re.sub(r"\d+$", "[0-9]*", part.name), []).append(part)
    fewer = tuple(
        alike[0] if len(alike) == 1 else Part(name, sum(part.operations for part in alike), finer=tuple(alike))
        for name, alike in kinds.items()
    )
    return fewer if len(fewer) <= limit else None


def joined(chosen: Sequence[Part], within: Sequence[Part]) -> list[Part]:
    """Returns `chosen`, with a part in place of its finer ones where all of those are chosen."""
    found: list[Part] = []
    for part in within:
        finer = [part] if part in chosen else joined(chosen, part.finer)
        found += [part] if part.finer and set(part.finer) <= set(finer) else finer
    return found
