"""The products of a whole program that run in float32 because they are no layers, with their derivatives.

    loss = sum (sin (dot_general x (transpose x)))
    c = dot_general x (transpose x)                 SQUARE, so that it runs in float32
    d = dot_general (cos c) x                       in float32 too: the derivative of `c`
    e = dot_general h w                             a layer: no entry of its own, and LOW by the table

A product that is no layer of a network (`causes.py`), or for which somebody asked for float32 by name, runs in
float32 forward and backward (`derivatives.py`).

Decides which products these are and why, before dtypes are assigned, including those inside loops, branches and calls.
Since only here the whole program is in view, it also decides which sums update parameters (`updates.py`) and which
values are states of unrolled loops (`unrolled.py`). Does not decide anything about other equations; see `passes`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...._jaxpr import (
    CALLS,
    LOOPS,
    ClosedJaxpr,
    Jaxpr,
    Loop,
    Node,
    branches_of,
    is_in_function_of_jax,
    loop_of,
    open_jaxpr,
    source_line,
    sub_jaxprs,
)
from ...._sizes import assumed
from ...ir import Place, Precision, is_float32, is_sixteen_bit
from ...primitives import ADDS, PLAIN_DOTS, SYSTEMS, TABLE, Entry, Rule
from ..dot_sizes import asks_for_float32
from ..wide_product import Cause, WideProduct, wide_product
from .causes import ProductCauses
from .consumers import sums_of_rows
from .derivatives import Forward, Registry
from .provenance import Known, Provenance, Values, carried_provenance, joined_provenance, provenance_after_loop
from .recurrences import carry_kinds
from .unrolled import find_unrolled
from .updates import STEP, UPDATE, Updates

if TYPE_CHECKING:
    from ...planner import Planner

_PROVENANCE_OF = {Precision.LOW: Provenance.NARROW, Precision.WEAK: Provenance.PARAMETER}


class Products:
    """Finds the products of a whole program that are no layers, those inside loops, branches and calls included."""

    def __init__(self, planner: "Planner"):
        self.planner = planner
        self._updates = Updates()
        # By the site of a program; outer programs come first. A loop's body is visited until its carries are known, and
        # the last visit counts.
        self._visits: dict[tuple, _Visit] = {}
        # By the site of a loop: the provenances of its carries with which its visits start, and with which they end.
        self.carries = dict[tuple, tuple[list[Provenance], list[Provenance]]]()
        self.registry = Registry()
        self.is_rule = False  # whether it is a derivative rule, planned without the program to which it belongs

    def find(self, jaxpr: ClosedJaxpr | Jaxpr, precisions: Sequence[Precision], place: Place) -> None:
        """Replaces the entries of those products by a `WideProduct`, in the programs that the planner has cached."""
        facts = [Known(_PROVENANCE_OF.get(each, Provenance.DATA), ("argument", i)) for i, each in enumerate(precisions)]
        self.is_rule = place.backward
        self.visit(jaxpr, place, facts, ())
        # After all visits, since `visit` looks for products whose entry is the table's. A program that several nodes
        # call is planned once: a product that one of them needs in float32 runs in float32 for all.
        for visit in self._visits.values():
            for position, entry in visit.found.items():
                visit.entries[position] = entry
        steps = dict[int, list[bool]]()
        for site, visit in self._visits.items():
            found = find_unrolled(visit.values, visit.entries, visit.place, steps.get(site[-2]) if site else None)
            self.planner.states |= found.states
            self.planner.starts |= found.starts
            steps |= found.steps

    def values_of(self, site: tuple) -> Values:
        """What is known of the values of the program at a site, from the last visit."""
        return self._visits[site].values

    def visit(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place, facts: Sequence[Known], site: tuple) -> list[Known]:
        """Looks at every product of a program; returns what is known of its results.

        Args:
          jaxpr: the program.
          place: the equation to which it belongs.
          facts: what is known of its arguments.
          site: the nodes that lead to it.
        """
        program, entries = self.planner.recorded(jaxpr, place)
        visit = self._visits[site] = _Visit(self, Values(program, facts), place, site, entries)
        for position, (node, entry) in enumerate(zip(program.nodes, entries, strict=True)):
            if entry.rule is Rule.ENTER:
                visit.enter(node)
                continue
            new = None
            if node.name in PLAIN_DOTS and entry is TABLE[node.name]:  # no region, scope or edit says otherwise
                new = visit.product(node, position)
            elif node.name in SYSTEMS:
                self.registry.systems.add(visit.line(node))
            elif node.name in ADDS:
                new = self._updates.of(node, entry, visit.values, place, position)
            if new is not None:
                visit.found[position] = entry = new
            visit.values.add(node, entry)
            if entry is UPDATE or entry is STEP:  # HIGH by its rule, but narrows beside 16-bit operands
                provenance = Provenance.PARAMETER if entry is UPDATE else Provenance.NARROW
                visit.values.give(node.outs[0], Known(provenance))
        return [visit.values.result(number) for number in program.outputs]


class _Visit:
    """One program while its products are looked at.

    Args:
      products: the whole program's.
      values: what is known of the values of this program.
      place: the equation to which it belongs.
      site: the nodes that lead to it.
      entries: of its nodes, as the rules give them.

    Attributes:
      found: the new entries, by the positions of their nodes.
    """

    def __init__(self, products: Products, values: Values, place: Place, site: tuple, entries: list[Entry]):
        self._products, self._planner, self.found = products, products.planner, dict[int, Entry]()
        self.values, self.place, self.entries, self._site = values, place, entries, site
        self._causes = ProductCauses(values, self._planner.policy.compute_dtype, place.body_of in LOOPS)

    def enter(self, node: Node) -> None:
        """Visits the programs inside a node and notes what is known of its results."""
        results = self._results(node, [self.values.fact(number) for number in node.ins])
        for number, fact in zip(node.outs, results, strict=True):
            self.values.give(number, fact)

    def _results(self, node: Node, facts: list[Known]) -> list[Known]:
        if (loop := loop_of(node.eqn)) is not None:
            return self._loop(node, loop, facts[loop.skip :])
        skip, bodies = branches_of(node.eqn)
        branches = [self._inside(node, body, facts[skip:], i) for i, body in enumerate(bodies)]
        if node.name in CALLS:
            return branches[0]
        if bodies:
            return [Known(joined_provenance(fact.provenance for fact in each)) for each in zip(*branches, strict=True)]
        for i, body in enumerate(sub_jaxprs(node.params)):  # planned behind float32 boundaries: its arguments are data
            self._inside(node, body, [Known(Provenance.DATA)] * len(open_jaxpr(body).invars), i)
        return [Known(Provenance.DATA)] * len(node.outs)

    def _loop(self, node: Node, loop: Loop, facts: list[Known]) -> list[Known]:
        """What is known of a loop's results, given its operands: carries are joined with the results of the body."""
        body, consts, carry, *_ = loop
        given = facts[consts + carry :]  # the rows of a scan; none of a `while`
        are_solutions = [fact.provenance is Provenance.SOLUTION for fact in given]
        kinds = carry_kinds(self._planner.inlined(loop.body, self.place.inside(node)), loop, are_solutions)
        estimates = any(is_estimate for _, is_estimate in kinds)
        rows = [self._row(fact, estimates, node) for fact in given]
        carried = [
            carried_provenance(fact.provenance, *kind) for fact, kind in zip(facts[consts:], kinds, strict=False)
        ]
        # A carry's provenance is joined with that of the body's result until nothing changes. A carry is no constant,
        # and no value outside equals it: only its provenance is known. The body of a loop around is visited several
        # times, and this loop with it: from the same provenances it starts with those that it ended with the last time.
        # Otherwise the visits would double with every level of nested loops.
        key, starts = (*self._site, id(node)), carried
        known, ends = self._products.carries.get(key, ([], []))
        carried = ends if known == starts else starts
        while True:
            inside = [*facts[:consts], *map(Known, carried), *rows]
            results = self._inside(node, body, inside, 0)
            after = [joined_provenance((a, fact.provenance)) for a, fact in zip(carried, results, strict=False)]
            after = [carried_provenance(each, *kind) for each, kind in zip(after, kinds, strict=True)]
            if after == carried:
                self._products.carries[key] = starts, carried
                if node.name == "scan":
                    inner = self._products.values_of((*self._site, id(node), 0))
                    arrays = zip(inner.program.outputs[carry:], node.outs[carry:], strict=True)
                    self.values.stack(list(arrays), inner, assumed(node.params["length"]))
                return [Known(provenance_after_loop(fact.provenance)) for fact in results]
            carried = after

    def _row(self, fact: Known, estimates: bool, node: Node) -> Known:
        """What is known of a row of a value, inside of a scan that reads the rows one by one."""
        filtered = estimates and fact.provenance is Provenance.SOLUTION  # in a smoother, an estimate of the filter
        provenance = Provenance.ESTIMATE if filtered else fact.provenance
        length = assumed(node.params["length"])
        return Known(provenance, ("row", fact.token), sums=lambda: sums_of_rows(fact.sums(), length))

    def _inside(self, node: Node, body: Any, facts: list[Known], which: int) -> list[Known]:
        # Inputs that are one value outside have one token. A carry has none, and gets one that no other input has: two
        # carries are two values, whatever their provenance.
        facts = [fact if fact.token else fact._replace(token=("argument", i)) for i, fact in enumerate(facts)]
        return self._products.visit(body, self.place.inside(node), facts, (*self._site, id(node), which))

    def product(self, node: Node, position: int) -> WideProduct | None:
        """The entry of a product that has to run in float32; `None` for a layer's."""
        # Not of a ragged dot's third operand, the sizes of its groups.
        avals = [self.values.program.avals[number] for number in (*node.ins[:2], *node.outs)]
        if not is_float32(avals[-1]) or any(map(is_sixteen_bit, avals)):
            return None  # cast by hand; integers times float32 numbers are a product like any other
        sources = {self.values.producers.source(number) for number in node.ins[:2]}
        registry, where, line = self._products.registry, (self._site, position), self.line(node)
        key = (node.name, *line)
        registry.forget(where, key)  # of an earlier visit, with other facts
        # In bodies of a backward pass, and in derivative rules, `place` says that they are backward, and name stacks do
        # not. Equations that a rule computes again, to differentiate them, are recorded under "jvp(": no derivatives.
        backward = node.scope.is_backward or (self.place.is_backward(node) and not node.scope.in_jvp)
        may_derive = backward or node.scope.in_jvp  # a tangent is a derivative, too
        other = registry.forward_of(key, self._site, sources, avals, backward) if may_derive else None
        if other is not None:
            return other.cause and wide_product(other.cause, of_derivative=True)
        guarded = asks_for_float32(node.params.get("precision"), self._planner.policy.matmul_precision)
        if guarded:
            # Nobody asked for the precision of `jax.image.resize`, whose default is `Precision.HIGHEST`.
            by_default = is_in_function_of_jax(node, "_resize") and self._causes.interpolates(node)
            cause = None if by_default else Cause.PRECISION
        elif may_derive and line in registry.systems:
            # The derivative of a factorization or a system consists of products with its factors, recorded on its line.
            return wide_product(Cause.SYSTEM)
        else:
            cause = self._causes.of(node) if not backward or self._is_no_derivative(node) else None
        # Also if it was guarded but has no cause: its derivatives have the same precision, and have to be narrow too.
        if cause is not None or guarded:
            registry.add(where, key, Forward(self._site, sources, avals, cause))
        elif not backward:
            registry.layers[line].append(avals)
        return cause and wide_product(cause)

    def _is_no_derivative(self, node: Node) -> bool:
        """Whether a product in a backward pass is not the derivative of a layer of the program.

        Such are a product scaled by a loss's own cotangent, and products of data on a line without a layer: in
        functions that `jax.linear_transpose` returned, of which the program has only the transpose, and in solvers that
        derivative rules call.
        """
        if self._causes.scales(node):
            return True
        if self._products.is_rule:
            return False  # a rule's arguments are float32, whatever it differentiates
        return self._causes.reads_data(node) and not self._products.registry.layers[self.line(node)]

    def line(self, node: Node) -> tuple:
        """A key that is equal for an operation and its derivatives, and for other operations of the same line."""
        return source_line(node), self.place.scope_of(node)
