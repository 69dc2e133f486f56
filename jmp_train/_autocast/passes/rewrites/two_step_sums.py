"""A sum over a few thousand rows of computed values, taken over some axes and then the others.

    x:f32[8,28,28,64] = ...                         x = ...
    s:f32[8,64] = reduce_sum[axes=(1,2)] x    ->    r:f32[8,28,64] = reduce_sum[axes=(2,)] x
                                                    s = reduce_sum[axes=(1,)] (saved r)

The average in a squeeze-and-excitation block is such a sum, and so are the gradients of a norm's parameters. For an
H200, XLA does not fuse a chain of two operations or more into a sum over 100 to 8,192 rows with fewer than 2^14
results: its cost model finds too few threads for the chain, whose result is then stored in float32, in five times the
bytes. A sum over some of the axes has more threads. The barrier keeps XLA from joining both sums again.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from ...._jaxpr import BARRIER, Node
from ...._sizes import is_static
from ...analysis.residual_costs import fuses, is_expensive
from ...ir import Equation, Program, Use
from ...primitives import Rule, Trait, having

_MOVES = having(Trait.MOVES | Trait.PICKS) - having(Trait.TRANSFERS) - {BARRIER} | {"convert_element_type"}
# Found by compiling for an H200: XLA fuses no chain into a sum over a number of rows in this range.
_FEWEST_ROWS, _MOST_ROWS = 100, 2**13
# A sum with this many results is fused with the equations that compute its operand, and so is one over so few rows.
_RESULTS, _FEW_ROWS = 2**14, 32


def two_step_sums(program: Program) -> Program:
    """The program with sums of computed values in a form into which XLA fuses the computation."""
    slow = {i for i, e in enumerate(program.equations) if e.node.name == "reduce_sum" and _is_slow(e)}
    if not slow:
        return program
    # The length of the longest chain of operations from memory to a value; an expensive operation counts as two.
    lengths, equations = dict[int, int](), [*program.equations]

    def longest(uses: Sequence[Use]) -> int:
        found = 0
        for value, _, residual in uses:
            if value in lengths and lengths[value] > found and not (residual and value in program.residuals.saved):
                found = lengths[value]
        return found

    for i, equation in enumerate(program.equations):
        name, uses, length = equation.node.name, equation.uses, 0
        if name in _MOVES:  # a value that is broadcast, such as a norm's statistics, is computed in its own kernel
            length = 0 if name == "broadcast_in_dim" else longest(uses)
        elif fuses(equation):
            shape = program.avals[equation.results[0]].shape
            near = [use for use in uses if program.avals[use.value].shape == shape]
            length = longest(near) + (2 if is_expensive(equation) else 1)
        elif i in slow and longest(uses) > 1:
            equations[i] = equation.replace(rewrite=sum_in_two_steps)
        if length:
            lengths.update(dict.fromkeys(equation.results, length))
    return program.replace(equations=equations)


def _is_slow(equation: Equation) -> bool:
    node: Any = equation.node
    if equation.entry.rule is not Rule.HIGH or node.params.get("out_sharding") is not None:
        return False
    return bool(first_axes(node.eqn.invars[0].aval.shape, node.params["axes"]))


def first_axes(shape: Sequence[Any], axes: Sequence[int]) -> list[int]:
    """Those among `axes` to sum over before the others; none if one sum over all is no worse.

    >>> first_axes((8, 28, 28, 64), (1, 2)), first_axes((32, 4, 4, 256), (0, 1, 2))
    ([2], [1, 2])
    """
    if len(shape) - 1 in axes or not is_static(tuple(shape)):
        return []
    rows, total = math.prod(shape[axis] for axis in axes), math.prod(shape)
    if not _FEWEST_ROWS <= rows < _MOST_ROWS or total >= _RESULTS * rows:
        return []
    found, fused = [], 1
    # Not the batch, axis 0: it may be split over devices, which would have to add up the larger partial result.
    others = [axis for axis in axes if axis and shape[axis] > 1]
    for axis in sorted(others, key=lambda axis: (shape[axis], axis), reverse=True):
        if fused * shape[axis] <= _FEW_ROWS or total >= _RESULTS * fused * shape[axis]:
            found, fused = [axis, *found], fused * shape[axis]
    return sorted(found)


def sum_in_two_steps(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """Computes a `reduce_sum` of `[n_0, n_1, ...]`.

    >>> import jax.numpy as jnp
    >>> eqn = jax.make_jaxpr(lambda x: jnp.sum(x, (0, 1)))(jnp.ones((10, 20, 3))).eqns[0]
    >>> sum_in_two_steps(Node(eqn, (), (), None, False), [jnp.ones((10, 20, 3))])
    [Array([200., 200., 200.], dtype=float32)]
    """
    return [sum_over(operands[0], node.params["axes"])]


def sum_over(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The sum of `x` over some axes, which it no longer has."""
    if not (first := first_axes(x.shape, axes)):
        return lax.reduce_sum(x, axes)
    step = lax.optimization_barrier(lax.reduce_sum(x, first))
    return lax.reduce_sum(step, [axis - sum(each < axis for each in first) for axis in axes if axis not in first])
