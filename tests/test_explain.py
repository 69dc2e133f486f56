"""The report of `explain` on small programs whose plan is known."""

import dataclasses
import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.custom_derivatives import linear_call

from jmp_train import DEFAULT_RULES, explain, full_precision
from jmp_train.diagnostics import find_overflow, tensor_core_report

W, X = jnp.full((8, 8), 0.5), jnp.ones((4, 8))
POLICY = "mixed_float16"


def layer(w, x):
    with jax.named_scope("Layer"):
        return jnp.tanh(x @ w)


def loss(w, x):
    return jnp.mean(layer(w, x) @ w)


def report(fn, *args, policy=POLICY, rules=DEFAULT_RULES, **kwargs):
    return explain(fn, policy, rules, **kwargs)(*args)


def only(found, primitive):
    return [op for op in found.operations if op.primitive == primitive]


# The operations


def test_each_equation_has_a_row():
    dot, tanh, other = report(layer, W, X).operations + report(jnp.exp, X).operations
    assert (dot.primitive, dot.rule, dot.recorded, dot.dtype, dot.result) == (
        "dot_general", "low", "float32", "float16", "float16",
    )  # fmt: skip
    assert dot.scope == "Layer" and not dot.backward and dot.times == 1
    assert re.search(r"test_explain\.py:\d+:\d+ \(layer\)$", dot.source)
    assert dot.reason == "Tensor Cores multiply 16-bit operands and accumulate in float32"
    assert (tanh.rule, tanh.dtype) == ("follow", "float16")
    assert (other.rule, other.dtype) == ("high", "float32")


def test_shapes_are_enough():
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, X)]
    assert report(jax.grad(loss), *shapes) == report(jax.grad(loss), W, X)


def test_keywords_and_python_numbers():
    found = explain(lambda w, *, x, factor: (x @ w) * factor, POLICY)(W, x=X, factor=2.0)
    assert only(found, "mul")[0].dtype == "float32"  # an argument outside argnums is data


def test_arguments_that_are_no_arrays():
    fn = lambda w, mode, *, how: {"train": how}[mode](w @ w)  # noqa: E731
    found = explain(fn, POLICY)(W, "train", how=jnp.tanh)
    assert [op.primitive for op in found.operations] == ["dot_general", "tanh"]
    assert found.hidden_casts_error is None


def test_argnums_says_what_is_data():
    def fn(x, w):
        return x @ jnp.ones((8, 8)) + w

    assert only(report(fn, X, W[0]), "add")[0].dtype == "float32"
    assert only(report(fn, X, W[0], argnums=1), "add")[0].dtype == "float16"


def test_backward_operations_are_told_apart():
    found = report(jax.grad(loss), W, X)
    assert [op.backward for op in only(found, "dot_general")] == [False, False, True, True, True]
    assert {op.scope for op in only(found, "dot_general")} == {"Layer", ""}


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda w, x: (x @ w) + x, "float32, for an argument is data, or float32 where this program begins"),
        (lambda w, x: (x @ w) + jnp.ones((4, 8)) * X, "float32, for mul leaves its operand in float32"),
        (lambda w, x: (x @ w) + CAPTURED, "float32, for a captured array is data"),
        (lambda w, x: jnp.sum((x @ w) * w[0]), "float32, for only float32 operations read it"),
        (lambda w, x: (x @ w) * 1e-9, "float32, for float16 cannot hold its literal"),
        (lambda w, x: w + w, "float32, until a narrow value meets it"),
        (lambda w, x: jnp.log(x) + x @ w, "float32, for log leaves its operand in float32"),
        # The value is read after a dot: this backward pass would rematerialize the exponential in float32.
        (lambda w, x: jnp.sum(jnp.exp(x @ w) * (x @ w @ w)), "float32, for exp leaves its operand in float32"),
    ],
)
def test_why_an_operation_is_wide(fn, reason):
    row = next(op for op in report(fn, W, X).operations if op.rule == "widest" and op.reason == reason)
    assert row.dtype == "float32"


CAPTURED = jnp.arange(32.0).reshape(4, 8)


# Programs inside


