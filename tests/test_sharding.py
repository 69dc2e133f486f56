"""Gradients on many devices: every route gives the mean gradient of the whole batch, and skips on all devices or none.

Trains with SGD, because Adam would hide a gradient that is wrong by a factor. The reference is the whole batch on one
device.
"""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from battery_tools import primitives
from comparisons import TOLERANCE
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jmp_train as jmp
from jmp_train import diagnostics
from jmp_train._sharding import axes_of, local, mean_gradients, mean_values

DTYPES = ("float32", "float16", "bfloat16")
BATCH = 64
SCALE = 1024.0
OVER_DATA = frozenset({"data"})


def loss_fn(params, x, y):
    hidden = jax.nn.gelu(x @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def example():
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.standard_normal, dtype=np.float32)
    params = {"in": draw((16, 32)) / 4, "bias": np.zeros(32, np.float32), "out": draw((32, 8)) / 6}
    return jax.tree.map(jnp.asarray, params), draw((BATCH, 16)), draw((BATCH, 8))


def mesh_of(devices, axis_type=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:devices]), ("data",), axis_types=(axis_type,))


def by_shard_map(step, devices, check_vma):
    mesh, data = mesh_of(devices), PartitionSpec("data")
    specs = PartitionSpec(), data, data
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma))


def by_pmap(step, devices):
    mapped = jax.pmap(step, axis_name="data", in_axes=(None, 0, 0), devices=jax.devices()[:devices])

    def run(state, *batch):
        results = mapped(state, *(part.reshape(devices, -1, part.shape[-1]) for part in batch))
        results = jax.tree.map(np.asarray, results)  # indexing a sharded array compiles a program
        for leaf in jax.tree.leaves(results):
            np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), results)

    return run


def by_jit(step, devices, axis_type):
    mesh = mesh_of(devices, axis_type)

    def run(state, *batch):
        put = functools.partial(jax.device_put, device=NamedSharding(mesh, PartitionSpec("data")))
        state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
        with jax.set_mesh(mesh):
            return jax.jit(step)(state, *map(put, batch))

    return run


ROUTES = {
    "shard_map": functools.partial(by_shard_map, check_vma=True),
    "shard_map_unchecked": functools.partial(by_shard_map, check_vma=False),
    "pmap": by_pmap,
    "jit": functools.partial(by_jit, axis_type=AxisType.Auto),
    "jit_explicit": functools.partial(by_jit, axis_type=AxisType.Explicit),
}


def axis_of(route):
    return None if route.startswith("jit") else "data"


def policy_of(param, compute, reduce):
    return jmp.Policy(param, compute, "float32", reduce_dtype=reduce)


@functools.cache
def stepper(route, devices, policy):
    """An optimizer, and the program of one step of it."""
    axis = axis_of(route)
    tx = jmp.with_loss_scale(optax.sgd(0.5, momentum=0.5), jmp.DynamicLossScale(SCALE), axis_name=axis)
    grad_fn = jmp.value_and_grad(loss_fn, policy, axis_name=axis)

    def step(state, x, y):
        params, opt_state = state
        loss, grads = grad_fn(params, x, y, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return tx, ROUTES[route](step, devices)


def steps_by(route, devices, policy, steps=3, spoil=lambda x, step: x) -> Any:
    """Parameters, losses and loss scale after a few steps of SGD on `devices` devices; `spoil(x, step)` edits data."""
    params, x, y = example()
    params, (tx, run) = policy.cast_to_param(params), stepper(route, devices, policy)
    state, losses = (params, tx.init(params)), []
    for number in range(steps):
        state, loss = run(state, spoil(x, number), y)
        losses.append(float(loss))
    return *state, losses


def error(got, want):
    got, want = ([np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(tree)] for tree in (got, want))
    pairs = zip(got, want, strict=True)
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs if b.any())


@functools.cache
def on_the_whole_batch(size=BATCH):
    """The loss and its gradient on one device, without this library."""
    params, x, y = example()
    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss_fn))(params, x[:size], y[:size]))


@functools.cache
def on_one_device(param, compute):
    params, _, losses = steps_by("jit", 1, policy_of(param, compute, "float32"))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params), losses


def summed(step):
    """The dtypes in which two devices add up what they computed; `step(params, x, y)` runs on each."""
    found = primitives(by_shard_map(step, 2, check_vma=True), *example())
    return {dtype for name, *dtypes in found if "psum" in name for dtype in dtypes}


