"""Gradients under a policy: dtypes, numbers against float64, true losses, transformations."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from comparisons import TOLERANCE, assert_same_bits, assert_two_programs_agree

import jmp_train
from jmp_train import (
    DynamicLossScale,
    NoOpLossScale,
    Policy,
    StaticLossScale,
    get_loss_scale,
    get_policy,
    with_loss_scale,
)

# Tests without autocast; `test_grad_autocast.py` tests what autocast adds.
grad = functools.partial(jmp_train.grad, autocast=False)
value_and_grad = functools.partial(jmp_train.value_and_grad, autocast=False)

SCALE = StaticLossScale(2.0**10)
NO_SCALE = NoOpLossScale()
POLICIES = ["float32", "tensorfloat32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16", "O2"]


def make_problem():
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(5, 8)) / 2, "b1": rng.normal(size=8) / 2, "w2": rng.normal(size=(8, 3)) / 2}
    batch = {"x": rng.normal(size=(16, 5)), "y": rng.normal(size=(16, 3))}
    return jax.tree.map(np.float32, params), jax.tree.map(np.float32, batch)


def loss_fn(params, batch):
    x = batch["x"].astype(params["w1"].dtype)
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((jnp.float32(hidden @ params["w2"]) - batch["y"]) ** 2)


def exact_gradient(params, batch):
    """The gradient written out in NumPy float64."""
    p = {key: np.asarray(value, np.float64) for key, value in params.items()}
    x, y = np.asarray(batch["x"], np.float64), np.asarray(batch["y"], np.float64)
    hidden = np.tanh(x @ p["w1"] + p["b1"])
    error = hidden @ p["w2"] - y
    d_out = 2 * error / error.size
    d_hidden = d_out @ p["w2"].T * (1 - hidden**2)
    grads = {"w1": x.T @ d_hidden, "b1": d_hidden.sum(0), "w2": hidden.T @ d_out}
    return np.mean(error**2), grads


# Dtypes and numbers


@pytest.mark.parametrize(
    ("name", "transform"), [*((name, jax.jit) for name in POLICIES), ("mixed_float16", lambda f: f)]
)
def test_loss_and_gradients_are_float32_unscaled_and_right(name, transform):
    params, batch = make_problem()
    policy = get_policy(name)
    seen = []

    def watched(params, batch):
        seen.append({leaf.dtype for leaf in jax.tree.leaves(params)} | {"batch", batch["x"].dtype})
        return loss_fn(params, batch)

    loss, grads = transform(value_and_grad(watched, policy))(params, batch, loss_scale=SCALE)
    assert seen == [{policy.compute_dtype, "batch", np.dtype("float32")}]
    assert {leaf.dtype for leaf in jax.tree.leaves((loss, grads))} == {np.dtype("float32")}
    exact_loss, exact_grads = exact_gradient(params, batch)
    tolerance = TOLERANCE[policy.compute_dtype.name].gradient
    np.testing.assert_allclose(loss, exact_loss, rtol=tolerance)
    for key, exact in exact_grads.items():
        assert np.linalg.norm(grads[key] - exact) <= tolerance * np.linalg.norm(exact), key


@pytest.mark.parametrize("loss_scale", [None, NO_SCALE, SCALE, DynamicLossScale(2.0**15)])
def test_under_float32_nothing_changes(loss_scale):
    params, batch = make_problem()
    with jax.default_matmul_precision("float32"):
        plain = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
    ours = jax.jit(value_and_grad(loss_fn, "float32"))(params, batch, loss_scale=loss_scale)
    assert_two_programs_agree(ours, plain)


def test_16_bit_parameters_get_float32_gradients():
    params, batch = make_problem()
    for name in ("float16", "bfloat16"):
        policy = get_policy(name)
        step = functools.partial(value_and_grad(loss_fn, policy), loss_scale=SCALE)
        _, grads = jax.eval_shape(step, policy.cast_to_param(params), batch)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}


def test_small_gradients_vanish_unscaled_and_survive_scaled():
    def tiny(w, x):
        return jnp.float32(w * x) * 1e-9

    w, x = jnp.float32(1), jnp.float16(3)
    assert grad(tiny, "mixed_float16")(w, x, loss_scale=NO_SCALE) == 0
    scaled = grad(tiny, "mixed_float16")(w, x, loss_scale=StaticLossScale(2.0**20))
    np.testing.assert_allclose(scaled, 3e-9, rtol=1e-3)


def test_the_loss_is_true_where_the_scaled_one_overflows():
    def big(w):
        return (w.astype(jnp.float16) * 60000).astype(jnp.float16)

    for loss_scale in (StaticLossScale(2.0**20), DynamicLossScale(2.0**24)):
        loss, gradient = value_and_grad(big, "mixed_float16")(jnp.float32(1), loss_scale=loss_scale)
        assert loss.dtype == jnp.float32 and loss == 60000
        assert not jnp.isfinite(gradient)
    loss, gradient = value_and_grad(lambda w: w * 1e37, "mixed_bfloat16")(jnp.float32(1), loss_scale=SCALE)
    assert jnp.isfinite(loss) and not jnp.isfinite(SCALE.scale(loss)) and not jnp.isfinite(gradient)


def test_scaling_by_a_power_of_two_is_exact_in_bfloat16():
    params, batch = make_problem()
    step = jax.jit(value_and_grad(loss_fn, "mixed_bfloat16"))
    assert_same_bits(step(params, batch, loss_scale=SCALE), step(params, batch, loss_scale=NO_SCALE))


def test_the_recipe_written_by_hand_with_jmp_gives_the_same():
    params, batch = make_problem()
    policy, loss_scale = jmp.get_policy("p=f32,c=f16,o=f32"), jmp.StaticLossScale(jnp.float32(2.0**10))

    def by_hand(params):
        loss = loss_fn(policy.cast_to_compute(params), batch)
        return loss_scale.scale(loss), loss

    grads, loss = jax.jit(jax.grad(by_hand, has_aux=True))(params)
    ours = jax.jit(value_and_grad(loss_fn, "p=f32,c=f16,o=f32"))(params, batch, loss_scale=SCALE)
    assert_two_programs_agree(ours, (loss, loss_scale.unscale(grads)), computed_in="float16")


def dot_precisions(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.params["precision"]
        for parameter in eqn.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from dot_precisions(inner)


def test_matmul_precision_holds_forward_and_backward():
    params, batch = make_problem()

    def precisions(policy):
        return list(dot_precisions(jax.make_jaxpr(value_and_grad(loss_fn, policy))(params, batch).jaxpr))

    # Two products forward, three backward.
    assert precisions("float32") == [(jax.lax.Precision.HIGHEST,) * 2] * 5
    assert precisions("tensorfloat32") == [(jax.lax.Precision.HIGH,) * 2] * 5
    plain = Policy("float32", "float32", "float32")
    assert precisions(plain) == [None] * 5
    with jax.default_matmul_precision("highest"):
        assert precisions(plain) == precisions("float32")


# The calling convention of jax.value_and_grad


@pytest.mark.parametrize("argnums", [0, 1, -1, -3, (0,), (1, 0), [0, 2]])
def test_argnums_and_structure_are_those_of_jax(argnums):
    def f(a, b, c, *, power=1):
        return (a["x"] * b + c) ** power

    args = ({"x": 2.0}, jnp.float32(3), np.float32(4))
    ours = value_and_grad(f, "float32", argnums=argnums)(*args, power=2)
    theirs = jax.value_and_grad(f, argnums=argnums)(*args, power=2)
    assert_same_bits(ours, jax.tree.map(jnp.asarray, theirs))


def test_only_differentiated_arguments_are_cast():
    def f(a, b, c):
        assert (a.dtype, b.dtype, c.dtype) == (jnp.float16, jnp.float32, jnp.float16)
        return jnp.float32(a + b + c)

    grads = grad(f, "mixed_float16", argnums=(0, 2))(*[jnp.float32(1)] * 3, loss_scale=SCALE)
    assert_same_bits(grads, (jnp.float32(1), jnp.float32(1)))


def test_aux_is_returned_as_it_is():
    def f(w):
        return w.astype(jnp.float32) ** 2, {"logits": w, "n": jnp.arange(2), "text": "abc", "none": None}

    (loss, aux), gradient = value_and_grad(f, "mixed_float16", has_aux=True)(jnp.float32(3), loss_scale=SCALE)
    assert (loss, gradient, aux["logits"].dtype, aux["text"], aux["none"]) == (9, 6, jnp.float16, "abc", None)
    gradient, aux = grad(f, "mixed_float16", has_aux=True)(jnp.float32(3), loss_scale=SCALE)
    assert (gradient, aux["n"].dtype) == (6, jnp.int32)


def test_the_function_is_named_after_the_loss_and_shows_its_keyword():
    for function in (value_and_grad(loss_fn, "float32"), grad(loss_fn, "float32")):
        assert function.__name__ == "loss_fn"
        assert "loss_scale" in inspect.signature(function).parameters
    params, batch = make_problem()
    assert jax.eval_shape(grad(functools.partial(loss_fn, batch=batch), "float32"), params)


def test_a_constant_loss_has_zero_gradient():
    loss, gradient = value_and_grad(lambda w: 1.0, "float32")(jnp.ones(2))
    assert loss.dtype == jnp.float32 and not gradient.any()
    assert loss == 1


# Transformations


@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_gradient_penalty(name):
    """The gradient of a gradient's norm, the outer one scaled: against float64 finite differences."""
    params, batch = make_problem()

    def penalised(params, batch):
        inner = grad(loss_fn, name)(params, batch, loss_scale=SCALE)
        return loss_fn(params, batch) + sum(jnp.sum(jnp.float32(leaf) ** 2) for leaf in jax.tree.leaves(inner))

    grads = jax.jit(grad(penalised, name))(params, batch, loss_scale=SCALE)

    def exact(w2):
        loss, gradient = exact_gradient(params | {"w2": w2}, batch)
        return loss + sum(np.sum(leaf**2) for leaf in gradient.values())

    w2, expected = np.float64(params["w2"]), np.zeros((8, 3))
    for index in np.ndindex(8, 3):
        step = np.zeros((8, 3))
        step[index] = 1e-5
        expected[index] = (exact(w2 + step) - exact(w2 - step)) / 2e-5
    tolerance = 3 * TOLERANCE[get_policy(name).compute_dtype.name].gradient
    assert np.linalg.norm(grads["w2"] - expected) <= tolerance * np.linalg.norm(expected)


