"""What a report lists of a compiled program: memory, copies, unused donations, collectives, and sums in 16 bits.

Decides the likely cause of a copy, from the instruction that made the copied value and the result it becomes, and which
sums accumulate in 16 bits. Does not decide how many bytes a kernel moves; see `_kernels.py`.
"""

import dataclasses
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ..._explain._emitted import Emitted
from ..._jaxpr import LOOPS
from ..._paths import leaf_paths
from ._hlo import Instruction, Module, dtypes_of, parse
from ._kernels import Kernel, kernels

# The order of dimensions in memory, as in `f32[8,4]{1,0}`.
_LAYOUT = re.compile(r"\]\{([\d,]*)")
_IN_ORDER = "donated buffers go to results of their shape in order. Return each new value where the old one stood."
# The warning of `jax.jit` for donated arguments that fit no result.
_UNUSABLE = re.compile(r"^Some donated buffers were not usable: (.*)\.$", re.M)
_SIXTEEN_BITS = frozenset({"f16", "bf16"})
_REDUCTIONS = frozenset({"reduce", "reduce-window", "scatter", "all-reduce", "reduce-scatter"})
_COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip


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
class Copy:
    """A buffer that is copied.

    Attributes:
      bytes: that its runs read and write.
      times: how often it runs.
      shape: of the buffer, as XLA writes it.
      cause: the likely reason, and what to do about it.
    """

    bytes: int
    times: int
    shape: str
    cause: str


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


def memory_of(compiled: jax.stages.Compiled) -> Memory:
    analysis: Any = compiled.memory_analysis()
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        results=analysis.output_size_in_bytes,
        donated=analysis.alias_size_in_bytes,
        temporary=analysis.temp_size_in_bytes,
    )


def copies(text: str, outputs: Any = None) -> tuple[Copy, ...]:
    """Every copy of a buffer with its likely cause, the largest first; those of at most 64 bytes are left out.

    Args:
      text: the module.
      outputs: the tree of the function's results, for their names; by default they are numbered.
    """
    module = parse(text)
    found = (each for each in kernels(text) if each.opcode.startswith("copy") and each.read > 64)
    rows = [Copy(each.bytes, each.times, _shape(each), _cause(module, each, outputs)) for each in found]
    return tuple(sorted(rows, key=lambda copy: -copy.bytes))


def _shape(kernel: Kernel) -> str:
    found = re.search(r" = \(*([a-z0-9]+\[[\d,]*\])", kernel.line)
    return found.group(1) if found else ""


def _cause(module: Module, kernel: Kernel, outputs: Any) -> str:
    """Why a kernel copies: where it runs, or what made its operand and what becomes of its result."""
    body = next(b for b in module.computations.values() if any(each.name == kernel.name for each in b))
    named = {each.name: each for each in body}
    copy = named[kernel.name]
    if not any(each is copy for each in module.computations[module.entry]):
        return "inside a loop or a branch: a carried value is changed while its old one is still read"
    source = _through_bitcasts(named, copy.operands[0])
    if source is not None and _layout(source) != _layout(copy):
        return f"another memory layout, for what reads it ({source.opcode} of {source.scope or source.name})"
    position = _output_position(body, copy)
    if position is not None:
        return _result_cause(module, body, position, _output_name(outputs, position), source)
    if source is not None and source.opcode == "parameter":
        return _parameter_cause(module, source, outputs)
    return "the compiler keeps a second copy of an intermediate value"


def _through_bitcasts(named: dict[str, Instruction], name: str) -> Instruction | None:
    """The instruction whose buffer a name stands for: bitcasts make no buffer of their own."""
    found = named.get(name)
    while found is not None and found.opcode == "bitcast":
        found = named.get(found.operands[0])
    return found


def _layout(instruction: Instruction) -> str:
    found = _LAYOUT.search(instruction.shape)
    return found.group(1) if found else ""


def _output_position(body: Sequence[Instruction], copy: Instruction) -> int | None:
    """Which result a copy is, if it is one, directly or as a bitcast."""
    names = {copy.name}
    for each in body:
        if each.opcode == "bitcast" and each.operands[0] in names:
            names.add(each.name)
    root = next(each for each in body if each.line.startswith("ROOT"))
    if root.opcode != "tuple":
        return 0 if root.name in names else None
    return next((position for position, name in enumerate(root.operands) if name in names), None)


