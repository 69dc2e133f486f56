"""The rule of each equation of a program, by region, scope, edit and table in this order, and by its operands.

    a = mul x x             HIGH, where the table says WIDEST: a square
    b = add x:i32 y:i32     RECORDED: not recorded in float32
    c = dot_general x w     LOW, as the table says; RECORDED in a `full_precision` region

Decides the rule of an equation before any dtype is known. Does not decide dtypes; see `passes.assign_dtypes`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..._dtypes import FLOAT32, FLOAT64
from ..._jaxpr import FULL_PRECISION_MARK, FlatJaxpr, Node, applies_function, region_mark
from ..ir import Place, is_float32, is_sixteen_bit
from ..primitives import DOTS, TABLE, Entry, Rule
from ..rules import Rules
from .producers import Producers

if TYPE_CHECKING:
    from ..passes.rewrites import Rewrite


def entries_of(program: FlatJaxpr, rules: Rules, place: Place, rewrites: "Sequence[Rewrite]") -> list[Entry]:
    """The rule of every node, with its reason."""
    producers = Producers(program)
    return [_entry(node, rules, place, producers, rewrites) for node in program.nodes]


def _of_tree(producers: Producers, node: Node, entry: Entry) -> Entry:
    """The entry of an addition of two parts of one value; cumulative sums that are written as trees consist of these.

    `x[:4] + x[4:]`, and again of the result, adds up many numbers, with a rounding per level in 16 bits.
    """
    if node.ins[0] == node.ins[1]:  # `x + x` is a factor of two, and sums nothing
        return entry
    left, right = map(producers.whole, node.ins)
    # The addition of disjoint parts joins them, and sums nothing.
    of_one = left is not None and left == right and not producers.are_disjoint(*node.ins)
    return Entry(Rule.HIGH, "adds parts of one value, as a sum written as a tree does") if of_one else entry


def _entry(node: Node, rules: Rules, place: Place, producers: Producers, rewrites: "Sequence[Rewrite]") -> Entry:
    entry, program = rules.entry(node.name), producers.program
    # A region takes precedence over everything below. Of the two marks only this one is an equation: a call marked
    # `low_precision` is inlined, and its nodes say so.
    if node.name == "jit" and region_mark(node.eqn) == FULL_PRECISION_MARK:
        return Entry(Rule.RECORDED, "full_precision region")
    scoped = rules.scope_dtype(place.scope_of(node)) if rules.scopes else None
    low_region = place.low_region or node.low_region
    if scoped == FLOAT32 and not low_region and entry.rule is not Rule.ENTER:  # a narrower scope may be inside
        return Entry(Rule.RECORDED, "with_scopes: float32")
    if node.name == "scatter" and applies_function(node.eqn):
        return Entry(Rule.RECORDED, "carries a user's function compiled for float32")
    if entry.rule in (Rule.ENTER, Rule.RECORDED):
        # JAX records a cast from float32 to float32 where a weak type ends.
        if node.name == "convert_element_type" and all(is_float32(program.avals[n]) for n in (*node.ins, *node.outs)):
            return Entry(Rule.SHAPE, "no change of dtype")
        return entry
    avals = [program.avals[i] for i in node.ins]
    if not any(map(is_float32, avals)):
        if entry.never_low and any(map(is_sixteen_bit, avals)):  # hand-cast code accumulates in float32, too
            return entry
        return Entry(Rule.RECORDED, "not recorded in float32")
    if node.name in DOTS:  # one of float32 and float64 numbers, or of complex ones, has no 16-bit form
        for aval in (*avals, program.avals[node.outs[0]]):
            if aval.dtype == FLOAT64 or np.issubdtype(aval.dtype, np.complexfloating):
                return Entry(Rule.RECORDED, f"it reads or makes {aval.dtype.name}")
    if low_region or scoped is not None:
        reason = "low_precision region" if low_region else "with_scopes"
        return entry if entry.never_low else Entry(Rule.LOW, reason)
    return _refine(node, entry, producers, rewrites)


def _refine(node: Node, entry: Entry, producers: Producers, rewrites: "Sequence[Rewrite]") -> Entry:
    # `jax.lax.mul(x, y, out_dtype=...)`.
    if node.params.get("out_dtype") is not None:
        return Entry(Rule.RECORDED, "the user asked for this dtype")
    if entry is not TABLE[node.name]:  # an edit of the user's, which stands
        return entry
    if node.name in ("add", "add_any"):
        return _of_tree(producers, node, entry)
    if node.name == "mul" and node.ins[0] == node.ins[1]:
        return Entry(Rule.HIGH, "a square: float16 overflows at 256 squared")
    # A rewrite may compute without the sum for which the table says HIGH, and then gives another entry.
    for rewrite in rewrites if entry.rule is Rule.HIGH else ():
        if node.name in rewrite.entry:
            entry = rewrite.entry[node.name](node) or entry
    return entry
