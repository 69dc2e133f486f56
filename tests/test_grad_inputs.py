"""`value_and_grad` for every kind of differentiated leaf, and its errors for wrong arguments."""

import dataclasses
import functools
import importlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_train
from jmp_train import DynamicLossScale, NoOpLossScale, StaticLossScale, get_loss_scale, get_policy, with_loss_scale

# Tests without autocast; `test_grad_autocast.py` tests what autocast adds.
grad = functools.partial(jmp_train.grad, autocast=False)
value_and_grad = functools.partial(jmp_train.value_and_grad, autocast=False)

SCALE = StaticLossScale(2.0**10)
NO_SCALE = NoOpLossScale()


def loss_fn(params):
    return jnp.sum(params)


# Leaf kinds


def test_overrides_choose_what_the_loss_sees():
    seen = {}

    def watched(params):
        seen.update({key: leaf.dtype.name for key, leaf in params.items()})
        return sum(jnp.float32(leaf).sum() for leaf in params.values())

    params = {"BatchNorm_0": jnp.ones(2), "Dense_0": jnp.ones(2)}
    grads = grad(watched, "c=f16,o=f32,@BatchNorm*=f32")(params, loss_scale=SCALE)
    assert seen == {"BatchNorm_0": "float32", "Dense_0": "float16"}
    assert {leaf.dtype.name for leaf in grads.values()} == {"float32"}


def test_complex_parameters_stay_complex():
    def f(tree):
        assert tree["z"].dtype == jnp.complex64 and tree["w"].dtype == jnp.bfloat16
        return jnp.abs(tree["z"]) ** 2 * jnp.float32(tree["w"])

    tree = {"z": jnp.complex64(3 + 1j), "w": jnp.float32(2)}
    grads = grad(f, "mixed_bfloat16")(tree, loss_scale=SCALE)
    assert grads["z"].dtype == jnp.complex64
    np.testing.assert_allclose(grads["z"], jax.grad(lambda z: 2 * jnp.abs(z) ** 2)(tree["z"]), rtol=1e-6)


def test_float64_parameters_stay_float64():
    with jax.enable_x64(True):
        w = jnp.array([1.0, 2.0], jnp.float64) / 3
        loss, gradient = value_and_grad(lambda w: jnp.sum(w**3), "mixed_float16")(w, loss_scale=SCALE)
        assert (loss.dtype, gradient.dtype) == (jnp.float64, jnp.float64)
        np.testing.assert_allclose(gradient, 3 * np.float64(w) ** 2, rtol=1e-14)
        # Unless the policy, or an override, speaks of them.
        kinds = []
        for policy in ("p=f64,c=f32", "c=bf16,@*=f32", "c=bf16"):
            grad(lambda w: kinds.append(w["w"].dtype.name) or jnp.sum(w["w"]), policy)({"w": w})
        assert kinds == ["float32", "float32", "float64"]


def test_other_leaves_among_the_differentiated():
    def f(tree):
        assert tree["none"] is None and tree["fp8"].dtype == jnp.float8_e5m2 and tree["python"].dtype == jnp.bfloat16
        return jnp.float32(tree["python"]) * 2 + jnp.float32(tree["numpy"]).sum() + jnp.float32(tree["fp8"]) * 4

    tree = {"none": None, "empty": {}, "python": 1.5, "numpy": np.ones(2), "fp8": jnp.float8_e5m2(1)}
    grads = grad(f, "mixed_bfloat16")(tree)
    assert grads["none"] is None and grads["empty"] == {}
    for key, expected in {"python": 2, "fp8": 4, "numpy": [1, 1]}.items():
        assert grads[key].dtype == jnp.float32
        np.testing.assert_array_equal(grads[key], expected)


def test_fp8_statistics_pass_unscaled_and_uncast():
    """Flax's fp8 layers return new statistics as the gradient of the old ones."""

    @jax.custom_vjp
    def layer(w, statistic):
        return w

    layer.defvjp(lambda w, statistic: (w, statistic), lambda statistic, g: (g, statistic + 70001.0))

    def f(tree):
        statistic = tree["_overwrite_with_gradient"]["amax"]
        assert statistic.dtype == jnp.float32 and tree["params"].dtype == jnp.float16
        return jnp.float32(layer(tree["params"], statistic))

    tree = {"params": jnp.float32(1), "_overwrite_with_gradient": {"amax": jnp.float32(2)}}
    grads = grad(f, "mixed_float16")(tree, loss_scale=SCALE)
    assert (grads["params"], grads["_overwrite_with_gradient"]["amax"]) == (1, 70003)


