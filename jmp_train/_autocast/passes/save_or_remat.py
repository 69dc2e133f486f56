"""What crosses from one side of a dot to the other: saved in 16 bits, saved as it is, or rematerialized.

    h:f32 = exp a:f16              h = exp a                       a: saved
    s:f32 = reduce_sum h           s = reduce_sum h                h: rematerialized from a
    y:f16 = dot_general h:f16 w    y = dot_general h:f16 w
    g:f32 = mul h y           ->   g = mul h* y                    (* read across the dot)

The backward pass of a network reads what its forward pass computed, and what lies inside a GELU, a softmax or a
normalisation is float32. Saved as it is, it would cost what mixed precision saves; rounded, it would cost accuracy and,
in float16, range. But it is elementwise in values that are saved in 16 bits anyway, since dots made them or read them.
Elementwise equations fuse with what reads them, so rematerializing costs no memory traffic and changes no bit (Chen et
al., "Training deep nets with sublinear memory cost", 2016, do so for whole layers).

A value that is read across a dot is, in this order:

1. *saved in the compute dtype*, if a dot reads it in that dtype anyway and no reader minds the rounding
   (`Fact.has_low_copy`), or if it is in the compute dtype and a dot's result, or computed from one: then 2 bytes a
   number are written once, behind an `optimization_barrier`, and read by all. The same holds for a cotangent that a
   chain with an expensive function makes and that a sum reads beside others, as a norm's backward pass reads the
   gradient of a GELU: the kernel of the sum ends before the others can start, so XLA stores it, in float32;
2. *rematerialized*, if it is elementwise (`Trait.FUSES`, `Trait.EXPENSIVE`) in values of which the reader finds the
   very numbers that the equation read, or in one saved value of its own dtype: 0 bytes more are saved, and the sources
   are read instead, which are no larger;
3. *saved as it is*, if it is a comparison (1 byte, where both operands would be saved otherwise), or an expensive
   function in the compute dtype, which XLA would otherwise store in float32, its rounding dropped;
4. *read as it is*: the compiler decides.

Decides this for every value, and which operands are read that way. Does not decide dtypes; see `assign_dtypes.py`.
Values that one scan hands to another are the business of `scan_residuals.py`, which asks `is_elementwise` of the same
table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..analysis.dot_sizes import DotSizes
from ..analysis.wide_product import Cause, WideProduct
from ..ir import Access, Equation, Fact, Precision, Program, Residuals
from ..primitives import DOTS, Rule, Trait, having
from .rewrites.relu_mask import is_positive, relu_operand

if TYPE_CHECKING:
    from ..planner import Context

_EXPENSIVE = having(Trait.EXPENSIVE)
_ELEMENTWISE = _EXPENSIVE | having(Trait.FUSES)
_IN_RULES = _ELEMENTWISE | having(Trait.BITWISE)
_RULES = (Rule.HIGH, Rule.WIDEST, Rule.FOLLOW, Rule.SHAPE)


def save_or_remat(program: Program, context: Context) -> Program:
    """The program with its `residuals`, and with those operands marked that are read as saved or rematerialized."""
    values: dict[int, _Value] = {}
    equations, saves_low = [], context.saves_low
    for equation in program.equations:
        for number in equation.results:
            values[number] = _value_of(program, equation, values, number, saves_low)
        uses = equation.uses
        for position, use in enumerate(uses):
            known = use.value in values and not use.residual
            if known and _is_residual(program, context, equation, values, position):
                uses = [*uses[:position], use._replace(residual=True), *uses[position + 1 :]]
        equations.append(equation if uses is equation.uses else dataclasses.replace(equation, uses=uses))
    shared = _shared_with_sums(program, equations) if saves_low else set()
    if shared:
        values.update(dict.fromkeys(shared, _Value(saved=True)))
        equations = [_reading_saved(equation, shared) for equation in equations]
    saved = frozenset(number for number, value in values.items() if value.saved)
    remat = frozenset(number for number, value in values.items() if value.remat)
    anchors = frozenset(
        number
        for equation in equations
        if equation.node.name in DOTS and is_short_product(equation) and not remat.isdisjoint(equation.results)
        for number in equation.operands
        if number not in saved and number not in remat
    )
    return dataclasses.replace(program, equations=equations, residuals=Residuals(saved, remat, anchors))


@dataclasses.dataclass(slots=True)
class _Value:
    """What is decided of a value, and what that rests on.

    Attributes:
      saved, remat: the decision; neither where readers read it as it is.
      from_dot: a dot's result or a mean over windows, possibly rearranged: it is in memory.
      source: the one saved value that a value in the compute dtype is, or is computed from, if it is one.
      expensive: rematerialized for kernels of their own too, since XLA would store it for them in float32.
      dot_reads_relu: a relu's result that a dot reads in the compute dtype, so that it is in memory, whatever else
        reads it.
    """

    saved: bool = False
    remat: bool = False
    from_dot: bool = False
    source: int | None = None
    expensive: bool = False
    dot_reads_relu: bool = False


_ARGUMENT = _Value()


def _value_of(program: Program, equation: Equation, values: dict[int, _Value], number: int, saves_low: bool) -> _Value:
    """What result `number` of an equation is to those who read it across a dot."""
    fact, node = program.facts[number], equation.node
    operands = [values.get(operand, _ARGUMENT) for operand in node.ins]
    value = _Value()
    if fact.precision is Precision.RECORDED:
        is_mask = program.avals[number].dtype == np.bool_ and any(
            program.precision(operand) is not Precision.RECORDED for operand in node.ins
        )
        value.remat = is_mask and is_positive(node, program.recorded) and operands[0].dot_reads_relu
        value.saved = is_mask and not value.remat
    elif fact.precision is Precision.LOW:
        dot = equation.entry.rule is Rule.LOW and node.name in DOTS
        mean = bool(equation.computes)
        moved = equation.entry.rule is Rule.SHAPE and any(operand.from_dot for operand in operands)
        value.from_dot = dot or mean or moved
        if not (value.from_dot or fact.to_dot):
            value.source = _common_source(program, equation, values)
            value.remat = value.source is not None or _joins_residuals(equation, operands)
        in_memory = value.from_dot or any(operand.from_dot for operand in operands)
        value.saved = not value.remat and (in_memory or (is_expensive(equation) and not fact.to_dot))
        value.source = number if value.saved else value.source
    elif fact.precision is Precision.FULL and fact.computed:
        value.saved = fact.has_low_copy
        value.remat = not value.saved and (
            _reads_residuals(program, equation, values)
            or _expands(program, equation)
            or (not fact.delicate and _is_distance(program, equation, values))
        )
        value.expensive = is_expensive(equation) or any(o.remat and o.expensive for o in operands)
    low = fact.has_low_copy or fact.precision is Precision.LOW
    value.dot_reads_relu = fact.to_dot and low and relu_operand(node, program.recorded) is not None
    if not saves_low:  # float32 values wait as they are, and nothing is rematerialized
        is_low = fact.precision is Precision.LOW
        value = _Value(saved=is_low and (value.saved or value.remat), from_dot=value.from_dot, source=value.source)
    return value


def _shared_with_sums(program: Program, equations: Sequence[Equation]) -> set[int]:
    """The cotangents in float32 that XLA would store: expensive chains end in them, and they meet a sum of themselves.

    So does the gradient of what follows a norm: sums over rows of it are subtracted from it.
    """
    expensive: set[int] = set()  # not known yet without computing an expensive function
    after_sum: set[int] = set()  # not known before the kernel of a sum has ended
    meets: set[int] = set()  # read beside what is after a sum
    for equation in equations:
        elementwise = equation.node.name in _ELEMENTWISE
        near = [use.value for use in equation.uses if not use.residual]
        if _is_sum(equation) or ((elementwise or equation.entry.rule is Rule.SHAPE) and not after_sum.isdisjoint(near)):
            after_sum.update(equation.results)
            meets.update(near if elementwise else ())
        # A statistic that is broadcast is computed once a row.
        chained = equation.node.name != "broadcast_in_dim" and not expensive.isdisjoint(equation.operands)
        if elementwise and (chained or is_expensive(equation)):
            expensive.update(equation.results)
    candidates: set[int] = set()
    for equation in reversed(equations):
        if meets.isdisjoint(equation.results) or not after_sum.isdisjoint(equation.results):
            continue
        meets.update(equation.operands)
        if not expensive.isdisjoint(equation.results) and program.place.is_backward(equation.node):
            candidates.update([n for n in equation.results if _may_be_saved_low(program.facts[n])])
    candidates.difference_update(program.outputs)
    readers: dict[int, list[Equation]] = {number: [] for number in candidates}
    for equation in equations if candidates else ():
        for number in candidates.intersection(equation.operands):
            readers[number].append(equation)
    return {number for number, found in readers.items() if len(found) > 1 and any(map(_is_sum, found))}


def _may_be_saved_low(fact: Fact) -> bool:
    return fact.precision is Precision.FULL and not fact.has_low_copy and not fact.delicate


def _is_sum(equation: Equation) -> bool:
    return equation.entry.never_low and equation.entry.rule is Rule.HIGH


def _reading_saved(equation: Equation, saved: set[int]) -> Equation:
    """The equation, reading saved copies of some values that are computed on its own side of the dots."""
    if saved.isdisjoint(equation.operands):
        return equation
    uses = [use._replace(residual=use.residual or use.value in saved) for use in equation.uses]
    return dataclasses.replace(equation, uses=uses)


def _is_residual(
    program: Program, context: Context, equation: Equation, values: dict[int, _Value], position: int
) -> bool:
    """Whether an operand is read as saved or rematerialized; kernels of their own read it so on the near side too."""
    use, access = equation.uses[position], equation.accesses[position]
    fact, value = program.facts[use.value], values[use.value]
    if fact.has_low_copy and access is Access.CARRIED:
        return False
    if not (value.saved or (value.remat and use.dtype is not None)):
        return False
    shared = fact.has_low_copy or (value.expensive and context.flow.readers[use.value] > 1)
    return equation.depth > fact.depth or (shared and use.dtype is not None and access is not Access.FUSED)


def _reads_residuals(program: Program, equation: Equation, values: dict[int, _Value]) -> bool:
    """Whether an equation is elementwise, and readers across a dot find the numbers it read, some of them saved."""
    if not is_rematerializable(equation) or any([program.facts[n].has_low_copy for n in equation.node.ins]):
        return False
    found = [values.get(number, _ARGUMENT) for number in equation.node.ins]
    return any([value.saved or value.remat for value in found])


def _expands(program: Program, equation: Equation) -> bool:
    """Whether an equation is a short product that makes more numbers than it reads: reading those again moves less."""
    product = equation.node.name in DOTS and is_short_product(equation)
    sizes = DotSizes.of(program.recorded, equation.node) if product else None
    return sizes is not None and sizes.result > max(sizes.operands)


def _is_distance(program: Program, equation: Equation, values: dict[int, _Value]) -> bool:
    """Whether an equation adds a value with a saved low copy and a literal, as the derivative `(1 + y) * (1 - y)` of a
    `tanh` does."""
    low = [number for number in equation.node.ins if program.facts[number].has_low_copy]
    others = [number for number in equation.node.ins if number not in low]
    return equation.node.name in ("add", "sub") and len(low) == 1 and all(n in program.constants for n in others)


def _joins_residuals(equation: Equation, operands: Sequence[_Value]) -> bool:
    """Whether an equation concatenates residuals: the result is as large as they are, and need not be saved too."""
    return equation.node.name == "concatenate" and all(operand.saved or operand.remat for operand in operands)


def _common_source(program: Program, equation: Equation, values: dict[int, _Value]) -> int | None:
    """The one saved value that an equation in the compute dtype is elementwise in, literals and parameters aside.

    The result is no larger and need not be saved beside that: a dot's result with its bias, which is there anyway, the
    derivative `2 * x` of a square, the sigmoid of a SiLU and its derivative, the error function of a GELU.
    """
    found = {
        values.get(number, _ARGUMENT).source
        for number in equation.node.ins
        if program.precision(number) is not Precision.WEAK
    }
    return found.pop() if len(found) == 1 and is_rematerializable(equation) else None


def is_rematerializable(equation: Equation) -> bool:
    """Whether an equation is elementwise, so that XLA fuses it with whatever reads it."""
    if equation.bodies:
        rule = equation.node.name == "custom_jvp_call" and len(equation.results) == 1
        return rule and all(inner.node.name in _IN_RULES for inner in equation.bodies[0].equations)
    return equation.entry.rule in _RULES and equation.node.name in _ELEMENTWISE


def is_expensive(equation: Equation) -> bool:
    """Whether XLA would rather store the result than compute it twice."""
    if equation.bodies and equation.node.name == "custom_jvp_call":
        return any([inner.node.name in _EXPENSIVE for inner in equation.bodies[0].equations])
    return equation.node.name in _EXPENSIVE


def is_short_product(equation: Equation) -> bool:
    """Whether an equation is a product written as a few multiplications and additions, which fuse with its readers."""
    entry = equation.entry
    return isinstance(entry, WideProduct) and entry.cause is Cause.SHORT and not entry.of_derivative
