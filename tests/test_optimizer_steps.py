"""Whole runs: a run with an overflow in one batch equals, bit for bit, a run without that batch."""

# Optax types trees and states as one union, in which pyright knows no attribute or index.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import assert_same_bits, same_bits
from optax_rows import loss as quadratic

from jmp_train import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    all_finite,
    get_loss_scale,
    get_policy,
    select_tree,
    value_and_grad,
    with_loss_scale,
)

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(100, 16, 8)).astype(np.float32)
TARGETS = np.tanh(INPUTS @ RNG.normal(size=(8, 4)).astype(np.float32))
PARAMS = {
    "hidden": jnp.asarray((RNG.normal(size=(8, 16)) / 3).astype(np.float32)),
    "bias": jnp.asarray(np.zeros(16, np.float32)),
    "out": jnp.asarray((RNG.normal(size=(16, 4)) / 4).astype(np.float32)),
}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.05, 5, 50)

INNER = {
    "sgd": lambda: optax.sgd(0.1),
    "schedule": lambda: optax.sgd(SCHEDULE),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(SCHEDULE, weight_decay=0.1),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lbfgs": lambda: optax.lbfgs(),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
    "accumulate": lambda: optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation(),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}


def network(params, batch):
    inputs, targets = batch
    hidden = jnp.tanh(inputs @ params["hidden"] + params["bias"].astype(inputs.dtype))
    return jnp.mean(jnp.square((hidden @ params["out"]).astype(jnp.float32) - targets))


def batches(*indices, poison=()):
    """The batches of these numbers; those in `poison` have an infinite input."""
    for i in indices:
        inputs = INPUTS[i].copy()
        if i in poison:
            inputs[3, 2] = np.inf
        yield inputs, TARGETS[i]


@cache
def stepper(tx, policy, loss_fn):
    """The jitted step, compiled once for all runs of one transformation."""
    grad_fn = value_and_grad(loss_fn, get_policy(policy))

    @jax.jit
    def step(params, state, batch):
        loss, grads = grad_fn(params, batch, loss_scale=get_loss_scale(state))
        extra = {"value": loss, "grad": grads, "value_fn": partial(loss_fn, batch=batch)}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def train(tx, data, params: Any = PARAMS, policy="float32", scales=None, loss=network):
    step = stepper(tx, policy, loss)
    state = tx.init(params)
    for batch in data:
        params, state = step(params, state, batch)
        if scales is not None:
            scales.append(float(get_loss_scale(state).loss_scale))
    return params, state


@pytest.mark.parametrize("name", INNER)
def test_a_run_with_one_overflow_equals_one_that_never_saw_that_batch(name):
    tx = with_loss_scale(INNER[name](), StaticLossScale(2.0**10))
    params, state = train(tx, batches(0, 1, 2, 3, 4, poison={2}))
    expected, clean = train(tx, batches(0, 1, 3, 4))
    assert int(state.skipped_steps) == 1 and int(clean.skipped_steps) == 0
    assert_same_bits((params, state.inner_state), (expected, clean.inner_state))


def test_the_scale_backs_off_once_and_grows_again_on_time():
    tx = with_loss_scale(optax.sgd(0.1), DynamicLossScale(64.0, growth_interval=2))
    scales = []
    train(tx, batches(*range(6), poison={1}), scales=scales)
    assert scales == [64.0, 32.0, 32.0, 64.0, 64.0, 128.0]


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_100_steps_equal_the_unscaled_run_bit_for_bit(policy, name):
    """A power of two changes exponents only, and both formats have the exponents of float32.

    The unscaled run is the same program with a scale of 1, because XLA may round two programs differently (FMA).
    """
    runs = []
    for start in (1.0, 2.0**12):
        tx = with_loss_scale(INNER[name](), DynamicLossScale(start, growth_interval=200))
        params, state = train(tx, batches(*range(100)), policy=policy)
        assert get_loss_scale(state).loss_scale == start and int(state.skipped_steps) == 0
        runs.append((params, state.inner_state))
    assert_same_bits(*runs)


def linear(params, batch):
    return jnp.mean(jnp.square(batch[0] @ params - batch[1]))


def test_eagerly_a_growing_scale_equals_none_bit_for_bit():
    start = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)  # each operation on each shape is compiled
    with jax.disable_jit():
        scale = DynamicLossScale(2.0**12, growth_interval=1)
        scaled, state = train(with_loss_scale(INNER["momentum"](), scale), batches(*range(2)), start, loss=linear)
        plain, bare = train(
            with_loss_scale(INNER["momentum"](), NoOpLossScale()), batches(*range(2)), start, loss=linear
        )
    assert get_loss_scale(state).loss_scale == 2.0**14
    assert_same_bits((scaled, state.inner_state), (plain, bare.inner_state))


