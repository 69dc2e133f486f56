"""`backward_histogram`: the exponents of everything that a backward pass computes.

Decides which values belong to it. Does not decide how they are counted (`_exponent_histogram.py`) nor what becomes of
them in another format (`_underflow_report.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ..._autocast._table import TABLE, Rule
from ..._dtypes import is_floating
from ..interpreter import Site, Value, Watcher, traced_call
from ._exponent_histogram import ExponentHistogram, exponent_histogram


def backward_histogram(fn: Callable[..., Any]) -> Callable[..., ExponentHistogram]:
    """Returns a function that runs `fn` operation by operation and counts the values of its backward pass.

    The gradients of parameters are sums over a batch; those of activations, which a backward pass hands from layer to
    layer, are smaller by its size, and are what float16 loses first. They appear in no result, hence this. Run the
    gradient in float32, and ask of what it returns how much float16 would lose, and which loss scale prevents it:
    `underflow_report(histogram, "float16")`, `suggest_loss_scale(histogram)`, `plot_exponents(histogram)`.

    Counted are the floating results of all operations that differentiation has transposed, loops included, but for
    those that only rearrange values. Under `jmp_train.value_and_grad` they are scaled by the loss scale, and rounded.

    Args:
      fn: a function that differentiates, such as `jax.grad(loss_fn)`, jitted or not.

    Returns:
      A function of `fn`'s arguments that returns an `ExponentHistogram` with a row for each scope and primitive.

    Raises:
      TypeError: `fn` is not callable, or it is called inside `jit`.
      ValueError: `fn` has no backward pass.

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, figure 3.

    >>> import jax
    >>> def loss(w, x):
    ...     with jax.named_scope("Layer"):
    ...         return jnp.mean(jnp.sin(w * x))
    >>> histogram = backward_histogram(jax.grad(loss))(jnp.ones(4), jnp.full(4, 2.0**-10))
    >>> [(path, int(row.sum())) for path, row in zip(histogram.paths, histogram.values)]
    [('Layer/div', 1), ('Layer/mul', 8)]
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be callable, got {fn!r}; pass a function that differentiates: jax.grad(loss_fn).")

    def count(*args: Any, **kwargs: Any) -> ExponentHistogram:
        call = traced_call("backward_histogram", fn, args, kwargs)
        counter = _Counter()
        call.interpreter.run(call.args, counter)
        if not counter.histograms:
            raise ValueError("`fn` has no backward pass; pass a function that differentiates: jax.grad(loss_fn).")
        found = counter.histograms.values()
        return ExponentHistogram(
            jnp.concatenate([histogram.counts for histogram in found]),
            tuple(path for histogram in found for path in histogram.paths),
            next(iter(found)).lowest,
        )

    return count


class _Counter(Watcher):
    """Adds up the histograms of a backward pass by scope and primitive."""

    def __init__(self) -> None:
        self.histograms: dict[str, ExponentHistogram] = {}

    def watch(self, site: Site, inputs: Sequence[Value], outputs: Sequence[Any]) -> Sequence[Any]:
        if site.backward and not (site.primitive in TABLE and TABLE[site.primitive].rule is Rule.SHAPE):
            path = "/".join(filter(None, (site.scope, site.primitive)))
            # In one format, the widest there is: histograms of one program add up.
            counted = [exponent_histogram({path: jnp.asarray(x, float)}) for x in outputs if is_floating(x)]
            for histogram in counted:
                known = self.histograms.get(path)
                self.histograms[path] = histogram if known is None else known + histogram
        return super().watch(site, inputs, outputs)
