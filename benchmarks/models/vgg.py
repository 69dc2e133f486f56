"""VGG-19, configuration E without normalisation (Simonyan and Zisserman, Very Deep Networks, ICLR 2015)."""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn

from .workload import Workload, cross_entropy, images, momentum

POOL = "pool"
LAYERS = (64, 64, POOL, 128, 128, POOL, *(256,) * 4, POOL, *(512,) * 4, POOL, *(512,) * 4, POOL)


class VGG(nn.Module):
    """`[batch, height, width, 3]` images to `[batch, classes]` logits."""

    layers: Sequence[int | str] = LAYERS
    hidden: int = 4096
    classes: int = 1000
    dropout: float = 0.5
    dtype: Any = None

    @nn.compact
    def __call__(self, x, train):
        for layer in self.layers:
            if isinstance(layer, int):
                x = nn.relu(nn.Conv(layer, (3, 3), padding=1, dtype=self.dtype)(x))
            else:
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(self.hidden, dtype=self.dtype)(x))
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x)


def vgg19(layers=LAYERS, hidden=4096, classes=1000, image=224, dropout=0.5, batch_size=128) -> Workload:
    return Workload(
        "vgg19",
        lambda dtype: VGG(layers, hidden, classes, dropout, dtype),
        images(image, classes),
        cross_entropy,
        momentum,
        batch_size,
        "images",
    )
