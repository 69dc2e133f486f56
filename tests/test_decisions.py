"""Loops whose number of steps depends on floats: which are planned and which run as recorded; none takes other steps.

Every program returns a state that products compute, and the number of iterations.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery_tools import leaves, relative_error
from jax import lax
from jax.experimental import io_callback
from jax.experimental.ode import odeint

from jmp_train import DEFAULT_RULES, autocast, explain, full_precision, low_precision

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((16, 16)) / 4).astype(np.float32)
X = RNG.standard_normal((8, 16)).astype(np.float32)

END = "its end depends on a product, or on another value that 16 bits change"
INTEGER = "an integer or boolean that it carries depends on a product, or on another value that 16 bits change"
STOP = "when it stops depends on a product, or on another value that 16 bits change"


def error(got, want):
    return relative_error(leaves(got), leaves(want))


def field(w, y):
    return jnp.tanh(y @ w)


def solve(step, unfinished, start, count=0):
    """Iterates `step` on `start`; returns the result and the number of iterations."""
    state, taken = lax.while_loop(lambda c: unfinished(*c[0]), lambda c: (step(*c[0]), c[1] + 1), (start, count))
    return state[1], taken


def timed(clock, t1: Any = 1.0):
    """Euler's method until `t1` with steps of 0.1; `clock(t, y, w)` gives the next time, which may read products."""
    return lambda w, x: solve(
        lambda t, y: (clock(t, y, w), y + 0.1 * field(w, y)), lambda t, y: t < t1, (jnp.float32(0), x)
    )


def by_index(w, x):
    step = lambda c: (c[0] + 1, c[1] + 0.1 * field(w, c[1]))  # noqa: E731
    return lax.while_loop(lambda c: 0.5 + 0.1 * jnp.asarray(c[0], jnp.float32) < 2.0 - 1e-4, step, (0, x))[::-1]


def mapped(w, x):
    ends = jnp.linspace(0.3, 1.2, len(x))
    return jax.vmap(lambda row, t1: timed(lambda t, y, w: t + 0.1, t1)(w, row))(x, ends)


def time_in_the_field(w, x):
    def step(t, y):
        t = t + 0.1
        times = jnp.broadcast_to(t, (len(y), 1))
        return t, y + 0.1 * (jnp.concatenate([y, times], 1) @ jnp.concatenate([w, w[:1]]))

    return solve(step, lambda t, y: t < 1, (jnp.float32(0), x))


def scanned_steps(w, x):
    def substep(c, _):
        return (c[0] + 0.02, c[1] + 0.02 * field(w, c[1])), c[1] @ w

    step = lambda t, y: lax.scan(substep, (t, y), None, length=3)[0]  # noqa: E731
    return solve(step, lambda t, y: t < 1, (jnp.float32(0), x))


def nested_solves(w, x):
    def step(t, y):
        t1 = t + 0.3
        unfinished = lambda c: c[0] < t1 - 1e-3  # noqa: E731
        return lax.while_loop(unfinished, lambda c: (c[0] + 0.1, c[1] + 0.1 * field(w, c[1])), (t, y))

    return solve(step, lambda t, y: t < 2, (jnp.float32(0), x))


def branching_steps(w, x):
    def step(t, y):
        fine = lambda t, y: (t + 0.05, y + 0.05 * field(w, y))  # noqa: E731
        coarse = lambda t, y: (t + 0.2, y + 0.2 * field(w, field(w, y)))  # noqa: E731
        return lax.cond(t < 0.4, fine, coarse, t, y)

    return solve(step, lambda t, y: t < 2, (jnp.float32(0), x))


def solves_in_a_scan(w, x):
    def solve_once(y, t1):
        return timed(lambda t, y, w: t + 0.1, t1)(w, y)

    y, taken = lax.scan(solve_once, x, jnp.array([0.35, 1.05, 0.75]))
    return y, taken


