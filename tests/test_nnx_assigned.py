"""NNX modules that assign to differentiated variables: a step starts from the assigned values, or changes nothing."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import assert_same_bits
from flax import nnx

import jmp_train as jmp
from jmp_train import flax_bridge, with_loss_scale
from jmp_train._jaxpr import flatten
from jmp_train._paths import leaf_paths
from jmp_train.flax_bridge import NNXTrainState, update_module
from jmp_train.flax_bridge._assigned import forwarded_arguments

X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
BAD = np.where(np.arange(8)[:, None] == 3, np.inf, X)
BATCHES = X, X + 1, X - 1
ADAM = optax.adam(1e-2)


def linear():
    return nnx.Linear(4, 3, rngs=nnx.Rngs(0))


def weight_norm():
    return nnx.WeightNorm(linear(), rngs=nnx.Rngs(1))


class Spectral(nnx.Module):
    def __init__(self):
        self.norm = nnx.SpectralNorm(linear(), rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.norm(x, update_stats=True)


def loss_fn(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def arrays(module):
    state = nnx.state(module)
    return dict(zip(leaf_paths(state), map(np.asarray, jax.tree.leaves(state)), strict=True))


def in_place(model, policy, batches):
    """The arrays of the module after in-place steps, one for each batch."""
    optimizer = nnx.Optimizer(model, with_loss_scale(ADAM, jmp.StaticLossScale(8.0)), wrt=nnx.Param)
    grad_fn = flax_bridge.value_and_grad(loss_fn, policy)

    @nnx.jit
    def train_step(model, optimizer, x):
        loss, grads, model_state = grad_fn(model, x, loss_scale=jmp.get_loss_scale(optimizer))
        update_module(model, optimizer, grads, model_state)
        return loss

    found = []
    for x in batches:
        train_step(model, optimizer, x)
        found.append(arrays(model))
    return found


def as_state(model, policy, batches):
    """The arrays of the module after the same steps with an immutable state."""
    state = NNXTrainState.create(model=model, tx=with_loss_scale(ADAM, jmp.StaticLossScale(8.0)))
    grad_fn = flax_bridge.value_and_grad(loss_fn, policy)

    @jax.jit
    def train_step(state, x):
        _, grads, model_state = grad_fn(state.model, x, loss_scale=jmp.get_loss_scale(state))
        return state.apply_gradients(grads=grads, model_state=model_state)

    found = []
    for x in batches:
        state = train_step(state, x)
        found.append(arrays(state.model))
    return found


@functools.cache
def by_flax(make):
    """The arrays of the module as Flax's own `nnx.value_and_grad` and `nnx.Optimizer` train it."""
    model = make()
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x):
        _, grads = nnx.value_and_grad(loss_fn)(model, x)
        optimizer.update(model, grads)

    for x in BATCHES:
        train_step(model, optimizer, x)
    return arrays(model)


@pytest.mark.parametrize(
    ("train", "policy", "tolerance"),
    [(in_place, "float32", 1e-6), (in_place, "mixed_float16", 3e-3), (as_state, "float32", 1e-6)],
)
@pytest.mark.parametrize("make", [weight_norm, Spectral])
def test_steps_are_those_of_flax(make, train, policy, tolerance):
    want = by_flax(make)
    *_, got = train(make(), policy, BATCHES)
    assert got.keys() == want.keys()
    for path in want:
        np.testing.assert_allclose(got[path], want[path], rtol=tolerance, atol=tolerance, err_msg=path)


@pytest.mark.parametrize("train", [in_place, as_state])
@pytest.mark.parametrize("make", [weight_norm, Spectral])
def test_a_skipped_step_keeps_nothing_that_was_assigned(make, train):
    before = arrays(make())
    skipped, good, skipped_later = train(make(), "mixed_float16", [BAD, X, BAD])
    assert_same_bits(before, skipped)
    assert_same_bits(good, skipped_later)
    assert any("kernel" in path and not np.array_equal(leaf, before[path]) for path, leaf in good.items())


def test_what_was_assigned_is_returned_with_the_other_variables():
    grad_fn = flax_bridge.value_and_grad(loss_fn, "mixed_bfloat16")
    graphdef, state = nnx.split(weight_norm())
    loss, grads, model_state = jax.jit(lambda state, x: grad_fn(nnx.merge(graphdef, state), x))(state, X)
    found = leaf_paths(model_state)
    assert "layer_instance/kernel" in found and "layer_instance/bias" not in found
    assert {"layer_instance/bias", "layer_instance/kernel"} <= {*leaf_paths(grads)} and jnp.isfinite(loss)
    assert model_state["layer_instance"]["kernel"][...].dtype == jnp.float32


