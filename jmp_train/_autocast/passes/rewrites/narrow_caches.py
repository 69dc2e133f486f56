"""Caches that a loop reads in 16 bits only, carried in 16 bits.

    c:f32 = scan { k:f32 = cast j                              c:f16 = scan {
                   n:f32 = dynamic_update_slice c k i                         n:f16 = dynamic_update_slice c j i
                   m:f16 = cast n; dot q m; return n }   ->                   dot q n; return n }

The keys and values that attention reads for every token of a text are such a cache. A float32 cache is read, and its
copy is written and read, at every step, which is twice the bytes of a program in float32. A cast commutes with
operations that only move numbers, so that all results of the copies stay the same. If something reads the loop's final
cache in float32, the cache is narrowed only if all its numbers are 16-bit numbers.

Somebody may differentiate the loop, and JAX adds up the gradient of a carry in the carry's dtype. So a scan keeps its
wide equation, and has the derivative of that (`Equation.wide`).

Decides which carries these are, and writes the loop's body for them. `control_flow.py` has decided the dtype of all
other carries.
"""

from collections.abc import Container, Mapping, Sequence

import numpy as np

from ...._dtypes import FLOAT32
from ...ir import Equation, Op, Program, Use, added, is_float32, with_dtype
from ...primitives import Trait, having
from ..dead_code import remove_dead_code

_MOVES = having(Trait.MOVES | Trait.PICKS | Trait.JOINS)


def narrow_caches(program: Program) -> Program:
    """The program whose loops carry caches in the compute dtype."""
    if not any([equation.loop_counts for equation in program.equations if equation.bodies]):
        return program
    program = program.replace(avals=[*program.avals])
    producers = program.producers()
    read = {*program.outputs}.union(*(equation.operands for equation in program.equations))
    equations = [each for e in program.equations for each in _with_narrow_caches(program, e, read, producers)]
    return program.replace(equations=equations)


def _with_narrow_caches(
    program: Program, loop: Equation, read: set[int], producers: Mapping[int, Equation]
) -> list[Equation]:
    """A loop whose caches are in the compute dtype, between casts of their first values and of results in `read`."""
    counts = loop.loop_counts
    if counts is None:
        return [loop]
    (body, *conditions), (consts, carry) = loop.bodies, counts
    first = len(loop.uses) - len(body.inputs) + consts  # a `while` has operands for its condition before
    found = _candidates(body, consts, carry)
    for condition in conditions:
        decisive = {number for equation in condition.equations for number in equation.operands}
        found -= {i for i, number in enumerate(condition.inputs[-carry:]) if number in decisive}
    # If a body moves numbers from one cache to another, both have to be narrow or neither. So the body is written for
    # all caches, and again without those that cannot be narrow, until no more are left out.
    while True:
        if not found:
            return [loop]
        writer = _Writer(body, {body.inputs[consts + i]: frozenset({i}) for i in found})
        kept = found & writer.read - writer.failed - writer.mismatched(found, consts)
        read_in_float32 = {i for i in kept if loop.results[i] in read}
        kept -= read_in_float32 & writer.rounded
        kept -= {i for i in read_in_float32 if not _is_exact(program, loop.operands[first + i], producers)}
        if kept == found:
            break
        found = kept
    uses, results, before, after = [*loop.uses], [*loop.results], list[Equation](), list[Equation]()
    for i in sorted(found):
        start, last = (program.new(with_dtype(body.avals[body.inputs[consts + i]], program.low)) for _ in range(2))
        before.append(_cast(loop, uses[first + i].value, start, program.low))
        if results[i] in read:
            after.append(_cast(loop, last, results[i], FLOAT32))
        uses[first + i], results[i] = Use(start), last
    bodies = writer.returning(found, loop), *(_given_narrow(condition, carry, found) for condition in conditions)
    wide = loop if loop.node.name == "scan" else None  # nobody differentiates a `while` backward
    return [*before, loop.replace(uses=uses, results=tuple(results), bodies=bodies, wide=wide), *after]


def _given_narrow(condition: Program, carry: int, narrow: Container[int]) -> Program:
    """The condition of a loop that carries some of its values, which the condition does not read, in 16 bits."""
    avals = [*condition.avals]
    for i, number in enumerate(condition.inputs[-carry:]):
        if i in narrow:
            avals[number] = with_dtype(avals[number], condition.low)
    return condition.replace(avals=avals)


def _candidates(body: Program, consts: int, carry: int) -> set[int]:
    """The carries that the body returns moved, from a loop, or cast from the compute dtype: few loops have any."""
    producers, found = body.producers(), set[int]()
    for i, (start, result) in enumerate(zip(body.inputs[consts : consts + carry], body.outputs[:carry], strict=True)):
        if is_float32(body.avals[start]) and (equation := producers.get(result)) is not None:
            if _moves(equation) or _widens(body, equation) or equation.node.name == "scan":
                found.add(i)
    return found


def _is_exact(program: Program, number: int, producers: Mapping[int, Equation]) -> bool:
    """Whether all numbers of a value fit the compute dtype: casts from it, moved and joined, and literals."""
    pending, seen = [number], set[int]()
    while pending:
        each = pending.pop()
        if each in program.constants and each not in program.captured:
            if not _holds(program.low, program.constants[each]):
                return False
            continue
        equation = producers.get(each)
        if equation is None or not (_moves(equation) or _widens(program, equation)):
            return False
        if _moves(equation) and each not in seen:
            seen.add(each)
            pending += [operand for operand in equation.operands if is_float32(program.avals[operand])]
    return True


def _holds(low: np.dtype, value: object) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.all(np.asarray(value, low).astype(FLOAT32) == np.asarray(value, FLOAT32)))


