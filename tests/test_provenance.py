"""What values were computed from, as the rules of products need it, in programs of a line or two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pass_tools import with_batching_rule

import jmp_train as jmp
from jmp_train._autocast.analysis.whole_program.products import Products
from jmp_train._autocast.analysis.whole_program.provenance import Known, Provenance
from jmp_train._autocast.ir import TOP
from jmp_train._autocast.planner import Planner

RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 16)).astype(np.float32)
X, Y = (jnp.asarray(RNG.normal(size=(16, 16)).astype(np.float32)) for _ in range(2))
NUMBER = jnp.full((1,), 3.0)
EXACT, TABLE, PARAMETER, NARROW, DATA, ACTIVATION, STATE, FACTOR, SOLUTION, KERNEL, ESTIMATE = Provenance


def states(step):
    """The states of a loop that starts from data; too few numbers for Tensor Cores."""
    return lambda w, x: lax.scan(lambda s, _: (step(s, w[:8, :8], x[:, :8]), s), x[:, :8], None, 3)[1]


# name: (a function of a parameter and data, the provenance of its result)
CASES = {
    "a parameter": (lambda w, x: w, PARAMETER),
    "data": (lambda w, x: x, DATA),
    "a captured array": (lambda w, x: X[:], DATA),
    "a captured number": (lambda w, x: X[0, 0].reshape(()), DATA),
    "a literal": (lambda w, x: jnp.full((2,), 3.0), EXACT),
    "a comparison": (lambda w, x: x > 0, EXACT),
    "zeros and ones": (lambda w, x: (x @ w > x).astype(np.float32), EXACT),
    "zeros and ones, scaled": (lambda w, x: 2 * (x > 0), EXACT),
    "a table": (lambda w, x: jnp.arange(3.0), TABLE),
    "a function of a table": (lambda w, x: jnp.exp(jnp.arange(3.0)), TABLE),
    "a table cast": (lambda w, x: jnp.arange(3).astype(np.float32), TABLE),
    "random numbers of a literal key": (lambda w, x: jax.random.normal(jax.random.key(0), (3,)), EXACT),
    "random numbers of an unknown key": (
        lambda w, x: jax.random.uniform(jax.random.key(jnp.sum(x).astype(np.uint32)), (3,)), DATA),
    "a power of a table": (lambda w, x: lax.pow(jnp.arange(16.0), x[0]), DATA),
    "a power to a table": (lambda w, x: lax.pow(x[0], jnp.arange(16.0)), DATA),
    "a table that a callback made": (
        lambda w, x: jnp.exp(jax.pure_callback(lambda: np.ones(3, np.float32), jax.typeof(jnp.ones(3)))), DATA),
    "the result of a dot": (lambda w, x: x @ w, NARROW),
    "a function of that": (lambda w, x: jnp.tanh(x @ w), NARROW),
    "with a bias": (lambda w, x: x @ w + w[0], NARROW),
    "with data": (lambda w, x: x @ w + x, DATA),
    "with what was computed of another": (lambda w, x: x @ w + jnp.exp(x @ w), ACTIVATION),
    "with a table": (lambda w, x: x @ w + jnp.arange(16.0), ACTIVATION),
    "an exponential of that": (lambda w, x: jnp.exp(x @ w), ACTIVATION),
    "an exponential of data": (lambda w, x: jnp.exp(x), DATA),
    "an exponential of a parameter": (lambda w, x: jnp.exp(w), DATA),
    "data times a parameter": (lambda w, x: x * w, DATA),
    "data times a literal": (lambda w, x: 3 * x, DATA),
    "a parameter times a literal": (lambda w, x: 3 * w, PARAMETER),
    "a parameter times a captured number": (lambda w, x: w * NUMBER, PARAMETER),
    "a parameter times a result": (lambda w, x: w * (x @ w), NARROW),
    "cast by hand": (lambda w, x: x.astype(np.float16), NARROW),
    "cast by hand, and back": (lambda w, x: x.astype(np.float16).astype(np.float32), ACTIVATION),
    "a choice": (lambda w, x: jnp.where(x > 0, x @ w, 0.0), NARROW),
    "a choice by a parameter": (lambda w, x: jnp.where(w > 0, x, 0.0), DATA),
    "picked by data": (lambda w, x: (x @ w)[x[0].astype(int)], NARROW),
    "data picked by results": (lambda w, x: x[jnp.argmax(x @ w, 1)], DATA),
    "part of a result, from where data say": (
        lambda w, x: lax.dynamic_slice_in_dim(x @ w, x[0, 0].astype(int), 2), NARROW),
    "a row of a parameter, written where data say": (
        lambda w, x: lax.dynamic_update_slice(w, w[:1], (x[0, 0].astype(int), 0)), PARAMETER),
    "results, written into zeros": (
        lambda w, x: lax.dynamic_update_slice(jnp.zeros((16, 16)), x @ w, (0, 0)), NARROW),
    "scattered into a parameter": (lambda w, x: w.at[x[0].astype(int)].set(0.0), PARAMETER),
    "scattered into zeros": (lambda w, x: jnp.zeros((16, 16)).at[x[0].astype(int)].add(x), DATA),
    "subtracted from results": (
        lambda w, x: (lambda h: h.at[jnp.argmax(x)].subtract(h[0]))(x @ w), ACTIVATION),
    "a larger one of results": (lambda w, x: (x @ w).at[x[0].astype(int)].max(x @ w), ACTIVATION),
    "in a region": (lambda w, x: jmp.full_precision(jnp.dot)(x @ w, w), ACTIVATION),
    "a dot of a precision": (lambda w, x: jnp.dot(x, w, precision="highest"), DATA),
    "a dot of a precision of results": (lambda w, x: jnp.dot(x @ w, w, precision="highest"), ACTIVATION),
    "a Gram matrix of data": (lambda w, x: x.T @ x, SOLUTION),
    "a Gram matrix of results": (lambda w, x: (lambda h: h.T @ h)(x @ w), SOLUTION),
    "a function of a Gram matrix": (lambda w, x: 1 + 2 * (x.T @ x), SOLUTION),
    "a Gram matrix and data": (lambda w, x: x.T @ x + x, SOLUTION),
    "a Gram matrix times data": (lambda w, x: (x.T @ x) @ x, SOLUTION),
    "a weighted Gram matrix of data": (lambda w, x: x.T @ (jnp.sin(x) * x), SOLUTION),
    "a Gram matrix and a parameter": (lambda w, x: x.T @ x + w, DATA),
    "a Gram matrix and results": (lambda w, x: x.T @ x + x @ w, DATA),
    "an exponential of a Gram matrix": (lambda w, x: jnp.exp(x.T @ x), KERNEL),
    "of a Gram matrix of results": (lambda w, x: (lambda h: jnp.exp(h.T @ h))(x @ w), KERNEL),
    "a kernel matrix, scaled": (lambda w, x: 2 * jnp.exp(x.T @ x) + 1, KERNEL),
    "a kernel matrix, its rows scaled": (lambda w, x: jax.nn.softmax(x.T @ x), KERNEL),
    "a kernel matrix and a Gram matrix": (lambda w, x: jnp.exp(x.T @ x) + x.T @ x, SOLUTION),
    "a kernel matrix and results": (lambda w, x: jnp.exp(x.T @ x) + x @ w, DATA),
    "sums of a kernel matrix": (lambda w, x: jnp.sum(jnp.exp(x.T @ x), 0), DATA),
    "sums of a Gram matrix": (lambda w, x: jnp.sum(x.T @ x, 0), SOLUTION),
    "a kernel matrix times data": (lambda w, x: jnp.exp(x.T @ x) @ x, KERNEL),
    "an exponential of a solution": (lambda w, x: jnp.exp(jnp.linalg.solve(1 + x, x)), KERNEL),
    "a factor of data": (lambda w, x: jnp.linalg.cholesky(1 + x), SOLUTION),
    "a factor of parameters": (lambda w, x: jnp.linalg.qr(w)[0], FACTOR),
    "a solution for parameters": (lambda w, x: lax.linalg.triangular_solve(w, w, left_side=True), FACTOR),
    "a solution for data": (lambda w, x: lax.linalg.triangular_solve(w, x, left_side=True), SOLUTION),
    "an iterative solution": (
        lambda w, x: jax.scipy.sparse.linalg.cg(lambda v: v * (1 + w[0] ** 2), x[0])[0], DATA),
    "a direct solution": (lambda w, x: jnp.linalg.solve(1 + x, x), SOLUTION),
    "beside a token": (
        lambda w, x: (lambda y: (lax.after_all(lax.create_token(y)), y)[1])(jnp.exp(x @ w)), ACTIVATION),
    # Bodies, and what is known inside of them.
    "in a call": (lambda w, x: jax.checkpoint(lambda h: jnp.exp(h))(x @ w), ACTIVATION),
    "in a function with a batching rule": (
        lambda w, x: with_batching_rule(jnp.tanh)(x @ w), DATA),
    "in branches": (lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: w), NARROW),
    "in other branches": (lambda w, x: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x), DATA),
    "a table in a call": (lambda w, x: jax.checkpoint(lambda: jnp.exp(jnp.arange(3.0)))(), TABLE),
    "a table for a call": (lambda w, x: jax.checkpoint(jnp.exp)(jnp.arange(3.0)), TABLE),
    "a function of data in a call": (lambda w, x: jax.checkpoint(jnp.exp)(x), DATA),
    "the states of a linear system": (states(lambda s, w, x: s @ w), STATE),
    "the states of one with input": (states(lambda s, w, x: s @ w + x), STATE),
    "a function of the states": (lambda w, x: jnp.exp(states(lambda s, w, x: s @ w)(w, x)), DATA),
    "the states times data": (
        lambda w, x: lax.scan(lambda s, _: (x @ s, None), jnp.exp(x), None, 3)[0] @ x, STATE),
    "the states and data": (lambda w, x: states(lambda s, w, x: s @ w)(w, x) + x[:, :8], STATE),
    "what linear systems are solved for": (
        lambda w, x: lax.scan(lambda p, _: (jnp.linalg.solve(p + x, p), p), jnp.eye(16), None, 3)[1], SOLUTION),
    "what they are solved for, of results": (
        lambda w, x: lax.scan(lambda p, _: (jnp.linalg.solve(p + x, p), p), x @ w, None, 3)[1], SOLUTION),
    "a function of what they are solved for": (
        lambda w, x: lax.scan(lambda p, _: (jnp.linalg.solve(p + x, p), jnp.tanh(p)), x, None, 3)[1], DATA),
    "a function of an angle": (lambda w, x: jnp.sin(x @ X), ACTIVATION),
    "what they are solved for, in the loop": (
        lambda w, x: lax.scan(lambda p, _: (jnp.linalg.solve(p + x, p), p), x, None, 3)[0], SOLUTION),
    "beside what they are solved for": (
        lambda w, x: lax.scan(lambda s, _: ((s[0] + 1, jnp.linalg.solve(x, s[1])), s[0]), (x, x), None, 3)[1], DATA),
    "the states of a nonlinear system": (states(lambda s, w, x: jnp.tanh(s @ w)), DATA),
    "the states of one that a parameter starts": (
        lambda w, x: lax.scan(lambda s, _: (s @ w[:8, :8], s), w[:8, :8], None, 3)[1], STATE),
    "running sums": (states(lambda s, w, x: s + x), DATA),
    "what a loop of unknown length makes of a parameter": (
        lambda w, x: lax.fori_loop(0, x[0, 0].astype(int), lambda _, s: 2 * s, w), PARAMETER),
    "what a loop of unknown length makes of data": (
        lambda w, x: lax.fori_loop(0, x[0, 0].astype(int), lambda _, s: 2 * s + x @ w, w), NARROW),
    "what a loop makes of a parameter": (lambda w, x: lax.fori_loop(0, 3, lambda _, s: 2 * s, w), PARAMETER),
    "what a loop mixes with results": (
        lambda w, x: lax.fori_loop(0, 3, lambda _, s: (s[0] * s[1], x @ w), (w, w))[0], NARROW),
    "rows": (lambda w, x: lax.scan(lambda c, r: (c, jnp.exp(r)), 0.0, x @ w)[1], ACTIVATION),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_value_was_computed_from(name):
    fn, expected = CASES[name]
    jaxpr = jax.make_jaxpr(fn)(W, X)
    planner = Planner(jmp.get_policy("mixed_float16"), jmp.DEFAULT_RULES)
    facts = [Known(PARAMETER, ("argument", 0)), Known(DATA, ("argument", 1))]
    (result,) = Products(planner).visit(jaxpr, TOP, facts, ())
    assert result.provenance is expected
