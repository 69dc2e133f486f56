"""What becomes of a product, as far as that says how exact it has to be.

    c = dot_general a b
    d = sub (add |a|² |b|²) (mul 2.0 c)        c: a cross term of squared distances

Distances between two sets are written so. Where points lie close together beside their norm, all digits cancel that 16
bits hold, and more if a product rounds what its square beside it does not.

Decides which products are such terms, and which are read by a function or a linear system that magnifies their error.
Does not decide what follows from it; see `product_causes.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..._jaxpr import FlatJaxpr, Node
from ..primitives import DELICATE_OPERAND, Trait, having
from .dot_sizes import DotSizes
from .producers import Producers

_ADDS = having(Trait.ADDS)
_BOUNDS = having(Trait.BOUNDS)
_SYSTEMS = having(Trait.SYSTEM)
_SQUARES = frozenset({"square", "integer_pow", "mul", "dot_general"})
_KEEPS_SUMS = _ADDS | {"sqrt", "square", "integer_pow"}  # a norm is a root of squares, and squared again
# Operands of which an absolute error counts, or a rounding to zero. Not those of bounds: a layer's result has some.
_DELICATE = {name: position for name, position in DELICATE_OPERAND.items() if name not in _BOUNDS and position >= 0}
_DELICATE |= dict.fromkeys(having(Trait.PERIODIC), 0)

# A sum is followed back to that many terms.
_MOST_TERMS = 16


class Consumers:
    """Answers questions about the products of one program by the equations that read them."""

    def __init__(self, program: FlatJaxpr, producers: Producers):
        self._program, self._producers = program, producers

    def squared_beside(self, node: Node) -> frozenset[int]:
        """The operands of a product, by position, sums of whose squares are added to it."""
        return self._cross_terms.get(node.outs[0], frozenset())

    def is_delicate(self, node: Node) -> bool:
        """Whether a product, perhaps with others added, is an angle, a divisor or the operand of a logarithm."""
        return node.outs[0] in self._delicate

    def enters_system(self, node: Node) -> bool:
        """Whether a linear system or a factorization reads a product, perhaps with others added."""
        return node.outs[0] in self._in_systems

    @functools.cached_property
    def _delicate(self) -> set[int]:
        readers = [node for node in self._program.nodes if node.name in _DELICATE]
        return {dot.outs[0] for node in readers for dot in self._products_in(node.ins[_DELICATE[node.name]])}

    @functools.cached_property
    def _in_systems(self) -> set[int]:
        systems = [node for node in self._program.nodes if node.name in _SYSTEMS]
        return {dot.outs[0] for node in systems for number in node.ins for dot in self._products_in(number)}

    @functools.cached_property
    def _cross_terms(self) -> dict[int, frozenset[int]]:
        found: dict[int, frozenset[int]] = {}
        for number, values in self._sums_of_squares().items():
            for dot in self._products_in(number):
                positions = [i for i, operand in enumerate(dot.ins) if self._is_one_of(operand, values)]
                found[dot.outs[0]] = found.get(dot.outs[0], frozenset()).union(positions)
        return found

    def _is_one_of(self, number: int, values: frozenset[int]) -> bool:
        return any(self._producers.are_one(number, value) for value in values)

    def _sums_of_squares(self) -> dict[int, frozenset[int]]:
        """The values whose squares are in a sum, by the sum, and by what adds it to others."""
        squares: dict[int, frozenset[int]] = {}
        sums: dict[int, frozenset[int]] = {}
        for node in self._program.nodes:
            name, found, kept = node.name, sums, ()
            for number in node.ins:
                if number in sums and (name in _KEEPS_SUMS or self._moves(node)):
                    kept = sums[number].union(kept)
                elif number in squares and (name == "reduce_sum" or self._moves(node)):
                    found, kept = sums if name == "reduce_sum" else squares, squares[number]
            if not kept and name in _SQUARES and self._is_square(node):
                found, kept = sums if name == "dot_general" else squares, frozenset(node.ins[:1])
            if kept:
                found[node.outs[0]] = kept
        return sums

    def _moves(self, node: Node) -> bool:
        return self._producers.source(node.outs[0]) != node.outs[0]

    def _is_square(self, node: Node) -> bool:
        """Whether a node multiplies the numbers of a value by themselves; a dot adds these up."""
        if len(node.ins) == 1:
            return node.params.get("y", 2) == 2
        if node.name == "mul":
            return node.ins[0] == node.ins[1]
        one, other = (self._program.avals[number].shape for number in node.ins)
        sizes = DotSizes.of(self._program, node) if one == other else None
        return sizes is not None and sizes.left == sizes.right == 1 and self._producers.are_one(*node.ins)

    def _products_in(self, number: int) -> Iterator[Node]:
        """The products that are terms of a value, moved, scaled or bounded."""
        pending = [number]
        for _ in range(_MOST_TERMS):
            node = self._producers.maker(pending.pop()) if pending else None
            if node is None:
                continue
            if node.name == "dot_general":
                yield node
            elif node.name in _ADDS or node.name in _BOUNDS:
                pending.extend(node.ins)
