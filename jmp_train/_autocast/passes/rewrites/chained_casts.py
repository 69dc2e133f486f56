"""A residual stream's gradient, cast to float16 in a form that XLA for CPUs does not duplicate.

    b:f32 = cast a                       b:f32 = cast a
    d:f32 = add b c              ->      d:f32 = add b c
    e:f16 = cast d                       e:f16 = chained d a

Such a gradient is a chain: each value is the last one, saved in float16, plus a branch in float32, rounded to float16
again. XLA's `CpuInstructionFusion` duplicates a cheap operation with one large operand into all of its consumers. A
cast to float16 is such an operation (a cast to bfloat16 counts as expensive). With it XLA duplicates the float32 sum,
whose only consumer the cast is, back to the previous cast, and so on: a kernel that reads the gradient at layer k
computes it from the head on. 24 Llama layers compile to 56,582 instructions, 1,549 of them in the largest fusion; with
this rewrite to 20,103 and 76. XLA does not duplicate an operation with two large operands if a consumer reaches it
through a product as well. So the cast becomes a `select` that has the previous value as another operand. GPU kernels
read that value already.

The last cast of a chain stays as it is: only dots read it, and the duplication ends at the cast before. Behind a
BatchNorm that is the gradient of each convolution: with a `select`, MobileNetV3 would move 4.8 % more bytes on an H200.

Decides which casts those are.
"""

from typing import Any

import jax.numpy as jnp

from ...._dtypes import FLOAT16
from ...ir import Op, Program, Use

# Elementwise, and NaN where an operand is NaN, which `Op.CHAINED` relies on.
_KEEP_NAN = frozenset("add sub add_any mul div neg convert_element_type copy".split())


def chained_casts(program: Program) -> Program:
    """The program in which casts of float16 residuals that are computed from other residuals depend on those, too."""
    if program.low != FLOAT16:  # XLA counts casts to bfloat16 as expensive and does not duplicate them
        return program
    links: set[int] = set()  # the results of casts from float32
    last: dict[int, int] = {}  # by value, the saved copy of the same shape that it is computed from
    copied: dict[int, int] = {}  # by such a copy, the value that is copied
    chained: dict[int, int] = {}  # by the position of a cast, the copy that its operand is computed from
    for i, equation in enumerate(program.equations):
        result = equation.results[0] if equation.results else -1
        found = None
        for number, _, _ in equation.uses:
            if found is None and number in last:
                found = last[number]
        if found is not None and not _may_be_linked(program.avals[found], program.avals[result]):
            found = None
        if equation.op is Op.SAVED and equation.operands[0] in links:
            last[result], copied[result] = result, equation.operands[0]
        elif equation.op is Op.CAST:
            if program.avals[result].dtype == FLOAT16:
                links.add(result)
                if found is not None:
                    chained[i] = found
            elif found is not None:
                last[result] = found
        elif found is not None and equation.name in _KEEP_NAN:
            last[result] = found
    # The last cast of a chain is duplicated, but no further than to the copy before it.
    continued = {copied[found] for found in chained.values()}
    equations = [*program.equations]
    for i, found in chained.items():
        cast = equations[i]
        if not continued.isdisjoint(cast.results):
            equations[i] = cast.replace(op=Op.CHAINED, uses=[*cast.uses, Use(found)])
    return program.replace(equations=equations)


def _may_be_linked(saved: Any, result: Any) -> bool:
    """Whether a value has an element for each of the saved copy's, and can be NaN where that is, unlike integers."""
    return saved.shape == getattr(result, "shape", None) and jnp.issubdtype(result.dtype, jnp.inexact)
