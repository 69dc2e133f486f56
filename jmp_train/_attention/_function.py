"""`dot_product_attention`, as `jax.nn` has it, for programs in float32.

Decides what arguments are accepted. Does not decide how they are computed; see `_primitives.py`.
"""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._dtypes import at_least_float32
from .._sharding import local, varying_axes
from .._sizes import is_static
from ._primitives import attention_p
from ._reference import position_mask, shifted, with_dropout
from ._settings import EXTRAS, Settings, config


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    broadcast_dropout: bool = False,
) -> jax.Array:
    """Scaled dot-product attention, `softmax(scale * query @ key.T + bias) @ value`, that autocast can fuse.

    Arguments, shapes and results are those of `jax.nn.dot_product_attention`. In float32 it is that function's
    mathematics. Under `autocast`, `value_and_grad` or `grad` with a 16-bit compute dtype, and with 16-bit operands, it
    runs as cuDNN's fused attention on NVIDIA GPUs from Ampere on: nothing of the size `T x S` is written, forward or
    backward. Elsewhere, and for what cuDNN does not take, it is the same mathematics in `jax.numpy`, every sum in
    float32. `explain` says which, and why. The limits: heads of a multiple of 8 up to 128 (256 from Hopper on), even
    lengths with a bias or a mask, equal lengths with `is_causal` or a window, no dropout.

    Shapes: B examples, T queries, S keys, N heads of the query, K heads of key and value (N is a multiple of K: grouped
    and multi-query attention), H numbers a head.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]`, floating.
      key, value: `[B, S, K, H]` or `[S, K, H]`, in the query's dtype.
      bias: added to the logits, broadcastable to `[B, N, T, S]`. From each row its largest number at a position that
        may be attended to is subtracted, which does not change the softmax; cuDNN gets the result in the compute dtype.
      mask: boolean, broadcastable to `[B, N, T, S]`; True takes part. cuDNN gets it as a bias in 16 bits, unless its
        numbers are known while tracing and equal those of `is_causal` or of a window, which like lengths cost nothing.
        A row that is masked completely averages all values.
      scale: of the logits; `1 / sqrt(H)` if `None`.
      is_causal: whether a position attends to no later position.
      query_seq_lengths, key_value_seq_lengths: `int32[B]`, how many positions of each example hold data. Output beyond
        the query's is zero.
      local_window_size: how many positions to the left and right of its own a position attends to; one number for both.
      dropout_rate: the share of the attention weights that is set to zero, the others scaled by `1 / (1 - rate)`.
      dropout_key: a PRNG key, required for a rate above zero. cuDNN takes no traced seed, so this is never fused.
      broadcast_dropout: whether one draw of `[T, S]` serves all examples and heads, as in Flax's layers.

    Returns:
      The output, in the query's shape and dtype.

    Raises:
      TypeError: not floating, or different dtypes; a traced `is_causal` or `dropout_rate`.
      ValueError: shapes that do not fit together, or a dropout without its key.

    >>> q = k = v = jnp.ones((2, 16, 4, 8))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (2, 16, 4, 8)
    """
    for name, static in (("is_causal", is_causal), ("dropout_rate", dropout_rate)):
        if isinstance(static, Tracer):
            raise TypeError(f"`{name}` must be known while tracing, got {static}; make it a static argument of jit.")
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    shape = query.shape
    query, key, value = (_with_batch(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value")))
    _check_shapes(query, key, value)
    extras = dict(zip(EXTRAS, (bias, mask, query_seq_lengths, key_value_seq_lengths), strict=True))
    extras = {name: _checked(jnp.asarray(x), name, query, key) for name, x in extras.items() if x is not None}
    factor: Any = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if np.ndim(factor) != 0:
        raise ValueError(f"`scale` must be one number, got the shape {np.shape(factor)}.")
    if isinstance(factor, Tracer):
        query, key, factor = *_scaled(query, key, factor), 1.0
    if key.shape[1] == 0:
        return jnp.zeros(shape, query.dtype)
    window = _window(local_window_size)
    lengths = query.shape[1], key.shape[1]
    is_causal, window = _normalized(is_causal, window, lengths)
    # Outside `jit` a mask would have to be fetched from the device at every call.
    looks = "mask" in extras and window is None and isinstance(query, Tracer)
    if looks and (found := _window_of(mask, lengths)) is not None:
        # A window to the right, with lengths or of unequal ones has no kernel; a mask has.
        within = _normalized(is_causal, found, lengths)
        padded = extras.keys() & {"query_seq_lengths", "key_value_seq_lengths"}
        has_kernel = within[0] and lengths[0] == lengths[1] and not (within[1] and padded)
        if within == (is_causal, None) or has_kernel:
            is_causal, window = within
            del extras["mask"]
    settings = Settings(tuple(extras), float(factor), bool(is_causal), window, config.jax_default_matmul_precision)
    if "bias" in extras:
        extras["bias"] = shifted(extras["bias"], _counting(extras, lengths, settings))
    operands = query, key, value, *extras.values()
    # In a `shard_map` that checks, so that the gradient of an operand that is equal on all devices is summed over them.
    operands = local(operands, tuple(frozenset().union(*map(varying_axes, operands))))
    if dropout_rate != 0.0:
        _check_dropout(dropout_rate, dropout_key)
        # Static arguments, as Python numbers: a call outside `jit` is compiled once.
        options = {"rate": float(dropout_rate), "broadcast": bool(broadcast_dropout)}
        return with_dropout(*operands, settings=settings, key=dropout_key, **options).reshape(shape)
    return attention_p.bind(*operands, settings=settings)[0].reshape(shape)


def _with_batch(x: jax.Array, name: str) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`{name}` must be floating, got {x.dtype}.")
    if x.ndim not in (3, 4):
        raise ValueError(f"`{name}` must have the shape [batch, length, heads, size], or no batch, got {x.shape}.")
    return x if x.ndim == 4 else x[None]


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"`query`, `key` and `value` must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}; "
            f"cast them to one."
        )
    if key.shape != value.shape:
        raise ValueError(f"`key` and `value` must have one shape, got {key.shape} and {value.shape}.")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"`query` and `key` must agree in batch and head size, got {query.shape} and {key.shape}: "
            f"[batch, length, heads, size] each."
        )
    if key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        raise ValueError(
            f"`query` must have a multiple of the heads of `key`, got {query.shape[2]} and {key.shape[2]} heads."
        )


