"""Optimizer states stored in bfloat16: which leaves, that they follow float32, and that other code is not affected."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import functools
import re

import chex
import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import assert_same_bits
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax import contrib

import jmp_train as jmp
from jmp_train import (
    _low_precision_state,
    _master_weights,
    with_loss_scale,
    with_low_precision_state,
    with_master_weights,
    with_stochastic_rounding,
)
from jmp_train._paths import leaf_paths
from jmp_train._state_leaves import traced_state
from jmp_train._stochastic_rounding import noise_at


def parameters(dtype=jnp.float32):
    w = np.random.default_rng(0).normal(size=(16, 8))
    tree = {"dense": {"w": w, "b": np.zeros(8)}, "scalar": np.float64(1)}
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, dtype)), tree)


def gradients(seed, params):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), np.float32), params)


def stepper(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(tx, params, steps=range(5), state=None, step=None, grads_of=gradients):
    step = step or jax.jit(stepper(tx))
    state = tx.init(params) if state is None else state
    for seed in steps:
        params, state = step(params, state, grads_of(seed, params))
    return params, state


def stored(state):
    """The paths of the leaves that are stored in 16 bits."""
    leaves = zip(leaf_paths(state), jax.tree.leaves(state), strict=True)
    return {path for path, x in leaves if x.dtype == jnp.bfloat16}


BOTH = {f"0/{moment}/dense/{name}" for moment in ("mu", "nu") for name in "bw"}
STORED = {
    "adam": (lambda: optax.adam(1e-3), BOTH),
    "clipped": (
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        {f"1/{path}" for path in BOTH},
    ),
    "momentum": (lambda: optax.sgd(1e-3, momentum=0.9), {"0/trace/dense/w", "0/trace/dense/b"}),
    "lion": (lambda: optax.lion(1e-3), {"0/mu/dense/w", "0/mu/dense/b"}),
    # The factors of a matrix's second moment are small; only that of a vector is stored in full.
    "adafactor": (lambda: optax.adafactor(1e-3, min_dim_size_to_factor=2), {"0/v/dense/b"}),
    "accumulated": (
        lambda: optax.MultiSteps(optax.adam(1e-3), 2),
        {f"inner_opt_state/{path}" for path in BOTH} | {"acc_grads/dense/w", "acc_grads/dense/b"},
    ),
    "hyperparameters": (
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
        {f"inner_state/{path}" for path in BOTH},
    ),
    "masked": (
        lambda: optax.masked(optax.adam(1e-3), lambda p: jax.tree.map(lambda x: x.ndim == 2, p)),
        {"inner_state/0/mu/dense/w", "inner_state/0/nu/dense/w"},
    ),
    # A leaf that starts equal to the parameters stays float32, because its distance from them is small at first.
    "prodigy": (
        lambda: contrib.prodigy(1e-3),
        {f"{name}/dense/{leaf}" for name in ("exp_avg", "exp_avg_sq", "grad_sum") for leaf in "bw"},
    ),
    "schedule free": (
        lambda: contrib.schedule_free_adamw(1e-3),
        {"base_optimizer_state/0/nu/dense/w", "base_optimizer_state/0/nu/dense/b"},
    ),
    "masters": (lambda: with_master_weights(optax.adam(1e-3)), {f"inner_state/{path}" for path in BOTH}),
}


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_in_16_bits(name):
    build, paths = STORED[name]
    params = parameters(jnp.bfloat16 if name == "masters" else jnp.float32)
    tx = with_low_precision_state(build())
    state = jax.eval_shape(tx.init, params)
    assert stored(state.inner_state) == paths
    after = jax.eval_shape(tx.update, gradients(0, params), state, params)[1]
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_globs_and_functions_pick():
    def picked(where, tx=None):
        return stored(with_low_precision_state(tx or optax.adam(1e-3), where=where).init(parameters()).inner_state)

    second = {path for path in BOTH if "nu" in path}
    assert picked("nu") == picked(["0/nu"]) == second
    assert picked(("nu/dense/w", "mu/*/b")) == {"0/nu/dense/w", "0/mu/dense/b"}
    assert picked(lambda path, leaf: leaf.ndim == 2) == {path for path in BOTH if path.endswith("w")}
    # The function is called with arrays only: the count has no first axis.
    assert picked(lambda path, leaf: leaf.shape[0] > 1) == BOTH
    factors = optax.adafactor(1e-3, min_dim_size_to_factor=2)
    assert picked("v_row/dense/w", factors) == {"0/v_row/dense/w"}  # of any shape, if asked for
    assert picked("z", contrib.schedule_free_sgd(1e-3)) == {"z/dense/w", "z/dense/b"}


def test_masters_and_hyperparameters_are_never_picked():
    masters = with_low_precision_state(with_master_weights(optax.adam(1e-3)), where=lambda path, leaf: leaf.ndim == 2)
    state = masters.init(parameters(jnp.bfloat16))
    assert jmp.master_params(state)["dense"]["w"].dtype == jnp.float32
    assert state.inner_state.inner_state[0].nu["dense"]["w"].dtype == jnp.bfloat16
    rates = optax.inject_hyperparams(optax.adam)(learning_rate=jnp.array([1e-3, 1e-4, 1e-5]))
    state = with_low_precision_state(rates).init(jnp.ones(3))  # the path of a parameter that is no tree ends every path
    assert stored(state.inner_state) == {"inner_state/0/mu", "inner_state/0/nu"}


@pytest.mark.parametrize(
    "same",
    [
        lambda x: x.astype(jnp.float32),
        lambda x: jnp.array(x, copy=True),
        lambda x: x.astype(jnp.float16).astype(jnp.float32),
        lambda x: jax.device_put(x, jax.devices()[0]),
        lambda x: jax.lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        jax.lax.optimization_barrier,
        jax.jit(lambda x: x),
    ],
    ids=["cast", "copy", "there and back", "device_put", "constraint", "barrier", "jit"],
)
def test_what_starts_as_the_parameters_stays(same):
    def init(params):
        moment = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float16).astype(x.dtype), params)
        return {"average": jax.tree.map(same, params), "moment": moment, "twice": jax.tree.map(lambda x: x * 2, params)}

    tx = with_low_precision_state(optax.GradientTransformation(init, lambda g, s, p=None: (g, s)))
    expected = {"moment/dense/w", "moment/dense/b", "twice/dense/w", "twice/dense/b"}
    assert stored(tx.init(parameters()).inner_state) == expected


def test_a_warning_if_nothing_is_stored():
    params = optax.LookaheadParams.init_synced(parameters())
    with pytest.warns(
        UserWarning, match=r"stores nothing in 16 bits: .* large ones are fast_state/0/mu/dense/w, fast_st"
    ) as warned:
        with_low_precision_state(optax.lookahead(optax.adam(1e-3), 5, 0.5)).init(params)
    assert warned[0].filename == __file__
    picked = with_low_precision_state(optax.lookahead(optax.adam(1e-3), 5, 0.5), where=["mu", "nu"]).init(params)
    assert len(stored(picked)) == 4


def test_the_longest_end_of_a_path_says_whose_a_leaf_is():
    params = {"w": jnp.ones(2), "a": {"w": jnp.ones(2)}}
    _, leaves = traced_state(optax.trace(0.9).init, params)
    assert {leaf.path: leaf.parameter for leaf in leaves} == {"trace/w": "w", "trace/a/w": "a/w"}


@pytest.mark.parametrize(
    ("names", "shown"), [("abc", "large ones are a, b, c."), ("abcd", "large ones are a, b, c, ....")]
)
def test_the_warning_names_three(names, shown):
    init = lambda params: {name: jnp.zeros((16, 9)) for name in names}  # noqa: E731
    tx = with_low_precision_state(optax.GradientTransformation(init, lambda g, s, p=None: (g, s)))
    with pytest.warns(UserWarning, match=re.escape(shown)):
        tx.init(parameters())


def test_the_warning_begins_at_two_numbers():
    tx = with_low_precision_state(optax.GradientTransformation(lambda p: jnp.zeros((1, 2)), optax.identity().update))
    with pytest.warns(UserWarning, match="large ones are the state itself."):
        tx.init({"w": jnp.ones(1)})


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["copies", "integers", "one number"])
def test_no_warning_and_nothing_stored_where_nothing_can_be(kind):
    init = {
        "copies": lambda p: jax.tree.map(lambda x: jnp.array(x, copy=True), p),
        "integers": lambda p: jax.tree.map(lambda x: jnp.zeros(x.shape, np.int32), p),
        "one number": lambda p: jnp.zeros(1),
    }[kind]
    tx = with_low_precision_state(optax.GradientTransformation(init, lambda g, s, p=None: (g, s)))
    assert not stored(tx.init({"w": jnp.ones(1)} if kind == "one number" else parameters()))


@pytest.mark.filterwarnings("error")
def test_no_warning_where_placeholders_stand_for_parameters():
    """As in `optax.tree_map_params`, where the only arrays of Muon's state are its coefficients."""
    tx = with_low_precision_state(contrib.muon(1e-2))
    state = tx.init(parameters())
    ones = optax.tree_map_params(tx, jnp.ones_like, state)
    assert len(stored(ones)) == len(stored(state)) > 0
    chex.assert_trees_all_equal_shapes_and_dtypes(ones, state)


