"""`shard_map` without its devices: the shards of arrays, and collectives on stacked shards.

Decides which `shard_map`s can be taken apart, what each device gets, and what a collective makes of what all devices
hand it. Does not decide in which order devices run; see `_lanes.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, bind, open_jaxpr, sub_jaxprs

Device = tuple[tuple[str, int], ...]
"""A device by its position on each axis of a mesh."""

# These say where a value is or how it varies, and leave it as it is.
UNCHANGING = frozenset("pvary pcast sharding_constraint reshard mesh_cast".split())
_ALONE = UNCHANGING | {"axis_index"}
_COLLECTIVES = frozenset(
    "psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter ppermute all_to_all".split()
)
_TOGETHER = "devices"  # the one axis that stands for those a collective runs along


def crossed(eqn: JaxprEqn, axes: Sequence[str]) -> tuple[str, ...]:
    """The mesh axes along which an operation needs other devices, in the order in which it numbers them.

    Args:
      eqn: the operation.
      axes: all axes in question, in the mesh's order.
    """
    if eqn.primitive.name in _ALONE:
        return ()
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    named = named if isinstance(named, tuple | list) else (named,)
    if eqn.primitive.name == "ppermute":  # numbers devices as the mesh does, whatever the order of the names
        return tuple(axis for axis in axes if axis in named)
    return tuple(axis for axis in named if axis in axes)


def devices_of(eqn: JaxprEqn) -> list[Device]:
    """The devices of a `shard_map`, along the axes that it divides arrays over."""
    sizes = {axis: size for axis, size in eqn.params["mesh"].shape.items() if axis in manual_axes(eqn)}
    return [tuple(zip(sizes, each, strict=True)) for each in itertools.product(*map(range, sizes.values()))]


def manual_axes(eqn: JaxprEqn) -> frozenset[str]:
    return eqn.params["newly_manual_axes"]


def can_enter(eqn: JaxprEqn, is_entered: Callable[[str], bool]) -> bool:
    """Whether a `shard_map` can be taken apart: every collective in it is known, and is where it can be reached.

    Args:
      eqn: the `shard_map`.
      is_entered: whether operations of a name are taken apart themselves.
    """

    def fits(jaxpr: ClosedJaxpr | Jaxpr, reached: bool) -> bool:
        for inner in open_jaxpr(jaxpr).eqns:
            if inner.primitive.name == "shard_map":
                return False
            if crossed(inner, tuple(manual_axes(eqn))) and not (reached and _is_known(inner)):
                return False
            if not all(fits(body, reached and is_entered(inner.primitive.name)) for body in sub_jaxprs(inner.params)):
                return False
        return True

    specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
    return not any(getattr(spec, "unreduced", None) for spec in specs) and fits(eqn.params["jaxpr"], True)


def _is_known(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _COLLECTIVES and eqn.params.get("axis_index_groups") is None


def bind_across(eqn: JaxprEqn, axes: tuple[str, ...], arrays: Sequence[Any], **changed: Any) -> list[Any]:
    """Runs a collective on what all devices along `axes` hand it.

    Args:
      eqn: the collective.
      axes: the axes it runs along, as `crossed` gives them.
      arrays: `[devices, ...]` for each operand.
      **changed: parameters in place of those recorded.

    Returns:
      `[devices, ...]` for each result.
    """
    key = "axes" if "axes" in eqn.params else "axis_name"
    changed[key] = (_TOGETHER,) if isinstance(eqn.params[key], tuple) else _TOGETHER
    return list(jax.vmap(lambda *each: bind(eqn, each, **changed), axis_name=_TOGETHER)(*arrays))


def part(names: Any, device: Device, last: Device) -> tuple[int, int]:
    """The number of a device among those along some axes, of which the last counts fastest, and how many there are.

    Args:
      names: one axis, several or `None`.
      device: the device.
      last: the device with the highest position on every axis.
    """
    at, sizes = dict(device), {axis: position + 1 for axis, position in last}
    number, count = 0, 1
    for name in () if names is None else names if isinstance(names, tuple) else (names,):
        number, count = number * sizes[name] + at[name], count * sizes[name]
    return number, count


def shards(array: Any, spec: Any, devices: Sequence[Device]) -> Iterator[Any]:
    """What each device gets of an array; devices that get the same share one array."""
    data, made = _numbers(array), {}
    for device in devices:
        where = tuple(part(names, device, devices[-1]) for names in spec)
        index = tuple(slice(i * data.shape[k] // n, (i + 1) * data.shape[k] // n) for k, (i, n) in enumerate(where))
        if where not in made:
            made[where] = _like(array, data[index])
        yield made[where]


def whole(pieces: Sequence[Any], spec: Any, devices: Sequence[Device]) -> Any:
    """The array of which each device has a piece; of equal pieces the first device's counts."""
    placed: dict[tuple[tuple[int, int], ...], Any] = {}
    for piece, device in zip(pieces, devices, strict=True):
        placed.setdefault(tuple(part(names, device, devices[-1]) for names in spec), _numbers(piece))
    first = _numbers(pieces[0])
    counts = [n for _, n in next(iter(placed))]
    sizes = [size * n for size, n in itertools.zip_longest(first.shape, counts, fillvalue=1)]
    data = np.empty(sizes, first.dtype)
    for where, piece in placed.items():
        data[tuple(slice(i * size, (i + 1) * size) for (i, _), size in zip(where, first.shape, strict=False))] = piece
    return _like(pieces[0], data)


def stack(arrays: Sequence[Any]) -> Any:
    """Arrays of one shape along a new first axis."""
    # On the host: a concatenation of a thousand operands would be compiled for a minute.
    return _like(arrays[0], np.stack(list(map(_numbers, arrays))))


def _numbers(array: Any) -> np.ndarray:
    """An array on the host, keys as the integers they are made of."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def _like(array: Any, data: np.ndarray) -> Any:
    """What `_numbers` gave as an array again, of the kind of `array`."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(array))
    return data if data.dtype == jax.dtypes.float0 else jnp.asarray(data)
