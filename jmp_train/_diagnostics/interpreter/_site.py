"""One equation as it runs: what it is, where it stands, and how it is bound to concrete arrays.

Decides how an equation is described to a watcher, and how it runs by itself: as recorded, on the stacked operands of
all devices that a collective joins, or in float32 instead of 16 bits. Does not decide the order in which equations run;
see `_interpreter.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._autocast.ir import Place
from ..._dtypes import FLOAT32, is_floating
from ..._jaxpr import JaxprEqn, Node, bind
from ..._values import spec_of_sum, unreduced_axes

Device = tuple[tuple[str, int], ...]
"""A device by its position on each axis of a mesh."""

# These change where a value is, or how its type varies over devices, and no number.
IDENTITIES = frozenset("pvary pcast sharding_constraint reshard mesh_cast".split())
_LOCAL = IDENTITIES | {"axis_index"}  # they name axes, but need no other device
_DEVICES = "devices"  # the one axis of `vmap` that stands for all axes of a collective


class Value(NamedTuple):
    """A concrete array, and the tag that a watcher gave it; `None` where it gave none, as of constants."""

    array: Any
    tag: Any = None


class Loop(NamedTuple):
    """One iteration of a loop: `scan` or `while`, which iteration from 0, and of how many, if that is known before."""

    primitive: str
    iteration: int
    length: int | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Site:
    """One equation as it runs.

    Attributes:
      node: the equation.
      place: where its program stands.
      loops: the iterations of the loops around it, outermost first.
      around: the loops, branches and other equations that were entered on the way, innermost first.
      derivative: whether it is a forward equation that only the backward pass uses.
      device: which device of a `shard_map` runs it: `(axis, position)` for each axis of its mesh; empty outside.
    """

    node: Node
    place: Place
    loops: tuple[Loop, ...]
    around: tuple[Node, ...]
    derivative: bool
    device: Device = ()

    @property
    def primitive(self) -> str:
        return self.node.name

    @property
    def scope(self) -> str:
        return self.place.scope_of(self.node)

    @property
    def backward(self) -> bool:
        return self.place.is_backward(self.node)

    @property
    def collective_axes(self) -> tuple[str, ...]:
        """The mesh axes that a collective runs along; its operands are those of all devices there, stacked."""
        return collective_axes(self.node.eqn, [axis for axis, _ in self.device])

    def bind(self, arrays: Sequence[Any], **changed: Any) -> list[Any]:
        """Runs the equation on `arrays`, some of its parameters changed; of a collective the results are stacked."""
        if self.device:  # one device's shard is on no mesh, so that no sharding of the mesh fits it
            params = self.node.params.items()
            changed |= {key: None for key, value in params if isinstance(value, jax.sharding.Sharding)}
        if self.collective_axes:
            return _bind_across(self.node.eqn, self.collective_axes, arrays, **changed)
        if self.primitive == "shard_map":  # JAX runs one that has another inside under `jit` only
            return jax.jit(lambda *arrays: bind(self.node.eqn, arrays, **changed))(*arrays)
        return bind(self.node.eqn, arrays, **changed)

    def bind_wide(self, arrays: Sequence[Any]) -> list[Any]:
        """Runs the equation on widened operands; what cannot run on them (a kernel, bit patterns) runs as recorded."""
        node = self.node
        if node.name == "reduce_precision":
            return list(arrays)  # it rounds to a narrow format, which is what a run in float32 leaves out
        if node.name != "bitcast_convert_type":
            try:
                return self.bind(arrays, **wide_params(node))
            except Exception:  # primitives reject dtypes they were not recorded with by exceptions of any type
                pass
        avals: list[Any] = [var.aval for var in node.eqn.invars]
        pairs = zip(arrays, avals, strict=True)
        recorded = [jnp.asarray(x, aval.dtype) if is_floating(x) else x for x, aval in pairs]
        return list(map(widened, self.bind(recorded)))


class Watcher:
    """Sees every equation of a program as it runs, and may tag each value; the base class does neither."""

    def before(self, site: Site, inputs: list[Value]) -> list[Value]:
        """Returns the operands to run with."""
        del site
        return inputs

    def watch(self, site: Site, inputs: Sequence[Value], outputs: Sequence[Any]) -> Sequence[Any]:
        """Is shown the results; returns the tag of each."""
        del site, inputs
        return [None] * len(outputs)

    def join(self, pieces: Sequence[Value]) -> Any:
        """The tag of an array that is put together, of a loop's rows or the shards of several devices."""
        del pieces


def collective_axes(eqn: JaxprEqn, axes: Sequence[str]) -> tuple[str, ...]:
    """The mesh axes along which an equation needs other devices, in the order in which it numbers them.

    Args:
      eqn: the equation.
      axes: all axes in question, in the mesh's order.
    """
    if eqn.primitive.name in _LOCAL:
        return ()
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = named if isinstance(named, tuple | list) else (named,)
    if eqn.primitive.name == "ppermute":  # numbers devices as the mesh does, whatever the order of the names
        return tuple(axis for axis in axes if axis in named)
    return tuple(axis for axis in named if axis in axes)


def _bind_across(eqn: JaxprEqn, axes: tuple[str, ...], arrays: Sequence[Any], **changed: Any) -> list[Any]:
    """Runs a collective on what all devices along `axes` hand it: `vmap` knows collectives over its own axis.

    Args:
      eqn: the collective.
      axes: the axes it runs along.
      arrays: `[devices, ...]` for each operand.
      **changed: parameters in place of those recorded.

    Returns:
      `[devices, ...]` for each result.
    """
    if eqn.primitive.name == "ppermute":  # `vmap` takes permutations of all devices only
        (x,), (sources, targets) = arrays, np.array(eqn.params["perm"], int).reshape(-1, 2).T
        return [jnp.zeros_like(x).at[targets].set(x[sources])]
    key = "axes" if "axes" in eqn.params else "axis_name"
    changed[key] = (_DEVICES,) if isinstance(eqn.params[key], tuple) else _DEVICES
    return list(jax.vmap(lambda *each: bind(eqn, each, **changed), axis_name=_DEVICES)(*arrays))


def is_narrow(array: Any) -> bool:
    """Whether an array, a `jax.Ref` or an aval has a floating dtype of fewer than 32 bits."""
    return _is_narrow_dtype(getattr(array, "dtype", None))


def _is_narrow_dtype(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating)) and np.dtype(dtype).itemsize < 4
    except TypeError:
        return False


def summed(array: Any) -> Any:
    """The array; of an unreduced one, which JAX neither reads nor computes with, the sum that it stands for."""
    if not isinstance(array, jax.Array) or not unreduced_axes(array):
        return array
    sharding: Any = array.sharding
    return jax.reshard(array, sharding.update(spec=spec_of_sum(array)))


def to_host(array: Any) -> np.ndarray:
    """An array on the host, unreduced ones summed, keys as the integers they are made of."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else summed(array))


def widened(array: Any) -> Any:
    """The array in float32 if it is floating and narrower, or else as it is."""
    return jnp.asarray(array, FLOAT32) if is_floating(array) and array.dtype.itemsize < 4 else array


def wide_params(node: Node) -> dict[str, Any]:
    """The parameters of an equation that name a narrow floating dtype, naming float32 instead."""
    params = node.params.items()
    return {key: FLOAT32 for key, value in params if isinstance(value, np.dtype | type) and _is_narrow_dtype(value)}