def test_models_with_functions_as_leaves():
    """As in Equinox: the functions are masked at `init`, or passed to `update` with the rest of the model."""
    arrays = parameters()
    model, grads = {**arrays, "activation": jax.nn.relu}, gradients(0, arrays)
    tx = with_low_precision_state(
        optax.masked(optax.adam(1e-3), {**jax.tree.map(lambda _: True, arrays), "activation": False})
    )
    assert len(stored(tx.init(model))) == 4
    tx = with_low_precision_state(optax.adam(1e-3))
    state = tx.init({**arrays, "activation": None})
    updates = jax.eval_shape(lambda grads: tx.update({**grads, "activation": None}, state, model)[0], grads)
    assert updates["activation"] is None


def test_moments_of_a_parameter_share_their_random_words():
    """One Threefry call per element serves both, and one more makes the key of the step."""
    tx = with_low_precision_state(optax.adam(1e-3))
    params = {"w": jnp.ones(8)}
    program = str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    assert program.count("threefry2x32") == 1 + program.count("threefry_fold_in")


def test_the_derivative_of_a_rounding_is_one():
    """Derivatives with respect to hyperparameters pass through the state."""

    def final(rate, tx_of, dtype):
        tx, params = tx_of(rate), jnp.ones(4, dtype)
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(jnp.full(4, 0.3), state, params)
            params = optax.apply_updates(params, updates)
        return jnp.sum(params.astype(jnp.float32))

    def momentum(rate):
        return optax.chain(optax.trace(rate), optax.scale(-0.1))

    gradient = jax.jit(jax.grad(final), static_argnums=(1, 2))
    exact = gradient(0.5, momentum, jnp.float32)
    found = gradient(0.5, lambda rate: with_low_precision_state(momentum(rate)), jnp.float32)
    assert float(found) == pytest.approx(float(exact), rel=0.02)


