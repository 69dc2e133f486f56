"""The sum of each small window written as additions.

    s:f32[m] = reduce_window_sum x:f32[n]    ->    s = sum over places k of slice(x, start=k, strides)
    s:f32[1] = reduce_window_sum x:f32[n]    ->    s = reduce_sum x

GPU compilers make a reduction over windows a kernel of its own, which reads and writes float32 in memory. An average
pool is such a reduction, and so is its gradient. Additions of slices fuse with the equations that compute `x` and with
those that read the sums. If there is one window, as in a squeeze-and-excitation block, its sum fuses with the equations
that compute `x`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from ...._jaxpr import Node
from ...ir import Equation, Program
from ...primitives import Rule
from .rewrite import Computation
from .two_step_sums import sum_over
from .windows import are_small, elements_at, starts_of_places

_MOST_PLACES = 16  # of a window: each reads the operand once more


def window_sums(program: Program, equation: Equation) -> Computation | None:
    node = equation.node
    # Dilation puts zeros between elements, or leaves elements out: slices with strides would have other elements.
    dilated = {*node.params["base_dilation"], *node.params["window_dilation"]} != {1}
    if equation.entry.rule is not Rule.HIGH or dilated:
        return None
    if _is_one_window(node):
        return sum_axes
    return add_places if are_small(node, node.eqn.outvars[0].aval, _MOST_PLACES) else None


def _is_one_window(node: Node) -> bool:
    """Whether all numbers are in one window along some axes, and alone in one along all others."""
    operand: Any = node.eqn.invars[0].aval
    padded = any(low or high for low, high in node.params["padding"])
    sizes = zip(node.params["window_dimensions"], node.params["window_strides"], operand.shape, strict=True)
    return not padded and all(window == size or window == stride == 1 for window, stride, size in sizes)


def sum_axes(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """Computes a `reduce_window_sum` with one window of `[n_0, n_1, ...]`: each summed axis is left with size one.

    >>> x = jax.numpy.ones((2, 20, 3))
    >>> pooled = jax.make_jaxpr(lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 20, 1), (1, 1, 1), "VALID"))(x)
    >>> sum_axes(Node(pooled.eqns[-1], (), (), None, False), [x])[0].shape
    (2, 1, 3)
    """
    axes = [axis for axis, window in enumerate(node.params["window_dimensions"]) if window != 1]
    return [lax.expand_dims(sum_over(operands[0], axes), axes)]


def add_places(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """Computes a `reduce_window_sum` of `[n_0, n_1, ...]`: `[m_0, m_1, ...]`, one sum per window, in the same dtype.

    >>> x = jax.numpy.arange(6.0)
    >>> pooled = jax.make_jaxpr(lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (2,), "VALID"))(x)
    >>> add_places(Node(pooled.eqns[-1], (), (), None, False), [x])
    [Array([1., 5., 9.], dtype=float32)]
    """
    (operand,) = operands
    windows: Any = node.eqn.outvars[0].aval
    strides = node.params["window_strides"]
    places = [elements_at(operand, start, strides, windows.shape) for start in starts_of_places(node)]
    return [functools.reduce(lax.add, places)]
