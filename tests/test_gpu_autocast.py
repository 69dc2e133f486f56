"""Autocast compiled for an H200: products in 16 bits, sums in float32, and the bytes that are moved.

Each bound is relative to a hand-written reference, compiled in the same run. `test_gpu_compile.py` shows that the
checks catch planted faults.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autocast_references import (
    DEEP,
    FILLING,
    by_hand_loss,
    flax_state,
    flax_step,
    mlp_arguments,
    mlp_loss,
    needless_casts,
    our_state,
    our_step,
    plain_state,
    plain_step,
)
from battery_models import BY_NAME, IN_BFLOAT16, LARGE, ROWS
from battery_tools import HALVES, abstract, abstract_example, figures, gradient_function, row_figures, tracing_calls
from jax import lax
from jax.sharding import PartitionSpec

from jmp_train import autocast, get_policy
from jmp_train._diagnostics.gpu._compile import gpu_module
from jmp_train._diagnostics.gpu._findings import collectives

pytestmark = pytest.mark.slow

MEGABYTE = 1e6


@pytest.mark.parametrize(
    ("row", "dtype"),
    [(row, "float16") for row in ROWS] + [(row, "bfloat16") for row in ROWS if row.name in IN_BFLOAT16],
    ids=str,
)
def test_products_are_16_bits_wide_and_sums_are_not(row, dtype):
    made = row_figures(row, f"mixed_{dtype}")
    assert not made.sixteen_bit_sums
    assert row.float32_dots or not made.wide_products
    assert not needless_casts(gradient_function(row, f"mixed_{dtype}"), *abstract_example(row))


def test_the_check_catches_flax_in_16_bits():
    assert row_figures(BY_NAME["mlp"], "flax_float16").sixteen_bit_sums
    assert row_figures(BY_NAME["mlp"], "float32").wide_products


def mlp_figures(step, state):
    params, batch = mlp_arguments()
    return figures(step, state(params), batch, donate_argnums=0)


def test_the_references_move_the_published_bytes():
    """Shows that the programs measured here are those for which the bounds were stated."""
    assert mlp_figures(plain_step(mlp_loss()), plain_state).bytes / MEGABYTE == pytest.approx(572.8, abs=0.1)
    flax = mlp_figures(flax_step(mlp_loss(jnp.float16)), flax_state)
    assert flax.bytes / MEGABYTE == pytest.approx(504.6, abs=0.1)
    assert len(flax.sixteen_bit_sums) == 6
    for reduce_dtype, published in ((jnp.float16, 507.8), (jnp.float32, 545.5)):
        by_hand = mlp_figures(flax_step(by_hand_loss(jnp.float16, reduce_dtype)), flax_state)
        assert by_hand.bytes / MEGABYTE == pytest.approx(published, abs=0.1)
        assert not by_hand.sixteen_bit_sums


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("wide", [False, True], ids=["reduce_16", "reduce_float32"])
def test_an_mlp_step_moves_the_bytes_of_one_written_by_hand(dtype, wide):
    reduce_dtype = "float32" if wide else dtype
    by_hand = mlp_figures(flax_step(by_hand_loss(jnp.dtype(dtype), jnp.dtype(reduce_dtype))), flax_state)
    policy = get_policy(f"mixed_{dtype}").replace(reduce_dtype=reduce_dtype)
    ours = mlp_figures(our_step(mlp_loss(), policy), our_state)
    assert ours.bytes <= 1.01 * by_hand.bytes
    assert not ours.sixteen_bit_sums and not ours.wide_products


def test_gradients_cross_eight_gpus_in_float32():
    params, (x, y) = mlp_arguments()
    state = our_state(params)
    step = our_step(mlp_loss(), get_policy("mixed_float16"))
    specs = (PartitionSpec(), PartitionSpec("data"))
    text = gpu_module(step, state, (x, y), devices=8, in_shardings=specs, donate_argnums=0)
    assert {each.dtypes[0] for each in collectives(text) if each.operation == "all-reduce"} <= {"f32", "pred", "s32"}


@pytest.mark.parametrize(
    "name", ["cnn_groupnorm", "cnn_batchnorm", "resnet", "unet", "transformer", "transformer_scan"]
)
def test_model_steps_move_the_bytes_of_flax(name):
    row = BY_NAME[name]
    params, batch = abstract_example(row, FILLING)
    policy = get_policy("mixed_float16")
    flax = figures(flax_step(row.loss(jnp.float16, FILLING)), flax_state(params), batch, donate_argnums=0)
    step = our_step(row.loss(None, FILLING), policy)
    ours = figures(step, our_state(params), batch, donate_argnums=0)
    assert ours.bytes <= 1.05 * flax.bytes
    assert len(ours.converting) <= len(jax.tree.leaves(params))
    assert not ours.sixteen_bit_sums and not ours.wide_products
    assert not needless_casts(step, our_state(params), batch)


def test_a_deep_transformer_needs_six_tenths_of_the_memory():
    row = BY_NAME["transformer"]
    params, batch = abstract_example(row, DEEP)

    def memory(how):
        return figures(gradient_function(row, how, DEEP), params, batch).temporary

    assert memory("mixed_float16") <= 0.60 * memory("float32")


def test_scanned_layers_stack_less_than_flax():
    """The residuals of the iterations, in bytes moved and in memory held."""
    ours, flax, wide = (
        row_figures(BY_NAME["transformer_scan"], how, LARGE) for how in ("mixed_float16", "flax_float16", "float32")
    )
    assert ours.bytes <= 0.75 * flax.bytes
    assert ours.temporary <= 0.45 * flax.temporary and ours.temporary <= 0.30 * wide.temporary


@pytest.mark.parametrize("name, bytes_bound, memory_bound", [("lstm", 0.72, 0.66), ("gru", 0.99, 0.67)])
def test_a_loop_stacks_what_its_gates_are_computed_from(name, bytes_bound, memory_bound):
    ours, flax = (row_figures(BY_NAME[name], how, LARGE) for how in ("mixed_float16", "flax_float16"))
    assert ours.bytes <= bytes_bound * flax.bytes and ours.temporary <= memory_bound * flax.temporary


def silu_of_a_dot(cast, y, w):
    return jax.nn.silu(y @ cast(w[0]))


def swiglu(cast, y, w):
    return jax.nn.silu(y @ cast(w[0])) * (y @ cast(w[1]))


@pytest.mark.parametrize(
    ("gate", "bytes_bound", "memory_bound"), [(silu_of_a_dot, 0.78, 0.58), (swiglu, 0.75, 0.56)], ids=["silu", "swiglu"]
)
def test_scanned_layers_with_a_gate_stack_less_than_by_hand(gate, bytes_bound, memory_bound):
    def loss(cast, weights, x):
        def layer(h, w):
            return h + cast(gate(cast, cast(h), w)) @ cast(w[2]), None

        return jnp.mean(lax.scan(layer, cast(x) @ cast(weights[0, 0]), weights)[0].astype(np.float32) ** 2)

    args = jax.ShapeDtypeStruct((4, 3, 512, 512), np.float32), jax.ShapeDtypeStruct((4096, 512), np.float32)
    by_hand = figures(jax.grad(functools.partial(loss, lambda value: value.astype(np.float16))), *args)
    ours = figures(autocast(jax.grad(functools.partial(loss, lambda value: value)), "mixed_float16"), *args)
    assert ours.bytes <= bytes_bound * by_hand.bytes and ours.temporary <= memory_bound * by_hand.temporary


def in_a_scan(step, weights, h):
    return lax.scan(lambda h, _: (step(h, weights), None), h, None, 16)[0]


def in_a_while(step, weights, h):
    return lax.while_loop(lambda state: state[1] < 16, lambda state: (step(state[0], weights), state[1] + 1), (h, 0))[0]


def unrolled_layers(h, weights):
    for weight in weights:
        h = jnp.tanh(h @ weight.T).astype(h.dtype)
    return h


def scanned_layers(h, weights):
    return lax.scan(lambda h, weight: (jnp.tanh(h @ weight).astype(h.dtype), None), h, weights)[0]


@pytest.mark.parametrize(
    "step",
    [unrolled_layers, scanned_layers, jax.checkpoint(unrolled_layers)],
    ids=["unrolled", "scanned", "checkpointed"],
)
@pytest.mark.parametrize("loop", [in_a_scan, in_a_while])
def test_a_stack_of_layers_is_cast_once_for_all_the_tokens_that_it_generates(loop, step):
    """As by hand, with a cast before the loop; the hidden state is float32, because the loop starts from data."""
    args = jax.ShapeDtypeStruct((4, 1024, 1024), np.float32), jax.ShapeDtypeStruct((8, 1024), np.float32)
    run = functools.partial(loop, step)
    by_hand = figures(lambda weights, h: run(weights.astype(np.float16), h.astype(np.float16)), *args)
    ours, wide = figures(autocast(run, "mixed_float16"), *args), figures(run, *args)
    assert ours.bytes <= 1.05 * by_hand.bytes and ours.bytes <= 0.7 * wide.bytes


def generate(loop, w, x, cast):
    """Tokens that attend to the cached keys of earlier ones; `cast` is what is written into a model by hand."""
    w, x, cache = cast(w), cast(x), cast(jnp.zeros((8, 1024, 1024)))

    def step(h, cache, i):
        key = h @ w[0]
        cache = lax.dynamic_update_slice(cache, key[:, None], (0, i, 0))
        scores = jnp.einsum("bd,bsd->bs", key, cache).astype(np.float32)
        attended = jnp.einsum("bs,bsd->bd", cast(jax.nn.softmax(scores)), cache)
        return cast(jnp.tanh((attended @ w[1]).astype(np.float32))), cache

    if loop is lax.scan:
        return lax.scan(lambda state, i: (step(*state, i), None), (x, cache), jnp.arange(16))[0][0]
    return lax.while_loop(lambda s: s[2] < 16, lambda s: (*step(*s), s[2] + 1), (x, cache, 0))[0]


@pytest.mark.parametrize("loop", [lax.scan, lax.while_loop])
def test_a_cache_of_keys_moves_the_bytes_of_one_in_16_bits(loop):
    args = jax.ShapeDtypeStruct((2, 1024, 1024), np.float32), jax.ShapeDtypeStruct((8, 1024), np.float32)
    by_hand = figures(lambda w, x: generate(loop, w, x, lambda each: each.astype(np.float16)), *args)
    ours = figures(autocast(lambda w, x: generate(loop, w, x, lambda each: each), "mixed_float16"), *args)
    assert ours.bytes <= 1.05 * by_hand.bytes


@pytest.mark.parametrize("name", ["transformer_remat", "transformer_scan_remat"])
def test_rematerialised_layers_move_the_bytes_of_flax(name):
    ours, flax = (row_figures(BY_NAME[name], how, LARGE) for how in ("mixed_float16", "flax_float16"))
    assert ours.bytes <= 1.07 * flax.bytes
    assert ours.temporary <= 1.06 * flax.temporary


@pytest.mark.parametrize("name", BY_NAME)
def test_no_model_moves_more_than_with_residuals_in_float32(name):
    """Except one, which saves the operand of a max-pool instead of computing it for each reader: 0.85 of the memory."""
    ours, wide = (row_figures(BY_NAME[name], how, LARGE) for how in ("mixed_float16", "wide_residuals_float16"))
    assert ours.bytes <= (1.03 if name == "cnn_batchnorm" else 1.01) * wide.bytes
    assert name != "cnn_batchnorm" or ours.temporary <= 0.86 * wide.temporary


@pytest.mark.parametrize("name", ["cnn_groupnorm", "transformer", "transformer_scan", "lstm"])
def test_tracing_costs_at_most_twice_as_much(name):
    row = BY_NAME[name]
    args = abstract_example(row)
    plain = tracing_calls(lambda: gradient_function(row, "float32"), *args)
    assert tracing_calls(lambda: gradient_function(row, "mixed_float16"), *args) <= 2 * plain


@pytest.mark.parametrize("growing", ["equations", "leaves"])
def test_the_cost_of_tracing_is_linear(growing):
    def program(count):
        def loss(weights, x):
            for layer in range(count):
                x = jnp.tanh(x @ weights[layer if growing == "leaves" else 0])
            return jnp.sum(x)

        leaves = count if growing == "leaves" else 1
        return loss, abstract(([jnp.ones((8, 8))] * leaves, jnp.ones((8, 8))))

    def calls(count):
        loss, args = program(count)
        return tracing_calls(lambda: autocast(jax.grad(loss), get_policy("mixed_float16")), *args)

    assert calls(400) <= 4.2 * calls(100)  # quadratic would be 16