def asked_for_in_float32(w, x):
    """A residual of a product that the user keeps in float32, and another product that decides nothing."""

    def step(z, y, _):
        new = full_precision(lambda z: jnp.tanh(0.3 * z @ w + x))(z)
        return new, y @ w, jnp.max(jnp.abs(new - z))

    (_, y, _), n = lax.while_loop(
        lambda c: c[0][2] > 1e-5, lambda c: (step(*c[0]), c[1] + 1), ((jnp.zeros_like(x), x, jnp.float32(1)), 0)
    )
    return y, n


def host_clock(t, y, w):
    return jax.pure_callback(lambda t: np.float32(t + 0.1), jax.ShapeDtypeStruct((), jnp.float32), t)


def solved_clock(t, y, w):
    return t + jnp.linalg.solve(jnp.diag(jnp.array([10.0, 20.0])), jnp.ones(2))[0]


def transposed(a, t):
    """The time, multiplied by a number and divided by it again, in a backward pass."""
    return jax.linear_transpose(lambda t: t * a, t)(t)[0] / a


def computed_again(w, x):
    """After a product, the time is rematerialized from a mask, which is stored exactly."""

    def step(t, y):
        t = jnp.where(t < 0.5, t + 0.1, t + 0.2)
        y = y + 0.1 * field(w, y)
        return transposed(x[0, 0], t), y

    return solve(step, lambda t, y: t < 2, (jnp.float32(0), x))


def linked_scans(w, x):
    """A second scan rematerializes what the first one stacks, and carries the time."""

    def step(t, y):
        h = y @ w
        _, stacked = lax.scan(lambda _, w: (None, jnp.exp(h @ w)), None, jnp.stack([w, 2 * w, w.T]))
        read = lambda c, row: ((c[0] + 0.03, c[1] + row / jnp.sum(row)), None)  # noqa: E731
        return lax.scan(read, (t, y), stacked)[0]

    return solve(step, lambda t, y: t < 1, (jnp.float32(0), x))


PLANNED = {
    "constant step": timed(lambda t, y, w: t + 0.1),
    "tolerance": timed(lambda t, y, w: t + 0.1, 1 - 1e-3),
    "parameter": timed(lambda t, y, w: t + 0.1 * (1 + w[0, 0] ** 2)),
    "growing step": timed(lambda t, y, w: 1.2 * t + 0.01),
    "callback": timed(host_clock),
    "linear solve": timed(solved_clock),
    "index": by_index,
    "vmap": mapped,
    "remat": timed(lambda t, y, w: jax.checkpoint(lambda t, y: (t + 0.1, y @ w))(t, y)[0]),
    "custom_jvp": timed(lambda t, y, w: t + jax.nn.relu(0.1 + t * 0.1)),
    "time across a product": computed_again,
    "time in the field": time_in_the_field,
    "inner scan": scanned_steps,
    "linked scans": linked_scans,
    "inner while": nested_solves,
    "inner cond": branching_steps,
    "scan around": solves_in_a_scan,
    "full_precision": asked_for_in_float32,
}


def fixed_point(w, x):
    step = lambda r, z: (jnp.max(jnp.abs(jnp.tanh(0.3 * z @ w + x) - z)), jnp.tanh(0.3 * z @ w + x))  # noqa: E731
    return solve(step, lambda r, z: r > 1e-5, (jnp.float32(1), jnp.zeros_like(x)))


def norm_of_the_state(w, x):
    """The condition reads the state without a product in between; products reach it through the carry."""
    step = lambda t, y: (t, 0.9 * y + 0.01 * field(w, y))  # noqa: E731
    return solve(step, lambda t, y: jnp.sum(y * y) > 1.0, (jnp.float32(0), x))


def product_in_the_condition(w, x):
    step = lambda t, y: (t + 0.1, y + 0.1 * field(w, y))  # noqa: E731
    return solve(step, lambda t, y: t + 0.01 * jnp.mean(y @ w) < 1, (jnp.float32(0), x))


def product_in_an_inner_scan(w, x):
    def clock(t, y, w):
        substep = lambda c, _: ((c[0] + jnp.mean(c[1]) ** 2 / 9 + 0.02, c[1] @ w), None)  # noqa: E731
        return lax.scan(substep, (t, y), None, length=3)[0][0]

    return timed(clock)(w, x)


