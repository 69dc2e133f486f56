"""A planned scan whose operands and stacked results can be exchanged, and its way back into a step.

Decides nothing: `_residuals.py` says what is exchanged.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from .._jaxpr import scan_counts
from ._evaluate import evaluate
from ._flow import Kind
from ._hoisted import Copies, read_by_dots, run_scan
from ._recompute import mark_unread
from ._steps import Plan, Step

CONST, CARRY, ROW = range(3)


class Operand(NamedTuple):
    """What a scan is given: whole or slice by slice, as a value of the program around it and how it is read there."""

    part: int
    number: int
    read: np.dtype | None
    far: bool


class Stacked(NamedTuple):
    """One result of a scan: the value in the program around it, the one in the body, and what is stacked of that."""

    number: int
    inner: int
    kind: Kind


@dataclasses.dataclass(slots=True)
class Loop:
    """A planned scan, taken apart.

    Attributes:
      step: the step it is.
      body: the plan of its body.
      carry: how many values it carries.
      operands: what it is given; those that nothing refers to any more are left out in the end.
      inputs: for each argument of `body` the operand it is, or the plan among `remade` and the result of it.
      results: carries, then what is stacked.
      remade: plans that run before the body in every iteration, and the operands that each is given.
    """

    step: Step
    body: Plan
    carry: int
    operands: list[Operand]
    inputs: list[int | tuple[int, int]]
    results: list[Stacked]
    remade: list[tuple[Plan, list[int]]] = dataclasses.field(default_factory=list)
    changed: bool = False
    slots: dict[int, list[int]] = dataclasses.field(init=False)

    def __post_init__(self):
        self.slots = {}
        for slot, operand in enumerate(self.operands):
            self.slots.setdefault(operand.number, []).append(slot)

    @property
    def length(self) -> int:
        return self.step.node.params["length"]

    def row_of(self, number: int) -> int | None:
        """The operand that brings the slices of `number`, if that is the only way in which `number` is read."""
        found = self.slots[number]
        return found[0] if len(found) == 1 and self.operands[found[0]].part == ROW else None

    def add(self, operand: Operand) -> int:
        """The place of an operand, which is added if it is not there."""
        slots = self.slots.setdefault(operand.number, [])
        for slot in slots:
            if self.operands[slot] == operand:
                return slot
        self.operands.append(operand)
        slots.append(len(self.operands) - 1)
        return slots[-1]

    def finish(self, plan: Plan) -> None:
        """Makes the step of `plan` run the loop as it has become."""
        if not self.changed:
            return
        step, body = self.step, self._body()
        used = {slot for slot in self.inputs if isinstance(slot, int)}.union(*(slots for _, slots in self.remade))
        order = sorted(used, key=lambda slot: (self.operands[slot].part, slot))
        operands = [self.operands[slot] for slot in order]
        ins, outs = tuple(o.number for o in operands), tuple(r.number for r in self.results)
        step.node = dataclasses.replace(step.node, ins=ins, outs=outs)
        step.reads, step.far = [o.read for o in operands], [o.far for o in operands]
        step.run, step.bodies = self._run(body, order), (body,)

    def _body(self) -> Plan:
        """The body with the results that are wanted now, without the arguments that it needs no more."""
        body = self.body
        outputs, kinds = tuple(result.inner for result in self.results), [result.kind for result in self.results]
        body = dataclasses.replace(body, program=dataclasses.replace(body.program, outputs=outputs), out_kinds=kinds)
        needed, inputs = mark_unread(body), body.program.inputs
        carried = {slot for slot, operand in enumerate(self.operands) if operand.part == CARRY}
        kept = [i for i, slot in enumerate(self.inputs) if inputs[i] in needed or slot in carried]
        self.inputs = [self.inputs[i] for i in kept]
        program = dataclasses.replace(body.program, inputs=tuple(inputs[i] for i in kept))
        return dataclasses.replace(body, program=program, in_dtypes=[body.in_dtypes[i] for i in kept])

    def _run(self, body: Plan, order: list[int]) -> Any:
        params, parts = self.step.node.params, [self.operands[slot].part for slot in order]
        consts, carry = parts.count(CONST), self.carry
        out_dtypes = body.dtypes_of(body.out_kinds)
        place = {slot: position for position, slot in enumerate(order)}
        whole = {
            number: place[slot]
            for number, slot in zip(body.program.inputs, self.inputs, strict=True)
            if isinstance(slot, int) and self.operands[slot].part == CONST
        }
        weights = read_by_dots(body, whole)

        def run(args: list[Any]) -> list[Any]:
            copies = Copies(body, weights, args)

            def iteration(given: list[Any]) -> list[Any]:
                made = [
                    evaluate(p, [given[place[s]] for s in slots], [None] * len(p.out_kinds)) for p, slots in self.remade
                ]
                values = [given[place[s]] if isinstance(s, int) else made[s[0]][s[1]] for s in self.inputs]
                return evaluate(body, values, out_dtypes, copies=copies.inside())

            return run_scan(params, args, consts, carry, iteration)

        return run


def loop_of(plan: Plan, step: Step) -> Loop | None:
    """The scan that a step is, if it is one that was planned."""
    if step.node.name != "scan" or not step.bodies:
        return None
    consts, carry = scan_counts(step.node.eqn)
    body = step.bodies[0]
    count = len(step.node.ins)
    parts = [CONST] * consts + [CARRY] * carry + [ROW] * (count - consts - carry)
    operands = list(map(Operand, parts, step.node.ins, step.reads, step.far))
    results = [
        Stacked(number, inner, plan.kinds[number])
        for number, inner in zip(step.node.outs, body.program.outputs, strict=True)
    ]
    return Loop(step, body, carry, operands, list(range(count)), results)
