"""`find_overflow` on planted faults, and on programs with infinities that the user intends."""

import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import overflow_faults
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.ref import addupdate
from overflow_faults import F16, F32, FAULTS, W, X

import jmp_train as jmp
from jmp_train._diagnostics.interpreter import Loop, Value
from jmp_train._diagnostics.overflow._find_overflow import _range
from jmp_train._diagnostics.overflow._source_lines import _PYTHON, _is_library
from jmp_train._diagnostics.overflow._taint import Tag, Taint, TaintTracker, _by_element, _earliest, makes_nan
from jmp_train.diagnostics import ArrayRange, Found, Verdict, find_overflow

SOURCE = Path(overflow_faults.__file__).read_text().splitlines()


def line_of(mark):
    (line,) = (number for number, text in enumerate(SOURCE, 1) if re.search(rf"# .*\bhere {mark}\b", text))
    return line


@functools.cache
def found(name):
    """The report of a planted fault."""
    (fault,) = (fault for fault in FAULTS if fault.make.__name__ == name)
    fn, args, kwargs = fault.make()
    return find_overflow(fn)(*args, **kwargs)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.make.__name__)
def test_the_planted_line_is_named(fault):
    report = found(fault.make.__name__)
    assert report and report.file == overflow_faults.__file__
    assert (report.line, report.text) == (line_of(fault.mark), SOURCE[line_of(fault.mark) - 1].strip())
    assert (report.primitive, report.verdict) == (fault.primitive, fault.verdict)
    assert report.backward == fault.backward
    assert tuple(loop[:2] for loop in report.loops) == fault.loops
    assert fault.cure in report.cure
    assert report.reached and any(x.infs or x.nans for x in report.results)
    if report.verdict is not Verdict.INPUT and report.primitive != "sub":
        assert not any(x.infs or x.nans for x in report.operands)
    json.dumps(report.as_dict(), allow_nan=False)


@pytest.mark.parametrize("by_autocast", [True, False])
def test_operands_that_were_rounded_before(by_autocast):
    def fn(x, keep):
        return jnp.log(jnp.where(keep, x @ x @ x, 1).astype(F32))

    x, keep = np.full((8, 8), 1e-6, F32 if by_autocast else F16), np.eye(8, dtype=bool)
    report = find_overflow(jmp.autocast(fn, "mixed_float16") if by_autocast else fn)(x, keep)
    assert (report.primitive, report.verdict) == ("log", Verdict.KEEP_FLOAT32)
    assert report.why.startswith("Its operands were rounded in 16 bits before, to zero or too far;")
    if by_autocast:
        assert report.cure.startswith("Put `with jax.named_scope('wide'):` around ")
    else:
        assert report.cure.startswith("The program itself computes this in 16 bits:")


IN_FLOAT32_TOO = {
    "log": (lambda x: jnp.log(x - 1), "the logarithm of zero", "jnp.maximum"),
    "log1p": (lambda x: jnp.log1p(x - 2), "the logarithm of zero", "keep its operand above -1"),
    "div": (lambda x: 1 / (x - 1), "a division by zero", "jnp.where(d == 0, 1, d)"),
    "rem": (lambda x: lax.rem(x, x - 1), "a remainder by zero", "jnp.where(d == 0, 1, d)"),
    "sqrt": (lambda x: jnp.sqrt(x - 2), "the root of a negative number", "jnp.maximum(x, 0)"),
    "rsqrt": (lambda x: lax.rsqrt(x - 1), "the reciprocal root of zero", "add an epsilon inside the root"),
    "pow": (lambda x: (x - 2) ** (x / 2), "a power of zero or of a negative number", "keep the base positive"),
    "integer_pow": (lambda x: (x - 1) ** -2, "a negative power of zero", "keep the base away from zero"),
    "exp": (lambda x: jnp.exp(x * 100), "the exponential of a number that is too large", "subtract the maximum first"),
    "atanh": (jnp.arctanh, "the inverse hyperbolic tangent of 1", "keep its operand inside (-1, 1)"),
}


@pytest.mark.parametrize("fn", [lambda x: lax.rsqrt(x), lambda x: 1 / x, lambda x: jnp.log(x)])
def test_a_constant_that_is_zero_in_float16(fn):
    report = find_overflow(lambda x: fn(x.astype(F16)))(jnp.float32(0))
    assert report.verdict is Verdict.MODEL and "(a constant of 3e-08 or less is zero in float16)" in report.cure


@pytest.mark.parametrize("primitive", IN_FLOAT32_TOO)
def test_what_is_the_models_own(primitive):
    fn, why, cure = IN_FLOAT32_TOO[primitive]
    report = find_overflow(fn)(np.float32(1))
    assert (report.primitive, report.verdict) == (primitive, Verdict.MODEL)
    assert why in report.why and cure in report.cure


# Scales that fit


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("scale_too_large", 2.0**15),
        ("scale_too_large_for_a_deep_layer", None),
        ("scan_backward", 8.0),
        ("scaled_loss_beyond_float32", None),
    ],
)
def test_the_scale_that_fits_is_the_largest(name, fits):
    (fault,) = (fault for fault in FAULTS if fault.make.__name__ == name)
    fn, args, kwargs = fault.make()
    report = found(name)
    scale = report.fitting_loss_scale or 0.0
    assert report.loss_scale == float(kwargs["loss_scale"].loss_scale)
    assert scale == 2.0 ** round(np.log2(scale)) and fits in (None, scale)
    for tried, expected in ((scale, True), (2 * scale, False)):
        results = jax.tree.leaves(fn(*args, loss_scale=jmp.StaticLossScale(tried)))
        assert all(np.isfinite(leaf).all() for leaf in results) == expected


def test_a_scale_in_a_closure_is_seen():
    def fn(w):
        return jmp.grad(lambda w: jnp.sum(X @ w), "mixed_float16")(w, loss_scale=jmp.StaticLossScale(2.0**17))

    report = find_overflow(fn)(W)
    assert (report.verdict, report.loss_scale, report.fitting_loss_scale) == (Verdict.LOWER_SCALE, 2.0**17, 2.0**15)


def multiply(x, scale):
    """Has the name of the function that multiplies by a loss scale."""
    return x * scale


def test_a_product_by_the_user_is_no_loss_scale():
    report = find_overflow(multiply)(np.float32(1e38), np.float32(10))
    assert (report.primitive, report.verdict, report.loss_scale) == ("mul", Verdict.MODEL, None)


def test_a_fault_that_no_scale_cures_is_the_models():
    def loss(w):
        return jnp.sum(jnp.sqrt(X @ w))

    fn = jmp.grad(loss, "mixed_float16")
    report = find_overflow(fn)(0 * W, loss_scale=jmp.StaticLossScale(2.0**10))
    assert report.verdict is Verdict.MODEL and report.why.endswith("No loss scale cures it.")
    assert report.fitting_loss_scale is None


# Cures that are pasted


def with_rules(rules):
    def loss(w, x):
        with jax.named_scope("Head"):
            y = x @ w
        with jax.named_scope("wide"):
            z = jnp.exp(y / 6000) @ w
        return jnp.mean(jnp.abs(y)) * 1e-6 + jnp.mean(z) * 1e-20

    fn = jmp.value_and_grad(loss, "mixed_float16", rules=rules)
    return find_overflow(fn)(200 * W, 200 * X, loss_scale=jmp.StaticLossScale(1.0))


