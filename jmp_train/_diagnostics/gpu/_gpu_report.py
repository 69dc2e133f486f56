"""`gpu_report`: what a compiler makes of a function for a GPU that need not be there.

Decides which figures a report has, how they are summed up, compared and printed. Does not decide how they are read from
the compiled module: `_kernels.py` reads the bytes, `_compiled_products.py` the products, `_findings.py` the rest.
"""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ..._autocast import autocast
from ..._explain._emitted import Emitted, emitted_of
from ..._flops import PRODUCTS
from ..._jaxpr import plain_scope
from ..._policy import Policy, get_policy
from ..._text import as_lists, columns, count, megabytes, short_source
from ..._values import check_callable
from ._compile import (
    check_sizes,
    compile_lowered,
    gpu_mesh,
    is_jitted,
    lower_for_gpu,
    mesh_axes,
    module_text,
    traced_program,
)
from ._compiled_products import CompiledProduct, products
from ._findings import (
    Collective,
    Copy,
    Memory,
    NarrowSum,
    carried_sums,
    collectives,
    copies,
    memory_of,
    sixteen_bit_sums,
    unused_donations,
    unused_donors,
)
from ._gpus import GPU, NARROW_UNITS, UNITS, WithProducts, get_gpu
from ._kernels import Kernel, kernels, unknown_loops

# How many rows of a report's longest tables `str` shows.
_MOST_KERNELS = 8
_MOST_COPIES = 4

