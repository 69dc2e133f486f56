"""The arguments that the diagnostics accept (NNX, static arguments, side effects), and their errors for others."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_train as jmp
from jmp_train import diagnostics

X = np.ones((4, 4), np.float32)
SHAPE = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def deleted():
    array = jnp.ones(3)
    array.delete()
    return {"w": array}


READERS = {
    "exponent_histogram": (diagnostics.exponent_histogram, "the leaf 'w'"),
    "underflow_report": (diagnostics.underflow_report, "the leaf 'w'"),
    "suggest_loss_scale": (diagnostics.suggest_loss_scale, "the leaf 'w'"),
    "find_overflow": (lambda tree: diagnostics.find_overflow(lambda tree: tree["w"])(tree), "the argument '0/w'"),
    "backward_histogram": (
        lambda tree: diagnostics.backward_histogram(lambda tree: tree["w"])(tree),
        "the argument '0/w'",
    ),
    "sensitivity": (lambda tree: diagnostics.sensitivity(loss_fn, "mixed_bfloat16")(tree, X), "the argument '0/w'"),
}


@pytest.mark.parametrize("name", READERS)
def test_arrays_without_numbers(name):
    read, what = READERS[name]
    with pytest.raises(TypeError) as error:
        read({"w": SHAPE})
    assert str(error.value) == f"{what} is a shape without numbers, {SHAPE}: {name} needs numbers; pass arrays."
    with pytest.raises(ValueError) as value_error:
        read(deleted())
    assert str(value_error.value) == (
        f"{what} was deleted, by donating it to an earlier call; keep a copy of the arguments, or call {name} with "
        "fresh ones."
    )


def test_sensitivity_inside_jit():
    with pytest.raises(TypeError) as error:
        jax.jit(diagnostics.sensitivity(loss_fn, "mixed_bfloat16"))(X, X)
    assert str(error.value) == "the argument '0' is traced: sensitivity needs numbers; call it outside jit, on arrays."


@pytest.mark.parametrize(
    "report", [diagnostics.tensor_core_report, pytest.param(diagnostics.gpu_report, marks=pytest.mark.slow)]
)
def test_static_arguments_of_a_jitted_function(report):
    def fn(w, power, name="tanh"):
        return jnp.sum(getattr(jnp, name)(w @ w) ** power) if isinstance(power, int) else None

    made = report(jax.jit(fn, static_argnums=1, static_argnames="name"))(X, 3, name="sin")
    assert len(made.products) == 1


@pytest.mark.slow
def test_gpu_report_of_nnx_and_of_callbacks():
    module = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    report = diagnostics.gpu_report(nnx.jit(nnx.grad(lambda module, x: jnp.mean(module(x)))))(module, X)
    assert report.kernels and json.dumps(report.as_dict(), allow_nan=False)

    def talks(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(ValueError) as error:
        diagnostics.gpu_report(talks)(X)
    assert str(error.value) == (
        "`fn` calls back to Python (jax.debug.print, jax.pure_callback), which cannot be compiled for a GPU that is "
        "not there; leave the call out for the report."
    )


def test_values_survive_json():
    tx = jmp.with_loss_scale(optax.sgd(0.1))
    _, opt_state = tx.update({"w": jnp.full((2, 2), jnp.nan)}, tx.init({"w": jnp.ones((2, 2))}))
    odd = {"w": np.array([np.inf, np.nan, 0, 1e-30, 2.0], np.float32), "none": None, "i": np.arange(3)}
    values = [
        diagnostics.exponent_histogram(odd).as_dict(),
        diagnostics.exponent_histogram({}).as_dict(),
        diagnostics.underflow_report(odd, "bfloat16", 8.0).as_dict(),
        diagnostics.underflow_report({}).as_dict(),
        diagnostics.overflow_report(opt_state, {"w": jnp.ones((2, 2))}).as_dict(),
        diagnostics.find_overflow(lambda x: jnp.log(x) * np.inf)(np.zeros((2, 2), np.float32)).as_dict(),
        diagnostics.find_overflow(jnp.sin)(X).as_dict(),
        diagnostics.tensor_core_report(jax.grad(loss_fn), "mixed_float16")(SHAPE, SHAPE).as_dict(),
        diagnostics.tensor_core_report(jnp.sin)(X).as_dict(),
    ]
    for value in values:
        assert json.loads(json.dumps(value, allow_nan=False)) == value