def scanned(w, x):
    return lax.scan(lambda c, _: (layer(w, c), None), x, None, length=3)[0]


def test_what_is_not_wide_has_the_reason_of_its_rule():
    def fn(w, i):
        return (w @ w).reshape(4, 16) @ w.reshape(16, 4), i.reshape(4, 2), w[0] + lax.iota(jnp.float32, 8)

    found = report(fn, W, jnp.arange(8))
    reshapes = [op for op in only(found, "reshape") if op.dtype != "float32"]
    assert {op.dtype for op in reshapes} == {"float16", "int32"}
    assert {op.reason for op in reshapes} == {DEFAULT_RULES.entry("reshape").reason, "not recorded in float32"}
    assert [op.recorded for op in only(found, "iota")] == ["float32"]


def test_loops_branches_and_remat_are_listed_with_their_scope():
    with_scan = report(scanned, W, X)
    assert [(op.primitive, op.holds_program, op.times) for op in with_scan.operations] == [
        ("scan", True, 1), ("dot_general", False, 3), ("tanh", False, 3),
    ]  # fmt: skip
    assert with_scan.total == 2 and with_scan.operations[0].dtype is None
    for wrapped in (
        lambda w, x: lax.cond(x[0, 0] > 0, layer, lambda w, x: x, w, x),
        jax.checkpoint(layer),
        jax.jit(layer),
        lambda w, x: lax.fori_loop(0, 3, lambda _, c: layer(w, c), x),
        lambda w, x: jax.vmap(layer, (None, 0))(w, x),
    ):
        with jax.named_scope("Outer"):
            found = report(lambda w, x, f=wrapped: jax.named_scope("Outer")(f)(w, x), W, X)
        (dot,) = only(found, "dot_general")
        assert dot.scope.startswith("Outer") and dot.scope.endswith("Layer") and dot.dtype == "float16"


def test_flops_count_loops():
    once = 2 * 4 * 8 * 8
    assert report(layer, W, X).flops == once and report(scanned, W, X).flops == 3 * once
    for recorded in (
        report(scanned, W, X, rules=DEFAULT_RULES.replace({"scan": "recorded"})),
        report(full_precision(scanned), W, X),
    ):
        assert recorded.flops == 3 * once and recorded.low_flop_share == 0
    mixed = report(lambda w, x: full_precision(layer)(w, x) + scanned(w, x), W, X)
    assert mixed.low_flop_share == 0.75
    conv = report(lambda w: lax.conv(jnp.ones((2, 3, 8, 8)), w, (1, 1), "SAME"), jnp.ones((5, 3, 3, 3)))
    assert conv.flops == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    assert report(jnp.sin, X).flops == 0 and report(jnp.sin, X).low_flop_share == 0


def test_ragged_flops():
    sizes = jnp.array([1, 3], jnp.int32)
    found = report(lambda w, x: lax.ragged_dot(x, w, sizes), jnp.ones((2, 8, 5)), X)
    assert found.flops == 2 * 4 * 8 * 5


def test_devices_count():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    fn = jax.shard_map(layer, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec("d"))
    assert report(fn, W, X).flops == report(layer, W, X).flops


def test_what_runs_as_recorded_is_listed_with_its_body():
    def fn(w, x):
        y = x @ w
        return lax.while_loop(lambda c: jnp.sum(c) > 1.0, lambda c: jnp.tanh(c @ w), y)

    found = report(fn, W, X)
    assert found.opaque == (("while", 1, "its end depends on a product, or on another value that 16 bits change"),)
    assert [op.dtype for op in only(found, "dot_general")] == ["float16", "float32"]
    assert only(found, "tanh")[0].reason == "inside while, as recorded"
    on_host = lambda x: jax.pure_callback(lambda x: x, x, x)  # noqa: E731
    assert report(on_host, X).opaque == (("pure_callback", 1, "calls the host"),)
    assert [count for _, count, _ in report(lambda x: on_host(x) + on_host(x), X).opaque] == [2]
    assert report(on_host, jnp.arange(3)).opaque == ()  # it has no floating values
    # A float32 operand or result.
    count = lambda x: jax.pure_callback(lambda x: 0, jax.ShapeDtypeStruct((), jnp.int32), x)  # noqa: E731
    draw = lambda n: jax.pure_callback(lambda n: 0, jax.ShapeDtypeStruct((), jnp.float32), n)  # noqa: E731
    assert [len(report(fn, x).opaque) for fn, x in ((count, X), (count, jnp.arange(3)), (draw, 3))] == [1, 0, 1]
    assert report(full_precision(layer), W, X).opaque == ()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.bitcast_convert_type(x, jnp.uint32),
        lambda x: lax.reduce_precision(x, 5, 10),
        lambda x: x.astype(jnp.bfloat16),
        lambda x: x + jnp.arange(8.0),
    ],
)
def test_what_is_no_surprise_as_recorded(fn):
    """Operations that the user requests by name, and operations without operands."""
    assert report(fn, X).opaque == ()


