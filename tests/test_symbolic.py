"""Symbolic dimensions: `jax.export` of mixed-precision gradients for every batch size, and every length, at once.

The exported function is called with new sizes, and must return what the same function returns under `jit`.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.export import export, symbolic_shape

import jmp_train as jmp

BATCH = ("b, 8", lambda n: (n, 8))
ROWS = ("b, t, 8", lambda n: (n, n + 2, 8))
IMAGES = ("b, 8, 8, 8", lambda n: (n, 8, 8, 8))
ANY_IMAGES = ("b, 2*h, 2*h, 8", lambda n: (n, 2 * n + 2, 2 * n + 2, 8))
SCALE = jmp.StaticLossScale(2.0**10)
W = np.random.default_rng(0).standard_normal((8, 8), np.float32) / 3


def layer_norm(w, x):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return jnp.mean(((x - mean) * lax.rsqrt(variance + 1e-6) @ w) ** 2)


def picked_logit(w, x):
    picked = jnp.take_along_axis(jax.nn.log_softmax(x @ w), jnp.argmax(x, -1)[..., None], -1)
    return -jnp.mean(picked)


def integer_labels(w, x):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, jnp.argmax(x, -1)).mean()


def label_of_any_number(w, x):
    """The axis along which labels select is symbolic."""
    scores = jax.nn.log_softmax(jnp.swapaxes(x @ w, -1, -2))
    return -jnp.mean(jnp.take_along_axis(scores, jnp.argmax(scores, -1)[..., None], -1, mode="clip"))


def layers(w, x):
    def layer(x, w):
        normed = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        return x + jax.nn.gelu(normed @ w) @ w.T, None

    return jnp.mean(lax.scan(layer, x, jnp.stack([w, w / 2]))[0] ** 2)


def attention_layers(w, x):
    """Which value of a layer is the smallest depends on the length."""

    def layer(x, w):
        normed = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        return x + jax.nn.softmax(normed @ w @ jnp.swapaxes(normed, -1, -2)) @ normed, None

    return jnp.mean(lax.scan(layer, x, jnp.stack([w, w / 2]))[0] ** 2)


def rematerialized_layers(w, x):
    layer = jax.checkpoint(lambda x, w: (x + jax.nn.gelu(x @ w) @ w.T, None))
    return jnp.mean(lax.scan(layer, x, jnp.stack([w, w / 2]))[0] ** 2)


def remat(w, x):
    return jnp.mean(jax.checkpoint(lambda x: jax.nn.softmax(jax.nn.gelu(x @ w) @ w))(x) ** 2)


def over_the_batch(w, x):
    """A scan of symbolic length, whose rows are examples."""
    return lax.scan(lambda total, row: (total + jnp.mean((row @ w) ** 2), None), jnp.float32(0), x)[0] / x.shape[0]


def as_often_as_rows(w, x):
    """A scan of symbolic length that reads nothing of its rows."""
    return jnp.mean(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), jnp.ones((2, 8)), x)[0] ** 2)


def recurrent(w, x):
    def cell(state, row):
        state = jnp.tanh(state @ w + row @ w.T)
        return state, state

    return jnp.mean(lax.scan(cell, jnp.zeros((x.shape[0], 8)), jnp.swapaxes(x, 0, 1))[1] ** 2)


def attention(w, x):
    scores = jnp.einsum("btd,bsd->bts", x @ w, x @ w.T) / 3
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)), scores, -1e9)
    return jnp.mean((jax.nn.softmax(scores) @ (x @ w)) ** 2)


def embedding(w, x):
    return jnp.mean((w[jnp.clip((3 * x).astype(jnp.int32), 0, 7)] @ w) ** 2)


def convolution(w, x):
    kernel = w[:2].reshape(1, 2, 1, 8).transpose(0, 1, 3, 2)
    numbers = ("NHWC", "HWIO", "NHWC")
    return jnp.mean(jax.nn.relu(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)) ** 2)


def pooled(window, strides, padding, pool=nn.max_pool):
    def loss(w, x):
        dims = x.ndim - 2
        rows = pool(jax.nn.relu(x @ w), (window,) * dims, (strides,) * dims, padding=padding)
        return jnp.mean((rows @ w) ** 2)

    return loss


def pooled_to_one(w, x):
    rows = x @ w
    return jnp.mean((nn.avg_pool(rows, rows.shape[1:-1]) @ w) ** 2)


def sum_in_16_bits(w, x):
    low = w.astype(jnp.bfloat16)
    total, _ = lax.scan(lambda c, r: (c + jnp.sum(r @ low), None), jnp.zeros((), jnp.bfloat16), x.astype(jnp.bfloat16))
    return total.astype(jnp.float32) / x.shape[0]


PROGRAMS = {
    "layer norm": (layer_norm, ROWS),
    "take_along_axis": (picked_logit, BATCH),
    "take_along_axis, rows": (picked_logit, ROWS),
    "integer labels": (integer_labels, BATCH),
    "a label of any number": (label_of_any_number, ROWS),
    "scan over layers": (layers, BATCH),
    "scan over layers, rows": (layers, ROWS),
    "scan over attention": (attention_layers, ROWS),
    "scan with remat": (rematerialized_layers, ROWS),
    "remat": (remat, BATCH),
    "scan over the batch": (over_the_batch, BATCH),
    "scan without rows": (as_often_as_rows, BATCH),
    "recurrent": (recurrent, ROWS),
    "attention": (attention, ROWS),
    "embedding": (embedding, ROWS),
    "convolution": (convolution, IMAGES),
    "convolution, any image": (convolution, ANY_IMAGES),
    "max-pool": (pooled(2, 2, "VALID"), IMAGES),
    "max-pool, any image": (pooled(2, 2, "VALID"), ANY_IMAGES),
    "overlapping max-pool, any image": (pooled(3, 2, "SAME"), ANY_IMAGES),
    "max-pool over any length": (pooled(2, 2, "VALID"), ROWS),  # perhaps shorter than a window
    "average pool, any image": (pooled(2, 2, "VALID", nn.avg_pool), ANY_IMAGES),
    "overlapping average pool, any image": (pooled(3, 2, "SAME", nn.avg_pool), ANY_IMAGES),
    "average of a whole image, any image": (pooled_to_one, ANY_IMAGES),
    "average pool over any length": (pooled(2, 2, "VALID", nn.avg_pool), ROWS),
    "sum in 16 bits": (sum_in_16_bits, BATCH),
}


def of_symbolic_shape(spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(symbolic_shape(spec), dtype)


def check(step, spec, params, examples):
    """Exports `step(params, batch)` for a batch of the shapes `spec`, and calls it with each of `examples`."""
    exported = export(jax.jit(step))(params, spec)
    for batch in examples:
        # One program of both, because each separate call would compile a program.
        both = jax.jit(lambda *args: (exported.call(*args), step(*args)))(params, batch)
        arrays = [np.abs(np.asarray(leaf)) for leaf in jax.tree.leaves(both[1]) if leaf.ndim]  # not the loss
        largest = max((array.max() for array in arrays), default=0.0)
        for got, want in zip(*map(jax.tree.leaves, both), strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            # The same program but for the order of sums, and what XLA makes of constant sizes. The gradient of a key's
            # bias, which changes no softmax, is nothing but roundings.
            atol = max(0.02 * np.max(np.abs(np.asarray(want))), 1e-3 * largest)
            np.testing.assert_allclose(got, want, rtol=0.02, atol=atol)


# Most programs would fail at export; only the others are called, because a call compiles both programs.
CALLED = {
    "layer norm", "scan over the batch",
    "recurrent", "convolution, any image", "overlapping max-pool, any image", "max-pool over any length",
    "overlapping average pool, any image",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "called"),
    [
        *((name, name in CALLED) for name in PROGRAMS),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in PROGRAMS if name not in CALLED),
    ],
)
def test_the_gradient_of_a_program(name, called):
    loss, (spec, shape) = PROGRAMS[name]
    policy = ["mixed_bfloat16", "mixed_float16"][list(PROGRAMS).index(name) % 2]  # a compilation each: half of them
    rng = np.random.default_rng(1)
    step = jax.jit(functools.partial(jmp.value_and_grad(loss, policy), loss_scale=SCALE))
    check(step, of_symbolic_shape(spec), W, [rng.standard_normal(shape(3), np.float32)] if called else [])


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.LayerNorm()(nn.gelu(nn.Dense(16)(x))))


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(2)(nn.Conv(8, (3, 3))(x)))
        x = nn.avg_pool(nn.max_pool(x, (2, 2), (2, 2)), (2, 2), (1, 1))
        return nn.Dense(4)(x.mean((1, 2)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 16)(tokens)
        mask = nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return nn.Dense(4)(nn.LayerNorm()(x)).mean(1)


MODELS: dict[str, Any] = {
    "MLP": (MLP(), "b, 8", [(3, 8), (17, 8)]),
    "CNN": (CNN(), "b, 8, 8, 2", [(3, 8, 8, 2), (6, 8, 8, 2)]),
    "transformer": (Transformer(), "b, t", [(3, 18), (2, 24)]),
}


def inputs_of(name):
    """Examples, and the abstract value of symbolic shape for them."""
    _, spec, shapes = MODELS[name]
    rng, dtype = np.random.default_rng(0), jnp.int32 if name == "transformer" else jnp.float32
    examples = [np.asarray(3 * rng.standard_normal(shape) + 4, dtype) for shape in shapes]
    return examples, of_symbolic_shape(spec, dtype)


def loss_of(model):
    def loss_fn(params, x):
        labels = jnp.arange(x.shape[0]) % 4
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), labels).mean()

    return loss_fn


@pytest.mark.slow  # that of the MLP is a part of the training step below
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_of_a_model(name):
    model, (examples, symbolic) = MODELS[name][0], inputs_of(name)
    params = jax.jit(model.init)(jax.random.key(0), examples[0])
    policy = "mixed_float16" if name == "CNN" else "mixed_bfloat16"
    step = jax.jit(functools.partial(jmp.value_and_grad(loss_of(model), policy), loss_scale=SCALE))
    check(step, symbolic, params, examples if name != "MLP" else examples[1:])


def test_a_training_step():
    model, tx, (examples, symbolic) = MLP(), jmp.with_loss_scale(optax.adam(0.1)), inputs_of("MLP")
    params, opt_state = jax.jit(lambda x: (params := model.init(jax.random.key(0), x), tx.init(params)))(examples[0])
    # jax.export does not know the types of an optimizer's state; its leaves are plain arrays.
    leaves, tree = jax.tree.flatten((params, opt_state))

    @jax.jit
    def step(leaves, x):
        params, opt_state = jax.tree.unflatten(tree, leaves)
        grad_fn = jmp.value_and_grad(loss_of(model), "mixed_float16")
        loss, grads = grad_fn(params, x, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, jax.tree.leaves((optax.apply_updates(params, updates), opt_state))

    check(step, symbolic, leaves, examples[:1])


@pytest.mark.parametrize(("policy", "autocast"), [("float32", True), ("bfloat16", False)])
def test_without_autocast(policy, autocast):
    step = jax.jit(jmp.value_and_grad(layer_norm, policy, autocast=autocast))
    check(step, of_symbolic_shape(ROWS[0]), W, [np.ones((3, 5, 8), np.float32)])


def test_gradients_of_symbolic_shape_are_checked():
    (b,) = symbolic_shape("b")
    grads = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((b, 8), (8, b), (b, 8))]
    finite = export(jax.jit(jmp.all_finite))(grads)
    for worst, expected in ((1.0, True), (jnp.inf, False)):
        assert finite.call([jnp.ones((3, 8)), jnp.ones((8, 3)), jnp.full((3, 8), worst)]) == expected


def test_dots_are_narrow_whatever_the_size():
    def dots(x):
        jaxpr = jax.make_jaxpr(jmp.autocast(jax.grad(layer_norm), "mixed_float16"))(W, x)
        found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
        return [(eqn.invars[0].aval.dtype, eqn.params["preferred_element_type"]) for eqn in found]

    symbolic = []
    export(jax.jit(lambda x: symbolic.extend(dots(x)) or x))(of_symbolic_shape("b, 5, 8"))
    assert symbolic == dots(jnp.ones((4, 5, 8))) and {dtype for dtype, _ in symbolic} == {np.dtype(np.float16)}


def test_squares_that_a_scan_of_symbolic_length_stacks_are_those_of_its_rows():
    """A cross term of distances is float32 for every batch."""

    def apart(x, y):
        rows, squares = lax.map(lambda r: (2 * r, jnp.sum((2 * r) ** 2, -1)), x)
        return squares[..., None] - 2 * jnp.einsum("bnd,md->bnm", rows, y)

    found = []

    def trace(x):
        found.extend(jax.make_jaxpr(jmp.autocast(apart, "mixed_float16"))(x, np.ones((16, 64), np.float32)).eqns)
        return x

    export(jax.jit(trace))(of_symbolic_shape("b, 8, 64"))
    (dot,) = (eqn for eqn in found if eqn.primitive.name == "dot_general")
    assert {var.aval.dtype for var in dot.invars} == {np.dtype(np.float32)}
