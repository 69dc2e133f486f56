"""Which values are rounded once for all equations that read them, in programs of a few lines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from pass_tools import after

from jmp_train._autocast import autocast
from jmp_train._autocast.emit import _round, emit
from jmp_train._autocast.ir import Op

RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 16)).astype(np.float32)
X = RNG.normal(size=(8, 16)).astype(np.float32)
B = jnp.asarray(X, jnp.bfloat16)


def lengths(f):
    return jnp.sum(f**2, -1)[:, None]


def moved(f):
    g = f.reshape(4, 2, 16).reshape(8, 16)
    return lengths(f) - g @ g.T


def to_data(f):
    x = jnp.asarray(X)
    return lengths(f) + lengths(x).T - f @ x.T


def in_a_scan(f):
    return lengths(f) - lax.scan(lambda c, _: (c + f @ f.T, None), jnp.zeros((8, 8)), None, length=3)[0]


def in_a_while(f):
    def step(each):
        return each[0] + 1, each[1] + f @ f.T

    return lengths(f) - lax.while_loop(lambda each: each[0] < 3, step, (0, jnp.zeros((8, 8))))[1]


def in_a_branch(f):
    return lengths(f) - lax.cond(f[0, 0] > 0, lambda f: f @ f.T, lambda f: f @ X.T, f)


# name: (a function of the rows of a product, the number of roundings in float16)
CASES = {
    "distances": (lambda f: lengths(f) - f @ f.T, 1),
    "moved": (moved, 1),
    "in a scan": (in_a_scan, 1),
    "in a while": (in_a_while, 1),
    "in a branch": (in_a_branch, 1),
    "of data": (lambda f: lengths(X) - X @ X.T, 0),
    "of data in bfloat16": (lambda f: lengths(B) - B @ B.T, 0),
    "an exponential of bfloat16": (lambda f: jnp.exp(B) * (X @ W @ jnp.exp(B).T).sum(), 0),
    "distances to data": (to_data, 1),
    "half of a distance": (lambda f: lengths(f) - f @ X.T, 0),
    "no square": (lambda f: lengths(jnp.sin(f)) - f @ X.T, 0),
    "an exponential": (lambda f: jnp.exp(f) * (X @ W @ jnp.exp(f).T).sum(), 1),
    "a softmax": (lambda f: jax.nn.softmax(f) * (X @ W @ jax.nn.softmax(f).T).sum(), 2),  # and its sum, apart
    "a sine": (lambda f: jnp.sin(f) * (X @ W @ jnp.sin(f).T).sum(), 0),
    "an exponential that a dot reads": (lambda f: jnp.exp(f) @ W, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_rounded_for_every_reader(name):
    fn, count = CASES[name]
    program = after("insert_casts", lambda w, x: fn(x @ w), W, X)
    assert sum(equation.op is Op.ROUND for equation in program.equations) == count


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_no_two_readers_of_a_softmax_share_an_expression(dtype):
    """The readers are a product, a sum, and an equation across a dot; in float16, saving rounds for the last."""

    def loss(w, x):
        return jnp.sum(jnp.square(jax.nn.softmax(x @ w, axis=0) @ w))  # that over rows is rewritten

    program = after("insert_casts", jax.grad(loss), W, X, policy=f"mixed_{dtype}")
    producers = {number: e for e in program.equations for number in e.results}

    def expression(number):
        each = producers.get(number)
        if each is None or each.name in ("dot_general", "stop_gradient"):
            return number
        name = () if each.op is Op.SAVED else (each.name, str(each.params))  # XLA removes barriers
        return (*name, *map(expression, each.operands))

    exponentials = [e for e in program.equations if e.name == "exp"]
    assert [e.remat for e in exponentials] == [False, True, True]
    assert len({expression(e.results[0]) for e in exponentials}) == 3
    rounds = [
        eqn for eqn in jax.make_jaxpr(lambda *args: emit(program, args))(W, X).eqns if "mantissa_bits" in eqn.params
    ]
    assert [eqn.params["exponent_bits"] for eqn in rounds] == [8, 10] + [9] * (dtype == "bfloat16")


@pytest.mark.parametrize("residual", range(4))
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_roundings_of_residuals_are_equal(dtype, residual):
    """To the nearest number of as many bits, ties to even, in any of the exponents of float32."""
    bits = np.concatenate([RNG.integers(0, 2**32, 100_000, np.uint32), 0x3F800000 + np.arange(2**16, dtype=np.uint32)])
    x = np.concatenate([bits.view(np.float32), np.asarray([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)])
    dropped = jnp.finfo(jnp.float32).nmant - jnp.finfo(dtype).nmant
    kept = x.view(np.uint32).astype(np.uint64)
    kept = (kept + (1 << (dropped - 1)) - 1 + ((kept >> dropped) & 1)) >> dropped << dropped
    expected = np.where(np.isnan(x), np.nan, kept.astype(np.uint32).view(np.float32))
    np.testing.assert_array_equal(jax.jit(_round, static_argnums=(1, 2))(x, np.dtype(dtype), residual), expected)


@pytest.mark.parametrize(
    "variance",
    [
        lambda h: jnp.mean(h**2, -1, keepdims=True),
        lambda h: jnp.sum(h * h / 16, -1, keepdims=True),
        lambda h: jnp.sum(jnp.where(jnp.arange(16) < 16, h * h, 0), -1, keepdims=True) / 16,
    ],
    ids=["mean", "scaled", "masked"],
)
def test_a_norm_in_a_scan_and_its_gradient_read_the_same_numbers(variance):
    """The gradient of the norm of rows that are nearly equal cancels; 7 % of it was wrong where XLA dropped a cast."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(16, 16)).astype(np.float32) / 4
    x = (-0.17 + 0.024 * rng.normal(size=(8, 8, 16))).astype(np.float32)
    b = np.full(16, 0.1, np.float32)

    def layer_norm(h):
        centred = h - jnp.mean(h, -1, keepdims=True)
        return centred / jnp.sqrt(variance(centred) + 1e-5)

    def loss(b, w, x):
        return jnp.mean(lax.scan(lambda s, x: (s + layer_norm(x @ w + b) / 4, None), jnp.zeros((8, 16)), x)[0] ** 2)

    rounded = jax.jit(jax.grad(loss))(b, *(each.astype(jnp.bfloat16).astype(np.float32) for each in (w, x)))
    gradient = jax.jit(autocast(jax.grad(loss), "mixed_bfloat16"))(b, w, x)
    assert np.linalg.norm(gradient - rounded) < 0.02 * np.linalg.norm(rounded)


def test_a_norm_in_a_shard_map_and_its_gradient_read_the_same_numbers():
    """The gradient of the square of what a norm returns cancels; it was wrong by a factor of 5 without the rounding."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(16, 16)).astype(np.float32) / 4
    x = rng.normal(size=(16, 16)).astype(np.float32)
    b = rng.normal(size=16).astype(np.float32) / 10

    def norm(b, w, x):
        h = x @ w + b
        return h / (jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-3)

    mesh = Mesh(jax.devices()[:1], ("d",))
    sharded = jax.shard_map(norm, mesh=mesh, in_specs=(P(), P(), P("d")), out_specs=P("d"))
    gradient = jax.grad(lambda *args: jnp.mean(sharded(*args) ** 2), argnums=(0, 1))
    rounded = jax.jit(gradient)(b, *(each.astype(jnp.bfloat16).astype(np.float32) for each in (w, x)))
    result = jax.jit(autocast(gradient, "mixed_bfloat16"))(b, w, x)
    for one, other in zip(result, rounded, strict=True):
        assert np.linalg.norm(one - other) < 0.05 * np.linalg.norm(other)
