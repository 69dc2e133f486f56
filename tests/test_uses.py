"""The uses of a value, in one-line programs: whether only dots read it, and whether its rounding would do harm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.experimental import io_callback
from pass_tools import with_batching_rule

import jmp_train as jmp
from jmp_train._autocast.analysis.uses import RETURNED, Flags, axes_of
from jmp_train._autocast.ir import TOP, Precision
from jmp_train._autocast.planner import Planner

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(8, 16)).astype(np.float32) for _ in range(2))
W = RNG.normal(size=(16, 4)).astype(np.float32)

NOTHING = Flags()
DOT = {"reaches_dot", "to_dot"}
ONLY_DOTS = DOT | {"only_dots"}
BEFORE_DOT = {"reaches_dot"}
RESULT = {"only_results"}
WIDE = {"only_wide"} | RESULT
DELICATE = {"delicate"}
EXPONENT = {"in_exponent"}
POSITION = {"is_position"}


def halves(x):
    """The results of one operation."""
    return jnp.split(x, 2)


def pooled(x):
    return nn.max_pool(x[..., None], (2, 1), (2, 1))[..., 0]


@jax.named_scope("wide")
def wide_dot(x, w):
    return x @ w


def looped(x, w):
    """The sum of a scan's carry and its rows, of which a dot reads the rows."""
    carry, rows = lax.scan(lambda c, row: (c + row, row * 2), x[0], x)
    return jnp.sum(carry) + jnp.sum(rows @ w)


def repeated(fn, x, y):
    return lax.fori_loop(0, y[0, 0].astype(int), lambda _, c: fn(c), x)


