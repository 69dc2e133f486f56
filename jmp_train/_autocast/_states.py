"""What a value is to those who read it on the far side of a dot: stored, computed again, or neither.

Decides the `State` of each result of a step. Does not decide its kind, nor who is on the far side; see `_plan.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._jaxpr import Program
from ._dot_sizes import DotSizes
from ._flow import DOTS, Flags, Kind
from ._magnitudes import Numbers, is_huge, range_through
from ._recompute import is_costly, is_repeatable, is_short_product
from ._signs import is_positive, relu_operand
from ._steps import State, Step
from ._table import Rule


def state_of_result(
    step: Step,
    kinds: Sequence[Kind],
    program: Program,
    states: Sequence[Any],
    number: int,
    kind: Kind,
    flags: Flags,
    low: np.dtype,
) -> State:
    """What result `number` of a step is.

    Args:
      step: the step, as decided.
      kinds: what it sees of its operands.
      program: the program that it belongs to.
      states: what all values before it are, by number.
      number, kind, flags: of the result.
      low: the compute dtype.
    """
    sources = [states[operand] for operand in step.node.ins]
    moves = step.entry.rule is Rule.SHAPE
    state = State(
        Kind.WIDE if kind is Kind.HUGE else kind,
        computed=not moves or any(s.computed for s in sources),
        parameter=moves and any(s.parameter for s in sources),
        numbers=_numbers_of(step, sources, kind, low),
    )
    if kind is Kind.FIXED:
        # A comparison of floats: one byte, where its operands would be kept, unless those are.
        is_mask = program.avals[number].dtype == np.bool_ and any(k is not Kind.FIXED for k in kinds)
        state.again = is_mask and is_positive(step.node, program) and sources[0].relu
        state.root = is_mask and not state.again
    elif kind is Kind.LOW:
        dot = step.entry.rule is Rule.LOW and step.node.name in DOTS
        mean = step.node.name == "div" and step.casts == [low]
        state.raw = dot or mean or (moves and any(s.raw for s in sources))
        state.origin = None if state.raw or flags.to_dot else _common_origin(step, sources)
        state.again = state.origin is not None or (_joins_stored(step, sources) and not flags.to_dot)
        # What a compiler would rather store than compute twice it would store in float32, its rounding dropped.
        stored = state.raw or (is_costly(step) and not flags.to_dot) or any(s.raw for s in sources)
        state.root = stored and not state.again
        state.origin = number if state.root else state.origin
    elif state.kind is Kind.WIDE and state.computed:
        delicate = flags.exact or flags.in_exponent or state.numbers.exceed(low)
        state.kept = state.root = flags.to_dot and not delicate
        state.again = not state.kept and (
            is_exactly_repeatable(step, states)
            or _is_expanding(step, program)
            or (not delicate and _is_distance(step, program, sources))
        )
        state.costly = is_costly(step) or any(s.again and s.costly for s in sources)
    state.relu = flags.to_dot and (state.kept or kind is Kind.LOW) and relu_operand(step.node, program) is not None
    return state


def _numbers_of(step: Step, sources: Sequence[Any], kind: Kind, low: np.dtype) -> Numbers:
    floats = [s.numbers for s in sources if s.kind is not Kind.FIXED]
    made_huge = kind is not Kind.FIXED and is_huge(step.node, floats, low)
    summed = step.node.name == "reduce_window_sum" and sources[0].kind is Kind.LOW
    terms = math.prod(step.node.params["window_dimensions"]) if summed else None
    return Numbers(range_through(step.node, [each.range for each in floats]), made_huge or kind is Kind.HUGE, terms)


def kept_wide(state: State) -> State:
    """A state for rules that keep float32 values for the backward pass as they are: only narrow values are stored."""
    narrow = state.kind is Kind.LOW
    root = narrow and (state.root or state.again)
    return dataclasses.replace(state, kept=False, again=False, costly=False, root=root, relu=False)


def is_exactly_repeatable(step: Step, states: Sequence[Any]) -> bool:
    """Whether a step is elementwise, and far readers see the very values that it saw, some of them stored."""
    sources = [states[number] for number in step.node.ins]
    exact = any(s.root or s.again for s in sources) and not any(s.kept for s in sources)
    return exact and is_repeatable(step)


def _is_expanding(step: Step, program: Program) -> bool:
    """Whether a step is a short product that makes more numbers than it reads: reading those again moves less."""
    sizes = DotSizes.of(program, step.node) if is_short_product(step) else None
    return sizes is not None and sizes.result > max(sizes.operands)


def _is_distance(step: Step, program: Program, sources: Sequence[State]) -> bool:
    """Whether a step adds a stored value and a literal, as the derivative `(1 + y) * (1 - y)` of a `tanh` does."""
    kept = [number for number, state in zip(step.node.ins, sources, strict=True) if state.kept]
    others = [number for number in step.node.ins if number not in kept]
    return step.node.name in ("add", "sub") and len(kept) == 1 and all(n in program.known for n in others)


def _joins_stored(step: Step, sources: Sequence[State]) -> bool:
    """Whether a step joins values that far readers find stored: joined, they are as large as they are apart."""
    return step.node.name == "concatenate" and all(state.root or state.again for state in sources)


def _common_origin(step: Step, sources: Sequence[State]) -> int | None:
    """The one stored value that a step in the compute dtype is elementwise in, literals aside, if it is one.

    The result is no larger and need not be stored beside that: the derivative `2 * x` of a square, the sigmoid of a
    SiLU and its derivative, the error function of a GELU.
    """
    found = {state.origin for state in sources if state.kind is not Kind.SOFT or state.parameter}
    return found.pop() if len(found) == 1 and is_repeatable(step) else None
