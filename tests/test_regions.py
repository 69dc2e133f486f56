"""Regions and scopes: the order of the four ways to set a precision, and that transformations keep it."""

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from jmp_train import DEFAULT_RULES, autocast, explain, full_precision, low_precision

X = np.full((8, 8), 0.5, np.float32)
ROWS = np.ones((3, 8, 8), np.float32)


def operations(fn, *args, rules=DEFAULT_RULES):
    return explain(fn, "mixed_float16", rules)(*args).operations


def reads(name, fn, *args, **options):
    return [op.dtype for op in operations(fn, *args, **options) if op.primitive == name]


def after_dot(fn):
    return lambda w: fn(w @ w)


def sentence(text):
    return "^" + re.escape(text) + "$"


# Precedence: region over scope over edit over table


def block(x):
    with jax.named_scope("Block"):
        return jnp.exp(x)


WIDE_BLOCK, NARROW_BLOCK = ({"Block": dtype} for dtype in ("float32", "float16"))


@pytest.mark.parametrize(
    ("fn", "edits", "scopes", "expected"),
    [
        (block, {}, {}, "float32"),
        (block, {"exp": "follow"}, {}, "float16"),
        (block, {"exp": "follow"}, WIDE_BLOCK, "float32"),
        (block, {"exp": "high"}, NARROW_BLOCK, "float16"),
        (low_precision(block), {"exp": "high"}, WIDE_BLOCK, "float16"),
        (full_precision(block), {"exp": "low"}, NARROW_BLOCK, "float32"),
        (full_precision(low_precision(block)), {"exp": "low"}, {}, "float32"),
        (low_precision(full_precision(block)), {"exp": "low"}, {}, "float32"),
    ],
)
def test_precedence(fn, edits, scopes, expected):
    rules = DEFAULT_RULES.replace(edits).with_scopes(scopes)
    assert reads("exp", after_dot(fn), X, rules=rules) == [expected]
    jax.eval_shape(autocast(after_dot(fn), "mixed_float16", rules=rules), X)


def test_the_last_scope_that_matches_wins():
    rules = DEFAULT_RULES.with_scopes({"Block": "float32"}).with_scopes({"Inner": "float16"})

    def inner(x):
        with jax.named_scope("Block"), jax.named_scope("Inner"):
            return jnp.exp(x)

    def in_a_loop(x):
        with jax.named_scope("Block"):
            return lax.scan(lambda c, _: (inner(jnp.exp(c)), None), x, None, length=2)[0]

    assert reads("exp", after_dot(inner), X, rules=rules) == ["float16"]
    assert reads("exp", after_dot(in_a_loop), X, rules=rules) == ["float32", "float16"]


def test_sums_stay_wide_in_low_precision():
    for fn in (low_precision(jnp.sum), jax.named_scope("Block")(jnp.sum)):
        assert reads("reduce_sum", after_dot(fn), X, rules=DEFAULT_RULES.with_scopes(NARROW_BLOCK)) == ["float32"]


# Regions and scopes survive transformations


def scan_of(fn):
    return lambda x: lax.scan(lambda c, _: (fn(c), None), x, None, length=2)[0]


def switch_of(fn):
    return lambda x: lax.cond(x[0, 0] > 0, fn, lambda x: x, x)


TRANSFORMS = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "vmap": jax.vmap,
    "remat": jax.checkpoint,
    "jit of remat": lambda fn: jax.jit(jax.checkpoint(fn)),
    "scan": scan_of,
    "scan of remat": lambda fn: scan_of(jax.checkpoint(fn)),
    "cond": switch_of,
    "vmap of scan": lambda fn: jax.vmap(scan_of(fn)),
}


def inside(x):
    """Every operation that belongs to the part under test is a dot, so that it can be told from the rest."""
    return jnp.tanh(x @ np.ones((8, 8), np.float32))


