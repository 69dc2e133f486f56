"""The models that benchmarks train, in plain Flax: written in float32, without this library.

workload = make("resnet50")                   # or make("resnet50", tiny=True), make("gpt2", batch_size=8)
params, model_state = workload.init(jax.random.key(0))
loss, model_state = workload.loss_fn()(params, model_state, workload.batch(), jax.random.key(1))
"""

import functools
from collections.abc import Callable
from typing import Any

from .bert import bert_base
from .densenet import densenet121
from .gpt2 import gpt2
from .lstm import lstm
from .resnet import resnet50
from .vgg import POOL, vgg19
from .workload import Workload as Workload

MAKERS: dict[str, Callable[..., Workload]] = {
    "resnet50": resnet50,
    "vgg19": vgg19,
    "densenet121": densenet121,
    "bert_base": bert_base,
    "lstm": lstm,
    "gpt2": gpt2,
    "gpt2_fused": functools.partial(gpt2, fused=True),
}
"""By name; `gpt2_fused` has this library's attention, the others are as Flax has them."""

_IMAGES = {"classes": 16, "image": 32, "batch_size": 4}
_TEXT = {"vocabulary": 64, "layers": 1, "width": 32, "length": 16, "batch_size": 4}
TINY: dict[str, dict[str, Any]] = {
    "resnet50": _IMAGES | {"blocks": (1, 1), "width": 8},
    "vgg19": _IMAGES | {"layers": (8, POOL, 16, POOL), "hidden": 32},
    "densenet121": _IMAGES | {"blocks": (1, 1), "growth": 8},
    "bert_base": _TEXT | {"heads": 2},
    "lstm": _TEXT,
    "gpt2": _TEXT | {"heads": 2},
    "gpt2_fused": _TEXT | {"heads": 2},
}
"""Sizes that train on a CPU in a moment."""


def make(name: str, tiny: bool = False, **sizes: Any) -> Workload:
    """The workload of a name, at its published size or a tiny one; `sizes` change either."""
    return MAKERS[name](**(TINY[name] if tiny else {}) | sizes)
