"""`underflow_report` and `suggest_loss_scale`: what a 16- or 8-bit format does to values, and the scale that helps.

Decides at which magnitudes the outcome of scaling and rounding changes, exactly, ties included, for a scale that may be
traced; which shares are reported; and which scale still leaves the largest value room. Does not decide how a scale
moves during training; see `DynamicLossScale`.

Rounding to nearest, ties to even, sends S * |x| to

    zero        up to half the smallest subnormal number, the tie included (0 is even)
    subnormal   below the smallest normal number less half a subnormal step, the tie excluded
    infinity    (NaN in formats without it) above the largest number and half a step; the tie where that number is odd

so that S * |x| need never be computed: |x| is compared with T / S for three rational T, as integers.

Reference: IEEE 754-2019, section 4.3.1.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import DTypeLike

from ..._dtypes import FLOAT64, Format, facts
from ..._loss_scale import DynamicLossScale, LossScale, StaticLossScale
from ..._scale_state import find_states
from ..._text import columns
from ..._values import as_number, register
from ._bits import (
    DOUBLE,
    SINGLE,
    Wide,
    bin_bits,
    check_single,
    exponent_bins,
    floating_leaves,
    from_bits,
    leading_bit,
    magnitudes,
    sum_uint64,
    target_format,
    to_int64,
)
from ._exponent_histogram import ExponentHistogram

OUTCOMES = ("zero", "subnormal", "normal", "infinite")

# The columns of `UnderflowReport.counts`: the outcomes of non-zero numbers, then what was no such number before.
_ZERO = len(OUTCOMES)
_NOT_FINITE = _ZERO + 1
_KINDS = _NOT_FINITE + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Underflow:
    """What becomes of one leaf, or of all.

    Attributes:
      path: the leaf, as a tree path, or "total".
      values: how many values it has.
      zeros: how many are zero already.
      not_finite: how many are infinite or NaN already.
      becomes_zero: the share of the other, non-zero and finite ones that becomes zero; 0 if there are none.
      becomes_subnormal: the share that becomes subnormal, and loses precision.
      becomes_infinite: the share that becomes infinite, or NaN in a format without infinities.
      largest: the largest finite |x|, before scaling; 0 if there is none.
      headroom: log2(largest number of the format / (S * `largest`)); negative: overflow; `None` if `largest` is 0.
    """

    path: str
    values: int
    zeros: int
    not_finite: int
    becomes_zero: float
    becomes_subnormal: float
    becomes_infinite: float
    largest: float
    headroom: float | None


@dataclasses.dataclass(frozen=True)
class UnderflowReport:
    """What `underflow_report` returns: a pytree of counts, read on the host by `leaves`, `total`, `as_dict`, `str`.

    Attributes:
      counts: uint32 `[n, 6, 2]` for n leaves: the non-zero finite values that become zero, subnormal, normal and
        infinite, then those that are zero and those that are not finite already; two uint32 as in
        `ExponentHistogram`.
      largest: the largest finite |x| of each leaf, n arrays `[]`, float64 for float64 leaves and float32 for others.
      loss_scale: S, float32 `[]`.
      paths: the leaves, as tree paths. Static.
      dtype: the name of the format. Static.
      exact: whether values were looked at, rather than the bins of a histogram. Static.
    """

    counts: jax.Array
    largest: tuple[jax.Array, ...]
    loss_scale: jax.Array
    paths: tuple[str, ...]
    dtype: str
    exact: bool

    @property
    def leaves(self) -> tuple[Underflow, ...]:
        """What becomes of each leaf, in the tree's order."""
        counts = self._counted()
        return tuple(map(self._row, self.paths, counts, map(float, self.largest)))

    @property
    def total(self) -> Underflow:
        """What becomes of all leaves together."""
        counts = self._counted().sum(axis=0)
        return self._row("total", counts, max(map(float, self.largest), default=0.0))

    def _counted(self) -> np.ndarray:
        check_single(self.counts, "report")
        return to_int64(self.counts)

    def _row(self, path: str, counts: np.ndarray, largest: float) -> Underflow:
        becomes = counts[:_ZERO]
        zero, subnormal, _, infinite = (float(share) for share in becomes / max(1, becomes.sum()))
        headroom = None
        if largest:
            headroom = math.log2(facts(self.dtype).max) - math.log2(float(self.loss_scale)) - math.log2(largest)
        already = int(counts[_ZERO]), int(counts[_NOT_FINITE])
        return Underflow(path, int(counts.sum()), *already, zero, subnormal, infinite, largest, headroom)

    def as_dict(self) -> dict[str, Any]:
        """Returns dictionaries, lists, strings and numbers, ready for JSON."""
        check_single(self.counts, "report")
        settings = {"dtype": self.dtype, "loss_scale": float(self.loss_scale), "exact": self.exact}
        return settings | {
            "leaves": [dataclasses.asdict(row) for row in self.leaves],
            "total": dataclasses.asdict(self.total),
        }

    def __str__(self) -> str:
        check_single(self.counts, "report")
        scale = float(self.loss_scale)
        title = f"Rounded to {self.dtype}" + (f" after scaling by {scale:g}" if scale != 1 else "")
        note = "" if self.exact else ", to the accuracy of a histogram"
        names = ("leaf", "values", "zero", "not finite", "becomes zero", "subnormal", "infinite", "largest", "headroom")
        return f"{title}{note}\n" + columns(names, [_cells(row) for row in (*self.leaves, self.total)])


