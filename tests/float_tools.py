"""Formats, awkward numbers and slow oracles for the tests of the diagnostics; NumPy, ml_dtypes and Python only."""

import bisect
import functools
import math
from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np

FP8 = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
)
TARGETS = ("float16", "bfloat16", *FP8)


def all_values(name):
    """Every bit pattern of a format of 8 or 16 bits."""
    dtype = np.dtype(getattr(jnp, name))
    integer = np.uint8 if dtype.itemsize == 1 else np.uint16
    return np.arange(2 ** (8 * dtype.itemsize)).astype(integer).view(dtype)


def awkward(dtype, size=400, seed=0):
    """Numbers of every magnitude of a wide format, its extremes, both zeros, infinities and NaN."""
    dtype = np.dtype(dtype)
    info = np.finfo(dtype)
    generator = np.random.default_rng(seed)
    integer = np.dtype(f"uint{8 * dtype.itemsize}")
    bits = generator.integers(0, 2 ** (8 * dtype.itemsize), size, dtype=integer)
    subnormal = generator.integers(0, 2**info.nmant, size // 4, dtype=integer)
    powers = np.ldexp(np.ones(1, dtype), np.arange(info.minexp - info.nmant, info.maxexp)).astype(dtype)
    edges = [0, -0.0, np.inf, -np.inf, np.nan, info.max, -info.max, info.tiny, info.smallest_subnormal]
    return np.concatenate([bits.view(dtype), subnormal.view(dtype), powers, np.array(edges, dtype)])


def exponents_of(values):
    """{exponent: count} of the finite non-zero values, and the counts of zeros, infinities and NaN, by math.frexp."""
    with np.errstate(invalid="ignore"):  # signalling NaNs of bfloat16
        numbers = np.asarray(values).astype(np.float64).ravel()
    counted = {}
    for number in numbers[np.isfinite(numbers) & (numbers != 0)]:
        exponent = math.frexp(number)[1] - 1
        counted[exponent] = counted.get(exponent, 0) + 1
    return counted, (np.sum(numbers == 0), np.sum(np.isinf(numbers)), np.sum(np.isnan(numbers)))


@functools.cache
def rounding(name):
    return Rounding(name)


class Rounding:
    """Rounding to nearest, ties to even, to a format of 8 or 16 bits, by a table of all its numbers."""

    def __init__(self, name):
        codes = all_values(name)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            half = codes[: len(codes) // 2].astype(np.float64)  # without the sign bit
        self.finite = [Fraction(x) for x in half if np.isfinite(x)]
        self.normal = Fraction(float(ml_dtypes.finfo(codes.dtype).smallest_normal))
        # The number that would follow the largest one if the format had one more bit of exponent.
        self.finite.append(2 * self.finite[-1] - self.finite[-2])

    def outcome(self, exact):
        """'zero', 'subnormal', 'normal' or 'infinite' for an exact positive number."""
        values, last = self.finite, len(self.finite) - 1
        if exact >= values[-1]:
            return "infinite"
        above = bisect.bisect_right(values, exact)
        low, high = values[above - 1], values[above]
        nearest = above - 1 if exact - low < high - exact else above
        if exact - low == high - exact:
            nearest = above - 1 if (above - 1) % 2 == 0 else above  # the even code
        if nearest == last:
            return "infinite"
        return "zero" if nearest == 0 else "subnormal" if values[nearest] < self.normal else "normal"
