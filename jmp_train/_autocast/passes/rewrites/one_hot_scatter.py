"""The gradient of picking one element of each row, written as a selection, without a scatter.

    g = scatter-add zeros i u    ->    g = add zeros (select (iota == i) u 0)

That is how a cross-entropy picks the logit of its label. JAX records the gradient as a `scatter-add` into zeros, a
kernel of its own, which writes logits-sized float32 values for the next to read, add and cast. Where each row gets one
value nothing is summed: comparing with the index fuses with everything around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._jaxpr import Node
from ...ir import Equation, Program
from ...primitives import Rule
from .rewrite import Computation


def one_hot_scatter(program: Program, equation: Equation) -> Computation | None:
    """What computes a `scatter-add` of one value to each row of its operand, at an index of the row's own."""
    operand, _, updates = (program.avals[number] for number in equation.node.ins)
    numbers = equation.node.params["dimension_numbers"]
    rows = numbers.operand_batching_dims
    # All axes but one are batch axes, in the order that they have in the operand, so that a reshape brings indices and
    # updates beside it. Along the other axis there is one index and one number a row.
    one_per_row = (
        equation.entry.rule is Rule.HIGH
        and len(rows) == operand.ndim - 1
        and list(numbers.scatter_indices_batching_dims) == sorted(numbers.scatter_indices_batching_dims)
        and numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims
        and not numbers.update_window_dims
        and math.prod(updates.shape) == math.prod(operand.shape[row] for row in rows)
    )
    return add_one_per_row if one_per_row else None


def add_one_per_row(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """What such a `scatter-add` does to its operand `[..., n, ...]`, given indices and updates, one a row."""
    operand, indices, updates = operands
    axis, rows = node.params["dimension_numbers"].inserted_window_dims[0], [*operand.shape]
    size, rows[axis] = rows[axis], 1
    wide = indices.dtype if indices.dtype.itemsize >= 4 else np.int32  # that holds every index
    index = lax.convert_element_type(lax.reshape(indices, rows), wide)
    # JAX clips when it lowers a scatter, so that the recorded indices are not clipped yet.
    if node.params["mode"] == lax.GatherScatterMode.CLIP:
        index = lax.clamp(np.zeros((), index.dtype), index, jnp.asarray(size - 1, index.dtype))
    every = range(operand.ndim)
    index, update = (lax.broadcast_in_dim(x, operand.shape, every) for x in (index, lax.reshape(updates, rows)))
    # An index out of bounds is equal to none, so that its update is dropped.
    here = lax.eq(lax.broadcasted_iota(index.dtype, operand.shape, axis), index)
    return [lax.add(operand, lax.select(here, update, lax.full_like(update, 0)))]