def _cells(row: Underflow) -> tuple[str, ...]:
    shares = (row.becomes_zero, row.becomes_subnormal, row.becomes_infinite)
    room = "" if row.headroom is None else f"2^{row.headroom:.1f}"
    numbers = (str(row.values), str(row.zeros), str(row.not_finite))
    return (row.path, *numbers, *(f"{share:.1%}" for share in shares), f"{row.largest:.3g}", room)


register(UnderflowReport, ("counts", "largest", "loss_scale"), ("paths", "dtype", "exact"))


def underflow_report(tree_or_histogram: Any, dtype: DTypeLike = "float16", loss_scale: Any = 1.0) -> UnderflowReport:
    """What becomes of the values of a tree if they are multiplied by S and rounded to a 16- or 8-bit format.

    From a tree it is exact: the real product S * x is rounded once, to nearest, ties to even, whatever S, subnormal
    numbers included. From a histogram every value counts as the middle of its bin, 1.5 * 2^e. With a power of two for
    S that is wrong only for values that round across a boundary: those equal to half the smallest subnormal number,
    those within half a step below the smallest normal one, and those above the largest. `largest` is then the end of
    the highest bin in use, at most twice the truth.

    Works inside `jit`, `vmap` and `scan`; the text is made outside. Each leaf is read once. Inside `shard_map`
    and `pmap` it is about the device's own part; `exponent_histogram(tree).psum(axis_name)` is about all of them.

    Args:
      tree_or_histogram: any pytree (leaves as in `exponent_histogram`), or an `ExponentHistogram`.
      dtype: float16, bfloat16 or an 8-bit format.
      loss_scale: S: a number, an array, or a loss scale.

    Returns:
      An `UnderflowReport`.

    Raises:
      ValueError: `dtype` is no such format, `loss_scale` no positive number in [2^-126, 2^126], or no leaf of the tree
        is floating.

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.

    >>> grads = {"w": jnp.array([1.0, 2.0**-20, 2.0**-30, 0.0])}
    >>> print(underflow_report(grads))
    Rounded to float16
    leaf   values  zero  not finite  becomes zero  subnormal  infinite  largest  headroom
    w      4       1     0           33.3%         33.3%      0.0%      1        2^16.0
    total  4       1     0           33.3%         33.3%      0.0%      1        2^16.0
    >>> underflow_report(grads, loss_scale=2.0**15).total.becomes_zero
    0.0
    """
    return _report(tree_or_histogram, dtype, loss_scale, "underflow_report")


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
    report = _report(tree_or_histogram, dtype, 1.0, "suggest_loss_scale")
    return _largest_scale(report, Fraction(facts(report.dtype).max) / Fraction(room))


@functools.partial(jax.jit, static_argnums=1)
def _largest_scale(report: UnderflowReport, limit: Fraction) -> jax.Array:
    """The largest power of two within `DynamicLossScale`'s bounds that keeps S * max|g| below `limit`."""
    scale = DynamicLossScale()
    low, high = (round(math.log2(bound)) for bound in (scale.min_loss_scale, scale.max_loss_scale))
    # Leaves without a finite value limit nothing as soon as another has one.
    power, used = jnp.int32(high), jnp.bool_(False)
    for largest in report.largest:
        bits = magnitudes(largest)
        wide = DOUBLE if largest.dtype == FLOAT64 else SINGLE
        power = jnp.where(bits == 0, power, jnp.minimum(power, _power_below(bits, wide, limit)))
        used |= bits != 0
    nonfinite = jnp.any(report.counts[:, _NOT_FINITE] > 0)
    power = jnp.where(used | ~nonfinite, jnp.maximum(power, low), low)
    return lax.bitcast_convert_type((power + np.int32(SINGLE.bias)) << SINGLE.mantissa, np.float32)


