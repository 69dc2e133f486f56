"""A product of bfloat16 numbers with a float32 result, in an order of its operands that CPUs can run.

    w:f32[d,h,k] = dot_general x:bf16[n,d] g:bf16[n,h,k]   ->   a:f32[h,k,d] = dot_general g x;  w = transpose a

XLA for CPUs has no kernel for such a product if the left operand is `[contracted, free]` and the right one has several
free axes, and raises an error when the program runs. The gradient of a weight of an attention's heads is such a
product if the layer reads one axis of examples. For GPUs both orders compile to programs that move the same bytes.

Decides which products those are, found by running all forms of up to two contracted, two free and one batch axis.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax

from ...._dtypes import BFLOAT16
from ...._jaxpr import Node, bind
from ...ir import Equation, Precision, Program
from ...primitives import Rule
from .fold_transposes import params_of, swap_of, swapped
from .rewrite import Computation


def swapped_dots(program: Program) -> Program:
    """The program whose products for which CPUs have no kernel have their operands swapped."""
    if program.low != BFLOAT16:
        return program
    equations = [*program.equations]
    for i, equation in enumerate(equations):
        if equation.node.name == "dot_general" and equation.entry.rule is Rule.LOW:
            if program.precision(equation.results[0]) is Precision.FULL and _is_rejected(program, equation):
                equations[i] = equation.replace(rewrite=_in_other_order(program, equation))
    return program.replace(equations=equations)


def _is_rejected(program: Program, dot: Equation) -> bool:
    (left, right), (left_batch, right_batch) = params_of(dot)["dimension_numbers"]
    free, several = (
        [axis for axis in range(len(program.avals[number].shape)) if axis not in (*contracted, *batch)]
        for number, contracted, batch in zip(dot.operands, (left, right), (left_batch, right_batch), strict=True)
    )
    return len(left) == len(free) == 1 and left[0] < free[0] and len(several) > 1


def _in_other_order(program: Program, dot: Equation) -> Computation:
    order = swap_of(program, dot)
    other, back = swapped(dot, order), [order.index(axis) for axis in range(len(order))]

    def swap_operands(node: Node, operands: Sequence[Any]) -> list[Any]:
        (result,) = bind(node.eqn, operands[::-1], **other.params)
        return [lax.transpose(result, back)]

    return swap_operands
