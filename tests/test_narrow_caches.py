"""Loops carry caches in 16 bits where this changes no result, and with the derivative of float32 caches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery_tools import primitives
from comparisons import assert_two_programs_agree
from jax import lax
from pass_tools import after, run

from jmp_train import DEFAULT_RULES, autocast
from jmp_train._autocast.passes.rewrites import REWRITES

RNG = np.random.default_rng(0)
BATCH, LENGTH, WIDTH, LAYERS, STEPS = 4, 16, 32, 2, 4
CACHE = (BATCH, LENGTH, WIDTH)
WITHOUT = [rewrite for rewrite in REWRITES if rewrite.name != "narrow_caches"]


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


W = {name: normal(WIDTH, WIDTH) / 6 for name in ("key", "out")}
STACK = {name: normal(LAYERS, WIDTH, WIDTH) / 6 for name in ("key", "out")}
X = normal(BATCH, WIDTH)


def attend(w, h, cache, i, cached=lambda key: key):
    """A token after attention to the cached keys of earlier tokens, and the cache with the token's key."""
    key = h @ w["key"]
    cache = lax.dynamic_update_slice(cache, cached(key)[:, None], (0, i, 0))
    scores = jax.nn.softmax(jnp.einsum("bd,bsd->bs", jnp.tanh(key), cache))
    return jnp.tanh(jnp.einsum("bs,bsd->bd", scores, cache) @ w["out"]), cache


def generate(w, x, cache, step: Any = attend):
    """The last token and the last cache."""
    return lax.scan(lambda state, i: (step(w, *state, i), None), (x, cache), jnp.arange(STEPS))[0]


def generate_in_while(w, x, cache):
    def body(state):
        h, cache, i = state
        return *attend(w, h, cache, i), i + 1

    return lax.while_loop(lambda state: state[2] < STEPS, body, (x, cache, 0))[:2]


def until_a_number_that_stays(w, x, cache):
    """A `while` that reads one of the numbers that it carries."""

    def body(state):
        h, cache, i, limits = state
        return (*attend(w, h + (limits @ w["out"])[:1], cache, i), i + 1, limits)

    limits = jnp.full((2, WIDTH), STEPS - 0.5)
    return lax.while_loop(lambda state: state[2] < state[3][0, 0], body, (x, cache, 0, limits))[:2]


def in_layers(w, h, caches, i):
    """A cache for each layer, which a scan over the layers reads and returns row by row."""
    return lax.scan(lambda h, layer: attend(layer[0], h, layer[1], i), h, (w, caches))


def in_carried_layers(w, h, caches, i):
    """The same layers, but the scan carries the cache of all layers."""

    def layer(state, row):
        h, caches, number = state
        h, cache = attend(row, h, caches[number], i)
        return (h, caches.at[number].set(cache), number + 1), None

    return lax.scan(layer, (h, caches, 0), w)[0][:2]


def selected(w, h, cache, i):
    h, new = attend(w, h, cache, i)
    return h, jnp.where(i < 2, new, cache)


def shifted(w, h, cache, i):
    return attend(w, h, jnp.concatenate([cache[:, 1:], jnp.zeros((BATCH, 1, WIDTH))], 1), LENGTH - 1)


def scaled(w, h, cache, i):
    h, cache = attend(w, h, cache, i)
    return h, cache * 0.5


def summed(w, h, cache, i):
    return attend(w, h + jnp.sum(cache, 1), cache, i)


def overwritten(w, h, cache, i):
    """What reads the cache replaces the key, in 16 bits, since it is read across a dot."""
    h, cache = attend(w, h, cache, i)
    return h, lax.dynamic_update_slice(cache, h[:, None], (0, i, 0))


def in_bfloat16(w, h, cache, i):
    cache = lax.dynamic_update_slice(cache, (h @ w["key"])[:, None], (0, i, 0))
    query, axes = h.astype(jnp.bfloat16), (((1,), (2,)), ((0,), (0,)))
    return jnp.sum(lax.dot_general(query, cache, axes, preferred_element_type=np.float32), 1, keepdims=True) * h, cache


def in_float32(w, h, cache, i):
    scores = jnp.einsum("bd,bsd->bs", h, cache, precision="highest")
    return attend(w, h + jnp.sum(scores), cache, i)


def behind_a_barrier(w, h, cache, i):
    return attend(w, h, lax.optimization_barrier(cache), i)


def beside_it_behind_a_barrier(w, h, cache, i):
    cache, beside = lax.optimization_barrier((cache, jnp.exp(h)))
    return attend(w, h + beside, cache, i)


def replaced(w, h, cache, i):
    return attend(w, h, cache, i)[0], jnp.tile(jnp.exp(h)[:, None], (1, LENGTH, 1))


def in_layers_of_exponentials(w, h, caches, i):
    return lax.scan(lambda h, layer: attend(layer[0], h, layer[1], i, jnp.exp), h, (w, caches))


