"""What XLA would store in float32 between the kernel of a sum and what waits for that sum, saved in 16 bits.

    t:f32 = tanh x:f16                       t:f32 = tanh x
    h:f32 = mul x t                          h:f32 = mul x t
    s:f32 = reduce_sum h          ->         s:f32 = reduce_sum h*        (* the saved copy, in the compute dtype)
    n:f32 = sub h s                          n:f32 = sub h* s

The sums of a norm are a kernel of their own, which ends before anything can be normalised, and XLA does not compute all
that comes before them in both kernels. It stores what they share, in float32, and reads that at least twice. A copy in
16 bits is half of the bytes. Flax's `dtype` and torch.amp round the same numbers.

A value that a dot depends on is saved so if

* it is the result of an activation function that a norm reads, perhaps squared or reshaped first: expensive, and no
  larger than the values in the compute dtype that it is computed from (`analysis/activations.py`), so that it is finite
  where they are;
* or it is a cotangent that a sum reads as it is, as the gradient of a GELU behind a norm: sums over rows of it are
  subtracted from it. Where it overflows, the loss scale skips the step. Sums and selections in 16 bits, such as the
  gradients of a relu, XLA computes again in each kernel.

Up to that rounding it is computed in float32. Decides which values these are. What is read across a dot was decided
before, by `save_or_remat.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..._dtypes import FLOAT32
from ..analysis.activations import activations
from ..analysis.residual_costs import is_expensive
from ..ir import Equation, Fact, Precision, Program
from ..primitives import Rule, Trait, having

if TYPE_CHECKING:
    from ..planner import Context

_ELEMENTWISE = having(Trait.FUSES | Trait.EXPENSIVE)


def save_for_sums(program: Program, context: Context) -> Program:
    """The program whose sums, and what waits for them, read saved copies of what XLA would store for both."""
    found = _shared_with_sums(program, context) if context.saves_low else None
    if not found:
        return program
    facts, equations = [*program.facts], []
    for equation in program.equations:
        uses = equation.uses
        if not found.isdisjoint(equation.operands):
            uses = [use._replace(residual=use.residual or use.value in found) for use in uses]
        for number in found.intersection(equation.results):
            if facts[number].precision is Precision.LOW and equation.entry.rule is not Rule.LOW:
                uses = [use._replace(dtype=FLOAT32) for use in uses]
                facts[number] = dataclasses.replace(facts[number], precision=Precision.FULL)
        equations.append(equation if uses is equation.uses else equation.replace(uses=uses))
    residuals = program.residuals
    residuals = dataclasses.replace(residuals, saved=residuals.saved | found, remat=residuals.remat - found)
    return dataclasses.replace(program, facts=facts, equations=equations, residuals=residuals)


def _shared_with_sums(program: Program, context: Context) -> set[int]:
    """The values that a sum and something beside a sum read, and that a dot depends on."""
    expensive, after_sum, beside = _around_sums(program)
    if not beside:
        return set()
    forward, cotangents = set[int](), set[int]()
    readers = Counter[int]()
    read_by_sum, summed = set[int](), set[int]()  # summed: a sum reads them, or what is elementwise in them
    for equation in reversed(program.equations):
        name, results, near = equation.node.name, equation.results, _near(equation)
        if not beside.isdisjoint(results) and after_sum.isdisjoint(results):
            beside.update(equation.operands)
            found = [n for n in summed.intersection(results) if name in _ELEMENTWISE and readers[n] > 1]
            shared = {n for n in found if context.uses[n].reaches_dot and _may_be_rounded(program.facts[n])}
            if not program.place.is_backward(equation.node):
                forward |= shared & expensive
            else:
                shared &= read_by_sum
                cotangents |= {n for n in shared if name == "mul" or program.precision(n) is Precision.FULL}
        readers.update(near)
        if equation.entry.has_own_kernel:
            read_by_sum |= near
        if equation.entry.has_own_kernel or (_follows(equation) and not summed.isdisjoint(results)):
            summed |= near
    if forward:
        forward &= activations(program)
    return (forward | cotangents).difference(program.outputs)


def _around_sums(program: Program) -> tuple[set[int], set[int], set[int]]:
    """The values that come of an expensive function, those that wait for a sum, and those that are read beside these.

    Each as far as a kernel goes: a dot's result is in memory, whatever it is computed from.
    """
    expensive, after_sum, beside = set[int](), set[int](), set[int]()
    for equation in program.equations:
        elementwise, is_sum = equation.node.name in _ELEMENTWISE, equation.entry.has_own_kernel
        if is_sum or (after_sum and _follows(equation)):
            near = _near(equation)
            if is_sum or not after_sum.isdisjoint(near):
                after_sum.update(equation.results)
                beside.update(near if elementwise else ())
        if elementwise:
            chain = expensive.intersection(equation.operands)
            if is_expensive(equation) or (chain and _is_large(program, chain, equation.results[0])):
                expensive.update(equation.results)
    return expensive, after_sum, beside


def _near(equation: Equation) -> set[int]:
    """The operands that are not read across a dot."""
    return {value for value, _, residual in equation.uses if not residual}


def _follows(equation: Equation) -> bool:
    return equation.node.name in _ELEMENTWISE or equation.entry.rule is Rule.SHAPE


def _is_large(program: Program, numbers: Iterable[int], result: int) -> bool:
    """Whether one of some operands is as large as a result: a statistic that is broadcast is computed once a row."""
    size = math.prod(program.avals[result].shape)
    return any([math.prod(program.avals[number].shape) == size for number in numbers])


def _may_be_rounded(fact: Fact) -> bool:
    return not (fact.has_low_copy or fact.sensitive)
