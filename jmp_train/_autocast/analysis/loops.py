"""Questions about loops: does a carry accumulate, is it a residual stream, does the end depend on a computed float.

    c -> add c (dot_general x w)                  c accumulates: what is added does not depend on it
    c -> add c (tanh (dot_general c w))           c is a residual stream: what is added is a function of it
    c -> add (mul 0.9 c) (tanh (dot_general c w)) neither: it is scaled on the way, so that small terms have to last

Decides them by following dependencies through the body. Does not decide dtypes; see `passes.control_flow`.
"""

import enum
from collections.abc import Callable, Container, Iterable
from typing import Any

import jax.numpy as jnp

from ..._jaxpr import BARRIER, FlatJaxpr, Loop, Node, branches_of, flatten, loop_of
from ..ir import Place, is_float32, is_sixteen_bit
from ..primitives import ADDS, DOTS, Trait, having

_COMMUTES = frozenset({"add", "add_any"})  # `x - c` changes the carry's sign in each iteration: no running sum
_ACCUMULATES = having(Trait.ACCUMULATES)
_PASSES = having(Trait.MOVES) | {"convert_element_type"}
_HANDS_ON = having(Trait.MOVES | Trait.TRANSFERS)
_ADDS_TO_STREAM = ADDS | _PASSES | {"select_n"}  # a selection is a mask, such as that of steps beyond a sequence's end


def dependents(
    program: FlatJaxpr, numbers: Iterable[int], through: Callable[[Node], bool] = lambda node: True
) -> set[int]:
    """`numbers`, and the values that depend on any of them by a path `through` some nodes."""
    found = set(numbers)
    for node in program.nodes:
        if not found.isdisjoint(node.ins) and through(node):
            found.update(node.outs)
    return found


def sources(
    program: FlatJaxpr, numbers: Iterable[int], through: Callable[[Node], bool] = lambda node: True
) -> set[int]:
    """`numbers`, and the values on which any of them depends by a path `through` some nodes."""
    found = set(numbers)
    for node in reversed(program.nodes):
        if not found.isdisjoint(node.outs) and through(node):
            pairs = zip(node.ins, node.outs, strict=False)  # of a barrier, which has as many of both
            found.update([n for n, result in pairs if result in found] if node.name == BARRIER else node.ins)
    return found


def may_be_narrow(
    body: FlatJaxpr, place: Place, weights: Iterable[int], start: int, result: int, wide: Container[int]
) -> bool:
    """Whether a carry in the compute dtype loses no more than the same layers do outside of a loop.

    Either the body returns the carry unchanged, as ring attention does with keys that go from device to device; or a
    dot rounds everything that the body computes from the carry anyway, as in a plain recurrent network; or the carry is
    the residual stream of a stack of layers, whose weights are rows of the loop. The state of an integrator, a
    recursion or an average is none of these: it adds up many small terms. Nor are weights that a loop updates, nor the
    gradient that comes back through such updates, since the rows of their loops are activations only.

    Args:
      body: the loop's body, whatever it rematerializes written out.
      place: the place of the body.
      weights: the arguments of `body` that are rows of parameters.
      start, result: the numbers of the carry as an argument of `body` and as its result.
      wide: the ids of equations that are products kept in float32.
    """
    if start in sources(body, [result], lambda node: node.name in _HANDS_ON):
        return True
    # A 16-bit dot rounds the carry anyway; one that is kept in float32 does not.
    if result not in dependents(body, [start], lambda node: node.name not in DOTS or id(node.eqn) in wide):
        return True
    # A loop of the forward pass that takes gradients inside updates weights, which are its carries.
    if not place.backward and any(map(place.is_backward, body.nodes)):
        return False
    rows = set(weights)  # and values computed from rows of parameters and known values alone
    for node in body.nodes:
        if not rows.isdisjoint(node.ins) and all(n in rows or n in body.known for n in node.ins):
            rows.update(node.outs)
    ours = dependents(body, [start])
    dots = (node for node in body.nodes if node.name in DOTS and not ours.isdisjoint(node.ins))
    by_layers = any(not rows.isdisjoint(node.ins) for node in dots)
    return by_layers and is_residual_stream(body, start, result)


class Relation(enum.IntEnum):
    """How a value in a loop's body depends on one carry."""

    NOTHING = 0
    CARRY = 1  # it is the carry, perhaps rearranged, cast to another width or masked
    SUM = 2  # it is the carry with terms added that do not depend on it
    OTHER = 3  # it depends on the carry in another way


