"""A decoder of GPT-2's smallest size (Radford et al., Language Models are Unsupervised Multitask Learners, 2019)."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from jmp_train import flax_bridge

from .workload import Workload, adamw, cross_entropy, tokens


class Block(nn.Module):
    """A pre-norm block on `[batch, length, width]`: causal self-attention and a feed-forward network.

    `fused` uses this library's attention, which needs no mask.
    """

    heads: int
    dropout: float
    dtype: Any = None
    fused: bool = False

    @nn.compact
    def __call__(self, x, mask, train):
        attend = functools.partial(flax_bridge.dot_product_attention, is_causal=True)
        attention = nn.MultiHeadDotProductAttention(
            self.heads,
            dtype=self.dtype,
            dropout_rate=self.dropout,
            deterministic=not train,
            attention_fn=attend if self.fused else nn.dot_product_attention,
        )
        y = attention(nn.LayerNorm(1e-5, dtype=self.dtype)(x), mask=mask)
        x = x + nn.Dropout(self.dropout, deterministic=not train)(y)
        y = nn.Dense(4 * x.shape[-1], dtype=self.dtype)(nn.LayerNorm(1e-5, dtype=self.dtype)(x))
        y = nn.Dense(x.shape[-1], dtype=self.dtype)(nn.gelu(y))
        return x + nn.Dropout(self.dropout, deterministic=not train)(y)


class _Step(nn.Module):
    """A `Block` as the body of a scan over layers."""

    heads: int
    dropout: float
    train: bool
    dtype: Any = None

    @nn.compact
    def __call__(self, x, _):
        return Block(self.heads, self.dropout, self.dtype, fused=True)(x, None, self.train), None


class GPT2(nn.Module):
    """`[batch, length]` tokens to `[batch, length, vocabulary]` logits; the output layer is the embedding's.

    `scanned` runs all layers in one scan and rematerializes each in the backward pass, as is done for large models, and
    uses this library's attention as `fused` does.
    """

    vocabulary: int = 50304
    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024
    dropout: float = 0.0
    dtype: Any = None
    fused: bool = False
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens, train):
        embedding = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        positions = nn.Embed(self.length, self.width, dtype=self.dtype)(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(self.dropout, deterministic=not train)(embedding(tokens) + positions)
        mask = None if self.fused or self.scanned else nn.make_causal_mask(tokens)
        if self.scanned:
            of_layers: dict[str, Any] = {
                "variable_axes": {"params": 0},
                "split_rngs": {"params": True, "dropout": True},
            }
            layers = nn.scan(nn.remat(_Step), length=self.layers, **of_layers)
            x, _ = layers(self.heads, self.dropout, train, self.dtype)(x, None)
        for _ in range(0 if self.scanned else self.layers):
            x = Block(self.heads, self.dropout, self.dtype, self.fused)(x, mask, train)
        return embedding.attend(nn.LayerNorm(1e-5, dtype=self.dtype)(x))


def gpt2(
    vocabulary=50304,
    layers=12,
    width=768,
    heads=12,
    length=1024,
    dropout=0.0,
    batch_size=16,
    fused=False,
    scanned=False,
) -> Workload:
    """The published sizes, with the vocabulary of 50,257 padded to a multiple of 64."""
    return Workload(
        "gpt2",
        lambda dtype: GPT2(vocabulary, layers, width, heads, length, dropout, dtype, fused, scanned),
        tokens(length, vocabulary),
        cross_entropy,
        adamw,
        batch_size,
    )
