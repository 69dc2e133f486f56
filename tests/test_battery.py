"""Every model of the battery under autocast: the promises that hold for any program, one test each.

What the compiled module holds is in `test_gpu_autocast.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery_models import BY_NAME, ROWS, SMALL
from battery_plain import SOLVERS, UNCHANGED, dense_params, sequence
from battery_tools import (
    HALVES,
    TOLERANCE,
    cast_floats,
    example,
    gradient_function,
    gradients,
    gradients_at,
    leaves,
    loss_gradients,
    median_errors,
    primitives,
    quick_jit,
    relative_error,
    types,
    unscaled,
)

from jmp_train import autocast, get_policy

MIXED = [f"mixed_{dtype}" for dtype in HALVES]


def each_row(wanted=lambda row: True):
    """Parametrises over the rows of the battery; the fast tier runs those marked so."""
    rows = [pytest.param(row, id=row.name, marks=() if row.fast else pytest.mark.slow) for row in ROWS if wanted(row)]
    return pytest.mark.parametrize("row", rows)


each_fast_row = pytest.mark.parametrize("row", [row for row in ROWS if row.fast], ids=str)
each_policy = pytest.mark.parametrize("name", MIXED)


def same_bits(got, want):
    def check(path, a, b):
        assert a.dtype == b.dtype, (path, a.dtype, b.dtype)
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))

    jax.tree_util.tree_map_with_path(check, got, want)


@each_row()
def test_float32_policy_changes_no_bit(row):
    policy, args = get_policy("float32"), example(row)
    same_bits(quick_jit(autocast(row.grads(), policy))(*args), gradients(row, "float32"))
    same_bits(quick_jit(autocast(row.loss(), policy))(*args), quick_jit(row.loss())(*args))


@each_policy
@each_row()
def test_outputs_keep_shapes_and_dtypes_and_stay_finite(row, name):
    """Also runs every model in bfloat16 on the CPU, which rejects some dots of it."""
    want = jax.eval_shape(gradient_function(row, "float32"), *example(row))
    got = gradients(row, name)
    assert types(got) == types(want)
    infinite = [path for path, leaf in leaves(got).items() if not np.isfinite(leaf).all()]
    assert not infinite


@each_row()
def test_the_loss_stays_float32_and_finite(row):
    loss = quick_jit(autocast(row.loss(), get_policy("mixed_float16")))(*example(row))
    assert loss.dtype == jnp.float32 and jnp.isfinite(loss)


@each_policy
@each_row()
def test_gradients_are_near_the_oracle(row, name):
    bound = row.slack * TOLERANCE[name.removeprefix("mixed_")].gradient
    assert median_errors(row, name, 3)["all"] <= bound


def against_flax(row, dtype, seeds):
    ours, flax = (median_errors(row, f"{side}_{dtype}", seeds) for side in ("mixed", "flax"))
    # Flax sums the gradient of a norm's scale in float32 too, over the same rounded values: there both are even.
    # Where relu and pooling choose otherwise after a rounding (`slack`), that is most of both errors.
    firm = row.slack == 1 and seeds >= 20
    margins = {"norm": 1.1 if seeds < 20 else 1.05, "bias": 1.0 if firm else 1.05, "embedding": 1.0 if firm else 1.05}
    worse = {kind: (ours[kind], flax[kind]) for kind in ours if ours[kind] > margins.get(kind, 1.1) * flax[kind]}
    assert not worse


@pytest.mark.parametrize("dtype", HALVES)
@each_row(lambda row: row.flax16)
def test_gradients_are_as_good_as_flax(row, dtype):
    # Where relu and pooling choose otherwise after a rounding, that is most of both errors: few seeds may tie.
    against_flax(row, dtype, 3 if row.slack == 1 else row.seeds)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.flax16], ids=str)
def test_gradients_are_as_good_as_flax_over_many_seeds(row):
    against_flax(row, "float16", row.seeds)


ORDERS = {
    "grad(autocast)": lambda loss, policy: jax.grad(autocast(loss, policy)),
    "autocast(jit(grad))": lambda loss, policy: autocast(jax.jit(jax.grad(loss)), policy),
    "grad(jit(autocast))": lambda loss, policy: jax.grad(jax.jit(autocast(loss, policy))),
    "autocast(grad(autocast))": lambda loss, policy: autocast(jax.grad(autocast(loss, policy)), policy),
}


def check_order(row, order):
    def loss(params, batch):
        return row.loss()(params, batch) * row.scale

    got = quick_jit(ORDERS[order](loss, get_policy("mixed_float16")))(*example(row))
    want = loss_gradients(row)
    assert types(got) == types(want)
    close(row, got, want)


@each_row()
def test_the_gradient_of_autocast_is_near_that_of_the_function(row):
    check_order(row, "grad(autocast)")


@pytest.mark.slow
@each_fast_row
@pytest.mark.parametrize("order", list(ORDERS)[1:])
def test_every_order_agrees(row, order):
    check_order(row, order)


def close(row, got, want):
    bound = row.slack * TOLERANCE["float16"].gradient
    assert relative_error(unscaled(row, got), unscaled(row, want)) <= bound


def check_vmap(row, mapped):
    params, batches = example(row)[0], [example(row, seed)[1] for seed in (0, 1)]
    got = quick_jit(mapped)(params, jax.tree.map(lambda *x: jnp.stack(x), *batches))
    one_by_one = [gradients_at(row, "mixed_float16", params, batch) for batch in batches]
    want = jax.tree.map(lambda *x: jnp.stack(x), *one_by_one)
    assert types(got) == types(want)
    close(row, got, want)


@each_row()
def test_autocast_of_vmap_is_vmap_of_autocast(row):
    check_vmap(row, autocast(jax.vmap(row.grads(), (None, 0)), get_policy("mixed_float16")))


@each_fast_row
def test_vmap_of_autocast(row):
    check_vmap(row, jax.vmap(autocast(row.grads(), get_policy("mixed_float16")), (None, 0)))


@each_policy
@each_row()
def test_autocast_twice_is_autocast_once(row, name):
    once = gradient_function(row, name)
    assert primitives(autocast(once, get_policy(name)), *example(row)) == primitives(once, *example(row))


@each_fast_row
def test_three_jitted_steps_trace_once(row):
    traces = []

    def loss(params, batch):
        traces.append(None)
        return row.loss()(params, batch)

    @quick_jit
    def step(params, batch):
        grads = autocast(jax.grad(loss), get_policy("mixed_float16"))(params, batch)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    params, batch = example(row)
    params = step(params, batch)
    after_one = len(traces)
    step(step(params, batch), batch)
    assert len(traces) == after_one
    assert step._cache_size() == 1


@each_policy
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_solvers_take_the_iterations_of_float32(solver, name):
    row = BY_NAME["plain_mlp"]
    params, batch = example(row)
    want, iterations = jax.jit(solver)(params, batch)
    got, ours = jax.jit(autocast(solver, get_policy(name)))(params, batch)
    # Dots outside the loop may run in 16 bits and hand the solver another problem, a step away at most.
    assert abs(int(ours) - int(iterations)) <= 1 and 2 < iterations < 100
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=10 * TOLERANCE[name.removeprefix("mixed_")].value)


@each_policy
@pytest.mark.parametrize(("fn", "dtype"), UNCHANGED.values(), ids=UNCHANGED)
def test_float64_and_complex_programs_stay_as_they_are(fn, dtype, name):
    with jax.enable_x64(np.dtype(dtype).itemsize > 8 or dtype is np.float64):
        params = cast_floats(dense_params(SMALL, jax.random.key(0)), dtype)
        batch = cast_floats(sequence(SMALL, np.random.default_rng(0)), dtype)
        program = jax.value_and_grad(fn)
        ours = autocast(program, get_policy(name))
        dtypes = {dtype for _, *dtypes in primitives(ours, params, batch) for dtype in dtypes}
        assert dtypes <= {dtype for _, *dtypes in primitives(program, params, batch) for dtype in dtypes}
        same_bits(jax.jit(ours)(params, batch), jax.jit(program)(params, batch))


def test_the_names_of_rows_are_unique():
    assert len(BY_NAME) == len(ROWS)


def test_float32_itself_is_near_the_oracle():
    row = BY_NAME["mlp"]
    assert median_errors(row, "float32", 1)["all"] <= TOLERANCE["float32"].gradient
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients(row, "float64"))} == {np.dtype(np.float64)}