def test_nnx_state_works_and_modules_are_refused():
    nnx = importlib.import_module("flax.nnx")
    module = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)

    def f(state):
        return jnp.float32(nnx.merge(graph, state)(jnp.ones((1, 2), jnp.bfloat16)).sum())

    grads = grad(f, "mixed_bfloat16")(state)
    np.testing.assert_array_equal(grads["kernel"][...], np.ones((2, 1)))
    message = (
        "an argument is or holds the NNX module Linear: updates that the loss function makes to it, such as "
        "BatchNorm's statistics, would be lost; flax_bridge.value_and_grad (from jmp_train import flax_bridge) takes a "
        "module as its first argument and returns them. A module that does not change can be closed over."
    )
    for argument in (module, {"model": [module]}):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            grad(lambda m: 0.0, "float32")(argument)
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            grad(lambda w, m: w, "float32")(jnp.float32(1), argument)
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            grad(lambda w, m: w, "float32")(jnp.float32(1), m=argument)


def test_a_module_of_another_library_is_a_tree():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Module:
        w: jax.Array

    assert grad(lambda module: module.w**2, "float32")(Module(jnp.float32(3))).w == 6


def test_a_complex_number_of_python():
    assert grad(lambda z: jnp.abs(z) ** 2, "float32")(3 + 4j) == 6 - 8j


# Errors


@pytest.mark.parametrize("policy", ["mixed_float16", "O2", "float16", "p=f32,c=f32,o=f16", "c=bf16,@w=f16"])
def test_float16_needs_a_loss_scale(policy):
    message = (
        f"`loss_scale` is required because float16 gradients vanish without it (the policy is '{get_policy(policy)}'); "
        f"pass loss_scale=get_loss_scale(opt_state) with an optimizer from with_loss_scale, a StaticLossScale, or "
        f"NoOpLossScale() to go without."
    )
    f = value_and_grad(lambda p: jnp.float32(p["w"]), policy)
    with pytest.raises(TypeError, match=re.escape(message)):
        f({"w": jnp.float32(1)})
    with pytest.raises(TypeError, match=re.escape(message)):
        jax.jit(f)({"w": jnp.float32(1)})
    assert f({"w": jnp.float32(1)}, loss_scale=NO_SCALE)[0] == 1


def test_float16_parameters_or_overrides_need_one_under_any_policy():
    with pytest.raises(TypeError, match="`loss_scale` is required"):
        grad(lambda w: jnp.float32(w), "float32")(jnp.float16(1))
    with pytest.raises(TypeError, match="`loss_scale` is required"):
        grad(lambda w: jnp.float32(w), get_policy("float32").replace(overrides=lambda p, x: "f16"))(jnp.float32(1))


@pytest.mark.parametrize(
    "wrong, got",
    [
        (1024.0, "an object of type float; wrap the number: StaticLossScale(number)."),
        (1024, "an object of type int; wrap the number: StaticLossScale(number)."),
        (np.ones(2), "float64[2]; wrap the number: StaticLossScale(number)."),
        (
            types.SimpleNamespace(scale=abs),
            "an object of type SimpleNamespace; take it out of the optimizer's state: get_loss_scale(opt_state).",
        ),
        (
            types.SimpleNamespace(unscale=abs),
            "an object of type SimpleNamespace; take it out of the optimizer's state: get_loss_scale(opt_state).",
        ),
        (jnp.float32(1024), "float32[]; wrap the number: StaticLossScale(number)."),
        (np.float32(1024), "float32[]; wrap the number: StaticLossScale(number)."),
        (DynamicLossScale, "the class DynamicLossScale; build one: DynamicLossScale()."),
        (
            with_loss_scale(optax.sgd(0.1)).init(jnp.ones(2)),
            "an object of type LossScaleState; take it out of the optimizer's state: get_loss_scale(opt_state).",
        ),
        (
            get_policy("O1"),
            "an object of type Policy; take it out of the optimizer's state: get_loss_scale(opt_state).",
        ),
    ],
)
def test_what_is_no_loss_scale(wrong, got):
    message = f"`loss_scale` must be a NoOpLossScale, StaticLossScale or DynamicLossScale, got {got}"
    with pytest.raises(TypeError, match=re.escape(message)):
        grad(lambda w: w, "float32")(jnp.float32(1), loss_scale=wrong)