def test_the_second_moment_falls_as_in_float32():
    """A decay of 0.1 % a step is less than half of bfloat16's last bit: rounded to nearest, the moment stays at 2."""
    adam, params = optax.scale_by_adam(), np.zeros(1000, np.float32)

    def nearest(x):
        return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)

    def after(tx, store=lambda state: state):
        def body(step, state):
            return store(tx.update(jnp.full(1000, jnp.where(step < 20, 10.0, 0.1)), state, params)[1])

        return jax.jit(lambda state: jax.lax.fori_loop(0, 6020, body, state))(tx.init(params))

    exact = float(after(adam).nu[0])
    assert exact == pytest.approx(0.014872, rel=1e-4)
    standing = after(adam, lambda state: state._replace(mu=nearest(state.mu), nu=nearest(state.nu)))
    assert float(standing.nu[0]) > 100 * exact
    found = np.asarray(after(with_low_precision_state(adam)).inner_state.nu, np.float64)
    # Each of the last thousand steps adds an error of variance below (2^-8 nu)^2 / 4, of which 0.999 remains.
    assert abs(found.mean() / exact - 1) < 4 * 2.0**-9 * np.sqrt(500) / np.sqrt(1000)


def test_moments_follow_float32_and_are_unbiased():
    params = np.zeros(20_000, np.float32)
    bare, low = optax.adam(1e-3), with_low_precision_state(optax.adam(1e-3))
    rng = np.random.default_rng(0)
    state, low_state = bare.init(params), low.init(params)
    updates = low_updates = params
    update = jax.jit(lambda grads, state, low_state: (bare.update(grads, state), low.update(grads, low_state)))
    for _ in range(20):
        grads = np.float32(rng.normal(size=20_000))
        (updates, state), (low_updates, low_state) = update(grads, state, low_state)
    for moment in ("mu", "nu"):
        exact = np.asarray(getattr(state[0], moment), np.float64)
        found = np.asarray(getattr(low_state.inner_state[0], moment), np.float64)
        scale = np.sqrt(np.mean(exact**2))
        error = (found - exact) / scale
        assert np.abs(error).max() < 20 * 2.0**-8 * np.abs(exact).max() / scale
        assert abs(error.mean()) < 4 * error.std() / np.sqrt(len(error))
    assert np.abs(np.asarray(low_updates) - np.asarray(updates)).max() < 0.05 * np.abs(np.asarray(updates)).max()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_inside_computes_in_float32(dtype):
    """With 16-bit parameters and gradients, the moments equal those of a float32 run of the same numbers."""
    seen = []

    def update(updates, state, params=None):
        seen.append(jax.tree.map(lambda x: x.dtype, (updates, state, params)))
        return updates, jax.tree.map(lambda m, g: m + g, state, updates)

    init = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    tx = with_low_precision_state(optax.GradientTransformation(init, update))
    params = {"w": jnp.ones(3, dtype)}
    _, state = tx.update({"w": jnp.ones(3, dtype)}, tx.init(params), params)
    assert seen == [({"w": jnp.float32},) * 3] and state.inner_state["w"].dtype == jnp.bfloat16


