"""with_loss_scale: its state, the arguments of the inner transformation, and the metrics."""

# Optax types trees and states as one union, in which pyright knows no attribute or index.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import pickle
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import assert_same_bits, assert_two_programs_agree, same_bits
from optimizer_tools import GOOD, PARAMS, broken, run

import jmp_train as jmp
from jmp_train import DynamicLossScale, NoOpLossScale, StaticLossScale, step_metrics, with_loss_scale


class TestState:
    def test_what_a_skip_records(self):
        tx = with_loss_scale(optax.sgd(0.1), DynamicLossScale(8.0))
        _, state = run(tx, [GOOD, broken("b"), broken("a", "b", value=jnp.nan)])
        assert not state.grads_finite and state.loss_scale.loss_scale == 2.0
        assert (int(state.skipped_steps), int(state.consecutive_skips)) == (2, 2)
        assert state.last_overflow.dtype == np.bool_
        assert state.last_overflow.tolist() == [True, True, False] and state.overflow_counts.tolist() == [1, 2, 0]
        _, state = run(tx, [GOOD], state)
        assert state.grads_finite and (int(state.skipped_steps), int(state.consecutive_skips)) == (2, 0)
        assert state.last_overflow.tolist() == [True, True, False] and state.overflow_counts.tolist() == [1, 2, 0]

    def test_one_trace_serves_all_steps_and_types_are_stable(self):
        tx = with_loss_scale(optax.adam(0.1))

        @jax.jit
        @chex.assert_max_traces(n=1)
        def step(grads, state):
            return tx.update(grads, state)[1]

        state = tx.init(PARAMS)
        for grads in (GOOD, broken("a"), GOOD):
            before = jax.tree.map(jax.typeof, state)
            state = step(grads, state)
            assert jax.tree.map(jax.typeof, state) == before

    def test_every_field_survives_pickle_and_a_resumed_run_equals_the_uninterrupted_one(self):
        tx = with_loss_scale(optax.adam(0.1), DynamicLossScale(8.0, growth_interval=2, hysteresis=2))
        first, second = [GOOD, broken("b"), broken("a"), GOOD], [GOOD, broken("c"), GOOD, GOOD]
        params, state = run(tx, first)
        saved = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, (params, state))))
        assert_same_bits(run(tx, second, saved[1], saved[0]), run(tx, first + second))

    def test_a_donated_state_never_breaks_a_later_init(self):
        start = DynamicLossScale(jnp.float32(8.0))
        for tx in (with_loss_scale(optax.adam(0.1)), with_loss_scale(optax.adam(0.1), start)):
            step = jax.jit(tx.update, donate_argnums=1)
            for _ in range(2):
                state = tx.init(PARAMS)
                for _ in range(2):
                    state = step(GOOD, state, PARAMS)[1]

    def test_a_scale_that_was_in_use_is_copied(self):
        used = DynamicLossScale(8.0).adjust(True)
        tx = with_loss_scale(optax.sgd(0.1), used)
        for _ in range(2):
            jax.jit(tx.update, donate_argnums=1)(GOOD, tx.init(PARAMS), PARAMS)
        assert used.loss_scale == 8.0

    def test_no_two_leaves_share_a_buffer(self):
        state = with_loss_scale(optax.adam(0.1)).init(PARAMS)
        jax.jit(lambda s: s, donate_argnums=0)(state)

    def test_disabled_equals_absent(self):
        bare, state = run(optax.adam(0.1), [GOOD] * 3)
        off, off_state = run(with_loss_scale(optax.adam(0.1), NoOpLossScale()), [GOOD] * 3)
        assert_two_programs_agree((off, off_state.inner_state), (bare, state))

    def test_empty_trees_and_none(self):
        tx = with_loss_scale(optax.adam(0.1))
        for params in ({}, None, {"a": None, "b": {}}):
            _, state = run(tx, [params], params=params)
            assert state.grads_finite and state.last_overflow.shape == (0,)
        params = {"a": jnp.ones(2), "frozen": None}
        params, state = run(tx, [{"a": jnp.ones(2), "frozen": None}], params=params)
        assert params["frozen"] is None and params["a"][0] < 1

    def test_a_skip_leaves_the_sign_of_zero_alone(self):
        params, _ = run(with_loss_scale(optax.sgd(0.1)), [broken("a")])
        assert_same_bits(params, PARAMS)

    def test_16_bit_gradients_reach_the_inner_transformation_in_float32(self):
        tiny = {"w": jnp.full(3, 2.0**-14, jnp.float16)}
        params = {"w": jnp.ones(3)}
        bare, _ = optax.adam(0.1).update(tiny, optax.adam(0.1).init(params), params)
        assert not bool(jnp.all(jnp.abs(bare["w"]) < 0.2))  # Adam's epsilon, 1e-8, is zero in float16
        got, state = run(with_loss_scale(optax.adam(0.1)), [tiny], params=params)
        expected, _ = run(optax.adam(0.1), [jax.tree.map(jnp.float32, tiny)], params=params)
        assert_two_programs_agree(got, expected)
        assert state.inner_state[0].nu["w"].dtype == jnp.float32

    def test_state_dtypes_stay_where_float32_gradients_meet_16_bit_parameters(self):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
        bare = optax.adam(0.1)
        assert bare.update(GOOD, bare.init(params), params)[1][0].mu["a"].dtype == jnp.float32
        got, state = run(with_loss_scale(bare), [GOOD, GOOD], params=params)
        assert {x.dtype for x in jax.tree.leaves((got, state.inner_state[0][1:]))} == {jnp.dtype("bfloat16")}

    def test_flax_statistics_are_neither_checked_nor_changed_on_their_way(self):
        grads = {"w": jnp.float32(1), "_overwrite_with_gradient": {"scale": jnp.float32(jnp.inf)}}
        updates, state = with_loss_scale(optax.identity()).update(grads, with_loss_scale(optax.identity()).init(grads))
        assert state.grads_finite and updates["_overwrite_with_gradient"]["scale"] == jnp.inf

    def test_inside_nothing_is_infinite_and_nothing_else_is_changed(self):
        seen = []
        spy = optax.stateless(lambda updates, params: seen.append(updates) or updates)
        grads = {"a": jnp.array([jnp.nan, 1.0, -jnp.inf]), "z": jnp.array([complex(jnp.inf, 1), 2j])}
        tx = with_loss_scale(spy)
        updates, _ = tx.update(grads, tx.init(grads), grads)
        assert seen[0]["a"].tolist() == [0, 1, 0] and seen[0]["z"].tolist() == [0, 2j]
        assert not any(jnp.any(u) for u in updates.values())

    @pytest.mark.parametrize(
        "inner", [optax.sgd(0.1), optax.adam(0.1), optax.masked(optax.adam(0.1), {"ids": False, "w": True})]
    )
    def test_integer_parameters(self, inner):
        params = {"ids": jnp.arange(3), "w": jnp.ones(2)}
        grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(params)
        assert grads["ids"].dtype == jax.dtypes.float0
        new, state = run(with_loss_scale(inner), [grads, grads], params=params)
        assert new["ids"].tolist() == [0, 1, 2] and new["ids"].dtype == jnp.int32
        assert jnp.all(new["w"] < 1) and state.grads_finite

    def test_integer_parameters_of_lookahead(self):
        decayed = optax.chain(optax.add_decayed_weights(1.0), optax.sgd(0.25))
        tx = with_loss_scale(optax.lookahead(decayed, sync_period=1, slow_step_size=0.5))
        params = optax.LookaheadParams.init_synced({"ids": jnp.arange(3), "w": jnp.ones(2)})
        grads = {"ids": np.zeros(3, jax.dtypes.float0), "w": jnp.ones(2)}
        updates, _ = tx.update(grads, tx.init(params), params)
        moved: Any = optax.apply_updates(params, updates)
        for each in moved:
            assert each["ids"].tolist() == [0, 1, 2] and each["ids"].dtype == jnp.int32
            assert each["w"].tolist() == [0.75, 0.75]

    def test_updates_come_in_the_containers_of_the_inner_transformation(self):
        tx = with_loss_scale(optax.stateless(lambda updates, params: list(updates.values())))
        assert isinstance(tx.update(GOOD, tx.init(PARAMS), PARAMS)[0], list)

    def test_vmap_over_an_ensemble(self):
        tx = with_loss_scale(optax.sgd(1.0), DynamicLossScale(8.0))
        params = jnp.zeros((3, 2))
        grads = np.float32([[1, 1], [np.inf, 1], [1, 1]])
        update = jax.jit(lambda grads: jax.vmap(tx.update)(grads, jax.vmap(tx.init)(params), params))
        updates, state = update(grads)
        np.testing.assert_array_equal(updates, [[-1, -1], [0, 0], [-1, -1]])
        np.testing.assert_array_equal(state.loss_scale.loss_scale, [8, 4, 8])

    def test_optax_can_map_over_the_parameters_in_the_state(self):
        tx = with_loss_scale(optax.adam(0.1))
        state = optax.tree.map_params(tx, lambda x: x + 1, tx.init(PARAMS))
        assert float(state.inner_state[0].mu["a"][0]) == 1.0 and state.loss_scale.loss_scale == 2.0**15


