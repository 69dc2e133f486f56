"""Attention in `jax.numpy`: logits, softmax and every sum in float32 (or wider), products in the operands' dtype.

With 16-bit operands this is the arithmetic of fused attention (Dao, "FlashAttention-2", 2023, algorithms 1 and 2): the
unnormalized weights and the gradient of the logits are rounded where a product reads them, and nowhere else. The
backward pass rematerializes the weights, so that no array of T x S is saved for it.

    B = batch size, T = length of the query, S = length of key and value, N = heads of the query,
    K = heads of key and value, G = N // K, H = size of a head

Decides the arithmetic. Does not decide where a fused kernel runs in its place; see `_cudnn.py`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import at_least_float32
from ._settings import DROPOUT, EXTRAS, Settings

Array = jax.Array

# The number that masks a logit in each dtype; in others it is -2**126. cuDNN subtracts two such numbers.
_MASKED = {"float16": -(2.0**15), "bfloat16": -(2.0**41)}
_HUGE = 2.0**100  # differences of such numbers are finite in float32


def forward(*operands: Array, settings: Settings, exact_products: bool = False) -> tuple[Array, Array]:
    """The output, `[B, T, N, H]` in the query's dtype, and the log-sum-exp of the logits, `[B, N, T]` in float32.

    Args:
      operands: `query [B, T, N, H]`, `key [B, S, K, H]`, `value [B, S, K, H]` and what `settings.extras` names.
      settings: the static part.
      exact_products: widens the operands of products: for CPUs, which have few products of 16-bit numbers.
    """
    query, key, value, *extras = operands
    at = _Attention.of(query, key, extras, settings, exact_products)
    logits = at.logits(query, key)
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = at.dot("bkgts,bskh->btkgh", weights.astype(value.dtype), value) / jnp.moveaxis(total, 3, 1)
    out = at.zero_padding(out.reshape(query.shape))
    return out.astype(query.dtype), (top + jnp.log(total)).reshape(query.shape[0], query.shape[2], query.shape[1])


def output(*operands: Array, settings: Settings) -> Array:
    """The output alone, which JAX can differentiate any number of times.

    With products of widened operands: the derivative of a product of 16-bit operands that leaves in float32 multiplies
    float32 by 16 bits (jax#34330).
    """
    return forward(*operands, settings=settings, exact_products=True)[0]


def _with_dropout(*operands: Array, settings: Settings, rate: float, key: Any, broadcast: bool) -> Array:
    """The output with a share `rate` of the weights set to zero and the others scaled up; plain `jax.numpy`.

    Srivastava et al., "Dropout", 2014. One draw for all examples and heads if `broadcast`.
    """
    query, keys, value, *extras = operands
    at = _Attention.of(query, keys, extras, settings, exact_products=False)
    weights = jax.nn.softmax(at.logits(query, keys), axis=-1)
    drawn = weights.shape[-2:] if broadcast else weights.shape
    weights = jnp.where(jax.random.bernoulli(key, 1 - rate, drawn), weights / (1 - rate), 0)
    out = at.dot("bkgts,bskh->btkgh", weights.astype(value.dtype), value).reshape(query.shape)
    return at.zero_padding(out).astype(query.dtype)


# A `jit` of its own, whose name tells the equations of an attention with dropout from the user's.
_with_dropout.__name__ = DROPOUT
with_dropout = jax.jit(_with_dropout, static_argnames=("settings", "rate", "broadcast"))


def backward(*operands: Array, settings: Settings, exact_products: bool = False) -> tuple[Array, ...]:
    """The gradients of query, key and value, and of the bias if `settings.bias_has_gradient`.

    Args:
      operands: those of `forward`, its two results, and the gradient of the output.
      settings, exact_products: as in `forward`.
    """
    query, key, value, *extras, out, _, gradient = operands
    at = _Attention.of(query, key, extras, settings, exact_products)
    groups = (*query.shape[:2], key.shape[2], query.shape[2] // key.shape[2], query.shape[3])
    gradient = at.zero_padding(gradient)
    # The sum over S of the weights times their gradients.
    delta = jnp.sum(at.wide(gradient) * at.wide(out), axis=-1).reshape(groups[:-1])
    delta = jnp.moveaxis(delta, 1, 3)[..., None]
    gradient = gradient.reshape(groups)
    # Of logits beyond 1e4 a log-sum-exp in float32 would not hold the sum.
    weights = jax.nn.softmax(at.logits(query, key), axis=-1)
    of_value = at.dot("bkgts,btkgh->bskh", weights.astype(value.dtype), gradient)
    of_logits = weights * (at.dot("btkgh,bskh->bkgts", gradient, value) - delta)
    low = of_logits.astype(query.dtype)
    of_query = settings.scale * at.dot("bkgts,bskh->btkgh", low, key)
    of_key = settings.scale * at.dot("bkgts,btkgh->bskh", low, at.attending(query).reshape(groups))
    gradients = [at.attending(of_query.reshape(query.shape)), of_key, of_value]
    found = [g.astype(x.dtype) for g, x in zip(gradients, (query, key, value), strict=True)]
    if settings.bias_has_gradient:
        bias = settings.named(extras)["bias"]
        of_bias = of_logits.reshape(of_logits.shape[0], -1, *of_logits.shape[3:])
        found.append(sum_to(at.where_attending(of_bias), bias.shape).astype(bias.dtype))
    return tuple(found)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """`x` summed over the axes along which an array of `shape` was broadcast to it."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


class _Attention(NamedTuple):
    """One attention's settings, its bias, and which rows attend to anything."""

    settings: Settings
    dtype: Any  # of logits and sums
    exact_products: bool
    bias: Array | None
    attends: Array | None
    query_lengths: Array | None

    @classmethod
    def of(
        cls, query: Array, key: Array, extras: list[Array], settings: Settings, exact_products: bool
    ) -> "_Attention":
        dtype = at_least_float32(query.dtype)
        named = settings.named(extras)
        rows, columns = query.shape[1], key.shape[1]
        mask = allowed(rows, columns, settings, named)
        bias, attends = merged(named["bias"], mask, mask, dtype)
        if settings.window is None and all(named[name] is None for name in EXTRAS[1:]):
            attends = None  # every position attends to the first
        return cls(settings, dtype, exact_products, bias, attends, named["query_seq_lengths"])

    def wide(self, x: Array) -> Array:
        return x.astype(self.dtype)

    def dot(self, spec: str, left: Array, right: Array) -> Array:
        if self.exact_products:
            left, right = self.wide(left), self.wide(right)
        precision = self.settings.precision if left.dtype == self.dtype else None
        return jnp.einsum(spec, left, right, precision=precision, preferred_element_type=self.dtype)

    def logits(self, query: Array, key: Array) -> Array:
        """`[B, K, G, T, S]`, with the bias and what masks."""
        batch, length, heads, size = query.shape
        groups = (batch, length, key.shape[2], heads // key.shape[2], size)
        logits = self.dot("btkgh,bskh->bkgts", self.attending(query).reshape(groups), key) * self.settings.scale
        if self.bias is None:
            return logits
        axis = self.bias.shape[1]
        split = groups[2:4] if axis != 1 else (1, 1)
        return logits + self.bias.reshape(self.bias.shape[0], *split, *self.bias.shape[2:])

    def attending(self, x: Array) -> Array:
        """`x`, `[B, T, N, H]`, with zeros in the rows that attend to nothing: their weights are then equal."""
        if self.attends is None:
            return x
        return jnp.where(jnp.moveaxis(self.attends, 1, 2)[..., None], x, jnp.zeros((), x.dtype))

    def where_attending(self, x: Array) -> Array:
        """The same of `x`, `[B, N, T, S]`."""
        return x if self.attends is None else jnp.where(self.attends[..., None], x, jnp.zeros((), x.dtype))

    def zero_padding(self, x: Array) -> Array:
        """`x`, `[B, T, N, H]`, with zeros beyond the lengths of the queries."""
        return zero_padding(x, self.query_lengths)


def zero_padding(x: Array, lengths: Array | None) -> Array:
    if lengths is None:
        return x
    inside = jnp.arange(x.shape[1])[None] < lengths[:, None]
    return jnp.where(inside[..., None, None], x, jnp.zeros((), x.dtype))


def allowed(rows: int, columns: int, settings: Settings, named: dict[str, Any]) -> Array | None:
    """`[B, N, T, S]` or broadcastable to it: which positions attend to which, by all masks; `None` for all."""
    lengths = named["query_seq_lengths"], named["key_value_seq_lengths"]
    masks = [position_mask(rows, columns, settings), named["mask"], padding_mask(rows, columns, *lengths)]
    masks = [mask for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, masks) if masks else None


def position_mask(rows: int, columns: int, settings: Settings) -> Array | None:
    """`[1, 1, T, S]`: where causality and the window let a position attend to another."""
    if not settings.is_causal and settings.window is None:
        return None
    distance = jnp.arange(columns)[None] - jnp.arange(rows)[:, None]
    left, right = (rows, columns) if settings.window is None else settings.window
    right = min(right, 0) if settings.is_causal else right
    return ((distance >= -left) & (distance <= right))[None, None]


def padding_mask(rows: int, columns: int, query_lengths: Array | None, lengths: Array | None) -> Array | None:
    """`[B, 1, T, S]`: the rows and columns that hold data."""
    inside = None
    if lengths is not None:
        inside = (jnp.arange(columns)[None] < lengths[:, None])[:, None, None, :]
    if query_lengths is not None:
        row = (jnp.arange(rows)[None] < query_lengths[:, None])[:, None, :, None]
        inside = row if inside is None else inside & row
    return inside


def shifted(bias: Array, mask: Array | None = None) -> Array:
    """`bias` less the largest number of each row, of those that `mask` allows; finite, and in float32 or wider.

    This does not change the softmax. A number beyond 65,504 would be infinite in float16, and in a row of -1e9, as
    padding is often written, the log-sum-exp would lose the logits.
    """
    wide = at_least_float32(bias.dtype)
    bias = jnp.clip(bias.astype(wide), -_HUGE, _HUGE)
    top = jnp.max(bias if mask is None else jnp.where(mask, bias, -_HUGE), axis=-1, keepdims=True)
    bias = bias - lax.stop_gradient(top)
    return bias if mask is None else jnp.where(mask, bias, 0)


def merged(
    bias: Array | None, mask: Array | None, written: Array | None, dtype: Any
) -> tuple[Array | None, Array | None]:
    """The bias and a mask as one bias in `dtype`, and which rows attend to anything; `None` for none and all.

    A row that is masked completely gets no bias; with a query of zeros its weights are equal, as in `jax.nn`.

    Args:
      bias: the bias that is added to the logits.
      mask: where a position may attend to another, by all masks together.
      written: the part of the mask that the result has to contain.
      dtype: of the result.
    """
    wide = at_least_float32(dtype)
    masked = jnp.asarray(_MASKED.get(np.dtype(dtype).name, -(2.0**126)), wide)
    if bias is not None:
        bias = jnp.maximum(shifted(bias, mask).astype(wide), masked / 2)  # above what masks
    if written is None:
        return (None if bias is None else bias.astype(dtype)), None
    attends = jnp.any(written, axis=-1, keepdims=True)
    filled = jnp.where(written, jnp.zeros((), wide) if bias is None else bias, masked)
    return jnp.where(attends, filled, jnp.zeros((), wide)).astype(dtype), attends[..., 0]
