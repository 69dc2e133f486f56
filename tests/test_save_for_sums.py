"""Which values are saved in 16 bits for sums that read them, and for what depends on those sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pass_tools import after, stages

from jmp_train import DEFAULT_RULES, autocast, explain, low_precision

RNG = np.random.default_rng(0)
W, A = (RNG.normal(size=(16, 16)).astype(np.float32) for _ in range(2))


def centred(h):
    return h - jnp.mean(h, -1, keepdims=True)


def rms_norm(h):
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True))


def saved_for_sums(fn, *args, **options):
    """The names of the equations whose saved copy is read on the same side of a dot; asserts that all readers do so."""
    programs = dict(stages(fn, *args, **options))
    before, program = programs["save_or_remat"], programs["save_for_sums"]
    pairs = zip(before.equations, program.equations, strict=True)
    uses = [pair for old, new in pairs for pair in zip(old.uses, new.uses, strict=True)]
    found = {new.value for old, new in uses if new.residual and not old.residual}
    assert found <= program.residuals.saved and found.isdisjoint(program.residuals.remat)
    assert all(new.residual for old, new in uses if new.value in found or old.residual)
    assert all(program.precision(number).value == "full" for number in found)
    return [equation.name for equation in program.equations if not found.isdisjoint(equation.results)]


def batch_norm(h):
    return (h - jnp.mean(h, 0)) * lax.rsqrt(jnp.mean(h * h, 0))


def behind_norm(activation, norm):
    """The gradient of an activation after a norm, whose scale and bias are rows of the weight."""
    return jax.grad(lambda w, x: jnp.sum(activation(norm(x @ w, w)) @ w.T))


def behind_norm_of_squares(w, x):
    """The activation's cotangent is a sum of 16-bit numbers that only float32 equations read."""
    h = x @ w
    return jnp.sum(jax.nn.leaky_relu(centred(h @ h.T) * w[0] + w[1]) @ w.T)


# name: (a gradient, whether the cotangent of the activation after the norm is saved for the sums that read it)
CHAINS = {
    "a gelu behind a norm": (behind_norm(jax.nn.gelu, lambda h, w: centred(h) * w[0] + w[1]), True),
    "a root": (behind_norm(lambda h: jnp.sqrt(1 + h * h), lambda h, w: centred(h) * w[0] + w[1]), True),
    "behind another norm": (behind_norm(jax.nn.gelu, lambda h, w: rms_norm(h) * w[0] + w[1]), True),
    "a norm without a scale": (behind_norm(jax.nn.gelu, lambda h, w: centred(h) + w[1]), True),
    "a square": (behind_norm(lambda h: h * h, lambda h, w: centred(h) * w[0] + w[1]), True),
    "a maximum": (behind_norm(lambda h: jnp.maximum(h, 0.0), lambda h, w: centred(h) * w[0] + w[1]), True),
    "a relu": (behind_norm(jax.nn.relu, lambda h, w: centred(h) * w[0] + w[1]), False),
    "a relu, squared": (behind_norm(lambda h: jax.nn.relu(h) ** 2, lambda h, w: centred(h) * w[0] + w[1]), False),
    "a leaky relu": (behind_norm(jax.nn.leaky_relu, lambda h, w: centred(h) * w[0] + w[1]), False),
    "a leaky relu, scaled in float32": (
        behind_norm(jax.nn.leaky_relu, lambda h, w: centred(h) * jnp.exp(w[0]) + jnp.exp(w[1])), False),
    "a leaky relu, before it squares": (jax.grad(behind_norm_of_squares), False),
    "an exponential": (behind_norm(jnp.exp, lambda h, w: centred(h) * w[0] + w[1]), True),
    "a cotangent whose logarithm is taken": (
        lambda w, x: jnp.sum(centred(jnp.log(jax.grad(lambda n: jnp.sum(jax.nn.gelu(n) @ w.T))(x @ w)))), False),
    "no dot follows": (
        jax.grad(lambda w, x: jnp.sum(jax.nn.gelu(centred(x) * w[0] + w[1]) @ W.T)), False),
    "a product that is kept in float32": (
        jax.grad(lambda w, x: jnp.sum(jnp.matmul(centred(x @ w) * w[0] + w[1], w.T, precision="highest"))), False),
    "a norm over rows without parameters": (behind_norm(jax.nn.gelu, lambda h, w: batch_norm(h)), True),
    "groups of rows without parameters": (
        behind_norm(jax.nn.gelu, lambda h, w: batch_norm(h.reshape(4, 4, 16)).reshape(16, 16)), True),
    "a norm of each row without parameters": (
        behind_norm(jax.nn.gelu, lambda h, w: centred(h) * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True))), False),
    "a norm over rows, and one of each row": (
        behind_norm(jax.nn.gelu, lambda h, w: rms_norm(batch_norm(h))), False),
    "rows weighted and summed": (behind_norm(jax.nn.gelu, lambda h, w: h * jnp.mean(h * w, 0)), False),
    "no sum but that of a weight": (behind_norm(jax.nn.gelu, lambda h, w: h * w[0] + w[1]), False),
    "one reader": (behind_norm(jax.nn.gelu, lambda h, w: centred(h) * w[0]), False),
    "no gradient": (lambda w, x: jnp.sum(jax.nn.gelu(centred(x @ w) * w[0] + w[1]) @ w.T), False),
    "a norm of a part": (
        behind_norm(
            jax.nn.gelu, lambda h, w: jnp.concatenate([centred(h[:, :8]) * w[0, :8] + w[1, :8], h[:, 8:]], -1)), True),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_which_cotangents_are_saved(name):
    fn, expected = CHAINS[name]
    assert len(saved_for_sums(fn, W, A)) == expected


