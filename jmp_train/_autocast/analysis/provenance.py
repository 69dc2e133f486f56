"""What a value was computed from, as far as it decides whether a product with it is a layer's.

Decides how provenances combine. Does not decide which product is a layer's; see `products.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple


class Provenance(enum.Enum):
    """What a value is to a multiplication: what its `Precision` will be, as far as products need it."""

    EXACT = "exact"  # single numbers and booleans: zeros, ones, a literal
    TABLE = "table"  # arrays that no argument decides
    PARAMETER = "parameter"  # narrows to what it meets
    NARROW = "narrow"  # rounded to 16 bits by a product, as activations are
    DATA = "data"  # float32: other arguments, captured arrays, and what float32 operations computed
    ACTIVATION = "activation"  # float32 computed from rounded values, as by a norm or a softmax
    STATE = "state"  # float32 data that a loop which is linear in it carries
    FACTOR = "factor"  # float32 solutions and factors of linear systems that parameters alone decide
    SOLUTION = "solution"  # the same where more than parameters decide; and sums of squares, such as Gram matrices


UNROUNDED_PROVENANCES = (
    Provenance.TABLE,
    Provenance.DATA,
    Provenance.STATE,
    Provenance.FACTOR,
    Provenance.SOLUTION,
)
FLOAT32_PROVENANCES = (*UNROUNDED_PROVENANCES, Provenance.ACTIVATION)
PARAMETER_PROVENANCES = (Provenance.EXACT, Provenance.PARAMETER, Provenance.FACTOR)
ROUNDED_PROVENANCES = (Provenance.NARROW, Provenance.ACTIVATION)


def joined(provenances: Iterable[Provenance]) -> Provenance:
    """What an operation makes of operands that it reads in one dtype: float32 data widens all others."""
    found = [each for each in provenances if each is not Provenance.EXACT]  # no set: enums hash in Python
    if not found or found.count(found[0]) == len(found):
        return found[0] if found else Provenance.EXACT
    if not any([each in FLOAT32_PROVENANCES for each in found]):
        return Provenance.NARROW
    if any([each in UNROUNDED_PROVENANCES[1:] for each in found]):
        return Provenance.DATA
    return Provenance.ACTIVATION if any([each in ROUNDED_PROVENANCES for each in found]) else Provenance.DATA


class Fact(NamedTuple):
    """What is known of a value at the boundary of a program.

    Attributes:
      provenance: what it was computed from.
      token: equal for equal values.
      numbers: gives its numbers, if it is a constant.
    """

    provenance: Provenance
    token: Any = None
    numbers: Any = None


def carried_provenance(provenance: Provenance, linear: bool) -> Provenance:
    """What a loop carries: the state of a linear system is float32 data, as the roundings of its steps add up."""
    adds_up = provenance in (Provenance.DATA, Provenance.SOLUTION, *ROUNDED_PROVENANCES)
    return Provenance.STATE if linear and adds_up else provenance
