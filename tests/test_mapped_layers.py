"""Layers of a network that are `shard_map`s: what they save for the backward pass, and loops around them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from jax import lax

from jmp_train import DEFAULT_RULES, autocast
from jmp_train._diagnostics.gpu._compile import gpu_mesh, module_text
from jmp_train._diagnostics.gpu._kernels import traffic

P, DATA, WHOLE = jax.P, jax.P("data"), jax.P()
RNG = np.random.default_rng(0)
W = {name: RNG.normal(size=(16, 16)).astype(np.float32) / 4 for name in ("in", "out")}
X = RNG.normal(size=(64, 16)).astype(np.float32)
OTHER = {name: RNG.normal(size=(16, 16)).astype(np.float32) / 4 for name in ("in", "out")}


def mesh_of(axes=("data",), kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((8,) if len(axes) == 1 else (4, 2), axes, axis_types=(kind,) * len(axes))


def mapped(fn, check=True, weights: Any = WHOLE, axes=("data",), **options):
    return jax.shard_map(fn, mesh=mesh_of(axes), in_specs=(weights, DATA), out_specs=DATA, check_vma=check, **options)


def mlp(w, x):
    return jax.nn.gelu(x @ w["in"]) @ w["out"]


def scaled_mlp(w, x):
    """Each device scales by one number of its own, which a `shard_map` without replication checks cannot return."""
    h = x @ w["in"]
    return jax.nn.gelu(h * jnp.exp(jnp.mean(h))) @ w["out"]


def attention(w, x):
    everyone = lax.all_gather(x, "data", tiled=True)
    return jax.nn.softmax(x @ w["in"] @ everyone.T, -1) @ everyone @ w["out"]


def gated(w, x):
    gate, value = jnp.split(x @ w["in"], 2, -1)
    return jnp.concatenate([jax.nn.silu(gate) * value] * 2, -1) @ w["out"]


def split_over_model(w, x):
    return lax.psum(mlp(w, x), "model")


def network(layer):
    """Layers, each a `shard_map` with its own weights, in a network that is not one."""

    def loss(weights, x):
        for w in weights:
            x = x + layer(w, jax.nn.standardize(x))
        return jnp.mean(x**2)

    return loss


LAYERS = {
    "gelu": mapped(mlp),
    "gelu, no check": mapped(mlp, check=False),
    "gelu, one of two axes": mapped(mlp, axes=("data", "model"), axis_names={"data"}),
    "gelu, weights split over one of two axes": mapped(
        split_over_model, weights={"in": P(None, "model"), "out": P("model")}, axes=("data", "model")
    ),
    "softmax": mapped(attention),
    "gates": mapped(gated),
    "a number a device": mapped(scaled_mlp),
    "a number a device, no check": mapped(scaled_mlp, check=False),
}


def plain_attention(w, x):
    return jax.nn.softmax(x @ w["in"] @ x.T, -1) @ x @ w["out"]


def plain_scaled_mlp(w, x):
    return jax.vmap(scaled_mlp, (None, 0))(w, x.reshape(8, -1, x.shape[1])).reshape(x.shape)


# The same on one device.
PLAIN = {
    **dict.fromkeys([name for name in LAYERS if name.startswith("gelu")], mlp),
    "softmax": plain_attention,
    "gates": gated,
    "a number a device": plain_scaled_mlp,
    "a number a device, no check": plain_scaled_mlp,
}


@functools.cache
def plain_gradient(layer):
    """The loss of a network, and its gradient."""
    return jax.jit(jax.value_and_grad(network(layer)))((W, OTHER), X)


def shard_maps(program: Any) -> list[Any]:
    return [eqn for eqn in program.eqns if eqn.primitive.name == "shard_map"]


def large_float32(variables: Any) -> int:
    """The number of variables that are float32 and at least as large as a layer's input."""
    return sum(v.aval.dtype == jnp.float32 and v.aval.size >= X.size for v in variables)


# The most large float32 values that a backward pass may read: the loss's cotangent; and, where JAX cannot save the
# values from which others are computed, these others.
MOST = dict.fromkeys(LAYERS, 1) | {name: 4 for name in LAYERS if "a number a device" in name}


@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_pass_of_a_layer_reads_16_bits(name):
    gradient = jax.value_and_grad(network(LAYERS[name]))
    ours = jax.jit(autocast(gradient, "mixed_float16"))
    programs = jax.make_jaxpr(gradient)((W, OTHER), X), ours.trace((W, OTHER), X).jaxpr
    before, after = ([large_float32(eqn.invars) for eqn in shard_maps(program)] for program in programs)
    assert min(before[2:]) > max(3, MOST[name]) >= MOST[name] >= max(after[2:])
    assert_close(ours((W, OTHER), X), plain_gradient(PLAIN[name]), rtol=5e-3)