@pytest.mark.parametrize("reduce_dtype", DTYPES)
def test_gradients_cross_the_devices_in_the_reduce_dtype(reduce_dtype):
    policy = jmp.get_policy("mixed_float16").replace(reduce_dtype=reduce_dtype)

    def step(params, x, y):
        return jmp.value_and_grad(loss_fn, policy, axis_name="data")(params, x, y, loss_scale=jmp.NoOpLossScale())

    assert summed(step) == {reduce_dtype, "float32"}  # the loss is summed too


def test_what_a_forward_pass_sums_over_devices_is_summed_in_float32():
    def step(params, x, y):
        return jax.lax.psum(x @ params["in"], "data")

    assert summed(jmp.autocast(step, "mixed_float16")) == {"float32"}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_gives_the_steps_of_one_device(route):
    params, opt_state, losses = steps_by(route, 8, policy_of("float32", "float16", "float32"))
    want, wanted_losses = on_one_device("float32", "float16")
    assert error(params, want) < TOLERANCE["float16"].value
    np.testing.assert_allclose(losses, wanted_losses, rtol=TOLERANCE["float16"].value)
    assert int(opt_state.skipped_steps) == 0


TRIPLES = list(itertools.product(DTYPES, repeat=3))


def spoiled(x):
    """The batch with an infinity on the last device."""
    return np.where(np.arange(BATCH)[:, None] == BATCH - 1, np.float32(np.inf), x)


def all_policies(route, devices, triples):
    """Parameters, state and losses for each (param, compute, reduce), after three steps and a skipped one in between.

    One program takes the steps of all policies, because compiling takes most of the time.
    """
    axis = axis_of(route)
    tx = jmp.with_loss_scale(optax.sgd(0.5, momentum=0.5), jmp.DynamicLossScale(SCALE), axis_name=axis)
    policies = [policy_of(*triple) for triple in triples]
    grad_fns = [jmp.value_and_grad(loss_fn, policy, axis_name=axis) for policy in policies]

    def step(states, x, y):
        results = []
        for (params, opt_state), grad_fn in zip(states, grad_fns, strict=True):
            loss, grads = grad_fn(params, x, y, loss_scale=jmp.get_loss_scale(opt_state))
            updates, opt_state = tx.update(grads, opt_state, params)
            results.append(((optax.apply_updates(params, updates), opt_state), loss))
        return [state for state, _ in results], [loss for _, loss in results]

    params, x, y = example()
    states: Any = [(stored, tx.init(stored)) for policy in policies for stored in [policy.cast_to_param(params)]]
    run, losses = ROUTES[route](step, devices), []
    for batch in (x, spoiled(x), x, x):
        before = jax.tree.map(np.asarray, states)
        states, loss = run(states, batch, y)
        if batch is not x:
            for (old, old_state), (new, new_state) in zip(before, states, strict=True):
                unchanged = (old, old_state.inner_state), (new, new_state.inner_state)
                jax.tree.map(np.testing.assert_array_equal, *unchanged)
        else:
            losses.append(np.asarray(loss))
    return [(*state, np.stack(losses)[:, i]) for i, state in enumerate(states)]


@functools.cache
def plain():
    """Three steps of SGD on one device without this library, in float32."""
    tx, (params, x, y) = optax.sgd(0.5, momentum=0.5), example()
    state, losses = tx.init(params), []
    for _ in range(3):
        loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, x, y)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return params, losses


@functools.cache
def every_pair_on_one_device():
    pairs = list(itertools.product(DTYPES, repeat=2))
    return dict(zip(pairs, all_policies("jit", 1, [(*pair, "float32") for pair in pairs]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("route", ROUTES)
def test_every_policy_on_every_route(route, devices):
    """Each of the 27 triples, with an infinity on one device: all skip, bit for bit, and all scales are equal."""
    for triple, (params, opt_state, losses) in zip(TRIPLES, all_policies(route, devices, TRIPLES), strict=True):
        want, _, wanted_losses = every_pair_on_one_device()[triple[:2]]
        tolerance = max(TOLERANCE[dtype].value for dtype in triple)
        assert error(params, jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), want)) < tolerance, triple
        np.testing.assert_allclose(losses, wanted_losses, rtol=tolerance, err_msg=str(triple))
        assert error(params, plain()[0]) < 3 * tolerance, triple  # both results have the rounding of the policy
        np.testing.assert_allclose(losses, plain()[1], rtol=3 * tolerance, err_msg=str(triple))
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(triple[0])}
        assert jmp.get_loss_scale(opt_state).loss_scale == SCALE / 2 and opt_state.skipped_steps == 1, triple


