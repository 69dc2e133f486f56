"""Masters and stochastic rounding: 16-bit parameters follow a float64 run where plainly rounded ones stand still."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jmp_train import (
    DynamicLossScale,
    MasterWeightsState,
    NoOpLossScale,
    get_loss_scale,
    master_params,
    sync_master_weights,
    with_loss_scale,
    with_low_precision_state,
    with_master_weights,
    with_stochastic_rounding,
)

HALVES = [jnp.float16, jnp.bfloat16]


def parameters(dtype):
    key = jax.random.key(0)
    return {
        "w": jax.random.normal(key, (16, 8)).astype(dtype),
        "scale": jnp.ones(8),
        "ids": jnp.arange(3),
        "none": None,
    }


def gradients(seed, params):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)


@functools.cache
def stepper(tx):
    """The jitted step, compiled once for all runs of one transformation."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(tx, params, steps=range(20), state=None):
    state = tx.init(params) if state is None else state
    for seed in steps:
        params, state = stepper(tx)(params, state, gradients(seed, params))
    return params, state


def as_bytes(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("inner", [optax.sgd(1e-3), optax.adam(1e-4), optax.adamw(1e-3)])
def test_masters_are_the_float32_run_and_parameters_their_rounding(dtype, inner):
    params = {"w": parameters(dtype)["w"], "scale": jnp.ones(8)}
    got, state = run(with_master_weights(inner), params)
    expected, _ = run(inner, jax.tree.map(jnp.float32, params))
    np.testing.assert_allclose(master_params(state, got)["w"], expected["w"], rtol=2e-7, atol=1e-9)
    np.testing.assert_allclose(got["scale"], expected["scale"], rtol=2e-7)
    assert got["w"].dtype == dtype and as_bytes(got["w"]) == as_bytes(master_params(state)["w"].astype(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_small_updates_are_not_lost(dtype):
    params = jnp.ones(4, dtype)
    grads = jnp.full(4, -(2.0**-13))
    for tx, moved in ((optax.sgd(1.0), False), (with_master_weights(optax.sgd(1.0)), True)):
        p, state = params, tx.init(params)
        if moved:  # differences below half the last bit are in the master only
            assert not jnp.any(tx.update(grads, state, p)[0])
        for _ in range(64):
            p, state = stepper(tx)(p, state, grads)
        assert bool(jnp.all(p == (1 + 2.0**-7 if moved else 1)))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_parameter_that_changes_magnitude_is_off_by_less_than_its_old_ulp_and_right_one_step_later(dtype):
    rng = np.random.default_rng(0)
    old = jnp.asarray(rng.normal(size=2000) * 2.0 ** rng.integers(-8, 8, 2000), dtype)
    new = jnp.asarray(rng.normal(size=2000) * 2.0 ** rng.integers(-8, 8, 2000), jnp.float32)
    tx = with_master_weights(optax.sgd(1.0))
    state = tx.init(old)
    updates, state = tx.update(old.astype(jnp.float32) - new, state, old)
    params = optax.apply_updates(old, updates)
    target = master_params(state).astype(dtype)
    error = jnp.abs(params.astype(jnp.float32) - target.astype(jnp.float32))
    ulp = np.spacing(np.abs(np.asarray(target, np.float32))) * 2.0 ** (13 if dtype == jnp.float16 else 16)
    assert np.all(error <= np.abs(np.asarray(old, np.float32)) * 2.0**-23 + ulp)
    updates, state = tx.update(jnp.zeros(2000), state, params)
    assert as_bytes(optax.apply_updates(params, updates)) == as_bytes(target)


def test_wide_leaves_get_no_copy_and_state_is_float32():
    params = {"w": jnp.ones(2, jnp.float16), "f32": jnp.ones(2), "f8": jnp.ones(2, jnp.float8_e4m3fn), "n": None}
    params |= {"ids": jnp.arange(2), "number": 0.1}
    state = with_master_weights(optax.adam(0.1)).init(params)
    assert isinstance(state, MasterWeightsState)
    assert jax.tree.map(lambda x: x.dtype, state.masters) == {**dict.fromkeys(params), "w": jnp.float32}
    assert state.inner_state[0].nu["w"].dtype == jnp.float32
    full = master_params(state, params)
    assert full["w"] is state.masters["w"] and full["f32"] is params["f32"]


def test_16_bit_gradients_and_extra_arguments():
    params = jnp.ones(3, jnp.bfloat16)
    tx = with_master_weights(optax.lbfgs())

    def value_fn(p):
        return jnp.sum(jnp.square(p.astype(jnp.float32) - 3))

    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(value_fn)(params)
        updates, _ = tx.update(grads, tx.init(params), params, value=loss, grad=grads, value_fn=value_fn)
        return optax.apply_updates(params, updates)

    assert jnp.all(step(params) > 1)


@pytest.mark.parametrize("wrap", [with_master_weights, with_stochastic_rounding])
def test_what_the_transformation_inside_sees(wrap):
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append((updates.dtype, params, extra))
        return jnp.full((), 2.0**-10), state

    tx = wrap(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update))
    params = jnp.ones((), jnp.bfloat16)
    state = tx.init(params)
    for _ in range(2):
        _, state = tx.update(jnp.ones((), jnp.bfloat16), state, params, value=3)
    assert [(dtype, p.dtype, extra) for dtype, p, extra in seen] == [(jnp.float32, jnp.float32, {"value": 3})] * 2
    if wrap is with_master_weights:
        assert [float(p) for _, p, _ in seen] == [1, 1 + 2.0**-10]  # the masters, not the rounded parameters


@pytest.mark.parametrize("wrap", [with_master_weights, with_stochastic_rounding])
def test_a_skipped_step_leaves_everything_alone(wrap):
    params = {"w": jnp.linspace(-1, 1, 8).astype(jnp.bfloat16), "b": jnp.zeros(2)}
    tx = with_loss_scale(wrap(optax.adam(0.1)), DynamicLossScale(8.0))
    p, state = run(tx, params, [0, 1])
    bad = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), params)
    updates, skipped = jax.jit(tx.update)(bad, state, p)
    assert not any(jnp.any(u) for u in jax.tree.leaves(updates)) and int(skipped.skipped_steps) == 1
    before, after = run(tx, p, [2], state), run(tx, p, [2], skipped)
    plain = [(q, master_or_key(s.inner_state), s.inner_state.inner_state) for q, s in (before, after)]
    assert as_bytes(plain[0]) == as_bytes(plain[1])


