"""`tensor_core_report`: which products of a program Tensor Cores run, and how much faster it can become by them.

Decides which equations are looked at, how the products are summed up and what a person reads of them. Does not decide
what is said of one product; see `_products.py`. Nothing is compiled or run. The speed-up is Amdahl's law,

    speed-up = 1 / ((1 - f) + f / s)

where f is the share of the time in strict float32 that is spent in products which run on Tensor Cores, and s how many
times faster these run there. Times are estimated by a roofline: a product takes the longer of its FLOPs at peak rate
and its bytes at peak bandwidth; everything else is bound by memory, and moves the least bytes possible in float32, as
if all equations between two products were one fusion. That these fusions move half the bytes in 16 bits is not
credited.

Reference: Micikevicius et al., Mixed Precision Training, ICLR 2018; Williams et al., Roofline, CACM 2009.
"""

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ..._autocast import autocast
from ..._autocast.ir import TOP
from ..._explain._operations import Visit, bodies_of, is_floating_dtype, visits
from ..._flops import ATTENTION, PRODUCTS
from ..._jaxpr import FlatJaxpr
from ..._paths import glob_matches
from ..._policy import Policy, get_policy
from ..._sizes import itemsize
from ..._text import as_lists, columns, count, short_source
from ..._values import check_callable
from ..gpu import GPU, NARROW_UNITS, UNITS, WithProducts, abstract_mesh, check_sizes, get_gpu, traced_program
from ._products import Padding, Product, products_of

# These may multiply matrices, which a jaxpr does not show.
_OPAQUE = frozenset(
    {"pallas_call", "ffi_call", "pure_callback", "io_callback", "scaled_matmul_wrapper", "cudnn_fusion"}
)
# Their result is their operand, or fuses with whatever reads it; in float32 there are no casts.
_FREE = frozenset({"reshape", "transpose", "squeeze", "convert_element_type", "copy", "name", "optimization_barrier"})


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Amdahl's law for a program.

    Attributes:
      f: the share of the float32 time that Tensor Cores can take.
      s: how many times faster they run that share.
    """

    f: float
    s: float

    @property
    def speedup(self) -> float:
        """Over strict float32, at best."""
        return 1 / ((1 - self.f) + self.f / self.s)


@dataclasses.dataclass(frozen=True)
class TensorCoreReport(WithProducts):
    """The dots and convolutions of a program: a value to read, print and test.

    `str(report)` sums it up and groups what is slow by its reason; `table()` lists every product; `as_dict()` is ready
    for JSON. FLOPs have the lengths of scans and the devices of a `shard_map` multiplied; every branch counts.

    Attributes:
      gpu: whose rates are reckoned with.
      policy: that of `tensor_core_report`, as text, if it was given one.
      products: every dot and convolution, in the order of the program.
      estimate: by Amdahl's law, how much faster than strict float32 the program can be as it is.
      repaired: the same if every product ran in 16 bits (or 8) and were aligned.
      opaque: primitives that may multiply matrices where this report cannot look.
      uncounted_loops: how many `while` loops hold products; they count as one iteration.
    """

    gpu: str
    policy: str | None
    products: tuple[Product, ...]
    estimate: Estimate
    repaired: Estimate
    opaque: tuple[str, ...]
    uncounted_loops: int

    @property
    def tensor_core_share(self) -> float:
        """The share of `flops` that Tensor Cores run in 16 or 8 bits on aligned sizes; 0 without any FLOPs."""
        fast = sum(product.flops * product.times for product in self.products if product.on_tensor_cores)
        return fast / self.flops if self.flops else 0.0

    @property
    def padding(self) -> tuple[tuple[Padding, float], ...]:
        """What to pad, with the share of `flops` of the products it is in, the largest share first."""
        found: Counter[tuple[int, int]] = Counter()
        first: dict[tuple[int, int], Padding] = {}
        for product in self.products:
            for key in {(each.size, each.padded) for each in product.padding}:
                found[key] += product.flops * product.times
            for each in product.padding:
                first.setdefault((each.size, each.padded), each)
        return tuple((first[key], flops / max(self.flops, 1)) for key, flops in found.most_common())

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as dictionaries, lists, strings and numbers, the sums of the properties included."""
        values = dataclasses.asdict(self)
        for row, product in zip(values["products"], self.products, strict=True):
            row["intensity"] = product.intensity
        for name in ("estimate", "repaired"):
            values[name]["speedup"] = getattr(self, name).speedup
        sums = {name: getattr(self, name) for name in ("flops", "unit_flops", "tensor_core_share")}
        padding = [dataclasses.asdict(each) | {"flop_share": share} for each, share in self.padding]
        return sums | {"padding": padding} | as_lists(values)

    def table(self, scope: str | None = None) -> str:
        """Returns a line for every product, those with the most FLOPs first.

        Args:
          scope: a glob over scope paths; only products that it matches are listed.
        """
        return _product_table(
            self, [each for each in self.products if scope is None or glob_matches(scope, each.scope)]
        )

    def __str__(self) -> str:
        return _report_text(self)


