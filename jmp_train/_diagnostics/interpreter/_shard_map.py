"""`shard_map` on one device: the shards of arrays, and the programs of all devices side by side.

Decides which `shard_map`s can be entered, what each device gets, whose turn it is, and when devices meet in a
collective. Does not decide what a collective computes; see `Site.bind` in `_site.py`.

Devices take turns, one equation each, so that equations run in the program's order whatever the device. Branches and
loops may differ from device to device; a device that reaches a collective waits for the others along its axes.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, open_jaxpr, sub_jaxprs
from ._site import IDENTITIES, Device, Site, Value, collective_axes, to_host

_COLLECTIVES = frozenset(
    "psum psum_invariant pmax pmin all_gather all_gather_invariant reduce_scatter ppermute all_to_all".split()
)


def devices_of(eqn: JaxprEqn) -> list[Device]:
    """The devices of a `shard_map`, along the axes that it divides arrays over."""
    sizes = {axis: size for axis, size in eqn.params["mesh"].shape.items() if axis in _manual_axes(eqn)}
    return [tuple(zip(sizes, each, strict=True)) for each in itertools.product(*map(range, sizes.values()))]


def _manual_axes(eqn: JaxprEqn) -> frozenset[str]:
    return eqn.params["newly_manual_axes"]


def can_enter(eqn: JaxprEqn, is_entered: Callable[[str], bool]) -> bool:
    """Whether a `shard_map` can be entered: every collective in it is known, and in no equation that runs as a whole.

    Args:
      eqn: the `shard_map`.
      is_entered: whether equations of a primitive are entered themselves.
    """

    # A nested shard_map divides further axes, which `Device` does not have. `axis_index_groups` split the devices of an
    # axis, and `vmap`, which runs collectives here, does not support them.
    def fits(jaxpr: ClosedJaxpr | Jaxpr, reached: bool) -> bool:
        for inner in open_jaxpr(jaxpr).eqns:
            if inner.primitive.name == "shard_map":
                return False
            if collective_axes(inner, tuple(_manual_axes(eqn))) and not (reached and _is_known(inner)):
                return False
            if not all(fits(body, reached and is_entered(inner.primitive.name)) for body in sub_jaxprs(inner.params)):
                return False
        return True

    # Unreduced arrays are sums of what the devices hold, not put together from it.
    specs = (*eqn.params["in_specs"], *eqn.params["out_specs"])
    return not any(getattr(spec, "unreduced", None) for spec in specs) and fits(eqn.params["jaxpr"], True)


def _is_known(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _COLLECTIVES and eqn.params.get("axis_index_groups") is None


# Arrays and their shards


def _position_along(names: Any, device: Device, devices: Sequence[Device]) -> tuple[int, int]:
    """The number of a device among those along some axes, of which the last counts fastest, and how many there are.

    Args:
      names: one axis, several or `None`.
      device: the device.
      devices: all of them, as `devices_of` lists them.
    """
    at, sizes = dict(device), {axis: position + 1 for axis, position in devices[-1]}
    number, total = 0, 1
    for name in () if names is None else names if isinstance(names, tuple) else (names,):
        number, total = number * sizes[name] + at[name], total * sizes[name]
    return number, total


def _place(spec: Any, device: Device, devices: Sequence[Device]) -> tuple[tuple[int, int], ...]:
    """Which shard of an array a device has along each dimension, and of how many."""
    return tuple(_position_along(names, device, devices) for names in spec.partitions)


def shards_of(array: Any, spec: Any, devices: Sequence[Device]) -> Iterator[Any]:
    """What each device gets of an array; devices that get the same share one array."""
    data, made = to_host(array), {}
    for device in devices:
        where = _place(spec, device, devices)
        index = tuple(slice(i * data.shape[k] // n, (i + 1) * data.shape[k] // n) for k, (i, n) in enumerate(where))
        if where not in made:
            made[where] = _from_host(data[index], array)
        yield made[where]


def assemble(shards: Sequence[Any], spec: Any, devices: Sequence[Device], aval: Any) -> Any:
    """Puts the devices' shards together to an array of type `aval`; of devices with the same shard the first counts."""
    placed: dict[tuple[tuple[int, int], ...], Any] = {}
    for shard, device in zip(shards, devices, strict=True):
        where = _place(spec, device, devices)
        placed.setdefault(where, to_host(shard))
    first = to_host(shards[0])
    splits = [n for _, n in next(iter(placed))]
    sizes = [size * n for size, n in itertools.zip_longest(first.shape, splits, fillvalue=1)]
    data = np.empty(sizes, first.dtype)
    for where, shard in placed.items():
        data[tuple(slice(i * size, (i + 1) * size) for (i, _), size in zip(where, first.shape, strict=False))] = shard
    return _from_host(data, shards[0], aval)


