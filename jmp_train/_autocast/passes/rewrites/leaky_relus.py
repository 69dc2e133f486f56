"""The gradient of a leaky relu behind a norm, as one selection in float32.

    p:f16 = select_n m 0.0 g:f16
    q:f16 = select_n m g 0.0
    r:f32 = mul 0.2 q              ->    d:f32 = add_any[scale_where_false] m g 0.2      (where(m, g, 0.2 * g))
    d:f32 = add_any p r

The numbers are the same, since one term is zero. But sums of the norm's gradient read `d` in one kernel, and equations
that need these sums read it in another: for an H200, XLA stores `p` and `q` for both, or `d` in float32. For the
selection it stores nothing, or the mask, a byte per number, unless it rematerializes that, as behind a norm over rows.
Networks of convolutions move 5 to 20 % fewer bytes. Behind a norm without a bias of its own, where no sum reads `d`
directly, they would move up to 9 % more. If a dot reads `d`, that is in 16 bits, and nothing changes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from ...._dtypes import FLOAT32
from ...._jaxpr import Node
from ...analysis.relus import is_norm_of_rows, is_zeros
from ...ir import Equation, Precision, Program, Use


class _Half(NamedTuple):
    """A value in the compute dtype where a mask is true, or where it is false; elsewhere zero."""

    mask: Use
    selected: Use
    where: bool


def leaky_relus(program: Program) -> Program:
    """The program with a selection for each sum of values where a mask is true and scaled values where it is false."""
    halves: dict[int, _Half] = {}
    scaled: dict[int, tuple[_Half, int]] = {}  # those that are multiplied, each with its factor
    found: dict[int, Equation] = {}
    summed = set[int]()
    for i, equation in enumerate(program.equations):
        name, operands = equation.node.name, equation.node.ins
        if name == "select_n" and (half := _half(program, equation)) is not None:
            halves[equation.results[0]] = half
        elif name == "mul" and halves:
            for number, slope in (operands, operands[::-1]):
                # Not by infinity, which times zero is NaN. (A range is of finite numbers.)
                if number in halves and (known := program.facts[slope].numbers.range) is not None and known.largest:
                    scaled[equation.results[0]] = halves[number], slope
        elif name == "add_any" and scaled and program.precision(equation.results[0]) is Precision.FULL:
            for one, other in (operands, operands[::-1]):
                if one in halves and other in scaled and _are_complements(halves[one], scaled[other][0]):
                    found[i] = _selection(program, equation, *scaled[other])
        elif name == "reduce_sum":
            summed.update(operands)
    found = {i: selection for i, selection in found.items() if not summed.isdisjoint(selection.results)}
    if not found:
        return program
    return program.replace(equations=[found.get(i, equation) for i, equation in enumerate(program.equations)])


def _half(program: Program, selection: Equation) -> _Half | None:
    mask, *cases = selection.uses
    zeros = [is_zeros(use.value, program.recorded) for use in cases]
    if sorted(zeros) != [False, True]:
        return None
    selected = cases[zeros.index(False)]
    is_low = program.precision(selected.value) is Precision.LOW
    return _Half(mask, selected, where=zeros[0]) if is_low else None


def _are_complements(one: _Half, other: _Half) -> bool:
    return one == other._replace(where=not other.where)


def _selection(program: Program, total: Equation, scaled: _Half, slope: int) -> Equation:
    comparison = program.recorded.producers.get(scaled.mask.value)
    of_rows = comparison is not None and any([is_norm_of_rows(each, program.recorded) for each in comparison.ins])
    mask = scaled.mask if of_rows else scaled.mask._replace(residual=0)
    uses = [mask, scaled.selected._replace(dtype=FLOAT32), Use(slope, FLOAT32)]
    return total.replace(uses=uses, rewrite=scale_where_true if scaled.where else scale_where_false)


def scale_where_false(_: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """A cotangent `[...]`, multiplied by a slope where a mask `[...]` is false; of a mask, a cotangent and a slope."""
    mask, cotangent, slope = operands
    return [lax.select(mask, cotangent, cotangent * slope)]


def scale_where_true(_: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """A cotangent `[...]`, multiplied by a slope where a mask `[...]` is true; of a mask, a cotangent and a slope."""
    mask, cotangent, slope = operands
    return [lax.select(mask, cotangent * slope, cotangent)]
