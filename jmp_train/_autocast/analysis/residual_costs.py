"""The cost of reading a value again: across a dot, or in the body of another scan or `shard_map`.

    saved             its bytes, written once and read once; only read, if they are in memory anyway
    rematerialized    the same for each of its sources, the values from which it is computed

Rematerializing an elementwise equation costs nothing more: XLA fuses it with its readers, and its arithmetic is done
while the kernel waits for memory. So a value is rematerialized if its sources cost less than the value: an intermediate
value of a GELU in float32 (8 bytes per number) from the result of a dot (2 bytes), or the sum of two such results (4
bytes, the same as for saving the sum, but no memory), but not the sum of three. A source that is small beside the
value, such as a bias, costs nothing. The sources of a rematerialized value are the sources of its operands, so that a
choice depends on earlier ones, as in a greedy form of the cut in Jain et al., "Checkmate" (2020).

This is a policy in the manner of `jax.checkpoint_policies`: it asks for an equation's primitive (`fuses`) and for facts
about its operands and result: the bytes of each, and whether it is in memory anyway, because it is an argument, the
operand or result of a dot, or another residual. `save_or_remat.py` states these facts for straight code, and
`body_residuals.py` for values that one scan or `shard_map` passes to another.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np

from ..._jaxpr import Literal, Node
from ..._sizes import is_less
from ..ir import Equation, Op
from ..primitives import EXPENSIVE, FUSED, Trait, having

_FUSES = FUSED | having(Trait.COMPARES)
# A value computed from more than this is its own source: keeps planning linear.
_MOST_SOURCES = 16
# A source more than this many times smaller than the value does not count, such as the bias or mean of many rows. Its
# few bytes would decide where the other sources cost as much as the value.
_NEGLIGIBLE = 4

Sources = frozenset[int]
_NOTHING: Sources = frozenset()


def fuses(equation: Equation) -> bool:
    """Whether an equation is elementwise, so that XLA computes it in the kernels of its readers."""
    if equation.bodies:
        # `jax.nn.relu` is such a call, and others of `jax.nn` and `jax.scipy.special` are.
        rule = equation.node.name == "custom_jvp_call" and len(equation.results) == 1
        inside = equation.bodies[0].equations
        return rule and all([inner.node.name in _FUSES or _is_test(inner.node) for inner in inside])
    if equation.op is Op.RECORDED:
        return equation.node.name in _FUSES or _is_test(equation.node)
    return equation.op in (Op.CAST, Op.ROUND, Op.SAVED)


def _is_test(node: Node) -> bool:
    """Whether it tests for NaN (`x != x`) or an infinity, which no rounding of a number that stays finite changes."""
    if node.name not in ("eq", "ne"):
        return False
    one, other = node.eqn.invars
    return one is other or any([isinstance(each, Literal) and np.all(np.isinf(each.val)) for each in (one, other)])


def is_expensive(equation: Equation) -> bool:
    """Whether XLA would rather store the result of an equation, which fuses if it has a body, than compute it twice."""
    if equation.bodies:
        return not EXPENSIVE.isdisjoint([inner.node.name for inner in equation.bodies[0].equations])
    return equation.node.name in EXPENSIVE


class ResidualCosts:
    """Which values of one program are in memory, and the sources from which each costs least.

    Values are stated in the order in which they are computed. Values that are not stated are free: literals, and inputs
    of a scan, which can be passed to the reader as well.

    Args:
      size_of: gives the bytes of a value, in the dtype in which it would be saved.
      in_memory: values that are stated to begin with, in memory.
    """

    def __init__(self, size_of: Callable[[int], Any], in_memory: Iterable[int] = ()):
        self._size_of = size_of
        self._sizes: dict[int, Any] = {}
        self._in_memory = dict.fromkeys(in_memory, True)
        self._sources: dict[int, Sources] = {}

    def state(self, number: int, in_memory: bool = False) -> None:
        """States a value, and whether saving it costs a read only. It is its own source until it is rematerialized."""
        self._in_memory[number] = in_memory
        if number in self._sources:  # saved after all
            del self._sources[number]

    def sources_of(self, operands: Iterable[int]) -> Sources:
        """The sources from which operands are computed at least cost; none for free operands."""
        found = _NOTHING
        for operand in operands:
            if operand in self._sources:
                found |= self._sources[operand]
            elif operand in self._in_memory:
                found |= {operand}
        return found

    def is_cheaper(
        self, sources: Sources, number: int, saved: Container[int] = (), *, reads_part: bool = False
    ) -> bool:
        """Whether a value's sources cost less than the value itself. Sources that are `saved` cost a read only.

        If both cost the same, the choice that needs no more memory is taken. A bias does not decide between them. A
        value that `reads_part` of its sources costs no more than its own bytes of each.
        """
        if len(sources) > _MOST_SOURCES:
            return False
        # Sizes may be symbolic, and are then neither less nor more: `is_less` is True only if it holds for all values.
        sizes, cost, are_in_memory = self._sizes, 0, True
        for each in (number, *sources):
            if each not in sizes:
                sizes[each] = self._size_of(each)
        for source in sources:
            if is_less(_NEGLIGIBLE * sizes[source], sizes[number]):
                continue
            is_read_only = source in saved or self._in_memory[source]
            are_in_memory = are_in_memory and is_read_only
            cost += sizes[number if reads_part else source] * (1 if is_read_only else 2)
        is_new = not self._in_memory[number]  # it would be written, and take memory, if it were saved
        value = sizes[number] * (2 if is_new else 1)
        return is_less(cost, value) or (is_new and are_in_memory and cost == value)

    def are_negligible(self, sources: Sources, number: int) -> bool:
        """Whether a value is so much larger than each of its sources that reading these counts for nothing."""
        size = self._size_of(number)
        return all([is_less(_NEGLIGIBLE * self._size_of(source), size) for source in sources])

    def rematerialize(self, number: int, sources: Sources, *, reads_part: bool = False) -> bool:
        """Whether rematerializing a value from these sources is cheaper; if so, they are its sources from then on."""
        if not self.is_cheaper(sources, number, reads_part=reads_part):
            return False
        self._sources[number] = sources
        return True
