"""What is known of each GPU: its description for the compiler, its memory bandwidth and its arithmetic rates.

Decides which GPUs have a name, the peak rate of each arithmetic, and which arithmetic multiplies operands of given
dtypes. Does not compile; see `_compile.py`.

References: NVIDIA's data sheets of the T4, A10, A100 (SXM, 80 GB), RTX A6000, L4, L40S, H100 and H200 (SXM), HGX B200,
GB200 NVL72 (a GPU of it) and RTX PRO 6000 Blackwell, and the white paper of Ada for the RTX 4090: dense rates
with accumulation in float32. The rest of a description is that of XLA's own specifications, or of `deviceQuery`.
"""

import dataclasses
import re
from collections import Counter
from typing import Any, NamedTuple

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

# The first compute capability that CUDA 13 makes kernels for, and the first with TF32 and bfloat16, with float8, and
# with float8 in kernels of Triton's.
_COMPILED_FOR = (7, 5)
_TF32 = (8, 0)
_FLOAT8 = (8, 9)
_FLOAT8_IN_TRITON = (12, 0)


@dataclasses.dataclass(frozen=True)
class GPU:
    """A GPU as a compiler and a roofline see it.

    Attributes:
      name: what it is called.
      target: its description, the text of XLA's `GpuTargetConfigProto`.
      bandwidth: of its memory, bytes per second.
      rates: `(arithmetic, FLOP per second)` at peak, dense, for each of `UNITS`.
      capability: its compute capability, `(9, 0)` for Hopper.
    """

    name: str
    target: str
    bandwidth: float
    rates: tuple[tuple[str, float], ...]
    capability: tuple[int, int]

    def rate(self, unit: str) -> float:
        """FLOP per second in one of `UNITS`."""
        return dict(self.rates)[unit]

    def ridge(self, unit: str) -> float:
        """FLOP per byte above which arithmetic, not memory, is the limit."""
        return self.rate(unit) / self.bandwidth

    @property
    def has_bfloat16(self) -> bool:
        """Whether it multiplies bfloat16; where not, XLA computes in float32 and moves twice the bytes."""
        return self.capability >= _TF32

    @property
    def is_compiled_for(self) -> bool:
        """Whether the CUDA 13 compiler makes kernels for it: for Turing and newer."""
        return self.capability >= _COMPILED_FOR

    def unit(self, dtypes: Any, is_strict: bool, by_triton: bool = False) -> str:
        """Which of `UNITS` it multiplies operands of these dtypes in; arguments as of `product_unit`.

        `by_triton`: in a kernel of Triton's, which converts float8 to float16 where it is not tuned.
        """
        unit = product_unit(dtypes, is_strict)
        if unit == "tf32" and self.capability < _TF32:
            return "float32"
        if unit == "16 bits" and not self.has_bfloat16 and any(re.match("bf16|bfloat16", name) for name in dtypes):
            return "float32"
        first = _FLOAT8_IN_TRITON if by_triton else _FLOAT8
        if unit == "8 bits" and self.capability < first and any(re.match("f8|float8", name) for name in dtypes):
            return "16 bits"
        return unit


def gpus() -> tuple[str, ...]:
    """The names of GPUs that `gpu_report` and `tensor_core_report` take; others can be given by a description.

    >>> "L40S" in gpus()
    True
    """
    return tuple(_NAMED)


