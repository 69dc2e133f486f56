"""Questions about loops: does a carry accumulate, is it a residual stream, does the end depend on a computed float.

Decides them by following dependencies through the body. Does not decide dtypes; see `_control_flow.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from .._jaxpr import Program, flatten
from ._flow import DOTS, Place

_ADDS = frozenset({"add", "add_any", "sub"})
_CASTS = frozenset({"convert_element_type", "copy", "optimization_barrier"})
_PASSES = frozenset({"convert_element_type", "select_n", "reshape", "copy", "optimization_barrier", "transpose"})


def dependents(program: Program, numbers: Iterable[int], around: frozenset[str] = frozenset()) -> set[int]:
    """The values that depend on any of `numbers`, which are among them, by a path around the primitives `around`."""
    found = set(numbers)
    for node in program.nodes:
        if node.name not in around and not found.isdisjoint(node.ins):
            found.update(node.outs)
    return found


def may_be_narrow(body: Program, place: Place, consts: int, carry: int, position: int) -> bool:
    """Whether a carry in the compute dtype loses no more than the same layers do outside of a loop.

    Either the body rounds all that it makes of the carry for a dot anyway, as a plain recurrent network does, or the
    carry is the residual stream of a stack of layers, whose weights come in row by row. The state of an integrator, a
    recursion or an average is neither: it is built up of many small terms; nor are weights that a loop updates.
    """
    start, result = body.inputs[consts + position], body.outputs[position]
    if result not in dependents(body, [start], DOTS):
        return True
    if not place.backward and any(map(place.is_backward, body.nodes)):
        return False
    rows = {*body.known, *body.inputs[consts + carry :]}
    for node in body.nodes:
        if rows.issuperset(node.ins):
            rows.update(node.outs)
    ours = dependents(body, [start])
    dots = (node for node in body.nodes if node.name in DOTS and not ours.isdisjoint(node.ins))
    by_layers = any(not rows.isdisjoint(node.ins) for node in dots)
    return by_layers and is_stream(body, consts + position, position)


def accumulates(program: Program, position: int, result: int) -> bool:
    """Whether the carry at input `position`, returned as output `result`, is a running sum.

    It is one if the body adds terms to it that do not depend on it, as a gradient accumulator does. A residual stream
    is none: what it adds is a function of itself.
    """
    start, number = program.inputs[position], program.outputs[result]
    ours = dependents(program, [start])
    producer = {out: node for node in program.nodes for out in node.outs}
    added = False
    while number != start:
        node = producer.get(number)
        if node is None or node.name not in _ADDS | _PASSES:
            return False
        through = [operand for operand in node.ins if operand in ours]
        if len(through) != 1:
            return False
        added |= node.name in _ADDS
        number = through[0]
    return added


def adds_terms(program: Program, position: int, result: int) -> bool:
    """Whether the carry is a running sum to which the body adds what it would return if given zero."""
    start, number = program.inputs[position], program.outputs[result]
    producer = {out: node for node in program.nodes for out in node.outs}
    if not accumulates(program, position, result):
        return False
    ours = dependents(program, [start])
    while number != start:
        node = producer[number]
        first = node.ins[0]
        if node.name not in _ADDS | _CASTS or (node.name == "sub" and first not in ours):
            return False
        number = next(operand for operand in node.ins if operand in ours)
    return True


def is_stream(program: Program, position: int, result: int) -> bool:
    """Whether a carry is a residual stream: the body returns it with functions of itself added, and nothing else done.

    The state of an LSTM or a moving average is none: it is scaled on the way, and small terms have to last.
    """
    start, pending = program.inputs[position], [program.outputs[result]]
    producer = {out: node for node in program.nodes for out in node.outs}
    seen = set(pending)
    while pending:
        number = pending.pop()
        if number == start:
            return not accumulates(program, position, result)
        node = producer.get(number)
        if node is not None and node.name in _ADDS | _PASSES:
            pending.extend(operand for operand in node.ins if operand not in seen)
            seen.update(node.ins)
    return False


def is_counted(params: dict[str, Any]) -> bool:
    """Whether the condition of a `while` depends on no floating value that its body computes."""
    condition, body = flatten(params["cond_jaxpr"]), flatten(params["body_jaxpr"])
    skip, consts = params["cond_nconsts"], params["body_nconsts"]
    carried = range(len(body.outputs))

    def depends(program: Program, source: int, target: int) -> bool:
        return target in dependents(program, [source])

    deciding = {i for i in carried if depends(condition, condition.inputs[skip + i], condition.outputs[0])}
    pending = list(deciding)
    while pending:
        result = body.outputs[pending.pop()]
        more = {i for i in carried if depends(body, body.inputs[consts + i], result)} - deciding
        deciding |= more
        pending.extend(more)
    avals = [body.avals[number] for number in body.outputs]
    return not any(jnp.issubdtype(avals[i].dtype, jnp.inexact) for i in deciding)
