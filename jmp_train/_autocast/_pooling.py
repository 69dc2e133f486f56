"""The gradient of a max-pool whose windows tile its operand, written without a scatter.

JAX records it as `select_and_scatter_add`, which compilers turn into a scatter that adds, one kernel with an index per
window. Where windows tile the operand nothing is added: every element is the largest of its one window or it is not.
Said so, it is a selection, which fuses, is exact in any dtype, and holds no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jaxpr import Node


def windows_tile(node: Node) -> bool:
    """Whether every element of the operand of a `select_and_scatter_add` lies in exactly one window."""
    operand: Any = node.eqn.invars[1].aval
    params, shape = node.params, operand.shape
    window, strides = params["window_dimensions"], params["window_strides"]
    whole = all(size % width == 0 for size, width in zip(shape, window, strict=True))
    return whole and tuple(window) == tuple(strides) and not any(low or high for low, high in params["padding"])


def scatter_to_windows(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """`select_and_scatter_add` of a source, one value a window, to the first extreme element of each window.

    Args:
      node: its `select_prim` says whether the largest or the smallest element counts.
      operands: the source `[n_0 / w_0, n_1 / w_1, ...]` and the operand `[n_0, n_1, ...]`, of one dtype.

    Returns:
      One array like the operand, zero but at the chosen elements.
    """
    source, operand = operands
    window = node.params["window_dimensions"]
    # [n_0, n_1, ...] -> [n_0 / w_0, w_0, n_1 / w_1, ...], the axes inside windows last.
    split = [extent for size, width in zip(operand.shape, window, strict=True) for extent in (size // width, width)]
    order = [*range(0, len(split), 2), *range(1, len(split), 2)]
    windows = operand.reshape(split).transpose(order).reshape(*source.shape, -1)
    extreme = lax.argmax if node.params["select_prim"].name == "ge" else lax.argmin
    chosen = extreme(windows, source.ndim, jnp.int32)
    places = lax.broadcasted_iota(jnp.int32, windows.shape, source.ndim)
    values = lax.broadcast_in_dim(source, windows.shape, range(source.ndim))
    spread = lax.select(places == chosen[..., None], values, lax.full_like(values, 0))
    back = [position for axis in range(source.ndim) for position in (axis, source.ndim + axis)]
    return [spread.reshape(*source.shape, *window).transpose(back).reshape(operand.shape)]
