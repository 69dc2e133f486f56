"""The mask of a relu's derivative, read off what the relu returns: that is positive where what it was given is.

What it returns is a dot's operand and in memory, in 16 bits, whatever becomes of the mask. What it was given often is
not, and a mask made of that waits for the backward pass, a byte a value.

Positive numbers that round to zero in float16, those up to 2^-25, may then have no gradient. The number that goes on to
the dot is zero for them, too.

Decides which comparisons that holds for. Does not decide whether a mask is kept; see `_states.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax.core import Tracer

from .._jaxpr import Node, Program, flatten


def masked_by_results(program: Program) -> Program:
    """The program whose comparisons of what a relu is given with zero compare what it returned before."""
    results: dict[int, int] = {}
    nodes: list[Node] = []
    for node in program.nodes:
        if is_relu(node, program):
            results.update(dict.fromkeys(node.ins, node.outs[0]))
        elif is_positive(node, program) and node.ins[0] in results:
            node = dataclasses.replace(node, ins=(results[node.ins[0]], node.ins[1]))
        nodes.append(node)
    return dataclasses.replace(program, nodes=tuple(nodes)) if results else program


def is_positive(node: Node, program: Program) -> bool:
    """Whether a node is `x > 0`, which says the same of a number rounded to 16 bits, 2^-25 apart."""
    return node.name == "gt" and _is_zero(program.known.get(node.ins[1]))


def is_relu(node: Node, program: Program) -> bool:
    """Whether a node is `max(x, 0)`, alone or, as `jax.nn.relu` is, with a derivative rule of its own."""
    if node.name == "max":
        return any(_is_zero(program.known.get(number)) for number in node.ins)
    if node.name != "custom_jvp_call" or len(node.ins) != 1:
        return False
    body = flatten(node.params["call_jaxpr"])
    return len(body.nodes) == 1 and body.inputs[0] in body.nodes[0].ins and is_relu(body.nodes[0], body)


def _is_zero(value: Any) -> bool:
    return value is not None and not isinstance(value, Tracer) and np.size(value) == 1 and not np.any(value)
