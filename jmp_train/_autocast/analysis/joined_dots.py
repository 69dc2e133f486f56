"""Which dots XLA for GPUs computes as one: dots of the same operand, such as those of a gate and of its factor.

    g:f16 = dot_general x w             joined = dot_general x (concatenate w v)
    u:f16 = dot_general x v      ->     g, u = slices of it, computed in the kernels that read them

Saved values are behind an optimization barrier. For a barrier XLA copies such a slice: it is written and read once
more. So saved results of these dots are kept apart from the forward pass in another way, see `emit.py`. If dots read
these results in turn, as in attention, the slices are rearranged for that, and so copied anyway.

Decides which results these are. Does not decide which of them are saved.
"""

from typing import Any

from ..._sizes import is_less, size_in_bytes
from ..ir import Equation, Program

# The bytes of a dot's operands and result up to which XLA joins it with others: 64 MiB, the flag
# `xla_gpu_dot_merger_threshold_mb`.
_MOST_BYTES = 2**26


def joined_dots(program: Program) -> frozenset[int]:
    """The results of dots that read one operand in the same way, if one of these dots is small.

    Not of dots that share only a parameter, such as those of a primal and its tangent; and no results that dots read.
    """
    dots: dict[Any, list[Equation]] = {}
    for equation in program.equations:
        if equation.node.name == "dot_general" and equation.is_narrow_dot:
            for position, number in enumerate(equation.node.ins):
                if not program.facts[number].parameter:
                    way = position, number, equation.node.params["dimension_numbers"]
                    dots.setdefault(way, []).append(equation)
    found: list[int] = []
    for several in dots.values():
        if len(several) > 1 and any(_is_small(program, each) for each in several):
            found += [equation.results[0] for equation in several]
    return frozenset([number for number in found if not program.context.uses.flags[number].to_dot])


def _is_small(program: Program, equation: Equation) -> bool:
    sizes = [size_in_bytes(program.avals[n], program.low) for n in (*equation.node.ins, *equation.results)]
    return is_less(sum(sizes), _MOST_BYTES)