def master_or_key(state):
    return state.masters if isinstance(state, MasterWeightsState) else (state.key, state.step)


@pytest.mark.parametrize("wrap", [with_master_weights, with_stochastic_rounding])
def test_one_trace_scan_cond_and_donation(wrap):
    params = {"w": jnp.ones((4, 2), jnp.bfloat16), "b": jnp.zeros(2)}
    tx = with_loss_scale(wrap(optax.adam(0.1)))

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    donating = jax.jit(chex.assert_max_traces(step, n=1), donate_argnums=(0, 1))
    p = params
    for _ in range(2):
        p = jax.tree.map(jnp.array, params)
        state = tx.init(p)
        for seed in range(3):
            p, state = donating(p, state, gradients(seed, params))

    def body(carry, grads):
        return jax.lax.cond(grads["b"][0] > 9, lambda: carry, lambda: step(*carry, grads)), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(gradients(seed, params) for seed in range(3)))
    scanned, _ = jax.lax.scan(body, (params, tx.init(params)), stacked)
    for name in params:  # XLA may round the body of a loop differently
        np.testing.assert_allclose(scanned[0][name].astype(jnp.float32), p[name].astype(jnp.float32), rtol=2.0**-7)


def test_parameters_changed_by_hand_are_restored_unless_synchronised():
    tx = optax.chain(with_loss_scale(with_master_weights(optax.sgd(0.5))))
    params = {"w": jnp.ones(2, jnp.float16), "b": jnp.ones(2)}
    state = tx.init(params)
    changed = {"w": jnp.full(2, 4.0, jnp.float16), "b": jnp.full(2, 5.0)}
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    updates, _ = tx.update(grads, state, changed)
    assert optax.apply_updates(changed, updates)["w"].tolist() == [0.5, 0.5]
    synced = jax.jit(sync_master_weights, donate_argnums=0)(state, changed)
    updates, synced = tx.update(grads, synced, changed)
    assert optax.apply_updates(changed, updates)["w"].tolist() == [3.5, 3.5]
    assert master_params(synced)["w"].dtype == jnp.float32 and get_loss_scale(synced).loss_scale == 2.0**15


