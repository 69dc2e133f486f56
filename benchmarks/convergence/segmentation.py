"""Segmentation: a U-Net says of each pixel which digit it belongs to, or that it is background.

Real: the digits, the photographs behind them, the network. Made: where the digits stand. Smaller: width, depth, 48 by
48 pixels. Stands for medical and industrial segmentation (Ronneberger et al., 2015; NVIDIA's U-Net).
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._application import Application, Player, Variables
from ._images import shuffled
from ._scenes import scenes

STEPS, BATCH = 300, 16


class Double(nn.Module):
    """Two convolutions with group norm."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.GroupNorm(8)(nn.Conv(self.features, (3, 3))(x)))
        return x


class UNet(nn.Module):
    """Down twice by max-pooling, up twice by transposed convolutions, with skip connections."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        high = Double(16)(x)
        middle = Double(32)(nn.max_pool(high, (2, 2), (2, 2)))
        low = Double(64)(nn.max_pool(middle, (2, 2), (2, 2)))
        x = Double(32)(jnp.concatenate([middle, nn.ConvTranspose(32, (2, 2), (2, 2))(low)], axis=-1))
        x = Double(16)(jnp.concatenate([high, nn.ConvTranspose(16, (2, 2), (2, 2))(x)], axis=-1))
        return nn.Conv(11, (1, 1))(x)


def applications() -> list[Application]:
    """The row of this file."""
    model, training, testing = UNet(), scenes(training=True), scenes(training=False)

    def init(key: jax.Array) -> Variables:
        return model.init(key, training.images[:1])

    def loss(variables: Sequence[Variables], batch, key):
        images, masks = batch
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(variables[0], images), masks).mean(), {}

    @jax.jit
    def classes(variables: Variables):
        return model.apply(variables, testing.images).argmax(-1)

    def mean_overlap(variables: Sequence[Variables]) -> float:
        found = np.asarray(classes(variables[0]))
        pairs = [(found == kind, testing.masks == kind) for kind in range(11)]
        return 100 * float(np.mean([np.sum(a & b) / np.sum(a | b) for a, b in pairs]))

    return [
        Application(
            name="segmentation, U-Net",
            metric="mean intersection over union, %",
            higher_is_better=True,
            resolution=1.0,
            steps=STEPS,
            players=(Player(init, loss, optax.adam(optax.cosine_decay_schedule(5e-3, STEPS))),),
            batches=lambda seed: shuffled(seed, BATCH, training.images, training.masks),
            evaluate=mean_overlap,
        )
    ]
