"""What a scan stacks for another scan, as a layer stack's forward pass does for its backward pass.

Whatever the forward iterations leave is written to memory, and what lies inside a GELU, a softmax or a normalisation is
float32. All of it is elementwise in a few values: the layer's input, the results of its dots, the statistics of its
rows. Stacking those and computing the rest again in the backward iterations moves fewer bytes, needs less memory and
rounds nothing (Chen et al., "Training deep nets with sublinear memory cost", 2016; the choice is a greedy form of the
cut in Jain et al., "Checkmate", 2020).

Decides which values a scan stacks. Does not decide a dtype: the steps that run again are those of the forward plan, so
that both sides see the same bits; see `_plan.py`. How a loop is put together again is in `_relinked.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax

from .._sizes import is_less
from ._flow import Kind
from ._recompute import is_elementwise, rounded_before_exponentials
from ._relinked import CARRY, ROW, Loop, Operand, Stacked, loop_of
from ._steps import Plan, dtype_of

# A value computed from more than this is stacked itself: keeps planning linear.
_MOST_ORIGINS = 16

Numbers = frozenset[int]
NOTHING: Numbers = frozenset()


def stack_less(plan: Plan) -> Plan:
    """`plan`, its scans stacking what other scans of it compute the rest from, where that is fewer bytes."""
    loops = {id(step): loop for step in plan.steps if (loop := loop_of(plan, step)) is not None}
    if len(loops) < 2:
        return plan
    readers: dict[int, set[int]] = {number: {0} for number in plan.program.outputs}
    for step in plan.steps:
        for number in step.node.ins:
            readers.setdefault(number, set()).add(id(step))
    program = dataclasses.replace(plan.program, avals=[*plan.program.avals])
    plan = dataclasses.replace(plan, program=program, kinds=[*plan.kinds])
    alive = _always_there(plan)
    for loop in loops.values():
        pairs: dict[int, list[Stacked]] = {}
        for stacked in loop.results[loop.carry :]:
            found = readers.get(stacked.number, set())
            reader = loops.get(next(iter(found))) if len(found) == 1 else None
            if reader is not None and reader.length == loop.length and reader.row_of(stacked.number) is not None:
                pairs.setdefault(id(reader.step), []).append(stacked)
        used: set[int] = set()
        for key, candidates in pairs.items():
            movable = [stacked for stacked in candidates if stacked.number not in used]
            used |= _Link(plan, alive, loop, loops[key], movable).make()
    for loop in loops.values():
        loop.finish(plan)
    return plan


def _always_there(plan: Plan) -> set[int]:
    """The values that cost nothing to read later: arguments, constants, what is elementwise in them or a parameter."""
    found = {*plan.program.known, *plan.program.inputs}
    for step in plan.steps:
        if is_elementwise(step) and found.issuperset(step.node.ins):
            found.update(step.node.outs)
        found.update(number for number in step.node.outs if plan.kinds[number] is Kind.SOFT)
    return found


class _Link:
    """What one scan stacks for one other."""

    def __init__(self, plan: Plan, alive: set[int], source: Loop, reader: Loop, candidates: list[Stacked]):
        self.plan, self.source, self.reader, self.candidates = plan, source, reader, candidates
        self.body = source.body
        movable = {stacked.number for stacked in candidates}
        kept = [s for s in source.results[source.carry :] if s.number not in movable]
        self.there = {s.inner for s in kept if s.kind is self.body.kinds[s.inner]}
        self.passed = self._passed()
        alive = alive.union(operand.number for operand in reader.operands)
        self.free = {number for number, operand in self.passed.items() if operand.number in alive}
        self.free |= self.body.program.known.keys()

    def _passed(self) -> dict[int, Operand]:
        """The body's arguments that the reader can be given too: whole, or by their slices."""
        slots = zip(self.body.program.inputs, self.source.inputs, strict=True)
        operands = {number: self.source.operands[slot] for number, slot in slots if isinstance(slot, int)}
        return {number: operand for number, operand in operands.items() if operand.part != CARRY}

    def bytes(self, number: int, kind: Kind | None = None) -> int:
        aval = self.body.program.avals[number]
        dtype = dtype_of(kind or self.body.kinds[number], self.body.low) or aval.dtype
        return math.prod(getattr(aval, "shape", ())) * getattr(dtype, "itemsize", 0)

    def price(self, numbers: Iterable[int]) -> int:
        return sum(self.bytes(number) for number in numbers if number not in self.there)

    def origins(self) -> tuple[dict[int, Numbers], dict[int, Numbers]]:
        """What each value is best computed from, which may be itself; and what it could be computed from."""
        best: dict[int, Numbers] = dict.fromkeys(self.free, NOTHING)
        could: dict[int, Numbers] = {}
        for number in self.body.program.inputs:
            best.setdefault(number, frozenset({number}))
        for step in self.body.steps:
            elementwise = is_elementwise(step)
            for number in step.node.outs:
                best[number] = frozenset({number})
                if not elementwise:
                    continue
                found = NOTHING.union(*(best[operand] for operand in step.node.ins))
                if len(found) <= _MOST_ORIGINS:
                    could[number] = found
                    if number not in self.there and is_less(self.price(found), self.bytes(number)):
                        best[number] = found
        return best, could

    def chosen(self) -> tuple[set[int], list[Stacked]]:
        """The values to stack or pass, and the candidates that are then computed again."""
        best, could = self.origins()
        exact = [s for s in self.candidates if s.kind is self.body.kinds[s.inner]]
        rounded = [s for s in self.candidates if s.kind is not self.body.kinds[s.inner]]
        needed: set[int] = set().union(*(best[s.inner] for s in exact))
        again, there = [], set(self.there)
        for stacked in rounded:
            missing = best[stacked.inner] - needed
            if is_less(self.price(missing), self.bytes(stacked.inner, stacked.kind)):
                needed |= missing
                again.append(stacked)
        for number in reversed(could):
            if number in needed and number not in self.there:
                missing = could[number] - needed
                if is_less(self.price(missing), self.bytes(number)):
                    needed.remove(number)
                    needed |= missing
        for stacked in exact:
            if stacked.inner not in needed or stacked.inner in there:
                again.append(stacked)
            there.add(stacked.inner)
        return needed, again

    def make(self) -> set[int]:
        """Exchanges what is stacked, if anything is gained; returns what the reader reads for that."""
        needed, again = self.chosen()
        if not again:
            return set()
        plan = self._again(needed, [s.inner for s in again])
        source, reader = self.source, self.reader
        gone = {s.number for s in again}
        source.results = [s for s in source.results if s.number not in gone]
        exact = (s for s in source.results[source.carry :] if s.kind is self.body.kinds[s.inner])
        stacked = {s.inner: s.number for s in exact}
        slots = [reader.add(self._operand(number, stacked)) for number in plan.program.inputs]
        made = {reader.row_of(s.number): (len(reader.remade), position) for position, s in enumerate(again)}
        reader.remade.append((plan, slots))
        reader.inputs = [made.get(slot, slot) if isinstance(slot, int) else slot for slot in reader.inputs]
        source.changed = reader.changed = True
        return {reader.operands[slot].number for slot in slots}

    def _operand(self, number: int, stacked: dict[int, int]) -> Operand:
        """How the reader is given a value of the body: as the source is, or stacked by it, now if not already."""
        if number in self.passed:
            return self.passed[number]
        kind, avals = self.body.kinds[number], self.plan.program.avals
        if number not in stacked:
            aval = self.body.program.avals[number]
            avals.append(jax.ShapeDtypeStruct((self.source.length, *aval.shape), aval.dtype))
            self.plan.kinds.append(kind)
            self.source.results.append(Stacked(len(avals) - 1, number, kind))
            stacked[number] = len(avals) - 1
        return Operand(ROW, stacked[number], dtype_of(kind, self.body.low), False)

    def _again(self, needed: set[int], results: list[int]) -> Plan:
        """The plan that computes `results` again, in the dtypes in which they were computed."""
        body, steps = self.body, []
        inputs = {number for number in results if number in needed or number in self.passed}
        pending = set(results) - inputs
        for step in reversed(body.steps):
            if not pending.isdisjoint(step.node.outs):
                steps.append(dataclasses.replace(step, far=[False] * len(step.far), unread=False))
                for number in step.node.ins:
                    stored = number in needed or number in self.passed
                    (inputs if stored else pending).add(number)
        steps, given = steps[::-1], sorted(inputs)
        program = dataclasses.replace(
            body.program, inputs=tuple(given), outputs=tuple(results), nodes=tuple(step.node for step in steps)
        )
        # Both sides round what an exponential is computed from; see `roots_of_exponents`.
        rounded = body.rounded | rounded_before_exponentials(steps, body.kinds)
        self.source.body = dataclasses.replace(body, rounded=rounded)
        return dataclasses.replace(
            self.source.body,
            program=program,
            steps=steps,
            in_dtypes=[None] * len(given),
            out_kinds=[body.kinds[number] for number in results],
            roots=frozenset(),
            again={},
        )