def test_an_infinity_on_one_device_makes_all_skip():
    policy = policy_of("float32", "float16", "float32")
    edit = lambda x, step: spoiled(x) if step == 1 else x  # noqa: E731
    params, opt_state, _ = steps_by("shard_map", 8, policy, steps=3, spoil=edit)
    never_saw_it, _, _ = steps_by("shard_map", 8, policy, steps=2)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, never_saw_it))
    assert float(jmp.get_loss_scale(opt_state).loss_scale) == SCALE / 2
    assert int(opt_state.skipped_steps) == 1


@pytest.mark.parametrize("route", ["shard_map", "shard_map_unchecked", "pmap"])
def test_the_mean_over_three_devices_without_autocast(route):
    def step(params, x, y):
        return jmp.value_and_grad(loss_fn, "float32", axis_name="data", autocast=False)(params, x, y)

    params, x, y = example()
    loss, grads = ROUTES[route](step, 3)(params, x[:63], y[:63])
    want_loss, want = on_the_whole_batch(63)
    assert error(grads, want) < 1e-6 and abs(float(loss) - want_loss) < 1e-6


def test_a_float16_wire_carries_what_a_sum_would_overflow():
    """Four devices have gradients of 40,000: float16 holds their mean, but not their sum."""

    def step(w, x):
        return jmp.value_and_grad(lambda w, x: jnp.mean(w * x), reduces_in_16, axis_name="data")(
            w, x, loss_scale=jmp.NoOpLossScale()
        )[1]

    reduces_in_16 = jmp.get_policy("float32").replace(reduce_dtype="float16")
    specs = PartitionSpec(), PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(step, mesh=mesh_of(4), in_specs=specs, out_specs=PartitionSpec()))
    assert mapped(jnp.float32(1), jnp.full(4, 40_000.0)) == 40_000


def test_gathered_shards_get_the_mean_gradient():
    """Parameters sharded by hand inside a `shard_map`: the transpose of the gather is the sum over the devices."""
    mesh, data = mesh_of(8), PartitionSpec("data")

    def gathering(params, x, y):
        return loss_fn(jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, "data", tiled=True), params), x, y)

    def step(params, x, y):
        return jmp.value_and_grad(gathering, "mixed_bfloat16", axis_name="data")(params, x, y)

    args = example()
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(data, data, data), out_specs=(PartitionSpec(), data))
    loss, grads = jax.jit(mapped)(*args)
    want_loss, want = on_the_whole_batch()
    assert error(grads, want) < 2e-2
    np.testing.assert_allclose(loss, want_loss, rtol=1e-2)


def test_two_axes_and_one_of_them():
    """The mean over both axes is that of the whole batch; a parameter sharded over the other axis stays sharded."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    batch = PartitionSpec(("data", "model"))

    def over_both(params, x, y):
        return jmp.value_and_grad(loss_fn, "float32", axis_name=("data", "model"))(params, x, y)[1]

    args = example()
    want = on_the_whole_batch()[1]
    specs = PartitionSpec(), batch, batch
    mapped = jax.jit(jax.shard_map(over_both, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()))
    assert error(mapped(*args), want) < 1e-6

    def column_parallel(params, x, y):
        def local_loss(params, x, y):
            hidden = jax.nn.gelu(x @ params["in"] + params["bias"])
            return jnp.mean((jax.lax.psum(hidden @ params["out"], "model") - y) ** 2)

        return jmp.value_and_grad(local_loss, "float32", axis_name="data")(params, x, y)[1]

    split = {"in": PartitionSpec(None, "model"), "bias": PartitionSpec("model"), "out": PartitionSpec("model")}
    data = PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(column_parallel, mesh=mesh, in_specs=(split, data, data), out_specs=split))
    assert error(mapped(*args), want) < 1e-6


def test_state_is_sharded_as_its_parameter():
    mesh = mesh_of(8)
    spread = NamedSharding(mesh, PartitionSpec("data"))
    params = jax.device_put({"w": jnp.ones((16, 8)), "b": jnp.ones(8)}, spread)
    tx = jmp.with_loss_scale(jmp.with_master_weights(optax.adam(1e-3)))
    opt_state: Any = tx.init(jmp.get_policy("bfloat16").cast_to_param(params))
    for leaf in jax.tree.leaves(opt_state.inner_state):
        assert leaf.shape == () or leaf.sharding.is_equivalent_to(spread, leaf.ndim), leaf.sharding


SPLIT = {
    "fully_sharded": {"in": PartitionSpec("data"), "bias": PartitionSpec("data"), "out": PartitionSpec("data")},
    "model": {"in": PartitionSpec(None, "model"), "bias": PartitionSpec("model"), "out": PartitionSpec("model")},
    "both": {
        "in": PartitionSpec("data", "model"),
        "bias": PartitionSpec("model"),
        "out": PartitionSpec("model", "data"),
    },
}


@pytest.mark.parametrize("split", SPLIT)
def test_sharded_parameters_under_jit(split):
    """The steps equal those on one device; each moment keeps its parameter's sharding; the run compiles once."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    shardings = jax.tree.map(functools.partial(NamedSharding, mesh), SPLIT[split])
    tx = jmp.with_loss_scale(optax.sgd(0.5, momentum=0.5), jmp.DynamicLossScale(SCALE))
    grad_fn = jmp.value_and_grad(loss_fn, policy_of("float32", "float16", "float32"))

    def step(params, opt_state, x, y):
        loss, grads = grad_fn(params, x, y, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, *batch = example()
    params = jax.device_put(params, shardings)
    opt_state: Any = jax.device_put(tx.init(params), NamedSharding(mesh, PartitionSpec()))
    moments = opt_state.inner_state[0].trace
    inner = (opt_state.inner_state[0]._replace(trace=jax.device_put(moments, shardings)), *opt_state.inner_state[1:])
    opt_state = opt_state._replace(inner_state=inner)
    placed = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))
    jitted: Any = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*placed, None))
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    for _ in range(3):
        params, opt_state, _ = jitted(params, opt_state, *batch)
    assert error(params, on_one_device("float32", "float16")[0]) < TOLERANCE["float16"].value
    assert jitted._cache_size() == 1
    for name, moment in opt_state.inner_state[0].trace.items():
        assert moment.sharding.is_equivalent_to(shardings[name], moment.ndim)