def narrowed_end(w, x):
    """The end comes as the largest result of a product that autocast narrows, and is never widened."""
    return timed(lambda t, y, w: t + 0.1, jnp.max(x @ w))(w, x)


def time_across_a_product(w, x):
    """A product reads the time, so that what is transposed after it reads its copy in 16 bits."""

    def step(t, y):
        t = t * 1.0 + 0.1
        times = jnp.broadcast_to(t, (len(y), 1))
        y = y + 0.1 * (jnp.concatenate([y, times], 1) @ jnp.concatenate([w, w[:1]]))
        return transposed(x[0, 0], t), y

    return solve(step, lambda t, y: t < 7.75, (jnp.float32(0), x))


def written(t, y, w):
    """The result of a callback may be a value that another callback wrote."""
    return io_callback(lambda t: np.float32(t + 0.1), jax.ShapeDtypeStruct((), jnp.float32), t)


def time_in_16_bits(w, x):
    step = lambda t, y: (t + jnp.bfloat16(0.1), y + 0.1 * field(w, y))  # noqa: E731
    return solve(step, lambda t, y: t < 1, (jnp.bfloat16(0), x))


SLOWED = timed(lambda t, y, w: t + 0.1 / (1 + jnp.mean(jnp.square(y @ w))))

AS_RECORDED = {
    "residual": fixed_point,
    "norm of the state": norm_of_the_state,
    "variable step": SLOWED,
    "condition": product_in_the_condition,
    "inner scan": product_in_an_inner_scan,
    "narrowed end": narrowed_end,
    "time across a product": time_across_a_product,
    "effect": timed(written),
    "16 bits": time_in_16_bits,
    "low_precision": timed(lambda t, y, w: low_precision(lambda t: t + 0.1)(t)),
    "low_precision condition": lambda w, x: solve(
        lambda t, y: (t + 0.1, y + 0.1 * field(w, y)), low_precision(lambda t, y: t < 1), (jnp.float32(0), x)
    ),
    "branch": timed(lambda t, y, w: t + lax.cond(jnp.sum(y @ w) > 0, lambda: 0.1, lambda: 0.15)),
}


def loops(fn, *args, rules=DEFAULT_RULES, kind="while"):
    found = explain(fn, "mixed_bfloat16", rules)(*args)
    return [op.reason for op in found.operations if op.primitive == kind and op.rule == "recorded"], found


@pytest.mark.parametrize("name", PLANNED)
def test_a_loop_whose_end_depends_on_no_product_is_planned(name):
    recorded, found = loops(PLANNED[name], W, X)
    dots = {op.reason: op.dtype for op in found.operations if op.primitive == "dot_general"}
    asked = {"full_precision region", "inside custom_linear_solve, as recorded"}
    assert recorded == [] and {dtype for reason, dtype in dots.items() if reason not in asked} == {"bfloat16"}


@pytest.mark.parametrize("name", AS_RECORDED)
def test_a_loop_whose_end_depends_on_a_narrowed_value_runs_as_recorded(name):
    recorded, found = loops(AS_RECORDED[name], W, X)
    assert recorded == [END]
    inside = [op for op in found.operations if op.reason == "inside while, as recorded"]
    assert inside and {op.dtype for op in inside if op.primitive == "dot_general"} == {"float32"}


# Rounded to bfloat16 the time is soonest off by a step; in float16 it may equal that of float32 by chance.
@pytest.mark.parametrize(
    ("fn", "policy"),
    [
        *(
            pytest.param(fn, "mixed_float16", id=f"{name}-f16", marks=[pytest.mark.slow] * (name != "constant step"))
            for name, fn in PLANNED.items()
        ),
        *(pytest.param(fn, "mixed_bfloat16", id=f"{name}-bf16") for name, fn in PLANNED.items()),
        *(pytest.param(fn, "mixed_bfloat16", id=name) for name, fn in AS_RECORDED.items()),
    ],
)
def test_loops_take_the_steps_of_float32(fn, policy):
    (y, steps), (want, wanted) = jax.jit(lambda *args: (autocast(fn, policy)(*args), fn(*args)))(W, X)
    np.testing.assert_array_equal(steps, wanted)
    assert np.min(wanted) > 2 and error(y, want) < 3e-2


