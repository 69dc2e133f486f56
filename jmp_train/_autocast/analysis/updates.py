"""Which sums are updates of parameters, as a program makes that trains inside of what is differentiated.

    q = sub p (mul 0.01 g)        p: a parameter, or updated before; g: a gradient

Such loops (Finn et al., "Model-agnostic meta-learning", 2017) are mostly unrolled. A step smaller than the last bit of
16 bits would be none: the updated parameters are float32 as the others are, and narrow to what they meet.

Decides which sums these are. Does not decide about those of a `scan`, whose carries are float32 anyway.
"""

from __future__ import annotations

import collections

from ..._jaxpr import Node
from ..ir import Place
from ..primitives import Entry, Rule, Trait, having
from .provenance import Provenance, Values

UPDATE = Entry(Rule.HIGH, "updates parameters by a gradient: steps are smaller than the last bit of 16 bits")
GRADIENT = Entry(Rule.HIGH, "sums gradients of parameters that are updated, step by step")

_STEPS = having(Trait.ELEMENTWISE | Trait.MOVES | Trait.JOINS)  # what an optimizer makes of a gradient
_MOST_STEPS = 64


def is_update(node: Node, values: Values, place: Place) -> bool:
    """Whether a sum is one of a parameter and what a backward pass computed; `values` are those before it."""
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