def test_what_the_inside_stores_in_16_bits_is_its_own():
    seen = []

    def update(updates, state, params=None):
        seen.append({name: str(x.dtype) for name, x in state.items()})
        return updates, state

    init = lambda p: {"own": jnp.zeros(p.shape, jnp.bfloat16), "ours": jnp.zeros(p.shape)}  # noqa: E731
    tx = with_low_precision_state(optax.GradientTransformation(init, update))
    _, state = tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
    assert seen == [{"own": "bfloat16", "ours": "float32"}]
    assert stored(state.inner_state) == {"own", "ours"}


def test_without_parameters():
    tx, grads = with_low_precision_state(optax.scale_by_adam()), gradients(0, parameters())
    state = tx.init(parameters())
    assert_same_bits(*jax.jit(lambda state: (tx.update(grads, state), tx.update(grads, state, parameters())))(state))


ORDERS = {
    "state inside": lambda **key: with_stochastic_rounding(with_low_precision_state(optax.adam(1e-2), **key), **key),
    "state outside": lambda **key: with_low_precision_state(with_stochastic_rounding(optax.adam(1e-2), **key), **key),
    "masters outside": lambda **key: with_master_weights(with_low_precision_state(optax.adam(1e-2), **key)),
    "masters inside": lambda **key: with_low_precision_state(with_master_weights(optax.adam(1e-2)), **key),
}


@functools.cache
def scaled(order):
    """The wrappers in one order under a loss scale, and a compiled step, for any key, which is in the state."""
    tx = with_loss_scale(ORDERS[order](), jmp.DynamicLossScale(8.0))
    return tx, jax.jit(stepper(tx))


@functools.cache
def twenty_steps_in_float32():
    exact, _ = run(optax.adam(1e-2), jax.tree.map(np.float32, parameters(jnp.bfloat16)), range(20))
    return jax.tree.map(np.asarray, exact)


@pytest.mark.parametrize("order", ORDERS)
def test_beside_the_wrappers_of_16_bit_parameters(order):
    """Parameters and moments in 16 bits, wrapped in either order: after 20 steps they equal float32's, up to noise."""
    tx, step = scaled(order)
    params, state = run(tx, parameters(jnp.bfloat16), range(20), step=step)
    w, wide = np.asarray(params["dense"]["w"]), twenty_steps_in_float32()["dense"]["w"]
    assert w.dtype == jnp.bfloat16
    error, moved = (float(np.abs(np.float32(x) - wide).mean()) for x in (w, parameters()["dense"]["w"]))
    # Each of 20 roundings has an error of half a last bit, 2^-9 to 2^-8; together sqrt(20) times that.
    assert error < np.sqrt(20) * 2.0**-9 * float(np.abs(wide).mean())
    assert moved > 5 * error
    if "masters" in order:
        assert jmp.master_params(state)["dense"]["w"].dtype == jnp.float32
    assert len(stored(state.inner_state)) == 4


