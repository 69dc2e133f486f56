"""Values that all readers have to read rounded.

    a:f16 = dot_general x w             a:f16 = dot_general x w
    h:f32 = exp a:f32                   b:f32 = cast a
    y:f16 = dot_general h:f16 w    ->   c:f32 = rounded b          (on the grid of float16)
    g:f32 = mul h* y                    h:f32 = exp c
                                        ...
                                        s:f16 = saved a            (what `insert_casts` writes for `h*`)
                                        p:f32 = remat exp (cast s)

XLA may drop a cast to 16 bits and back where it fuses both. Two readers of one value then compute from different bits.
An exponential turns an absolute error into a relative one, so that a softmax and its gradient, which rematerializes the
exponential, would no longer match. And a squared distance `|a|² - 2 a b` needs the same `a` in both terms. These
readers round explicitly (`Op.ROUND`), which fuses and costs no memory traffic. If both sides read the saved copy
instead, both exponentials would be one expression, which XLA would compute once and store in float32. The same holds
for the exponentials of a sum and of the readers across the dot: if a rematerialized operand is rounded, there is a
different rounding expression for each number of `Use.residual`. In the body of a scan or `shard_map` all values from
which an exponential or a sum of squares is computed are rounded, because `body_residuals` may rematerialize them in
another body. The gradient of a norm is a projection, which is right only for the numbers that were normalized: where it
nearly cancels, that of `layer_norm(x @ w + b)` in a scan was wrong by 7 % in bfloat16, for 0.4 % in hand-written code.

Decides which values these are.
"""

import dataclasses
from collections.abc import Callable, Iterable

from ..analysis.residual_costs import fuses
from ..analysis.wide_product import WideProduct
from ..ir import Equation, Precision, Program
from ..primitives import EXPONENTIALS, Rule
from .bodies import KINDS

_SUMS = frozenset({"reduce_sum"})
_SQUARES = frozenset({"integer_pow", "square", "mul"})
_SCALES = frozenset({"mul", "div", "neg"})


def shared_roundings(program: Program) -> Program:
    """The program whose residuals say which values are rounded for all readers."""
    residuals = program.residuals
    squared = _low(program, leading_to(program, _squared(program), _moves_or_scales))
    exponentials = [
        number for equation in program.equations if equation.node.name in EXPONENTIALS for number in equation.results
    ]
    if program.place.body_of in KINDS:  # another body may rematerialize whatever is elementwise
        exponents = _low(program, leading_to(program, [*exponentials, *_squared_and_summed(program)], fuses))
    else:
        read = leading_to(program, exponentials, lambda equation: not residuals.remat.isdisjoint(equation.results))
        # Values that are neither saved nor rematerialized, such as the largest logit of a row, are equal on both sides.
        exponents = _low(program, read & (residuals.saved | residuals.remat))
    rounded = residuals.rounded | exponents | squared
    return program.replace(residuals=dataclasses.replace(residuals, rounded=rounded, squared=squared))


def leading_to(program: Program, numbers: Iterable[int], through: Callable[[Equation], bool]) -> set[int]:
    """Some values, and all values from which equations that satisfy `through` compute them."""
    found = set(numbers)
    for equation in reversed(program.equations) if found else ():
        if not found.isdisjoint(equation.results) and through(equation):
            found.update(equation.operands)
    return found


def _squared_and_summed(program: Program) -> list[int]:
    """The values whose squares are summed, perhaps scaled or masked before."""
    summed = {number for equation in program.equations if equation.node.name in _SUMS for number in equation.operands}
    summed = leading_to(
        program, summed, lambda equation: _moves_or_scales(equation) or equation.node.name == "select_n"
    )
    squares = [e for e in program.equations if e.node.name in _SQUARES and not summed.isdisjoint(e.results)]
    return [e.operands[0] for e in squares if e.node.name != "mul" or e.operands[0] == e.operands[-1]]


def _low(program: Program, numbers: Iterable[int]) -> frozenset[int]:
    return frozenset(number for number in numbers if program.precision(number) is Precision.LOW)


def _squared(program: Program) -> set[int]:
    """The values that a product, here or in a body, multiplies with themselves."""
    found: set[int] = set()
    for equation in program.equations:
        if isinstance(equation.entry, WideProduct) and equation.entry.meets_squares:
            found.update(equation.operands)
        for body in equation.bodies if equation.node.name != "while" else equation.bodies[:1]:  # not its condition
            operands = zip(equation.given, body.inputs, strict=True)
            found.update(number for number, inside in operands if inside in body.residuals.squared)
    return found


def _moves_or_scales(equation: Equation) -> bool:
    return equation.entry.rule is Rule.SHAPE or equation.node.name in _SCALES
