"""Every optimizer of optax inside `with_loss_scale`: its own update if gradients are finite, else no change.

And every optimizer with its state in 16 bits: its own update, up to rounding.
"""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import assert_same_bits, assert_two_programs_agree
from optax import contrib
from optax_rows import ALIASES, CONTRIBUTED, ROWS

from jmp_train import DynamicLossScale, with_loss_scale, with_low_precision_state, with_master_weights

PARAMS = {"b": np.float32([0.5, -0.25, 1.0]), "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)}
PARAMS = jax.tree.map(jnp.asarray, PARAMS)

# Types are decided for every row without compiling. Of each kind of state and of extra argument, some are compiled; the
# slow tier compiles all.
COMPILED = {
    "adafactor", "adamw", "noisy_sgd", "polyak_sgd", "sgd", "chain", "multi_steps", "partition", "masked",
    "inject_hyperparams", "backtracking",
}  # fmt: skip


def rows(*slow):
    fast = COMPILED.difference(slow)
    marked = [pytest.param(row, marks=[pytest.mark.slow] * (row.name not in fast)) for row in ROWS]
    return pytest.mark.parametrize("row", marked, ids=str)


def gradients(seed, bad=None):
    rng = np.random.default_rng(seed)
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), PARAMS)
    if bad is not None:
        grads["w"][2, 1] = bad
    return jax.tree.map(jnp.asarray, grads)


def stepper(row, tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **row.extra(params, grads))
        return updates, optax.apply_updates(params, updates), state

    return step


def test_the_list_is_complete():
    """A new optimizer in a new optax fails here, by name."""

    def module(name):
        found = getattr(optax, name)
        return getattr(getattr(found, "func", found), "__module__", "")

    public = {name for name in dir(optax) if module(name) == "optax._src.alias"}
    assert public == {row.name for row in ALIASES}
    assert {row.name for row in CONTRIBUTED} <= set(dir(contrib))
    assert {row.name for row in ROWS} >= COMPILED


@rows("adafactor")
def test_eagerly_a_finite_step_is_the_bare_step(row):
    bare, wrapped = row.build(), with_loss_scale(row.build())
    state, wrapped_state = bare.init(PARAMS), wrapped.init(PARAMS)
    for seed in range(2):
        grads = gradients(seed)
        updates, _, state = stepper(row, bare)(PARAMS, state, grads)
        wrapped_updates, _, wrapped_state = stepper(row, wrapped)(PARAMS, wrapped_state, grads)
        assert_same_bits(wrapped_updates, updates)
        assert_same_bits(wrapped_state.inner_state, state)


@rows()
def test_jitted_the_good_steps_are_the_bare_ones_and_the_bad_leave_no_trace(row):
    bare, wrapped = row.build(), with_loss_scale(row.build(), DynamicLossScale(16.0))
    bare_step = jax.jit(stepper(row, bare))
    step = jax.jit(chex.assert_max_traces(stepper(row, wrapped), n=1))
    params, state = PARAMS, bare.init(PARAMS)
    wrapped_params, wrapped_state = PARAMS, wrapped.init(PARAMS)
    for seed, bad in enumerate([None, np.nan, None, -np.inf]):
        if bad is None:
            _, params, state = bare_step(params, state, gradients(seed))
        before = wrapped_params, wrapped_state
        updates, wrapped_params, wrapped_state = step(*before, gradients(seed, bad))
        if bad is not None:
            assert_same_bits((wrapped_params, wrapped_state.inner_state), (before[0], before[1].inner_state))
            assert not any(np.any(u) for u in jax.tree.leaves(updates))
        assert bool(wrapped_state.grads_finite) == (bad is None)
        if seed == 0:  # later ones carry its roundings, which some optimizers enlarge
            assert_two_programs_agree((wrapped_params, wrapped_state.inner_state), (params, state))
    assert int(wrapped_state.skipped_steps) == 2


def carried(row, tx, params, grads):
    """The types of (params, state) before and after a scan of conditional updates."""
    step = stepper(row, tx)

    def program(params, grads):
        def body(carry, grads):
            params, state = carry

            def update(state):
                return step(params, state, grads)[1:]

            return jax.lax.cond(state.skipped_steps < 5, update, lambda state: (params, state), state), None

        start = params, tx.init(params)
        return start, jax.lax.scan(body, start, jax.tree.map(lambda g: jnp.stack([g, g]), grads))[0]

    return jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(program, params, grads))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_state_is_a_stable_carry(row):
    before, after = carried(row, with_loss_scale(row.build()), PARAMS, halved(gradients(0), jnp.float16))
    assert before == after


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_state_is_a_stable_carry_for_16_bit_parameters(row):
    """Float32 gradients flip the dtypes of a bare optimizer's state. Where optax itself refuses them, masters help."""
    params, inner = halved(PARAMS, jnp.bfloat16), row.build()
    if row.name in REFUSES_16_BIT_PARAMETERS:
        with pytest.raises((TypeError, FutureWarning)):
            jax.eval_shape(stepper(row, inner), params, inner.init(params), gradients(0))
        inner = with_master_weights(inner)
    before, after = carried(row, with_loss_scale(inner), params, gradients(0))
    assert before == after


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_state_in_16_bits_is_a_stable_carry(row):
    tx = with_loss_scale(with_low_precision_state(row.build()))
    if row.name in LEARNS_FROM_DIFFERENCES:
        with pytest.raises(ValueError, match=r"`inner` has .*, which learns from differences of what it stores"):
            tx.init(PARAMS)
    else:
        before, after = carried(row, tx, PARAMS, gradients(0))
        assert before == after


