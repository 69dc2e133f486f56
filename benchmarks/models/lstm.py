"""The large LSTM language model of Zaremba et al., Recurrent Neural Network Regularization, 2014."""

from typing import Any

import optax
from flax import linen as nn

from .workload import Workload, cross_entropy, tokens


class LSTM(nn.Module):
    """`[batch, length]` tokens to `[batch, length, vocabulary]` logits."""

    vocabulary: int = 10000
    layers: int = 2
    width: int = 1536
    dropout: float = 0.0
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens, train):
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


def clipped_sgd() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(1.0))


def lstm(vocabulary=10000, layers=2, width=1536, length=64, dropout=0.0, batch_size=256) -> Workload:
    """The published sizes, with the width of 1,500 padded to a multiple of 8."""
    return Workload(
        "lstm",
        lambda dtype: LSTM(vocabulary, layers, width, dropout, dtype),
        tokens(length, vocabulary),
        cross_entropy,
        clipped_sgd,
        batch_size,
    )
