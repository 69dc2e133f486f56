"""Where a value comes from: the value that it was moved from or is a part of, and whether two values are one.

    b = transpose (mul 2.0 a)         the source of `b` is `a`
    c = slice b                       its own source; it is a part of the product, `mul 2.0 a`
    d = sin a; e = sin a              `d` and `e` are one: computed by equal equations
    f = mul d a                       the factors of `f` are `d` and `a`

Decides these by following producers back through a program. Does not decide what follows from it; see
`whole_program/causes.py` and `entries.py`.
"""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from ..._dtypes import BFLOAT16, FLOAT16, FLOAT32
from ..._jaxpr import BARRIER, FlatJaxpr, Node
from ..._sizes import is_single, is_static
from ..primitives import PLAIN_DOTS, Trait, having
from .constants import is_zero
from .loops import dependents

_MOVES = having(Trait.MOVES) | {"neg"}  # and the sign: `-x @ x.T` multiplies `x` with itself
_PARTS = having(Trait.PICKS) | {"pad"}  # some of the numbers, or all of them beside zeros
_BECOME_WEIGHTS = _MOVES | {"add", "mul", "convert_element_type"}

# Two values computed by more equations than this are not compared to the end, and count as two: the comparison follows
# every path, of which there may be exponentially many.
_MOST_COMPARED = 64


