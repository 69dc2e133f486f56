"""Stochastic rounding to bfloat16, and the random bits for it.

Decides how a float32 number is rounded and which random bits an element of an array gets at a step. Does not decide
what is rounded; see `_master_weights.py` for parameters and `_low_precision_state.py` for an optimizer's state.

The bits are a function of a key, a step, the name of an array and an element's position in it, computed where they are
used: nothing is drawn in sequence and nothing is stored. So an element gets the same bits however its array is divided
among devices, and copies of an array on several devices stay equal.
"""

import functools
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jaxpr import threefry2x32_p

_IMPLEMENTATION = "threefry2x32"
_LANES = 4  # of 16 bits, in the 64 bits that one call of Threefry gives


def check_key(key: Any) -> Any:
    """Returns `key`, a seed or one PRNG key.

    Raises:
      TypeError: it is neither.
    """
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return int(key)
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None and shape is not None:
        is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
        is_seed = jnp.issubdtype(dtype, np.integer) and shape == ()
        if is_typed or is_seed or (dtype == np.uint32 and len(shape) == 1):
            return key
    found = type(key).__name__ if dtype is None else f"{dtype}{list(shape or ())}"
    raise TypeError(
        f"`key` must be an integer or one PRNG key, got {found}. Pass a seed such as 0, or jax.random.key(0)."
    )


def start_key(key: Any) -> jax.Array:
    """The data of a Threefry key, uint32 `[2]` in a buffer of its own, from a key or seed that `check_key` accepts.

    Plain data, because every library saves and restores it; `noise_at` makes a key of it.
    """
    if jnp.ndim(key) == 0 and not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key):
        return jax.random.key_data(jax.random.key(key, impl=_IMPLEMENTATION))
    data = jax.random.key_data(key)
    if data.shape == (2,):
        return jnp.array(data, copy=True)
    # A key of another generator, whose bits would depend on how arrays are divided among devices.
    return jax.random.bits(key, (2,), np.uint32)


def noise_at(key: jax.Array, step: jax.Array) -> Callable[[str, tuple[int, ...], int], jax.Array]:
    """The random bits of a step: a function `(name, shape, lane) -> uint32 shape`, of numbers below 2^16.

    The element of position i in an array gets Threefry-2x32 of the counter (hash of the name, i), under a key of the
    step; its 64 bits are four lanes. Positions beyond 2^32 repeat the bits of those 2^32 before.

    Args:
      key: uint32 `[2]`, from `start_key`.
      step: uint32 `[]`.

    Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    first, second = jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(key, impl=_IMPLEMENTATION), step))

    @functools.cache
    def positions(shape: tuple[int, ...]) -> jax.Array:
        found = jnp.zeros(shape, np.uint32)
        for axis in range(len(shape)):
            stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
            found += stride * jax.lax.broadcasted_iota(np.uint32, shape, axis)
        return found

    @functools.cache
    def words(name: str, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        counter = np.uint32(zlib.crc32(name.encode()))
        return threefry2x32_p.bind(first, second, jnp.full(shape, counter), positions(shape))

    def noise(name: str, shape: tuple[int, ...], lane: int) -> jax.Array:
        call, lane = divmod(lane, _LANES)
        word = words(f"{name}#{call}", shape)[lane // 2]
        return word >> np.uint32(16) if lane % 2 else word & np.uint32(0xFFFF)

    return noise


@jax.custom_jvp
def round_stochastically(value: jax.Array, noise: jax.Array) -> jax.Array:
    """Rounds to one of the two neighbouring bfloat16 numbers, with the probabilities that keep the mean.

    bfloat16 is the upper half of float32. Uniform bits added to the lower half carry into the upper with exactly the
    probability that the lower half is of the distance between the neighbours, for either sign and for subnormals.
    Numbers that bfloat16 holds stay as they are, and so do infinities and NaN. The derivative is that of the mean: one.

    Args:
      value: float32.
      noise: uint32 of its shape, uniform in [0, 2^16).

    Returns:
      bfloat16 numbers, as float32.
    """
    bits = jax.lax.bitcast_convert_type(value.astype(np.float32), np.uint32)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & np.uint32(0xFFFF0000), np.float32)
    return jnp.where(jnp.isfinite(value), rounded, value)  # a NaN's bits would carry over into another number


@round_stochastically.defjvp
def _derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    return round_stochastically(*primals), tangents[0]
