"""Decisions of a plan that only its whole shows, made after the walk over its steps.

Decides which steps run in float32 because all that reads them does, and which masks are compared again instead of
stored. See `_plan.py` for the walk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._dtypes import FLOAT32
from .._jaxpr import Program
from ._flow import ROUNDS, Kind
from ._recompute import sources_of
from ._steps import Step

_COMPARISONS = frozenset("eq ne lt le gt ge is_finite".split())


def again_steps(steps: Sequence[Step], states: Sequence[Any]) -> dict[int, Step]:
    """The values that far readers compute again, and the step that does."""
    return {number: step for step in steps for number in step.node.outs if states[number].again}


def widen_what_only_wide_steps_read(
    program: Program, steps: Sequence[Step], depths: Sequence[int], states: Sequence[Any], low: np.dtype
) -> None:
    """Runs a pairwise or bounded operation in float32 where every reader reads it in float32 anyway.

    Readers are near, or compute it again.
    """
    blocked = set(program.outputs)
    for step in again_steps(steps, states).values():
        blocked.update(number for number in step.node.ins if not states[number].again)
    for step, depth in zip(reversed(steps), reversed(depths), strict=True):
        outs = step.node.outs
        narrow = step.node.name in ROUNDS and any(states[number].kind is Kind.LOW for number in outs)
        if narrow and not any(number in blocked for number in outs) and low in step.reads:
            step.reads = [None if read is None else FLOAT32 for read in step.reads]
            for number in outs:
                if states[number].kind is Kind.LOW:
                    states[number].kind = Kind.WIDE
        for number, read in zip(step.node.ins, step.reads, strict=True):
            if read != FLOAT32 or (depth > states[number].depth and not states[number].again):
                blocked.add(number)


def repeat_masks(steps: Sequence[Step], depths: Sequence[int], states: Sequence[Any]) -> None:
    """Compares again, on the far side of a dot, what is kept for that side anyway, instead of storing a mask."""
    again = again_steps(steps, states)
    makers = {
        number: step
        for step in steps
        for number in step.node.outs
        if states[number].root and step.node.name in _COMPARISONS
    }
    held = _held(steps, depths, states, again, makers)
    for number, step in makers.items():
        needed = {source for operand in step.node.ins for source in sources_of(again, operand, True)}
        if all(source in held or states[source].spread for source in needed):
            states[number].root, states[number].again = False, True


def _held(
    steps: Sequence[Step], depths: Sequence[int], states: Sequence[Any], again: Mapping[int, Step], masks: Any
) -> set[int]:
    """The values that the far side of a dot reads, other than through a mask."""
    held: set[int] = set()
    for step, depth in zip(steps, depths, strict=True):
        for number, far in zip(step.node.ins, step.far, strict=True):
            if depth > states[number].depth and number not in masks:
                held.update(sources_of(again, number, far))
    return held
