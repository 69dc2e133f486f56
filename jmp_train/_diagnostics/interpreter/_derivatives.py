"""Which forward operations compute a derivative: those that only the backward pass reads.

JAX computes the factor 1 / (2 sqrt(x)) of a root's derivative in the forward pass and keeps it; by its name stack it is
an ordinary forward operation. Decides this from who reads what.
"""

from __future__ import annotations

from typing import NamedTuple

from ..._autocast._flow import Place
from ..._jaxpr import Program


class Kept(NamedTuple):
    """Of a program: the nodes that only serve the backward pass, and what is so of other nodes' results.

    Attributes:
      nodes: their positions.
      results: by position of a node, the positions of its results that only the backward pass reads.
    """

    nodes: frozenset[int]
    results: dict[int, frozenset[int]]


def kept_for_backward(program: Program, place: Place, kept_outputs: frozenset[int]) -> Kept:
    """Goes backwards through a program of which some outputs, by position, are only read by the backward pass."""
    outputs = list(enumerate(program.outputs))
    forward = {number for position, number in outputs if position not in kept_outputs}
    read = {number for position, number in outputs if position in kept_outputs}
    nodes: set[int] = set()
    results: dict[int, frozenset[int]] = {}
    for position, node in reversed(list(enumerate(program.nodes))):
        if place.is_backward(node):
            read.update(node.ins)
            continue
        kept = frozenset(i for i, number in enumerate(node.outs) if number in read and number not in forward)
        if kept:
            results[position] = kept
        if kept and forward.isdisjoint(node.outs):
            nodes.add(position)
            read.update(node.ins)
        else:
            forward.update(node.ins)
    return Kept(frozenset(nodes), results)