def test_an_argument_loss_scale_of_the_loss_function():
    message = (
        "`loss_scale=` scales the gradients and is not handed to `loss_fn`, which has an argument of this name; rename "
        "that argument, or remove it if all it did was scale the loss: that is done here."
    )
    one, x = jnp.float32(1), jnp.float32(3)

    def own(w, x, loss_scale):
        return w * x * loss_scale

    def own_keyword(w, *, loss_scale):
        return w * loss_scale

    for f, args in ((own, (one, x)), (own_keyword, (one,))):
        with pytest.raises(TypeError, match=re.escape(message)):
            value_and_grad(f, "mixed_float16")(*args, loss_scale=SCALE)

    @functools.wraps(own)
    def wrapper(*args):
        return own(*args, loss_scale=2.0)

    def own_numbers(w, *loss_scale):
        return w * sum(loss_scale) * 2

    def own_keywords(w, **loss_scale):
        return w * loss_scale["x"] * 2

    by_position = value_and_grad(own, "mixed_float16")(one, x, 2.0, loss_scale=SCALE)
    all_numbers = value_and_grad(own_numbers, "mixed_float16")(one, x, loss_scale=SCALE)
    all_keywords = value_and_grad(own_keywords, "mixed_float16")(one, x=x, loss_scale=SCALE)
    wrapped = value_and_grad(wrapper, "mixed_float16")(one, x, loss_scale=SCALE)
    bound = value_and_grad(functools.partial(own, loss_scale=2.0), "mixed_float16")(one, x, loss_scale=SCALE)
    assert by_position == wrapped == bound == all_numbers == all_keywords == (6, 6)


def test_a_loss_scale_for_each_of_an_ensemble():
    params = {"w": jnp.ones((2, 3))}
    scales = get_loss_scale(jax.vmap(with_loss_scale(optax.sgd(1.0), DynamicLossScale(1024)).init)(params))

    def gradients(params, scale):
        return grad(lambda p: jnp.sum(p["w"] ** 2), "mixed_float16")(params, loss_scale=scale)

    np.testing.assert_array_equal(jax.vmap(gradients)(params, scales)["w"], 2 * params["w"])
    message = "`loss_scale` must be one number, got the shape (2,), as the states of jax.vmap(tx.init) hold; compute"
    with pytest.raises(ValueError, match=re.escape(message)):
        gradients(params, scales)


@pytest.mark.parametrize("wrong", [0, (0, 1), [1]])
@pytest.mark.parametrize("function", [grad, value_and_grad])
def test_argnums_where_the_policy_belongs(function, wrong):
    message = (
        f"`policy` must be a Policy or a name such as 'mixed_float16', got {wrong!r}; the argument that comes second "
        f"in jax.value_and_grad and jax.grad is a keyword here: argnums={wrong!r}."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        function(loss_fn, wrong)


def test_other_things_where_the_policy_or_argnums_belong():
    with pytest.raises(TypeError, match=re.escape("`policy` must be a Policy or a name such as 'mixed_float16', got")):
        grad(loss_fn, SCALE)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=re.escape("unknown policy 'mixed_fp16' (did you mean 'mixed_float16'?)")):
        grad(loss_fn, "mixed_fp16")
    for wrong in (get_policy("O1"), "params", ["params"], 1.0):
        message = f"`argnums` must be an integer or a sequence of integers, got {wrong!r}."
        with pytest.raises(TypeError, match=re.escape(message)):
            grad(loss_fn, "float32", argnums=wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "result, got",
    [
        (lambda w: w * jnp.ones(3), "float32[3]; take its mean or its sum."),
        (lambda w: w[None], "float32[1]; take its mean or its sum."),
        (lambda w: np.ones(3, np.float32), "float32[3]; take its mean or its sum."),
        (lambda w: np.int32(3), "int32[]; convert it, or take its real part or absolute value."),
        (lambda w: 1j, "an object of type complex; convert it, or take its real part or absolute value."),
        (lambda w: 3, "an object of type int; convert it, or take its real part or absolute value."),
        (lambda w: jnp.int32(w), "int32[]; convert it, or take its real part or absolute value."),
        (lambda w: w * 1j, "complex64[]; convert it, or take its real part or absolute value."),
        (lambda w: (w, w), "an object of type tuple; pass has_aux=True if that is (loss, aux)."),
        (lambda w: {"loss": w}, "an object of type dict; return the loss, such as jnp.mean(errors**2)."),
        (lambda w: None, "None; return the loss, such as jnp.mean(errors**2)."),
    ],
)
def test_a_loss_that_is_no_real_floating_scalar(result, got):
    message = f"`loss_fn` must return a real floating scalar, got {got}"
    with pytest.raises(TypeError, match=re.escape(message)):
        grad(result, "float32")(jnp.float32(1))
    if "has_aux" not in got:
        with pytest.raises(TypeError, match=re.escape(message)):
            grad(lambda w: (result(w), None), "float32", has_aux=True)(jnp.float32(1))