def test_the_pasted_rules_cure():
    rules, scopes = jmp.DEFAULT_RULES, []
    for _ in range(4):
        report = with_rules(rules)
        if not report:
            break
        assert report.verdict is Verdict.KEEP_FLOAT32
        pasted = re.search(r"rules=(jmp\.DEFAULT_RULES\.with_scopes\(\{.*?\}\))", report.cure)
        assert pasted
        scopes.append(report.scope)
        rules = jmp.DEFAULT_RULES.with_scopes(dict(rules.scopes) | dict(eval(pasted[1]).scopes))
    assert scopes == ["Head", "wide"]
    assert not with_rules(rules)


def test_a_scope_with_others_inside_is_not_widened_whole():
    def loss(w, x):
        with jax.named_scope("Model"):
            with jax.named_scope("First"):
                h = jnp.tanh(x @ w)
            return jnp.mean((200 * w) @ (100 * h.T)) * 1e-6

    report = find_overflow(jmp.value_and_grad(loss, "mixed_float16"))(10 * W, X, loss_scale=jmp.NoOpLossScale())
    assert report.scope == "Model" and "jax.named_scope('wide')" in report.cure


# Infinities that the user intends


def attention(q, mask):
    scores = jnp.where(mask, q @ q.T, -jnp.inf)
    return jnp.sum(jax.nn.softmax(scores) @ q)


CAUSAL = np.tril(np.ones((2, 2), bool))
NARROW_DOTS = jmp.DEFAULT_RULES.replace({"dot_general": "low"})
INNOCENT = {
    "mask of a softmax": (jax.value_and_grad(attention), (X, CAUSAL)),
    "the same under autocast": (jmp.autocast(jax.grad(attention), "mixed_float16", rules=NARROW_DOTS), (X, CAUSAL)),
    "additive mask, an argument": (
        jax.grad(lambda q, m: jnp.sum(jax.nn.softmax(q @ q.T + m) ** 2)),
        (X, np.where(CAUSAL, 0, -np.inf).astype(np.float32)),
    ),
    "a branch not selected": (lambda x: jnp.where(x > 0, jnp.log(x), 0.0), (X - 0.5,)),
    "the double where": (jax.grad(lambda x: jnp.sum(jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1)), 0))), (X - 0.5,)),
    "max over nothing": (lambda x: jnp.max(x, initial=-jnp.inf, where=x > 1), (X,)),
    "pooling": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"), (X,)),
    "running maximum": (
        lambda x: lax.scan(lambda c, row: (jnp.maximum(c, row), None), jnp.full(8, -jnp.inf), x)[0],
        (X,),
    ),
    "infinity compared with": (lambda x: jnp.where(x < jnp.inf, x, 0.0), (X,)),
    "logsumexp of a mask": (lambda x: jax.nn.logsumexp(jnp.where(x > 1, x, -jnp.inf), axis=1), (X,)),
    "a mask handed through": (lambda x, m: (x + 1, m), (X, np.full(3, -np.inf, np.float32))),
    "an infinity handed through": (lambda x, m: (x + 1, m), (X, np.full(3, np.inf, np.float32))),
    "a check inside of JAX": (lambda x: jnp.exp(jax.nn.logsumexp(jnp.log(0 * x), axis=1)), (X,)),
    "a mask written out": (lambda x: jnp.where(x > 1, x, -jnp.inf), (X,)),
    "a division masked by a product with a boolean": (lambda x: jnp.where(x == 0, 0, 1 / x).sum(), (X - 0.5,)),
    "an exponential that saturates": (lambda x: jnp.tanh(jnp.exp(x)), (100 * X,)),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_intended_infinities_are_not_blamed(name):
    fn, args = INNOCENT[name]
    report = find_overflow(fn)(*args)
    assert not report, report
    assert re.match(r"No operation of \d+ is to blame for an infinity or NaN\.(\n|$)", str(report))


def test_the_culprit_is_what_reaches_the_result():
    def loss(x):
        masked = jnp.where(x > 0, jnp.log(x), 0.0)
        saturated = jnp.tanh(jnp.exp(200 * x))
        return jnp.sum(masked + saturated) / jnp.sum(0 * x)

    assert find_overflow(loss)(X - 0.5).primitive == "div"


def test_values_are_followed_element_by_element():
    def selected(x):
        log, root = jnp.log(x), jnp.sqrt(x - 1)
        return jnp.where(x >= 0, root, log)

    def divided(x):
        log, power = jnp.log(x), jnp.exp(1000 * x)
        return power / log

    # log(0) is the first infinity, but it is not selected, and a division by it gives zero.
    x = np.array([0.0, 2.0], np.float32)
    assert find_overflow(selected)(x).primitive == "sqrt"
    assert find_overflow(divided)(x).primitive == "exp"


def test_what_was_masked_away_is_forgotten():
    def fn(x):
        log = jnp.where(x > 0, jnp.log(x), 0.0)  # its infinity ends here
        return lax.reduce_window(log, -jnp.inf, lax.max, (1, 2), (1, 2), "SAME") + jnp.exp(200 * log)

    assert find_overflow(fn)(np.array([[0.0, 2.0]], np.float32)).primitive == "exp"


def test_a_finite_result_beside_a_bad_one_remembers_nothing():
    def both(a, b):
        return [a[0] + b[0], a[1] + b[1]]

    def fn(x):
        def body(carry, row):
            zero = np.float32(0)
            _, other = lax.reduce((jnp.log(row), jnp.exp(100 * row)), (zero, zero), both, (0,))
            return carry, other

        return lax.scan(body, 0, x)[1]

    # The log of the first row is infinite but not used; the exp of the second row is returned.
    report = find_overflow(fn)(np.array([[0.0], [1.0]], np.float32))
    assert (report.primitive, report.loops[0].iteration) == ("exp", 1)


def test_a_cast_that_autocast_made_is_no_cast_of_the_users():
    def loss(w, x):
        return jnp.mean(jnp.exp(x @ w) @ w) * 1e-6

    def by_hand(w, x):
        return loss(w.astype(F16), x.astype(F16)).astype(F32)

    autocast = find_overflow(jmp.value_and_grad(loss, "mixed_float16"))(W, 6 * X, loss_scale=jmp.NoOpLossScale())
    assert autocast.verdict is Verdict.KEEP_FLOAT32 and "DEFAULT_RULES" in autocast.cure
    users = find_overflow(jmp.value_and_grad(by_hand, "mixed_float16"))(W, 6 * X, loss_scale=jmp.NoOpLossScale())
    assert users.verdict is Verdict.KEEP_FLOAT32 and ".astype(jnp.float32)" in users.cure


def narrowed_in_a_loop(w, x):
    rows = lax.scan(lambda carry, row: (carry, row.astype(F16)), 0, 1e3 * x)[1]
    return rows * rows


def narrow_from_the_start(w, x):
    return jnp.square(lax.iota(F16, 300))


def widened_again(w, x):
    return (200 * x).astype(F16).astype(F32) @ (200 * w)


@pytest.mark.parametrize(
    ("fn", "cure"),
    [
        (narrowed_in_a_loop, "The program itself computes this in 16 bits"),
        (narrow_from_the_start, "The program itself computes this in 16 bits"),
        (widened_again, "Put `with jax.named_scope('wide'):` around"),
    ],
)
def test_whose_16_bits_they_are(fn, cure):
    report = find_overflow(jmp.autocast(fn, "mixed_float16"))(W, X)
    assert report.verdict is Verdict.KEEP_FLOAT32 and report.cure.startswith(cure)