class TestMetrics:
    @pytest.mark.parametrize(
        "scale, steps, status",
        [
            (DynamicLossScale(8.0), [GOOD], jmp.ScaleStatus.OK),
            (DynamicLossScale(8.0), [broken("a")], jmp.ScaleStatus.BACKING_OFF),
            (DynamicLossScale(8.0), [broken("a"), GOOD], jmp.ScaleStatus.OK),
            (DynamicLossScale(2.0), [broken("a")], jmp.ScaleStatus.AT_MINIMUM),
            (DynamicLossScale(2.0), [broken("a"), GOOD], jmp.ScaleStatus.AT_MINIMUM),
            (DynamicLossScale(1.0), [], jmp.ScaleStatus.OK),
            (DynamicLossScale(1.0), [GOOD], jmp.ScaleStatus.OK),
            (DynamicLossScale(1.0), [broken("a")], jmp.ScaleStatus.AT_MINIMUM),
            (DynamicLossScale(2.0, growth_interval=1), [broken("a"), GOOD], jmp.ScaleStatus.OK),
            (StaticLossScale(8.0), [GOOD], jmp.ScaleStatus.OK),
            (StaticLossScale(8.0), [broken("a")], jmp.ScaleStatus.AT_MINIMUM),
            (NoOpLossScale(), [broken("a")], jmp.ScaleStatus.AT_MINIMUM),
        ],
    )
    def test_status(self, scale, steps, status):
        _, state = run(with_loss_scale(optax.sgd(0.1), scale), steps)
        metrics = jax.jit(step_metrics)(state)
        assert jmp.ScaleStatus(int(metrics["status"])) == status
        assert {name: x.dtype.name for name, x in metrics.items()} == {
            "loss_scale": "float32",
            "grads_finite": "bool",
            "skipped_steps": "int32",
            "consecutive_skips": "int32",
            "nonfinite_losses": "int32",
            "status": "int32",
        }
        assert all(x.shape == () for x in metrics.values())