def test_aux_stays_local_and_fp8_statistics_are_the_largest():
    def with_aux(params, x):
        statistic = params["_overwrite_with_gradient"]["amax"]
        loss = jnp.mean(params["w"] * x) + jnp.sum(statistic * jax.lax.stop_gradient(x.max()))
        return loss, jnp.sum(x)[None]

    def step(params, x):
        return jmp.value_and_grad(with_aux, "float32", axis_name="data", has_aux=True)(params, x)

    params = {"w": jnp.ones(()), "_overwrite_with_gradient": {"amax": jnp.zeros(1)}}
    specs = PartitionSpec(), PartitionSpec("data")
    out_specs = (PartitionSpec(), PartitionSpec("data")), PartitionSpec()
    mapped = jax.jit(jax.shard_map(step, mesh=mesh_of(4), in_specs=specs, out_specs=out_specs))
    (_, aux), grads = mapped(params, jnp.arange(4.0))
    np.testing.assert_array_equal(aux, np.arange(4.0))
    assert grads["w"] == 1.5
    np.testing.assert_array_equal(grads["_overwrite_with_gradient"]["amax"], [3.0])


def test_statistics_of_a_shard_stay_those_of_the_shard():
    def mean(params):
        return mean_gradients(params, params, ("data",), np.dtype("float32"))

    params = {"_overwrite_with_gradient": {"amax": jnp.arange(4.0)}}
    spec = PartitionSpec("data")
    found = jax.jit(jax.shard_map(mean, mesh=mesh_of(4), in_specs=spec, out_specs=spec))(params)
    np.testing.assert_array_equal(found["_overwrite_with_gradient"]["amax"], np.arange(4.0))


def test_aux_of_what_is_replicated_is_replicated():
    """Only the differentiated arguments are declared varying."""

    def loss(w, step, x):
        return jnp.mean(w * x), step + 1

    def grads(w, step, x):
        return jmp.grad(loss, "float32", axis_name="data", has_aux=True)(w, step, x)

    specs = PartitionSpec(), PartitionSpec(), PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(grads, mesh=mesh_of(4), in_specs=specs, out_specs=PartitionSpec()))
    assert jax.tree.map(float, mapped(jnp.ones(()), jnp.zeros(()), jnp.arange(4.0))) == (1.5, 1.0)


def test_complex_and_bfloat16_gradients_are_averaged_in_their_own_way():
    def step(params, x):
        def loss(params, x):
            return jnp.mean(jnp.abs(params["c"] * x) ** 2 + params["h"].astype(jnp.float32) * x)

        reduced = jmp.get_policy("float32").replace(reduce_dtype="bfloat16")
        return jmp.grad(loss, reduced, axis_name="data")(params, x)

    params = {"c": jnp.complex64(1 + 1j), "h": jnp.bfloat16(1)}
    specs = PartitionSpec(), PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(step, mesh=mesh_of(4), in_specs=specs, out_specs=PartitionSpec()))
    grads = mapped(params, jnp.arange(4.0))
    np.testing.assert_allclose(grads["c"], 7 * (1 - 1j), rtol=1e-6)
    assert grads["c"].dtype == jnp.complex64 and grads["h"] == 1.5 and grads["h"].dtype == jnp.float32


