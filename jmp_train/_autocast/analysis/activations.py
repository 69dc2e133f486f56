"""Which expensive values are no larger than the values in the compute dtype from which they are computed.

    t = tanh (mul 0.8 x:f16)      |t| <= 1             degree 0, factor 1
    s = mul 0.5 (add 1.0 t)       |s| <= 0.5 (1 + 1)   degree 0, factor 1
    y = mul x:f16 s               |y| <= 1 |x|         degree 1, factor 1: no larger than `x`, and as expensive as `t`

The results of activation functions that multiply their operand by a bounded function of it are such values: GELU
(Hendrycks and Gimpel, 2016), SiLU, Mish; those that select a bounded function or their operand, as ELU does (Clevert et
al., 2016); and tanh itself. In the compute dtype they are finite wherever their operand is.

Decides which values these are. Does not decide which of them are saved in the compute dtype; see
`passes.save_for_sums`.
"""

import math
from typing import NamedTuple

from ..._dtypes import facts as dtype_facts
from ..._sizes import is_less
from ..ir import Precision, Program
from ..primitives import ADDS, LARGEST_RESULT, Trait, having
from .relus import is_positive
from .residual_costs import is_expensive

_SAME = having(Trait.MOVES | Trait.PICKS | Trait.FLIPS)


class _Bound(NamedTuple):
    """A value is at most `factor` times the largest value in the compute dtype to the power of `degree`.

    Bounds compare as tuples: a bound of less degree is smaller, since the largest value is far above any factor.
    """

    degree: int
    factor: float


_NO_LARGER = _Bound(1, 1.0)


def activations(program: Program) -> dict[int, set[int]]:
    """The results of an expensive function that are at most as large as some value in the compute dtype.

    Each with the results of tanh that it is computed from on the same side of a dot.
    """
    bounds: dict[int, _Bound] = {}
    expensive: dict[int, set[int]] = {}
    # Each tanh of a value in the compute dtype, unless it is small beside what it scales. No sigmoid, which may be a
    # probability: products of its complement may be zero where one of them is rounded.
    alone = set[int]()
    largest = dtype_facts(program.low).max

    def bound(number: int) -> _Bound | None:
        fact, found = program.facts[number], bounds.get(number)
        # Known numbers do not grow with the operand: the `1.0` of a sigmoid has degree 0.
        if (known := fact.numbers.range) is not None:
            return _Bound(0, known.largest)
        # A value in the compute dtype is finite, whatever it was computed from: `h + h` is no larger than itself.
        return min(found or _NO_LARGER, _NO_LARGER) if fact.precision is Precision.LOW else found

    def size(number: int) -> int:
        return math.prod(program.avals[number].shape)

    for equation in program.equations:
        name, operands = equation.node.name, equation.node.ins
        if not equation.results:  # it prints or checks
            continue
        # A smaller operand, such as a statistic, a row of parameters or a gate, is computed in a kernel of its own,
        # where its cost does not count.
        large = []
        for n in operands:  # a loop, since it runs for every equation
            if n in expensive and not is_less(size(n), size(equation.results[0])):
                large.append(n)
            elif n in alone:
                alone.remove(n)
        if name in LARGEST_RESULT:
            bounds[equation.results[0]] = _Bound(0, LARGEST_RESULT[name])
            if name == "tanh" and program.precision(operands[0]) is Precision.LOW:
                alone.add(equation.results[0])
        elif name in _SAME and (found := bound(operands[0])) is not None:
            bounds.update(dict.fromkeys(equation.results, found))
        elif name == "mul" or name in ADDS:
            one, other = map(bound, operands)
            if one is None or other is None:
                continue
            if name == "mul":
                bounds[equation.results[0]] = _Bound(one.degree + other.degree, one.factor * other.factor)
            elif one.degree == other.degree:  # `x + 1` may exceed the largest value by one
                bounds[equation.results[0]] = _Bound(one.degree, one.factor + other.factor)
        elif name == "select_n":
            cases = [found for n in operands[1:] if (found := bound(n)) is not None]
            if len(cases) < len(operands) - 1:
                continue
            # A case of degree 0 does not shrink with the operand: twice 40000 is infinite in float16.
            degree, _ = max(cases)
            factors = [case.factor if case.degree == degree else case.factor / largest for case in cases]
            bounds[equation.results[0]] = _Bound(degree, max(factors))
        elif name == "expm1" and _is_never_positive(operands[0], program):
            bounds[equation.results[0]] = _Bound(0, 1.0)
        else:
            continue
        if large or is_expensive(equation):
            near = [n for n in large if program.facts[n].depth == equation.depth]
            expensive[equation.results[0]] = alone.intersection(near).union(*[expensive[n] for n in near])
    return {
        number: inner
        for number, inner in expensive.items()
        if (found := bounds.get(number)) is not None and found <= _NO_LARGER and (found.degree or number in alone)
    }


def _is_never_positive(number: int, program: Program) -> bool:
    """Whether a value is `where(x > 0, 0, x)`, of which ELU takes the exponential."""
    producers = program.recorded.producers
    node = producers.get(number)
    if node is None or node.name != "select_n" or len(node.ins) != 3:  # `lax.select_n` takes any number of cases
        return False
    predicate, where_not, where_positive = node.ins
    compares, known = producers.get(predicate), program.facts[where_positive].numbers.range
    if compares is None or known is None or not is_positive(compares, program.recorded):
        return False
    return compares.ins[0] == where_not and known.largest == 0
