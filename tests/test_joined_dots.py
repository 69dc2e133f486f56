"""Which dots XLA for GPUs computes as one, in programs of a line or two, and how their results are saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pass_tools import after

from jmp_train import autocast
from jmp_train._autocast.emit import _saved

RNG = np.random.default_rng(0)
W, V, X = (RNG.standard_normal((16, 16)).astype(np.float32) for _ in range(3))


def gated(w, v, x):
    return jnp.sum((jnp.tanh(x @ w) * (x @ v)) @ w)


# Each value: a function of (w, v, x) whose gradient is planned, and the number of results of joined dots.
PROGRAMS = {
    "a gate and what it multiplies": (gated, 2),
    "three of one operand": (lambda w, v, x: jnp.sum((jnp.tanh(x @ w) * (x @ v) * (x @ (w + v))) @ w), 3),
    "one behind the other": (lambda w, v, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ v) @ w), 0),
    "the same operand on the other side": (lambda w, v, x: jnp.sum((jnp.tanh(w @ x) * (x @ v)) @ w), 0),
    "the same operand, transposed": (lambda w, v, x: jnp.sum((jnp.tanh(x.T @ w) * (x @ v)) @ w), 0),
    "two operands of one parameter": (lambda w, v, x: jnp.sum((jnp.tanh(x @ w) * (jnp.cos(x) @ w)) @ v), 0),
    "dots read one of them": (lambda w, v, x: jnp.sum((jnp.tanh(x @ w) @ (h := x @ v)) * h), 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_which_dots_are_joined(name):
    fn, expected = PROGRAMS[name]
    program = after("save_or_remat", jax.grad(fn, (0, 1)), W, V, X)
    assert len(program.residuals.by_product) == expected


@pytest.mark.parametrize("rows, joined", [(2**20 - 9, 2), (2**20 - 8, 0)])
def test_dots_of_64_mib_are_not_joined(rows, joined):
    """Each dot reads and writes 64 bytes a row in 16 bits, and 512 bytes of the weight."""
    x = jax.ShapeDtypeStruct((rows, 16), np.float32)
    residuals = after("save_or_remat", jax.grad(gated, (0, 1)), W, V, x).residuals
    assert len(residuals.by_product) == joined and residuals.saved


def test_what_is_saved_of_them_fuses_with_its_readers():
    """With a separate barrier, each slice of the joined dots would be copied."""
    gradient = jax.grad(gated, (0, 1))
    narrow = jax.make_jaxpr(autocast(gradient, "mixed_float16"))(W, V, X)
    barriers = [eqn for eqn in narrow.jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    one, other = (eqn.outvars[0] for eqn in barriers if eqn.outvars[0].aval.shape == ())
    scaled = [eqn for eqn in narrow.jaxpr.eqns if eqn.primitive.name == "mul" and {one, other} & {*eqn.invars}]
    dots = {eqn.outvars[0] for eqn in narrow.jaxpr.eqns if eqn.primitive.name == "dot_general"}
    assert len(scaled) == 2 and all(eqn.invars[0] in dots for eqn in scaled)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_number_keeps_its_value(dtype):
    numbers = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype)))
    saved = jax.jit(functools.partial(_saved, by_product=True))(numbers)
    normal = ~(jnp.abs(numbers) < jnp.finfo(dtype).tiny) if dtype == "bfloat16" else ...  # CPUs flush those of float32
    got, expected = (np.asarray(each[normal], np.float32) for each in (saved, numbers))
    np.testing.assert_array_equal(got, expected)
