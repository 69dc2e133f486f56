"""Values that a dot rounds go to other devices and to the host's memory in 16 bits; nothing is cast on the host."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_close
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jmp_train import autocast, explain
from jmp_train._diagnostics.gpu._compile import compile_for_gpu, gpu_mesh, module_text
from jmp_train._diagnostics.gpu._findings import collectives
from jmp_train._diagnostics.gpu._kernels import traffic
from jmp_train._jaxpr import open_jaxpr, sub_jaxprs

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
)
RNG = np.random.default_rng(0)
W, X = (RNG.normal(size=shape).astype(np.float32) / 8 for shape in ((64, 64), (32, 64)))
WEIGHTS = RNG.normal(size=(4, 64, 64)).astype(np.float32) / 8


def dense(x, w):
    return jnp.tanh(checkpoint_name(x @ w, "h"))


def residual(x, w):
    x = checkpoint_name(x, "h")
    return x + jax.nn.gelu(x @ w) @ w.T


def unrolled(block, weights, x):
    for w in weights:
        x = block(x, w)
    return x


def scanned(block, weights, x):
    return lax.scan(lambda x, w: (block(x, w), None), x, weights)[0]


def network(layers, block, dtype=jnp.float32) -> Callable[..., Any]:
    """A loss of layers whose input or product is offloaded; with another `dtype`, cast as Flax's layers cast."""

    @functools.partial(jax.checkpoint, policy=OFFLOAD)
    def layer(x, w):
        return block(x, w.astype(dtype))

    def loss(params, x):
        x = layers(layer, params["layers"], x.astype(dtype) @ params["in"].astype(dtype))
        return jnp.mean((x @ params["out"].astype(dtype)).astype(jnp.float32) ** 2)

    return loss


def parameters(layers, width) -> Any:
    """Abstract parameters of four layers."""
    square, stack = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((width, width), (4, width, width)))
    return {"in": square, "layers": stack if layers is scanned else [square] * 4, "out": square}


NETWORKS = [(layers, block) for layers in (unrolled, scanned) for block in (dense, residual)]


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in sub_jaxprs(eqn.params):
            yield from equations(inner)


def on_host(fn, *args) -> set[tuple[str, str]]:
    """The primitives that read or make values in the host's memory, with the dtypes of these values."""
    return {
        (eqn.primitive.name, str(var.aval.dtype))
        for eqn in equations(jax.make_jaxpr(fn)(*args))
        for var in (*eqn.invars, *eqn.outvars)
        if getattr(var.aval, "memory_space", None) == HOST
    }


def moved_values(fn, *args) -> list[tuple[str, bool]]:
    """For each value that is moved, its dtype, and whether it is moved to the host's memory."""
    eqns = [eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name == "device_put"]
    return [(str(eqn.outvars[0].aval.dtype), eqn.outvars[0].aval.memory_space == HOST) for eqn in eqns]


@pytest.mark.parametrize("layers, block", NETWORKS)
@pytest.mark.parametrize("inside", [True, False], ids=["autocast of the gradient", "gradient of autocast"])
def test_offloaded_residuals_have_16_bits(layers, block, inside):
    loss = network(layers, block)
    params = jax.tree.map(lambda leaf: RNG.normal(size=leaf.shape).astype(np.float32) / 8, parameters(layers, 64))
    ours = autocast(jax.grad(loss), "mixed_float16") if inside else jax.grad(autocast(loss, "mixed_float16"))
    found = on_host(ours, params, X)
    assert {dtype for _, dtype in found} == {"float16"}
    assert {name for name, _ in found} <= {"device_put", "scan", "remat2"}
    assert_close(jax.jit(ours)(params, X), jax.jit(jax.grad(loss))(params, X))


