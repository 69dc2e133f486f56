"""A CNN with BatchNorm and dropout in Linen and in NNX, digits for training, and batches with an infinity."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jmp_train as jmp
from jmp_train import flax_bridge
from jmp_train._paths import leaf_paths

NO_SCALE = jmp.NoOpLossScale()


class CNN(nn.Module):
    """Images `[batch, 8, 8, 1]` to logits `[batch, 10]`."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3), strides=(2, 2), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


class NNXCNN(nnx.Module):
    """The same model in NNX."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), strides=(2, 2), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.dense = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.dense(self.dropout(x.reshape(len(x), -1)))


def digits(count, size=32):
    """`count` batches of images in [0, 1] and their labels: a pattern for each of ten digits, plus noise."""
    rng = np.random.default_rng(0)
    patterns, labels = rng.random((10, 8, 8, 1)), rng.integers(10, size=(count, size))
    images = (3 * patterns[labels] + rng.random((count, size, 8, 8, 1))).astype(np.float32) / 4
    return [*zip(images, labels, strict=True)]


def spoiled(batch):
    """The batch with one infinite pixel."""
    images, labels = batch
    images = images.copy()
    images[3, 4, 4, 0] = np.inf
    return images, labels


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_training(policy="mixed_float16", tx=None, model: Any = None, **fields):
    """A Linen state and its jitted step, which donates the state."""
    model = CNN() if model is None else model
    init = jax.jit(model.init, static_argnames="train")
    variables = init(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32), train=False)
    state = flax_bridge.TrainState.create(
        apply_fn=model.apply,
        params=jmp.get_policy(policy).cast_to_param(variables["params"]),
        tx=jmp.with_loss_scale(optax.adam(1e-2)) if tx is None else tx,
        model_state={"batch_stats": variables["batch_stats"]},
        rngs={"dropout": jax.random.key(1)},
        **fields,
    )

    def train_step(state, batch):
        images, labels = batch

        def loss_fn(params):
            variables = {"params": params, **state.model_state}
            logits, model_state = state.apply_fn(
                variables, images, train=True, mutable=list(state.model_state), rngs=state.step_rngs
            )
            return cross_entropy(logits, labels), model_state

        grad_fn = jmp.value_and_grad(loss_fn, policy, has_aux=True)
        (loss, model_state), grads = grad_fn(state.params, loss_scale=jmp.get_loss_scale(state))
        return state.apply_gradients(grads=grads, model_state=model_state), loss

    return state, jax.jit(train_step, donate_argnums=0)


def nnx_loss(model, batch):
    images, labels = batch
    return cross_entropy(model(images), labels)


def nnx_training(policy="mixed_float16", tx=None, model: Any = None, **fields):
    """An NNX state and its jitted step, which donates the state."""
    tx = jmp.with_loss_scale(optax.adam(1e-2)) if tx is None else tx
    model = NNXCNN(nnx.Rngs(0)) if model is None else model
    state = flax_bridge.NNXTrainState.create(model=model, tx=tx, **fields)
    grad_fn = flax_bridge.value_and_grad(nnx_loss, policy)

    def train_step(state, batch):
        loss, grads, model_state = grad_fn(state.model, batch, loss_scale=jmp.get_loss_scale(state))
        return state.apply_gradients(grads=grads, model_state=model_state), loss

    return state, jax.jit(train_step, donate_argnums=0)


@jax.jit
def copied(tree):
    return jax.tree.map(jnp.copy, tree)


def run(training, batches):
    """The state after these batches, and the loss of each; donates a copy of the initial state."""
    state, step = training
    state = copied(state)
    losses = []
    for batch in batches:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return state, losses


def trained(state):
    """The state without the records of `with_loss_scale`, equal to that of a run that never saw a bad batch."""

    def is_scale_state(node):
        return isinstance(node, jmp.LossScaleState)

    state = jax.tree.map(lambda x: x.inner_state if is_scale_state(x) else x, state, is_leaf=is_scale_state)
    return dict(zip(leaf_paths(state), jax.tree.leaves(state), strict=True))
