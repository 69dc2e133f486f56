"""`jmp_train.dot_product_attention` with the arguments that Flax's attention layers pass to their `attention_fn`.

Decides for each of those arguments whether it is supported or raises an error. Does not decide how attention is
computed.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _attention
from .._jaxpr import leave_out_of_source_lines

leave_out_of_source_lines(__file__)


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    force_fp32_for_softmax: bool = True,
    is_causal: bool = False,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
) -> jax.Array:
    """The `attention_fn` of Linen's `MultiHeadDotProductAttention` and NNX's `MultiHeadAttention`, fused by autocast.

    As `jmp_train.dot_product_attention`, with the arguments and defaults of `flax.linen.dot_product_attention`. For a
    causal layer, `functools.partial(dot_product_attention, is_causal=True)` and no mask: a mask that is an array costs
    a bias of its size in 16 bits.

    Args:
      query: `[batch..., T, heads, size]`.
      key, value: `[batch..., S, heads, size]`.
      bias: added to the logits, broadcastable to `[batch..., heads, T, S]`.
      mask: broadcastable to the same shape; positions that are not zero take part. Decoding with a cache passes one.
      broadcast_dropout: whether one draw of `[T, S]` serves all examples and heads.
      dropout_rng, dropout_rate, deterministic: as in Flax. A rate above zero that is not deterministic is not fused.
      dtype: what query, key and value are cast to; the dtype they promote to if `None`.
      precision: must be `None`, or the default.
      module: must be `None`: a layer with `sow_weights` asks for weights that are never written.
      force_fp32_for_softmax: softmax is always in float32.
      is_causal: whether a position attends to no later position.
      qk_attn_weights_einsum, attn_weights_value_einsum: must be `None`.

    Returns:
      `[batch..., T, heads, size]`.

    Raises:
      ValueError: an argument that it does not support.

    Example:
      >>> from flax import linen as nn
      >>> layer = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=dot_product_attention)
      >>> layer.init(jax.random.key(0), jnp.ones((2, 16, 32)))["params"]["out"]["kernel"].shape
      (4, 8, 32)
    """
    del force_fp32_for_softmax
    if module is not None:
        raise ValueError(
            "`sow_weights` asks for the attention weights, which fused attention never writes; leave `attention_fn` "
            "out of the layer that records them."
        )
    refused = {
        "precision": precision,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, value_of in refused.items():
        if value_of is not None and value_of not in ("default", jax.lax.Precision.DEFAULT):
            raise ValueError(
                f"`{name}` must be None for jmp_train's attention, got {value_of!r}: its products run in the policy's "
                f"compute dtype; to keep them in float32, mark the layer with jmp_train.full_precision."
            )
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (jnp.asarray(x).astype(dtype) for x in (query, key, value))
    if mask is not None:
        mask = jnp.asarray(mask) != 0
    batch = query.shape[:-3]
    bias, mask = (None if x is None else _four_axes(jnp.asarray(x), batch) for x in (bias, mask))
    flat_query, flat_key, flat_value = (x.reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
    out = _attention.dot_product_attention(
        flat_query,
        flat_key,
        flat_value,
        bias,
        mask,
        is_causal=is_causal,
        dropout_rate=0.0 if deterministic else dropout_rate,
        dropout_key=dropout_rng,
        broadcast_dropout=broadcast_dropout,
    )
    return out.reshape(query.shape)


def _four_axes(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """`x`, broadcastable to `[batch..., heads, T, S]`, with one axis for the batch, of size one if it can be."""
    rest = (1,) * max(0, 3 - x.ndim) + x.shape[-3:]
    if math.prod(x.shape[:-3]) == 1:
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*batch, *rest)).reshape(math.prod(batch), *rest)
