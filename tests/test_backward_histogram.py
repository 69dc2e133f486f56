"""`backward_histogram` against a backward pass written out in NumPy float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jmp_train as jmp
from jmp_train import diagnostics

X = np.linspace(0.5, 2.0, 16, dtype=np.float32).reshape(2, 8)
W = np.eye(8, dtype=np.float32) + 0.05


def exponents(*arrays):
    """(exponent, number) of the non-zero values, smallest first."""
    values = np.concatenate([np.ravel(array) for array in arrays])
    found, counts = np.unique(np.floor(np.log2(np.abs(values[values != 0]))), return_counts=True)
    return list(zip(found.astype(int).tolist(), counts.tolist(), strict=True))


def counted(histogram, path):
    row = histogram.values[histogram.paths.index(path)]
    return [(int(histogram.exponents[i]), int(row[i])) for i in np.flatnonzero(row)]


def loss(w, x):
    with jax.named_scope("Net"):
        return 1e-4 * jnp.sum(jnp.sin(x @ w))


def test_the_backward_pass_of_a_layer():
    found = diagnostics.backward_histogram(jax.grad(loss))(W, X)
    x, w = X.astype(np.float64), W.astype(np.float64)
    dh = 1e-4 * np.cos(x @ w)
    assert counted(found, "Net/mul") == exponents([1e-4], dh)
    assert counted(found, "Net/dot_general") == exponents(x.T @ dh)
    # The cosine itself belongs to the forward pass; what only rearranges is not counted.
    assert set(found.paths) == {"Net/mul", "Net/dot_general"}


def test_the_activation_gradients_are_there():
    found = diagnostics.backward_histogram(jax.jit(jax.value_and_grad(loss, (0, 1))))(W, X)
    x, w = X.astype(np.float64), W.astype(np.float64)
    dh = 1e-4 * np.cos(x @ w)
    assert counted(found, "Net/dot_general") == exponents(x.T @ dh, dh @ w.T)


def test_every_iteration_of_a_loop_counts():
    def looped(x):
        return jnp.sum(lax.scan(lambda c, _: (c * 0.25, None), x, None, length=5)[0])

    found = diagnostics.backward_histogram(jax.grad(looped))(X)
    assert counted(found, "mul") == [(-2 * i, X.size) for i in range(5, 0, -1)]


def test_values_on_another_mesh_than_the_callers():
    """Inside of `auto_axes` values are on a mesh of automatic axes."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = jax.sharding.PartitionSpec("a", None)
    with jax.set_mesh(mesh):
        sine: Any = jax.sharding.auto_axes(jnp.sin, out_sharding=spec)
        x = jax.device_put(np.ones((8, 8), np.float32), spec)
        found = diagnostics.backward_histogram(jax.grad(lambda x: jnp.sum(sine(x))))(x)
    assert counted(found, "mul") == [(-1, 64)]


def looked_up(w, sharding):
    """A lookup whose gradient JAX scatters on a mesh of automatic axes."""
    rows = w.at[np.arange(4)].get(out_sharding=sharding)
    return jnp.sum(jnp.sin(rows @ w))


def multiplied(w, sharding):
    return jnp.sum(jnp.sin((X if sharding is None else jax.reshard(X, sharding)) @ w))


@pytest.mark.parametrize("fn, spec", [(looked_up, P()), (multiplied, P(reduced=frozenset({"a"})))])
def test_an_explicit_mesh_counts_what_one_device_does(fn, spec):
    """The gradient of a "reduced" parameter is "unreduced": devices hold terms of a sum, and the sum is counted."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    want = diagnostics.backward_histogram(jax.grad(fn))(W, None)
    with jax.set_mesh(mesh):
        w = jax.device_put(W, jax.NamedSharding(mesh, spec))
        found = diagnostics.backward_histogram(jax.grad(lambda w: fn(w, P("a", None))))(w)
    for path in want.paths:
        assert counted(found, path) == counted(want, path)


def test_booleans_are_not_counted():
    relu = jax.custom_vjp(lambda x: jnp.maximum(x, 0))
    relu.defvjp(lambda x: (relu(x), x), lambda x, ct: (jnp.where(x > 0, ct, 0) * ct,))
    found = diagnostics.backward_histogram(jax.grad(lambda x: jnp.sum(relu(x))))(X)
    assert "mul" in found.paths and "gt" not in found.paths


def test_float64_beside_float32():
    with jax.enable_x64(True):

        def mixed(x, y):
            return jnp.sum(jnp.sin(x)) * jnp.float32(2) + jnp.sum(jnp.sin(y)) * 2

        found = diagnostics.backward_histogram(jax.grad(mixed, (0, 1)))(jnp.float32(X), jnp.float64(X))
        assert found.lowest == -1074
        assert counted(found, "mul") == exponents([2, 2], *[2 * np.cos(X.astype(np.float64))] * 2)


def test_zeros_and_the_loss_scale():
    def small(w):
        return 1e-8 * jnp.sum(jnp.sin(X @ w))

    unscaled = diagnostics.backward_histogram(jmp.grad(small, "mixed_float16"))(W, loss_scale=jmp.NoOpLossScale())
    scaled = diagnostics.backward_histogram(jmp.grad(small, "mixed_float16"))(
        W, loss_scale=jmp.StaticLossScale(2.0**15)
    )
    assert sum(unscaled.zeros) >= 2 * X.size > 0 == sum(scaled.zeros)
    # In float32 nothing is lost; what float16 would lose can be asked.
    wide = diagnostics.backward_histogram(jax.grad(small))(W)
    assert sum(wide.zeros) == 0
    assert diagnostics.underflow_report(wide, "float16").total.becomes_zero > 0.5
    assert diagnostics.underflow_report(wide, "float16", 2.0**20).total.becomes_zero == 0


def test_bad_input():
    with pytest.raises(TypeError) as error:
        diagnostics.backward_histogram("loss")  # type: ignore[arg-type]
    assert (
        str(error.value) == "`fn` must be callable, got 'loss'; pass a function that differentiates: jax.grad(loss_fn)."
    )
    with pytest.raises(ValueError) as value_error:
        diagnostics.backward_histogram(loss)(W, X)
    assert str(value_error.value) == (
        "`fn` has no backward pass; pass a function that differentiates: jax.grad(loss_fn)."
    )
    with pytest.raises(TypeError) as error:
        jax.jit(diagnostics.backward_histogram(jax.grad(loss)))(W, X)
    assert str(error.value) == (
        "the argument '0' is traced: backward_histogram needs numbers; call it outside jit, on arrays."
    )
