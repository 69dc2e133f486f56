"""Values that depend on no argument: their numbers, and whether a product with a table of them is exact."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from jmp_train import explain, full_precision
from jmp_train._autocast.analysis.constants import Constants, is_zero, table_of
from jmp_train._jaxpr import flatten

HALF = np.dtype(np.float16)
CAPTURED = jnp.asarray(np.arange(1.0, 4.0, dtype=np.float32))
BITS = jnp.arange(1, 4)
KEY = jax.random.key_data(jax.random.fold_in(jax.random.split(jax.random.key(0))[1], 2))


def numbers_of(fn, *args, given=None):
    """The numbers of a program's result; `given` those of its first argument."""
    program = flatten(jax.make_jaxpr(fn)(*args))
    constants = Constants(program)
    if given is not None:
        constants.give(program.inputs[0], lambda: given)
    for node in program.nodes:
        constants.add(node)
    return constants.numbers(program.outputs[0])


def many_steps(count):
    def fn(x):
        y = jnp.arange(3.0)
        for _ in range(count):
            y = y + 1
        return y

    return fn


# name: (a function of an argument that is not known, the known numbers of its result)
KNOWN = {
    "computed from a literal": (lambda x: jnp.arange(4.0) * 2 + 1, [1, 3, 5, 7]),
    "a literal": (lambda x: 3.0, 3),
    "a captured array": (lambda x: CAPTURED, [1, 2, 3]),
    "computed from that": (lambda x: CAPTURED * 2, [2, 4, 6]),
    "two results of one node": (lambda x: jnp.add(*jnp.split(jnp.arange(4.0), 2)), [2, 4]),
    "of a call that the user keeps in float32": (lambda x: full_precision(jax.nn.relu)(jnp.arange(3.0) - 1), [0, 0, 1]),
    "shifted": (lambda x: lax.shift_right_arithmetic(lax.shift_right_logical(BITS << 4, 1), 1), [4, 8, 12]),
    "bits": (lambda x: (~BITS & 3) | (BITS ^ 1), [2, 3, 2]),
    "whether bits are set": (lambda x: jnp.any(BITS > 2) & jnp.all(BITS > 0), True),
    "a part of complex numbers": (lambda x: jnp.imag(lax.complex(CAPTURED, 2 * CAPTURED)), [2, 4, 6]),
    "rounded": (lambda x: lax.reduce_precision(CAPTURED + 2**-20, 8, 7), [1, 2, 3]),
    "the bits of numbers": (
        lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(CAPTURED, np.int32), np.float32), [1, 2, 3]),
    "random bits": (
        lambda x: jax.random.key_data(jax.random.fold_in(jax.random.split(jax.random.key(0))[1], 2)), KEY),
    "an argument": (lambda x: x, None),
    "computed from it": (lambda x: jnp.arange(3.0) + x, None),
    "with an effect": (lambda x: (jax.debug.print(""), jnp.arange(2.0))[1], [0, 1]),
    "made by a callback": (lambda x: jax.pure_callback(lambda: np.ones(3), jax.typeof(jnp.ones(3))), None),
    "made by a loop": (lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + 1, jnp.zeros(2)), None),
    "from 2**20 numbers": (lambda x: jnp.sum(jnp.ones(2**20)), 2**20),
    "from one more": (lambda x: jnp.sum(jnp.ones(2**20 + 1)), None),
    "by 256 equations": (many_steps(255), [255, 256, 257]),
    "by 257": (many_steps(256), None),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_the_numbers_of_a_constant(name):
    fn, expected = KNOWN[name]
    found = numbers_of(fn, np.ones(3, np.float32))
    assert (found is None) == (expected is None)
    np.testing.assert_array_equal(found, expected)


def test_a_constant_of_the_program_around_is_one():
    np.testing.assert_array_equal(numbers_of(lambda x: 2 * x, np.ones(3), given=np.arange(3.0)), [0, 2, 4])


def test_a_constant_of_the_program_around_that_is_not_known_makes_none():
    program = flatten(jax.make_jaxpr(lambda x: 2 * x)(np.ones(3)))
    constants = Constants(program)
    constants.give(program.inputs[0], lambda: None)
    assert constants.add(program.nodes[0]) and constants.numbers(program.outputs[0]) is None


def test_what_cannot_be_evaluated_while_planning_is_not_known():
    program = flatten(jax.make_jaxpr(lambda x: 2 * x)(np.ones(3)))

    def fails():
        raise RuntimeError("an array of another process")

    constants = Constants(program)
    constants.give(program.inputs[0], fails)
    constants.add(program.nodes[0])
    assert constants.numbers(program.outputs[0]) is None


def test_constants_of_a_symbolic_size_are_not_known():
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b"), np.float32)
    assert numbers_of(lambda x: jnp.ones(x.shape), x) is None


def test_whether_a_tracer_is_zero_is_not_known():
    seen = []
    jax.make_jaxpr(lambda x: seen.append(is_zero(x)))(np.float32(0))
    assert seen == [False]


