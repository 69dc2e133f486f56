"""A dot of which an iteration of a scan reads parts, stored before they are read.

    a:f16 = dot_general x w               a:f16 = dot_general x w
    b:f16 = slice a                       s:f16 = saved a
    c:f16 = slice a                ->     b:f16 = slice s
                                          c:f16 = slice s

An LSTM multiplies with the kernels of its four gates at once. Of few rows, such a dot is split over its contracted
dimension, and XLA fuses the sum of the partial results with what reads it. A scan stacks what its backward pass reads,
each array in a kernel of its own, and each of them would sum up all partial results: on an H200 an iteration of Flax's
`OptimizedLSTMCell` would read them in five kernels.

Of many rows, which XLA does not split, a dot writes its result to memory in any case: scanned layers with joined
kernels, of 4,096 rows, move the same bytes with this and without.

Decides which dots those are: read in parts only, as they are or in a sum with another value, such as a bias.
"""

from __future__ import annotations

from ...ir import Op, Program, Use, added
from ...primitives import ADDS, PLAIN_DOTS, Trait, having

_PICKS = having(Trait.PICKS)
_SUMS = ADDS | {Op.CAST.value}


def sliced_dots(program: Program) -> Program:
    """The program, if a scan's body, with saved copies of the dots in the compute dtype that it reads in parts."""
    before = program.equations
    if not program.place.is_scan or _PICKS.isdisjoint([equation.node.name for equation in before]):
        return program
    # What something reads whole. A sum, with a bias say, is read in parts only if the kernels of the parts compute it.
    whole = set(program.outputs)
    for equation in reversed(before):
        in_parts = equation.name in _PICKS or (equation.name in _SUMS and whole.isdisjoint(equation.results))
        if not in_parts:
            whole.update(equation.operands)
    dots = [
        number
        for equation in before
        if equation.name in PLAIN_DOTS
        for number in equation.results
        if number not in whole and program.avals[number].dtype == program.low
    ]
    if not dots:
        return program
    program = program.replace(avals=[*program.avals], equations=[])
    saved = {number: program.new(program.avals[number]) for number in dots}
    for equation in before:
        uses = [Use(saved.get(number, number)) for number in equation.operands]
        program.equations.append(equation.replace(uses=uses))
        for number in equation.results:
            if number in saved:
                node = equation.node
                program.equations.append(added(Op.SAVED, node, [number], saved[number]))
    return program
