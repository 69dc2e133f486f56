"""Which sums rematerialize their operand in separate expressions, in programs of a few lines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pass_tools import after

from jmp_train import autocast
from jmp_train._autocast import planner
from jmp_train._autocast.format_program import format_program
from jmp_train._autocast.ir import SEPARATE, SHARED

RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 16)).astype(np.float32)
X = RNG.normal(size=(8, 16)).astype(np.float32)


def reads(fn, name):
    """For each equation of this name, the kind of residual as which it reads its operands."""
    program = after("separate_sums", fn, W, X)
    return [max(use.residual for use in equation.uses) for equation in program.equations if equation.name == name]


def across(value, w, x):
    """Reads `value` across two dots."""
    return jnp.sum(value * (x @ w @ w))


def capped(h):
    return 3 * jnp.tanh(h / 3)


def test_sums_on_the_near_side_share_an_expression():
    def loss(w, x):
        h = jnp.exp(x @ w)
        return jnp.sum(h), jnp.sum(h, 0), across(h, w, x)

    assert "reduce_sum d:float32*2" in format_program(after("separate_sums", loss, W, X))
    assert reads(loss, "reduce_sum") == [SEPARATE, SEPARATE, 0]
    assert reads(loss, "mul") == [SHARED]


@pytest.mark.parametrize("value", [jnp.exp, jnp.tanh, jax.nn.gelu], ids=lambda fn: fn.__name__)
def test_nothing_is_separate_without_a_sum_on_the_near_side(value):
    def loss(w, x):
        h = value(x @ w)
        return jnp.max(h), across(h, w, x)

    program = after("separate_sums", loss, W, X)
    assert max(use.residual for equation in program.equations for use in equation.uses) == SHARED


def exponential_of_capped(h, x):
    del x
    return jnp.exp(capped(h))


def exponential_beside_capped_data(h, x):
    return jnp.exp(h * capped(x))


@pytest.mark.parametrize(
    ("value", "expected"), [(exponential_of_capped, SEPARATE), (exponential_beside_capped_data, SHARED)]
)
def test_what_runs_again_has_to_be_expensive_twice(value, expected):
    assert max(reads(lambda w, x: across(value(x @ w, x), w, x), "mul")) == expected


def test_what_is_cheap_is_shared():
    def loss(w, x):
        scaled = (x @ w) / 3
        jax.debug.print("{}", x[0, 0])  # an equation without results
        return across(jnp.exp(jnp.tanh(scaled)), w, x), across(scaled, w, x)

    assert [residual for residual in reads(loss, "mul") if residual] == [SEPARATE, SHARED]


def test_a_sum_reads_the_saved_copy_that_all_readers_share():
    def loss(w, x):
        h = jnp.sin(x @ w)
        return jnp.sum(h), h @ w

    assert reads(loss, "reduce_sum") == [SHARED]


def test_nothing_is_separate_that_nobody_rematerializes():
    assert reads(lambda w, x: jnp.max(jnp.exp(capped(x @ w))), "reduce_max") == [0]


def softmax_of(logits, axis=-1):
    return lambda w, x: jnp.sum(jnp.square(jax.nn.softmax(logits(x @ w), axis) @ w))


def test_every_sum_of_a_softmax_of_capped_logits_is_separate():
    """Separate: the maximum, both sums, and the product that the second sum adds up, but not the result's product."""
    gradient = jax.grad(softmax_of(capped))
    assert reads(gradient, "reduce_max") == [SEPARATE]
    found = [residual for residual in reads(gradient, "reduce_sum") if residual]
    assert found == [SEPARATE + 1]
    products = [residual for residual in reads(gradient, "mul") if residual]
    assert products.count(SEPARATE + 2) == 1 and set(products) == {SHARED, SEPARATE + 2}


@pytest.mark.parametrize("part", [0, 1])
def test_a_sum_of_what_an_exponential_of_a_part_is_computed_from_is_separate(part):
    def loss(w, x):
        t = jnp.tanh(x @ w)
        h = jnp.exp(jnp.split(t, 2, -1)[part])
        return jnp.sum(h), jnp.sum(t), jnp.sum(h * (x @ w @ w)[:, :8])

    assert reads(loss, "reduce_sum") == [SEPARATE, SEPARATE + 1, 0]


def test_numbers_start_anew_for_each_softmax():
    """Numbers become bits of an exponent, which is too short to count the hundreds of softmaxes of a network."""

    def loss(w, x):
        for _ in range(3):
            x = jax.nn.softmax(capped(x @ w))
        return jnp.sum(jnp.square(x @ w))

    program = after("separate_sums", jax.grad(loss), W, X)
    found = {use.residual for equation in program.equations for use in equation.uses}
    assert found == {0, SHARED, SEPARATE, SEPARATE + 1, SEPARATE + 2}


def test_a_softmax_over_columns_has_three_expressions():
    gradient = jax.grad(softmax_of(lambda logits: logits, axis=0))
    assert reads(gradient, "reduce_max") == [0]
    assert [residual for residual in reads(gradient, "reduce_sum") if residual] == [SEPARATE]
    assert {residual for residual in reads(gradient, "mul") if residual} == {SHARED}


@pytest.mark.parametrize(
    "read_twice", [lambda p: (jnp.sum(p), p), lambda p: (jnp.sum(p), jnp.sum(p, 0))], ids=["returned", "two sums"]
)
def test_what_others_read_is_in_no_kernel_alone(read_twice):
    def loss(w, x):
        h = jnp.exp(capped(x @ w))
        return read_twice(h * (x @ w @ w)), across(h, w, x)

    assert [residual for residual in reads(loss, "mul") if residual] == [SHARED, SEPARATE]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_gradients_are_the_same_bits_with_shared_expressions(policy, monkeypatch):
    """Run operation by operation, where no fusion rounds differently, all expressions have the same numbers."""
    fn = jax.grad(lambda w, x: 256 * softmax_of(capped)(w, x))
    with jax.disable_jit():
        separate = autocast(fn, policy)(W, X)
        passes = tuple(each for each in planner.PLANNING if each.__name__ != "separate_sums")
        monkeypatch.setattr(planner, "PLANNING", passes)
        shared = autocast(lambda *args: fn(*args), policy)(W, X)
    np.testing.assert_array_equal(separate, shared)
