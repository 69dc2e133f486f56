"""What a value was computed from, as far as it decides whether a product with it is a layer's.

Decides how origins combine. Does not decide which product is a layer's; see `_products.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple


class Origin(enum.Enum):
    """What a value is to a multiplication: what the planner's `Kind` will be, as far as products need it."""

    EXACT = "exact"  # single numbers and booleans: zeros, ones, a literal
    TABLE = "table"  # arrays that no argument decides
    PARAMETER = "parameter"  # narrows to what it meets
    NARROW = "narrow"  # rounded to 16 bits by a product, as activations are
    DATA = "data"  # float32: other arguments, captured arrays, and what float32 operations computed
    STATE = "state"  # the same, and carried by a loop that is linear in it


FLOAT32_ORIGINS = (Origin.TABLE, Origin.DATA, Origin.STATE)


def joined(origins: Iterable[Origin]) -> Origin:
    """What an operation makes of operands that it reads in one dtype: float32 data widens all others."""
    found = set(origins) - {Origin.EXACT}
    if len(found) <= 1:
        return next(iter(found), Origin.EXACT)
    return Origin.DATA if not found.isdisjoint(FLOAT32_ORIGINS) else Origin.NARROW


class Fact(NamedTuple):
    """What is known of a value at the boundary of a program.

    Attributes:
      origin: what it was computed from.
      token: equal for equal values.
      numbers: gives its numbers, if it is a constant.
    """

    origin: Origin
    token: Any = None
    numbers: Any = None


def carried_origin(origin: Origin, linear: bool) -> Origin:
    """What a loop carries: the state of a linear system is float32 data, as the roundings of its steps add up."""
    return Origin.STATE if linear and origin in (Origin.DATA, Origin.NARROW) else origin
