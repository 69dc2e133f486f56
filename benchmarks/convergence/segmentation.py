"""Segmentation: a U-Net says of each pixel of a photograph whether a digit was written there.

Real: the digits, the photographs behind them, the network. Made: where the digits stand. Smaller: width, depth, 48 by
48 pixels. Stands for medical and industrial segmentation (Ronneberger et al., 2015; NVIDIA's U-Net),
where what is looked for covers a small part of the picture.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from ._application import Application, Player, Variables
from ._images import shuffled
from ._scenes import scenes

STEPS, BATCH = 300, 8


class Double(nn.Module):
    """Two convolutions with group norm."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.GroupNorm(4)(nn.Conv(self.features, (3, 3))(x)))
        return x


class UNet(nn.Module):
    """Down twice by max-pooling, up twice by transposed convolutions, with skip connections."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        high = Double(8)(x)
        middle = Double(16)(nn.max_pool(high, (2, 2), (2, 2)))
        low = Double(32)(nn.max_pool(middle, (2, 2), (2, 2)))
        x = Double(16)(jnp.concatenate([middle, nn.ConvTranspose(16, (2, 2), (2, 2))(low)], axis=-1))
        x = Double(8)(jnp.concatenate([high, nn.ConvTranspose(8, (2, 2), (2, 2))(x)], axis=-1))
        return nn.Conv(1, (1, 1))(x)[..., 0]


def applications() -> list[Application]:
    """The row of this file."""
    model, training, testing = UNet(), scenes(training=True), scenes(training=False)

    def init(key: jax.Array) -> Variables:
        return model.init(key, training.images[:1])

    def loss(variables: Sequence[Variables], batch, key):
        images, masks = batch
        return optax.sigmoid_binary_cross_entropy(model.apply(variables[0], images), masks > 0).mean(), {}

    @jax.jit
    def overlap(variables: Variables):
        found, truth = model.apply(variables, testing.images) > 0, testing.masks > 0
        return jnp.sum(found & truth) / jnp.sum(found | truth)

    return [
        Application(
            name="segmentation, U-Net",
            metric="intersection over union, %",
            higher_is_better=True,
            resolution=1.0,
            steps=STEPS,
            players=(Player(init, loss, optax.adam(optax.cosine_decay_schedule(5e-3, STEPS))),),
            batches=lambda seed: shuffled(seed, BATCH, training.images, training.masks),
            evaluate=lambda variables: 100 * float(overlap(variables[0])),
        )
    ]