@pytest.mark.slow
@pytest.mark.parametrize("layers, block", NETWORKS)
def test_an_offloading_network_moves_no_more_bytes_than_by_hand(layers, block):
    args = parameters(layers, 1024), jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    hand = compile_for_gpu(jax.grad(network(layers, block, jnp.float16)), *args)
    ours = compile_for_gpu(autocast(jax.grad(network(layers, block)), "mixed_float16"), *args)
    assert traffic(module_text(ours)) <= 1.03 * traffic(module_text(hand))
    memory: list[Any] = [each.memory_analysis() for each in (ours, hand)]
    bytes_on_host = [each.host_temp_size_in_bytes for each in memory]
    assert bytes_on_host[0] == bytes_on_host[1] > 0


def test_what_is_returned_from_the_host_is_cast_before_it_is_put_there():
    def fn(w, x):
        h = jax.device_put(x @ w, HOST)
        return h, jax.device_put(h, DEVICE) @ w

    ours = autocast(fn, "mixed_float16")
    assert on_host(ours, W, X) == {("device_put", "float16"), ("device_put", "float32")}
    assert_close(ours(W, X), fn(W, X))
    assert ours(W, X)[0].sharding.memory_kind == "pinned_host"


def test_a_derivative_rule_can_offload_its_residuals():
    @jax.custom_vjp
    def layer(w, x):
        return jnp.tanh(x @ w)

    def forward(w, x):
        h = x @ w
        return jnp.tanh(h), (w, x, jax.device_put(h, HOST))

    def backward(residuals, ct):
        w, x, h = residuals
        ct = ct * (1 - jnp.tanh(jax.device_put(h, DEVICE)) ** 2)
        return x.T @ ct, ct @ w.T

    layer.defvjp(forward, backward)
    gradient = jax.grad(lambda w, x: jnp.sum(layer(w, x) ** 2))
    ours = autocast(gradient, "mixed_float16")
    assert {name for name, _ in on_host(ours, W, X)} == {"device_put"}
    assert_close(jax.jit(ours)(W, X), gradient(W, X))


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_put_beside_a_layer_is_not_rounded(order):
    def fn(w, x):
        y, squares = jax.device_put((x @ w, 1e6 * jnp.sum(x**2, -1))[::order], HOST)[::order]
        y, squares = jax.device_put((y, squares), DEVICE)
        return y @ w, squares

    ours = autocast(fn, "mixed_float16")
    assert sorted(moved_values(ours, W, X)) == [(d, h) for d in ("float16", "float32") for h in (False, True)]
    np.testing.assert_array_equal(jax.jit(ours)(W, X)[1], jax.jit(fn)(W, X)[1])
    assert_close(jax.jit(ours)(W, X), jax.jit(fn)(W, X))


def test_a_value_that_a_dot_rounds_anyway_is_put_on_the_host_in_16_bits():
    def fn(w, x):
        h = jnp.exp(x @ w)
        offloaded = jax.device_put(h, HOST)
        return h @ w + jax.device_put(offloaded, DEVICE)

    assert moved_values(autocast(fn, "mixed_float16"), W, X) == [("float16", True), ("float16", False)]


def test_layers_on_other_devices_read_16_bits():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = (jax.NamedSharding(mesh, spec) for spec in (jax.P("data"), jax.P()))

    def loss(weights, x):
        for w in weights:
            x = jax.device_put(jnp.tanh(jax.device_put(x, split) @ w), whole)
        return jnp.sum(x**2)

    gradient = jax.grad(loss)
    products = explain(gradient, "mixed_float16")(WEIGHTS, X).products
    assert {dtype for dtype, *_ in products} == {"float16"}
    dtypes = [dtype for dtype, _ in moved_values(autocast(gradient, "mixed_float16"), WEIGHTS, X)]
    assert dtypes.count("float32") == 1  # the input
    assert_close(jax.jit(autocast(gradient, "mixed_float16"))(WEIGHTS, X), jax.jit(gradient)(WEIGHTS, X))