@pytest.mark.parametrize(
    ("fn", "verdict", "why"),
    [
        (lambda x: x.at[np.zeros(3, int)].add(x), Verdict.KEEP_FLOAT32, "float32 reaches 1.6e+05."),
        (
            lambda x: lax.reduce(x, np.float16(0), lambda a, b: a + b + 1, (0,)),
            Verdict.UNKNOWN,
            "reduce was written for float16 and cannot be run in float32, to compare.",
        ),
    ],
)
def test_whether_an_operation_runs_in_float32(fn, verdict, why):
    report = find_overflow(fn)(np.full(3, 4e4, F16))
    assert report.verdict is verdict and report.why.endswith(why)


@pytest.mark.parametrize("branches", [(lambda y: y, jnp.sin), (jnp.sin, lambda y: y)], ids=["fewer", "more"])
@pytest.mark.parametrize(
    "end",
    [lambda y, rows: lax.scan(lambda carry, row: (carry / row, None), y, rows)[0], lambda y, rows: y / rows[1]],
    ids=["in a loop", "outside"],
)
def test_a_run_in_float32_may_take_another_branch(end, branches):
    """In that run the equation at the same position is another one, in another iteration, or missing."""

    def fn(x, rows):
        y = x.astype(F16)
        y = lax.cond(y == 0, *branches, y)  # zero in 16 bits only
        return end(y + F16(1), rows)

    report = find_overflow(fn)(np.float32(1e-9), np.array([1, 0], F16))
    assert (report.primitive, report.verdict) == ("div", Verdict.MODEL)


def test_a_cast_that_jax_made_is_not_to_be_left_out():
    report = find_overflow(jnp.sum)(np.full(4, 4e4, F16))  # sums in float32, and casts the sum back
    assert (report.primitive, report.verdict) == ("convert_element_type", Verdict.KEEP_FLOAT32)
    assert "Leave out this cast" not in report.cure and ".astype(jnp.float32)" in report.cure


def scanned(x):
    last, carries = lax.scan(lambda carry, _: (jnp.log(carry), carry), x, None, length=3)
    return jnp.sum(carries), last


def repeated(x):
    steps, last = lax.while_loop(lambda c: c[1] > -jnp.inf, lambda c: (c[0] + 1, jnp.log(c[1])), (0.0, x))
    return steps, last


@pytest.mark.parametrize("forward", [scanned, repeated])
def test_what_a_loop_carries_is_no_derivative(forward):
    fn = jax.custom_vjp(lambda x: forward(x)[0])
    fn.defvjp(forward, lambda last, ct: (ct * last,))  # only the backward pass reads the last carry
    report = find_overflow(jax.value_and_grad(fn))(np.float32(1))
    assert (report.primitive, report.backward, report.loops[0].iteration) == ("log", False, 1)


def test_an_operation_is_blamed_before_a_mask_it_meets_later():
    def fn(x, mask):
        return jax.nn.softmax(x + mask, axis=1) * 0 + jnp.log(x - x)

    mask = np.array([[0.0, -np.inf] * 4, [-np.inf] * 8], np.float32)
    assert find_overflow(fn)(X, mask).primitive == "log"


def test_data_is_blamed_where_its_infinities_become_nan():
    bad = X.copy()
    bad[0, 0] = np.inf
    report = find_overflow(lambda x: jnp.sum(jnp.tanh(x) + (2 * x - x)))(bad)
    assert (report.verdict, report.primitive) == (Verdict.INPUT, "sub")


def test_a_mask_is_to_blame_where_it_makes_nan():
    def fn(q, mask):
        return jax.nn.softmax(q @ q.T + mask)

    mask = np.array([[0.0, 0.0], [-np.inf, -np.inf]], np.float32)
    report = find_overflow(fn)(X, mask)
    assert (report.verdict, report.primitive, report.why) == (
        Verdict.INPUT, "sub", "The argument '1' holds infinities or NaN.",
    )  # fmt: skip
    # An operation that itself overflows is reported before a mask.
    real = find_overflow(lambda q, mask: fn((q * 1e3).astype(F16), mask.astype(F16)))(X, mask)
    assert (real.verdict, real.primitive) == (Verdict.KEEP_FLOAT32, "dot_general")


def test_a_mask_is_to_blame_where_a_product_makes_nan_of_it():
    report = find_overflow(lambda x, mask: jnp.tanh(x @ mask))(0 * X, np.full((8, 2), -np.inf, np.float32))
    assert (report.verdict, report.primitive) == (Verdict.INPUT, "dot_general")


@pytest.mark.parametrize("log", [jnp.log, jnp.log2])
def test_a_pole_beside_an_infinity_of_the_program(log):
    report = find_overflow(lambda x: log(jnp.where(x > 5, jnp.inf, x)))(np.array([0, 6], np.float32))
    assert report.primitive in ("log", "log2")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_data_is_named_by_its_path(value):
    batch = {"image": X.copy(), "label": X}
    batch["image"][0, 1] = value
    report = find_overflow(jax.grad(lambda w, batch: jnp.mean((batch["image"] @ w - batch["label"]) ** 2)))(W, batch)
    assert report.verdict is Verdict.INPUT and "'1/image'" in report.why and report.primitive == "dot_general"


NAN_IN_ROW_1 = np.where(np.arange(2)[:, None] == 1, np.nan, X).astype(np.float32)
ROW_BY_ROW = {
    "scan": lambda w, x: lax.scan(lambda total, row: (total + (row @ w).sum(), None), 0.0, x)[0],
    "map": lambda w, x: lax.map(lambda row: (row @ w).sum(), x),
    "loop": lambda w, x: lax.fori_loop(0, 2, lambda i, total: total + (x[i] @ w).sum(), 0.0),
    "gradient": jax.grad(lambda w, x: lax.scan(lambda total, row: (total + (row @ w).sum(), None), 0.0, x)[0]),
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_bad_data_is_named_in_the_iteration_that_reads_it(name):
    report = find_overflow(ROW_BY_ROW[name])(W, NAN_IN_ROW_1)
    assert (report.verdict, report.loops[0].iteration) == (Verdict.INPUT, 1)
    assert report.operands[0].nans == 8 or report.backward


def test_bad_data_is_named_where_it_is_computed_with():
    """Not at an operation that tests, moves or casts it, or whose result does not reach the result of the program."""

    def loss(w, x):
        largest = jnp.max(x) > 9.0
        is_bad = jnp.isnan(x).any() + jnp.argsort(x[:, 0])[0]
        rows = x.astype(F16).T.T.astype(F32)
        y = rows @ w
        return y.sum() + 0.0 * largest + 0 * is_bad

    report = find_overflow(loss)(W, NAN_IN_ROW_1)
    assert (report.verdict, report.primitive, report.text) == (Verdict.INPUT, "dot_general", "y = rows @ w")
    masked = find_overflow(lambda x: jnp.where(CAUSAL, 0.0, -jnp.inf) + x @ W[:, :2])(NAN_IN_ROW_1)
    assert (masked.verdict, masked.primitive) == (Verdict.INPUT, "dot_general")  # the mask is made before
    moved = find_overflow(lambda x: x.T)(NAN_IN_ROW_1)
    assert (moved.verdict, moved.primitive) == (Verdict.INPUT, "transpose")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, lambda fn: functools.partial(fn)], ids=["", "jit", "partial"])
