"""What the backward pass reads from the forward pass, and in which dtype it was stored.

Decides which values cross from forward to backward operations of a plan. Does not decide what the compiler keeps: it
may compute more of them again than the plan already does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .._autocast._steps import Plan, Step, dtype_of
from .._sizes import static_size
from ._operations import dtype_name

# What these hand on is their operand, stored once.
_MOVES = frozenset(
    {"reshape", "broadcast_in_dim", "transpose", "squeeze", "rev", "copy", "name", "stop_gradient", "pvary"}
)


def kept_values(plan: Plan) -> Iterator[tuple[str, int | None]]:
    """The dtype and the bytes, `None` if a dimension is symbolic, of what is made forward and read backward.

    Arguments and captured arrays are not among them. A value that the plan computes again counts as what it is computed
    from, one that is only rearranged as what it was made of, and each once. Where the backward pass is inside a loop or
    a `shard_map`, one iteration (one device) counts.
    """
    producers = {number: step for step in plan.steps for number in step.node.outs}
    kept: dict[int, np.dtype[Any]] = {}
    for step in plan.steps:
        if not plan.place.is_backward(step.node):
            for body in step.bodies:
                yield from kept_values(body)
            continue
        for number, read, far in _reads(plan, step):
            origin = _origin(number, producers)
            producer = producers.get(origin)
            if producer is not None and not plan.place.is_backward(producer.node):
                dtype = _stored(plan, number, read, far)
                kept[origin] = max(kept.get(origin, dtype), dtype, key=lambda dtype: dtype.itemsize)
    for number, dtype in kept.items():
        size = static_size(getattr(plan.program.avals[number], "shape", ()))
        yield dtype_name(dtype) or "", None if size is None else size * dtype.itemsize


def _reads(plan: Plan, step: Step) -> Iterator[tuple[int, np.dtype | None, bool]]:
    """The values that a step needs, in which dtype and whether as stored: what it computes again resolved."""
    if step.unread:
        return
    pending, seen = list(zip(step.node.ins, step.reads, step.far, strict=True)), set()
    while pending:
        number, read, far = pending.pop()
        if not far or number not in plan.again:
            yield number, read, far
        elif number not in seen:
            seen.add(number)
            again = plan.again[number]
            stored = [operand in plan.roots or operand in plan.again for operand in again.node.ins]
            pending.extend(zip(again.node.ins, again.reads, stored, strict=True))


def _origin(number: int, producers: dict[int, Step]) -> int:
    while number in producers and producers[number].node.name in _MOVES:
        number = producers[number].node.ins[0]
    return number


def _stored(plan: Plan, number: int, read: np.dtype | None, far: bool) -> np.dtype:
    """The narrowest of what a value is and what it is read in: a copy in the compute dtype is what waits."""
    if read is None:
        return plan.program.avals[number].dtype
    own = dtype_of(plan.kinds[number], plan.low)
    return plan.low if far else min(read, own or read, key=lambda dtype: dtype.itemsize)
