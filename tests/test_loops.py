"""Which carries of a loop accumulate, are residual streams or linear systems, and which loops are counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train._autocast.analysis.loops import accumulates, is_counted, is_residual_stream, may_be_narrow
from jmp_train._autocast.analysis.whole_program.recurrences import are_linear, are_solved, carry_kinds
from jmp_train._autocast.ir import TOP
from jmp_train._jaxpr import flatten, loop_of

RNG = np.random.default_rng(0)
C, D = (RNG.normal(size=(4, 4)).astype(np.float32) for _ in range(2))

ACCUMULATES, STREAM, LINEAR, SOLVES = "accumulates", "residual stream", "linear", "solves"


def scanned(c, d):
    """The sum of a carry and of terms, in a loop inside the loop."""
    return lax.scan(lambda c, row: (c + row, None), c, jnp.stack([d, d]))[0]


# Functions of a body's carry `c`, and of `d`, which does not depend on it.
BODIES = {
    "a solution, rounded": (lambda c, d: jnp.linalg.solve(c, d).astype(jnp.float16).astype(jnp.float32), {SOLVES}),
    "the carry": (lambda c, d: c, {STREAM}),
    "terms added": (lambda c, d: c + d, {ACCUMULATES}),
    "terms added from the left": (lambda c, d: jnp.sin(d) + c, {ACCUMULATES}),
    "terms subtracted": (lambda c, d: c - d, {ACCUMULATES}),
    "subtracted from terms": (lambda c, d: d - c, {STREAM}),
    "terms scattered": (lambda c, d: c.at[jnp.array([0, 0])].add(d[:2]), {ACCUMULATES}),
    "terms added twice": (lambda c, d: (c + d) + d, {ACCUMULATES}),
    "terms added to a moved carry": (lambda c, d: c.T + d, {ACCUMULATES}),
    "terms added to a rounded carry": (lambda c, d: (c.astype(jnp.float16) + 0).astype(jnp.float32) + d, {ACCUMULATES}),
    "terms added to an integer": (lambda c, d: c.astype(jnp.int32).astype(jnp.float32) + d, {STREAM}),
    "terms added where a mask says so": (lambda c, d: jnp.where(d > 0, c + d, c), {ACCUMULATES}),
    "terms added where the carry says so": (lambda c, d: jnp.where(c > 0, c + d, c), {STREAM}),
    "terms added in a loop": (scanned, {ACCUMULATES}),
    "terms of each iteration added in a loop": (
        lambda c, d: lax.scan(lambda c, _: (c + d, None), c, None, 2)[0], {ACCUMULATES}),
    "terms added to the second carry of a loop": (
        lambda c, d: lax.scan(lambda s, _: ((s[0] * d, s[1] + d), None), (d, c), None, 2)[0][1], {ACCUMULATES}),
    "terms added before a branch that keeps the sum": (
        lambda c, d: lax.cond(d[0, 0] > 0, lambda c: c, lambda c: c.T, c + d), {ACCUMULATES}),
    "added to terms in each iteration of a loop": (
        lambda c, d: lax.scan(lambda s, _: (s + c, None), d, None, 2)[0], set()),
    "its rows added to terms in a loop": (lambda c, d: lax.scan(lambda s, row: (s + row, None), d[0], c)[0], set()),
    "terms added in a branch": (lambda c, d: lax.cond(d[0, 0] > 0, lambda c: c + d, lambda c: c, c), {ACCUMULATES}),
    "terms added in a branch that the carry decides": (
        lambda c, d: lax.cond(c[0, 0] > 0, lambda c: c + d, lambda c: c, c), set()
    ),
    "terms added in a rematerialized call": (jax.checkpoint(lambda c, d: c + d), {ACCUMULATES}),
    "terms added that pass a barrier beside it": (
        lambda c, d: sum(lax.optimization_barrier((d, c))), {ACCUMULATES}),
    "a function of itself that passes a barrier beside it": (
        lambda c, d: sum(lax.optimization_barrier((c, jnp.sin(c)))), {STREAM}),
    "terms scaled in a loop": (lambda c, d: lax.scan(lambda c, row: (c * row, None), c, jnp.stack([d, d]))[0], set()),
    "a function of itself added": (lambda c, d: c + jnp.sin(c @ d), {STREAM}),
    "a function of itself added, masked": (lambda c, d: jnp.where(d > 0, c + jnp.sin(c), 0), {STREAM}),
    "itself added": (lambda c, d: c + c, {STREAM}),
    "scaled": (lambda c, d: 0.9 * c + d, set()),
    "a product": (lambda c, d: c @ d, {LINEAR}),
    "a product and terms": (lambda c, d: (c @ d).T[::-1] - d / 2, {LINEAR}),
    "itself and a product": (lambda c, d: c + c @ d, {STREAM, LINEAR}),
    "a product, and terms scattered": (lambda c, d: (c @ d).at[jnp.array([0, 0])].add(d[:2]), {LINEAR}),
    "a product with a function of terms": (lambda c, d: jnp.sin(d) @ c, {LINEAR}),
    "a product of parts": (lambda c, d: jnp.concatenate([c[:2] @ d, c[2:]]), {LINEAR}),
    "a product with itself": (lambda c, d: c @ c, set()),
    "a product and a function": (lambda c, d: jnp.sin(c @ d), set()),
    "a product and a function beside": (lambda c, d: (c @ d, jnp.sin(c))[0], {LINEAR}),
    "a product that passes a barrier beside a function": (
        lambda c, d: lax.optimization_barrier((jnp.sin(c), c @ d))[1], {LINEAR}),
    "a product and a quotient of terms": (lambda c, d: (c @ d) / (1 + d * d), {LINEAR}),
    "a product and a quotient": (lambda c, d: d / (c @ d), set()),
    "a product, scaled by its sums": (lambda c, d: (c @ d) / jnp.sum(c @ d, -1, keepdims=True), {LINEAR}),
    "a product, scaled by the reciprocal of its sums": (
        lambda c, d: (c @ d) * (1 / jnp.sum(c @ d, -1, keepdims=True)), {LINEAR}),
    "scaled by repeated sums": (
        lambda c, d: (c @ d) / jnp.broadcast_to(jnp.sum(c, -1, keepdims=True), (4, 4)), {LINEAR}),
    "a row of a product, times terms": (lambda c, d: (c @ d)[:1] * d, {LINEAR}),
    "scaled by a norm": (lambda c, d: jnp.linalg.norm(c, axis=-1)[:, None] * (c @ d), {LINEAR}),
    "scaled by a norm from the right": (lambda c, d: (c @ d) * jnp.sqrt(jnp.sum(c**2)), {LINEAR}),
    "a norm, divided by a product": (lambda c, d: jnp.sum(c, -1, keepdims=True) / (c @ d), set()),
    "a product, times itself": (lambda c, d: c @ d * c, set()),
    "a product, divided by a function of itself": (lambda c, d: (c @ d) / (1 + c), set()),
    "a norm of it": (lambda c, d: d @ d * jnp.sum(c), set()),
    "terms alone": (lambda c, d: d @ d, set()),
    "a solution": (lambda c, d: jnp.linalg.solve(c + d, d), {SOLVES}),
    "a factor of products": (lambda c, d: jnp.linalg.cholesky(c @ d @ c.T) + d, {SOLVES}),
    "a factor of a function of it": (lambda c, d: jnp.linalg.cholesky(jnp.sin(c)) + d, set()),
    "a solution, its diagonal raised": (
        lambda c, d: jnp.linalg.solve(c, d).at[jnp.arange(4), jnp.arange(4)].add(1e-6), {SOLVES}),
    "a solution, bounded": (lambda c, d: jnp.clip(jnp.linalg.solve(c, d), 0.0, 9.0), {SOLVES}),
    "a solution, and its diagonal, which is a branch": (
        lambda c, d: jnp.linalg.solve(c, d) + jnp.diag(jnp.diag(c)), {SOLVES}),
    "a solution that passes a barrier beside a function": (
        lambda c, d: lax.optimization_barrier((jnp.sin(c), jnp.linalg.solve(c + d, d)))[1], {SOLVES}),
    "a solution, or terms": (
        lambda c, d: lax.cond(d[0, 0] > 0, lambda c: jnp.linalg.solve(c, d), lambda c: d, c + jnp.linalg.solve(c, d)),
        {SOLVES}),
    "a solution, or a function": (
        lambda c, d: lax.cond(d[0, 0] > 0, jnp.sin, lambda c: c, jnp.linalg.solve(c, d)), set()),
    "updated by recursive least squares": (
        lambda c, d: c - jnp.outer(c @ d[0] / (1 + d[0] @ c @ d[0]), d[0] @ c), {SOLVES, STREAM}),
    "updated by recursive least squares, in a network": (
        lambda c, d: jnp.tanh(c - jnp.outer(c @ d[0] / (1 + d[0] @ c @ d[0]), d[0] @ c)), set()),
    "updated by recursive least squares, with `einsum`": (
        lambda c, d: c - jnp.einsum("i,j->ij", c @ d[0] / (1 + d[0] @ c @ d[0]), d[0] @ c), {SOLVES, STREAM}),
    "updated by recursive least squares, of columns": (
        lambda c, d: c - (c @ d[:, :1]) @ (d[:, :1].T @ c) / (1 + d[:, :1].T @ c @ d[:, :1]), {SOLVES, STREAM}),
    "updated by recursive least squares, of columns from the left": (
        lambda c, d: c - c @ d[:, :1] @ d[:, :1].T @ c / (1 + d[:, :1].T @ c @ d[:, :1]), {SOLVES, STREAM}),
    "updated by products of rank two over a product": (
        lambda c, d: c - c @ d[:, :2] @ d[:, :2].T @ c / (1 + d[:, :1].T @ c @ d[:, :1]), {STREAM}),
    "updated by itself times a number over a product": (
        lambda c, d: c - c * (d[0] @ c @ d[0] / (1 + d[0] @ c @ d[0])), {STREAM}),
    "updated by products over a known number": (
        lambda c, d: c - jnp.outer(c @ d[0], d[0] @ c) / (1 + d[0] @ d[0]), {STREAM}),
    "updated by products over a sum of it": (
        lambda c, d: c - jnp.outer(c @ d[0], d[0] @ c) / (1 + jnp.sum(c)), {STREAM}),
    "updated by products, times a reciprocal of one": (
        lambda c, d: c - jnp.outer(c @ d[0], d[0] @ c) * (1 / (1 + d[0] @ c @ d[0])), {SOLVES, STREAM}),
    "a solution beside": (lambda c, d: (jnp.sin(c), jnp.linalg.solve(c, d))[0], set()),
    "a solution of terms": (lambda c, d: jnp.sin(c) + jnp.linalg.solve(d, d), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_what_a_body_makes_of_its_carry(name):
    fn, expected = BODIES[name]
    program = flatten(jax.make_jaxpr(fn)(C, D))
    start, result = program.inputs[0], program.outputs[0]
    found = {ACCUMULATES: accumulates(program, start, result), STREAM: is_residual_stream(program, start, result)}
    (linear,) = are_linear(program, [(start, result)])
    found |= {LINEAR: linear, SOLVES: are_solved(program, [(start, result)])[0]}
    assert {question for question, answer in found.items() if answer} == expected


def test_each_carry_is_linear_in_itself():
    """The kind of one carry does not depend on how another carry reads it."""

    def body(a, b, c, d):
        return a @ d, b @ d + jnp.sin(a), c + b, a @ d

    program = flatten(jax.make_jaxpr(body)(C, C, C, D))
    ends = list(zip(program.inputs, program.outputs, strict=True))
    assert are_linear(program, ends) == [are_linear(program, [end])[0] for end in ends] == [True, True, False, True]


def test_each_carry_is_solved_for_by_itself():
    def body(a, b, c, e, d):
        update = jnp.outer(b @ d[0] / (1 + d[0] @ b @ d[0]), d[0] @ b)
        return jnp.linalg.solve(a, d), b - update, c + jnp.sin(a) + update, jnp.sin(jnp.linalg.solve(e, d))

    program = flatten(jax.make_jaxpr(body)(C, C, C, C, D))
    ends = list(zip(program.inputs, program.outputs, strict=False))
    alone = [are_solved(program, [end])[0] for end in ends]
    assert are_solved(program, ends) == alone == [True, True, False, False]


def test_what_the_gain_of_recursive_least_squares_moves_is_an_estimate():
    def step(carry, row):
        p, mean, h = carry
        gain = p @ row[0] / (1 + row[0] @ p @ row[0])
        return (
            p - jnp.outer(gain, row[0] @ p),
            mean + gain * (row[1, 0] - mean @ row[0]),
            jnp.tanh(h @ D + gain),
        ), None

    (eqn,) = jax.make_jaxpr(lambda c, m, rows: lax.scan(step, (c, m, c), rows))(C, C[0], np.stack([C, C])).eqns
    loop = loop_of(eqn)
    assert loop is not None
    kinds = carry_kinds(flatten(loop.body, also=("jit", "custom_jvp_call")), loop, [False])
    assert [is_estimate for _, is_estimate in kinds] == [True, True, False]


# Each value: a body of a carry and a row of parameters, and whether the carry may be in 16 bits.
LAYERS = {
    "handed on": (lambda c, row: c.T, True),
    "rounded for a dot": (lambda c, row: jnp.tanh(c @ row), True),
    "a stream of layers": (lambda c, row: c + jnp.tanh(c @ row), True),
    "a stream of other functions of rows": (lambda c, row: c + jnp.tanh(c * row), False),
    "a stream of products without rows": (lambda c, row: c + jnp.tanh(c @ c), False),
    "a stream of products with known numbers": (lambda c, row: c + jnp.tanh(c @ jnp.eye(4)), False),
    "an average": (lambda c, row: 0.9 * c + jnp.tanh(c @ row), False),
}


@pytest.mark.parametrize("name", LAYERS)
def test_which_carries_may_be_narrow(name):
    fn, expected = LAYERS[name]
    body = flatten(jax.make_jaxpr(fn)(C, D))
    start, row = body.inputs
    assert may_be_narrow(body, TOP, [row], start, body.outputs[0], ()) == expected


# Each value: a condition, a body, and whether no float that the body computes decides the end. The carry is a counter,
# a floating number and an array.
LOOPS = {
    "a counter": (lambda i, t, x: i < 5, lambda i, t, x: (i + 1, t + 1, x @ x), True),
    "a floating counter": (lambda i, t, x: t < 5, lambda i, t, x: (i, t + 1, x @ x), False),
    "a number that stays": (lambda i, t, x: i < t, lambda i, t, x: (i + 1, t, x @ x), False),
    "a residual": (lambda i, t, x: jnp.sum(x) > 1e-3, lambda i, t, x: (i, t, x / 2), False),
    "an integer that a number decides": (lambda i, t, x: i < 5, lambda i, t, x: (i + (x[0, 0] > 0), t, x @ x), False),
    "an integer that another decides": (lambda i, t, x: i < 5, lambda i, t, x: (i + i // 2 + 1, t, x @ x), True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_which_loops_are_counted(name):
    condition, body, expected = LOOPS[name]
    traced = jax.make_jaxpr(lambda *c: lax.while_loop(lambda c: condition(*c), lambda c: body(*c), c))
    (eqn,) = traced(np.int32(0), np.float32(0), C).eqns
    loop = loop_of(eqn)
    assert loop is not None and is_counted(loop) == expected


def test_what_a_gain_moves_is_an_estimate_if_it_is_linear():
    """The carries are a filter's covariance, its mean, and the state of a network that reads the gain."""

    def step(carry, row):
        p, mean, h = carry
        gain = jnp.linalg.solve(p + C, p)
        return (p - gain @ p, mean @ D + (row - mean @ D) @ gain, jnp.tanh(h @ D + gain)), None

    (eqn,) = jax.make_jaxpr(lambda c, rows: lax.scan(step, (c, c, c), rows))(C, np.stack([C, C])).eqns
    loop = loop_of(eqn)
    assert loop is not None
    kinds = carry_kinds(flatten(loop.body, also=("jit", "custom_jvp_call")), loop, [False])
    assert [is_estimate for _, is_estimate in kinds] == [True, True, False]