def tensor_core_report(
    fn: Callable[..., Any],
    policy: Policy | str | None = None,
    gpu: str = "H200",
    devices: int | Mapping[str, int] | None = None,
) -> Callable[..., TensorCoreReport]:
    """Returns a function that lists every dot and convolution of `fn` and tells whether Tensor Cores run it well.

    `fn` is traced, not run, and no GPU is needed. Report what you train with, gradient included, so that the products
    of the backward pass are seen:

        tensor_core_report(jmp.value_and_grad(loss_fn, policy))(params, batch, loss_scale=scale)
        tensor_core_report(jax.grad(loss_fn), policy)(params, batch)

    What the compiler makes of it, bytes and kernels included, is in `gpu_report`.

    Args:
      fn: any function of arrays: plain, jitted, under `autocast`, or what `value_and_grad` returned.
      policy: a policy to `autocast` `fn` with first; `None` takes `fn` as it is.
      gpu: whose rates to reckon with, as for `gpu_report`.
      devices: a mesh to trace `fn` in, for `shard_map` without one, as for `gpu_report`; `None` for that of the caller.

    Returns:
      A function of `fn`'s arguments (arrays or `jax.ShapeDtypeStruct`s) that returns a `TensorCoreReport`.

    Raises:
      TypeError: `fn` is not callable, or `gpu` is no text.
      ValueError: `gpu` or `policy` is unknown, or `devices` are none; an argument has a symbolic dimension.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.mean(x @ w)
    >>> report = tensor_core_report(jax.grad(loss), "mixed_float16")(jnp.ones((512, 50257)), jnp.ones((64, 512)))
    >>> print(report.products[0].reason)
    no multiple of 8: pad N 50257 -> 50264
    """
    check_callable("fn", fn, "pass the function whose products are to be listed")
    described = get_gpu(gpu)
    program = fn if policy is None else autocast(fn, policy)
    mesh = None if devices is None else abstract_mesh(devices)

    def report(*args: Any, **kwargs: Any) -> TensorCoreReport:
        check_sizes(args, kwargs)
        with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
            found = list(visits(traced_program(program, args, kwargs), TOP))
        products = tuple(products_of(found, described))
        others = _other_bytes(found)
        return TensorCoreReport(
            gpu=described.name,
            policy=None if policy is None else str(get_policy(policy)),
            products=products,
            estimate=_estimate(products, others, described, repaired=False),
            repaired=_estimate(products, others, described, repaired=True),
            opaque=tuple(dict.fromkeys(visit.node.name for visit in found if visit.node.name in _OPAQUE)),
            uncounted_loops=_uncounted_loops(found),
        )

    return report


