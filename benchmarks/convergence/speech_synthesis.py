"""Speech synthesis: text to spectrogram, an encoder, attention and a recurrent decoder that feeds on its own past.

Real: the words, the network's parts (convolutions and a bidirectional LSTM over letters, additive attention that knows
where it looked, a pre-net with dropout, two LSTM cells stepped together in one scan, a prediction of the end), teacher
forcing, the losses. Made: the speech (see `_speech.py`). Stands for Tacotron 2 (Shen et al., 2018).
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from ._application import Application, Player, Variables
from ._images import shuffled
from ._speech import BANDS, FRAMES, LETTERS, speech

STEPS, BATCH, WIDTH = 400, 32, 64


class Step(nn.Module):
    """One frame of the decoder: attention, two LSTM cells, a frame and the logit of the end."""

    @nn.compact
    def __call__(self, carry, before: jax.Array, memory: jax.Array, there: jax.Array):
        first, second, looked = carry
        context = jnp.einsum("bl,bld->bd", looked[..., 0], memory)
        first, h = nn.OptimizedLSTMCell(WIDTH)(first, jnp.concatenate([before, context], axis=-1))
        where = nn.Dense(WIDTH)(nn.Conv(8, (5,))(looked))
        query = nn.tanh(nn.Dense(WIDTH)(h)[:, None] + nn.Dense(WIDTH, use_bias=False)(memory) + where)
        scores = jnp.where(there, nn.Dense(1)(query)[..., 0], -1e9)
        weights = jax.nn.softmax(scores)
        context = jnp.einsum("bl,bld->bd", weights, memory)
        second, h = nn.OptimizedLSTMCell(WIDTH)(second, jnp.concatenate([h, context], axis=-1))
        looked = jnp.stack([weights, looked[..., 1] + weights], axis=-1)
        return (first, second, looked), nn.Dense(BANDS + 1)(jnp.concatenate([h, context], axis=-1))


class Tacotron(nn.Module):
    """Letters `[batch, 12]` and the frames before `[batch, 80, 40]` to frames and logits of the end."""

    @nn.compact
    def __call__(self, text: jax.Array, before: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
        x = nn.Embed(1 + len(LETTERS), WIDTH)(text)
        for _ in range(2):
            x = nn.relu(nn.LayerNorm()(nn.Conv(WIDTH, (3,))(x)))
        cells = (nn.OptimizedLSTMCell(WIDTH // 2), nn.OptimizedLSTMCell(WIDTH // 2))
        memory = nn.Bidirectional(nn.RNN(cells[0]), nn.RNN(cells[1]))(x)
        for _ in range(2):
            before = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(WIDTH)(before)))
        there = text != 0
        cell = jnp.zeros((len(text), WIDTH))
        start = jnp.zeros((*text.shape, 2)).at[:, 0].set(1.0)
        scan = nn.scan(
            Step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=(1, nn.broadcast, nn.broadcast),
            out_axes=1,
        )
        _, out = scan()(((cell, cell), (cell, cell), start), before, memory, there)
        frames, ends = out[..., :BANDS], out[..., BANDS]
        # The post-net: corrections that see a frame's neighbours.
        return frames + nn.Conv(BANDS, (5,))(nn.tanh(nn.Conv(WIDTH, (5,))(frames))), ends


def applications() -> list[Application]:
    """The row of this file."""
    model, training, testing = Tacotron(), speech(training=True), speech(training=False)

    def errors(variables: Variables, batch, key, train: bool):
        sounds, lengths, text = batch
        before = jnp.pad(sounds, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        frames, ends = model.apply(variables, text, before, train=train, rngs={"dropout": key})
        spoken = jnp.arange(FRAMES) < lengths[:, None]
        distance = jnp.sum(jnp.abs(frames - sounds).mean(-1) * spoken) / jnp.sum(spoken)
        stop = optax.sigmoid_binary_cross_entropy(ends, ~spoken).mean()
        return distance, stop

    def loss(variables: Sequence[Variables], batch, key):
        distance, stop = errors(variables[0], batch, key, train=True)
        return distance + stop, {}

    @jax.jit
    def held_out(variables: Variables):
        return errors(variables, tuple(testing), jax.random.key(0), train=False)[0]

    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 50, STEPS)
    return [
        Application(
            name="speech synthesis, Tacotron",
            metric="held-out distance of frames, thousandths",
            higher_is_better=False,
            resolution=1.0,
            steps=STEPS,
            players=(
                Player(
                    lambda key: model.init(key, training.text[:1], training.spectrograms[:1], train=False),
                    loss,
                    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)),
                ),
            ),
            batches=lambda seed: shuffled(seed, BATCH, *training),
            evaluate=lambda variables: 1000 * float(held_out(variables[0])),
        )
    ]