@pytest.mark.parametrize("check", [True, False])
def test_what_is_handed_on_is_split_over_the_axes_of_its_shard_map(check):
    """Devices along the other axes of the mesh have the same numbers."""
    options = {"check": check, "axes": ("data", "model"), "axis_names": {"data"}}
    one, other = mapped(lambda w, x: jnp.tanh(x @ w["in"]), **options), mapped(lambda w, h: h + 2, **options)
    eqn, _ = shard_maps(jax.make_jaxpr(autocast(lambda w, x: other(w, one(w, x)), "mixed_float16"))(W, X))
    assert [v.aval.dtype for v in eqn.outvars] == [jnp.float16] and eqn.params["out_specs"] == (DATA,)


def test_a_number_is_handed_on_for_a_row_that_repeats_it():
    repeat = lambda x: jnp.full(16, lax.psum(jnp.sum(x), "data"))  # noqa: E731
    one, other = (
        jax.shard_map(fn, mesh=mesh_of(), in_specs=spec, out_specs=WHOLE)
        for fn, spec in ((repeat, DATA), (jnp.sin, WHOLE))
    )
    eqn, _ = shard_maps(jax.make_jaxpr(autocast(lambda x: other(one(x)), "mixed_float16"))(X))
    assert [v.aval.shape for v in eqn.outvars] == [()]


def equations_in(eqn: Any, name: str) -> list[Any]:
    """The equations of a primitive in the body of a `shard_map`."""
    return [inner for inner in eqn.params["jaxpr"].eqns if inner.primitive.name == name]


def test_an_exponential_is_computed_twice_from_the_same_numbers():
    """The exponential of a product that is saved in 16 bits, because it is returned in 16 bits anyway."""

    def odds(w, both):
        product = both[0] * both[1]
        p = jnp.exp(product)
        return p / (1 + p) @ w["out"], product

    def loss(w):
        both = X @ w["in"], X @ w["out"]
        layer = jax.shard_map(odds, mesh=mesh_of(), in_specs=(WHOLE, DATA), out_specs=DATA)
        return jnp.mean((sum(layer(w, both)) @ w["in"]) ** 2)

    gradient = jax.grad(loss)
    ours = autocast(gradient, "mixed_float16")
    bodies = shard_maps(jax.make_jaxpr(ours)(W))
    assert all(equations_in(eqn, "exp") and equations_in(eqn, "reduce_precision") for eqn in bodies)
    assert_close(jax.jit(ours)(W), jax.jit(gradient)(W))


def test_barriers_are_before_what_is_computed_again_only():
    """Not before literals, which XLA folds, nor before operands of dots, which XLA may have padded."""

    def relu_mlp(w, x):
        return jax.nn.relu(x @ w["in"]) @ w["out"]

    for layer in (mlp, relu_mlp):
        ours = autocast(jax.grad(network(mapped(layer))), "mixed_float16")
        for body in shard_maps(jax.make_jaxpr(ours)((W, OTHER), X))[2:]:
            barriers, dots = (equations_in(body, name) for name in ("optimization_barrier", "dot_general"))
            assert barriers and all(v.aval.shape for eqn in barriers for v in eqn.invars)
            assert {v for eqn in barriers for v in eqn.outvars}.isdisjoint(v for eqn in dots for v in eqn.invars)


def test_what_is_computed_from_an_argument_is_not_handed_on():
    layer = mapped(lambda w, x: jnp.tanh(x) @ w["in"])
    ours = autocast(jax.grad(lambda x: jnp.mean(layer(W, x) ** 2)), "mixed_float16")
    forward, backward = shard_maps(jax.make_jaxpr(ours)(X))
    assert large_float32(forward.outvars) == 0 and equations_in(backward, "tanh")


def test_what_is_computed_from_a_value_of_the_program_around_is_handed_on():
    """XLA computes such a value in the kernel that reads it: it is not in memory, unlike an argument."""
    inner, outer = mapped(lambda w, h: 2 * jnp.sin(h)), mapped(lambda w, h: h @ w["out"])
    ours = autocast(lambda w, x: outer(w, inner(w, jnp.cos(x))), "mixed_float16")
    _, last = shard_maps(jax.make_jaxpr(ours)(W, X))
    assert not equations_in(last, "sin")