@rows("backtracking", "noisy_sgd", "polyak_sgd")
def test_a_state_in_16_bits_follows_float32(row):
    """Ten updates from the same gradients. A rounding is off by 2^-8 at most, 2^-9 in the root mean square."""
    if row.name in LEARNS_FROM_DIFFERENCES:
        return
    rng = np.random.default_rng(0)
    params = {"b": np.linspace(-1, 1, 32), "w": rng.normal(size=(64, 32))}
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(0.3, 1, (10, *x.shape)), jnp.float32), params)
    params = jax.tree.map(jnp.float32, params)

    def run(tx):
        def body(state, grads):
            updates, state = tx.update(grads, state, params, **row.extra(params, grads))
            return state, updates

        return jax.jit(lambda state: jax.lax.scan(body, state, grads))(tx.init(params))

    def deviation(found, wanted):
        found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
        return np.sqrt(np.mean((found - wanted) ** 2) / max(np.mean(wanted**2), 1e-30))

    (state, updates), (low, low_updates) = run(row.build()), run(with_low_precision_state(row.build()))
    pairs = list(zip(jax.tree.leaves(low.inner_state), jax.tree.leaves(state), strict=True))
    assert all(deviation(x, wanted) < 2**-6 for x, wanted in pairs if x.dtype == jnp.bfloat16)
    # Where an update is a sign, a rounding turns some of those that are nearly zero. MoMo's step size is a difference
    # between the loss, here the same at every step, and sums over the state.
    bound = 0.12 if row.name == "momo" else 0.06
    assert max(jax.tree.leaves(jax.tree.map(deviation, low_updates, updates))) < bound


def halved(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


LEARNS_FROM_DIFFERENCES = {"backtracking", "centred_rmsprop", "lbfgs", "zoom"}
REFUSES_16_BIT_PARAMETERS = {"galore", "lbfgs", "mechanize", "novograd"}


MONITORED = optax.chain(optax.adam(0.1), optax.monitor({"norm": optax.tree.norm}))


def test_what_only_an_update_adds_to_a_state_is_zero_until_a_step_is_taken():
    bare, tx = MONITORED, with_loss_scale(MONITORED)
    state, bare_state = tx.init(PARAMS), bare.init(PARAMS)
    _, skipped = tx.update(gradients(0, np.nan), state, PARAMS)
    assert skipped.inner_state[1].measurements == {"norm": 0}
    for seed, start in enumerate((state, skipped)):
        updates, after = tx.update(gradients(seed), start, PARAMS)
        bare_updates, bare_after = bare.update(gradients(seed), bare_state, PARAMS)
        assert_same_bits((updates, after.inner_state), (bare_updates, bare_after))
        _, kept = tx.update(gradients(2, np.inf), after, PARAMS)
        assert_same_bits(kept.inner_state, after.inner_state)


def test_a_state_of_which_an_update_leaves_something_out():
    forgetful = optax.GradientTransformation(
        lambda params: {"a": params["b"]}, lambda grads, state, params: (grads, {})
    )
    tx = with_loss_scale(forgetful)
    message = r"^`inner` made \['a'\] in its state, which its update left out: a skip has to restore it\.$"
    with pytest.raises(ValueError, match=message):
        tx.update(gradients(0), tx.init(PARAMS), PARAMS)


def test_a_count_that_becomes_a_fraction_is_not_cut_off():
    bare = optax.GradientTransformation(
        lambda params: jnp.zeros((), jnp.int32), lambda u, s, params=None: (u, s + 0.25)
    )
    tx = with_loss_scale(bare)
    state = tx.init(PARAMS)
    for grads in (gradients(0), gradients(1), gradients(2, np.inf), gradients(3)):
        _, state = tx.update(grads, state, PARAMS)
    assert state.inner_state == 0.75


def test_lookahead_has_gradients_of_its_fast_parameters():
    bare = optax.lookahead(optax.adam(0.1), sync_period=3, slow_step_size=0.5)
    tx, params = with_loss_scale(bare), optax.LookaheadParams.init_synced(PARAMS)
    state, bare_state, bare_params = tx.init(params), bare.init(params), params
    for seed in range(7):
        updates, bare_state = bare.update(gradients(seed), bare_state, bare_params)
        bare_params = optax.apply_updates(bare_params, updates)
        for grads in (gradients(seed, np.inf), gradients(seed)):  # a step is skipped before each
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
    assert_same_bits((params, state.inner_state), (bare_params, bare_state))
    message = r"^`grads` must have the structure of `params`: missing \['b', 'w'\], not in `params` \['fast/b', .*\]\."
    with pytest.raises(ValueError, match=message):
        tx.update(jax.tree.map(jnp.ones_like, params), state, params)