def test_float64_gradients_change_no_dtype():
    with jax.enable_x64(True):
        params, grads = jnp.ones(4, jnp.bfloat16), np.linspace(0.1, 0.4, 4)
        masters, stochastic = (wrap(optax.sgd(0.1)) for wrap in (with_master_weights, with_stochastic_rounding))
        state = masters.update(grads, masters.init(params), params)[1]
        assert master_params(state).dtype == jnp.float32
        np.testing.assert_allclose(master_params(state), 1 - 0.1 * grads, rtol=1e-7)
        moved = np.asarray(params + stochastic.update(grads, stochastic.init(params), params)[0])
        assert np.array_equal(moved, moved.astype(jnp.bfloat16)) and np.all(np.abs(moved - 1 + 0.1 * grads) < 2**-8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    """A layer that reads the dtype of its weight whenever it is built; JAX, too, builds it, with other leaves."""

    w: jax.Array

    def __post_init__(self):
        assert jnp.issubdtype(self.w.dtype, jnp.floating)


@pytest.mark.parametrize("wrap", [with_master_weights, with_stochastic_rounding, with_low_precision_state])
def test_a_tree_that_checks_its_leaves(wrap):
    plain, grads = {"w": jnp.ones(4, jnp.bfloat16)}, {"w": jnp.linspace(-1, 1, 4)}
    tx = with_loss_scale(wrap(optax.adam(1e-3)))
    state = tx.init(Checked(plain["w"]))
    updates, state = jax.jit(tx.update)(Checked(grads["w"]), state, Checked(plain["w"]))
    assert isinstance(updates, Checked)
    expected, expected_state = jax.jit(tx.update)(grads, tx.init(plain), plain)
    assert as_bytes((updates, state)) == as_bytes((expected, expected_state))


class TestStochasticRounding:
    def test_it_follows_a_float64_run_where_plain_bfloat16_stands_still(self):
        """The mean over many parameters, whose standard error is known: the plain run is 100 standard errors away."""
        params = jnp.ones(4096, jnp.bfloat16)
        updates_of = jnp.full(4096, -(2.0**-12))
        for tx, follows in ((optax.sgd(1.0), False), (with_stochastic_rounding(optax.sgd(1.0)), True)):

            def body(carry, _, tx=tx):
                p, state = carry
                updates, state = tx.update(updates_of, state, p)
                return (optax.apply_updates(p, updates), state), None

            (p, _), _ = jax.lax.scan(body, (params, tx.init(params)), length=256)
            exact = 1 + 256 * 2.0**-12
            error = abs(float(np.mean(np.asarray(p, np.float64))) - exact)
            # Each step rounds up by 2^-7 with probability 2^-5: variance p(1 - p) 2^-14 per step.
            standard_error = np.sqrt(256 * 2.0**-5 * 2.0**-14 / 4096)
            assert (error < 5 * standard_error) == follows

    def test_the_key_decides(self):
        params = {"w": jnp.ones(64, jnp.bfloat16), "v": jnp.ones(64, jnp.bfloat16)}
        grads = jax.tree.map(lambda x: jnp.ones(64), params)

        def updated(**key):
            tx = with_stochastic_rounding(optax.sgd(1e-3), **key)
            return jax.jit(tx.update)(grads, tx.init(params), params)[0]

        assert as_bytes(updated(key=1)) == as_bytes(updated(key=jax.random.key(1))) != as_bytes(updated(key=2))
        assert as_bytes(updated(key=0)) == as_bytes(updated())
        assert as_bytes(updated()["w"]) != as_bytes(updated()["v"])  # different leaves draw different bits

    def test_every_step_draws_afresh(self):
        tx = with_stochastic_rounding(optax.sgd(2.0**-8))
        params = jnp.ones(64, jnp.bfloat16)
        update = jax.jit(tx.update)
        start = tx.init(params)
        one, state = update(-jnp.ones(64), start, params)
        assert (start.step, state.step) == (0, 1)
        assert as_bytes(one) != as_bytes(update(-jnp.ones(64), state, params)[0])

    def test_leaves_that_are_not_bfloat16_get_the_inner_updates(self):
        params = {"w": jnp.ones(64, jnp.bfloat16), "f32": jnp.ones(64)}
        tx = with_stochastic_rounding(optax.adam(0.1))
        updates, state = jax.jit(tx.update)(jax.tree.map(lambda x: jnp.ones(64), params), tx.init(params), params)
        assert jnp.all(updates["f32"] == updates["f32"][0]) and state.inner_state[0].nu["w"].dtype == jnp.float32

    def test_a_python_float_as_a_parameter(self):
        tx = with_stochastic_rounding(optax.sgd(0.5))
        params = {"w": 1.5, "v": jnp.ones(2, jnp.bfloat16)}
        updates, _ = tx.update({"w": jnp.float32(1), "v": jnp.ones(2)}, tx.init(params), params)
        assert updates["w"] == -0.5 and updates["v"].tolist() == [-0.5, -0.5]

    def test_what_is_not_bfloat16_is_not_widened(self):
        tx = with_stochastic_rounding(optax.GradientTransformation(lambda params: params, optax.identity().update))
        state = tx.init({"w": jnp.ones(2, jnp.bfloat16), "ids": jnp.arange(3)})
        assert jax.tree.map(lambda x: x.dtype, state.inner_state) == {"w": jnp.float32, "ids": jnp.int32}

    def test_what_is_no_key(self):
        with pytest.raises(TypeError, match=r"^`key` must be an integer or one PRNG key, got str\."):
            with_stochastic_rounding(optax.sgd(0.1), key="0")


def test_masters_of_some_parameters_in_optax_masked():
    params = {"b": jnp.zeros(2, jnp.bfloat16), "k": jnp.ones(2, jnp.bfloat16), "w": jnp.ones(2)}
    tx = with_loss_scale(optax.masked(with_master_weights(optax.sgd(0.5)), {"b": False, "k": True, "w": False}))
    state = tx.init(params)
    masters = master_params(state, params)
    assert masters["k"].dtype == np.float32 and masters["b"] is params["b"] and masters["w"] is params["w"]
    state = sync_master_weights(state, jax.tree.map(lambda x: x + 2, params))
    np.testing.assert_array_equal(master_params(state)["k"], [3, 3])


def test_masters_in_an_nnx_optimizer():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(3, 2, rngs=rngs, param_dtype=jnp.bfloat16)
            self.norm = nnx.LayerNorm(2, rngs=rngs)

    model = Net(nnx.Rngs(0))
    tx = with_loss_scale(with_master_weights(optax.sgd(0.5)), NoOpLossScale())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state, params = nnx.as_pure(optimizer.opt_state), nnx.as_pure(nnx.state(model, nnx.Param))
    masters = master_params(sync_master_weights(state, jax.tree.map(lambda x: x + 1, params)), params)
    assert masters["dense"]["kernel"].dtype == np.float32 and masters["norm"]["scale"] is params["norm"]["scale"]
    np.testing.assert_array_equal(masters["dense"]["bias"], [1, 1])


class TestErrors:
    def check(self, kind, message, fn, *args):
        with pytest.raises(kind, match=f"^{re.escape(message)}$"):
            fn(*args)

    @pytest.mark.parametrize("wrap", [with_master_weights, with_stochastic_rounding])
    def test_bad_calls(self, wrap):
        name, params = wrap.__name__, jnp.ones(2, jnp.bfloat16)
        message = f"`params` is missing: {name} rounds them. Call update(grads, opt_state, params)."
        tx = wrap(optax.sgd(0.1))
        self.check(ValueError, message, tx.update, params, tx.init(params))
        message = (
            "`inner` has with_loss_scale, which must see the state that it restores on a skipped step. "
            f"Write with_loss_scale({name}(optax.adam(1e-3)))."
        )
        for inner in (with_loss_scale(optax.sgd(0.1)), optax.chain(with_loss_scale(optax.sgd(0.1)), optax.scale(2.0))):
            self.check(ValueError, message, wrap(inner).init, params)
        message = (
            f"`inner` must be an optax transformation, got float. Pass an optimizer, as in {name}(optax.adam(1e-3))."
        )
        self.check(TypeError, message, wrap, 0.1)
        for functions in ((1, print), (print, 1)):
            without_one = optax.GradientTransformation(*functions)  # pyright: ignore[reportArgumentType]
            self.check(TypeError, message.replace("float", "GradientTransformation"), wrap, without_one)
        message = (
            f"`state` must be the {type(tx.init(params)).__name__} that `init` or `update` returned, got dict. Pass "
            "the whole state, not a part of it."
        )
        self.check(TypeError, message, tx.update, params, {}, params)

    def test_parameters_of_other_shapes_than_the_masters(self):
        state = with_master_weights(optax.sgd(0.1)).init({"w": jnp.ones((2, 3), jnp.bfloat16)})
        message = "`params`: 'w' has the shape (3,), and its master weight (2, 3)."
        self.check(ValueError, message, sync_master_weights, state, {"w": jnp.ones(3, jnp.bfloat16)})

    def test_narrow_or_disabled_masters(self):
        message = "`dtype` must be float32 or float64, got float16: masters keep what 16 bits cannot hold."
        self.check(ValueError, message, with_master_weights, optax.sgd(0.1), "float16")
        message = (
            "`dtype` is float64, and 64-bit types are disabled. "
            "Call jax.config.update('jax_enable_x64', True) first, or leave it float32."
        )
        self.check(ValueError, message, with_master_weights, optax.sgd(0.1), "float64")
        with jax.enable_x64(True):
            state = with_master_weights(optax.sgd(0.1), "float64").init(jnp.ones(2, jnp.float16))
        assert state.masters.dtype == jnp.float64

    def test_no_masters_or_two(self):
        one = with_master_weights(optax.sgd(0.1)).init(jnp.ones(2, jnp.float16))
        for state, count in ((optax.adam(0.1).init(jnp.ones(2)), 0), ([one, one], 2)):
            message = (
                f"`opt_state` must have the state of one with_master_weights, got {count}. "
                "Build the optimizer as with_master_weights(optax.adam(1e-3))."
            )
            self.check(ValueError, message, master_params, state)
            self.check(ValueError, message, sync_master_weights, state, jnp.ones(2))

    def test_parameters_that_no_longer_fit(self):
        half, full = jnp.ones(2, jnp.float16), jnp.ones(2)
        state = with_master_weights(optax.sgd(0.1)).init({"w": half, "norm": full})
        message = (
            "`params` must have the structure that the master weights were made for, with leaves ['norm', 'w']; got "
            "leaves ['v', 'w']. Make a new state with `init` if the parameters changed; of an nnx.Optimizer pass "
            "nnx.as_pure(...) of the state and of the parameters."
        )
        for fn in (sync_master_weights, master_params):
            self.check(ValueError, message, fn, state, {"v": full, "w": half})
        assert master_params(state, {"w": full, "norm": full})["w"].dtype == np.float32  # whatever they are now
        for params, what in (
            ({"w": full, "norm": full}, "'w' is float32, and `init` saw a dtype of 16 bits, which has a float32"),
            ({"w": half, "norm": half}, "'norm' is float16, and `init` saw another dtype, which has no"),
        ):
            message = (
                f"`params`: {what} master weight. Cast it to the dtype that it had, or make a new state with `init`."
            )
            self.check(ValueError, message, sync_master_weights, state, params)

    def test_float16_has_no_stochastic_rounding(self):
        message = (
            "`params`: 'a/w' is float16; stochastic rounding is for bfloat16, whose range is float32's. "
            "Use with_master_weights."
        )
        self.check(ValueError, message, with_stochastic_rounding(optax.sgd(0.1)).init, {"a": {"w": jnp.float16(1)}})