# Casts


def test_casts_are_those_of_the_emitted_program():
    assert report(layer, W, X).casts == 3  # w and x down, the result up
    assert report(lambda w: w @ w, W).casts == 2  # one copy of w, which is read twice
    assert report(jnp.sin, X).casts == 0
    by_hand = report(lambda w, x: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32), W, X)
    assert by_hand.casts == 0
    # Nor does a cast whose result is not read; it is dropped.
    assert report(lambda w, x: (x.astype(jnp.float16), x @ w)[1], W, X).casts == 3
    # A Python number loses its weak type by a conversion from float32 to float32, which is not a cast.
    assert report(lambda x: jnp.exp(jnp.float32(x)), 2.0).casts == 0
    assert report(lambda w: w @ w > 0, W).casts == 1  # a comparison is none
    # A user's cast to the dtype that the value has already does not reduce the number of casts that autocast adds.
    assert report(lambda w: (w @ w).astype(jnp.float16), W).casts == 1


def test_the_summary():
    found = report(layer, W, X)
    assert found.summary == "Converted 2/2 operations to float16 using 3 casts"
    assert report(lambda w: (w @ w).astype(jnp.float16), W).summary.endswith(" using 1 cast")
    assert report(layer, W, X, policy="mixed_bfloat16").summary == "Converted 2/2 operations to bfloat16 using 3 casts"


def test_sums_that_were_narrow_are_counted():
    found = report(lambda x: lax.reduce_sum(x.astype(jnp.float16), (0,)), X)
    assert found.widened == 1 and only(found, "reduce_sum")[0].recorded == "float16"


def test_sums_of_integers_accumulate_in_no_floating_dtype():
    emitted = report(lambda i, x: (jnp.sum(i), jnp.sum(x)), jnp.arange(8), X).emitted
    assert [op.sums_in for op in emitted if op.primitive == "reduce_sum"] == [None, "float32"]


def test_a_float32_policy_converts_nothing():
    found = report(jax.grad(scanned_loss), W, X, policy="float32")
    assert (found.converted, found.casts, found.widened, found.low_flop_share) == (0, 0, 0, 0)
    assert {op.reason for op in found.operations} == {"the policy computes in 32 bits or more"}
    assert {op.rule for op in found.operations if not op.holds_program} == {"recorded"}
    assert found.opaque == () and found.total == report(jax.grad(scanned_loss), W, X).total


def scanned_loss(w, x):
    return jnp.mean(scanned(w, x))


# What the backward pass keeps


