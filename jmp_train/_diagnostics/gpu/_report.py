"""`GPUReport`: what `gpu_report` returns. Values first, text second.

Decides how a compiled program is summed up. Does not decide what is in it; see `_gpu_report.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..._text import as_lists
from ._compare import Comparison, compare
from ._compiled_products import CompiledProduct
from ._copies import Copy
from ._gpus import GPU, NARROW_UNITS, flops_by_unit
from ._kernels import Kernel
from ._text import kernel_table, report_text


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one GPU holds.

    Attributes:
      arguments, results: of the call.
      donated: the part of the results that stands where arguments did.
      temporary: everything between, at its peak.
    """

    arguments: int
    results: int
    donated: int
    temporary: int

    @property
    def peak(self) -> int:
        """Arguments, results and temporary memory together, what is donated counted once."""
        return self.arguments + self.results - self.donated + self.temporary


@dataclasses.dataclass(frozen=True, slots=True)
class NarrowSum:
    """A sum that accumulates in 16 bits: what it is, its result as XLA writes it (or its dtype), and where."""

    kind: str
    result: str
    scope: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """An operation across devices: the dtypes and bytes of one run's result, how often it runs, and where."""

    operation: str
    dtypes: tuple[str, ...]
    bytes: int
    times: int
    scope: str
    source: str


@dataclasses.dataclass(frozen=True)
class GPUReport:
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
      products: every dot and convolution.
      collectives: what crosses devices.
      sixteen_bit_sums: sums that accumulate in float16 or bfloat16, those that loops carry included.
      copies: buffers that are copied, with the likely cause.
      unused_donations: donated arguments that fit no result, by shape: their memory is at most used for a while.
      unknown_loops: how many loops count as one iteration, for the compiler does not know their length.
      memory: what it holds at its peak.
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

    @property
    def bytes(self) -> int:
        """Bytes that one call reads and writes, loops multiplied out."""
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def launches(self) -> int:
        """Kernels that one call starts, loops multiplied out."""
        return sum(kernel.times for kernel in self.kernels)

    @property
    def flops(self) -> int:
        """FLOPs of all dots and convolutions, loops multiplied out."""
        return sum(product.flops * product.times for product in self.products)

    @property
    def unit_flops(self) -> dict[str, int]:
        """FLOPs by what multiplies: `8 bits`, `16 bits`, `tf32`, `float32`, `float64`."""
        return flops_by_unit(self.products, (unit for unit, _ in self.rates))

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
        gpu = GPU(self.gpu, "", self.bandwidth, self.rates)
        seconds = {kernel.name: kernel.bytes / gpu.bandwidth for kernel in self.kernels}
        arithmetic = dict.fromkeys(seconds, 0.0)
        for product in self.products:
            arithmetic[product.kernel] += product.flops * product.times / gpu.rate(product.unit)
        return sum(max(least, arithmetic[name]) for name, least in seconds.items())

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as dictionaries, lists, strings and numbers, the sums of the properties included."""
        names = ("bytes", "launches", "flops", "unit_flops", "tensor_core_share", "least_seconds")
        values = dataclasses.asdict(self)
        for row in (*values["kernels"], *values["products"]):
            del row["line"]  # the module's text is no report
        values["rates"] = dict(self.rates)
        values["memory"]["peak"] = self.memory.peak
        return {name: getattr(self, name) for name in names} | as_lists(values)

    def compare(self, other: GPUReport, names: tuple[str, str] | None = None) -> Comparison:
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
        return compare(names or default, self.figures(), other.figures())

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
        return kernel_table(self, most)

    def __str__(self) -> str:
        return report_text(self)