def test_a_captured_array_is_named(value, wrap):
    data = jnp.asarray(np.where(X == X[0, 1], value, X), F32)
    report = find_overflow(jax.value_and_grad(wrap(lambda w: jnp.mean(jnp.tanh(data @ w) ** 2))))(W)
    assert (report.verdict, report.primitive) == (Verdict.INPUT, "dot_general")
    assert report.why == "An array float32[2, 8] that the function captures holds infinities or NaN."
    both = find_overflow(lambda x: jnp.sum(data) + jnp.sum(x))(NAN_IN_ROW_1)
    assert both.why == "The argument '0' and an array float32[2, 8] that the function captures hold infinities or NaN."


def test_what_is_finite_beside_bad_data_overflows_itself():
    """If an array is passed row by row, each row is examined by itself."""

    def total(x):
        return lax.scan(lambda low, row: (jnp.minimum(low, row @ jnp.ones(2, x.dtype)), None), x[0, 0], x)[0]

    x = np.array([[-np.inf, 0], [-4e4, -4e4]], F16)
    for fn in (total, jmp.autocast(total, "mixed_float16")):
        report = find_overflow(fn)(x)
        assert (report.primitive, report.verdict, report.loops[0].iteration) == ("dot_general", Verdict.KEEP_FLOAT32, 1)
        assert report.cure.startswith("The program itself computes this in 16 bits")


def test_what_is_selected_counts_before_what_was_tested():
    mask = jnp.where(X > 1, 0, -jnp.inf)
    report = find_overflow(lambda y, x: jnp.where(jnp.isnan(x), jnp.log(0 * y), y))(X, NAN_IN_ROW_1)
    assert (report.primitive, report.verdict) == ("log", Verdict.MODEL)
    both = find_overflow(lambda y, x: jnp.log(0 * y) + x)(X, NAN_IN_ROW_1)
    assert (both.primitive, both.verdict) == ("add", Verdict.INPUT)
    assert not find_overflow(lambda mask: 2 * mask)(mask).reached  # nor does the program write what it is given


def test_a_captured_mask_is_none():
    mask = jnp.where(CAUSAL, 0, -jnp.inf)
    assert not find_overflow(jax.grad(lambda q: jnp.sum(jax.nn.softmax(q @ q.T + mask) ** 2)))(X)


# Calls of every kind


def step_of(scale, loss_fn):
    tx = jmp.with_loss_scale(optax.sgd(0.1), scale)
    grad_fn = jmp.value_and_grad(loss_fn, "mixed_float16")

    def step(params, opt_state, x):
        loss, grads = grad_fn(params, x, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step, tx


def test_a_state_that_starts_at_infinity_hides_no_fault():
    """For example the lowest loss so far: the step returns it unchanged, or in part."""
    tx = optax.chain(optax.sgd(1e-3), optax.contrib.reduce_on_plateau())

    def step(w, state, x):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        updates, state = tx.update(grads, state, w, value=loss)
        return optax.apply_updates(w, updates), state, loss

    healthy, faulty = (find_overflow(step)(W, tx.init(W), X * size) for size in (1, 1e30))
    assert not healthy and not healthy.reached
    assert (faulty.primitive, faulty.text) == (
        "integer_pow",
        "loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)",
    )
    assert faulty.verdict is Verdict.MODEL and "1/1/best_value" not in faulty.reached

    def of_tasks(best, x):
        return best.at[0].min(jnp.sum(x)), jnp.log(x - x)

    assert find_overflow(of_tasks)(jnp.full(3, jnp.inf), X).primitive == "log"
    # Without another cause, such an argument is reported.
    assert find_overflow(lambda best: best.at[0].set(1.0))(jnp.full(3, jnp.inf)).verdict is Verdict.INPUT


@pytest.mark.parametrize(("scale", "verdict"), [(2.0**24, Verdict.LOWER_SCALE), (2.0**10, Verdict.INPUT)])
def test_a_state_with_nan_hides_no_overflow_of_a_step_that_skips(scale, verdict):
    train, tx = step_of(jmp.DynamicLossScale(scale), lambda w, x: jnp.mean(x @ w))

    def step(w, opt_state, last, x):
        return train(w, opt_state, x), jnp.where(jnp.sum(x) > 1e9, 0.0, last)

    assert find_overflow(step)(W, tx.init(W), jnp.full(2, jnp.nan), X).verdict is verdict


def test_nan_that_is_written_in_the_program():
    report = find_overflow(lambda x: {"mean": jnp.where(x > 0, jnp.nan, x), "x": x + 1})(X)
    assert not report and report.reached == ("mean",) and report.written == "NaN"
    first, second, text = str(report).splitlines()
    assert first.startswith("No operation of ")
    assert second == f"The NaN of mean is written in the program, at {__file__}:{report.line} ({report.function})."
    assert text.strip() == report.text and "jnp.nan, x)" in text
    assert find_overflow(lambda x: jnp.where(x > 0, jnp.nan, x))(X).reached == ("the result",)


def test_an_infinite_loss_of_an_infinity_in_the_program():
    """The label's logit is masked: the loss is infinite, its gradients are finite."""

    def loss(w, x, y):
        logits = jnp.where(jnp.arange(8) < 7, x @ w, -jnp.inf)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    report = find_overflow(jax.value_and_grad(loss))(W, X, jnp.array([0, 7]))
    assert not report and (report.written, report.reached) == ("infinity", ("0",))
    assert report.text == "logits = jnp.where(jnp.arange(8) < 7, x @ w, -jnp.inf)" and report.verdict is None
    # A literal that one line writes and another moves belongs to the line that writes it.
    moved = find_overflow(lambda x: jnp.where(x > 1, jnp.full((8, 2), jnp.inf).T.reshape(x.shape), x))(X)
    assert moved.primitive is None and "jnp.full((8, 2), jnp.inf)" in moved.text


@pytest.mark.parametrize(
    "fn, x, verdict, primitive",
    [
        (jnp.median, np.where(X == X[1, 3], np.nan, X), Verdict.INPUT, "select_n"),
        (lambda x: jnp.quantile(jnp.log(x), 0.3), -X, Verdict.MODEL, "log"),
        (
            lambda x: jnp.where(jnp.isnan(x).any(), jnp.nan, 0 * x),
            np.where(X > 1, np.nan, X),
            Verdict.INPUT,
            "select_n",
        ),
    ],
)
def test_what_was_tested_is_to_blame_for_a_nan_of_the_program(fn, x, verdict, primitive):
    report = find_overflow(fn)(x.astype(np.float32))
    assert (report.verdict, report.primitive) == (verdict, primitive)


def test_a_test_of_what_is_finite_blames_nothing():
    report = find_overflow(lambda x: jnp.var(x, axis=0, ddof=1))(X[:1])
    assert not report and report.written == "NaN" and "jnp.var(x, axis=0, ddof=1)" in report.text


def test_a_gradient_that_the_dtype_of_its_parameter_cannot_hold():
    """No region cures it, because the gradient has the parameter's dtype; a parameter in float32 does."""

    def gradient(w, x):
        return jmp.autocast(jax.grad(lambda w: jnp.sum((x @ w) * 300)), "mixed_float16")(w)

    x, w = jnp.full((1000, 8), 3.0), jnp.ones(8)
    # What "a" cannot hold either has another origin.
    narrow = find_overflow(lambda w: {"w": gradient(w, x), "a": 6e4 * w + 6e4 * w})(w.astype(F16))
    assert narrow.verdict is Verdict.KEEP_FLOAT32 and narrow.why.endswith(
        "Besides, 'w' itself is too large for the 16 bits that the program returns it in."
    )
    assert narrow.cure.endswith(" Have 'w' in float32 first: a gradient has the dtype that its parameter is stored in.")
    assert " Besides, the result itself is too large" in find_overflow(lambda w: gradient(w, x))(w.astype(F16)).why
    assert not find_overflow(gradient)(w, x)
    # Nothing is reported if 16 bits can hold the result.
    small = find_overflow(jax.grad(lambda w: jnp.sum((x @ (w * F16(1 / 300))) * F32(300))))(w.astype(F16))
    assert small.backward and "Besides" not in small.why


def test_a_step_at_the_minimum():
    def loss_fn(w, x):
        return jnp.sum(jnp.sqrt(x @ w))

    step, tx = step_of(jmp.DynamicLossScale(2.0), loss_fn)
    params = 0 * W
    args = params, tx.init(params), X
    _, opt_state, _ = jax.jit(step)(*args)
    assert jmp.step_metrics(opt_state)["status"] == jmp.ScaleStatus.AT_MINIMUM
    report = find_overflow(jax.jit(step, donate_argnums=(0, 1)))(*args)
    assert (report.verdict, report.reached) == (Verdict.MODEL, ("the check of the gradients",))
    assert report.text == "return jnp.sum(jnp.sqrt(x @ w))" and report.backward
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))