def test_edits_of_the_table_count():
    fn = PLANNED["constant step"]
    assert loops(fn, W, X, rules=DEFAULT_RULES.replace({"add": "low"}))[0] == [END]
    assert loops(fixed_point, W, X, rules=DEFAULT_RULES.replace({"dot_general": "high"}))[0] == []


def test_the_state_is_carried_in_float32():
    """Also if the state starts as the result of a product."""
    fn = lambda w, x: PLANNED["constant step"](w, x @ w)  # noqa: E731
    eqns = jax.make_jaxpr(autocast(fn, "mixed_bfloat16"))(W, X).eqns
    (loop,) = (eqn for eqn in eqns if eqn.primitive.name == "while")
    assert sorted(var.aval.str_short() for var in loop.outvars) == ["float32[8,16]", "float32[]", "int32[]"]


def rejected_steps(w, x):
    """A fixed number of iterations; an error estimate decides which of them count as steps."""

    def step(t, y):
        return t + 0.1, y + jnp.where(jnp.max(jnp.abs(field(w, y))) < 0.9, 0.1, 0.05) * field(w, y)

    def body(c):
        state, taken = c
        return step(*state), taken + (jnp.max(jnp.abs(field(w, state[1]))) < 0.99).astype(jnp.int32)

    (_, y), taken = lax.while_loop(lambda c: c[0][0] < 2, body, ((jnp.float32(0), x), 0))
    return y, taken


def test_what_a_loop_counts_decides_too():
    assert loops(rejected_steps, W, X)[0] == [INTEGER]
    assert jax.jit(autocast(rejected_steps, "mixed_bfloat16"))(W, X)[1] == jax.jit(rejected_steps)(W, X)[1]


# Adjoints: derivatives that are loops


@jax.custom_vjp
def backsolved(w, x):
    """Euler's method, and the adjoint equation solved backwards in time (Chen et al. 2018)."""
    return timed(lambda t, y, w: t + 0.1, 1 - 1e-3)(w, x)[0]


def backsolve(result, cotangent):
    w, y = result

    def step(c):
        t, y, a, g = c
        f, pull = jax.vjp(field, w, y)
        to_w, to_y = pull(a)
        return t - 0.1, y - 0.1 * f, a + 0.1 * to_y, g + 0.1 * to_w

    start = (jnp.float32(1), y, cotangent, jnp.zeros_like(w))
    return lax.while_loop(lambda c: c[0] > 1e-3, step, start)[:1:-1]


backsolved.defvjp(lambda w, x: (y := backsolved(w, x), (w, y)), backsolve)


@pytest.mark.parametrize("policy", [pytest.param("mixed_float16", marks=pytest.mark.slow), "mixed_bfloat16"])
def test_adjoint_equations_are_planned(policy):
    loss = lambda w, x: jnp.mean(backsolved(w, x) ** 2)  # noqa: E731
    assert explain(jax.grad(loss), policy)(W, X).low_flop_share == 1
    want = jax.jit(jax.grad(loss))(W, X)
    for fn in (autocast(jax.grad(loss), policy), jax.grad(autocast(loss, policy))):
        assert error(jax.jit(fn)(W, X), want) < 1e-2


def test_adaptive_steps_are_float32_both_ways():
    def loss(w, x):
        return jnp.mean(odeint(lambda y, t, w: field(w, y), x, jnp.array([0.0, 1.0]), w)[-1] ** 2)

    recorded, found = loops(jax.grad(loss), W, X)
    assert recorded == [END]  # the steps back are planned: `odeint` takes them under precision "highest"
    narrow = [op for op in found.operations if op.primitive == "dot_general" and op.dtype == "bfloat16"]
    assert len(narrow) == 2  # before the first loop, which they choose the first step of


