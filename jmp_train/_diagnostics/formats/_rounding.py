"""What becomes of a number that is scaled and rounded: zero, subnormal, normal or infinite, decided without rounding.

Decides at which magnitudes the outcome changes, exactly, ties included, for a scale that may be traced. Does not decide
what is counted; see `_underflow_report.py`.

Rounding to nearest, ties to even, sends S * |x| to

    zero        up to half the smallest subnormal number, the tie included (0 is even)
    subnormal   below the smallest normal number less half a subnormal step, the tie excluded
    infinity    (NaN in formats without it) above the largest number and half a step; the tie where that number is odd

so that S * |x| need never be computed: |x| is compared with T / S for three rational T, as integers.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..._dtypes import Format
from ..._loss_scale import LossScale, StaticLossScale
from ._bits import SINGLE, Wide

OUTCOMES = ("zero", "subnormal", "normal", "infinite")
_SINGLE_BITS = SINGLE.mantissa + 1  # of a float32's mantissa, the leading one included


def as_scale(loss_scale: Any) -> jax.Array:
    """The scale of a loss scale, a number or a traced array, as float32 `[]`.

    Raises:
      ValueError: not one positive number within [2^-126, 2^126].
    """
    if isinstance(loss_scale, LossScale):
        return jnp.asarray(loss_scale.loss_scale, np.float32)
    if isinstance(loss_scale, Tracer):
        return loss_scale.astype(np.float32)
    return jnp.asarray(StaticLossScale(loss_scale).loss_scale, np.float32)


def outcome(bits: jax.Array | np.ndarray, wide: Wide, scale: jax.Array, target: Format) -> jax.Array:
    """The index in `OUTCOMES` of what each finite magnitude becomes, times S, in the target; int32 in their shape."""
    limits = outcome_limits(scale, wide, target)
    return sum((jnp.asarray(bits > limit).astype(np.int32) for limit in limits), jnp.int32(0))


def _thresholds(target: Format) -> list[tuple[Fraction, bool]]:
    """The three magnitudes at which the outcome changes, and whether the lower outcome includes them."""
    largest, step = Fraction(target.max), Fraction(target.smallest_subnormal)
    last_step = Fraction(target.eps) * Fraction(2) ** floor_log2(largest)
    even = (largest / last_step) % 2 == 0
    return [(step / 2, True), (Fraction(target.smallest_normal) - step / 2, False), (largest + last_step / 2, even)]


@functools.partial(jax.jit, static_argnums=(1, 2))
def outcome_limits(scale: jax.Array, wide: Wide, target: Format) -> tuple[jax.Array, ...]:
    """The bits of the largest magnitude of each outcome but the last, ascending."""
    found = []
    for threshold, inclusive in _thresholds(target):
        bits, exact = _quotient(threshold, scale, wide)
        found.append(bits if inclusive else bits - exact.astype(wide.dtype))
    return tuple(found)


def _quotient(threshold: Fraction, scale: jax.Array, wide: Wide) -> tuple[jax.Array, jax.Array]:
    """The bits of the largest magnitude that is at most T / S, and whether the two are equal.

    Long division of the two mantissas, m_T / m_S, with one bit more of the quotient in each step.
    """
    scale_bits = lax.bitcast_convert_type(scale, np.int32)
    divisor = (scale_bits & np.int32((1 << SINGLE.mantissa) - 1)) | np.int32(1 << SINGLE.mantissa)
    scale_exponent = (scale_bits >> SINGLE.mantissa) - np.int32(SINGLE.bias)
    exponent = floor_log2(threshold)
    mantissa = threshold / Fraction(2) ** (exponent - SINGLE.mantissa)
    assert mantissa.denominator == 1, threshold  # 12 bits are the most that a 16-bit format needs
    below_one = np.int32(mantissa.numerator) < divisor
    rest = jnp.where(below_one, np.int32(2 * mantissa.numerator), np.int32(mantissa.numerator))
    leading = np.int32(exponent) - scale_exponent - below_one.astype(np.int32)
    quotient = jnp.zeros((), wide.dtype)
    for _ in range(wide.mantissa + 1):
        fits = rest >= divisor
        quotient = (quotient << 1) | fits.astype(wide.dtype)
        rest = jnp.where(fits, rest - divisor, rest) << 1
    return _encode(quotient, leading, rest == 0, wide)


def floor_log2(number: Fraction) -> int:
    """floor(log2(number)) of a positive number."""
    guess = number.numerator.bit_length() - number.denominator.bit_length()
    return guess if Fraction(2) ** guess <= number else guess - 1


def _encode(mantissa: jax.Array, exponent: jax.Array, exact: jax.Array, wide: Wide) -> tuple[jax.Array, jax.Array]:
    """The bits of mantissa * 2^(exponent - wide.mantissa), rounded down, and whether nothing was lost."""
    field = (exponent + np.int32(wide.bias)).astype(wide.dtype)
    normal = ((field - 1) << wide.mantissa) + mantissa  # the leading bit of the mantissa adds one to the field
    shift = jnp.clip(1 - field, 0, wide.mantissa + 1)
    subnormal = mantissa >> shift
    exact = exact & ((subnormal << shift) == mantissa)
    too_large = field > 2 * wide.bias
    bits = jnp.where(field >= 1, normal, subnormal)
    return jnp.where(too_large, wide.dtype.type(wide.infinity - 1), bits), exact & ~too_large
