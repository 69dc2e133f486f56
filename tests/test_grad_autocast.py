"""`value_and_grad` under autocast: unmodified loss functions, arguments of any kind, the same contract as without."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_train as jmp
from jmp_train import NoOpLossScale, StaticLossScale, grad

SCALE = StaticLossScale(2.0**10)
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]


def data():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"w": jax.random.normal(keys[0], (8, 4)) / 3, "b": jax.random.normal(keys[1], (4,))}
    return params, jax.random.normal(keys[2], (16, 8)), jax.random.normal(keys[3], (16, 4))


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def dots(jaxpr):
    return [eqn.invars[0].aval.dtype for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize("policy", POLICIES)
def test_loss_and_gradients_are_float32_and_near_float64(policy):
    params, x, y = data()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x, y))
        expected = jax.jit(jax.value_and_grad(loss_fn))(*wide)
    loss, grads = jax.jit(jmp.value_and_grad(loss_fn, policy))(params, x, y, loss_scale=SCALE)
    tolerance = {"float32": 1e-6, "mixed_float16": 2e-3, "mixed_bfloat16": 1.5e-2}[policy]
    assert {loss.dtype, *(g.dtype for g in jax.tree.leaves(grads))} == {np.dtype(np.float32)}
    for got, want in zip(jax.tree.leaves((loss, grads)), jax.tree.leaves(expected), strict=True):
        assert np.max(np.abs(np.asarray(got) - np.asarray(want))) <= tolerance * np.max(np.abs(np.asarray(want)))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_every_dot_of_an_unmodified_function_is_narrow_with_autocast_alone(policy):
    args = data()
    low = jmp.get_policy(policy).compute_dtype
    jaxpr = jax.make_jaxpr(lambda *args: jmp.grad(loss_fn, policy)(*args, loss_scale=SCALE))(*args)
    assert dots(jaxpr) == [low, low]
    plain = jax.make_jaxpr(lambda *args: jmp.grad(loss_fn, policy, autocast=False)(*args, loss_scale=SCALE))(*args)
    assert dots(plain) == [np.float32] * 2  # the data are float32, and so is the model


@pytest.mark.parametrize("argnums", [0, -2])
def test_python_numbers_are_data_where_they_are_differentiated(argnums):
    traced = []

    def f(tree, n):
        traced.append(n)
        return tree["w"] * len(range(n))

    gradient = grad(f, "mixed_bfloat16", argnums=argnums)
    last = grad(lambda n, tree: f(tree, n), "mixed_bfloat16", argnums=argnums + 1)
    for number in (1.5, 2.5):
        assert gradient({"w": number}, 3)["w"] == last(3, {"w": number})["w"] == 3
    assert traced == [3, 3]


def test_arguments_that_are_no_arrays_reach_the_loss_function_as_they_are():
    params, x, y = data()
    seen = []

    def loss(params, x, y, mode, *, train, depth, activation):
        seen.append((mode, train, depth, activation))
        for _ in range(depth):
            x = activation(x)
        return loss_fn(params, x, y) if train else jnp.float32(0)

    grad_fn = jmp.value_and_grad(loss, "mixed_float16")
    call = {"train": True, "depth": 2, "activation": jax.nn.relu, "loss_scale": SCALE}
    first = grad_fn(params, x, y, "fan_in", **call)
    assert seen == [("fan_in", True, 2, jax.nn.relu)]
    again = grad_fn(params, x, y, "fan_in", **call)
    assert len(seen) == 1, "an equal call is not traced again"
    assert first[0] == again[0]
    assert grad_fn(params, x, y, "fan_in", **{**call, "train": False})[0] == 0


def test_aux_may_hold_what_is_no_array():
    grad_fn = jmp.value_and_grad(
        lambda w: (w**2, {"name": "loss", "w": w, "none": None}), "mixed_bfloat16", has_aux=True
    )
    for _ in range(2):
        (loss, aux), grads = grad_fn(jnp.float32(3))
        assert (loss, aux["name"], aux["w"], aux["none"], grads) == (9, "loss", 3, None, 6)


def test_the_loss_stays_finite_where_the_scaled_one_overflows():
    loss, grads = jmp.value_and_grad(lambda w: w * 1e30, "mixed_float16")(
        jnp.float32(1), loss_scale=StaticLossScale(2.0**60)
    )
    assert np.isfinite(loss) and not np.isfinite(grads)


def test_overrides_keep_a_parameter_and_what_it_meets_in_float32():
    def loss(params, x, y):
        return jnp.mean((jax.nn.relu(x @ params["w"] + params["b"]) @ params["w"].T) ** 2)

    def bias_add(policy):
        jaxpr = jax.make_jaxpr(lambda *args: jmp.grad(loss, policy)(*args, loss_scale=SCALE))(*data())
        return next(eqn.outvars[0].aval.dtype for eqn in jaxpr.eqns if eqn.primitive.name == "add")

    assert bias_add("mixed_float16") == np.float16
    assert bias_add(jmp.get_policy("mixed_float16").replace(overrides={"b": "float32"})) == np.float32


def test_targets_beyond_float16_do_no_harm():
    params, x, y = data()
    loss, grads = jmp.value_and_grad(loss_fn, "mixed_float16")(params, x, y * 1e6, loss_scale=NoOpLossScale())
    chex.assert_tree_all_finite((loss, grads))


def test_one_trace_in_a_jitted_loop_of_steps():
    params, x, y = data()
    tx = jmp.with_loss_scale(optax.sgd(0.1))
    grad_fn = jmp.value_and_grad(loss_fn, "mixed_float16")

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(params, opt_state):
        loss, grads = grad_fn(params, x, y, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = tx.init(params)
    losses = []
    for _ in range(5):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_rules_belong_to_autocast():
    with pytest.raises(TypeError, match=r"^`rules` are for autocast, which `autocast=False` turns off; leave one of"):
        jmp.grad(loss_fn, "float32", autocast=False, rules=jmp.DEFAULT_RULES)
    with pytest.raises(TypeError, match=r"^`rules` must be a Rules, got 'exp'; edit the default"):
        not_rules: Any = "exp"
        jmp.grad(loss_fn, "float32", rules=not_rules)
    rules = jmp.DEFAULT_RULES.replace({"dot_general": "recorded"})
    args = data()
    jaxpr = jax.make_jaxpr(lambda *args: jmp.grad(loss_fn, "mixed_bfloat16", rules=rules)(*args))(*args)
    assert dots(jaxpr) == [np.float32] * 2


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SquaredScale(jmp.StaticLossScale):
    """A loss scale of the user's: the loss times the square of S."""

    def scale(self, tree):
        return super().scale(super().scale(tree))

    def unscale(self, tree):
        return super().unscale(super().unscale(tree))


