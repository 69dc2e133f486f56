"""A float32 Flax script, and the same with three lines changed: scikit-learn's digits, on a CPU, in under a minute.

    python examples/three_lines.py

`train_in_float32` is an ordinary training loop. `train_in_float16` is the same loop with three lines changed, which are
numbered. Both call the same model and the same loss function, which say nothing about precision.

1. `with_loss_scale` keeps the loss scale in the optimizer's state, and skips a step whose gradients overflowed.
2. `value_and_grad` computes in the policy's dtypes: dots and convolutions in float16, sums in float32.
3. The loss is multiplied by the scale, which keeps small gradients within float16's range; the gradients are returned
   unscaled, in float32.
"""

import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jmp_train as jmp


class CNN(nn.Module):
    """Classifies images `[batch, 8, 8, 1]`; returns logits `[batch, 10]`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.Conv(64, (3, 3), strides=(2, 2))(x))
        x = nn.LayerNorm()(x.reshape(len(x), -1))
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


model = CNN()


def loss_fn(params, batch):
    """The mean cross-entropy, a scalar."""
    images, labels = batch
    logits = jnp.asarray(model.apply(params, images))  # for type checkers: `apply` may also return a tuple
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train_in_float32(params, batches):
    """An ordinary training loop; returns the parameters and the losses."""
    tx = optax.adamw(3e-4)
    grad_fn = jax.value_and_grad(loss_fn)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = tx.init(params)
    losses = []
    for batch in batches:
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(loss)
    return params, losses


def train_in_float16(params, batches):
    """The same loop in mixed precision; returns the parameters, which stay float32, and the losses."""
    tx = jmp.with_loss_scale(optax.adamw(3e-4))  # 1
    grad_fn = jmp.value_and_grad(loss_fn, jmp.get_policy("mixed_float16"))  # 2

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = grad_fn(params, batch, loss_scale=jmp.get_loss_scale(opt_state))  # 3
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = tx.init(params)
    losses = []
    for batch in batches:
        params, opt_state, loss = train_step(params, opt_state, batch)
        losses.append(loss)
    return params, losses


def load_data():
    """Training and test sets, each of images `[n, 8, 8, 1]` in [0, 1] and labels `[n]`."""
    pixels, labels = load_digits(return_X_y=True)
    images = (np.asarray(pixels).reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    return (parts[0], parts[2]), (parts[1], parts[3])


def batches_of(data, epochs: int, size: int = 64):
    """Shuffled batches of `size`, `epochs` times through the data."""
    images, labels = data
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for start in range(0, len(images) - size + 1, size):
            chosen = order[start : start + size]
            yield images[chosen], labels[chosen]


def main(epochs: int = 10) -> dict[str, float]:
    """Trains both ways from the same start; prints and returns the test accuracies in percent."""
    train_set, (test_images, test_labels) = load_data()
    params = model.init(jax.random.key(0), train_set[0][:1])
    accuracies = {}
    for train in (train_in_float32, train_in_float16):
        started = time.perf_counter()
        trained, losses = train(params, batches_of(train_set, epochs))
        seconds = time.perf_counter() - started
        logits = jnp.asarray(model.apply(trained, test_images))
        accuracy = 100 * float(np.mean(np.asarray(logits).argmax(-1) == test_labels))
        accuracies[train.__name__] = accuracy
        print(
            f"{train.__name__}: loss {float(losses[0]):.4f} -> {float(losses[-1]):.4f}, "
            f"test accuracy {accuracy:.2f} % ({seconds:.0f} s)"
        )
    return accuracies


if __name__ == "__main__":
    main()
