"""Which gradients of softmaxes are written as one equation, and the operands of that equation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery_tools import leaves, relative_error
from jax import lax
from pass_tools import add_any, after

import jmp_train as jmp
from jmp_train import autocast
from jmp_train._autocast.ir import SHARED
from jmp_train._autocast.passes.rewrites import REWRITES
from jmp_train._autocast.passes.rewrites.softmax_gradient import gradient_of_softmax

RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 16)).astype(np.float32)
X = RNG.normal(size=(8, 16)).astype(np.float32)
MASK = RNG.random((8, 16)) < 0.7
OTHERS = tuple(rewrite for rewrite in REWRITES if rewrite.name != "softmax_gradient")


def by_hand(scores, axis=-1, largest=jnp.max, total=jnp.sum):
    exponentials = jnp.exp(scores - lax.stop_gradient(largest(scores, axis, keepdims=True)))
    return exponentials / total(exponentials, axis, keepdims=True)


def largest_of_others(scores, axis, keepdims: bool):
    return jnp.max(2 * scores, axis, keepdims=keepdims)


def larger_of_two(scores, axis, keepdims: bool):
    return jnp.maximum(*(jnp.max(each, axis, keepdims=keepdims) for each in (scores, -scores)))


def sum_of_others(exponentials, axis, keepdims: bool):
    return jnp.sum(2 * exponentials, axis, keepdims=keepdims)


def of(probabilities):
    """The gradient of a loss of an attention's weights."""
    return jax.grad(lambda w, x: jnp.sum(jnp.sin(probabilities(x @ w, w) @ w.T)))


# name: (the attention weights of scores `[8, 16]` and a parameter, the number of gradients that are rewritten)
CASES = {
    "a softmax": (lambda s, w: jax.nn.softmax(s), 1),
    "scaled": (lambda s, w: jax.nn.softmax(s / 3), 1),
    "masked": (lambda s, w: jax.nn.softmax(jnp.where(MASK, s, -1e9)), 1),
    "with a bias": (lambda s, w: jax.nn.softmax(s - jnp.arange(16.0)), 1),
    "capped": (lambda s, w: jax.nn.softmax(5 * jnp.tanh(s / 5)), 1),
    "with dropout": (lambda s, w: jnp.where(MASK, jax.nn.softmax(s) / 0.7, 0), 1),
    "of more axes": (lambda s, w: jax.nn.softmax(s.reshape(2, 4, 16)).reshape(8, 16), 1),
    "of one batch": (lambda s, w: jax.nn.softmax(s[None, :, None])[0, :, 0], 1),
    "of one row": (lambda s, w: jax.nn.softmax(s[:1]) + jnp.zeros((8, 1)), 1),
    "of one score": (lambda s, w: jax.nn.softmax(s[:, :1]) + jnp.zeros((8, 16)), 0),
    "written out": (lambda s, w: by_hand(s), 1),
    "twice": (lambda s, w: jax.nn.softmax(s) - jax.nn.softmax(2 * s), 2),
    "over columns": (lambda s, w: jax.nn.softmax(s, axis=0), 0),
    "over columns of one": (lambda s, w: jax.nn.softmax(s[:1], axis=0) + jnp.zeros((8, 1)), 0),
    "over two axes": (lambda s, w: jax.nn.softmax(s, axis=(0, 1)), 0),
    "where a mask is true": (lambda s, w: jax.nn.softmax(s, where=MASK), 0),
    "without the largest": (lambda s, w: jnp.exp(s) / jnp.sum(jnp.exp(s), -1, keepdims=True), 0),
    "with the smallest": (lambda s, w: by_hand(s, largest=jnp.min), 0),
    "with the largest of other scores": (lambda s, w: by_hand(s, largest=largest_of_others), 0),
    "over the sum of others": (lambda s, w: by_hand(s, total=sum_of_others), 0),
    "minus the larger of two": (lambda s, w: by_hand(s, largest=larger_of_two), 0),
    "minus the largest of all": (lambda s, w: by_hand(s, largest=lambda s, axis, keepdims: jnp.max(s)), 0),
    "over a product": (lambda s, w: by_hand(s, total=jnp.prod), 0),
    "over the largest": (lambda s, w: by_hand(s, total=jnp.max), 0),
    "minus the largest": (lambda s, w: (lambda s: s - jnp.max(s, -1, keepdims=True))(jnp.exp(s)), 0),
    "a sigmoid": (lambda s, w: jax.nn.sigmoid(s), 0),
    "of parameters": (lambda s, w: jax.nn.softmax(w[:8]), 0),
}  # fmt: skip


def summed(x, axis: int = -1):
    return jnp.sum(x, axis, keepdims=True)


def rows(x):
    return jnp.broadcast_to(x, (8, 16))


in_16_bits = jax.named_scope("narrow")(jnp.multiply)


def of_sums(g, e, t):
    return add_any(g / t, jnp.broadcast_to(-summed(g * t**-2 * e), g.shape)) * e


