"""What crosses eight H200s, read from the compiled module: gradients in `reduce_dtype`, shards in the compute dtype."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jmp_train as jmp
from jmp_train._diagnostics._faults import collectives
from jmp_train._diagnostics._gpu_compile import gpu_mesh

pytestmark = pytest.mark.slow

DATA, WHOLE = PartitionSpec("data"), PartitionSpec()
SCALE = jmp.StaticLossScale(1024.0)
WIRES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
SHORT = {"float16": "f16", "bfloat16": "bf16"}


def loss_fn(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["in"]) @ params["out"] - y) ** 2)


def gathering(params, x, y):
    return loss_fn(jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, "data", tiled=True), params), x, y)


def arguments(mesh, spec):
    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    params = {"in": array(spec, 1024, 4096), "out": array(spec, 4096, 1024)}
    return params, array(DATA, 4096, 1024), array(DATA, 4096, 1024)


def crossing(fn, mesh, spec, **options):
    """How often each collective runs on arrays of each dtype. `fn` returns gradients only, so that no loss crosses."""
    compiled = jax.jit(fn, **options).lower(*arguments(mesh, spec)).compile()
    text = compiled.as_text()
    assert text is not None
    return Counter((name, dtype) for name, dtype, _ in collectives(text))


def gradient(policy, reduce_dtype, loss=loss_fn, axis_name=None):
    made = jmp.grad(loss, jmp.get_policy(policy).replace(reduce_dtype=reduce_dtype), axis_name=axis_name)
    return functools.partial(made, loss_scale=SCALE)


@pytest.mark.parametrize("reduce_dtype", WIRES)
@pytest.mark.parametrize("compute", SHORT)
@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_parameters(compute, reduce_dtype, check_vma):
    mesh = gpu_mesh(8)
    step = gradient(f"mixed_{compute}", reduce_dtype, axis_name="data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(WHOLE, DATA, DATA), out_specs=WHOLE, check_vma=check_vma)
    assert {dtype for _, dtype in crossing(mapped, mesh, WHOLE)} == {WIRES[reduce_dtype]}


@pytest.mark.parametrize("compute", SHORT)
def test_replicated_parameters_under_jit(compute):
    mesh = gpu_mesh(8)
    for reduce_dtype in ("float32", compute):
        step = gradient(f"mixed_{compute}", reduce_dtype)
        assert {dtype for _, dtype in crossing(step, mesh, WHOLE)} == {WIRES[reduce_dtype]}


@pytest.mark.parametrize("compute", SHORT)
@pytest.mark.parametrize("route", ["jit", "shard_map"])
def test_shards_are_cast_before_they_are_gathered_and_move_once(compute, route):
    mesh = gpu_mesh(8)
    if route == "jit":
        step, options = gradient(f"mixed_{compute}", "float32"), {"out_shardings": NamedSharding(mesh, DATA)}
    else:
        step = gradient(f"mixed_{compute}", "float32", gathering, "data")
        step, options = jax.shard_map(step, mesh=mesh, in_specs=DATA, out_specs=DATA), {}
    found = crossing(step, mesh, DATA, **options)
    gathers = {(name, dtype) for name, dtype in found if "gather" in name}
    sums = {dtype for name, dtype in found if "gather" not in name}
    assert gathers and {dtype for _, dtype in gathers} == {SHORT[compute]}
    assert sums == {"f32"}
    assert sum(count for (name, _), count in found.items() if "gather" in name) <= 2  # one for each parameter
