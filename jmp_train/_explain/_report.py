"""`Explanation`, which `explain` returns: a plan as values, and as text.

Decides how a plan is summed up and compared with another. Does not decide what is in it; see `_explain.py`.
"""

import dataclasses
from collections import Counter
from typing import Any

from .._autocast.analysis.wide_product import Cause
from .._flops import PRODUCTS
from .._paths import glob_matches
from .._text import as_lists, columns, count, megabytes, short_source
from ._difference import Difference, compare
from ._emitted import Emitted
from ._operations import Operation
from ._uncounted import Uncounted

_SIXTEEN_BITS = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A result of the explained function.

    Attributes:
      path: where in the result, as a tree path; empty for a result that is one array.
      shape: its shape, a symbolic dimension as text.
      dtype: its dtype, which autocast leaves as it was recorded.
      computed_in: the dtype in which it was computed, before it was cast to `dtype`.
    """

    path: str
    shape: tuple[int | str, ...]
    dtype: str
    computed_in: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The plan of a program under a policy: a value to read, print, compare and test.

    `str(report)` sums it up; `table()` lists every operation; `as_dict()` is ready for JSON; `diff` compares two.

    Attributes:
      policy: the policy, as text.
      compute_dtype: its compute dtype.
      reduce_dtype: its reduce dtype.
      operations: one `Operation` for each equation of the program, those inside loops, branches, rematerialized parts
        and calls included.
      emitted: one `Emitted` for each equation of the program that autocast makes of it.
      outputs: one `Output` for each array that is returned.
      casts: how many floating conversions autocast adds to those that the program has.
      uncounted: one `Uncounted` for each kind of operation whose products `flops` leaves out, or counts once though
        they may run more often.
      kept_bytes: `(dtype, bytes)` of the values that forward operations compute and backward operations read. The
        compiler may save fewer bytes, by rematerializing more than the plan does.
      kept_symbolic: how many more such values have symbolic dimensions, so that their bytes are not known.
      opaque: `(primitive, number, reason)` of operations on float32 values that run exactly as recorded although nobody
        asked for that.
      derivative_rules: user-written `custom_jvp`, `custom_vjp` and `linear_call` rules. After differentiation they
        are expanded to ordinary operations, which are recognised by their tracebacks, as far as that is possible.
      unmatched_scopes: globs of `with_scopes` that matched no operation.
      hidden_casts: source lines of casts to float32 that a float32 trace does not show, so that autocast may narrow
        the operations that they guard: mark these `full_precision`. Found by a second trace with 16-bit arguments,
        hence best effort: it shows only casts of values that depend on arguments.
      hidden_casts_error: why that trace failed, if it did.
    """

    policy: str
    compute_dtype: str
    reduce_dtype: str
    operations: tuple[Operation, ...]
    emitted: tuple[Emitted, ...]
    outputs: tuple[Output, ...]
    casts: int
    uncounted: tuple[Uncounted, ...]
    kept_bytes: tuple[tuple[str, int], ...]
    kept_symbolic: int
    opaque: tuple[tuple[str, int, str], ...]
    derivative_rules: tuple[str, ...]
    unmatched_scopes: tuple[str, ...]
    hidden_casts: tuple[str, ...]
    hidden_casts_error: str | None
    text: str = dataclasses.field(default="", repr=False, compare=False)

    def program(self) -> str:
        """Returns the program that runs, as text in the manner of `jax.make_jaxpr`: a line for each equation.

        `cast`, `round` and `saved` are what autocast adds: conversions, roundings that no compiler may drop, and values
        that are stored once for all later readers. `remat` marks equations that run again for the backward pass.
        """
        return self.text

    @property
    def total(self) -> int:
        """The number of operations, without the loops, branches and calls that hold them."""
        return sum(not op.holds_program for op in self.operations)

    @property
    def converted(self) -> int:
        """How many were recorded in float32 and run in the compute dtype."""
        if self.compute_dtype == "float32":
            return 0
        return sum(op.recorded == "float32" and op.dtype == self.compute_dtype for op in self.operations)

    @property
    def widened(self) -> int:
        """How many were recorded in 16 bits and run in float32: reductions of code that casts by hand."""
        return sum(op.recorded in _SIXTEEN_BITS and op.dtype == "float32" for op in self.operations)

    @property
    def flops(self) -> int:
        """FLOPs of all dots and convolutions, loops multiplied out, without those that `uncounted` names."""
        return sum(op.flops * op.times for op in self.operations)

    @property
    def low_flop_share(self) -> float:
        """The share of `flops` on 16-bit operands; 0 without any. It says nothing of what `uncounted` names."""
        low = sum(op.flops * op.times for op in self.operations if op.dtype in _SIXTEEN_BITS)
        return low / self.flops if self.flops else 0.0

    @property
    def products(self) -> tuple[tuple[str, str, int], ...]:
        """`(dtype of the operands, reason, number)` of the dots and convolutions, the commonest first."""
        found = Counter((op.dtype or "", op.reason) for op in self.operations if op.primitive in PRODUCTS)
        return tuple((dtype, reason, number) for (dtype, reason), number in found.most_common())

    @property
    def wide_products(self) -> tuple[Operation, ...]:
        """The dots and convolutions that run in float32, one for each, whatever the reason."""
        return tuple(op for op in self.operations if op.primitive in PRODUCTS and op.dtype == "float32")

    @property
    def summary(self) -> str:
        """One line, such as "Converted 405/4897 operations to float16 using 2 casts"."""
        return f"Converted {self.converted}/{self.total} operations to {self.compute_dtype} using " + count(
            self.casts, "cast"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as dictionaries, lists, strings and numbers, the sums of the properties included."""
        names = ("summary", "converted", "total", "widened", "flops", "low_flop_share")
        values = dataclasses.asdict(dataclasses.replace(self, text=""))  # `program()` is text, and long
        del values["text"]
        values["kept_bytes"] = dict(self.kept_bytes)
        values["products"] = [dict(zip(("dtype", "reason", "number"), row, strict=True)) for row in self.products]
        values["opaque"] = [dict(zip(("primitive", "number", "reason"), row, strict=True)) for row in self.opaque]
        return {name: getattr(self, name) for name in names} | as_lists(values)

    def table(self, scope: str | None = None) -> str:
        """Returns a line for every operation: its primitive and source line, its rule, its dtype and the reason.

        Args:
          scope: a glob over scope paths; only operations that it matches are listed.
        """
        header = ("", "primitive", "dtype", "result", "rule", "times", "scope", "source", "reason")
        chosen = [op for op in self.operations if scope is None or glob_matches(scope, op.scope)]
        rows = [
            (
                "bwd" if op.backward else "fwd",
                op.primitive,
                op.dtype or "",
                op.result or "",
                op.rule,
                str(op.times),
                op.scope,
                short_source(op.source),
                op.reason,
            )
            for op in chosen
        ]
        return columns(header, rows)

    def diff(self, other: "Explanation") -> Difference:
        """Returns what changes from this plan to `other`: of the same program under other rules or another policy.

        Raises:
          TypeError: `other` is no `Explanation`.
        """
        if not isinstance(other, Explanation):
            raise TypeError(
                f"`other` must be an Explanation, got {other!r}; pass what explain(fn, policy)(*args) gave."
            )
        return compare(self._numbers(), other._numbers(), self.operations, other.operations)

    def _numbers(self) -> dict[str, Any]:
        """The totals that `diff` compares, by name."""
        numbers = {"policy": self.policy, "converted": self.converted, "total": self.total, "casts": self.casts}
        kept = {f"kept in {dtype}": number for dtype, number in self.kept_bytes}
        return numbers | {"low_flop_share": round(self.low_flop_share, 4)} | kept

    def __str__(self) -> str:
        lines = [self.summary + f" ({self.policy})" + self._guarded()]
        if self.widened:
            lines.append(f"Widened {count(self.widened, 'operation')} recorded in 16 bits to float32")
        if self.flops:
            lines.append(f"{self.low_flop_share:.1%} of {self.flops / 1e9:.3g} GFLOP on 16-bit operands")
        if self.uncounted:
            lines.append("Not counted: " + ", ".join(map(_named, self.uncounted)))
        if self.kept_bytes or self.kept_symbolic:
            parts = [f"{megabytes(number)} {dtype}" for dtype, number in self.kept_bytes]
            parts += [f"{count(self.kept_symbolic, 'array')} of symbolic size"] if self.kept_symbolic else []
            lines.append(f"The backward pass reads from the forward pass: {', '.join(parts)}")
        lines += [f"{count(number, 'product')} in {dtype}: {reason}" for dtype, reason, number in self.products]
        wide = self._by_wide_product()
        return "\n".join([*lines, *self._notes(), "", self._by_primitive(), *wide])

    def _guarded(self) -> str:
        """What the first line adds where products were recorded with a precision of float32, perhaps all of them."""
        number = sum(op.reason.endswith(Cause.PRECISION.value) for op in self.wide_products)
        if not number:
            return ""
        told = f"; {count(number, 'product')} kept in float32 by an explicit precision"
        if "matmul_precision" in self.policy:
            return told  # by the call itself, over the policy
        return f'{told}: where that is set for all, matmul_precision="default" in the policy lets them narrow'

    def _by_wide_product(self) -> list[str]:
        """A table of the products that run in float32, unless the whole program does."""
        if not self.wide_products or self.compute_dtype == "float32":
            return []
        header = ("product in float32", "number", "scope", "source", "reason")
        found = Counter(
            ("bwd" if op.backward else "fwd", op.scope, short_source(op.source), op.reason) for op in self.wide_products
        )
        rows = [(where, str(number), *rest) for (where, *rest), number in found.items()]
        return ["", columns(header, rows)]

    def _notes(self) -> list[str]:
        sections = {
            "Runs as recorded": [f"{name} x{number}: {reason}" for name, number, reason in self.opaque],
            "User-written derivative rules": self.derivative_rules,
            "Scopes that matched nothing": self.unmatched_scopes,
            "Casts to float32 that autocast cannot see (full_precision can be)": map(short_source, self.hidden_casts),
        }
        lines = [f"{title}: {'; '.join(items)}" for title, found in sections.items() if (items := list(found))]
        if self.hidden_casts_error:
            lines.append(f"No search for hidden casts: {self.hidden_casts_error}")
        return lines

    def _by_primitive(self) -> str:
        found = Counter((op.primitive, op.rule, op.dtype or "") for op in self.operations if not op.holds_program)
        rows = [(name, str(number), rule, dtype) for (name, rule, dtype), number in found.most_common()]
        return columns(("primitive", "number", "rule", "dtype"), rows)


def _named(kind: Uncounted) -> str:
    estimate = "" if kind.flops is None else f"; {kind.flops / 1e9:.3g} GFLOP by its own estimate"
    operands = "" if kind.dtype is None else f" on {kind.dtype} operands"
    return f"{kind.number} {kind.primitive}{operands} ({kind.reason}{estimate})"
