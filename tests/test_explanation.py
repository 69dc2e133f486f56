"""The value that `explain` returns: as JSON, as text, compared with another; and the errors of `explain`."""

import dataclasses
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_train import DEFAULT_RULES, Explanation, explain, full_precision, get_policy
from jmp_train._explain._difference import compare
from jmp_train._explain._operations import Operation

W, X = jnp.full((8, 8), 0.5), jnp.ones((4, 8))
POLICY = "mixed_float16"


def layer(w, x):
    with jax.named_scope("Layer"):
        return jnp.tanh(x @ w)


def loss(w, x):
    return jnp.mean(layer(w, x) @ w)


def scanned_loss(w, x):
    return jnp.mean(lax.scan(lambda c, _: (layer(w, c), None), x, None, length=3)[0])


def report(fn, *args, policy: Any = POLICY, rules=DEFAULT_RULES):
    return explain(fn, policy, rules)(*args)


# The value


def test_outputs():
    found = report(lambda w, x: {"loss": jnp.mean(x @ w), "logits": [x @ w]}, W, X)
    assert [dataclasses.astuple(output) for output in found.outputs] == [
        ("logits/0", (4, 8), "float32", "float16"),
        ("loss", (), "float32", "float32"),
    ]


def test_the_report_is_a_value_of_its_own():
    found = report(jax.grad(loss), W, X)
    assert isinstance(found, Explanation) and hash(found) == hash(report(jax.grad(loss), W, X))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.casts = 0  # pyright: ignore[reportAttributeAccessIssue]


def test_as_dict_is_json():
    found = report(jax.grad(scanned_loss), W, X)
    values = found.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["converted"] == found.converted and len(values["operations"]) == len(found.operations)
    assert values["kept_bytes"] == dict(found.kept_bytes) and "text" not in values


def test_products_as_dict_and_as_text():
    found = report(jax.grad(loss), W, X)
    (row,) = found.as_dict()["products"]
    assert row == dict(zip(("dtype", "reason", "number"), found.products[0], strict=True))
    assert f"{row['number']} products in float16: {row['reason']}" in str(found).splitlines()
    kept = ", ".join(f"{number} B {dtype}" for dtype, number in found.kept_bytes)
    assert f"The backward pass reads from the forward pass: {kept}" in str(found).splitlines()
    assert "The backward pass reads" not in str(report(loss, W, X))


def test_what_the_text_notes():
    found = report(lambda x: jax.pure_callback(lambda x: x, x, x), X)
    assert "Runs as recorded: pure_callback x1: calls the host" in str(found).splitlines()
    found = report(lambda w, x: jnp.sum(jnp.exp((x @ w).astype(jnp.float32)) @ w), W, X)
    assert found.hidden_casts and "Casts to float32 that autocast cannot see" in str(found)


def test_operations_that_stay_narrow_are_not_widened():
    assert report(jnp.abs, X.astype(jnp.float16)).widened == 0


def test_the_share_of_flops_in_a_difference():
    def fn(w):
        return full_precision(jnp.matmul)(w, w) + full_precision(jnp.matmul)(w, jnp.sin(w)) + w @ w

    rows = {name: values for name, *values in report(fn, W).diff(report(fn, W, policy="float32")).numbers}
    assert rows["low_flop_share"] == [0.3333, 0.0]


def test_wide_products_of_the_backward_pass():
    found = report(jax.grad(lambda w: jnp.sum(full_precision(lambda w: w @ w)(jnp.sin(w)))), W)
    rows = str(found).partition("product in float32")[2].splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [["fwd", "1"], ["bwd", "2"]]


def test_table_and_text():
    found = report(jax.grad(loss), W, X)
    assert len(found.table().splitlines()) == 1 + len(found.operations)
    assert all("Layer" in line for line in found.table("Layer").splitlines()[1:])
    first, *rest = str(found).splitlines()
    assert first == f"{found.summary} ({get_policy(POLICY)})"
    assert any(line.startswith("100.0% of ") for line in rest)
    assert "100.0% of 5.12e-07 GFLOP on 16-bit operands" in str(report(layer, W, X)).splitlines()  # 2 * 4 * 8 * 8
    found = report(jax.grad(scanned_loss), W, X)
    assert "scan " not in str(found) and "Runs as recorded" not in str(found)
    rows = [re.split("  +", line) for line in found.table("Lay*").splitlines()]
    assert {tuple(row[:2]) for row in rows[1:]} >= {("fwd", "tanh"), ("bwd", "mul")} and {
        row[5] for row in rows[1:]
    } == {"3"}
    assert found.table().isascii() and str(found).isascii()
    assert found.program().startswith("{ lambda") and " = tanh " in found.program()


