"""What a scan stacks for another scan, as the forward pass of a stack of layers does for its backward pass.

    y ; h = scan { a = dot x w; h:f32 = exp a; ... }        y ; a = scan { a:f16 = dot x w; h:f32 = exp a; ... }
    g = scan { g = mul h ct }  h                       ->   g = scan { h:f32 = remat exp a; g = mul h ct }  a

Whatever the forward iterations leave is written to memory, and what lies inside a GELU, a softmax or a normalisation is
float32. All of it is elementwise in a few values: the layer's input, the results of its dots, the statistics of its
rows. Stacking those and rematerializing the rest in the backward iterations moves fewer bytes, needs less memory and
rounds nothing (Chen et al., "Training deep nets with sublinear memory cost", 2016; the choice is a greedy form of the
cut in Jain et al., "Checkmate", 2020).

Decides which values a scan stacks, by the bytes of an iteration (`analysis/residual_costs.py`): the constants and rows
that the scan is given itself are free to give to its reader, and what is stacked anyway is only read. Does not decide a
dtype: the equations that run again are those of the forward body, so that both sides see the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..._jaxpr import scan_counts
from ..._sizes import size_in_bytes
from ..analysis.residual_costs import ResidualCosts, Sources, fuses
from ..ir import Equation, Op, Program, Use
from .dead_code import computing, remove_dead_code

if TYPE_CHECKING:
    from ..planner import Planner

_CONST, _CARRY, _ROW = range(3)


def scan_residuals(program: Program, planner: Planner) -> Program:
    """The program whose scans stack what others of them rematerialize the rest from, where that is fewer bytes."""
    scans = {i: _Scan.of(e) for i, e in enumerate(program.equations) if e.bodies and e.name == "scan"}
    if len(scans) < 2 or not planner.rules.low_residuals:
        return program
    program = program.replace(avals=[*program.avals])
    readers = program.only_readers()
    for scan in scans.values():
        pairs: dict[int, list[tuple[int, int]]] = {}
        for number, _ in scan.results[scan.carry :]:
            at, operand = _reading_scan(program, readers, number)
            if at in scans and (row := scans[at].row_of(operand)) is not None:
                pairs.setdefault(at, []).append((number, row))
        used: set[int] = set()
        for at, candidates in pairs.items():
            movable = {number: row for number, row in candidates if number not in used}
            used |= _Link(program, scan, scans[at], movable).make()
    equations = [scans[i].finished() if i in scans else equation for i, equation in enumerate(program.equations)]
    return remove_dead_code(program.replace(equations=equations))


def _reading_scan(program: Program, readers: Mapping[int, int | None], number: int) -> tuple[int, int]:
    """The equation that alone reads a value, which may be saved for it, and as what; -1 if several do."""
    while (at := readers.get(number)) is not None and program.equations[at].op is Op.SAVED:
        (number,) = program.equations[at].results
    return (-1 if at is None else at), number


@dataclasses.dataclass(slots=True)
class _Scan:
    """A scan whose operands and stacked results are exchanged.

    Attributes:
      equation: as it was.
      body: its body, one input for each of the operands.
      carry: how many values it carries.
      operands: how each operand is given, as a constant, carry or rows, and which value of the program around it is.
      results: the value in the program around, and that in the body; carries first.
    """

    equation: Equation
    body: Program
    carry: int
    operands: list[tuple[int, int]]
    results: list[tuple[int, int]]

    @staticmethod
    def of(equation: Equation) -> _Scan:
        consts, carry = scan_counts(equation.node.eqn)  # `hoist_weight_casts`, which changes them, runs later
        parts = [_CONST] * consts + [_CARRY] * carry + [_ROW] * (len(equation.uses) - consts - carry)
        operands = list(zip(parts, equation.operands, strict=True))
        body = equation.bodies[0].replace(avals=[*equation.bodies[0].avals])
        results = list(zip(equation.results, body.outputs, strict=True))
        return _Scan(equation, body, carry, operands, results)

    def row_of(self, number: int) -> int | None:
        """The body's input that is a row of `number`, if that is the only way in which `number` is read."""
        found = [i for i, (_, operand) in enumerate(self.operands) if operand == number]
        return self.body.inputs[found[0]] if len(found) == 1 and self.operands[found[0]][0] == _ROW else None

    def given(self, part: int, number: int, aval: Any) -> int:
        """The body's input that `number` of the program around is; added if there is none yet."""
        if (part, number) not in self.operands:
            self.operands.append((part, number))
            value = self.body.new(aval)
            body = self.body
            self.body = body.replace(
                inputs=(*body.inputs, value), input_dtypes=[*body.input_dtypes, getattr(aval, "dtype", None)]
            )
        return self.body.inputs[self.operands.index((part, number))]

    def finished(self) -> Equation:
        """The equation, its body without inputs and equations that nobody reads."""
        body = self.body.replace(outputs=tuple(inner for _, inner in self.results))
        body.result_dtypes = [body.avals[number].dtype for number in body.outputs]
        body = remove_dead_code(body)
        read = {*body.outputs}.union(*(equation.operands for equation in body.equations))
        slots = [i for i, (part, _) in enumerate(self.operands) if part == _CARRY or body.inputs[i] in read]
        slots.sort(key=lambda i: self.operands[i][0])
        body = body.replace(
            inputs=tuple(body.inputs[i] for i in slots),
            input_dtypes=[body.input_dtypes[i] for i in slots],
        )
        operands = [self.operands[i] for i in slots]
        return self.equation.replace(
            uses=[Use(number) for _, number in operands],
            results=tuple(number for number, _ in self.results),
            bodies=(body,),
            counts=(sum(part == _CONST for part, _ in operands), self.carry),
        )


