"""Speech recognition: bidirectional recurrent layers over convolved spectrograms, trained with CTC.

Real: the words, the network (two convolutions, two bidirectional GRUs), the loss, greedy decoding, the metric. Made:
the speech (see `_speech.py`). Stands for Deep Speech 2 (Amodei et al., 2016), on which the paper reports the character
error rates of English and Mandarin, and the loss of 80 % relative accuracy with 16-bit weights.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._application import Application, Player, Variables
from ._images import shuffled
from ._speech import LETTERS, speech

STEPS, BATCH, BLANK = 500, 32, 0


class DeepSpeech(nn.Module):
    """Spectrograms `[batch, frames, 40]` to logits `[batch, frames / 2, 27]`."""

    @nn.compact
    def __call__(self, x: jax.Array, frames: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(64, (5,))(x))
        x = nn.relu(nn.Conv(64, (5,), strides=2)(x))
        for _ in range(2):
            layer = nn.Bidirectional(nn.RNN(nn.GRUCell(48)), nn.RNN(nn.GRUCell(48)))
            x = nn.LayerNorm()(layer(x, seq_lengths=(frames + 1) // 2))
        return nn.Dense(1 + len(LETTERS))(x)


def distance(a: Sequence[int], b: Sequence[int]) -> int:
    """The edit distance (Levenshtein)."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        before, row = row, [i]
        for j, right in enumerate(b, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (left != right)))
    return row[-1]


def applications() -> list[Application]:
    """The row of this file."""
    model, training, testing = DeepSpeech(), speech(training=True), speech(training=False)

    def loss(variables: Sequence[Variables], batch, key):
        sounds, frames, text = batch
        logits = model.apply(variables[0], sounds, frames)
        silent = jnp.arange(logits.shape[1]) >= ((frames + 1) // 2)[:, None]
        losses = optax.ctc_loss(
            logits, silent.astype(jnp.float32), text, (text == 0).astype(jnp.float32), blank_id=BLANK
        )
        return jnp.mean(losses / jnp.sum(text != 0, axis=1)), {}

    @jax.jit
    def best(variables: Variables):
        return model.apply(variables, testing.spectrograms, testing.frames).argmax(-1)

    def error_rate(variables: Sequence[Variables]) -> float:
        wrong, found = 0, np.asarray(best(variables[0]))
        for path, frames, text in zip(found, testing.frames, testing.text, strict=True):
            path = path[: (frames + 1) // 2]
            letters = [k for k, before in zip(path, [BLANK, *path[:-1]], strict=True) if k not in (BLANK, before)]
            wrong += distance(letters, text[text != 0].tolist())
        return 100 * wrong / int(np.sum(testing.text != 0))

    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 50, STEPS)
    return [
        Application(
            name="speech recognition, CTC",
            metric="character error rate, %",
            higher_is_better=False,
            resolution=0.5,
            steps=STEPS,
            players=(
                Player(
                    lambda key: model.init(key, training.spectrograms[:1], training.frames[:1]),
                    loss,
                    optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)),
                ),
            ),
            batches=lambda seed: shuffled(seed, BATCH, *training),
            evaluate=error_rate,
        )
    ]