def test_text_of_what_is_widened_and_of_products_in_float32():
    widened = report(lambda x: lax.reduce_sum(x, (0,)), X.astype(jnp.float16))
    assert widened.converted == 0 and "Widened 1 operation recorded in 16 bits to float32" in str(widened).splitlines()

    assert report(jnp.square, X.astype(jnp.float16)).converted == 0  # by hand

    def fn(w, x):
        with jax.named_scope("Head"):
            return x @ w, full_precision(jnp.matmul)(x, w), jnp.matmul(x, w, precision="highest")

    found = report(fn, W, X)
    assert "; 1 product kept in float32 by an explicit precision: " in str(found).splitlines()[0]
    by_default = report(fn, W, X, policy=get_policy(POLICY).replace(matmul_precision="default"))
    assert str(by_default).splitlines()[0].endswith("; 1 product kept in float32 by an explicit precision")
    assert [op.primitive for op in found.wide_products] == ["dot_general"] * 2
    assert (found.converted, found.total) == (1, 3)
    header, *rows = [re.split("  +", line) for line in str(found).split("\n\n")[-1].splitlines()]
    assert header == ["product in float32", "number", "scope", "source", "reason"]
    assert [[*row[:3], row[4]] for row in rows] == [
        ["fwd", "1", "Head", "full_precision region"],
        ["fwd", "1", "Head", "its precision was set to float32"],
    ]
    assert "product in float32 " not in str(report(loss, W, X))
    strict = report(fn, W, X, policy="float32")
    assert str(strict).splitlines()[0] == f"{strict.summary} ({strict.policy})" and "product in float32 " not in str(
        strict
    )


def test_the_commonest_come_first():
    found = report(lambda w, x: (full_precision(jnp.matmul)(x, w), x @ w @ w), W, X)
    assert [row[0::2] for row in found.products] == [("float16", 2), ("float32", 1)]
    rows = str(report(lambda x: jnp.exp(jnp.exp(jnp.cos(x))), X)).split("\n\n")[1].splitlines()
    assert [re.split("  +", row) for row in rows[1:]] == [
        ["exp", "2", "high", "float32"],
        ["cos", "1", "high", "float32"],
    ]


def test_diff():
    before = report(jax.grad(loss), W, X)
    after = report(jax.grad(loss), W, X, rules=DEFAULT_RULES.replace({"tanh": "high"}))
    assert not before.diff(before) and str(before.diff(before)) == "No difference."
    difference = before.diff(after)
    changed = {(a.primitive, a.rule, b.rule) for a, b in difference.changed if a.rule != b.rule}
    assert changed == {("tanh", "follow", "high")}
    assert difference.only_before == difference.only_after == ()
    values = difference.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert "follow -> high" in str(difference)
    numbers = before.diff(report(jax.grad(loss), W, X, policy="float32")).numbers
    assert ("converted", before.converted, 0) in numbers and ("casts", before.casts, 0) in numbers
    assert ("kept in float16", dict(before.kept_bytes)["float16"], 0) in numbers


def test_diff_tells_operations_of_one_line_apart():
    def fn(w, x):
        for _ in range(3):
            x = jnp.exp(x @ w)
        return x

    recorded = DEFAULT_RULES.replace({"exp": "recorded"})
    difference = report(fn, W, X).diff(report(fn, W, X, rules=recorded))
    assert [(a.rule, b.rule, b.dtype) for a, b in difference.changed] == [("high", "recorded", "float32")] * 3


def test_diff_of_two_programs():
    difference = report(layer, W, X).diff(report(lambda w, x: layer(w, x) + 1, W, X))
    assert [op.primitive for op in difference.only_after] == ["add"] and difference.only_before == ()


