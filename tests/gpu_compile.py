"""Compiles a JAX function for an NVIDIA GPU on a machine that has none, and reads the optimized module.

    text = gpu_module(step, state, batch, donate_argnums=0)
    traffic(text)            bytes that all kernels of one step read and write
    copies(text)             buffers copied because donation did not match
    sixteen_bit_sums(text)   sums accumulated in float16 or bfloat16
    wide_dots(text)          matrix products of float32 operands: no Tensor Cores at full speed
    wide_convolutions(text)  the same for convolutions
    sixteen_bit_carries(fn)(*args)   sums that a loop carries in 16 bits: the module no longer shows them

Needs `pip install -e ".[gpu-report]"` (no CUDA libraries, no driver) and a few seconds per function. The figures are
deterministic and comparable to the byte. They are not times: autotuning is off, so that nothing asks for a GPU, and a
kernel's reads are counted without a cache. Checked with jax 0.10.2, 0.11.2 and 0.12.0; `test_gpu_compile.py` plants
every fault that is looked for here.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from loop_carries import sixteen_bit_carries as sixteen_bit_carries

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H200"
"""

ITEMSIZE = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|[a-z0-9]+\[[^\]]*\](?:\{[^}]*\})?) ([\w\-]+)\((.*)$")
CALLED = re.compile(
    r"(?:body|to_apply|branch_computations=\{|true_computation|false_computation|called_computations=\{)=?%([\w.\-]+)"
)
NOT_A_KERNEL = {
    "parameter", "bitcast", "tuple", "get-tuple-element", "constant", "after-all", "partition-id", "replica-id",
}  # fmt: skip
SUMMING = {
    "reduce", "reduce-window", "scatter", "all-reduce", "all-reduce-start", "reduce-scatter",
}  # fmt: skip


class Instruction(NamedTuple):
    """One line of a module: its name, the text of its shape, its opcode, and the names of its operands."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str


class Kernel(NamedTuple):
    """One launch. `read` and `written` are bytes; `times` is the product of the trip counts of the enclosing loops."""

    name: str
    opcode: str
    read: int
    written: int
    line: str
    times: int


def gpu_mesh(devices: int = 1, target: str = H200, axis: str = "data") -> Mesh:
    """A mesh of `devices` GPUs that are described, not present."""
    try:
        topology = topologies.get_topology_desc("", "cuda", target_config=target, topology=f"1x1x{devices}")
    except Exception as error:
        raise RuntimeError(
            f"No GPU compiler for jax {jax.__version__}. It comes with: pip install -e '.[gpu-report]'"
        ) from error
    return Mesh(np.array(topology.devices), (axis,))


def compile_for_gpu(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    specs: Sequence[PartitionSpec] | None = None,
    **jit_options: Any,
) -> jax.stages.Compiled:
    """Compiles `jax.jit(fn, **jit_options)` for `args`, which may be arrays or `jax.ShapeDtypeStruct`s.

    `specs`, one PartitionSpec per argument, shards over `mesh`; by default everything sits on one GPU.
    """
    mesh = gpu_mesh() if mesh is None else mesh
    specs = [PartitionSpec()] * len(args) if specs is None else specs

    def place(tree: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    placed = [place(arg, spec) for arg, spec in zip(args, specs, strict=True)]
    return jax.jit(fn, **jit_options).lower(*placed).compile(compiler_options={"xla_gpu_autotune_level": "0"})


def gpu_module(fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The text of the optimized module; the arguments are those of `compile_for_gpu`."""
    text = compile_for_gpu(fn, *args, **options).as_text()
    assert text is not None
    return text


def kernels(text: str) -> list[Kernel]:
    """Every kernel of one call; those in both branches of a conditional, and those in loops whose length the compiler
    does not know, count once."""
    computations, entry = _parse(text)
    rows = []

    def visit(name: str, times: int) -> None:
        shapes = {instruction.name: instruction.shape for instruction in computations[name]}
        for instruction in computations[name]:
            opcode, line = instruction.opcode, instruction.line
            if opcode in ("while", "call", "conditional"):
                trips = re.search(r"known_trip_count[^0-9]*([0-9]+)", line)
                inner = times * int(trips.group(1)) if opcode == "while" and trips else times
                for called in CALLED.findall(line):
                    visit(called, inner)
            elif opcode not in NOT_A_KERNEL:
                read = sum(_nbytes(shapes.get(operand, "")) for operand in set(instruction.operands))
                rows.append(Kernel(instruction.name, opcode, read, _nbytes(instruction.shape), line, times))

    visit(entry, 1)
    return rows


def traffic(text: str) -> int:
    """Bytes that the kernels of one call read and write, loops multiplied out."""
    return sum((kernel.read + kernel.written) * kernel.times for kernel in kernels(text))


def copies(text: str) -> list[Kernel]:
    """Kernels that only copy a buffer, scalars aside: usually a donated argument that matched no output."""
    return [kernel for kernel in kernels(text) if kernel.opcode.startswith("copy") and kernel.read > 64]


def sixteen_bit_sums(text: str) -> list[str]:
    """Lines whose running sum is float16 or bfloat16: reduce, reduce-window, scatter, all-reduce, reduce-scatter.

    Maxima and minima are exact and not listed. Sums that a loop carries are found by `sixteen_bit_carries`.
    """
    computations, _ = _parse(text)
    adders = {name for name, body in computations.items() if any(each.opcode == "add" for each in body)}
    found = []
    for instruction in _instructions(text):
        combines = re.search(r"to_apply=%([\w.\-]+)", instruction.line)
        if instruction.opcode in SUMMING and combines and combines.group(1) in adders:
            if {"f16", "bf16"} & set(_dtypes(instruction.shape)):
                found.append(instruction.line.strip())
    return found


def dots(text: str) -> list[tuple[tuple[str, ...], str]]:
    """(dtypes of the operands, line) of every matrix product: cuBLAS calls, dots in Triton and in other kernels."""
    called = re.compile(r'custom_call_target="[^"]*(?:cublas|gemm|matmul)')
    return list(_products(text, lambda each: each.opcode == "dot" or called.search(each.line)))


def convolutions(text: str) -> list[tuple[tuple[str, ...], str]]:
    """(dtypes of the operands, line) of every convolution."""
    return list(_products(text, lambda each: each.opcode == "convolution" or "__cudnn$conv" in each.line))


def wide_dots(text: str) -> list[str]:
    """Matrix products with a float32 operand."""
    return [line for dtypes, line in dots(text) if "f32" in dtypes]


def wide_convolutions(text: str) -> list[str]:
    """Convolutions with a float32 operand; asking 16-bit ones for a float32 result is enough to get one."""
    return [line for dtypes, line in convolutions(text) if "f32" in dtypes]


def collectives(text: str) -> list[tuple[str, str, str]]:
    """(opcode, dtype, line) of every cross-device operation."""
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    found = []
    for instruction in _instructions(text):
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in names:
            found.append((opcode, _dtypes(instruction.shape)[0], instruction.line.strip()))
    return found


def _products(text: str, wanted: Callable[[Instruction], Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    computations, _ = _parse(text)
    for body in computations.values():
        shapes = {instruction.name: instruction.shape for instruction in body}
        for instruction in filter(wanted, body):
            operands = [_dtypes(shapes[name]) for name in instruction.operands if name in shapes]
            yield tuple(dtype for dtypes in operands for dtype in dtypes), instruction.line.strip()


def _parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of every computation by its name, and the name of the entry."""
    found: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.rstrip().endswith("{") and line.startswith(("%", "ENTRY")):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            current = found.setdefault(name, [])
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := INSTRUCTION.match(line)):
            name, shape, opcode, rest = match.groups()
            current.append(Instruction(name, shape, opcode, _operands(rest), line))
    return found, entry


def _instructions(text: str) -> Iterator[Instruction]:
    for body in _parse(text)[0].values():
        yield from body


def _operands(rest: str) -> tuple[str, ...]:
    depth, end = 1, 0
    while depth and end < len(rest):
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    return tuple(re.findall(r"%([\w.\-]+)", rest[:end]))


def _dtypes(shape: str) -> list[str]:
    return [dtype for dtype, _ in SHAPE.findall(shape) if dtype in ITEMSIZE]


def _nbytes(shape: str) -> int:
    total = 0
    for dtype, dims in SHAPE.findall(shape):
        if dtype in ITEMSIZE:
            total += ITEMSIZE[dtype] * int(np.prod([int(d) for d in dims.split(",") if d], dtype=np.int64))
    return total
