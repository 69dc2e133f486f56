"""The FLOPs of dots and convolutions, from their shapes.

Decides the count for one run of one operation. Does not decide how often a loop runs it, nor in which dtype it runs;
see `_explain/_operations.py`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_OUR_ATTENTION = {"jmp_attention": 2, "jmp_attention_tangent": 5, "jmp_attention_backward": 5}
PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated", *_OUR_ATTENTION})
"""The primitives that have FLOPs here: what Tensor Cores run. Everything else is bound by memory."""

Shape = Sequence[int]


def product_flops(primitive: str, operands: Sequence[Shape], result: Shape, params: Mapping[str, Any]) -> int:
    """Returns the FLOPs of a dot or a convolution, a multiplication and an addition each counted; 0 for all others.

    Every element of the result is a sum over K products, hence 2 * K * size(result), with K the contracted dimensions
    of a dot, and the window times the input channels of one group of a convolution. Padding up to the input's size is
    counted as if it were data. Padding beyond that is not counted, nor are the zeros that a dilation inserts: a
    transposed convolution, and either gradient of a convolution, has the FLOPs of the convolution it belongs to.

    Args:
      primitive: its name.
      operands: their shapes; left and right come first.
      result: the shape of the result.
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
        return _convolution_flops(operands[0], operands[1], result, params)
    return attention_flops(primitive, operands, params)


def _convolution_flops(left: Shape, right: Shape, result: Shape, params: Mapping[str, Any]) -> int:
    numbers = params["dimension_numbers"]
    batch, features, *spatial = numbers.out_spec
    products = result[batch] * result[features] * right[numbers.rhs_spec[1]]  # times the input channels of one group
    for one, two, out in zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], spatial, strict=True):
        # Of position, element of the window and result, any two determine the third.
        sizes = sorted((left[one], right[two], result[out]))
        products *= sizes[0] * sizes[1]
    return 2 * products


ATTENTION = {
    **_OUR_ATTENTION,
    "dot_product_attention_fwd_wrapper": 2,
    "dot_product_attention_bwd_wrapper": 5,
}
"""Attention, ours and cuDNN's, and how many products of the size of `query @ key` it makes: backward one again."""


def attention_flops(primitive: str, operands: Sequence[Shape], params: Mapping[str, Any]) -> int:
    """Returns the FLOPs of an attention, with no credit for what a causal mask leaves out; 0 for all others.

    Args:
      primitive: its name, as it is traced.
      operands: the shapes of query and key, `[batch, length, heads, size]` or, for another `layout`, `[batch, heads,
        length, size]`.
      params: the primitive's parameters, as the jaxpr has them.

    >>> attention_flops("dot_product_attention_fwd_wrapper", [(2, 16, 4, 8), (2, 32, 4, 8)], {"layout": 0})
    131072
    """
    if primitive not in ATTENTION:
        return 0
    query, key = operands[:2]
    keys = key[2] if params.get("layout") else key[1]
    return ATTENTION[primitive] * 2 * math.prod(query) * keys
