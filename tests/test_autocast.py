"""What `autocast` guarantees for any function; each test is the smallest program that could break one guarantee."""

import gc
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from battery_tools import primitives
from comparisons import as_written, assert_same_bits, assert_two_programs_agree, with_and_without
from jax.custom_derivatives import SymbolicZero

from jmp_train import DEFAULT_RULES, autocast, explain, full_precision
from jmp_train._autocast.autocast import Plan

F16 = np.dtype(np.float16)
W, X = np.full((8, 8), 0.25, np.float32), np.ones((4, 8), np.float32)


def equations(fn, *args):
    """(primitive, operand dtypes, result dtype) of every equation in the program of `fn`, bodies included."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name, [v.aval.dtype for v in eqn.invars], eqn.outvars[0].aval.dtype
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(value, "eqns"):
                    yield from walk(getattr(value, "jaxpr", value))

    return list(walk(jax.make_jaxpr(fn)(*args).jaxpr))


def test_an_eager_call_with_known_shapes_does_not_trace_again():
    traces = []

    def f(w, x):
        traces.append(1)
        return x @ w

    cast = autocast(f, "mixed_float16")
    for _ in range(3):
        cast(W, X)
    assert len(traces) == 1
    cast(W, X[:2])
    assert len(traces) == 2


def test_a_function_may_close_over_traced_values():
    def outer(w, x):
        return autocast(lambda w: jnp.sum(x @ w), "mixed_float16")(w)

    for transformed in (jax.jit(jax.grad(outer)), jax.vmap(jax.grad(outer), in_axes=(None, 0))):
        assert np.isfinite(transformed(W, X)).all()


def test_keywords_numbers_and_pytrees_are_arguments_as_under_jit():
    cast = autocast(lambda p, *, scale, pair: (p["w"] @ pair[0]) * scale, "mixed_bfloat16")
    out = cast({"w": W}, scale=2, pair=(X.T, None))
    assert out.dtype == np.float32 and out[0, 0] == 4


def test_squares_are_wide_even_of_narrow_values():
    def rms_norm(w, x):
        h = x @ w
        return (h * jax.lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True))) @ w

    out = autocast(rms_norm, "mixed_float16")(W, X * 900)  # |h| = 1800: a float16 square is infinite
    np.testing.assert_allclose(out, np.full((4, 8), 2), rtol=1e-3)


@pytest.mark.parametrize("masked", [-1e9, float(np.finfo(np.float32).min)])
def test_what_float16_cannot_hold_stays_wide(masked):
    def attend(w, x, bias):
        scores = x @ w
        literal = jax.nn.softmax(jnp.where(jnp.arange(8) < 4, scores, masked))
        argument = jax.nn.softmax(scores + bias)
        return (literal + argument) @ w, jnp.log(jnp.abs(scores - scores) + 1e-12)

    bias = np.where(np.arange(8) < 4, 0.0, masked).astype(np.float32)
    for got, want in zip(*with_and_without(attend, "mixed_float16", W, X, bias), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3)


MADE_OF_LITERALS = {
    "a mask times ten": lambda h, mask: h + jnp.where(mask, 0.0, -1e4) * 10.0,
    "a mask of booleans": lambda h, mask: h + (1 - mask.astype(jnp.float32)) * -3e4 * 3,
    "a product": lambda h, mask: h + jnp.full(8, 300.0) * 300.0,
    "a small product": lambda h, mask: h * (jnp.full(8, 1e-4) * 1e-4),
    "a quotient": lambda h, mask: h * (jnp.ones(8) / 1e-3 / 1e-3),
    "a sum": lambda h, mask: h + (jnp.full(8, 6e4) + 6e4),
}


@pytest.mark.parametrize("name", MADE_OF_LITERALS)
def test_what_literals_make_together_stays_wide_too(name):
    """Each literal fits into float16, but the value that is computed from them does not."""
    fn = MADE_OF_LITERALS[name]
    got, want = with_and_without(lambda w, x, mask: fn(x @ w, mask), "mixed_float16", W, X, np.arange(8) < 3)
    np.testing.assert_allclose(got, want, rtol=2e-3)


GUARDED = {
    "an arc cosine": lambda c: jnp.arccos(jnp.clip(c, -0.999999, 0.999999)),
    "a sine": lambda c: jnp.sqrt(1 - jnp.clip(c, -0.999999, 0.999999) ** 2),
    "a cross-entropy": lambda c: jnp.log(1 - jnp.clip(c, 1e-6, 0.999999)),
}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", GUARDED)
def test_a_literal_beside_one_is_not_rounded_to_one(name, policy):
    """A bound such as 0.999999 is one in 16 bits, where the derivative that it keeps finite would be infinite."""

    def loss(w, x):
        return jnp.mean(GUARDED[name](x @ w))

    got, exact = with_and_without(jax.value_and_grad(loss), policy, W, 3 * X)
    assert np.isfinite(exact[1]).all()
    np.testing.assert_allclose(got[0], exact[0], rtol=1e-2)
    assert np.isfinite(got[1]).all()


HUGE = {
    "selected": lambda h: jnp.where(jnp.arange(8) < 4, h, -1e5),
    "added": lambda h: h + jnp.where(jnp.arange(8) < 4, 0.0, -1e5),
    "beside": lambda h: jnp.concatenate([h[:, :4], jnp.full((4, 4), -1e5)], axis=1),
    "around": lambda h: jnp.pad(h[:, :4], ((0, 0), (0, 4)), constant_values=-1e5),
    "beyond the end": lambda h: jnp.take(h, np.array([0, 1, 2, 3, 8, 9, 8, 9]), 1, mode="fill", fill_value=-1e5),
    "the start of a loop": lambda h: jax.lax.scan(lambda c, row: (jnp.logaddexp(c, row), c), jnp.full(8, -1e5), h)[1],
    "carried on": lambda h: jax.lax.scan(
        lambda c, row: ((c[1], jnp.where(jnp.arange(8) < 4, row, -1e5)), c[0]), (h[0], h[1]), h
    )[1],
    "of one branch": lambda h: jax.lax.cond(h[0, 0] < 1e9, lambda: jnp.where(h < 0, h, -1e5), lambda: h),
    "in a function": lambda h: jax.jit(lambda h: 2 * jnp.where(jnp.arange(8) < 4, h, -1e5))(h),
    "scaled, normalised": lambda h: jax.nn.log_softmax(jnp.where(jnp.arange(8) < 4, h, -1e9) / 2),
}
BOUNDED = {
    "a softmax": lambda h: jax.nn.softmax(jnp.where(jnp.arange(8) < 4, h, -1e9)),
    "a bound": lambda h: jnp.maximum(h, -1e9),
    "two bounds": lambda h: jnp.clip(h, -1e9, 1e9),
    "the largest": lambda h: jnp.where(jnp.arange(4)[:, None] < 2, h, -1e9).max(0) * jnp.ones((4, 1)),
    "a factor": lambda h: 1e-6 * (1e6 * h),
    "a comparison": lambda h: h * (jnp.where(jnp.arange(8) < 4, h, -1e9) > 0),
}


def picked(make):
    """Multiplies `make(x @ w)` by zeros and ones, as a CTC loss does to pick the score of a path."""
    return lambda w, x: jnp.einsum("bn,nk->bk", make(x @ w), jnp.eye(8)[:, :3])


@pytest.mark.parametrize("name", HUGE)
def test_a_product_does_not_find_what_float16_cannot_hold_infinite(name):
    """A number beyond float16's range would be infinite in a float16 product, and zero times infinity is NaN."""
    fn = picked(HUGE[name])
    np.testing.assert_allclose(*with_and_without(fn, "mixed_float16", W, X), rtol=2e-3, atol=1e-3)
    narrow = autocast(fn, "mixed_bfloat16")  # bfloat16 has the range of float32
    assert {dtypes[0] for name, dtypes, _ in equations(narrow, W, X) if name == "dot_general"} == {
        np.dtype(jnp.bfloat16)
    }


