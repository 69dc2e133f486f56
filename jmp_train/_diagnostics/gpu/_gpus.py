"""What is known of each GPU: its description for the compiler, its memory bandwidth and its arithmetic rates.

Decides which GPUs have a name, the peak rate of each arithmetic, and which arithmetic multiplies operands of given
dtypes. Does not compile; see `_compile.py`.

Reference: NVIDIA's data sheets of the A100, H100 and H200, SXM versions, dense rates.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..._dtypes import did_you_mean

UNITS = {
    "8 bits": "Tensor Cores in 8 bits",
    "16 bits": "Tensor Cores in 16 bits",
    "tf32": "Tensor Cores in TF32, half the rate of 16 bits",
    "float32": "no Tensor Cores: strict float32",
    "float64": "Tensor Cores in float64, no faster than float32 without",
}
"""The arithmetics that a product can run in, fastest first."""

NARROW_UNITS = ("8 bits", "16 bits")


@dataclasses.dataclass(frozen=True)
class GPU:
    """A GPU as a compiler and a roofline see it.

    Attributes:
      name: what it is called.
      target: its description, the text of XLA's `GpuTargetConfigProto`.
      bandwidth: of its memory, bytes per second.
      rates: `(arithmetic, FLOP per second)` at peak, dense, for each of `UNITS`.
    """

    name: str
    target: str
    bandwidth: float
    rates: tuple[tuple[str, float], ...]

    def rate(self, unit: str) -> float:
        """FLOP per second in one of `UNITS`."""
        return dict(self.rates)[unit]

    def ridge(self, unit: str) -> float:
        """FLOP per byte above which arithmetic, not memory, is the limit."""
        return self.rate(unit) / self.bandwidth


def get_gpu(gpu: str) -> GPU:
    """Returns the GPU of a name, or of a target description.

    The rates of `A100`, `H100` and `H200` are the data sheets' (SXM, dense); those of a description follow from its
    cores, its clock and its compute capability.

    Raises:
      ValueError: an unknown name, or a description without what is needed.
      TypeError: no text.

    >>> get_gpu("H200").ridge("16 bits")
    206.25
    """
    if not isinstance(gpu, str):
        raise TypeError(f"`gpu` must be a name such as 'H200' or the text of a target description, got {gpu!r}.")
    if "gpu_device_info" in gpu:
        return _described(gpu)
    if gpu.upper() not in _NAMED:
        raise ValueError(
            f"`gpu`: unknown GPU {gpu!r}{did_you_mean(gpu, _NAMED)}; the names are {', '.join(_NAMED)}, and any other "
            f"GPU can be given by the text of its target description (gpu_device_info {{...}}), as XLA has them."
        )
    return _NAMED[gpu.upper()]


def _target(name: str, specific: str) -> str:
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  {specific}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


_HOPPER = """shared_memory_per_core: 233472 core_count: 132 fpus_per_core: 128 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }"""
_AMPERE = """shared_memory_per_core: 167936 core_count: 108 fpus_per_core: 64 l2_cache_size: 41943040
  clock_rate_ghz: 1.41 shared_memory_per_block_optin: 166912 cuda_compute_capability { major: 8 minor: 0 }"""


def _rates(*teraflops: float) -> tuple[tuple[str, float], ...]:
    return tuple((unit, rate * 1e12) for unit, rate in zip(UNITS, teraflops, strict=True))


_HOPPER_RATES = _rates(1979, 990, 495, 67, 67)
_NAMED = {
    "A100": GPU(
        "NVIDIA A100",
        _target("NVIDIA A100", _AMPERE + " memory_bandwidth: 2039000000000 device_memory_size: 85100068864"),
        2.039e12,
        _rates(624, 312, 156, 19.5, 19.5),
    ),
    "H100": GPU(
        "NVIDIA H100",
        _target("NVIDIA H100", _HOPPER + " memory_bandwidth: 3350000000000 device_memory_size: 84942979072"),
        3.35e12,
        _HOPPER_RATES,
    ),
    "H200": GPU(
        "NVIDIA H200",
        _target("NVIDIA H200", _HOPPER + " memory_bandwidth: 4800000000000 device_memory_size: 150754820096"),
        4.8e12,
        _HOPPER_RATES,
    ),
}

# FLOP per clock and core of the data centre GPU of each major compute capability, dense, in 16 bits.
_PER_CLOCK = {7: 1024, 8: 2048, 9: 4096, 10: 8192}


def _described(target: str) -> GPU:
    cores, fpus, capability = (_field(target, name) for name in ("core_count", "fpus_per_core", "major"))
    bandwidth, clock = _field(target, "memory_bandwidth"), _field(target, "clock_rate_ghz") * 1e9
    generation = max((known for known in _PER_CLOCK if known <= capability), default=min(_PER_CLOCK))
    sixteen = cores * clock * _PER_CLOCK[generation]
    float32 = cores * clock * 2 * fpus  # a fused multiply-add is two FLOPs
    name = re.search(r'device_description_str: *"([^"]*)"', target)
    rates = (2 * sixteen, sixteen, sixteen / 2, float32, float32)  # in the ratios of the A100 and the H100
    return GPU(name.group(1) if name else "a GPU", target, bandwidth, tuple(zip(UNITS, rates, strict=True)))


def _field(target: str, name: str) -> float:
    # dnn_version_info, cuDNN's version, has a `major` too.
    inside = target.partition("cuda_compute_capability")[2] if name == "major" else target
    found = re.search(rf"\b{name}: *([0-9.]+)", inside)
    if not found:
        raise ValueError(
            f"`gpu`: the target description has no {name}; it must say core_count, fpus_per_core, memory_bandwidth, "
            f"clock_rate_ghz and cuda_compute_capability {{ major: ... }}."
        )
    return float(found.group(1))


def product_unit(dtypes: Any, is_strict: bool) -> str:
    """Which of `UNITS` multiplies operands of these dtypes, given as NumPy's or XLA's names.

    Args:
      dtypes: names of the operands' dtypes; the widest decides.
      is_strict: whether float32 operands must be multiplied as float32; otherwise the GPU rounds them to TF32.

    >>> product_unit(["float16", "float16"], False), product_unit(["f32", "bf16"], False)
    ('16 bits', 'tf32')
    """
    # The first number in a name is its width: float16, bf16, f8e4m3fn, s8. Without one it is a `pred` or a `bool`.
    bits = max(int(found.group(1)) if (found := re.search(r"(\d+)", name)) else 8 for name in dtypes)
    if any(name.startswith(("c", "complex")) for name in dtypes):
        bits //= 2  # a complex number is two floating ones
    if any(re.match(r"(u?int|[su])\d", name) for name in dtypes) and bits > 8:
        return "float32"  # integers wider than 8 bits have no matrix unit
    if bits >= 64:
        return "float64"
    if bits == 32:
        return "float32" if is_strict else "tf32"
    return "16 bits" if bits == 16 else "8 bits"


def flops_by_unit(products: Iterable[Any], units: Iterable[str]) -> dict[str, int]:
    """FLOPs of products (with `unit`, `flops`, `times`), loops multiplied out, by unit in the order of `units`."""
    found: Counter[str] = Counter()
    for product in products:
        found[product.unit] += product.flops * product.times
    return {unit: found[unit] for unit in units if found[unit]}
