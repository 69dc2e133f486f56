"""Battery rows with convolutions: CNNs with batch and group norm, a ResNet, a U-Net, a GAN with two losses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from battery_row import Program, Row, gradient_of, layer_dtypes, linen, normal, wide
from flax import linen as nn

CLASSES = 16


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(wide(logits), batch["y"]).mean()


def images(size, rng):
    return {
        "x": normal(rng, size.batch, size.image, size.image, 8),
        "y": rng.integers(0, CLASSES, size.batch, np.int32),
    }


class CNN(nn.Module):
    """Pooling windows overlap where `window` exceeds the stride of 2."""

    width: int
    norm: str
    window: int
    kw: dict[str, Any]

    @nn.compact
    def __call__(self, x):
        for factor in (1, 2):
            x = nn.Conv(factor * self.width, (3, 3), **self.kw)(x)
            if self.norm == "batch":
                x = nn.BatchNorm(use_running_average=False, **self.kw)(x)
            else:
                x = nn.GroupNorm(num_groups=4, **self.kw)(x)
            x = nn.relu(x)
            pool = nn.max_pool if factor == 1 else nn.avg_pool
            x = pool(x, (self.window, self.window), strides=(2, 2), padding="SAME")
        x = x.reshape(x.shape[0], -1)
        return nn.Dense(CLASSES, **self.kw)(x)


class ResidualBlock(nn.Module):
    """He et al. 2015, figure 5 right, with the projection of option B where the shape changes."""

    features: int
    stride: int
    kw: dict[str, Any]

    @nn.compact
    def __call__(self, x):
        strides = (self.stride, self.stride)
        y = nn.Conv(self.features, (1, 1), use_bias=False, **self.kw)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False, **self.kw)(y))
        y = nn.Conv(self.features, (3, 3), strides, use_bias=False, **self.kw)(y)
        y = nn.relu(nn.BatchNorm(use_running_average=False, **self.kw)(y))
        y = nn.Conv(2 * self.features, (1, 1), use_bias=False, **self.kw)(y)
        y = nn.BatchNorm(use_running_average=False, **self.kw)(y)
        if y.shape != x.shape:
            x = nn.Conv(2 * self.features, (1, 1), strides, use_bias=False, **self.kw)(x)
            x = nn.BatchNorm(use_running_average=False, **self.kw)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    width: int
    kw: dict[str, Any]

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (3, 3), use_bias=False, **self.kw)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, **self.kw)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for features, stride in ((self.width, 1), (self.width, 1), (2 * self.width, 2)):
            x = ResidualBlock(features, stride, self.kw)(x)
        x = x.mean(axis=(1, 2))
        return nn.Dense(CLASSES, **self.kw)(x)


class UNet(nn.Module):
    """Ronneberger et al. 2015 with group norm: one level down, one up, one skip connection a level."""

    width: int
    kw: dict[str, Any]

    def block(self, x, features):
        x = nn.Conv(features, (3, 3), **self.kw)(x)
        return nn.silu(nn.GroupNorm(num_groups=4, **self.kw)(x))

    @nn.compact
    def __call__(self, x):
        first = self.block(x, self.width)
        second = self.block(nn.max_pool(first, (2, 2), strides=(2, 2)), 2 * self.width)
        bottom = self.block(nn.avg_pool(second, (2, 2), strides=(2, 2)), 2 * self.width)
        up = nn.ConvTranspose(2 * self.width, (2, 2), strides=(2, 2), **self.kw)(bottom)
        up = self.block(jnp.concatenate([up, second], axis=-1), 2 * self.width)
        b, h, w, c = up.shape
        up = jax.image.resize(up, (b, 2 * h, 2 * w, c), "bilinear")
        up = self.block(jnp.concatenate([up, first], axis=-1), self.width)
        return nn.Conv(8, (1, 1), **self.kw)(up)


def segmentation(logits, batch):
    target = (batch["x"] > 0.5).astype(jnp.int32)
    return optax.sigmoid_binary_cross_entropy(wide(logits), target).mean()


class Generator(nn.Module):
    width: int
    kw: dict[str, Any]

    @nn.compact
    def __call__(self, z):
        x = nn.Dense(4 * 4 * self.width, **self.kw)(z).reshape(-1, 4, 4, self.width)
        x = nn.relu(nn.BatchNorm(use_running_average=False, **self.kw)(x))
        x = nn.relu(nn.ConvTranspose(self.width, (4, 4), (2, 2), **self.kw)(x))
        return nn.tanh(nn.ConvTranspose(8, (4, 4), (2, 2), **self.kw)(x))


class Discriminator(nn.Module):
    width: int
    kw: dict[str, Any]

    @nn.compact
    def __call__(self, x):
        x = nn.leaky_relu(nn.Conv(self.width, (4, 4), (2, 2), **self.kw)(x), 0.2)
        x = nn.leaky_relu(nn.Conv(2 * self.width, (4, 4), (2, 2), **self.kw)(x), 0.2)
        return nn.Dense(8, **self.kw)(x.reshape(x.shape[0], -1)).mean(axis=-1)


def gan(penalty):
    """Both players' gradients in one program; `penalty` weighs a gradient penalty (Mescheder et al. 2018)."""

    def make(size, dtype):
        kw = layer_dtypes(dtype)
        generator, discriminator = Generator(size.width // 2, kw), Discriminator(size.width // 2, kw)

        def batch(rng):
            return {"x": normal(rng, size.batch, 16, 16, 8), "z": normal(rng, size.batch, size.width)}

        def init(key, batch):
            first, second = jax.random.split(key)
            return {
                "g": generator.init(first, batch["z"])["params"],
                "d": discriminator.init(second, batch["x"])["params"],
            }

        def generate(g, z):
            return generator.apply({"params": g}, z, mutable=["batch_stats"])[0]

        def score(d, x):
            return wide(discriminator.apply({"params": d}, x, mutable=["batch_stats"])[0])

        def generator_loss(g, d, batch):
            return jax.nn.softplus(-score(d, generate(g, batch["z"]))).mean()

        def discriminator_loss(d, g, batch):
            fake = jax.lax.stop_gradient(generate(g, batch["z"]))
            loss = jax.nn.softplus(score(d, fake)).mean() + jax.nn.softplus(-score(d, batch["x"])).mean()
            if penalty:
                slope = jax.grad(lambda x: score(d, x).sum())(batch["x"])
                loss += penalty * jnp.mean(jnp.sum(wide(slope) ** 2, axis=(1, 2, 3)))
            return loss

        def loss(params, batch):
            return generator_loss(params["g"], params["d"], batch) + discriminator_loss(params["d"], params["g"], batch)

        def grads(scale):
            def both(params, batch):
                g = gradient_of(lambda g, batch: generator_loss(g, params["d"], batch))(scale)(params["g"], batch)
                d = gradient_of(lambda d, batch: discriminator_loss(d, params["g"], batch))(scale)(params["d"], batch)
                return {"g": g, "d": d}

            return both

        return Program(batch, init, loss, grads)

    return make


ROWS = [
    Row(
        "cnn_batchnorm",
        linen(lambda s, kw: CNN(s.width, "batch", 3, kw), images, cross_entropy),
        flax16=True,
        slack=2,
        fast=True,
    ),
    Row(
        "cnn_groupnorm", linen(lambda s, kw: CNN(s.width, "group", 2, kw), images, cross_entropy), flax16=True, slack=2
    ),
    Row("resnet", linen(lambda s, kw: ResNet(s.width, kw), images, cross_entropy), flax16=True, slack=20),
    Row("unet", linen(lambda s, kw: UNet(s.width, kw), images, segmentation), flax16=True),
    Row("gan", gan(penalty=0), flax16=True),
    Row("gan_gradient_penalty", gan(penalty=10), flax16=True),
]
