"""The range of numbers that a program computes from its literals, and where numbers beyond float16 occur."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pass_tools import add_any

from jmp_train._autocast.analysis.ranges import (
    UNKNOWN_NUMBERS,
    Numbers,
    Range,
    divides_by_terms,
    filled_with,
    numbers_through,
    overflows_through,
    range_of,
    range_through,
)
from jmp_train._jaxpr import flatten

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(jnp.bfloat16)
X = np.ones((4, 4), np.float32)
SMALL, LARGE = Range(1e-4, 1e-2), Range(10.0, 1e4)


def node_of(fn, *args, name=None):
    """The last node of a program, or the last with this name."""
    nodes = flatten(jax.make_jaxpr(fn)(*args)).nodes
    return [node for node in nodes if name in (None, node.name)][-1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.0, Range(2.0, 2.0)),
        (np.float32(-3), Range(3.0, 3.0)),
        (np.full((1, 1), 5.0), Range(5.0, 5.0)),
        (0.0, Range()),
        (-np.inf, Range()),
        (np.nan, Range()),
        (np.ones(2), None),
    ],
)
def test_the_range_of_a_known_number(value, expected):
    assert range_of(value) == expected


def test_the_range_of_a_tracer_is_not_known():
    seen = []
    jax.make_jaxpr(lambda x: seen.append(range_of(x)))(np.float32(1))
    assert seen == [None]


@pytest.mark.parametrize(
    ("magnitudes", "dtype", "fits"),
    [
        (Range(), FLOAT16, True),
        (Range(1.0, 65504.0), FLOAT16, True),
        (Range(1.0, 65505.0), FLOAT16, False),
        (Range(2.0**-14, 1.0), FLOAT16, True),
        (Range(2.0**-15, 1.0), FLOAT16, False),
        (Range(2.0**-15, 65505.0), BFLOAT16, True),
        # Near one, and equal to one in 16 bits: a bound that guards a logarithm or an arc cosine.
        (Range(0.9999, 0.9999), FLOAT16, False),
        (Range(0.5, 1.0001), FLOAT16, False),
        (Range(1.0001, 2.0), FLOAT16, False),
        (Range(0.9995, 1.001), FLOAT16, True),
        (Range(0.999, 0.999), BFLOAT16, False),
        (Range(0.998, 1.01), BFLOAT16, True),
    ],
)
def test_a_range_fits_if_all_are_normal_numbers_and_none_becomes_one(magnitudes, dtype, fits):
    assert magnitudes.fits(dtype) == fits


# name: (a function, the ranges of its operands, the range of its result)
THROUGH = {
    "a move": (lambda x: x.T, [LARGE], LARGE),
    "a sign": (lambda x: -x, [LARGE], LARGE),
    "a magnitude": (lambda x: jnp.abs(x), [LARGE], LARGE),
    "a part": (lambda x: lax.slice(x, (0, 0), (1, 1)), [LARGE], LARGE),
    "the largest": (lambda x: lax.reduce_max_p.bind(x, axes=(0,), out_sharding=None), [LARGE], LARGE),
    "a conversion": (lambda x: x.astype(jnp.float16), [LARGE], LARGE),
    "a choice": (lambda x: lax.select(x > 0, x, 2 * x), [SMALL, LARGE], Range(1e-4, 1e4)),
    "a bound": (lambda x: lax.max(x, 2 * x), [LARGE, SMALL], Range(1e-4, 1e4)),
    "a sum": (lambda x: x + x.T, [SMALL, LARGE], Range(1e-4, 1e-2 + 1e4)),
    "a difference": (lambda x: x - x.T, [LARGE, SMALL], Range(1e-4, 1e4 + 1e-2)),
    "a product": (lambda x: x * x.T, [SMALL, LARGE], Range(1e-4 * 10.0, 1e-2 * 1e4)),
    "a product with zero": (lambda x: x * x.T, [Range(), LARGE], Range()),
    "a quotient": (lambda x: x / x.T, [LARGE, SMALL], Range(10.0 / 1e-2, 1e4 / 1e-4)),
    "zero divided": (lambda x: x / x.T, [Range(), LARGE], Range()),
    "divided by zero": (lambda x: x / x.T, [LARGE, Range()], Range()),
    "a function": (lambda x: jnp.sin(x), [SMALL], None),
    "an unknown operand": (lambda x: x * x.T, [SMALL, None], None),
    "unknown operands": (lambda x: x * x.T, [None, None], None),
}


@pytest.mark.parametrize("name", THROUGH)
def test_the_range_of_a_result(name):
    fn, operands, expected = THROUGH[name]
    assert range_through(node_of(fn, X), operands) == expected


def test_booleans_are_zeros_and_ones_and_integers_are_not_followed():
    assert range_through(node_of(lambda x: x.astype(jnp.float32), X > 0), []) == Range(1, 1)
    assert range_through(node_of(lambda x: x.astype(jnp.float32), np.ones(3, np.int32)), []) is None


def gathered(mode, fill):
    def fn(x):
        return x.at[jnp.array([0, 9])].get(mode=mode, fill_value=fill)

    return node_of(fn, X, name="gather")


def test_the_literal_that_a_gather_fills_with():
    assert filled_with(gathered("fill", 1e9)) == Range(float(np.float32(1e9)), float(np.float32(1e9)))
    assert filled_with(gathered("fill", 0.0)) == Range()
    assert filled_with(gathered("clip", None)) is None
    assert filled_with(node_of(jnp.sin, X)) is None


TOO_LARGE, KNOWN, OVERFLOWS = Numbers(Range(1e9, 1e9)), Numbers(Range(1.0, 1.0)), Numbers(overflows=True)

# name: (a function, the numbers of its operands, whether its result has numbers beyond float16 beside others)
MIXES = {
    "joined with what is too large": (lambda x: lax.select(x > 0, x, 2 * x), [UNKNOWN_NUMBERS, TOO_LARGE], True),
    "joined with what fits": (lambda x: lax.select(x > 0, x, 2 * x), [UNKNOWN_NUMBERS, KNOWN], False),
    "known alone": (lambda x: lax.select(x > 0, x, 2 * x), [KNOWN, TOO_LARGE], False),
    "added to what is too large": (lambda x: x + x.T, [UNKNOWN_NUMBERS, TOO_LARGE], True),
    "less what is too large": (lambda x: x - x.T, [UNKNOWN_NUMBERS, TOO_LARGE], True),
    "subtracted from": (lambda x: x.at[jnp.array([0])].subtract(x[:1]), [TOO_LARGE, UNKNOWN_NUMBERS], True),
    "scattered into": (lambda x: x.at[jnp.array([0])].add(x[:1]), [TOO_LARGE, UNKNOWN_NUMBERS], True),
    "a gradient added to": (lambda x: add_any(x, x.T), [UNKNOWN_NUMBERS, TOO_LARGE], True),
    "moved": (lambda x: x.T, [OVERFLOWS], True),
    "moved, and fits": (lambda x: x.T, [UNKNOWN_NUMBERS], False),
    "sorted": (lambda x: lax.sort(x), [OVERFLOWS], True),
    "summed": (lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), [OVERFLOWS], True),
    "summed so far": (lambda x: lax.cumsum(x), [OVERFLOWS], True),
    "exponentials summed so far": (lambda x: lax.cumlogsumexp(x), [OVERFLOWS], True),
    "squared": (lambda x: lax.square(x), [OVERFLOWS], True),
    "a power": (lambda x: x**3, [OVERFLOWS], True),
    "bounded from below by it": (lambda x: lax.max(x, 2 * x), [UNKNOWN_NUMBERS, TOO_LARGE], False),
    "a bound of known numbers": (lambda x: lax.max(x, 2 * x), [KNOWN, TOO_LARGE], False),
    "a bound of it": (lambda x: lax.max(x, 2 * x), [OVERFLOWS, TOO_LARGE], True),
    "a bound of it and of others": (lambda x: lax.max(x, 2 * x), [OVERFLOWS, UNKNOWN_NUMBERS], False),
    "the largest": (lambda x: lax.reduce_max_p.bind(x, axes=(0,), out_sharding=None), [OVERFLOWS], False),
    "scaled by it": (lambda x: x * x.T, [UNKNOWN_NUMBERS, TOO_LARGE], False),
    "scaled": (lambda x: x * x.T, [UNKNOWN_NUMBERS, OVERFLOWS], True),
    "divided": (lambda x: x / x.T, [OVERFLOWS, UNKNOWN_NUMBERS], True),
    "a divisor": (lambda x: x / x.T, [UNKNOWN_NUMBERS, OVERFLOWS], False),
    "a function of it": (lambda x: jnp.sin(x), [OVERFLOWS], False),
}


@pytest.mark.parametrize("name", MIXES)
def test_where_numbers_beyond_the_dtype_stand_among_others(name):
    fn, operands, expected = MIXES[name]
    assert overflows_through(node_of(fn, X), operands, FLOAT16) == expected


def test_what_a_gather_fills_with_stands_among_others():
    assert overflows_through(gathered("fill", 1e9), [UNKNOWN_NUMBERS], FLOAT16)
    assert not overflows_through(gathered("fill", 1e9), [UNKNOWN_NUMBERS], BFLOAT16)
    assert not overflows_through(gathered("fill", 1.0), [UNKNOWN_NUMBERS], FLOAT16)
    assert overflows_through(gathered("fill", 1.0), [OVERFLOWS], FLOAT16)


def test_numbers_exceed_a_dtype_that_would_make_them_infinite():
    assert TOO_LARGE.exceed(FLOAT16) and not TOO_LARGE.exceed(BFLOAT16)
    assert OVERFLOWS.exceed(FLOAT16) and not UNKNOWN_NUMBERS.exceed(FLOAT16)
    assert not Numbers(Range(1e-9, 65504.0)).exceed(FLOAT16)  # small ones vanish, which is not meant here


@pytest.mark.parametrize(
    ("terms", "divisor", "fits"),
    [
        (4, Range(4.0, 4.0), True),
        (4, Range(8.0, 8.0), True),
        (4, Range(9.0, 9.0), False),  # the mean might be too small
        (4, Range(3.0, 3.0), False),
        (4, Range(4.0, 8.0), False),
        (4, None, False),
    ],
)
def test_a_mean_of_16_bit_numbers_fits_where_they_do(terms, divisor, fits):
    assert divides_by_terms(terms, divisor) == fits


def test_zeros_and_ones_are_known_though_no_operand_is_floating():
    (node,) = flatten(jax.make_jaxpr(lambda x: x.astype(np.float32))(np.array(True))).nodes
    assert numbers_through(node, [], FLOAT16).range == Range(1, 1)
    assert numbers_through(node, [UNKNOWN_NUMBERS], FLOAT16) is UNKNOWN_NUMBERS
