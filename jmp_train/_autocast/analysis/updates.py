"""Which sums are updates of parameters, as a program makes that trains inside of what is differentiated.

    q = sub p (mul 0.01 g)        p: a parameter, or updated before; g: a gradient

Such loops (Finn et al., "Model-agnostic meta-learning", 2017) are mostly unrolled. A step smaller than the last bit of
16 bits would be none: the updated parameters are float32 as the others are, and narrow to what they meet. So is what
starts as a network's result, as the weights that a hypernetwork makes; to a product it stays an activation.

Decides which sums these are. Does not decide about those of a `scan`, whose carries are float32 anyway.
"""

from __future__ import annotations

from typing import Any

from ..._jaxpr import Node
from ..ir import Place
from ..primitives import Entry, Rule, Trait, having
from .provenance import Provenance, Values
from .uses import axes_of

UPDATE = Entry(Rule.HIGH, "updates parameters by a gradient: steps are smaller than the last bit of 16 bits")
STEP = Entry(Rule.HIGH, "a step along a gradient: steps are smaller than the last bit of 16 bits")
GRADIENT = Entry(Rule.HIGH, "sums gradients of parameters that are updated, step by step")

_STEPS = having(Trait.ELEMENTWISE | Trait.MOVES | Trait.JOINS)  # what an optimizer makes of a gradient
_MOST_STEPS = 64


class Updates:
    """Finds the updates of a whole program, and what adds up the gradients of what is updated."""

    def __init__(self):
        self._axes = set[frozenset[Any]]()  # of the parameters that are updated
        # Where a search for a gradient ends: updates, and what is known to be none. By ids of nodes, which are kept.
        self._ends = set[int]()

    def of(self, node: Node, entry: Entry, values: Values, place: Place) -> Entry | None:
        """The entry of a sum that had `entry`, if it is one of these; `values` are those before it."""
        if node.name == "add_any":  # JAX's own sum of gradients
            sums = bool(self._axes) and axes_of(values.program.avals[node.outs[0]]) in self._axes
            return GRADIENT if sums and entry.rule is Rule.WIDEST else None
        old = self._updated(node, values, place)
        if old is None:
            return None
        self._ends.add(id(node))
        if entry.rule is not Rule.WIDEST:  # a region, scope or edit says otherwise
            return None
        if values.provenances[old] is Provenance.NARROW:
            return STEP
        if values.provenances[old] is not Provenance.PARAMETER:  # data, which is float32 and widens what it meets
            return None
        self._axes.add(axes_of(values.program.avals[node.outs[0]]))
        return UPDATE

    def _updated(self, node: Node, values: Values, place: Place) -> int | None:
        """The term of a sum that the other term, which a backward pass computed, updates."""
        provenances = values.provenances
        for old, step in (node.ins, node.ins[::-1]):
            # A parameter that is a gradient is that of a penalty, and updates a parameter.
            is_bias = provenances[step] is Provenance.PARAMETER and provenances[old] is not Provenance.PARAMETER
            if provenances[old] is Provenance.SCALAR or is_bias:
                continue
            if self._is_gradient(step, values, place) and not self._is_gradient(old, values, place):
                return None if place.is_backward(node) else old  # a derivative rule computes residuals again, say
        return None

    def _is_gradient(self, number: int, values: Values, place: Place) -> bool:
        """Whether a value is elementwise in what a backward pass computed, and was not updated by it."""
        reached, seen, visited = [number], {number}, []
        for each in reached:  # grows; the nearest first, since others are of earlier steps
            if len(seen) >= _MOST_STEPS:
                return False
            node = values.program.producers.get(each)
            if node is None or id(node) in self._ends:
                continue
            if place.is_backward(node):
                return True
            visited.append(id(node))
            if node.name in _STEPS:
                reached += [each for each in node.ins if each not in seen]
                seen.update(node.ins)
        self._ends.update(visited)
        return False
