"""Decisions of a plan that only its whole shows, made after the walk over its steps.

Decides which steps run in float32 because all that reads them does. See `_plan.py` for the walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._dtypes import FLOAT32
from .._jaxpr import Program
from ._flow import ROUNDS, Kind
from ._steps import Step


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
