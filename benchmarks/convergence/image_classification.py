"""Image classification: four famous architectures in small, on handwritten digits.

Real: the images and labels (scikit-learn's digits, 8 by 8 pixels, half of them for testing) and the shapes of the
networks: residual blocks (ResNet), stacks of convolutions with dense layers on top and no normalisation (VGG), blocks
that concatenate all that came before (DenseNet), parallel branches (Inception). Smaller: width, depth, the images.
Stands for ImageNet and the networks of the paper's table 1; see also NVIDIA's for ResNet-50, VGG-19 and DenseNet-121.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from ._application import Application, Player, Variables
from ._images import digits, shuffled

STEPS, BATCH = 300, 64


class Unit(nn.Module):
    """Convolution, BatchNorm, ReLU."""

    features: int
    size: int = 3
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(self.features, (self.size, self.size), self.strides, use_bias=False)(x)
        return nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))


class ResNet(nn.Module):
    """Residual blocks, the second stage at half the resolution."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = Unit(16)(x, train)
        for features, strides in ((16, 1), (32, 2)):
            for block in range(2):
                stride = strides if block == 0 else 1
                y = Unit(features, strides=stride)(x, train)
                y = nn.Conv(features, (3, 3), use_bias=False)(y)
                y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
                if y.shape != x.shape:
                    x = nn.Conv(features, (1, 1), stride, use_bias=False)(x)
                x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


class VGG(nn.Module):
    """Plain convolutions with biases, max-pooling, dense layers with dropout; nothing normalises."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in (16, 32):
            for _ in range(2):
                x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(128)(x)))
        return nn.Dense(10)(x)


class DenseNet(nn.Module):
    """Each layer reads all layers before it: concatenations of BatchNorm's inputs, average pooling in between."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        for block in range(2):
            for _ in range(4):
                y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
                x = jnp.concatenate([x, nn.Conv(8, (3, 3), use_bias=False)(y)], axis=-1)
            if block == 0:
                x = nn.avg_pool(Unit(24, 1)(x, train), (2, 2), (2, 2))
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(10)(x.mean((1, 2)))


class Inception(nn.Module):
    """Branches of several sizes side by side, one of them a pool."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = Unit(16)(x, train)
        for _ in range(2):
            branches = (
                Unit(8, 1)(x, train),
                Unit(12)(Unit(8, 1)(x, train), train),
                Unit(8)(Unit(8)(Unit(8, 1)(x, train), train), train),
                Unit(4, 1)(nn.max_pool(x, (3, 3), padding="SAME"), train),
            )
            x = nn.max_pool(jnp.concatenate(branches, axis=-1), (2, 2), (2, 2))
        return nn.Dense(10)(x.mean((1, 2)))


def classifier(name: str, make: Callable[[], nn.Module]) -> Application:
    """The application that trains one of the networks."""
    model, (train_images, test_images, train_labels, test_labels) = make(), digits()

    def init(key: jax.Array) -> Variables:
        return model.init(key, train_images[:1], train=False)

    def loss(variables: Sequence[Variables], batch, key):
        images, labels = batch
        mutable = [name for name in variables[0] if name != "params"]
        logits, model_state = model.apply(variables[0], images, train=True, mutable=mutable, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), model_state

    @jax.jit
    def correct(variables: Variables):
        return jnp.mean(model.apply(variables, test_images, train=False).argmax(-1) == test_labels)

    return Application(
        name=name,
        metric="test accuracy, %",
        higher_is_better=True,
        resolution=0.5,  # four or five images
        steps=STEPS,
        players=(Player(init, loss, optax.sgd(optax.cosine_decay_schedule(0.05, STEPS), momentum=0.9)),),
        batches=lambda seed: shuffled(seed, BATCH, train_images, train_labels),
        evaluate=lambda variables: 100 * float(correct(variables[0])),
    )


def applications() -> list[Application]:
    """The rows of this file."""
    rows = (("ResNet", ResNet), ("VGG", VGG), ("DenseNet", DenseNet), ("Inception", Inception))
    return [classifier(f"classification, {name}", make) for name, make in rows]
