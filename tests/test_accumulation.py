"""Gradient accumulation: micro-batches in float32, each with its own loss scale, equal the whole batch."""

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
from comparisons import assert_same_bits, same_bits

import jmp_train as jmp
from jmp_train import with_loss_scale
from jmp_train.flax_bridge import TrainState

MICRO = 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, MICRO, 8, 5)).astype(np.float32)  # three steps, four micro-batches of eight rows
Y = RNG.normal(size=(3, MICRO, 8, 2)).astype(np.float32)
PARAMS = {"w": RNG.normal(size=(5, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
HALVES = jax.tree.map(lambda x: x.astype(np.float16), PARAMS)


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def start(tx, params=PARAMS):
    return TrainState.create(apply_fn=loss_fn, params=jax.tree.map(jnp.array, params), tx=tx)


@functools.cache
def make_step(policy):
    grad_fn = jmp.value_and_grad(loss_fn, policy)

    @jax.jit
    def step(state, x, y):
        loss, grads = grad_fn(state.params, x, y, loss_scale=jmp.get_loss_scale(state))
        return state.apply_gradients(grads=grads), loss

    return step


def by_hand(rate=0.1):
    """SGD on the whole batches, in NumPy float64."""
    w, b = (PARAMS[name].astype(np.float64) for name in "wb")
    for x, y in zip(X.reshape(3, -1, 5).astype(np.float64), Y.reshape(3, -1, 2).astype(np.float64), strict=True):
        error = 2 * (x @ w + b - y) / y.size
        w, b = w - rate * x.T @ error, b - rate * error.sum(0)
    return {"w": w, "b": b}


def accumulate(tx, policy, spoil=(), params=PARAMS):
    """Takes all micro-batches; before each of those in `spoil` it takes one with an infinity."""
    state, step, scales = start(tx, params), make_step(policy), []
    for i, (x, y) in enumerate(zip(X.reshape(-1, 8, 5), Y.reshape(-1, 8, 2), strict=True)):
        batches = [np.full_like(x, np.inf)] * (i in spoil) + [x]
        for each in batches:
            state, _ = step(state, each, y)
            scales.append(float(jmp.get_loss_scale(state).loss_scale))
    return state, scales


SGD = optax.sgd(0.1)
# Not Adam, which would hide a wrong scale of the gradients.


@pytest.mark.parametrize("policy, tolerance", [("float32", 1e-5), ("mixed_bfloat16", 3e-2), ("mixed_float16", 3e-3)])
def test_multi_steps_equals_the_whole_batch(policy, tolerance):
    tx = with_loss_scale(optax.MultiSteps(SGD, MICRO), jmp.DynamicLossScale(2.0**6, growth_interval=3))
    state, scales = accumulate(tx, policy)
    assert len(set(scales)) > 1  # it grew between the micro-batches of one step
    assert state.opt_state.inner_state.acc_grads["w"].dtype == jnp.float32
    assert state.opt_state.inner_state.gradient_step == 3 and state.step == 12
    expected = by_hand()
    for name in PARAMS:
        np.testing.assert_allclose(state.params[name], expected[name], rtol=tolerance, atol=tolerance)
    assert np.abs(expected["w"] - PARAMS["w"]).max() > 0.05


SPOILED = with_loss_scale(optax.MultiSteps(optax.adam(0.1), MICRO), jmp.DynamicLossScale(2.0**10))


@pytest.mark.parametrize("spoil", [(0,), (1, 3), (4, 5, 6, 11)], ids=str)
def test_an_overflow_in_one_micro_batch_is_left_out(spoil):
    """Bit for bit, in a policy where the scale (which backs off) is a power of two that changes nothing."""
    clean, _ = accumulate(SPOILED, "mixed_bfloat16")
    seen, scales = accumulate(SPOILED, "mixed_bfloat16", spoil)
    assert same_bits(seen.params, clean.params) and seen.step == clean.step
    assert_same_bits(seen.opt_state.inner_state, clean.opt_state.inner_state)
    assert scales[-1] == 2.0 ** (10 - len(spoil))


def test_accumulators_of_16_bit_parameters_are_float32():
    """With masters, whose steps equal those by hand, and without."""
    params = HALVES
    tx = with_loss_scale(jmp.with_master_weights(optax.MultiSteps(SGD, MICRO)), jmp.DynamicLossScale(2.0**10))
    state, _ = accumulate(tx, "O2", params=params)
    assert state.opt_state.inner_state.inner_state.acc_grads["w"].dtype == jnp.float32
    assert state.params["w"].dtype == jnp.float16
    masters = jmp.master_params(state.opt_state)
    for name, expected in by_hand().items():
        np.testing.assert_allclose(masters[name], expected, rtol=3e-3, atol=3e-3)
    bare, _ = accumulate(with_loss_scale(optax.MultiSteps(SGD, MICRO)), "O2", params=params)
    assert bare.opt_state.inner_state.acc_grads["w"].dtype == jnp.float32


def make_scanned_step(policy):
    """One optimizer step over micro-batches `[MICRO, 8, ...]`, whose unscaled float32 gradients a scan sums."""
    grad_fn = jmp.value_and_grad(loss_fn, policy)

    @jax.jit
    def step(state, x, y):
        def add_micro_batch(carry, batch):
            total, scale = carry
            _, grads = grad_fn(state.params, *batch, loss_scale=scale)
            scale = scale.adjust(jmp.all_finite(grads))
            return (jax.tree.map(lambda t, g: t + g / MICRO, total, grads), scale), scale.loss_scale

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params)
        (grads, _), scales = jax.lax.scan(add_micro_batch, (zeros, jmp.get_loss_scale(state)), (x, y))
        return state.apply_gradients(grads=grads), scales

    return step


@pytest.mark.parametrize("policy, tolerance", [("float32", 1e-5), ("mixed_float16", 3e-3)])
def test_a_scan_in_the_step_equals_the_whole_batch(policy, tolerance):
    tx = with_loss_scale(SGD, jmp.DynamicLossScale(2.0**10, growth_interval=2))
    state, step = start(tx), make_scanned_step(policy)
    for x, y in zip(X, Y, strict=True):
        state, scales = step(state, x, y)
        assert len(set(np.asarray(scales).tolist())) > 1
    for name, expected in by_hand().items():
        np.testing.assert_allclose(state.params[name], expected, rtol=tolerance, atol=tolerance)
    assert step._cache_size() == 1
    before = state
    state, _ = step(state, np.where(np.arange(MICRO)[:, None, None] == 1, np.float32(np.inf), X[0]), Y[0])
    assert same_bits(state.params, before.params) and state.step == 3
    assert jmp.get_loss_scale(state).loss_scale == jmp.get_loss_scale(before).loss_scale / 2


def test_the_compiled_loop_carries_float32():
    """No carry of the loop over micro-batches has 16 bits, also for 16-bit parameters."""
    step, state = make_scanned_step("O2"), start(with_loss_scale(jmp.with_master_weights(SGD)), HALVES)
    text = step.lower(state, X[0], Y[0]).compile().as_text()
    (carried,) = re.findall(r"= \((.*)\) while\(", text)
    assert "f32[5,2]" in carried and "f16" not in carried
