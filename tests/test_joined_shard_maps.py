"""A differentiated `shard_map` stays one for both passes, if the cotangent does not depend on its result."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery_tools import primitives_of
from comparisons import assert_close
from jax import lax

from jmp_train import autocast, explain, low_precision

P, DATA, WHOLE = jax.P, jax.P("data"), jax.P()
RNG = np.random.default_rng(0)
W = {name: RNG.normal(size=(16, 16)).astype(np.float32) / 4 for name in ("in", "out")}
X = RNG.normal(size=(64, 16)).astype(np.float32)


def mapped(fn, check, out=WHOLE, axes=("data",), weights: Any = WHOLE, **options):
    mesh = jax.make_mesh((8,) if len(axes) == 1 else (4, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    return jax.shard_map(fn, mesh=mesh, in_specs=(weights, DATA), out_specs=out, check_vma=check, **options)


def features(w, x):
    return jax.nn.gelu(jnp.tanh(x @ w["in"]) @ w["out"])


def local_loss(w, x):
    return lax.pmean(jnp.mean(features(w, x) ** 2), "data")


def layers_of(w, x):
    return lax.scan(lambda h, _: (jax.nn.gelu(h @ w["in"]) + h @ w["out"], None), x, None, length=3)[0]


def local_layers(w, x):
    return lax.pmean(jnp.mean(layers_of(w, x) ** 2), "data")


def tensor_parallel(w, x):
    h = lax.psum(jax.nn.gelu(x @ w["in"]) @ w["out"], "model")
    return lax.pmean(jnp.mean(h**2), "data")


def loss(check):
    return mapped(local_loss, check)


def layers(check):
    return mapped(local_layers, check)


def loss_over_one_of_two_axes(check):
    return mapped(local_loss, check, axes=("data", "model"), axis_names={"data"})


def split_weights(check):
    specs = {"in": P(None, "model"), "out": P("model")}
    return mapped(tensor_parallel, check, axes=("data", "model"), weights=specs)


def scaled_loss(check):
    return lambda w, x: 1024 * loss(check)(w, x)


def named_loss(check):
    return jax.named_scope("network")(loss(check))


def low_precision_loss(check):
    return low_precision(loss(check))


def two_losses(check):
    return lambda w, x: loss(check)(w, x) + layers(check)(w, x)


def rematerialized_loss(check):
    return jax.checkpoint(loss(check))


def loss_of_features(check):
    return lambda w, x: loss(check)(w, mapped(features, check, DATA)(w, x))


def square_of_features(check):
    return lambda w, x: jnp.mean(mapped(features, check, DATA)(w, x) ** 2)


def logarithm_of_loss(check):
    return lambda w, x: jnp.log(loss(check)(w, x))


# The same on one device.


def plain_loss(w, x):
    return jnp.mean(features(w, x) ** 2)


def plain_layers(w, x):
    return jnp.mean(layers_of(w, x) ** 2)


def plain_tensor_parallel(w, x):
    return jnp.mean((jax.nn.gelu(x @ w["in"]) @ w["out"]) ** 2)


def plain_scaled_loss(w, x):
    return 1024 * plain_loss(w, x)


def plain_two_losses(w, x):
    return plain_loss(w, x) + plain_layers(w, x)


def plain_loss_of_features(w, x):
    return plain_loss(w, features(w, x))


def plain_logarithm_of_loss(w, x):
    return jnp.log(plain_loss(w, x))


# Each value: the same without `shard_map`, and the number of `shard_map`s in the gradient before and after.
CASES = {
    **dict.fromkeys([loss, loss_over_one_of_two_axes, named_loss, low_precision_loss], (plain_loss, 2, 1)),
    layers: (plain_layers, 2, 1),
    split_weights: (plain_tensor_parallel, 2, 1),
    scaled_loss: (plain_scaled_loss, 2, 1),
    two_losses: (plain_two_losses, 4, 2),
    rematerialized_loss: (plain_loss, 3, 2),
    loss_of_features: (plain_loss_of_features, 4, 2),
    # The cotangent is computed from the result.
    square_of_features: (plain_loss, 2, 2),
    logarithm_of_loss: (plain_logarithm_of_loss, 2, 2),
}


@functools.cache
def on_one_device(plain):
    return jax.jit(jax.value_and_grad(plain))(W, X)


@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["check_vma", "no check"])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_gradients_of_shard_maps(make, check):
    gradient = jax.value_and_grad(make(check))
    ours = jax.jit(autocast(gradient, "mixed_float16"))
    counts = [primitives_of(program) for program in (jax.make_jaxpr(gradient)(W, X), ours.trace(W, X).jaxpr)]
    plain, *expected = CASES[make]
    assert [sum(n for (name, *_), n in count.items() if name == "shard_map") for count in counts] == expected
    assert_close(ours(W, X), on_one_device(plain))


def test_equations_keep_their_scopes_and_passes():
    gradient = jax.grad(named_loss(True))
    products = [op for op in explain(gradient, "mixed_float16")(W, X).operations if op.primitive == "dot_general"]
    assert len(products) == 5 and {op.scope for op in products} == {"network"}
    found = primitives_of(jax.make_jaxpr(autocast(gradient, "mixed_float16"))(W, X))
    assert found["dot_general", "float32"] == 2  # the gradients of the weights, which are summed over the devices


def test_a_second_derivative():
    def norm(fn):
        return lambda w, x: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jax.grad(fn)(w, x)))

    got = jax.jit(autocast(jax.grad(norm(loss(True))), "mixed_float16"))(W, X)
    assert_close(got, jax.jit(jax.grad(norm(plain_loss)))(W, X))


def test_what_has_effects_stays_where_it_is(capfd):
    def reported(w, x):
        jax.debug.callback(lambda y: print("loss"), x[0, 0])
        return local_loss(w, x)

    gradient = jax.jit(autocast(jax.grad(mapped(reported, False)), "mixed_float16"))
    found = primitives_of(gradient.trace(W, X).jaxpr)
    assert sum(n for (name, *_), n in found.items() if name == "shard_map") == 2
    gradient(W, X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("loss") == 8


def test_other_devices_and_layouts_stay_apart():
    """A value that is returned with one sharding and passed with another differs inside of the `shard_map`."""

    def halves(x):
        return mapped(lambda w, x: x * jnp.sum(w), True, DATA)(jnp.ones(3), x)

    def fn(x):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        return jax.shard_map(lambda y: jnp.sum(y**2), mesh=mesh, in_specs=WHOLE, out_specs=WHOLE)(halves(x))

    got, want = (jax.jit(each)(X) for each in (autocast(jax.grad(fn), "mixed_float16"), jax.grad(fn)))
    np.testing.assert_allclose(got, want, rtol=2e-3)


@pytest.mark.parametrize("checks, expected", [((True, True), 2), ((True, False), 3)])
def test_those_that_are_checked_in_another_way_stay_apart(checks, expected):
    def fn(x):
        for check in checks:
            x = mapped(lambda w, x: w * jnp.sin(x), check, DATA)(2.0, x)
        return jnp.sum(x)

    found = primitives_of(jax.make_jaxpr(autocast(jax.grad(fn), "mixed_float16"))(X))
    assert sum(n for (name, *_), n in found.items() if name == "shard_map") == expected