def test_a_loss_scale_of_the_users_own_scales_as_it_says():
    grad_fn = jmp.grad(lambda w: jnp.sum(w**2), "mixed_float16")
    np.testing.assert_array_equal(grad_fn(jnp.ones(2), loss_scale=SquaredScale(8.0)), [2, 2])


@pytest.mark.parametrize("dtype", [np.float32, np.dtype("float16"), jnp.bfloat16, "float16"], ids=str)
def test_dtypes_reach_the_loss_as_they_are(dtype):
    def loss(w, dtype):
        return jnp.mean(w.astype(dtype).astype(jnp.float32))

    assert grad(loss, "mixed_bfloat16")(jnp.ones(4), dtype).dtype == jnp.float32
    assert grad(loss, "mixed_bfloat16")(jnp.ones(4), dtype=dtype).dtype == jnp.float32


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.array([{}, {}]), np.array(["2020-01-01"], "datetime64[D]")])
def test_arrays_that_jax_has_not_reach_the_loss_as_they_are(array):
    def loss(w, batch):
        assert batch["ids"] is array
        return jnp.mean(w) * len(batch["ids"])

    assert grad(loss, "mixed_bfloat16")(jnp.ones(1), {"ids": array}) == len(array)


def test_a_static_scale_runs_as_a_dynamic_one():
    """Its number is none of the model's, whose products would not become infinite."""

    def narrow(scale):
        grad_fn = grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), "mixed_float16")
        program = jax.make_jaxpr(lambda *args: grad_fn(*args, loss_scale=scale))(jnp.ones((8, 8)), jnp.ones((4, 8)))
        return str(program).count(":f16[")

    assert narrow(SCALE) == narrow(jmp.DynamicLossScale(2.0**10))


def test_zeros_of_both_signs_are_two_numbers():
    grad_fn = grad(lambda w, sign: w * jnp.copysign(1.0, sign), "mixed_bfloat16")
    assert [float(grad_fn(jnp.float32(1), sign)) for sign in (0.0, -0.0, 0.0)] == [1, -1, 1]


def test_aux_of_numpy_stays_in_numpy():
    """A traced program would hold 2^40 + 1 as the int32 1."""
    steps = np.int64(2**40 + 1)
    (_, aux), _ = jmp.value_and_grad(lambda w: (w**2, {"steps": steps}), "mixed_bfloat16", has_aux=True)(jnp.float32(3))
    assert aux["steps"] is steps


def test_an_argument_counted_from_the_end_is_a_parameter_too():
    def loss(x, params):
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]))

    def program(argnums):
        policy = jmp.get_policy("mixed_bfloat16").replace(overrides={"w": "float32"})  # a path of `params` alone
        args = jnp.ones((64, 64)), {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
        return str(jax.make_jaxpr(jmp.grad(loss, policy, argnums=argnums))(*args))

    assert program(-1) == program(1)


@pytest.mark.parametrize("policy, second", [("float32", 4.0), ("mixed_bfloat16", 2.0)])
def test_a_value_from_elsewhere_is_that_of_the_first_call_under_autocast(policy, second):
    """As the docstring says. `jax.checkpoint` keeps its trace likewise."""
    beta = [2.0]
    grad_fn = jmp.value_and_grad(lambda w: jnp.sum(w) * beta[0], policy)
    assert grad_fn(jnp.ones(1))[0] == 2.0
    beta[0] = 4.0
    assert grad_fn(jnp.ones(1))[0] == second
    assert jmp.value_and_grad(lambda w, beta: jnp.sum(w) * beta, policy)(jnp.ones(1), beta[0])[0] == 4.0
