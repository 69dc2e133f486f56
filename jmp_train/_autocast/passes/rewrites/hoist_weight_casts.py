"""Weights that a dot reads in every iteration of a loop, cast once before it.

    scan { b:f16 = cast w; c = dot x b }  w        b:f16 = cast w
                                            ->     scan { d:f16 = hoisted w b; c = dot x d }  w b

XLA does not move the cast out of the loop: a recurrent network would read its float32 weights and write their copies
at every step. Cast outside, though, a weight would have its gradient accumulated over the iterations in 16 bits, if
someone differentiates the loop. So the loop is given both, and the copy's derivative is that of a cast inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...._dtypes import FLOAT32
from ...._jaxpr import scan_counts
from ...ir import Equation, Op, Program, Use, with_dtype
from ...primitives import DOTS
from .rewrite import Rewrite


class HoistWeightCasts(Rewrite):
    def of_lowered(self, program: Program) -> Program:
        """The program whose scans are given copies of the constants that their dots read in the compute dtype."""
        if not any([equation.bodies for equation in program.equations]):
            return program
        avals, equations = [*program.avals], []
        for equation in program.equations:
            weights = _weights(equation) if equation.bodies and equation.node.name == "scan" else {}
            first, params = len(avals), {"dtype": program.low, "stop_gradient": True}
            for position, cast in weights.items():
                number, at = equation.operands[position], equation.at or equation.node
                copy = cast.replace(uses=[Use(number)], results=(len(avals),), params=params, at=at)
                avals.append(with_dtype(avals[number], program.low))
                equations.append(copy)
            equations.append(_reading(equation, weights, range(first, len(avals))) if weights else equation)
        return dataclasses.replace(program, avals=avals, equations=equations)


def _weights(scan: Equation) -> dict[int, Equation]:
    """The casts of float32 constants that dots of a scan's body read, by the position of the constant."""
    (body,), consts = scan.bodies, (scan.counts or scan_counts(scan.node.eqn))[0]
    positions = {number: position for position, number in enumerate(body.inputs[:consts])}
    read = {number for e in body.equations if e.node.name in DOTS for number in e.operands}
    return {
        positions[cast.operands[0]]: cast
        for cast in body.equations
        if cast.op is Op.CAST
        and cast.operands[0] in positions
        and cast.results[0] in read
        and body.avals[cast.operands[0]].dtype == FLOAT32
        and body.avals[cast.results[0]].dtype == body.low
    }


def _reading(scan: Equation, weights: dict[int, Equation], copies: Sequence[int]) -> Equation:
    """The scan with `copies` as further constants, which its body reads instead of its casts."""
    (body,), (consts, carry) = scan.bodies, scan.counts or scan_counts(scan.node.eqn)
    avals, inputs = [*body.avals], []
    hoisted: dict[int, Equation] = {}
    for cast in weights.values():
        avals.append(avals[cast.results[0]])
        inputs.append(len(avals) - 1)
        uses = [*cast.uses, Use(inputs[-1])]
        hoisted[id(cast)] = cast.replace(op=Op.HOISTED, uses=uses, params={})
    body = dataclasses.replace(
        body,
        avals=avals,
        inputs=(*body.inputs[:consts], *inputs, *body.inputs[consts:]),
        input_dtypes=[*body.input_dtypes[:consts], *[body.low] * len(inputs), *body.input_dtypes[consts:]],
        equations=[hoisted.get(id(equation), equation) for equation in body.equations],
    )
    uses = [*scan.uses[:consts], *map(Use, copies), *scan.uses[consts:]]
    return scan.replace(uses=uses, bodies=(body,), counts=(consts + len(copies), carry))