@pytest.mark.parametrize("name", BOUNDED)
def test_a_product_is_narrow_where_huge_literals_only_bound_its_operands(name):
    fn = jax.grad(lambda w, x: 65536.0 * jnp.mean(picked(BOUNDED[name])(w, x) ** 2))
    read = [dtypes[0] for name, dtypes, _ in equations(autocast(fn, "mixed_float16"), W, X) if name == "dot_general"]
    assert len(read) >= 3 and set(read) == {F16}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap, lambda fn: lambda x: jax.lax.map(fn, x)])
def test_predictions_in_the_units_of_their_data_are_finite(wrap, policy):
    def predict(x):
        return 60_000 * (jnp.tanh(x @ W) @ W.T) + 5_000

    rows, expected = X[:, None], predict(X[:, None])
    assert jnp.max(jnp.abs(expected)) > 66_000
    np.testing.assert_allclose(autocast(wrap(predict), policy)(rows), expected, atol=60_000 * 2e-2)


def test_a_mask_and_a_literal_that_fit_widen_nothing():
    drop = lambda w, x, mask: jnp.where(mask, (x @ w) / 0.9, 0.0) * (mask / 0.9) @ w  # noqa: E731
    operations = explain(drop, "mixed_float16")(W, X, np.arange(8) < 3).operations
    assert [op.dtype for op in operations if op.primitive == "mul"] == ["float16"]


