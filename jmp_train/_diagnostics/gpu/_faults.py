"""What a compiled module should not do: sum in 16 bits, copy buffers; and what crosses devices.

Decides which instructions those are. Does not decide why a buffer is copied; see `_copies.py`.
"""

from __future__ import annotations

from ._hlo import Instruction, dtypes_of, parse
from ._kernels import Kernel, kernels

SIXTEEN_BITS = frozenset({"f16", "bf16"})
_SUMMING = {
    "reduce", "reduce-window", "scatter", "all-reduce", "reduce-scatter",
}  # fmt: skip
_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip


def copies(text: str) -> list[Kernel]:
    """Kernels that only copy a buffer, scalars aside: usually a donated argument that matched no output."""
    return [kernel for kernel in kernels(text) if kernel.opcode.startswith("copy") and kernel.read > 64]


def sixteen_bit_sums(text: str) -> list[str]:
    """Lines whose running sum is float16 or bfloat16: reduce, reduce-window, scatter, all-reduce, reduce-scatter.

    Maxima and minima are exact and not listed. Sums that a loop carries no longer show in a module.
    """
    return [instruction.line for instruction, _ in narrow_sums(text)]


def opcode_of(instruction: Instruction | Kernel) -> str:
    """What an operation is, whether or not it runs beside others."""
    return instruction.opcode.removesuffix("-start")


def narrow_sums(text: str) -> list[tuple[Instruction, Instruction]]:
    """The instructions whose running sum is float16 or bfloat16, each with the addition that it repeats.

    A `reduce-window` of bfloat16 becomes one of float32 whose addition rounds to bfloat16 every time: what counts is
    the addition.
    """
    module = parse(text)
    adders = {name: each for name, body in module.computations.items() for each in body if each.opcode == "add"}
    pairs = [
        (each, adders.get(each.attribute("to_apply").lstrip("%")))
        for each in module.instructions()
        if opcode_of(each) in _SUMMING
    ]
    return [(each, add) for each, add in pairs if add is not None and SIXTEEN_BITS & set(dtypes_of(add.result))]


def collective_kernels(text: str) -> list[tuple[str, Kernel]]:
    """`(operation, kernel)` of what crosses devices."""
    named = ((opcode_of(kernel), kernel) for kernel in kernels(text))
    return [(opcode, kernel) for opcode, kernel in named if opcode in _COLLECTIVES]


def collectives(text: str) -> list[tuple[str, str, str]]:
    """`(operation, dtype, line)` of what crosses devices."""
    return [(opcode, kernel.writes[0], kernel.line) for opcode, kernel in collective_kernels(text)]
