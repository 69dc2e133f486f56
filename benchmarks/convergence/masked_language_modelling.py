"""Masked language modelling in the manner of BERT, on the standard library's source.

Real: the text, the objective (15 % of the characters are to be found; of these 80 % are hidden, 10 % replaced, 10 %
left), an encoder with dropout, learning rate warm-up, AdamW and clipping. Smaller: width, depth, context.
Stands for BERT's pre-training (Devlin et al., 2019).
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._application import Application, Player, Variables
from ._layers import Block
from ._text import VOCABULARY, held_out, windows

STEPS, BATCH, LENGTH, HIDDEN = 300, 32, 64, 0


class BERT(nn.Module):
    """Two bidirectional layers; the output shares the embedding's weights."""

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        embed = nn.Embed(VOCABULARY, 96)
        x = nn.LayerNorm()(embed(tokens) + nn.Embed(LENGTH, 96)(jnp.arange(LENGTH)))
        for _ in range(2):
            x = Block(dropout=0.1)(x, train=train)
        x = nn.LayerNorm()(nn.gelu(nn.Dense(96)(x)))
        return embed.attend(x) + self.param("bias", nn.initializers.zeros, (VOCABULARY,))


def hide(key: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Corrupts `tokens` as BERT does; returns them and which are to be found."""
    chosen, how, other = jax.random.split(key, 3)
    asked = jax.random.bernoulli(chosen, 0.15, tokens.shape)
    how = jax.random.uniform(how, tokens.shape)
    random = jax.random.randint(other, tokens.shape, 32, 127)
    corrupted = jnp.where(how < 0.8, HIDDEN, jnp.where(how < 0.9, random, tokens))
    return jnp.where(asked, corrupted, tokens), asked


def applications() -> list[Application]:
    """The row of this file."""
    model = BERT()

    def init(key: jax.Array) -> Variables:
        return model.init(key, np.zeros((1, LENGTH), np.int32), train=False)

    def loss(variables: Sequence[Variables], batch, key, train: bool = True):
        hide_key, dropout_key = jax.random.split(key)
        corrupted, asked = hide(hide_key, batch)
        logits = model.apply(variables[0], corrupted, train=train, rngs={"dropout": dropout_key})
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch)
        return jnp.sum(losses * asked) / jnp.sum(asked), {}

    @jax.jit
    def bits(variables: Variables):
        return loss([variables], held_out(512, LENGTH), jax.random.key(0), train=False)[0] / jnp.log(2.0)

    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 50, STEPS)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    return [
        Application(
            name="masked language model, BERT",
            metric="held-out bits per hidden character",
            higher_is_better=False,
            resolution=0.02,
            steps=STEPS,
            players=(Player(init, loss, optimizer),),
            batches=lambda seed: windows(seed, BATCH, LENGTH),
            evaluate=lambda variables: float(bits(variables[0])),
        )
    ]