def entropy_of_attention(w, x):
    weights = jax.nn.softmax(x @ w @ x.T * 0.7)
    return jnp.mean((weights @ x @ w) ** 2) - jnp.sum(weights * jnp.log(weights))


def rates_cut_off(w, x):
    """`rates`, up to 1e6, are bounded before they meet a dot and read again after it."""
    rates = jnp.exp(x @ w * 0.6)
    out = jnp.minimum(rates, 50.0) @ w
    return jnp.mean(out**2) * 1e-3 + 1e-6 * jnp.mean(rates * (1 + out))


def log_of_gates(w, x):
    gates = jax.nn.sigmoid(x @ w)
    return jnp.mean((gates @ w) ** 2) + jnp.mean(jnp.log(gates))


def divided_by_a_bell(w, x):
    bell = jnp.exp(-jnp.square(x @ w) * 0.05)
    out = bell @ w
    return jnp.mean(out**2) + 1e-9 * jnp.mean(out / bell)


def density_of_squashed_actions(w, x):
    """The log-density of a tanh-Gaussian policy: in 16 bits an action of 0.9999 is one, and one minus it zero."""
    drawn = x @ w + 0.1 * x
    actions = jnp.tanh(0.3 * drawn)
    return jnp.mean((actions @ w) ** 2) - 100 * jnp.mean(jnp.log(1 - actions**2 + 1e-6))


def log_of_a_squashed_narrow_value(w, x):
    actions = jnp.tanh(0.3 * (x @ w))
    return jnp.mean((actions @ w) ** 2) - 100 * jnp.mean(jnp.log(1 + 1e-6 - jnp.square(actions)))


@jax.custom_vjp
def log_of_sum(scores):
    return jax.nn.logsumexp(scores, axis=-1, keepdims=True)


def log_of_sum_forward(scores):
    total = log_of_sum(scores)
    return total, (scores, total)


log_of_sum.defvjp(log_of_sum_forward, lambda kept, ct: (ct * jnp.exp(kept[0] - kept[1]),))


def exponents_that_a_dot_rounds(w, x):
    """Scores of some hundreds, whose softmax a derivative rule computes, and which a dot with zeros and ones reads."""
    scores = 300 * x[:, :1] + jnp.cumsum(x @ w, axis=0)
    picked = jax.nn.one_hot(jnp.arange(16) % 8, 8) @ scores.T
    return jnp.sum(log_of_sum(scores) * x[:, 1:2]) + 1e-6 * jnp.sum(picked)


@pytest.mark.parametrize(
    "fn",
    [
        entropy_of_attention,
        rates_cut_off,
        log_of_gates,
        divided_by_a_bell,
        density_of_squashed_actions,
        log_of_a_squashed_narrow_value,
        exponents_that_a_dot_rounds,
    ],
)
def test_a_float32_value_that_a_dot_rounds_is_finite_for_its_other_readers(fn):
    """Softmaxes and exponentials that are zero or infinite in float16, in the forward and in the backward pass."""
    rng = np.random.default_rng(0)
    w, x = (3 * rng.standard_normal((8, 8))).astype(np.float32), rng.standard_normal((16, 8)).astype(np.float32)
    for one, other in zip(*with_and_without(jax.value_and_grad(fn), "mixed_float16", w, x), strict=True):
        assert np.linalg.norm(one - other) < 2e-2 * np.linalg.norm(other)


def test_a_solver_takes_the_iterations_of_float32():
    def solve(w, b):
        def step(state):
            x, r, n = state
            return x + 0.5 * r, b - (w @ (x + 0.5 * r)), n + 1

        return jax.lax.while_loop(lambda s: jnp.sum(s[1] ** 2) > 1e-10, step, (jnp.zeros(8), b, 0))[2]

    matrix = np.eye(8, dtype=np.float32) + 0.01 * W
    assert autocast(solve, "mixed_float16")(matrix, X[0]) == jax.jit(solve)(matrix, X[0])


def test_a_gradient_accumulates_in_a_float32_carry():
    def total(w, xs):
        return jax.lax.scan(lambda c, x: (c + jnp.outer(x @ w, x), None), jnp.zeros((8, 8)), xs)[0]

    many = np.ones((5000, 8), np.float32)
    np.testing.assert_allclose(autocast(total, "mixed_float16")(W, many), np.full((8, 8), 10000), rtol=1e-3)