def test_weights_on_the_host_come_to_the_device_one_by_one():
    """A cast before the loop would keep all weights, and `w`, on the device for as long as the loop runs."""

    def fn(weights, w, x):
        weights, w = jax.device_put((weights, w), HOST)

        def layer(x, row):
            return jnp.tanh(x @ jax.device_put(row, DEVICE) @ jax.device_put(w, DEVICE)), None

        return lax.scan(layer, x, weights)[0]

    ours = autocast(fn, "mixed_float16")
    outside: list[Any] = open_jaxpr(jax.make_jaxpr(ours)(WEIGHTS, W, X)).eqns
    to_host = [eqn.outvars[0].aval.memory_space == HOST for eqn in outside if eqn.primitive.name == "device_put"]
    assert to_host == [True, True] and len(moved_values(ours, WEIGHTS, W, X)) == 4
    assert_close(jax.jit(ours)(WEIGHTS, W, X), jax.jit(fn)(WEIGHTS, W, X))


RING = [(i, (i + 1) % 8) for i in range(8)]


def send_to_experts(h):
    """Sends an eighth of the rows to each device (Gale et al., "MegaBlocks", 2023)."""
    count, device = jnp.int32(h.shape[0] // 8), lax.axis_index("data").astype(jnp.int32)
    sizes, places = jnp.full(8, count), count * jnp.arange(8, dtype=jnp.int32)
    return lax.ragged_all_to_all(
        h, jnp.zeros_like(h), places, sizes, jnp.full(8, device * count), sizes, axis_name="data"
    )


SENT = {
    "all_gather": lambda h: lax.all_gather(h, "data", tiled=True),
    "ppermute": lambda h: lax.ppermute(h, "data", RING),
    "all_to_all": lambda h: lax.all_to_all(h, "data", 0, 0, tiled=True),
    "ragged_all_to_all": send_to_experts,
}


def sending(send, mesh, after=jnp.matmul):
    """`send` between two layers on eight devices; the first layer ends in float32."""

    def local(w, x):
        return after(send(jnp.exp(x @ w / 8)), w)

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data"), "check_vma": False}
    return jax.shard_map(local, mesh=mesh, **specs)


@pytest.mark.parametrize("name", SENT)
def test_activations_cross_devices_in_the_dtype_of_the_dot_that_reads_them(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.tile(X, (8, 1))

    def dtypes(fn):
        found = equations(jax.make_jaxpr(autocast(fn, "mixed_float16"))(W, x))
        return {str(eqn.outvars[0].aval.dtype) for eqn in found if eqn.primitive.name == name}

    assert dtypes(sending(SENT[name], mesh)) == {"float16"}
    assert dtypes(sending(SENT[name], mesh, lambda h, w: jnp.log(h))) == {"float32"}
    gradient = jax.grad(lambda w, x: jnp.sum(sending(SENT[name], mesh)(w, x) ** 2))
    assert dtypes(gradient) <= {"float16", "int32"}  # the places and counts of ragged rows cross, too
    if name != "ragged_all_to_all":  # which XLA does not compile for a CPU
        assert_close(jax.jit(autocast(gradient, "mixed_float16"))(W, x), jax.jit(gradient)(W, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", SENT)
def test_activations_cross_eight_h200s_in_16_bits(name):
    mesh = gpu_mesh(8)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in (((1024, 1024), jax.P()), ((8192, 1024), jax.P("data")))
    ]
    compiled = jax.jit(autocast(sending(SENT[name], mesh), "mixed_float16")).lower(*args).compile()
    assert {each.dtypes[0] for each in collectives(module_text(compiled))} == {"f16"}


def test_the_cross_terms_of_distances_are_found_on_another_device():
    def squared_distances(x, y):
        (a, b), device = jax.device_put((x, y)), jax.devices()[0]
        norms = jax.device_put((jnp.sum(a * a, -1)[:, None], jnp.sum(b * b, -1)), device)
        return norms[0] + norms[1] - 2 * jax.device_put(x @ y.T, device)

    x = 50 + RNG.normal(size=(2, 16, 64)).astype(np.float32)
    got, want = autocast(squared_distances, "mixed_float16")(*x), squared_distances(*x)
    assert np.max(np.abs(got - want)) < 0.5  # of 128; in float16 4


def sharded_layers(mesh, rematerialized):
    """Layers in a scan, each of which gathers its weights (Rajbhandari et al., "ZeRO", 2020)."""

    def local(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)), None

        layer = jax.checkpoint(layer) if rematerialized else layer
        return lax.pmean(jnp.mean(lax.scan(layer, x, weights)[0] ** 2), "data")

    specs = {"in_specs": (jax.P(None, "data"), jax.P("data")), "out_specs": jax.P(), "check_vma": False}
    return jax.shard_map(local, mesh=mesh, **specs)


@pytest.mark.parametrize("rematerialized", [False, True])
@pytest.mark.parametrize("inside", [True, False], ids=["autocast of the gradient", "gradient of autocast"])
def test_weights_are_gathered_in_16_bits_and_their_gradients_summed_in_32(inside, rematerialized):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    fn, x = sharded_layers(mesh, rematerialized), np.tile(X, (8, 1))
    ours = autocast(jax.grad(fn), "mixed_float16") if inside else jax.grad(autocast(fn, "mixed_float16"))
    found = {
        (eqn.primitive.name, str(eqn.outvars[0].aval.dtype))
        for eqn in equations(jax.make_jaxpr(ours)(WEIGHTS, x))
        if eqn.primitive.name in ("all_gather", "reduce_scatter")
    }
    assert found == {("all_gather", "float16"), ("reduce_scatter", "float32")}
    assert_close(jax.jit(ours)(WEIGHTS, x), jax.jit(jax.grad(fn))(WEIGHTS, x))


@pytest.mark.parametrize("place", [lax.with_sharding_constraint, jax.device_put])
def test_weights_that_are_put_elsewhere_are_cast_before(place):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = jax.NamedSharding(mesh, jax.P())
    fn = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ place(place(w, whole), whole)) ** 2))
    eqns = list(equations(jax.make_jaxpr(autocast(fn, "mixed_float16"))(W, X)))

    def read_by(name):
        operands = [eqn.invars[0].aval for eqn in eqns if eqn.primitive.name == name]
        return [str(aval.dtype) for aval in operands if aval.shape == W.shape]

    primitive = "sharding_constraint" if place is lax.with_sharding_constraint else "device_put"
    # The weight, and its gradient, which the transpose of a `device_put` does not move.
    assert read_by(primitive) == ["float16"] * 2 + ["float32"] * 2 * (primitive == "sharding_constraint")
    assert read_by("convert_element_type") == ["float32"]  # the second sends what the first one did
    assert_close(jax.jit(autocast(fn, "mixed_float16"))(W, X), jax.jit(fn)(W, X))


