"""Weights that loops read are cast once: moved ones, those of loops inside, and those of rematerialized functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import assert_two_programs_agree
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pass_tools import after, run

from jmp_train import autocast
from jmp_train._autocast.format_program import format_program
from jmp_train._autocast.ir import Op, Program
from jmp_train._autocast.passes.rewrites import REWRITES

RNG = np.random.default_rng(0)
W, X = (RNG.normal(size=shape).astype(np.float32) / 4 for shape in ((16, 16), (2, 16)))
LAYERS = RNG.normal(size=(3, 16, 16)).astype(np.float32) / 4
WITHOUT = [rewrite for rewrite in REWRITES if rewrite.name != "hoist_weight_casts"]
NUMBER = np.int32(5)


def repeated(step):
    """`step` on `x` five times, in a scan."""
    return lambda w, x: lax.scan(lambda h, _: (step(h, w), None), x, None, 5)[0]


def counted(w, x, n):
    return lax.while_loop(lambda state: state[1] < n, lambda state: (jnp.tanh(state[0] @ w), state[1] + 1), (x, 0))[0]


def layers(h, w):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, w)[0]


def steps(h, w):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w.T), None), h, None, 2)[0]


def part_of_stack(h, w):
    for one in jnp.split(w, 3):
        h = jnp.tanh(h @ one[0])
    return jnp.tanh(h @ w[1].T)


@jax.checkpoint
def checkpointed(h, w):
    return jnp.tanh(h @ w) @ w.T


def over_devices(w, x):
    """Each step declares the weight to vary over devices, as the activations do."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    step = repeated(lambda h, w: jnp.tanh(h @ w))
    return jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(w, x)


HOISTED = {
    "a weight": (repeated(lambda h, w: jnp.tanh(h @ w)), W, X),
    "its transpose": (repeated(lambda h, w: jnp.tanh(h @ w.T)), W, X),
    "parts of a stack": (repeated(part_of_stack), LAYERS, X),
    "in a `while`": (counted, W, X, NUMBER),
    "in a `while` whose condition has no constants": (lambda w, x: counted(w, x, 5), W, X),
    "of a loop inside": (repeated(steps), W, X),
    "of a loop in a loop inside": (repeated(lambda h, w: repeated(steps)(w, h)), W, X),
    "rows of a loop inside": (repeated(layers), LAYERS, X),
    "of a checkpointed function": (repeated(checkpointed), W, X),
    "in a function mapped over devices": (over_devices, W, X),
    "of its gradient": (repeated(jax.grad(lambda h, w: jnp.sum(checkpointed(h, w)))), W, X),
}


def casts_in_loops(program: Program, in_loop: bool = False) -> list[int]:
    """The number of axes of what is cast to float16 in the loops of a program, and is no row of activations."""
    found = []
    for equation in program.equations:
        inside = in_loop or equation.node.name in ("scan", "while")
        found += [number for body in equation.bodies for number in casts_in_loops(body, inside)]
        shape = program.avals[equation.results[0]].shape if equation.results else ()
        if in_loop and equation.op is Op.CAST and shape in (W.shape, LAYERS.shape, LAYERS[:1].shape):
            found += [len(shape)] if program.avals[equation.results[0]].dtype == np.float16 else []
    return found


@pytest.mark.parametrize("name", HOISTED)
def test_weights_of_a_loop_are_cast_before_it(name):
    fn, *args = HOISTED[name]
    assert casts_in_loops(after("rewrite_lowered", fn, *args)) == []
    assert casts_in_loops(after("rewrite_lowered", fn, *args, rewrites=WITHOUT)) != []
    assert_two_programs_agree(run(fn, *args), run(fn, *args, rewrites=WITHOUT), "float16")


@pytest.mark.parametrize("name", [name for name in HOISTED if "while" not in name])
def test_the_copies_have_the_derivative_of_a_cast_inside(name):
    fn, *args = HOISTED[name]

    def gradient(rewrites: Any):
        return jax.grad(lambda w: jnp.sum(run(fn, w, *args[1:], rewrites=rewrites)[0]))(args[0])

    assert_two_programs_agree(gradient(REWRITES), gradient(WITHOUT), "float16")


def test_a_counted_while_is_differentiated_forward():
    def tangent(fn):
        return jax.jvp(lambda w: fn(w, X, NUMBER), (W,), (np.ones_like(W),))[1]

    assert_two_programs_agree(tangent(autocast(counted, "mixed_float16")), tangent(counted), "float16")


def gradients_of_stack(w, x):
    gradient = jax.grad(lambda w, h: jnp.sum(layers(h, w)))
    return lax.scan(lambda total, row: (total + gradient(w, row[None]), None), jnp.zeros_like(w), x)[0]


def moved_rows(h, w):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w.T), None), h, w)[0]


def carried(h, w):
    return h @ lax.scan(lambda v, _: (jnp.tanh(v @ W), None), w, None, 2)[0]


def repeated_weight(h, w):
    return jnp.einsum("bi,bij->bj", h, jnp.broadcast_to(w, (2, 16, 16)))


def added(h, w):
    return jnp.tanh(h @ W) + w[0]


def in_float32(w, x):
    keys = jnp.tanh(x @ w)
    queries = lax.stop_gradient(keys @ w)
    return lax.scan(lambda h, _: (jnp.dot(h, queries.T, precision="highest") @ queries, None), x, None, 3)[0]


# Programs with casts that are not hoisted, and their number of copies, which are of other weights.
NOT_HOISTED = {
    "rows, where gradients are accumulated": (gradients_of_stack, LAYERS, 0),
    "rows that are moved first": (repeated(moved_rows), LAYERS, 0),
    "what a loop inside carries": (repeated(carried), W, 1),
    "repeated, which would be larger than the weight": (repeated(repeated_weight), W, 0),
    "of a weight that no dot reads": (repeated(added), W, 1),
    "of a weight that scales activations": (repeated(lambda h, w: jnp.tanh(h @ W) * w), X, 1),
    "a copy in float32": (in_float32, W, 0),
    "activations of a checkpointed function": (repeated(jax.checkpoint(lambda h, w: jnp.tanh(h @ w))), W, 1),
}


@pytest.mark.parametrize("name", NOT_HOISTED)
def test_other_casts_stay_where_they_are(name):
    fn, w, copies = NOT_HOISTED[name]
    assert format_program(after("rewrite_lowered", fn, w, X)).count("copy_of") == copies
    assert_two_programs_agree(run(fn, w, X), run(fn, w, X, rewrites=WITHOUT), "float16")