def _moves(equation: Equation) -> bool:
    return equation.op is Op.RECORDED and equation.node.name in _MOVES


def _widens(program: Program, equation: Equation) -> bool:
    return equation.op is Op.CAST and program.avals[equation.operands[0]].dtype == program.low


def _cast(at: Equation, operand: int, result: int, dtype: np.dtype) -> Equation:
    return added(Op.CAST, at.node, [operand], result, dtype=dtype)


class _Writer:
    """Writes a loop's body for some inputs in the compute dtype.

    Args:
      body: the body.
      given: those inputs, each with the caches whose numbers it holds, by their positions in the loop around.

    Attributes:
      caches: for each value that is narrow now, the caches whose numbers it holds.
      failed: the caches that something reads in float32.
      rounded: the caches into which numbers are written that the compute dtype cannot hold.
      read: the caches of which a copy in the compute dtype is read.
    """

    def __init__(self, body: Program, given: Mapping[int, frozenset[int]]):
        self.caches, self._source, self._producers = dict(given), body, body.producers()
        self.failed, self.rounded, self.read = set[int](), set[int](), set[int]()
        self._body = body.replace(avals=[*body.avals], constants=dict(body.constants), equations=[])
        self._narrow = {number: self._new(number) for number in given}  # what stands for such a value, or for a copy
        self._widened: dict[int, int] = {}  # by the result of a cast to float32, what is cast
        self._moved = set[int]()  # copies, and what is moved from them
        for equation in body.equations:
            self._write(equation)

    def mismatched(self, narrow: Container[int], consts: int) -> set[int]:
        """The caches that the body does not return as it has to.

        Its results at `narrow`, some of its carries, have to be caches or copies in the compute dtype, and no others.
        """
        found = set[int]()
        for i, number in enumerate(self._source.outputs):
            if i not in narrow:
                found |= self.caches.get(number, frozenset())
            elif number not in self.caches and number not in self._moved:
                found |= self.caches[self._source.inputs[consts + i]]
        return found

    def returning(self, narrow: Container[int], at: Equation) -> Program:
        """The body of the loop `at`; its results at `narrow` are in the compute dtype."""
        body, source = self._body, self._source
        body.inputs = self._names(source.inputs)
        names = enumerate(zip(source.outputs, self._names(source.outputs), strict=True))
        body.outputs = tuple([self._narrowed(n, frozenset(), at) if i in narrow else name for i, (n, name) in names])
        return remove_dead_code(body)  # such as casts to float32 of what is written

    def _write(self, equation: Equation) -> None:
        caches = frozenset[int]().union(*(self.caches.get(number, ()) for number in equation.operands))
        if not caches:
            operands = self._names(equation.operands)
            self._body.equations.append(equation.replace(uses=list(map(Use, operands))))
            if _widens(self._source, equation):
                self._widened[equation.results[0]] = operands[0]
            hands_on = _moves(equation) or equation.op in (Op.SAVED, Op.CAST)
            if hands_on and not self._moved.isdisjoint(equation.operands):
                self._moved.update(equation.results)
        elif equation.op is Op.CAST and self._source.avals[equation.results[0]].dtype == self._source.low:
            # The copy that a dot reads is the cache itself now.
            self._narrow[equation.results[0]] = self._narrow[equation.operands[0]]
            self._moved.add(equation.results[0])
            self.read |= caches
        elif _moves(equation):
            uses = [Use(self._narrowed(number, caches, equation)) for number in equation.operands]
            for number in equation.results:
                self._define(number, caches)
            self._body.equations.append(equation.replace(uses=uses, results=self._names(equation.results)))
        elif equation.node.name == "scan" and (counts := equation.loop_counts):
            self._write_scan(equation, *counts)
        else:  # an equation that computes with a cache would do so in 16 bits
            self.failed |= caches

    def _write_scan(self, scan: Equation, consts: int, carry: int) -> None:
        """Writes a scan with caches among its operands, such as a scan over layers with one cache each."""
        (body,) = scan.bodies
        pairs = zip(body.inputs, scan.operands, strict=True)
        given = {inside: self.caches[number] for inside, number in pairs if number in self.caches}
        inner = _Writer(body, given)
        narrow = {i for i in range(carry) if body.inputs[consts + i] in given}
        narrow |= {i for i, number in enumerate(body.outputs) if i >= carry and number in inner.caches}
        self.failed |= inner.failed | inner.mismatched(narrow, consts)
        self.rounded |= inner.rounded
        self.read |= inner.read
        uses = list(map(Use, self._names(scan.operands)))
        for i in narrow:
            start = body.inputs[consts + i] if i < carry else body.outputs[i]
            self._define(scan.results[i], inner.caches[start])
        results, bodies = self._names(scan.results), (inner.returning(narrow, scan),)
        self._body.equations.append(scan.replace(uses=uses, results=results, bodies=bodies))

    def _names(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple([self._narrow.get(number, number) for number in numbers])

    def _define(self, number: int, caches: frozenset[int]) -> None:
        self._narrow[number], self.caches[number] = self._new(number), caches

    def _new(self, number: int) -> int:
        return self._body.new(with_dtype(self._body.avals[number], self._body.low))

    def _narrowed(self, number: int, caches: frozenset[int], at: Equation) -> int:
        """What stands for an operand of an equation that moves caches."""
        if number in self._narrow or not is_float32(self._source.avals[number]):
            return self._narrow.get(number, number)
        if number in self._widened:
            return self._widened[number]
        if not _is_exact(self._source, number, self._producers):
            self.rounded |= caches
        low = self._new(number)
        self._body.equations.append(_cast(at, number, low, self._body.low))
        return low