def test_arguments_that_are_no_arrays():
    def fn(x, *, train, name):
        assert name == "log" and train is True
        return {"y": getattr(jnp, name)(x), "name": name}

    report = find_overflow(fn)(X - 0.5, train=True, name="log")
    assert report.primitive == "log" and report.reached == ("y",)


def test_a_function_that_is_applied_to_elements_cannot_be_run_in_float32():
    def fn(x):
        return x.astype(jnp.float16).at[0].apply(lambda y: y * 1000.0) - 1

    found = find_overflow(fn)(jnp.full(3, 100.0))
    assert found.primitive == "scatter" and found.verdict is Verdict.UNKNOWN
    assert "scatter was written for float16" in found.why


def test_what_a_reference_holds_is_seen_when_it_is_read():
    def fn(x):
        ref = jax.new_ref(np.zeros(3, np.float32))
        ref[...] = x
        return ref[...] / x

    assert not find_overflow(fn)(np.ones(3, np.float32))
    assert find_overflow(fn)(np.zeros(3, np.float32)).primitive == "div"


def infinite(x):
    return (x * 1e5).astype(jnp.float16)


def stored(x):
    ref = jax.new_ref(jnp.zeros(3, jnp.float16))
    ref[...] = infinite(x)
    return ref[...] + 1


def overwritten(x):
    ref = jax.new_ref(jnp.exp(200 * x))
    ref[...] = x
    ref[0] = jnp.log(ref[0] - 1)
    return ref[...]


def grown(x):
    ref = jax.new_ref(x.astype(jnp.float16) * 3e4)

    def double(_, carry):
        ref[...] *= 2
        return carry

    return jax.lax.fori_loop(0, 3, double, 0), ref[...]


def added(x):
    ref = jax.new_ref(x.astype(jnp.float16) * 6e4)
    addupdate(ref, ..., ref[...])
    return ref[...]


def added_to_infinity(x):
    ref = jax.new_ref(x * 3e38)
    addupdate(ref, ..., ref[...])
    return ref[...]


@pytest.mark.parametrize(
    ("fn", "primitive", "text", "verdict"),
    [
        (stored, "convert_element_type", "return (x * 1e5).astype(jnp.float16)", Verdict.KEEP_FLOAT32),
        (overwritten, "log", "ref[0] = jnp.log(ref[0] - 1)", Verdict.MODEL),
        (grown, "mul", "ref[...] *= 2", Verdict.KEEP_FLOAT32),
        (added, "addupdate", "addupdate(ref, ..., ref[...])", Verdict.KEEP_FLOAT32),
        (added_to_infinity, "addupdate", "addupdate(ref, ..., ref[...])", Verdict.MODEL),
    ],
)
def test_what_is_written_to_a_reference_is_blamed_not_its_reader(fn, primitive, text, verdict):
    report = find_overflow(fn)(np.ones(3, np.float32))
    assert (report.primitive, report.text, report.verdict) == (primitive, text, verdict)


def test_references_from_outside_stay_as_they_are():
    def fn(ref):
        ref[...] *= 2
        captured[...] *= ref[...]
        return captured[...]

    given, captured = jax.new_ref(jnp.full(3, 1e3, jnp.float16)), jax.new_ref(jnp.full(3, 1e3, jnp.float16))
    report = find_overflow(fn)(given)
    assert (report.text, report.verdict) == ("captured[...] *= ref[...]", Verdict.KEEP_FLOAT32)
    assert given[0] == captured[0] == 1e3


def test_the_forward_pass_of_a_gradient_whose_loss_nobody_reads():
    def loss(w, x):
        return jnp.mean((jax.nn.relu(jax.nn.relu(x @ w) @ (1e5 * w)) * 1e-6) @ w)

    for transform in (jax.grad, jax.value_and_grad):
        report = find_overflow(jmp.autocast(transform(loss), "mixed_float16"))(np.ones_like(W), np.ones_like(X))
        assert (report.backward, report.verdict) == (False, Verdict.KEEP_FLOAT32)


@pytest.mark.parametrize("scope", ["block[1]", "encoder/layer_0", 'the "first"', "été"])
def test_the_cure_can_be_pasted(scope):
    def loss(w, x):
        with jax.named_scope(scope):
            h = jax.nn.relu((1e3 * x) @ (1e2 * w)) @ w
        return jnp.mean(h)

    args = np.ones_like(W), np.ones_like(X)
    report = find_overflow(jmp.autocast(jax.value_and_grad(loss), "mixed_float16"))(*args)
    assert report.scope == scope
    pasted = eval(report.cure.removeprefix("Pass rules=").partition(";")[0])
    assert not find_overflow(jmp.autocast(jax.value_and_grad(loss), "mixed_float16", rules=pasted))(*args)


@pytest.mark.parametrize("scope", [".", " dense", "dense", "", "bell\x07"])
def test_a_scope_that_no_glob_names_alone(scope):
    def loss(w, x):
        with jax.named_scope(scope):
            h = jax.nn.relu((1e3 * x) @ (1e2 * w)) @ w
        with jax.named_scope("block"), jax.named_scope("dense"):
            return jnp.mean(h)

    report = find_overflow(jmp.autocast(loss, "mixed_float16"))(np.ones_like(W), np.ones_like(X))
    assert report.cure.startswith("Put `with jax.named_scope('wide'):` around ")
    assert 'DEFAULT_RULES.with_scopes({"wide": "float32"})' in report.cure


def masked(x):
    log = jnp.log(x)
    return jnp.sum(jnp.where(jnp.isfinite(log), log, 0))


@pytest.mark.parametrize("is_finite", [jnp.isfinite, lax.is_finite])
def test_a_check_by_the_user_is_one_of_gradients(is_finite):
    def step(x):
        y = jnp.exp(200 * x)
        return jnp.where(jnp.all(is_finite(y)), y, x)

    report = find_overflow(step)(X)
    assert (report.primitive, report.reached) == ("exp", ("the check of the gradients",))


def test_a_mask_of_what_is_finite_is_no_check_of_gradients():
    assert not find_overflow(masked)(jnp.array([1.0, 0.0]))
    report = find_overflow(lambda x: (masked(x), jnp.exp(1000 * x)))(jnp.array([1.0, 0.0]))
    assert (report.primitive, report.reached) == ("exp", ("1",))

    def checked(x):
        root = jnp.sqrt(x - 1)
        return jnp.where(jnp.isfinite(root).all(), x, 0)

    assert find_overflow(checked)(jnp.zeros(2)).reached == ("the check of the gradients",)