# The gradient of a softmax as JAX writes it, and expressions that are not it, of a cotangent `g`, exponentials `e`,
# their sums over rows `t`, and other values `o` `[8, 16]`; and the number of gradients that are rewritten.
WRITTEN = {
    "as JAX does": (lambda g, e, t, o: add_any(g / t, rows(-summed(g * t**-2 * e))) * e, 1),
    "in other orders": (lambda g, e, t, o: e * add_any(rows(-summed(e * (t**-2 * g))), g / t), 1),
    "the negative before rows": (lambda g, e, t, o: add_any(g / t, -rows(summed(g * t**-2 * e))) * e, 1),
    "over an axis of one": (lambda g, e, t, o: add_any(g / t, rows(-summed(summed(g * t**-2 * e)))) * e, 1),
    "times others": (lambda g, e, t, o: add_any(g / t, rows(-summed(g * t**-2 * e))) * o, 0),
    "a sum": (lambda g, e, t, o: add_any(g / t, rows(summed(g * t**-2 * e))) * e, 0),
    "twice the negative": (lambda g, e, t, o: add_any(g / t, -rows(-summed(g * t**-2 * e))) * e, 0),
    "a difference": (lambda g, e, t, o: (g / t - rows(summed(g * t**-2 * e))) * e, 0),
    "another power": (lambda g, e, t, o: add_any(g / t, rows(-summed(g * t**-3 * e))) * e, 0),
    "a negative power": (lambda g, e, t, o: add_any(g / t, rows(-summed(g * -(t**-2) * e))) * e, 0),
    "a power of others": (lambda g, e, t, o: add_any(g / t, rows(-summed(g * summed(o) ** -2 * e))) * e, 0),
    "others divided": (lambda g, e, t, o: add_any(o / t, rows(-summed(g * t**-2 * e))) * e, 0),
    "divided by others": (lambda g, e, t, o: add_any(g / summed(o), rows(-summed(g * t**-2 * e))) * e, 0),
    "divided by rows": (lambda g, e, t, o: add_any(g / o, rows(-summed(g * t**-2 * e))) * e, 0),
    "a sum of others": (lambda g, e, t, o: add_any(g / t, rows(-summed(g * t**-2 * o))) * e, 0),
    "a sum over columns": (lambda g, e, t, o: add_any(g / t, rows(-summed(g * t**-2 * e, 0))) * e, 0),
    "a mean": (lambda g, e, t, o: add_any(g / t, rows(-jnp.mean(g * t**-2 * e, -1, keepdims=True))) * e, 0),
    "a largest product": (lambda g, e, t, o: add_any(g / t, rows(-jnp.max(g * t**-2 * e, -1, keepdims=True))) * e, 0),
    "a sum of sums": (lambda g, e, t, o: add_any(g / t, rows(-jnp.sum(summed(g * t**-2 * e)))) * e, 0),
    "of sums of others": (lambda g, e, t, o: of_sums(g, e, summed(o)), 0),
    "of the largest": (lambda g, e, t, o: of_sums(g, e, jnp.max(e, -1, keepdims=True)), 0),
    "in 16 bits": (lambda g, e, t, o: in_16_bits(add_any(g / t, rows(-summed(g * t**-2 * e))), e), 0),
    "a quotient alone": (lambda g, e, t, o: g / t * e, 0),
}  # fmt: skip


def test_of_one_row_columns_are_no_rows():
    def fn(w, x):
        scores = x[:1] @ w
        e = jnp.exp(scores - jnp.max(scores, 0, keepdims=True))
        t = summed(e, 0)
        g = e / t @ w
        return add_any(g / t, -summed(g * t**-2 * e, 0)) * e

    assert not gradients(after("rewrite_planned", fn, W, X))


