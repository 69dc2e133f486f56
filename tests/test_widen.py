"""Which equations run in float32 because all their readers do, in programs of a few lines."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hand_tools import by_hand, relative_error
from jax import lax, scipy
from pass_tools import after

from jmp_train import DEFAULT_RULES, autocast, low_precision

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(16, 16)), "v": RNG.normal(size=(16, 16)), "b": RNG.normal(size=16)}
PARAMS |= {"m": RNG.normal(size=(2, 16)), "s": np.array(0.3)}
PARAMS = jax.tree.map(lambda leaf: leaf.astype(np.float32), PARAMS)
X = RNG.normal(size=(2, 16)).astype(np.float32)


def pad(value: Any, low: int, high: int) -> Any:
    return lax.pad(value, np.float32(0), [(low, high, 0), (0, 0, 0)])


# Functions of two products, parameters and data, whose float32 readers make the equations before them float32.
CASES = {
    "computed again across a dot": (lambda a, b, p, x: (a + b) * jnp.exp(x @ p["w"] @ p["w"]), "add", ["full"]),
    "read across a dot, to be stored in float32": (
        lambda a, b, p, x: a * b * (x @ p["v"].T) * (jnp.exp(x @ p["w"] @ p["w"]) + x + p["m"]),
        "mul",
        ["low", "low", "full"],
    ),
    "a bias of one number": (
        lambda a, b, p, x: (2 * a + p["s"])[:, ::2] * x[:, ::2],
        "add slice",
        ["low", "low", "full"],
    ),
    "a sum": (lambda a, b, p, x: (a + b) * x, "add", ["full"]),
    "a chain": (lambda a, b, p, x: ((a + b) - b) * x, "add sub", ["full", "full"]),
    "what a solver reads": (
        lambda a, b, p, x: scipy.sparse.linalg.cg(lambda y: 2 * y, (a[:, :8] - a[:, 8:]) / 0.1)[0],
        "sub div",
        ["full", "full"],
    ),
    "a choice": (lambda a, b, p, x: jnp.where(p["b"] > 0, a + b, b) * x, "add select_n", ["low", "low"]),
    "a choice of a product": (lambda a, b, p, x: jnp.where(x > 0, a * b, 2 * b) + x, "mul select_n", ["full"] * 3),
    "a choice that compares it": (
        lambda a, b, p, x: jnp.where((u := a * b) > (v := 2 * b), u, v) + x,
        "mul select_n",
        ["full"] * 3,
    ),
    "a choice that asks whether it is equal": (
        lambda a, b, p, x: jnp.where((u := a * b) == (v := 2 * b), u, v) + x,
        "mul select_n",
        ["full"] * 3,
    ),
    "a choice that asks whether it is another number": (
        lambda a, b, p, x: jnp.where((u := a * b) != (v := 2 * b), u, v) + x,
        "mul select_n",
        ["full"] * 3,
    ),
    "the place of the smallest": (lambda a, b, p, x: (jnp.argmin(u := a * b), u + x), "mul", ["full"]),
    "the place of the largest": (lambda a, b, p, x: (jnp.argmax(u := a * b), u + x), "mul", ["full"]),
    "the logits of a sum of exponentials": (
        lambda a, b, p, x: jax.nn.logsumexp(30 * a),
        "mul reduce_max",
        ["full"] * 2,
    ),
    "a softmax's logits": (lambda a, b, p, x: jax.nn.softmax(30 * a), "mul reduce_max stop_gradient", ["full"] * 3),
    "a sum of products": (lambda a, b, p, x: (a * b + 2 * b)[:, ::2] * x[:, ::2], "mul add slice", ["full"] * 6),
    "parts of a product": (lambda a, b, p, x: (a * b)[:, ::2] + x[:, ::2], "mul slice", ["full"] * 3),
    "a row of a sum": (lambda a, b, p, x: (a + b).reshape(32) * x.reshape(32), "add reshape", ["low", "low", "full"]),
    "a part of a sum with a product": (
        lambda a, b, p, x: (a + 2 * b)[:, ::2] * x[:, ::2],
        "add slice",
        ["low", "low", "full"],
    ),
    "a bound of products": (lambda a, b, p, x: jnp.maximum(a, b) * x, "max", ["low"]),
    "a row of a sum with a number": (lambda a, b, p, x: (1 - a).reshape(32) * x.reshape(32), "sub", ["full"]),
    "joined parts": (lambda a, b, p, x: pad(a * b, 0, 2) + pad(a * b, 2, 0) - 1e9, "add mul pad", ["full"] * 5),
    "a part of a buffer": (
        lambda a, b, p, x: lax.dynamic_update_slice(2 * b, (a * b)[:1], (0, 0)) + x,
        "mul dynamic_update_slice",
        ["low"] * 3,
    ),
    "a row of a buffer": (
        lambda a, b, p, x: (2 * b).at[np.array([1])].set((a * b)[:1]) + x,
        "mul scatter",
        ["low"] * 3,
    ),
    "a bias of a small product": (lambda a, b, p, x: (a @ p["w"][:, :2] + p["b"][:2]) * x[:, :2], "add", ["full"]),
    "a part of the bias of a small product": (
        lambda a, b, p, x: (a @ p["w"][:, :2] + p["b"][:2])[:, 0] * x[:, 0],
        "add",
        ["full"],
    ),
    "a part of the bias of a large product": (
        lambda a, b, p, x: (a + p["b"])[:, ::2] * x[:, ::2],
        "add slice",
        ["low", "low", "full"],
    ),
    "corners of a mesh": (lambda a, b, p, x: (p["m"] + 2 * a)[:, ::2] * x[:, ::2], "add mul", ["full"] * 3),
    "a bias of each row": (
        lambda a, b, p, x: (jnp.broadcast_to(p["b"], (2, 16)) + 2 * a)[:, ::2] * x[:, ::2],
        "add slice",
        ["low", "low", "full"],
    ),
    "a bias": (lambda a, b, p, x: (a + p["b"]) * x, "add", ["low"]),
    "a scale": (lambda a, b, p, x: (a * p["b"]) * x, "mul", ["full", "full"]),
    "a bias of a sum": (lambda a, b, p, x: (a + b + p["b"]) * x, "add", ["full", "full"]),
    "read by a dot as well": (lambda a, b, p, x: ((a + b) * x, (a + b) @ p["w"]), "add", ["full", "low"]),
    "read across a dot": (lambda a, b, p, x: (a + b) * (x @ p["w"] @ p["w"]), "add", ["low"]),
    "returned": (lambda a, b, p, x: [u := a + b, u * x], "add", ["low"]),
    "a bias of a computed weight": (
        lambda a, b, p, x: (a[:, :8] @ (p["w"] * p["v"])[:8, :8] + p["b"][:8]) * x[:, :8],
        "add",
        ["low"],
    ),
    "with data": (lambda a, b, p, x: (a + x) * x, "add", ["full"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_only_float32_reads_runs_in_float32(name):
    fn, primitives, expected = CASES[name]
    program = after("widen", lambda p, x: fn(x @ p["w"], x @ p["v"], p, x), PARAMS, X)
    found = [
        program.facts[equation.results[0]].precision.value
        for equation in program.equations
        if equation.name in primitives.split()
    ]
    assert found == expected


def test_in_a_scan_a_parameter_for_each_number_is_added_in_16_bits():
    def fn(p, x):
        a = x @ p["w"]
        return lax.scan(lambda c, _: (c, (p["m"] + 2 * a)[:, ::2] * x[:, ::2]), 0.0, length=2)[1]

    (body,) = next(equation.bodies for equation in after("widen", fn, PARAMS, X).equations if equation.name == "scan")
    (total,) = [equation.results[0] for equation in body.equations if equation.name == "add"]
    assert body.precision(total).value == "low"


def test_in_a_call_a_stream_of_16_bits_is_added_to_in_16_bits():
    def fn(p, x):
        return jax.checkpoint(lambda h, a: (h + 2 * a)[:, ::2] * x[:, ::2])(x @ p["w"], x @ p["v"])

    (body,) = next(equation.bodies for equation in after("widen", fn, PARAMS, X).equations if equation.bodies)
    (total,) = [equation.results[0] for equation in body.equations if equation.name == "add"]
    assert body.precision(total).value == "low"


def regression(params, x, y, dot):
    """The offset is as large as the targets, and the network computes what is left of them."""
    return jnp.mean((dot(jnp.tanh(x @ params["hidden"]), params["out"]) + params["offset"] - y) ** 2)


def mesh(params, x, y, dot):
    """The mean length of edges between corners, which the network moves a little."""
    corners = params["corners"] + 0.1 * dot(jnp.tanh(x @ params["hidden"]), params["out"][:, :3])
    return jnp.mean(jnp.linalg.norm(jnp.diff(corners, axis=0), axis=-1))


def differences(params, x, y, dot):
    """Differences between the values of consecutive states, as in temporal-difference learning."""
    values = (dot(jnp.tanh(x @ params["hidden"]), params["out"][:, :1]) + params["offset"][:1])[:, 0]
    return jnp.mean((values[1:] - values[:-1] - y[1:, 0] / 1000) ** 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("loss", [regression, mesh, differences])
def test_what_a_network_adds_to_is_not_rounded(loss, dtype):
    rng = np.random.default_rng(0)
    arrays = {"hidden": (16, 64), "out": (64, 4), "offset": (4,), "corners": (256, 3), "x": (256, 16), "y": (256, 4)}
    arrays = {name: rng.normal(size=shape) / 4 for name, shape in arrays.items()}
    arrays["corners"] = arrays["corners"].cumsum(0) + 50
    for name in ("offset", "y"):
        arrays[name] = arrays[name] + 1000
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    x, y = arrays.pop("x"), arrays.pop("y")
    rounded = by_hand(dtype)
    hand = jax.jit(jax.grad(lambda *args: loss(*args, lambda a, b: rounded(rounded(a) @ rounded(b)))))
    cast = jax.jit(autocast(jax.grad(lambda *args: loss(*args, jnp.matmul)), f"mixed_{dtype}"))
    exact = jax.grad(lambda *args: loss(*args, jnp.matmul))(arrays, x, y)
    errors = [relative_error(fn(arrays, x, y), exact) for fn in (hand, cast)]
    assert errors[1] < 2 * errors[0]


def attention(params, x, dot, scale):
    """One attention head with a bias for each pair of positions, as in T5 and Swin Transformer."""
    q, k, v = (dot(x, params[name]) for name in "qkv")
    scores = dot(q, jnp.swapaxes(k, 1, 2))
    scores = (scores if scale is None else scores * scale) + params["bias"]
    return jnp.sum(jnp.square(dot(jax.nn.softmax(scores), v)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [None, 0.3, 0.125])
def test_biased_scores_of_an_attention_are_not_rounded(scale, dtype):
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(32, 32)) / 12 for name in "qkv"} | {"bias": 3 * rng.normal(size=(64, 64))}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    x, rounded = rng.normal(size=(4, 64, 32)).astype(np.float32), by_hand(dtype)
    hand = jax.jit(jax.grad(lambda p, x: attention(p, x, lambda a, b: rounded(rounded(a) @ rounded(b)), scale)))
    gradient = jax.grad(lambda p, x: attention(p, x, jnp.matmul, scale))
    errors = [
        relative_error(fn(arrays, x), gradient(arrays, x))
        for fn in (hand, jax.jit(autocast(gradient, f"mixed_{dtype}")))
    ]
    assert errors[1] < 1.2 * errors[0]


def test_a_bias_of_the_layers_of_heads_is_added_in_16_bits():
    """A batch of dots, but of parameters: a layer for each head."""

    def fn(p, x):
        return (jnp.einsum("hni,hij->hnj", x, p["w"]) + p["b"]) * x

    shapes = {"w": (4, 32, 32), "b": (32,)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    program = after("widen", fn, params, jax.ShapeDtypeStruct((4, 64, 32), np.float32))
    (total,) = [equation.results[0] for equation in program.equations if equation.name == "add"]
    assert program.precision(total).value == "low"


def test_the_largest_is_found_beyond_float16():
    """In float16 several numbers would be infinite, and `argmax` would silently return the first of them."""

    def largest(p, x):
        h = x @ p["w"]
        return jnp.argmax((h - jnp.roll(h, 1, 1)) / 1e-3 / 1e-2, 1)

    np.testing.assert_array_equal(autocast(largest, "mixed_float16")(PARAMS, X), largest(PARAMS, X))


def test_a_comparison_reads_what_is_compared_in_float32_too():
    fn = CASES["a choice that compares it"][0]
    program = after("widen", lambda p, x: fn(x @ p["w"], x @ p["v"], p, x), PARAMS, X)
    assert [equation.reads for equation in program.equations if equation.name == "gt"] == [[np.float32, np.float32]]


@pytest.mark.parametrize(
    "wrap, rules",
    [(lambda fn: fn, DEFAULT_RULES.replace({"mul": "low"})), (low_precision, DEFAULT_RULES)],
    ids=["an edit", "a region"],
)
def test_what_was_asked_for_in_the_compute_dtype_stays_so(wrap, rules):
    scaled = wrap(lambda a, b: a * b)
    program = after("widen", lambda p, x: jnp.exp(scaled(x @ p["w"], x @ p["v"])), PARAMS, X, rules=rules)
    (result,) = next(equation.results for equation in program.equations if equation.name == "mul")
    assert program.facts[result].precision.value == "low"


def product(w: Any, x: Any) -> Any:
    """The product of two activations of a few hundred, most of which exceeds float16's range."""
    return (x @ w[0]) * (x @ w[1])


