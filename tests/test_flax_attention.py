"""`flax_bridge.dot_product_attention` in Flax's layers: every argument that they pass is honoured or refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import TOLERANCE
from flax import linen as nn
from flax import nnx

from jmp_train import autocast, explain, flax_bridge
from jmp_train.flax_bridge import dot_product_attention

WIDTH, HEADS, LENGTH = 32, 4, 8
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, LENGTH, WIDTH), np.float32))
MASK = nn.make_causal_mask(jnp.ones((2, LENGTH)))  # of float32, as Flax has it


def linen(attention_fn: Any = nn.dot_product_attention, **kwargs: Any) -> Any:
    return nn.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn, **kwargs)


PARAMS = jax.jit(linen().init)(jax.random.key(0), X)


def assert_near(got: Any, want: Any, dtype: str = "float32") -> None:
    """Compares in the norm of all arrays together: the gradient of a bias that softmax cancels is rounding noise."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    errors = [np.linalg.norm(a - b) for a, b in zip(got, want, strict=True)]
    assert np.linalg.norm(errors) <= TOLERANCE[dtype].gradient * np.linalg.norm([np.linalg.norm(x) for x in want])


def linens_loss(attention_fn, mask):
    return lambda params, x: jnp.sum(jnp.sin(linen(attention_fn).apply(params, x, mask=mask)))


@functools.cache
def by_linen(masked):
    return jax.jit(jax.grad(linens_loss(nn.dot_product_attention, MASK if masked else None), (0, 1)))(PARAMS, X)


@pytest.mark.parametrize("masked", ["mask", pytest.param("partial", marks=pytest.mark.slow), "none"])
def test_linens_layer_computes_the_same(masked):
    attend = functools.partial(dot_product_attention, is_causal=True) if masked == "partial" else dot_product_attention
    gradient = jax.grad(linens_loss(attend, MASK if masked == "mask" else None), (0, 1))
    assert_near(jax.jit(gradient)(PARAMS, X), by_linen(masked != "none"))
    found = explain(gradient, "mixed_float16")(PARAMS, X).operations
    assert {"jmp_attention", "jmp_attention_backward"} <= {op.primitive for op in found if op.dtype == "float16"}


def test_nnxs_layer_computes_the_same_and_trains_under_autocast():
    def layer(**kwargs):
        return nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0), **kwargs)

    def loss(model, x):
        return jnp.mean(model(x, mask=MASK) ** 2)

    def run(layer, policy):
        return layer(X, mask=MASK), flax_bridge.value_and_grad(loss, policy)(layer, X)[1]

    @nnx.jit
    def both(ours, theirs):
        return run(ours, "mixed_bfloat16"), run(theirs, "float32")

    (got, grads), (want, expected) = both(layer(attention_fn=dot_product_attention), layer())
    assert_near(got, want)
    assert_near(grads, expected, "bfloat16")


def test_decoding_with_a_cache():
    """One position at a time; the mask says how far the cache is filled."""
    outs: list[Any] = []
    for attention_fn in (dot_product_attention, nn.dot_product_attention):
        layer = linen(attention_fn, decode=True)
        empty = jax.eval_shape(layer.init, jax.random.key(0), X)["cache"]
        step = jax.jit(lambda cache, x, layer=layer: layer.apply({**PARAMS, "cache": cache}, x, mutable=["cache"]))
        cache, rows = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), empty), []
        for position in range(LENGTH):
            out, changed = step(cache, X[:, position : position + 1])
            cache = changed["cache"]
            rows.append(out)
        outs.append(np.concatenate(rows, axis=1))
    assert_near(*outs)
    assert_near(outs[0], jax.jit(functools.partial(linen().apply, mask=MASK))(PARAMS, X))


def test_dropout_is_drawn_as_the_layer_asks():
    def run(**kwargs):
        layer = linen(dropout_rate=0.5, **kwargs)
        return layer.apply(PARAMS, X, deterministic=False, rngs={"dropout": jax.random.key(1)})

    @jax.jit
    def outputs():
        each = run(attention_fn=dot_product_attention, broadcast_dropout=False)
        still = linen(dot_product_attention, dropout_rate=0.5).apply(PARAMS, X, deterministic=True)
        return run(attention_fn=dot_product_attention), run(), each, still, linen().apply(PARAMS, X)

    # The same draws from the same key: a mask of [T, S] for all, and one for each example and head.
    ours, theirs, each, still, without = outputs()
    assert_near(ours, theirs)
    assert not np.allclose(each, ours)
    assert_near(still, without)


