"""Values of a network of which only the fractional part counts: positions, bins, phases."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hand_tools import PARAMS, X, errors
from jax import lax
from jax.scipy.ndimage import map_coordinates
from pass_tools import after

import jmp_train as jmp

IMAGE = np.kron(np.random.default_rng(0).uniform(size=(8, 8)), np.ones((16, 16))).cumsum(0).astype(np.float32) / 64


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
}
HASH_GRIDS = {
    "a jitted function": jax.jit(hash_grid),
    "a checkpointed function": jax.checkpoint(hash_grid),
    "a loop": lambda h: lax.map(hash_grid, h),
}
FAST = ("a hash grid", "an image")  # of those in bfloat16, which nothing here treats differently


@functools.cache
def distance(read: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda h, y: jnp.mean((read(h) - y) ** 2)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "float16") for name in (*READ, *HASH_GRIDS)]
    + [pytest.param(name, "bfloat16", marks=[pytest.mark.slow] * (name not in FAST)) for name in (*READ, *HASH_GRIDS)],
)
def test_what_is_read_at_a_position_is_as_exact_as_by_hand(name, dtype):
    written = READ.get(name, hash_grid)
    hand, got = errors(distance(HASH_GRIDS.get(name, written)), dtype, 1024, distance(written))
    assert got < 1.5 * hand


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


def test_a_product_of_narrow_values_that_is_rounded_later_is_no_stream():
    def gated(params, x):
        h = (x @ params[0].T) * (x[::-1] @ params[0].T)
        return h @ params[0], jnp.round(h)

    assert widths(gated, "mul") == ["float32"]


def test_an_edit_of_a_rounding_holds():
    rules = jmp.DEFAULT_RULES.replace({"floor": "follow"})
    assert widths(lambda params, x: jnp.floor(x @ params[0].T), "floor", rules=rules) == ["float16"]