def test_a_model_written_in_16_bits_changes_only_where_it_accumulates():
    def loss(table, ids):
        h = jax.nn.relu(table.astype(F16)[ids] @ W.astype(F16))
        return jnp.sum(h, dtype=F16)

    ids = np.zeros(4096, np.int32)
    plain, cast = jax.grad(loss), autocast(jax.grad(loss), "mixed_float16")
    before, after = (equations(fn, W, ids) for fn in (plain, cast))
    assert [e for e in before if e[0] == "dot_general"] == [e for e in after if e[0] == "dot_general"]
    assert {e[2] for e in before if e[0] == "scatter-add"} == {F16}
    assert {e[2] for e in after if e[0] == "scatter-add"} == {np.dtype(np.float32)}
    np.testing.assert_allclose(jax.jit(cast)(W, ids)[0], np.full(8, 4096 * 2.0), rtol=1e-3)
    assert abs(float(jax.jit(plain)(W, ids)[0, 0]) - 8192) > 1000  # a float16 sum stops growing


@pytest.mark.parametrize("name", ["set", "add", "multiply", "min", "max"])
def test_every_scatter_runs_on_a_narrow_buffer(name):
    def f(w, x):
        return getattr(jnp.dot(x, w).at[jnp.array([0, 2])], name)(3.0) @ w

    np.testing.assert_allclose(*with_and_without(f, "mixed_float16", W, X), rtol=1e-3)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_function_is_applied_to_elements_in_the_dtype_that_it_was_recorded_in(policy):
    def f(w, x):
        return (x @ w).at[jnp.array([0, 2])].apply(lambda y: jnp.where(y > 0, 1e5 * y, -3.0)) * 1e-5 @ w

    for fn in (f, jax.checkpoint(f)):
        np.testing.assert_allclose(*with_and_without(fn, policy, W, X), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("window", "stride"), [((2, 2), (2, 2)), ((4, 3), (4, 3)), ((3, 3), (2, 2)), ((5, 2), (2, 1)), ((1, 2), (2, 3))]
)
def test_the_gradient_of_a_max_pool_chooses_as_jax_does(window, stride):
    def loss(x, weights):
        pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, *window), (1, *stride), "SAME")
        return jnp.sum(pooled * weights)

    x = np.random.default_rng(0).integers(-2, 3, (2, 8, 12)).astype(np.float32)  # full of ties
    weights = 1 + np.arange(8 * 12 * 2 // np.prod(stride), dtype=np.float32).reshape(2, 8 // stride[0], 12 // stride[1])
    cast = autocast(jax.grad(loss), "mixed_float16")
    np.testing.assert_array_equal(*with_and_without(jax.grad(loss), "mixed_float16", x, weights))
    assert not [e for e in equations(cast, x, weights) if e[0] == "select_and_scatter_add"]


@pytest.mark.parametrize("extreme", [jax.lax.max, jax.lax.min])
def test_a_pool_whose_gradient_is_in_the_program_compares_in_float32_the_numbers_that_are_stored(extreme):
    start, name = (-np.inf, "reduce_window_max") if extreme is jax.lax.max else (np.inf, "reduce_window_min")

    def loss(w, x):
        pooled = jax.lax.reduce_window(x @ w, start, extreme, (1, 3), (1, 2), "SAME")
        return jnp.sum(pooled @ w[:4]), pooled

    def compares(fn):
        return [dtypes for found, dtypes, _ in equations(fn, w, x) if found == name]

    w, x = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)
    x[1], x[2] = np.nan, np.inf
    gradient, alone = (autocast(fn, "mixed_float16") for fn in (jax.grad(loss, has_aux=True), loss))
    assert compares(gradient) == [[np.float32]]
    assert compares(alone) == compares(jax.grad(alone, has_aux=True)) == [[np.float16]]
    pooled = as_written(lambda w, x: (gradient(w, x)[1], alone(w, x)[1]))(w, x)
    np.testing.assert_array_equal(*pooled)


@pytest.mark.parametrize("extreme", [jax.lax.max, jax.lax.min])
def test_the_gradient_of_a_pool_sums_overlapping_windows_in_float32(extreme):
    """One element is the extreme of nine windows, with gradients of 2048 and eight ones: 2048 in a float16 sum."""
    sign = 1.0 if extreme is jax.lax.max else -1.0

    def loss(w, x, weights):
        pooled = jax.lax.reduce_window(x @ w, -sign * jnp.inf, extreme, (1, 3, 3), (1, 1, 1), "SAME")
        return jnp.sum((pooled.reshape(16, 8) @ w) * weights)

    x, weights = np.zeros((1, 16, 8), np.float32), np.ones((16, 8), np.float32)
    x[0, 8, 4], weights[9, 5] = sign, 2048
    gradient = jax.jit(autocast(jax.grad(loss, 1), "mixed_float16", argnums=(0, 1, 2)))
    assert gradient(np.eye(8, dtype=np.float32), x, weights)[0, 8, 4] == 2048 + 8


