"""Why a compiled module copies a buffer.

Decides the likely cause from the instruction that made the copied value and the result it becomes. Does not decide
which kernels are copies; see `_kernels.py`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from ..._paths import leaf_paths
from ._hlo import Instruction, Module, parse
from ._kernels import Kernel, copies

# The order of dimensions in memory, as in `f32[8,4]{1,0}`.
_LAYOUT = re.compile(r"\]\{([\d,]*)")


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


def explained_copies(text: str, outputs: Any) -> tuple[Copy, ...]:
    """Every copy with its cause, the largest first.

    Args:
      text: the module.
      outputs: the tree of the function's results, for their names.
    """
    module = parse(text)
    found = [
        Copy(kernel.bytes, kernel.times, _shape(kernel), _cause(module, kernel, outputs)) for kernel in copies(text)
    ]
    return tuple(sorted(found, key=lambda copy: -copy.bytes))


def _shape(kernel: Kernel) -> str:
    found = re.search(r" = \(*([a-z0-9]+\[[\d,]*\])", kernel.line)
    return found.group(1) if found else ""


def _cause(module: Module, kernel: Kernel, outputs: Any) -> str:
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
            f"donated buffers go to results of their shape in order. Return each new value where the old one stood."
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
            f"been read by all: donated buffers go to results of their shape in order. Return each new value where "
            f"the old one stood."
        )
    return f"the argument {argument} is not donated, and a loop or an update in place changes its copy. Donate it."


def unused_donors(text: str) -> tuple[str, ...]:
    """The donated arguments that no result is written over, by name and with their shape."""
    module = parse(text)
    found = (_parameter(module.computations[module.entry], number) for number in module.unused_donors)
    return tuple(f"{_argument(each)} {each.shape.partition('{')[0]}" for each in found)


def _parameter(body: Sequence[Instruction], number: int) -> Instruction:
    return next(each for each in body if each.opcode == "parameter" and each.parameter == number)


def _argument(parameter: Instruction) -> str:
    name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', parameter.line)
    return name.group(1).replace("\\", "") if name else parameter.name


def _output_name(outputs: Any, position: int) -> str:
    paths = leaf_paths(outputs)
    if paths == [""]:
        return "the result"
    return f"result {paths[position]}" if position < len(paths) else f"result {position}"
