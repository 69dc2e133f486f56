"""Sums that rematerialize their operands in expressions of their own.

    h:f32 = exp a:f16                 h:f32 = exp a:f16
    s:f32 = reduce_sum h*      ->     s:f32 = reduce_sum h*2         (an expression that no other reader's is equal to)
    ...                               ...
    g:f32 = mul h* y                  g:f32 = mul h* y

XLA computes equal expressions once. If the expression is expensive, such as an exponential, XLA stores its result in
float32 rather than compute it in the kernel of each reader: by its cost model three readers of `exp (a + bias)` on an
H200 are too many, and so are two of `exp (tanh a)`, the softmax of capped logits. If the expressions are not equal,
each reads its operand in 16 bits.

The sums on the near side share one expression of a rematerialized value, which no other reader has. If an exponential
is computed from another expensive value, every single sum and maximum has an expression of its own, together with the
equations that XLA computes in its kernel alone. To do so everywhere would cost: a U-Net with `silu` behind GroupNorm
would move 16 % more bytes.

Decides which uses read which expression. Does not decide what is rematerialized; see `save_or_remat.py`.
"""

import collections

from ..analysis.residual_costs import fuses, is_expensive
from ..ir import SEPARATE, Program, Use
from ..primitives import EXPONENTIALS, Trait, having

_EXTREMES = having(Trait.EXTREMES)


def separate_sums(program: Program) -> Program:
    """The program whose sums read rematerialized values with residual numbers from `SEPARATE` on."""
    remat, facts, nested = program.residuals.remat, program.facts, _nested(program)
    kernels = _kernels(program) if nested else [None] * len(program.equations)
    numbers: dict[int, dict[int, int]] = {}  # by the exponential, and by the sum in whose kernel it is computed
    equations = [*program.equations]
    for i, equation in enumerate(program.equations):
        uses, kernel = equation.uses, kernels[i]
        for position, (value, dtype, residual) in enumerate(equation.uses):  # runs for every use, and calls nothing
            number = 0
            if kernel is not None and value in nested:
                found = numbers.setdefault(nested[value], {})
                number = found.setdefault(kernel, SEPARATE + len(found))
            elif residual and value in remat and equation.depth <= facts[value].depth:
                number = SEPARATE
            if number:
                uses = [*uses[:position], Use(value, dtype, number), *uses[position + 1 :]]
        if uses is not equation.uses:
            equations[i] = equation.replace(uses=uses)
    return program.replace(equations=equations)


def _nested(program: Program) -> dict[int, int]:
    """Rematerialized exponentials of expensive values, and the expensive values that each is computed from."""
    if EXPONENTIALS.isdisjoint([equation.node.name for equation in program.equations]):
        return {}
    remat = program.residuals.remat
    expensive: set[int] = set()
    outer: set[int] = set()
    for equation in program.equations:
        if remat.isdisjoint(equation.results):
            continue
        inside = not expensive.isdisjoint(equation.operands)
        if inside and equation.node.name in EXPONENTIALS:
            outer.update(equation.results)
        if inside or is_expensive(equation):
            expensive.update(equation.results)
    if not outer:
        return {}
    read = {use.value for equation in program.equations for use in equation.uses if use.residual}
    found = {number: number for number in outer & read}
    for equation in reversed(program.equations):
        for result in equation.results:
            if result in found:
                for number in expensive.intersection(equation.operands):
                    found.setdefault(number, found[result])
    return found


def _kernels(program: Program) -> list[int | None]:
    """For each equation the sum or maximum in whose kernel alone XLA computes it, if there is one."""
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for i, equation in enumerate(program.equations):
        for use in equation.uses:
            readers[use.value].append(i)
    kernels: list[int | None] = [None] * len(program.equations)
    for i, equation in reversed([*enumerate(program.equations)]):
        if equation.entry.has_own_kernel or equation.node.name in _EXTREMES:
            kernels[i] = i
        elif fuses(equation) and not any([number in program.outputs for number in equation.results]):
            found = {kernels[reader] for number in equation.results for reader in readers.get(number, ())}
            if len(found) == 1:
                (kernels[i],) = found
    return kernels
