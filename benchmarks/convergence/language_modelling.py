"""Language modelling: an LSTM and a Transformer decoder write the standard library's source, character by character.

Real: the text, 2 MB of Python, and the two kinds of network. Smaller: width and depth, 64 characters of context.
Stands for the paper's bigLSTM on the One Billion Word benchmark, and for GPT-like decoders.
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

STEPS, BATCH, LENGTH = 300, 32, 65


class LSTM(nn.Module):
    """Two recurrent layers."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, 96)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(96))(x)
        return nn.Dense(VOCABULARY)(x)


class Transformer(nn.Module):
    """Two causal layers."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, 96)(tokens) + nn.Embed(LENGTH, 96)(jnp.arange(tokens.shape[-1]))
        for _ in range(2):
            x = Block()(x, nn.make_causal_mask(tokens))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def language_model(name: str, model: nn.Module, rate: float) -> Application:
    """The application that trains one of the networks."""

    def init(key: jax.Array) -> Variables:
        return model.init(key, np.zeros((1, LENGTH - 1), np.int32))

    def loss(variables: Sequence[Variables], batch, key):
        logits = model.apply(variables[0], batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean(), {}

    @jax.jit
    def bits(variables: Variables):
        return loss([variables], held_out(256, LENGTH), None)[0] / jnp.log(2.0)

    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 30, STEPS)
    return Application(
        name=name,
        metric="held-out bits per character",
        higher_is_better=False,
        resolution=0.01,
        steps=STEPS,
        players=(Player(init, loss, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))),),
        batches=lambda seed: windows(seed, BATCH, LENGTH),
        evaluate=lambda variables: float(bits(variables[0])),
    )


def applications() -> list[Application]:
    """The rows of this file."""
    return [
        language_model("language model, LSTM", LSTM(), 1e-2),
        language_model("language model, Transformer", Transformer(), 4e-3),
    ]
