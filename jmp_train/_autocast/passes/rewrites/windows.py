"""The elements of windows that slide over an array, for rewrites that have one term for each place of a window.

Sizes may be symbolic: only padding and strided slices from the first element are used, which `jax.export` accepts.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from ...._jaxpr import Node
from ...._sizes import is_less, static_size


def are_small(node: Node, windows: Any, most_places: int) -> bool:
    """Whether windows have so few places that there can be one term for each.

    Along every axis there must be a window, even if the sizes are symbolic: without one, `elements_at` would cut off
    more elements than the axis has.

    Args:
      node: the reduction, whose parameters hold the size of a window.
      windows: the abstract value that has one number for each window.
      most_places: how many places a window may have.
    """
    places = static_size(node.params["window_dimensions"])
    if places is None or places > most_places or not all(is_less(0, count) for count in windows.shape):
        return False
    # With explicit mesh axes the type of an array says how devices split it. Along a split axis JAX takes only slices
    # whose size is divisible by the number of devices, which those of windows seldom are.
    axes_of = windows.sharding.spec.partitions
    split = zip(node.params["window_dimensions"], node.params["window_strides"], axes_of, strict=True)
    return all(axes is None or window == stride == 1 for window, stride, axes in split)


def starts_of_places(node: Node) -> list[list[int]]:
    """The index that each place of the first window has in the operand; negative in the padding before it.

    >>> x = jax.numpy.ones(6)
    >>> pooled = jax.make_jaxpr(lambda x: lax.reduce_window(x, 0.0, lax.add, (3,), (2,), [(1, 1)]))(x)
    >>> starts_of_places(Node(pooled.eqns[-1], (), (), None, False))
    [[-1], [0], [1]]
    """
    places = itertools.product(*map(range, node.params["window_dimensions"]))
    return [[at - low for at, (low, _) in zip(place, node.params["padding"], strict=True)] for place in places]


def elements_at(operand: Any, start: Sequence[int], strides: Sequence[int], windows: tuple[Any, ...]) -> jax.Array:
    """One element of each window of `operand`, `[m_0, m_1, ...]`; zero in the padding.

    Args:
      operand: `[n_0, n_1, ...]`.
      start: the index of the first window's element.
      strides: how far the next window's element is.
      windows: `(m_0, m_1, ...)`, at least one along every axis.

    >>> elements_at(jax.numpy.arange(1.0, 6.0), [-1], [2], (3,))
    Array([0., 2., 4.], dtype=float32)
    """
    sizes = zip(start, strides, windows, operand.shape, strict=True)
    cut = [(-first, first + stride * (count - 1) + 1 - size, 0) for first, stride, count, size in sizes]
    elements = lax.pad(operand, np.zeros((), operand.dtype), cut)
    return lax.slice(elements, [0] * elements.ndim, elements.shape, strides)
