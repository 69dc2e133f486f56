"""How the result of a product is read, as far as that says how exact it has to be.

    c = dot_general a b
    d = sub (add |a|² |b|²) (mul 2.0 c)        c: a cross term of squared distances

This is how distances between two sets are written. If the distance of points is small beside their norm, all digits
that 16 bits hold cancel, and more if the product rounds numbers whose squares are not rounded.

    c = dot_general a b; e = cos (mul 2.0 c)       c is delicate: an absolute error of an angle is one of its cosine
    c = dot_general a b; e = log (add (gather c i) 1e-12)      c is under a logarithm, which is taken of numbers of it
    c = dot_general a b; e = select_n (eq (iota 0) (iota 1)) 0.0 c       only the diagonal of c is read, as by a trace
    c = dot_general a b; e = div c (reduce_sum a)  c is an average, of which `a` are the weights
    c = dot_general a b; e = cholesky c            c is in a system, directly
    c = dot_general a b; e = dot_general c a       c is repeated, as in a quadratic form: `a` is a factor of both
    c = dot_general a b; e = dot_general (div c (norm c)) a       the same, though not directly: a power iteration
    c = dot_general a v; e = mul c v               c is a component along `v`: `a - e` projects or reflects the rows

Decides which products are such terms, and which are read by a function or a linear system that magnifies their error.
Does not decide in which dtype they run; see `causes.py`.
"""

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from ...._jaxpr import BARRIER, FlatJaxpr, Node, is_in_function_of_jax
from ...._sizes import assumed_size, is_single
from ...primitives import ADDS, ARITHMETIC, BOUNDS, DELICATE_OPERAND, PLAIN_DOTS, SYSTEMS, Trait, having
from ..dot_sizes import DotSizes
from ..producers import Producers
from ..ranges import Range, range_of

_PICKS = having(Trait.PICKS)
_SQUARES = frozenset({"square", "integer_pow", "pow", "mul", "dot_general"})
# Operands for which an absolute error matters, or a rounding to zero. Not those of bounds: a layer's result is clipped
# just as often, as by a relu6. Nor the log-sum-exp of the attention's backward pass (the only position counted from the
# end), which is no product.
_DELICATE = {name: position for name, position in DELICATE_OPERAND.items() if name not in BOUNDS and position >= 0}
_DELICATE |= dict.fromkeys(having(Trait.PERIODIC), 0)

_LOGARITHMS = frozenset({"log", "log2", "log1p"})
_SUMS = frozenset({"reduce_sum"})
_EXPONENTIALS = frozenset({"exp", "exp2", "logistic"})
_MAGNITUDES = frozenset({"square", "integer_pow", "abs", "sqrt"})  # the primitives that compute a power spectrum
_KEEPS_MASKS = having(Trait.MOVES) | {"convert_element_type"}
# The primitives by which a program computes with probabilities before it takes their logarithm: it picks those of
# labels, weighs, adds and normalises them, and multiplies them by further ones.
_OF_PROBABILITIES = ARITHMETIC | BOUNDS | PLAIN_DOTS | _MAGNITUDES | having(Trait.PICKS | Trait.JOINS)
_OF_PROBABILITIES |= {"reduce_sum", "reduce_max", "cumsum"}

# A sum is followed back to that many terms, which keeps planning linear in the number of equations.
_MOST_TERMS = 16

Sums = frozenset[tuple[Any, int]]  # the source of the value whose squares are summed, and the number of sums
_NOTHING: Sums = frozenset()


