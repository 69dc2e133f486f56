"""Floating numbers as integers, and exact counts of them: what exponents and underflow are read from.

Decides how a leaf of any floating format becomes bits that order like its absolute values, and how many of something
are counted beyond 32 bits. Does not decide what is counted; see `_exponent_histogram.py` and `_underflow.py`.

XLA computes with subnormal float32 numbers as if they were zero, on CPUs and GPUs alike, in comparisons too. Their bits
are safe: for x >= 0 the bits of an IEEE format, read as an integer, grow with x.

A count is a uint64 as two uint32, low and high, in the last axis: JAX has no 64-bit types unless they are enabled. The
counts of one step would fit an int32 nearly always, their sum over a training run would not: a billion parameters pass
2^31 in the third step.

Reference: IEEE 754-2019, section 3.4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jax.typing import DTypeLike

from ..._dtypes import BFLOAT16, FLOAT32, FLOAT64, Format, facts
from ..._finite import is_gradient
from ..._paths import leaf_paths
from ..._values import check_readable, check_reduced


class Wide(NamedTuple):
    """A format that magnitudes are read in: float32 for all floats up to 32 bits, float64 for float64.

    Attributes:
      dtype: the integer that holds the bits, int32 or int64.
      mantissa: explicit bits of the mantissa.
      bias: of the exponent, and the exponent of the largest finite number.
    """

    dtype: np.dtype
    mantissa: int
    bias: int

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    @property
    def lowest(self) -> int:
        """The exponent of the smallest subnormal number: -149, -1074."""
        return 1 - self.bias - self.mantissa

    @property
    def bins(self) -> int:
        """How many exponents there are, from `lowest` to `bias`."""
        return self.bias - self.lowest + 1

    @property
    def infinity(self) -> int:
        """The bits of infinity; those of a NaN are larger."""
        return (2 * self.bias + 1) << self.mantissa


SINGLE = Wide(np.dtype(np.int32), 23, 127)
DOUBLE = Wide(np.dtype(np.int64), 52, 1023)

# GPU threads that add to one address wait for each other, so that a large array is counted in many rows, which are
# summed at the end: 2^8 rows of 280 counters are 0.3 MB, less than a GPU's cache.
_MOST_ROWS = 2**8
_VALUES_PER_ROW = 2**12

# What one call of `bincount` can count without an overflow.
_MOST_VALUES = 2**32 - 1


class Leaf(NamedTuple):
    """A leaf whose magnitudes are to be read.

    Attributes:
      path: where it is, as in `_paths.py`.
      array: its values, floating or complex.
      wide: the format in which `magnitudes` reads them.
    """

    path: str
    array: jax.Array
    wide: Wide


def floating_leaves(tree: Any, caller: str) -> list[Leaf]:
    """Every leaf that is a gradient (see `is_gradient`), in the order of `jax.tree.leaves`.

    Raises:
      ValueError: a float64 leaf while JAX has no 64-bit types, one of 2^32 values or more, or an unreduced one.
    """
    keyed, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = []
    for path, (keys, leaf) in zip(leaf_paths(tree), keyed, strict=True):
        if is_gradient(keys, leaf):
            array = _as_array(leaf, path, caller)
            found.append(Leaf(path, array, DOUBLE if array.dtype in (FLOAT64, np.complex128) else SINGLE))
    return found


def _as_array(leaf: Any, path: str, caller: str) -> jax.Array:
    check_readable(caller, f"the leaf {path!r}", leaf)
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"`{caller}`: the leaf {path!r} is {dtype} while 64-bit types are disabled, and JAX would round it to 32 "
            "bits; call jax.config.update('jax_enable_x64', True) first, or cast it yourself."
        )
    check_reduced(f"the leaf {path!r}", leaf)
    array = jnp.asarray(leaf)
    values = array.size * (2 if jnp.iscomplexobj(array) else 1)
    if values > _MOST_VALUES:
        raise ValueError(
            f"`{caller}`: the leaf {path!r} has {values} values, and one leaf may have 2**32 - 1; "
            "pass it in pieces, as a list."
        )
    return array


def check_single(counts: Any, what: str) -> None:
    """Raises ValueError where the counts `[n, kinds, 2]` of a "histogram" or "report" have further axes in front."""
    if jnp.ndim(counts) != 3:
        raise ValueError(
            f"this is a stack of {what}s, of shape {jnp.shape(counts)[:-3]}, as vmap and scan return; "
            f"take one with jax.tree.map(lambda x: x[0], {what})."
        )


def magnitudes(array: jax.Array) -> jax.Array:
    """The bits of |x| as int32, or int64 for float64, in the array's shape; `[2, ...]` for complex numbers."""
    if jnp.iscomplexobj(array):
        return jnp.stack([magnitudes(lax.real(array)), magnitudes(lax.imag(array))])
    if array.dtype == jnp.float8_e8m0fnu:
        # Powers of two without a sign: the exponent of a float32. The smallest, 2^-127, is subnormal there.
        code = lax.bitcast_convert_type(array, np.uint8).astype(np.int32)
        bits = jnp.where(code == 0, np.int32(1 << 22), code << 23)
        return jnp.where(code == 255, np.int32(SINGLE.infinity + 1), bits)
    if array.dtype == BFLOAT16:
        # The upper half of a float32. By bits, for a conversion might flush subnormal numbers to zero.
        return (lax.bitcast_convert_type(array, np.uint16).astype(np.int32) & np.int32(0x7FFF)) << 16
    if array.dtype == FLOAT64:
        return lax.bitcast_convert_type(array, np.int64) & np.int64(2**63 - 1)
    # All values of float16 and of the other narrow formats are normal numbers in float32.
    single = array if array.dtype == FLOAT32 else array.astype(FLOAT32)
    return lax.bitcast_convert_type(single, np.int32) & np.int32(2**31 - 1)