def _report(tree_or_histogram: Any, dtype: DTypeLike, loss_scale: Any, caller: str) -> UnderflowReport:
    target, scale = target_format(dtype), as_scale(loss_scale)
    if isinstance(tree_or_histogram, ExponentHistogram):
        return _from_histogram(tree_or_histogram, target, scale)
    leaves = floating_leaves(tree_or_histogram, caller)
    if not leaves and jax.tree.leaves(tree_or_histogram):
        raise ValueError("`tree_or_histogram` has leaves, and none is floating; pass gradients.")
    found = [_count(leaf.array, scale, leaf.wide, target) for leaf in leaves]
    counts = jnp.stack([counts for counts, _ in found]) if found else jnp.zeros((0, _KINDS, 2), np.uint32)
    paths = tuple(leaf.path for leaf in leaves)
    return UnderflowReport(counts, tuple(largest for _, largest in found), scale, paths, target.name, True)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _count(array: jax.Array, scale: jax.Array, wide: Wide, target: Format) -> tuple[jax.Array, jax.Array]:
    """The counts of one leaf, uint32 `[6, 2]`, and its largest finite magnitude."""
    bits = magnitudes(array)
    edges = np.int32(0), *outcome_limits(scale, wide, target), wide.dtype.type(wide.infinity - 1)
    # One reduction with many results reads the leaf once, and so does a GPU, if all it needs are its bits.
    operands = [*((bits > edge).astype(np.uint32) for edge in edges), jnp.where(bits < wide.infinity, bits, 0)]
    starts = [*[np.uint32(0)] * len(edges), wide.dtype.type(0)]
    *above, largest = lax.reduce(operands, starts, _sums_and_maximum, tuple(range(bits.ndim)))
    between = [low - high for low, high in itertools.pairwise(above)]
    low = jnp.stack([*between, np.uint32(bits.size) - above[0], above[-1]])
    return jnp.stack([low, jnp.zeros_like(low)], axis=-1), from_bits(largest, wide)


def _sums_and_maximum(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    return [*map(lax.add, a[:-1], b[:-1]), lax.max(a[-1], b[-1])]


def _from_histogram(histogram: ExponentHistogram, target: Format, scale: jax.Array) -> UnderflowReport:
    check_single(histogram.counts, "histogram")
    counts, largest = _count_bins(jnp.asarray(histogram.counts), scale, histogram.wide, target)
    return UnderflowReport(counts, tuple(largest), scale, histogram.paths, target.name, False)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _count_bins(counts: jax.Array, scale: jax.Array, wide: Wide, target: Format) -> tuple[jax.Array, list[jax.Array]]:
    """As `_count`, of the bins of a histogram, uint32 `[..., n, bins + 3, 2]`, for each of its n leaves."""
    middles, ends = bin_bits(wide)
    kinds = jnp.append(outcome(middles, wide, scale, target), np.array([_ZERO, _NOT_FINITE, _NOT_FINITE], np.int32))
    of_each = [sum_uint64(jnp.where((kinds == kind)[:, None], counts, 0), -1) for kind in range(_KINDS)]
    used = jnp.any(counts[..., : wide.bins, :] > 0, axis=-1)
    largest = jnp.max(jnp.where(used, ends, 0), axis=-1)
    return jnp.stack(of_each, axis=-2), [from_bits(largest[..., i], wide) for i in range(counts.shape[-3])]


def as_scale(loss_scale: Any) -> jax.Array:
    """The scale of a loss scale, a number or a traced array, as float32 `[]`.

    Raises:
      ValueError: not one positive number within [2^-126, 2^126].
    """
    if isinstance(loss_scale, LossScale):
        return jnp.asarray(loss_scale.loss_scale, np.float32)
    if isinstance(loss_scale, Tracer):
        return loss_scale.astype(np.float32)
    if find_states(loss_scale):
        raise ValueError(
            "`loss_scale` must be a number or a loss scale, got an optimizer's state; pass get_loss_scale(opt_state)."
        )
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
    assert mantissa.denominator == 1, threshold  # a threshold of a 16-bit format has 12 bits at most
    # The scale is a normal number, by `as_scale`; both mantissas are in [1, 2), and so their quotient in (1/2, 2).
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
