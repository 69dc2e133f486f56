"""The search behind `sensitivity`: what can stay in float32 by itself, what each of it costs, and the fewest to keep.

Decides the candidates (named scopes, or groups of primitives), how they are ranked and which are proposed. Does not
decide how an error is measured (`_gradient_errors.py`), nor what is returned (`_sensitivity.py`).
"""

from __future__ import annotations

import dataclasses
import glob
import math
import re
from collections.abc import Iterable, Sequence

from ..._autocast import DEFAULT_RULES, Rule, Rules
from ..._autocast.primitives import ROUNDS
from ..._explain import Explanation
from ..._explain._operations import Operation
from ._gradient_errors import GradientErrors

# Candidates with less of the squared error than this are not divided.
_WORTH_DIVIDING = 0.05
# Shares are measured with rounding noise: those that differ by less count as equal.
_EQUAL = 0.9
# A tolerance that is out of reach is replaced by the least error there is, and this much more.
_NEAR_LEAST = 1.1


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """What one entry of `Rules` can keep in float32.

    Attributes:
      name: a glob over scope paths, or primitives with commas between them.
      operations: how many operations in it round to 16 bits, those of its children included.
      primitives: the primitives; empty for a scope.
      children: the candidates that it consists of, empty where it cannot be divided.
    """

    name: str
    operations: int
    primitives: tuple[str, ...] = ()
    children: tuple[Candidate, ...] = ()


def keep_float32(rules: Rules, chosen: Iterable[Candidate]) -> Rules:
    """Returns `rules` under which the operations of the chosen candidates run as recorded."""
    chosen = tuple(chosen)
    edits: dict[str, Rule | str] = {name: Rule.RECORDED for each in chosen for name in each.primitives}
    return rules.with_scopes({each.name: "float32" for each in chosen if not each.primitives}).replace(edits)


def rounding_operations(plan: Explanation) -> list[Operation]:
    """The operations of a plan that make a rounding error, rather than move or compare values in 16 bits."""
    narrow = {plan.compute_dtype, plan.reduce_dtype} - {"float32", "float64"}
    return [op for op in plan.operations if op.recorded == "float32" and op.dtype in narrow and _is_rounding(op)]


def _is_rounding(op: Operation) -> bool:
    if op.holds_program or op.result == "bool":
        return False
    exact = DEFAULT_RULES.entry(op.primitive).rule in (Rule.SHAPE, Rule.FOLLOW) and op.primitive not in ROUNDS
    return op.rule == Rule.LOW.value or not exact  # LOW rounds the operands, whatever the primitive does to them


def primitive_candidates(operations: Sequence[Operation]) -> tuple[Candidate, ...]:
    """The primitives among `operations`, those of one row of the table of rules as one candidate."""
    groups: dict[str, list[Operation]] = {}
    for op in operations:
        groups.setdefault(DEFAULT_RULES.entry(op.primitive).reason, []).append(op)
    candidates = []
    for group in groups.values():
        names = tuple(dict.fromkeys(op.primitive for op in group))
        candidates.append(Candidate(", ".join(names), len(group), primitives=names))
    return tuple(candidates)


def scope_candidates(operations: Sequence[Operation]) -> tuple[Candidate, ...]:
    """The outermost scopes of `operations`, with a candidate `.` for what stands in none."""
    return _children((), [tuple(filter(None, op.scope.split("/"))) for op in operations])


def _children(prefix: tuple[str, ...], paths: Sequence[tuple[str, ...]]) -> tuple[Candidate, ...]:
    """The scopes directly below `prefix`, of the scope paths of some operations."""
    below: dict[str, list[tuple[str, ...]]] = {}
    for path in paths:
        below.setdefault(path[len(prefix)] if len(path) > len(prefix) else "", []).append(path)
    candidates = []
    for segment, inside in below.items():
        path = (*prefix, segment or ".")
        children = _children(path, inside) if segment else ()
        # A scope with one child only is that child: measuring both would tell nothing.
        children = children[0].children if len(children) == 1 else children
        candidates.append(Candidate(glob.escape("/".join(path)), len(inside), children=children))
    return tuple(candidates)


