"""BERT-base with its masked-language-model head (Devlin et al., BERT, NAACL 2019)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from .workload import Tree, Workload, adamw

MASK = 103
"""The token that stands where one is to be guessed; 0 is padding."""


class Layer(nn.Module):
    """A post-norm block on `[batch, length, width]`: self-attention and a feed-forward network."""

    heads: int
    dropout: float
    dtype: Any = None

    @nn.compact
    def __call__(self, x, mask, train):
        norm = functools.partial(nn.LayerNorm, epsilon=1e-12, dtype=self.dtype)
        drop = functools.partial(nn.Dropout, self.dropout, deterministic=not train)
        attention = nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, dropout_rate=self.dropout, deterministic=not train
        )
        x = norm()(x + drop()(attention(x, mask=mask)))
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(x), approximate=False)
        return norm()(x + drop()(nn.Dense(x.shape[-1], dtype=self.dtype)(y)))


class BERT(nn.Module):
    """`[batch, length]` tokens to `[batch, length, vocabulary]` logits; the output layer is the embedding's."""

    vocabulary: int = 30528
    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 512
    dropout: float = 0.0
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens, train):
        norm = functools.partial(nn.LayerNorm, epsilon=1e-12, dtype=self.dtype)
        embedding = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        positions = nn.Embed(self.length, self.width, dtype=self.dtype)(jnp.arange(tokens.shape[1]))
        segments = nn.Embed(2, self.width, dtype=self.dtype)(jnp.zeros_like(tokens))
        x = norm()(embedding(tokens) + positions + segments)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        mask = nn.make_attention_mask(jnp.ones_like(tokens), tokens > 0)
        for _ in range(self.layers):
            x = Layer(self.heads, self.dropout, self.dtype)(x, mask, train)
        x = norm()(nn.gelu(nn.Dense(self.width, dtype=self.dtype)(x), approximate=False))
        bias = self.param("bias", nn.initializers.zeros, (self.vocabulary,))
        return embedding.attend(x) + bias.astype(x.dtype)


def masked_text(length: int, vocabulary: int):
    """Batches of `{"inputs", "labels": int32, "weights": float32}`, all `[size, length]`; 15 % are masked."""

    def make(rng: np.random.Generator, size: int) -> Tree:
        text = rng.integers(1, vocabulary, size=(size, length), dtype=np.int32)
        masked = rng.random((size, length)) < 0.15
        inputs = np.where(masked, np.int32(min(MASK, vocabulary - 1)), text)
        return {"inputs": inputs, "labels": text, "weights": masked.astype(np.float32)}

    return make


def masked_cross_entropy(outputs: jax.Array, batch: Tree) -> jax.Array:
    """The mean cross-entropy over the positions of weight 1."""
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
    return jnp.sum(losses * batch["weights"]) / jnp.maximum(jnp.sum(batch["weights"]), 1.0)


def bert_base(vocabulary=30528, layers=12, width=768, heads=12, length=512, dropout=0.0, batch_size=64) -> Workload:
    """The published sizes, with the vocabulary of 30,522 padded to a multiple of 8."""
    return Workload(
        "bert_base",
        lambda dtype: BERT(vocabulary, layers, width, heads, length, dropout, dtype),
        masked_text(length, vocabulary),
        masked_cross_entropy,
        adamw,
        batch_size,
    )