def stack(arrays: Sequence[Any], aval: Any = None) -> Any:
    """Arrays of one shape along a new first axis; of type `aval`, if that is known."""
    # On the host: XLA takes a minute to compile a concatenation of a thousand operands.
    return _from_host(np.stack(list(map(to_host, arrays))), arrays[0], aval)


def _from_host(data: np.ndarray, like: Any, aval: Any = None) -> Any:
    """What `to_host` gave as an array again, of the kind of `like`, sharded as `aval` says where types say that."""
    if data.dtype == jax.dtypes.float0:
        return data
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    array = jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(like)) if is_key else jnp.asarray(data)
    mesh = jax.sharding.get_abstract_mesh()
    if aval is not None and aval.sharding.mesh == mesh and jax.sharding.AxisType.Explicit in mesh.axis_types:
        return jax.reshard(array, aval.sharding)
    return array


# Programs and their turns


class Request(NamedTuple):
    """An equation that a program is about to run, with its operands."""

    site: Site
    inputs: list[Value]


Coroutine = Generator[Request, list[Value], list[Value]]
"""A running program: yields one equation after another, is sent the results of each, and returns its own."""


Run = Callable[[Sequence[Site], list[Value]], list[list[Value]]]
"""Runs an equation: of a collective with the sites of all its devices; returns the results for each site."""


def run_program(program: Coroutine, run: Run) -> list[Value]:
    """The results of a program outside `shard_map`."""
    reply: Any = None
    while True:
        try:
            site, inputs = program.send(reply)
        except StopIteration as stop:
            return stop.value
        (reply,) = run([site], inputs)


def run_devices(
    programs: Mapping[Device, Coroutine], run: Run, join: Callable[[Sequence[Value]], Any]
) -> list[list[Value]]:
    """The results of every device's program, in the order of `programs`.

    Args:
      programs: by device, in the order of `devices_of`.
      run: runs an equation.
      join: gives the tag of stacked operands.

    Raises:
      ValueError: devices wait in different collectives, or for one that has ended; real ones would hang.
    """
    waiting: dict[Device, Request] = {}
    results: dict[Device, list[Value]] = {}

    def resume(device: Device, reply: Any) -> None:
        try:
            waiting[device] = programs[device].send(reply)
        except StopIteration as stop:
            waiting.pop(device, None)
            results[device] = stop.value

    for device in programs:
        resume(device, None)
    while waiting:
        local = [device for device, request in waiting.items() if not request.site.collective_axes]
        for device in local:
            resume(device, _run_local(waiting[device], device, list(programs), run))
        if local:
            continue
        group = next(filter(None, (_complete_group(device, waiting, programs) for device in waiting)), None)
        if group is None:
            raise ValueError(_DEADLOCK.format(", ".join(sorted({each.site.primitive for each in waiting.values()}))))
        columns = list(zip(*(waiting[device].inputs for device in group), strict=True))
        inputs = [Value(stack([value.array for value in column]), join(column)) for column in columns]
        replies = run([waiting[device].site for device in group], inputs)
        for device, reply in zip(group, replies, strict=True):
            resume(device, reply)
    return [results[device] for device in programs]


_DEADLOCK = (
    "the devices of a shard_map wait for each other in collectives that they do not all reach ({}), and would hang; "
    "every device must take the branches and iterations that lead to one, along all of its axes."
)


def _run_local(request: Request, device: Device, devices: Sequence[Device], run: Run) -> list[Value]:
    """Runs an equation that needs no other device."""
    site, inputs = request
    if site.primitive in IDENTITIES:
        return inputs
    if site.primitive == "axis_index":
        return [Value(np.int32(_position_along(site.node.params["axis_name"], device, devices)[0]))]
    return run([site], inputs)[0]


def _complete_group(
    device: Device, waiting: Mapping[Device, Request], programs: Mapping[Device, Coroutine]
) -> list[Device] | None:
    """The devices that a collective joins, in its order, if all of them have reached it."""
    site = waiting[device].site
    others = [(axis, at) for axis, at in device if axis not in site.collective_axes]
    members = [other for other in programs if all(each in other for each in others)]
    kind = _collective(site)
    if any(other not in waiting or _collective(waiting[other].site) != kind for other in members):
        return None
    return sorted(members, key=lambda other: [dict(other)[axis] for axis in site.collective_axes])


def _collective(site: Site) -> tuple[Any, ...]:
    """What tells collectives apart, in XLA too: not where they are in the program.

    JAX's transpose of a `cond` has an equal sum over devices in every branch, where devices of all branches meet.
    """
    eqn = site.node.eqn
    avals: list[Any] = [var.aval for var in eqn.invars]
    return site.primitive, eqn.params, [(aval.shape, aval.dtype) for aval in avals]