def test_values_kept_for_the_backward_pass_cost_no_accuracy():
    def loss(params, x):
        h = jax.nn.gelu(x @ params["in"])
        h = jax.nn.softmax(h @ params["mid"]) @ params["mid"].T
        h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
        return jnp.mean((h @ params["out"]) ** 2)

    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((64, 64)).astype(np.float32) / 8 for name in ("in", "mid", "out")}
    x = rng.standard_normal((256, 64)).astype(np.float32)
    with jax.enable_x64(True):
        exact = jax.jit(jax.grad(loss))(*jax.tree.map(lambda a: a.astype(np.float64), (params, x)))

    def error_and_kept(rules):
        gradient = jax.jit(autocast(jax.grad(loss), "mixed_float16", rules=rules))(params, x)
        errors = [np.linalg.norm(gradient[k] - np.asarray(exact[k])) / np.linalg.norm(exact[k]) for k in params]
        kept = dict(explain(jax.grad(loss), "mixed_float16", rules)(params, x).kept_bytes)
        return max(errors), kept.get("float32", 0)

    low, wide = map(error_and_kept, (DEFAULT_RULES, DEFAULT_RULES.with_residuals("float32")))
    assert low[0] < 1.2 * wide[0] < 5e-3
    assert low[1] < wide[1] / 2


def test_a_product_in_float64_reads_what_was_recorded():
    with jax.enable_x64(True):

        def loss(w, x):
            return jnp.sum(jnp.dot(x, w, preferred_element_type=jnp.float64))

        for fn in (loss, jax.grad(loss)):
            kinds = [
                dtypes for name, dtypes, _ in equations(autocast(fn, "mixed_float16"), W, X) if name == "dot_general"
            ]
            assert kinds and F16 not in {dtype for dtypes in kinds for dtype in dtypes}
            assert_two_programs_agree(*with_and_without(fn, "mixed_float16", W, X))


@pytest.mark.parametrize("fn", [lambda w, z: z @ w, lambda w, z: w @ z.T, lambda w, z: jnp.einsum("ij,j->ij", z, w[0])])
def test_a_product_with_complex_numbers_reads_what_was_recorded(fn):
    w, z = np.full((32, 32), 1e5, np.float32), np.full((32, 32), 1 + 2j, np.complex64)
    for each in (fn, jax.grad(lambda w, z: jnp.sum(jnp.abs(fn(w, z))))):
        assert_two_programs_agree(*with_and_without(each, "mixed_float16", w, z))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.where(x > 1, jnp.fft.fft(x), 1j),
        lambda x: jnp.roots(x, strip_zeros=False),
        lambda x: jnp.take(x + 1j, jnp.array([0, 9]), mode="fill", fill_value=2j),
    ],
    ids=["where", "roots", "take"],
)
def test_complex_literals_have_no_range(fn):
    x = np.linspace(1, 2, 4, dtype=np.float32)
    for each in (fn, jax.grad(lambda x: jnp.sum(jnp.abs(fn(x))))):
        assert_two_programs_agree(*with_and_without(each, "mixed_float16", x))


def test_the_conjugate_of_real_numbers_is_complex():
    """`jnp.conj` leaves real numbers unchanged; `lax.conj` makes complex ones, and does not accept 16-bit numbers."""
    w, x = np.eye(16, dtype=np.float32), np.ones((4, 16), np.float32)
    got = autocast(lambda w, x: jax.lax.conj(x @ w), "mixed_float16")(w, x)
    assert got.dtype == jnp.complex64
    np.testing.assert_array_equal(got, x)