WIDE_SCOPE = DEFAULT_RULES.with_scopes({"Part": "float32"})
WIDE_PARTS = {
    "region": full_precision(inside),
    "scope": jax.named_scope("Part")(inside),
    "scope of two segments": jax.named_scope("Part/0")(inside),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("part", WIDE_PARTS.values(), ids=WIDE_PARTS)
def test_a_wide_part_is_wide_forward_and_backward(name, part):
    def loss(x):
        return jnp.mean(TRANSFORMS[name](part)(x))

    x = ROWS if "vmap" in name else X
    found = [op for op in operations(jax.grad(loss), x, rules=WIDE_SCOPE) if op.primitive == "dot_general"]
    assert {op.dtype for op in found} == {"float32"} and {op.backward for op in found} == {False, True}


@pytest.mark.parametrize(
    ("name", "part"), [*((name, WIDE_PARTS["region"]) for name in TRANSFORMS), ("scan of remat", WIDE_PARTS["scope"])]
)
def test_a_wide_part_computes_what_it_does_without_autocast(name, part):
    def loss(x):
        return jnp.mean(TRANSFORMS[name](part)(x))

    x = ROWS if "vmap" in name else X
    wide = jax.jit(autocast(jax.grad(loss), "mixed_float16", rules=WIDE_SCOPE))(x)
    with jax.default_matmul_precision("highest"):  # on a GPU, JAX's default is TF32
        np.testing.assert_allclose(wide, jax.jit(jax.grad(loss))(x), rtol=1e-6)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_without_a_region_or_scope_all_of_it_is_narrow(name):
    gradient = jax.grad(lambda x: jnp.mean(TRANSFORMS[name](inside)(x)))
    plain = [op for op in operations(gradient, ROWS if "vmap" in name else X) if op.flops]
    assert {op.dtype for op in plain} == {"float16"}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_low_part_is_low_forward_and_backward(name):
    def loss(x):
        return jnp.mean(TRANSFORMS[name](low_precision(jnp.sin))(x))

    x = ROWS if "vmap" in name else X
    found = [op for op in operations(jax.grad(loss), x) if op.primitive in ("sin", "cos")]
    assert {op.dtype for op in found} == {"float16"}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_a_low_part_transforms_is_low_too(name):
    """The mark stands around the loop, branch or call whose body is planned."""

    def loss(x):
        return jnp.mean(low_precision(TRANSFORMS[name](jnp.sin))(x))

    x = ROWS if "vmap" in name else X
    found = [op for op in operations(jax.grad(loss), x) if op.primitive in ("sin", "cos")]
    assert found and {op.dtype for op in found} == {"float16"}


def test_a_scope_of_two_segments_finds_what_is_computed_again():
    def loss(x):
        with jax.named_scope("Net"):
            return jnp.mean(jax.checkpoint(jax.named_scope("Part")(inside))(x))

    rules = DEFAULT_RULES.with_scopes({"Net/Part": "float32"})
    assert {op.dtype for op in operations(jax.grad(loss), X, rules=rules) if op.flops} == {"float32"}
    assert {op.scope for op in operations(jax.grad(loss), X) if op.flops} == {"Net/Part"}


def test_linen_modules_are_scopes():
    nn = importlib.import_module("flax.linen")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="head")(nn.relu(nn.Dense(8, name="body")(x)))

    params = jax.eval_shape(Net().init, jax.random.key(0), X)
    gradient = jax.grad(lambda params, x: jnp.mean(Net().apply(params, x)))
    found = operations(gradient, params, X, rules=DEFAULT_RULES.with_scopes({"Net/head": "float32"}))
    assert {(op.scope, op.dtype) for op in found if op.flops} == {("Net/body", "float16"), ("Net/head", "float32")}


@pytest.mark.parametrize("body", ["remat", "scan", "cond"])
def test_weight_gradients_of_inner_programs_leave_their_dot_in_the_reduce_dtype(body):
    def layer(x, w):
        return jnp.tanh(x @ w)

    def loss(w, x):
        if body == "remat":
            return jnp.mean(jax.checkpoint(layer)(x, w))
        if body == "scan":
            return jnp.mean(lax.scan(lambda c, w: (layer(c, w), None), x, jnp.stack([w, w]))[0])
        return jnp.mean(lax.cond(x[0, 0] > 0, layer, lambda x, w: x, x, w))

    found = operations(jax.grad(loss), X, jnp.ones((4, 8)))
    gradients = [op for op in found if op.primitive == "dot_general" and op.backward]
    assert "float32" in {op.result for op in gradients}
    assert {op.dtype for op in gradients} == {"float16"}