@pytest.mark.parametrize("name", CHAINS)
def test_a_program_is_rounded_once(name):
    fn, _ = CHAINS[name]
    once = autocast(fn, "mixed_float16")
    assert saved_for_sums(once, W, A) == []


def test_a_cotangent_that_is_returned_is_not_saved_for_sums():
    def fn(w, x):
        gradient = jax.grad(lambda n: jnp.sum(jax.nn.gelu(n) @ w.T))(centred(x @ w) * w[0] + w[1])
        return gradient, jnp.sum(gradient, 0), jax.vjp(lambda h: centred(h) * w[0], x @ w)[1](gradient)

    program = after("save_for_sums", fn, W, A)
    assert program.outputs[0] not in program.residuals.saved


def gelu_before(norm):
    return lambda w, x: jnp.sum(norm(jax.nn.gelu(x @ w)) @ w.T)


def before_norm(activation):
    return lambda w, x: jnp.sum(centred(activation(x @ w)) @ w.T)


def groups(h):
    grouped = h.reshape(16, 4, 4)
    return h - jnp.repeat(jnp.mean(grouped, -1), 4, -1)


def response_norm(h):
    """The global response normalization of ConvNeXt V2 (Woo et al., 2023)."""
    norms = jnp.sqrt(jnp.sum(h * h, 0, keepdims=True))
    return h * (norms / jnp.mean(norms)) + h


def norm_of_part(h):
    left, right = jnp.split(h, 2, -1)
    return jnp.tile(left * centred(right), 2)


