"""`update(..., value=loss)`: counts, and does not skip, steps whose loss is not finite but whose gradients are."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import assert_two_programs_agree
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec
from optimizer_tools import GOOD, PARAMS, broken

import jmp_train as jmp
from jmp_train import DynamicLossScale, flax_bridge, step_metrics, with_loss_scale

ADAM = with_loss_scale(optax.adam(0.1), DynamicLossScale(8.0))


def steps(tx, pairs, state=None, params=PARAMS):
    """Parameters and state after steps of `(grads, loss)`."""
    state = tx.init(params) if state is None else state
    for grads, loss in pairs:
        updates, state = jax.jit(tx.update)(grads, state, params, value=loss)
        params = optax.apply_updates(params, updates)
    return params, state


def sum_of_squares(weights):
    low = weights.astype(jnp.float16)
    return jnp.vdot(low, low).astype(jnp.float32) / low.size


def test_a_sum_that_overflows_in_float16():
    """The loss is infinite, and its gradient, 2 x / n, is right: the step is applied, and counted."""
    weights = jnp.full(64, 100.0)
    grad_fn = jmp.value_and_grad(sum_of_squares, "float32")

    @jax.jit
    def train_step(weights, opt_state):
        loss, grads = grad_fn(weights, loss_scale=jmp.NoOpLossScale())
        updates, opt_state = ADAM.update(grads, opt_state, weights, value=loss)
        return optax.apply_updates(weights, updates), opt_state, loss, grads

    after, opt_state, loss, grads = train_step(weights, ADAM.init(weights))
    assert loss == jnp.inf and jnp.all(grads == 3.125)
    metrics = step_metrics(opt_state)
    assert metrics["nonfinite_losses"] == 1 and metrics["grads_finite"] and metrics["skipped_steps"] == 0
    assert jnp.all(after < weights)


@pytest.mark.parametrize("value", ["x", len, {"loss": "x"}])
def test_what_is_no_loss(value):
    message = (
        f"`value` must be the loss of this step, got {value!r}. Call update(grads, opt_state, params, value=loss)."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        ADAM.update(GOOD, ADAM.init(PARAMS), PARAMS, value=value)


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_what_is_counted(bad):
    """Only applied steps are counted; a step whose gradients overflow counts as skipped."""
    pairs = [(GOOD, 1.0), (GOOD, bad), (broken("a"), bad), (broken("b"), 1.0), (GOOD, bad)]
    counts, state = [], ADAM.init(PARAMS)
    for pair in pairs:
        _, state = steps(ADAM, [pair], state)
        counts.append((int(state.nonfinite_losses), int(state.skipped_steps)))
    assert counts == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 2)]
    assert step_metrics(state)["nonfinite_losses"].dtype == np.int32


def test_nothing_else_depends_on_it():
    def others(state):
        return state._replace(nonfinite_losses=jnp.int32(0))

    with_value = steps(ADAM, [(GOOD, jnp.inf), (broken("a"), jnp.nan), (GOOD, 1.0)])
    without = steps(ADAM, [(GOOD, None), (broken("a"), None), (GOOD, None)])
    assert_two_programs_agree((with_value[0], others(with_value[1])), (without[0], others(without[1])))
    assert int(with_value[1].nonfinite_losses) == 1 and int(without[1].nonfinite_losses) == 0


def test_without_a_value_the_counter_is_handed_on():
    state = ADAM.init(PARAMS)._replace(nonfinite_losses=jnp.int32(7))
    assert ADAM.update(GOOD, state, PARAMS)[1].nonfinite_losses is state.nonfinite_losses


def test_values_of_any_kind():
    state = ADAM.init(PARAMS)
    for value, count in ((1, 0), (float("inf"), 1), (np.float32("nan"), 2), (np.float64(3), 2), (jnp.bfloat16(1), 2)):
        _, state = ADAM.update(GOOD, state, PARAMS, value=value)
        assert int(state.nonfinite_losses) == count


def test_one_trace_and_stable_types():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state, loss):
        return ADAM.update(GOOD, state, PARAMS, value=loss)[1]

    state = ADAM.init(PARAMS)
    for loss in (1.0, jnp.inf, 2.0):
        before = jax.tree.map(jax.typeof, state)
        state = step(state, jnp.float32(loss))
        assert jax.tree.map(jax.typeof, state) == before
    assert int(state.nonfinite_losses) == 1


def test_scan_and_vmap():
    losses = jnp.array([1.0, jnp.inf, jnp.nan, 2.0])

    def step(state, loss):
        return ADAM.update(GOOD, state, PARAMS, value=loss)[1], None

    assert int(jax.lax.scan(step, ADAM.init(PARAMS), losses)[0].nonfinite_losses) == 2
    states = jax.jit(jax.vmap(lambda loss: step(ADAM.init(PARAMS), loss)[0]))(losses)
    assert states.nonfinite_losses.tolist() == [0, 1, 1, 0]


def test_it_survives_pickle():
    _, state = steps(ADAM, [(GOOD, jnp.inf)] * 3)
    restored = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, state)))
    assert int(steps(ADAM, [(GOOD, jnp.nan)], restored)[1].nonfinite_losses) == 4


def test_the_inner_transformation_gets_the_loss_too():
    tx = with_loss_scale(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)))
    _, state = steps(tx, [(GOOD, jnp.float32(1))] * 4)
    assert state.inner_state[1].scale < 1 and state.nonfinite_losses == 0


@pytest.mark.parametrize("outer", [lambda tx: tx, lambda tx: optax.chain(tx, optax.scale(0.5))])
def test_it_is_found_at_any_depth(outer):
    _, state = steps(outer(ADAM), [(GOOD, jnp.inf)])
    assert step_metrics(state)["nonfinite_losses"] == 1


class TestDevices:
    """Every device counts a loss that is not finite on one of them."""

    LOSSES = jnp.array([1.0, 2.0, jnp.inf, 3.0])

    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("averaged", [True, False])
    @pytest.mark.parametrize("local_grads", [True, False])
    def test_shard_map(self, check_vma, averaged, local_grads):
        mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
        tx = with_loss_scale(optax.adam(0.1), axis_name="data")
        params = jnp.zeros(3)

        def step(state, losses):
            loss = jax.lax.pmean(losses[0], "data") if averaged else losses[0]
            grads = jnp.ones(3)
            if local_grads and check_vma:
                grads = jax.lax.pcast(grads, "data", to="varying")
            state = tx.update(grads, state, params, value=loss)[1]
            return state.nonfinite_losses, state.nonfinite_losses[None]

        data, every = PartitionSpec("data"), PartitionSpec()
        mapped = jax.shard_map(step, mesh=mesh, in_specs=(every, data), out_specs=(every, data), check_vma=check_vma)
        count, on_each = jax.jit(mapped)(tx.init(params), self.LOSSES)
        assert count == 1 and on_each.tolist() == [1] * 4

    def test_one_collective(self):
        tx = with_loss_scale(optax.sgd(0.1), axis_name="data")
        jaxpr = jax.make_jaxpr(
            lambda loss: tx.update(GOOD, tx.init(PARAMS), PARAMS, value=loss), axis_env=[("data", 2)]
        )
        assert str(jaxpr(jnp.float32(1))).count("pmin[") == 1

    def test_pmap(self):
        tx = with_loss_scale(optax.sgd(1.0), axis_name="data")
        params = jnp.zeros((4, 3))

        def step(grads, state, params, loss):
            return tx.update(grads, state, params, value=loss)

        updates, state = jax.pmap(step, axis_name="data")(params + 1, jax.pmap(tx.init)(params), params, self.LOSSES)
        assert state.nonfinite_losses.tolist() == [1] * 4 and jnp.all(updates == -1)

    def test_jit_over_a_sharded_mesh(self):
        mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
        losses = jax.device_put(self.LOSSES, jax.NamedSharding(mesh, PartitionSpec("data")))

        @jax.jit
        def step(state, losses):
            return ADAM.update(GOOD, state, PARAMS, value=jnp.mean(losses))[1]

        assert int(step(ADAM.init(PARAMS), losses).nonfinite_losses) == 1


class TestFlax:
    def test_a_state(self):
        tx = with_loss_scale(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)))
        state = flax_bridge.TrainState.create(apply_fn=print, params=PARAMS, tx=tx)
        step = jax.jit(lambda state, value: state.apply_gradients(grads=GOOD, value=value))
        for value in (1.0, jnp.inf, 1.0, 1.0):
            state = step(state, value)
        assert step_metrics(state)["nonfinite_losses"] == 1 and state.step == 4
        assert state.opt_state.inner_state[1].scale < 1
        by_name = jax.jit(lambda state: state.apply_gradients(grads=GOOD, extra_args={"value": jnp.nan}))(state)
        assert step_metrics(by_name)["nonfinite_losses"] == 2

    def test_a_state_that_is_given_no_loss(self):
        state = flax_bridge.TrainState.create(apply_fn=print, params=PARAMS, tx=ADAM)
        after = jax.jit(lambda state: state.apply_gradients(grads=GOOD))(state)
        assert after.step == 1 and step_metrics(after)["nonfinite_losses"] == 0

    def test_a_module(self):
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, with_loss_scale(optax.sgd(0.1)), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, value):
            grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
            flax_bridge.update_module(model, optimizer, grads, nnx.state(model, nnx.Not(nnx.Param)), value=value)

        for value, count in ((jnp.inf, 1), (1.0, 1), (jnp.nan, 2)):
            step(model, optimizer, value)
            assert step_metrics(optimizer)["nonfinite_losses"] == count
