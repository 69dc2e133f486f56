"""Numbers that a network computes and of which only the fraction counts: positions, bins, phases."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.ndimage import map_coordinates
from pass_tools import after

import jmp_train as jmp
from jmp_train import autocast

RNG = np.random.default_rng(0)
PARAMS = {"hidden": (24, 64), "bias": (64,), "out": (64, 16)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) / 6 for name, shape in PARAMS.items()}
X, Y = (RNG.normal(size=shape).astype(np.float32) for shape in ((64, 24), (64, 16)))
IMAGE = np.kron(RNG.uniform(size=(8, 8)), np.ones((16, 16))).cumsum(0).astype(np.float32) / 64


def two_hot(h):
    """Target distributions over 51 bins, as `rlax.transform_to_2hot` computes them."""
    bins = (jnp.clip(5 * jnp.tanh(h), -10, 10) + 10) / 20 * 50
    low, high = jnp.floor(bins), jnp.ceil(bins)
    values = jnp.log1p(jnp.arange(51.0))
    share = (high - bins) / (high - low + 1e-5)
    return values[low.astype(int)] * share + values[high.astype(int)] * (1 - share)


def hash_grid(h):
    """Linear interpolation in grids of three resolutions (Müller et al., 2022)."""
    result = 0.0
    for resolution in (16, 64, 256):
        position = jax.nn.sigmoid(h) * resolution
        cell = jnp.floor(position)
        table = jnp.sin(1.7 * jnp.arange(resolution + 2.0))
        share = position - cell
        result += table[cell.astype(int)] * (1 - share) + table[cell.astype(int) + 1] * share
    return result


def encoded(h):
    """Sines of a position in eight octaves (Mildenhall et al., 2020)."""
    octaves = np.pi * 2.0 ** np.arange(8, dtype=np.float32)
    return jnp.sin(jax.nn.sigmoid(h)[..., None] * octaves).sum(-1)


def sampled(h):
    """An image read at 8 points, as RoIAlign and deformable attention do."""
    points = 127 * jax.nn.sigmoid(h).reshape(64, 8, 2)
    values = map_coordinates(IMAGE.astype(h.dtype), [points[..., 0], points[..., 1]], 1, mode="nearest")
    return jnp.repeat(values, 2, 1)


READ = {
    "two-hot targets": two_hot,
    "a hash grid": hash_grid,
    "a positional encoding": encoded,
    "an image": sampled,
    "a remainder": lambda h: jnp.mod(100 * jax.nn.sigmoid(h), 1.0),
    "a jitted function": jax.jit(hash_grid),
    "a checkpointed function": jax.checkpoint(hash_grid),
    "a loop": lambda h: lax.map(hash_grid, h),
}


def loss(read: Callable[..., Any], params: Any, x: Any, y: Any, rounded: Callable[[Any], Any]) -> Any:
    def dot(a, b):
        return rounded(rounded(a) @ rounded(b))

    return jnp.mean((read(dot(jnp.tanh(dot(x, params["hidden"]) + params["bias"]), params["out"])) - y) ** 2)


def by_hand(dtype: str) -> Callable[[Any], Any]:
    return lambda value: lax.optimization_barrier(value.astype(dtype)).astype(jnp.float32)


def gradients(read: Callable[..., Any], dtype: str) -> tuple[Any, Any, Any]:
    """In float64, with products alone in a dtype, and by autocast. The losses are scaled by 1,024."""

    def plain(params, x, y):
        return 1024 * loss(read, params, x, y, lambda value: value)

    def hand(params, x, y):
        return 1024 * loss(read, params, x, y, by_hand(dtype))

    with jax.enable_x64(True):
        exact = jax.grad(plain)(*jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (PARAMS, X, Y)))
    return exact, jax.jit(jax.grad(hand))(PARAMS, X, Y), autocast(jax.grad(plain), f"mixed_{dtype}")(PARAMS, X, Y)


def relative_error(got: Any, want: Any) -> float:
    got, want = (np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(tree)]) for tree in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", READ)
def test_what_is_read_at_a_position_is_as_exact_as_by_hand(name, dtype):
    exact, hand, got = gradients(READ[name], dtype)
    assert relative_error(got, exact) < 1.5 * relative_error(hand, exact)


def widths(fn: Callable[..., Any], primitive: str, **arguments: Any) -> list[str]:
    program = after("assign_dtypes", fn, (PARAMS["out"], PARAMS["bias"]), X[:, :16], **arguments)
    return [np.dtype(e.reads[0]).name for e in program.equations if e.node.name == primitive]


@pytest.mark.parametrize("fn", [jnp.floor, jnp.ceil, jnp.round, jnp.sin, lambda h: lax.rem(h, 2.0)])
def test_what_leads_to_a_position_is_computed_in_float32(fn):
    def placed(params, x):
        h = jnp.tanh(x @ params[0].T)
        return h, h * 100 - fn(h * 100)

    assert widths(placed, "tanh") == widths(placed, "mul")[:1] == ["float32"]


def test_a_stream_and_a_biased_product_that_are_rounded_later_stay_narrow():
    def biased(params, x):
        h = x @ params[0].T + params[1]
        return h @ params[0], jnp.round(3 * h)

    def stream(params, x):
        h = x @ params[0].T
        h = h + jnp.tanh(h) @ params[0] @ params[0].T
        return h @ params[0], jnp.round(3 * h)

    assert widths(biased, "add") == widths(stream, "add") == ["float16"]
    assert widths(biased, "mul") == widths(biased, "round") == ["float32"]


def test_an_edit_of_a_rounding_holds():
    rules = jmp.DEFAULT_RULES.replace({"floor": "follow"})
    assert widths(lambda params, x: jnp.floor(x @ params[0].T), "floor", rules=rules) == ["float16"]
