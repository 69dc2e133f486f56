"""Which equations are relus, and which compare with zero, as the mask of a relu's derivative does.

    y = max x 0.0        a relu of x, as is a call of `jax.nn.relu`
    m = gt x 0.0         whether x is positive

A rewrite asks for this in recorded programs, `save_or_remat` in planned ones.
"""

import numpy as np

from ..._jaxpr import FlatJaxpr, Node, flatten
from ..primitives import ARITHMETIC
from .constants import is_zero

RELUS = frozenset({"max", "custom_jvp_call"})  # what may be one


def is_positive(node: Node, program: FlatJaxpr) -> bool:
    """Whether a node is `x > 0`, of which rounding `x` to 16 bits changes nothing but for `0 < x <= 2^-25`."""
    return node.name == "gt" and is_zeros(node.ins[1], program)


def relu_operand(node: Node, program: FlatJaxpr) -> int | None:
    """The `x` of a node that is `max(x, 0)`, alone or, as `jax.nn.relu` is, with a derivative rule of its own."""
    if node.name == "max":
        others = [number for number in node.ins if not is_zeros(number, program)]
        same = len(others) == 1 and program.avals[others[0]].shape == program.avals[node.outs[0]].shape
        return others[0] if same else None
    if node.name != "custom_jvp_call" or len(node.ins) != 1:
        return None
    body = flatten(node.params["call_jaxpr"])
    whole = len(body.nodes) == 1 and body.outputs == body.nodes[0].outs
    return node.ins[0] if whole and relu_operand(body.nodes[0], body) == body.inputs[0] else None


def is_norm_of_rows(number: int, program: FlatJaxpr) -> bool:
    """Whether a value is computed from one array of its shape and from numbers for its rows, such as mean and variance.

    Not if another array was added to it, which would be read for the mask only.
    """
    shape, computed = program.avals[number].shape, [number]
    for each in computed:  # grows
        node = program.producers.get(each)
        if node is None or node.name not in ARITHMETIC:
            continue
        shapes = [program.avals[operand].shape for operand in node.ins]
        if (*shape[:-1], 1) in shapes and shape[-1] != 1:  # in rows of one number, such an operand is no statistic
            return True
        if node.name in ("mul", "div") or shapes.count(shape) == 1:
            computed += [operand for operand in node.ins if operand not in computed]
    return False


def is_zeros(number: int, program: FlatJaxpr) -> bool:
    """Whether a value is a literal zero, or a broadcast of one."""
    node = program.producers.get(number)
    value = program.known.get(node.ins[0] if node is not None and node.name == "broadcast_in_dim" else number)
    return value is not None and np.size(value) == 1 and is_zero(value)
