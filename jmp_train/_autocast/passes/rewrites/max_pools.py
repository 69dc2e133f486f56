"""Max-pools whose gradient is in the program: the gradient as selections, without a scatter; the pool in float32.

    g = select_and_scatter_add dy x    ->    p:u8 = place of the first extreme of each window
                                             g = sum over places k of pad(select(p == k, dy, 0))

JAX records the gradient as `select_and_scatter_add`, which compilers turn into a search with three integer outputs and
a scatter that adds in the dtype of its buffer. Here the place of each window's extreme is found once and stored in a
byte, and every window passes its gradient to that place; an element sums the gradients of the few windows over it. This
fuses, reads and writes values of the compute dtype, and sums in float32 registers.

    m:f16 = reduce_window_max x:f16    ->    m = cast (reduce_window_max (cast x))

Both pools choose the same numbers. XLA for GPUs stores the float16 numbers that a pool compares. It computes float32
numbers in the pool's kernel and again in the gradient's, and so it does bfloat16 numbers, which it widens itself.
ResNet-50 writes and reads 0.8 GB less. Pools that JAX differentiates afterwards stay as they are: the gradient that JAX
records for a pool in float32 moves twice the bytes.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...._dtypes import FLOAT32, at_least_float32
from ...._jaxpr import Node, bind
from ...._sizes import is_less
from ...ir import Equation, Program
from ...primitives import Entry, Rule, Trait, having
from .rewrite import Computation
from .windows import are_small, elements_at, starts_of_places

_POOLS = having(Trait.POOL)
_MOST_PLACES = 64  # of a window: each adds a few operations to the program
_ENTRY = Entry(Rule.WIDEST, "a selection in each window, summed in float32")


def entry_of_scatter(node: Node) -> Entry | None:
    """The rule for a scatter that becomes selections, which follow their operands and have no buffer to add in."""
    return _ENTRY if windows_are_small(node) else None


def max_pools(program: Program, equation: Equation) -> Computation | None:
    # Not a scatter that the user's rules keep as recorded or in float32, where it adds in float32.
    follows = equation.entry.rule in (Rule.WIDEST, Rule.FOLLOW, Rule.LOW)
    return scatter_to_windows if follows and windows_are_small(equation.node) else None


def pools_in_float32(program: Program) -> Program:
    """The program in which pools of values in the compute dtype compare them in float32."""
    if not any([equation.rewrite is scatter_to_windows for equation in program.equations]):
        return program
    equations = [*program.equations]
    for i, equation in enumerate(equations):
        if equation.node.name in _POOLS and equation.reads == [program.low]:
            equations[i] = equation.replace(rewrite=compare_in_float32)
    return program.replace(equations=equations)


def windows_are_small(node: Node) -> bool:
    """Whether the windows of a `select_and_scatter_add` have so few places that there can be one term for each."""
    return are_small(node, node.eqn.invars[0].aval, _MOST_PLACES)


def scatter_to_windows(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """`select_and_scatter_add` of a source, one value a window, to the first extreme element of each window.

    Args:
      node: its `select_prim` says whether the largest or the smallest element counts.
      operands: the source `[m_0, m_1, ...]`, one value a window, and the operand `[n_0, n_1, ...]`.

    Returns:
      One array like the operand, in the source's dtype, zero but at the chosen elements.
    """
    source, operand = operands
    strides, starts = node.params["window_strides"], starts_of_places(node)
    chosen = _chosen(operand, source, starts, strides, node.params["select_prim"].name == "ge")
    nothing, zero = lax.full_like(source, 0), np.zeros((), at_least_float32(source.dtype))
    total = lax.full_like(operand, 0, zero.dtype)
    for place, start in enumerate(starts):
        handed = lax.select(lax.eq(chosen, np.uint8(place)), source, nothing)
        padding = _placing(start, strides, source.shape, operand.shape)
        total = lax.add(total, lax.pad(lax.convert_element_type(handed, zero.dtype), zero, padding))
    return [lax.convert_element_type(total, source.dtype)]


def compare_in_float32(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """Computes a `reduce_window_max` or `reduce_window_min` of an operand in 16 bits, in its dtype."""
    (result,) = bind(node.eqn, [lax.convert_element_type(operands[0], FLOAT32)])
    return [lax.convert_element_type(result, operands[0].dtype)]


def _chosen(operand: Any, source: Any, starts: list[list[int]], strides: Any, largest: bool) -> jax.Array:
    """The place of each window's first extreme element, as a number, `uint8[m_0, m_1, ...]`, sharded as `source`.

    Compares in the same order and with the same comparison as XLA's SelectAndScatter, so that ties choose the same
    element. Places in the padding are never chosen, even if all others are infinite or NaN.
    """
    # Of at most _MOST_PLACES places, so that a byte holds the number of each, and one for none.
    compare, nowhere = lax.ge if largest else lax.le, len(starts)
    windows, chosen = source.shape, lax.full_like(source, nowhere, jnp.uint8)
    extreme = value = lax.full_like(source, 0, operand.dtype)
    keep = chosen == nowhere
    for place, start in enumerate(starts):
        extreme = lax.select(keep, extreme, value)
        value = elements_at(operand, start, strides, windows)
        keep = compare(extreme, value) & (chosen < nowhere) | ~_inside(start, strides, windows, operand.shape)
        chosen = lax.select(keep, chosen, lax.full_like(chosen, place))
    return lax.optimization_barrier(chosen)  # one byte, found once: it has as many readers as there are places


def _inside(start: Sequence[int], strides: Any, windows: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Where the element at `start` of a window is one of the operand rather than of its padding."""
    inside: Any = np.True_
    for axis, (first, stride, count, size) in enumerate(zip(start, strides, windows, shape, strict=True)):
        if first < 0 or not is_less(first + stride * (count - 1), size):
            at = first + stride * lax.broadcasted_iota(jnp.int32, windows, axis)
            inside = inside & (at >= 0) & (at < size)
    return inside


def _placing(start: Any, strides: Any, windows: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """The padding, negative where it cuts, that puts one value a window at its element in the operand."""
    sizes = zip(start, strides, windows, shape, strict=True)
    return [(first, size - first - stride * (count - 1) - 1, stride - 1) for first, stride, count, size in sizes]
