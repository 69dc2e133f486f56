"""The Transformer layers that several applications share, as Flax has them."""

import flax.linen as nn
import jax


class Block(nn.Module):
    """Self-attention, attention to a `memory` if there is one, and two dense layers, each behind a LayerNorm."""

    heads: int = 4
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, mask=None, memory=None, memory_mask=None, train: bool = False) -> jax.Array:
        def drop(y: jax.Array) -> jax.Array:
            return nn.Dropout(self.dropout, deterministic=not train)(y)

        y = nn.LayerNorm()(x)
        x = x + drop(nn.MultiHeadDotProductAttention(self.heads)(y, y, mask=mask))
        if memory is not None:
            y = nn.LayerNorm()(x)
            x = x + drop(nn.MultiHeadDotProductAttention(self.heads)(y, memory, mask=memory_mask))
        y = nn.LayerNorm()(x)
        return x + drop(nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(y))))