def divide_outermost(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Divides the one candidate that can be divided, again and again: a model's name tells nothing of its layers."""
    while len(divisible := [each for each in candidates if each.children]) == 1:
        candidates = tuple(
            inner for each in candidates for inner in (each.children if each is divisible[0] else (each,))
        )
    return candidates


def at_most(limit: int, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...] | None:
    """Returns `candidates`, those of one kind (`Block_0`, `Block_1`, ...) as one if need be; `None` if too many."""
    if len(candidates) <= limit:
        return candidates
    kinds: dict[str, list[Candidate]] = {}
    for each in candidates:
        kinds.setdefault(each.name if each.primitives else re.sub(r"\d+$", "[0-9]*", each.name), []).append(each)
    fewer = tuple(
        alike[0] if len(alike) == 1 else Candidate(name, sum(each.operations for each in alike), children=tuple(alike))
        for name, alike in kinds.items()
    )
    return fewer if len(fewer) <= limit else None


def _merge_siblings(chosen: Sequence[Candidate], within: Sequence[Candidate]) -> list[Candidate]:
    """Returns `chosen`, with a candidate in place of its children where all of those are chosen."""
    found: list[Candidate] = []
    for each in within:
        children = [each] if each in chosen else _merge_siblings(chosen, each.children)
        found += [each] if each.children and set(each.children) <= set(children) else children
    return found


@dataclasses.dataclass(slots=True)
class Measured:
    """A candidate and its errors, as for `Contribution`.

    `caused`, its share by its error alone, and `share` are set when all candidates are measured.
    """

    candidate: Candidate
    alone: float
    without: float
    caused: float = 0.0
    share: float = 0.0


class Search:
    """The candidates, which together are the whole program, and what was measured of them.

    Args:
      gradients: measures an error.
      base: the rules without any candidate in float32.
      candidates: the outermost ones.
      error: under `base`.
    """

    def __init__(self, gradients: GradientErrors, base: Rules, candidates: tuple[Candidate, ...], error: float):
        self.gradients, self.base, self.error = gradients, base, error
        self.outermost, self.candidates = candidates, list(candidates)
        self.floor = gradients.error(keep_float32(base, candidates))
        self.measured: dict[Candidate, Measured] = {}

    def ranking(self) -> list[Measured]:
        """The candidates, the worst first; of equal shares, one that causes it alone, or else the last."""
        rows = [self._measure(each) for each in self.candidates]
        noise = max((row.without**2 - self.error**2 for row in rows if row.without < math.inf), default=0.0)
        for row in rows:
            row.caused, row.share = shares_of(row, self.error, self.floor, max(0.0, noise))
        ranked: list[Measured] = []
        while worst := max((row.share for row in rows), default=0.0):
            equal = [row for row in rows if row.share >= _EQUAL * worst]
            ranked.append(next(row for row in equal if row.caused >= row.share / 2 or row is equal[-1]))
            rows.remove(ranked[-1])
        return ranked + sorted(rows, key=lambda row: -row.alone)

    def _measure(self, candidate: Candidate) -> Measured:
        if candidate not in self.measured:
            others = [other for other in self.candidates if other != candidate]
            alone = self.gradients.error(keep_float32(self.base, others))
            without = self.gradients.error(keep_float32(self.base, [candidate]))
            self.measured[candidate] = Measured(candidate, alone, without)
        return self.measured[candidate]

    def refine(self, limit: int) -> None:
        """Divides the worst candidate, again and again, as long as no more than `limit` are measured."""
        while True:
            for row in self.ranking():
                children = at_most(limit - len(self.measured), row.candidate.children)
                if children and row.share >= _WORTH_DIVIDING:
                    break
            else:
                return
            place = self.candidates.index(row.candidate)
            self.candidates[place : place + 1] = children

    def propose(self, tolerance: float) -> list[Candidate]:
        """The fewest candidates of the highest rank that meet the tolerance in float32, or come near the least."""
        ranked = [row.candidate for row in self.ranking()]
        # More in float32 can be worse: errors of 16 bits may cancel each other.
        least = min(self.floor, self.error)
        target = tolerance if least <= tolerance else least * _NEAR_LEAST

        def enough(chosen: Sequence[Candidate]) -> bool:
            return self.gradients.error(keep_float32(self.base, chosen)) <= target

        # The errors of no candidate and of one are known already and cost no compilation; then by bisection.
        few, many = 0, len(ranked)
        for number in (0, 1):
            if number < many and enough(ranked[:number]):
                many = number
            elif number < many:
                few = number
        while few + 1 < many:
            middle = (few + many) // 2
            few, many = (few, middle) if enough(ranked[:middle]) else (middle, many)
        chosen = ranked[:many]
        for each in reversed(chosen[:-1]):
            fewer = [other for other in chosen if other != each]
            chosen = fewer if enough(fewer) else chosen
        return _merge_siblings(chosen, self.outermost)


def shares_of(row: Measured, error: float, floor: float, noise: float) -> tuple[float, float]:
    """What a candidate causes alone, and the larger of that and what it removes, as shares of the squared error.

    The formulas are those of `sensitivity`.

    Args:
      row: its errors.
      error: with everything in 16 bits.
      floor: with every candidate in float32.
      noise: the most by which a candidate in float32 raises the squared error; to remove less than this is chance.
    """
    if error == 0:
        return 0.0, 0.0
    if error == math.inf:
        caused, removed = float(row.alone == math.inf), float(row.without < math.inf)
    else:
        caused, removed = max(0.0, row.alone**2 - floor**2), error**2 - row.without**2
        caused, removed = min(1.0, caused / error**2), (removed if removed > noise else 0.0) / error**2
    return caused, max(caused, removed)
