"""Which values are states of an unrolled loop, such as a Python loop.

    a = tanh (dot_general x w)       x: float32 data
    s = add x (mul 0.1 a)            a state: `w` multiplies it again, and no product has rounded it since
    b = tanh (dot_general s w)
    t = add s (mul 0.1 b)            a state

The samples of a diffusion model, the state of an ODE and the window of a forecast are such states. A `scan` would carry
them in float32, the dtype in which they start. A residual network has no such states: each of its layers has weights of
its own, and its stream starts from a product, the first layer, and so is in 16 bits in loops, too.

A state may also start from an array that the program computes, such as `jnp.zeros(shape)`, and so may a running sum or
average. JAX's promotion of such an array and a 16-bit array is float32, unlike that of a literal and a 16-bit array.

Decides which values these are, including their cotangents. Does not decide about the carries of a loop; see `loops.py`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...._jaxpr import Node
from ...ir import Place
from ...primitives import COMBINES, DATA_OPERANDS, ELEMENT_BY_ELEMENT, PLAIN_DOTS, Entry, Rule
from .provenance import UNROUNDED_PROVENANCES, Values

_STARTS = frozenset({"add", "sub", "mul"})  # what JAX's promotion makes float32 of an array of constants
_BOOL = np.dtype(np.bool_)


class Unrolled(NamedTuple):
    """What is known of the unrolled loops of a program, by ids of its nodes.

    Attributes:
      states: the nodes that compute states.
      starts: the nodes that add an array of constants, or multiply by one.
      steps: the nodes that compute states and may have a body, such as a rematerialized call; for each operand, whether
        no product has rounded it.
    """

    states: set[int]
    starts: set[int]
    steps: dict[int, list[bool]]


def find_unrolled(values: Values, entries: Sequence[Entry], place: Place, given: Sequence[bool] | None) -> Unrolled:
    """Finds the states of a program.

    Args:
      values: what is known of the program's values, all its nodes added.
      entries: of its nodes.
      place: the equation to which it belongs.
      given: for the body of a step, whether no product has rounded each of its arguments, which are the last ones of
        these; `None` for any other program.
    """
    # Sets of factors, as bits of a number. For each value, `multiplied` has the factors of the products before it. For
    # a value computed element by element from a sum that starts unrounded, `in_sum` has the factors of the products
    # before the sum, and `repeated` those that have multiplied such a value again.
    program, constant = values.program, values.constants.is_constant
    multiplied, in_sum, repeated = ([0] * len(program.avals) for _ in range(3))
    unrounded = [provenance in UNROUNDED_PROVENANCES for provenance in values.provenances]
    starts, refining = set[int](), 0  # `refining` has the factors that did so for another such sum
    if given is not None:  # the arguments that no product has rounded are the state, which every product refines
        refining = -1
        for number, is_state in zip(reversed(program.inputs), reversed(given), strict=False):
            unrounded[number] = is_state
            multiplied[number] = in_sum[number] = -1 if is_state else 0
    # For most nodes the walk calls no function.
    for node, factors in zip(program.nodes, _factors(values, entries, place), strict=True):
        name, before, summed, again = node.name, 0, 0, 0
        wide = meets_constant = False
        for number in node.ins[DATA_OPERANDS[name]] if name in DATA_OPERANDS else node.ins:
            before |= multiplied[number]
            summed |= in_sum[number]
            again |= repeated[number]
            wide = wide or unrounded[number]
            meets_constant = meets_constant or constant[number]
        if factors is not None:
            once_more, computes_sum = factors & summed, False
            if once_more and place.is_backward(node):
                once_more = 0
            for number in node.outs:
                computes_sum = computes_sum or unrounded[number]  # in a body
            refining |= once_more if computes_sum else 0
            summed = before = before | factors
            again |= once_more
        elif name not in ELEMENT_BY_ELEMENT:
            summed = 0
        else:
            if meets_constant and name in _STARTS and _starts(values, node):
                starts.add(id(node))
                wide = True
            if name == "convert_element_type" and program.avals[node.ins[0]].dtype == _BOOL:
                wide = False  # zeros and ones, which take the dtype of the other operand
            elif wide and name in COMBINES:  # a state plus a value that refines it
                if summed & again and not place.is_backward(node):
                    refining |= summed & again
                summed = before
            for number in node.outs:
                unrounded[number] = wide
        for number in node.outs:
            multiplied[number], repeated[number] = before, again
            in_sum[number] = summed if unrounded[number] else 0
    # Now `refining` is complete, and says which values are states.
    states, steps = set[int](), dict[int, list[bool]]()
    for node in program.nodes if refining else ():
        if any([in_sum[number] & refining for number in node.outs]):
            # The value with which the first state starts is a state too, and so is that of its cotangents.
            first = [number for number in node.ins if unrounded[number] or constant[number]]
            states.update(map(id, [node, *filter(None, map(program.producers.get, first))]))
            steps[id(node)] = [unrounded[number] for number in node.ins]
    return Unrolled(states, starts, steps)


def _starts(values: Values, node: Node) -> bool:
    """Whether a node adds an array of constants, or multiplies by one, with which a state may start.

    The array has to be as large as the result, except for axes that `jax.vmap` added: the zeros that an RMSNorm
    subtracts in place of a mean are one for each row.
    """
    (result,), avals, constant = node.outs, values.program.avals, values.constants.is_constant
    shapes = [avals[number].shape for number in node.ins if constant[number] and avals[number].shape != ()]
    return not constant[result] and any([shape[-1] == avals[result].shape[-1] for shape in shapes])


def _factors(values: Values, entries: Sequence[Entry], place: Place) -> list[int | None]:
    """The factors of each node, as bits of a number; `None` for a node that does not multiply.

    A node with a body may multiply by any of its operands. A factor of only one product in a forward pass has no bit:
    it refines nothing.
    """
    found = [
        {values.producers.source(number) for number in node.ins}
        if node.name not in ELEMENT_BY_ELEMENT and (node.name in PLAIN_DOTS or entry.rule is Rule.ENTER)
        else None
        for node, entry in zip(values.program.nodes, entries, strict=True)
    ]
    counts = Counter[object]()
    for node, factors in zip(values.program.nodes, found, strict=True):
        if factors is not None and not place.is_backward(node):
            counts.update(factors)
    bits = {factor: 1 << i for i, factor in enumerate(counts) if counts[factor] > 1}
    return [None if factors is None else sum(bits.get(each, 0) for each in factors) for factors in found]