def test_the_returned_loss_can_be_differentiated_itself():
    params, batch = make_problem()
    through = jax.jit(jax.grad(lambda p: value_and_grad(loss_fn, "float32")(p, batch)[0]))(params)
    with jax.default_matmul_precision("float32"):
        assert_two_programs_agree(through, jax.jit(jax.grad(loss_fn))(params, batch))


def test_per_example_gradients_by_vmap():
    params, batch = make_problem()

    def one(params, x, y):
        return loss_fn(params, {"x": x[None], "y": y[None]})

    def per_example(params, x, y):
        return grad(one, "mixed_float16")(params, x, y, loss_scale=SCALE)

    grads = jax.jit(jax.vmap(per_example, (None, 0, 0)))(params, batch["x"], batch["y"])
    assert grads["w1"].shape == (16, 5, 8)
    for key, exact in exact_gradient(params, batch)[1].items():
        error = np.linalg.norm(grads[key].mean(0) - exact)
        assert error <= TOLERANCE["float16"].gradient * np.linalg.norm(exact), key


def test_a_training_loop_in_scan_equals_steps_under_jit_with_one_trace():
    params, batch = make_problem()
    tx = with_loss_scale(optax.sgd(0.1), DynamicLossScale(2.0**15, growth_interval=2))
    grad_fn = value_and_grad(loss_fn, "mixed_float16")

    def step(carry, _):
        params, state = carry
        loss, grads = grad_fn(params, batch, loss_scale=get_loss_scale(state))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    carry, losses = (params, tx.init(params)), []
    jitted = jax.jit(chex.assert_max_traces(step, n=1))
    for _ in range(3):
        carry, loss = jitted(carry, None)
        losses.append(loss)
    scanned, scanned_losses = jax.lax.scan(step, (params, tx.init(params)), None, length=3)
    np.testing.assert_allclose(scanned_losses, losses, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), scanned[0], carry[0])
    assert losses[2] < losses[0]


def test_under_strict_promotion():
    params, _ = make_problem()
    with jax.numpy_dtype_promotion("strict"):
        for loss_scale in (SCALE, NO_SCALE, DynamicLossScale()):
            step = value_and_grad(lambda p: jnp.float32(p["w1"].sum()), "mixed_float16")
            jax.eval_shape(functools.partial(step, loss_scale=loss_scale), params)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_without_arguments_jax_says_what_is_missing(policy):
    with pytest.raises(TypeError, match=r"argnums=0 requires at least 1 positional arguments to be passed"):
        jmp_train.grad(lambda: 1.0, policy)()
