"""The values that one scan or `shard_map` passes to another, as a forward pass does to its backward pass.

    y ; h = scan { a = dot x w; h:f32 = exp a; ... }        y ; a = scan { a:f16 = dot x w; h:f32 = exp a; ... }
    g = scan { g = mul h ct }  h                       ->   g = scan { h:f32 = remat exp a; g = mul h ct }  a

Every residual that the forward body returns is written to memory, and the intermediate values of a GELU, a softmax or a
normalisation are float32. All of them are elementwise in a few values: the layer's input, the results of its dots, the
statistics of its rows. To pass on only those and to rematerialize the others in the backward body moves fewer bytes,
needs less memory and rounds nothing (Chen et al., "Training deep nets with sublinear memory cost", 2016; the choice is
a greedy form of the cut in Jain et al., "Checkmate", 2020).

A value that its forward body rounds for all readers (`shared_roundings.py`) is rounded where the other body computes it
again, too. The gradient of `rms_norm(x @ w + b)` in a `shard_map` was wrong by a factor of 5 where it nearly cancels.

Decides which values a body passes on, by the bytes per iteration or device (`analysis/residual_costs.py`). Does not
decide a dtype: the rematerialized equations are those of the forward body, so that both sides compute the same bits.
"""

from collections.abc import Mapping

from ..._sizes import size_in_bytes
from ..analysis.residual_costs import ResidualCosts, Sources, fuses
from ..ir import Equation, Op, Program, Use, added
from .bodies import KINDS, Crossing, WithBody
from .dead_code import computing, remove_dead_code


def body_residuals(program: Program) -> Program:
    """The program whose bodies pass on fewer bytes, from which other bodies rematerialize the rest."""
    found = {i: KINDS[e.name](e) for i, e in enumerate(program.equations) if e.bodies and e.name in KINDS}
    if len(found) < 2 or not program.context.saves_low:
        return program
    program = program.replace(avals=[*program.avals])
    readers = program.only_readers()
    for source in found.values():
        pairs: dict[int, list[tuple[int, int]]] = {}
        for result in source.handed_on:
            at, operand = _only_reader(program, readers, result.number)
            if at in found and found[at].alike == source.alike:
                value = found[at].input_of(operand, result.layout)
                if value is not None:
                    pairs.setdefault(at, []).append((result.number, value))
        # Values that one reader reads by now, to rematerialize others from them, are passed on in any case.
        used: set[int] = set()
        for at, candidates in pairs.items():
            movable = {number: value for number, value in candidates if number not in used}
            used |= _Link(program, source, found[at], movable).make()
    equations = [found[i].finished() if i in found else equation for i, equation in enumerate(program.equations)]
    return remove_dead_code(program.replace(equations=equations))


def _only_reader(program: Program, readers: Mapping[int, int | None], number: int) -> tuple[int, int]:
    """The position of the equation that alone reads a value, -1 if several do, and the value that it reads.

    The latter is another value if the equation reads a saved copy: a stack is in memory, so that it needs no barrier.
    """
    while (at := readers.get(number)) is not None and program.equations[at].op is Op.SAVED:
        (number,) = program.equations[at].results
    return (-1 if at is None else at), number


