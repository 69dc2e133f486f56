"""Which carries of a loop are states of a linear recurrence or estimates, so that the roundings of its steps add up.

    s -> add (dot_general s a) x                   a state: linear in itself, through a product
    s -> tanh (dot_general s a)                    none: not linear, as a recurrent layer
    s -> add s x                                   none: no product is between
    p -> dot_general (triangular_solve l p) a      an estimate: a linear system is solved for it, as in a Kalman filter
    p -> sub p (div (mul q q) (dot_general x q))   the same with one equation, as in recursive least squares: q = p @ x

Decides this by the equations between a carry and the body's result for it: products and sums of itself, linear
systems. Does not decide what follows from it; see `provenance.py` and `causes.py`.
"""

import itertools
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from ...._jaxpr import BARRIER, FlatJaxpr, Loop, Node, flatten
from ...._sizes import assumed_size
from ...primitives import BOUNDS, COMBINES, SYSTEMS, Trait, having
from ..dot_sizes import DotSizes
from ..loops import dependents, sources
from ..producers import Producers

# Primitives that combine operands are linear in all of them together.
_LINEAR = having(Trait.LINEAR | Trait.MOVES | Trait.PICKS) | COMBINES | {"convert_element_type"}
KEEPS_ESTIMATES = _LINEAR | SYSTEMS | BOUNDS
_ONE_EQUATION = frozenset({"div", "dot_general"})  # the primitives that solve a system of one equation


def carry_kinds(program: FlatJaxpr, loop: Loop, are_solutions: Sequence[bool]) -> list[tuple[bool, bool]]:
    """For each carry of a loop, whether it is the state of a linear recurrence, and whether it is an estimate.

    The mean of a Kalman filter is a linear state that its gain moves, and the gain comes from the covariance, an
    estimate. A smoother reads both row by row.

    Args:
      program: the loop's body, with calls inlined.
      loop: the loop, which says where its carries are.
      are_solutions: for each of its rows, whether it is a solution of a linear system.
    """
    first = loop.consts + loop.carry
    ends = list(zip(program.inputs[loop.consts : first], program.outputs[: loop.carry], strict=True))
    linear = are_linear(program, ends)
    # Without a system there is no estimate. Most loops have none, and the walks below take time.
    names = {node.name for node in program.nodes}
    if SYSTEMS.isdisjoint(names) and not names.issuperset(_ONE_EQUATION):
        return [(each, False) for each in linear]
    solved = are_solved(program, ends)
    estimates = [start for (start, _), is_estimate in zip(ends, solved, strict=True) if is_estimate]
    # A linear state that a system of an estimate moves, as the gain moves the mean, is an estimate too. A smoother
    # solves systems of the covariances that it reads row by row, which are solutions.
    solutions = itertools.compress(program.inputs[first:], are_solutions)
    given = dependents(program, [*estimates, *solutions])
    systems = [node for node in program.nodes if node.name in SYSTEMS and not given.isdisjoint(node.ins)]
    systems += [node for node in program.nodes if node.name == "div" and node.ins[1] in given]
    moved = dependents(program, [number for node in systems for number in node.outs])
    return [
        (is_linear, is_estimate or (is_linear and result in moved))
        for is_linear, is_estimate, (_, result) in zip(linear, solved, ends, strict=True)
    ]


def are_linear(program: FlatJaxpr, ends: Sequence[tuple[int, int]]) -> list[bool]:
    """For each carry, whether it is the state of a linear recurrence: the body returns sums of products of it.

    Each rounding of such a state stays in it, and roundings add up. Scaling its rows by their sums or norms leaves it
    linear, as in a power iteration or the forward algorithm of a hidden Markov model.

    Args:
      program: the loop's body.
      ends: for each carry, its numbers as an argument of the body and as a result.
    """
    # For each value, the carries (as bits) on which it depends, those on which it depends through a product, and those
    # in which it is not linear: one walk for all carries.
    depends, product, other = ([0] * len(program.avals) for _ in range(3))
    for position, (start, _) in enumerate(ends):
        depends[start] = 1 << position
    producers = Producers(program)
    for node in program.nodes:
        if node.name == BARRIER:
            for number, result in zip(node.ins, node.outs, strict=True):
                depends[result], product[result], other[result] = depends[number], product[number], other[number]
            continue
        once = twice = multiplied = nonlinear = 0
        # A state over its own norm: the norm depends on the state, and has a number for a row or for all.
        several = node.name in ("mul", "div") and depends[node.ins[0]] & depends[node.ins[1]]
        operands = _but_for_scale(node, producers) if several else node.ins
        for number in operands:
            twice |= once & depends[number]
            once |= depends[number]
            multiplied |= product[number]
            nonlinear |= other[number]
        if not once:
            continue
        if node.name not in _LINEAR:
            nonlinear = once
        elif node.name not in COMBINES:  # a product of a carry with itself is not linear in it, nor is a quotient by it
            nonlinear |= twice | (depends[operands[1]] if node.name == "div" and len(operands) > 1 else 0)
        for number in node.outs:
            depends[number], other[number] = once, nonlinear
            product[number] = once if node.name == "dot_general" else multiplied
    linear = [product[result] & ~other[result] for _, result in ends]
    return [bool(found >> position & 1) for position, found in enumerate(linear)]


