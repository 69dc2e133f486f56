"""What becomes of each value of a program: a walk from its results back to its arguments.

Decides whether a dot consumes a value, whether any dot comes after it, whether only float32 equations read it, and
whether a rounding of it would be more than a rounding later. Does not decide dtypes; see `passes.assign_dtypes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..._jaxpr import FlatJaxpr, Node
from ..ir import Place
from ..primitives import DELICATE_OPERAND, DOTS, Entry, Rule, Trait, having
from .wide_product import WideProduct

# Rounding before these is rounding after them: every element of the result is one of an operand's, or its negative.
_EXACT = having(Trait.JOINS | Trait.BOUNDS | Trait.FLIPS)
_EXACT_OR_POOLS = _EXACT | having(Trait.POOL)
_EXPONENTIALS = having(Trait.EXPONENTIAL)
_AFFINE = having(Trait.ADDS) | {"mul"}


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


class Backward:
    """Accumulates `Flags` of every value of a program, from its results back to its arguments.

    Attributes:
      readers: how many equations read a value.
      returned: the results, and what they are moved from or the sum of.
    """

    def __init__(self, program: FlatJaxpr, out_flags: Sequence[Flags]):
        count = len(program.avals)
        self._reaches, self._to_dot = [False] * count, [False] * count
        self._used, self._not_wide, self._exact = [False] * count, [False] * count, [False] * count
        self._in_exponent, self._known = [False] * count, program.known
        self.returned, self._avals = set(program.outputs), program.avals
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
        of_weight = weights is None or number in self.returned or axes in map(Counter, weights)
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
            to_dot = node.name in _EXACT_OR_POOLS and any(out.to_dot for out in outs)
            # A dot kept in float32 is one too: what a narrow dot hands it is no weight's gradient.
            flags = Flags(reaches or node.name in DOTS, to_dot, False)
        moves = entry.rule is Rule.SHAPE or node.name == "add_any" or self._sums_ones(node)
        if moves and not self.returned.isdisjoint(node.outs):
            self.returned.update(node.ins)
        passes = entry.rule is Rule.SHAPE or node.name in _EXACT
        exact = (passes or self._measures_from_constant(node)) and any(out.exact for out in outs)
        exact = exact or entry.rule is Rule.RECORDED
        exponent = (passes or node.name in _AFFINE) and any(out.in_exponent for out in outs)
        flags = flags._replace(in_exponent=exponent or node.name in _EXPONENTIALS)
        for position, number in enumerate(node.ins):
            self.add(number, flags._replace(exact=exact or _is_delicate(node, position)))

    def _sums_ones(self, node: Node) -> bool:
        """Whether a node sums over axes of one number each, as the gradient of a broadcast bias does in the end."""
        shape = self._avals[node.ins[0]].shape if node.name == "reduce_sum" else ()
        return node.name == "reduce_sum" and all(shape[axis] == 1 for axis in node.params["axes"])

    def _measures_from_constant(self, node: Node) -> bool:
        """Whether a node is a step of `1 - x**2` and its like, which is nothing where rounding makes `x` one."""
        if node.name in ("add", "sub"):
            return not self._known.keys().isdisjoint(node.ins)
        return node.name in ("square", "integer_pow") or (node.name == "mul" and node.ins[0] == node.ins[1])


def _is_delicate(node: Node, position: int) -> bool:
    if node.name == "integer_pow":
        return node.params["y"] < 0
    return node.name == "min" or DELICATE_OPERAND.get(node.name) == position


EnterFlags = Callable[[Node, Place, list[Flags]], list[Flags]]


def backward(
    program: FlatJaxpr, entries: Sequence[Entry], place: Place, out_flags: Sequence[Flags], enter: EnterFlags
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
