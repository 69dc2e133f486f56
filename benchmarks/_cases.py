"""The training problems whose compiled steps are compared: shapes, and a loss in any dtype.

Decides the models' sizes. Does not decide how a step is written; see `_peers.py`.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import models
from _peers import Loss, Step, Tree, hand_scaling, ours, ours_without_scale, selected

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from autocast_references import FILLING, by_hand_loss, mlp_arguments, mlp_loss
from battery_models import BY_NAME
from battery_row import Size
from battery_tools import abstract, abstract_example


@dataclasses.dataclass(frozen=True)
class Case:
    """One training problem.

    Attributes:
      name: of the model.
      shapes: `() -> (params, model_state, batch)`, shapes and dtypes only.
      loss: `(dtype=None) -> (params, model_state, batch) -> (loss, model_state)`, its Flax layers in that dtype.
      by_hand: steps that were written for this model alone, by name.
      about: its size, in words.
    """

    name: str
    shapes: Callable[[], tuple[Tree, Tree, Tree]]
    loss: Callable[..., Loss]
    about: str
    by_hand: Mapping[str, Callable[..., Step]] = dataclasses.field(default_factory=dict)


def without_state(loss: Callable[[Tree, Tree], jax.Array]) -> Loss:
    """`(params, batch) -> loss` as the loss of a model that has no state."""
    return lambda params, model_state, batch: (loss(params, batch), model_state)


def mlp() -> Case:
    def shapes():
        params, batch = mlp_arguments()
        return params, {}, batch

    def by_hand(reduce_dtype):
        return lambda _: selected(without_state(by_hand_loss(jnp.float16, reduce_dtype)), hand_scaling())

    return Case(
        "mlp",
        shapes,
        lambda dtype=None: without_state(mlp_loss(dtype)),
        "six dense layers of 1024, bias, gelu, mean squared error, batch 512",
        {
            "by hand, custom_vjp, reduce float16": by_hand(jnp.float16),
            "by hand, custom_vjp, reduce float32": by_hand(jnp.float32),
        },
    )


def workload(
    name: str, title: str, about: str, by_hand: Mapping[str, Callable[..., Step]] | None = None, **sizes: Any
) -> Case:
    """One of `models/`."""
    made = models.make(name, **sizes)

    def shapes():
        params, model_state = jax.eval_shape(made.init, jax.random.key(0))
        return params, model_state, abstract(made.batch())

    def loss(dtype=None):
        fn, key = made.loss_fn(dtype), jax.random.key(0)
        return lambda params, model_state, batch: fn(params, model_state, batch, key)

    return Case(title, shapes, loss, about, by_hand or {})


def of_battery(name: str, title: str, about: str, size: Size = FILLING) -> Case:
    """A model that the tests of autocast use, at a size that fills a GPU."""
    row = BY_NAME[name]

    def shapes():
        params, batch = abstract_example(row, size)
        return params, {}, batch

    return Case(title, shapes, lambda dtype=None: without_state(row.loss(dtype, size)), about)


def gpt2() -> Case:
    """GPT-2, with two more steps whose attention is `flax_bridge.dot_product_attention`."""
    sizes = {"layers": 4, "batch_size": 8}
    fused = workload("gpt2", "transformer", "", fused=True, **sizes)
    return workload(
        "gpt2",
        "transformer",
        "GPT-2's width and vocabulary, 4 layers, length 1024, batch 8",
        {
            "ours, our attention_fn": lambda _: ours(fused.loss(), "mixed_float16"),
            "ours, mixed_bfloat16, no scale, our attention_fn": lambda _: ours_without_scale(
                fused.loss(), "mixed_bfloat16"
            ),
        },
        **sizes,
    )


CASES: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "cnn": lambda: of_battery(
        "cnn_groupnorm", "cnn", "two convolutions, group norm, max- and average pool, 64 images of 32x32, width 256"
    ),
    "transformer": gpt2,
    "lstm": lambda: workload("lstm", "lstm", "two layers of 1536, vocabulary 10,000, length 64, batch 256"),
    "resnet50": lambda: workload("resnet50", "resnet50", "224x224, batch 256, BatchNorm in training mode"),
}


@jax.custom_vjp
def given_gradients(params: Tree, model_state: Tree, grads: Tree) -> tuple[jax.Array, Tree]:
    """A loss of zero whose gradient is its last argument, so that a step of it consists of the optimizer alone."""
    return jnp.float32(0), model_state


def _forward(params, model_state, grads):
    return given_gradients(params, model_state, grads), (params, model_state, grads)


def _backward(saved, cotangents):
    params, model_state, grads = saved
    scaled = jax.tree.map(lambda p, g: (g.astype(jnp.float32) * cotangents[0]).astype(p.dtype), params, grads)
    nothing = functools.partial(jax.tree.map, jnp.zeros_like)
    return scaled, nothing(model_state), nothing(grads)


given_gradients.defvjp(_forward, _backward)
