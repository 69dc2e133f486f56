"""The search behind `sensitivity`: which parts can stay in float32, the error each one causes, and the fewest to keep.

Decides the candidates (named scopes, or groups of primitives), how the error of a gradient is measured, how candidates
are ranked by it and which are proposed. Does not decide what is returned and printed; see `_sensitivity.py`.
"""

import dataclasses
import glob
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._autocast import DEFAULT_RULES, Rule, Rules
from ..._autocast.primitives import ROUNDS
from ..._dtypes import at_least_float32
from ..._explain import Explanation, explain
from ..._explain._operations import Operation
from ..._grad import grad
from ..._grad_inputs import check_loss_scale
from ..._loss_scale import LossScale, NoOpLossScale
from ..._policy import Policy, get_policy
from ..._static import hide_static, reveal_static
from ..interpreter import check_concrete

# Candidates with less of the squared error than this are not divided.
_WORTH_DIVIDING = 0.05
# Shares are measured with rounding noise: those that differ by less count as equal.
_EQUAL = 0.9
# A tolerance that is out of reach is replaced by this many times the least error there is.
_NEAR_LEAST = 1.1

_STRICT = get_policy("float32")
# The policy under which `plan` records the program: a matmul precision would keep all products in float32.
_AS_RECORDED = _STRICT.replace(matmul_precision=None)


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
    children: "tuple[Candidate, ...]" = ()


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
    if op.result == "bool":
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
        kinds.setdefault(re.sub(r"\d+$", "[0-9]*", each.name), []).append(each)
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


class GradientErrors:
    """Measures `|g - g32| / |g32|` over all leaves of a gradient together, g32 being the strict float32 one.

    Remembers what it measured. `compiled` counts the gradients that were compiled and run, the strict one included.

    Raises:
      TypeError: as the function that `value_and_grad` returns.
      ValueError: the strict gradient is zero or not finite.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        policy: Policy,
        argnums: int | tuple[int, ...],
        has_aux: bool,
        loss_scale: LossScale | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self._loss_fn, self._policy, self._argnums, self._has_aux = loss_fn, policy, argnums, has_aux
        check_concrete("sensitivity", args, kwargs)
        self._chosen = (argnums,) if isinstance(argnums, int) else argnums
        differentiated = [args[i] for i in self._chosen if -len(args) <= i < len(args)]
        self._scale = check_loss_scale(loss_scale, policy, differentiated)
        self._args = hide_static((kwargs, *args))
        self._errors: dict[Rules, float] = {}
        self.compiled = 0
        self._strict = self._gradient(_STRICT, None, NoOpLossScale())
        size = float(_largest(self._strict))
        if size == 0:
            raise ValueError(
                "the gradient is zero everywhere in float32, so that no error is relative to it; take another batch."
            )
        if not size < math.inf:
            raise ValueError(
                "the gradient holds infinities or NaN in float32 already, whatever the policy; find_overflow(fn)(*args)"
                " finds the operation that makes the first one."
            )

    def error(self, rules: Rules) -> float:
        """The error under the policy with these rules; infinite where the gradient is not finite."""
        if rules not in self._errors:
            error = float(_relative_error(self._gradient(self._policy, rules, self._scale), self._strict))
            self._errors[rules] = error if math.isfinite(error) else math.inf
        return self._errors[rules]

    def plan(self, rules: Rules) -> Explanation:
        """What `explain` says of the gradient under the policy with these rules."""
        shifted = [i + 2 if i >= 0 else i for i in self._chosen]  # after the scale and the keywords
        recorded = self._program(_AS_RECORDED, None)
        return explain(recorded, self._policy, rules, shifted)(self._scale, *self._args)

    def _gradient(self, policy: Policy | str, rules: Rules | None, scale: LossScale) -> Any:
        self.compiled += 1
        return jax.jit(self._program(policy, rules))(scale, *self._args)

    def _program(self, policy: Policy | str, rules: Rules | None) -> Callable[..., Any]:
        gradient = grad(self._loss_fn, policy, argnums=self._argnums, has_aux=self._has_aux, rules=rules)

        def program(scale: LossScale, kwargs: Any, *args: Any) -> Any:
            found = gradient(*reveal_static(args), loss_scale=scale, **reveal_static(kwargs))
            return found[0] if self._has_aux else found

        return program


@jax.jit
def _largest(tree: Any) -> jax.Array:
    """The largest magnitude, float32 or float64 `[]`; NaN if there is one."""
    largest = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(tree)]
    return jnp.max(jnp.stack(largest), initial=0.0) if largest else jnp.zeros(())


@jax.jit
def _relative_error(tree: Any, truth: Any) -> jax.Array:
    """`|tree - truth| / |truth|`, `[]`."""
    # Both norms in units of the largest magnitude: the square of a number below 1e-19 is zero in float32.
    size = _largest(truth)

    def square(leaf: jax.Array) -> jax.Array:
        magnitude = jnp.abs(leaf)
        return jnp.sum(jnp.square(magnitude.astype(at_least_float32(magnitude.dtype)) / size))

    leaves = list(zip(jax.tree.leaves(tree), jax.tree.leaves(truth), strict=True))
    return jnp.sqrt(sum(square(one - true) for one, true in leaves) / sum(square(true) for _, true in leaves))


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