def test_batches_of_any_rank_and_a_dtype():
    attend = functools.partial(dot_product_attention, dtype=jnp.bfloat16)
    query = np.random.default_rng(1).standard_normal((3, 2, LENGTH, HEADS, 8), np.float32)
    bias, mask = query[..., 0, 0][:, :, None, None, :], np.ones((2, 1, LENGTH, LENGTH), bool)
    got, want = (jax.jit(fn)(query, query, query, bias, mask) for fn in (attend, nn.dot_product_attention))
    assert got.shape == query.shape and got.dtype == jnp.bfloat16
    assert_near(np.asarray(got, np.float32), want, "bfloat16")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_without_a_dtype_it_is_that_of_the_arguments(dtype):
    x = X.reshape(2, LENGTH, HEADS, 8).astype(dtype)
    assert dot_product_attention(x, x, x).dtype == dtype


def test_a_mask_for_all_examples_is_not_repeated():
    x = jnp.ones((5, LENGTH, HEADS, 8))
    program = jax.make_jaxpr(lambda mask: dot_product_attention(x, x, x, mask=mask))(jnp.ones((1, 1, LENGTH, LENGTH)))
    assert f"5,1,{LENGTH},{LENGTH}" not in str(program)


def test_source_lines_are_those_of_its_callers():
    x = X.reshape(2, LENGTH, HEADS, 8)
    report = explain(lambda x: dot_product_attention(x, x, x), "mixed_float16")(x)
    assert all(op.source.partition(":")[0].endswith("test_flax_attention.py") for op in report.operations)


@pytest.mark.parametrize("precision", [None, "default", jax.lax.Precision.DEFAULT])
def test_arguments_of_other_forms(precision):
    """The default precision, a key of a wider dtype, few axes, and a mask of numbers below zero."""
    wide = np.reshape(X, (2, LENGTH, HEADS, 8))
    low = wide.astype(jnp.bfloat16)
    bias, mask = np.arange(LENGTH, dtype=np.float32), -np.tri(LENGTH, dtype=np.float32)
    got = jax.jit(functools.partial(dot_product_attention, precision=precision))(low, wide, wide, bias, mask)
    assert got.dtype == jnp.float32
    assert_near(got, jax.jit(nn.dot_product_attention)(low.astype(np.float32), wide, wide, bias, mask != 0))


def test_one_draw_serves_all_if_nothing_is_said():
    x = np.broadcast_to(np.arange(1, 9, dtype=np.float32), (2, LENGTH, HEADS, 8))
    value = np.broadcast_to(np.eye(LENGTH, dtype=np.float32)[None, :, None], x.shape)
    attend = jax.jit(functools.partial(dot_product_attention, dropout_rate=0.5))
    out = np.asarray(attend(x, x, value, dropout_rng=jax.random.key(0)))
    np.testing.assert_array_equal(out, np.broadcast_to(out[:1, :, :1], out.shape))
    assert np.any(out == 0)


REFUSED = {
    "module": (object(), "^`sow_weights` asks for the attention weights, which fused attention never writes;"),
    "precision": ("highest", "^`precision` must be None for jmp_train's attention, got 'highest': "),
    "qk_attn_weights_einsum": (jnp.einsum, "^`qk_attn_weights_einsum` must be None"),
    "attn_weights_value_einsum": (jnp.einsum, "^`attn_weights_value_einsum` must be None"),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_what_it_cannot_honour_is_refused(argument):
    value, message = REFUSED[argument]
    query = jnp.ones((1, LENGTH, HEADS, 8))
    with pytest.raises(ValueError, match=message):
        dot_product_attention(query, query, query, **{argument: value})


def test_the_layers_pass_nothing_that_it_does_not_know():
    """Linen silently drops arguments that `attention_fn` has no parameter for."""
    import inspect

    known = set(inspect.signature(dot_product_attention).parameters)
    theirs = set(inspect.signature(nn.dot_product_attention).parameters)
    assert theirs - known == {"einsum_dot_general"}  # a default of the function, which the layers do not pass


def test_under_autocast_the_layer_is_as_accurate():
    gradient = jax.grad(linens_loss(dot_product_attention, MASK), (0, 1))
    assert_near(jax.jit(autocast(gradient, "mixed_float16"))(PARAMS, X), by_linen(True), "float16")