def test_which_gradient_products_leave_in_the_reduce_dtype():
    """Gradients of weights, and of inputs that are results; gradients of activations are in 16 bits, as in Flax."""

    def loss(params, x):
        return jnp.sum(jnp.tanh((x * params["scale"]) @ params["w"]))

    def dtypes(argnums):
        program = jax.make_jaxpr(autocast(jax.grad(loss, argnums), "mixed_float16", argnums=0))(params, X)
        products = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
        return {eqn.outvars[0].aval.shape: eqn.outvars[0].aval.dtype.name for eqn in products[1:]}

    params = {"scale": jnp.ones(8), "w": jnp.ones((8, 6))}
    of_weight, of_activation = (8, 6), (4, 8)
    assert dtypes(0) == {of_weight: "float32", of_activation: "float16"}
    assert dtypes((0, 1)) == {of_weight: "float32", of_activation: "float16"}  # multiplied by `scale` after the dot

    def product(params, x):
        return jnp.sum(x @ params["first"] @ params["second"])

    deep = {"first": jnp.ones((8, 4)), "second": jnp.ones((4, 2))}
    gradient = autocast(jax.grad(product, (0, 1)), "mixed_float16")
    program = jax.make_jaxpr(gradient)(deep, X)
    wide = [eqn.outvars[0].aval.dtype.name for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert wide.count("float32") == 3  # two weights and the input, which is returned as it is


def test_a_softmax_and_its_gradient_see_the_same_logits():
    """XLA may drop a rounding of the logits that a cast undoes; the backward pass must then drop it, too."""

    def loss(params, x, labels):
        logits = (jax.nn.relu(x @ params["in"]) @ params["out"]) * 3
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    rng = np.random.default_rng(0)
    params = {"in": rng.standard_normal((16, 64)) / 4, "out": rng.standard_normal((64, 10))}
    params = jax.tree.map(np.float32, params)
    x = rng.standard_normal((64, 16)).astype(np.float32)
    labels = np.argmax(np.maximum(x @ params["in"], 0) @ params["out"], -1)  # small gradients, as after training
    gradient = np.asarray(jax.jit(autocast(jax.grad(loss), "mixed_bfloat16"))(params, x, labels)["out"])
    # A softmax's gradient sums to zero over the classes, whatever the logits were rounded to.
    assert np.linalg.norm(gradient.sum(axis=1)) < 0.02 * np.linalg.norm(gradient)


def test_user_written_derivative_rules_are_called():
    calls = []

    @jax.custom_vjp
    def f(w, x):
        return jnp.sum(x @ w)

    def forward(w, x):
        calls.append("forward")
        return f(w, x), x

    def backward(x, ct):
        calls.append("backward")
        return 7 * ct * (x.T @ jnp.ones((4, 8))), None

    f.defvjp(forward, backward)
    gradient = jax.grad(autocast(f, "mixed_float16"))(W, X)
    assert calls == ["forward", "backward"]
    np.testing.assert_allclose(gradient, np.full((8, 8), 28.0))


def test_the_forward_rule_of_a_custom_vjp_is_planned_for_what_the_call_is_given():
    @jax.custom_vjp
    def fn(h):
        return jnp.tanh(h)

    fn.defvjp(lambda h: (jnp.tanh(h), h), lambda h, g: (g * jnp.cos(h),))
    found = primitives(jax.grad(autocast(lambda w, x: jnp.sum(fn(x @ w)), "mixed_float16")), W, X)
    assert ("tanh", "float16") in found


def test_the_tangents_of_a_custom_jvp_are_as_wide_as_what_the_call_is_given():
    @jax.custom_jvp
    def fn(h):
        return jnp.tanh(h)

    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0] * primals[0]))
    found = primitives(jax.grad(autocast(lambda w, x: jnp.sum(fn(x @ w)), "mixed_float16")), W, X)
    assert ("mul", "float16") in found


@jax.custom_jvp
def with_integers(h, rows):
    return jnp.tanh(h)[rows]


@with_integers.defjvp
def _(primals, tangents):
    h, rows = primals
    return with_integers(h, rows), (2 * tangents[0])[rows]


@jax.custom_jvp
def on_sixteen_bits(h, rows):
    return jnp.where(h > jnp.float16(0), h, h / 2)[rows]


@on_sixteen_bits.defjvp
def _(primals, tangents):
    h, rows = primals
    return on_sixteen_bits(h, rows), jnp.where(h > jnp.float16(0), 2 * tangents[0], tangents[0])[rows]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("rule", [with_integers, on_sixteen_bits])
def test_derivative_rules_are_given_what_they_were_recorded_with(rule, policy):
    """Integers and operands that the user cast keep their dtypes beside operands that autocast cast."""

    def loss(w, x, rows):
        h = x @ w
        h = h.astype(jnp.float16) if rule is on_sixteen_bits else h
        return jnp.sum(rule(h, rows).astype(jnp.float32))

    rows = np.array([3, 0, 0])
    want = 2 * np.repeat((X[0] * np.bincount(rows, minlength=4).sum())[:, None], 8, axis=1)
    np.testing.assert_allclose(jax.jit(jax.grad(autocast(loss, policy)))(W, X, rows), want)