def test_aux_that_is_missing():
    message = (
        "`loss_fn` must return the pair (loss, aux) because has_aux=True, got float32[]; return both, or leave has_aux "
        "out."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        grad(lambda w: w, "float32", has_aux=True)(jnp.float32(1))
    for wrong in (lambda w: (w, None, None), lambda w: (w,), lambda w: [w, None]):
        with pytest.raises(TypeError, match=r"^`loss_fn` must return the pair .* got an object of type (tuple|list); "):
            grad(wrong, "float32", has_aux=True)(jnp.float32(1))


@pytest.mark.parametrize(
    "argument, got",
    [
        ({"w": 1.0, "step": jnp.int32(3)}, "int32[] for the leaf 'step'"),
        ({"a": [1.0, jnp.array([True])]}, "bool[1] for the leaf 'a/1'"),
        (3, "an object of type int for the argument"),
        ({"key": jax.random.key(0)}, "key<fry>[] for the leaf 'key'"),
        ({"activation": print}, "an object of type builtin_function_or_method for the leaf 'activation'"),
        ({"name": "dense"}, "an object of type str for the leaf 'name'"),
        ({"type": jnp.float32}, "an object of type _ScalarMeta for the leaf 'type'"),
        ({"spec": types.SimpleNamespace(shape=())}, "an object of type SimpleNamespace for the leaf 'spec'"),
    ],
)
def test_leaves_without_gradients(argument, got):
    integer = not any(f"type {name}" in got for name in ("builtin", "str", "_ScalarMeta", "SimpleNamespace"))
    message = (
        f"a differentiated argument must hold floating or complex numbers only, got {got}; pass it as an argument that "
        f"`argnums` does not name{', or pass allow_int=True for a gradient of float0' if integer else ''}."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        grad(lambda tree: 0.0, "float32")(argument)


def test_what_is_no_loss_function():
    message = "`loss_fn` must be callable, got None; pass the function to differentiate."
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        grad(None, "float32")  # pyright: ignore[reportArgumentType]


def test_no_argument_to_differentiate():
    message = "`argnums` must name an argument to differentiate with respect to, got none."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        grad(loss_fn, "float32", argnums=())
    with pytest.raises(ValueError, match=re.escape("`argnums` must name each argument once, got (0, 0).")):
        grad(loss_fn, "float32", argnums=(0, 0))


def test_a_tree_of_arrays_in_the_wrong_place_is_shown_in_one_line():
    params = {"w": jnp.ones((50, 50)), "b": jnp.arange(1000.0)}
    wrong = (
        lambda: grad(loss_fn, params),  # pyright: ignore[reportArgumentType]
        lambda: jmp_train.grad(loss_fn, "float32", rules=params),  # pyright: ignore[reportArgumentType]
        lambda: jmp_train.autocast(loss_fn, "float32", argnums=params),  # pyright: ignore[reportArgumentType]
        lambda: jmp_train.cast_floating(params, params),  # pyright: ignore[reportArgumentType]
        lambda: with_loss_scale(optax.sgd(1.0), params),  # pyright: ignore[reportArgumentType]
        lambda: jmp_train.Policy("float32", "float32", "float32", overrides=(params,)),  # pyright: ignore[reportArgumentType]
        lambda: jmp_train.DEFAULT_RULES.replace(params["w"]),  # pyright: ignore[reportArgumentType]
    )
    for call in wrong:
        with pytest.raises(TypeError, match="Array") as error:
            call()
        assert len(str(error.value)) < 450 and "\n" not in str(error.value)


def test_arguments_that_are_not_there_are_left_to_jax():
    with pytest.raises(Exception, match="argnums"):
        grad(loss_fn, "float32", argnums=5)(jnp.float32(1))
    with pytest.raises(Exception, match="argnums"):
        grad(loss_fn, "float32")(params=jnp.float32(1))
