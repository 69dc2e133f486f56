"""Flax on several devices: statistics are equal, an infinity on one device does not change them, states stay equal."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import assert_same_bits, same_bits
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_train as jmp
from jmp_train import flax_bridge
from jmp_train.flax_bridge import NNXTrainState, TrainState

DEVICES, WHOLE, DATA = 4, PartitionSpec(), PartitionSpec("data")
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32) + np.arange(16, dtype=np.float32)[:, None]
SPOILED = np.where(np.arange(16)[:, None] == 15, np.float32(np.inf), X)
GRADIENTS_IN_16 = jmp.get_policy("mixed_float16").replace(reduce_dtype="float16")
ROUTES = ["shard_map", "shard_map_unchecked", "pmap"]


def parallel(step, route="shard_map") -> Any:
    """The step over four devices, its state replicated: it returns the states of all devices."""
    if route == "pmap":
        mapped = jax.pmap(step, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:DEVICES])
        return lambda state, x: mapped(state, x.reshape(DEVICES, -1, 3))
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
    check = route == "shard_map"
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(WHOLE, DATA), out_specs=WHOLE, check_vma=check)
    return jax.jit(mapped)


def agreed(tree, route):
    """The tree of one device, after asserting that all others are equal."""
    for leaf in jax.tree.leaves(tree):
        numbers = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        parts = [np.asarray(shard.data) for shard in numbers.addressable_shards]
        assert len(parts) == DEVICES and all(same_bits(part, parts[0]) for part in parts)
    return jax.tree.map(lambda leaf: leaf[0], tree) if route == "pmap" else tree


def optimizer():
    return jmp.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(1024.0), axis_name="data")


class Standardised(nnx.Module):
    """Statistics as BatchNorm keeps them, a count, a frozen weight and a key."""

    def __init__(self):
        self.w = nnx.Param(jnp.full(3, 0.5))
        self.frozen = nnx.Variable(jnp.full(7, 2.0))
        self.mean = nnx.BatchStat(jnp.zeros(3))
        self.calls = nnx.BatchStat(jnp.int32(0))
        self.rngs = nnx.Rngs(0)

    def __call__(self, x):
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * x.mean(0)
        self.calls[...] += 1
        noise = jax.random.uniform(self.rngs(), (3,))
        return (x - x.mean(0)) * self.w * self.frozen[0] + noise


@pytest.mark.parametrize("route", ["shard_map", *(pytest.param(r, marks=pytest.mark.slow) for r in ROUTES[1:])])
def test_what_a_module_changes_in_itself_agrees(route):
    grad_fn = flax_bridge.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), GRADIENTS_IN_16, axis_name="data")

    def step(state, x):
        _, grads, model_state = grad_fn(state.model, x, loss_scale=jmp.get_loss_scale(state))
        return state.apply_gradients(grads=grads, model_state=model_state)

    start, run = NNXTrainState.create(model=Standardised(), tx=optimizer(), ema_decay=0.5), parallel(step, route)
    after = agreed(run(start, X), route)
    assert not same_bits(after.params, start.params)
    np.testing.assert_allclose(after.model.mean[...], 0.5 * X.mean(0), rtol=1e-6)
    assert after.model.calls[...] == 1 and after.model.rngs.default.count[...] == 1
    skipped = agreed(run(after, SPOILED), route)
    assert jmp.get_loss_scale(skipped).loss_scale == 512 and skipped.step == 1
    for name in ("params", "model_state", "ema_params"):
        assert_same_bits(*map(jax.tree.leaves, (getattr(skipped, name), getattr(after, name))))
    if route == "shard_map":
        crossing = re.findall(r"all_reduce[\s\S]*?-> tensor<(\S+)>", run.lower(start, X).as_text())
        assert "7xf32" not in crossing  # unchanged values are not sent
        assert crossing.count("3xf16") == 1 and crossing.count("3xf32") == 1


class BatchNormed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False, momentum=0.5, axis_name="data")(x)


class NNXBatchNormed(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(3, momentum=0.5, axis_name="data", rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


def linen_training():
    # Without the axis: there is none yet.
    variables = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), X)
    variables = jax.tree.map(jnp.array, {name: {"BatchNorm_0": tree} for name, tree in variables.items()})
    params = variables.pop("params")
    state = TrainState.create(apply_fn=BatchNormed().apply, params=params, tx=optimizer(), model_state=variables)

    def loss_fn(params, model_state, x):
        y, model_state = state.apply_fn({"params": params, **model_state}, x, mutable=["batch_stats"])
        return jnp.mean((y - 1) ** 2), model_state

    grad_fn = jmp.value_and_grad(loss_fn, GRADIENTS_IN_16, has_aux=True, axis_name="data")

    def step(state, x):
        (_, model_state), grads = grad_fn(state.params, state.model_state, x, loss_scale=jmp.get_loss_scale(state))
        return state.apply_gradients(grads=grads, model_state=model_state)

    return state, step


def nnx_training():
    grad_fn = flax_bridge.value_and_grad(
        lambda model, x: jnp.mean((model(x) - 1) ** 2), GRADIENTS_IN_16, axis_name="data"
    )

    def step(state, x):
        _, grads, model_state = grad_fn(state.model, x, loss_scale=jmp.get_loss_scale(state))
        return state.apply_gradients(grads=grads, model_state=model_state)

    return NNXTrainState.create(model=NNXBatchNormed(), tx=optimizer()), step


@pytest.mark.parametrize(
    "training, route",
    [
        (linen_training, "shard_map"),
        *(pytest.param(t, r, marks=pytest.mark.slow) for t in (linen_training, nnx_training) for r in ROUTES[1:]),
        pytest.param(nnx_training, "shard_map", marks=pytest.mark.slow),
    ],
)
def test_batch_norm_over_the_devices_has_the_statistics_of_the_whole_batch(training, route):
    """Squares exceed float16's range; the statistics cross devices in float32, whatever the `reduce_dtype`."""
    start, step = training()
    run, large = parallel(step, route), 100 * X
    after = agreed(run(start, large), route)
    mean, var = jax.tree.leaves(after.model_state)
    np.testing.assert_allclose(mean, 0.5 * large.mean(0), rtol=1e-6)
    np.testing.assert_allclose(var, 0.5 + 0.5 * large.var(0), rtol=1e-5)
    skipped = agreed(run(after, SPOILED), route)
    assert jmp.get_loss_scale(skipped).loss_scale == 512 and skipped.step == 1
    assert_same_bits(*map(jax.tree.leaves, (skipped.model_state, after.model_state)))
    assert_same_bits(*map(jax.tree.leaves, (skipped.params, after.params)))


