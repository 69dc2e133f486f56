"""`exponent_histogram` and `backward_histogram`: how many numbers lie between which powers of two.

Decides what is counted, of a tree or of a backward pass, and how histograms add up. Does not decide what becomes of the
numbers in another format; see `_underflow.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._autocast import DEFAULT_RULES, Rule
from ..._dtypes import is_floating
from ..._text import columns
from ..._values import check_callable, register
from ..interpreter import Site, Value, Watcher, summed, traced_call
from ._bits import (
    DOUBLE,
    SINGLE,
    Wide,
    bincount,
    check_single,
    exponent_bins,
    floating_leaves,
    magnitudes,
    psum_uint64,
    sum_uint64,
    to_int64,
)

# The bins after those of the exponents in `ExponentHistogram.counts`.
_ZERO, _INFINITE, _NAN = range(3)
_SPECIAL = 3
_TOTAL = "total"


@dataclasses.dataclass(frozen=True)
class ExponentHistogram:
    """How many values of each leaf have 2^e <= |x| < 2^(e+1), and how many are zero, infinite or NaN.

    A pytree: it goes through `jit`, `vmap` (a stack of histograms), `scan` (as carry or result), checkpoints and
    `jax.device_get`. `a + b` adds two of the same tree, such as those of successive steps. The properties, `as_dict`
    and `str` read the numbers on the host.

    Attributes:
      counts: uint32 `[n, bins + 3, 2]` for n leaves: the exponents from `lowest` on, then zeros, infinities of either
        sign, and NaNs. A count is `counts[..., 0] + 2**32 * counts[..., 1]` and exact up to 2^64.
      paths: the leaves, as tree paths. Static.
      lowest: the exponent of the first bin, that of the smallest subnormal number: -149, or -1074 if a leaf is
        float64. Static.
    """

    counts: jax.Array
    paths: tuple[str, ...]
    lowest: int

    @property
    def wide(self) -> Wide:
        """The format whose exponents are the bins."""
        return SINGLE if self.lowest == SINGLE.lowest else DOUBLE

    @property
    def exponents(self) -> np.ndarray:
        """The exponent of each bin, int64 `[bins]`."""
        return np.arange(self.lowest, self.lowest + self.wide.bins)

    @property
    def values(self) -> np.ndarray:
        """How many values are in each bin, int64 `[n, bins]`."""
        return to_int64(self.counts)[..., : self.wide.bins]

    @property
    def zeros(self) -> np.ndarray:
        """How many values are zero, int64 `[n]`."""
        return self._special(_ZERO)

    @property
    def infinities(self) -> np.ndarray:
        """How many values are infinite, of either sign, int64 `[n]`."""
        return self._special(_INFINITE)

    @property
    def nans(self) -> np.ndarray:
        """How many values are NaN, int64 `[n]`."""
        return self._special(_NAN)

    def _special(self, which: int) -> np.ndarray:
        return to_int64(self.counts)[..., self.wide.bins + which]

    def total(self) -> "ExponentHistogram":
        """The histogram of all leaves together, with one path, "total"; works inside `jit`."""
        return ExponentHistogram(jnp.expand_dims(sum_uint64(jnp.asarray(self.counts), -2), -3), (_TOTAL,), self.lowest)

    def psum(self, axis_name: Any) -> "ExponentHistogram":
        """The histogram of what all devices along a mesh axis have, inside `shard_map` or `pmap`.

        There each device counts its own shard of an array. A plain `jax.lax.psum` of the tree would lose the carry.

        Args:
          axis_name: the axis, or a tuple of axes, over which the arrays are sharded; every copy counts.
        """
        return ExponentHistogram(psum_uint64(self.counts, axis_name), self.paths, self.lowest)

    def __add__(self, other: Any) -> "ExponentHistogram":
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        if (self.paths, self.lowest) != (other.paths, other.lowest):
            differing = sorted({*self.paths} ^ {*other.paths}) or (
                f"bins from 2^{self.lowest} and 2^{other.lowest}" if self.lowest != other.lowest else "their order"
            )
            raise ValueError(
                f"histograms add up only for trees of the same leaves, these differ in {differing}; "
                "add what total() returns, or cast float64 leaves."
            )
        both = jnp.stack([jnp.asarray(self.counts), jnp.asarray(other.counts)])
        return ExponentHistogram(sum_uint64(both, 0), self.paths, self.lowest)

    def as_dict(self) -> dict[str, Any]:
        """Returns dictionaries, lists, strings and numbers, ready for JSON; exponents are keys, empty bins left out.

        Raises:
          ValueError: this is a stack of histograms, as `vmap` and `scan` return.
        """
        check_single(self.counts, "histogram")
        whole = self.total()
        return {"leaves": self._rows(), "total": whole._rows()[0]}

    def _rows(self) -> list[dict[str, Any]]:
        columns_of = zip(self.paths, self.zeros, self.infinities, self.nans, self.values, strict=True)
        return [
            {
                "path": path,
                "zeros": int(zeros),
                "infinities": int(infinities),
                "nans": int(nans),
                "exponents": {str(self.lowest + int(i)): int(values[i]) for i in np.flatnonzero(values)},
            }
            for path, zeros, infinities, nans, values in columns_of
        ]

    def __str__(self) -> str:
        header = ("leaf", "values", "zero", "smallest", "median", "largest", "infinite", "NaN")
        rows = self.as_dict()
        return columns(header, [_cells(row) for row in (*rows["leaves"], rows["total"])])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table; the median is over the values that are neither zero nor infinite nor NaN."""
    exponents = {int(e): number for e, number in row["exponents"].items()}
    counted = sum(exponents.values())
    special = (row["zeros"], row["infinities"], row["nans"])
    spread = ("", "", "")
    if counted:
        middle = np.searchsorted(np.cumsum(list(exponents.values())), (counted + 1) // 2)
        spread = tuple(f"2^{e}" for e in (min(exponents), list(exponents)[middle], max(exponents)))
    return (row["path"], str(counted + sum(special)), str(special[0]), *spread, str(special[1]), str(special[2]))


register(ExponentHistogram, ("counts",), ("paths", "lowest"))


def exponent_histogram(tree: Any) -> ExponentHistogram:
    """Counts the values of a tree by powers of two, leaf by leaf; works inside `jit`, `vmap`, `scan`.

    Exact for every format from 4 to 64 bits, subnormal numbers included: bits are read, nothing is computed in floating
    point. Each leaf is read once, nothing waits for the device.

    Args:
      tree: any pytree: gradients, parameters, activations. Counted are its floating leaves, and of complex ones the
        real and the imaginary parts; integers, booleans, PRNG keys, float0, `None` and Flax's
        `_overwrite_with_gradient` statistics are left out. Python floats count as JAX takes them, in float32.

    Returns:
      An `ExponentHistogram`. Under `jit` it counts the whole of a sharded array; inside `shard_map` and `pmap` the
      device's own part, and `exponent_histogram(tree).psum("data")` the parts of all devices.

    Raises:
      ValueError: a leaf is float64 while JAX has no 64-bit types, has 2^32 values or more, or is unreduced.

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, figure 3.

    >>> histogram = exponent_histogram({"w": jnp.array([1.0, 1.5, 2.0, -0.25, 0.0, jnp.inf]), "step": 3})
    >>> histogram.as_dict()["leaves"]
    [{'path': 'w', 'zeros': 1, 'infinities': 1, 'nans': 0, 'exponents': {'-2': 1, '0': 2, '1': 1}}]
    >>> print(histogram + histogram)
    leaf   values  zero  smallest  median  largest  infinite  NaN
    w      12      2     2^-2      2^0     2^1      2         0
    total  12      2     2^-2      2^0     2^1      2         0
    """
    leaves = floating_leaves(tree, "exponent_histogram")
    wide = DOUBLE if any(leaf.wide is DOUBLE for leaf in leaves) else SINGLE
    counted = [_count(leaf.array, leaf.wide, wide) for leaf in leaves]
    counts = jnp.stack(counted) if counted else jnp.zeros((0, wide.bins + _SPECIAL, 2), np.uint32)
    return ExponentHistogram(counts, tuple(leaf.path for leaf in leaves), wide.lowest)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _count(array: jax.Array, own: Wide, wide: Wide) -> jax.Array:
    """The counts of one leaf, read in one format, in the bins of another: uint32 `[wide.bins + 3, 2]`."""
    bits = magnitudes(array)
    special = wide.bins + jnp.where(bits == 0, _ZERO, jnp.where(bits == own.infinity, _INFINITE, _NAN))
    ordinary = (bits > 0) & (bits < own.infinity)
    bins = exponent_bins(bits, own) + np.int32(own.lowest - wide.lowest)
    return bincount(jnp.where(ordinary, bins, special), wide.bins + _SPECIAL)


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
    check_callable("fn", fn, "pass a function that differentiates: jax.grad(loss_fn)")

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
        if site.backward and DEFAULT_RULES.entry(site.primitive).rule is not Rule.SHAPE:
            path = "/".join(filter(None, (site.scope, site.primitive)))
            for x in map(summed, filter(is_floating, outputs)):
                with jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh):  # not that of the caller
                    # In the widest format there is, so that the histograms of one program have the same bins.
                    histogram = exponent_histogram({path: jnp.asarray(x, float)})
                histogram = jax.device_get(histogram)  # JAX adds up no arrays of different meshes
                known = self.histograms.get(path)
                self.histograms[path] = histogram if known is None else known + histogram
        return super().watch(site, inputs, outputs)
