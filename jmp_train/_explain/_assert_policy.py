"""`assert_policy`: a mixed-precision program as a test in the user's CI.

Decides which checks run and how their findings are raised. Does not decide what they find; see `_checks.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .._autocast.rules import DEFAULT_RULES, Rules
from .._policy import Policy
from .._text import count
from ._checks import MAKERS, Check, float32_loss, no_float64, no_narrow_sums, no_wide_dots, scopes_match
from ._explain import explain
from ._report import Explanation


def assert_policy(
    fn: Callable[..., Any],
    policy: Policy | str,
    *checks: Check,
    rules: Rules = DEFAULT_RULES,
    argnums: int | Sequence[int] = 0,
) -> Callable[..., Explanation]:
    """Returns a function that raises an error if the program that `autocast` makes of `fn` fails a check.

    Nothing is run and no GPU is needed. Test the function that you train with, in your CI; `checks` is
    `jmp_train.checks`:

        assert_policy(
            jax.grad(loss_fn), "mixed_float16", checks.no_narrow_sums(), checks.no_wide_dots(except_scopes=("Router",))
        )(params, batch)

    Under a policy that computes in float32 every dot is wide by definition: `no_wide_dots` is for the others.

    Args:
      fn, policy, rules, argnums: as for `autocast`.
      checks: `no_wide_dots()`, `no_narrow_sums()`, `no_float64()`, `float32_loss()`, which are the default, and
        `output_dtypes(dtype)`; or your own: any function of the `Explanation` that returns a sentence for each fault.
        It is always checked that each glob of `Rules.with_scopes` matches something.

    Returns:
      A function of `fn`'s arguments (arrays or `jax.ShapeDtypeStruct`s) that returns the `Explanation`.

    Raises:
      AssertionError: by the returned function, with every fault at once.
      TypeError: `fn` is not callable, or `rules`, `argnums` or a check is something else.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.mean(jax.nn.relu(x @ w))
    >>> report = assert_policy(jax.grad(loss), "mixed_float16")(jnp.ones((16, 8)), jnp.ones((8, 16)))
    >>> report.low_flop_share
    1.0
    """
    for check in checks:
        if check in MAKERS:
            raise TypeError(
                f"`checks` holds {check.__name__} itself; call it: {check.__name__}(...) returns the check."
            )
        if not callable(check):
            raise TypeError(f"`checks` must be functions of an Explanation, got {check!r}; see jmp_train.checks.")
    explained = explain(fn, policy, rules, argnums)
    demanded = checks or (no_wide_dots(), no_narrow_sums(), no_float64(), float32_loss())

    def run(*args: Any, **kwargs: Any) -> Explanation:
        report = explained(*args, **kwargs)
        faults = [fault for check in (scopes_match, *demanded) for fault in _run(check, report)]
        if faults:
            listed = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(faults, 1))
            raise AssertionError(f"{count(len(faults), 'fault')} under {report.policy}:\n{listed}")
        return report

    return run


def _run(check: Check, report: Explanation) -> list[str]:
    faults = check(report)
    # A generator may stand for a list. A string would count as one fault for each letter, and `None` or a boolean may
    # be meant as "no fault".
    if not isinstance(faults, list | tuple) and not hasattr(faults, "__next__"):
        name = getattr(check, "__name__", repr(check))
        raise TypeError(f"the check {name} must return a list of sentences, empty if all is well; got {faults!r}.")
    return list(faults)
