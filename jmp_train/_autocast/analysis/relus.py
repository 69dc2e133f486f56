"""Which equations are relus, and which compare with zero, as the mask of a relu's derivative does.

    y = max x 0.0        a relu of x, as is a call of `jax.nn.relu`
    m = gt x 0.0         whether x is positive

A rewrite asks this of recorded programs, and `save_or_remat` of planned ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._jaxpr import FlatJaxpr, Node, flatten
from .constants import is_zero

RELUS = frozenset({"max", "custom_jvp_call"})  # what may be one


def is_positive(node: Node, program: FlatJaxpr) -> bool:
    """Whether a node is `x > 0`, of which rounding `x` to 16 bits changes nothing but for `0 < x <= 2^-25`."""
    return node.name == "gt" and _is_zero(program.known.get(node.ins[1]))


def relu_operand(node: Node, program: FlatJaxpr) -> int | None:
    """The `x` of a node that is `max(x, 0)`, alone or, as `jax.nn.relu` is, with a derivative rule of its own."""
    if node.name == "max":
        others = [number for number in node.ins if not _is_zero(program.known.get(number))]
        same = len(others) == 1 and program.avals[others[0]].shape == program.avals[node.outs[0]].shape
        return others[0] if same else None
    if node.name != "custom_jvp_call" or len(node.ins) != 1 or len(node.outs) != 1:
        return None
    body = flatten(node.params["call_jaxpr"])
    whole = len(body.nodes) == 1 and body.outputs == body.nodes[0].outs
    return node.ins[0] if whole and relu_operand(body.nodes[0], body) == body.inputs[0] else None


def _is_zero(value: Any) -> bool:
    return value is not None and np.size(value) == 1 and is_zero(value)