# What float32 sums read of a product, and what stands between.
SUMMED = {
    "nothing": product,
    "a call": jax.jit(product),
    "a rematerialized call": jax.checkpoint(product),
    "a batch": jax.vmap(product, (None, 0)),
    "a scan's rows": lambda w, x: lax.scan(lambda c, x: (c, product(w, x)), 0.0, x)[1],
    "branches": lambda w, x: lax.cond(x[0, 0] > 0, product, lambda w, x: product(w, x[::-1]), w, x),
    "branches in a scan": lambda w, x: lax.map(
        lambda x: lax.cond(x[0] > 0, product, lambda w, x: product(w[::-1], x), w, x), x
    ),
    "a derivative rule": lambda w, x: jax.nn.relu(product(w, x)),
    "an absolute value": lambda w, x: jnp.abs(product(w, x)),
    "a choice": lambda w, x: jnp.where(x > 0, product(w, x), 0),
    "other products": lambda w, x: jnp.concatenate([product(w, x), product(w, x[::-1])]),
    "some rows": lambda w, x: product(w, x)[np.array([0, 3, 5])],
    "another shape": lambda w, x: jnp.moveaxis(product(w, x).reshape(4, 2, 8, 4), 1, 2),
    "a quotient": lambda w, x: product(w, x) / (1.5 + jnp.tanh(x @ w[0])),
    "a dot": lambda w, x: (lambda once: once * (jnp.tanh(x @ w[0]) @ w[1]))(product(w, x)),
}


@pytest.mark.parametrize("between", SUMMED)
@pytest.mark.parametrize("total", [jnp.sum, jnp.mean, jnp.var, jnp.cumsum], ids=lambda fn: fn.__name__)
def test_a_product_that_only_float32_reads_does_not_overflow(between, total):
    w = 60 * RNG.normal(size=(2, 32, 32)).astype(np.float32)
    x = RNG.normal(size=(8, 32)).astype(np.float32)
    fn = SUMMED[between]
    want = total(fn(w, x), 0)
    assert np.max(np.abs(fn(w, x))) > 2**17 and np.max(np.abs(x @ w[0])) < 2**12
    got = jax.jit(autocast(lambda w, x: total(fn(w, x), 0), "mixed_float16"))(w, x)
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-6 * np.max(np.abs(want)))