def test_of_two_that_are_one_value_one_was_assigned():
    class Two(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(jnp.ones(2)), nnx.Param(jnp.full(2, 2.0))

    def tie(model):
        model.a[...] = model.b[...]
        return jnp.sum(model.a[...] * model.b[...])

    _, _, model_state = flax_bridge.value_and_grad(tie, "float32")(Two())
    assert leaf_paths(model_state) == ["a"]


def test_one_array_of_a_variable_that_holds_two():
    class Tree(nnx.Module):
        def __init__(self):
            self.w = nnx.Param({"a": jnp.ones(2), "b": jnp.full(2, 2.0)})

    def loss(model):
        model.w.set_value({**model.w.get_value(), "a": jnp.zeros(2)})
        return jnp.sum(model.w.get_value()["b"])

    _, _, model_state = flax_bridge.value_and_grad(loss, "float32")(Tree())
    assert leaf_paths(model_state) == ["w/a", "w/b"]


def test_rounded_values_are_refused():
    grad_fn = flax_bridge.value_and_grad(loss_fn, "mixed_float16", autocast=False)
    message = (
        "`loss_fn` assigned to 'layer_instance/kernel', of which autocast=False gives it a copy in float16, and "
        "updates would be lost in the rounding. Use autocast=True, or keep what a step computes in a variable of "
        "another kind, such as nnx.BatchStat."
    )
    graphdef, state = nnx.split(weight_norm())

    def model_state(grad_fn):
        return jax.eval_shape(
            lambda state: grad_fn(nnx.merge(graphdef, state), X, loss_scale=jmp.NoOpLossScale())[2], state
        )

    with pytest.raises(ValueError, match=rf"^{re.escape(message)}(\n|$)"):
        model_state(grad_fn)
    wide = jmp.get_policy("mixed_float16").replace(overrides={"kernel": "float32"})
    grad_fn = flax_bridge.value_and_grad(loss_fn, wide, autocast=False)
    assert "layer_instance/kernel" in leaf_paths(model_state(grad_fn))


def test_on_several_devices_it_is_the_mean():
    class Centred(nnx.Module):
        def __init__(self):
            self.centre = nnx.Param(jnp.zeros(4))

        def __call__(self, x):
            self.centre[...] = jnp.mean(x, 0)
            return x - self.centre[...]

    model = Centred()
    graphdef, state = nnx.split(model)
    grad_fn = flax_bridge.value_and_grad(loss_fn, "mixed_bfloat16", axis_name="data")

    def fn(state, x):
        return grad_fn(nnx.merge(graphdef, state), x)[2]

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec = jax.P()
    got = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(spec, jax.P("data")), out_specs=spec))(state, X)
    np.testing.assert_allclose(got["centre"][...], jnp.mean(X, 0), rtol=1e-5, atol=1e-6)


def scanned(model, x):
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    @nnx.remat
    def forward(layer, x):
        return nnx.relu(layer(x))

    return forward(model, x)


def called(call):
    return lambda model, x: call(lambda model, x: model(x))(model, x)


def by_custom_vjp(model, x):
    @nnx.custom_vjp
    def apply(model, x):
        return model(x)

    def forward(model, x):
        return apply(model, x), (model, x)

    def backward(residuals, cotangents):
        model, x = residuals
        _, cotangent = cotangents
        grads, dx = nnx.grad(lambda model, x: jnp.sum(model(x) * cotangent), argnums=(0, 1))(model, x)
        return grads, dx

    apply.defvjp(forward, backward)
    return apply(model, x)


def layers(axis=0):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=0, out_axes=axis)
    def make(rngs):
        return nnx.Linear(4, 4, rngs=rngs)

    return make(nnx.Rngs(0))


def scanned_along_axis_1(model, x):
    return nnx.scan(lambda layer, x: layer(x), in_axes=(1, nnx.Carry), out_axes=nnx.Carry)(model, x)