@pytest.mark.parametrize("call", [jax.pure_callback, io_callback])
def test_a_function_outside_of_jax(call):
    def fn(x):
        return call(lambda x: np.full(3, np.nan, np.float32), x, x)

    report = find_overflow(fn)(np.ones(3, np.float32))
    assert (report.primitive, report.verdict) == (call.__name__, Verdict.UNKNOWN)
    assert report.why == f"{call.__name__} calls a function outside of JAX."


def test_it_can_be_called_again():
    find = find_overflow(jnp.log)
    assert find(X - 0.5) and not find(X)


def test_nested_transformations():
    def energy(w, x):
        return jnp.sum(jnp.sqrt(x * w))

    def fn(w, x):
        hessian = jax.vmap(jax.hessian(energy), (None, 0))(w, x)
        return jax.jit(jnp.sum)(hessian)

    report = find_overflow(fn)(np.float32(0), X[0])
    assert report.text == "return jnp.sum(jnp.sqrt(x * w))" and report.verdict is Verdict.MODEL


def test_what_cannot_be_entered_is_said():
    def solve(x):
        return lax.custom_linear_solve(lambda y: y * x, x, lambda _, y: jnp.log(y))

    report = find_overflow(solve)(X - 0.5)
    assert (report.primitive, report.verdict) == ("custom_linear_solve", Verdict.UNKNOWN)
    assert report.why == "custom_linear_solve runs as one operation."
    assert str(report).endswith("Not looked into: custom_linear_solve")


def test_eight_bits_complex_and_keys_pass():
    def fn(x, key):
        noise = jax.random.bits(key, x.shape) % 2
        spectrum = jnp.fft.fft(x + noise)
        eight = x.astype(jnp.float8_e4m3fn).astype(F32)
        return jnp.abs(spectrum) + jnp.log(eight - eight)

    report = find_overflow(fn)(X, jax.random.key(0))
    assert report.primitive == "log" and report.verdict is Verdict.MODEL


def test_integers_have_a_range():
    report = find_overflow(lambda x, i: jnp.take(x, i))(np.ones(3, np.float32), np.array([1, 7]))
    assert [str(operand) for operand in report.operands] == ["float32[3] 1", "int32[2, 1] from 1 to 7"]


def test_booleans_have_no_range():
    assert _range(np.array([True, False])) == ArrayRange((2,), "bool", None, None, None, infs=0, nans=0, zeros=0)


@pytest.mark.parametrize(
    ("log", "through"),
    [
        (lambda x: eval("jnp.log(x)"), r"<string>:1 \(<module>\)"),
        (lambda x: functools.singledispatch(jnp.log)(x), r".*functools\.py:\d+ \(.*\)"),
    ],
    ids=["string", "functools"],
)
def test_code_from_a_string_and_of_python_itself_is_not_the_users_line(log, through):
    report = find_overflow(log)(np.float32(0))
    assert report.file == __file__ and re.fullmatch(through, str(report.through))


def test_an_installed_library_is_not_the_users_line(monkeypatch):
    """The user's line is outside of installed packages. If the whole program is installed, its own line is named."""
    file = "/opt/lib/python3/site-packages/models/mlp.py"
    names = {}
    exec(compile("import jax.numpy as jnp\ndef apply(x):\n    return jnp.log(x)", file, "exec"), names)
    report = find_overflow(lambda x: names["apply"](x))(np.float32(0))
    assert report.file == __file__ and report.through == f"{file}:3 (apply)"
    alone = find_overflow(names["apply"])(np.float32(0))
    assert alone.file in (file, __file__)


def test_a_function_of_jax_alone_has_no_line_of_this_package():
    report = find_overflow(jax.jacfwd(jnp.sqrt))(jnp.zeros(()))
    assert report.primitive == "div" and report.through is None


def test_a_branch_on_a_value_is_reported_as_by_jit():
    def loss(batch):
        return jnp.log(batch["x"]) if batch["x"][0, 0] > 0 else 0

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"tracing the function loss at [^ ]+.*batch\['x'\]"):
        find_overflow(loss)({"x": X})


def test_a_region_is_no_library():
    report = find_overflow(lambda x: jmp.full_precision(jnp.matmul)(x, x.T))(1e38 * X)
    assert report.primitive == "dot_general" and report.through is None


# The text


def test_the_text():
    lines = str(found("logits_beyond_float16")).splitlines()
    assert lines == [
        "dot_general made 8 infinities and 0 NaN",
        f"  at      {overflow_faults.__file__}:{line_of('08')} (logits_beyond_float16.<locals>.loss)",
        "          y = x @ w  # here 08",
        "  in      the forward pass, Head",
        "  operand float16[2, 8] from 100 to 400",
        "  operand float16[8, 8] from 10 to 210",
        "  result  float16[2, 8] from 3.36e+04 to 6.16e+04, 8 infinite",
        "  reached 0",
        "Verdict: keep this operation in float32. float16 ends at 65504; from the same operands float32 reaches "
        "1.064e+05.",
        'Cure: Pass rules=jmp.DEFAULT_RULES.with_scopes({"Head": "float32"}); or wrap the function of this line: '
        "jmp.full_precision(fn).",
    ]


def test_the_text_of_a_library_of_places_and_of_many_results():
    report = Found(
        operations=9, primitive="div", file="a.py", line=3, function="f", text="y = g(x)", through="g.py:7 (g)",
        loops=(Loop("while", 2, None), Loop("scan", 0, 4)), device=(("data", 1),), reached=tuple("abcde"), cure="C.",
    )  # fmt: skip
    assert str(report).splitlines() == [
        "div made 0 infinities and 0 NaN",
        "  at      a.py:3 (f)",
        "          y = g(x)",
        "  through g.py:7 (g)",
        "  in      the forward pass, device 1 of data, while iteration 2, scan iteration 0 of 4",
        "  reached a, b, c, d, ...",
        "",
        "Cure: C.",
    ]
    assert "  reached a, b, c, d\n" in str(dataclasses.replace(report, reached=tuple("abcd")))


def test_the_text_without_a_line():
    assert str(find_overflow(jax.jit(jnp.exp))(jnp.full(3, 1e3))).splitlines()[1] == "  at      no line of a file"


def test_the_text_of_a_loop_in_the_backward_pass():
    text = str(found("scan_backward"))
    assert "  in      the backward pass, scan iteration 3 of 6\n" in text
    assert "Only the loss scale of 1024 makes it: at 8 all is finite." in text


def test_a_library_and_a_rule_are_named():
    assert re.fullmatch(r".*optax/losses/_regression\.py:\d+ \(.*\)", str(found("optax_loss").through))
    assert found("custom_vjp_backward").through == (
        "the backward rule of the custom_vjp called there; JAX keeps no line of it"
    )
    assert found("log_of_zero").through is None


def test_the_values():
    report = found("zero_over_zero")
    values = report.as_dict()
    assert values["verdict"] == "model" and values["loops"] == []
    largest = pytest.approx(float(X[0].sum()))
    assert values["operands"][1] == {
        "shape": [2, 1], "dtype": "float32", "min": 0.0, "max": largest, "abs_max": largest, "infs": 0, "nans": 0,
        "zeros": 1,
    }  # fmt: skip
    assert values["results"][0]["nans"] == 8
    assert values["loss_scale"] is None and "loss scale" not in values["why"]
    scan = found("scan_that_grows").as_dict()
    assert scan["loops"] == [{"primitive": "scan", "iteration": 4, "length": 9}]
    assert find_overflow(jnp.exp)(X).as_dict()["verdict"] is None