def test_a_rule_that_is_given_a_symbolic_zero_and_has_an_integer_result():
    @jax.custom_jvp
    def scaled(h, scale):
        return scale * h, jnp.argmax(h)

    def rule(primals, tangents) -> Any:
        assert type(tangents[1]) is SymbolicZero
        return scaled(*primals), (primals[1] * tangents[0], np.zeros((), jax.dtypes.float0))

    scaled.defjvp(rule, symbolic_zeros=True)

    def loss(w, x):
        return jnp.sum(scaled(x @ w, jax.lax.stop_gradient(x @ w))[0])

    found = primitives(jax.grad(autocast(loss, "mixed_float16")), W, X)
    assert ("dot_general", "float16") in found


def test_repeated_application_changes_nothing():
    def loss(w, x):
        wide = full_precision(lambda h: jnp.sum(h @ w))
        return wide(jax.nn.gelu(x @ w)) + jnp.mean(jax.nn.softmax(x @ w))

    once = autocast(jax.grad(loss), "mixed_float16")
    assert equations(autocast(once, "mixed_float16"), W, X) == equations(once, W, X)


def test_side_effects_happen_once():
    seen = []

    def f(w, x):
        h = x @ w
        jax.debug.callback(lambda value: seen.append(value.dtype), h)
        return h

    autocast(f, "mixed_float16")(W, X)
    jax.effects_barrier()
    assert seen == [np.float32]


def test_an_exception_leaves_nothing_behind():
    def broken(w, x):
        raise RuntimeError("inside")

    before = str(jax.make_jaxpr(jnp.dot)(X, W))
    with pytest.raises(RuntimeError, match="inside"):
        autocast(broken, "tensorfloat32")(W, X)
    assert str(jax.make_jaxpr(jnp.dot)(X, W)) == before
    assert autocast(lambda w, x: x @ w, "mixed_float16")(W, X)[0, 0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 3}, r"^`fn` must be callable, got 3; pass the function to run"),
        ({"rules": {}}, r"^`rules` must be a Rules, got {}; edit the default"),
        ({"argnums": "w"}, r"^`argnums` must be an integer or a sequence"),
    ],
)
def test_bad_arguments_are_a_sentence(arguments, message):
    call: dict[str, Any] = {"fn": len, "policy": "float32", **arguments}
    with pytest.raises(TypeError, match=message):
        autocast(**call)


@pytest.mark.parametrize("argnums", [2, (0, 2), -3])
def test_argnums_that_name_no_argument_are_a_sentence(argnums):
    with pytest.raises(ValueError, match=r"^`argnums` is .*, but the function was called with 2 positional arguments"):
        autocast(lambda w, x: x @ w, "mixed_float16", argnums=argnums)(W, X)


def test_arguments_by_name_are_no_positional_ones():
    assert jax.eval_shape(autocast(lambda w, x: x @ w, "mixed_float16"), w=W, x=X).dtype == jnp.float32


def test_plans_live_as_long_as_the_programs_that_jax_keeps():
    def plans():
        gc.collect()
        return sum(isinstance(each, Plan) for each in gc.get_objects())

    jax.clear_caches()
    gc.collect()
    gc.freeze()  # the objects of other tests are not searched again
    fn = autocast(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), "mixed_float16")
    try:
        for _ in range(3):
            fn(W, X)
            assert plans() == 1
            jax.clear_caches()
        assert plans() == 0
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_a_function_survives_pickle(policy):
    fn = autocast(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), policy)
    expected = fn(W, X)  # makes a plan
    assert_same_bits(cloudpickle.loads(cloudpickle.dumps(fn))(W, X), expected)


@pytest.mark.parametrize("empty", [np.zeros((0, 4), np.float32), np.zeros((3, 0), np.float32)])
def test_products_with_empty_arrays(empty):
    w = np.ones((empty.shape[1], 5), np.float32)
    for fn in (lambda w: empty @ w, lambda w: jnp.zeros(empty.shape) @ w):
        result = autocast(fn, "mixed_float16")(w)
        np.testing.assert_array_equal(result, np.zeros((len(empty), 5)))
        assert result.dtype == np.float32


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.grad, lambda fn: jax.jit(jax.grad(fn))])
def test_arrays_that_a_function_inside_a_checkpoint_captured(wrap):
    """Captured values are constants of an inner program: JAX arrays, NumPy arrays and tracers of an outer function."""
    kernel, weights = np.full((8, 8), 0.25, np.float32), jnp.asarray(np.full((8, 8), 0.5, np.float32))

    def loss(scale):
        inner = jax.jit(lambda h: (h * scale) @ weights + kernel[0])
        outer = jax.checkpoint(lambda w: jnp.tanh(inner(w @ jnp.asarray(kernel))))
        return jnp.sum(autocast(outer, "mixed_float16")(weights))

    def plain(scale):
        return jnp.sum(jnp.tanh((weights @ kernel * scale) @ weights + kernel[0]))

    scale = np.linspace(0.1, 0.2, 8, dtype=np.float32)
    np.testing.assert_allclose(wrap(loss)(scale), jax.jit(wrap(plain))(scale), rtol=2e-3)


