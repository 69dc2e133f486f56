"""The mask of a relu's derivative, read off what the relu returns: that is positive where what it was given is.

    y = max x 0.0                 y = max x 0.0
    m = gt x 0.0           ->     m = gt y 0.0

What it returns is a dot's operand and in memory, in 16 bits, whatever becomes of the mask. What it was given often is
not, and a mask made of that is saved for the backward pass, a byte a value.

Positive numbers that round to zero in float16, those up to 2^-25, may then have no gradient. The number that goes on to
the dot is zero for them, too.

But behind a norm over rows, a LayerNorm or an RMSNorm, what it was given is computed again from what the norm's own
backward pass reads, and what it returns would be one more array for those kernels. (Behind a norm over columns, such as
a BatchNorm, XLA would often store the masked gradient instead: ResNet-50 would move 1.4 % more bytes.)

Decides which comparisons that holds for. Does not decide whether a mask is saved; see `save_or_remat.py`.
"""

from __future__ import annotations

import dataclasses

from ...._jaxpr import FlatJaxpr
from ...analysis.relus import RELUS, is_norm_of_rows, is_positive, relu_operand


def relu_mask(program: FlatJaxpr) -> FlatJaxpr:
    """The program whose comparisons of what a relu is given with zero compare what it returned."""
    results: dict[int, int] = {}
    nodes = [*program.nodes]
    for i, node in enumerate(nodes):
        # By name first: this runs for every equation, and calls no function that need not be.
        if node.name in RELUS and (operand := relu_operand(node, program)) is not None:
            results[operand] = node.outs[0]
        elif node.name == "gt" and node.ins[0] in results and is_positive(node, program):
            if not is_norm_of_rows(node.ins[0], program):
                nodes[i] = dataclasses.replace(node, ins=(results[node.ins[0]], node.ins[1]))
    return dataclasses.replace(program, nodes=tuple(nodes)) if results else program