def from_bits(bits: jax.Array, wide: Wide) -> jax.Array:
    """The numbers that the bits stand for, float32 or float64."""
    return lax.bitcast_convert_type(bits, FLOAT32 if wide is SINGLE else FLOAT64)


def leading_bit(bits: jax.Array, wide: Wide) -> jax.Array:
    """The position of the highest bit that is set, int32: 0 for 1, 3 for 8, and -1 for 0."""
    return wide.bits - 1 - lax.clz(bits).astype(np.int32)


def exponent_bins(bits: jax.Array, wide: Wide) -> jax.Array:
    """floor(log2 |x|) - `wide.lowest` of non-zero numbers, int32; what it is for zero and NaN means nothing.

    The exponent field counts normal numbers, and the leading bit of the mantissa subnormal ones.
    """
    field = (bits >> wide.mantissa).astype(np.int32)
    return jnp.where(field == 0, leading_bit(bits, wide), field + np.int32(wide.mantissa - 1))


def bin_bits(wide: Wide) -> tuple[np.ndarray, np.ndarray]:
    """The bits of the middle, 1.5 * 2^e, and of the largest number of each bin, as NumPy integers `[wide.bins]`."""
    exponents = np.arange(wide.bins)
    subnormal = np.left_shift(1, np.minimum(exponents, wide.mantissa), dtype=np.int64)
    normal = (exponents - wide.mantissa + 1).clip(0).astype(np.int64) << wide.mantissa
    first = np.where(exponents < wide.mantissa, subnormal, normal)
    half = np.where(exponents < wide.mantissa, subnormal >> 1, 1 << (wide.mantissa - 1))
    following = np.append(first[1:], wide.infinity)
    return (first + half).astype(wide.dtype), (following - 1).astype(wide.dtype)


def target_format(dtype: DTypeLike) -> Format:
    """The facts of a format that gradients are rounded to: 16 bits, or 8.

    Raises:
      ValueError: another width, or float8_e8m0fnu, which holds neither zero nor negative numbers.
    """
    found = facts(dtype)
    if found.bits not in (8, 16) or found.name == "float8_e8m0fnu":
        raise ValueError(
            f"`dtype` must be a format of 16 or 8 bits that holds gradients, such as 'float16', 'bfloat16' or "
            f"'float8_e5m2', got {found.name}."
        )
    return found


def bincount(index: jax.Array, length: int) -> jax.Array:
    """How often each of `0 ... length - 1` occurs, uint32 `[length, 2]`; one pass, integers only, nothing sorted.

    Args:
      index: int32, of any shape, at most 2^32 - 1 elements, all in range.
      length: how many numbers are counted.

    >>> to_int64(bincount(jnp.array([[0, 2], [2, 2]]), 3))
    array([1, 0, 3])
    """
    mesh, count = jax.typeof(index).sharding.mesh, functools.partial(_bincount, length=length)
    if AxisType.Explicit not in mesh.axis_types:
        return count(index)
    # The place of an index in its array is a number whose sharding no type follows, and so is a sum over devices.
    with jax.sharding.use_abstract_mesh(mesh):
        return jnp.asarray(jax.sharding.auto_axes(count, out_sharding=PartitionSpec())(index))


def _bincount(index: jax.Array, length: int) -> jax.Array:
    rows = min(_MOST_ROWS, max(1, index.size // _VALUES_PER_ROW))
    # The sum of the indices of all axes, not the flat index: a reshape might gather an array that is sharded.
    steps = [lax.broadcasted_iota(np.int32, index.shape, axis) for axis in range(index.ndim)]
    row = sum(steps) % rows
    counted = jnp.zeros((rows, length), np.uint32).at[row, index].add(np.uint32(1), mode="promise_in_bounds")
    low = jnp.sum(counted, axis=0, dtype=np.uint32)
    return jnp.stack([low, jnp.zeros_like(low)], axis=-1)


@functools.partial(jax.jit, static_argnums=1)
def sum_uint64(counts: jax.Array, axis: int) -> jax.Array:
    """Sums counts, uint32 `[..., 2]`, over one axis (the last but one is -1) of at most 2^16 of them.

    >>> most = jnp.array([[2**32 - 1, 0], [1, 0]], np.uint32)
    >>> sum_uint64(most, 0)
    Array([0, 1], dtype=uint32)
    """
    first, second, high = (jnp.sum(each, axis=axis, dtype=np.uint32) for each in _halves(counts))
    return _from_sums(first, second, high)


def psum_uint64(counts: jax.Array, axis_name: Any) -> jax.Array:
    """Sums counts, uint32 `[..., 2]`, over the devices of a mesh axis, 2^16 of them at most."""
    return _from_sums(*lax.psum(_halves(counts), axis_name))


def _halves(counts: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The lower and the upper 16 bits of the low uint32, of which 2^16 add up without overflow, and the high one."""
    return counts[..., 0] & np.uint32(0xFFFF), counts[..., 0] >> 16, counts[..., 1]


def _from_sums(first: jax.Array, second: jax.Array, high: jax.Array) -> jax.Array:
    """A uint64 from sums of what `_halves` gives: carries go from the lower 16 bits up."""
    second = second + (first >> 16)
    low = (second << 16) | (first & np.uint32(0xFFFF))
    return jnp.stack([low, high + (second >> 16)], axis=-1)


def to_int64(counts: jax.Array) -> np.ndarray:
    """The counts as int64, one axis fewer, on the host."""
    low, high = np.moveaxis(np.asarray(counts).astype(np.int64), -1, 0)
    return low + (high << 32)
