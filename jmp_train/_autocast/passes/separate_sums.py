"""Sums that rematerialize what they read in expressions of their own.

    h:f32 = exp a:f16                 h:f32 = exp a:f16
    s:f32 = reduce_sum h*      ->     s:f32 = reduce_sum h*2         (an expression that no other reader's is equal to)
    ...                               ...
    g:f32 = mul h* y                  g:f32 = mul h* y

XLA computes equal expressions once. One that is expensive, as an exponential is, it then stores in float32 rather than
compute it in the kernel of each reader: by its cost model three readers of `exp (a + bias)` on an H200 are too many,
and so are two of `exp (tanh a)`, the softmax of capped logits. Read by expressions that are not equal, the value that
they are computed from is read in 16 bits by each.

The sums on the near side have an expression of their own of what they read as rematerialized. Where an exponential is
computed from another expensive value, so has every single sum and maximum, with what XLA computes in its kernel alone.
Everywhere, that would cost: a U-Net with `silu` behind GroupNorm would move 16 % more bytes.

Decides which uses read which expression. Does not decide what is rematerialized; see `save_or_remat.py`.
"""

from __future__ import annotations

from ..analysis.residual_costs import fuses, is_expensive
from ..ir import SEPARATE, Program, Use
from ..primitives import EXPONENTIALS, Trait, having

_EXTREMES = having(Trait.EXTREMES)
_NEAR = -1  # stands for the kernels of all sums on the near side, where these share an expression


def separate_sums(program: Program) -> Program:
    """The program whose sums read rematerialized values as `SEPARATE` and what follows: a number for each sum."""
    remat, facts, nested = program.residuals.remat, program.facts, _nested(program)
    kernels = _kernels(program) if nested else [None] * len(program.equations)
    numbers: dict[int, int] = {}  # of expressions, by the sum in whose kernel they are computed
    equations = [*program.equations]
    for i, equation in enumerate(program.equations):
        uses = equation.uses
        for position, (value, dtype, residual) in enumerate(equation.uses):  # runs for every use, and calls nothing
            kernel = kernels[i] if value in nested else None
            if kernel is None and residual and value in remat and equation.depth <= facts[value].depth:
                kernel = _NEAR
            if kernel is not None:
                number = numbers.setdefault(kernel, SEPARATE + len(numbers))
                uses = [*uses[:position], Use(value, dtype, number), *uses[position + 1 :]]
        if uses is not equation.uses:
            equations[i] = equation.replace(uses=uses)
    return program.replace(equations=equations) if numbers else program


def _nested(program: Program) -> set[int]:
    """Rematerialized exponentials of expensive values, and the expensive values that they are computed from."""
    remat = program.residuals.remat
    expensive: set[int] = set()
    outer: set[int] = set()
    if EXPONENTIALS.isdisjoint([equation.node.name for equation in program.equations]):
        return outer
    for equation in program.equations:
        if remat.isdisjoint(equation.results):
            continue
        inside = not expensive.isdisjoint(equation.operands)
        if inside and equation.node.name in EXPONENTIALS:
            outer.update(equation.results)
        if inside or is_expensive(equation):
            expensive.update(equation.results)
    read = {use.value for equation in program.equations for use in equation.uses if use.residual}
    found = outer & read
    for equation in reversed(program.equations) if found else ():
        if not found.isdisjoint(equation.results):
            found.update(expensive.intersection(equation.operands))
    return found


def _kernels(program: Program) -> list[int | None]:
    """For each equation the sum or maximum in whose kernel alone XLA computes it, if there is one."""
    readers: dict[int, list[int]] = {}
    for i, equation in enumerate(program.equations):
        for use in equation.uses:
            readers.setdefault(use.value, []).append(i)
    kernels: list[int | None] = [None] * len(program.equations)
    for i, equation in reversed([*enumerate(program.equations)]):
        if equation.entry.has_own_kernel or equation.node.name in _EXTREMES:
            kernels[i] = i
        elif fuses(equation) and not any([number in program.outputs for number in equation.results]):
            found = {kernels[reader] for number in equation.results for reader in readers.get(number, ())}
            if len(found) == 1:
                (kernels[i],) = found
    return kernels