def test_what_float32_reads_beside_a_dot_is_handed_on_in_float32():
    def layer(w, x):
        x = x + jnp.mean(x)  # cannot be rematerialized
        return x @ w["in"] + x * w["out"] + jnp.exp(x)

    gradient = jax.grad(lambda w: jnp.mean(mapped(layer)(w, X) ** 2))
    w = W | {"out": W["out"][0]}
    ours = autocast(gradient, "mixed_float16")
    _, backward = shard_maps(jax.make_jaxpr(ours)(w))
    assert large_float32(backward.invars) == 2
    assert_close(jax.jit(ours)(w), jax.jit(gradient)(w))


@pytest.mark.parametrize("manual, spec", [({"data"}, DATA), ({"data", "model"}, WHOLE)])
def test_other_devices_and_layouts_are_given_the_value(manual, spec):
    """Two axes of a mesh share out what one axis cannot take back, and a part of a value is not the whole."""
    one = mapped(lambda w, x: jnp.tanh(x @ w["in"]), check=False, axes=("data", "model"))
    mesh = mesh_of(("data", "model"))
    other = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False, axis_names=manual)

    def fn(w, x):
        return other(one(w, x))

    ours = autocast(fn, "mixed_float16")
    assert len(shard_maps(jax.make_jaxpr(ours)(W, X))) == 2
    assert_close(jax.jit(ours)(W, X), jax.jit(fn)(W, X))


def test_further_derivatives():
    def derivatives(layer):
        def norm(w):
            gradient = jax.grad(network(layer))((w,), X)
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))

        return jax.grad(norm), lambda w: jax.jvp(norm, (w,), (w,))

    for ours, plain in zip(*map(derivatives, (LAYERS["softmax"], plain_attention)), strict=True):
        assert_close(jax.jit(autocast(ours, "mixed_float16"))(W), jax.jit(plain)(W), rtol=1e-2)


def test_residuals_are_as_recorded_if_the_rules_say_so():
    rules = DEFAULT_RULES.with_residuals("float32")
    program = jax.make_jaxpr(autocast(jax.grad(network(LAYERS["gelu"])), "mixed_float16", rules=rules))((W, OTHER), X)
    assert min(large_float32(eqn.invars) for eqn in shard_maps(program)[2:]) > 3


def scanned(layer, remat=False):
    """A stack of mapped layers."""

    def loss(w, x):
        step = lambda x, w: (x + layer(w, jax.nn.standardize(x)), None)  # noqa: E731
        x, _ = lax.scan(jax.checkpoint(step) if remat else step, x @ W["in"], w)
        return jnp.mean(x**2)

    return loss


@pytest.mark.parametrize("remat", [False, True])
def test_a_stack_of_mapped_layers_carries_16_bits(remat):
    w = jax.tree.map(lambda leaf: np.stack([leaf] * 3), W)
    ours = jax.jit(autocast(jax.grad(scanned(LAYERS["gelu"], remat)), "mixed_float16"))
    scans = [eqn for eqn in ours.trace(w, X).jaxpr.eqns if eqn.primitive.name == "scan"]
    assert [eqn.outvars[0].aval.dtype for eqn in scans] == [jnp.float16] * 2
    assert_close(ours(w, X), jax.jit(jax.grad(scanned(mlp)))(w, X))


def decoder(layer, steps=4):
    """A loop over a mapped layer, whose weights it reads in every step."""
    return lambda w, x: lax.fori_loop(0, steps, lambda _, x: x + layer(w, jax.nn.standardize(x)), x @ W["in"])


@pytest.mark.parametrize("name", ["gelu", "gelu, no check", "gelu, weights split over one of two axes"])
def test_weights_of_a_mapped_layer_are_cast_before_the_loop(name):
    fn = decoder(LAYERS[name])
    ours = jax.jit(autocast(fn, "mixed_float16"))
    (loop,) = (eqn for eqn in ours.trace(W, X).jaxpr.eqns if eqn.primitive.name in ("scan", "while"))
    copies = [v for v in loop.invars if v.aval.dtype == jnp.float16 and v.aval.shape == W["in"].shape]
    assert len(copies) == 2
    value, gradient = decoded()
    assert_close(ours(W, X), value)
    outside = jax.grad(lambda w: jnp.sum(ours(w, X) ** 2))
    assert_close(jax.jit(outside)(W), gradient, rtol=1e-2)


