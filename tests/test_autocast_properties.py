"""Properties of autocast over random programs: shapes, dtypes, tolerance, idempotence, float32 identity."""

from collections.abc import Callable

import chex
import jax
import numpy as np
import pytest
from battery_tools import HALVES, primitives, primitives_of
from comparisons import TOLERANCE, assert_only_the_precision_differs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import BINARY, SIDE, UNARY, WRAPPERS, Step, as_function, as_gradient, programs

from jmp_train import autocast, get_policy

PARAMS, X = (np.random.default_rng(seed).standard_normal((SIDE, SIDE)).astype(np.float32) for seed in (0, 1))
FORWARD_AND_BACKWARD = {"forward": as_function, "backward": as_gradient}
EVERY_STEP = [Step(name, "plain", (0, 1)[: 1 if name in UNARY else 2]) for name in (*UNARY, *BINARY)]
EVERY_WRAPPER = [Step("residual", wrapper, (0, 1)) for wrapper in WRAPPERS]

either_direction = pytest.mark.parametrize("build", FORWARD_AND_BACKWARD.values(), ids=FORWARD_AND_BACKWARD)
either_half = pytest.mark.parametrize("dtype", HALVES)


def examples(count: int):
    """`count` programs; compiling is slow."""
    slow = [HealthCheck.too_slow]
    return settings(max_examples=count, suppress_health_check=slow)


def check_tolerance(got: list[jax.Array], want: list[jax.Array], dtype: str, what: object):
    """Every value is off by a few roundings a step, of the largest value so far."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    largest = max(1.0, *(float(np.max(np.abs(value))) for value in want))
    for a, b in zip(got, want, strict=True):
        assert float(np.max(np.abs(a - b))) <= 4 * len(want) * largest * TOLERANCE[dtype].value, what


def check_program(program: list[Step], dtype: str):
    run = as_function(program)
    got, want = jax.jit(beside(run, dtype))(PARAMS, X)
    check_tolerance(got, want, dtype, program)


def beside(run: Callable, dtype: str) -> Callable:
    """The results of autocast, and those expected."""
    return lambda *args: (autocast(run, get_policy(f"mixed_{dtype}"))(*args), run(*args))


def check_identity(run: Callable):
    assert_only_the_precision_differs(autocast(run, get_policy("float32")), run, PARAMS, X)


def check_types_and_idempotence(run: Callable, dtype: str):
    policy = get_policy(f"mixed_{dtype}")
    once = autocast(run, policy)
    program, got = jax.make_jaxpr(once, return_shape=True)(PARAMS, X)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, jax.eval_shape(run, PARAMS, X))
    assert primitives(autocast(once, policy), PARAMS, X) == primitives_of(program)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_each_operation_is_within_tolerance(dtype):
    """All in one program, because compiling a hundred would take as long as the rest of this file."""
    steps = [*EVERY_STEP, *EVERY_WRAPPER]
    runs = [beside(as_function([Step("matmul", "plain", (0, 1)), step]), dtype) for step in steps]
    found = jax.device_get(jax.jit(lambda *args: [run(*args) for run in runs])(PARAMS, X))
    for step, (got, want) in zip(steps, found, strict=True):
        check_tolerance(got, want, dtype, step)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@examples(8)
@given(program=programs())
def test_outputs_are_within_tolerance(program, dtype):
    check_program(program, dtype)


@either_direction
@examples(8)
@given(program=programs())
def test_float32_changes_no_bit(program, build):
    check_identity(build(program))


@either_direction
@examples(15)
@given(program=programs(), dtype=st.sampled_from(HALVES))
def test_dtypes_and_shapes_are_as_recorded_and_twice_is_once(program, dtype, build):
    check_types_and_idempotence(build(program), dtype)


@pytest.mark.slow
@either_half
@examples(15)
@given(program=programs(12))
def test_long_programs(program, dtype):
    check_program(program, dtype)
    check_types_and_idempotence(as_gradient(program), dtype)
    check_identity(as_gradient(program))