@pytest.mark.parametrize("place", [lax.with_sharding_constraint, jax.device_put])
def test_weights_that_a_step_updates_are_not_rounded_where_they_are_put(place):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(w, x):
        w = place(w, jax.NamedSharding(mesh, jax.P()))
        return w - 1e-5 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    got, want = (jax.jit(fn)(W, X) for fn in (autocast(step, "mixed_float16"), step))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("read", [lambda x, w: x * w[0], lambda x, w: x @ w - jnp.log(w[0])])
def test_a_weight_that_float32_reads_is_sent_in_float32(read):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P("data"), jax.P("data")), "out_specs": jax.P("data"), "check_vma": False}
    fn = jax.shard_map(lambda w, x: read(x, lax.all_gather(w, "data", tiled=True)), mesh=mesh, **specs)
    traced = jax.make_jaxpr(autocast(fn, "mixed_float16"))(W, np.tile(X, (8, 1)))
    found = [eqn.outvars[0].aval.dtype for eqn in equations(traced) if eqn.primitive.name == "all_gather"]
    assert found == [jnp.float32]


def ring(mesh, update):
    """Keys that go round eight devices in a scan (Liu et al., "Ring attention", 2023), scored against queries."""

    def local(w, x):
        def step(state, _):
            keys, total = state
            total = total + jnp.sum(jnp.exp(x @ keys.T), -1)
            return (update(lax.ppermute(keys, "data", RING), x), total), None

        return lax.scan(step, (x @ w, jnp.zeros(x.shape[0])), None, 8)[0][1]

    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data"), "check_vma": False}
    return jax.shard_map(local, mesh=mesh, **specs)


