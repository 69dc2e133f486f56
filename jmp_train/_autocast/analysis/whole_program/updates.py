"""Which sums are updates of parameters, in a program that trains inside of the differentiated function.

    q = sub p (mul 0.01 g)        p: a parameter, or updated before; g: a gradient

Such loops (Finn et al., "Model-agnostic meta-learning", 2017) are mostly unrolled. In 16 bits a step smaller than the
last bit would be lost: updated parameters are float32 like the others, and narrow beside 16-bit operands. The same
holds for updated values that start as a network's result, such as the weights that a hypernetwork computes; to a
product they stay activations.

The step of a parameter may be a gradient that products, solvers or loops changed, as in Muon, in Shampoo, with natural
gradients or with learned matrices (Park and Oliva, "Meta-curvature", 2019): then a gradient of the parameter's shape is
among the values from which the step was computed.

Decides which sums these are. Does not decide about those of a `scan`, whose carries are float32 anyway.
"""

import collections
from typing import Any

from ...._jaxpr import Node
from ...ir import Place
from ...primitives import ELEMENT_BY_ELEMENT, Entry, Rule
from ..uses import axes_of
from .provenance import Provenance, Values

UPDATE = Entry(Rule.HIGH, "updates parameters by a gradient: steps are smaller than the last bit of 16 bits")
STEP = Entry(Rule.HIGH, "a step along a gradient: steps are smaller than the last bit of 16 bits")
GRADIENT = Entry(Rule.HIGH, "sums gradients of parameters that are updated, step by step")

_MOST_STEPS = 64  # values that a search through these looks at: keeps planning linear


class Updates:
    """Finds the updates of a whole program, and the sums of gradients of updated values."""

    def __init__(self):
        self._axes = set[frozenset[Any]]()  # of the parameters that are updated
        # Where a search for a gradient ends: at updates, whose gradients belong to an earlier step; and at nodes from
        # which an earlier search found none, by the axes it was for. By ids of nodes and programs, which the planner
        # keeps alive, so that no other object gets the same.
        self._updates = set[int]()
        self._ends = collections.defaultdict[frozenset[Any] | None, set[int]](set)
        self._backward_from: dict[int, int] = {}  # by program, what `_starts_backward` found

    def of(self, node: Node, entry: Entry, values: Values, place: Place, position: int) -> Entry | None:
        """The entry of a sum that had `entry`, if it is one of these.

        Args:
          node, entry: the sum.
          values: those before it.
          place: where its program stands.
          position: its place among the program's nodes.
        """
        # JAX records the sum of the gradients of a value that is read twice as `add_any`, and no user's code does.
        # Where steps are differentiated, the gradient of each step's parameters is such a sum, of their axes.
        if node.name == "add_any":
            sums = bool(self._axes) and axes_of(values.program.avals[node.outs[0]]) in self._axes
            return GRADIENT if sums and entry.rule is Rule.WIDEST else None
        old = self._updated(node, values, place, position)
        if old is None:
            return None
        self._updates.add(id(node))
        if entry.rule is not Rule.WIDEST:  # a region, scope or edit says otherwise
            return None
        if values.provenances[old] is Provenance.NARROW:
            return STEP
        if values.provenances[old] is not Provenance.PARAMETER:  # data, which is float32 and widens what it meets
            return None
        self._axes.add(axes_of(values.program.avals[node.outs[0]]))
        return UPDATE

    def _updated(self, node: Node, values: Values, place: Place, position: int) -> int | None:
        """The term of a sum that the other term, which a backward pass computed, updates."""
        provenances = values.provenances
        for old, step in (node.ins, node.ins[::-1]):
            # A step that is a parameter is the gradient of a penalty, and updates a parameter.
            is_bias = provenances[step] is Provenance.PARAMETER and provenances[old] is not Provenance.PARAMETER
            # Nor is the sum of a gradient and the zeros that a momentum starts from an update of these.
            if provenances[old] is Provenance.SCALAR or is_bias:
                continue
            is_gradient = self._is_gradient(step, values, place, None)
            # A step that products, solvers or loops made of a gradient. Before any backward pass there is no gradient,
            # and no search.
            if not is_gradient and provenances[old] is Provenance.PARAMETER:
                if self._starts_backward(values) < position:
                    axes = axes_of(values.program.avals[node.outs[0]])
                    is_gradient = self._is_gradient(step, values, place, axes)
            # Of two gradients the sum is a gradient, or the momentum of an optimizer.
            if is_gradient and not self._is_gradient(old, values, place, None):
                return None if place.is_backward(node) else old  # a derivative rule computes residuals again, say
        return None

    def _starts_backward(self, values: Values) -> int:
        """The position of a program's first node of a backward pass; that after the last if there is none."""
        program = values.program
        if id(program) not in self._backward_from:
            positions = (i for i, node in enumerate(program.nodes) if node.scope.is_backward)
            self._backward_from[id(program)] = next(positions, len(program.nodes))
        return self._backward_from[id(program)]

    def _is_gradient(self, number: int, values: Values, place: Place, axes: frozenset[Any] | None) -> bool:
        """Whether a value is elementwise in what a backward pass computed, and was not updated by it.

        With `axes`, whether it was computed in any way from what a backward pass computed of these axes.
        """
        reached, seen, visited, ends = [number], {number}, [], self._ends[axes]
        for each in reached:  # grows; the nearest first, since others are of earlier steps
            if axes is None and len(seen) >= _MOST_STEPS:
                return False
            node = values.program.producers.get(each)
            if node is None or id(node) in ends or id(node) in self._updates:
                continue
            if place.is_backward(node):
                if axes is None or axes_of(values.program.avals[each]) == axes:
                    return True
                continue  # its operands belong to the same backward pass, or to the forward pass
            visited.append(id(node))
            if axes is not None or node.name in ELEMENT_BY_ELEMENT:
                reached += [each for each in node.ins if each not in seen]
                seen.update(node.ins)
        ends.update(visited)
        return False
