"""Which sums over a batch read what is computed in their own kernel, in heads of a line or two."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pass_tools import after

LARGE, SMALL = 2**12, 2**11  # rows of 256 logits


def cross_entropy(logits):
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


def standardized(x):
    return (x - jnp.mean(x, -1, keepdims=True)) / (1 + jnp.std(x, -1, keepdims=True))


# A loss of the parameters (w, b, g, v) and of the inputs, how many, and how the gradient of `b` reads its operand.
HEADS: dict[str, tuple[Callable[..., Any], int, str]] = {
    "of a softmax": (lambda w, b, g, v, x: cross_entropy(x @ w + b), LARGE, "fused"),
    "of a softmax of fewer logits": (lambda w, b, g, v, x: cross_entropy(x @ w + b), SMALL, "stored"),
    "of a softmax of scaled logits": (lambda w, b, g, v, x: cross_entropy(jnp.tanh(x @ w + b) / 3), LARGE, "fused"),
    "of a softmax of reshaped logits": (
        lambda w, b, g, v, x: cross_entropy((x @ w + b).reshape(-1, 128)), LARGE, "fused"),
    "of a softmax of transposed logits": (
        lambda w, b, g, v, x: -jnp.mean(jax.nn.log_softmax((x @ w + b).T, 0)[0]), LARGE, "fused"),
    "of a softmax before another layer": (
        lambda w, b, g, v, x: cross_entropy(jax.nn.log_softmax(x @ w + b) @ v), LARGE, "stored"),
    "without a sum before": (lambda w, b, g, v, x: jnp.mean(jnp.tanh(x @ w + b)), LARGE, "stored"),
    "of the layer before": (lambda w, b, g, v, x: cross_entropy(jnp.tanh(x @ w + b) @ v), LARGE, "stored"),
    "before a norm, whose scale has its gradient summed first": (
        lambda w, b, g, v, x: cross_entropy(g * standardized(x @ w + b)), LARGE, "stored"),
    "before a norm without a scale": (
        lambda w, b, g, v, x: cross_entropy(standardized(x @ w + b)), LARGE, "fused"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_how_the_gradient_of_a_bias_reads_the_cotangent_of_the_logits(name):
    fn, batch, expected = HEADS[name]
    shapes = (8, 256), (256,), (256,), (256, 256), (batch, 8)
    *params, x = (np.zeros(shape, np.float32) for shape in shapes)
    program = after("assign_dtypes", jax.grad(lambda params, x: fn(*params, x)), params, x)
    sums = [e for e in program.equations if e.name == "reduce_sum" and e.node.params["axes"] == (0,)]
    bias = [e for e in sums if program.avals[e.operands[0]].shape == (batch, 256)][-1]
    assert [access.value for access in bias.accesses] == [expected]


def test_a_sum_that_the_program_returns_is_no_gradient():
    program = after("assign_dtypes", lambda w, x: jnp.sum(jax.nn.softmax(x @ w), 0), np.zeros((8, 256), np.float32),
                    np.zeros((LARGE, 8), np.float32))  # fmt: skip
    sums = [e for e in program.equations if e.name == "reduce_sum"]
    assert all([access.value for access in e.accesses] == ["stored"] for e in sums) and len(sums) == 2


def test_a_gradient_that_is_summed_again_is_not_returned():
    """Only a result of the program is written out and nothing else."""

    def fn(b, x):
        return jnp.tanh(jax.grad(lambda b: cross_entropy(x + b))(b))

    program = after("assign_dtypes", fn, np.zeros(256, np.float32), np.zeros((LARGE, 256), np.float32))
    bias = [e for e in program.equations if e.name == "reduce_sum" and e.node.params["axes"] == (0,)][-1]
    assert [access.value for access in bias.accesses] == ["stored"]