@pytest.mark.parametrize("order", ORDERS)
def test_updates_below_a_last_bit_arrive(order):
    wrap = {
        "state inside": lambda tx: with_stochastic_rounding(with_low_precision_state(tx)),
        "state outside": lambda tx: with_low_precision_state(with_stochastic_rounding(tx)),
        "masters outside": lambda tx: with_master_weights(with_low_precision_state(tx)),
        "masters inside": lambda tx: with_low_precision_state(with_master_weights(tx)),
    }[order]
    tx, params = wrap(optax.sgd(2.0**-12)), jnp.ones(4096, jnp.bfloat16)

    def body(carry, _):
        return stepper(tx)(*carry, jnp.ones(4096)), None

    (params, _), _ = jax.jit(lambda start: jax.lax.scan(body, start, length=100))((params, tx.init(params)))
    assert np.float32(params).mean() == pytest.approx(1 - 100 * 2.0**-12, abs=2.0**-9)


@pytest.mark.parametrize("order", ORDERS)
def test_a_skipped_step_draws_nothing(order):
    tx, step = scaled(order)
    params, state = run(tx, parameters(jnp.bfloat16), step=step)
    bad = jax.tree.map(lambda g: np.full_like(g, np.nan), gradients(0, params))
    same, skipped = step(params, state, bad)
    assert int(skipped.skipped_steps) == 1
    assert_same_bits((same, skipped.inner_state), (params, state.inner_state))
    assert_same_bits(run(tx, params, [7], skipped, step)[0], run(tx, params, [7], state, step)[0])


def test_the_key_decides_and_steps_draw_afresh():
    _, step = scaled("state inside")

    def after(key):
        tx = with_loss_scale(ORDERS["state inside"](key=key), jmp.DynamicLossScale(8.0))
        return run(tx, parameters(jnp.bfloat16), range(3), step=step)[0]

    assert_same_bits(after(1), after(jax.random.key(1)))
    assert not np.array_equal(after(1)["dense"]["w"], after(2)["dense"]["w"])
    tx = with_low_precision_state(optax.sgd(1.0, momentum=0.5))
    state, grads = tx.init(np.zeros(1000, np.float32)), np.full(1000, 1.001, np.float32)
    assert_same_bits(state.key, with_low_precision_state(optax.sgd(1.0), key=0).init(jnp.zeros(1000)).key)
    updated = tx.update(grads, state)[1]
    assert (state.step, updated.step) == (1, 2) and state.step.dtype == updated.step.dtype == jnp.uint32
    first = updated.inner_state[0].trace
    second = tx.update(grads, state._replace(step=state.step + 1))[1].inner_state[0].trace
    assert not np.array_equal(first, second)


def test_moments_of_a_parameter_and_equal_parameters_draw_other_bits():
    params = {"a": jnp.zeros(1000), "b": jnp.zeros(1000)}
    twice = optax.GradientTransformation(lambda p: (p, p), lambda g, s, p=None: (g, (g, g)))
    tx = with_low_precision_state(twice, where=lambda path, leaf: True)
    grads = jax.tree.map(lambda x: jnp.full(1000, 1.001), params)
    made = [np.asarray(x) for x in jax.tree.leaves(tx.update(grads, tx.init(params), params)[1].inner_state)]
    assert len({x.tobytes() for x in made}) == 4


def test_leaves_of_no_parameter_draw_other_bits():
    state = {"a": jnp.full(1000, 1.001), "b": jnp.full(1000, 1.001)}
    tx = with_low_precision_state(optax.GradientTransformation(lambda p: state, optax.identity().update), where="*")
    a, b = jax.tree.leaves(tx.init(jnp.zeros(3)).inner_state)
    assert not np.array_equal(a, b)


