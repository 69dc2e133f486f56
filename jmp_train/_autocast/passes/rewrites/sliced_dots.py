"""A dot in a scan whose result is read in parts, stored before the parts are read.

    a:f16 = dot_general x w               a:f16 = dot_general x w
    b:f16 = slice a                       s:f16 = saved a
    c:f16 = slice a                ->     b:f16 = slice s
                                          c:f16 = slice s

An LSTM multiplies by the kernels of its four gates at once. XLA splits such a dot over its contracted dimension if it
has few rows, and fuses the sum of the partial results with each reader. A scan stacks the residuals of its backward
pass, each in a kernel of its own, and each of these kernels would sum all partial results: on an H200 an iteration of
Flax's `OptimizedLSTMCell` would read them in five kernels.

XLA does not split a dot with many rows, which writes its result to memory in any case: scanned layers with joined
kernels, of 4,096 rows, move the same bytes with this rewrite and without.

Decides which dots those are: read in parts only, directly or in a sum with another value, such as a bias.
"""

from ...ir import Op, Program, Use, added
from ...primitives import ADDS, PLAIN_DOTS, Trait, having

_PICKS = having(Trait.PICKS)
_SUMS = ADDS | {Op.CAST.value}


def sliced_dots(program: Program) -> Program:
    """The program, if a scan's body, with saved copies of the dots in the compute dtype that it reads in parts."""
    before = program.equations
    if not program.place.is_scan or _PICKS.isdisjoint([equation.node.name for equation in before]):
        return program
    # The values that something reads whole. A sum, with a bias say, is read in parts only if the kernels of the parts
    # compute it.
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