def test_between_a_narrow_and_a_wide_dot_the_gradient_is_narrow():
    def loss(w, x):
        with jax.named_scope("Wide"):
            h = x @ w
        with jax.named_scope("Narrow"):
            return jnp.sum(jnp.tanh(h @ w))

    found = operations(jax.grad(loss), X, X, rules=DEFAULT_RULES.with_scopes({"Wide": "float32"}))
    dots = [op for op in found if op.primitive == "dot_general" and op.backward and op.scope == "Narrow"]
    # The weight's gradient leaves in float32; what goes on to the wide dot does not, as it does between narrow ones.
    assert sorted(str(op.result) for op in dots) == ["float16", "float32"]


def test_a_weight_made_of_parameters_is_rounded_once_if_a_wide_part_makes_it():
    """For example Glow's convolutions, made of the factors of a matrix (Kingma and Dhariwal, 2018, section 3.2)."""
    rng = np.random.default_rng(0)
    factors = [np.eye(32, dtype=np.float32) + rng.normal(size=(32, 32)).astype(np.float32) / 8 for _ in range(3)]
    x = rng.normal(size=(64, 32)).astype(np.float32)

    def compose(factors):
        return factors[0] @ factors[1] @ factors[2]

    def layer(factors, x, compose=compose):
        return x @ compose(factors)

    kept = functools.partial(layer, compose=full_precision(compose))
    assert reads("dot_general", layer, factors, x) == ["float16"] * 3
    assert reads("dot_general", kept, factors, x) == ["float32", "float32", "float16"]
    by_hand = x.astype(np.float16).astype(np.float64) @ np.float64(np.float16(compose(factors)))
    exact = layer([np.float64(factor) for factor in factors], np.float64(x))
    narrow, wide, bound = (
        np.linalg.norm(got - exact)
        for got in (autocast(layer, "mixed_float16")(factors, x), autocast(kept, "mixed_float16")(factors, x), by_hand)
    )
    assert wide <= 1.5 * bound < narrow


def test_what_stands_in_a_scope_itself():
    def fn(x):
        with jax.named_scope("Net"):
            y = jnp.tanh(x @ x)
            with jax.named_scope("Dense"):
                return jnp.tanh(y @ x)

    assert reads("tanh", fn, X, rules=DEFAULT_RULES.with_scopes({"Net/.": "float32"})) == ["float32", "float16"]
    assert reads("tanh", fn, X, rules=DEFAULT_RULES.with_scopes({"Net": "float32"})) == ["float32", "float32"]


# Errors, with their whole message


def test_bad_scopes():
    with pytest.raises(ValueError, match=sentence("`scopes` sets 'Dense*' to float64; use float32 or a 16-bit dtype.")):
        DEFAULT_RULES.with_scopes({"Dense*": "float64"})
    with pytest.raises(ValueError, match=r"^`scopes\['Dense\*'\]`: unknown dtype 'float33' "):
        DEFAULT_RULES.with_scopes({"Dense*": "float33"})
    rules = DEFAULT_RULES.with_scopes({"Dense*": "bfloat16"})
    with pytest.raises(
        ValueError,
        match=sentence(
            "`rules` set the scope 'Dense*' to bfloat16, but the policy computes in float16; a scope is in the "
            "policy's compute dtype or in float32."
        ),
    ):
        autocast(jnp.sin, "mixed_float16", rules=rules)
    autocast(jnp.sin, "float32", rules=rules)  # computes in neither


def test_bad_regions():
    for mark in (full_precision, low_precision, lambda fn: low_precision(fn, dtype="float16")):
        with pytest.raises(
            TypeError,
            match=sentence("`fn` must be callable, got 3; pass the function whose operations are to be marked."),
        ):
            mark(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float8_e4m3fn"])
def test_low_precision_takes_16_bit_dtypes(dtype):
    message = (
        f"`dtype` must be 'float16' or 'bfloat16', got {dtype}. `full_precision` marks what has to run in float32."
    )
    with pytest.raises(ValueError, match=sentence(message)):
        low_precision(jnp.tanh, dtype=dtype)


def test_a_pallas_kernel_is_given_16_bits_by_low_precision_and_float32_without():
    def kernel(x, out):
        out[...] = 2 * x[...]

    def twice(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    for call, dtype in ((twice, "float32"), (low_precision(twice, dtype="float16"), "float16")):
        fn = lambda x, call=call: call(x @ x)  # noqa: E731
        assert reads("pallas_call", fn, X) == [dtype]
        assert np.all(jax.jit(autocast(fn, "mixed_float16"))(X) == 4)
