"""Which sums of two selections are written as one: the gradients of leaky relus."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pass_tools import after

from jmp_train import DEFAULT_RULES
from jmp_train._autocast.passes.rewrites.leaky_relus import scale_where_false, scale_where_true

RNG = np.random.default_rng(0)
W, X = (RNG.normal(size=shape).astype(np.float32) for shape in ((8, 8), (4, 8)))
REWRITES = {"scale_where_false", "scale_where_true"}


def normed(h, axis=0):
    centred = h - h.mean(axis, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, axis, keepdims=True) + 1e-6)


def behind_norm(activation, axis=0):
    """The gradient of an activation of a norm with a bias, as it stands between two dots."""
    return jax.grad(lambda w, x: jnp.sum(activation(normed(x @ w, axis) + w[0]) @ w.T))


def between_dots(activation):
    return jax.grad(lambda w, x: jnp.sum(activation(x @ w + w[0]) @ w.T))


def rewritten(program):
    """The rewrites of the sums that are written as one selection."""
    names = [getattr(equation.rewrite, "__name__", None) for equation in program.equations]
    return [name for name in names if name in REWRITES]


def of_mask(activation):
    return lambda h: activation(h, h >= 0)


# Each value: the activation after the norm, and the rewrites in its gradient.
ACTIVATIONS = {
    "jax.nn's": (jax.nn.leaky_relu, ["scale_where_false"]),
    "another slope": (lambda h: jax.nn.leaky_relu(h, 0.2), ["scale_where_false"]),
    "the other way round": (lambda h: jnp.where(h < 0, 0.2 * h, h), ["scale_where_true"]),
    "the slope behind": (lambda h: jnp.where(h >= 0, h, h * 0.2), ["scale_where_false"]),
    "beside zeros": (lambda h: jax.nn.leaky_relu(h) + jnp.where(h >= 1, 0.0, 0.0), ["scale_where_false"]),
    "an infinite slope": (lambda h: jnp.where(h >= 0, h, jnp.inf * h), []),
    "an array of slopes": (lambda h: jnp.where(h >= 0, h, W[0] * h), []),
    "a sum": (of_mask(lambda h, m: jnp.where(m, 0.0, 0.2 * h) + jnp.where(m, h, 0.0)), ["scale_where_false"]),
    "another sum": (of_mask(lambda h, m: jnp.where(m, h, 0.0) + jnp.where(m, 0.0, 0.2 * h)), ["scale_where_false"]),
    "one half, twice": (of_mask(lambda h, m: jnp.where(m, 0.2 * h, 0.0) + jnp.where(m, h, 0.0)), []),
    "two masks": (lambda h: jnp.where(h >= 0.5, 0.0, 0.2 * h) + jnp.where(h >= 0, h, 0.0), []),
    "another function": (lambda h: jnp.where(h >= 0, h, 0.1 * jnp.sin(h)), []),
    "a relu": (jax.nn.relu, []),
    "an elu": (jax.nn.elu, []),
    "both scaled": (lambda h: jnp.where(h >= 0, 0.5 * h, 0.1 * h), []),
    "other numbers than zero": (lambda h: other_than_zero(h), []),
}  # fmt: skip


@jax.custom_vjp
def other_than_zero(h):
    return jax.nn.leaky_relu(h)


def _backward(h, g):
    mask = h >= 0
    return (jnp.where(mask, g, 1.0) + 0.1 * jnp.where(mask, 1.0, g),)


other_than_zero.defvjp(lambda h: (jax.nn.leaky_relu(h), h), _backward)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_which_gradients_are_one_selection(name):
    activation, expected = ACTIVATIONS[name]
    assert rewritten(after("rewrite_planned", behind_norm(activation), W, X)) == expected


def test_the_mask_may_be_an_argument():
    def loss(w, x, mask):
        h = normed(x @ w) + w[0]
        return jnp.sum(jnp.where(mask, h, 0.2 * h) @ w.T)

    program = after("rewrite_planned", jax.grad(loss), W, X, X > 0)
    assert rewritten(program) == ["scale_where_false"]


def test_a_gradient_that_no_sum_reads_as_it_is_stays_a_sum():
    gradient = jax.grad(lambda w, x: jnp.sum(jax.nn.leaky_relu(normed(x @ w)) @ w.T))
    assert rewritten(after("rewrite_planned", gradient, W, X)) == []


def test_a_gradient_that_a_dot_reads_stays_a_sum():
    assert rewritten(after("rewrite_planned", between_dots(jax.nn.leaky_relu), W, X)) == []


def test_a_gradient_of_float32_numbers_stays_a_sum():
    rules = DEFAULT_RULES.with_scopes({".": "float32"})
    assert rewritten(after("rewrite_planned", behind_norm(jax.nn.leaky_relu), W, X, rules=rules)) == []


@pytest.mark.parametrize(("axis", "again"), [(0, False), (-1, True)])
def test_the_mask_is_computed_again_behind_a_norm_over_rows_only(axis, again):
    program = after("rewrite_planned", behind_norm(jax.nn.leaky_relu, axis), W, X)
    (selection,) = (e for e in program.equations if getattr(e.rewrite, "__name__", None) in REWRITES)
    mask, cotangent, _ = selection.uses
    assert mask.residual == again and mask.dtype is None
    assert cotangent.dtype == np.float32 and program.precision(cotangent.value).value == "low"


def test_the_mask_is_read_as_it_is_with_float32_residuals():
    rules = DEFAULT_RULES.with_residuals("float32")
    program = after("rewrite_planned", behind_norm(jax.nn.leaky_relu, -1), W, X, rules=rules)
    (selection,) = (e for e in program.equations if getattr(e.rewrite, "__name__", None) in REWRITES)
    assert not selection.uses[0].residual


@pytest.mark.parametrize("make", [scale_where_false, scale_where_true])
def test_the_selection_is_the_sum(make):
    mask = RNG.random(12) < 0.5
    cotangent = np.array(
        [0.0, -0.0, 1.0, -3e-8, 65504.0, -2.0, np.inf, -np.inf, np.nan, 1.5, 2.0**-24, 7.0], np.float32
    )
    cotangent, slope = cotangent.astype(np.float16), np.float32(0.2)
    where = mask if make is scale_where_true else ~mask
    want = np.where(where, 0, cotangent).astype(np.float32) + slope * np.where(where, cotangent, 0)
    (got,) = make(None, [mask, jnp.asarray(cotangent, jnp.float32), slope])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
