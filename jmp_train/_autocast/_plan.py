"""The dtype of every operation of a program, decided with the whole program in view.

Decides what each operand is read in, what each result is stored in and where a cast stands. Does not run anything; see
`_autocast.py`. Programs inside operations (loops, branches, rematerialisation) are planned by `_control_flow.py`.

One forward walk over the nodes carries a `State` per value. Two things make it more than a table look-up:

* A value that a dot will consume is rounded for that dot anyway. Where such a value was computed in float32 and is read
  again on the far side of a dot (a residual connection, the backward pass), the rounded copy is read: nothing needs to
  keep the wide one. Operations on the near side read the float32 value, which costs nothing since they fuse.
* A pairwise operation whose every reader is a float32 operation of the same stretch runs in float32 too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .._dtypes import FLOAT32
from .._jaxpr import ClosedJaxpr, Jaxpr, Node, Program, flatten
from .._policy import Policy
from . import _control_flow
from ._accumulators import widened
from ._dot_sizes import asks_for_float32, leaves_small_result
from ._flow import (
    DOTS,
    ROUNDS,
    TOP,
    Backward,
    Flags,
    Kind,
    Place,
    backward,
    entries_of,
    is_float32,
    is_sixteen_bit,
    kind_of_known,
)
from ._magnitudes import Numbers, divides_by_terms, filled_with, range_of
from ._pooling import scatter_to_windows
from ._products import Products
from ._recompute import mark_unread, operands_to_read_again, roots_of_exponents, squared_operands
from ._residuals import stack_less
from ._revised import again_steps, widen_what_only_wide_steps_read
from ._rules import Rules
from ._selection import add_one_per_row, adds_one_per_row
from ._short_products import multiply_and_add
from ._signs import masked_by_results
from ._states import kept_wide, state_of_result
from ._steps import Plan, State, Step, dtype_of
from ._streams import Wait, Waits
from ._table import Entry, Rule
from ._transposes import fold_transposes
from ._wide_product import Cause, WideProduct


class Planner:
    """Plans programs under one policy and one set of rules; remembers what it derived from each jaxpr."""

    def __init__(self, policy: Policy, rules: Rules):
        self.policy, self.rules = policy, rules
        self.low, self.reduce = policy.compute_dtype, policy.reduce_dtype
        self._programs: dict[tuple[int, Place], tuple[Any, Program, list[Entry]]] = {}
        self._flows: dict[tuple, Backward] = {}
        self.wide: set[int] = set()  # the ids of equations that are products kept in float32

    def program(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place) -> tuple[Program, list[Entry]]:
        key = (id(jaxpr), place)
        if key not in self._programs:
            program = masked_by_results(flatten(jaxpr, replaced=widened))
            self._programs[key] = (jaxpr, program, entries_of(program, self.rules, place))
        return self._programs[key][1:]

    def plan_whole(
        self, jaxpr: ClosedJaxpr | Jaxpr, kinds: Sequence[Kind], out_flags: Sequence[Flags], place: Place = TOP
    ) -> Plan:
        """Plans a program that is inside no other; arguments and result as of `plan`."""
        Products(self).find(jaxpr, kinds, place)
        return self.plan(jaxpr, kinds, out_flags, place)

    def flow(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place, out_flags: Sequence[Flags]) -> Backward:
        key = (id(jaxpr), place, tuple(out_flags))
        if key not in self._flows:
            program, entries = self.program(jaxpr, place)

            def enter(node: Node, at: Place, outs: list[Flags]) -> list[Flags]:
                return _control_flow.flags(self, node, at.inside(node), outs)

            self._flows[key] = backward(program, entries, place, out_flags, enter)
        return self._flows[key]

    def in_flags(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place, out_flags: Sequence[Flags]) -> list[Flags]:
        flow = self.flow(jaxpr, place, out_flags)
        return [flow[number] for number in self.program(jaxpr, place)[0].inputs]

    def plan(
        self,
        jaxpr: ClosedJaxpr | Jaxpr,
        kinds: Sequence[Kind],
        out_flags: Sequence[Flags],
        place: Place = TOP,
        roundable: Sequence[int] = (),
    ) -> Plan:
        """Plans a program.

        Args:
          jaxpr: the program.
          kinds: what its arguments are.
          out_flags: what becomes of its results.
          place: where it stands.
          roundable: positions of arguments that a loop computed, so that a copy handed out may be rounded.
        """
        program, entries = self.program(jaxpr, place)
        walk = _Walk(self, program, place, self.flow(jaxpr, place, out_flags), kinds)
        for node, entry in zip(program.nodes, entries, strict=True):
            walk.step(node, entry)
        widen_what_only_wide_steps_read(program, walk.steps, walk.depths, walk.states, self.low)
        fold_transposes(program, walk.steps)
        carried = {program.inputs[position] for position in roundable if self.rules.low_residuals}
        results = zip(program.outputs, out_flags, strict=True)
        out_kinds = [walk.out_kind(number, flags, number in carried) for number, flags in results]
        in_dtypes = [dtype_of(kind, self.low) for kind in kinds]
        roots = frozenset(number for number, state in enumerate(walk.states) if state.root)
        made, again = [state.kind for state in walk.states], again_steps(walk.steps, walk.states)
        plan = Plan(program, place, walk.steps, in_dtypes, out_kinds, self.low, made, roots, again)
        plan.barred = operands_to_read_again(again, roots)
        plan.squared = squared_operands(plan)
        plan.rounded = roots_of_exponents(plan) | plan.squared
        plan = stack_less(plan) if self.rules.low_residuals else plan
        mark_unread(plan)
        return plan


class _Walk:
    """The forward walk over one program."""

    def __init__(self, planner: Planner, program: Program, place: Place, flow: Backward, kinds: Sequence[Kind]):
        self.planner, self.program, self.place, self.flow = planner, program, place, flow
        self.low = planner.low
        self.waits = Waits(program, place, planner.wide)
        self.steps: list[Step] = []
        self.depths: list[int] = []
        self.forward_depth = 0
        self.states: list[Any] = [None] * len(program.avals)
        for number, kind in zip(program.inputs, kinds, strict=True):
            numbers = Numbers(huge=kind is Kind.HUGE)
            kind = Kind.WIDE if kind is Kind.HUGE else kind
            self.states[number] = State(kind, parameter=kind is Kind.SOFT, numbers=numbers)
        self.weights = [program.avals[number].shape for number in program.inputs if self.states[number].parameter]
        for number, value in program.known.items():
            kind = kind_of_known(value, program.avals[number], self.low)
            self.states[number] = State(kind, numbers=Numbers(None if kind is Kind.FIXED else range_of(value)))

    def seen(self, number: int, depth: int, wait: Wait) -> Kind:
        """What a reader at `depth` sees of a value."""
        state = self.states[number]
        narrow = state.kept and wait is not Wait.CARRIED and (wait is Wait.STORED or depth > state.depth)
        return Kind.LOW if narrow or wait is Wait.NARROW else state.kind

    def across(self, number: int, kind: Kind) -> Kind:
        """What a value of some kind is on the other side of a body's boundary."""
        return Kind.HUGE if kind is Kind.WIDE and self.states[number].numbers.exceed(self.low) else kind

    def step(self, node: Node, entry: Entry) -> None:
        depth = max((self.states[number].depth for number in node.ins), default=0)
        if self.place.is_backward(node):
            depth = max(depth, self.forward_depth)
        waits = self.waits.of(node, entry, self.states)
        kinds = [self.seen(number, depth, wait) for number, wait in zip(node.ins, waits, strict=True)]
        if entry.rule is Rule.ENTER:
            kinds = [self.across(number, kind) for number, kind in zip(node.ins, kinds, strict=True)]
            step, out_kinds, has_dot = _control_flow.enter(self.planner, node, entry, self.place, kinds, self.flow)
        else:
            step, out_kinds = self._DECIDE[entry.rule](self, node, entry, kinds)
            has_dot = step.entry.rule is Rule.LOW and node.name in DOTS
        states = [self.states[number] for number in node.ins]
        step.far = step.far or [
            self._far(*read, depth) for read in zip(node.ins, states, step.reads, waits, strict=True)
        ]
        made = [self._made(step, kinds, number, kind) for number, kind in zip(node.outs, out_kinds, strict=True)]
        for number, state in zip(node.outs, made, strict=True):
            state.depth = depth + has_dot
            self.states[number] = state
        self.steps.append(step)
        self.depths.append(depth)
        if not self.place.is_backward(node):
            self.forward_depth = max(self.forward_depth, depth + has_dot)

    def _made(self, step: Step, kinds: Sequence[Kind], number: int, kind: Kind) -> State:
        """What a result of a step is, for its readers."""
        state = state_of_result(step, kinds, self.program, self.states, number, kind, self.flow[number], self.low)
        values = state.numbers.range
        if state.kind is Kind.SOFT and values is not None and not values.fits(self.low):
            state.kind = Kind.WIDE
        return state if self.planner.rules.low_residuals else kept_wide(state)

    def _far(self, number: int, state: State, read: np.dtype | None, wait: Wait, depth: int) -> bool:
        """Whether an operand is read as stored or computed again; kernels of their own do so even near."""
        if (state.kept and wait is Wait.CARRIED) or not (state.root or (state.again and read is not None)):
            return False
        shared = state.kept or (state.costly and self.flow.readers[number] > 1)
        return depth > state.depth or (shared and read is not None and wait is not Wait.FUSED)

    def _recorded_kind(self, number: int) -> Kind:
        return Kind.WIDE if is_float32(self.program.avals[number]) else Kind.FIXED

    def _wide_product(self, node: Node, entry: WideProduct, kinds: list[Kind]) -> tuple[Step, list[Kind]]:
        wide = [self._recorded_kind(node.outs[0])]
        if entry.cause is Cause.SQUARE and not entry.of_derivative and all(kind is Kind.LOW for kind in kinds):
            # Products of 16-bit numbers are exact in float32. They are read as stored: a compiler that computes
            # the product in float32 would drop the rounding that other readers see.
            params = {"preferred_element_type": FLOAT32}
            return Step(node, entry, [self.low, self.low], far=[True, True], params=params), wide
        run = functools.partial(multiply_and_add, node) if entry.as_sums else None
        unset = node.params["precision"] is None
        params = {"precision": (lax.Precision.HIGHEST,) * 2} if unset else {}  # float32, where a GPU would use TF32
        reads = [None if kind is Kind.FIXED else FLOAT32 for kind in kinds]
        return Step(node, entry, reads, params=params, run=run), wide

    def _recorded(self, node: Node, entry: Entry, kinds: list[Kind]) -> tuple[Step, list[Kind]]:
        if isinstance(entry, WideProduct):
            return self._wide_product(node, entry, kinds)
        reads: list[np.dtype | None] = [None if kind is Kind.FIXED else FLOAT32 for kind in kinds]
        outs = [self._recorded_kind(number) for number in node.outs]
        if node.name == "convert_element_type" and kinds[0] is Kind.LOW and node.params["new_dtype"] == self.low:
            reads = [self.low]  # the user asks for what the value already is
        if node.name == "convert_element_type" and node.ins[0] in self.program.known:  # as jnp.pad's zero is
            outs = [kind_of_known(self.program.known[node.ins[0]], self.program.avals[node.outs[0]], self.low)]
        elif node.name == "convert_element_type" and self.program.avals[node.ins[0]].dtype == np.bool_:
            outs = [Kind.SOFT if kind is Kind.WIDE else kind for kind in outs]  # zeros and ones fit anywhere
        return Step(node, entry, reads), outs

    def _high(self, node: Node, entry: Entry, kinds: list[Kind]) -> tuple[Step, list[Kind]]:
        avals = [self.program.avals[number] for number in node.ins]
        reads = [FLOAT32 if is_float32(aval) or is_sixteen_bit(aval) else None for aval in avals]
        out_avals = [self.program.avals[number] for number in node.outs]
        casts = [aval.dtype if is_sixteen_bit(aval) else None for aval in out_avals]
        one = node.name == "scatter-add" and adds_one_per_row(node, avals)
        run = functools.partial(add_one_per_row, node) if one else None
        return Step(node, entry, reads, casts=casts, run=run), [self._recorded_kind(n) for n in node.outs]

    def _follow(self, node: Node, entry: Entry, kinds: list[Kind]) -> tuple[Step, list[Kind]]:
        floating = [kind for kind in kinds if kind is not Kind.FIXED]
        if len(floating) > 1 and len(node.outs) != len(node.ins):
            return self._widest(node, entry, kinds)  # an edit: its operands still need one dtype
        if node.name == "rev" and kinds == [Kind.SOFT] and self.flow.is_for_one_dot(node.outs[0]):
            return self._pairwise(node, entry, kinds, Kind.LOW)  # a cast after it would hide cuDNN's data gradient
        fill = filled_with(node)
        if fill is not None and kinds[0] is not Kind.FIXED and not fill.fits(self.low):
            high = Entry(Rule.HIGH, f"{self.low.name} cannot hold its fill_value")
            return self._pairwise(node, high, kinds, Kind.WIDE)
        if node.name in ROUNDS and self.flow[node.outs[0]].exact:
            return self._pairwise(node, entry, kinds, Kind.WIDE)
        first = next(iter(floating), Kind.FIXED)
        sources = kinds if len(node.outs) == len(node.ins) else [first] * len(node.outs)
        outs = [
            kind if is_float32(self.program.avals[number]) else Kind.FIXED
            for number, kind in zip(node.outs, sources, strict=True)
        ]
        return Step(node, entry, [dtype_of(kind, self.low) for kind in kinds]), outs

    def _widest(self, node: Node, entry: Entry, kinds: list[Kind]) -> tuple[Step, list[Kind]]:
        only_wide = node.name in ROUNDS and all(self.flow[number].only_wide for number in node.outs)
        if node.name == "div" and not only_wide and self._is_mean_to_keep(node):
            entry = Entry(entry.rule, "a mean of 16-bit values, which fits where they do")
            return Step(node, entry, [FLOAT32, FLOAT32], casts=[self.low]), [Kind.LOW]
        narrow = Kind.LOW if Kind.LOW in kinds else Kind.SOFT
        kind = Kind.WIDE if only_wide or Kind.WIDE in kinds else narrow
        return self._pairwise(node, entry, kinds, kind)

    def _is_mean_to_keep(self, node: Node) -> bool:
        flags, asked_for = self.flow[node.outs[0]], node.outs[0] in self.program.outputs
        mean = divides_by_terms(*(self.states[number].numbers for number in node.ins))
        return mean and not (asked_for or flags.exact or flags.in_exponent)

    def _pairwise(self, node: Node, entry: Entry, kinds: list[Kind], kind: Kind) -> tuple[Step, list[Kind]]:
        reads = [None if k is Kind.FIXED else dtype_of(kind, self.low) for k in kinds]
        outs = [kind if is_float32(self.program.avals[number]) else Kind.FIXED for number in node.outs]
        run = functools.partial(scatter_to_windows, node) if node.name == "select_and_scatter_add" else None
        return Step(node, entry, reads, run=run), outs

    def _low(self, node: Node, entry: Entry, kinds: list[Kind]) -> tuple[Step, list[Kind]]:
        if node.name not in DOTS:
            return self._pairwise(node, entry, kinds, Kind.LOW)
        if any(self.states[number].numbers.exceed(self.low) for number in node.ins):
            return self._recorded(
                node, Entry(Rule.RECORDED, f"some of its numbers are infinite in {self.low.name}"), kinds
            )
        avals = [self.program.avals[number] for number in node.ins]
        low = next((aval.dtype for aval in avals if is_sixteen_bit(aval)), self.low)
        reads = [None if kind is Kind.FIXED else low for kind in kinds]
        if not is_float32(self.program.avals[node.outs[0]]):
            return Step(node, entry, reads), [Kind.FIXED]
        gradient = node.name != "conv_general_dilated" and self.place.is_backward(node)
        weights = self.weights if any(self.states[number].parameter for number in node.ins) else None
        leaves = self.planner.reduce if gradient and self.flow.ends_at(node.outs[0], weights) else low
        are_parameters = [self.states[number].parameter for number in node.ins]
        if not self.place.is_backward(node) and leaves_small_result(self.program, node, are_parameters):
            entry, leaves = Entry(entry.rule, f"{entry.reason}; its small result stays in float32"), FLOAT32
        params: dict[str, Any] = {"preferred_element_type": leaves}
        if asks_for_float32(node.params.get("precision"), None):
            params["precision"] = None  # of 16-bit operands there is one precision; compilers widen them for another
        if leaves == self.low:
            return Step(node, entry, reads, params=params), [Kind.LOW]
        return Step(node, entry, reads, params=params, casts=[FLOAT32]), [Kind.WIDE]

    def _collective(self, node: Node, entry: Entry, kinds: list[Kind]) -> tuple[Step, list[Kind]]:
        avals, wire = self.program.avals, self.planner.reduce if self.place.is_backward(node) else FLOAT32
        reads = [wire if is_float32(avals[n]) or is_sixteen_bit(avals[n]) else None for n in node.ins]
        casts = [avals[number].dtype for number in node.outs]
        return Step(node, entry, reads, casts=casts), [self._recorded_kind(number) for number in node.outs]

    _DECIDE = {  # noqa: RUF012
        Rule.LOW: _low,
        Rule.HIGH: _high,
        Rule.FOLLOW: _follow,
        Rule.SHAPE: _follow,
        Rule.WIDEST: _widest,
        Rule.COLLECTIVE: _collective,
        Rule.RECORDED: _recorded,
    }

    def out_kind(self, number: int, flags: Flags, carried: bool) -> Kind:
        """What a result is for those who read it outside: rounded, if a dot out there consumes it."""
        state = self.states[number]
        delicate = flags.exact or flags.in_exponent
        kind = self.across(number, state.kind)
        rounded = flags.to_dot and not delicate and kind is Kind.WIDE and (state.kept or carried)
        return Kind.LOW if rounded else kind
