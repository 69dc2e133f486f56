"""Parses the text of a module that XLA has compiled: HLO instructions, computations, donated buffers, source lines.

Decides what an instruction is: name, shape, opcode, operands, and the source line it comes from. Does not decide what
it costs; see `_kernels.py`. The text is the one public form of an optimized module, and has no specification: lines
that do not parse are skipped.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping

ITEMSIZE = {
    "pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3": 1, "f8e3m4": 1,
    "f8e4m3b11fnuz": 1, "f8e4m3fnuz": 1, "f8e5m2fnuz": 1, "f8e8m0fnu": 1,
    "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
"""Bytes of one element of each of XLA's dtypes."""

_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
# A name, a shape (of a tuple, in parentheses), an opcode, and everything after its opening parenthesis.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = (\(.*?\)|[a-z0-9]+\[[^\]]*\](?:\{[^}]*\})?) ([\w\-]+)\((.*)$")
_TABLE_ROW = re.compile(r"^(\d+) (?:\"(.*)\"|\{(.*)\})$")
# `stack_frame_id` of an instruction leads through these tables to a file, a line and a function.
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a module: its name, the text of its shape, its opcode, the names of its operands, and all of it."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    line: str

    def attribute(self, name: str) -> str:
        """What stands after `name=`, empty if nothing does; for a list in braces, what is inside them.

        >>> Instruction("a", "f32[2]", "dot", (), "%a = f32[2] dot(%b), lhs_contracting_dims={1,0}").attribute(
        ...     "lhs_contracting_dims"
        ... )
        '1,0'
        """
        found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|\"([^\"]*)\"|([^,\s}}]+))", self.line)
        return next((group for group in found.groups() if group is not None), "") if found else ""

    @property
    def result(self) -> str:
        """The shape of its result. An asynchronous `-start` has a tuple of its operands, its result and a handle.

        A copy's result comes first, and is in the shape of what is copied.

        >>> Instruction("a", "((f16[8], s32[]), f16[2], u32[])", "fusion-start", (), "").result
        'f16[2]'
        """
        if not self.opcode.endswith("-start") or self.opcode == "all-reduce-start":
            return self.shape
        elements = _elements(self.shape)
        return elements[1] if len(elements) > 1 else self.shape

    @property
    def parameter(self) -> int | None:
        """Which argument of its computation it is, if it is one."""
        found = re.search(r" parameter\((\d+)\)", self.line)
        return int(found.group(1)) if found else None

    @property
    def scope(self) -> str:
        """The operation of the traced program that it was made of, as JAX names it; empty if XLA does not say."""
        return self.attribute("op_name")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A module.

    Attributes:
      computations: the instructions of each computation, by its name.
      entry: the name of the one that is run.
      aliases: `{output: parameter}`, both as numbers: outputs that are written over a donated parameter.
      unused_donors: numbers of donated parameters that no output is written over.
      sources: `file:line (function)` by stack frame.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    aliases: Mapping[int, int]
    unused_donors: tuple[int, ...]
    sources: Mapping[str, str]

    def instructions(self) -> Iterator[Instruction]:
        for body in self.computations.values():
            yield from body

    def called(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The body of a fusion; empty for other instructions."""
        return self.computations.get(instruction.attribute("calls").lstrip("%"), ())

    def source_of(self, instruction: Instruction) -> str:
        """`file:line (function)` of the user's code that it was made of; empty if XLA does not say."""
        return self.sources.get(instruction.attribute("stack_frame_id"), "")


# A report asks for the same text several times: for its kernels, products, sums and copies.
@functools.lru_cache(maxsize=8)
def parse(text: str) -> Module:
    """The module that a text describes."""
    found: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
    entry, current, table = "", None, ""
    for line in text.splitlines():
        if line in tables:
            table = line
        elif table and (row := _TABLE_ROW.match(line)):
            tables[table][row.group(1)] = row.group(2) or row.group(3)
        elif line.rstrip().endswith("{") and line.startswith(("%", "ENTRY")):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            current = found.setdefault(name, [])
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            name, shape, opcode, rest = match.groups()
            current.append(Instruction(name, shape, opcode, _operands(rest), line.strip()))
    computations = {name: tuple(body) for name, body in found.items()}
    aliases, donors = _donations(text.partition("\n")[0])
    return Module(computations, entry, aliases, donors, _sources(tables))


def _operands(rest: str) -> tuple[str, ...]:
    # Up to the matching parenthesis: the attributes after it name computations with % too.
    depth, end = 1, 0
    while depth and end < len(rest):
        depth += {"(": 1, ")": -1}.get(rest[end], 0)
        end += 1
    return tuple(re.findall(r"%([\w.\-]+)", rest[:end]))


def _donations(header: str) -> tuple[dict[int, int], tuple[int, ...]]:
    pairs = re.findall(r"\{(\d*)\}: \((\d+), \{[^}]*\}, (?:may|must)-alias\)", header)
    # `input_output_alias={ {0}: (1, {}, may-alias) }`; of a single result that is no tuple, the number is left out.
    aliases = {int(output or 0): int(parameter) for output, parameter in pairs}
    donors = re.search(r"buffer_donor=\{ (.*?) \}", header)
    numbers = map(int, re.findall(r"\((\d+),", donors.group(1)) if donors else ())
    return aliases, tuple(number for number in numbers if number not in aliases.values())


def _sources(tables: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    def read(row: str) -> dict[str, str]:
        return dict(pair.split("=") for pair in row.split())

    places = {}
    for number, row in tables["FileLocations"].items():
        at = read(row)
        file = os.path.basename(tables["FileNames"].get(at.get("file_name_id", ""), ""))
        function = tables["FunctionNames"].get(at.get("function_name_id", ""), "")
        places[number] = f"{file}:{at.get('line', '?')} ({function})"
    return {
        number: places.get(read(row).get("file_location_id", ""), "") for number, row in tables["StackFrames"].items()
    }


def _elements(shape: str) -> list[str]:
    """The shapes of a tuple's elements, which may be tuples."""
    elements, depth = [""], 0
    for character in shape[1:-1]:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return [element.strip() for element in elements]


def shapes_of(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """`(dtype, dimensions)` of an array, or of every array of a tuple.

    >>> shapes_of("(f16[8,4]{1,0}, u8[0]{0})")
    [('f16', (8, 4)), ('u8', (0,))]
    >>> shapes_of("(f16[8], token[])")  # what a program hands on for the order of its effects has no size
    [('f16', (8,))]
    """
    found = ((dtype, dims) for dtype, dims in _SHAPE.findall(shape) if dtype in ITEMSIZE)
    return [(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found]


def dtypes_of(shape: str) -> list[str]:
    return [dtype for dtype, _ in shapes_of(shape)]


def nbytes(shape: str) -> int:
    """
    >>> nbytes("(f16[8,4]{1,0}, f32[])")
    68
    """
    return sum(ITEMSIZE[dtype] * math.prod(dims) for dtype, dims in shapes_of(shape))
