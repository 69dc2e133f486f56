"""overflow_report: names the parameters whose gradients overflowed, for every nesting, mask and kind of tree."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optimizer_tools import GOOD, PARAMS, broken, run

import jmp_train as jmp
from jmp_train import DynamicLossScale, with_loss_scale
from jmp_train.diagnostics import overflow_report


def blame(report):
    return [(row.path, row.skipped_steps, row.at_last_skip) for row in report.parameters]


def test_names_counts_and_order():
    tx = with_loss_scale(optax.sgd(0.1), DynamicLossScale(2.0**10))
    params, state = run(tx, [GOOD, broken("c"), broken("b", "c"), GOOD, broken("a", "b", value=jnp.nan), GOOD])
    report = overflow_report(state, params)
    assert blame(report) == [("b", 2, True), ("c", 2, False), ("a", 1, True)]
    assert report.last == ("b", "a") and report.gradients == 3
    assert (report.skipped_steps, report.consecutive_skips, report.loss_scale, report.status) == (3, 0, 128.0, "OK")
    values = json.loads(json.dumps(report.as_dict()))
    assert values["last"] == ["b", "a"] and values["parameters"][0]["shape"] == [2, 2]
    assert str(report).splitlines() == [
        "3 steps skipped, 0 since the last one applied; the loss scale is 128 (OK).",
        "3 of 3 gradients overflowed, 2 at the last skip.",
        "parameter  skipped steps  at the last  array",
        "b          2/3            yes          float32[2,2]",
        "c          2/3            no           float32[]",
        "a          1/3            yes          float32[3]",
    ]


def test_never_skipped():
    tx = with_loss_scale(optax.sgd(0.1))
    for state in (tx.init(PARAMS), run(tx, [GOOD])[1]):
        report = overflow_report(state, PARAMS)
        assert report.parameters == () and report.last == ()
        assert str(report) == ("No step was skipped: no gradient was infinite or NaN; the loss scale is 32768 (OK).")


@pytest.mark.parametrize("scale", [DynamicLossScale(2.0), jmp.StaticLossScale(8.0), jmp.NoOpLossScale()])
def test_at_minimum_points_to_find_overflow(scale):
    _, state = run(with_loss_scale(optax.sgd(0.1), scale), [broken("a")])
    report = overflow_report(state, PARAMS)
    assert report.status == "AT_MINIMUM"
    assert (
        "The loss scale can go no lower. At 1 or less, overflows are the model's own: find_overflow(fn)(*args), "
        "with the step's gradient function and its arguments, finds the operation that makes the first one."
    ) in str(report)


def test_at_minimum_without_a_skip():
    state = with_loss_scale(optax.sgd(0.1), DynamicLossScale(1.0)).init(PARAMS)
    assert str(overflow_report(state, PARAMS)).startswith("No step was skipped")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(tx, optax.scale(0.5)),
        lambda tx: optax.chain(optax.identity(), optax.chain(tx)),
        lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(0.5),
    ],
)
def test_any_nesting(wrap):
    _, state = run(wrap(with_loss_scale(optax.adam(0.1))), [broken("b")])
    assert blame(overflow_report(state, PARAMS)) == [("b", 1, True)]


def test_groups_and_masks():
    labels = {"a": "adam", "b": "sgd", "c": "sgd"}
    inside = with_loss_scale(optax.multi_transform({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}, labels))
    _, state = run(inside, [broken("b", "c")])
    assert overflow_report(state, PARAMS).last == ("b", "c")

    # Outside: each scale sees its own group, and the leaves are those that its mask lets through.
    mask = {"a": False, "b": True, "c": True}
    _, state = run(optax.masked(with_loss_scale(optax.sgd(0.1)), mask), [broken("c")])
    assert overflow_report(state, {**PARAMS, "a": None}).last == ("c",)
    assert overflow_report(state, {**PARAMS, "a": optax.MaskedNode()}).last == ("c",)
    with pytest.raises(ValueError) as error:
        overflow_report(state, PARAMS)
    assert str(error.value) == (
        "`params` has 3 leaves, and with_loss_scale saw gradients with 2. Pass the parameters that it was initialised "
        "with, those frozen by a mask as None (of optax.lookahead's, params.fast)."
    )


def test_none_and_integer_parameters():
    params = {"frozen": None, "ids": jnp.arange(3), "w": jnp.ones(2)}
    grads = {"frozen": None, "ids": np.zeros(3, jax.dtypes.float0), "w": jnp.array([1.0, jnp.inf])}
    tx = with_loss_scale(optax.sgd(0.1))
    _, state = tx.update(grads, tx.init(params), params)
    for tree in (params, grads):
        assert overflow_report(state, tree).last == ("w",)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, name="out")(jnp.exp(nn.Dense(4, name="hidden")(x)))


def test_parameters_that_are_numbers():
    tx = with_loss_scale(optax.sgd(0.1))
    _, state = tx.update({"w": np.float32(np.nan)}, tx.init({"w": 1.0}), {"w": 1.0})
    (row,) = overflow_report(state, {"w": 1.0}).parameters
    assert (row.shape, row.dtype) == ((), "float")


def test_in_a_training_step_with_an_injected_infinity():
    x, y = jnp.ones((2, 3)), jnp.ones((2, 1))
    params = Net().init(jax.random.key(0), x)
    tx = with_loss_scale(optax.sgd(0.01), DynamicLossScale(8.0))
    grad_fn = jmp.value_and_grad(lambda p, x, y: jnp.mean((Net().apply(p, x) - y) ** 2), "mixed_float16")

    @jax.jit
    def step(params, opt_state, x, y):
        _, grads = grad_fn(params, x, y, loss_scale=jmp.get_loss_scale(opt_state))
        # Only one layer is broken: what the report must find.
        grads["params"]["hidden"]["kernel"] = grads["params"]["hidden"]["kernel"] / x[0, 0]
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for first in (1.0, 0.0, 1.0, 0.0, 0.0):
        params, opt_state = step(params, opt_state, x.at[0, 0].set(first), y)
    report = overflow_report(opt_state, params)
    assert blame(report) == [("params/hidden/kernel", 3, True)]
    assert (report.skipped_steps, report.consecutive_skips, report.loss_scale, report.status) == (
        3,
        2,
        1.0,
        "AT_MINIMUM",
    )
    (row,) = report.parameters
    assert (row.shape, row.dtype) == ((3, 4), "float32")


def test_nnx():
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(model, with_loss_scale(optax.sgd(0.1)), wrt=nnx.Param)
    grads = nnx.jit(nnx.grad(lambda m: jnp.mean(m(jnp.ones((4, 2))))))(model)
    grads["layers"][1]["kernel"].set_value(jnp.full((2, 2), jnp.nan))
    nnx.jit(lambda optimizer, model: optimizer.update(model, grads))(optimizer, model)
    for state in (optimizer, optimizer.opt_state):
        report = overflow_report(state, nnx.state(model, nnx.Param))
        assert report.last == ("layers/1/kernel",)
    assert overflow_report(optimizer, grads).last == ("layers/1/kernel",)


def test_an_ensemble():
    tx = with_loss_scale(optax.sgd(1.0))
    params = {"w": jnp.zeros((3, 2))}
    grads = {"w": np.float32([[1, 1], [np.inf, 1], [1, 1]])}
    _, state = jax.jit(lambda grads: jax.vmap(tx.update)(grads, jax.vmap(tx.init)(params), params))(grads)
    with pytest.raises(ValueError) as error:
        overflow_report(state, params)
    assert str(error.value) == (
        "`opt_state` is a stack of states, of shape (3,). Take one with jax.tree.map(lambda x: x[0], opt_state)."
    )
    members = [jax.tree.map(lambda x, i=i: x[i], (state, params)) for i in range(3)]
    assert [overflow_report(*member).last for member in members] == [(), ("w",), ()]


def test_inside_jit():
    def step(state):
        return overflow_report(state, PARAMS).loss_scale

    with pytest.raises(ValueError) as error:
        jax.jit(step)(with_loss_scale(optax.sgd(0.1)).init(PARAMS))
    assert str(error.value) == (
        "`overflow_report` reads numbers on the host, and `opt_state` is being traced. Call it outside jit, on the "
        "state that the step returned."
    )


def test_no_loss_scale_and_two():
    with pytest.raises(ValueError, match=r"^`opt_state` has no loss scale"):
        overflow_report(optax.sgd(0.1).init(PARAMS), PARAMS)
    two = optax.multi_transform({"x": with_loss_scale(optax.sgd(0.1)), "y": with_loss_scale(optax.sgd(0.1))}, "x")
    with pytest.raises(ValueError, match=r"^`opt_state` has 2 loss scales"):
        overflow_report(two.init(PARAMS), PARAMS)