# name: (a function, all flags of its first argument `x`)
CASES = {
    "nothing reads it": (lambda x, y, w: y, set()),
    "returned": (lambda x, y, w: x, set()),
    "returned and summed": (lambda x, y, w: (x, jnp.sum(x)), set()),
    "a dot": (lambda x, y, w: x @ w, ONLY_DOTS),
    "a dot and a sum": (lambda x, y, w: (x @ w, jnp.sum(x)), DOT),
    "a dot behind moves": (lambda x, y, w: x.T.reshape(8, 16)[:, ::-1] @ w, ONLY_DOTS),
    "a dot behind a sign": (lambda x, y, w: jnp.abs(-x) @ w, DOT),
    "a dot behind a magnitude": (lambda x, y, w: jnp.abs(x) @ w, DOT),
    "a dot behind a bound": (lambda x, y, w: jnp.maximum(x, y) @ w, DOT),
    "a dot behind a choice": (lambda x, y, w: jnp.where(y > 0, x, y) @ w, DOT),
    "a dot behind a pool": (lambda x, y, w: pooled(x) @ w, DOT),
    "a dot behind a concatenation": (lambda x, y, w: jnp.concatenate([y, x]) @ w, DOT),
    "a dot behind a function": (lambda x, y, w: jnp.tanh(x) @ w, BEFORE_DOT),
    "a dot behind a product": (lambda x, y, w: (x * y) @ w, BEFORE_DOT),
    "a dot behind a sum": (lambda x, y, w: jnp.sum(x, 0) * w[:, 0] @ w, BEFORE_DOT | WIDE),
    "a dot of one part": (lambda x, y, w: (halves(x)[0] @ w, jnp.tanh(halves(x)[1])), DOT),
    "a dot in a region": (lambda x, y, w: jmp.full_precision(jnp.dot)(x, w), DELICATE),
    "a dot in a scope": (lambda x, y, w: wide_dot(x, w), BEFORE_DOT | DELICATE),
    "a dot behind a barrier": (lambda x, y, w: lax.optimization_barrier(x) @ w, ONLY_DOTS),
    "a dot behind a barrier in a scope": (
        lambda x, y, w: jax.named_scope("wide")(lax.optimization_barrier)(x) @ w,
        BEFORE_DOT | DELICATE,
    ),
    "a dot of a precision": (lambda x, y, w: jnp.dot(x, w, precision="highest"), BEFORE_DOT | DELICATE | WIDE),
    "a dot in a loop": (lambda x, y, w: looped(x, w), BEFORE_DOT),
    "a dot in a loop of unknown length": (
        lambda x, y, w: repeated(lambda c: jnp.tanh(c @ y.T @ jnp.cos(y)), x, y),
        ONLY_DOTS,
    ),
    "a dot after a loop of unknown length": (lambda x, y, w: repeated(lambda c: c[::-1], x, y) @ w, ONLY_DOTS),
    "a function in a loop of unknown length": (lambda x, y, w: repeated(jnp.tanh, x, y), set()),
    "an exponential after a loop": (lambda x, y, w: jnp.exp(repeated(lambda c: c[::-1], x, y)), EXPONENT),
    "an exponential in a loop": (lambda x, y, w: repeated(lambda c: jnp.sin(jnp.exp(c)), x, y), EXPONENT | WIDE),
    "an exponential in the next iteration": (
        lambda x, y, w: lax.fori_loop(0, 3, lambda _, c: (y, c[0][::-1], jnp.exp(c[1])), (x, y, y))[2],
        EXPONENT,
    ),
    "a sum after a loop": (lambda x, y, w: jnp.sum(repeated(lambda c: c[::-1], x, y)), set()),
    "a sum in a loop": (lambda x, y, w: lax.scan(lambda c, row: (c + jnp.sum(row), None), 0.0, x)[0], WIDE),
    "a function with a batching rule": (lambda x, y, w: with_batching_rule(jnp.tanh)(x), BEFORE_DOT),
    "the predicate of a branch": (lambda x, y, w: lax.cond(x[0, 0] > 0, lambda: y @ w, lambda: w[:8]), RESULT),
    "a dot in a branch": (lambda x, y, w: lax.cond(y[0, 0] > 0, lambda: x @ w, lambda: jnp.tanh(y @ w)), DOT),
    "a sum": (lambda x, y, w: jnp.sum(x), WIDE),
    "two sums": (lambda x, y, w: jnp.sum(x) + jnp.sum(x, 0), WIDE),
    "a sum behind moves": (lambda x, y, w: jnp.sum(x.T[:4], 0), WIDE),
    "a sum of a product": (lambda x, y, w: jnp.sum(x * y), WIDE),
    "a sum of a magnitude": (lambda x, y, w: jnp.sum(jnp.abs(x)), WIDE),
    "a sum of a function": (lambda x, y, w: jnp.sum(jnp.tanh(x)), RESULT),
    "a largest element": (lambda x, y, w: jnp.max(x), set()),
    "a sum of one part": (lambda x, y, w: (jnp.sum(halves(x)[0]), halves(x)[1]), set()),
    "a square": (lambda x, y, w: x.T @ x, BEFORE_DOT | DELICATE | WIDE),
    "a divisor": (lambda x, y, w: y / x, DELICATE),
    "a dividend": (lambda x, y, w: x / y, set()),
    "a logarithm": (lambda x, y, w: jnp.log(x), DELICATE | WIDE),
    "a logarithm of moves": (lambda x, y, w: jnp.log(-x.T[:2]), DELICATE | RESULT),
    "a logarithm of a product": (lambda x, y, w: jnp.log(x * y), WIDE),
    "a logarithm of a distance": (lambda x, y, w: jnp.log(1 - x), DELICATE | WIDE),
    "a logarithm of a difference": (lambda x, y, w: jnp.log(y - x), WIDE),
    "a logarithm of a distance of a square": (lambda x, y, w: jnp.log(1 - x**2), DELICATE | WIDE),
    "a logarithm of a distance of a product with itself": (lambda x, y, w: jnp.log(1 - x * x), DELICATE | WIDE),
    "a logarithm of one part": (lambda x, y, w: (jnp.log(halves(x)[0]), halves(x)[1]), DELICATE),
    "a bound from above": (lambda x, y, w: jnp.minimum(x, y), DELICATE),
    "a bound from below": (lambda x, y, w: jnp.maximum(x, y), set()),
    "a negative power": (lambda x, y, w: x**-2, DELICATE | WIDE),
    "a power": (lambda x, y, w: x**2, WIDE),
    "what runs as recorded": (lambda x, y, w: lax.bitcast_convert_type(x, np.int32), DELICATE),
    "an exponential": (lambda x, y, w: jnp.exp(x), EXPONENT | WIDE),
    "an exponential of a sum": (lambda x, y, w: jnp.exp(y - 2 * x), EXPONENT | WIDE),
    "an angle": (lambda x, y, w: jnp.sin(2 * x.T / y.T + 1), POSITION | WIDE),
    "a fraction": (lambda x, y, w: x - jnp.floor(x), POSITION),
    "a remainder": (lambda x, y, w: lax.rem(jnp.maximum(x, y), y), POSITION),
    "a divisor of which the remainder is left": (lambda x, y, w: lax.rem(y, x), DELICATE | POSITION),
    "an angle of a bounded value": (lambda x, y, w: jnp.sin(10 * jnp.tanh(x)), RESULT),
    "an exponential of moves": (lambda x, y, w: jnp.exp(jnp.maximum(x.T, 0)), EXPONENT | WIDE),
    "an exponential of a function": (lambda x, y, w: jnp.exp(jnp.tanh(x)), RESULT),
    "an exponential of a quotient": (lambda x, y, w: jnp.exp(x / y), WIDE),
    "an exponential of one part": (lambda x, y, w: (jnp.exp(halves(x)[0]), halves(x)[1]), EXPONENT),
    "an exponential in a branch": (
        lambda x, y, w: lax.cond(y[0, 0] > 0, lambda: jnp.exp(x), lambda: x),
        EXPONENT,
    ),
}


