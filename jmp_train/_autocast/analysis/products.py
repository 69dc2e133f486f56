"""Which products are no layers of a network, so that rounding their operands would lose what they compute.

A dot with a weight averages over many numbers, and networks are robust to its rounding: that is what 16 bits are for.
Programs around networks contain other dots. The angle of a rotary embedding is a position times a frequency, and half
of its digits are a wrong angle; a Gram matrix sums squares; a table of bins holds numbers that float16 does not. And
somebody may have asked for float32 by name. Such products run in float32, forward and backward.

Decides which products these are and why, before dtypes are assigned: by what they multiply (a value with itself, few
numbers, constants) and by what was asked for. Does not decide anything about other equations; see `passes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax.core import Tracer

from ..._jaxpr import ClosedJaxpr, FlatJaxpr, Jaxpr, Node, in_jvp, scan_counts, source_line
from ..ir import Place, Precision, is_float32
from ..primitives import DATA_OPERANDS, TABLE, Entry, Rule, Trait, having
from .dot_sizes import DotSizes, asks_for_float32
from .loops import is_linear
from .producers import Producers, Table, known_size, makes_constants, row_of, table_of
from .provenance import (
    FLOAT32_PROVENANCES,
    PARAMETER_PROVENANCES,
    ROUNDED_PROVENANCES,
    UNROUNDED_PROVENANCES,
    Fact,
    Provenance,
    carried_provenance,
    joined,
)
from .wide_product import Cause, WideProduct, wide_product

if TYPE_CHECKING:
    from ..planner import Planner

# Tensor Cores contract 16 numbers of 16 bits at a time; with fewer they mostly multiply padding.
TENSOR_CORE_DEPTH = 16
# An expectation over fewer constants, of 16 bits each, is a short contraction.
_MOST_EXPECTATIONS = 16
# There is an instruction for half as many. Data times a weight of that depth is a layer's, as it is if there are more
# and the result is larger than both: in float32 it would move more bytes.
_HALF_DEPTH = 8
# Written as multiplications and additions, which fuse with their neighbours and are float32 on every GPU.
_AS_SUMS = frozenset({Cause.SHORT, Cause.INNER})
# A kernel with at most so many different filters of one channel, known when planning, is no layer.
_FEW_FILTERS = 4

_BOOL = np.dtype(np.bool_)
_COMPUTES_FLOAT32 = (Rule.HIGH, Rule.COLLECTIVE, Rule.RECORDED)
_STAY = (Provenance.EXACT, Provenance.FACTOR, Provenance.SOLUTION)  # what an operation that runs in float32 leaves them
_PROVENANCE_OF = {Precision.LOW: Provenance.NARROW, Precision.WEAK: Provenance.PARAMETER}

_PRODUCTS = having(Trait.DOT)
_SYSTEMS = having(Trait.SYSTEM)


class _Forward(NamedTuple):
    """A product whose derivatives are decided with it: where it stands, what it multiplies, why it is in float32.

    `cause` is `None` for one that is narrow although its precision was set.
    """

    site: tuple
    sources: set[Any]
    cause: Cause | None


class _Registry:
    """The products whose derivatives are to be found: those made so far by what they share with their derivatives."""

    def __init__(self):
        self._by_key: dict[Any, dict[tuple, _Forward]] = {}
        self._keys: dict[tuple, Any] = {}
        self.systems: set[tuple] = set()  # the lines and scopes of linear systems, whose derivatives are products

    @property
    def is_empty(self) -> bool:
        return not (self._keys or self.systems)

    def add(self, where: tuple, key: Any, product: _Forward) -> None:
        self._keys[where] = key
        self._by_key.setdefault(key, {})[where] = product

    def forget(self, where: tuple) -> None:
        if where in self._keys:
            del self._by_key[self._keys.pop(where)][where]

    def forward_of(self, key: Any, site: tuple, sources: set[Any]) -> _Forward | None:
        """The product that one with this key derives: in the same program, only if they share an operand."""
        for product in self._by_key.get(key, {}).values():
            if product.site != site or not sources.isdisjoint(product.sources):
                product.sources.update(sources)  # derivatives of derivatives share an operand with these
                return product
        return None


class Products:
    """Finds the products of a whole program that are no layers, those inside loops, branches and calls included."""

    def __init__(self, planner: Planner):
        self._planner = planner
        self._found: dict[tuple, list[tuple[list[Entry], int, Node, WideProduct]]] = {}
        self.registry = _Registry()

    def find(self, jaxpr: ClosedJaxpr | Jaxpr, kinds: Sequence[Precision], place: Place) -> None:
        """Gives those products a `WideProduct` for an entry, in the programs that the planner remembers."""
        facts = [Fact(_PROVENANCE_OF.get(kind, Provenance.DATA), ("argument", i)) for i, kind in enumerate(kinds)]
        self.visit(jaxpr, place, facts, ())
        # A program that several nodes call is planned once: what one of them needs in float32 is.
        for found in self._found.values():
            for entries, position, node, entry in found:
                entries[position] = entry
                self._planner.wide.add(id(node.eqn))

    def visit(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place, facts: Sequence[Fact], site: tuple) -> list[Fact]:
        """Looks at every product of a program; returns what is known of its results.

        Args:
          jaxpr: the program.
          place: where it stands.
          facts: what is known of its arguments.
          site: the nodes that lead to it.
        """
        program, entries = self._planner.recorded(jaxpr, place)
        view = _View(self, program, place, facts, site)
        found = self._found[site] = []
        for position, (node, entry) in enumerate(zip(program.nodes, entries, strict=True)):
            if entry.rule is Rule.ENTER:
                view.enter(node)
                continue
            name, wide = node.name, None
            if name in _PRODUCTS and entry == TABLE[name]:  # no region, scope or edit says otherwise
                wide = view.product(node, position)
            if wide is not None:
                found.append((entries, position, node, wide))
            view.compute(node, name, entry if wide is None else wide)
        return [view.fact(number) for number in program.outputs]


class _View:
    """What is known of the values of one program while it is visited."""

    def __init__(self, products: Products, program: FlatJaxpr, place: Place, facts: Sequence[Fact], site: tuple):
        self._products, self._planner = products, products._planner
        self._program, self._place, self._site = program, place, site
        constants = {n: fact.numbers for n, fact in zip(program.inputs, facts, strict=True) if fact.numbers}
        self._producers = Producers(program, tuple(fact.token for fact in facts), constants)
        self._provenances = [Provenance.DATA] * len(program.avals)
        self._constant = [False] * len(program.avals)
        for number, fact in zip(program.inputs, facts, strict=True):
            self._provenances[number], self._constant[number] = fact.provenance, fact.numbers is not None
        for number, value in program.known.items():
            self._provenances[number] = Provenance.EXACT if np.size(value) == 1 else Provenance.DATA
            self._constant[number] = not isinstance(value, Tracer)

    def fact(self, number: int) -> Fact:
        numbers = self._producers.thunk(number) if self._constant[number] else None
        return Fact(self._provenances[number], ("outside", self._producers.source(number)), numbers)

    def compute(self, node: Node, name: str, entry: Entry) -> None:
        """What the results of a node are, given its operands and the entry that holds for it.

        This runs for every equation of a program: no function is called that need not be.
        """
        provenances, constants, constant = self._provenances, self._constant, True
        for number in node.ins:
            constant = constant and constants[number]
        constant = constant and makes_constants(node)
        values = node.ins[DATA_OPERANDS[name]] if name in DATA_OPERANDS else node.ins
        provenance = Provenance.EXACT
        for number in values:
            if provenance is Provenance.EXACT:
                provenance = provenances[number]
            elif provenances[number] is not provenance:
                provenance = joined((provenance, provenances[number]))
        rule = entry.rule
        if name in _SYSTEMS:
            self._products.registry.systems.add(self._line(node))
            provenance = self._solution(node, name, provenance)
        if not node.ins or (rule in _COMPUTES_FLOAT32 and provenance not in _STAY):
            square = isinstance(entry, WideProduct) and entry.cause is Cause.SQUARE
            computed = Provenance.ACTIVATION if provenance in ROUNDED_PROVENANCES else Provenance.DATA
            provenance = Provenance.TABLE if constant else Provenance.SOLUTION if square else computed
        for number in node.outs:
            constants[number] = constant
            try:
                dtype = self._program.avals[number].dtype
            except AttributeError:  # a token
                continue
            rounded = rule is Rule.LOW or dtype.itemsize == 2
            provenances[number] = Provenance.EXACT if dtype == _BOOL else Provenance.NARROW if rounded else provenance

    def _solution(self, node: Node, name: str, provenance: Provenance) -> Provenance:
        """The provenance of what a linear system makes: as it is, where an iteration solves it to a tolerance."""
        found = {self._provenances[number] for number in node.ins}
        if name == "custom_linear_solve" and found.isdisjoint((Provenance.FACTOR, Provenance.SOLUTION)):
            return provenance
        return Provenance.FACTOR if found.issubset(PARAMETER_PROVENANCES) else Provenance.SOLUTION

    def enter(self, node: Node) -> None:
        """Visits the programs inside a node and notes what its results are made of."""
        facts = [self.fact(number) for number in node.ins]
        results = self._results(node, facts)
        for number, fact in zip(node.outs, results, strict=True):
            self._provenances[number] = fact.provenance

    def _results(self, node: Node, facts: list[Fact]) -> list[Fact]:
        params = node.params
        if node.name == "scan":
            consts, carry = scan_counts(node.eqn)
            return self._loop(node, params["jaxpr"], facts, consts, carry)
        if node.name == "while":
            consts, facts = params["body_nconsts"], facts[params["cond_nconsts"] :]
            return self._loop(node, params["body_jaxpr"], facts, consts, len(facts) - consts)
        bodies = params["branches"] if node.name == "cond" else [params[key] for key in _BODY if key in params][:1]
        operands = facts[1:] if node.name == "cond" else facts
        found = [self._inside(node, body, operands, i) for i, body in enumerate(bodies)]
        if not found:
            return [Fact(Provenance.DATA)] * len(node.outs)
        return [Fact(joined(fact.provenance for fact in each)) for each in zip(*found, strict=True)]

    def _loop(self, node: Node, body: Any, facts: list[Fact], consts: int, carry: int) -> list[Fact]:
        """The results of a loop: its carries start as they are given and come back as the body returns them."""
        program, _ = self._planner.recorded(body, self._place.inside(node))
        ends = zip(program.inputs[consts:], program.outputs[:carry], strict=False)
        states = [is_linear(program, *end) for end in ends]
        rows = [Fact(fact.provenance, row_of(fact.token)) for fact in facts[consts + carry :]]
        carried = [carried_provenance(fact.provenance, s) for fact, s in zip(facts[consts:], states, strict=False)]
        while True:
            inside = [*facts[:consts], *map(Fact, carried), *rows]
            results = self._inside(node, body, inside, 0)
            after = [joined((a, fact.provenance)) for a, fact in zip(carried, results, strict=False)]
            after = list(map(carried_provenance, after, states))
            if after == carried:
                return results
            carried = after

    def _inside(self, node: Node, body: Any, facts: list[Fact], which: int) -> list[Fact]:
        facts = [fact if fact.token else fact._replace(token=("argument", i)) for i, fact in enumerate(facts)]
        return self._products.visit(body, self._place.inside(node), facts, (*self._site, id(node), which))

    def product(self, node: Node, position: int) -> WideProduct | None:
        """The entry of a product that has to run in float32; `None` for a layer's."""
        avals = [self._program.avals[number] for number in (*node.ins[:2], *node.outs)]
        if not is_float32(avals[-1]) or any(aval.dtype.itemsize == 2 for aval in avals):
            return None  # cast by hand; integers times float32 numbers are a product as any other
        sources = {self._producers.source(number) for number in node.ins[:2]}
        registry = self._products.registry
        registry.forget((self._site, position))  # of an earlier visit, with other facts
        backward = self._place.is_backward(node)
        may_derive = not registry.is_empty and (backward or in_jvp(node))
        other = registry.forward_of(self._key(node, avals), self._site, sources) if may_derive else None
        if other is not None:
            as_sums = self._as_sums(node, other.cause)
            return other.cause and wide_product(other.cause, of_derivative=True, as_sums=as_sums)
        guarded = asks_for_float32(node.params.get("precision"), self._planner.policy.matmul_precision)
        if guarded:
            cause = None if self._interpolates(node) else Cause.PRECISION
        elif may_derive and self._line(node) in registry.systems:
            return wide_product(Cause.SYSTEM)
        else:
            cause = None if backward and not self._scales(node) else self._cause(node)
        if cause is not None or guarded:
            registry.add((self._site, position), self._key(node, avals), _Forward(self._site, sources, cause))
        return cause and wide_product(cause, as_sums=cause in _AS_SUMS)

    def _as_sums(self, node: Node, cause: Cause | None) -> bool:
        """Whether a derivative is best written as multiplications and additions: as a few, or as one long sum."""
        sizes = DotSizes.of(self._program, node) if cause in _AS_SUMS else None
        return sizes is not None and (sizes.contracted < TENSOR_CORE_DEPTH or sizes.contracted > sizes.result)

    def _key(self, node: Node, avals: Sequence[Any]) -> Any:
        """Equal for a product and its derivatives: the same primitive, on and of values of the same three sizes."""
        sizes = [str(known_size(aval) or aval.shape) for aval in avals]
        return node.name, *self._line(node), tuple(sorted(sizes))

    def _line(self, node: Node) -> tuple:
        """Equal for an operation and its derivatives, and for others of one line."""
        return source_line(node), self._place.scope_of(node)

    def _cause(self, node: Node) -> Cause | None:
        if self._exceeds(node):
            return Cause.TABLE
        if node.name == "conv_general_dilated":
            return Cause.FILTER if self._is_fixed_filter(node) else None
        if node.name != "dot_general":
            return None
        sizes = DotSizes.of(self._program, node)
        if self._producers.are_one(*node.ins) and self._contracts_one_axis(node):
            return Cause.SQUARE
        if sizes is None:
            return None
        provenances = [self._provenances[number] for number in node.ins]
        free = (sizes.left, sizes.right)
        if max(free) == 1 or (min(free) == 1 and self._is_in_memory(node, provenances)):
            return Cause.INNER
        if sizes.contracted < TENSOR_CORE_DEPTH and self._is_data(node, provenances, sizes):
            return Cause.SHORT
        # Times a parameter, a solution or Gram matrix is what a layer is given.
        if Provenance.SOLUTION in provenances and Provenance.PARAMETER not in provenances:
            return Cause.SOLUTION
        return Cause.GRID if self._is_expectation(node, provenances, sizes) else None

    def _is_in_memory(self, node: Node, provenances: Sequence[Provenance]) -> bool:
        """Whether a product of float32 data reads some of it from where it is float32 anyway."""
        data = all(provenance in UNROUNDED_PROVENANCES for provenance in provenances)
        return data and any(self._producers.is_stored(number) for number in node.ins)

    def _scales(self, node: Node) -> bool:
        """Whether an operand is one number that the program knows, as a loss's own cotangent is."""
        return any(
            self._provenances[number] is Provenance.EXACT and known_size(self._program.avals[number]) == 1
            for number in node.ins[:2]
        )

    def _contracts_one_axis(self, node: Node) -> bool:
        """Whether a product of a value with itself sums squares: a power of a matrix contracts two axes of it."""
        pairs = zip(node.ins, node.params["dimension_numbers"][0], strict=True)
        one, other = (self._producers.axes_of_source(number, axes) for number, axes in pairs)
        return one is None or other is None or one == other

    def _table(self, node: Node, operand: int) -> Table | None:
        """What is known of an operand of a product that is an array of constants."""
        number = node.ins[operand]
        if not self._constant[number]:
            return None
        numbers = self._producers.numbers(number)
        if numbers is None:
            return None
        axes = tuple(range(numbers.ndim))
        if node.name == "dot_general" and self._provenances[number] in (Provenance.EXACT, Provenance.TABLE):
            axes = node.params["dimension_numbers"][0][operand]
        return table_of(numbers, axes, self._planner.policy.compute_dtype)

    def _exceeds(self, node: Node) -> bool:
        tables = [self._table(node, operand) for operand in (0, 1)]
        return any(t is not None and (t.infinite or t.vanishing or t.loses_integers) for t in tables)

    def _is_data(self, node: Node, provenances: Sequence[Provenance], sizes: DotSizes) -> bool:
        """Whether a short contraction reads float32 data, which it keeps as a multiplication does."""
        grows, fills = sizes.result > max(sizes.operands), sizes.contracted == _HALF_DEPTH
        if set(provenances).isdisjoint(FLOAT32_PROVENANCES):
            # Parameters times parameters are dynamics and geometry, but for the two factors of a weight.
            both = provenances[0] is provenances[1] is Provenance.PARAMETER
            if not both or fills or (grows and sizes.contracted > _HALF_DEPTH):
                return False
            return not (grows and self._producers.becomes_weight(node.outs[0]))
        if fills and all(provenance in ROUNDED_PROVENANCES for provenance in provenances):
            return False  # activations times activations, as in attention
        if (
            not all(provenance in FLOAT32_PROVENANCES for provenance in provenances)
            and Provenance.STATE not in provenances
            and (grows or fills)
        ):
            return sizes.contracted < _HALF_DEPTH
        return not self._interpolates(node)

    def _interpolates(self, node: Node) -> bool:
        """Whether a product averages or selects rounded values with exact weights, which rounds no operand."""
        provenances = [self._provenances[number] for number in node.ins[:2]]
        if node.name != "dot_general" or sum(provenance in ROUNDED_PROVENANCES for provenance in provenances) != 1:
            return False
        table = self._table(node, 1 if provenances[0] in ROUNDED_PROVENANCES else 0)
        return table is not None and table.averages

    def _is_expectation(self, node: Node, provenances: Sequence[Provenance], sizes: DotSizes) -> bool:
        """Whether a product is a transform of float32 data by a table, or averages the numbers of one."""
        for i, number in enumerate(node.ins):
            # A table that the program computes. One that is captured may be a frozen network's weight.
            computed = self._constant[number] and provenances[i] in (Provenance.EXACT, Provenance.TABLE)
            if computed and provenances[1 - i] in UNROUNDED_PROVENANCES:
                table = self._table(node, i)
                return table is not None and not table.uniform  # uniform: a sum, which dots accumulate in float32
        if sizes.result * _MOST_EXPECTATIONS > max(sizes.operands):
            return False
        for i, provenance in enumerate(provenances):
            table, narrow = self._table(node, i), provenances[1 - i] is Provenance.NARROW
            if table is not None and (provenance is Provenance.TABLE or table.ordered):
                # Weights of an average that are rounded already, times numbers that 16 bits hold, lose nothing more.
                return not table.exact or not (narrow or table.averages)
        return False

    def _is_fixed_filter(self, node: Node) -> bool:
        """Whether a convolution blurs, differentiates or interpolates each channel by itself, with known weights."""
        kernel, numbers = node.ins[1], node.params["dimension_numbers"]
        provenance, aval = self._provenances[kernel], self._program.avals[kernel]
        if aval.shape[numbers.rhs_spec[1]] != 1 or provenance not in (
            Provenance.EXACT,
            Provenance.TABLE,
            Provenance.DATA,
        ):
            return False
        filters = aval.shape[numbers.rhs_spec[0]]
        source = self._producers.source(kernel)
        source = known_size(self._program.avals[source]) if isinstance(source, int) else None
        spread = source is not None and source * filters <= math.prod(aval.shape)  # one filter, repeated
        if filters == 1 or spread or provenance is not Provenance.DATA:
            return True
        # An array of as many filters as channels: a frozen network's, unless they are few different ones.
        values = self._producers.numbers(kernel) if self._constant[kernel] else None
        if values is None:
            return False
        rows = np.moveaxis(values, numbers.rhs_spec[0], 0).reshape(filters, -1)
        return len(np.unique(rows, axis=0)) <= _FEW_FILTERS


_BODY = ("jaxpr", "call_jaxpr")
