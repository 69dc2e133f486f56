"""Where a value comes from, of what it is a part, and whether two values are equal, in one-line programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from jmp_train._autocast.analysis.producers import Producers
from jmp_train._jaxpr import flatten

X, Y = np.ones((4, 6), np.float32), np.full((4, 6), 2, np.float32)


def produced(fn, *args, same=()):
    """The producers of a program, and the numbers of its inputs and results."""
    program = flatten(jax.make_jaxpr(fn)(*args))
    return Producers(program, tuple(same)), program.inputs, program.outputs


SOURCES = {
    "itself": (lambda x: x, True),
    "moved": (lambda x: x.T.reshape(3, 8)[:, None], True),
    "repeated": (lambda x: jnp.broadcast_to(x, (2, 4, 6)), True),
    "negated": (lambda x: -x, True),
    "named": (lambda x: checkpoint_name(x, "x"), True),
    "put on a device": (lambda x: jax.device_put(x, jax.devices()[0]), True),
    "behind a barrier": (lambda x: lax.optimization_barrier((Y, x))[1], True),
    "as `jax.checkpoint` saves it": (lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23), True),
    "with fewer digits": (lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10), False),
    "with a smaller range": (lambda x: lax.reduce_precision(x, exponent_bits=5, mantissa_bits=23), False),
    "scaled": (lambda x: 2 * x / 3, True),
    "scaled from the left": (lambda x: lax.mul(np.float32(2), x.sum()), False),
    "rounded": (lambda x: x.astype(jnp.float16), False),
    "a part": (lambda x: x[:2], False),
    "a quotient by itself": (lambda x: 2 / x, False),
    "scaled by an array": (lambda x: Y * x, False),
    "a function": (lambda x: jnp.sin(x), False),
    "a sum": (lambda x: x + 1, False),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_a_value_was_moved_and_scaled_from(name):
    fn, expected = SOURCES[name]
    producers, (x,), (result,) = produced(fn, X)
    assert (producers.source(result) == x) == expected


def test_16_bit_numbers_that_are_widened_are_the_same():
    producers, (x,), (result,) = produced(lambda x: x.astype(jnp.float32).T, X.astype(np.float16))
    assert producers.source(result) == x
    producers, (x,), (result,) = produced(lambda x: x.astype(jnp.bfloat16), X.astype(np.float16))
    assert producers.source(result) != x


def pad(x, low, high, interior=0):
    return lax.pad(x, np.float32(0), [(low, high, interior), (0, 0, 0)])


WHOLES = {
    "a part": (lambda x: x[:2], True),
    "a part of a moved value": (lambda x: x.T[:2], True),
    "a part, padded with zeros": (lambda x: pad(x[:2], 1, 0), True),
    "a part, padded with ones": (lambda x: lax.pad(x[:2], np.float32(1), [(1, 0, 0), (0, 0, 0)]), False),
    "a part, padded with one of its numbers": (lambda x: lax.pad(x[:2], x[0, 0], [(1, 0, 0), (0, 0, 0)]), False),
    "all of it": (lambda x: x.T, False),
    "a part, scaled": (lambda x: 2 * x[:2], False),
}


@pytest.mark.parametrize("name", WHOLES)
def test_what_a_value_is_a_part_of(name):
    fn, expected = WHOLES[name]
    producers, (x,), (result,) = produced(fn, X)
    assert (producers.whole(result) == x) == expected


SAME = {
    "one value": (lambda x, y: (x, x), True),
    "scaled and moved": (lambda x, y: (2 * x, -x.T), True),
    "computed alike": (lambda x, y: (jnp.sin(x + y), jnp.sin(x + y)), True),
    "computed alike from literals": (lambda x, y: (jnp.sin(x + 2), jnp.sin(x + 2)), True),
    "of other literals": (lambda x, y: (jnp.sin(x + 2), jnp.sin(x + 3)), False),
    "of other operands": (lambda x, y: (jnp.sin(x), jnp.sin(y)), False),
    "of other functions": (lambda x, y: (jnp.sin(x), jnp.cos(x)), False),
    "of other parameters": (lambda x, y: (jnp.sum(x, 0), jnp.sum(x, 1)), False),
    "of operands in another order": (lambda x, y: (x - y, y - x), False),
    "results of one operation": (lambda x, y: tuple(jnp.split(x, 2)), False),
    "two values": (lambda x, y: (x, y), False),
    "of one captured array": (lambda x, y: (x + Y, x + Y), True),
    "of two captured arrays": (lambda x, y: (x + Y, x + X), False),
    "of a captured array and a literal": (lambda x, y: (x + Y, x + 2), False),
    "of more operands": (lambda x, y: (jnp.concatenate([x, y]), jnp.concatenate([x, y, y])), False),
    "of a callback with effects": (lambda x, y: (io_callback(np.sin, x, x), io_callback(np.sin, x, x)), False),
}


@pytest.mark.parametrize("name", SAME)
def test_whether_two_values_are_one(name):
    fn, expected = SAME[name]
    producers, _, (one, other) = produced(fn, X, Y)
    assert producers.are_one(one, other) == producers.are_one(other, one) == expected


def test_inputs_are_one_if_they_are_so_outside_and_a_row_is_its_array():
    producers, _, (one, other) = produced(lambda x, y: (x, y), X, Y, same=("a", "a"))
    assert producers.are_one(one, other)
    producers, _, (one, other) = produced(lambda x, y: (x, y), X, Y, same=("a", ("row", ("row", "a"))))
    assert producers.are_one(one, other)
    producers, _, (one, other) = produced(lambda x, y: (x, y), X, Y, same=("a", ("row", "b")))
    assert not producers.are_one(one, other)


def test_comparing_ends_after_so_many_equations():
    def chain(x):
        for _ in range(100):
            x = jnp.sin(x)
        return x

    producers, _, (one, other) = produced(lambda x: (chain(x), chain(x)), X)
    assert not producers.are_one(one, other)


PADS = {
    "behind the last of other steps": (lambda x, y: (pad(x, 0, 4, 1), pad(y, 7, 0)), True),
    "with other steps, from another place": (lambda x, y: (pad(x, 1, 2, 1), pad(y, 0, 0, 2)), False),
    "one after the other": (lambda x, y: (pad(x, 0, 4), pad(y, 4, 0)), True),
    "overlapping by one": (lambda x, y: (pad(x, 0, 3), pad(y, 3, 0)), False),
    "interleaved": (lambda x, y: (pad(x, 0, 1, 1), pad(y, 1, 0, 1)), True),
    "on the same places": (lambda x, y: (pad(x, 0, 1, 1), pad(y, 0, 1, 1)), False),
    "with other steps": (lambda x, y: (pad(x, 0, 3, 1), pad(y, 0, 0, 2)), False),
    "of ones": (lambda x, y: (lax.pad(x, np.float32(1), [(0, 4, 0), (0, 0, 0)]), pad(y, 4, 0)), False),
    "one alone": (lambda x, y: (pad(x, 0, 4), jnp.concatenate([y, y])), False),
}


@pytest.mark.parametrize("name", PADS)
def test_whether_two_values_are_zero_where_the_other_is_not(name):
    fn, expected = PADS[name]
    producers, _, (one, other) = produced(fn, X, Y)
    assert producers.are_disjoint(one, other) == producers.are_disjoint(other, one) == expected


AXES = {
    "itself": (lambda x: x, [1], {1}),
    "transposed": (lambda x: x.T, [0], {1}),
    "broadcast": (lambda x: jnp.broadcast_to(x, (3, 4, 6)), [2], {1}),
    "along a new axis": (lambda x: jnp.broadcast_to(x, (3, 4, 6)), [0], {-1}),
    "reshaped": (lambda x: x.reshape(6, 4), [0], None),
    "scaled": (lambda x: x.T * 2, [1], {0}),
    "scaled from the left": (lambda x: 2 * x.T, [1], {0}),
}


@pytest.mark.parametrize("name", AXES)
def test_which_axes_of_its_source_the_axes_of_a_value_are(name):
    fn, axes, expected = AXES[name]
    producers, _, (result,) = produced(fn, X, same=(("argument", 0),))
    found = producers.axes_of_source(result, axes)
    assert found == expected


def test_the_axes_of_what_comes_from_outside_are_not_known():
    producers, (x,), _ = produced(lambda x: x, X, same=(("outside", "a"),))
    assert producers.axes_of_source(x, [0]) is None


def test_what_is_computed_alike_outside_is_one_value_inside():
    around, _, (one, alike, other) = produced(lambda x: (jnp.sin(x), jnp.sin(x), jnp.cos(x)), X)
    elsewhere, _, (same, *_) = produced(lambda x: (jnp.sin(x), x), X)
    tokens = [around.token(number) for number in (one, alike, other)]
    producers, (a, b, c, d), _ = produced(lambda *args: args, X, X, X, X, same=(*tokens, elsewhere.token(same)))
    assert producers.are_one(a, b) and not producers.are_one(a, c)
    assert one == same and not producers.are_one(a, d)  # one number, of two programs


STORED = {
    "rows of what is computed around": (lambda x: x, ("row", ("outside", 7)), False),
    "an argument": (lambda x: 2 * x.T, ("argument", 0), True),
    "an argument of a program around": (lambda x: x, ("outside", ("argument", 0)), True),
    "rows of an argument": (lambda x: x, ("row", ("outside", ("argument", 0))), True),
    "part of an argument": (lambda x: x[1:3].T, ("argument", 0), True),
    "an argument beside zeros": (lambda x: pad(x, 1, 0), ("argument", 0), True),
    "an argument beside ones": (lambda x: lax.pad(x, np.float32(1), [(1, 0, 0), (0, 0, 0)]), ("argument", 0), False),
    "computed around": (lambda x: x, ("outside", 7), False),
    "computed": (lambda x: jnp.sin(x), ("argument", 0), False),
    "captured": (lambda x: Y.T, ("argument", 0), True),
}


@pytest.mark.parametrize("name", STORED)
def test_what_is_in_memory_as_float32(name):
    fn, token, expected = STORED[name]
    producers, _, (result,) = produced(fn, X, same=(token,))
    assert producers.is_stored(result) == expected


def test_the_factors_of_a_product():
    def fn(x, y):
        products = x * y, (x * y).T, 2 * (x * y), jnp.einsum("ij,kj->ikj", x, y)
        return *products, x / y, x * x, x * y + 1, x.T @ y, x

    producers, (x, y), (*products, quotient, square, total, dot, same) = produced(fn, X, Y)
    assert all({*producers.factors(number)} == {x, y} for number in products)
    assert producers.factors(square) == (x, x) and producers.factors(quotient) == (x,)
    assert producers.factors(total) == producers.factors(dot) == producers.factors(same) == ()


def test_what_a_dot_multiplies_by_is_a_weight():
    def fn(x, y):
        weights = x + y, jnp.sin(x), -x, y * jnp.cos(x), jnp.tan(x).astype(jnp.float16)
        product = (x + y).T @ y
        return product, [y.T @ weight for weight in weights], x[:2], product.sum()

    producers, _, (product, *_, part, _) = produced(fn, X, Y)
    names = ("add", "sin", "neg", "cos", "tan")
    weights = [node.outs[0] for node in producers.program.nodes if node.name in names]
    assert len(weights) == 6 and all(map(producers.becomes_weight, weights))
    assert not producers.becomes_weight(product) and not producers.becomes_weight(part)


def test_a_number_that_loses_its_weak_type_is_the_same():
    producers, (x,), (result,) = produced(lambda x: lax.convert_element_type(x, np.float32), 2.0)
    assert result != x and producers.source(result) == x


def test_pads_of_a_symbolic_size_may_meet():
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 6"), np.float32)
    producers, _, (one, other) = produced(lambda x, y: (pad(x, 4, 0), pad(y, 0, 4)), x, x)
    assert not producers.are_disjoint(one, other)


def test_what_is_computed_alike_of_inputs_that_are_one_outside():
    producers, _, (one, other) = produced(lambda x, y: (jnp.sin(x), jnp.sin(y)), X, Y, same=("a", "a"))
    assert producers.are_one(one, other)


def test_one_array_that_two_calls_capture():
    one, two = jax.jit(lambda x: x + Y), jax.jit(lambda x: jnp.add(x, Y))
    producers, _, (left, right) = produced(lambda x: (one(x), two(x)), X)
    assert producers.are_one(left, right)
