"""DenseNet-121: a layer reads all earlier ones in its block (Huang et al., Densely Connected Networks, CVPR 2017)."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from .workload import Workload, cross_entropy, images, momentum


class DenseLayer(nn.Module):
    """`[batch, h, w, c]` to `[batch, h, w, c + growth]`: the input and `growth` new channels after it."""

    growth: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, train):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        y = conv(4 * self.growth, (1, 1))(nn.relu(norm()(x)))
        y = conv(self.growth, (3, 3), padding=1)(nn.relu(norm()(y)))
        return jnp.concatenate([x, y], axis=-1)


class DenseNet(nn.Module):
    """`[batch, height, width, 3]` images to `[batch, classes]` logits."""

    blocks: Sequence[int] = (6, 12, 24, 16)
    growth: int = 32
    classes: int = 1000
    dtype: Any = None

    @nn.compact
    def __call__(self, x, train):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        x = nn.relu(norm()(conv(2 * self.growth, (7, 7), (2, 2), padding=3)(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for block, layers in enumerate(self.blocks):
            if block > 0:
                x = conv(x.shape[-1] // 2, (1, 1))(nn.relu(norm()(x)))
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            for _ in range(layers):
                x = DenseLayer(self.growth, self.dtype)(x, train)
        x = jnp.mean(nn.relu(norm()(x)), axis=(1, 2))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


def densenet121(blocks=(6, 12, 24, 16), growth=32, classes=1000, image=224, batch_size=128) -> Workload:
    return Workload(
        "densenet121",
        lambda dtype: DenseNet(blocks, growth, classes, dtype),
        images(image, classes),
        cross_entropy,
        momentum,
        batch_size,
        "images",
    )