def get_gpu(gpu: str) -> GPU:
    """Returns the GPU of a name, or of a target description.

    The rates of the named ones are the data sheets'; those of a description follow from its cores, its clock and its
    compute capability.

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
    name = re.sub(r"NVIDIA|GEFORCE|TESLA|[\s_-]", "", gpu.upper())
    known = {re.sub(r"\s", "", each): each for each in _NAMED}
    if name in _TOO_OLD:
        raise ValueError(
            f"`gpu`: there are no figures for Volta and older, such as {gpu!r}, for which the compiler of CUDA 13 "
            f"makes no kernels; the oldest with a name is the T4."
        )
    if name not in known:
        raise ValueError(
            f"`gpu`: unknown GPU {gpu!r}{did_you_mean(gpu, _NAMED)}; the names are {', '.join(_NAMED)}, and any other "
            f"GPU can be given by the text of its target description (gpu_device_info {{...}}), as XLA has them."
        )
    return _NAMED[known[name]]


_TOO_OLD = frozenset({"P100", "V100", "P4", "P40", "TITANV", "TITANXP"})


class _Generation(NamedTuple):
    """What all GPUs of one compute capability share.

    Attributes:
      fpus: float32 units of a multiprocessor.
      per_clock: FLOP per clock and multiprocessor, dense, in 16 bits with accumulation in float32: the data sheets'
        rates divided by clock and multiprocessors. Of consumer cards since 8.6 it is half.
      float64: the rate of float64 as a share of float32's.
      shared, shared_optin: memory shared by a multiprocessor, and what one block may use of it.
      threads: that a multiprocessor holds.
    """

    fpus: int
    per_clock: int
    float64: float
    shared: int
    shared_optin: int
    threads: int


_GENERATIONS = {
    (7, 0): _Generation(64, 1024, 1 / 2, 98304, 98304, 2048),
    (7, 5): _Generation(64, 1024, 1 / 32, 65536, 65536, 1024),
    (8, 0): _Generation(64, 2048, 1.0, 167936, 166912, 2048),
    (8, 6): _Generation(128, 1024, 1 / 64, 102400, 101376, 1536),
    (8, 9): _Generation(128, 1024, 1 / 64, 102400, 101376, 1536),
    (9, 0): _Generation(128, 4096, 1.0, 233472, 232448, 2048),
    (10, 0): _Generation(128, 8192, 1 / 2, 233472, 232448, 2048),
    (12, 0): _Generation(128, 1024, 1 / 64, 102400, 101376, 1536),
}


def _generation(capability: tuple[int, int]) -> _Generation:
    """Of a capability, or of the newest before it."""
    return _GENERATIONS[max((known for known in _GENERATIONS if known <= capability), default=min(_GENERATIONS))]


def _gpu(
    name: str,
    capability: tuple[int, int],
    rates: tuple[float, ...],
    *,
    cores: int,
    clock: float,
    bandwidth: int,
    memory: int,
    cache: int,
) -> GPU:
    """A named GPU.

    Args:
      rates: in TFLOP/s for each of `UNITS`.
      cores: streaming multiprocessors.
      clock: in GHz, boosted.
      bandwidth, memory, cache: of device memory in bytes a second, its size and that of the L2 cache in bytes.
    """
    major, minor = capability
    generation = _generation(capability)
    # Since Hopper there are instructions that only the very same generation has.
    feature = "feature_extension: ACCELERATED_FEATURES" if capability >= (9, 0) else ""
    # XLA's 8-bit rewriter asks for the CUDA runtime's version, fused attention for cuDNN's.
    target = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {generation.shared} threads_per_core_limit: {generation.threads}
  core_count: {cores} fpus_per_core: {generation.fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} shared_memory_per_block_optin: {generation.shared_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation" thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0" cub_version: "3.1.2"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""
    named = tuple((unit, rate * 1e12) for unit, rate in zip(UNITS, rates, strict=True))
    return GPU(name, target, float(bandwidth), named, capability)


_HOPPER_RATES = (1979, 990, 495, 67, 67)
_NAMED = {
    "T4": _gpu(
        "Tesla T4",
        (7, 5),
        (130, 65, 8.1, 8.1, 0.25),
        cores=40,
        clock=1.59,
        bandwidth=320_064_000_000,
        memory=15_655_829_504,
        cache=4_194_304,
    ),
    "A10": _gpu(
        "NVIDIA A10",
        (8, 6),
        (250, 125, 62.5, 31.2, 0.49),
        cores=72,
        clock=1.695,
        bandwidth=600_096_000_000,
        memory=23_609_475_072,
        cache=6_291_456,
    ),
    "A100": _gpu(
        "NVIDIA A100",
        (8, 0),
        (624, 312, 156, 19.5, 19.5),
        cores=108,
        clock=1.41,
        bandwidth=2_039_000_000_000,
        memory=85_100_068_864,
        cache=41_943_040,
    ),
    "A6000": _gpu(
        "NVIDIA RTX A6000",
        (8, 6),
        (309.7, 154.8, 77.4, 38.7, 0.6),
        cores=84,
        clock=1.8,
        bandwidth=768_096_000_000,
        memory=51_041_271_808,
        cache=6_291_456,
    ),
    "L4": _gpu(
        "NVIDIA L4",
        (8, 9),
        (242, 121, 60, 30.3, 0.47),
        cores=58,
        clock=2.04,
        bandwidth=300_096_000_000,
        memory=23_669_571_584,
        cache=50_331_648,
    ),
    "L40S": _gpu(
        "NVIDIA L40S",
        (8, 9),
        (733, 362, 183, 91.6, 1.4),
        cores=142,
        clock=2.52,
        bandwidth=864_000_000_000,
        memory=48_305_799_168,
        cache=100_663_296,
    ),
    "RTX 4090": _gpu(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        (330, 165, 82.6, 82.6, 1.3),
        cores=128,
        clock=2.52,
        bandwidth=1_008_096_000_000,
        memory=25_393_692_672,
        cache=75_497_472,
    ),
    "H100": _gpu(
        "NVIDIA H100",
        (9, 0),
        _HOPPER_RATES,
        cores=132,
        clock=1.98,
        bandwidth=3_350_000_000_000,
        memory=84_942_979_072,
        cache=52_428_800,
    ),
    "H200": _gpu(
        "NVIDIA H200",
        (9, 0),
        _HOPPER_RATES,
        cores=132,
        clock=1.98,
        bandwidth=4_800_000_000_000,
        memory=150_754_820_096,
        cache=52_428_800,
    ),
    "B200": _gpu(
        "NVIDIA B200",
        (10, 0),
        (4500, 2250, 1125, 75, 37),
        cores=148,
        clock=1.965,
        bandwidth=7_672_320_000_000,
        memory=191_514_411_008,
        cache=132_644_864,
    ),
    "GB200": _gpu(
        "NVIDIA GB200",
        (10, 0),
        (5000, 2500, 1250, 80, 40),
        cores=152,
        clock=2.062,
        bandwidth=8_000_000_000_000,
        memory=191_514_411_008,
        cache=132_644_864,
    ),
    "RTX PRO 6000": _gpu(
        "NVIDIA RTX PRO 6000 Blackwell",
        (12, 0),
        (1008, 504, 252, 126, 2),
        cores=188,
        clock=2.6,
        bandwidth=1_792_000_000_000,
        memory=101_000_000_000,
        cache=134_217_728,
    ),
}


def _described(target: str) -> GPU:
    cores, fpus = (_field(target, name) for name in ("core_count", "fpus_per_core"))
    capability = int(_field(target, "major")), int(_field(target, "minor", 0))
    bandwidth, clock = _field(target, "memory_bandwidth"), _field(target, "clock_rate_ghz") * 1e9
    generation = _generation(capability)
    sixteen = cores * clock * generation.per_clock
    float32 = cores * clock * 2 * fpus  # a fused multiply-add is two FLOPs
    name = re.search(r'device_description_str: *"([^"]*)"', target)
    tf32 = sixteen / 2 if capability >= _TF32 else float32
    rates = (2 * sixteen, sixteen, tf32, float32, float32 * generation.float64)
    pairs = tuple(zip(UNITS, rates, strict=True))
    return GPU(name.group(1) if name else "a GPU", target, bandwidth, pairs, capability)


def _field(target: str, name: str, default: float | None = None) -> float:
    # Versions have a `major` and a `minor` too.
    inside = target.partition("cuda_compute_capability")[2].partition("}")[0] if name in ("major", "minor") else target
    found = re.search(rf"\b{name}: *([0-9.]+)", inside)
    if found:
        return float(found.group(1))
    if default is not None:
        return default
    raise ValueError(
        f"`gpu`: the target description has no {name}; it must say core_count, fpus_per_core, memory_bandwidth, "
        f"clock_rate_ghz and cuda_compute_capability {{ major: ... }}."
    )


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


class WithProducts:
    """What reports say of their `products`, which have `flops`, `times` and `unit`; loops are multiplied out."""

    products: Any  # a tuple, of each report's own kind

    @property
    def flops(self) -> int:
        """FLOPs of all products."""
        return sum(product.flops * product.times for product in self.products)

    @property
    def unit_flops(self) -> dict[str, int]:
        """FLOPs by what multiplies: `8 bits`, `16 bits`, `tf32`, `float32`, `float64`."""
        found: Counter[str] = Counter()
        for product in self.products:
            found[product.unit] += product.flops * product.times
        return {unit: found[unit] for unit in UNITS if found[unit]}
