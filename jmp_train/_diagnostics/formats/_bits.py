"""Floating numbers as integers: magnitudes that no processor flushes to zero.

Decides how a leaf of any floating format becomes bits that order and count like its absolute values. Does not decide
what is counted; see `_exponent_histogram.py` and `_underflow_report.py`.

XLA computes with subnormal float32 numbers as if they were zero, on CPUs and GPUs alike, in comparisons too. Their bits
are safe: for x >= 0 the bits of an IEEE format, read as an integer, grow with x.

Reference: IEEE 754-2019, section 3.4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from ..._dtypes import BFLOAT16, FLOAT32, FLOAT64, Format, facts
from ..._finite import is_gradient
from ..._paths import leaf_paths
from ..._values import check_readable
from ._counts import MOST_VALUES


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
      ValueError: a float64 leaf while JAX has no 64-bit types, or one of 2^32 values or more.
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
    array = jnp.asarray(leaf)
    parts = 2 if jnp.iscomplexobj(array) else 1
    if parts * array.size > MOST_VALUES:
        raise ValueError(
            f"`{caller}`: the leaf {path!r} has {parts * array.size} values, and one leaf may have 2**32 - 1; "
            "pass it in pieces, as a list."
        )
    return array


def magnitudes(array: jax.Array) -> jax.Array:
    """The bits of |x| as int32, or int64 for float64, in the array's shape; `[2, ...]` for complex numbers."""
    if jnp.iscomplexobj(array):
        return jnp.stack([magnitudes(lax.real(array)), magnitudes(lax.imag(array))])
    if array.dtype == jnp.float8_e8m0fnu:
        # Powers of two without a sign: the exponent of a float32, of which the smallest is subnormal there.
        code = lax.bitcast_convert_type(array, np.uint8).astype(np.int32)
        bits = jnp.where(code == 0, np.int32(1 << 22), code << 23)
        return jnp.where(code == 255, np.int32(SINGLE.infinity + 1), bits)
    if array.dtype == BFLOAT16:
        # The upper half of a float32, whose subnormal numbers a conversion might flush.
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
    """The place of the highest bit, int32: 0 for 1, 3 for 8, and -1 for 0."""
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
