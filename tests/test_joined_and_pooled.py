"""The parts of DenseNets' blocks: means over windows are saved in 16 bits, concatenations are not saved."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from test_autocast import equations

from jmp_train import autocast

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 8, 8, 16)).astype(np.float32)
W = RNG.standard_normal((16, 16)).astype(np.float32) / 4
EITHER = pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])


def pooled(x, count: Any = 4.0):
    sums = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return sums / count


def normed(x):
    return (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-3)


def read_by(name, fn, *args, dtype="float16"):
    """The dtypes of the first operands of a primitive in the program."""
    return [dtypes[0].name for each, dtypes, _ in equations(autocast(fn, f"mixed_{dtype}"), *args) if each == name]


@EITHER
def test_a_mean_over_windows_is_summed_in_float32_and_kept_in_16_bits(dtype):
    def fn(w, x):
        means = pooled(x @ w)
        return means + jnp.flip(means, 0)

    assert read_by("add", fn, W, X, dtype=dtype) == 3 * ["float32"] + [dtype]  # the places of a window, then the flip
    exact = np.asarray(fn(W.astype(np.float64), X.astype(np.float64)))
    np.testing.assert_allclose(autocast(fn, f"mixed_{dtype}")(W, X), exact, atol=4 * float(jnp.finfo(dtype).eps))


def test_a_mean_fits_where_its_sum_does_not():
    x = np.full((1, 2, 2, 16), 3750.0, np.float32)
    np.testing.assert_array_equal(
        autocast(lambda w, x: pooled(x @ w) + 0.0, "mixed_float16")(jnp.ones((16, 1)), x), 60000
    )


STAY_WIDE = {
    "a sum divided by far more": lambda w, x: pooled(x @ w, 1e10) + 0.0,
    "a sum divided by a difference": lambda w, x: pooled(x @ w, jnp.full((8,), 8.0)[:1] - 7.5) + 0.0,
    "a sum divided by less": lambda w, x: pooled(x @ w, 2.0) + 0.0,
    "of data": lambda w, x: pooled(x) + 0.0,
    "of what was normalised": lambda w, x: pooled(normed(x @ w)) + 0.0,
    "that a logarithm reads": lambda w, x: jnp.log(pooled(x @ w) ** 2),
    "that an exponential reads": lambda w, x: (lambda m: jnp.exp(m) + jnp.flip(m, 0))(pooled(x @ w)),
    "that is asked for": lambda w, x: pooled(x @ w),
}


@pytest.mark.parametrize("name", STAY_WIDE)
def test_means_that_stay_in_float32(name):
    casts = [
        out.name
        for each, dtypes, out in equations(autocast(STAY_WIDE[name], "mixed_float16"), W, X)
        if each == "convert_element_type" and dtypes[0] == np.float32
    ]
    assert casts.count("float16") <= 2  # the weight and the data


def test_a_sum_divided_by_less_does_not_overflow():
    x = np.full((1, 2, 2, 16), 3750.0, np.float32)
    fn = STAY_WIDE["a sum divided by less"]
    np.testing.assert_array_equal(autocast(fn, "mixed_float16")(jnp.ones((16, 1)), x), 120_000)


BODIES = {
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "scan": lambda fn: lambda: lax.scan(lambda carry, _: (carry, fn()), 0, None, 2)[1][0],
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_may_have_no_operands(name):
    def fn(w):
        return w + BODIES[name](lambda: jnp.ones((16, 4)) @ jnp.ones((4, 16)))()

    np.testing.assert_allclose(autocast(fn, "mixed_float16")(W), W + 4, rtol=1e-3)


class Block(nn.Module):
    """Three dense layers behind a transition, as in DenseNet."""

    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.Conv(16, (1, 1), use_bias=False)(x), (2, 2), (2, 2))
        for _ in range(3):
            y = nn.Conv(8, (3, 3), use_bias=False)(nn.relu(nn.GroupNorm(4)(x)))
            x = jnp.concatenate([x, y], axis=-1)
        return nn.Dense(4)(nn.relu(nn.GroupNorm(4)(x)))


@EITHER
def test_joined_values_are_joined_again_and_not_kept(dtype):
    model = Block()
    params = jax.jit(model.init)(jax.random.key(2), X)

    def loss(params, x):
        return jnp.mean(jnp.asarray(model.apply(params, x)) ** 2)

    cast = autocast(jax.grad(loss), f"mixed_{dtype}")
    program = jax.make_jaxpr(cast)(params, X).jaxpr
    joined = [eqn for eqn in program.eqns if eqn.primitive.name == "concatenate"]
    assert len(joined) > 3 and {var.aval.dtype.name for eqn in joined for var in eqn.invars} == {dtype}
    # The gradient of the last relu, a selection, is kept: parts of it are gradients of the layers.
    selected = {eqn.outvars[0] for eqn in program.eqns if eqn.primitive.name == "select_n"}
    kept = [eqn.invars[0] for eqn in program.eqns if eqn.primitive.name == "optimization_barrier"]
    shapes = [var.aval.shape[-1:] for var in kept if var not in selected]
    assert shapes and not {(24,), (32,), (40,)} & {*shapes}
    if dtype == "float16":  # in bfloat16 some relus see another sign, which no gradient survives
        with jax.enable_x64(True):
            double = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, X))
            exact = jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(*double))
        for got, true in zip(jax.tree.leaves(jax.jit(cast)(params, X)), jax.tree.leaves(exact), strict=True):
            assert np.linalg.norm(got - true) < 2e-3 * np.linalg.norm(true)


def test_what_a_dot_reads_is_joined_once():
    def loss(w, x):
        return jnp.mean((jnp.concatenate([x @ w, x @ (2 * w)], axis=-1) @ jnp.concatenate([w, w])) ** 2)

    found = equations(autocast(jax.grad(loss), "mixed_float16"), W, X[0, 0])
    assert [name for name, _, _ in found].count("concatenate") == 2