def test_the_gradient_of_a_loop_over_a_mapped_layer():
    fn = decoder(LAYERS["gelu"])
    gradient = autocast(jax.grad(lambda w: jnp.sum(fn(w, X) ** 2)), "mixed_float16")
    assert_close(jax.jit(gradient)(W), decoded()[1], rtol=1e-2)


@functools.cache
def decoded():
    """The results of a decoder on one device, and the gradient of their squares."""
    fn = decoder(mlp)
    return jax.jit(lambda w: (fn(w, X), jax.grad(lambda w: jnp.sum(fn(w, X) ** 2))(w)))(W)


def test_weights_of_a_loop_inside_a_mapped_function_are_cast_before_it():
    fn = mapped(lambda w, x: decoder(mlp)(w, x))
    ours = jax.jit(autocast(fn, "mixed_float16"))
    (outer,) = shard_maps(ours.trace(W, X).jaxpr)
    (loop,) = (eqn for eqn in outer.params["jaxpr"].eqns if eqn.primitive.name in ("scan", "while"))
    assert sum(v.aval.dtype == jnp.float16 and v.aval.shape == W["in"].shape for v in loop.invars) == 2
    assert_close(ours(W, X), decoded()[0])


@functools.cache
def gpus():
    return gpu_mesh(8)


def mapped_by_hand(dtype, gathered):
    """An MLP over eight devices, whose weights are sharded and gathered, or replicated."""

    def layer(w, x):
        one, other = (lax.all_gather(x, "data", tiled=True) if gathered else x for x in (w.astype(dtype) for w in w))
        return jax.nn.gelu(x @ one) @ other

    specs = (DATA, DATA) if gathered else (WHOLE, WHOLE)
    return jax.shard_map(layer, mesh=gpus(), in_specs=(specs, DATA), out_specs=DATA)


def training(dtype):
    layer = mapped_by_hand(dtype, gathered=True)

    def loss(w, x):
        x = x.astype(dtype) @ w[0].astype(dtype)
        for each in w[1:]:
            x = x + layer(each, jax.nn.standardize(x.astype(jnp.float32)).astype(dtype))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return jax.grad(loss)


def decoding(dtype):
    layer = mapped_by_hand(dtype, gathered=False)

    def fn(w, x):
        def step(_, x):
            for each in w[1:]:
                x = x + layer(each, jax.nn.standardize(x.astype(jnp.float32)).astype(dtype))
            return x

        return lax.fori_loop(0, 64, step, x.astype(dtype) @ w[0].astype(dtype)).astype(jnp.float32)

    return fn


@pytest.mark.slow
@pytest.mark.parametrize("program, rows, most, memory", [(training, 16384, 1.01, 0.83), (decoding, 16, 0.3, 6.0)])
def test_mapped_layers_beside_those_by_hand(program, rows, most, memory):
    """Bytes moved and temporary memory; in a loop, that of the 16-bit copies. The README cites the figures."""

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(gpus(), spec))

    spec = DATA if program is training else WHOLE
    layers = [(array(spec, 1024, 4096), array(spec, 4096, 1024)) for _ in range(3)]
    args = [array(WHOLE, 1024, 1024), *layers], array(DATA, rows, 1024)
    programs = autocast(program(jnp.float32), "mixed_float16"), program(jnp.float16)
    ours, hand = (jax.jit(fn).lower(*args).compile() for fn in programs)
    assert traffic(module_text(ours)) <= most * traffic(module_text(hand))
    stats: list[Any] = [each.memory_analysis() for each in (ours, hand)]
    assert stats[0].temp_size_in_bytes <= memory * stats[1].temp_size_in_bytes


def with_derivative_rule(fn):
    ruled = jax.custom_jvp(fn)
    ruled.defjvp(lambda primals, tangents: (fn(*primals), tangents[1]))
    return ruled


@pytest.mark.parametrize("rule", [lambda fn: fn, with_derivative_rule], ids=["plain", "with a derivative rule"])
def test_a_shard_map_inside_of_another_outside_of_jit(rule):
    """JAX itself runs none there."""

    @rule
    def inner(w, x):
        return jax.shard_map(split_over_model, in_specs=(WHOLE, WHOLE), out_specs=WHOLE, axis_names={"model"})(w, x)

    outer = mapped(lambda w, x: x + inner(w, x), axes=("data", "model"), axis_names={"data"})
    with jax.set_mesh(mesh_of(("data", "model"))):
        np.testing.assert_allclose(autocast(outer, "mixed_float16")(W, X), jax.jit(outer)(W, X), rtol=2e-2, atol=2e-2)
