"""Which sums are updates of parameters, as a program makes that trains inside of what is differentiated.

    q = sub p (mul 0.01 g)        p: a parameter, or updated before; g: a gradient

Such loops (Finn et al., "Model-agnostic meta-learning", 2017) are mostly unrolled. A step smaller than the last bit of
16 bits would be none: the updated parameters are float32 as the others are, and narrow to what they meet.

Decides which sums these are. Does not decide about those of a `scan`, whose carries are float32 anyway.
"""

from __future__ import annotations

import collections
from typing import Any

from ..._jaxpr import Node
from ..ir import Place
from ..primitives import Entry, Rule, Trait, having
from .provenance import Provenance, Values
from .uses import axes_of

UPDATE = Entry(Rule.HIGH, "updates parameters by a gradient: steps are smaller than the last bit of 16 bits")
GRADIENT = Entry(Rule.HIGH, "sums gradients of parameters that are updated, step by step")

_STEPS = having(Trait.ELEMENTWISE | Trait.MOVES | Trait.JOINS)  # what an optimizer makes of a gradient
_MOST_STEPS = 64


class Updates:
    """Finds the updates of a whole program, and what adds up the gradients of what is updated."""

    def __init__(self):
        self._axes = set[frozenset[Any]]()  # of the parameters that are updated

    def of(self, node: Node, values: Values, place: Place) -> Entry | None:
        """The entry of a sum, if it is one of these; `values` are those before it."""
        aval = values.program.avals[node.outs[0]]
        if _is_update(node, values, place):
            self._axes.add(axes_of(aval))
            return UPDATE
        sums = bool(self._axes) and node.name == "add_any" and axes_of(aval) in self._axes
        return GRADIENT if sums else None


def _is_update(node: Node, values: Values, place: Place) -> bool:
    if place.is_backward(node):  # there the gradient of a penalty, say, is added to another
        return False
    pairs = zip(node.ins, reversed(node.ins), strict=True)
    return any(
        [values.provenances[n] is Provenance.PARAMETER and _is_gradient(other, values, place) for n, other in pairs]
    )


def _is_gradient(number: int, values: Values, place: Place) -> bool:
    """Whether a value is elementwise in what a backward pass computed."""
    pending, seen = collections.deque([number]), {number}
    while pending and len(seen) < _MOST_STEPS:
        node = values.producers.node(pending.popleft())  # the nearest first: others are of earlier steps
        if node is not None and place.is_backward(node):
            return True
        if node is not None and node.name in _STEPS:
            pending += [each for each in node.ins if each not in seen]
            seen.update(node.ins)
    return False
