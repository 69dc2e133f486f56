"""The gradient of picking one element of each row, written as a selection, without a scatter.

    g = scatter-add zeros i u    ->    g = add zeros (select (iota == i) u 0)

A cross-entropy picks the logit of its label in this way. JAX records the gradient as a `scatter-add` into zeros, which
is a kernel of its own and writes a float32 array as large as the logits for the next kernel to read, add and cast. If
each row gets one value, nothing is summed: a comparison with the index fuses with the equations around it.
"""

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
    """The computation for a `scatter-add` of one value to each row of its operand, at one index per row."""
    operand, _, updates = (program.avals[number] for number in equation.node.ins)
    numbers = equation.node.params["dimension_numbers"]
    rows = numbers.operand_batching_dims
    # All axes but one are batch axes, in the order of the operand, so that a reshape aligns indices and updates with
    # it. Along the other axis there is one index and one number per row.
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
    """Computes such a `scatter-add` to an operand `[..., n, ...]`, given one index and one update per row."""
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
    # An index out of bounds equals no place of the `iota`, so that its update is dropped.
    here = lax.eq(lax.broadcasted_iota(index.dtype, operand.shape, axis), index)
    return [lax.add(operand, lax.select(here, update, lax.full_like(update, 0)))]