class _Link:
    """What one scan stacks for one other.

    Args:
      program: the program around both.
      source, reader: the scans.
      candidates: the stacked results that only `reader` reads, and the input of its body that is a row of them.
    """

    def __init__(self, program: Program, source: _Scan, reader: _Scan, candidates: dict[int, int]):
        self.program, self.source, self.reader, self.rows = program, source, reader, candidates
        self.body = source.body
        stacked = source.results[source.carry :]
        self.candidates = [(number, inner) for number, inner in stacked if number in candidates]
        self.there = {inner for number, inner in stacked if number not in candidates}
        pairs = zip(self.body.inputs, source.operands, strict=True)
        self.passed = {inner: operand for inner, operand in pairs if operand[0] != _CARRY}

    def costs(self) -> tuple[ResidualCosts, dict[int, Sources]]:
        """What the values of the source's body cost the reader, and what each could be computed from."""
        stacked = self.there - self.passed.keys()
        costs = ResidualCosts(lambda number: size_in_bytes(self.body.avals[number]), in_memory=stacked)
        could: dict[int, Sources] = {}
        for number in self.body.inputs:
            if number not in self.there and number not in self.passed:
                costs.state(number)
        for equation in self.body.equations:
            for number in equation.results:
                if number not in self.there:
                    costs.state(number)
                if fuses(equation) or equation.name == "split":  # as slices
                    could[number] = costs.sources_of(equation.operands)
                    if number not in self.there:
                        costs.rematerialize(number, could[number])
        return costs, could

    def chosen(self) -> tuple[set[int], dict[int, int]]:
        """The values to stack or pass, and the candidates that are then rematerialized."""
        costs, could = self.costs()
        needed: set[int] = {*costs.sources_of(inner for _, inner in self.candidates)}
        # Once the others are known, a value may cost less as its sources, which some of them are. A source that is no
        # cheaper itself stands for its own: what is rounded for a dot is the float32 number before, and that a product
        # of two results of dots.
        for number in reversed(could):
            if number in needed:
                theirs = [{each} if each in needed else could.get(each, {each}) for each in could[number]]
                sources = frozenset[int]().union(*theirs)
                if costs.is_cheaper(sources, number, needed):
                    needed.remove(number)
                    needed |= sources
        again, there = {}, set(self.there)  # a candidate that equals another one is stacked once
        for number, inner in self.candidates:
            if inner not in needed or inner in there:
                again[number] = inner
            there.add(inner)
        return needed, again

    def make(self) -> set[int]:
        """Exchanges what is stacked, if anything is gained; returns what the reader reads for that."""
        needed, again = self.chosen()
        if not again:
            return set()
        source, reader = self.source, self.reader
        source.results = [result for result in source.results if result[0] not in again]
        stops = needed | self.passed.keys() | self.body.constants.keys()
        chain = computing(self.body.equations, again.values(), stops)
        read = {number for equation in chain for number in equation.operands}
        names = {number: self._given(number) for number in sorted(stops & read.union(again.values()))}
        used = {reader.operands[reader.body.inputs.index(n)][1] for n in names.values() if n in reader.body.inputs}
        clones = [self._clone(equation, names) for equation in chain]
        self._substitute(clones, {self.rows[number]: names[inner] for number, inner in again.items()})
        return used

    def _given(self, number: int) -> int:
        """How the reader's body is given a value of the source's: a constant, as the source is, or stacked by it."""
        body, reader = self.body, self.reader
        if number in body.constants:
            value = reader.body.new(body.avals[number])
            constants = {**reader.body.constants, value: body.constants[number]}
            reader.body = reader.body.replace(constants=constants)
            return value
        if number in self.passed:
            return reader.given(*self.passed[number], body.avals[number])
        stacked = {inner: outer for outer, inner in self.source.results[self.source.carry :]}
        if number not in stacked:
            aval, length = body.avals[number], self.source.equation.node.params["length"]
            rows = aval.sharding.spec.update(partitions=(None, *aval.sharding.spec))  # with explicit mesh axes
            aval = aval.update(shape=(length, *aval.shape), sharding=aval.sharding.update(spec=rows))
            stacked[number] = self.program.new(aval)
            self.source.results.append((stacked[number], number))
        return reader.given(_ROW, stacked[number], body.avals[number])

    def _clone(self, equation: Equation, names: dict[int, int]) -> Equation:
        uses = [Use(names[number]) for number in equation.operands]
        results = tuple([self.reader.body.new(self.body.avals[number]) for number in equation.results])
        for number, result in zip(equation.results, results, strict=True):
            names.setdefault(number, result)  # another part of a `split` may be stacked
        return equation.replace(uses=uses, results=results, at=equation.at or equation.node, remat=True)

    def _substitute(self, first: list[Equation], names: Mapping[int, int]) -> None:
        """Runs `first` before the reader's body, which then reads other values in place of rows."""
        reader = self.reader
        rest = [
            equation.replace(uses=[Use(names.get(number, number)) for number in equation.operands])
            for equation in reader.body.equations
        ]
        reader.body = reader.body.replace(equations=[*first, *rest])
        reader.results = [(number, names.get(inner, inner)) for number, inner in reader.results]
