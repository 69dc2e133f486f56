"""`sensitivity`: which parts of a model cost the accuracy of its gradient, and the smallest set to keep in float32.

Decides what is measured, how parts are ranked and which are proposed. Does not decide what a part is (`_candidates.py`)
nor how the result is told (`_sensitivity_report.py`).
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ..._autocast import DEFAULT_RULES, Rules
from ..._dtypes import facts
from ..._explain import Explanation
from ..._grad_inputs import check_argnums, check_policy
from ..._loss_scale import LossScale
from ..._policy import Policy
from ._candidates import (
    Part,
    at_most,
    first_level,
    joined,
    keep_wide,
    primitive_parts,
    rounding_operations,
    scope_parts,
)
from ._gradient_errors import GradientErrors
from ._sensitivity_report import Contribution, Sensitivity

# The usual error of a model in which nothing goes wrong is one to three of its format's epsilon.
_EPSILONS = 8
# Parts with less of the squared error than this are not looked into.
_WORTH_OPENING = 0.05
# Shares that differ by less are alike.
_ALIKE = 0.9
# A tolerance that is out of reach is replaced by the least error there is, and this much more.
_NEAR = 1.1


def sensitivity(
    loss_fn: Callable[..., Any],
    policy: Policy | str,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    rules: Rules | None = None,
    tolerance: float | None = None,
    by: str | None = None,
    max_scopes: int = 24,
) -> Callable[..., Sensitivity]:
    """Returns a function that ranks the parts of a model by the error they cause in the gradient under `policy`.

    With g32 the gradient in strict float32, the error of a gradient g is |g - g32| / |g32|, over all leaves together.
    Each part is measured twice: *alone*, with everything else in float32, and *without* it, with only this part in
    float32. Rounding errors of different parts are as good as independent, so that their squares add up:

        caused = (alone^2 - floor^2) / error^2        removed = (error^2 - without^2) / error^2

    with `floor` the error that is left with every part in float32. Were they independent, both would be the part's
    share. The share is the larger of the two, because each is blind to something: an operation that follows narrow
    operands has none when alone, and of two parts each of which ruins the gradient neither removes anything. What is
    removed counts only if it is more than some other part adds by being wide, which is chance. Shares need not add up
    to one. A part that is wide widens what follows it, too; therefore, of parts with nearly the same share, those that
    cause it alone come first, and if there is none the last in the program.

    The proposal is made of the highest ranked parts that together meet the tolerance, less those that turn out not to
    be needed, and is measured as a whole. It is for the batch that was given; take a typical one.

    It costs a compilation of the gradient, and one run, for nearly everything that is measured: two a part, and some
    for the proposal. Scopes are measured level by level, from the outermost; only those with a share of 5 % are opened.

    Args:
      loss_fn, policy, argnums, has_aux, rules: as for `value_and_grad`.
      tolerance: the error to reach; `None` for 8 epsilon of the compute dtype, 0.8 % for float16 and 6 % for bfloat16.
      by: `"scope"`, for parts by `jax.named_scope`, where Linen puts every module; `"primitive"`, for groups of
        primitives, as for NNX and plain functions; `None` for scopes where most operations that round have one.
      max_scopes: how many parts to measure at most. Scopes that are numbered (`Block_0`, `Block_1`, ...) count as one
        where they are too many.

    Returns:
      A function of `loss_fn`'s arguments and of the keyword `loss_scale`, as that of `value_and_grad`. It returns a
      `Sensitivity`.

    Raises:
      TypeError: as `value_and_grad` does; `max_scopes` is no integer.
      ValueError: `tolerance`, `by` or `max_scopes` cannot be used; by scope, none has an operation that rounds, or
        there are more at the outermost level than `max_scopes`; the float32 gradient is zero or not finite.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     with jax.named_scope("Easy"):
    ...         easy = jnp.tanh(x @ w)
    ...     with jax.named_scope("Cancelling"):
    ...         hard = jnp.tanh((x + 1000) @ w - 1000 * jnp.sum(w, axis=0))
    ...     return jnp.mean(easy) + jnp.mean(hard)
    >>> args = jnp.linspace(-1, 1, 256).reshape(16, 16), jnp.linspace(-2, 2, 128).reshape(8, 16)
    >>> report = sensitivity(loss, "mixed_bfloat16")(*args)
    >>> report.rows[0].scope, report.line
    ('Cancelling', 'rules=jmp.DEFAULT_RULES.with_scopes({"Cancelling": "float32"})')
    """
    policy, argnums, base = check_policy(policy), check_argnums(argnums), DEFAULT_RULES if rules is None else rules
    _check_search(loss_fn, base, by)
    tolerance, max_scopes = _check_tolerance(tolerance, policy), _check_max_scopes(max_scopes)

    def measure(*args: Any, loss_scale: LossScale | None = None, **kwargs: Any) -> Sensitivity:
        gradients = GradientErrors(loss_fn, policy, argnums, has_aux, loss_scale, args, kwargs)
        error = gradients.error(base)
        how, parts = _parts(gradients.plan(base), by, max_scopes)
        search = _Search(gradients, base, parts, error)
        search.refine(max_scopes)
        kept = search.propose(tolerance)
        proposal = keep_wide(base, kept)
        return Sensitivity(
            policy=str(policy),
            by=how,
            tolerance=tolerance,
            error=error,
            floor=search.floor,
            rows=tuple(row.contribution() for row in search.ranking()),
            base=base,
            kept=tuple(name for part in kept for name in part.primitives or (part.name,)),
            proposal=proposal,
            proposal_error=gradients.error(proposal),
            gradients=gradients.compiled,
        )

    return measure


def _check_search(loss_fn: Any, rules: Any, by: Any) -> None:
    if not callable(loss_fn):
        raise TypeError(
            f"`loss_fn` must be callable, got {loss_fn!r}; pass the function that is given to value_and_grad."
        )
    if not isinstance(rules, Rules):
        raise TypeError(f"`rules` must be a Rules, got {rules!r}; edit the default: DEFAULT_RULES.replace({{...}}).")
    if by not in (None, "scope", "primitive"):
        raise ValueError(f"`by` must be 'scope', 'primitive' or None, got {by!r}.")


def _check_tolerance(tolerance: Any, policy: Policy) -> float:
    if tolerance is None:
        return _EPSILONS * facts(policy.compute_dtype).eps
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise ValueError(f"`tolerance` must be a positive number, a relative error such as 0.01, got {tolerance!r}.")
    return float(tolerance)


def _check_max_scopes(max_scopes: Any) -> int:
    try:
        number = operator.index(max_scopes)
    except TypeError:
        raise TypeError(f"`max_scopes` must be an integer, got {max_scopes!r}.") from None
    if number < 1:
        raise ValueError(f"`max_scopes` must be at least 1, got {number}.")
    return number


def _parts(plan: Explanation, by: str | None, max_scopes: int) -> tuple[str, tuple[Part, ...]]:
    operations = rounding_operations(plan)
    scoped = sum(bool(op.scope) for op in operations)
    if by == "scope" and operations and not scoped:
        raise ValueError(
            "`by` is 'scope', but no operation that the policy rounds is in a named scope; use by='primitive', or name "
            "the parts of the model with jax.named_scope."
        )
    if by == "primitive" or (by is None and 2 * scoped < len(operations)):
        return "primitive", primitive_parts(operations)
    parts = first_level(scope_parts(operations))
    fitting = at_most(max_scopes, parts)
    if fitting is None:
        raise ValueError(
            f"`max_scopes` is {max_scopes}, but the outermost level has {len(parts)} scopes; raise it, or use "
            f"by='primitive'."
        )
    return "scope", fitting


@dataclasses.dataclass(slots=True)
class _Measured:
    """A part and its errors; what it causes and its share are set when all parts are known."""

    part: Part
    alone: float
    without: float
    caused: float = 0.0
    share: float = 0.0

    def contribution(self) -> Contribution:
        part = self.part
        return Contribution(part.name, part.operations, self.alone, self.without, self.share, len(part.finer))


class _Search:
    """The parts under study, which together are the whole program, and what was measured of them."""

    def __init__(self, gradients: GradientErrors, base: Rules, parts: tuple[Part, ...], error: float):
        self.gradients, self.base, self.outermost, self.parts, self.error = gradients, base, parts, list(parts), error
        self.floor = gradients.error(keep_wide(base, parts))
        self.measured: dict[Part, _Measured] = {}

    def ranking(self) -> list[_Measured]:
        """The parts under study, the worst first; of those alike, one at fault when alone, or else the last."""
        rows = [self._measure(part) for part in self.parts]
        noise = max((row.without**2 - self.error**2 for row in rows if row.without < math.inf), default=0.0)
        for row in rows:
            row.caused, row.share = _shares(row, self.error, self.floor, max(0.0, noise))
        ranked: list[_Measured] = []
        while worst := max((row.share for row in rows), default=0.0):
            alike = [row for row in rows if row.share >= _ALIKE * worst]
            ranked.append(next(row for row in alike if row.caused >= row.share / 2 or row is alike[-1]))
            rows.remove(ranked[-1])
        return ranked + sorted(rows, key=lambda row: -row.alone)

    def _measure(self, part: Part) -> _Measured:
        if part not in self.measured:
            others = [other for other in self.parts if other != part]
            alone = self.gradients.error(keep_wide(self.base, others))
            self.measured[part] = _Measured(part, alone, self.gradients.error(keep_wide(self.base, [part])))
        return self.measured[part]

    def refine(self, limit: int) -> None:
        """Opens the worst part, again and again, as long as no more than `limit` parts are measured."""
        while True:
            for row in self.ranking():
                finer = at_most(limit - len(self.measured), row.part.finer)
                if finer and row.share >= _WORTH_OPENING:
                    break
            else:
                return
            place = self.parts.index(row.part)
            self.parts[place : place + 1] = finer

    def propose(self, tolerance: float) -> list[Part]:
        """The fewest parts, of the highest rank, whose error in float32 is the tolerance, or else near the least."""
        ranked = [row.part for row in self.ranking()]
        least = min(self.floor, self.error)
        target = tolerance if least <= tolerance else least * _NEAR

        def enough(chosen: Sequence[Part]) -> bool:
            return self.gradients.error(keep_wide(self.base, chosen)) <= target

        # One part was measured already, so that the first two questions cost nothing; then by bisection.
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
        for part in reversed(chosen[:-1]):
            fewer = [other for other in chosen if other != part]
            chosen = fewer if enough(fewer) else chosen
        return joined(chosen, self.outermost)


def _shares(row: _Measured, error: float, floor: float, noise: float) -> tuple[float, float]:
    """What a part causes alone, and the larger of that and what it removes, as shares of the squared error."""
    if error == 0:
        return 0.0, 0.0
    if error == math.inf:
        caused, removed = float(row.alone == math.inf), float(row.without < math.inf)
    else:
        caused, removed = max(0.0, row.alone**2 - floor**2), error**2 - row.without**2
        caused, removed = min(1.0, caused / error**2), (removed if removed > noise else 0.0) / error**2
    return caused, max(caused, removed)
