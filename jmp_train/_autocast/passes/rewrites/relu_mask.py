"""The mask of a relu's derivative, computed from the relu's result, which is positive where its operand is.

    y = max x 0.0                 y = max x 0.0
    m = gt x 0.0           ->     m = gt y 0.0

The result is an operand of a dot, and so in memory in 16 bits in any case. The relu's operand often is not, and a mask
that is computed from the operand is saved for the backward pass, a byte per value.

Positive numbers that round to zero in float16, those up to 2^-25, may then have no gradient. The dot reads zero for
them, too.

But behind a norm over rows, a LayerNorm or an RMSNorm, the relu's operand is rematerialized from values that the norm's
own backward pass reads, and the result would be one more array for those kernels. (Behind a norm over columns, such as
a BatchNorm, XLA would often store the masked gradient instead: ResNet-50 would move 1.4 % more bytes.)

Decides which comparisons are changed. Does not decide whether a mask is saved; see `save_or_remat.py`.
"""

import dataclasses

from ...._jaxpr import FlatJaxpr
from ...analysis.relus import RELUS, is_norm_of_rows, is_positive, relu_operand


def relu_mask(program: FlatJaxpr) -> FlatJaxpr:
    """The program in which comparisons of a relu's operand with zero compare the relu's result."""
    results: dict[int, int] = {}
    nodes = [*program.nodes]
    for i, node in enumerate(nodes):
        # The name first: this runs for every equation, and so avoids calls of functions.
        if node.name in RELUS and (operand := relu_operand(node, program)) is not None:
            results[operand] = node.outs[0]
        elif node.name == "gt" and node.ins[0] in results and is_positive(node, program):
            if not is_norm_of_rows(node.ins[0], program):
                nodes[i] = dataclasses.replace(node, ins=(results[node.ins[0]], node.ins[1]))
    return dataclasses.replace(program, nodes=tuple(nodes)) if results else program
