"""A barrier of several values: a result has the facts of its own operand, not those of the other operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train import autocast, diagnostics, explain

barrier = lax.optimization_barrier
W, X = np.eye(64, dtype=np.float32), np.full((32, 64), 60, np.float32)


def wide_products(fn, *args):
    """The number of products in float32, and the number of all products."""
    products = explain(fn, "mixed_float16")(*args).products
    return sum(count for dtype, _, count in products if dtype != "float16"), sum(count for *_, count in products)


def test_what_no_dot_reads_stays_in_float32():
    def fn(w, x):
        y, squares = barrier((x @ w, jnp.sum(x**2, -1)))
        return y @ w, squares

    np.testing.assert_array_equal(autocast(fn, "mixed_float16")(W, X)[1], fn(W, X)[1])  # 230,400


@pytest.mark.parametrize("order", [1, -1])
def test_a_number_beyond_float16_is_that_of_one_value_alone(order):
    def fn(w, x):
        small, large = barrier((jnp.ones(64), jnp.full(64, 1e6))[::order])[::order]
        return (x @ w + large) @ w, (x @ w + small) @ w

    got, want = autocast(fn, "mixed_float16")(W, X), fn(W, X)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3)
    assert wide_products(fn, W, X) == (1, 4)


@pytest.mark.parametrize("beside", [lambda h, w: barrier((h, w)), lambda h, w: barrier((w, h))[::-1]])
def test_layers_behind_a_barrier_run_in_16_bits(beside):
    def loss(params, x):
        for w in params:
            h, w = beside(x, w)
            x = jnp.tanh(h @ w)
        return 1e4 * jnp.sum(x**2)

    rng = np.random.default_rng(0)
    params = [rng.standard_normal((64, 64)).astype(np.float32) / 8 for _ in range(2)]
    x = rng.standard_normal((32, 64)).astype(np.float32)
    wide, count = wide_products(jax.grad(loss), params, x)
    assert wide == 0 and count >= 5  # JAX 0.12 leaves out the gradient of `x`
    got, want = autocast(jax.grad(loss), "mixed_float16")(params, x), jax.grad(loss)(params, x)
    for mine, plain in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, plain, atol=0.01 * np.abs(plain).max())


@pytest.mark.parametrize("order", [1, -1])
def test_the_cross_terms_of_distances_are_found_behind_a_barrier(order):
    def squared_distances(x, y):
        values = jnp.sum(x * x, -1), jnp.sum(y * y, -1), x @ y.T
        _, (of_x, of_y, cross) = barrier((jnp.sin(x), values[::order]))
        of_x, of_y, cross = (of_x, of_y, cross)[::order]
        return of_x[:, None] + of_y - 2 * cross

    x = 50 + np.random.default_rng(0).standard_normal((2, 16, 64)).astype(np.float32)
    got, want = autocast(squared_distances, "mixed_float16")(*x), squared_distances(*x)
    assert np.max(np.abs(got - want)) < 0.5  # of 128; in float16 4


@pytest.mark.parametrize("order", [1, -1])
def test_a_table_is_one_behind_a_barrier(order):
    def fn(w, x):
        places = jnp.linspace(-15, 15, 64)
        p, values = barrier((jax.nn.softmax(x @ w), jnp.sign(places) * jnp.expm1(jnp.abs(places)))[::order])[::order]
        return p @ values

    x = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    np.testing.assert_allclose(autocast(fn, "mixed_float16")(W, x), fn(W, x), rtol=2e-2, atol=3e3)


def test_masked_keys_do_not_keep_what_they_sort_in_float32():
    def fn(w, x):
        scores = jnp.where(np.tri(32, 64, dtype=bool), jnp.tanh(x @ w), -1e9)
        _, h = lax.sort((scores, jnp.tanh(x @ w)), num_keys=1)
        return h @ w

    assert wide_products(fn, W, X) == (0, 3)


def test_an_overflow_behind_a_barrier_is_not_blamed_on_a_cast_beside():
    def fn(w, x):
        y, beside = barrier((x @ w, x.astype(jnp.float16)))
        return (y @ w) @ w, beside

    report = diagnostics.find_overflow(autocast(fn, "mixed_float16"))(np.full((64, 64), 3.0), X / 2)
    assert "itself" not in report.cure and "scope" in report.cure


def test_a_state_that_a_barrier_returns_beside_the_old_one_is_not_handed_on():
    def fn(w, x):
        def step(h, _):
            h, new = barrier((h, 0.9999 * h + 1e-4 * jnp.sin(h)))
            return new, jnp.sum(h @ w)

        return lax.scan(step, x @ w, None, 300)[0]

    x = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    np.testing.assert_allclose(autocast(fn, "mixed_float16")(W, x), fn(W, x), atol=4e-3)  # in float16 0.03