class Producers:
    """Answers questions about the values of one program.

    Args:
      program: the program.
      same: for each of its inputs a token, equal for inputs that are one value outside: `("argument", i)`, a
        `token` of a value of the program around, `("row", token)` of a value that a loop reads row by row.
    """

    def __init__(self, program: FlatJaxpr, same: tuple[Any, ...] = ()):
        self.program = program
        self._producers = program.producers
        self._tokens = dict(zip(program.inputs, same, strict=True)) if same else {}
        self._moved: dict[int, Any] = {}  # by arrays that a scan stacks of moved rows, the source of these
        # By the arguments of `_follow`, its result for each value: for inputs their tokens.
        self._followed: dict[tuple[frozenset[str], bool], dict[int, Any]]
        self._followed = collections.defaultdict(lambda: dict(self._tokens))

    def give(self, number: int, source: Any) -> None:
        """Notes the source of a value that a scan stacks, row by row."""
        self._moved[number] = source
        self._followed.clear()  # earlier answers did not know this

    def token(self, number: int) -> tuple[Any, ...]:
        """The token of a value in a program that reads it from outside: its source, and the producers that know it."""
        return "outside", self.source(number), self

    def source(self, number: int) -> Any:
        """The value from which a value was moved and scaled: its number, or the token of an input."""
        return self._follow(number, _MOVES, scales=True)

    def producer(self, number: int) -> Node | None:
        """The equation that computes the source of a value; `None` of an argument or a constant."""
        return self._producers.get(self.source(number))

    def whole(self, number: int) -> Any:
        """The value of which a value is a part, rearranged but not scaled; `None` if it is no part."""
        source = self._follow(number, _MOVES | _PARTS, scales=False)
        return None if source == self._follow(number, _MOVES, scales=False) else source

    def _follow(self, number: int, primitives: frozenset[str], scales: bool) -> Any:
        followed, path = self._followed[primitives, scales], []
        while number not in followed:
            operand = self._operand(number, primitives, scales)
            if operand is None:
                followed[number] = number
            else:
                path.append(number)
                number = operand
        for each in path:  # so that a chain is followed once, whatever is asked about its values
            followed[each] = followed[number]
        return followed[number]

    def _operand(self, number: int, primitives: frozenset[str], scales: bool) -> Any:
        """The operand of a value's equation, if this is one of some primitives or, if `scales`, applies a factor."""
        if scales and number in self._moved:
            return self._moved[number]
        node = self._producers.get(number)
        if node is None:
            return None
        if node.name in primitives:
            if node.name == BARRIER:
                return node.ins[node.outs.index(number)]
            # Zeros add nothing to a sum over the value; other numbers do.
            return None if node.name == "pad" and not self._is_zero(node.ins[1]) else node.ins[0]
        if node.name == "convert_element_type" and self._widens(node):
            return node.ins[0]
        if node.name == "reduce_precision" and keeps_float32(node):  # a product that `jax.checkpoint` saves
            return node.ins[0]
        return self.scaled(node) if scales and node.name in ("mul", "div") else None

    def factors(self, number: int) -> tuple[int, ...]:
        """The factors of a product or quotient of two arrays, moved and scaled; none of any other value."""
        node = self.producer(number)
        if node is None or node.name not in ("mul", "div", "dot_general"):
            return ()
        # `jnp.einsum("ni,n->ni", ...)` multiplies by a dot that contracts no axis.
        contracts = node.name == "dot_general" and node.params["dimension_numbers"][0][0]
        # A divisor is no factor: `x / w` has the factors `x` and one over `w`, which is no value of the program.
        return () if contracts else node.ins[:1] if node.name == "div" else node.ins

    def is_stored(self, number: int) -> bool:
        """Whether a value is, or is part of, an argument or a captured array: it is in memory, as float32."""
        source = self._follow(number, _MOVES | _PARTS, scales=True)
        if isinstance(source, int):
            return source in self.program.known
        # An argument's token is a tuple, even as a row or in a program around. A number is a value that a program
        # around computed.
        while isinstance(source, tuple) and source[0] in ("outside", "row"):
            source = source[1]
        return isinstance(source, tuple)

    def are_disjoint(self, one: int, other: int) -> bool:
        """Whether two computed values are pads, one of them zero wherever the other is not: their sum joins them."""
        nodes = (self._producers[number] for number in (one, other))
        pads = [node for node in nodes if node.name == "pad" and self._is_zero(node.ins[1])]
        if len(pads) < 2 or not is_static(self.program.avals[one].shape):  # `range` takes no symbolic size
            return False
        places = [_padded_places(pad, self.program.avals[pad.ins[0]].shape) for pad in pads]
        # Along one axis: one pad ends before the other begins, or both have the same step and start at other places of
        # it, as `associative_scan` interleaves even and odd elements.
        return any(
            a.stop <= b.start or b.stop <= a.start or (a.step == b.step and (a.start - b.start) % a.step != 0)
            for a, b in zip(*places, strict=True)
        )

    def axes_of_source(self, number: int, axes: Sequence[int]) -> frozenset[int] | None:
        """The axes of its source that `axes` of a value are; `None` where a reshape, scan or boundary may mix them."""
        source, axes = self.source(number), list(axes)
        # A value from the program around may have been moved there. An argument's token is its own here.
        if isinstance(source, tuple) and source[0] != "argument":
            return None
        while (node := self._producers.get(number)) is not None and self.source(number) != number:
            operand = next(n for n in node.ins if self.source(n) == self.source(number))
            if node.name == "transpose":
                axes = [node.params["permutation"][axis] for axis in axes]
            elif node.name == "broadcast_in_dim":
                of_operand = {axis: i for i, axis in enumerate(node.params["broadcast_dimensions"])}
                # -1 stands for an axis that the operand does not have.
                axes = [of_operand.get(axis, -1) for axis in axes]
            elif node.name == "scan" or self.program.avals[number].shape != self.program.avals[operand].shape:
                return None
            number = operand
        return frozenset(axes)

    def becomes_weight(self, number: int) -> bool:
        """Whether a dot multiplies by a value, or by the sum of it and others, as by a weight and its adapter."""
        found = dependents(self.program, [number], lambda node: node.name in _BECOME_WEIGHTS)
        return any(node.name in PLAIN_DOTS and not found.isdisjoint(node.ins) for node in self.program.nodes)

    def _widens(self, node: Node) -> bool:
        """Whether a conversion changes no number: from 16 bits to float32, or of the weak type alone."""
        source, target = (self.program.avals[number].dtype for number in (node.ins[0], node.outs[0]))
        return source == target or (source in (FLOAT16, BFLOAT16) and target == FLOAT32)

    def _is_zero(self, number: int) -> bool:
        value = self.program.known.get(self._follow(number, _MOVES, scales=False))  # a token is no number of these
        return value is not None and is_zero(value)

    def scaled(self, node: Node, computed: bool = False) -> int | None:
        """The operand that a node multiplies or divides by one number, which no argument decides unless `computed`."""
        left, right = node.ins
        if self._is_number(right, computed):
            return left
        # A number divided by a value is no multiple of the value.
        return right if node.name == "mul" and self._is_number(left, computed) else None

    def _is_number(self, number: int, computed: bool) -> bool:
        source = self._follow(number, _MOVES, scales=False)
        inside = source in self.program.known or (computed and isinstance(source, int))
        return inside and is_single(self.program.avals[source])

    def are_one(self, left: int, right: int) -> bool:
        """Whether two values are equal except for moves and factors, as `x` and `2 * x.T`, or have equal equations."""
        return self.comes_from(left, self.source(right))

    def comes_from(self, number: int, source: Any) -> bool:
        """Whether a value has this source, or one computed by equal equations."""
        own = self.source(number)
        return own == source or self._equal(_without_rows(own), _without_rows(source), [_MOST_COMPARED])

    def is_part_of(self, number: int, source: Any) -> bool:
        """Whether a value has some or all numbers of a value with this source, moved and scaled."""
        return self._follow(number, _MOVES | _PARTS, scales=True) == source

    def _equal(self, left: Any, right: Any, budget: list[int]) -> bool:
        if left == right:  # numbers of one value, or tokens of one value outside
            return True
        match left, right:
            # The indices of `x[i] @ x[i].T` in the derivative of a loop: zeros that JAX computes twice around it.
            case ("outside", one, around), ("outside", other, other_around) if around is other_around:
                return around._equal(one, other, budget)
        if left in self.program.known:
            return self._equal_known(left, right)
        one, other = self._producers.get(left), self._producers.get(right)
        budget[0] -= 1
        # An equation with effects, as a callback, may give other numbers each time.
        if one is None or other is None or budget[0] < 0 or one.name != other.name or one.eqn.effects:
            return False
        if one.outs.index(left) != other.outs.index(right) or len(one.ins) != len(other.ins):
            return False
        tokens = [(self._tokens.get(a, a), self._tokens.get(b, b)) for a, b in zip(one.ins, other.ins, strict=True)]
        return one.params == other.params and all(self._equal(a, b, budget) for a, b in tokens)

    def _equal_known(self, left: int, right: Any) -> bool:
        if right not in self.program.known:
            return False
        one, other = self.program.known[left], self.program.known[right]
        # Single numbers are compared. Two arrays are one only if they are one object: to compare them takes time.
        if isinstance(one, Tracer) or isinstance(other, Tracer) or np.size(one) != 1 or np.size(other) != 1:
            return one is other
        return bool(np.asarray(one) == np.asarray(other))


def keeps_float32(node: Node) -> bool:
    """Whether a `reduce_precision` leaves float32 numbers as they are."""
    float32 = np.finfo(np.float32)
    return node.params["exponent_bits"] >= float32.nexp and node.params["mantissa_bits"] >= float32.nmant


def _without_rows(source: Any) -> Any:
    """The value of which a value is a row, at any depth: a block of a Gram matrix multiplies rows by the whole."""
    while isinstance(source, tuple) and source[0] == "row":
        source = source[1]
    return source


def _padded_places(node: Node, shape: Sequence[int]) -> list[range]:
    """The places along each axis at which a `pad` puts its operand, of this shape."""
    axes = zip(node.params["padding_config"], shape, strict=True)
    return [range(low, low + (size - 1) * (interior + 1) + 1, interior + 1) for (low, _, interior), size in axes]