AVERAGED = {
    "pmean": lambda *args: jax.lax.pmean(loss_fn(*args), "data"),
    "psum": lambda *args: jax.lax.psum(loss_fn(*args), "data") / jax.lax.axis_size("data"),
    "all_gather": lambda *args: jnp.mean(jax.lax.all_gather(loss_fn(*args), "data")),
}


@pytest.mark.parametrize("averaged", ["pmean", "psum"])
def test_a_loss_already_averaged_is_refused(averaged):
    def step(params, x, y):
        return jmp.grad(AVERAGED[averaged], "float32", axis_name="data")(params, x, y)

    with pytest.raises(ValueError) as raised:
        by_shard_map(step, 4, check_vma=True)(*example())
    assert str(raised.value) == (
        "`loss_fn` must return the mean loss of this device's part of the batch, got one that is equal on all devices "
        "of axis 'data'; leave the jax.lax.pmean or psum over 'data' to value_and_grad(axis_name='data'), which "
        "averages loss and gradients."
    )


# `pmap` behaves like a `shard_map` without checks.
UNTOLD = [("shard_map_unchecked", "pmean"), ("shard_map_unchecked", "psum"), ("shard_map", "all_gather")]


@pytest.mark.parametrize("route, averaged", [*UNTOLD, pytest.param("pmap", "pmean", marks=pytest.mark.slow)])
def test_where_jax_cannot_tell_an_averaged_loss_gives_the_mean_all_the_same(route, averaged):
    """Without checks, the transposes of `psum` and of a gather are sums; the gradient is each device's own."""

    def step(params, x, y):
        return jmp.value_and_grad(AVERAGED[averaged], "float32", axis_name="data")(params, x, y)

    args = example()
    loss, grads = ROUTES[route](step, 4)(*args)
    want_loss, want = on_the_whole_batch()
    assert error(grads, want) < 1e-6 and abs(float(loss) - want_loss) < 1e-6


def test_an_axis_that_is_none():
    message = (
        "`axis_name` must name an axis of an enclosing jax.shard_map, jax.pmap or jax.vmap, got 'batch', which is none "
        "here; under jax.jit over a sharded mesh leave axis_name out: the mean over the whole batch is in the loss "
        "already."
    )
    with pytest.raises(ValueError) as raised:
        jmp.grad(loss_fn, "float32", axis_name="batch")(*example())
    assert str(raised.value) == message
    tx = jmp.with_loss_scale(optax.sgd(0.1), axis_name="batch")
    with pytest.raises(ValueError) as raised:
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    assert str(raised.value) == message


