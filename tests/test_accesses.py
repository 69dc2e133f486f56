"""Which sums over a batch have their operand computed in their own kernel, for heads of a line or two."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pass_tools import after

from jmp_train import autocast

LARGE, SMALL = 2**12, 2**11  # numbers of rows of 256 logits


def cross_entropy(logits):
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


def standardized(x):
    return (x - jnp.mean(x, -1, keepdims=True)) / (1 + jnp.std(x, -1, keepdims=True))


# Each value: a loss of parameters (w, b, g, v) and rows of inputs, their number, the access of the gradient of `b`.
HEADS: dict[str, tuple[Callable[..., Any], int, str]] = {
    "of a softmax": (lambda w, b, g, v, x: cross_entropy(x @ w + b), LARGE, "summed"),
    "of a softmax of fewer logits": (lambda w, b, g, v, x: cross_entropy(x @ w + b), SMALL, "stored"),
    "of a softmax of scaled logits": (lambda w, b, g, v, x: cross_entropy(jnp.tanh(x @ w + b) / 3), LARGE, "summed"),
    "of a softmax of reshaped logits": (
        lambda w, b, g, v, x: cross_entropy((x @ w + b).reshape(-1, 128)), LARGE, "summed"),
    "of a softmax of transposed logits": (
        lambda w, b, g, v, x: -jnp.mean(jax.nn.log_softmax((x @ w + b).T, 0)[0]), LARGE, "summed"),
    "of a softmax before another layer": (
        lambda w, b, g, v, x: cross_entropy(jax.nn.log_softmax(x @ w + b) @ v), LARGE, "stored"),
    "of a softmax of averaged logits": (
        lambda w, b, g, v, x: cross_entropy(jnp.mean(x @ w + b, 0, keepdims=True)), LARGE, "fused"),
    "without a sum before": (lambda w, b, g, v, x: jnp.mean(jnp.tanh(x @ w + b)), LARGE, "stored"),
    "of the layer before": (lambda w, b, g, v, x: cross_entropy(jnp.tanh(x @ w + b) @ v), LARGE, "stored"),
    "before a norm, whose scale has its gradient summed first": (
        lambda w, b, g, v, x: cross_entropy(g * standardized(x @ w + b)), LARGE, "stored"),
    "before a norm without a scale": (
        lambda w, b, g, v, x: cross_entropy(standardized(x @ w + b)), LARGE, "summed"),
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


def test_the_gradients_of_biases_of_several_heads_read_float32():
    heads = [np.zeros(shape, np.float32) for shape in ((2, 8, 256), (2, 256))]
    gradient = jax.grad(lambda heads, x: jnp.sum(jax.vmap(lambda head: cross_entropy(x @ head[0] + head[1]))(heads)))
    program = after("assign_dtypes", gradient, heads, np.zeros((LARGE, 8), np.float32))
    producers = {number: equation for equation in program.equations for number in equation.results}
    bias = producers[program.outputs[1]]
    while program.avals[bias.operands[0]].shape != (2, LARGE, 256):  # moved since
        bias = producers[bias.operands[0]]
    assert [access.value for access in bias.accesses] == ["fused"]


def test_the_numbers_that_the_gradient_of_a_bias_sums_are_behind_no_barrier():
    """XLA adds them up in the kernel that computes them: a product with a one keeps them apart from what dots read."""
    w, b, x = np.zeros((8, 256), np.float32), np.zeros(256, np.float32), np.zeros((LARGE, 8), np.float32)
    program = after("insert_casts", jax.grad(lambda params, x: cross_entropy(x @ params[0] + params[1])), (w, b), x)
    producers = {number: equation for equation in program.equations for number in equation.results}
    sums = [e for e in program.equations if e.name == "reduce_sum" and e.node.params["axes"] == (0,)]
    (total,) = (e for e in sums if program.avals[e.operands[0]].shape == (LARGE, 256))
    saved = producers[producers[total.operands[0]].operands[0]]
    dots = [equation for equation in program.equations if equation.name == "dot_general"]
    assert saved.params == {"by_product": True} and saved.operands[0] in dots[-1].operands


def test_the_gradient_of_a_bias_of_averaged_logits_is_that_of_float32():
    """The cotangent that the mean gives each logit is stored once, in float32, although dots read it in 16 bits."""
    rng = np.random.default_rng(3)
    params = [rng.standard_normal(shape).astype(np.float32) / 6 for shape in ((32, 32), (32, 10), (10,))]
    x = rng.standard_normal((60, 6, 32)).astype(np.float32)

    def loss(params, x):
        v, w, b = params
        logits = jnp.mean(jnp.tanh(x @ v) @ w + b, 1)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(60), jnp.arange(60) % 10])

    narrow, wide = (
        jax.jit(gradient)(params, x)[2] for gradient in (autocast(jax.grad(loss), "mixed_bfloat16"), jax.grad(loss))
    )
    assert jnp.linalg.norm(narrow - wide) <= 4e-3 * jnp.linalg.norm(wide)


@jax.custom_vjp
def layer(w, b, x):
    return x @ w + b


def layer_backward(residuals, g):
    w, x = residuals
    return x.T @ g, jnp.sum(g, 0), g @ w.T


layer.defvjp(lambda w, b, x: (layer(w, b, x), (w, x)), layer_backward)


# Each value: the number of outputs of a layer of 256 inputs, the layer, and the access of its bias's gradient.
FEW_OUTPUTS: dict[str, tuple[int, Callable[..., Any], str]] = {
    "four": (4, lambda w, b, x: x @ w + b, "fused"),
    "five": (5, lambda w, b, x: x @ w + b, "stored"),
    "four, in rows": (4, lambda w, b, x: w.T @ x.T + b[:, None], "fused"),
    "five, in rows": (5, lambda w, b, x: w.T @ x.T + b[:, None], "stored"),
    "two of each position": (
        2, lambda w, b, x: jax.lax.conv(x.reshape(8, 256, 8), w.reshape(2, 256, 1), (1,), "VALID") + b[:, None],
        "fused"),
    "one of each expert": (
        1, lambda w, b, x: jax.lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([32, 32])) + b, "fused"),
    "four, of a rule of its own": (4, lambda w, b, x: layer(w, b, jnp.sin(x)), "fused"),
    "many, of two rows and a rule of its own": (256, lambda w, b, x: layer(w, b, jnp.tanh(x[:2] @ w)), "stored"),
    "many, of two rows": (256, lambda w, b, x: jnp.tanh(x[:2] @ w) @ w + b, "stored"),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW_OUTPUTS)
def test_how_the_gradient_of_a_bias_reads_the_cotangent_of_few_outputs(name):
    outputs, fn, expected = FEW_OUTPUTS[name]
    params, x = [np.zeros(shape, np.float32) for shape in ((256, outputs), (outputs,))], np.zeros((64, 256), np.float32)
    program = after("assign_dtypes", jax.grad(lambda params, x: jnp.mean(fn(*params, x) ** 2)), params, x)
    producers = {number: equation for equation in program.equations for number in equation.results}
    bias = producers[program.outputs[1]]
    while not bias.entry.has_own_kernel:  # moved since
        bias = producers[bias.operands[0]]
    assert [access.value for access in bias.accesses] == [expected]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("returns", ["the gradient", "a step"])
def test_the_gradient_of_a_values_bias_is_a_sum_of_float32_numbers(returns, dtype):
    """The cotangents of a state's value and of its successor's cancel up to the discount."""
    rng = np.random.default_rng(3)
    params = {"w": rng.standard_normal((256, 1)).astype(np.float32) / 16, "b": np.ones(1, np.float32)}
    states, rewards = (rng.standard_normal((64, 16, n)).astype(np.float32) for n in (256, 1))

    def loss(params, states):
        values = states @ params["w"] + params["b"]
        return jnp.mean((rewards[:-1] + 0.99 * values[1:] - values[:-1]) ** 2)

    def fn(params, states):
        grads = jax.grad(loss)(params, states)
        return grads if returns == "the gradient" else jax.tree.map(jnp.subtract, params, grads)

    got = jax.jit(autocast(fn, f"mixed_{dtype}"))(params, states)["b"]
    got = got if returns == "the gradient" else params["b"] - got
    assert abs(got / jax.grad(loss)(params, states)["b"] - 1) <= 5e-3


def window_sums(x):
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 1), (2, 1), "VALID")


def normalized(x, axis):
    return (x - jnp.mean(x, axis, keepdims=True)) / jnp.sqrt(1 + jnp.var(x, axis, keepdims=True))


# Each value: a loss of parameters (w, b, g, v) and inputs, rows and columns, the access of the gradient of `b`.
NORMS: dict[str, tuple[Callable[..., Any], tuple[int, int], str]] = {
    "without a norm, before sums of windows and another layer": (
        lambda w, b, g, v, x: window_sums(jnp.tanh(x @ w + b)) @ v + g,
        (2**14, 256),
        "stored",
    ),
    "over the batch": (lambda w, b, g, v, x: g * normalized(x @ w + b, 0), (2**14, 256), "fused"),
    "over the batch, of fewer numbers": (lambda w, b, g, v, x: g * normalized(x @ w + b, 0), (2**13, 256), "stored"),
    "over fewer rows": (lambda w, b, g, v, x: g * normalized(x @ w + b, 0), (2**13, 2**9), "fused"),
    "over a smaller batch": (lambda w, b, g, v, x: g * normalized(x @ w + b, 0), (2**12, 2**11), "stored"),
    "over the batch, behind an activation": (
        lambda w, b, g, v, x: g * normalized(jax.nn.relu(x @ w + b), 0), (2**14, 256), "fused"),
    "over the batch, behind a tanh, which is stored": (
        lambda w, b, g, v, x: g * normalized(jnp.tanh(x @ w + b), 0), (2**14, 256), "fused"),
    "over the batch, behind an expensive activation": (
        lambda w, b, g, v, x: g * normalized(jax.nn.gelu(x @ w + b), 0), (2**14, 256), "stored"),
    "over the batch, behind an activation with an expensive derivative": (
        lambda w, b, g, v, x: g * normalized(jax.nn.sigmoid(x @ w + b), 0), (2**14, 256), "stored"),
    "over the batch, before an expensive activation": (
        lambda w, b, g, v, x: jax.nn.gelu(g * normalized(x @ w + b, 0)), (2**14, 256), "fused"),
    "over the batch, of a stream behind an expensive activation": (
        lambda w, b, g, v, x: g * normalized((h := jax.nn.silu(x @ w)) + h @ v + b, 0), (2**14, 256), "fused"),
    "over the batch, of a running sum of an expensive activation": (
        lambda w, b, g, v, x: g * normalized(jnp.cumsum(jax.nn.silu(x @ w), 1) + b, 0), (2**14, 256), "fused"),
    "over the batch, of a row times an expensive function of parameters": (
        lambda w, b, g, v, x: g * normalized((x @ w + b) * jnp.exp(g), 0), (2**14, 256), "fused"),
    "over the batch, before a layer": (lambda w, b, g, v, x: normalized(x @ w + b, 0) @ v, (2**14, 256), "fused"),
    "over groups of rows": (
        lambda w, b, g, v, x: g * normalized((x @ w + b).reshape(4, -1, 256), 1).reshape(-1, 256), (2**14, 256),
        "fused"),
    "over rows": (lambda w, b, g, v, x: normalized(x @ w + b, 1), (2**14, 256), "fused"),
    "over rows, then scaled by a parameter": (
        lambda w, b, g, v, x: g * normalized(x @ w + b, 1), (2**14, 256), "stored"),
    "over the batch, then over rows and scaled": (
        lambda w, b, g, v, x: g * normalized(normalized(x @ w + b, 0), 1), (2**14, 256), "stored"),
    "over the batch, before sums of windows": (
        lambda w, b, g, v, x: window_sums(g * normalized(x @ w + b, 0)),
        (2**14, 256), "fused"),
    "of the layer before": (lambda w, b, g, v, x: normalized((x @ w + b) @ v, 0), (2**14, 256), "stored"),
    "without a norm": (lambda w, b, g, v, x: g * jnp.tanh(x @ w + b), (2**14, 256), "stored"),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_how_the_gradient_of_a_bias_reads_the_cotangent_of_a_norm(name):
    fn, (rows, columns), expected = NORMS[name]
    shapes = (8, columns), (columns,), (columns,), (columns, columns), (rows, 8)
    *params, x = (np.zeros(shape, np.float32) for shape in shapes)

    def loss(params, x):
        return jnp.mean((fn(*params, x) @ params[-1]) ** 2)

    program = after("assign_dtypes", jax.grad(loss), params, x)
    producers = {number: equation for equation in program.equations for number in equation.results}
    bias = producers[program.outputs[1]]
    while program.avals[bias.operands[0]].shape != (rows, columns):  # moved since
        bias = producers[bias.operands[0]]
    assert [access.value for access in bias.accesses] == [expected]


def test_a_sum_that_the_program_returns_is_no_gradient():
    program = after("assign_dtypes", lambda w, x: jnp.sum(jax.nn.softmax(x @ w), 0), np.zeros((8, 256), np.float32),
                    np.zeros((LARGE, 8), np.float32))  # fmt: skip
    sums = [e for e in program.equations if e.name == "reduce_sum"]
    assert all([access.value for access in e.accesses] == ["stored"] for e in sums) and len(sums) == 2


def test_a_sum_of_few_outputs_in_a_forward_pass_reads_what_is_stored():
    def fn(w, x):
        h = jnp.exp(x @ w)
        return jnp.sum(h, 0), jax.lax.dot_general(h, x, (((0,), (0,)), ((), ())))

    program = after("assign_dtypes", fn, np.zeros((256, 4), np.float32), np.zeros((64, 256), np.float32))
    (total,) = (e for e in program.equations if e.name == "reduce_sum")
    assert [access.value for access in total.accesses] == ["stored"]


def test_a_gradient_that_is_summed_again_is_not_returned():
    """Only a gradient that is a result of the program counts as returned."""

    def fn(b, x):
        return jnp.tanh(jax.grad(lambda b: cross_entropy(x + b))(b))

    program = after("assign_dtypes", fn, np.zeros(256, np.float32), np.zeros((LARGE, 256), np.float32))
    bias = [e for e in program.equations if e.entry.has_own_kernel and e.node.params["axes"] == (0,)][-1]
    assert [access.value for access in bias.accesses] == ["stored"]
