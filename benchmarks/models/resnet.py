"""ResNet-50, version 1.5: the stride is in the 3x3 convolution (He et al., Deep Residual Learning, CVPR 2016)."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from .workload import Workload, cross_entropy, images, momentum


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; `[batch, h, w, c]` to `[batch, h/stride, w/stride, 4 width]`."""

    width: int
    stride: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(self, x, train):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        strides, shortcut = (self.stride, self.stride), x
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), strides, padding=1)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.width, (1, 1))(y))
        if shortcut.shape != y.shape:
            shortcut = norm()(conv(4 * self.width, (1, 1), strides)(shortcut))
        return nn.relu(y + shortcut)


class ResNet(nn.Module):
    """`[batch, height, width, 3]` images to `[batch, classes]` logits."""

    blocks: Sequence[int] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    dtype: Any = None

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(self.width, (7, 7), (2, 2), padding=3, use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(self.width * 2**stage, stride, self.dtype)(x, train)
        return nn.Dense(self.classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


def resnet50(blocks=(3, 4, 6, 3), width=64, classes=1000, image=224, batch_size=256) -> Workload:
    return Workload(
        "resnet50",
        lambda dtype: ResNet(blocks, width, classes, dtype),
        images(image, classes),
        cross_entropy,
        momentum,
        batch_size,
        "images",
    )