def _result_cause(
    module: Module, body: Sequence[Instruction], position: int, output: str, source: Instruction | None
) -> str:
    """Why a result is copied into its buffer."""
    if position in module.aliases:
        argument = _argument(_parameter(body, module.aliases[position]))
        return (
            f"{output} is written over the donated argument {argument}, which is still read when it is computed: "
            f"{_IN_ORDER}"
        )
    if source is not None and source.opcode == "parameter":
        return f"{output} is the argument {_argument(source)} as it came in, not donated. Donate it, or leave it out."
    return f"{output} is computed into another buffer first"


def _parameter_cause(module: Module, parameter: Instruction, outputs: Any) -> str:
    """Why an argument is copied."""
    overwritten = [output for output, donated in module.aliases.items() if donated == parameter.parameter]
    argument = _argument(parameter)
    if overwritten:
        return (
            f"the donated argument {argument} is overwritten by {_output_name(outputs, overwritten[0])} before it has "
            f"been read by all: {_IN_ORDER}"
        )
    return f"the argument {argument} is not donated, and a loop or an update in place changes its copy. Donate it."


def unused_donors(text: str) -> tuple[str, ...]:
    """The donated arguments that XLA writes no result over, by name and with their shape."""
    module = parse(text)
    found = (_parameter(module.computations[module.entry], number) for number in module.unused_donors)
    return tuple(f"{_argument(each)} {each.shape.partition('{')[0]}" for each in found)


def _parameter(body: Sequence[Instruction], number: int) -> Instruction:
    return next(each for each in body if each.parameter == number)


def _argument(parameter: Instruction) -> str:
    name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', parameter.line)
    return name.group(1).replace("\\", "") if name else parameter.name


def _output_name(outputs: Any, position: int) -> str:
    paths = leaf_paths(outputs)
    if paths == [""]:
        return "the result"
    return f"result {paths[position]}" if position < len(paths) else f"result {position}"


def unused_donations(raised: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """The shapes of buffers that JAX, by its warnings, did not donate; other warnings are warned of again."""
    unused: list[str] = []
    for each in raised:
        if found := _UNUSABLE.search(str(each.message)):
            unused += re.findall(r"\w+\[[\d,]*\]", found.group(1))
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return tuple(unused)


def collectives(text: str) -> tuple[Collective, ...]:
    """What crosses devices."""
    named = ((_opcode(kernel), kernel) for kernel in kernels(text))
    return tuple(
        Collective(opcode, each.writes, each.written, each.times, each.scope, each.source)
        for opcode, each in named
        if opcode in _COLLECTIVES
    )


def _opcode(instruction: Instruction | Kernel) -> str:
    """The opcode, of an asynchronous operation too: XLA splits `all-reduce` into `all-reduce-start` and `-done`."""
    return instruction.opcode.removesuffix("-start")


def sixteen_bit_sums(text: str) -> tuple[NarrowSum, ...]:
    """The sums that accumulate in float16 or bfloat16: reduce, reduce-window, scatter, all-reduce, reduce-scatter.

    Maxima and minima are exact and not listed. Sums that a loop carries no longer show in a module; `carried_sums` has
    them.
    """
    module, found = parse(text), []
    additions = {name: each for name, body in module.computations.items() for each in body if each.opcode == "add"}
    for each in module.instructions():
        add = additions.get(each.attribute("to_apply").lstrip("%"))
        # A `reduce-window` of bfloat16, as of a running sum, becomes one of float32 whose addition rounds to bfloat16
        # every time: what counts is the dtype of the addition, which has kept its line too.
        if _opcode(each) in _REDUCTIONS and add is not None and _SIXTEEN_BITS & set(dtypes_of(add.result)):
            result = dtypes_of(add.result)[0] + re.findall(r"\[[\d,]*\]", each.result)[0]
            found.append(NarrowSum(_opcode(each), result, each.scope, module.source_of(each) or module.source_of(add)))
    return tuple(found)


def carried_sums(emitted: Iterable[Emitted]) -> tuple[NarrowSum, ...]:
    """The sums that a loop carries from iteration to iteration in float16 or bfloat16.

    In the compiled module they are additions like any other, hence they are read from the jaxpr.
    """
    return tuple(
        NarrowSum(f"{each.primitive} carry", each.sums_in, each.scope, each.source)
        for each in emitted
        if each.primitive in LOOPS and each.sums_in in ("float16", "bfloat16")
    )
