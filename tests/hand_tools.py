"""A small network with a head, its gradients in float64, in mixed precision by hand, and by autocast."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from comparisons import as_written
from jax import lax

from jmp_train import autocast

RNG = np.random.default_rng(0)
PARAMS = {"hidden": (24, 64), "bias": (64,), "out": (64, 16)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) / 6 for name, shape in PARAMS.items()}
X, Y = (RNG.normal(size=shape).astype(np.float32) for shape in ((64, 24), (64, 16)))

Head = Callable[[Any, Any], Any]  # (activations [64, 16], targets [64, 16]) -> loss []


def by_hand(dtype: str) -> Callable[[Any], Any]:
    """A rounding to `dtype` that XLA cannot drop."""
    return lambda value: lax.optimization_barrier(value.astype(dtype)).astype(jnp.float32)


def gradients(head: Head, scale: float, arguments: Any, rounded: Callable[[Any], Any] = lambda value: value) -> Any:
    def dot(a, b):
        return rounded(rounded(a) @ rounded(b))

    def loss(params, x, y):
        return scale * head(dot(jnp.tanh(dot(x, params["hidden"]) + params["bias"]), params["out"]), y)

    return jax.grad(loss)(*arguments)


@functools.cache
def exact_gradients(head: Head) -> Any:
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (PARAMS, X, Y))
        return jax.tree.map(np.asarray, jax.jit(lambda *arguments: gradients(head, 1.0, arguments))(*wide))


@functools.cache
def error_by_hand(head: Head, dtype: str, scale: float) -> float:
    found = as_written(lambda *arguments: gradients(head, scale, arguments, by_hand(dtype)))(PARAMS, X, Y)
    return relative_error(found, jax.tree.map(lambda leaf: scale * leaf, exact_gradients(head)))


def errors(head: Head, dtype: str, scale: float, written: Head | None = None) -> tuple[float, float]:
    """The relative errors of gradients: by hand, with products alone in a dtype, and under autocast.

    By hand, the head is `written`, if given: a function that computes the same as `head`.
    """
    written = head if written is None else written
    cast = autocast(lambda *arguments: gradients(head, scale, arguments), f"mixed_{dtype}")
    exact = jax.tree.map(lambda leaf: scale * leaf, exact_gradients(written))
    return error_by_hand(written, dtype, scale), relative_error(as_written(cast)(PARAMS, X, Y), exact)


def relative_error(got: Any, want: Any) -> float:
    got, want = (np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(tree)]) for tree in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