def test_an_overflow_in_one_micro_batch_costs_that_micro_batch():
    tx = with_loss_scale(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation())
    params, state = train(tx, batches(0, 1, 2, poison={1}))
    expected, _ = train(tx, batches(0, 2))
    assert same_bits(params, expected) and int(state.inner_state.mini_step) == 0


def test_a_gradient_penalty_is_scaled_through_both_derivatives():
    def penalised(params, batch):
        slopes = jax.grad(network)(params, batch)
        return network(params, batch) + 0.1 * quadratic(slopes)

    scale = DynamicLossScale(2.0**10)
    batch = next(batches(0))
    plain = jax.jit(jax.grad(penalised))(PARAMS, batch)
    scaled = jax.jit(lambda p: scale.unscale(jax.grad(lambda q: scale.scale(penalised(q, batch)))(p)))(PARAMS)
    for name in plain:
        np.testing.assert_allclose(scaled[name], plain[name], rtol=1e-5, atol=1e-7)
    tx = with_loss_scale(optax.sgd(0.1), scale)
    _, state = tx.update(jax.tree.map(lambda x: x / 0, scaled), tx.init(PARAMS), PARAMS)
    assert not state.grads_finite


def test_two_losses_and_two_optimizers_overflow_apart():
    generator, critic = with_loss_scale(optax.adam(1e-2)), with_loss_scale(optax.sgd(0.1))
    states = {"g": generator.init(PARAMS["hidden"]), "c": critic.init(PARAMS["out"])}
    good = jnp.ones_like(PARAMS["hidden"])
    up_g, states["g"] = generator.update(good, states["g"], PARAMS["hidden"])
    up_c, states["c"] = critic.update(jnp.full_like(PARAMS["out"], jnp.nan), states["c"], PARAMS["out"])
    assert jnp.all(up_g != 0) and not jnp.any(up_c)
    assert get_loss_scale(states["g"]).loss_scale == 2 * get_loss_scale(states["c"]).loss_scale


def test_statistics_averages_and_counters_of_a_skipped_step_stay():
    """Values that a step updates beside the parameters: BatchNorm statistics, a parameter average, a step counter."""
    tx = with_loss_scale(optax.adam(1e-2))

    def loss_fn(params, stats, batch):
        mean = jnp.mean(batch[0], 0)
        return network(params, (batch[0] - mean, batch[1])), {"mean": 0.9 * stats["mean"] + 0.1 * mean}

    @jax.jit
    def step(carry, batch):
        params, state, rest = carry
        grads, stats = jax.grad(loss_fn, has_aux=True)(params, rest["stats"], batch)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        ema = optax.incremental_update(params, rest["ema"], 0.1)
        new = {"stats": stats, "ema": ema, "step": rest["step"] + 1}
        return params, state, select_tree(state.grads_finite, new, rest)

    def finish(data):
        carry = PARAMS, tx.init(PARAMS), {"stats": {"mean": jnp.zeros(8)}, "ema": PARAMS, "step": jnp.int32(0)}
        for batch in data:
            carry = step(carry, batch)
        return carry

    poisoned, clean = finish(batches(0, 1, 2, poison={1})), finish(batches(0, 2))
    assert same_bits((poisoned[0], poisoned[2]), (clean[0], clean[2])) and int(poisoned[2]["step"]) == 2


def test_a_gradient_that_is_finite_scaled_and_infinite_unscaled_is_caught():
    scale = StaticLossScale(2.0**-10)
    scaled = {"w": jnp.array([1e38, 1.0])}
    assert all_finite(scaled) and not all_finite(scale.unscale(scaled))
    tx = with_loss_scale(optax.sgd(0.1), scale)
    _, state = tx.update(scale.unscale(scaled), tx.init(scaled))
    assert not state.grads_finite


def test_duplicate_indices_that_add_up_beyond_float16_are_an_overflow():
    table = jnp.zeros((3, 2), jnp.float16)
    scaled = jax.vjp(lambda t: t[jnp.array([1, 1])], table)[1](jnp.full((2, 2), 64_000, jnp.float16))[0]
    assert not jnp.isfinite(scaled[1, 0])
    tx = with_loss_scale(optax.sgd(0.1))
    updates, state = tx.update(get_loss_scale(tx.init(table)).unscale(scaled), tx.init(table), table)
    assert not jnp.any(updates) and state.overflow_counts.tolist() == [1]
