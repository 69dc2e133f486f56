"""What activations, norms, heads and recurrent cells move in a module compiled for an H200, beside Flax in float16."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from battery_tools import figures
from flax import linen as nn

from jmp_train import autocast, get_policy

pytestmark = pytest.mark.slow


class Normed(nn.Module):
    """Convolutions, each followed by BatchNorm and ReLU."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.Conv(128, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return nn.Conv(128, (1, 1), dtype=self.dtype)(x)


class Joined(nn.Module):
    """A dense block behind a transition (Huang et al., 2017): every layer reads what all before it made."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        x = nn.avg_pool(conv(128, (1, 1))(x), (2, 2), (2, 2))
        for _ in range(6):
            y = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            y = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(conv(128, (1, 1))(y)))
            x = jnp.concatenate([x, conv(32, (3, 3))(y)], axis=-1)
        return conv(128, (1, 1))(nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)))


class Dense(nn.Module):
    """Dense layers with an activation between every two."""

    activation: Any
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = self.activation(nn.Dense(2048, dtype=self.dtype)(x))
            x = nn.Dense(512, dtype=self.dtype)(x)
        return x


class Recurrent(nn.Module):
    """Two layers of LSTM, whose cells join their kernels."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(1024, dtype=self.dtype))(x)
        return x


def exact_gelu(x):
    return nn.gelu(x, approximate=False)


def mean_square(out):
    return 1024 * jnp.mean(out**2)


def cross_entropy(logits):
    labels = jnp.arange(len(logits)) % logits.shape[1]
    return 1024 * optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


IMAGES, ROWS, STEPS = ((64, 56, 56, 128), (16384, 512), (128, 32, 1024))
# Of Flax's bytes. It writes the gradient of the logits in float32 and casts it in a kernel of its own.
ROWS_OF_TABLE = {
    "batch norm": (Normed, IMAGES, mean_square, 1.03),
    "dense block": (Joined, IMAGES, mean_square, 1.0),
    "relu": (lambda dtype: Dense(nn.relu, dtype), ROWS, mean_square, 1.03),
    "exact gelu": (lambda dtype: Dense(exact_gelu, dtype), ROWS, mean_square, 1.03),
    "silu": (lambda dtype: Dense(nn.silu, dtype), ROWS, mean_square, 1.03),
    "tanh": (lambda dtype: Dense(nn.tanh, dtype), ROWS, mean_square, 1.03),
    "lstm": (Recurrent, STEPS, mean_square, 1.03),
    "head": (lambda dtype: nn.Dense(32768, dtype=dtype), (4096, 256), cross_entropy, 0.9),
    "head without bias": (lambda dtype: nn.Dense(32768, use_bias=False, dtype=dtype), (4096, 256), cross_entropy, 0.75),
}


@pytest.mark.parametrize("name", ROWS_OF_TABLE)
def test_no_more_bytes_than_flax_in_float16(name):
    make, shape, loss_of, bound = ROWS_OF_TABLE[name]
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    variables = jax.eval_shape(make(None).init, jax.random.key(0), x)

    def gradients(dtype):
        def loss(params, state, x):
            out, _ = make(dtype).apply({"params": params, **state}, x, mutable=["batch_stats"])
            return loss_of(jnp.asarray(out).astype(jnp.float32))

        return jax.grad(loss)

    args = variables["params"], {"batch_stats": variables.get("batch_stats", {})}, x
    ours = figures(autocast(gradients(None), get_policy("mixed_float16")), *args)
    flax = figures(gradients(jnp.float16), *args)
    assert ours.bytes <= bound * flax.bytes
    assert ours.temporary <= (1.01 if name in ("batch norm", "relu") else 1.2) * flax.temporary
    assert not ours.wide_products and not ours.sixteen_bit_sums
