"""A small network with a head, its gradients in float64, in mixed precision by hand, and by autocast."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_train import autocast

RNG = np.random.default_rng(0)
PARAMS = {"hidden": (24, 64), "bias": (64,), "out": (64, 16)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) / 6 for name, shape in PARAMS.items()}
X, Y = (RNG.normal(size=shape).astype(np.float32) for shape in ((64, 24), (64, 16)))

Head = Callable[[Any, Any], Any]  # (activations [64, 16], targets [64, 16]) -> loss []


def by_hand(dtype: str) -> Callable[[Any], Any]:
    """A rounding that no compiler leaves out."""
    return lambda value: lax.optimization_barrier(value.astype(dtype)).astype(jnp.float32)


def errors(head: Head, dtype: str, scale: float) -> tuple[float, float]:
    """The relative errors of gradients: with products alone in a dtype, written by hand, and under autocast."""

    def gradients(run: Callable[..., Any], arguments: Any, rounded: Callable[[Any], Any]) -> Any:
        def dot(a, b):
            return rounded(rounded(a) @ rounded(b))

        def loss(params, x, y):
            return scale * head(dot(jnp.tanh(dot(x, params["hidden"]) + params["bias"]), params["out"]), y)

        return run(jax.grad(loss))(*arguments)

    arguments = (PARAMS, X, Y)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), arguments)
        exact = gradients(jax.jit, wide, lambda value: value)
    hand = gradients(jax.jit, arguments, by_hand(dtype))
    cast = gradients(lambda fn: autocast(fn, f"mixed_{dtype}"), arguments, lambda value: value)
    return relative_error(hand, exact), relative_error(cast, exact)


def relative_error(got: Any, want: Any) -> float:
    got, want = (np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(tree)]) for tree in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