def in_layers_that_sum(w, h, caches, i):
    return lax.scan(lambda h, layer: summed(layer[0], h, layer[1], i), h, (w, caches))


def in_layers_that_carry_the_last(w, h, caches, i):
    def layer(state, row):
        h, cache = attend(row[0], state[0], row[1], i)
        return (h, cache), cache

    (h, last), caches = lax.scan(layer, (h, zeros()), (w, caches))
    return h + last[:, 0], caches


def in_carried_layers_that_replace(w, h, caches, i):
    def layer(state, row):
        h, caches = state
        return (attend(row, h, caches[0], i)[0], jnp.tile(jnp.exp(h)[:, None], (LAYERS, 1, LENGTH, 1))), None

    return lax.scan(layer, (h, caches), w)[0]


def unread(w, h, cache, i):
    return jnp.tanh(h @ w["key"]) @ w["out"], lax.dynamic_update_slice(cache, (h @ w["out"])[:, None], (0, i, 0))


def recurrent(w, x):
    """A state that only a dot reads, and that a dot computes."""
    return lax.scan(lambda h, _: (jnp.tanh(h @ w["key"]), None), jnp.zeros_like(x), None, STEPS)[0]


def stacked(w, x):
    """Every state of the cache."""
    return lax.scan(lambda state, i: (attend(w, state[0], state[1], i), state[1]), (x, zeros()), jnp.arange(STEPS))


def of_a_loop_inside(w, x):
    """A cache in a scan over layers, inside of a loop over steps with the same layers."""

    def layer(state, row):
        h, cache, i = state
        return (*attend(row, h, cache, i), i + 1), None

    def step(h, _):
        return lax.scan(layer, (h, zeros(), 0), w)[0][0], None

    return lax.scan(step, x, None, STEPS)[0]


def of_exponentials(w, h, cache, i):
    return attend(w, h, cache, i, jnp.exp)


def zeros(*leading: int) -> jax.Array:
    return jnp.zeros((*leading, *CACHE))


def returning(fn, which=0):
    return lambda w, x: fn(w, x)[which]


CAPTURED = np.zeros(CACHE, np.float32)
# Each value: a program of parameters and data, the parameters, the index of the cache among the carries, its dtype.
CACHES = {
    "not returned": (returning(lambda w, x: generate(w, x, zeros())), W, 1, "float16"),
    "in a `while`": (returning(lambda w, x: generate_in_while(w, x, zeros())), W, 1, "float16"),
    "read by the condition": (returning(lambda w, x: until_a_number_that_stays(w, x, zeros())), W, 3, "float32"),
    "an argument": (returning(lambda w, x: generate(w, x, jnp.tile(x[:, None], (1, LENGTH, 1)))), W, 1, "float16"),
    "returned": (lambda w, x: generate(w, x, zeros()), W, 1, "float16"),
    "of a prompt, and returned": (lambda w, x: generate(w, x, zeros().at[:, 0].set(x @ w["out"])), W, 1, "float16"),
    "an argument, and returned": (lambda w, x: generate(w, x, jnp.tile(x[:, None], (1, LENGTH, 1))), W, 1, "float32"),
    "of other numbers, and returned": (lambda w, x: generate(w, x, jnp.full(CACHE, 0.1)), W, 1, "float32"),
    "of exponentials": (returning(lambda w, x: generate(w, x, zeros(), of_exponentials)), W, 1, "float16"),
    "of exponentials, and returned": (lambda w, x: generate(w, x, zeros(), of_exponentials), W, 1, "float32"),
    "selected": (lambda w, x: generate(w, x, zeros(), selected), W, 1, "float16"),
    "shifted": (lambda w, x: generate(w, x, zeros(), shifted), W, 1, "float16"),
    "overwritten": (lambda w, x: generate(w, x, zeros(), overwritten), W, 1, "float16"),
    "scaled": (returning(lambda w, x: generate(w, x, zeros(), scaled)), W, 1, "float32"),
    "summed": (returning(lambda w, x: generate(w, x, zeros(), summed)), W, 1, "float32"),
    "read by a dot in float32": (returning(lambda w, x: generate(w, x, zeros(), in_float32)), W, 1, "float32"),
    "read by a dot in bfloat16": (returning(lambda w, x: generate(w, x, zeros(), in_bfloat16)), W, 1, "float32"),
    "rows of a loop inside": (returning(lambda w, x: generate(w, x, zeros(LAYERS), in_layers)), STACK, 1, "float16"),
    "carried by a loop inside": (
        returning(lambda w, x: generate(w, x, zeros(LAYERS), in_carried_layers)),
        STACK,
        1,
        "float16",
    ),
    "rows of a loop inside, and returned": (lambda w, x: generate(w, x, zeros(LAYERS), in_layers), STACK, 1, "float16"),
    "captured": (returning(lambda w, x: generate(w, x, CAPTURED)), W, 1, "float16"),
    "captured, and returned": (lambda w, x: generate(w, x, CAPTURED), W, 1, "float32"),
    "behind a barrier": (returning(lambda w, x: generate(w, x, zeros(), behind_a_barrier)), W, 1, "float16"),
    "behind one with other numbers": (
        returning(lambda w, x: generate(w, x, zeros(), beside_it_behind_a_barrier)), W, 1, "float32"),
    "replaced": (returning(lambda w, x: generate(w, x, zeros(), replaced)), W, 1, "float32"),
    "rows of a loop inside, of exponentials": (
        lambda w, x: generate(w, x, zeros(LAYERS), in_layers_of_exponentials), STACK, 1, "float32"),
    "rows that a loop inside sums": (
        returning(lambda w, x: generate(w, x, zeros(LAYERS), in_layers_that_sum)), STACK, 1, "float32"),
    "rows of a loop inside, of which it carries the last": (
        returning(lambda w, x: generate(w, x, zeros(LAYERS), in_layers_that_carry_the_last)), STACK, 1, "float32"),
    "replaced by a loop inside": (
        returning(lambda w, x: generate(w, x, zeros(LAYERS), in_carried_layers_that_replace)), STACK, 1, "float32"),
    "that no dot reads": (lambda w, x: generate(w, x, zeros(), unread), W, 1, "float32"),
    "of which each state is returned": (stacked, W, 1, "float32"),
    "a recurrent state": (recurrent, W, 0, "float32"),
    "of a loop inside, of which the weights are cast outside": (of_a_loop_inside, STACK, 0, "float32"),
    "no cache": (returning(lambda w, x: generate(w, x, zeros())), W, 0, "float32"),
}  # fmt: skip
NARROW = [name for name, (*_, dtype) in CACHES.items() if dtype == "float16"]


