"""The entry of a product that runs in float32, and the possible causes.

Decides which causes there are. Does not decide which product has one; see `whole_program/causes.py`.
"""

import dataclasses
import enum

from ..primitives import Entry, Rule


class Cause(enum.Enum):
    """Why a product runs in float32; the text is its reason in `explain`."""

    PRECISION = "its precision was set to float32"
    SHORT = "contracts too few numbers for a Tensor Core, and follows its float32 data"
    INNER = "inner products of float32 data, or only one: no Tensor Core computes them"
    DIAGONAL = "only its diagonal is read, as by a trace: inner products"
    SQUARE = "a value times itself, a square"
    DISTANCE = "added to squares of its operands, as in a distance: their digits cancel"
    DELICATE = "an angle, a divisor or under a logarithm, and computed from float32 data"
    PROBABILITY = "probabilities under a logarithm: float16 rounds those below 3e-8 to zero"
    AVERAGE = "an average of float32 data, divided by the sum of its weights, which is of unrounded ones"
    IN_SYSTEM = "read by a linear system, which magnifies its error"
    REPEATED = "multiplies float32 data by one value twice, as a quadratic form or a power iteration does"
    SOLUTION = "multiplies a Gram matrix, or a solution or factor of a linear system: their digits cancel"
    STATE = "multiplies the state of a linear recurrence by data: the roundings of its steps add up"
    SYSTEM = "belongs to the derivative of a linear system or a factorization"
    TABLE = "multiplies constants that the compute dtype cannot hold"
    DIFFERENCES = "differences of numbers that no product has rounded: their digits cancel"
    CUMULATIVE = "multiplies a triangle of ones, which makes a cumulative sum"
    GRID = "an expectation over a table of constants, or such a table times float32 data"
    FILTER = "a fixed filter of one channel: no Tensor Core computes one"


@dataclasses.dataclass(frozen=True)
class WideProduct(Entry):
    """The entry of a product that runs in float32.

    Attributes:
      cause: why it runs in float32.
      of_derivative: whether it belongs to the derivative of another product, whose cause this is.
    """

    cause: Cause = Cause.PRECISION
    of_derivative: bool = False

    @property
    def meets_squares(self) -> bool:
        """Whether it is added to squares of its operands, so that product and squares have to read the same numbers."""
        return self.cause in (Cause.SQUARE, Cause.DISTANCE)


def wide_product(cause: Cause, of_derivative: bool = False) -> WideProduct:
    reason = f"derivative of a product kept in float32: {cause.value}" if of_derivative else cause.value
    return WideProduct(Rule.RECORDED, reason, cause=cause, of_derivative=of_derivative)
