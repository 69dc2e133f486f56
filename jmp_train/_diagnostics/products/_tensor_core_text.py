"""A `TensorCoreReport` as text.

Decides what a person reads of it. Does not decide any figure; see `_tensor_core_report.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..._text import columns, count, short_source
from ..gpu import UNITS
from ._products import Product

if TYPE_CHECKING:
    from ._tensor_core_report import TensorCoreReport


def report_text(report: TensorCoreReport) -> str:
    """The shares, what to pad, Amdahl's estimate, and what is slow by its reason."""
    policy = f", {report.policy}" if report.policy else ""
    if not report.products:
        return f"No dot and no convolution for the Tensor Cores of {report.gpu}{policy}"
    total = f"{report.flops / 1e9:.4g} GFLOP"
    lines = [f"{count(len(report.products), 'product')}, dots and convolutions, {total}, {report.gpu}{policy}"]
    lines += [f"  {_share(flops, report)}  {UNITS[unit]}" for unit, flops in report.unit_flops.items()]
    lines.append(f"  {report.tensor_core_share:6.1%}  on Tensor Cores in 16 or 8 bits with all sizes aligned")
    memory = sum(each.flops * each.times for each in report.products if each.is_memory_bound)
    lines.append(f"  {_share(memory, report)}  in products bound by memory, which Tensor Cores do not speed up further")
    if report.padding:
        pads = [f"  {each.size} -> {each.padded}  in {share:.1%} of the FLOPs" for each, share in report.padding]
        lines += ["", "Sizes to pad:", *pads]
    lines += ["", *_estimates(report), *_notes(report)]
    slow = list(_slow(report))
    if slow:
        lines += ["", "Not as fast as they could be:", columns(("share", "number", "reason", "first of them"), slow)]
    return "\n".join(lines)


def _share(flops: int, report: TensorCoreReport) -> str:
    return f"{flops / report.flops:6.1%}" if report.flops else "  0.0%"


def _estimates(report: TensorCoreReport) -> Iterator[str]:
    yield "Speed-up over strict float32 by Amdahl's law, 1 / ((1 - f) + f / s), estimated and not timed:"
    for name, each in (("as it is", report.estimate), ("if all were in 16 bits and aligned", report.repaired)):
        yield f"  {each.speedup:5.2f}  {name} (f = {each.f:.3f}, s = {each.s:.2f})"
    yield "  f: share of the float32 time in products that Tensor Cores take; s: how much faster these run there."


def _notes(report: TensorCoreReport) -> Iterator[str]:
    if report.opaque:
        yield f"Not looked into: {', '.join(report.opaque)}"
    if report.uncounted_loops:
        yield f"Counted as one iteration: {count(report.uncounted_loops, 'while loop')} of unknown length"


def _slow(report: TensorCoreReport) -> Iterator[tuple[str, str, str, str]]:
    """A row for each reason, the largest share of the FLOPs first."""
    grouped: dict[str, list[Product]] = {}
    for product in report.products:
        if not product.on_tensor_cores:
            grouped.setdefault(product.reason, []).append(product)
    flops = {reason: sum(each.flops * each.times for each in found) for reason, found in grouped.items()}
    for reason in sorted(grouped, key=lambda reason: -flops[reason]):
        first = grouped[reason][0]
        where = " ".join(filter(None, (first.scope, short_source(first.source))))
        yield _share(flops[reason], report).strip(), str(len(grouped[reason])), reason, where


def product_table(report: TensorCoreReport, chosen: Sequence[Product]) -> str:
    """A line for every product, those with the most FLOPs first."""
    header = ("", "primitive", "batch x M x N x K", "dtypes", "runs", "share", "FLOP/B", "scope", "source", "reason")
    rows = [
        (
            "bwd" if each.backward else "fwd",
            each.primitive,
            f"{each.batch} x {each.m} x {each.n} x {each.k}",
            f"{each.dtypes[0]}, {each.dtypes[1]} -> {each.dtypes[2]}",
            str(each.times),
            _share(each.flops * each.times, report).strip(),
            f"{each.intensity:.0f}",
            each.scope,
            short_source(each.source),
            each.reason,
        )
        for each in sorted(chosen, key=lambda each: -each.flops * each.times)
    ]
    return columns(header, rows)