_WITHOUT_TRITON = (
    "Triton's tile sizes do not divide a product, and only a GPU can try others: all products are counted as cuBLAS's, "
    "which fuse with less of what is around them."
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `GPUReport.compare` returns; `str` is a table.

    Attributes:
      names: what the two reports are called.
      rows: `(figure, of the first, of the second)`.
    """

    names: tuple[str, str]
    rows: tuple[tuple[str, float, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns `{figure: {"first": ..., "second": ...}}` and the names."""
        figures = {name: {"first": first, "second": second} for name, first, second in self.rows}
        return {"names": list(self.names), "figures": figures}

    def __str__(self) -> str:
        rows = [
            (name, _figure_text(name, first), _figure_text(name, second), f"{second / first:.3f}" if first else "")
            for name, first, second in self.rows
        ]
        return columns(("", *self.names, "second / first"), rows)


def _figure_text(name: str, value: float) -> str:
    if "bytes" in name or "memory" in name:
        return megabytes(int(value))
    if "share" in name:
        return f"{value:.1%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclasses.dataclass(frozen=True)
class GPUReport(WithProducts):
    """A program as compiled for a GPU: a value to read, print, compare and test. Figures are those of one GPU.

    `str(report)` sums it up; `table()` lists the kernels; `as_dict()` is ready for JSON; `compare` sets two side by
    side.

    Attributes:
      gpu: its name.
      bandwidth, rates: of the GPU, bytes per second and `(arithmetic, FLOP per second)`.
      devices: how many there are.
      policy: that of `gpu_report`, as text, if it was given one.
      jax_version: the compiler is of this version.
      kernels: every launch, those in loops once with their `times`.
      products: every dot, convolution and fused attention.
      collectives: what crosses devices.
      sixteen_bit_sums: sums that accumulate in float16 or bfloat16, those that loops carry included.
      copies: buffers that are copied, with the likely cause.
      unused_donations: donated arguments that fit no result, by shape: at most temporary values can use their memory.
      unknown_loops: how many loops count as one iteration, for the compiler does not know their length.
      memory: what it holds at its peak.
      notes: what the program asks for that the GPU does not have, and what a compiler on that GPU would do otherwise.
    """

    gpu: str
    bandwidth: float
    rates: tuple[tuple[str, float], ...]
    devices: int
    policy: str | None
    jax_version: str
    kernels: tuple[Kernel, ...]
    products: tuple[CompiledProduct, ...]
    collectives: tuple[Collective, ...]
    sixteen_bit_sums: tuple[NarrowSum, ...]
    copies: tuple[Copy, ...]
    unused_donations: tuple[str, ...]
    unknown_loops: int
    memory: Memory
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that one call reads and writes, loops multiplied out."""
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """Kernels that one call starts, loops multiplied out."""
        return sum(kernel.times for kernel in self.kernels)

    @property
    def tensor_core_share(self) -> float:
        """The share of `flops` on Tensor Cores in 16 or 8 bits, 0 without any; TF32 has half their rate.

        Whether sizes are aligned is not in it: that is `tensor_core_report`'s.
        """
        fast = sum(flops for unit, flops in self.unit_flops.items() if unit in NARROW_UNITS)
        return fast / self.flops if self.flops else 0.0

    @property
    def least_seconds(self) -> float:
        """A lower bound by the GPU's roofline: each kernel at peak bandwidth or peak arithmetic. Nothing is timed."""
        rates = dict(self.rates)
        # Memory traffic and arithmetic of one kernel overlap; those of different kernels do not.
        seconds = {kernel.name: kernel.bytes / self.bandwidth for kernel in self.kernels}
        arithmetic = dict.fromkeys(seconds, 0.0)
        for product in self.products:
            arithmetic[product.kernel] += product.flops * product.times / rates[product.unit]
        return sum(max(least, arithmetic[name]) for name, least in seconds.items())

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as dictionaries, lists, strings and numbers, the sums of the properties included."""
        names = ("bytes", "launches", "flops", "unit_flops", "tensor_core_share", "least_seconds")
        values = dataclasses.asdict(self)
        for row in (*values["kernels"], *values["products"]):
            del row["line"]  # megabytes of the module's text in a large program
        values["rates"] = dict(self.rates)
        values["memory"]["peak"] = self.memory.peak
        return {name: getattr(self, name) for name in names} | as_lists(values)

    def compare(self, other: "GPUReport", names: tuple[str, str] | None = None) -> Comparison:
        """Returns this report and `other` side by side: of one program under two policies, say.

        Args:
          other: another report.
          names: what to call the two; by default their policies, or `before` and `after`.

        Raises:
          TypeError: `other` is no `GPUReport`.
        """
        if not isinstance(other, GPUReport):
            raise TypeError(f"`other` must be a GPUReport, got {other!r}; pass what gpu_report(fn)(*args) gave.")
        default = (self.policy or "before", other.policy or "after")
        first, second = self.figures(), other.figures()
        return Comparison(names or default, tuple((name, first[name], second[name]) for name in first))

    def figures(self) -> dict[str, float]:
        """Returns the numbers that `compare` compares, by name."""
        return {
            "bytes moved": self.bytes,
            "peak memory": self.memory.peak,
            "temporary memory": self.memory.temporary,
            "launches": self.launches,
            "GFLOP of dots and convolutions": self.flops / 1e9,
            "Tensor Core share, 16 or 8 bits": self.tensor_core_share,
            "least milliseconds, by roofline": self.least_seconds * 1e3,
            "16-bit sums": len(self.sixteen_bit_sums),
            "copies": sum(copy.times for copy in self.copies),
            "collective bytes": sum(each.bytes * each.times for each in self.collectives),
        }

    def table(self, most: int | None = None) -> str:
        """Returns a line for every kernel, those that move the most bytes first.

        Args:
          most: how many to list; all by default.
        """
        return _kernel_table(self, most)

    def __str__(self) -> str:
        return _report_text(self)


def gpu_report(
    fn: Callable[..., Any],
    gpu: str = "H200",
    devices: int | Mapping[str, int] = 1,
    *,
    policy: Policy | str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    in_shardings: Any = None,
) -> Callable[..., GPUReport]:
    """Returns a function that compiles `fn` for a GPU and tells what became of it. Nothing is run.

    Report what you train with, the whole step, jitted as it is in training:

        before = gpu_report(jax.jit(float32_step, donate_argnums=0))(state, batch)
        after = gpu_report(jax.jit(mixed_step, donate_argnums=0))(state, batch)
        print(before.compare(after))

    The machine needs no GPU, no driver and no CUDA libraries, only `pip install "jmp-train[gpu-report]"` on Linux and,
    without a GPU, the environment variable `JAX_PLATFORMS=cpu`: else JAX looks for one and leaves the compiler out. The
    figures are bytes and FLOPs as compiled, the same every time; no kernel is timed and none is tuned, so the choice
    between cuBLAS, cuDNN and Triton may differ from that of a run on the GPU itself.

    Args:
      fn: any function of arrays, jitted or not, under `autocast` or not.
      gpu: one of the names of `gpus()`, such as `"H200"`, `"L40S"` or `"T4"`, or the text of another GPU's target
        description (XLA's `GpuTargetConfigProto`).
      devices: how many GPUs, along one mesh axis `"data"`; or `{"data": 4, "model": 2}`. The mesh is set while `fn` is
        traced: `shard_map` without `mesh` and partition specs in `jit`'s `in_shardings` find it. All figures are those
        of one GPU.
      policy: a policy to `autocast` a function that is not jitted with, for a first look; `None` leaves `fn` as it is.
      donate_argnums, in_shardings: for a function that is not jitted, as for `jax.jit`; shardings are partition specs
        over the axes of `devices`. By default nothing is donated and the compiler shards as it likes.

    Returns:
      A function of `fn`'s arguments (arrays or `jax.ShapeDtypeStruct`s) that returns a `GPUReport`.

    Warns:
      UserWarning: of products in bfloat16 for a GPU that has none.

    Raises:
      TypeError: `fn` is not callable, or is jitted and given options of `jit` here.
      ValueError: `gpu` or `devices` name none, `gpu` is older than the compiler knows, `fn` uses devices of this
        machine, or an argument has a symbolic dimension.
      RuntimeError: the compiler is not installed, or not in jax's version; the error has the command.

    ```python
    report = gpu_report(lambda w, x: x @ w)(jnp.ones((512, 512)), jnp.ones((64, 512)))
    report.bytes, report.tensor_core_share, report.memory.peak
    ```

    >>> gpu_report(3)
    Traceback (most recent call last):
      ...
    TypeError: `fn` must be callable, got 3; pass the function to compile.
    """
    check_callable("fn", fn, "pass the function to compile")
    options = {"donate_argnums": donate_argnums, "in_shardings": in_shardings}
    options = {name: value for name, value in options.items() if value is not None}
    if is_jitted(fn) and (options or policy is not None):
        given = [*options, *(["policy"] if policy is not None else [])]
        raise TypeError(
            f"`fn` is jitted, so `{given[0]}` belongs inside: jax.jit(fn, donate_argnums=...), "
            f"jax.jit(autocast(fn, policy)). Pass either a jitted function or options."
        )
    described = get_gpu(gpu)
    mesh_axes(devices)  # complains here rather than at the first report
    program = fn if policy is None else autocast(fn, policy)

    def report(*args: Any, **kwargs: Any) -> GPUReport:
        check_sizes(args, kwargs)
        mesh = gpu_mesh(devices, gpu)
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            lowered = lower_for_gpu(program, mesh, args, kwargs, **options)
            compiled, with_triton = compile_lowered(lowered)
        text = module_text(compiled)
        unused = unused_donations(raised)
        with jax.set_mesh(mesh):
            emitted = tuple(emitted_of(traced_program(program, args, kwargs)))
        notes = tuple(_notes(emitted, described))
        for note in notes:
            warnings.warn(note, stacklevel=2)
        notes = notes if with_triton else (*notes, _WITHOUT_TRITON)
        return GPUReport(
            gpu=described.name,
            bandwidth=described.bandwidth,
            rates=described.rates,
            devices=mesh.size,
            policy=None if policy is None else str(get_policy(policy)),
            jax_version=jax.__version__,
            kernels=tuple(kernels(text)),
            products=tuple(products(text, described)),
            collectives=collectives(text),
            sixteen_bit_sums=(*sixteen_bit_sums(text), *carried_sums(emitted)),
            copies=copies(text, lowered.out_info),
            unused_donations=(*unused, *unused_donors(text)),
            unknown_loops=unknown_loops(text),
            memory=memory_of(compiled),
            notes=notes,
        )

    return report


def _notes(emitted: Sequence[Emitted], gpu: GPU) -> Iterator[str]:
    """What a program asks for that the GPU does not have."""
    if not gpu.has_bfloat16 and any(each.primitive in PRODUCTS and "bfloat16" in each.operands for each in emitted):
        yield (
            f"{gpu.name} has no bfloat16: products of it are computed in float32 there and move twice the bytes; use "
            f"mixed_float16."
        )


def _report_text(report: GPUReport) -> str:
    """The summary, and tables of the products and of the largest kernels."""
    many = f", {report.devices} devices (figures of one)" if report.devices > 1 else ""
    policy = f", {report.policy}" if report.policy else ""
    lines = [f"Compiled for {report.gpu}{many}, jax {report.jax_version}{policy}"]
    lines += report.notes
    lines += [f"  {name:18s}  {value}" for name, value in _summary(report)]
    for title, rows in (("16-bit sums", _sums(report)), ("Copies", _copies(report))):
        lines += ["", f"{title}:", *(f"  {row}" for row in rows)] if rows else []
    if report.unknown_loops:
        loops = count(report.unknown_loops, "loop")
        lines += ["", f"The compiler does not know the length of {loops}, counted as one iteration each."]
    if report.products:
        lines += ["", _product_table(report)]
    return "\n".join([*lines, "", "What moves most:", _kernel_table(report, _MOST_KERNELS)])


def _summary(report: GPUReport) -> Iterator[tuple[str, str]]:
    memory = report.memory
    yield "memory moved", f"{megabytes(report.bytes)} by {count(report.launches, 'launch', 'launches')}"
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
        yield "collectives", _collective_bytes(report)


def _collective_bytes(report: GPUReport) -> str:
    """Bytes by operation and dtype."""
    found: Counter[str] = Counter()
    for each in report.collectives:
        found[f"{each.operation} in {', '.join(dict.fromkeys(each.dtypes))}"] += each.bytes * each.times
    return "; ".join(f"{name}, {megabytes(number)}" for name, number in found.items()) or "none"


def _sums(report: GPUReport) -> list[str]:
    return [
        f"{each.kind} {each.result}"
        + "".join(f", {at}" for at in (_scope_text(each.scope), short_source(each.source)) if at)
        for each in report.sixteen_bit_sums
    ]


def _copies(report: GPUReport) -> list[str]:
    rows = [f"{megabytes(copy.bytes)}, {copy.shape}: {copy.cause}" for copy in report.copies[:_MOST_COPIES]]
    rest = report.copies[_MOST_COPIES:]
    if rest:
        rows.append(f"{megabytes(sum(copy.bytes for copy in rest))} in {len(rest)} more")
    return rows


def _product_table(report: GPUReport) -> str:
    """A line for each kind of product and dtypes, with their number and FLOPs."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    number: Counter[tuple[str, str, str, str]] = Counter()
    for each in report.products:
        key = (each.kind, " x ".join(each.operands[:2]), each.result, UNITS[each.unit])
        found[key] += each.flops * each.times
        number[key] += each.times
    total = max(report.flops, 1)  # the FLOPs of an attention may be unknown
    rows = []
    for key, flops in found.most_common():
        kind, operands, result, unit = key
        rows.append((kind, operands, result, str(number[key]), f"{flops / 1e9:.4g}", f"{flops / total:.1%}", unit))
    return columns(("product", "operands", "result", "runs", "GFLOP", "share", "on"), rows)


def _scope_text(scope: str) -> str:
    """The scope path of an operation without transforms and without the jitted function around it."""
    return plain_scope(scope.partition("/")[2] if scope.startswith("jit(") else scope)


def _kernel_table(report: GPUReport, most: int | None) -> str:
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
            ("bwd " if "transpose(" in kernel.scope else "") + _scope_text(kernel.scope),
            kernel.source,
        )
        for kernel in largest
    ]
    return columns(("kernel", "read", "written", "runs", "share", "dtypes", "of", "source"), rows)