def _estimate(products: Sequence[Product], other_bytes: int, gpu: GPU, repaired: bool) -> Estimate:
    """The estimate for a program.

    A product that is misaligned, or a vector's, counts as no faster than in float32: the worst case.

    Args:
      products: all of them.
      other_bytes: what everything else moves in float32.
      gpu: whose rates.
      repaired: whether every product is taken to run in 16 bits (or 8, where it does) and aligned.
    """
    total = other_bytes / gpu.bandwidth  # seconds in strict float32
    before = after = 0.0  # seconds of what Tensor Cores take: in strict float32, and there
    for product in products:
        unit, fast = product.unit, product.on_tensor_cores or product.unit == "tf32"
        wide, moved = _bytes_in_float32(product), product.bytes
        if repaired:
            unit, fast = (unit if unit in NARROW_UNITS else "16 bits"), True
            moved = min(moved, wide // 2)  # 16-bit operands are half of float32's, 8-bit ones less
        slow = product.times * max(product.flops / gpu.rate("float32"), wide / gpu.bandwidth)
        total += slow
        if fast:
            before += slow
            after += product.times * max(product.flops / gpu.rate(unit), moved / gpu.bandwidth)
    return Estimate(before / total, before / after) if before else Estimate(0.0, 1.0)


def _bytes_in_float32(product: Product) -> int:
    return 4 * sum(map(math.prod, product.shapes))


def _other_bytes(found: Sequence[Visit]) -> int:
    """The least bytes that everything but products moves in float32, in all programs, loops multiplied out."""
    times = {visit.program: visit.times for visit in found}
    return sum(_bytes_outside_products(program) * number for program, number in times.items())


def _bytes_outside_products(program: FlatJaxpr) -> int:
    """Bytes of what fusions read from products or as arguments, and of what they write for products or as results."""
    source = list(range(len(program.avals)))
    read: set[int] = set()
    written: set[int] = set()
    computed: set[int] = set()
    for node in program.nodes:
        operands = [source[number] for number in node.ins]
        if node.name in _FREE and len(node.ins) == 1:
            source[node.outs[0]] = operands[0]
        elif node.name in PRODUCTS or node.name in ATTENTION or bodies_of(node):
            written |= computed.intersection(operands)
        else:
            read |= set(operands) - computed
            computed |= set(node.outs)
    written |= computed.intersection(source[number] for number in program.outputs)
    literals = set(program.known) - program.captured
    return sum(_nbytes(program.avals[number]) for number in (*(read - literals), *written))


def _nbytes(aval: Any) -> int:
    """Of a value in strict float32: a 16-bit one would be twice as large there."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    return math.prod(aval.shape) * (max(itemsize(dtype), 4) if is_floating_dtype(dtype) else itemsize(dtype))


def _uncounted_loops(found: Sequence[Visit]) -> int:
    """How many `while` loops hold a product: their length is not in the program."""
    loops = (visit.node.params for visit in found if visit.node.name == "while")
    parts = (itertools.chain(visits(each["cond_jaxpr"], TOP), visits(each["body_jaxpr"], TOP)) for each in loops)
    return sum(any(visit.node.name in PRODUCTS for visit in inside) for inside in parts)


def _report_text(report: TensorCoreReport) -> str:
    """The shares, what to pad, Amdahl's estimate, and what is slow by its reason."""
    policy = f", {report.policy}" if report.policy else ""
    if not report.products:
        return f"No dot and no convolution for the Tensor Cores of {report.gpu}{policy}"
    total = f"{report.flops / 1e9:.4g} GFLOP"
    lines = [f"{count(len(report.products), 'product')}, dots and convolutions, {total}, {report.gpu}{policy}"]
    lines += [f"  {_share(flops, report):>6}  {UNITS[unit]}" for unit, flops in report.unit_flops.items()]
    lines.append(f"  {report.tensor_core_share:6.1%}  on Tensor Cores in 16 or 8 bits with all sizes aligned")
    memory = sum(each.flops * each.times for each in report.products if each.is_memory_bound)
    lines.append(
        f"  {_share(memory, report):>6}  in products bound by memory, which Tensor Cores do not speed up further"
    )
    if report.padding:
        pads = [f"  {each.size} -> {each.padded}  in {share:.1%} of the FLOPs" for each, share in report.padding]
        lines += ["", "Sizes to pad:", *pads]
    lines += ["", *_estimates(report), *_notes(report)]
    slow = list(_slow(report))
    if slow:
        lines += ["", "Not as fast as they could be:", columns(("share", "number", "reason", "first of them"), slow)]
    return "\n".join(lines)


def _share(flops: int, report: TensorCoreReport) -> str:
    return f"{flops / report.flops:.1%}" if report.flops else "0.0%"


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
        yield _share(flops[reason], report), str(len(grouped[reason])), reason, where


def _product_table(report: TensorCoreReport, chosen: Sequence[Product]) -> str:
    """A line for every product, those with the most FLOPs first."""
    header = ("", "primitive", "batch x M x N x K", "dtypes", "runs", "share", "FLOP/B", "scope", "source", "reason")
    rows = [
        (
            "bwd" if each.backward else "fwd",
            each.primitive,
            f"{each.batch} x {each.m} x {each.n} x {each.k}",
            f"{each.dtypes[0]}, {each.dtypes[1]} -> {each.dtypes[2]}",
            str(each.times),
            _share(each.flops * each.times, report),
            f"{each.intensity:.0f}",
            each.scope,
            short_source(each.source),
            each.reason,
        )
        for each in sorted(chosen, key=lambda each: -each.flops * each.times)
    ]
    return columns(header, rows)