def operation(primitive="exp", source="a.py:1:2 (f)", scope="A", backward=False, **others):
    fields = {"rule": "low", "recorded": "float32", "dtype": "float16", "result": "float16", "reason": "", **others}
    return Operation(primitive, source, scope, **fields, backward=backward, times=1, flops=0, holds_program=False)


@pytest.mark.parametrize("change", [{"rule": "high"}, {"dtype": "float32"}, {"result": "float32"}])
def test_what_of_an_operation_counts_as_changed(change):
    before, after = operation(), operation(**change)
    difference = compare({}, {}, [before], [after])
    assert difference and difference.changed == ((before, after),)
    assert not compare({}, {}, [before], [operation(reason="another")])


@pytest.mark.parametrize(
    "other", [{"primitive": "log"}, {"source": "b.py:1:2 (f)"}, {"scope": "B"}, {"backward": True}]
)
def test_which_operations_are_the_same(other):
    one, two = operation(), operation(**other, rule="high")
    difference = compare({}, {}, [one], [two])
    assert (difference.changed, difference.only_before, difference.only_after) == ((), (one,), (two,))
    assert compare({}, {}, [one], []) and compare({}, {}, [], [one])


def test_a_difference_as_text_and_as_dict():
    before = [operation(reason="old"), operation("log")]
    after = [operation(rule="high", dtype="float32", reason="new"), operation("tanh", scope="")]
    difference = compare({"casts": 1, "a": 1}, {"casts": 2, "b": 1}, before, after)
    assert [re.split("  +", line.strip()) for line in str(difference).splitlines()] == [
        ["casts: 1 -> 2"],
        ["a: 1 -> 0"],
        ["b: 0 -> 1"],
        ["primitive", "rule", "dtype", "scope", "source", "reason"],
        ["exp", "low -> high", "float16 -> float32", "A", "a.py:1 (f)", "new"],
        ["log", "gone", "A", "a.py:1 (f)"],
        ["tanh", "new", "a.py:1 (f)"],
    ]
    same_rule = compare({}, {}, [operation()], [operation(dtype=None)])
    assert re.split("  +", str(same_rule).splitlines()[1])[:3] == ["exp", "low", "float16 -> None"]
    without = compare({}, {}, [operation(dtype=None)], [operation(dtype=None, rule="high")])
    assert re.split("  +", str(without).splitlines()[1]) == ["exp", "low -> high", "A", "a.py:1 (f)"]
    as_dict = dataclasses.asdict
    assert difference.as_dict() == {
        "numbers": {"casts": {"before": 1, "after": 2}, "a": {"before": 1, "after": 0}, "b": {"before": 0, "after": 1}},
        "changed": [{"before": as_dict(before[0]), "after": as_dict(after[0])}],
        "only_before": [as_dict(before[1])],
        "only_after": [as_dict(after[1])],
    }
    assert compare({"casts": 1}, {"casts": 2}, [], []) and str(compare({"a": 1}, {}, [], [])) == "a: 1 -> 0"


# Bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: explain(3, POLICY), TypeError,  # pyright: ignore[reportArgumentType]
         "`fn` must be callable, got 3; pass the function whose precision is to be explained."),
        (lambda: explain(layer, POLICY, {"exp": "low"}), TypeError,  # pyright: ignore[reportArgumentType]
         "`rules` must be a Rules, got {'exp': 'low'}; edit the default: DEFAULT_RULES.replace({...}). "
         "Arguments of the function belong to the one that is returned: explain(fn, policy)(*args)."),
        (lambda: explain(layer, "float32", 3), TypeError,  # pyright: ignore[reportArgumentType]
         "`rules` must be a Rules, got 3; edit the default: DEFAULT_RULES.replace({...}). "
         "Arguments of the function belong to the one that is returned: explain(fn, policy)(*args)."),
        (lambda: explain(layer, POLICY, argnums="a"), TypeError,  # pyright: ignore[reportArgumentType]
         "`argnums` must be an integer or a sequence of integers, got 'a'."),
        (lambda: report(layer, W, X).diff(3), TypeError,  # pyright: ignore[reportArgumentType]
         "`other` must be an Explanation, got 3; pass what explain(fn, policy)(*args) gave."),
    ],
)  # fmt: skip
def test_bad_input(call, error, message):
    with pytest.raises(error, match="^" + re.escape(message) + "$"):
        call()
