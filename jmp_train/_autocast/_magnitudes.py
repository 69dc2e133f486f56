"""How large and how small the numbers are that a program makes of its literals and booleans alone.

Each literal may fit into the compute dtype and their product may not: a mask of -1e4 that is multiplied by 10, a
coefficient of 1e-4 squared. Arguments are not followed: of parameters it is known that they narrow, and data are wide.

Decides the range of such values, and whether the compute dtype holds it. Does not decide what follows from that; see
`_plan.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._dtypes import facts
from .._jaxpr import Node

_UNITED = frozenset("select_n max min clamp concatenate pad stack dynamic_update_slice scatter".split())
_SAME = frozenset(
    "neg abs broadcast_in_dim reshape transpose squeeze rev slice dynamic_slice gather split unstack tile copy "
    "optimization_barrier reduce_max reduce_min convert_element_type".split()
)


class Range(NamedTuple):
    """The smallest and the largest finite magnitude among some numbers, zeros left out."""

    smallest: float = math.inf
    largest: float = 0.0

    def fits(self, dtype: np.dtype) -> bool:
        """Whether `dtype` holds all of them as normal numbers."""
        return self == Range() or (facts(dtype).smallest_normal <= self.smallest and self.largest <= facts(dtype).max)


def range_of(value: Any) -> Range:
    """The range of one known number; zeros, infinities and NaN are the same in every format."""
    magnitude = abs(float(np.asarray(value).reshape(())))
    return Range(magnitude, magnitude) if magnitude and math.isfinite(magnitude) else Range()


def range_through(node: Node, operands: Sequence[Range | None]) -> Range | None:
    """The range of a node's results, given those of its floating operands; `None` where it is not known."""
    if node.name == "convert_element_type" and not operands:
        return Range(1, 1) if getattr(node.eqn.invars[0].aval, "dtype", None) == np.bool_ else None
    known = [operand for operand in operands if operand is not None]
    if not known or len(known) < len(operands):
        return None
    if node.name in _SAME:
        return known[0]
    first, last = known[0], known[-1]
    if node.name in _UNITED:
        return Range(min(r.smallest for r in known), max(r.largest for r in known))
    if node.name in ("add", "sub", "add_any"):
        return Range(min(first.smallest, last.smallest), first.largest + last.largest)
    if node.name in ("mul", "div") and Range() in known:
        return Range()
    if node.name == "mul":
        return Range(first.smallest * last.smallest, first.largest * last.largest)
    if node.name == "div":
        return Range(first.smallest / last.largest, first.largest / last.smallest)
    return None
