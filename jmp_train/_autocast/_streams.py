"""What waits in memory for an operation, and which of it is narrowed for that: above all residual streams in loops.

A loop's carry starts as its first value is. An embedding is a parameter, and the gradient of a network's head is
float32, yet outside of a loop the first layer would narrow both. Here they are narrowed before the loop, since a carry
has one dtype.

Decides which operands of a node these are. What else a loop carries (the state of a recurrent cell, sums, weights that
an inner loop updates) is built up over many iterations and stays as it starts. Does not decide whether the body can
return a carry in the compute dtype; see `_control_flow.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Sequence

from .._jaxpr import Node, Program, flatten, scan_counts
from ._flow import POOLS, Kind, Place
from ._loops import may_be_narrow
from ._steps import State
from ._table import Entry, Rule


class Wait(enum.Enum):
    """How an operand gets to its node."""

    FUSED = "fused"  # a compiler computes it where it is read
    STORED = "stored"  # through memory, so the copy that a dot will read anyway does
    NARROW = "narrow"  # the same, in the compute dtype in any case
    CARRIED = "carried"  # as it is, whatever reads it


class Waits:
    """Says of each node of a program how its operands get to it; asked in the order of the nodes."""

    def __init__(self, program: Program, place: Place, wide: Container[int]):
        self._program, self._place, self._wide = program, place, wide
        self._scans: dict[int, Node] = {}

    def of(self, node: Node, entry: Entry, states: Sequence[State]) -> list[Wait]:
        """For each operand of `node`, given the state of every value so far."""
        if entry.rule is not Rule.ENTER:
            # A sum or a pool does not fuse with what computes its operands.
            kernel = (entry.never_low and entry.rule is Rule.HIGH) or node.name in POOLS
            return [Wait.STORED if kernel else Wait.FUSED] * len(node.ins)
        if node.name != "scan":
            return [Wait.STORED if node.name == "remat2" else Wait.FUSED] * len(node.ins)
        consts, carry = scan_counts(node.eqn)
        waits = [Wait.STORED] * len(node.ins)
        waits[consts : consts + carry] = self._carried(node, consts, states, node.ins[consts : consts + carry])
        self._scans.update(dict.fromkeys(node.outs, node))
        return waits

    def _carried(self, node: Node, consts: int, states: Sequence[State], carry: Sequence[int]) -> list[Wait]:
        candidates = {
            position
            for position, state in enumerate(states[number] for number in carry)
            if state.kept or (state.kind is Kind.SOFT and state.computed)
        }
        if not candidates:
            return [Wait.CARRIED] * len(carry)
        inside, body = self._place.inside(node), flatten(node.params["jaxpr"], also=("remat2",))
        if inside.backward:
            shapes = self._narrow_shapes(node, states)
            candidates = {p for p in candidates if self._program.avals[carry[p]].shape in shapes}
        rows = zip(body.inputs, node.ins, strict=True)
        weights = [inner for inner, number in [*rows][consts + len(carry) :] if states[number].kind is Kind.SOFT]
        ends = list(zip(body.inputs[consts:], body.outputs[: len(carry)], strict=False))
        streams = {p for p in candidates if may_be_narrow(body, inside, weights, *ends[p], wide=self._wide)}
        return [Wait.NARROW if position in streams else Wait.CARRIED for position in range(len(carry))]

    def _narrow_shapes(self, node: Node, states: Sequence[State]) -> set[tuple[int, ...]]:
        """The shapes of the streams whose gradients a backward scan carries: those of the scans that it reads."""
        forward = {id(self._scans[number]): self._scans[number] for number in node.ins if number in self._scans}
        carried = [number for scan in forward.values() for number in scan.outs[: scan_counts(scan.eqn)[1]]]
        return {self._program.avals[number].shape for number in carried if states[number].kind is Kind.LOW}