def _but_for_scale(node: Node, producers: Producers) -> tuple[int, ...]:
    """The operands of a product or quotient, without one of fewer numbers that scales the rows of the other."""
    left, right = node.ins
    one, other = (assumed_size(producers.program.avals[producers.source(number)]) for number in node.ins)
    if other < one:
        return (left,)
    return (right,) if node.name == "mul" and one < other else node.ins


def are_solved(program: FlatJaxpr, ends: Sequence[tuple[int, int]]) -> list[bool]:
    """For each carry, whether it is returned through linear systems, products and bounds, and no other functions.

    This is so for a Kalman filter's covariance, but not for a network, which has other functions. A system of one
    equation is a division by a product of the carry.

    Args:
      program: the loop's body.
      ends: for each carry, its numbers as an argument of the body and as a result.
    """
    # As in `are_linear`, one walk for all carries: a node is between the ends of the carries in `between`.
    depends, leads = [0] * len(program.avals), _leading(program, [result for _, result in ends])
    for position, (start, _) in enumerate(ends):
        depends[start] |= 1 << position
    systems = products = divided = other = 0
    for node in program.nodes:
        dependent = leading = 0
        for number in node.ins:
            dependent |= depends[number]
        for number in node.outs:
            depends[number] |= dependent
            leading |= leads[number]
        between = dependent & leading
        if not between:
            continue
        if node.name in SYSTEMS:
            systems |= between
        elif node.name == "dot_general":
            products |= between
        elif node.name == "div":
            divided |= between
        elif not _keep_estimates(program, [node]):
            other |= between

    def is_solved(position: int) -> bool:
        carry = 1 << position
        if carry & (other | systems):
            return not carry & other
        if not carry & products & divided:
            return False
        start, result = ends[position]
        dependent, leading = dependents(program, [start]), sources(program, [result])
        nodes = [n for n in program.nodes if not (dependent.isdisjoint(n.ins) or leading.isdisjoint(n.outs))]
        return _is_rank_one_update(program, nodes, dependent)

    return list(map(is_solved, range(len(ends))))


def _leading(program: FlatJaxpr, results: Sequence[int]) -> list[int]:
    """For each value, the carries (as bits) whose result depends on it."""
    leads = [0] * len(program.avals)
    for position, result in enumerate(results):
        leads[result] |= 1 << position
    for node in reversed(program.nodes):
        if node.name == BARRIER:
            for number, result in zip(node.ins, node.outs, strict=True):
                leads[number] |= leads[result]
            continue
        found = 0
        for number in node.outs:
            found |= leads[number]
        if found:
            for number in node.ins:
                leads[number] |= found
    return leads


def _is_rank_one_update(program: FlatJaxpr, nodes: Sequence[Node], dependent: set[int]) -> bool:
    """Whether some nodes divide by a product of a carry, and compute an outer product of values that depend on it.

    Recursive least squares (Sherman and Morrison 1950) and quasi-Newton methods update a matrix in this way. A network
    without other functions, such as one of linear attentions, multiplies values as large as the result.
    """
    products = dependents(program, [node.outs[0] for node in nodes if node.name == "dot_general"])
    if not any(node.name == "div" and node.ins[1] in products for node in nodes):
        return False
    producers = Producers(program)
    return any(dependent.issuperset(node.ins) and _is_rank_one(node, producers) for node in nodes)


def _is_rank_one(node: Node, producers: Producers) -> bool:
    """Whether a node computes an outer product, or multiplies one by a matrix: `((p @ x) @ x.T) @ p`."""
    factors = map(producers.producer, node.ins) if node.name == "dot_general" else ()
    return any(each is not None and _is_outer(each, producers) for each in (node, *factors))


def _is_outer(node: Node, producers: Producers) -> bool:
    """Whether a node multiplies each number of a value by each of another."""
    avals = producers.program.avals
    if node.name == "dot_general":
        sizes = DotSizes.of(producers.program, node)
        return sizes is not None and sizes.contracted == 1
    sizes = [assumed_size(avals[producers.source(number)]) for number in node.ins] if node.name == "mul" else []
    return bool(sizes) and max(sizes) < assumed_size(avals[node.outs[0]])


def _keep_estimates(program: FlatJaxpr, nodes: Iterable[Node]) -> bool:
    """Whether an estimate is still one after the floating operations of some nodes and of their branches."""
    for node in nodes:
        if not any(jnp.issubdtype(program.avals[number].dtype, jnp.floating) for number in node.outs):
            continue  # an index or a comparison, as `jnp.diag` and `jnp.clip` make
        if node.name == "cond":  # as `jnp.diagonal` is, with a branch for each platform
            if not all(_keep_estimates(body, body.nodes) for body in map(flatten, node.params["branches"])):
                return False
        elif node.name not in KEEPS_ESTIMATES:
            return False
    return True
