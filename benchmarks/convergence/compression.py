"""Compression: an autoencoder says photographs in a twelfth of their numbers.

Real: two photographs whole, the transforms between pixels and code, the mean squared error over all pixels. Smaller:
the network; the code is not quantised. Stands for learned compression (Ballé et al., 2017), and for losses whose mean
is over so many values that each has a tiny gradient.
"""

from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_sample_images

from ._application import Application, Player, Variables

STEPS, PATCH, CODE = 200, 8, 16


class Autoencoder(nn.Module):
    """Pictures `[n, height, width, 3]` in [0, 1] to 16 numbers for each 8 by 8 pixels, and back."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(64, (PATCH, PATCH), (PATCH, PATCH))(images))
        code = nn.Conv(CODE, (1, 1))(x)
        x = nn.relu(nn.Conv(64, (3, 3))(code))
        return nn.sigmoid(nn.ConvTranspose(3, (PATCH, PATCH), (PATCH, PATCH))(x))


def applications() -> list[Application]:
    """The row of this file."""
    photographs = np.stack(load_sample_images().images)[:, :424].astype(np.float32) / 255
    cut = 3 * photographs.shape[2] // 4
    training, testing = photographs[:, :, :cut], photographs[:, :, cut:]
    model = Autoencoder()

    def error(variables: Variables, images: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model.apply(variables, images) - images))

    def loss(variables: Sequence[Variables], batch, key):
        return error(variables[0], batch[0]), {}

    def batches(seed: int) -> Iterator[tuple[np.ndarray]]:
        """Both photographs, as they are or mirrored either way."""
        rng = np.random.default_rng(seed)
        while True:
            down, across = rng.choice([-1, 1], 2)
            yield (training[:, ::down, ::across],)

    @jax.jit
    def held_out(variables: Variables):
        return -10 * jnp.log10(error(variables, testing))

    return [
        Application(
            name="compression, autoencoder",
            metric="held-out peak signal to noise, dB",
            higher_is_better=True,
            resolution=0.1,
            steps=STEPS,
            players=(
                Player(
                    lambda key: model.init(key, training[:, :PATCH]),
                    loss,
                    optax.adam(optax.cosine_decay_schedule(5e-3, STEPS)),
                ),
            ),
            batches=batches,
            evaluate=lambda variables: float(held_out(variables[0])),
        )
    ]