# Bounded loops: a `while` that is written as a scan, so that it can be differentiated


def bounded(step, unfinished, start, length=24):
    """`solve` as a scan of conditional steps, which from some iteration on do nothing."""

    def iteration(c, _):
        return lax.cond(unfinished(*c[0]), lambda c: (step(*c[0]), c[1] + 1), lambda c: c, c), None

    (state, taken), _ = lax.scan(iteration, (start, 0), None, length=length)
    return state[1], taken


def bounded_euler(w, x):
    return bounded(lambda t, y: (t + 0.1, y + 0.1 * field(w, y)), lambda t, y: t < 1, (jnp.float32(0), x))


def adapted(t, y, w):
    """Steps whose size the vector field decides."""
    dt = 0.05 / jnp.max(jnp.abs(field(w, y)), -1)
    return t + dt, y + dt[..., None] * field(w, y)


def bounded_adaptive(w, x):
    return bounded(lambda t, y: adapted(t, y, w), lambda t, y: t < 1, (jnp.float32(0), x[0]))


def mapped_adaptive(w, x):
    return jax.vmap(lambda row: bounded_adaptive(w, row[None]))(x)


def skipped_updates(w, x):
    """A training loop that skips some updates, depending on their values; it does not stop early."""

    def update(w, row):
        new = w - 0.1 * jnp.outer(row, row @ w)
        return lax.cond(jnp.all(jnp.isfinite(new @ jnp.tanh(new))), lambda: new, lambda: w), None

    return lax.scan(update, w, x)[0], jnp.int32(len(x))


def other_carries_go_on(w, x):
    """A loop in which other carries still change when the condition is false."""

    def iteration(c, row):
        mean, v, n = c
        v = lax.cond(mean > 0, lambda: v + row @ w, lambda: v)
        return (mean + 0.1 * (jnp.mean(row @ w) - mean), v, n + 1), None

    (_, v, n), _ = lax.scan(iteration, (jnp.float32(0.1), x[0], 0), x)
    return v, n


def changed_roles(w, x):
    """Both branches change the state."""

    def iteration(c, _):
        return lax.cond(jnp.sum(c[0]) > 0, lambda c: (c[0] @ w, c[1]), lambda c: (c[1], c[0]), c), None

    return lax.scan(iteration, (x, -x), None, length=9)[0][0], jnp.int32(9)


@pytest.mark.parametrize("fn", [bounded_euler, skipped_updates, other_carries_go_on, changed_roles])
def test_scans_that_no_product_stops_are_planned(fn):
    recorded, found = loops(fn, W, X, kind="scan")
    assert recorded == [] and found.low_flop_share > 0.9  # the rest is a vector of data times a matrix


@pytest.mark.parametrize("fn", [bounded_adaptive, mapped_adaptive])
@pytest.mark.parametrize("policy", [pytest.param("mixed_float16", marks=pytest.mark.slow), "mixed_bfloat16"])
def test_scans_that_a_product_stops_take_the_steps_of_float32(fn, policy):
    assert loops(fn, W, X, kind="scan")[0] == [STOP]
    (y, steps), (want, wanted) = jax.jit(lambda *args: (autocast(fn, policy)(*args), fn(*args)))(W, X)
    np.testing.assert_array_equal(steps, wanted)
    assert 2 < np.min(wanted) and np.max(wanted) < 24
    np.testing.assert_allclose(y, want, rtol=1e-5)


def test_the_gradient_of_a_stopped_scan_takes_its_steps():
    """Also where rematerialization takes the steps again."""
    loss = jax.checkpoint(lambda w, x: jnp.mean(bounded_adaptive(w, x)[0] ** 2))
    assert loops(jax.grad(loss), W, X, kind="scan")[0] == [STOP, STOP]
    ours, plain = (jax.jit(fn)(W, X) for fn in (autocast(jax.grad(loss), "mixed_bfloat16"), jax.grad(loss)))
    assert error(ours, plain) < 1e-2