class Consumers:
    """Answers questions about the products of one program by the equations that read them.

    Args:
      program: the program.
      producers: of its values.
      given: for inputs, a function that returns the sums of squares that are terms of the value outside.
    """

    def __init__(self, program: FlatJaxpr, producers: Producers, given: Mapping[int, Callable[[], Sums]]):
        self._program, self._producers, self._given = program, producers, dict(given)

    def give(self, sums: Mapping[int, Sums]) -> None:
        """Notes the sums of squares that are terms of arrays that a scan stacks, and forgets earlier answers."""
        self._given.update({number: functools.partial(frozenset, found) for number, found in sums.items()})
        for name in [name for name in vars(self) if isinstance(vars(Consumers).get(name), functools.cached_property)]:
            delattr(self, name)

    def sums_stacked(self, number: int, stacked: Mapping[Any, Any], length: int) -> Sums:
        """The sums of squares that are terms of the array that a scan stacks of a value, if it stacks their sources."""
        sums = self._sums_of_squares.get(number, _NOTHING)
        return frozenset((stacked[source], size * length) for source, size in sums if source in stacked)

    def sums_outside(self, number: int) -> Sums:
        """The sums of squares that are terms of a value, as a program is told that is given it."""
        sums = self._sums_of_squares.get(number, _NOTHING)
        return frozenset((("outside", source, self._producers), size) for source, size in sums)

    @functools.cached_property
    def delicate(self) -> set[int]:
        """The products that, perhaps with others added, are angles, divisors or operands of a logarithm."""
        found: set[int] = set()
        for node in self._program.nodes:
            if node.name in _DELICATE:
                products = self._products_in(node.ins[_DELICATE[node.name]], magnitudes=node.name in _LOGARITHMS)
                found.update(each.outs[0] for each in products)
        return found

    @functools.cached_property
    def under_logarithms(self) -> set[int]:
        """The products under a logarithm, even if numbers are picked from them, weighed, added or multiplied before.

        These are more than the `delicate` ones, and may include layers: the operands decide; see `are_exponentials`.
        """
        nodes = self._program.nodes
        found = list(self._probabilities([node.ins[0] for node in nodes if node.name in _LOGARITHMS]))
        # A backward pass that computes products again does not take their logarithm again: it divides by them.
        if any([node.scope.is_recomputed for node in nodes if node.name in PLAIN_DOTS]):
            divisors = [node.ins[1] for node in nodes if node.name == "div" and not node.scope.is_recomputed]
            found += [node for node in self._probabilities(divisors) if node.scope.is_recomputed]
        return {node.outs[0] for node in found}

    @functools.cached_property
    def diagonals(self) -> set[int]:
        """The products of which only a diagonal is read: the inner products that a trace adds up."""
        producers, nodes = self._producers, self._program.nodes
        masks, places = set[int](), dict[int, int]()  # of what counts places along an axis, which one
        for node in nodes:
            if node.name == "iota":
                places[node.outs[0]] = node.params["dimension"]
            elif node.name == "add" and node.ins[0] in places and is_single(self._program.avals[node.ins[1]]):
                places[node.outs[0]] = places[node.ins[0]]  # of another diagonal
            elif node.name == "eq" and node.ins[0] in places and node.ins[1] in places:
                if places[node.ins[0]] != places[node.ins[1]]:
                    masks.add(node.outs[0])
        if not masks:  # as in most programs
            return set()
        read, otherwise = set[Any](), {producers.source(number) for number in self._program.outputs}
        for node in nodes:
            if node.name in _KEEPS_MASKS and node.ins[0] in masks:
                masks.add(node.outs[0])
                continue
            diagonal = self._taken_diagonal(node, masks)
            for position, number in enumerate(node.ins):
                source = producers.source(number)
                if position == diagonal:
                    read.add(source)
                elif not any([producers.source(result) == source for result in node.outs]):  # neither moved nor scaled
                    otherwise.add(source)
        return read - otherwise

    def _taken_diagonal(self, node: Node, masks: set[int]) -> int | None:
        """The position of the operand of which a node reads a diagonal, which `masks` choose."""
        if node.name == "select_n":
            return 2 if node.ins[0] in masks else None
        if node.name == "mul" or (node.name == "cond" and is_in_function_of_jax(node, "diagonal")):
            of_masks = [number in masks for number in node.ins[-2:]]
            return len(node.ins) - 2 + of_masks.index(False) if any(of_masks) and not all(of_masks) else None
        return None

    def _probabilities(self, pending: list[int]) -> Iterator[Node]:
        """The products from which values are computed as from probabilities."""
        seen = set[int]()
        while pending:
            node = self._producers.producer(pending.pop())
            if node is None or node.name not in _OF_PROBABILITIES or node.outs[0] in seen:
                continue
            seen.add(node.outs[0])
            pending.extend(node.ins)
            if node.name in PLAIN_DOTS:
                yield node

    @functools.cached_property
    def are_exponentials(self) -> set[int]:
        """The values made of exponentials, such as a softmax and the mean of sigmoids.

        A value that is divided by an exponential is none, nor is a function of one.
        """
        found: set[int] = set()
        for node in self._program.nodes:
            if node.name == BARRIER:
                found.update(result for number, result in zip(node.ins, node.outs, strict=True) if number in found)
                continue
            values = node.ins[:1] if node.name == "div" else node.ins
            moved = node.name in _OF_PROBABILITIES or self._moves(node)
            if node.name in _EXPONENTIALS or (moved and not found.isdisjoint(values)):
                found.update(node.outs)
        return found

    @functools.cached_property
    def in_systems(self) -> dict[int, bool]:
        """The products that a linear system or a factorization reads, and whether it reads them directly.

        Others may be added to them; if products of them are read, they are not read directly.
        """
        systems = [node for node in self._program.nodes if node.name in SYSTEMS]
        pending = [node for system in systems for number in system.ins for node in self._products_in(number)]
        found = {node.outs[0]: True for node in pending}
        while pending:
            # Through sums only: what a bound such as relu makes of a product is an activation.
            for factor in [each for number in pending.pop().ins for each in self._products_in(number, ADDS)]:
                if factor.outs[0] not in found:
                    found[factor.outs[0]] = False
                    pending.append(factor)
        return found

    @functools.cached_property
    def averages(self) -> dict[int, list[int]]:
        """The operands of products, by position, that are weights of an average: the product is divided by their sum.

        If the product rounds them and the sum does not, an offset of the averaged values does not cancel: in float16
        the result is off by 2e-4 of the offset.
        """
        found: dict[int, list[int]] = {}
        producers = self._producers
        for node in self._program.nodes:
            dot = producers.producer(node.ins[0]) if node.name == "div" else None
            if dot is None or dot.name != "dot_general":
                continue
            sums = list(self._products_in(node.ins[1], of=_SUMS))
            operands = enumerate(zip(dot.ins, dot.params["dimension_numbers"][0], strict=True))
            found[dot.outs[0]] = [i for i, operand in operands if any([self._adds_up(each, *operand) for each in sums])]
        return found

    def _adds_up(self, total: Node, number: int, axes: Sequence[int]) -> bool:
        """Whether a sum is of a value over its `axes`, perhaps moved and scaled."""
        producers = self._producers
        if not producers.comes_from(total.ins[0], producers.source(number)):
            return False
        summed = producers.axes_of_source(total.ins[0], total.params["axes"])
        return summed is not None and summed == producers.axes_of_source(number, axes)

    @functools.cached_property
    def repeated(self) -> dict[int, bool]:
        """The products that multiply by the same value as another product does, as in `x @ a @ x.T`, and powers.

        And whether the second reads the first directly. Otherwise the first is divided by a norm between, as in a power
        iteration.
        """
        found: dict[int, bool] = {}
        producers, bases = self._producers, dict[Any, int]()  # of powers of a value, that value
        for node in self._program.nodes:
            if node.name != "dot_general":
                continue
            one, other = (bases.get(producers.source(number), number) for number in node.ins)
            if producers.are_one(one, other):
                bases[node.outs[0]] = one
                found[node.outs[0]] = True
            for number, beside in (node.ins, node.ins[::-1]):
                inner, directly = self._scaled_dot(number)
                if inner is not None and any([producers.are_one(each, beside) for each in inner.ins]):
                    for result in (*inner.outs, *node.outs):
                        found[result] = found.get(result, False) or directly
        return found

    def _scaled_dot(self, number: int) -> tuple[Node | None, bool]:
        """The dot that a value is, perhaps scaled by a number, and whether the program knows that number."""
        node, directly = self._producers.producer(number), True
        if node is not None and node.name in ("mul", "div"):
            scaled = self._producers.scaled(node, computed=True)
            node, directly = None if scaled is None else self._producers.producer(scaled), False
        return (node if node is not None and node.name == "dot_general" else None), directly

    @functools.cached_property
    def components(self) -> set[int]:
        """The products with a vector that are multiplied by it again, as `outer(x @ v, v)` of a reflection of `x`."""
        found: set[int] = set()
        for node in self._program.nodes:
            for number, beside in (node.ins, node.ins[::-1]) if node.name == "mul" else ():
                dot, _ = self._scaled_dot(number)  # by the square of the vector's length
                sizes = None if dot is None else DotSizes.of(self._program, dot)
                if dot is None or sizes is None or assumed_size(self._program.avals[node.outs[0]]) <= sizes.result:
                    continue
                free = zip(dot.ins, (sizes.left, sizes.right), strict=True)
                if any([size == 1 and self._producers.are_one(each, beside) for each, size in free]):
                    found.update(dot.outs)
        return found

    @functools.cached_property
    def squared_beside(self) -> dict[int, frozenset[int]]:
        """The operands of products, by position, the sums of whose squares are added to the product."""
        found: dict[int, frozenset[int]] = {}
        for number, sums in self._sums_of_squares.items():
            for dot in self._products_in(number):
                sizes = DotSizes.of(self._program, dot)
                positions = [] if sizes is None else [i for i in (0, 1) if self._is_squared(dot.ins[i], sizes, i, sums)]
                found[dot.outs[0]] = found.get(dot.outs[0], frozenset()).union(positions)
        return found

    def _is_squared(self, number: int, sizes: DotSizes, position: int, sums: Sums) -> bool:
        """Whether one of some sums is over the squares of an operand, and over the numbers that the dot contracts.

        Then there is one sum for each row of the operand.
        """
        free = sizes.operands[position] // sizes.contracted
        matching = [source for source, size in sums if size == free]
        return any(self._producers.comes_from(number, s) or self._producers.is_part_of(number, s) for s in matching)

    @functools.cached_property
    def _sums_of_squares(self) -> dict[int, Sums]:
        """Which sums of squares are terms of a value, one of them at least."""
        squares: dict[int, Any] = {}  # of a value that is squares, the source of what is squared
        sums = {number: found for number, give in self._given.items() if (found := give())}
        roots: dict[int, Sums] = {}  # of a norm, the sums of which it is the root
        for node in self._program.nodes:
            if node.name == BARRIER:
                for known in (squares, sums, roots):
                    known.update({r: known[n] for n, r in zip(node.ins, node.outs, strict=True) if n in known})
                continue
            name, result, terms = node.name, node.outs[0] if node.outs else -1, _NOTHING
            for number in node.ins:
                if number in sums and name == "sqrt":  # a norm, to be squared again
                    roots[result] = sums[number]
                elif number in sums and (name in ADDS or self._moves(node)):
                    terms |= sums[number]
                elif number in sums and name in _PICKS:  # some rows' sums: as many as the result has numbers
                    terms = frozenset((source, assumed_size(self._program.avals[result])) for source, _ in sums[number])
                elif number in roots and name in _SQUARES:
                    terms |= roots[number]
                elif number in roots and self._moves(node):
                    roots[result] = roots[number]
                elif number in squares and name == "reduce_sum":
                    terms = frozenset([(squares[number], assumed_size(self._program.avals[result]))])
                elif number in squares and self._moves(node):
                    squares[result] = squares[number]
            if not terms and name in _SQUARES and (value := self._squared_by(node)) is not None:
                if name == "dot_general":
                    terms = frozenset([(self._producers.source(value), assumed_size(self._program.avals[result]))])
                else:
                    squares[result] = self._producers.source(value)
            if terms and len(terms) <= _MOST_TERMS:
                sums[result] = terms
        return sums

    def _moves(self, node: Node) -> bool:
        """Whether a node moves or scales a value. A scan stacks others beside."""
        return bool(node.outs) and node.name != "scan" and self._producers.source(node.outs[0]) != node.outs[0]

    def _squared_by(self, node: Node) -> int | None:
        """The value whose numbers a node multiplies by themselves; a dot adds these up."""
        value, *others = node.ins
        if node.name == "dot_general":
            # Sizes are asked for only where shapes are equal: this runs for every dot. A dot with rows of its own on
            # either side is a Gram matrix, not squares.
            one, other = (self._program.avals[number].shape for number in node.ins)
            sizes = DotSizes.of(self._program, node) if one == other else None
            inner = sizes is not None and sizes.left == sizes.right == 1
            return value if inner and self._producers.are_one(*node.ins) else None
        if node.name == "mul":
            is_square = others == [value]
        elif node.name == "pow":
            is_square = range_of(self._program.known.get(others[0], 0)) == Range(2, 2)
        else:
            is_square = node.params.get("y", 2) == 2  # of `integer_pow`; `square` has no such parameter
        if not is_square:
            return None
        producer = self._producers.producer(value)
        # `jnp.linalg.norm` squares magnitudes, which are the squares of the value itself.
        return producer.ins[0] if producer is not None and producer.name == "abs" else value

    def _products_in(
        self,
        number: int,
        through: Container[str] = ADDS | BOUNDS,
        magnitudes: bool = False,
        of: Container[str] = PLAIN_DOTS,
    ) -> Iterator[Node]:
        """The products that are terms of a value, moved, scaled or bounded; of `magnitudes` their squares and roots."""
        pending = [number]
        for _ in range(_MOST_TERMS):
            node = self._producers.producer(pending.pop()) if pending else None
            if node is None:
                continue
            if node.name in of:
                yield node
            elif node.name in through:
                pending.extend(node.ins)
            elif magnitudes and (node.name in _MAGNITUDES or (node.name == "mul" and node.ins[0] == node.ins[1])):
                pending.append(node.ins[0])


def sums_of_rows(sums: Sums, rows: int) -> Sums:
    """The sums of squares that are terms of each of the rows of a value, given those of the value."""
    return frozenset((("row", source), size // rows) for source, size in sums)