@pytest.mark.parametrize(
    ("policy", "name", "shape", "bound"),
    [
        ("mixed_float16", "temperature", (256, 7, 16), 0.01),
        pytest.param("mixed_bfloat16", "temperature", (256, 7, 16), 0.05, marks=pytest.mark.slow),
        ("mixed_float16", "bias", (32, 64, 16), 1e-3),
        ("mixed_bfloat16", "bias", (32, 64, 16), 5e-3),
    ],
)
def test_a_gradient_outside_of_autocast_sums_biases_and_scales_in_float32(policy, name, shape, bound):
    """In 16 bits the gradient of the temperature is off by 0.1 and 0.7, that of the bias by 0.01 and 0.16."""
    scaled = jax.jit(jax.grad(autocast(lambda *args: 2.0**10 * loss(*args), policy)))
    gradient = jax.jit(jax.grad(lambda *args: loss(*args)))

    def loss(params, x):
        keys = x @ params["kernel"] + params["bias"]
        weights = jax.nn.softmax(x @ jnp.swapaxes(keys, 1, 2) * params["temperature"])
        return -jnp.mean(jax.nn.log_softmax((weights @ keys).mean(1) @ params["out"])[:, 0])

    def error(seed):
        rng = np.random.default_rng(seed)
        shapes = {"kernel": (16, 16), "bias": (16,), "out": (16, 5)}
        params = {key: rng.normal(size=shape, scale=0.25) for key, shape in shapes.items()}
        args = {**params, "temperature": np.float64(1)}, rng.normal(size=shape)
        with jax.enable_x64(True):
            exact = np.asarray(gradient(*args)[name])
        found = np.asarray(scaled(*jax.tree.map(np.float32, args))[name]) / 2**10
        return np.linalg.norm(found - exact) / np.linalg.norm(exact)

    assert np.median(list(map(error, range(5)))) < bound


@pytest.mark.parametrize(
    ("policy", "wrap", "grad"),
    [
        ("mixed_float16", jax.checkpoint, True),  # XLA drops no rounding in float16
        *(("mixed_bfloat16", wrap, grad) for wrap in (lambda fn: fn, jax.checkpoint) for grad in (False, True)),
    ],
)
def test_compiled_probabilities_sum_to_one(policy, wrap, grad):
    """Numerator and denominator must read the same logits; in bfloat16, XLA would drop the rounding of one of them."""
    rng = np.random.default_rng(0)
    shapes = {"x": (256, 32), "w": (32, 64), "v": (64, 21), "b": (21,)}
    x, w, v, b = (rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32) for shape in shapes.values())

    def loss(w, v, b):
        found = wrap(lambda *args: jax.nn.softmax(jnp.tanh(32 * x @ args[0]) @ args[1] + args[2]))(w, v, b)
        return jnp.mean(found[:, 0]), found

    fn = jax.value_and_grad(loss, (0, 1, 2), has_aux=True) if grad else loss
    found = jax.jit(autocast(fn, policy))(w, v, b)
    probabilities = found[0][1] if grad else found[1]
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(("policy", "bound"), [("mixed_float16", 3e-3), ("mixed_bfloat16", 2e-2)])
def test_a_gradient_outside_of_autocast_adds_the_cotangents_of_a_softmax_in_float32(policy, bound):
    """Cotangents of numerator and denominator cancel; if they are rounded first, gradients are off by 0.01 and 0.09."""
    bins = np.linspace(288.0, 308.0, 21, dtype=np.float32)  # kelvin

    def loss(params, x, y):
        hidden = jnp.tanh(x @ params["first"])
        expected = jnp.sum(jax.nn.softmax(hidden @ params["last"] + params["bias"]) * bins, -1)
        return jnp.mean((expected - y) ** 2)

    rng = np.random.default_rng(0)
    shapes = {"first": (32, 64), "last": (64, 21), "bias": (21,)}
    params = {key: rng.normal(size=shape, scale=0.15) for key, shape in shapes.items()}
    args = params, rng.normal(size=(256, 32)), 298 + 2 * rng.normal(size=256)
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(*args))
    scaled = jax.jit(jax.grad(autocast(lambda *args: 2.0**10 * loss(*args), policy)))
    found = scaled(*jax.tree.map(np.float32, args))
    for name, wanted in exact.items():
        assert np.linalg.norm(np.asarray(found[name]) / 2**10 - wanted) < bound * np.linalg.norm(wanted), name
