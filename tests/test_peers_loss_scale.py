"""Bugs of other libraries' loss scaling, each shown in one run with the right result here.

If a test fails because the other library was repaired, remove the part of the test that shows its bug.
"""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import importlib
import warnings

import jax
import jax.numpy as jnp
import jmp as deepmind_jmp
import numpy as np
import optax
import pytest
from comparisons import TOLERANCE
from flax.training.dynamic_scale import DynamicScale

import jmp_train as jmp
from jmp_train import DynamicLossScale, StaticLossScale, get_loss_scale, value_and_grad, with_loss_scale

W = jnp.array([1.0, -2.0, 3.0])


def quadratic(w):
    return jnp.sum(w.astype(jnp.float32) ** 2)


class TestMpx:
    """mixed_precision_for_JAX 0.1.8."""

    @pytest.fixture
    def mpx(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("mpx")

    def test_it_unscales_with_the_new_scale(self, mpx):
        scaling = mpx.DynamicLossScaling(jnp.float32(8.0), jnp.float32(1.0), period=1)
        _, _, theirs = mpx.filter_grad(quadratic, scaling)(W)
        np.testing.assert_allclose(theirs, 2 * W / 2)  # halved on every growth step

        tx = with_loss_scale(optax.sgd(1.0), DynamicLossScale(8.0, growth_interval=1))
        state = tx.init(W)
        loss, ours = value_and_grad(quadratic, "mixed_float16")(W, loss_scale=get_loss_scale(state))
        _, state = tx.update(ours, state, W)
        np.testing.assert_array_equal(ours, 2 * W)
        assert loss == 14.0 and get_loss_scale(state).loss_scale == 16.0

    def test_its_scale_overflows_float16(self, mpx):
        theirs = mpx.DynamicLossScaling(jnp.float32(2.0**16), jnp.float32(1.0)).scale(jnp.float32(1.0))
        assert jnp.isinf(theirs)
        assert DynamicLossScale(2.0**16).scale(jnp.float16(1.0)) == 2.0**16


class TestFlaxDynamicScale:
    def test_it_grows_one_step_late(self):
        theirs, ours = DynamicScale(growth_interval=2, scale=8.0), DynamicLossScale(8.0, growth_interval=2)
        for _ in range(2):
            theirs, ours = theirs.value_and_grad(quadratic)(W)[0], ours.adjust(True)
        assert theirs.scale == 8.0 and ours.loss_scale == 16.0

    def test_its_state_is_traced_twice(self):
        def count(step, state):
            traces = []

            @jax.jit
            def traced(state):
                traces.append(1)
                return step(state)

            for _ in range(3):
                state = traced(state)
            return len(traces)

        tx = with_loss_scale(optax.sgd(0.1))
        assert count(lambda s: s.value_and_grad(quadratic)(W)[0], DynamicScale()) == 2
        assert count(lambda s: tx.update(W, s)[1], tx.init(W)) == 1

    def test_it_returns_a_loss_that_overflowed_only_after_scaling(self):
        def loss_fn(w):
            return 1e37 * jnp.sum(w**2)

        theirs = DynamicScale(scale=2.0**16).value_and_grad(loss_fn)(W)[2]
        ours, grads = value_and_grad(loss_fn, "float32")(W, loss_scale=DynamicLossScale(2.0**16))
        assert jnp.isinf(theirs) and ours == loss_fn(W) and not jmp.all_finite(grads)

    def test_it_drops_imaginary_parts_and_casts_float64(self):
        def loss_fn(z):
            return jnp.sum(jnp.abs(z) ** 2)

        def theirs(z):
            return DynamicScale(scale=8.0).value_and_grad(loss_fn)(z)[3]

        def ours(z):
            return scale.unscale(jax.grad(lambda z: scale.scale(loss_fn(z)))(z))

        scale, z = DynamicLossScale(8.0), np.array([1 + 2j], np.complex64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert not jnp.iscomplexobj(jax.eval_shape(theirs, z))
        np.testing.assert_allclose(jax.jit(ours)(z), jax.jit(jax.grad(loss_fn))(z), rtol=TOLERANCE["float32"].programs)
        with jax.enable_x64(True):
            x = np.array([1 / 3])
            assert jax.eval_shape(theirs, x).dtype == jnp.float32
            assert jax.eval_shape(ours, x).dtype == jnp.float64


class TestJmp:
    """jmp 0.0.4."""

    def test_it_loses_its_minimum_in_jit(self):
        def twice(scale):
            return scale.adjust(jnp.bool_(False)).adjust(jnp.bool_(False))

        theirs = deepmind_jmp.DynamicLossScale(jnp.float32(8.0), min_loss_scale=jnp.float32(4.0))
        assert (
            jax.jit(lambda s: s)(theirs).min_loss_scale == 1.0 and jax.jit(twice)(jax.jit(twice)(theirs)).loss_scale < 4
        )
        ours = DynamicLossScale(8.0, min_loss_scale=4.0)
        assert jax.jit(twice)(jax.jit(twice)(ours)).loss_scale == 4.0

    def test_a_float16_scale_is_a_type_error(self):
        with pytest.raises(TypeError):
            deepmind_jmp.DynamicLossScale(jnp.float16(8.0)).adjust(jnp.bool_(False))
        assert DynamicLossScale(jnp.float16(8.0)).adjust(jnp.bool_(False)).loss_scale == 4.0

    def test_static_unscaling_underflows(self):
        grads = jnp.float16(2.0**-10)
        assert deepmind_jmp.StaticLossScale(jnp.float16(2.0**15)).unscale(grads) == 0
        assert StaticLossScale(2.0**15).unscale(grads) == 2.0**-25

    def test_it_cannot_be_mapped_to_other_leaves(self):
        with pytest.raises(AttributeError):
            jax.tree.map(lambda x: None, deepmind_jmp.DynamicLossScale(jnp.float32(8.0)))
        assert jax.tree.map(lambda x: None, DynamicLossScale(8.0)).loss_scale is None

    def test_two_devices_drift_apart(self):
        grads = jnp.ones((2, 3)).at[1, 0].set(jnp.inf)

        def their_step(g):
            return deepmind_jmp.DynamicLossScale(jnp.float32(8.0)).adjust(deepmind_jmp.all_finite(g)).loss_scale

        assert jax.pmap(their_step, axis_name="i")(grads).tolist() == [8.0, 4.0]
        tx = with_loss_scale(optax.sgd(0.1), DynamicLossScale(8.0), axis_name="i")

        def our_step(g):
            return tx.update(g, tx.init(g))[1].loss_scale.loss_scale

        assert jax.pmap(our_step, axis_name="i")(grads).tolist() == [4.0, 4.0]


class TestUnboundedScales:
    """jaxamp and Keras multiply and divide without bounds; the loop below is their automaton."""

    @pytest.mark.parametrize("finite, end", [(True, np.inf), (False, 0.0)])
    def test_they_stick_at_zero_or_infinity(self, finite, end):
        theirs, ours = np.float32(2.0**15), DynamicLossScale(growth_interval=1)
        with np.errstate(over="ignore", under="ignore"):
            for _ in range(200):
                theirs = theirs * np.float32(2.0 if finite else 0.5)
        ours = jax.lax.scan(lambda s, _: (s.adjust(finite), None), jax.tree.map(jnp.array, ours), length=200)[0]
        assert theirs == end and theirs * 2 == theirs
        assert ours.loss_scale == (2.0**24 if finite else 1.0)


class TestOptax:
    def test_apply_if_finite_needs_equal_dtypes(self):
        grads = jnp.ones(3, jnp.float16)
        tx = optax.apply_if_finite(optax.adam(0.1), 5)
        with pytest.raises(TypeError):
            jax.jit(tx.update)(grads, tx.init(W), W)
        tx = with_loss_scale(optax.adam(0.1))
        updates, _ = jax.jit(tx.update)(grads, tx.init(W), W)
        assert updates.dtype == jnp.float32

    def test_apply_if_finite_gives_up_and_writes_nan(self):
        bad = jnp.full(3, jnp.nan)
        for tx, survives in (
            (optax.apply_if_finite(optax.sgd(0.1), 3), False),
            (with_loss_scale(optax.sgd(0.1)), True),
        ):
            params, state = W, tx.init(W)
            for _ in range(6):
                updates, state = tx.update(bad, state, params)
                params = optax.apply_updates(params, updates)
            assert bool(jnp.all(params == W)) == survives

    def test_multi_steps_accumulates_in_the_gradients_dtype(self):
        grads = jnp.full(3, 1e-7, jnp.float16)
        theirs, ours = optax.MultiSteps(optax.sgd(1.0), 2), with_loss_scale(
            optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
        )  # fmt: skip
        params = jnp.zeros(3, jnp.float32)
        dtypes = []
        for tx in (theirs, ours):
            _, state = tx.update(grads, tx.init(params), params)
            updates, _ = tx.update(grads, state, params)
            dtypes.append(updates.dtype)
        assert dtypes == [jnp.float16, jnp.float32]

    def test_clipping_before_the_check_turns_infinity_into_nan_and_zero(self):
        grads = jnp.array([jnp.inf, 1.0])
        clip = optax.clip_by_global_norm(1.0)
        theirs, _ = clip.update(grads, clip.init(grads))
        assert jnp.isnan(theirs[0]) and theirs[1] == 0
        tx = with_loss_scale(optax.chain(clip, optax.sgd(1.0)))
        updates, state = tx.update(grads, tx.init(grads), grads)
        assert not jnp.any(updates) and not state.grads_finite