def test_keys_that_go_round_a_ring_stay_in_16_bits():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    args = W, np.tile(X, (8, 1)) / 8

    def dtype_of_keys(update):
        traced = jax.make_jaxpr(autocast(ring(mesh, update), "mixed_float16"))(*args)
        return next(str(eqn.outvars[0].aval.dtype) for eqn in equations(traced) if eqn.primitive.name == "ppermute")

    assert dtype_of_keys(lambda keys, x: keys) == "float16"
    assert dtype_of_keys(lambda keys, x: jnp.where(keys > 0, keys, jnp.sin(x))) == "float32"
    assert dtype_of_keys(lambda keys, x: keys + 1e-3 * x) == "float32"
    fn = ring(mesh, lambda keys, x: keys)
    assert_close(jax.jit(autocast(fn, "mixed_float16"))(*args), jax.jit(fn)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("rematerialized", [False, True])
def test_eight_h200s_gather_weights_in_16_bits_and_sum_gradients_in_32(rematerialized):
    mesh = gpu_mesh(8)
    args = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in (((4, 1024, 1024), jax.P(None, "data")), ((8192, 1024), jax.P("data")))
    ]
    gradient = autocast(jax.grad(sharded_layers(mesh, rematerialized)), "mixed_float16")
    found = collectives(module_text(jax.jit(gradient).lower(*args).compile()))
    crossing = {(each.operation, each.dtypes[0]) for each in found if each.operation != "all-reduce"}  # of the loss
    assert crossing == {("all-gather", "f16"), ("reduce-scatter", "f32")}


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_bytes_of_sharded_layers_beside_those_by_hand(inside):
    """Differentiated inside and outside of the `shard_map`; the README cites the figure."""
    mesh = gpu_mesh(8)

    def gradient(dtype):
        def loss(params, x):
            def gathered(w):
                return lax.all_gather(w.astype(dtype), "data", tiled=True)

            def layer(x, w):
                up, down = map(gathered, w)
                return x + jax.nn.gelu(jax.nn.standardize(x) @ up) @ down, None

            x, _ = lax.scan(layer, x.astype(dtype) @ gathered(params["in"]), params["layers"])
            x = jax.nn.standardize(x) @ gathered(params["out"])
            loss = jnp.mean(x.astype(jnp.float32) ** 2)
            return loss if inside else lax.pmean(loss, "data")

        rows, whole = jax.P("data"), jax.P()
        specs = {"in": rows, "layers": (jax.P(None, "data"),) * 2, "out": rows}
        mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, rows), check_vma=False)
        return mapped(jax.grad(loss), out_specs=specs) if inside else jax.grad(mapped(loss, out_specs=whole))

    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec))

    rows, stacked = jax.P("data"), jax.P(None, "data")
    layers = array(stacked, 4, 1024, 4096), array(stacked, 4, 4096, 1024)
    args = {"in": array(rows, 1024, 1024), "layers": layers, "out": array(rows, 1024, 1024)}, array(rows, 16384, 1024)
    programs = autocast(gradient(jnp.float32), "mixed_float16"), gradient(jnp.float16)
    ours, hand = (traffic(module_text(jax.jit(fn).lower(*args).compile())) for fn in programs)
    assert ours <= 0.73 * hand