@jax.jit
def jitted(a, b):
    return a @ b


def test_the_cure_of_a_product_inside_a_jit():
    """`jit` cuts tracebacks: in JAX's own, the line is the user's call; in the user's, autocast's frames are hidden."""
    a = np.full((8, 8), 1e3, np.float32)
    of_jax = find_overflow(jmp.autocast(lambda a, b: jnp.linalg.matrix_power(a @ b, 3), "mixed_float16"))(a / 1e3, a)
    assert of_jax.file == __file__ and "with_scopes" in of_jax.cure and "itself" not in of_jax.cure
    of_user = find_overflow(jmp.autocast(jitted, "mixed_float16"))(a, a)
    assert of_user.file == __file__ and "with_scopes" in of_user.cure and "Without autocast" in of_user.cure
    by_hand = find_overflow(lambda a: jitted(a.astype(jnp.float16), a.astype(jnp.float16)))(a)
    assert by_hand.cure == (
        "The program itself computes this in 16 bits: widen the operands with .astype(jnp.float32)."
    )
    outside = find_overflow(lambda a: a.astype(jnp.float16) @ a.astype(jnp.float16) * 2)(a)
    assert outside.cure.startswith("The program itself computes this in 16 bits")


def grows(h):
    return jnp.exp(h) * 1e4


MARKED = jmp.low_precision(grows)


def test_the_cure_in_a_low_precision_region():
    """A `low_precision` mark is stronger than a scope, so that the cure names the mark."""

    def fn(h, head=MARKED):
        with jax.named_scope("head"):
            return head(h) + 1

    h = np.full(8, 8.0, np.float32)
    report = find_overflow(jmp.autocast(fn, "mixed_float16"))(h)
    assert report.verdict is Verdict.KEEP_FLOAT32 and report.cure == (
        f"{__file__}:{report.line} is inside a function marked low_precision, for which no rules hold: take the mark "
        f"off it, or wrap the function of this line: jmp.full_precision(fn)."
    )
    for head in (grows, jmp.low_precision(jmp.full_precision(grows))):
        assert find_overflow(jmp.autocast(functools.partial(fn, head=head), "mixed_float16"))(h).verdict is None
    by_hand = jmp.low_precision(lambda h: h.astype(jnp.float16) * 1e4)
    assert find_overflow(by_hand)(h).cure.startswith("The program itself computes this in 16 bits")


@pytest.mark.parametrize("widens", [False, True])
def test_the_cure_where_low_precision_casts(widens):
    def square(x, w):
        if widens:
            x, w = x.astype(F32), w.astype(F32)
        return (x @ w) ** 2

    fast = jmp.low_precision(square, dtype="float16")
    report = find_overflow(jax.grad(lambda w, x: jnp.mean(fast(x, w))))(W, 3000 * X)
    assert re.fullmatch(
        r".*:\d+ is inside a function that low_precision\(fn, dtype=...\) hands 16-bit operands: leave that out, or "
        r"give it the other 16-bit dtype; bfloat16 has the range of float32, float16 three bits more\.",
        report.cure,
    )


def test_what_exceeds_float64():
    with jax.enable_x64(True):
        report = find_overflow(lambda x: jnp.exp(x) ** 2)(jnp.full(2, 700.0))
        too_large = find_overflow(jnp.exp)(jnp.full(2, 2000.0))
    assert report.why == "Non-finite in float64 too: the result exceeds float64."
    assert too_large.why == "Non-finite in float64 too: the exponential of a number that is too large."


def test_the_cure_of_a_parameter_that_is_stored_in_float16():
    params = {"w": jnp.ones(3, F16)}
    report = find_overflow(lambda p, u: optax.apply_updates(p, u))(params, {"w": np.full(3, 1e5, F32)})
    assert report.primitive == "convert_element_type" and report.cure.startswith("A library casts this to the dtype of")


class Scores(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.einsum("ij,kj->ik", x, x)


class Encoder(nn.Module):
    def setup(self):
        self.scores = Scores()

    def encode(self, x):
        return self.scores(x)


def test_the_cure_names_a_flax_module_if_there_is_one():
    x = jnp.full((4, 4), 300, F16)
    report = find_overflow(lambda x: Encoder().apply({}, x, method="encode"))(x)
    assert report.cure.endswith(
        " widen the operands with .astype(jnp.float32), or give the Flax module `Encoder/scores` dtype=jnp.float32."
    )
    named = find_overflow(jax.named_call(lambda x: x @ x, name="square"))(x)
    assert named.scope == "square" and named.cure.endswith(" widen the operands with .astype(jnp.float32).")
    plain = find_overflow(lambda x: jnp.einsum("ij,kj->ik", x, x))(x)
    assert plain.scope == "ij,kj->ik" and plain.cure.endswith(" widen the operands with .astype(jnp.float32).")


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_mask_that_is_infinite_in_float16():
    keep = jnp.array([1, 1, 1, 0], F16)
    report = find_overflow(lambda x: jax.nn.softmax(x + (1 - keep) * -1e9))(jnp.ones(4, F16))
    assert report.verdict is Verdict.KEEP_FLOAT32
    assert report.cure == "Mask with jnp.finfo(jnp.float16).min, or in float32."
    wide = find_overflow(lambda x: jax.nn.softmax(x + (1 - keep.astype(F32)) * -jnp.inf))(jnp.ones(4))
    assert wide.verdict is Verdict.MODEL and "infinities meet" in wide.why


def derivative(rule):
    """The derivative of a function whose backward rule returns `rule` of the argument."""
    fn = jax.custom_vjp(lambda x: x)
    fn.defvjp(lambda x: (x, x), lambda x, ct: (ct * rule(x),))
    return jax.grad(fn)


@pytest.mark.parametrize(
    ("fn", "x", "cure"),
    [
        (lambda x: 1 / x, np.float32(0), "divide by jnp.where(d == 0, 1, d) and select afterwards"),
        (
            lambda x: 1 / x,
            np.float16(0),
            "divide by jnp.where(d == 0, 1, d) and select afterwards (a constant of 3e-08 or less is zero in float16)",
        ),
        (
            derivative(lambda x: 1 / x),
            np.float32(0),
            "replace the operand first, jnp.where(x == 0, 1, x), and select the result afterwards; or add an epsilon",
        ),
        (jnp.exp, np.float16(1000), "subtract the maximum first, as jax.nn.softmax does"),
        (derivative(jnp.exp), np.float32(1000), "subtract the maximum first, as jax.nn.softmax does"),
        (jnp.arccos, np.float32(1.5), "jnp.clip(x, -1, 1), or a little less than that if it is differentiated"),
        (lambda x: jnp.take(x, np.array([7])), np.ones(3, np.float32), "keep indices inside the array"),
        (jnp.linalg.cholesky, -np.eye(2, dtype=np.float32), "add a multiple of the identity"),
        (lambda x: lax.igamma(x, x), np.float32(-1), "look at its operands"),
        (lambda x: x**2.5, np.float32(-1), "keep the base positive"),
        (lambda x: x**-2, np.float32(0), "keep the base away from zero"),
        (lambda x: x**2.5, np.float32(1e30), "make its operands smaller"),
        (lambda x: x**4, np.float32(-1e30), "make its operands smaller"),
        (lambda x: x / 1e-30, np.float32(-1e30), "keep the divisor away from zero"),
        (derivative(lambda x: x * x), np.float32(1e30), "make its operands smaller"),
        (lambda x: x * x, np.float32(1e30), "make its operands smaller"),
        (
            lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)),
            -np.ones(2, np.float32),
            "a row that is masked everywhere needs a finite mask, such as -1e9",
        ),
        (lambda x: jnp.where(x > 0, x, -jnp.inf) * x, np.array([1e30, -1], np.float32), "make its operands smaller"),
        (lambda x: jnp.where(x > 0, x, jnp.nan) * x, np.array([1e30, -1], np.float32), "make its operands smaller"),
        (
            lambda x: x + x,
            np.float32(jnp.finfo(F32).min),
            "mask with a number such as -1e9, to which another can be added",
        ),
        (
            lambda x: jnp.exp(jnp.where(x > 0, x, -jnp.inf)),
            np.array([1000, -1], np.float32),
            "subtract the maximum first, as jax.nn.softmax does",
        ),
        (
            lambda x: lax.reduce((x, x), (F32(0), F32(0)), lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), (0,)),
            np.full(2, 3e38, np.float32),
            "make its operands smaller",
        ),
    ],
)
def test_the_cure_of_the_models_own(fn, x, cure):
    assert find_overflow(fn)(x).cure == f"It is the model's own: {cure}."


