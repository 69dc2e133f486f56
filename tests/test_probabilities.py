"""Losses of probabilities, and gates: nothing between the last product and the loss is rounded, forward or backward.

A probability near one is one in 16 bits, and the logarithm of its complement is lost.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from hand_tools import errors
from jax import lax
from jax.scipy.special import ndtri
from jax.scipy.stats import norm


def cross_entropy(q, y, eps=1e-7):
    t = y > 0
    return -jnp.mean(jnp.where(t, jnp.log(q + eps), jnp.log(1 - q + eps)))


def stick_breaking(h, y):
    """The weights of a Dirichlet process (Sethuraman, 1994), and the entropy of the targets under them."""
    v = jax.nn.sigmoid(6 * h)
    left = jnp.cumprod(1 - v, -1)
    weights = v * jnp.concatenate([jnp.ones_like(v[..., :1]), left[..., :-1]], -1)
    return -jnp.mean(jax.nn.softmax(y) * jnp.log(weights))


def long_memory(h, y):
    """A state that is forgotten slowly, as a forget gate with a large bias does."""

    def step(state, row):
        f = jax.nn.sigmoid(row[0] + 5)
        return f * state + (1 - f) * row[1], None

    return jnp.mean((lax.scan(step, jnp.ones_like(h[0]), (h, jnp.tanh(y)))[0] - 0.5) ** 2)


def of_either(q, y):
    """The cross entropy of one of two outcomes, chosen before the logarithm is taken."""
    return -jnp.mean(jnp.log(jnp.where(y > 0, q, 1 - q) + 1e-7))


def mixture(h):
    gate, one, other = (jax.nn.sigmoid(4 * part) for part in (h, jnp.roll(h, 1), -h))
    return gate * one + (1 - gate) * other


def of_labels(logits, y):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.argmax(y, 1)))


LOSSES = {
    "capped logits": lambda h, y: of_labels(30 * jnp.tanh(20 * h / 30), y),
    "logits over a temperature": lambda h, y: of_labels(h / 0.007, y),
    "the most probable of a bag": lambda h, y: of_either(jnp.max(jax.nn.sigmoid(4 * h), 1), y[:, 0]),
    "a mixture": lambda h, y: of_either(mixture(h), y),
    "straight through": lambda h, y: of_either((q := jax.nn.sigmoid(4 * h)) + lax.stop_gradient(2 * q - 2 * q), y),
    "probit": lambda h, y: cross_entropy(norm.cdf(2 * h), y),
    "probit, bounded": lambda h, y: cross_entropy(jnp.clip(norm.cdf(2 * h), 1e-6, 1 - 1e-6), y, eps=0.0),
    "a Gaussian copula": lambda h, y: jnp.mean((ndtri(jnp.clip(norm.cdf(2 * h), 1e-4, 1 - 1e-4)) - y) ** 2),
    "logit": lambda h, y: cross_entropy(jax.nn.sigmoid(4 * h), y),
    "stick breaking": stick_breaking,
    "survival": lambda h, y: -jnp.mean(jnp.log(jnp.cumprod(1 - jax.nn.sigmoid(4 * h), 1) + 1e-7)),
    "a product of probabilities": lambda h, y: -jnp.mean(jnp.log(jnp.prod(jax.nn.sigmoid(h).reshape(16, 64), 1))),
    "a long memory": long_memory,
}
STICK_BREAKING = {
    "jitted": jax.jit(stick_breaking),
    "checkpointed": jax.checkpoint(stick_breaking),
    "mapped": lambda h, y: jnp.mean(jax.vmap(stick_breaking)(h, y)),
}
FAST = ("a mixture", "stick breaking", "a long memory")  # of those in bfloat16, which nothing here treats differently
SLOW = ("a Gaussian copula",)  # of those in float16: two functions of many equations


@pytest.mark.parametrize(
    ("name", "dtype", "scale"),
    [
        pytest.param(name, "float16", 256, marks=[pytest.mark.slow] * (name in SLOW))
        for name in (*LOSSES, *STICK_BREAKING)
    ]
    + [
        pytest.param(name, "bfloat16", 1, marks=[pytest.mark.slow] * (name not in FAST))
        for name in (*LOSSES, *STICK_BREAKING)
    ],
)
def test_gradients_of_probabilities_are_as_exact_as_by_hand(name, dtype, scale):
    written = LOSSES.get(name, stick_breaking)
    hand, got = errors(STICK_BREAKING.get(name, written), dtype, scale, written)
    assert got < 1.5 * hand


@pytest.mark.parametrize("scaled", [lambda h: h * 2e4, lambda h: h / 1e-4], ids=["multiplied", "divided"])
def test_logits_of_a_softmax_may_be_larger_than_float16_holds(scaled):
    def loss(h, y):
        return -jnp.mean(jnp.sum(jax.nn.softmax(y) * jax.nn.log_softmax(scaled(9 * h)), -1)) / 1e4

    hand, got = errors(loss, "float16", scale=256)
    assert got < 1.5 * hand
