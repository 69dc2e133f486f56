"""Which float32 values are no larger than a value in the compute dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pass_tools import after

from jmp_train._autocast.analysis.activations import activations

W, X = np.ones((8, 8), np.float32), np.ones((2, 8), np.float32)


# name: (a function of a 16-bit value, whether its result is no larger than that value)
FUNCTIONS = {
    "a gelu": (jax.nn.gelu, True),
    "an exact gelu": (lambda h: jax.nn.gelu(h, approximate=False), True),
    "a silu": (jax.nn.silu, True),
    "its negative": (lambda h: -jax.nn.silu(h), True),
    "its shape": (lambda h: jnp.reshape(jax.nn.silu(h), (16,)), True),
    "some of it": (lambda h: jax.nn.silu(h)[:1], True),
    "twice its half": (lambda h: jax.nn.silu(h) * 0.5 + h * 0.5 * jnp.tanh(h), True),
    "their difference": (lambda h: h * 0.5 - h * 0.5 * jnp.tanh(h), True),
    "a narrow sum": (lambda h: (h + h) * jnp.tanh(h), True),
    "a bounded number more": (lambda h: 0.5 * h * jnp.tanh(h) + 0.5 * jnp.tanh(h), False),
    "twice as large": (lambda h: 2 * jax.nn.silu(h), False),
    "the sum of two": (lambda h: jax.nn.silu(h) + h * jnp.tanh(h), False),
    "the difference of two": (lambda h: jax.nn.silu(h) - h * jnp.tanh(h), False),
    "a tanh": (jnp.tanh, True),
    "one that is printed": (lambda h: (t := jnp.tanh(h), jax.debug.callback(lambda t: None, t))[0], True),
    "one that may be a probability": (jax.nn.sigmoid, False),
    "half of one": (lambda h: 0.5 * jnp.tanh(h), False),
    "one of float32 numbers": (lambda h: jnp.tanh(jnp.exp(h)), False),
    "one of few numbers, which scales more": (lambda h: (g := jnp.tanh(h[:, :1]), g * h)[0], False),
    "a constant more": (lambda h: h * jnp.tanh(h) + 100.0 * jnp.tanh(h), False),
    "a square": (lambda h: h * jax.nn.silu(h), False),
    "an exponential": (jnp.expm1, False),
    "its product": (lambda h: h * jnp.expm1(h), False),
    "an elu": (jax.nn.elu, True),
    "an elu that ends at -3": (lambda h: jax.nn.elu(h, 3.0), True),
    "one twice as large": (lambda h: 2 * jax.nn.elu(h), False),
    "one of which a case is beyond float16": (
        lambda h: jnp.where(h > 0, h, 1e5 * jnp.expm1(jnp.where(h > 0, 0.0, h))),
        False,
    ),
    "twice one of which a case is beyond half of float16": (
        lambda h: 2 * jnp.where(h > 0, 0.5 * h * jnp.tanh(h), 4e4 * jnp.tanh(h)),
        False,
    ),
    "twice one of which no case is": (
        lambda h: 2 * jnp.where(h > 0, 0.5 * h * jnp.tanh(h), 3e4 * jnp.tanh(h)),
        True,
    ),
    "one of which a case is not bounded": (lambda h: jnp.where(h > 0, jnp.exp(h), h * jnp.tanh(h)), False),
    "an exponential that is not bounded": (lambda h: jnp.where(h > 0, h, jnp.expm1(h)), False),
    "an exponential of the other side": (lambda h: jnp.where(h > 0, h, jnp.expm1(jnp.where(h > 0, h, 0.0))), False),
    "an exponential of at most one": (lambda h: jnp.where(h > 0, h, jnp.expm1(jnp.where(h > 0, 1.0, h))), False),
    "an exponential beside another comparison": (
        lambda h: jnp.where(h > 0, h, jnp.expm1(jnp.where(h > 9, 0.0, h))),
        False,
    ),
    "an exponential where another value is positive": (
        lambda h: jnp.where(h > 0, h, jnp.expm1(jnp.where(h[::-1] > 0, 0.0, h))),
        False,
    ),
    "an exponential of one of three cases": (
        lambda h: jnp.where(h > 0, h, jnp.expm1(lax.select_n((h > 0).astype(jnp.int32), h, h, h))),
        False,
    ),
    "an exponential of the only case": (lambda h: jnp.where(h > 0, h, jnp.expm1(lax.select_n(h > 0, h))), False),
    "a quotient": (lambda h: h / (1 + jnp.exp(-h)), False),
    "of erfc, which is two at most": (lambda h: h * lax.erfc(h), False),
    "of erf": (lambda h: h * lax.erf(h), True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_which_values_are_no_larger(name):
    fn, expected = FUNCTIONS[name]
    program = after("assign_dtypes", lambda w, x: fn(x @ w), W, X)
    assert (program.outputs[0] in activations(program)) == expected


def test_what_they_are_computed_from():
    program = after("assign_dtypes", lambda w, x: (h := x @ w) * (0.5 * jnp.tanh(h)), W, X)
    (inner,) = activations(program)[program.outputs[0]]
    assert program.recorded.producers[inner].name == "tanh"
    across_a_dot = after("assign_dtypes", lambda w, x: ((h := jnp.tanh(x @ w)) @ w) * h, W, X)
    assert activations(across_a_dot)[across_a_dot.outputs[0]] == set()
