"""Generation: a DCGAN draws digits; two networks, two losses, two optimizers and two loss scales.

Real: the digits, the networks (transposed convolutions with BatchNorm against convolutions with leaky ReLU), the
non-saturating losses, Adam with beta1 = 0.5. Smaller: everything. Measured by the Fréchet distance between drawn and
real digits, of their 20 principal components instead of Inception's features.
Stands for DCGAN on faces (Radford et al., 2016), in the paper.
"""

from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import numpy as np
import optax
from scipy.linalg import sqrtm
from sklearn.decomposition import PCA

from ._application import Application, Player, Variables
from ._images import digits, shuffled

STEPS, BATCH, LATENT = 1500, 64, 16


class Generator(nn.Module):
    """Latents `[batch, 16]` to images `[batch, 8, 8, 1]` in [-1, 1]."""

    @nn.compact
    def __call__(self, z: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(2 * 2 * 64)(z).reshape(-1, 2, 2, 64)
        for features in (32, 16):
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.ConvTranspose(features, (4, 4), (2, 2), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.tanh(nn.Conv(1, (3, 3))(x))


class Discriminator(nn.Module):
    """Images to logits `[batch]`, positive for real ones."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (32, 64):
            x = nn.leaky_relu(nn.Conv(features, (4, 4), (2, 2))(x), 0.2)
        return nn.Dense(1)(x.reshape(len(x), -1))[:, 0]


def applications() -> list[Application]:
    """The row of this file."""
    generator, discriminator = Generator(), Discriminator()
    images = 2 * digits()[0] - 1
    components = PCA(20, random_state=0).fit(images.reshape(len(images), -1))
    truth = components.transform((2 * digits()[1] - 1).reshape(-1, 64))

    def draw(variables: Variables, z: jax.Array):
        return generator.apply(variables, z, train=True, mutable=["batch_stats"])

    def fool(variables: Sequence[Variables], batch, key):
        _, z = batch
        drawn, model_state = draw(variables[0], z)
        return jax.nn.softplus(-discriminator.apply(variables[1], drawn)).mean(), model_state

    def tell(variables: Sequence[Variables], batch, key):
        real, z = batch
        drawn, _ = draw(variables[0], z)
        judge = lambda x: discriminator.apply(variables[1], x)  # noqa: E731
        return jax.nn.softplus(judge(drawn)).mean() + jax.nn.softplus(-judge(real)).mean(), {}

    def batches(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(1000 + seed)
        for (real,) in shuffled(seed, BATCH, images):
            yield real, rng.normal(size=(BATCH, LATENT)).astype(np.float32)

    @jax.jit
    def sample(variables: Variables):
        return generator.apply(variables, jax.random.normal(jax.random.key(0), (2048, LATENT)), train=False)

    def distance(variables: Sequence[Variables]) -> float:
        drawn = np.asarray(sample(variables[0]), np.float64).reshape(-1, 64)
        if not np.isfinite(drawn).all():
            return float("nan")
        drawn = components.transform(drawn)
        (m, s), (n, t) = ((x.mean(0), np.cov(x.T)) for x in (drawn, truth))
        return float(np.sum((m - n) ** 2) + np.trace(s + t - 2 * np.real(sqrtm(s @ t))))

    adam = optax.adam(optax.cosine_decay_schedule(2e-3, STEPS), b1=0.5)
    return [
        Application(
            name="generation, DCGAN",
            metric="Fréchet distance",
            higher_is_better=False,
            resolution=0.1,
            steps=STEPS,
            players=(
                Player(lambda key: generator.init(key, np.zeros((1, LATENT), np.float32), train=False), fool, adam),
                Player(lambda key: discriminator.init(key, images[:1]), tell, adam),
            ),
            batches=batches,
            evaluate=distance,
        )
    ]
