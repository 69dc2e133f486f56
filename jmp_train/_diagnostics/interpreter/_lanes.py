"""Runs the programs of several devices side by side, operation by operation, until they meet in collectives.

Decides whose turn it is. Does not decide what a collective makes of its operands; see `_shard_map.py`.

Devices take turns, one operation each, so that operations run in the program's order whatever the device. Branches and
loops may differ from device to device; a device that reaches a collective waits for the others along its axes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._shard_map import UNCHANGING, Device, part, stack
from ._site import Site, Value


class Request(NamedTuple):
    """An operation that a program is about to run, with its operands."""

    site: Site
    inputs: list[Value]


Steps = Generator[Request, list[Value], list[Value]]
"""A program that hands out its operations, is handed the results of each, and ends with its own."""


Run = Callable[[Sequence[Site], list[Value]], list[list[Value]]]
"""Runs an operation: of a collective with the sites of all its devices; returns the results for each site."""


def finished(steps: Steps, run: Run) -> list[Value]:
    """The results of a program that runs alone."""
    reply: Any = None
    while True:
        try:
            site, inputs = steps.send(reply)
        except StopIteration as stop:
            return stop.value
        (reply,) = run([site], inputs)


def together(programs: Mapping[Device, Steps], run: Run, join: Callable[[Sequence[Value]], Any]) -> list[list[Value]]:
    """The results of every device's program, in the order of `programs`, of which the last device is the last.

    Args:
      programs: by device.
      run: runs an operation.
      join: gives what to remember of stacked operands.

    Raises:
      ValueError: devices wait in different collectives, or for one that has ended; real ones would hang.
    """
    last = list(programs)[-1]
    waiting: dict[Device, Request] = {}
    results: dict[Device, list[Value]] = {}

    def go_on(device: Device, reply: Any) -> None:
        try:
            waiting[device] = programs[device].send(reply)
        except StopIteration as stop:
            waiting.pop(device, None)
            results[device] = stop.value

    for device in programs:
        go_on(device, None)
    while waiting:
        alone = [device for device, request in waiting.items() if not request.site.crosses]
        for device in alone:
            go_on(device, _alone(waiting[device], device, last, run))
        if alone:
            continue
        group = next(filter(None, (_group(device, waiting, programs) for device in waiting)), None)
        if group is None:
            raise ValueError(_APART.format(", ".join(sorted({each.site.primitive for each in waiting.values()}))))
        columns = list(zip(*(waiting[device].inputs for device in group), strict=True))
        inputs = [Value(stack([value.array for value in column]), join(column)) for column in columns]
        replies = run([waiting[device].site for device in group], inputs)
        for device, reply in zip(group, replies, strict=True):
            go_on(device, reply)
    return [results[device] for device in programs]


_APART = (
    "the devices of a shard_map wait for each other in collectives that they do not all reach ({}), and would hang; "
    "every device must take the branches and iterations that lead to one, along all of its axes."
)


def _alone(request: Request, device: Device, last: Device, run: Run) -> list[Value]:
    site, inputs = request
    if site.primitive in UNCHANGING:
        return inputs
    if site.primitive == "axis_index":
        return [Value(np.int32(part(site.node.params["axis_name"], device, last)[0]))]
    return run([site], inputs)[0]


def _group(device: Device, waiting: Mapping[Device, Request], programs: Mapping[Device, Steps]) -> list[Device] | None:
    """The devices that a collective joins, in its order, if all of them have reached it."""
    site = waiting[device].site
    others = [(axis, at) for axis, at in device if axis not in site.crosses]
    members = [other for other in programs if all(each in other for each in others)]
    if any(other not in waiting or waiting[other].site.node.eqn is not site.node.eqn for other in members):
        return None
    return sorted(members, key=lambda other: [dict(other)[axis] for axis in site.crosses])
