"""Python numbers as results: in a jaxpr they are literals, which are not arrays, but autocast must return arrays."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

import jmp_train as jmp
from jmp_train import flax_bridge

POLICIES = ["float32", "tensorfloat32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16"]
SCALE = jmp.StaticLossScale(8.0)
MATRIX = jnp.ones((3, 3))


def numbers(p) -> Any:
    return p @ p, 1, 2.5, True


@jax.custom_jvp
def with_jvp(p):
    return numbers(p)


@with_jvp.defjvp
def _(primals, tangents):
    no_tangent = np.zeros((), jax.dtypes.float0)
    return with_jvp(*primals), (primals[0] @ tangents[0] + tangents[0] @ primals[0], no_tangent, 0.0, no_tangent)


@jax.custom_vjp
def with_vjp(p):
    return numbers(p)


with_vjp.defvjp(lambda p: (numbers(p), (p, 2.0)), lambda saved, ct: (saved[1] * (ct[0] @ saved[0].T),))

PROGRAMS = {
    "alone": lambda p: 0.0,
    "beside arrays": numbers,
    "numpy": lambda p: (p, np.float32(1), np.ones(2, np.int32), np.float16(2)),
    "jit": jax.jit(numbers),
    "remat": jax.checkpoint(numbers),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "full_precision": jmp.full_precision(numbers),
    "low_precision": jmp.low_precision(numbers),
    "vmap": jax.vmap(lambda p: (p, 1, 2.5, True), out_axes=(0, None, None, None)),
    "cond": lambda p: jax.lax.cond(p[0, 0] > 0, lambda p: (p @ p, 1.0, True), lambda p: (p, 2.0, False), p),
    "scan": lambda p: jax.lax.scan(lambda c, _: ((c[0] @ p, 3.0, True), (1.0, 2)), (p, 0.0, False), None, length=2),
    "fori_loop": lambda p: jax.lax.fori_loop(0, 2, lambda i, c: (c[0] @ p, 3.0, True), (p, 0.0, False)),
    "16-bit sum in a scan": lambda p: jax.lax.scan(
        lambda c, _: ((c[0] + p[0, 0].astype(jnp.float16), True), 1), (jnp.zeros((), jnp.float16), False), None, 2
    ),
}


@pytest.mark.parametrize("policy", [pytest.param("mixed_bfloat16", marks=pytest.mark.slow), "mixed_float16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_the_arrays_of_jit(name, policy):
    expected, tree = jax.tree.flatten(jax.jit(PROGRAMS[name])(MATRIX))
    for run in (jmp.autocast(PROGRAMS[name], policy), jax.jit(jmp.autocast(PROGRAMS[name], policy))):
        got, got_tree = jax.tree.flatten(run(MATRIX))
        assert got_tree == tree and all(isinstance(leaf, jax.Array) for leaf in got)
        assert [(leaf.dtype, leaf.weak_type) for leaf in got] == [(leaf.dtype, leaf.weak_type) for leaf in expected]
        for leaf, want in zip(got, expected, strict=True):
            np.testing.assert_array_equal(leaf, want)  # small whole numbers: exact in 16 bits


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_describes_them(name, policy):
    outputs = jmp.explain(PROGRAMS[name], policy)(MATRIX).outputs
    expected = jax.tree.leaves(jax.eval_shape(PROGRAMS[name], MATRIX))
    assert [(output.shape, output.dtype) for output in outputs] == [(leaf.shape, leaf.dtype.name) for leaf in expected]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("loss", [0.0, np.float32(2), np.float64(2), np.float16(2), np.ones(())], ids=repr)
def test_a_constant_loss_has_zero_gradients(loss, autocast, policy):
    value, grads = jmp.value_and_grad(lambda p: loss, policy, autocast=autocast)({"w": MATRIX}, loss_scale=SCALE)
    assert isinstance(value, jax.Array) and value.dtype == np.float32 and value == loss
    assert grads["w"].dtype == np.float32 and not jnp.any(grads["w"])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("autocast", [True, False])
def test_numbers_beside_the_loss_come_back_as_they_are(autocast, policy):
    grad_fn = jmp.value_and_grad(
        lambda p: (1.5, (1, 2.5, True, None, 3j, "a")), policy, has_aux=True, autocast=autocast
    )
    (loss, aux), grads = grad_fn(MATRIX, loss_scale=SCALE)
    assert loss == 1.5 and aux == (1, 2.5, True, None, 3j, "a") and list(map(type, aux[:3])) == [int, float, bool]
    assert not jnp.any(grads)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_constant_loss_of_a_module(policy):
    loss, grads, _ = flax_bridge.value_and_grad(lambda model: 0.0, policy)(
        nnx.Linear(2, 3, rngs=nnx.Rngs(0)), loss_scale=SCALE
    )
    assert loss == 0 and not any(jnp.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_a_constant_loss_inside_transforms(transform):
    loss, grads = transform(lambda p: jmp.value_and_grad(lambda p: 2.0, "mixed_float16")(p, loss_scale=SCALE))(MATRIX)
    assert jnp.all(loss == 2) and grads.shape == MATRIX.shape and not jnp.any(grads)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_constant_loss_is_its_own_mean_over_devices(autocast, check_vma):
    grad_fn = jmp.value_and_grad(lambda p: 2.0, "mixed_float16", axis_name="data", autocast=autocast)
    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec()
    step = jax.shard_map(
        lambda p: grad_fn(p, loss_scale=SCALE), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    loss, grads = jax.jit(step)(MATRIX)
    assert loss == 2 and grads.shape == MATRIX.shape and not jnp.any(grads)


WEAK = {
    "a product": lambda x: x @ x,
    "a function of one": lambda x: jax.nn.relu(x @ x) * 2,
    "a gradient": jax.grad(lambda x: jnp.mean(jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (1, 1), "VALID"))),
    "with strong ones": lambda x: (x @ x, x + MATRIX, jnp.float16(1) * x),
}


@pytest.mark.parametrize("name", WEAK)
def test_results_of_weakly_typed_arrays_are_weakly_typed(name):
    x = jnp.full(MATRIX.shape, 0.5)
    want = jax.tree.leaves(jax.jit(WEAK[name])(x))
    for run in (jmp.autocast(WEAK[name], "mixed_float16"), jax.jit(jmp.autocast(WEAK[name], "mixed_float16"))):
        got = jax.tree.leaves(run(x))
        assert [(leaf.dtype, leaf.weak_type) for leaf in got] == [(leaf.dtype, leaf.weak_type) for leaf in want]
    assert want[0].weak_type


@pytest.fixture(params=[False, True], ids=["as operands", "as literals"])
def written(request):
    """Whether JAX writes captured arrays into the equations that read them."""
    before = getattr(jax.config, "jax_use_simplified_jaxpr_constants")  # noqa: B009
    jax.config.update("jax_use_simplified_jaxpr_constants", request.param)
    yield
    jax.config.update("jax_use_simplified_jaxpr_constants", before)


@pytest.mark.usefixtures("written")
def test_captured_arrays_are_data_however_jax_records_them():
    scales, weights = (np.random.default_rng(i).normal(size=(8, 8)).astype(np.float32) for i in range(2))

    def loss(w, x):
        h = (x * scales) @ w
        last = (h @ weights) @ weights
        return jnp.sum(jnp.where(jnp.abs(last) == np.full((8, 8), np.inf, np.float32), 0, jnp.tanh(last)))

    text = jmp.explain(jax.grad(loss), "mixed_float16")(weights, scales).program()
    assert text.startswith("{ lambda a:f32[8,8] b:f32[8,8] c:f32[8,8] ; ")  # the arrays that it captures, each once
    assert re.search(r"f32\[8,8\] = mul \w+ a\n", text)
    got, want = jmp.autocast(jax.grad(loss), "mixed_float16")(weights, scales), jax.grad(loss)(weights, scales)
    assert np.linalg.norm(got - want) < 5e-3 * np.linalg.norm(want)
