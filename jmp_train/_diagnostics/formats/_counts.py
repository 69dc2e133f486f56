"""Exact counts beyond 32 bits, without 64-bit types: two uint32 to a count.

Decides how many of something are counted, and how such counts add up. Does not decide what is counted; see
`_exponent_histogram.py` and `_underflow_report.py`.

A count is `low + 2^32 * high`, the two in the last axis. Counts of one step would fit an int32 nearly always, their sum
over a training run would not: a billion parameters pass 2^31 in the third step.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Threads that count into one address wait for each other, so that a large array is counted in many rows, added up at
# the end: 2^8 rows of 280 counters are 0.3 MB, less than a GPU's cache.
_MOST_ROWS = 2**8
_VALUES_PER_ROW = 2**12

MOST_VALUES = 2**32 - 1
"""What one call of `count_each` can count without an overflow."""


def count_each(index: jax.Array, kinds: int) -> jax.Array:
    """How often each of `0 ... kinds - 1` occurs, uint32 `[kinds, 2]`; one pass, integers only, nothing sorted.

    Args:
      index: int32, of any shape, at most 2^32 - 1 elements, all in range.
      kinds: how many there are.

    >>> to_integers(count_each(jnp.array([[0, 2], [2, 2]]), 3))
    array([1, 0, 3])
    """
    rows = min(_MOST_ROWS, max(1, index.size // _VALUES_PER_ROW))
    # The sum of all indices, not of the flattened one: an array sharded over devices keeps its shape.
    steps = [lax.broadcasted_iota(np.int32, index.shape, axis) for axis in range(index.ndim)]
    row = sum(steps, jnp.zeros(index.shape, np.int32)) % rows
    counted = jnp.zeros((rows, kinds), np.uint32).at[row, index].add(np.uint32(1), mode="promise_in_bounds")
    low = jnp.sum(counted, axis=0, dtype=np.uint32)
    return jnp.stack([low, jnp.zeros_like(low)], axis=-1)


@functools.partial(jax.jit, static_argnums=1)
def add_counts(counts: jax.Array, axis: int) -> jax.Array:
    """Sums counts, uint32 `[..., 2]`, with the carry, over one axis (the last but one is -1) of at most 2^16 of them.

    >>> most = jnp.array([[2**32 - 1, 0], [1, 0]], np.uint32)
    >>> add_counts(most, 0)
    Array([0, 1], dtype=uint32)
    """
    first, second, high = (jnp.sum(part, axis=axis, dtype=np.uint32) for part in _halves(counts))
    return _carried(first, second, high)


def psum_counts(counts: jax.Array, axis_name: Any) -> jax.Array:
    """Sums counts, uint32 `[..., 2]`, with the carry, over the devices of a mesh axis, 2^16 of them at most."""
    return _carried(*lax.psum(_halves(counts), axis_name))


def _halves(counts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The lower and the upper 16 bits of the first number, of which 2^16 can be added, and the second number."""
    return counts[..., 0] & np.uint32(0xFFFF), counts[..., 0] >> 16, counts[..., 1]


def _carried(first: jax.Array, second: jax.Array, high: jax.Array) -> jax.Array:
    second = second + (first >> 16)
    low = (second << 16) | (first & np.uint32(0xFFFF))
    return jnp.stack([low, high + (second >> 16)], axis=-1)


def to_integers(counts: jax.Array) -> np.ndarray:
    """The counts as int64, one axis fewer, on the host."""
    low, high = np.moveaxis(np.asarray(counts).astype(np.int64), -1, 0)
    return low + (high << 32)