def test_a_pole_of_a_derivative_is_before_what_overflows_in_the_backward_pass():
    """The derivative is infinite in the first row; in others, times the loss scale, it exceeds float16's range."""

    def loss(w, x):
        return jnp.sum(jnp.arccos(jnp.clip(50 * (x @ w), -1, 1)))

    w, x = np.eye(16, dtype=np.float32), np.full((16, 16), 0.01, np.float32)
    x[0] = 1
    report = find_overflow(jmp.value_and_grad(loss, "mixed_float16"))(w, x, loss_scale=jmp.StaticLossScale(2.0**15))
    assert (report.primitive, report.verdict) == ("rsqrt", Verdict.MODEL)


# Bad input


def test_bad_input():
    with pytest.raises(TypeError) as error:
        find_overflow(3)  # type: ignore[arg-type]
    assert str(error.value) == "`fn` must be callable, got 3; pass the function whose call gave infinities or NaN."
    with pytest.raises(TypeError) as error:
        jax.jit(lambda x: find_overflow(jnp.log)(x))(X)
    assert str(error.value) == (
        "the argument '0' is traced: find_overflow needs numbers; call it outside jit, on arrays."
    )
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(ValueError) as value_error:
        find_overflow(lambda batch: batch["x"])({"x": gone})
    assert str(value_error.value) == (
        "the argument '0/x' was deleted, by donating it to an earlier call; keep a copy of the arguments, or call "
        "find_overflow with fresh ones."
    )


def test_twenty_kinds_of_fault():
    assert len({fault.mark for fault in FAULTS}) == len(FAULTS) >= 20
    assert {fault.verdict for fault in FAULTS} >= {"lower_scale", "keep_float32", "model", "input"}
    kinds = itertools.chain(*(fault.loops for fault in FAULTS))
    assert {primitive for primitive, _ in kinds} == {"scan", "while"}


class TestTaint:
    """The tracker of bad values, on single equations."""

    def test_nan_of_infinities_is_an_origin_and_nan_of_nan_is_not(self):
        finite, infinite = np.ones(2, np.float32), np.array([np.inf, 1], np.float32)
        nan = np.array([np.nan, 1], np.float32)
        assert makes_nan([infinite, finite], [True, False], [nan])
        assert not makes_nan([infinite, nan], [True, True], [nan])
        assert not makes_nan([finite], [False], [nan])
        assert not makes_nan([infinite], [True], [infinite])
        assert makes_nan([infinite, nan], [True, False], [nan])

    def test_elements_are_told_apart(self):
        one = np.array([np.nan, np.inf, 1, 1], np.float32)
        other = np.array([0, -np.inf, 1, 1], np.float32)
        total = np.array([np.nan, np.nan, 2, 2], np.float32)
        assert _by_element([one, other], [True, True], total) == ([True, True], False, True)
        overflown = np.array([np.nan, 1, np.inf, 1], np.float32)
        assert _by_element([one, other], [True, True], overflown) == ([True, False], True, False)

    def test_the_first_are_remembered(self):
        assert _earliest(frozenset({64, *range(1, 9)})) == frozenset(range(1, 9))

    def test_a_barrier_tells_its_operands_apart(self):
        def fn(x):
            first, second = jax.lax.optimization_barrier((jnp.log(x - 1), jnp.exp(100 * x)))
            return jnp.where(x > 2, first, second)

        report = find_overflow(fn)(np.float32(1))
        assert report and report.primitive == "exp"

    def test_pieces_of_one_value(self):
        bad, good = np.array([np.inf], np.float32), np.ones(1, np.float32)
        taints = [Taint(origins=frozenset({number})) for number in (3, 5)]
        tags = [Tag(True, taints[0], True), Tag(True, taints[1], False)]
        joined = TaintTracker().join([Value(bad, tags[0]), Value(good), Value(bad, tags[1])])
        assert joined == Tag(True, Taint(origins=frozenset({3, 5})), True)


def test_complex_infinities_are_no_mask():
    assert find_overflow(lambda z: z + 1)(np.array([1, -np.inf], np.complex64)).verdict is Verdict.INPUT


def test_code_that_is_in_no_file():
    functions: dict[str, Any] = {"jnp": jnp}
    exec("def made(x): return jnp.log(0 * x)\ndef written(x): return x + jnp.full(3, jnp.inf)", functions)
    lines = str(find_overflow(functions["made"])(np.ones(3, np.float32))).splitlines()
    assert lines[1:3] == ["  at      no line of a file", "  through <string>:1 (made)"]
    written = str(find_overflow(functions["written"])(np.ones(3, np.float32))).splitlines()
    assert written[1:] == ["The infinity of the result is written in the program."]


def test_a_number_that_is_returned_as_it_is_written():
    report = str(find_overflow(lambda x: {"loss": x, "worst": jnp.asarray(np.nan)})(np.ones(3, np.float32)))
    assert report.splitlines()[1:] == ["The NaN of worst is written in the program."]
    captured = np.full(2, np.inf, np.float32)
    for fn in (lambda x: (x, jnp.asarray(1.0)), lambda x: (x + 1, captured)):
        assert len(str(find_overflow(fn)(np.ones(3, np.float32))).splitlines()) == 1


def test_code_whose_text_is_gone():
    functions: dict[str, Any] = {"jnp": jnp}
    exec(compile("def written(x): return x + jnp.full(3, jnp.inf)", "/gone.py", "exec"), functions)
    written = str(find_overflow(functions["written"])(np.ones(3, np.float32))).splitlines()
    assert written[1:] == ["The infinity of the result is written in the program, at /gone.py:1 (written)."]


def test_an_infinity_that_no_operation_reads():
    report = find_overflow(lambda x: (x, jnp.full(3, jnp.inf)))(X)
    assert (report.written, report.reached, report.file) == ("infinity", ("1",), None)


def test_a_sum_beyond_float32_has_nothing_to_do_with_masks():
    report = find_overflow(lambda x: x + x)(np.full(3, 3e38, np.float32))
    assert report.cure == "It is the model's own: make its operands smaller."


def test_packages_inside_of_pythons_folder_are_no_part_of_it():
    assert _is_library(_PYTHON + "json/decoder.py") and not _is_library(_PYTHON + "site-packages/mine.py")