def test_resumed_from_a_checkpoint_it_is_the_same_run():
    """The state is converted to NumPy arrays and back, keys to their data."""
    tx = with_loss_scale(ORDERS["state inside"](key=3), jmp.DynamicLossScale(8.0))
    _, step = scaled("state inside")
    params, state = run(tx, parameters(jnp.bfloat16), range(3), step=step)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    saved = jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), (params, state))
    restored = jax.tree.map(
        lambda x, like: jax.random.wrap_key_data(x) if is_key(like) else jnp.asarray(x), saved, (params, state)
    )
    resumed, want = (run(tx, params, range(3, 6), state, step) for params, state in (restored, (params, state)))
    assert_same_bits(resumed, want)


def test_one_trace_scan_and_donation():
    tx = with_loss_scale(ORDERS["state inside"]())
    step = jax.jit(chex.assert_max_traces(stepper(tx), n=1), donate_argnums=(0, 1))
    params = jax.tree.map(jnp.array, parameters(jnp.bfloat16))
    params, _ = run(tx, params, range(3), step=step)
    start = parameters(jnp.bfloat16)
    stacked = jax.tree.map(lambda *x: np.stack(x), *(gradients(seed, start) for seed in range(3)))
    (scanned, _), _ = jax.lax.scan(lambda c, g: (stepper(tx)(*c, g), None), (start, tx.init(start)), stacked)
    chex.assert_trees_all_close(
        jax.tree.map(np.float32, scanned), jax.tree.map(np.float32, params), rtol=2.0**-6, atol=1e-3
    )


# Each of its operations rounds at most once, so that two programs cannot differ.
EXACT = with_stochastic_rounding(with_low_precision_state(optax.sgd(2.0**-6, momentum=0.5)))