def on_a_mesh(model, x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    specs = (jax.P(), jax.P("d"))
    return nnx.shard_map(lambda model, x: model(x), mesh=mesh, in_specs=specs, out_specs=jax.P("d"))(model, x)


def repeated(model, x):
    def step(i, carry):
        model, x = carry
        return model, called(nnx.remat)(model, x) @ jnp.ones((3, 4))

    return nnx.fori_loop(0, 3, step, (model, x))[1]


def chosen(model, x):
    return nnx.cond(x[0, 0] > 0, called(nnx.remat), lambda model, x: -called(nnx.jit)(model, x), model, x)


NOT_ASSIGNED = {
    "jit": (linear, called(nnx.jit)),
    "remat": (linear, called(nnx.remat)),
    "remat of jit": (linear, called(lambda fn: nnx.remat(nnx.jit(fn)))),
    "remat inside a scan": (layers, scanned),
    "custom_vjp": (linear, by_custom_vjp),
    "a scan along another axis": (lambda: layers(axis=1), scanned_along_axis_1),
    "branches": (linear, chosen),
    "remat inside a loop": (linear, repeated),
    "shard_map": (linear, on_a_mesh),
}


@pytest.mark.parametrize("name", NOT_ASSIGNED)
def test_calls_that_give_back_every_variable_assign_none(name):
    make, apply = NOT_ASSIGNED[name]
    graphdef, state = nnx.split(make())

    def loss_of_model(model, x):
        return jnp.mean(apply(model, x) ** 2)

    @jax.jit
    def gradients(state, x):
        found = [nnx.grad(loss_of_model)(nnx.merge(graphdef, state), x)]
        for autocast in (True, False):
            grad_fn = flax_bridge.value_and_grad(loss_of_model, "mixed_bfloat16", autocast=autocast)
            _, grads, model_state = grad_fn(nnx.merge(graphdef, state), x)
            assert not leaf_paths(model_state)
            found.append(grads)
        return list(map(jax.tree.leaves, found))

    want, *found = gradients(state, X)
    for grads in found:
        for one, other in zip(grads, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("call", [nnx.jit, nnx.remat])
def test_an_assignment_inside_such_a_call(call):
    @call
    def double(model):
        model.kernel[...] = 2 * model.kernel[...]

    def doubled(model, x):
        double(model)
        return jnp.sum(model.kernel[...]) * jnp.sum(x)

    model = linear()
    _, _, model_state = flax_bridge.value_and_grad(doubled, "mixed_bfloat16")(model, X)
    assert leaf_paths(model_state) == ["kernel"]
    np.testing.assert_array_equal(model_state["kernel"][...], 2 * model.kernel[...])


def split(taken, put):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    specs = {"in_specs": (taken, jax.P()), "out_specs": (put, jax.P())}
    return jax.shard_map(lambda x, y: (x, y), mesh=mesh, check_vma=False, **specs)


@jax.checkpoint
def same(x):
    return x


FORWARDED = {
    "a carry": (lambda x, y: jax.lax.scan(lambda c, _: ((c[0], c[1] + c[0]), None), (x, y), None, 3)[0], [0, None]),
    "carries that change places": (
        lambda x, y: jax.lax.scan(lambda c, _: ((c[1], c[0]), None), (x, y), None, 3)[0], [None, None]),
    "rows": (lambda x, y: jax.lax.scan(lambda c, row: (c + row, row), y[0], x), [None, 0]),
    "rows of another": (lambda x, y: jax.lax.scan(lambda c, rows: (c, rows[1]), y[0], (x, y))[1], [1]),
    "rows of what is computed": (lambda x, y: jax.lax.scan(lambda c, row: (c, c * row), y[0], x)[1], [None]),
    "a constant stacked": (lambda x, y: jax.lax.scan(lambda c, _: (c, y), x, None, 3)[1], [None]),
    "rows of another, by a remat": (
        lambda x, y: jax.lax.scan(lambda c, rows: (c + rows[0], same(rows[1])), y[0], (x, y))[1], [1]),
    "a constant stacked, by a remat": (
        lambda x, y: jax.lax.scan(lambda c, _: (c + 1, same(y)), x, None, 3)[1], [None]),
    "a while": (
        lambda x, y: jax.lax.while_loop(lambda c: c[0][0] < 3, lambda c: (c[0] + 1, c[1]), (x, y)), [None, 1]),
    "a while whose carries change places": (
        lambda x, y: jax.lax.while_loop(lambda c: c[0][0] < 3, lambda c: (c[1], c[0]), (x, y)), [None, None]),
    "branches": (lambda x, y: jax.lax.cond(x[0] > 0, lambda a, b: (b, a), lambda a, b: (b, b), x, y), [1, None]),
    "a remat": (lambda x, y: jax.checkpoint(lambda a, b: (b, a + b))(x, y), [1, None]),
    "a remat of what is computed": (lambda x, y: jax.checkpoint(lambda a, b: (b, a))(x + 1, y), [1, None]),
    "a custom_jvp": (lambda x, y: (jax.nn.relu(x), y), [None, 1]),
    "a shard_map": (lambda x, y: split(jax.P(), jax.P())(x, y), [0, 1]),
    "a shard_map that gathers": (lambda x, y: split(jax.P("d"), jax.P())(x, y), [None, 1]),
    "transposed": (lambda x, y: (x[None].T[:, 0], y), [None, 1]),
    "nothing": (lambda x, y: (x + y, jnp.ones(3)), [None, None]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARDED)
def test_which_arguments_a_program_forwards(name):
    fn, expected = FORWARDED[name]
    assert forwarded_arguments(flatten(jax.make_jaxpr(fn)(np.ones(3, np.float32), np.ones(3, np.float32)))) == expected


def test_a_transposed_argument_is_another_value():
    program = jax.make_jaxpr(lambda x: (x.T, jnp.transpose(x.T), x.T + x))(np.ones((3, 3), np.float32))
    assert forwarded_arguments(flatten(program)) == [None, 0, None]