def test_kept_bytes():
    wide = dict(report(jax.grad(loss), W, X, policy="float32").kept_bytes)
    assert wide["float32"] % X.nbytes == 0 and set(wide) == {"float32"}
    low = dict(report(jax.grad(lambda w, x: jnp.mean((x @ w) @ w)), W, X).kept_bytes)
    assert low == {"float16": X.nbytes // 2}
    assert report(layer, W, X).kept_bytes == ()
    nothing = report(jax.grad(lambda w, x: jnp.mean(x @ w)), W, X)
    assert nothing.kept_bytes == ()  # arguments are there anyway


def test_what_the_plan_computes_again_is_not_kept():
    def f(w, x):
        return jnp.mean((jnp.sin(jnp.exp(x @ w) * 2) @ w) ** 2)

    found = report(jax.grad(f), W, X)
    # The first dot's result, and the sine, which the second one reads; the loss reads the second one's in float32. The
    # cosine is computed again from the first.
    assert dict(found.kept_bytes) == {"float16": 2 * X.nbytes // 2, "float32": X.nbytes}
    assert only(found, "cos")[0].unread and not only(found, "sin")[0].unread
    # A gradient that is not requested reads nothing.
    of_one = report(lambda w, x: jax.grad(lambda v, w: f(v, x) + jnp.mean((x @ w) ** 2), (0, 1))(w, w)[1], W, X)
    assert dict(of_one.kept_bytes) == {"float16": X.nbytes // 2}
    wide = report(jax.grad(f), W, X, rules=DEFAULT_RULES.with_residuals("float32"))
    assert dict(wide.kept_bytes)["float32"] >= 2 * X.nbytes and not only(wide, "cos")[0].unread


def test_a_rearranged_value_is_kept_once():
    def f(w, x):
        y = x @ w
        return jnp.mean((y @ w) * (y.T.T.reshape(8, 4).reshape(4, 8) @ w))

    twice = dict(report(jax.grad(f), W, X).kept_bytes)
    once = dict(report(jax.grad(lambda w, x: jnp.mean(((y := x @ w) @ w) * (y @ w))), W, X).kept_bytes)
    assert twice == once


# What a trace does not show


@jax.custom_vjp
def own_vjp(x):
    return jnp.sin(x)


own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x),))


@jax.custom_jvp
def own_jvp(x):
    return jnp.sin(x)


own_jvp.defjvps(lambda t, out, x: t * jnp.cos(x))


@pytest.mark.parametrize("fn", [own_vjp, own_jvp])
def test_user_written_rules_are_listed(fn):
    kind = "custom_vjp" if fn is own_vjp else "custom_jvp"
    (rule,) = report(lambda w, x: fn(x @ w), W, X).derivative_rules
    assert re.fullmatch(rf"{kind} of own_\w+ \(.*test_explain\.py:\d+\)", rule)
    assert report(lambda w, x: fn(x @ w) + fn(x @ w), W, X).derivative_rules == (rule,)
    expanded = report(jax.grad(lambda w, x: jnp.mean(fn(x @ w))), W, X).derivative_rules
    assert any(re.search(rf"{kind} rule .*test_explain\.py:\d+\), expanded", rule) for rule in expanded)


def test_linear_calls_are_listed():
    def fn(w, x):
        return linear_call(lambda w, x: x @ w, lambda w, ct: ct @ w.T, w, x)

    assert report(fn, W, X).derivative_rules == ("linear_call",)


def test_rules_of_functions_without_a_line_are_listed():
    fn = jax.custom_jvp(functools.partial(jnp.multiply, 2.0))
    fn.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))
    assert report(lambda w, x: fn(x @ w), W, X).derivative_rules == ("custom_jvp of <unknown>",)


def test_values_without_a_dtype():
    def fn(w, x):
        return x @ w, lax.after_all(lax.create_token(), lax.create_token())

    found = explain(lambda w, x: fn(w, x)[0], "mixed_float16")(W, X)
    assert [op.recorded for op in found.operations if "token" in op.primitive or op.primitive == "after_all"] == [
        None
    ] * 3
    assert tensor_core_report(fn)(W, X).products and not find_overflow(fn)(W, X)


def test_rules_of_jax_itself_are_not():
    assert report(jax.grad(lambda w, x: jnp.mean(jax.nn.relu(jax.nn.silu(x @ w)))), W, X).derivative_rules == ()


def guarded(w, x):
    y = x @ w
    return jnp.mean(jnp.sin(y.astype(jnp.float32)))