class TestStatesThatWouldPart:
    """States that would differ between devices, where JAX tracks what varies."""

    def check(self, message, step, state):
        with pytest.raises(ValueError) as raised:
            jax.eval_shape(parallel(step), state, X)
        assert str(raised.value) == message

    def state(self, **fields):
        return TrainState.create(apply_fn=print, params={"w": jnp.ones(3)}, tx=optimizer(), **fields)

    def test_statistics(self):
        def step(state, x):
            model_state = {"batch_stats": {"mean": x.mean(0)}}
            return state.apply_gradients(grads={"w": jnp.ones(3)}, model_state=model_state)

        message = (
            "`model_state`: 'batch_stats/mean' differs between the devices of axis 'data', and the state's is equal on "
            "all of them; pass jax.lax.pmean(model_state, 'data'), or give the layer that computes it axis_name='data'."
        )
        self.check(message, step, self.state(model_state={"batch_stats": {"mean": jnp.zeros(3)}}))

    @pytest.mark.parametrize("axis_name", [None, "data"])
    def test_gradients(self, axis_name):
        tx = jmp.with_loss_scale(optax.sgd(0.1), axis_name=axis_name)
        state = TrainState.create(apply_fn=print, params={"w": jnp.ones(3)}, tx=tx)
        message = (
            "`grads` differ between the devices of axis 'data', whose states are equal and would drift apart: average "
            "them with value_and_grad(..., axis_name='data'), and let all devices skip together with "
            "with_loss_scale(..., axis_name='data')."
        )
        self.check(message, lambda state, x: state.apply_gradients(grads={"w": x.mean(0)}), state)

    def test_one_decision_for_parameters_of_their_own(self):
        """Parameters that differ between devices have different updates, but one loss scale."""
        tx = jmp.with_loss_scale(optax.sgd(0.1))

        def step(w, x):
            own = state.replace(params={"w": jax.lax.pcast(w, "data", to="varying")})
            return own.apply_gradients(grads={"w": x.mean(0)}).step

        state = TrainState.create(apply_fn=print, params={"w": jnp.ones(3)}, tx=tx)
        with pytest.raises(
            ValueError, match=r"^`grads` differ between the devices of axis 'data', whose states are equal"
        ):
            jax.eval_shape(parallel(step), jnp.ones(3), X)

    def test_states_of_their_own_may_part(self):
        def step(state, x):
            state = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "data", to="varying"), state)
            return jax.tree.map(lambda leaf: leaf[None], state.apply_gradients(grads={"w": x.mean(0)}).params)

        mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))
        tx = jmp.with_loss_scale(optax.sgd(0.1))
        state = TrainState.create(apply_fn=print, params={"w": jnp.ones(3)}, tx=tx)
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(WHOLE, DATA), out_specs=DATA)
        assert jax.eval_shape(mapped, state, X)["w"].shape == (DEVICES, 3)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(3, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@pytest.mark.parametrize("layout", ["sharded", pytest.param("replicated", marks=pytest.mark.slow)])
def test_a_module_under_jit_over_a_mesh(layout):
    """The steps equal those on one device; leaves keep their shardings, also in a skipped step; one compilation."""
    tx = jmp.with_loss_scale(optax.adam(0.1), jmp.DynamicLossScale(1024.0))
    grad_fn = flax_bridge.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), "mixed_float16")

    def step(state, x):
        _, grads, model_state = grad_fn(state.model, x, loss_scale=jmp.get_loss_scale(state))
        return state.apply_gradients(grads=grads, model_state=model_state)

    mesh = Mesh(np.array(jax.devices()), ("data",))

    def place(leaf):
        split = layout == "sharded" and leaf.ndim and leaf.shape[-1] % 8 == 0
        return NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 1), "data") if split else WHOLE)

    start = NNXTrainState.create(model=Network(nnx.Rngs(0)), tx=tx, ema_decay=0.5)
    shardings = jax.tree.map(place, start)
    alone, run_alone = jax.tree.map(jnp.copy, start), jax.jit(step)  # device_put copies nothing to the device it is on
    state, run = jax.device_put(start, shardings), jax.jit(step, out_shardings=shardings, donate_argnums=0)
    for x in (X, SPOILED, X):
        state = run(state, jax.device_put(x, NamedSharding(mesh, DATA)))
        alone = run_alone(alone, x)
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert run._cache_size() == 1 and state.step == alone.step == 2
    assert jmp.get_loss_scale(state).loss_scale == 512
    for got, want in zip(*map(jax.tree.leaves, (state.params, alone.params)), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-3)
