"""What becomes of a product, as far as that says how exact it has to be.

    c = dot_general a b
    d = sub (add |a|² |b|²) (mul 2.0 c)        c: a cross term of squared distances

Distances between two sets are written so. Where points lie close together beside their norm, all digits cancel that 16
bits hold, and more if a product rounds what its square beside it does not.

Decides which products are such terms, and which are read by a function that magnifies their error. Does not decide what
follows from it; see `product_causes.py`.
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
_KEEPS_SQUARES = _ADDS | {"sqrt", "square", "integer_pow"}  # a norm is a root of squares, and squared again
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
        return node.outs[0] in self._operands

    @functools.cached_property
    def _operands(self) -> set[int]:
        delicate = [(node, _DELICATE[node.name]) for node in self._program.nodes if node.name in _DELICATE]
        return {dot.outs[0] for node, position in delicate for dot in self._products_in(node.ins[position])}

    @functools.cached_property
    def _cross_terms(self) -> dict[int, frozenset[int]]:
        found: dict[int, frozenset[int]] = {}
        for number, values in self._squared().items():
            for dot in self._products_in(number):
                positions = [i for i, operand in enumerate(dot.ins) if self._is_one_of(operand, values)]
                found[dot.outs[0]] = found.get(dot.outs[0], frozenset()).union(positions)
        return found

    def _is_one_of(self, number: int, values: frozenset[int]) -> bool:
        return any(self._producers.are_one(number, value) for value in values)

    def _squared(self) -> dict[int, frozenset[int]]:
        """The values whose squares are summed, by these sums and by what is added up of them and others."""
        found: dict[int, frozenset[int]] = {}
        for node in self._program.nodes:
            if node.name in ("reduce_sum", "dot_general"):
                value = self._squared_by(node)
                if value is not None:
                    found[node.outs[0]] = frozenset([value])
            elif found and not found.keys().isdisjoint(node.ins):
                if node.name in _KEEPS_SQUARES or self._producers.source(node.outs[0]) != node.outs[0]:
                    found[node.outs[0]] = frozenset().union(*(found.get(number, ()) for number in node.ins))
        return found

    def _squared_by(self, node: Node) -> int | None:
        """The value whose squares a node sums; `None` if it sums others."""
        if node.name == "dot_general":
            sizes = DotSizes.of(self._program, node)
            inner = sizes is not None and sizes.left == sizes.right == 1
            return node.ins[0] if inner and self._producers.are_one(*node.ins) else None
        maker = self._producers.maker(node.ins[0])
        if maker is None:
            return None
        is_square = maker.name == "square" or (maker.name == "integer_pow" and maker.params["y"] == 2)
        return maker.ins[0] if is_square or (maker.name == "mul" and maker.ins[0] == maker.ins[1]) else None

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
