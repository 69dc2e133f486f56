"""What values of a planned program are computed from, and which scans a product ends, in short programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from pass_tools import after, with_batching_rule

from jmp_train._autocast.analysis.loop_ends import dependencies
from jmp_train._autocast.primitives import Rule

RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 16)).astype(np.float32)
X = RNG.normal(size=(2, 16)).astype(np.float32)
N = np.int32(3)
W_, X_, N_ = range(3)


def printed(x):
    jax.debug.print("{}", jnp.sum(x))
    return x + 1


def repeated(body, start, n):
    return lax.fori_loop(0, n, lambda _, c: body(c), start)


# Each value: a function of a parameter, data and an integer, and the arguments from which its first result is computed,
# or `None` if not all of that computation runs as recorded.
CASES = {
    "a counter whose end an argument says": (
        lambda w, x, n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ w), (0, x))[0],
        {N_},
    ),
    "a loop that may not run": (lambda w, x, n: repeated(lambda c: x + 1, w[:2], n), {W_, X_, N_}),
    "a comparison across a dot": (
        lambda w, x, n: bias_gradient(lambda h, b: jnp.where(x > 0, b, 2 * b) + 0 * h, w, x),
        {X_},
    ),
    "data": (lambda w, x, n: x + 1, {X_}),
    "a parameter": (lambda w, x, n: 2 * w, {W_}),
    "a constant": (lambda w, x, n: jnp.arange(3) + 1, set()),
    "all": (lambda w, x, n: x * w[0] + n, {W_, X_, N_}),
    "a product": (lambda w, x, n: x @ w, None),
    "what follows a product": (lambda w, x, n: jnp.argmax(x @ w), None),
    "beside a product": (lambda w, x, n: (x + 1, x @ w), {X_}),
    "a product of a precision": (lambda w, x, n: jnp.dot(x, w, precision="highest"), {W_, X_}),
    "a product written as sums": (lambda w, x, n: x[:, :2] @ x[:, 2:4].T, None),
    "in 16 bits by hand": (lambda w, x, n: x.astype(np.float16) + 1, None),
    "from 16 bits by hand": (lambda w, x, n: x.astype(np.float16).astype(np.float32), None),
    "what a dot rounds": (lambda w, x, n: (lambda h: (jnp.sin(h), h @ w))(jnp.exp(x)), {X_}),
    "a rounding of it": (lambda w, x, n: bias_gradient(lambda h, b: h * b, w, x), None),
    "a distance from one of its rounding": (lambda w, x, n: bias_gradient(lambda h, b: (1 - h) * b, w, x), None),
    "beside a print": (lambda w, x, n: jax.checkpoint(printed)(x), {X_}),
    "a random number of the host's": (
        lambda w, x, n: io_callback(lambda: np.float32(1), jax.typeof(jnp.float32(1))) + x, None),
    "a call": (lambda w, x, n: jax.checkpoint(lambda x, w: (x + 1, x @ w))(x, w), {X_}),
    "the other result of a call": (lambda w, x, n: jax.checkpoint(lambda x, w: (x + 1, x @ w))(x, w)[1], None),
    "a call without a plan": (lambda w, x, n: with_batching_rule(jnp.tanh)(x), None),
    "a branch": (lambda w, x, n: lax.cond(n > 0, lambda: x, lambda: 2 * x), {X_, N_}),
    "a branch with a product": (lambda w, x, n: lax.cond(n > 0, lambda: x, lambda: x @ w), None),
    "a branch beside a product": (lambda w, x, n: lax.cond(n > 0, lambda: (x, x @ w), lambda: (2 * x, x)), {X_, N_}),
    "a branch that a product decides": (
        lambda w, x, n: lax.cond((x @ w)[0, 0] > 0, lambda: x, lambda: 2 * x), None),
    "a loop": (lambda w, x, n: repeated(lambda c: c + x, w[:2], n), {W_, X_, N_}),
    "a loop whose end an argument says": (
        lambda w, x, n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + x), (0, w[:2]))[1],
        {W_, X_, N_}),
    "a loop whose end no argument says": (
        lambda w, x, n: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + x), (0, w[:2]))[1], {W_, X_}),
    "a loop's counter": (lambda w, x, n: repeated(lambda c: (c[0] + 1, c[1] @ w), (n, x), n), {N_}),
    "a loop with a product": (lambda w, x, n: repeated(lambda c: c @ w, x, n), None),
    "a loop with a product in the iteration before": (
        lambda w, x, n: repeated(lambda c: (c[1] + 1, c[2], x @ w), (x, x, x), n), None),
    "a loop that a product ends, so that it runs as recorded": (
        lambda w, x, n: lax.while_loop(lambda c: jnp.sum(c[1]) > 0, lambda c: (c[0] + 1, c[1] @ w), (n, x))[0],
        {W_, X_, N_}),
    "a scan": (lambda w, x, n: lax.scan(lambda c, r: (c + r, n), w[0], x), {W_, X_}),
    "a scan's rows": (lambda w, x, n: lax.scan(lambda c, r: (c + r, n), w[0], x)[1], {N_}),
    "a scan with a product": (lambda w, x, n: lax.scan(lambda c, r: (c @ w, n), x, x)[0], None),
    "a scan beside a product": (
        lambda w, x, n: lax.scan(lambda c, r: ((c[0] + r, c[1] @ w), n), (x[0], x), x)[0], {X_}),
}  # fmt: skip


def bias_gradient(read, w, x):
    """The gradient with respect to `b` of what `read` makes of an exponential that a dot rounds."""

    def loss(b):
        h = jnp.exp(x)
        return jnp.sum(jnp.sin(read(h, b))) + jnp.sum(jnp.sin(h @ w))

    return jax.grad(loss)(jnp.ones(16))


@pytest.mark.parametrize("name", CASES)
def test_what_a_value_is_computed_from(name):
    fn, expected = CASES[name]
    program = after("mark_dead", fn, W, X, N)
    assert dependencies(program, program.outputs[:1]) == expected


def unfinished(c):
    return jnp.sum(c) > 0


# Each value: a scan's body, and whether the scan runs as recorded, because products decide when its carry stops.
STOPS = {
    "no condition": (lambda c: c @ W, False),
    "a branch": (lambda c: lax.cond(unfinished(c), lambda: c @ W, lambda: c), True),
    "the other branch": (lambda c: lax.cond(unfinished(c), lambda: c, lambda: c @ W), True),
    "a choice": (lambda c: jnp.where(unfinished(c), c @ W, c), True),
    "another choice": (lambda c: jnp.where(unfinished(c), c, c @ W), True),
    "a choice of two": (lambda c: jnp.where(unfinished(c), c @ W, -c), False),
    "a branch of two": (lambda c: lax.cond(unfinished(c), lambda: c @ W, lambda: -c), False),
    "an update that is skipped for its own result": (
        lambda c: (lambda new: jnp.where(jnp.sum(new) > 0, new, c))(c @ W),
        False,
    ),
    "a branch in a batch": (jax.vmap(lambda c: lax.cond(unfinished(c), lambda c: c @ W, lambda c: c, c)), True),
}


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a carry that stays"])
@pytest.mark.parametrize("name", STOPS)
def test_which_scans_a_product_stops(name, beside):
    body, expected = STOPS[name]

    def fn(w, x):
        def step(c, _):
            return (body(c[0]), jnp.where(c[0][0, 0] > 0, c[1], c[1])), None

        return lax.scan(step, (x, w), None, 3) if beside else lax.scan(lambda c, _: (body(c), None), x, None, 3)

    (scan,) = (equation for equation in after("assign_dtypes", fn, W, X).equations if equation.node.name == "scan")
    assert (scan.entry.rule is Rule.RECORDED) == expected


def test_a_counter_stops_a_scan_that_is_planned():
    def fn(w, x):
        step = lambda c, _: lax.cond(c[0] < 2, lambda: (c[0] + 1, c[1] @ W), lambda: c)  # noqa: E731
        return lax.scan(lambda c, _: (step(c, _), None), (0, x), None, 3)[0]

    (scan,) = (equation for equation in after("assign_dtypes", fn, W, X).equations if equation.node.name == "scan")
    assert scan.entry.rule is Rule.ENTER
