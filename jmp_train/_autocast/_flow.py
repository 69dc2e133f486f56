"""What a value is and where it goes: the two facts that every dtype decision rests on.

Decides the static rule of each node (region over scope over edit over table) and, walking backwards, what becomes of
each value: whether a dot consumes it, whether any dot comes after it, whether only float32 operations read it. Does not
decide dtypes; see `_plan.py`.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from .._jaxpr import FULL_PRECISION_MARK, Node, Program, is_backward, is_recomputed, region_mark, scope_of
from ._lineage import Lineage
from ._magnitudes import range_of
from ._pooling import windows_are_small
from ._rules import Rules
from ._table import Entry, Rule
from ._wide_product import WideProduct

# Rounding before these is rounding after them: they pass values on, some of them, or their negatives.
_EXACT = frozenset("max min neg abs select_n clamp concatenate pad stack dynamic_update_slice scatter".split())
# The operands of which a rounding to zero, to one or to infinity is no small change.
_DELICATE = {
    **dict.fromkeys("log log2 log1p sqrt rsqrt cbrt reciprocal pow digamma lgamma".split(), 0),
    **dict.fromkeys("erf_inv asin acos atanh acosh".split(), 0),
    **dict.fromkeys(("div", "rem", "clamp"), 1),
}
_EXPONENTIALS = frozenset("exp exp2 expm1 sinh cosh".split())
_AFFINE = frozenset("add sub add_any mul".split())
# What follows its operands and yet rounds: worth running in float32 where that costs nothing.
ROUNDS = frozenset("add sub add_any mul div rem atan2 tanh logistic erf erfc".split())
POOLS = frozenset({"reduce_window_max", "reduce_window_min"})
DOTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})


class Kind(enum.Enum):
    """What autocast knows of a value recorded in float32."""

    LOW = "low"  # is in the compute dtype
    SOFT = "soft"  # float32, but a parameter or a small literal: narrows to what it meets
    WIDE = "wide"  # float32, and widens what it meets: data, and what a HIGH operation computed
    HUGE = "huge"  # WIDE, at the boundary of a body: and some of its numbers are infinite in the compute dtype
    FIXED = "fixed"  # not recorded in float32: never touched


def joined(kinds: Sequence[Kind]) -> Kind:
    """What a value is that may be any one of several, such as the result of a branch."""
    return next((kind for kind in (Kind.FIXED, Kind.HUGE, Kind.WIDE, Kind.LOW) if kind in kinds), Kind.SOFT)


class Flags(NamedTuple):
    """What becomes of a value.

    Attributes:
      reaches_dot: some dot depends on it.
      to_dot: a dot consumes it, directly or through operations that pass values on as they are.
      only_wide: only operations that run in float32 consume it.
      exact: what is finite for it may not be for its copy in the compute dtype: something divides by it, takes its
        logarithm, or bounds it first, or does so to its distance from a constant.
      in_exponent: an exponential is computed from it, or from sums and products of it: the absolute error of its copy
        would be a relative one there, and what was normalised with the value itself no longer sums to one.
    """

    reaches_dot: bool = False
    to_dot: bool = False
    only_wide: bool = False
    exact: bool = False
    in_exponent: bool = False


class Place(NamedTuple):
    """Where a sub-program stands: the scope path of its call, whether that is marked `low_precision`, and whether it
    belongs to a backward pass, which the name stacks inside a body do not say."""

    scope: str = ""
    low_region: bool = False
    backward: bool = False

    def scope_of(self, node: Node) -> str:
        return "/".join(filter(None, (self.scope, scope_of(node))))

    def is_backward(self, node: Node) -> bool:
        return is_backward(node) or (self.backward and not is_recomputed(node))

    def inside(self, node: Node) -> Place:
        return Place(self.scope_of(node), self.low_region or node.low_region, self.is_backward(node))


TOP = Place()


def is_float32(aval: Any) -> bool:
    return getattr(aval, "dtype", None) == FLOAT32


def is_sixteen_bit(aval: Any) -> bool:
    return getattr(aval, "dtype", None) in (FLOAT16, BFLOAT16)


def kind_of_known(value: Any, aval: Any, low: np.dtype) -> Kind:
    """Literals and captured scalars that `low` can hold are SOFT, other float32 values of the program are WIDE."""
    if not is_float32(aval):
        return Kind.FIXED
    values = range_of(value)
    return Kind.SOFT if values is not None and values.fits(low) else Kind.WIDE


def entries_of(program: Program, rules: Rules, place: Place) -> list[Entry]:
    """The rule of every node, with its reason."""
    lineage = Lineage(program)
    return [_entry(program, node, rules, place, lineage) for node in program.nodes]


def _of_tree(lineage: Lineage, node: Node, entry: Entry) -> Entry:
    """The entry of an addition of two parts of one value, as cumulative sums that are written as trees consist of."""
    if entry.rule is not Rule.WIDEST or node.ins[0] == node.ins[1]:
        return entry
    left, right = map(lineage.whole, node.ins)
    of_one = left is not None and left == right and not lineage.are_disjoint(*node.ins)
    return Entry(Rule.HIGH, "adds parts of one value, as a sum written as a tree does") if of_one else entry


def _entry(program: Program, node: Node, rules: Rules, place: Place, lineage: Lineage) -> Entry:
    entry = rules.entry(node.name)
    if region_mark(node.eqn) == FULL_PRECISION_MARK:
        return Entry(Rule.RECORDED, "full_precision region")
    scoped = rules.scope_dtype(place.scope_of(node)) if rules.scopes else None
    low_region = place.low_region or node.low_region
    if scoped == FLOAT32 and not low_region and entry.rule is not Rule.ENTER:  # a narrower scope may be inside
        return Entry(Rule.RECORDED, "with_scopes: float32")
    if entry.rule in (Rule.ENTER, Rule.RECORDED):
        return _recorded(program, node, entry)
    avals = [program.avals[i] for i in node.ins]
    if not any(map(is_float32, avals)):
        if entry.never_low and any(map(is_sixteen_bit, avals)):
            return entry
        return Entry(Rule.RECORDED, "not recorded in float32")
    if node.name in DOTS and FLOAT64 in {aval.dtype for aval in (*avals, program.avals[node.outs[0]])}:
        return Entry(Rule.RECORDED, "it reads or makes float64")
    if low_region or scoped is not None:
        reason = "low_precision region" if low_region else "with_scopes"
        return entry if entry.never_low else Entry(Rule.LOW, reason)
    return _refine(node, entry, lineage)


def _recorded(program: Program, node: Node, entry: Entry) -> Entry:
    if node.name == "convert_element_type" and is_float32(program.avals[node.ins[0]]):
        if is_float32(program.avals[node.outs[0]]):
            return Entry(Rule.SHAPE, "no change of dtype")
    return entry


def _refine(node: Node, entry: Entry, lineage: Lineage) -> Entry:
    if node.name in ("add", "add_any"):
        return _of_tree(lineage, node, entry)
    if node.name == "mul" and node.ins[0] == node.ins[1] and entry.rule is Rule.WIDEST:
        return Entry(Rule.HIGH, "a square: float16 overflows at 256 squared")
    if node.name == "mul" and node.params.get("out_dtype") is not None:
        return Entry(Rule.RECORDED, "the user asked for this dtype")
    if node.name == "select_and_scatter_add" and entry.rule is Rule.HIGH and windows_are_small(node):
        return Entry(Rule.WIDEST, "a selection in each window, summed in float32")
    return entry


class Backward:
    """Accumulates `Flags` of every value of a program, from its results back to its arguments."""

    def __init__(self, program: Program, out_flags: Sequence[Flags]):
        count = len(program.avals)
        self._reaches, self._to_dot = [False] * count, [False] * count
        self._used, self._not_wide, self._exact = [False] * count, [False] * count, [False] * count
        self._in_exponent, self._known = [False] * count, program.known
        self._handed_out, self._avals = set(program.outputs), program.avals
        self.readers = [0] * count
        for number, flags in zip(program.outputs, out_flags, strict=True):
            self.add(number, flags)

    def add(self, number: int, flags: Flags) -> None:
        self._reaches[number] |= flags.reaches_dot
        self._to_dot[number] |= flags.to_dot
        self._used[number] = True
        self.readers[number] += 1
        self._not_wide[number] |= not flags.only_wide
        self._exact[number] |= flags.exact
        self._in_exponent[number] |= flags.in_exponent

    def __getitem__(self, number: int) -> Flags:
        only_wide = self._used[number] and not self._not_wide[number]
        reaches, to_dot = self._reaches[number], self._to_dot[number]
        return Flags(reaches, to_dot, only_wide, self._exact[number], self._in_exponent[number])

    def is_for_one_dot(self, number: int) -> bool:
        return self._to_dot[number] and self.readers[number] == 1

    def ends_at(self, number: int, weights: Sequence[tuple[int, ...]] | None) -> bool:
        """Whether a backward product is the last on its way, as a weight's gradient is, and no other dot rounds it.

        A product with a parameter is the gradient of an activation, on its way to a norm, a bias or an embedding,
        unless the program returns it (rearranged or summed with others, if need be), or it has the shape of one of the
        `weights`: of one that is multiplied by another first, as in low-rank adaptation. `None`: no such product.
        """
        axes = Counter(self._avals[number].shape)  # in any order; symbolic dimensions cannot be sorted
        of_weight = weights is None or number in self._handed_out or axes in map(Counter, weights)
        return not self._reaches[number] and of_weight

    def step(self, node: Node, entry: Entry) -> None:
        """Passes the flags of a node's results on to its operands, for every rule but ENTER."""
        outs = [self[number] for number in node.outs]
        reaches = any(out.reaches_dot for out in outs)
        if entry.rule is Rule.LOW:
            flags = Flags(True, True, False)
        elif entry.rule is Rule.HIGH:
            flags = Flags(reaches, False, True)
        elif entry.rule is Rule.SHAPE:
            flags = Flags(reaches, any(out.to_dot for out in outs), all(out.only_wide for out in outs))
        elif entry.rule is Rule.WIDEST:
            to_dot = node.name in _EXACT and any(out.to_dot for out in outs)
            flags = Flags(reaches, to_dot, all(out.only_wide for out in outs))
        elif isinstance(entry, WideProduct):
            flags = Flags(True, False, True)
        else:
            to_dot = node.name in _EXACT | POOLS and any(out.to_dot for out in outs)
            # A dot kept in float32 is one too: what a narrow dot hands it is no weight's gradient.
            flags = Flags(reaches or node.name in DOTS, to_dot, False)
        if (entry.rule is Rule.SHAPE or node.name == "add_any") and not self._handed_out.isdisjoint(node.outs):
            self._handed_out.update(node.ins)
        passes = entry.rule is Rule.SHAPE or node.name in _EXACT
        exact = (passes or self._measures_from_constant(node)) and any(out.exact for out in outs)
        exact = exact or entry.rule is Rule.RECORDED
        exponent = (passes or node.name in _AFFINE) and any(out.in_exponent for out in outs)
        flags = flags._replace(in_exponent=exponent or node.name in _EXPONENTIALS)
        for position, number in enumerate(node.ins):
            self.add(number, flags._replace(exact=exact or _is_delicate(node, position)))

    def _measures_from_constant(self, node: Node) -> bool:
        """Whether a node is a step of `1 - x**2` and its like, which is nothing where rounding makes `x` one."""
        if node.name in ("add", "sub"):
            return not self._known.keys().isdisjoint(node.ins)
        return node.name in ("square", "integer_pow") or (node.name == "mul" and node.ins[0] == node.ins[1])


def _is_delicate(node: Node, position: int) -> bool:
    if node.name == "integer_pow":
        return node.params["y"] < 0
    return node.name == "min" or _DELICATE.get(node.name) == position


EnterFlags = Callable[[Node, Place, list[Flags]], list[Flags]]


def backward(
    program: Program, entries: Sequence[Entry], place: Place, out_flags: Sequence[Flags], enter: EnterFlags
) -> Backward:
    """Runs the backward walk; `enter(node, place, out_flags)` gives the flags of the operands of a node with a body."""
    flow = Backward(program, out_flags)
    for node, entry in zip(reversed(program.nodes), reversed(entries), strict=True):
        if entry.rule is Rule.ENTER:
            for number, flags in zip(node.ins, enter(node, place, [flow[o] for o in node.outs]), strict=True):
                flow.add(number, flags)
        else:
            flow.step(node, entry)
    return flow
