"""`Workload`: a model with the batch, the loss and the optimizer with which it is trained.

Decides what a benchmark may ask of a model. Models are written in float32, without this library; `dtype` is passed to
Flax's own layers, for the comparison with Flax's mixed precision.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

Tree = Any


@dataclasses.dataclass(frozen=True)
class Workload:
    """One training problem on synthetic data.

    Attributes:
      name: of the model.
      module: `dtype -> nn.Module`, called as `module(inputs, train=True)`; `None` computes in float32.
      make_batch: `(generator, size) -> {"inputs": ..., ...}`, NumPy arrays with `size` examples.
      loss: `(outputs, batch) -> []`, the mean loss; outputs are float32.
      optimizer: an optimizer with which the model is trained.
      batch_size: the number of examples that fills an H200.
      unit: the name of an example.
    """

    name: str
    module: Callable[[Any], nn.Module]
    make_batch: Callable[[np.random.Generator, int], Tree]
    loss: Callable[[jax.Array, Tree], jax.Array]
    optimizer: Callable[[], optax.GradientTransformation]
    batch_size: int
    unit: str = "sequences"

    def batch(self, seed: int = 0, size: int | None = None) -> Tree:
        """A batch of NumPy arrays; `size` examples, `batch_size` by default."""
        return self.make_batch(np.random.default_rng(seed), self.batch_size if size is None else size)

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        """`(params, model_state)` in float32; the state holds batch statistics, or nothing."""
        inputs = jnp.asarray(self.batch(size=1)["inputs"])
        variables = self.module(None).init(key, inputs, train=False)
        return variables["params"], {name: value for name, value in variables.items() if name != "params"}

    def loss_fn(self, dtype: Any = None) -> Callable[..., tuple[jax.Array, Tree]]:
        """`(params, model_state, batch, key) -> (loss, model_state)` in training mode; `key` is for dropout."""
        module = self.module(dtype)

        def loss(params: Tree, model_state: Tree, batch: Tree, key: jax.Array) -> tuple[jax.Array, Tree]:
            outputs, model_state = module.apply(
                {"params": params, **model_state},
                batch["inputs"],
                train=True,
                mutable=list(model_state),
                rngs={"dropout": key},
            )
            return self.loss(outputs.astype(jnp.float32), batch), model_state

        return loss


def images(image: int, classes: int) -> Callable[[np.random.Generator, int], Tree]:
    """Batches of `{"inputs": [size, image, image, 3] float32, "labels": [size] int32}`."""

    def make(rng: np.random.Generator, size: int) -> Tree:
        inputs = rng.standard_normal((size, image, image, 3), dtype=np.float32)
        return {"inputs": inputs, "labels": rng.integers(classes, size=size, dtype=np.int32)}

    return make


def tokens(length: int, vocabulary: int) -> Callable[[np.random.Generator, int], Tree]:
    """Batches of `{"inputs", "labels": [size, length] int32}`, the labels being the next tokens."""

    def make(rng: np.random.Generator, size: int) -> Tree:
        text = rng.integers(vocabulary, size=(size, length + 1), dtype=np.int32)
        return {"inputs": text[:, :-1], "labels": text[:, 1:]}

    return make


def cross_entropy(outputs: jax.Array, batch: Tree) -> jax.Array:
    """The mean over all labels of `-log softmax(outputs)[label]`; outputs `[..., classes]`, labels `[...]`."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"]))


def momentum() -> optax.GradientTransformation:
    return optax.sgd(0.01, momentum=0.9)


def adamw() -> optax.GradientTransformation:
    return optax.adamw(1e-4, weight_decay=0.01)