@pytest.mark.parametrize("name", CACHES)
def test_which_caches_are_carried_in_16_bits(name):
    fn, w, position, dtype = CACHES[name]
    program = after("rewrite_lowered", fn, w, X)
    (loop,) = (equation for equation in program.equations if equation.loop_counts)
    assert program.avals[loop.results[position]].dtype == dtype


@pytest.mark.parametrize("name", NARROW)
def test_in_16_bits_a_cache_gives_the_same_results(name):
    fn, w, *_ = CACHES[name]
    assert_two_programs_agree(run(fn, w, X), run(fn, w, X, rewrites=WITHOUT), "float16")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("returned", "captured", "rows of a loop inside") else pytest.mark.slow)
        for name in NARROW
        if name != "in a `while`"
    ],
)
def test_the_gradient_of_a_cache_accumulates_in_float32(name):
    fn, w, *_ = CACHES[name]

    def gradient(rewrites: Any) -> Any:
        return jax.grad(lambda w: sum(map(jnp.sum, jax.tree.leaves(run(fn, w, X, rewrites=rewrites)))))(w)

    assert_two_programs_agree(gradient(REWRITES), gradient(WITHOUT), "float32")


@pytest.mark.parametrize("name", CACHES)
def test_autocast_twice_is_autocast_once(name):
    fn, w, *_ = CACHES[name]
    once = autocast(fn, "mixed_float16")
    assert primitives(autocast(once, "mixed_float16"), w, X) == primitives(once, w, X)


def test_a_loop_around_casts_the_weights_of_one_with_a_cache():
    program = after("rewrite_lowered", of_a_loop_inside, STACK, X)
    (outer,) = (equation for equation in program.equations if equation.loop_counts)
    (inner,) = (equation for equation in outer.bodies[0].equations if equation.loop_counts)
    assert inner.wide is not None and len(inner.uses) > len(inner.wide.uses)


def test_a_while_with_a_cache_is_differentiated_forward():
    fn, w, *_ = CACHES["in a `while`"]

    def tangent(fn):
        return jax.jvp(lambda w: fn(w, X), (w,), (w,))[1]

    assert_two_programs_agree(tangent(autocast(fn, "mixed_float16")), tangent(fn), "float16")


def test_a_cache_that_a_scan_reads_as_recorded_is_not_narrowed():
    def fn(w, x):
        def body(state):
            h, cache, i = state
            h = lax.scan(lambda total, row: (total + row, None), h, cache.transpose(1, 0, 2))[0]
            return *attend(w, h, cache, i), i + 1

        return lax.while_loop(lambda state: state[2] < STEPS, body, (x, zeros(), 0))[0]

    program = after("rewrite_lowered", fn, W, X, rules=DEFAULT_RULES.replace({"scan": "recorded"}))
    (loop,) = (equation for equation in program.equations if equation.loop_counts)
    assert program.avals[loop.results[1]].dtype == "float32"