def test_what_is_captured_from_another_trace_is_no_constant():
    @jax.jit
    def around(x):
        program = flatten(jax.make_jaxpr(lambda: x + 1)())
        constants = Constants(program)
        assert not constants.add(program.nodes[0]) and constants.numbers(program.outputs[0]) is None
        return x

    around(np.ones(3))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jax.lax.conv(
            x.reshape(1, 1, 8, 8), jnp.exp(-(jnp.arange(9.0) ** 2)).reshape(1, 1, 3, 3), (1, 1), "SAME"
        ),
        lambda x: x.reshape(16, 4) @ jnp.cos(jnp.arange(16.0)).reshape(4, 4),
        lambda x: x.reshape(8, 8) @ jnp.cos(jnp.arange(8.0)),
    ],
    ids=["a fixed filter", "a short contraction", "a matrix times a vector"],
)
def test_constants_are_computed_only_where_they_decide(fn, monkeypatch):
    """XLA compiles the computation of each constant, which takes a tenth of a second of planning."""
    monkeypatch.setattr(Constants, "_run", None)
    report = explain(fn, "mixed_float16", argnums=())(np.ones(64, np.float32))
    assert [dtype for dtype, *_ in report.products] == ["float32"]


TABLES = {
    "selections": ([0.0, 1.0, 0.0], {"exact", "averages"}),
    "halves": ([0.5, -0.5], {"exact", "averages", "ordered", "differences"}),
    "a second derivative": ([1.0, -2.0, 1.0], {"exact", "differences"}),
    "a derivative whose numbers are rounded": ([0.1, 0.2, -0.3], {"differences"}),
    "integers": ([1.0, 2048.0, 7.0], {"exact"}),
    "integers that float16 skips": ([1.0, 2049.0, 7.0], {"exceeds"}),
    "thirds": ([1 / 3, 1 / 7, 1 / 5], set()),
    "bins": ([0.1, 0.2, 0.3], {"ordered"}),
    "falling bins": ([0.3, 0.2, 0.1], {"ordered"}),
    "one number": ([0.3], {"uniform"}),
    "ones": ([1.0, 1.0], {"exact", "averages", "uniform"}),
    "too large": ([1e5, 0.1, 0.3], {"exceeds"}),
    "too small": ([1e-8, 2e-8, 1.5e-8], {"exceeds"}),
    "one that is too small beside others": ([1e-8, 0.25, 0.125], set()),
    # Halfway between two subnormal numbers of float16, which are 2**-24 apart: a 410th and a 610th is lost.
    "too small by more than two roundings": ([200.5 / 2**24, 210.5 / 2**24, 205.5 / 2**24], {"exceeds"}),
    "too small by less than that": ([300.5 / 2**24, 310.5 / 2**24, 305.5 / 2**24], set()),
    "infinite in any dtype": ([np.inf, 1.0, 0.5], {"exact", "averages"}),
}


@pytest.mark.parametrize("name", TABLES)
def test_what_is_known_of_a_table(name):
    numbers, expected = TABLES[name]
    table = table_of(np.array(numbers, np.float32), (0,), HALF)
    assert {name for name, is_so in dataclasses.asdict(table).items() if is_so} == expected


ONES = np.ones((4, 6), np.float32)
STAIRCASES = {
    "a triangle": (np.tri(4), True),
    "an upper triangle, without a diagonal": (np.triu(ONES, 1), True),
    "rows from the last": (np.tri(4)[::-1], True),
    "two rows alike": (np.tri(4)[[0, 1, 1, 2, 3]], True),
    "two rows alike, from the last": (np.tri(4)[[3, 2, 1, 1, 0]], True),
    "in a batch of one": (np.tri(4)[None], True),
    "ones": (ONES, False),
    "the same ones in each row": (ONES * (np.arange(6) < 3), False),
    "a unit matrix": (np.eye(4), False),
    "a band": (np.tri(4) - np.tri(4, k=-2), False),
    "a triangle of averages": (np.tri(4) / np.arange(1, 5)[:, None], False),
    "rows in disorder": (np.tri(4)[[1, 0, 2, 3]], False),
    "a row": (np.tri(4)[2], False),
}


@pytest.mark.parametrize("name", STAIRCASES)
def test_the_ones_of_a_cumulative_sum_are_a_staircase(name):
    numbers, expected = STAIRCASES[name]
    assert table_of(numbers.astype(np.float32), (0,), HALF).staircase == expected


def test_differences_are_taken_in_all_rows():
    """A Fourier matrix has one row that is not a difference, so that it does not count as a derivative."""
    rows = np.array([[1, 1, 1], [1, -2, 1]], np.float32)
    assert table_of(rows[1:], (1,), HALF).differences and not table_of(rows, (1,), HALF).differences


def test_a_table_without_numbers_is_uniform():
    assert table_of(np.zeros((0, 3), np.float32), (1,), HALF).uniform


def test_small_numbers_vanish_along_the_axis_that_a_product_contracts():
    numbers = np.array([[1e-8, 2e-8], [0.25, 0.5]], np.float32)
    assert table_of(numbers, (1,), HALF).exceeds and not table_of(numbers, (0,), HALF).exceeds