# name: (a function, the equations of whose results a norm reads a saved copy)
ACTIVATIONS = {
    "its square is normalised": (gelu_before(lambda h: centred(h * h)), []),
    "gelu": (before_norm(jax.nn.gelu), ["mul"]),
    "silu": (before_norm(jax.nn.silu), ["mul"]),
    "mish": (before_norm(lambda h: h * jnp.tanh(jnp.logaddexp(h, 0.0))), ["mul"]),
    "gelu, differentiated": (jax.grad(before_norm(jax.nn.gelu)), ["mul"]),
    "scaled by its tanh, differentiated": (jax.grad(before_norm(lambda h: h * jnp.tanh(h))), ["mul"]),
    "squares are summed": (gelu_before(rms_norm), ["mul"]),
    "groups are summed": (gelu_before(groups), ["mul"]),
    "a norm over rows": (gelu_before(response_norm), ["mul"]),
    "a norm of a part": (gelu_before(norm_of_part), ["mul"]),
    "a sum of one part": (gelu_before(lambda h: jnp.tile(centred(jnp.split(h, 2, -1)[0] + 1), 2)), []),
    "a tanh": (lambda w, x: jnp.sum(rms_norm(jnp.tanh(x @ w)) @ w.T), ["tanh"]),
    "a tanh, which its mean computes again": (before_norm(jnp.tanh), []),
    "a tanh, and what is computed from it across a dot": (
        lambda w, x: jnp.sum(rms_norm(rms_norm(h := jnp.tanh(x @ w)) @ w.T * h) @ w), ["tanh", "mul"]),
    "a tanh of float32": (lambda w, x: jnp.sum(rms_norm(jnp.tanh(x)) @ w), []),
    "a tanh that a dot reads anyway": (
        lambda w, x: jnp.sum(rms_norm(h := jnp.tanh(x @ w)) @ w.T) + jnp.sum(h @ w), []),
    "a tanh that is a position, too": (
        lambda w, x: jnp.sum(rms_norm(h := jnp.tanh(x @ w)) @ w.T + jnp.sin(100 * h) @ w), []),
    "a gate a row": (
        jax.grad(lambda w, x: jnp.sum(rms_norm(x @ w * jnp.tanh(x @ w[:, :1])) @ w.T)), []),
    "of data, which float16 may not hold": (lambda w, x: jnp.sum(centred(jax.nn.gelu(x)) @ w.T), []),
    "unbounded: twice as large": (before_norm(lambda h: 2 * jax.nn.gelu(h)), []),
    "unbounded: an exponential": (before_norm(lambda h: h * jnp.exp(h)), []),
    "unbounded: a square": (before_norm(lambda h: h * h * jax.nn.sigmoid(h)), []),
    "of float32 data": (lambda w, x: jnp.sum(centred(jax.nn.silu(x)) @ w), []),
    "no norm": (lambda w, x: jnp.sum(jax.nn.gelu(x @ w) @ w.T), []),
    "a sum alone": (lambda w, x: jnp.sum(jax.nn.gelu(x @ w)), []),
    "cheap to compute twice": (before_norm(lambda h: h * jnp.where(h > 0, 1.0, 0.1)), []),
    "a gate of parameters": (lambda w, x: jnp.sum(centred((x @ w) * jnp.tanh(w[0])) @ w.T), []),
    "its exponential is summed": (gelu_before(lambda h: jnp.exp(h) / jnp.sum(jnp.exp(h)) * h), []),
    "it is sorted for the sum": (gelu_before(lambda h: h - jnp.sum(jnp.sort(h)[8:])), []),
    "no dot follows": (lambda w, x: jnp.sum(centred(jax.nn.gelu(x @ w)) ** 2), []),
    "a dot reads it anyway": (lambda w, x: jnp.sum(rms_norm(h := jax.nn.gelu(x @ w)) @ w.T) + jnp.sum(h @ w), []),
    "returned": (lambda w, x: (h := jax.nn.gelu(x @ w), jnp.sum(centred(h) @ w.T)), []),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_which_activations_are_saved(name):
    fn, expected = ACTIVATIONS[name]
    assert saved_for_sums(fn, W, A) == expected


def test_what_is_saved_is_computed_in_float32():
    def exact_gelu(w, x):
        return before_norm(lambda h: jax.nn.gelu(h, approximate=False))(w, x)

    program = after("insert_casts", exact_gelu, W, A)
    (erfc,) = (equation for equation in program.equations if equation.name == "erfc")
    assert program.avals[erfc.results[0]].dtype == np.float32


def test_a_low_precision_region_stays_narrow():
    """Operands and results of the region are rounded."""
    program = after("save_for_sums", before_norm(low_precision(jax.nn.silu)), W, A)
    products = [
        equation for equation in program.equations if equation.name == "mul" and equation.entry.rule.value == "low"
    ]
    assert products and all(use.dtype == np.float16 for equation in products for use in equation.uses)


def test_nothing_is_saved_with_float32_residuals():
    rules = DEFAULT_RULES.with_residuals("float32")
    assert saved_for_sums(before_norm(jax.nn.gelu), W, A, rules=rules) == []


def test_the_largest_number_stays_finite():
    """The rounding of a value that is no larger than a float16 number is finite."""
    x = np.full((4, 16), 6e4, np.float32)
    w = np.eye(16, dtype=np.float32)
    narrow = jax.jit(autocast(lambda w, x: centred(jax.nn.gelu(x @ w)), "mixed_float16"))(w, x)
    np.testing.assert_array_equal(narrow, 0)


def residual_stream(norm, add=lambda h, w: h + h @ w):
    return jax.grad(lambda w, x: jnp.sum(norm(add(x @ w, w)) @ w.T))


# Whether the sum of two values is stored for a norm, so that the backward pass reads it rather than both.
STREAMS = {
    "before a norm over rows": (residual_stream(batch_norm), True),
    "in groups": (residual_stream(lambda h: batch_norm(h.reshape(4, 4, 16)).reshape(16, 16)), True),
    "before a norm of each row": (residual_stream(rms_norm), False),
    "before an activation": (residual_stream(jax.nn.gelu), False),
    "with a bias": (residual_stream(batch_norm, lambda h, w: h + w[0]), False),
    "a gate": (residual_stream(batch_norm, lambda h, w: h * (h @ w)), False),
    "of exponentials, in float32": (residual_stream(batch_norm, lambda h, w: jnp.exp(h) + jnp.exp(h @ w)), False),
    "of squares, in float32": (residual_stream(batch_norm, lambda h, w: h * h + jnp.square(h @ w)), False),
}


@pytest.mark.parametrize("name", STREAMS)
def test_which_residual_streams_are_read_as_stored(name):
    fn, expected = STREAMS[name]
    programs = dict(stages(fn, W, A))
    remat, saved = (programs[each].residuals for each in ("save_or_remat", "save_for_sums"))
    assert bool(remat.remat & saved.saved) == expected


def test_a_float32_sum_beyond_the_compute_dtype_has_finite_gradients():
    """The backward pass reads `exp(h) + exp(-h)` in float32, as the norm does, though float16 cannot hold it."""
    h = np.linspace(-15, 15, 16 * 16, dtype=np.float32).reshape(16, 16)
    w = np.eye(16, dtype=np.float32)
    fn = residual_stream(batch_norm, lambda h, w: jnp.exp(h) + jnp.exp(h @ -w))
    assert np.isfinite(jax.jit(autocast(fn, "mixed_float16"))(w, h)).all()


def test_a_stored_stream_is_rounded_for_the_norm_in_bfloat16():
    """XLA for CPUs would drop the rounding for the norm alone, and the two passes would normalise other numbers."""
    fn, _ = STREAMS["before a norm over rows"]
    for policy, count in (("mixed_bfloat16", 2), ("mixed_float16", 0)):  # for the norm, and for its backward pass
        assert explain(fn, policy)(W, A).program().count("rounded ") == count
