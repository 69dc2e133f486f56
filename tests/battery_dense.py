"""Battery rows of dense layers: Linen and NNX MLPs, targets that float16 cannot hold, the losses of optax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from battery_row import Program, Row, layer_dtypes, linen, normal, wide
from flax import linen as nn
from flax import nnx

from jmp_train import full_precision


class MLP(nn.Module):
    width: int
    depth: int
    kw: dict[str, Any]

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.gelu(nn.Dense(self.width, **self.kw)(x))
        return nn.Dense(self.width, **self.kw)(x)


class NNXMLP(nnx.Module):
    def __init__(self, width, kw, rngs):
        self.first = nnx.Linear(width, 2 * width, rngs=rngs, **kw)
        self.norm = nnx.LayerNorm(2 * width, rngs=rngs, **kw)
        self.second = nnx.Linear(2 * width, width, rngs=rngs, **kw)

    def __call__(self, x):
        return self.second(nnx.gelu(self.norm(self.first(x))))


def regression(size, rng):
    return {"x": normal(rng, 4 * size.batch, size.width), "y": normal(rng, 4 * size.batch, size.width)}


def far_regression(size, rng):
    """Targets around 1e5, above what float16 can hold."""
    batch = regression(size, rng)
    return batch | {"y": 1e5 + 1e3 * batch["y"]}


def squared_error(out, batch):
    return jnp.mean((wide(out) - batch["y"]) ** 2)


def nnx_mlp(size, dtype):
    def build(key):
        return nnx.split(NNXMLP(size.width, layer_dtypes(dtype), nnx.Rngs(key)), nnx.Param, ...)

    graphdef, _, rest = nnx.eval_shape(lambda: build(jax.random.key(0)))

    def loss(params, batch):
        return squared_error(nnx.merge(graphdef, params, rest)(batch["x"]), batch)

    return Program(lambda rng: regression(size, rng), lambda key, _: build(key)[1], loss)


def mlp(head, batch=regression):
    return linen(lambda s, kw: MLP(s.width, 2, kw), batch, head)


def labelled(size, rng):
    batch = regression(size, rng)
    return batch | {
        "label": rng.integers(0, size.width, 4 * size.batch, np.int32),
        "binary": (batch["y"] > 0).astype(np.float32),
    }


def sequences(size, rng):
    return {
        "x": normal(rng, size.batch, size.length, size.width),
        "label": rng.integers(1, size.width, (size.batch, size.length // 4), np.int32),
        "padding": np.zeros((size.batch, size.length // 4), np.float32),
    }


def ctc(out, batch):
    """The CTC loss in float32: it multiplies log-likelihoods of about -40, which 16 bits round, by one-hot masks."""
    loss = full_precision(optax.ctc_loss)
    return loss(wide(out), jnp.zeros(out.shape[:2]), batch["label"], batch["padding"]).mean()


def contrastive(out, batch):
    """InfoNCE over the batch (van den Oord et al. 2018), temperature 0.1."""
    first, second = (x / optax.safe_norm(x, 1e-6, axis=-1, keepdims=True) for x in (wide(out), batch["y"]))
    return optax.softmax_cross_entropy_with_integer_labels(10 * first @ second.T, jnp.arange(out.shape[0])).mean()


LOSSES = {
    "softmax_cross_entropy": lambda o, b: optax.softmax_cross_entropy(wide(o), jax.nn.softmax(b["y"])).mean(),
    "integer_labels": lambda o, b: optax.softmax_cross_entropy_with_integer_labels(wide(o), b["label"]).mean(),
    "poly_loss": lambda o, b: optax.losses.poly_loss_cross_entropy(wide(o), jax.nn.softmax(b["y"])).mean(),
    "sigmoid": lambda o, b: optax.sigmoid_binary_cross_entropy(wide(o), b["binary"]).mean(),
    "focal": lambda o, b: optax.sigmoid_focal_loss(wide(o), b["binary"]).mean(),
    "huber": lambda o, b: optax.huber_loss(wide(o), b["y"]).mean(),
    "log_cosh": lambda o, b: optax.log_cosh(wide(o), b["y"]).mean(),
    "cosine": lambda o, b: optax.cosine_distance(wide(o), b["y"], epsilon=1e-6).mean(),
    "kl": lambda o, b: optax.kl_divergence(jax.nn.log_softmax(wide(o)), jax.nn.softmax(b["y"])).mean(),
    # Large logits: an absolute error of a logit is a relative error of its probability.
    "sharp_labels": lambda o, b: optax.softmax_cross_entropy_with_integer_labels(16 * wide(o), b["label"]).mean(),
}

ROWS = [
    Row("mlp", mlp(squared_error), flax16=True, fast=True),
    Row("nnx_mlp", nnx_mlp, flax16=True, fast=True),
    Row("targets_1e5", mlp(squared_error, far_regression), flax16=True, scale=2.0**-4),
    *(Row(f"optax_{name}", mlp(head, labelled), flax16=True) for name, head in LOSSES.items()),
    # The derivative jumps where a margin crosses one.
    Row(
        "optax_hinge",
        mlp(lambda o, b: optax.hinge_loss(wide(o), 2 * b["binary"] - 1).mean(), labelled),
        flax16=True,
        slack=3,
        seeds=60,
    ),
    Row(
        "optax_ctc",
        linen(lambda s, kw: MLP(s.width, 1, kw), sequences, ctc),
        flax16=True,
        float32_dots="the loss is in full_precision",
    ),
    Row("contrastive", mlp(contrastive), flax16=True),
]
