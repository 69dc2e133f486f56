"""The checks of a mixed-precision program that a user may ask for, each a function of an `Explanation`.

Decides which operations fail a check and how that is said. Does not decide which checks are run; see
`_assert_policy.py`. Each function below returns a check: a function that returns one sentence for every fault that it
finds. Any function of an `Explanation` that does so is a check.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from glob import escape
from typing import Any, TypeAlias

from jax.typing import DTypeLike

from .._dtypes import to_dtype
from .._flops import PRODUCTS
from .._jaxpr import LOOPS
from .._paths import glob_matches
from .._text import count
from ._emitted import COLLECTIVE_SUMS, Emitted
from ._report import Explanation, Output

Check: TypeAlias = Callable[[Explanation], Iterable[str]]

_WIDE = ("float32", "float64")
_NARROW = ("float16", "bfloat16")


def no_wide_dots(*, except_scopes: Sequence[str] = ()) -> Check:
    """Returns a check that no dot or convolution reads float32 operands: they run outside the Tensor Cores' fast mode.

    Dots that you set to float32 yourself (a scope, a rule, `full_precision`) count too, unless their scope is named
    here: the check is to notice a plan that loses its speed.

    Args:
      except_scopes: globs over `jax.named_scope` paths, as for `Rules.with_scopes`.

    >>> import jax.numpy as jnp
    >>> from jmp_train import assert_policy
    >>> report = assert_policy(lambda w, x: x @ w, "mixed_float16", no_wide_dots())(jnp.ones((4, 2)), jnp.ones((8, 4)))
    """
    scopes = _globs(except_scopes)

    def check(report: Explanation) -> list[str]:
        # The emitted program has no reasons: they are taken from the plan, by primitive, source line and scope.
        # Reversed, so that of two operations that are equal in these the first counts.
        wide = [op for op in reversed(report.operations) if op.dtype in _WIDE]
        reasons = {(op.primitive, op.source, op.scope): op.reason for op in wide}

        def is_fault(op: Emitted) -> bool:
            # Those that are multiplied come first: attention has others, such as a log-sum-exp in float32.
            wide = op.primitive in PRODUCTS and any(dtype in _WIDE for dtype in op.operands[:2])
            return wide and not _is_in(op.scope, scopes)

        def sentence(op: Emitted, where: str) -> str:
            reason = reasons.get((op.primitive, op.source, op.scope))
            because = f" ({reason})" if reason else ""
            operands = ", ".join(filter(None, op.operands))
            return (
                f"no_wide_dots: {op.primitive} reads {operands} {where}{because}; let it narrow, or except its scope: "
                f"no_wide_dots(except_scopes=({escape(op.scope) or 'a jax.named_scope around it'!r},))."
            )

        return _grouped(report, is_fault, sentence)

    return check


def no_narrow_sums(*, except_scopes: Sequence[str] = ()) -> Check:
    """Returns a check that nothing accumulates in 16 bits: reductions, cumulative and windowed sums, scatter-adds, sums
    across devices (narrower than the policy's `reduce_dtype`) and sums that a loop carries.

    Args:
      except_scopes: globs over `jax.named_scope` paths, as for `Rules.with_scopes`.

    >>> import jax.numpy as jnp
    >>> from jmp_train import assert_policy
    >>> report = assert_policy(lambda x: jnp.sum(x), "mixed_float16", no_narrow_sums())(jnp.ones(8))
    """
    scopes = _globs(except_scopes)

    def check(report: Explanation) -> list[str]:
        def is_fault(op: Emitted) -> bool:
            # What a policy's `reduce_dtype` asks for between devices is no fault.
            asked_for = op.primitive in COLLECTIVE_SUMS and op.sums_in == report.reduce_dtype
            return op.sums_in in _NARROW and not asked_for and not _is_in(op.scope, scopes)

        def sentence(op: Emitted, where: str) -> str:
            if op.primitive in LOOPS:
                what, remedy = f"{op.primitive} carries a sum in {op.sums_in}", "start the carry in float32"
            else:
                what, remedy = f"{op.primitive} accumulates in {op.sums_in}", "cast its operand to float32 before"
            return (
                f"no_narrow_sums: {what} {where}; {remedy}, or except its scope: "
                f"no_narrow_sums(except_scopes=({escape(op.scope) or 'a jax.named_scope around it'!r},))."
            )

        return _grouped(report, is_fault, sentence)

    return check


def no_float64() -> Check:
    """Returns a check that nothing is computed in float64 or complex128, which GPUs run many times slower.

    >>> import jax.numpy as jnp
    >>> from jmp_train import assert_policy
    >>> report = assert_policy(jnp.sin, "mixed_float16", no_float64())(jnp.ones(8))
    """

    def check(report: Explanation) -> list[str]:
        def is_fault(op: Emitted) -> bool:
            return any(dtype in ("float64", "complex128") for dtype in (*op.operands, op.result))

        def sentence(op: Emitted, where: str) -> str:
            dtypes = ", ".join(dict.fromkeys(filter(None, (*op.operands, op.result))))
            return f"no_float64: {op.primitive} computes with {dtypes} {where}; cast what enters it to float32."

        return _grouped(report, is_fault, sentence)

    return check


def float32_loss() -> Check:
    """Returns a check that every floating scalar among the results, as the loss is, was computed in float32 or wider.

    >>> import jax.numpy as jnp
    >>> from jmp_train import assert_policy
    >>> report = assert_policy(lambda x: jnp.mean(x**2), "mixed_float16", float32_loss())(jnp.ones(8))
    """

    def check(report: Explanation) -> list[str]:
        return [
            f"float32_loss: the scalar {_named(output)} is computed in {output.computed_in} and returned in "
            f"{output.dtype}; cast what it is made of to float32, or wrap the end of the loss in full_precision."
            for output in report.outputs
            if not output.shape and output.computed_in in _NARROW
        ]

    return check


def output_dtypes(dtype: DTypeLike) -> Check:
    """Returns a check that all floating results have one dtype.

    >>> import jax.numpy as jnp
    >>> from jmp_train import assert_policy
    >>> report = assert_policy(jnp.sin, "mixed_float16", output_dtypes("float32"))(jnp.ones(8))
    """
    wanted = to_dtype(dtype, "dtype").name

    def check(report: Explanation) -> list[str]:
        return [
            f"output_dtypes: {_named(output)} is {output.dtype}, not {wanted}; autocast leaves results as the function "
            f"returns them, so cast it there."
            for output in report.outputs
            if output.dtype not in (wanted, "float0") and "float" in output.dtype  # float0: the gradient of an integer
        ]

    return check


def scopes_match(report: Explanation) -> list[str]:
    """The check that every glob of `Rules.with_scopes` matched an operation; `assert_policy` always makes it."""
    return [
        f"scopes_match: the scope glob {glob} of the rules matches no operation; explain(...) lists the scopes, and "
        f"only jax.named_scope and Linen modules make one."
        for glob in report.unmatched_scopes
    ]


def _grouped(
    report: Explanation, is_fault: Callable[[Emitted], bool], sentence: Callable[[Emitted, str], str]
) -> list[str]:
    """One sentence for all faults of the same primitive, dtypes, source line and scope."""
    # Operations that differ only in fields which no sentence mentions count as alike.
    alike = Counter(dataclasses.replace(op, backward=False, times=1) for op in report.emitted if is_fault(op))
    return [sentence(op, _where(op, number)) for op, number in alike.items()]


def _where(op: Emitted, number: int) -> str:
    scope = f", scope {op.scope!r}" if op.scope else ""
    often = f", {count(number, 'time')}" if number > 1 else ""
    return f"at {op.source or 'an unknown line'}{scope}{often}"


def _named(output: Output) -> str:
    return f"result {output.path!r}" if output.path else "result"


def _is_in(scope: str, globs: Sequence[str]) -> bool:
    return any(glob_matches(glob, scope) for glob in globs)


def _globs(scopes: Any) -> tuple[str, ...]:
    globs = tuple(scopes) if isinstance(scopes, Iterable) and not isinstance(scopes, str) else (scopes,)
    if isinstance(scopes, str) or not all(isinstance(glob, str) for glob in globs):
        example = scopes if isinstance(scopes, str) else "head"
        raise TypeError(f"`except_scopes` must be a sequence of globs, got {scopes!r}; write ({example!r},).")
    return globs


MAKERS = (no_wide_dots, no_narrow_sums, no_float64, float32_loss, output_dtypes)
