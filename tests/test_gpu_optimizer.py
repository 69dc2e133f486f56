"""The cost of loss scaling in one Adam step compiled for an H200: bytes, copies, kernels, compile time."""

import time

import jax
import jax.numpy as jnp
import optax
import pytest

from jmp_train import (
    all_finite,
    get_loss_scale,
    with_loss_scale,
    with_low_precision_state,
    with_master_weights,
    with_stochastic_rounding,
)
from jmp_train._diagnostics.gpu._compile import gpu_module
from jmp_train._diagnostics.gpu._findings import copies
from jmp_train._diagnostics.gpu._kernels import kernels, traffic

pytestmark = pytest.mark.slow

ADAM = optax.adam(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
LARGE = {"w": (1024, 1024)}
MODEL = {f"{i}": shape for i, shape in enumerate([(512, 512), (512,), (256, 1024), (1024,)] * 4)}


def module(tx, shapes, grad_dtype=jnp.float32, param_dtype=jnp.float32, scaled=True):
    """The optimized module of one step from (params, state) to (params, state), its buffers donated."""

    def step(carry, grads):
        params, state = carry
        if scaled:
            grads = get_loss_scale(state).unscale(grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {name: jax.ShapeDtypeStruct(shape, param_dtype) for name, shape in shapes.items()}
    grads = {name: jax.ShapeDtypeStruct(shape, grad_dtype) for name, shape in shapes.items()}
    return gpu_module(step, (params, jax.eval_shape(tx.init, params)), grads, donate_argnums=0)


def bytes_per_parameter(text, shapes):
    return traffic(text) / sum(jnp.zeros(shape).size for shape in shapes.values())


@pytest.mark.parametrize("grad_dtype, bound", [(jnp.float32, 32.0), (jnp.float16, 28.0), (jnp.bfloat16, 28.0)])
@pytest.mark.parametrize("inner", [ADAM, CLIPPED], ids=["adam", "clipped"])
@pytest.mark.parametrize("shapes", [LARGE, MODEL], ids=["one leaf", "16 leaves"])
def test_bytes_copies_and_conditionals(inner, grad_dtype, bound, shapes):
    text = module(with_loss_scale(inner), shapes, grad_dtype)
    found = bytes_per_parameter(text, shapes)
    print(f"{found:.2f} bytes a parameter, {len(kernels(text))} kernels")
    assert found <= 1.01 * bound
    assert copies(text) == () and "conditional(" not in text


def test_the_figure_for_bare_adam_is_28():
    assert abs(bytes_per_parameter(module(ADAM, LARGE, scaled=False), LARGE) - 28) < 0.1


def test_kernels_above_bare_adam():
    bare = len(kernels(module(ADAM, MODEL, scaled=False)))
    ours = len(kernels(module(with_loss_scale(ADAM), MODEL)))
    print(f"{bare} kernels bare, {ours} with loss scaling, {len(MODEL)} leaves")
    assert ours - bare <= 2 * len(MODEL)


def usual_check(grads):
    """One reduction a leaf, as everywhere."""
    return jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]).all()


def small_leaves(count):
    return {f"{i}": [(64,), (32,), (8, 16), (3, 3, 4, 4)][i % 4] for i in range(count)}


def timed_kernels(build):
    start = time.process_time()
    return len(kernels(build())), time.process_time() - start


def check_of(count, check):
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in small_leaves(count).values()]
    return timed_kernels(lambda: gpu_module(check, leaves))


def test_the_check_of_1000_small_leaves():
    check_of(1, all_finite)  # start the compiler
    few, few_seconds = check_of(250, all_finite)
    ours, seconds = check_of(1000, all_finite)
    usual, usual_seconds = check_of(1000, usual_check)
    print(f"1000 leaves: {ours} kernels in {seconds:.1f} CPU s; usual check {usual} in {usual_seconds:.1f}")
    print(f"250 leaves: {few} kernels in {few_seconds:.1f} CPU s")
    assert ours <= 0.1 * usual
    assert seconds <= 2 * 4 * few_seconds  # linear, with room for a busy machine


def test_a_step_over_many_small_leaves():
    counts = (125, 250)
    ours = [timed_kernels(lambda n=n: module(with_loss_scale(ADAM), small_leaves(n))) for n in counts]
    bare, bare_seconds = timed_kernels(lambda: module(ADAM, small_leaves(250), scaled=False))
    print(f"250 leaves: {bare} kernels bare in {bare_seconds:.1f} CPU s; with loss scaling {ours}")
    assert ours[1][0] - bare <= 0.2 * 250
    assert ours[1][1] <= 2 * 2 * ours[0][1]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_master_weights_copy_nothing(dtype):
    """The gradient twice, 2 + 2 bytes; master, mu and nu in and out, 24; the parameter in and out, 2 + 2."""
    text = module(with_loss_scale(with_master_weights(ADAM)), LARGE, dtype, dtype)
    found = bytes_per_parameter(text, LARGE)
    print(f"{found:.2f} bytes a parameter")
    assert found <= 32.1 and copies(text) == ()


LOW = with_low_precision_state(ADAM)
BOTH_LOW = with_stochastic_rounding(LOW)


SCALED = with_loss_scale(LOW), with_loss_scale(BOTH_LOW)


@pytest.mark.parametrize(
    ("tx", "dtype", "bound"),
    [
        (LOW, jnp.float32, 20),  # the gradient 4, each moment 2 + 2, the parameter 4 + 4
        (SCALED[0], jnp.float32, 24),  # the gradient twice
        (BOTH_LOW, jnp.bfloat16, 14),  # the gradient 2, each moment 2 + 2, the parameter 2 + 2
        (with_low_precision_state(with_stochastic_rounding(ADAM)), jnp.bfloat16, 14),
        (SCALED[1], jnp.bfloat16, 16),
        (with_stochastic_rounding(ADAM), jnp.bfloat16, 22),
        (with_master_weights(LOW), jnp.bfloat16, 22),
    ],
    ids=["state", "scaled", "all", "all, state outside", "all, scaled", "parameters", "masters"],
)
@pytest.mark.parametrize("shapes", [LARGE, MODEL], ids=["one leaf", "16 leaves"])
def test_16_bit_states_move_no_byte_for_their_random_bits(tx, dtype, bound, shapes):
    is_scaled = any(tx is each for each in SCALED)
    text = module(tx, shapes, dtype, dtype, scaled=is_scaled)
    bare = len(kernels(module(ADAM, shapes, scaled=False)))
    found = bytes_per_parameter(text, shapes)
    print(f"{found:.2f} bytes a parameter, {len(kernels(text))} kernels, {bare} of bare Adam")
    assert found <= 1.001 * bound
    assert copies(text) == () and "conditional(" not in text
    # The step's key and the loss scale are scalars: some kernels, however many leaves.
    assert len(kernels(text)) - bare <= 3 * len(shapes) + 20


def test_kernels_of_a_16_bit_state_do_not_grow_with_the_leaves():
    counts = []
    for times in (1, 4):
        shapes = {f"{i}": (256, 256) for i in range(4 * times)}
        counts.append([len(kernels(module(tx, shapes, scaled=False))) for tx in (LOW, ADAM)])
    print(counts)
    assert counts[1][0] - counts[1][1] == counts[0][0] - counts[0][1] <= 3
