"""The sum of each small window written as additions.

    s:f32[m] = reduce_window_sum x:f32[n]    ->    s = sum over places k of slice(x, start=k, strides)

GPU compilers make a reduction over windows a kernel of its own, which reads and writes float32 in memory. An average
pool is one, and its gradient another. Additions of slices fuse with what computes `x` and with what reads the sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from ...._jaxpr import Node
from ...ir import Equation, Op, Program
from ...primitives import Rule
from .rewrite import Rewrite
from .windows import are_small, elements_at, starts_of_places

_MOST_PLACES = 16  # of a window: each reads the operand once more


class WindowSums(Rewrite):
    primitives = frozenset({"reduce_window_sum"})

    def of_equation(self, program: Program, equation: Equation) -> Equation:
        del program
        if equation.entry.rule is not Rule.HIGH or not _can_be_written_out(equation.node):
            return equation
        return equation.replace(op=Op.REWRITTEN, rewrite=add_places)


def _can_be_written_out(node: Node) -> bool:
    """Whether each window has few elements, next to each other."""
    dilations = {*node.params["base_dilation"], *node.params["window_dilation"]}
    return dilations == {1} and are_small(node, node.eqn.outvars[0].aval, _MOST_PLACES)


def add_places(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """What a `reduce_window_sum` does to `[n_0, n_1, ...]`: `[m_0, m_1, ...]`, one sum a window, in the same dtype.

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
