"""Biases and scales applied in float32, so that `jax.grad(autocast(f))` sums their gradients in float32.

    c:f16[8]   = cast b                      c:f32[4,8] = cast x
    y:f16[4,8] = add x:f16[4,8] c     ->     d:f32[4,8] = add c b
                                             y:f16[4,8] = cast d

The transpose of a broadcast is a sum, which JAX computes in the dtype of what was broadcast. In 16 bits the gradient of
the one temperature of an attention, a sum of thousands of numbers of either sign, may be off by half. The casts fuse
with the equations around them. In a program that contains its backward pass these sums are equations, which run in
float32 anyway.

Decides which equations those are: sums and products of 16-bit values with smaller parameters.
"""

import numpy as np

from ...._dtypes import FLOAT32
from ...._sizes import assumed_size
from ...ir import Equation, Op, Program, Use, added, with_dtype
from ...primitives import ARITHMETIC


def wide_biases(program: Program) -> Program:
    """The program, if no backward pass is in it, with parameters that are broadcast in float32."""
    if program.context.planner.has_backward:
        return program
    equations: list[Equation] = []
    wide: dict[int, int] = {}  # the parameters that were cast to the compute dtype, by their casts
    for equation in program.equations:
        if equation.op is Op.CAST and _is_parameter(program, equation.operands[0]):
            wide[equation.results[0]] = equation.operands[0]
        joins = equation.op is Op.RECORDED and equation.node.name in ARITHMETIC
        if joins and any([number in wide and _is_smaller(program, number, equation) for number in equation.operands]):
            equations += _in_float32(program, equation, wide)
        else:
            equations.append(equation)
    unread = wide.keys() - {number for equation in equations for number in equation.operands}.union(program.outputs)
    return program.replace(equations=[each for each in equations if unread.isdisjoint(each.results)])


def _is_parameter(program: Program, number: int) -> bool:
    # There are facts only of recorded values, which have the lower numbers.
    return number < len(program.facts) and program.facts[number].parameter


def _is_smaller(program: Program, number: int, equation: Equation) -> bool:
    """Whether an operand is broadcast: only then is its gradient a sum."""
    return assumed_size(program.avals[number]) < assumed_size(program.avals[equation.results[0]])


def _in_float32(program: Program, equation: Equation, wide: dict[int, int]) -> list[Equation]:
    """An equation of 16-bit numbers as one of float32 numbers between casts.

    Values that are cast to float32 are also rounded there: a compiler may drop a cast to bfloat16 and back in one
    kernel, but not in another.
    """
    made: list[Equation] = []

    def add(op: Op, source: int, dtype: np.dtype, result: int) -> int:
        made.append(added(op, equation.at or equation.node, [source], result, dtype=dtype))
        return result

    def in_float32(number: int) -> int:
        return program.new(with_dtype(program.avals[number], FLOAT32))

    def operand(number: int) -> int:
        if number in wide:
            return wide[number]
        return add(Op.ROUND, add(Op.CAST, number, FLOAT32, in_float32(number)), program.low, in_float32(number))

    operands, (result,) = [*map(operand, equation.operands)], equation.results
    total = in_float32(result)
    made.append(equation.replace(uses=[*map(Use, operands)], results=(total,)))
    add(Op.CAST, total, program.low, result)
    return made