# The same for square arrays, where columns could be mistaken for rows.
SQUARE = {
    "rows": (lambda g, e, t: add_any(g / t, -jnp.broadcast_to(summed(g * t**-2 * e), g.shape)) * e, 1),
    "sums of rows at columns": (
        lambda g, e, t: add_any(g / t, -jnp.broadcast_to(jnp.sum(g * t**-2 * e, -1), g.shape)) * e, 0),
    "sums of rows, reshaped to columns": (
        lambda g, e, t: add_any(g / t, -jnp.broadcast_to(summed(g * t**-2 * e).reshape(1, 16), g.shape)) * e, 0),
    "divided by columns": (lambda g, e, t: of_sums(g, e, t[:, 0][None]), 0),
    "divided by the transpose": (lambda g, e, t: of_sums(g, e, t.T), 0),
    "divided by the sums, reshaped": (lambda g, e, t: of_sums(g, e, t.reshape(1, 16)), 0),
    "divided by sums in each column": (lambda g, e, t: of_sums(g, e, lax.broadcast_in_dim(t, (16, 16), (1, 0))), 0),
    "divided by sums in each row": (lambda g, e, t: of_sums(g, e, lax.broadcast_in_dim(t, (16, 16), (0, 1))), 1),
    "divided by the larger of two": (lambda g, e, t: of_sums(g, e, jnp.maximum(t, 2.0)), 0),
    "the larger of a sum and zero": (
        lambda g, e, t: add_any(g / t, -jnp.broadcast_to(jnp.maximum(summed(g * t**-2 * e), 0.0), g.shape)) * e, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", SQUARE)
def test_rows_are_no_columns(name):
    written, expected = SQUARE[name]

    def fn(w, x):
        scores = w @ x
        e = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
        return written(e / summed(e) @ w, e, summed(e))

    assert len(gradients(after("rewrite_planned", fn, W, W))) == expected


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("axis", [-1, 0])
def test_what_is_the_gradient_of_a_softmax(name, axis):
    """Across a dot, as in a backward pass. Over columns none is."""
    written, expected = WRITTEN[name]

    def fn(w, x):
        scores = x @ w
        exponentials = jnp.exp(scores - jnp.max(scores, axis, keepdims=True))
        total = jnp.sum(exponentials, axis, keepdims=True)
        cotangent = exponentials / total @ w
        return written(cotangent, exponentials, rows(total)[:, :1] if axis == 0 else total, x)

    rules = jmp.DEFAULT_RULES.with_scopes({"narrow": "float16"})
    assert len(gradients(after("rewrite_planned", fn, W, X, rules=rules))) == (expected if axis == -1 else 0)


def gradients(program):
    return [equation for equation in program.equations if equation.rewrite is gradient_of_softmax]


@pytest.mark.parametrize("name", CASES)
def test_which_gradients_are_rewritten(name):
    probabilities, expected = CASES[name]
    found = gradients(after("rewrite_planned", of(probabilities), W, X))
    assert len(found) == expected


@pytest.mark.parametrize("name", [name for name, (_, count) in CASES.items() if count])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_gradient_is_as_accurate(name, policy, monkeypatch):
    fn = of(CASES[name][0])
    with jax.enable_x64(True):
        exact = leaves(jax.jit(fn)(W.astype(np.float64), X.astype(np.float64)))
    ours = relative_error(leaves(jax.jit(autocast(fn, policy))(W, X)), exact)
    monkeypatch.setattr("jmp_train._autocast.planner.Planner.__init__.__defaults__", (OTHERS,))
    without = relative_error(leaves(jax.jit(autocast(lambda *args: fn(*args), policy))(W, X)), exact)
    assert ours <= 1.1 * without


def test_what_the_gradient_reads():
    """The cotangent as it is; exponentials and their sums again, with the largest score."""
    program = after("rewrite_planned", of(lambda s, w: jax.nn.softmax(s)), W, X)
    (gradient,) = gradients(program)
    assert [use.residual for use in gradient.uses] == [0, SHARED, SHARED]
    assert [use.dtype for use in gradient.uses] == 3 * [np.float32]
    producers = program.producers()
    again = [producers[use.value].name for use in gradient.uses[1:]]
    assert again == ["exp", "broadcast_in_dim"]
    written = after("insert_casts", of(lambda s, w: jax.nn.softmax(s)), W, X)
    assert [e.name for e in written.equations if e.remat and e.name in ("reduce_max", "exp", "reduce_sum")] == [
        "reduce_max", "exp", "reduce_sum"
    ]  # fmt: skip


def test_the_sum_reads_the_exponentials_that_the_quotient_reads():
    program = after("rewrite_planned", of(lambda s, w: jax.nn.softmax(s)), W, X)
    (gradient,) = gradients(program)
    exponentials = gradient.uses[1].value
    near = [e for e in program.equations if exponentials in e.operands and e.depth == program.facts[exponentials].depth]
    assert sorted(e.name for e in near) == ["div", "reduce_sum"]
    assert all(use.residual == 0 for e in near for use in e.uses if use.value == exponentials)


def test_others_across_a_dot_still_read_the_exponentials_again():
    def fn(w, x):
        scores = x @ w
        e = jnp.exp(scores - jnp.max(scores, -1, keepdims=True))
        g = e / summed(e) @ w
        return of_sums(g, e, summed(e)), jnp.sin(g) * e

    program = after("rewrite_planned", fn, W, X)
    (product,) = [e for e in program.equations if e.name == "mul" and not e.rewrite and e.results[0] in program.outputs]
    assert len(gradients(program)) == 1 and sorted(use.residual for use in product.uses) == [0, SHARED]


def test_nothing_is_rewritten_that_is_not_rematerialized():
    rules = jmp.DEFAULT_RULES.with_residuals("float32")
    assert not gradients(after("rewrite_planned", of(lambda s, w: jax.nn.softmax(s)), W, X, rules=rules))


def test_the_equation():
    g, s = RNG.normal(size=(2, 5)), RNG.normal(size=(2, 5))
    with jax.enable_x64(True):
        _, back = jax.vjp(jax.nn.softmax, s)
        (expected,) = back(g)
        e = jnp.exp(s)
        node: Any = None  # it is computed of operands alone
        (got,) = gradient_of_softmax(node, [g, e, jnp.sum(e, -1, keepdims=True)])
    np.testing.assert_allclose(got, expected, rtol=1e-12)
