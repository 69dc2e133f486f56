"""A `GPUReport` as text.

Decides what a person reads of it. Does not decide any figure; see `_report.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..._jaxpr import plain_scope
from ..._text import columns, count, megabytes, short_source
from ._gpus import UNITS

if TYPE_CHECKING:
    from ._report import GPUReport

_MOST_KERNELS = 8
_MOST_COPIES = 4


def report_text(report: GPUReport) -> str:
    """The summary, and tables of the products and of the largest kernels."""
    many = f", {report.devices} devices (figures of one)" if report.devices > 1 else ""
    policy = f", {report.policy}" if report.policy else ""
    lines = [f"Compiled for {report.gpu}{many}, jax {report.jax_version}{policy}"]
    lines += [f"  {name:18s}  {value}" for name, value in _summary(report)]
    for title, rows in (("16-bit sums", _sums(report)), ("Copies", _copies(report))):
        lines += ["", f"{title}:", *(f"  {row}" for row in rows)] if rows else []
    if report.unknown_loops:
        loops = count(report.unknown_loops, "loop")
        lines += ["", f"The compiler does not know the length of {loops}, counted as one iteration each."]
    if report.products:
        lines += ["", product_table(report)]
    return "\n".join([*lines, "", "What moves most:", kernel_table(report, _MOST_KERNELS)])


def _summary(report: GPUReport) -> Iterator[tuple[str, str]]:
    memory = report.memory
    launches = "1 launch" if report.launches == 1 else f"{report.launches} launches"
    yield "memory moved", f"{megabytes(report.bytes)} by {launches}"
    yield (
        "peak memory",
        f"{megabytes(memory.peak)}: arguments {megabytes(memory.arguments)}, results {megabytes(memory.results)} "
        f"({megabytes(memory.donated)} of them in donated arguments), temporary {megabytes(memory.temporary)}",
    )
    shares = [f"{flops / report.flops:.1%} {UNITS[unit]}" for unit, flops in report.unit_flops.items()]
    yield "dots, convolutions", "; ".join([f"{report.flops / 1e9:.4g} GFLOP", *shares]) if report.flops else "none"
    yield "least time", f"{report.least_seconds * 1e3:.3g} ms at peak bandwidth and arithmetic; nothing was timed"
    yield "16-bit sums", str(len(report.sixteen_bit_sums) or "none")
    yield "copies", count(sum(copy.times for copy in report.copies), "buffer") if report.copies else "none"
    if report.unused_donations:
        yield "unused donations", ", ".join(report.unused_donations) + ": no result of that shape and dtype"
    if report.devices > 1:
        yield "collectives", _crossing(report)


def _crossing(report: GPUReport) -> str:
    found: Counter[str] = Counter()
    for each in report.collectives:
        found[f"{each.operation} in {', '.join(dict.fromkeys(each.dtypes))}"] += each.bytes * each.times
    return "; ".join(f"{name}, {megabytes(number)}" for name, number in found.items()) or "none"


def _sums(report: GPUReport) -> list[str]:
    return [
        f"{each.kind} {each.result}"
        + "".join(f", {at}" for at in (_operation(each.scope), short_source(each.source)) if at)
        for each in report.sixteen_bit_sums
    ]


def _copies(report: GPUReport) -> list[str]:
    rows = [f"{megabytes(copy.bytes)}, {copy.shape}: {copy.cause}" for copy in report.copies[:_MOST_COPIES]]
    rest = report.copies[_MOST_COPIES:]
    if rest:
        rows.append(f"{megabytes(sum(copy.bytes for copy in rest))} in {len(rest)} more")
    return rows


def product_table(report: GPUReport) -> str:
    """A line for each kind of product and dtypes, with their number and FLOPs."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    number: Counter[tuple[str, str, str, str]] = Counter()
    for each in report.products:
        key = (each.kind, " x ".join(each.operands[:2]), each.result, UNITS[each.unit])
        found[key] += each.flops * each.times
        number[key] += each.times
    rows = [
        (kind, operands, result, str(number[key]), f"{flops / 1e9:.4g}", f"{flops / report.flops:.1%}", unit)
        for key, flops in found.most_common()
        for kind, operands, result, unit in [key]
    ]
    return columns(("product", "operands", "result", "runs", "GFLOP", "share", "on"), rows)


def _operation(scope: str) -> str:
    """The path of an operation without transforms and without the jitted function it is in."""
    return plain_scope(scope.partition("/")[2] if scope.startswith("jit(") else scope)


def kernel_table(report: GPUReport, most: int | None) -> str:
    """A line for each kernel, the largest first."""
    largest = sorted(report.kernels, key=lambda kernel: -kernel.bytes)[:most]
    rows = [
        (
            kernel.name,
            megabytes(kernel.read),
            megabytes(kernel.written),
            str(kernel.times),
            f"{kernel.bytes / report.bytes:.1%}" if report.bytes else "",
            ",".join(kernel.reads) + " -> " + ",".join(kernel.writes),
            ("bwd " if "transpose(" in kernel.scope else "") + _operation(kernel.scope),
            kernel.source,
        )
        for kernel in largest
    ]
    return columns(("kernel", "read", "written", "runs", "share", "dtypes", "of", "source"), rows)
