"""The arithmetic of scaling: a tree times S, a tree divided by S.

Decides in which dtype products and quotients are computed and returned, so that they lose nothing. Does not decide what
S is; see `_loss_scale.py`.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ._finite import map_gradients
from ._values import unreduced_axes

T = TypeVar("T")


def widen(leaf: ArrayLike) -> jax.Array:
    """The leaf as an array, in float32 if it was a narrower float."""
    array = jnp.asarray(leaf)
    return array.astype(np.float32) if jnp.finfo(array.dtype).bits < 32 else array


def _each_part(fn: Callable[[jax.Array], jax.Array], leaf: ArrayLike) -> jax.Array:
    """`fn` of a real array, or of both parts: a complex product would turn (inf, 1) * (S, 0) into (nan, nan)."""
    array = widen(leaf)
    return jax.lax.complex(fn(array.real), fn(array.imag)) if jnp.iscomplexobj(array) else fn(array)


def _factor(scale: ArrayLike, part: jax.Array) -> jax.Array:
    """The scale in the dtype of `part`, and "reduced" over the axes that `part` is unreduced over, as JAX wants it."""
    factor, axes = jnp.asarray(scale, part.dtype), unreduced_axes(part)
    if not axes:
        return factor
    if jax.typeof(part).manual_axis_type.unreduced:  # inside a `shard_map`
        return jax.lax.pcast(factor, axes, to="reduced")
    return jax.reshard(factor, jax.typeof(part).sharding.update(spec=PartitionSpec(reduced=frozenset(axes))))


def multiply(tree: T, scale: ArrayLike) -> T:
    """Every gradient or loss times S (float32 `[]`), in float32 or the leaf's wider dtype."""
    return map_gradients(lambda x: _each_part(lambda part: part * _factor(scale, part), x), tree)


def divide(tree: T, scale: ArrayLike) -> T:
    """Every gradient divided by S (float32 `[]`), in float32 or the leaf's wider dtype.

    Float32 leaves are multiplied by 1 / S: exact for a power of two, and otherwise off by at most 1.5 ulp, where
    the quotient that XLA emits for a GPU (`div.full.f32`) is off by up to 2.
    """
    inverse = _reciprocal(jnp.asarray(scale, np.float32))

    def divide_part(part: jax.Array) -> jax.Array:
        return part * _factor(inverse, part) if part.dtype == np.float32 else part / jnp.asarray(scale, part.dtype)

    return map_gradients(lambda x: _each_part(divide_part, x), tree)


def _reciprocal(scale: jax.Array) -> jax.Array:
    """1 / S in float32, exact for every power of two on every device.

    On a GPU, XLA compiles 1 / S to an approximate instruction (`rcp.approx.f32`). A power of two has no mantissa bits,
    and its inverse has the exponent 254 - e, so that the subtraction below is the exact inverse.
    """
    bits = jax.lax.bitcast_convert_type(scale, np.int32)
    exact = jax.lax.bitcast_convert_type(np.int32(254 << 23) - bits, np.float32)
    return jnp.where(bits & np.int32((1 << 23) - 1) == 0, exact, 1 / scale)