def over_a_mesh(kind, spec):
    """Five steps in a `jit` over arrays that are sharded by `spec`, or replicated."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def put(x):
        return jax.device_put(x, NamedSharding(mesh, spec if x.ndim else PartitionSpec()))

    with jax.set_mesh(mesh):
        params = jax.tree.map(put, parameters(jnp.bfloat16))
        found = run(EXACT, params, state=jax.jit(EXACT.init)(params))
    copies = found[1].inner_state.inner_state[0].trace["dense"]["w"].addressable_shards
    assert len({np.asarray(copy.data).tobytes() for copy in copies}) == (1 if spec == PartitionSpec() else 8)
    return found


def in_shard_map(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec(),) * 3
    step = jax.shard_map(stepper(EXACT), mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma)
    return run(EXACT, parameters(jnp.bfloat16), step=jax.jit(step))


def mapped(transform):
    """Eight copies of the state, all with the same gradients."""

    def eight(tree):
        return jax.tree.map(lambda x: jnp.stack([x] * 8), tree)

    one = parameters(jnp.bfloat16)
    params, state = eight((one, EXACT.init(one)))
    step = transform(stepper(EXACT))
    found = run(EXACT, params, state=state, step=step, grads_of=lambda seed, _: eight(gradients(seed, one)))
    copies = [jax.tree.map(lambda x, i=device: x[i], found) for device in range(8)]
    for copy in copies[1:]:
        assert_same_bits(copy, copies[0])
    return copies[0]


DEVICES = {
    "replicated": lambda: over_a_mesh(AxisType.Auto, PartitionSpec()),
    "sharded": lambda: over_a_mesh(AxisType.Auto, PartitionSpec("data")),
    "replicated, explicit": lambda: over_a_mesh(AxisType.Explicit, PartitionSpec()),
    "sharded, explicit": lambda: over_a_mesh(AxisType.Explicit, PartitionSpec("data")),
    "shard_map": lambda: in_shard_map(True),
    "shard_map, unchecked": lambda: in_shard_map(False),
    "pmap": lambda: mapped(jax.pmap),
    "vmap": lambda: mapped(lambda step: jax.jit(jax.vmap(step))),
}
FAST = {"sharded", "shard_map"}


@functools.cache
def on_one_device():
    return run(EXACT, parameters(jnp.bfloat16))


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.slow] * (how not in FAST)) for how in DEVICES], ids=str
)
def test_eight_devices_draw_the_same_bits_for_the_same_element(how):
    """The result equals that on one device, bit for bit."""
    assert_same_bits(DEVICES[how](), on_one_device())


class TestErrors:
    def check(self, kind, message, fn, *args, **kwargs):
        with pytest.raises(kind, match=f"^{re.escape(message)}$"):
            fn(*args, **kwargs)

    def test_dtypes(self):
        message = (
            "`dtype` is float16: squares of gradients below 2^-12 would be zero in it, and above 2^8 infinite. "
            "Use bfloat16, whose range is float32's."
        )
        self.check(ValueError, message, with_low_precision_state, optax.adam(1e-3), "float16")
        message = "`dtype` must be bfloat16, got float32: rounding is by the upper half of a float32 number."
        self.check(ValueError, message, with_low_precision_state, optax.adam(1e-3), "float32")

    def test_other_arguments(self):
        message = (
            "`inner` must be an optax transformation, got float. "
            "Pass an optimizer, as in with_low_precision_state(optax.adam(1e-3))."
        )
        self.check(TypeError, message, with_low_precision_state, 0.1)
        message = "`key` must be an integer or one PRNG key, got float. Pass a seed such as 0, or jax.random.key(0)."
        self.check(TypeError, message, with_low_precision_state, optax.adam(1e-3), key=0.5)
        for where in (3, [], ["nu", 1], {"nu": True}):
            message = (
                f"`where` must be a glob over the state's paths such as 'nu', several, or a function "
                f"(path, leaf) -> bool; got {where!r}."
            )
            self.check(TypeError, message, with_low_precision_state, optax.adam(1e-3), where=where)
        message = (
            "`where`: the glob '/nu' has an empty segment; write whole segments such as 'BatchNorm*' or "
            "'Block_1/Dense_0', without a slash at either end."
        )
        self.check(ValueError, message, with_low_precision_state, optax.adam(1e-3), where="/nu")

    def test_a_glob_that_matches_nothing(self):
        message = (
            "`where`: the glob 'nus' matches none of the tree's leaves (near: 'nu', 'dense'); their paths are "
            "'0/mu/dense/b', '0/mu/dense/w', '0/nu/dense/b', .... A glob matches whole segments, at any depth. "
            "Only float32 arrays of one dimension or more can be stored in 16 bits, and no master weights."
        )
        self.check(ValueError, message, with_low_precision_state(optax.adam(1e-3), where="nus").init, parameters())

    def test_orders_that_make_no_sense(self):
        message = (
            "`inner` has with_loss_scale, which must see the state that it restores on a skipped step. "
            "Write with_loss_scale(with_low_precision_state(optax.adam(1e-3)))."
        )
        tx = with_low_precision_state(with_loss_scale(optax.adam(1e-3)))
        self.check(ValueError, message, tx.init, parameters())
        message = (
            "`inner` has with_low_precision_state already. Use it once around all, or around each part, each with a "
            "`key` of its own."
        )
        tx = with_low_precision_state(optax.chain(optax.clip(1.0), with_low_precision_state(optax.adam(1e-3))))
        self.check(ValueError, message, tx.init, parameters())

    @pytest.mark.parametrize(
        ("build", "what"),
        [
            (lambda: optax.lbfgs(), "L-BFGS"),
            (lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3)), "a line search"),
            (lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(3)), "a line search"),
            (lambda: optax.rmsprop(1e-3, centered=True), "a centred second moment, nu - mu^2"),
            (lambda: optax.scale_by_stddev(bias_correction=True), "a centred second moment, nu - mu^2"),
        ],
        ids=["lbfgs", "backtracking", "zoom", "centred", "centred, counted"],
    )
    def test_what_learns_from_differences(self, build, what):
        cure = " Without `centered` it works." if "centred" in what else ""
        message = (
            f"`inner` has {what}, which learns from differences of what it stores: in 16 bits these would be "
            f"roundings. Leave with_low_precision_state off, or put it around the rest of the chain.{cure}"
        )
        self.check(ValueError, message, with_low_precision_state(build()).init, parameters())

    def test_a_state_of_other_parameters(self):
        tx = with_low_precision_state(optax.adam(1e-3))
        message = (
            "`state` must be what `init` made for these parameters: it has 7 leaves inside, and `inner` makes 3. "
            "Call update(grads, state, params)."
        )
        self.check(ValueError, message, tx.update, jnp.zeros(3), tx.init(parameters()), jnp.zeros(3))

    def test_a_state_that_is_none(self):
        tx = with_low_precision_state(optax.adam(1e-3))
        message = (
            "`state` must be the LowPrecisionState that `init` or `update` returned, got NoneType. "
            "Pass the whole state, not a part of it."
        )
        self.check(TypeError, message, tx.update, parameters(), None, parameters())

    @pytest.mark.parametrize(
        ("wrap", "dtype"),
        [
            (with_master_weights, jnp.bfloat16),
            (with_master_weights, jnp.float16),
            (with_stochastic_rounding, jnp.bfloat16),
        ],
    )
    def test_a_neighbour_of_a_wrapper_that_would_compute_in_16_bits(self, wrap, dtype):
        message = (
            "`inner` has a wrapper for 16-bit parameters, and beside it, at '0/mu/dense/b', a transformation that "
            f"would compute in {jnp.dtype(dtype)}. Put with_stochastic_rounding or with_master_weights around all of "
            "it."
        )
        tx = with_low_precision_state(optax.chain(optax.scale_by_adam(), wrap(optax.sgd(1e-3))))
        self.check(ValueError, message, tx.init, parameters(dtype))
        tx.init(parameters())
        asked_for = optax.trace(0.9, accumulator_dtype=dtype)  # 16 bits whatever the parameters are
        with_low_precision_state(optax.chain(asked_for, wrap(optax.adam(1e-3)))).init(parameters(dtype))

    def test_a_glob_where_nothing_can_be_stored(self):
        tx = with_low_precision_state(optax.sgd(1e-3), where="nonsense")
        with pytest.raises(ValueError, match=r"^`where`: the glob 'nonsense' matches none"):
            tx.init(parameters())


def test_a_transformation_survives_pickle():
    tx = with_low_precision_state(optax.adam(1e-2))
    params = {"w": jnp.ones((4, 2))}
    state = jax.jit(tx.init)(params)
    again = cloudpickle.loads(cloudpickle.dumps(tx))
    updates = jax.jit(lambda state: [each.update(params, state, params) for each in (again, tx)])(state)
    assert_same_bits(*updates)


def test_what_the_inner_transformation_makes_is_found_out_once():
    calls = []

    def init(params):
        calls.append(params)
        return optax.adam(1e-2).init(params)

    tx = with_low_precision_state(optax.GradientTransformation(init, optax.adam(1e-2).update))
    params = {"w": jnp.ones((4, 2))}
    state = tx.init(params)
    made = len(calls)
    for _ in range(2):
        _, state = tx.update(params, state, params)
    assert len(calls) == made


@pytest.mark.parametrize("numbers", [(True, False), (2, 3), (1.5, 2.5), (1j, 2j)])
def test_a_number_of_python_among_the_parameters_is_data(numbers):
    calls = []

    def init(params):
        calls.append(params)
        return {"w": jnp.zeros_like(params["w"])}

    tx = with_low_precision_state(optax.GradientTransformation(init, optax.identity().update))
    grads = {"w": jnp.ones(3), "n": 0.0}
    state = tx.init(grads | {"n": numbers[0]})
    made = len(calls)
    for number in numbers:
        tx.update(grads, state, grads | {"n": number})
    assert len(calls) == made


def test_parameters_and_their_state_draw_different_bits(monkeypatch):
    names = {}
    for module in (_master_weights, _low_precision_state):
        drawn = names[module] = set()

        def recording(key, step, drawn=drawn):
            noise = noise_at(key, step)
            return lambda name, *rest: drawn.add(name) or noise(name, *rest)

        monkeypatch.setattr(module, "noise_at", recording)
    tx, params = with_stochastic_rounding(with_low_precision_state(optax.adam(0.1))), {"w": jnp.ones(4, jnp.bfloat16)}
    state = tx.init(params)
    assert state.inner_state.step == 1  # the bits of step 0 are those of `init`
    jax.eval_shape(tx.update, params, state, params)
    of_parameters, of_state = names.values()
    assert of_parameters and of_state and of_parameters.isdisjoint(of_state)