# name: (a function whose results are float32, whether all readers of `x` are float32, too)
RESULTS = {
    "nothing reads it": (lambda x, y, w: y, False),
    "returned": (lambda x, y, w: x, True),
    "moved": (lambda x, y, w: x.T[:2], True),
    "of two results": (lambda x, y, w: (jnp.sum(x), x * y), True),
    "a function": (lambda x, y, w: jnp.sort(jnp.tanh(x)), True),
    "behind a barrier": (lambda x, y, w: lax.optimization_barrier(x), True),
    "a function after a sum": (lambda x, y, w: jnp.sum(jnp.tanh(x)), True),
    "an exponential": (lambda x, y, w: jnp.exp(x), True),
    "a dot": (lambda x, y, w: x @ w, False),
    "a dot behind a function": (lambda x, y, w: jnp.tanh(x) @ w, False),
    "a dot and a result": (lambda x, y, w: (x, x @ w), False),
    "what runs as recorded": (lambda x, y, w: lax.bitcast_convert_type(x, np.int32), False),
    "a comparison": (lambda x, y, w: jnp.any(x > y), True),
    "a test for NaN": (lambda x, y, w: jnp.any(x != x), True),
    "an index of the largest": (lambda x, y, w: w[jnp.argmax(x[0]) % 4], True),
    "a test for finite numbers": (lambda x, y, w: jnp.where(jnp.all(lax.is_finite(x)), y, 0), True),
    "a dot that nothing reads": (lambda x, y, w: (x @ w, x)[1], True),
    "a branch that nothing reads": (
        lambda x, y, w: (lax.cond(y[0, 0] > 0, lambda: x @ w, lambda: y @ w), x)[1],
        True,
    ),
    "a callback": (lambda x, y, w: (io_callback(np.tanh, x, x), x)[1], False),
    "one of two parts": (lambda x, y, w: halves(x)[0], True),
    "a branch": (lambda x, y, w: lax.cond(y[0, 0] > 0, lambda: -x, lambda: x), True),
    "a dot in a branch": (lambda x, y, w: lax.cond(y[0, 0] > 0, lambda: x @ w, lambda: y[:, :4]), False),
    "a loop's rows": (lambda x, y, w: lax.map(jnp.tanh, x), True),
    "a loop's carry": (lambda x, y, w: repeated(lambda c: c[::-1], x, y), False),
    "a function with a batching rule": (lambda x, y, w: with_batching_rule(jnp.tanh)(x), False),
}