@pytest.mark.parametrize("axis_name", [("data", "data"), 0])
def test_an_axis_name_that_is_none(axis_name):
    with pytest.raises(ValueError) as raised:
        jmp.grad(loss_fn, "float32", axis_name=axis_name)(*example())
    got = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    assert str(raised.value) == (
        f"`axis_name` must be the name of an axis, or a tuple of different names, got {got}; for a position pass the "
        f"name that the axis has in the mesh."
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_averaged_by_the_users_own_hand(check_vma):
    """Without `axis_name`, with parameters declared varying, each device has its own float32 gradient to average."""

    def step(params, x, y):
        spread = jax.lax.pcast(params, "data", to="varying")
        return jax.lax.pmean(jmp.value_and_grad(loss_fn, "mixed_bfloat16")(spread, x, y), "data")

    args = example()
    loss, grads = by_shard_map(step, 8, check_vma=check_vma)(*args)
    want_loss, want = on_the_whole_batch()
    assert error(grads, want) < 2e-2
    np.testing.assert_allclose(loss, want_loss, rtol=1e-2)


def test_a_loss_averaged_by_the_users_own_hand():
    """Without `axis_name`, in a shard_map that checks: JAX sums the gradient of the mean loss over the devices."""

    def step(params, x, y):
        return jmp.value_and_grad(AVERAGED["pmean"], "mixed_bfloat16")(params, x, y)

    args = example()
    loss, grads = by_shard_map(step, 8, check_vma=True)(*args)
    want_loss, want = on_the_whole_batch()
    assert error(grads, want) < 2e-2
    np.testing.assert_allclose(loss, want_loss, rtol=1e-2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_layer_of_sequences_trains_in_bfloat16(check_vma):
    """Its gradient is a transposed bfloat16 dot, for which CPUs have no kernel; see `fold_transposes.py`."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in ((8, 4), (16, 3, 8)))
    loss = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    value_and_grad = jmp.value_and_grad(loss, "mixed_bfloat16", axis_name="data")
    specs = PartitionSpec(), PartitionSpec("data")
    step = lambda w, x: value_and_grad(w, x)[1]  # noqa: E731
    mapped = jax.shard_map(step, mesh=mesh_of(8), in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma)
    want = jax.grad(loss)(w, x)
    assert jnp.linalg.norm(jax.jit(mapped)(w, x) - want) <= TOLERANCE["bfloat16"].gradient * jnp.linalg.norm(want)


@pytest.mark.parametrize("length", [3, 8])  # one of them is a multiple of the number of devices
def test_layers_in_a_scan_over_an_explicitly_sharded_batch(length):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(shape, np.float32)) / 8 for shape in ((16, 16), (32, 16)))

    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length)[0] ** 2)

    grad_fn = jax.jit(functools.partial(jmp.grad(loss, "mixed_float16"), loss_scale=jmp.NoOpLossScale()))
    want = grad_fn(w, x)
    mesh = mesh_of(8, AxisType.Explicit)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        got = grad_fn(jax.device_put(w, NamedSharding(mesh, PartitionSpec())), split)
    assert jnp.linalg.norm(got - want) <= TOLERANCE["float16"].gradient * jnp.linalg.norm(want)


def max_pooled(w, x):
    h = jax.nn.relu((x @ w).reshape(-1, 4, 4, 1))
    return jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def max_pooled_rows(w, x):
    """Max-pools along the axis that is sharded over devices."""
    return jax.lax.reduce_window(x @ w, -jnp.inf, jax.lax.max, (2, 1), (2, 1), "VALID")


def in_automatic_axes(w, x):
    """Layers whose shardings the compiler chooses, each between two of JAX's `reshard`."""

    def layer(w, x):
        return jnp.tanh(x @ w)

    auto_axes: Any = jax.sharding.auto_axes
    if jax.sharding.get_abstract_mesh().axis_names:
        layer = auto_axes(layer, out_sharding=PartitionSpec("data"))
    return layer(w, layer(w, x))


@pytest.mark.parametrize("layers", [max_pooled, max_pooled_rows, in_automatic_axes])
@pytest.mark.parametrize("inside", [True, False])
def test_an_explicit_mesh_gives_the_gradient_of_one_device(layers, inside):
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(shape, np.float32)) / 4 for shape in ((16, 16), (32, 16)))

    def loss(w, x):
        return jnp.mean((layers(w, x) - 1) ** 2)

    def autocast(fn):
        return jmp.autocast(fn, "mixed_float16")

    gradient = jax.jit(autocast(jax.grad(loss)) if inside else jax.grad(autocast(loss)))
    want, mesh = gradient(w, x), mesh_of(8, AxisType.Explicit)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        got = gradient(jax.device_put(w, NamedSharding(mesh, PartitionSpec())), split)
    assert jnp.linalg.norm(got - want) <= TOLERANCE["float16"].gradient * jnp.linalg.norm(want)


def in_a_scan(w, x):
    def step(h, i):
        return jnp.tanh(h @ jnp.tanh(w * i)) @ w, None

    return jax.lax.scan(step, x, jnp.arange(1.0, 3.0))[0]


def in_a_shard_map(w, x):
    def layers(w, x):
        return jnp.tanh(x @ w) @ w

    if not jax.sharding.get_abstract_mesh().axis_names:
        return layers(w, x)
    data = PartitionSpec("data")
    return jax.shard_map(layers, in_specs=(PartitionSpec(reduced=OVER_DATA), data), out_specs=data)(w, x)


def short_products(w, x):
    return jnp.tanh(x[:, :2] @ w[:2]) @ w


@pytest.mark.parametrize("layers", [short_products, max_pooled, in_a_scan, in_a_shard_map])
@pytest.mark.parametrize("loss_scale", [jmp.StaticLossScale(SCALE), jmp.DynamicLossScale(SCALE)], ids=["static", ""])
def test_gradients_whose_sum_over_devices_is_left_open(layers, loss_scale):
    """Gradients of "reduced" parameters, on a mesh with explicit axes, are "unreduced"."""
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(shape, np.float32)) / 8 for shape in ((16, 16), (32, 16)))
    gradient = jmp.grad(lambda w, x: jnp.mean((layers(w, x) - 1) ** 2), "mixed_float16")
    want, mesh = gradient(w, x, loss_scale=loss_scale), mesh_of(8, AxisType.Explicit)
    with jax.set_mesh(mesh):
        w = jax.device_put(w, NamedSharding(mesh, PartitionSpec(reduced=OVER_DATA)))
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        for run in (gradient, jax.jit(gradient)):
            got = run(w, split, loss_scale=loss_scale)
            assert jax.typeof(got).sharding.spec.unreduced == OVER_DATA
            got = jax.reshard(got, PartitionSpec())
            assert jnp.linalg.norm(got - want) <= TOLERANCE["float16"].gradient * jnp.linalg.norm(want)


