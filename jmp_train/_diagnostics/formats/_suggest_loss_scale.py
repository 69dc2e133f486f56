"""`suggest_loss_scale`: the scale that puts the largest gradient where the format still has room.

Decides the scale from one look at gradients. Does not decide how a scale moves during training; see `DynamicLossScale`.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..._loss_scale import DynamicLossScale
from ..._values import as_number
from ._bits import SINGLE, Wide, exponent_bins, floating_leaves, leading_bit, magnitudes, target_format
from ._exponent_histogram import ExponentHistogram
from ._underflow_report import floor_log2, largest_bits, largest_in_bins


def suggest_loss_scale(tree_or_histogram: Any, dtype: DTypeLike = "float16", margin: float = 2.0) -> jax.Array:
    """The largest power of two S such that S * max|g| stays below the format's largest number / margin.

    The scale to start from: `DynamicLossScale` finds it too, at the price of a skipped step for every power of two that
    it starts too high, and of `growth_interval` steps for every one too low. S stays within the bounds of
    `DynamicLossScale`, 1 and 2^24: where S * max|g| is too large at 1, the suggestion is 1.

    Infinities and NaNs are ignored; `underflow_report` and `exponent_histogram` count them. If no value is finite and
    non-zero, the suggestion is 2^24 where all are zero (nothing can overflow, and gradients that vanished in 16 bits
    need all the scale there is) and 1 where some are infinite or NaN.

    From a tree it is exact, and from a histogram, of which the highest bin is taken to be full, at most a factor 2 too
    low. Works inside `jit`, `vmap` and `scan`.

    Args:
      tree_or_histogram: unscaled gradients, as in `underflow_report`.
      dtype: the format the scaled gradients will have: float16, bfloat16 or an 8-bit one.
      margin: at least 1. Activation gradients, which no one sees, are often larger than those of parameters, and the
        largest gradient changes from batch to batch; 2 leaves room for one doubling. More is safer and costs range.

    Returns:
      S, float32 `[]`.

    Raises:
      ValueError: `dtype` is no such format, `margin` no number of at least 1, or no leaf of the tree is floating.

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2: any S will do as long as
    S * max|g| does not exceed 65,504.

    >>> float(suggest_loss_scale({"w": jnp.array([1.0, -3.0])}))
    8192.0
    >>> float(suggest_loss_scale({"w": jnp.array([1.0, -3.0])}, "float8_e4m3fn"))
    64.0
    """
    room = as_number("margin", margin)
    if room < 1:
        raise ValueError(f"`margin` must be at least 1, got {margin!r}. Pass how many times larger gradients may get.")
    limit = Fraction(target_format(dtype).max) / Fraction(room)
    if isinstance(tree_or_histogram, ExponentHistogram):
        tree_or_histogram.check_single()
        return _from_bins(jnp.asarray(tree_or_histogram.counts), tree_or_histogram.wide, limit)
    leaves = floating_leaves(tree_or_histogram, "suggest_loss_scale")
    if not leaves and jax.tree.leaves(tree_or_histogram):
        raise ValueError("`tree_or_histogram` has leaves, and none is floating; pass gradients.")
    seen = [_largest_and_nonfinite(leaf.array, leaf.wide) for leaf in leaves]
    return _from_largest(seen, tuple(leaf.wide for leaf in leaves), limit)


@functools.partial(jax.jit, static_argnums=1)
def _largest_and_nonfinite(array: jax.Array, wide: Wide) -> tuple[jax.Array, jax.Array]:
    """The bits of the largest finite magnitude, and whether anything is not finite."""
    bits = magnitudes(array)
    return largest_bits(bits, wide), jnp.any(bits >= wide.infinity)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _from_bins(counts: jax.Array, wide: Wide, limit: Fraction) -> jax.Array:
    """The scale for the bins of a histogram, uint32 `[..., bins + 3, 2]`."""
    nonfinite = jnp.any(counts[..., wide.bins + 1 :, :] > 0)
    return _from_largest([(largest_in_bins(counts, wide), nonfinite)], (wide,), limit)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _from_largest(seen: list[tuple[jax.Array, jax.Array]], wides: tuple[Wide, ...], limit: Fraction) -> jax.Array:
    """The scale for what was seen of each leaf: the bits of its largest magnitude, and whether any is not finite."""
    scale = DynamicLossScale()
    low, high = (round(math.log2(bound)) for bound in (scale.min_loss_scale, scale.max_loss_scale))
    # Leaves without a finite value limit nothing as soon as another has one.
    powers, used, nonfinite = [jnp.full(1, high, np.int32)], jnp.bool_(False), jnp.bool_(False)
    for (bits, not_finite), wide in zip(seen, wides, strict=True):
        powers.append(jnp.where(bits == 0, high, _power_below(bits, wide, limit)).ravel())
        used, nonfinite = used | jnp.any(bits != 0), nonfinite | not_finite
    power = jnp.min(jnp.concatenate(powers))
    return _power_of_two(jnp.where(used | ~nonfinite, jnp.maximum(power, low), low))


def _power_below(bits: jax.Array, wide: Wide, limit: Fraction) -> jax.Array:
    """The largest k, int32, with 2^k * |x| < limit, for the bits of numbers |x| > 0.

    With |x| = f * 2^e and limit = l * 2^b, both mantissas in [1, 2), that is b - e, or one less where f >= l.
    """
    shift = jnp.maximum(wide.mantissa - leading_bit(bits, wide), 0)  # of a subnormal number's mantissa
    one = wide.dtype.type(1 << wide.mantissa)
    mantissa = jnp.where(shift == 0, (bits & (one - 1)) | one, bits << shift.astype(wide.dtype))
    limit_exponent = floor_log2(limit)
    # Rounded up: an integer is at least l if it is at least the next integer above l.
    limit_mantissa = math.ceil(limit / Fraction(2) ** (limit_exponent - wide.mantissa))
    exponent = exponent_bins(bits, wide) + np.int32(wide.lowest)
    return np.int32(limit_exponent) - exponent - (mantissa >= wide.dtype.type(limit_mantissa)).astype(np.int32)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + np.int32(SINGLE.bias)) << SINGLE.mantissa, np.float32)