def found(fn, outside=NOTHING):
    """The flags of the first argument, given the flags of the results."""
    jaxpr = jax.make_jaxpr(fn)(X, Y, W)
    planner = Planner(jmp.get_policy("mixed_float16"), jmp.DEFAULT_RULES.with_scopes({"wide": "float32"}))
    planner.analyze(jaxpr, [Precision.FULL] * 3)
    flags = planner.in_flags(jaxpr, TOP, [outside] * len(jaxpr.out_avals))[0]
    return {flag for flag in Flags._fields if getattr(flags, flag)}


@pytest.mark.parametrize("name", CASES)
def test_what_becomes_of_a_value(name):
    fn, expected = CASES[name]
    assert found(fn) == expected


@pytest.mark.parametrize("name", RESULTS)
def test_what_only_results_are_computed_from(name):
    fn, expected = RESULTS[name]
    assert ("only_results" in found(fn, RETURNED)) == expected


@pytest.mark.parametrize("name", "log log1p sqrt rsqrt cbrt digamma lgamma erf_inv asin acos atanh acosh".split())
def test_what_a_function_with_a_pole_or_branch_point_reads_is_delicate(name):
    assert found(lambda x, y, w: getattr(lax, name)(x)) >= DELICATE


@pytest.mark.parametrize("name", "sin cos tan floor ceil round".split())
def test_what_a_periodic_function_reads_is_a_position(name):
    assert found(lambda x, y, w: getattr(lax, name)(x)) >= POSITION


def sum_of_two(x, y, w):
    """The transpose of two products with one operand: a sum of two products."""
    return jax.linear_transpose(lambda x: (x @ w, x @ (2 * w)), x)((x[:, :4], y[:, :4]))[0]


# Whether each product is the last one before a result, as the gradient of a weight is: first in general, then if it
# multiplies by a parameter, as the gradient of an activation does.
ENDS = {
    "returned behind a barrier": (lambda x, y, w: lax.optimization_barrier((x @ w, x))[0], [True], [True]),
    "returned": (lambda x, y, w: x @ w, [True], [True]),
    "returned, moved": (lambda x, y, w: (x @ w).T[:, None], [True], [True]),
    "a sum of two": (sum_of_two, [True, True], [True, True]),
    "over axes of one number": (lambda x, y, w: jnp.sum((x[:1] @ w)[:, None], (0, 1)), [True], [True]),
    "over many numbers": (lambda x, y, w: jnp.sum(x @ w, 0), [True], [False]),
    "read by a function": (lambda x, y, w: jnp.tanh(x @ w), [True], [False]),
    "read by a function, behind a barrier": (
        lambda x, y, w: jnp.tanh(lax.optimization_barrier(x @ w)), [True], [False]),
    "read by a dot": (lambda x, y, w: (x @ w) @ w.T, [False, True], [False, True]),
    "of a weight's axes": (lambda x, y, w: jnp.tanh(w.T @ (w @ w.T)), [False, True], [False, True]),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_which_products_are_the_last_on_their_way(name):
    fn, own, of_parameter = ENDS[name]
    jaxpr = jax.make_jaxpr(fn)(X, Y, W)
    planner = Planner(jmp.get_policy("mixed_float16"), jmp.DEFAULT_RULES)
    uses = planner.uses(jaxpr, TOP, [NOTHING] * len(jaxpr.out_avals))
    program, _ = planner.recorded(jaxpr, TOP)
    products = [node.outs[0] for node in program.nodes if node.name == "dot_general"]
    assert [uses.ends_at(number, None) for number in products] == own
    assert [uses.ends_at(number, {axes_of(jax.typeof(W))}) for number in products] == of_parameter


def test_axes_of_one_size_are_counted():
    assert axes_of(jax.ShapeDtypeStruct((4, 4, 16), np.float32)) != axes_of(jax.ShapeDtypeStruct((4, 16), np.float32))


def test_a_result_that_nothing_reads_outside_says_nothing_of_its_operands():
    """For example an unread output of a branch: its operands do not count as read by float32 alone."""
    planner = Planner(jmp.get_policy("mixed_float16"), jmp.DEFAULT_RULES)
    unread = planner.uses(jax.make_jaxpr(lambda x, y: x)(X, X), TOP, [NOTHING]).flags[1]
    assert planner.in_flags(jax.make_jaxpr(jnp.transpose)(X), TOP, [unread]) == [Flags()]
