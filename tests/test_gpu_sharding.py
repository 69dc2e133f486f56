"""Transfers between eight H200s in the compiled module: gradients in `reduce_dtype`, shards in the compute dtype."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jmp_train as jmp
from jmp_train._diagnostics.gpu._compile import gpu_mesh
from jmp_train._diagnostics.gpu._findings import collectives

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
    """The number of runs of each collective on each dtype. `fn` returns gradients only, so that no loss crosses."""
    compiled = jax.jit(fn, **options).lower(*arguments(mesh, spec)).compile()
    text = compiled.as_text()
    assert text is not None
    return Counter((each.operation, each.dtypes[0]) for each in collectives(text))


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


def normalised(x, scale):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale


def transformer_loss(params, tokens, targets):
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        h = normalised(x, layer["norm"])
        q, k, v = (jnp.einsum("bld,dhk->blhk", h, layer[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("blhk,bmhk->bhlm", q, k) / 8, -1)
        x = x + jnp.einsum("bhlm,bmhk,hkd->bld", weights, v, layer["o"])
        x = x + jax.nn.gelu(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], targets).mean()


def experts_loss(params, x, y):
    hidden = jax.nn.relu(jnp.einsum("nd,edh->enh", x, params["up"]) + params["bias"][:, None])
    outputs = jnp.einsum("enh,ehd->end", hidden, params["down"])
    return jnp.mean((jnp.einsum("ne,end->nd", jax.nn.softmax(x @ params["router"]), outputs) - y) ** 2)


def convolution_loss(params, x, y):
    for kernel in params["kernels"]:
        x = jax.nn.relu(
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
    return jnp.mean((x.mean((1, 2)) @ params["out"] - y) ** 2)


# Shapes, and how they are split over a model or expert axis. All matrices have sizes of their own.
P = PartitionSpec
LAYER = {
    "norm": ((256,), P()),
    **{name: ((256, 8, 64), P(None, "model")) for name in "qkv"},
    "o": ((8, 64, 256), P("model")),
    "up": ((256, 1152), P(None, "model")),
    "bias": ((1152,), P("model")),
    "down": ((1152, 256), P("model")),
}
TRANSFORMER = {"embedding": ((640, 256), P("model")), "head": ((256, 640), P(None, "model")), "layers": [LAYER] * 2}
EXPERTS = {
    "router": ((512, 8), P()),
    **{"up": ((8, 512, 1024), P("model")), "bias": ((8, 1024), P("model")), "down": ((8, 1024, 512), P("model"))},
}
CONVOLUTIONS = {"kernels": [((3, 3, 64, 64), P())] * 2, "out": ((64, 16), P())}
TOKENS = jax.ShapeDtypeStruct((32, 128), np.int32)
ROWS = jax.ShapeDtypeStruct((1024, 512), np.float32)
IMAGES = jax.ShapeDtypeStruct((64, 16, 16, 64), np.float32), jax.ShapeDtypeStruct((64, 16), np.float32)


def fully_sharded(shape, _):
    """Split over all devices: the embedding by its words, else along the last dimension that they divide."""
    axis = 0 if shape == TRANSFORMER["embedding"][0] else max(i for i, size in enumerate(shape) if size % 8 == 0)
    return P(*[None] * axis, "data")


def adam_step(loss, shapes, batch, mesh, spec_of):
    """The collectives of a step whose state is sharded as its parameters are, without the booleans of the check."""
    is_leaf = lambda node: isinstance(node, tuple)  # noqa: E731

    def place(leaf, spec):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(
        lambda leaf: place(jax.ShapeDtypeStruct(leaf[0], np.float32), spec_of(*leaf)), shapes, is_leaf=is_leaf
    )
    tx = jmp.with_loss_scale(optax.adam(1e-3))
    opt_state = optax.tree_map_params(
        tx,
        lambda leaf, param: place(leaf, param.sharding.spec),
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda leaf: place(leaf, WHOLE),
    )
    grad_fn = jmp.value_and_grad(loss, "mixed_float16")

    def step(params, opt_state, *batch):
        _, grads = grad_fn(params, *batch, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    placed = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=placed)
    text = jitted.lower(params, opt_state, *(place(leaf, DATA) for leaf in batch)).compile().as_text()
    return [each for each in operands(text) if not each[1].startswith("pred")]


def operands(text):
    """`(operation, operand)` of what crosses, such as `("all-gather", "f16[32,4096]")`."""
    types = dict(re.findall(r"%([\w.\-]+) = (\S+\[[\d,]*\])", text))
    found = []
    for name, arguments in re.findall(r" (all-[\w]+|reduce-scatter)(?:-start)?\(([^)]*)\)", text):
        if not name.endswith("done"):
            found += [(name, types[each]) for each in re.findall(r"%([\w.\-]+)", arguments)]
    return found


def test_a_fully_sharded_transformer_moves_each_matrix_once():
    """In the compute dtype; its gradient moves in float32. An embedding is cast after its lookup."""
    crossing = adam_step(transformer_loss, TRANSFORMER, (TOKENS, TOKENS), gpu_mesh(8), fully_sharded)
    gathered = Counter()
    for name, operand in crossing:
        if name == "all-gather" and "," in operand:
            dtype, *sizes = re.findall(r"\w+", operand)
            gathered[dtype, int(np.prod([*map(int, sizes)]))] += 1
    heads, hidden, words = 256 * 8 * 64 // 8, 256 * 1152 // 8, 256 * 640 // 8
    assert gathered == {("f16", heads): 8, ("f16", hidden): 4, ("f16", words): 1, ("f32", words): 1}
    assert {each[:3] for name, each in crossing if name == "reduce-scatter"} == {"f32"}


@pytest.mark.parametrize(
    "loss, shapes, batch",
    [(transformer_loss, TRANSFORMER, (TOKENS, TOKENS)), (experts_loss, EXPERTS, (ROWS, ROWS))],
    ids=["tensors", "experts"],
)
def test_split_over_a_model_axis_each_gradient_crosses_the_data_axis_once(loss, shapes, batch):
    """Two groups of four GPUs: a quarter of the gradients in one float32 sum. Activations cross the model axis."""
    mesh = Mesh(gpu_mesh(8).devices.reshape(2, 4), ("data", "model"))
    crossing = adam_step(loss, shapes, batch, mesh, lambda _, spec: spec)
    own = 0
    for shape, spec in jax.tree.leaves(shapes, is_leaf=lambda node: isinstance(node, tuple)):
        # XLA splits the router, which is whole, as the experts' activations are.
        own += int(np.prod(shape)) // (4 if "model" in spec or shape[-1] == 8 else 1)
    assert ("all-reduce", f"f32[{own}]") in crossing
    moved = {operand for name, operand in crossing if name == "all-gather"} - {"f32[512,2]"}  # the router
    assert not moved


def test_convolutions():
    """In a shard_map their gradients cross in `reduce_dtype`; under jit in their own dtype (see README)."""
    mesh = gpu_mesh(8)
    crossing = adam_step(convolution_loss, CONVOLUTIONS, IMAGES, mesh, lambda *_: WHOLE)
    assert {each[:3] for name, each in crossing if name == "all-reduce"} == {"f16", "f32"}
    step = gradient("mixed_float16", "float32", convolution_loss, "data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(WHOLE, DATA, DATA), out_specs=WHOLE)
    is_leaf = lambda node: isinstance(node, tuple)  # noqa: E731
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf[0], np.float32), CONVOLUTIONS, is_leaf=is_leaf)
    text = jax.jit(mapped).lower(params, *IMAGES).compile().as_text()
    assert {each[:3] for _, each in operands(text)} == {"f32"}
