"""`sensitivity`: which parts of a model cost the accuracy of its gradient, and the smallest set to keep in float32.

Decides what is accepted as an argument, what is returned and how it is printed. Does not decide how parts are found,
measured, ranked and proposed; see `_sensitivity_search.py`.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..._autocast import DEFAULT_RULES, Rules, check_rules
from ..._dtypes import facts
from ..._explain import Explanation
from ..._grad_inputs import check_argnums, check_policy
from ..._loss_scale import LossScale
from ..._policy import Policy
from ..._text import columns, count
from ..._values import as_count, check_callable
from ._sensitivity_search import (
    Candidate,
    GradientErrors,
    Measured,
    Search,
    at_most,
    divide_outermost,
    keep_float32,
    primitive_candidates,
    rounding_operations,
    scope_candidates,
)

# The usual error of a model in which nothing goes wrong is one to three of its format's epsilon.
_EPSILONS = 8

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
        argument = json.dumps(dict.fromkeys(self.kept, value), ensure_ascii=False)
        return f"{start}{method}({argument})" if self.kept else start

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
    share. The share is the larger of the two, because each misses something: a part that runs in 16 bits only where its
    operands do causes nothing alone, and of two parts each of which ruins the gradient neither removes anything. Some
    parts raise the error when they are kept in float32, by chance; what is removed counts only where it exceeds the
    largest such rise. Shares need not add up to one. A part in float32 widens what follows it, too; therefore, of parts
    with nearly the same share, those that cause it alone come first, and if there is none the last in the program.

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
      TypeError: as `value_and_grad` does.
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
    check_callable("loss_fn", loss_fn, "pass the function that is given to value_and_grad")
    check_rules(base)
    if by not in (None, "scope", "primitive"):
        raise ValueError(f"`by` must be 'scope', 'primitive' or None, got {by!r}.")
    tolerance, max_scopes = _check_tolerance(tolerance, policy), as_count("max_scopes", max_scopes)

    def measure(*args: Any, loss_scale: LossScale | None = None, **kwargs: Any) -> Sensitivity:
        gradients = GradientErrors(loss_fn, policy, argnums, has_aux, loss_scale, args, kwargs)
        error = gradients.error(base)
        how, candidates = _candidates(gradients.plan(base), by, max_scopes)
        search = Search(gradients, base, candidates, error)
        search.refine(max_scopes)
        chosen = search.propose(tolerance)
        proposal = keep_float32(base, chosen)
        return Sensitivity(
            policy=str(policy),
            by=how,
            tolerance=tolerance,
            error=error,
            floor=search.floor,
            rows=tuple(map(_contribution, search.ranking())),
            base=base,
            kept=tuple(name for each in chosen for name in each.primitives or (each.name,)),
            proposal=proposal,
            proposal_error=gradients.error(proposal),
            gradients=gradients.compiled,
        )

    return measure


def _check_tolerance(tolerance: Any, policy: Policy) -> float:
    if tolerance is None:
        return _EPSILONS * facts(policy.compute_dtype).eps
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise ValueError(f"`tolerance` must be a positive number, a relative error such as 0.01, got {tolerance!r}.")
    return float(tolerance)


def _candidates(plan: Explanation, by: str | None, max_scopes: int) -> tuple[str, tuple[Candidate, ...]]:
    """Whether candidates are scopes or primitives, and the outermost of them."""
    operations = rounding_operations(plan)
    scoped = sum(bool(op.scope) for op in operations)
    if by == "scope" and operations and not scoped:
        raise ValueError(
            "`by` is 'scope', but no operation that the policy rounds is in a named scope; use by='primitive', or name "
            "the parts of the model with jax.named_scope."
        )
    if by == "primitive" or (by is None and 2 * scoped < len(operations)):
        return "primitive", primitive_candidates(operations)
    outermost = divide_outermost(scope_candidates(operations))
    fitting = at_most(max_scopes, outermost)
    if fitting is None:
        raise ValueError(
            f"`max_scopes` is {max_scopes}, but the outermost level has {len(outermost)} scopes; raise it, or use "
            f"by='primitive'."
        )
    return "scope", fitting


def _contribution(row: Measured) -> Contribution:
    each = row.candidate
    return Contribution(each.name, each.operations, row.alone, row.without, row.share, len(each.children))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and math.isinf(value) else value


def _text(error: float) -> str:
    return "infinite" if math.isinf(error) else f"{error:.3g}"