def _checked(x: jax.Array, name: str, query: jax.Array, key: jax.Array) -> jax.Array:
    batch, rows, heads, _ = query.shape
    if name in ("bias", "mask"):
        wanted = (batch, heads, rows, key.shape[1])
        if name == "mask" and x.dtype != jnp.bool_:
            raise TypeError(f"`mask` must be boolean, got {x.dtype}; what is added to the logits is the `bias`.")
        if name == "bias" and not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
            raise TypeError(f"`bias` must be real numbers, got {x.dtype}; what masks is the `mask`.")
        x = x.reshape((1,) * (4 - x.ndim) + x.shape) if x.ndim < 4 else x
        if x.ndim != 4 or any(a not in (1, b) for a, b in zip(x.shape, wanted, strict=True)):
            raise ValueError(f"`{name}` must be broadcastable to [batch, heads, T, S] = {wanted}, got {x.shape}.")
        return x
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"`{name}` must be int32[{batch}], a length for each example, got {x.dtype}{list(x.shape)}.")
    return x.astype(jnp.int32)


def _window(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides: Any = (size, size) if np.ndim(size) == 0 else size
    try:
        left, right = map(operator.index, sides)
    except (TypeError, ValueError):
        left = right = -1
    if isinstance(size, bool) or min(left, right) < 0:
        raise ValueError(f"`local_window_size` must be one number of positions or (left, right), got {size!r}.")
    return left, right


def _normalized(
    is_causal: bool, window: tuple[int, int] | None, lengths: tuple[int, int]
) -> tuple[bool, tuple[int, int] | None]:
    """Causality and window; `None` for a window that excludes no pair of positions beyond those of causality."""
    if window is None or not is_static(lengths):
        return is_causal, window
    (rows, columns), (left, right) = lengths, window
    is_causal = is_causal or right == 0
    return is_causal, None if left >= rows - 1 and (is_causal or right >= columns - 1) else window


def _window_of(mask: Any, lengths: tuple[int, int]) -> tuple[int, int] | None:
    """The window that is equal to a mask whose numbers are known, one for all examples and heads.

    Its left size is negative if every position attends to later positions only, not to its own.
    """
    rows, columns = lengths
    known = not isinstance(mask, Tracer) and np.size(mask) == rows * columns and np.shape(mask)[-2:] == lengths
    if not known or rows == 0:
        return None
    numbers = np.asarray(mask).reshape(lengths)
    row = np.arange(rows)
    first, last = np.argmax(numbers, axis=1), columns - 1 - np.argmax(numbers[:, ::-1], axis=1)
    left, right = int(np.max(row - first)), int(np.max(last - row))
    is_window = np.array_equal(np.sum(numbers, axis=1), last - first + 1)
    is_window &= np.array_equal(first, np.maximum(row - left, 0))
    is_window &= np.array_equal(last, np.minimum(row + right, columns - 1))
    return (left, right) if is_window else None


def _counting(extras: dict[str, jax.Array], lengths: tuple[int, int], settings: Settings) -> jax.Array | None:
    """Where a bias counts, as far as masks no larger than it say so: `None` for everywhere.

    A large bias at a position that is masked, such as a distance to a later position, would otherwise be the largest
    number of its row, which is subtracted, and the others would lose their digits.
    """
    shape, masks = extras["bias"].shape, (position_mask(*lengths, settings), extras.get("mask"))
    masks = [mask for mask in masks if mask is not None and jnp.broadcast_shapes(mask.shape, shape) == shape]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def _scaled(query: jax.Array, key: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
    """Query and key whose products are `scale` times as large: each takes half of its power of two.

    A query times 3,000 would leave float16's range where the logits do not.
    """
    wide = at_least_float32(query.dtype)
    scale = jnp.asarray(scale, wide)
    size = jnp.maximum(jnp.abs(scale), 1)
    of_key = jnp.floor(jnp.log2(size) / 2)  # of no derivative
    query = (query.astype(wide) * (scale * jnp.exp2(-of_key))).astype(query.dtype)
    return query, (key.astype(wide) * jnp.exp2(of_key)).astype(key.dtype)


def _check_dropout(rate: Any, key: jax.Array | None) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"`dropout_rate` must be at least 0 and less than 1, got {rate!r}.")
    if key is None:
        raise ValueError(f"`dropout_rate` is {rate}, which needs a `dropout_key`, such as `jax.random.key(step)`.")
