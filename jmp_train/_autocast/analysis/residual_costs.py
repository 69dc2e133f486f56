"""What it costs to have a value where it is read again: across a dot, or in the iterations of another scan.

    saved             its bytes, written once and read once; read only, where they are in memory anyway
    rematerialized    the same for each of the values that it is computed from: its sources

An elementwise equation that runs again costs nothing more. XLA fuses it with what reads it, and its arithmetic is done
while the kernel waits for memory. So a value is rematerialized if its sources cost less than it does itself: a GELU's
inside in float32 (8 bytes a number) from the result of a dot (2), or the sum of two such results (4 bytes, as they are
together, and no memory), but not of three. The sources of a rematerialized value are those of its operands, so that one
choice rests on the ones before it, as in a greedy form of the cut in Jain et al., "Checkmate" (2020).

A policy in the manner of `jax.checkpoint_policies`: it asks for an equation's primitive (`fuses`) and for facts about
its operands and result, the bytes and the `Storage` of each. `save_or_remat.py` states them for straight code, and
`scan_residuals.py` for what one scan stacks for another.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from ..._sizes import is_less
from ..ir import Equation, Op
from ..primitives import Trait, having

_ELEMENTWISE = having(Trait.FUSES | Trait.EXPENSIVE | Trait.COMPARES)
_IN_RULES = _ELEMENTWISE | having(Trait.BITWISE)
# A value computed from more than this is its own source: keeps planning linear.
_MOST_SOURCES = 16

Values = frozenset[int]
_NOTHING: Values = frozenset()


class Storage(enum.IntEnum):
    """How often the bytes of a value move, if it is saved. What is not stated at all is free: literals, and what a
    reader is given anyway."""

    IN_MEMORY = 1  # written anyway: an argument, the operand or result of a dot, another residual
    NEW = 2  # written and read


def fuses(equation: Equation) -> bool:
    """Whether an equation is elementwise, so that XLA computes it in the kernel of whatever reads it."""
    if equation.bodies:
        rule = equation.node.name == "custom_jvp_call" and len(equation.results) == 1
        return rule and all([inner.node.name in _IN_RULES for inner in equation.bodies[0].equations])
    if equation.op is Op.RECORDED:
        return equation.node.name in _ELEMENTWISE
    return equation.op in (Op.CAST, Op.ROUND, Op.SAVED)


def size_in_bytes(aval: Any, itemsize: int | None = None) -> Any:
    """The bytes of a value, in numbers of another size if that is given; an expression if its shape is symbolic."""
    width = getattr(getattr(aval, "dtype", None), "itemsize", 0) if itemsize is None else itemsize
    return math.prod(getattr(aval, "shape", ())) * width


class _Stated(NamedTuple):
    bytes: Any
    storage: Storage

    @property
    def cost(self) -> Any:
        return self.bytes * self.storage


class ResidualCosts:
    """The values of one program, what each costs, and the sources from which it costs least.

    Values are stated in the order in which they are computed. What was not stated is free.
    """

    def __init__(self):
        self._stated: dict[int, _Stated] = {}
        self._sources: dict[int, Values] = {}

    def state(self, number: int, bytes: Any, storage: Storage) -> None:
        """States what a value costs. It is its own source, unless `rematerialize` says otherwise."""
        self._stated[number] = _Stated(bytes, storage)
        self._sources[number] = frozenset((number,))

    def sources(self, number: int) -> Values:
        return self._sources.get(number, _NOTHING)

    def sources_of(self, operands: Iterable[int]) -> Values | None:
        """What a result of these operands is computed from; `None` if that is too much to keep track of."""
        found = _NOTHING.union(*[self._sources.get(operand, _NOTHING) for operand in operands])
        return found if len(found) <= _MOST_SOURCES else None

    def is_cheaper(self, sources: Values, number: int, saved: Container[int] = ()) -> bool:
        """Whether a value's sources cost less than the value itself. Those that are `saved` are read only.

        Where both cost the same, the one that needs no more memory is chosen.
        """
        stated = [self._stated[each] for each in sources]
        known = [each.storage is Storage.IN_MEMORY or n in saved for n, each in zip(sources, stated, strict=True)]
        cost = sum([each.bytes if read else each.cost for each, read in zip(stated, known, strict=True)])
        value = self._stated[number]
        return is_less(cost, value.cost) or (cost == value.cost and value.storage is Storage.NEW and all(known))

    def rematerialize(self, number: int, operands: Iterable[int]) -> bool:
        """Whether a value is best computed again from its operands; from then on their sources are its own."""
        found = self.sources_of(operands)
        if found is None or not self.is_cheaper(found, number):
            return False
        self._sources[number] = found
        return True