def test_unreduced_gradients_are_reduced_before_they_are_checked():
    mesh, tx = mesh_of(8, AxisType.Explicit), jmp.with_loss_scale(optax.sgd(0.5))
    data, reduced = PartitionSpec("data"), PartitionSpec(None, reduced=OVER_DATA)
    what = "the leaf 'w' is unreduced over the mesh axes ('data',): each device holds a part of a sum"
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.ones(4), NamedSharding(mesh, reduced))}
        x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, data))

        def gradient(params, x):
            return jax.grad(lambda params: jnp.sum(x @ params["w"]))(params)

        grads, state = jax.jit(gradient)(params, x), tx.init(params)
        message = f"{what}, and the sum is not computed yet; add the parts up first, jax.reshard(x, jax.P(None,))."
        for check in (jmp.all_finite, diagnostics.exponent_histogram, lambda grads: tx.update(grads, state)):
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                check(grads)
        updates: Any = tx.update(jax.reshard(grads, PartitionSpec(None)), state)[0]
        assert updates["w"].tolist() == [-4.0] * 4

        def inside(params, x, add_up):
            gradient = jmp.grad(lambda params: jnp.sum(x @ params["w"]), "mixed_float16")
            grads = gradient(params, loss_scale=jmp.DynamicLossScale(8.0))
            return jmp.all_finite(jax.lax.psum(grads, ("data",)) if add_up else grads)

        def run(add_up):
            specs = {"in_specs": (reduced, data), "out_specs": PartitionSpec()}
            return jax.shard_map(functools.partial(inside, add_up=add_up), **specs)(params, x)

        with pytest.raises(ValueError, match=re.escape("add the parts up first, jax.lax.psum(x, ('data',)).")):
            run(False)
        assert run(True)


def test_several_axes_may_be_a_list():
    assert axes_of(["data", "model"]) == axes_of(("data", "model")) == ("data", "model")
    assert axes_of("data") == ("data",) and axes_of(None) == ()


def test_the_mean_of_what_a_model_changes_in_itself():
    """The mean over the axes along which it varies; not of integers, nor of state that varied from the start."""
    mesh, data = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")), PartitionSpec("data")

    def step(own):
        rank = jax.lax.axis_index("data")[None]
        new, old = [rank.astype(np.float32), rank, own + rank], [np.zeros(1, np.float32), np.zeros(1, np.int32), own]
        new, old = [*new, rank.astype(jnp.bfloat16)], [*old, np.zeros(1, jnp.bfloat16)]
        keys = jax.vmap(jax.random.key)
        return mean_values([*new, keys(rank)], [*map(jnp.asarray, old), keys(jnp.arange(1))], ("data", "model"))

    run = jax.shard_map(step, mesh=mesh, in_specs=data, out_specs=[PartitionSpec(), data, data, PartitionSpec(), data])
    mean, ranks, own, low, keys = jax.jit(run)(jnp.full(4, 10.0))
    assert (mean.tolist(), ranks.tolist(), own.tolist()) == ([1.5], [0, 1, 2, 3], [10, 11, 12, 13])
    assert low.tolist() == [1.5] and low.dtype == jnp.bfloat16
    assert jnp.all(keys == jax.vmap(jax.random.key)(jnp.arange(4)))


def test_the_devices_of_two_axes_skip_together():
    mesh, both = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model")), PartitionSpec(("data", "model"))
    tx = jmp.with_loss_scale(optax.sgd(1.0), axis_name=("data", "model"))

    def step(grads):
        state: Any = tx.update(grads, tx.init(jnp.zeros(1)))[1]
        return state.grads_finite[None]

    run = jax.shard_map(step, mesh=mesh, in_specs=both, out_specs=both, check_vma=False)
    assert not jnp.any(jax.jit(run)(jnp.ones(8).at[3].set(jnp.inf)))


