"""What reads a product: sums with squares, and functions that make it delicate, in one-line programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train._autocast.analysis.producers import Producers
from jmp_train._autocast.analysis.whole_program.consumers import Consumers
from jmp_train._jaxpr import flatten

X, Y = np.ones((4, 6), np.float32), np.full((5, 6), 2, np.float32)


def consumers_of(fn, *args):
    """The consumers of a program, and its first product of two matrices."""
    program = flatten(jax.make_jaxpr(fn)(*args))
    dots = (node for node in program.nodes if node.name == "dot_general" and len(program.avals[node.outs[0]].shape) > 1)
    return Consumers(program, Producers(program), {}), next(dots)


def squares(x):
    return jnp.sum(x**2, -1)


BOTH, LEFT, RIGHT, NEITHER = {0, 1}, {0}, {1}, set()
# name: (a function, the operands of `x @ y.T` whose squares are added to it)
CROSS_TERMS = {
    "squares, moved": (lambda x, y: jnp.sum((x**2).T, 0)[:, None] + jnp.sum((y**2).T, 0) - 2 * x @ y.T, BOTH),
    "squares of magnitudes": (lambda x, y: squares(jnp.abs(x))[:, None] + squares(jnp.abs(y)) - 2 * x @ y.T, BOTH),
    "powers": (
        lambda x, y: (
            jnp.sum(lax.pow(x, np.float32(2)), -1)[:, None] + jnp.sum(lax.pow(y, np.float32(2)), -1) - x @ y.T
        ),
        BOTH,
    ),
    "a matrix times itself": (lambda x, y: (lambda a: a @ y[:, :4].T + (a @ a)[:, :1])(x[:, :4]), NEITHER),
    "distances": (lambda x, y: squares(x)[:, None] + squares(y) - 2 * x @ y.T, BOTH),
    "the product scaled": (lambda x, y: squares(x)[:, None] + squares(y) - 2 * (x @ y.T), BOTH),
    "the product first": (lambda x, y: -2 * x @ y.T + squares(x)[:, None] + squares(y), BOTH),
    "the product between": (lambda x, y: squares(x)[:, None] - 2 * x @ y.T + squares(y), BOTH),
    "with another term": (lambda x, y: squares(x)[:, None] - 2 * x @ y.T + 1e-6 + squares(y), BOTH),
    "means": (lambda x, y: jnp.mean(x**2, -1)[:, None] + jnp.mean(y**2, -1) - x @ y.T / 3, BOTH),
    "products": (lambda x, y: jnp.sum(x * x, -1)[:, None] + jnp.sum(y * y, -1) - 2 * x @ y.T, BOTH),
    "square": (lambda x, y: jnp.sum(lax.square(x), -1)[:, None] + jnp.sum(lax.square(y), -1) - x @ y.T, BOTH),
    "norms": (
        lambda x, y: jnp.linalg.norm(x, axis=-1)[:, None] ** 2 + jnp.linalg.norm(y, axis=-1) ** 2 - 2 * x @ y.T, BOTH),
    "einsum": (
        lambda x, y: jnp.einsum("id,id->i", x, x)[:, None]
        + jnp.einsum("jd,jd->j", y, y) - 2 * jnp.einsum("id,jd->ij", x, y), BOTH),
    "vmap": (lambda x, y: jax.vmap(lambda a: jax.vmap(lambda b: a @ a + b @ b - 2 * a @ b)(y))(x), BOTH),
    "clipped, then a term": (lambda x, y: jnp.maximum(2 * x @ y.T, 0) - squares(x)[:, None] - squares(y), BOTH),
    "of computed values": (
        lambda x, y: squares(jnp.sin(x))[:, None] + squares(y) - 2 * jnp.sin(x) @ y.T, BOTH),
    "of parts": (lambda x, y: squares(x)[1:, None] + squares(y)[:3] - 2 * x[1:] @ y[:3].T, BOTH),
    "of given codes": (
        lambda x, y: squares(x)[:, None] + squares(y)[np.arange(3)] - 2 * x @ y[np.arange(3)].T, BOTH),
    "of no rows": (lambda x, y: squares(x[:0])[:, None] + squares(y) - 2 * x[:0] @ y.T, NEITHER),
    "of fewer parts": (lambda x, y: squares(x)[1:2, None] + squares(y)[:1] - 2 * x[1:] @ y[:3].T, NEITHER),
    "a convolution beside squares": (
        lambda x, y: lax.conv((x @ y.T)[None, None], x[None, None, :1, :1], (1, 1), "SAME") + jnp.sum(x**2), NEITHER),
    "printed squares": (
        lambda x, y: (jax.debug.callback(lambda s: None, s := squares(x)), s[:, None] - 2 * x @ y.T)[1], LEFT),
    "squares behind a barrier": (
        lambda x, y: lax.optimization_barrier((y, squares(x)))[1][:, None] - 2 * x @ y.T, LEFT),
    "a function beside squares in a barrier": (
        lambda x, y: lax.optimization_barrier((jnp.sin(x[:, :1]), squares(x)))[0] - 2 * x @ y.T, NEITHER),
    "one side": (lambda x, y: squares(x)[:, None] - 2 * x @ y.T, LEFT),
    "the other side": (lambda x, y: x @ y.T - squares(y) / 2, RIGHT),
    "sums": (lambda x, y: jnp.sum(x, -1)[:, None] + jnp.sum(y, -1) - 2 * x @ y.T, NEITHER),
    "sums of a function of squares": (lambda x, y: jnp.sum(jnp.sin(x**2), -1)[:, None] - 2 * x @ y.T, NEITHER),
    "cubes": (lambda x, y: jnp.sum(x**3, -1)[:, None] + jnp.sum(y**3, -1) - 2 * x @ y.T, NEITHER),
    "sums of products": (lambda x, y: jnp.sum(x * (x + 1), -1)[:, None] - 2 * x @ y.T, NEITHER),
    "an inner product of two": (lambda x, y: jnp.einsum("id,id->i", x, x + 1)[:, None] - 2 * x @ y.T, NEITHER),
    "a Gram matrix": (lambda x, y: x @ y[:4].T + x @ x.T, NEITHER),
    "squares of other values": (lambda x, y: squares(x + 1)[:, None] + squares(y + 1) - 2 * x @ y.T, NEITHER),
    "a factor of the squares": (lambda x, y: squares(x)[:, None] * (x @ y.T), NEITHER),
    "a function of the squares": (lambda x, y: jnp.sin(squares(x))[:, None] - 2 * x @ y.T, NEITHER),
    "a function of the product": (lambda x, y: squares(x)[:, None] + squares(y) - jnp.sin(x @ y.T), NEITHER),
}  # fmt: skip


@pytest.mark.parametrize("name", CROSS_TERMS)
def test_which_squares_are_added_to_a_product(name):
    fn, expected = CROSS_TERMS[name]
    consumers, product = consumers_of(fn, X, Y)
    assert consumers.squared_beside.get(product.outs[0], frozenset()) == expected


DELICATE = {
    "an angle": (jnp.sin, True),
    "an angle, scaled": (lambda p: jnp.cos(2 * jnp.pi * p + 1), True),
    "a logarithm": (jnp.log, True),
    "a logarithm of what is bounded": (lambda p: jnp.log(jnp.maximum(p, 1e-6)), True),
    "a divisor": (lambda p: 2 / (p + 1), True),
    "a root": (jnp.sqrt, True),
    "a cosine": (lax.acos, True),
    "the base of a power": (lambda p: lax.pow(p, np.float32(0.3)), True),
    "a numerator": (lambda p: p / 2, False),
    "a numerator of an array": (lambda p: p / np.arange(1.0, 6, dtype=np.float32), False),
    "an activation": (jnp.tanh, False),
    "clipped": (lambda p: lax.clamp(np.float32(0), p, np.float32(6)), False),
    "a softmax": (jax.nn.softmax, False),
    "a logarithm of a function": (lambda p: jnp.log(jnp.exp(p)), False),
    "a logarithm of a magnitude": (lambda p: jnp.log1p(jnp.abs(p)), True),
    "a logarithm of a power": (lambda p: jnp.log(1e-6 + p**3), True),
    "a logarithm of squares": (lambda p: jnp.log(1e-6 + lax.square(p)), True),
    "a logarithm of a value times itself": (lambda p: jnp.log2(p * p), True),
    "a logarithm of a root of a square": (lambda p: jnp.log(jnp.sqrt(jnp.abs(p) + 1)), True),
    "a logarithm of a product": (lambda p: jnp.log(p * (p + 1)), False),
    "an angle of a square": (lambda p: jnp.sin(p**2), False),
    "a sum of squares beside its divisor": (lambda p: p / (1 + jnp.sum(p**2)), False),
}


@pytest.mark.parametrize("name", DELICATE)
def test_what_reads_a_product(name):
    fn, expected = DELICATE[name]
    consumers, product = consumers_of(lambda x, y: fn(x @ y.T), X, Y)
    assert (product.outs[0] in consumers.delicate) == expected


def places(axis):
    return lax.broadcasted_iota(np.int32, (4, 4), axis)


DIAGONALS = {
    "a trace": (jnp.trace, True),
    "the trace of a method, scaled": (lambda p: (p / 2).T.trace() + 1, True),
    "a trace beside the main one": (lambda p: jnp.trace(p, 1), True),
    "a trace by an einsum": (lambda p: jnp.einsum("ii->", p), True),
    "a diagonal": (jnp.diag, True),
    "a mean of a diagonal": (lambda p: jnp.mean(jnp.diagonal(3 * p)), True),
    "times the identity": (lambda p: jnp.sum(jnp.eye(4) * p), True),
    "times the identity twice": (lambda p: jnp.sum(jnp.eye(4) * jnp.eye(4) * p), False),
    "twice": (lambda p: jnp.trace(p) + jnp.sum(jnp.diag(p) ** 2), True),
    "with the product": (lambda p: (jnp.trace(p), p.T), False),
    "with a function of the product": (lambda p: jnp.trace(p) + jnp.sum(jnp.sin(p)), False),
    "a trace of a function": (lambda p: jnp.trace(jnp.sin(p)), False),
    "all but the diagonal": (lambda p: jnp.where(jnp.eye(4, dtype=bool), 0, p), False),
    "where a row is itself": (lambda p: jnp.sum(jnp.where(places(0) == places(0), p, 0)), False),
    "where a row is a column": (lambda p: jnp.sum(jnp.where(places(0) == places(1), p, 0)), True),
    "a triangle": (lambda p: jnp.sum(jnp.tril(p)), False),
    "a sum": (jnp.sum, False),
    "an identity beside it": (lambda p: p + jnp.eye(4), False),
}


@pytest.mark.parametrize("name", DIAGONALS)
def test_products_of_which_only_a_diagonal_is_read(name):
    fn, expected = DIAGONALS[name]
    consumers, product = consumers_of(lambda x, y: fn(x @ y[:4].T), X, Y)
    assert (product.outs[0] in consumers.diagonals) == expected


AVERAGES = {
    "rows by their sum": (lambda x, y: x @ y.T / jnp.sum(x, 1, keepdims=True), [0]),
    "columns by their sum": (lambda x, y: x @ y.T / jnp.sum(y, 1), [1]),
    "by both sums": (lambda x, y: x @ y.T / (jnp.sum(x, 1)[:, None] + jnp.sum(y, 1)), [0, 1]),
    "by the mean, bounded": (lambda x, y: (x @ y.T / 6).T / jnp.maximum(jnp.mean(x, 1) + 1e-9, 1e-6), [0]),
    "of computed weights": (lambda x, y: jnp.exp(x) @ y.T / jnp.exp(x).sum(1)[:, None], [0]),
    "moved weights": (lambda x, y: jnp.einsum("ki,jk->ij", x.T, y) / jnp.sum(x.T, 0)[:, None], [0]),
    "by the sum of other weights": (lambda x, y: x @ y.T / jnp.sum(jnp.sin(x), 1)[:, None], []),
    "by sums over other axes": (lambda x, y: x @ y.T / jnp.sum(x), []),
    "reshaped weights, of unknown axes": (
        lambda x, y: x.reshape(2, 12).reshape(4, 6) @ y.T / jnp.sum(x.reshape(4, 2, 3), (1, 2))[:, None],
        [],
    ),
    "by a maximum": (lambda x, y: x @ y.T / jnp.max(x, 1)[:, None], []),
    "a function of it": (lambda x, y: jnp.sin(x @ y.T) / jnp.sum(x, 1)[:, None], []),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_products_that_are_divided_by_sums_of_an_operand(name):
    fn, expected = AVERAGES[name]
    consumers, product = consumers_of(fn, X, Y)
    assert consumers.averages.get(product.outs[0], []) == expected


UNDER_LOGARITHMS = {
    "a logarithm": (jnp.log, True),
    "a choice, bounded": (lambda p: jnp.log1p(jnp.maximum(p[np.arange(2), np.arange(2)], 1e-6)), True),
    "a mean": (lambda p: jnp.log2(jnp.mean(p, 0) + 1e-9), True),
    "a weighted sum": (lambda p: jnp.log(jnp.arange(5.0) * p + (1 - jnp.arange(5.0))), True),
    "a quotient": (lambda p: jnp.log(p / jnp.sum(jnp.sin(p), 1, keepdims=True)), True),
    "a product of it": (lambda p: jnp.log(p @ jnp.ones((5, 2))), True),
    "a selection": (lambda p: jnp.log(jnp.where(np.eye(4, 5) > 0, p, 1)), True),
    "the other half of it": (lambda p: jnp.log(jnp.concatenate([p, 1 - p])), True),
    "a softmax": (jax.nn.log_softmax, False),
    "a softplus": (jax.nn.softplus, False),
    "a function": (lambda p: jnp.log(jnp.sin(p)), False),
    "a divisor": (lambda p: 1 / p, False),
    "a product that is saved": (lambda p: jnp.log(lax.reduce_precision(p, exponent_bits=8, mantissa_bits=23)), True),
    "a root": (jnp.sqrt, False),
}


@pytest.mark.parametrize("name", UNDER_LOGARITHMS)
def test_products_under_logarithms(name):
    fn, expected = UNDER_LOGARITHMS[name]
    consumers, product = consumers_of(lambda x, y: fn(x @ y.T), X, Y)
    assert (product.outs[0] in consumers.under_logarithms) == expected


ARE_EXPONENTIALS = {
    "a softmax": (jax.nn.softmax, True),
    "a sigmoid": (jax.nn.sigmoid, True),
    "an exponential of base two": (jnp.exp2, True),
    "a mean of rows, moved": (lambda x: jnp.mean(jnp.exp(x)[None].repeat(3, 0), 0).T.reshape(4, 6), True),
    "what is left": (lambda x: 1 - jax.nn.sigmoid(x), True),
    "smoothed": (lambda x: 0.9 * jax.nn.softmax(x) + 0.1 / 6, True),
    "the part of a barrier": (lambda x: lax.optimization_barrier((jnp.sin(x), jnp.exp(x)))[1], True),
    "another part": (lambda x: lax.optimization_barrier((jnp.sin(x), jnp.exp(x)))[0], False),
    "what is divided by one": (lambda x: x / jnp.exp(x), False),
    "a function of one": (lambda x: jnp.sin(jnp.exp(x)), False),
    "data": (jnp.sin, False),
}


@pytest.mark.parametrize("name", ARE_EXPONENTIALS)
def test_values_that_are_made_of_exponentials(name):
    fn, expected = ARE_EXPONENTIALS[name]
    consumers, product = consumers_of(lambda x, y: fn(x) @ y.T, X, Y)
    assert (product.ins[0] in consumers.are_exponentials) == expected


@pytest.mark.parametrize("fn, expected", [(jnp.log, True), (jnp.tanh, False)])
def test_what_reads_a_convolution(fn, expected):
    x, y = np.ones((1, 2, 8), np.float32), np.ones((4, 2, 3), np.float32)
    program = flatten(jax.make_jaxpr(lambda x, y: fn(lax.conv(x, y, (1,), "SAME")))(x, y))
    (convolution,) = (node for node in program.nodes if node.name == "conv_general_dilated")
    assert (convolution.outs[0] in Consumers(program, Producers(program), {}).delicate) == expected


SYSTEMS = {
    "a right-hand side": (lambda p: jnp.linalg.solve(jnp.eye(4), p), True),
    "a matrix": (lambda p: jnp.linalg.solve(jnp.eye(4) + p[:, :4], jnp.ones((4, 5))), False),
    "a product of it": (lambda p: jnp.linalg.cholesky(jnp.eye(5) + p.T @ p), True),
    "a product of it and others": (lambda p: jnp.linalg.cholesky((p.T + p[:1].T) @ jnp.tanh(p)), True),
    "a product of a product of it": (lambda p: jnp.linalg.cholesky(jnp.eye(5) @ (p.T @ jnp.ones((4, 5)))), True),
    "a product of a function of it": (lambda p: jnp.linalg.cholesky(jnp.tanh(p).T @ jnp.tanh(p)), False),
    "a product of what bounds it": (lambda p: jnp.linalg.cholesky(jnp.maximum(p, 0).T @ jnp.tanh(p)), False),
    "a factor": (lambda p: jnp.linalg.qr(2 * p)[0], True),
    "a function of it": (lambda p: jnp.linalg.solve(jnp.eye(4), jnp.tanh(p)), False),
    "an angle": (jnp.sin, False),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_which_products_a_linear_system_reads(name):
    fn, expected = SYSTEMS[name]
    consumers, product = consumers_of(lambda x, y: fn(x @ y.T), X, Y)
    assert (product.outs[0] in consumers.in_systems) == expected
    assert consumers.in_systems.get(product.outs[0], False) == (expected and not name.startswith("a product"))


# Of the first product, `p = x @ y.T`: whether it is repeated, and directly.
REPEATED = {
    "a quadratic form": (lambda p, x, y: p @ jnp.sin(y) @ (jnp.sin(y).T @ p.T), None),
    "one value on both sides": (lambda p, x, y: p.T @ x, True),
    "the other value on both sides": (lambda p, x, y: 2 * p @ y, True),
    "a value twice on one side": (lambda p, x, y: x.T @ p, True),
    "three values": (lambda p, x, y: p @ jnp.sin(y), None),
    "a function between": (lambda p, x, y: jnp.tanh(p).T @ x, None),
    "what is added to it": (lambda p, x, y: (p + 1).T @ x, None),
    "its norm between": (lambda p, x, y: (p / jnp.linalg.norm(p)).T @ x, False),
    "its norm between and nothing": (lambda p, x, y: ((p / jnp.linalg.norm(p)).T @ x, p.T @ x), True),
    "nothing between and its norm": (lambda p, x, y: (p.T @ x, (p / jnp.linalg.norm(p)).T @ x), True),
    "one over its norm between": (lambda p, x, y: (lax.rsqrt(jnp.sum(p * p)) * p).T @ x, False),
    "its inverse": (lambda p, x, y: (jnp.linalg.norm(p) / p).T @ x, None),
    "norms of its rows between": (lambda p, x, y: (p / jnp.linalg.norm(p, axis=0)).T @ x, None),
}


@pytest.mark.parametrize("name", REPEATED)
def test_which_products_repeat_a_value(name):
    fn, expected = REPEATED[name]
    consumers, product = consumers_of(lambda x, y: fn(x @ y.T, x, y), X, Y)
    assert consumers.repeated.get(product.outs[0]) is expected


# name: (a function of square matrices, whether its last product is a power)
POWERS = {
    "a square": (lambda a, b: a @ a, True),
    "a fifth power": (lambda a, b: (a @ a) @ (a @ a) @ a, True),
    "a product of powers": (lambda a, b: (a @ (a @ a)) @ ((a @ a) @ (a @ a)), True),
    "a matrix scaled by another": (lambda a, b: (a * b) @ b, False),
    "powers of two matrices": (lambda a, b: (a @ a) @ (b @ b), False),
    "powers of a product": (lambda a, b: (a @ b) @ (a @ b), True),
    "a power times another value": (lambda a, b: (a @ a) @ b, False),
}


@pytest.mark.parametrize("name", POWERS)
def test_which_products_are_powers(name):
    a = np.ones((4, 4), np.float32)
    program = flatten(jax.make_jaxpr(POWERS[name][0])(a, a))
    *_, last = (node for node in program.nodes if node.name == "dot_general")
    assert (last.outs[0] in Consumers(program, Producers(program), {}).repeated) == POWERS[name][1]


@pytest.mark.parametrize("sums, expected", [(15, True), (16, False)])
def test_how_far_a_sum_is_followed(sums, expected):
    def fn(x, y):
        value = x @ y.T
        for i in range(sums):
            value = jnp.tanh(i * x) + value
        return jnp.sin(value)

    consumers, product = consumers_of(fn, np.ones((4, 4), np.float32), np.ones((4, 4), np.float32))
    assert (product.outs[0] in consumers.delicate) == expected


@pytest.mark.parametrize("others, expected", [(15, LEFT), (16, NEITHER)])
def test_how_many_sums_of_squares_are_followed(others, expected):
    def fn(x, y):
        total = sum((squares(jnp.tanh(i * x)) for i in range(others)), squares(x))
        return total[:, None] - 2 * x @ y.T

    consumers, product = consumers_of(fn, X, Y)
    assert consumers.squared_beside.get(product.outs[0], frozenset()) == expected
