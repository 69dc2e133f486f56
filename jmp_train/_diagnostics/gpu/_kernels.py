"""The kernels of a compiled module, and the bytes that each one moves.

Decides what is a kernel, how often it runs and which bytes it reads and writes. Does not decide which kernels multiply
matrices (`_compiled_products.py`), nor which could be spared or lose accuracy (`_findings.py`). Bytes are counted
without a cache: what a kernel reads, it reads from memory.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from ._hlo import Instruction, Module, dtypes_of, nbytes, parse

# Opcodes that run other computations: their kernels are those inside.
_CONTROL_FLOW = ("while", "call", "conditional")
_CALLED = re.compile(r"(?:body|to_apply|true_computation|false_computation|called_computations=\{)=?%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# These name buffers and numbers of devices; nothing is launched for them.
_NOT_A_KERNEL = {
    "parameter", "bitcast", "tuple", "get-tuple-element", "constant", "after-all", "partition-id", "replica-id",
}  # fmt: skip
_LIBRARY_CALL = re.compile(r'custom_call_target="__cu(?:blas|dnn)')
# What reads only a slice of its first operand, as large as its result.
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""What writes a slice of its first operand, and which operand holds the new values."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a compiled program.

    Attributes:
      name: its name in the module.
      opcode: what it is: `fusion`, `custom-call`, `copy`, `all-reduce`, ...
      read, written: bytes of one run.
      times: how often it runs: the product of the lengths of the loops around it.
      reads, writes: the dtypes of its operands and results, as XLA names them.
      scope: the operation it was made of, as JAX names it.
      source: `file:line (function)` of that.
      line: its line of the module.
    """

    name: str
    opcode: str
    read: int
    written: int
    times: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    scope: str
    source: str
    line: str

    @property
    def bytes(self) -> int:
        """Bytes of all its runs."""
        return (self.read + self.written) * self.times


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """An instruction that runs, the shapes of its computation by instruction name, and how often it runs."""

    instruction: Instruction
    shapes: Mapping[str, str]
    times: int

    def operand_dtypes(self) -> tuple[str, ...]:
        shapes = (self.shapes.get(name, "") for name in self.instruction.operands)
        return tuple(dtype for shape in shapes for dtype in dtypes_of(shape))


def launches(module: Module) -> Iterator[Launch]:
    """Everything that one call runs; both branches of a conditional, and loops of unknown length once."""

    def visit(name: str, times: int) -> Iterator[Launch]:
        body = module.computations[name]
        shapes = {instruction.name: instruction.shape for instruction in body}
        for instruction in body:
            if instruction.opcode in _CONTROL_FLOW:
                runs = trip_count(instruction) or 1
                for called in _called(instruction.line):
                    yield from visit(called, times * runs)
            # The second half of an asynchronous pair waits: what it moves is counted with the first half.
            elif instruction.opcode not in _NOT_A_KERNEL and not instruction.opcode.endswith("-done"):
                yield Launch(instruction, shapes, times)

    return visit(module.entry, 1)


def _called(line: str) -> list[str]:
    branches = _BRANCHES.search(line)
    return re.findall(r"%([\w.\-]+)", branches.group(1)) if branches else _CALLED.findall(line)


def trip_count(loop: Instruction) -> int | None:
    """How often a loop runs, if the compiler knows; `None` of what is no loop, too."""
    # XLA's loop analysis leaves it in `backend_config`: scans and loops with constant bounds have it.
    found = re.search(r"known_trip_count[^0-9]*([0-9]+)", loop.line)
    return int(found.group(1)) if found else None


def unknown_loops(text: str) -> int:
    """How many loops have a length that the compiler does not know: they count as one iteration."""
    loops = (each for each in parse(text).instructions() if each.opcode == "while")
    return sum(trip_count(loop) is None for loop in loops)


def kernels(text: str) -> list[Kernel]:
    """Every kernel of one call of a module."""
    module = parse(text)
    return [_kernel(module, launch) for launch in launches(module)]


def _kernel(module: Module, launch: Launch) -> Kernel:
    instruction = launch.instruction
    read, written = _bytes(module, launch)
    return Kernel(
        name=instruction.name,
        opcode=instruction.opcode,
        read=read,
        written=written,
        times=launch.times,
        reads=tuple(dict.fromkeys(launch.operand_dtypes())),
        writes=tuple(dict.fromkeys(dtypes_of(instruction.result))),
        scope=instruction.scope,
        source=module.source_of(instruction),
        line=instruction.line,
    )


def traffic(text: str) -> int:
    """Bytes that the kernels of one call read and write, loops multiplied out."""
    return sum(kernel.bytes for kernel in kernels(text))


def _bytes(module: Module, launch: Launch) -> tuple[int, int]:
    """Bytes read and written by one run. Of an array that is sliced or updated in place, only the slice counts."""
    instruction, shapes = launch.instruction, launch.shapes
    body = module.called(instruction)
    if not body:
        # The instruction by itself, as if it were the body of a fusion.
        inner, names = [instruction], list(instruction.operands)
        sizes = {name: nbytes(shapes.get(name, "")) for name in names} | {instruction.name: nbytes(instruction.result)}
    else:
        inner, sizes = body, {each.name: nbytes(each.shape) for each in body}
        numbered = {each.parameter: each.name for each in body if each.parameter is not None}
        names = [numbered[number] for number in sorted(numbered)]
    # An operand given twice is read once.
    operands = dict(zip(instruction.operands, names, strict=False))
    read = sum(_bytes_read(inner, name, sizes) for name in operands.values())
    written = nbytes(instruction.result) - _workspace(instruction)
    for each in inner:
        update = _IN_PLACE.get(each.opcode)
        if update is not None and each.operands[0] in names and sizes[each.name] <= written:
            written += min(_operand_bytes(each, update, sizes), sizes[each.name]) - sizes[each.name]
    return read, written


def _workspace(instruction: Instruction) -> int:
    """Bytes that a call of cuBLAS or cuDNN is given to work in: how much of them it writes is not known."""
    shapes = re.findall(r"\w+\[[\d,]*\]", instruction.result)
    last = shapes[-1] if len(shapes) > 1 else ""
    scratch = _LIBRARY_CALL.search(instruction.line) and re.fullmatch(r"[su]8\[\d+\]", last)
    return nbytes(last) if scratch else 0


def _operand_bytes(instruction: Instruction, position: int, sizes: Mapping[str, int]) -> int:
    return sizes.get(instruction.operands[position], 0)


def _bytes_read(body: Sequence[Instruction], name: str, sizes: Mapping[str, int]) -> int:
    """Bytes that a computation reads of one operand: only slices of it, if every use takes a slice."""
    total = 0
    for user in (each for each in body if name in each.operands):
        is_first = user.operands[0] == name and name not in user.operands[1:]
        if is_first and user.opcode in _SLICES:
            total += sizes[user.name]
        elif is_first and user.opcode in _IN_PLACE:
            # A scatter adds to what it overwrites; dynamic-update-slice reads nothing of its first operand.
            total += _operand_bytes(user, 2, sizes) if user.opcode == "scatter" else 0
        else:
            return sizes[name]
    return min(total, sizes[name])
