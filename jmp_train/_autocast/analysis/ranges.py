"""How large and how small the numbers are that a program computes from its literals and booleans alone.

    a = mul 10.0 -1e4             range 1e5 to 1e5: float16 ends at 65,504
    b = select_n mask 0.0 -1e5    range 1e5 to 1e5, zeros left out
    c = add scores b              overflows: has numbers beyond float16 among others, whose range is not known

Each literal may fit into the compute dtype although their product does not: a mask of -1e4 that is multiplied by 10, a
coefficient of 1e-4 squared. Arguments have no range here: parameters narrow, and data is float32, whatever its numbers.

Also decides which values have numbers that do not fit among others: the -1e5 that a CTC loss uses for the logarithm of
zero is carried beside scores, and a product with zeros and ones that picks scores would multiply infinities by zero.

Decides the range of such values, and whether the compute dtype holds it. Does not decide the dtypes; see
`passes.assign_dtypes`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.core import Tracer

from ..._dtypes import facts
from ..._jaxpr import Node
from ..primitives import ADDS, BOUNDS, COMBINES, Trait, having

_JOINS = having(Trait.JOINS | Trait.BOUNDS)
_MOVES = having(Trait.MOVES | Trait.PICKS | Trait.FLIPS) | {"convert_element_type"}
_SAME = _MOVES | having(Trait.EXTREMES)
_CARRIES = _MOVES | {"sort", "reduce_sum", "cumsum", "cumlogsumexp", "integer_pow", "square"}


class Range(NamedTuple):
    """The smallest and the largest finite magnitude among some numbers, zeros left out."""

    smallest: float = math.inf
    largest: float = 0.0

    def fits(self, dtype: np.dtype) -> bool:
        """Whether `dtype` holds all of them as normal numbers, and rounds none to one that is merely close to it.

        The 0.999999 of `arccos(clip(x, -0.999999, 0.999999))` keeps a slope finite, and one would not.
        """
        found = facts(dtype)
        # Below the smallest normal number digits are lost.
        if not (found.smallest_normal <= self.smallest and self.largest <= found.max):
            return False
        if self.smallest >= 1 + found.eps or self.largest <= 1 - found.eps:  # asked first, since it needs no rounding
            return True
        return not (_becomes_one(self.smallest, dtype) or _becomes_one(self.largest, dtype))


def _becomes_one(number: float, dtype: np.dtype) -> bool:
    return number != 1 and bool(dtype.type(number) == 1)


def range_of(value: Any) -> Range | None:
    """The range of one known number; zeros, infinities and NaN are the same in every format.

    `None` of arrays, and of complex numbers, which have no 16-bit form.
    """
    if isinstance(value, Tracer) or np.size(value) != 1:
        return None
    number = np.asarray(value)
    if number.dtype.kind == "c":
        return None
    magnitude = abs(float(number.reshape(())))
    return Range(magnitude, magnitude) if magnitude and math.isfinite(magnitude) else Range()


def range_through(node: Node, operands: Sequence[Range | None]) -> Range | None:
    """The range of a node's results, given those of its floating operands; `None` where it is not known."""
    if node.name == "convert_element_type" and not operands:
        # Of a boolean: zeros are left out.
        return Range(1, 1) if getattr(node.eqn.invars[0].aval, "dtype", None) == np.bool_ else None
    known = [operand for operand in operands if operand is not None]
    if not known or len(known) < len(operands):
        return None
    if node.name in _SAME:
        return known[0]
    first, last = known[0], known[-1]  # of the two operands of arithmetic
    if node.name in _JOINS:
        return Range(min(r.smallest for r in known), max(r.largest for r in known))
    if node.name in ADDS:
        # Numbers that almost cancel count as zero, which they mostly are, as in `1 - mask` for ones.
        return Range(min(first.smallest, last.smallest), first.largest + last.largest)
    if node.name in ("mul", "div") and Range() in known:  # zeros, which no magnitude of the other changes
        return Range()
    if node.name == "mul":
        return Range(first.smallest * last.smallest, first.largest * last.largest)
    if node.name == "div":
        return Range(first.smallest / last.largest, first.largest / last.smallest)
    return None


def filled_with(node: Node) -> Range | None:
    """The range of the literal that a gather returns for an index out of bounds, if it has one."""
    fill = node.params.get("fill_value") if node.name == "gather" else None
    return None if fill is None else range_of(fill)


class Numbers(NamedTuple):
    """What is known of the numbers of a value.

    Attributes:
      range: their range, if the value is computed from literals and booleans alone.
      overflows: whether some are literals beyond the compute dtype, or sums with such literals, among others.
    """

    range: Range | None = None
    overflows: bool = False

    def exceed(self, dtype: np.dtype) -> bool:
        """Whether some would be infinite in `dtype`."""
        return self.overflows or (self.range is not None and self.range.largest > facts(dtype).max)


UNKNOWN_NUMBERS = Numbers()


def divides_by_terms(terms: int, divisor: Range | None) -> bool:
    """Whether sums of so many values, divided by a number, are means: no larger than the values, and fit where they do.

    The divisor is one known number. If it were much larger than `terms`, the means would be too small for the compute
    dtype. Up to twice as large, it makes them smaller by a factor of two at most.
    """
    return divisor is not None and divisor.smallest == divisor.largest and terms <= divisor.smallest <= 2 * terms


def overflows_through(node: Node, operands: Sequence[Numbers], dtype: np.dtype) -> bool:
    """Whether a node's results hold numbers beyond `dtype` among others, given what is known of its operands.

    A bound does not count: `max(x, -1e9)` is `x`, and the largest of masked numbers is one that is not masked. A factor
    does not count either: its product with a small number is small, and a loss is scaled in this way.
    """
    if node.name in BOUNDS:
        others = [each for each in operands if each.range is None]
        return bool(others) and all(each.overflows for each in others)
    if (fill := filled_with(node)) is not None:
        return operands[0].overflows or Numbers(fill).exceed(dtype)
    if node.name in COMBINES:
        return any([each.range is None for each in operands]) and any([each.exceed(dtype) for each in operands])
    if node.name == "div":
        return operands[0].overflows
    return (node.name in _CARRIES or node.name == "mul") and any([each.overflows for each in operands])


def numbers_through(node: Node, operands: Sequence[Numbers], dtype: np.dtype) -> Numbers:
    """What is known of the numbers of a node's results, given what is known of its floating operands."""
    if not operands:
        return Numbers(range_through(node, ()))
    if operands.count(UNKNOWN_NUMBERS) == len(operands) and node.name != "gather":  # which has numbers of its own
        return UNKNOWN_NUMBERS
    return Numbers(range_through(node, [each.range for each in operands]), overflows_through(node, operands, dtype))
