"""The value that `explain` returns: as JSON, as text, compared with another; and what `explain` refuses."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_train import DEFAULT_RULES, Explanation, explain, get_policy

W, X = jnp.full((8, 8), 0.5), jnp.ones((4, 8))
POLICY = "mixed_float16"


def layer(w, x):
    with jax.named_scope("Layer"):
        return jnp.tanh(x @ w)


def loss(w, x):
    return jnp.mean(layer(w, x) @ w)


def scanned_loss(w, x):
    return jnp.mean(lax.scan(lambda c, _: (layer(w, c), None), x, None, length=3)[0])


def report(fn, *args, policy=POLICY, rules=DEFAULT_RULES):
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
    assert values["kept_bytes"] == dict(found.kept_bytes)


def test_table_and_text():
    found = report(jax.grad(loss), W, X)
    assert len(found.table().splitlines()) == 1 + len(found.operations)
    assert all("Layer" in line for line in found.table("Layer").splitlines()[1:])
    first, *rest = str(found).splitlines()
    assert first == f"{found.summary} ({get_policy(POLICY)})"
    assert any(line.startswith("100.0% of ") for line in rest)
    assert found.table().isascii() and str(found).isascii()


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


# Bad input


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: explain(3, POLICY), TypeError,  # pyright: ignore[reportArgumentType]
         "`fn` must be callable, got 3; pass the function whose precision is to be explained."),
        (lambda: explain(layer, POLICY, {"exp": "low"}), TypeError,  # pyright: ignore[reportArgumentType]
         "`rules` must be a Rules, got {'exp': 'low'}; edit the default: DEFAULT_RULES.replace({...})."),
        (lambda: explain(layer, "float32", 3), TypeError,  # pyright: ignore[reportArgumentType]
         "`rules` must be a Rules, got 3; edit the default: DEFAULT_RULES.replace({...})."),
        (lambda: explain(layer, POLICY, argnums="a"), TypeError,  # pyright: ignore[reportArgumentType]
         "`argnums` must be an integer or a sequence of integers, got 'a'."),
        (lambda: report(layer, W, X).diff(3), TypeError,  # pyright: ignore[reportArgumentType]
         "`other` must be an Explanation, got 3; pass what explain(fn, policy)(*args) gave."),
    ],
)  # fmt: skip
def test_bad_input(call, error, message):
    with pytest.raises(error, match="^" + re.escape(message) + "$"):
        call()