HANDED_ON = (Relation.CARRY, Relation.SUM)
HOLDS_SUMS = frozenset({"scan", "while", "cond", "remat2"})


def accumulates(program: FlatJaxpr, start: int, result: int) -> bool:
    """Whether the carry that is the body's argument `start` and its result `result` is a running sum.

    It is one if the body adds terms to it that do not depend on it, as to a gradient accumulator. A residual stream is
    none: functions of itself are added to it.
    """
    return relations(program, start).get(result) is Relation.SUM


def relations(program: FlatJaxpr, start: int) -> dict[int, Relation]:
    """How values depend on `start`; the other results of the same equations are listed too, with no relation to it."""
    found = {start: Relation.CARRY}
    for node in program.nodes:
        operands = [found.get(number, Relation.NOTHING) for number in node.ins]
        if any(operands):
            found.update(zip(node.outs, _results(program, node, operands), strict=True))
    return found


def _results(program: FlatJaxpr, node: Node, operands: list[Relation]) -> list[Relation]:
    """The relations of a node's results, given those of its operands, of which one at least depends on the carry."""
    if node.name == BARRIER:
        return operands
    related = [relation for relation in operands if relation]
    other = [Relation.OTHER] * len(node.outs)
    if Relation.OTHER in related:
        return other
    # A selection between the carry and a sum of it, as for masked steps, is a sum. Its predicate is no carry or sum,
    # since these are floating.
    if node.name == "select_n":
        return [max(related)]
    if len(related) > 1:  # a sum of the carry and itself: what is added depends on it
        return other
    position = next(i for i, relation in enumerate(operands) if relation)
    if node.name in HOLDS_SUMS:
        inside = relations_through(node, position)
        # A sum that starts a carry of an inner loop, and that the loop only adds to, is still a sum.
        return [max(relation, related[0]) if relation else relation for relation in inside]
    if node.name in _PASSES:
        aval = program.avals[node.outs[0]]
        return related if is_float32(aval) or is_sixteen_bit(aval) else other
    if node.name in _ACCUMULATES and (node.name in _COMMUTES or position == 0):
        return [Relation.SUM]
    return other


def relations_through(node: Node, position: int) -> list[Relation]:
    """How the results of a loop, a branch or a call depend on one of its operands, which is a carry or sum."""
    skip, bodies = branches_of(node.eqn)
    if bodies:  # whose predicate, of integers, is no sum
        programs = list(map(flatten, bodies))
        found = [(program, relations(program, program.inputs[position - skip])) for program in programs]
        each = [[inner.get(number, Relation.NOTHING) for number in program.outputs] for program, inner in found]
        return list(map(max, zip(*each, strict=True)))
    loop: Any = loop_of(node.eqn)
    carried = position - loop.skip - loop.consts
    if not 0 <= carried < loop.carry:  # read in every iteration, or row by row
        return [Relation.OTHER] * len(node.outs)
    program = flatten(loop.body)
    inner = relations(program, program.inputs[loop.consts + carried])
    # Any other result depends on the carry of several iterations.
    found = [Relation.OTHER if inner.get(number) else Relation.NOTHING for number in program.outputs]
    found[carried] = inner.get(program.outputs[carried], Relation.NOTHING)
    return found


def is_residual_stream(program: FlatJaxpr, start: int, result: int) -> bool:
    """Whether a carry is a residual stream: the body only adds functions of the carry to it.

    The state of an LSTM or a moving average is none: it is scaled in each iteration, and small terms have to last.
    """
    added_to = sources(program, [result], lambda node: node.name in _ADDS_TO_STREAM)
    return start in added_to and not accumulates(program, start, result)


def is_counted(loop: Loop) -> bool:
    """Whether the end of a loop depends on no floating value that its body computes, as for a `scan`."""
    if loop.condition is None:
        return True
    condition, body = flatten(loop.condition), flatten(loop.body)
    # Carries that decide the end, and those from which these are computed in the iteration before, and so on.
    read = sources(condition, condition.outputs)
    pending = {i for i, number in enumerate(condition.inputs[loop.skip :]) if number in read}
    deciding: set[int] = set()
    while pending:
        deciding |= pending
        read = sources(body, [body.outputs[i] for i in pending])
        pending = {i for i in range(loop.carry) if body.inputs[loop.consts + i] in read} - deciding
    avals = [body.avals[number] for number in body.outputs]
    return not any(jnp.issubdtype(avals[i].dtype, jnp.inexact) for i in deciding)