class _Link:
    """The values that one body passes to one other body.

    Args:
      program: the program around both.
      source, reader: the equations with the bodies.
      candidates: the results that only `reader` reads, and the input of its body for each.

    Attributes:
      wanted: for each candidate, the value of the source's body that the reader needs.
      replaced: for each candidate, the value of the reader's body that it replaces.
    """

    def __init__(self, program: Program, source: WithBody, reader: WithBody, candidates: dict[int, int]):
        self.program, self.source, self.reader = program, source, reader
        self.body, self.passed = source.body, source.passed
        self.candidates = [result for result in source.handed_on if result.number in candidates]
        self.there = {result.inner for result in source.handed_on if result.number not in candidates}
        self.wanted = {result.number: result.inner for result in self.candidates}
        self.replaced = dict(candidates)
        ours, theirs = source.copies(), reader.copies()
        for result in self.candidates:
            given = candidates[result.number]
            # If the reader only casts a value that the source casts as well, the copy is passed on: half of the bytes.
            if result.inner in ours and given in theirs and reader.reads_once(given):
                self.wanted[result.number], self.replaced[result.number] = ours[result.inner], theirs[given]

    def costs(self) -> tuple[ResidualCosts, dict[int, Sources]]:
        """The costs of the source's values for the reader, and the sources from which each could be computed."""
        free, memory = self.passed if self.source.shares else (), self.source.in_memory(self.program)
        costs = ResidualCosts(
            lambda number: size_in_bytes(self.body.avals[number]), in_memory=self.there.difference(free)
        )
        could: dict[int, Sources] = {}
        for operand in self.source.operands:
            if operand.inner not in self.there and operand.inner not in free:
                costs.state(operand.inner, operand.inner in memory)
        for equation in self.body.equations:
            for number in equation.results:
                if number not in self.there:
                    costs.state(number, number in memory)
                if not fuses(equation):
                    continue
                sources = costs.sources_of(equation.operands)
                if all([each in self.passed or self.source.layout_of(each) is not None for each in sources]):
                    could[number] = sources
                    if number not in self.there:
                        costs.rematerialize(number, sources)
        return costs, could

    def chosen(self) -> tuple[set[int], dict[int, int]]:
        """The values to pass on, and for some candidates the passed or rematerialized value that they equal."""
        costs, could = self.costs()
        needed: set[int] = {*costs.sources_of(self.wanted.values())}
        # `costs` compared each value alone with its sources. Once it is known which values are passed on, some sources
        # only cost a read, and a value may be cheaper to rematerialize after all. A source that is not passed on is
        # replaced by its own sources: a value rounded for a dot by the float32 value before the rounding, and this by
        # the two results of dots whose product it is.
        for number in reversed(could):
            if number in needed:
                theirs = [{each} if each in needed else could.get(each, {each}) for each in could[number]]
                sources = frozenset[int]().union(*theirs)
                if costs.is_cheaper(sources, number, needed):
                    needed.remove(number)
                    needed |= sources
        again, there = {}, set(self.there)  # JAX may return one value several times: it is passed on once
        for result in self.candidates:
            wanted = self.wanted[result.number]
            if wanted != result.inner or wanted not in needed or wanted in there:
                again[result.number] = wanted
            else:
                there.add(wanted)
        return needed, again

    def make(self) -> set[int]:
        """Exchanges the values that are passed on, if that saves bytes; returns those that the reader then reads."""
        needed, again = self.chosen()
        if not again:
            return set()
        source, reader = self.source, self.reader
        source.results = [result for result in source.results if result.number not in again]
        # Rematerialized equations start from values that are passed on, the source's own inputs, and literals.
        stops = needed | self.passed.keys() | self.body.constants.keys()
        chain = computing(self.body.equations, again.values(), stops)
        read = {number for equation in chain for number in equation.operands}
        given = {number: self._given(number) for number in sorted(stops & read.union(again.values()))}
        names, equations = dict(given), list[Equation]()
        for number in sorted(read.intersection(given) - self.body.constants.keys()):
            names[number], before = reader.reading(given[number])
            equations += before
        for equation in chain:
            uses = [Use(names[number]) for number in equation.operands]
            results = tuple([reader.body.new(self.body.avals[number]) for number in equation.results])
            for number, result in zip(equation.results, results, strict=True):
                names.setdefault(number, result)  # another part of a `split` may be passed on
            equations.append(equation.replace(uses=uses, results=results, remat=True))
        names.update(given)  # the reader's own equations read an input as it is, with no barrier before it
        new = {self.replaced[number]: names[inner] for number, inner in again.items()}
        rounded_there = self._rounded()
        rounded = {self.replaced[number] for number, inner in again.items() if inner in rounded_there}
        for equation in reader.body.equations:
            uses = [Use(new.get(number, number)) for number in equation.operands]
            if equation.op is Op.CAST and not rounded.isdisjoint(equation.operands):
                # XLA may drop a cast from 16 bits of a rematerialized value, which no array stores.
                (result,) = equation.results
                copy = reader.body.new(reader.body.avals[result])
                equations.append(equation.replace(uses=uses, results=(copy,)))
                equations.append(added(Op.ROUND, equation.node, [copy], result, dtype=reader.body.low))
            else:
                equations.append(equation.replace(uses=uses))
        reader.body = reader.body.replace(equations=equations)
        reader.results = [result._replace(inner=new.get(result.inner, result.inner)) for result in reader.results]
        return {operand.number for operand in reader.operands if operand.inner in given.values()}

    def _rounded(self) -> set[int]:
        """The values that readers in the source's body read rounded; see `shared_roundings.py`."""
        casts = {e.results[0]: e.operands[0] for e in self.body.equations if e.op is Op.CAST}
        return {casts[e.operands[0]] for e in self.body.equations if e.op is Op.ROUND and e.operands[0] in casts}

    def _given(self, number: int) -> int:
        """The value of the reader's body that equals one of the source's: an input of both, or passed on."""
        body, reader, source = self.body, self.reader, self.source
        if number in body.constants:
            value = reader.body.new(body.avals[number])
            constants = {**reader.body.constants, value: body.constants[number]}
            reader.body = reader.body.replace(constants=constants)
            return value
        operand = self.passed.get(number) or next((each for each in source.handed_on if each.inner == number), None)
        if operand is None:  # the source does not pass it on yet
            operand = Crossing(source.layout_of(number), self.program.new(source.whole(number)), number)
            source.results.append(operand)
        return reader.given(operand.layout, operand.number, body.avals[number])
