"""How a fused attention is divided among the devices of a `jit` over sharded arrays.

The kernels get the arrays of one device, so XLA has to be told how to divide an attention: each device computes a part
of the batch and of the heads, and whole sequences. Arrays sharded along other axes are gathered first. Inside
`shard_map` there is nothing to divide.

Decides the sharding of operands and results. Does not decide whether the kernels run; see `_cudnn.py`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .._dtypes import at_least_float32
from ._settings import Settings

Shapes = tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=4096)
def partitioned(run: Callable[..., tuple[Any, ...]], settings: Settings, shapes: Shapes) -> Callable[..., Any]:
    """`run(*operands, settings=settings)`, forward or backward, for operands of global `shapes` on any devices."""
    names = ("query", "key", "value", *settings.extras)
    is_backward = len(shapes) > len(names)
    names = (*names, "out", "lse", "d_out") if is_backward else names
    results = ("query", "key", "value", *["bias"] * settings.bias_has_gradient) if is_backward else ("out", "lse")
    shape_of = dict(zip(names, shapes, strict=True))
    divided = custom_partitioning(lambda *operands: run(*operands, settings=settings))

    def specs(mesh: Any, query: Any) -> dict[str, PartitionSpec]:
        """How each operand and result is divided: as the query's batch and heads are."""
        spec = (*query.sharding.spec.partitions, None, None, None, None)
        batch, heads, keys = spec[0], spec[2], shape_of["key"][2]
        of_keys = None if keys % math.prod(mesh.shape[axis] for axis in _axes(heads)) else heads
        heads = heads if keys == 1 else of_keys  # one head of keys serves all
        return {name: _spec(name, shape_of, batch, heads, of_keys) for name in {*names, *results}}

    def infer(mesh: Any, operands: Any, results_of_all: Any) -> Any:
        del results_of_all
        found = specs(mesh, operands[0])
        return tuple(NamedSharding(mesh, found[name]) for name in results)

    def partition(mesh: Any, operands: Any, results_of_all: Any) -> Any:
        del results_of_all
        found = specs(mesh, operands[0])
        divided_by = {axis for entry in found["query"] for axis in _axes(entry)}

        def local(*arrays: Any) -> tuple[Any, ...]:
            """The gradient of an operand that devices share is the sum of their gradients, in float32."""
            made = run(*arrays, settings=settings)
            own = [{axis for entry in found[name] for axis in _axes(entry)} for name in results]
            return tuple(_summed(x, tuple(sorted(divided_by - axes))) for x, axes in zip(made, own, strict=True))

        given = (*(found[name] for name in results), *(found[name] for name in names))
        placed = tuple(NamedSharding(mesh, spec) for spec in given)
        return mesh, local, placed[: len(results)], placed[len(results) :]

    divided.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=_rule(names, results, shape_of),
        need_replication_factors=("t", "h", "s"),  # in the order in which they appear
    )
    return divided


def _summed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    wide = at_least_float32(x.dtype)
    return jax.lax.psum(x.astype(wide), axes).astype(x.dtype) if axes else x


def _axes(entry: Any) -> tuple[Any, ...]:
    """The mesh axes of one entry of a partition spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _spec(name: str, shape_of: dict[str, tuple[int, ...]], batch: Any, heads: Any, of_keys: Any) -> PartitionSpec:
    if name in ("bias", "mask"):
        first, second = shape_of[name][:2]
        return PartitionSpec(batch if first != 1 else None, heads if second != 1 else None, None, None)
    if name == "lse":
        return PartitionSpec(batch, heads, None)
    if name.endswith("lengths"):
        return PartitionSpec(batch)
    return PartitionSpec(batch, None, of_keys if name in ("key", "value") else heads, None)


# Of the others: b t n h.
_FACTORS = {"key": "b s k h", "value": "b s k h", "lse": "b n t", "bias": "b n t s", "mask": "b n t s"}


def _rule(names: tuple[str, ...], results: tuple[str, ...], shape_of: dict[str, tuple[int, ...]]) -> str:
    """Which axes of operands and results correspond, in Shardy's notation; axes of size one correspond to none."""

    def factors(name: str, position: int) -> str:
        if name.endswith("lengths"):
            return "b"
        found = _FACTORS.get(name, "b t n h")
        if name not in ("bias", "mask"):
            return found
        pairs = enumerate(zip(found.split(), shape_of[name], strict=True))
        return " ".join(f"one{position}{i}" if size == 1 else factor for i, (factor, size) in pairs)

    of_operands = ", ".join(factors(name, i) for i, name in enumerate(names))
    of_results = ", ".join(factors(name, len(names) + i) for i, name in enumerate(results))
    return f"{of_operands} -> {of_results}"
