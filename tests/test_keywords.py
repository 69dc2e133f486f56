"""Every wrapper passes on the keyword arguments of a user's function, whatever their names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_train as jmp
from jmp_train import diagnostics, flax_bridge

# What the package's own functions call their arguments.
NAMES = (
    "fn", "args", "kwargs", "avals", "argnums", "axes", "allow_int", "cast", "chosen", "has_aux", "loss_fn", "model",
    "module", "number", "policy", "program", "rules", "scale", "scale_loss", "self",
)  # fmt: skip
X = jnp.ones((16, 16))
WRAPPERS = {
    "autocast": lambda fn: jmp.autocast(fn, "mixed_bfloat16"),
    "full_precision": jmp.full_precision,
    "low_precision": jmp.low_precision,
    "value_and_grad": lambda fn: jmp.value_and_grad(fn, "mixed_bfloat16"),
    "value_and_grad without autocast": lambda fn: jmp.value_and_grad(fn, "mixed_bfloat16", autocast=False),
    "grad": lambda fn: jmp.grad(fn, "mixed_bfloat16"),
    "explain": lambda fn: jmp.explain(fn, "mixed_bfloat16"),
    "assert_policy": lambda fn: jmp.assert_policy(fn, "mixed_bfloat16"),
    "find_overflow": diagnostics.find_overflow,
    "tensor_core_report": diagnostics.tensor_core_report,
    "backward_histogram": lambda fn: diagnostics.backward_histogram(jax.grad(fn)),
    "sensitivity": lambda fn: diagnostics.sensitivity(fn, "mixed_bfloat16"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_keyword_may_have_any_name(wrapper):
    def fn(w, x, **factors):
        return jnp.mean(x @ w) * sum(factors.values())

    factors = {name: jnp.float32(2) for name in NAMES}
    result = WRAPPERS[wrapper](fn)(X, X, **factors)
    if wrapper in ("autocast", "full_precision", "low_precision"):
        assert result == fn(X, X, **factors)
    elif wrapper.startswith("value_and_grad"):
        assert result[0] == fn(X, X, **factors)


LENGTHS = {
    "of a loop": lambda x, n: sum(x for _ in range(n)),
    "of an array": lambda x, n: x + jnp.zeros(n),
    "of a step": lambda x, n: x if n > 1 else 2 * x,
    "static in a jit": jax.jit(lambda x, n: n * x, static_argnames="n"),
}


@pytest.mark.parametrize("wrapper", ["autocast", "explain", "assert_policy", "tensor_core_report"])
@pytest.mark.parametrize("needs", LENGTHS.values(), ids=LENGTHS)
def test_a_number_that_python_needs_to_know_is_bound(wrapper, needs):
    def fn(w, x, n):
        return jnp.mean(needs(x @ w, n))

    wrap = WRAPPERS[wrapper]
    with pytest.raises((TypeError, ValueError)) as raised:
        wrap(fn)(X, X, n=16)
    assert any("`functools.partial(fn, n=3)` instead of `fn`" in note for note in raised.value.__notes__)
    wrap(functools.partial(fn, n=16))(X, X)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        pytest.param(lambda x, n: x if x[0, 0] > 0 else 2 * x, (X, jnp.ones(())), id="without a number"),
        pytest.param(lambda x, n: jnp.ones(2) + jnp.ones(3), (X, 3), id="another error"),
    ],
)
def test_no_other_error_speaks_of_numbers(fn, args):
    with pytest.raises(TypeError) as raised:
        jmp.autocast(fn, "mixed_bfloat16")(*args)
    assert not any("functools.partial" in note for note in getattr(raised.value, "__notes__", ()))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_flags_and_text_reach_the_function_as_they_are(wrapper):
    """An eager function may branch on them; under `jax.jit` a flag would be traced, and text would be an error."""

    def fn(w, x, train, *, mode="sum", options=None):
        h = jnp.tanh(x @ w) if train else x @ w
        return (jnp.mean if mode == "mean" else jnp.sum)(h) * (1 if options is None else options["scale"])

    wrapped = WRAPPERS[wrapper](fn)
    for train, mode in ((True, "sum"), (False, "sum"), (False, "mean")):
        options = {"scale": 2.0, "name": "b"}
        result = wrapped(X, X, train, mode=mode, options=options)
        if wrapper in ("autocast", "full_precision", "low_precision"):
            np.testing.assert_allclose(result, fn(X, X, train, mode=mode, options=options), rtol=1e-2)


def test_a_function_among_the_keywords_is_the_users():
    def loss(w, x, cast):
        return jnp.mean(cast(x) @ w)

    for autocast in (True, False):
        grad_fn = jmp.value_and_grad(loss, "mixed_bfloat16", autocast=autocast)
        assert grad_fn(X, X, cast=lambda x: 3 * x)[0] == 3 * grad_fn(X, X, cast=lambda x: x)[0]


def test_a_keyword_of_a_modules_loss_may_have_any_name():
    def loss(net, x, **factors):
        return jnp.mean(net(x)) * sum(factors.values())

    net = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    factors = {name: jnp.float32(2) for name in NAMES}
    value, *_ = flax_bridge.value_and_grad(loss, "mixed_bfloat16")(net, X, **factors)
    one, *_ = flax_bridge.value_and_grad(loss, "mixed_bfloat16")(net, X, factor=jnp.float32(2 * len(NAMES)))
    assert value == one
