"""Every model of the battery under autocast: one test for each guarantee that holds for any program.

`test_gpu_autocast.py` tests the compiled modules.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery_models import BY_NAME, IN_BFLOAT16, ROWS, SMALL
from battery_plain import SOLVERS, UNCHANGED, sequence
from battery_tools import (
    HALVES,
    abstract_example,
    cast_floats,
    example,
    gradient_function,
    gradients,
    gradients_at,
    loss_gradients,
    median_errors,
    primitives,
    relative_error,
    unscaled,
)
from comparisons import TOLERANCE, assert_only_the_precision_differs, lowered

from jmp_train import autocast, get_policy

FAST_IN_BFLOAT16 = {"transformer_block", "rmsnorm_large"}


def each_row(wanted=lambda row: True, fast=lambda row: row.fast):
    """Parametrises over the rows of the battery; the fast tier runs those that are `fast`."""
    rows = [pytest.param(row, id=row.name, marks=() if fast(row) else pytest.mark.slow) for row in ROWS if wanted(row)]
    return pytest.mark.parametrize("row", rows)


def each_row_and_dtype(wanted=lambda row: True, fast=lambda row: row.fast, in_bfloat16=FAST_IN_BFLOAT16):
    """As `each_row`, in float16 and, for rows of `IN_BFLOAT16`, in bfloat16; the fast tier only for `in_bfloat16`."""
    return pytest.mark.parametrize(
        ("row", "dtype"),
        [
            pytest.param(row, dtype, id=f"{row.name}-{dtype}", marks=() if is_fast else pytest.mark.slow)
            for row in ROWS
            for dtype in HALVES
            if wanted(row) and (dtype == "float16" or row.name in IN_BFLOAT16)
            for is_fast in [fast(row) and (dtype == "float16" or row.name in in_bfloat16)]
        ],
    )


each_fast_row = each_row(lambda row: row.fast)
one_fast_row = each_row(lambda row: row.fast, fast=lambda row: row.name == "lstm")
each_policy = pytest.mark.parametrize("name", [f"mixed_{dtype}" for dtype in HALVES])


@each_row()
def test_the_float32_policy_changes_only_the_precision_of_products(row):
    ours = autocast(row.grads(), get_policy("float32"))
    assert_only_the_precision_differs(ours, row.grads(), *abstract_example(row))


@each_row_and_dtype()
def test_gradients_are_float32_and_near_the_oracle(row, dtype):
    """Also shows that every model runs in bfloat16 on CPUs, which have no kernel for some bfloat16 dots."""
    got = gradients(row, f"mixed_{dtype}")
    chex.assert_trees_all_equal_shapes_and_dtypes(got, jax.eval_shape(gradient_function(row, "float32"), *example(row)))
    chex.assert_tree_all_finite(got)
    assert median_errors(row, f"mixed_{dtype}", 3)["all"] <= row.slack * TOLERANCE[dtype].gradient


def against_flax(row, dtype, seeds):
    ours, flax = (median_errors(row, f"{side}_{dtype}", seeds) for side in ("mixed", "flax"))
    # Flax, too, sums the gradient of a norm's scale in float32 over the same rounded values: there both are equal.
    # Where a rounding changes the choice of a relu or of pooling (`slack`), this is most of both errors.
    firm = row.slack == 1 and seeds >= 20
    margins = {"norm": 1.1 if seeds < 20 else 1.05, "bias": 1.0 if firm else 1.05, "embedding": 1.0 if firm else 1.05}
    worse = {kind: (ours[kind], flax[kind]) for kind in ours if ours[kind] > margins.get(kind, 1.1) * flax[kind]}
    assert not worse


@pytest.mark.parametrize("row", [row for row in ROWS if row.flax16 and row.fast and row.slack == 1], ids=str)
def test_gradients_are_as_good_as_flax(row):
    against_flax(row, "float16", 3)


@pytest.mark.slow
@each_row_and_dtype(lambda row: row.flax16, fast=lambda row: False)
def test_gradients_are_as_good_as_flax_over_many_seeds(row, dtype):
    against_flax(row, dtype, row.seeds)


ORDERS = {
    "grad(autocast)": lambda loss, policy: jax.value_and_grad(autocast(loss, policy)),
    "autocast(jit(grad))": lambda loss, policy: autocast(jax.jit(jax.value_and_grad(loss)), policy),
    "grad(jit(autocast))": lambda loss, policy: jax.value_and_grad(jax.jit(autocast(loss, policy))),
    "autocast(grad(autocast))": lambda loss, policy: autocast(jax.value_and_grad(autocast(loss, policy)), policy),
}


def check_order(row, order):
    def scaled(params, batch):
        return row.loss()(params, batch) * row.scale

    params, batch = example(row)
    loss, got = jax.jit(ORDERS[order](scaled, get_policy("mixed_float16")))(params, batch)
    assert loss.dtype == jnp.float32 and jnp.isfinite(loss)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, params)
    close(row, got, loss_gradients(row))


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


def stacked(*leaves):
    is_key = jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key)
    return jnp.stack(leaves) if is_key else np.stack(leaves)


def check_vmap(row, mapped):
    params, batches = example(row)[0], [example(row, seed)[1] for seed in (0, 1)]
    got = jax.jit(mapped)(params, jax.tree.map(stacked, *batches))
    one_by_one = [gradients_at(row, "mixed_float16", params, batch) for batch in batches]
    want = jax.tree.map(stacked, *one_by_one)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    close(row, got, want)


@each_row(fast=lambda row: row.name in {"transformer_block", "lstm"})
def test_autocast_of_vmap_is_vmap_of_autocast(row):
    check_vmap(row, autocast(jax.vmap(row.grads(), (None, 0)), get_policy("mixed_float16")))


@one_fast_row
def test_vmap_of_autocast(row):
    check_vmap(row, jax.vmap(autocast(row.grads(), get_policy("mixed_float16")), (None, 0)))


@each_row_and_dtype(in_bfloat16={"rmsnorm_large"})
def test_autocast_twice_is_autocast_once(row, dtype):
    policy = get_policy(f"mixed_{dtype}")
    once = autocast(row.grads(), policy)
    assert primitives(autocast(once, policy), *example(row)) == primitives(once, *example(row))


@one_fast_row
def test_three_jitted_steps_trace_once(row):
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, batch):
        grads = autocast(jax.grad(row.loss()), get_policy("mixed_float16"))(params, batch)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    params, batch = example(row)
    for _ in range(3):
        params = step(params, batch)


@each_policy
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_solvers_take_the_iterations_of_float32(solver, name):
    row = BY_NAME["plain_mlp"]
    params, batch = example(row)
    want, iterations = jax.jit(solver)(params, batch)
    got, ours = jax.jit(autocast(solver, get_policy(name)))(params, batch)
    # Dots outside of the loop may run in 16 bits, so that the solver's problem differs, by one iteration at most.
    assert abs(int(ours) - int(iterations)) <= 1 and 2 < iterations < 100
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=10 * TOLERANCE[name.removeprefix("mixed_")].value)


@each_policy
@pytest.mark.parametrize(("fn", "dtype"), UNCHANGED.values(), ids=UNCHANGED)
def test_float64_and_complex_programs_stay_as_they_are(fn, dtype, name):
    with jax.enable_x64(np.dtype(dtype).itemsize > 8 or dtype is np.float64):
        params = cast_floats(example(BY_NAME["plain_mlp"])[0], dtype)
        batch = cast_floats(sequence(SMALL, np.random.default_rng(0)), dtype)
        program = jax.value_and_grad(fn)
        ours = autocast(program, get_policy(name))
        dtypes = {dtype for _, *dtypes in primitives(ours, params, batch) for dtype in dtypes}
        assert dtypes <= {dtype for _, *dtypes in primitives(program, params, batch) for dtype in dtypes}
        assert lowered(ours, params, batch) == lowered(program, params, batch)


def test_the_names_of_rows_are_unique():
    assert len(BY_NAME) == len(ROWS) and BY_NAME.keys() >= IN_BFLOAT16 >= FAST_IN_BFLOAT16


def test_float32_itself_is_near_the_oracle():
    row = BY_NAME["mlp"]
    assert median_errors(row, "float32", 1)["all"] <= TOLERANCE["float32"].gradient
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients(row, "float64"))} == {np.dtype(np.float64)}
