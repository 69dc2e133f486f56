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
    ACTIVATION = "activation"  # float32 computed from rounded values, as by a norm or a softmax
    STATE = "state"  # float32 data that a loop which is linear in it carries
    FACTOR = "factor"  # float32 solutions and factors of linear systems that parameters alone decide
    SOLUTION = "solution"  # the same where more than parameters decide; and sums of squares, such as Gram matrices


FLOAT32_ORIGINS = (Origin.TABLE, Origin.DATA, Origin.ACTIVATION, Origin.STATE, Origin.FACTOR, Origin.SOLUTION)
UNROUNDED_ORIGINS = (Origin.TABLE, Origin.DATA, Origin.STATE, Origin.FACTOR, Origin.SOLUTION)
PARAMETER_ORIGINS = (Origin.EXACT, Origin.PARAMETER, Origin.FACTOR)
ROUNDED_ORIGINS = (Origin.NARROW, Origin.ACTIVATION)


def joined(origins: Iterable[Origin]) -> Origin:
    """What an operation makes of operands that it reads in one dtype: float32 data widens all others."""
    found = set(origins) - {Origin.EXACT}
    if len(found) <= 1:
        return next(iter(found), Origin.EXACT)
    if found.isdisjoint(FLOAT32_ORIGINS):
        return Origin.NARROW
    activation = found.isdisjoint(UNROUNDED_ORIGINS[1:]) and not found.isdisjoint(ROUNDED_ORIGINS)
    return Origin.ACTIVATION if activation else Origin.DATA


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
    return Origin.STATE if linear and origin in (Origin.DATA, Origin.SOLUTION, *ROUNDED_ORIGINS) else origin