class TestLineSearch:
    """The loop of an inner line search ends although loss and gradient are NaN, and its state is unchanged."""

    @pytest.mark.parametrize(
        "tx", [optax.lbfgs(), optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9))]
    )
    def test_it_ends(self, tx):
        tx = with_loss_scale(tx)
        params = jnp.ones(3)
        state = tx.init(params)
        bad = jnp.array([jnp.nan, 1.0, jnp.inf])

        @jax.jit
        def update(value):
            def value_fn(params):
                return jnp.sum(params**2) * value

            return tx.update(bad, state, params, value=value, grad=bad, value_fn=value_fn)

        for value in (np.nan, np.inf, 1.0):
            updates, after = update(np.float32(value))
            assert not jnp.any(updates) and same_bits(after.inner_state, state.inner_state)


def test_numbers_in_the_state_inside_are_arrays_from_the_start():
    """With Python numbers, the second step would be traced again."""
    start = {"count": 0, "rate": 0.5, "on": True, "weak": jnp.asarray(2.0)}
    inner = optax.GradientTransformation(lambda params: start, lambda updates, state, params=None: (updates, state))
    state = with_loss_scale(inner).init(PARAMS).inner_state
    assert {name: (x.dtype, x.weak_type) for name, x in state.items()} == {
        "count": (np.int32, False),
        "rate": (np.float32, False),
        "on": (np.bool_, False),
        "weak": (np.float32, False),
    }


def test_which_leaves_of_a_state_belong_to_a_parameter():
    from jmp_train._optimizer import _belongs_to

    assert _belongs_to("0/mu/w", "w") and _belongs_to("w", "w") and _belongs_to("0/mu", "")
    assert not _belongs_to("0/mu/low", "w") and not _belongs_to("0/count", "w")
