"""Float32 for what only float32 equations read.

    c:f16 = add a:f16 b:f16             c:f32 = add a:f32 b:f32
    d:f32 = exp c:f32             ->    d:f32 = exp c:f32

Rounding the sum saves nothing here: it fuses with its reader, which widens it again. Only the whole program shows
that: the readers have to be near, or rematerialize it, since across a dot a value in 16 bits is what is saved.

The sum of a dot's result and a bias stays rounded. Two kernels may read it, and XLA then stores one value of the chain
that they share, in the dtype that it has there: on an H200 the loss of a dense network moves a third more bytes with
that sum in float32.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..._dtypes import FLOAT32
from ..ir import Precision, Program
from ..primitives import DOTS, Trait, having

if TYPE_CHECKING:
    from ..planner import Context

_ROUNDS = having(Trait.ROUNDS)
_ADDS = having(Trait.ADDS)


def widen(program: Program, context: Context) -> Program:
    """The program with equations that round run in float32 where every reader reads float32 anyway."""
    del context
    low, remat, facts = program.low, program.residuals.remat, [*program.facts]
    narrow_readers = set(program.outputs)
    for equation in program.equations:
        if not remat.isdisjoint(equation.results):  # runs again across a dot, on the values that are saved
            narrow_readers.update(number for number in equation.node.ins if number not in remat)
    dots = {number for equation in program.equations if equation.node.name in DOTS for number in equation.results}
    equations = []
    for equation in reversed(program.equations):
        rounds = equation.node.name in _ROUNDS and low in equation.reads
        biased = equation.node.name in _ADDS and any(facts[number].parameter for number in equation.operands)
        if biased and not dots.isdisjoint(equation.operands):
            rounds = False
        if rounds and narrow_readers.isdisjoint(equation.results):
            equation = equation.replace(uses=[use._replace(dtype=FLOAT32) for use in equation.uses])
            for number in equation.results:
                facts[number] = dataclasses.replace(facts[number], precision=Precision.FULL)
        depth = equation.depth
        narrow_readers.update(
            [
                number
                for number, dtype, _ in equation.uses
                if dtype != FLOAT32 or (depth > facts[number].depth and number not in remat)
            ]
        )
        equations.append(equation)
    return dataclasses.replace(program, facts=facts, equations=equations[::-1])
