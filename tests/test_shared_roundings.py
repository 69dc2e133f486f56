"""Which values are rounded for all that read them, in programs of a few lines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pass_tools import after

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


# Of the rows of a product, in float16: how many roundings are written.
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
    "a softmax": (lambda f: jax.nn.softmax(f) * (X @ W @ jax.nn.softmax(f).T).sum(), 1),
    "a sine": (lambda f: jnp.sin(f) * (X @ W @ jnp.sin(f).T).sum(), 0),
    "an exponential that a dot reads": (lambda f: jnp.exp(f) @ W, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_rounded_for_every_reader(name):
    fn, count = CASES[name]
    program = after("insert_casts", lambda w, x: fn(x @ w), W, X)
    assert sum(equation.op is Op.ROUND for equation in program.equations) == count
