"""The gradient of a residual stream in float16: its program, compiled for CPUs, does not grow faster than the depth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_same_bits
from pass_tools import after, run

from jmp_train import autocast
from jmp_train._autocast.passes.rewrites import REWRITES

ROWS, WIDTH = 8, 16
WITHOUT = tuple(rewrite for rewrite in REWRITES if rewrite.name != "chained_casts")


def residual_network(norm_first):
    """`x + relu(norm(x) @ v) @ w` or `norm(x + relu(x @ v) @ w)` a layer, with a norm that runs in float32."""

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)

    def loss(params, x):
        for v, w in params:
            x = x + jax.nn.relu(norm(x) @ v) @ w if norm_first else norm(x + jax.nn.relu(x @ v) @ w)
        return jnp.mean(jnp.square(x @ params[0][0]))

    return loss


def arguments(layers):
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((layers, 2, WIDTH, WIDTH)).astype(np.float32) / 4
    return [tuple(layer) for layer in weights], rng.standard_normal((ROWS, WIDTH)).astype(np.float32)


def largest_fusion(loss, layers):
    """The number of instructions of the largest computation of the compiled gradient, without the entry computation."""
    gradient = jax.jit(
        autocast(jax.grad(loss), "mixed_float16"), compiler_options={"xla_backend_optimization_level": 0}
    )
    sizes, size = [], 0
    text = gradient.lower(*arguments(layers)).compile().as_text() or ""
    for line in text.splitlines():
        if line.startswith("%"):
            size = 0
        elif line.startswith("}"):
            sizes.append(size)
        size += " = " in line and not line.startswith("ENTRY")
    return max(sizes[:-1])


@pytest.mark.parametrize("norm_first", [True, False])
def test_no_fusion_grows_with_depth(norm_first):
    loss = residual_network(norm_first)
    assert largest_fusion(loss, 16) == largest_fusion(loss, 8)


@pytest.mark.parametrize("scale", [1, np.inf])
@pytest.mark.parametrize("norm_first", [True, False])
def test_no_bit_changes(norm_first, scale):
    loss, (params, x) = residual_network(norm_first), arguments(4)
    gradient = jax.grad(lambda params, x: loss(params, x) * scale)
    assert "chained" in [e.name for e in after("rewrite_lowered", gradient, params, x).equations]
    with jax.disable_jit():
        assert_same_bits(run(gradient, params, x), run(gradient, params, x, rewrites=WITHOUT))


@pytest.mark.parametrize(
    "without_nan",
    [lambda x: x.astype(jnp.int32).astype(jnp.float32), lambda x: jnp.where(jnp.isnan(x), 0.0, x)],
    ids=["integers", "replaced"],
)
def test_what_cannot_be_nan_between_is_no_chain(without_nan):
    """The cast of what follows must not become NaN again."""

    def fn(w, x, data):
        x = jnp.exp(x)
        y = jnp.roll(x, 1, 0) @ w
        return (without_nan(x * y) + y + data) @ w

    w, x, data = np.eye(WIDTH, dtype=np.float32), *np.ones((2, ROWS, WIDTH), np.float32)
    x[0, 0] = np.nan
    with jax.disable_jit():
        assert_same_bits(run(fn, w, x, data), run(fn, w, x, data, rewrites=WITHOUT))


def test_the_last_cast_of_a_chain_is_not_chained():
    """Only dots read it; on a GPU, a `select` before a convolution would prevent a fusion."""
    programs = {
        layers: after("rewrite_lowered", jax.grad(residual_network(True)), *arguments(layers)) for layers in (3, 4, 5)
    }
    names = {layers: [equation.name for equation in program.equations] for layers, program in programs.items()}
    assert [names[layers].count("chained") for layers in (3, 4, 5)] == [0, 1, 2]


def test_one_number_beside_an_array_is_no_chain():
    def fn(w, x):
        scale = jnp.exp(x[0, 0])
        y = jnp.full_like(x, scale) @ w
        return (scale * y + x) @ w

    w, x = np.eye(WIDTH, dtype=np.float32), np.ones((ROWS, WIDTH), np.float32)
    with jax.disable_jit():
        assert_same_bits(run(fn, w, x), run(fn, w, x, rewrites=WITHOUT))


def test_the_derivative_is_that_of_a_cast():
    loss, (params, x) = residual_network(norm_first=False), arguments(3)
    got, want = (
        jax.grad(lambda params, rewrites=rewrites: run(loss, params, x, rewrites=rewrites)[0])
        for rewrites in (REWRITES, WITHOUT)
    )
    assert " ne " in str(jax.make_jaxpr(got)(params))
    with jax.disable_jit():
        assert_same_bits(got(params), want(params))