def test_the_axis_of_a_vmap():
    grad_fn = jmp.value_and_grad(lambda w, x: w * x, "float32", axis_name="batch")
    losses, grads = jax.vmap(grad_fn, in_axes=(None, 0), axis_name="batch")(jnp.float32(2), jnp.arange(4.0))
    assert losses.tolist() == [3.0] * 4 and grads.tolist() == [1.5] * 4


@pytest.mark.parametrize("argnums", [1, -1])
def test_an_argument_counted_from_the_end(argnums):
    def step(x, w):
        return jmp.grad(lambda x, w: jnp.mean(w * x), "float32", argnums=argnums, axis_name="data")(x, w)

    specs = PartitionSpec("data"), PartitionSpec()
    run = jax.shard_map(step, mesh=mesh_of(4), in_specs=specs, out_specs=PartitionSpec())
    assert jax.jit(run)(jnp.arange(4.0), jnp.float32(2)) == 1.5


@pytest.mark.parametrize("sharded", [False, True])
def test_the_mean_of_16_bit_gradients_is_not_rounded_to_16_bits(sharded):
    """Gradients 1 and 1 + 2**-7, neighbours in bfloat16, of a replicated parameter and of a sharded one."""
    data, of_w = PartitionSpec("data"), PartitionSpec("data") if sharded else PartitionSpec()

    def step(w, x):
        def loss(w, x):
            return jnp.sum((jax.lax.all_gather(w, "data") if sharded else w) * x[0])

        return jmp.grad(loss, "mixed_bfloat16", autocast=False, axis_name="data")(w, x)

    x = np.array([1, 1 + 2**-7], np.float32).reshape(2, 1, 1) * np.ones((1, 2 if sharded else 1, 1), np.float32)
    run = jax.jit(jax.shard_map(step, mesh=mesh_of(2), in_specs=(of_w, data), out_specs=of_w))
    grads = run(jnp.ones(2 if sharded else 1, jnp.bfloat16), x.astype(jnp.bfloat16))
    assert grads.dtype == jnp.float32
    if not sharded:  # the transpose of the gather adds up in bfloat16
        assert grads.tolist() == [1 + 2**-8]


def test_what_crosses_no_wire_is_not_rounded_for_it():
    def step(grad, shard):
        return mean_gradients(grad, shard, ("data",), jnp.float16)

    data = PartitionSpec("data")
    run = jax.shard_map(step, mesh=mesh_of(4), in_specs=(data, data), out_specs=data)
    assert jax.jit(run)(jnp.full(4, 4 * (1 + 2.0**-20)), jnp.ones(4)).tolist() == [1 + 2.0**-20] * 4


def test_several_arguments():
    def step(w, b, x):
        return jmp.grad(lambda w, b: jnp.mean(w * x + b), "float32", argnums=(-2, 1), axis_name="data")(w, b)

    specs = PartitionSpec(), PartitionSpec(), PartitionSpec("data")
    run = jax.shard_map(step, mesh=mesh_of(4), in_specs=specs, out_specs=PartitionSpec())
    assert jax.jit(run)(jnp.float32(2), jnp.float32(3), jnp.arange(4.0)) == (1.5, 1)


def test_a_constant_loss_is_its_own_mean():
    def step(w):
        return jmp.value_and_grad(lambda w: 2.0, "float32", axis_name="data")(w)

    run = jax.shard_map(step, mesh=mesh_of(4), in_specs=PartitionSpec(), out_specs=PartitionSpec())
    assert jax.jit(run)(jnp.float32(2)) == (2, 0)


def test_integers_stay_equal_on_all_devices():
    whole, floating = PartitionSpec(), PartitionSpec("data")
    run = jax.shard_map(
        lambda tree: local(tree, ("data",)), mesh=mesh_of(4), in_specs=whole, out_specs={"n": whole, "x": floating}
    )
    tree = run({"n": jnp.arange(1), "x": jnp.ones(1)})
    assert (tree["n"].shape, tree["x"].shape) == ((1,), (4,))


def test_the_mean_of_complex_values_that_a_model_changes():
    (mean,) = jax.vmap(lambda x: mean_values([x], [jnp.complex64(0)], ("batch",)), axis_name="batch")(
        jnp.array([1j, 3 + 1j])
    )
    assert mean.tolist() == [1.5 + 1j] * 2


def test_16_bit_gradients_cross_the_devices_in_float32():
    def step(grad):
        return mean_gradients(grad, jnp.bfloat16(0), ("data",), jnp.float32)

    run = jax.shard_map(step, mesh=mesh_of(4), in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    program = jax.jit(run).lower(jnp.ones(4, jnp.bfloat16)).as_text()
    assert re.findall(r"all_reduce[\s\S]*?-> tensor<(\S+)>", program) == ["1xf32"]