def test_casts_that_a_float32_trace_hides():
    found = report(guarded, W, X)
    assert len(found.hidden_casts) == 1 and "(guarded)" in found.hidden_casts[0]
    assert found.hidden_casts_error is None
    assert explain(guarded, POLICY)(W, x=X).hidden_casts == found.hidden_casts
    # Casts inside jnp.mean, and by promotion, are not requests of the user.
    assert report(lambda w, x: jnp.mean(x @ w), W, X).hidden_casts == ()
    assert report(lambda w, x: (x @ w) + jnp.ones(8), W, X).hidden_casts == ()
    assert report(lambda w, x: (x @ w).astype(jnp.int32), W, X).hidden_casts == ()
    # A cast that the float32 trace contains, too, is not hidden.
    assert report(lambda w, x: (x @ w).astype(jnp.float16).astype(jnp.float32), W, X).hidden_casts == ()


def test_what_code_warns_of_narrow_arguments_is_not_shown():
    def written(w, x):
        return jnp.mean(x @ w.at[0].set(jnp.ones(8)))

    with warnings.catch_warnings(action="error"):
        assert report(written, W, X).hidden_casts_error is None
        assert report(written, W, X).hidden_casts == ()


@pytest.mark.parametrize(
    "call",
    [
        lambda: report(lambda w, n: (w @ w)[n], W, jnp.arange(2)),
        lambda: report(lambda w, n: w @ w * n, W, 2),
        lambda: report(lambda w: w @ w * 1e9, W),  # float16 has no such number
    ],
    ids=["integers", "a Python number", "a large number"],
)
def test_arguments_that_are_searched_for_hidden_casts(call):
    assert call().hidden_casts_error is None


def test_a_function_that_takes_no_narrow_arguments():
    def strict(w):
        if w.dtype != jnp.float32:
            raise TypeError("float32 only")
        return w @ w

    message = "the function cannot be traced with float16 arguments (TypeError)"
    assert report(strict, W).hidden_casts_error == message
    assert f"No search for hidden casts: {message}" in str(report(strict, W)).splitlines()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    """A tree that reads the dtype of its leaf whenever it is built."""

    value: Any

    def __post_init__(self):
        if self.value.dtype != jnp.float32:
            raise ValueError("float32 only")


def test_a_result_that_checks_its_leaves():
    gradient = jax.grad(lambda tree, x: jnp.mean((x @ tree.value) ** 2))
    (output,) = report(gradient, Checked(W), X).outputs
    assert (output.shape, output.dtype, output.computed_in) == ((8, 8), "float32", "float32")


def test_products_in_a_function_that_jax_jits():
    """JAX cuts their tracebacks at its own `jit`, so that their line is that of the call."""
    found = report(lambda x, w: jnp.linalg.matrix_power(x @ w, 3), jnp.ones((8, 8)), W, argnums=1)
    sources = [op.source for op in only(found, "dot_general")]
    assert len(sources) == 3 and all("test_explain.py" in source for source in sources)
    (nested,) = only(report(lambda x: jnp.corrcoef(x * 2), jnp.ones((16, 32))), "dot_general")
    assert "test_explain.py" in nested.source  # `cov` in `corrcoef`, both of JAX


def test_a_function_of_jaxs_has_the_line_of_each_call():
    """JAX records the function once, with the line of the first call."""

    def norms(x):
        first = jnp.linalg.norm(x)
        return first, jnp.linalg.norm(2 * x)

    one, other = [op.source for op in explain(norms, "mixed_float16")(X).operations if op.primitive == "sqrt"]
    assert one != other and all("test_explain.py" in source for source in (one, other))


def test_scopes_that_match_nothing():
    rules = DEFAULT_RULES.with_scopes({"Layer": "float32", "Lajer": "float32"})
    assert report(layer, W, X, rules=rules).unmatched_scopes == ("'Lajer' (did you mean 'Layer'?)",)
    twice = DEFAULT_RULES.with_scopes({"Lajer": "float32"}).with_scopes({"Lajer": "float16"})
    assert len(report(layer, W, X, rules=twice).unmatched_scopes) == 1
    brackets = DEFAULT_RULES.with_scopes({"block[1]": "float32"})
    (found,) = report(jax.named_scope("block[1]")(layer), W, X, rules=brackets).unmatched_scopes
    assert found == "'block[1]' (did you mean 'block[[]1]'?)"
    assert report(jax.grad(scanned_loss), W, X, rules=rules, policy="float32").unmatched_scopes != ()
