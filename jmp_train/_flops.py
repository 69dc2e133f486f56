"""How much arithmetic a product is: the FLOPs of dots and convolutions, from their shapes.

Decides the count for one run of one operation. Does not decide how often a loop runs it, nor what it runs in; see
`_autocast/_operations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
"""The primitives that have FLOPs here: what Tensor Cores run. Everything else is bound by memory."""

Shape = Sequence[int]


def product_flops(primitive: str, operands: Sequence[Shape], result: Shape, params: Mapping[str, Any]) -> int:
    """Returns the FLOPs of a dot or a convolution, a multiplication and an addition each counted; 0 for all others.

    Every element of the result is a sum over K products, hence 2 * K * size(result), with K the contracted dimensions
    of a dot, and the window times the input channels of one group of a convolution. Padding is counted as if it were
    data, and so are the zeros that a dilation inserts: hardware multiplies them.

    Args:
      primitive: its name.
      operands: their shapes; left and right come first.
      result: the shape of what comes out.
      params: the primitive's parameters, as the jaxpr has them.

    >>> product_flops("dot_general", [(8, 4), (4, 2)], (8, 2), {"dimension_numbers": (((1,), (0,)), ((), ()))})
    128
    """
    if primitive == "dot_general":
        (left, _), _ = params["dimension_numbers"]
        return 2 * math.prod(result) * math.prod(operands[0][d] for d in left)
    if primitive == "ragged_dot_general":
        # Every row belongs to one group: the groups together are one dot. A ragged contraction is split among results.
        numbers = params["ragged_dot_dimension_numbers"]
        (left, _), _ = numbers.dot_dimension_numbers
        groups = operands[2][-1] if set(numbers.lhs_ragged_dimensions) & set(left) else 1
        return 2 * math.prod(result) * math.prod(operands[0][d] for d in left) // groups
    if primitive == "conv_general_dilated":
        kernel = params["dimension_numbers"].rhs_spec  # output channels, input channels of one group, window
        return 2 * math.prod(result) * math.prod(operands[1][d] for d in kernel[1:])
    return 0
