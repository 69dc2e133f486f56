"""Whether a planned loop takes the steps that it takes in float32, whatever its products run in.

A solver of differential equations with constant steps adds up its time beside its state: the time decides when the loop
ends, and no product decides the time. Its products may run in 16 bits. Where a loop ends on a residual, or where an
error estimate chooses the next step, products decide, and in 16 bits the number of steps would be another.

Decides which values of a loop are decisions, and whether all that they are computed from runs as recorded. Reads
finished plans, so that the answer holds for every rule, edit and region. Does not decide what is done about it; see
`_control_flow.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import jax.numpy as jnp

from .._jaxpr import scan_counts
from ._flow import Kind, is_float32, is_sixteen_bit
from ._recompute import computed_from
from ._steps import Plan, Step

_CALLS = frozenset({"jit", "remat2", "shard_map", "custom_jvp_call", "custom_vjp_call"})


def narrowed_decision(condition: Plan, body: Plan, skip: int, consts: int) -> str | None:
    """What of a `while` depends on values that do not run as recorded; `None` if no decision does.

    Decisions are its end, and the integers and booleans that it carries: no rounding of these is small. They matter
    where a backward pass takes the steps of an adaptive solver once more: it knows how many there are, but decides anew
    which of them are rejected.

    Args:
      condition, body: the plans of both programs.
      skip, consts: how many constants each of them is given before the carry.
    """
    if _dependencies_of_while(condition, body, (), skip, consts) is None:
        return "its end depends on a product, or on another value that 16 bits change"
    avals = [body.program.avals[number] for number in body.program.outputs]
    exact = [i for i, aval in enumerate(avals) if not jnp.issubdtype(aval.dtype, jnp.inexact)]
    if _dependencies_of_loop(body, exact, (), consts, len(avals)) is None:
        return "an integer or boolean that it carries depends on a product, or on another value that 16 bits change"
    return None


def narrowed_stop(body: Plan, consts: int, carry: int) -> str | None:
    """As `narrowed_decision`, for a `scan` that from some iteration on hands on its carry unchanged.

    That is a `while` with a bound, written so that JAX can differentiate it. Like the condition of a `while`, what
    stops it is computed from the carry alone; an update that is skipped for its own result stops nothing.
    """
    stops = _stops(body, consts, carry)
    of_carry = bool(stops) and dependencies(body, stops) is not None
    if of_carry and _dependencies_of_loop(body, (), stops, consts, carry) is None:
        return "when it stops depends on a product, or on another value that 16 bits change"
    return None


def _stops(body: Plan, consts: int, carry: int) -> set[int]:
    """The predicates by which a scan hands on all that it carries unchanged; none if it never does."""
    makers = {number: (step, i) for step in body.steps for i, number in enumerate(step.node.outs)}
    same = _copies(body)
    cases, found = {0, 1}, set()
    for start, result in zip(body.program.inputs[consts:], body.program.outputs[:carry], strict=False):
        if same.get(result, result) != start:
            step, position = makers.get(result, (None, 0))
            cases &= _unchanged(step, position, start, same) if step else set()
            found.update(step.node.ins[:1] if step else ())
    return found if cases else set()


def _copies(body: Plan) -> dict[int, int]:
    """The values that are other ones: in a batched branch each operand is `select_n(p, stop_gradient(x), x)`."""
    same: dict[int, int] = {}
    for node in body.program.nodes:
        cases = node.ins[1:] if node.name == "select_n" else node.ins
        found = {same.get(number, number) for number in cases}
        if node.name in ("select_n", "stop_gradient", "copy") and len(found) == 1:
            same[node.outs[0]] = found.pop()
    return same


def _unchanged(step: Step, position: int, start: int, same: dict[int, int]) -> set[int]:
    """The values of a step's predicate for which one of its results is the value `start`."""
    operands = [same.get(number, number) for number in step.node.ins[1:]]
    if step.node.name == "select_n":
        return {case for case, number in enumerate(operands) if number == start}
    if step.node.name != "cond":
        return set()
    pairs = ((branch.program.inputs, branch.program.outputs[position]) for branch in step.bodies)
    return {
        case
        for case, (inputs, result) in enumerate(pairs)
        if result in inputs and operands[inputs.index(result)] == start
    }


def dependencies(plan: Plan, numbers: Iterable[int]) -> set[int] | None:
    """The arguments, by position, that some values of a plan are computed from; `None` if not all runs as recorded."""
    needed = set(numbers)
    for node, step in zip(reversed(plan.program.nodes), reversed(plan.steps), strict=True):
        results = [i for i, number in enumerate(step.node.outs) if number in needed]
        if not results:
            continue
        # A node that was exchanged is a loop put together anew, whose operands are not the arguments of its body.
        operands = _operands(step, results) if step.node is node else None
        if operands is None or not _runs_as_recorded(plan, step, operands):
            return None
        needed.update(step.node.ins[i] for i in operands)
    if any(plan.kinds[n] is Kind.LOW or is_sixteen_bit(plan.program.avals[n]) for n in needed):
        return None
    return {i for i, number in enumerate(plan.program.inputs) if number in needed}


def _runs_as_recorded(plan: Plan, step: Step, operands: Iterable[int]) -> bool:
    """Whether a step does what was recorded, on operands that come as they were recorded."""
    for i in operands:
        number, read = step.node.ins[i], step.reads[i]
        if (read is not None and read.itemsize < 4) or (step.far[i] and _is_rounded_far(plan, number)):
            return False
    # An effect brings in what is no operand, such as what another operation wrote.
    return bool(step.bodies) or not (step.run or step.node.eqn.effects)


def _is_rounded_far(plan: Plan, number: int) -> bool:
    """Whether a value is another one across a dot: a stored copy in 16 bits, or computed again from one."""
    return any(n in plan.roots and is_float32(plan.program.avals[n]) for n in computed_from(plan, number))


def _operands(step: Step, results: Collection[int]) -> Collection[int] | None:
    """The operands of a step that some of its results are computed from; `None` as for `dependencies`."""
    name, params, bodies = step.node.name, step.node.params, step.bodies
    if not bodies:
        return range(len(step.node.ins))
    if name == "cond":
        each = [dependencies(branch, [branch.program.outputs[i] for i in results]) for branch in bodies]
        found = [inside for inside in each if inside is not None]
        return {0, *(1 + i for inside in found for i in inside)} if len(found) == len(each) else None
    if name == "while":
        body, condition = bodies
        return _dependencies_of_while(condition, body, results, params["cond_nconsts"], params["body_nconsts"])
    if name == "scan":
        return _dependencies_of_loop(bodies[0], results, (), *scan_counts(step.node.eqn))
    return dependencies(bodies[0], [bodies[0].program.outputs[i] for i in results]) if name in _CALLS else None


def _dependencies_of_while(
    condition: Plan, body: Plan, results: Iterable[int], skip: int, consts: int
) -> Collection[int] | None:
    """`dependencies` of a `while`'s end, and of some of its results, among its operands."""
    ends = dependencies(condition, condition.program.outputs)
    if ends is None:
        return None
    deciding = {i - skip for i in ends if i >= skip}
    inside = _dependencies_of_loop(body, deciding.union(results), (), consts, len(body.program.outputs))
    return None if inside is None else {i for i in ends if i < skip} | {skip + i for i in inside}


def _dependencies_of_loop(
    body: Plan, results: Iterable[int], numbers: Iterable[int], consts: int, carry: int
) -> set[int] | None:
    """`dependencies` of some of a loop's results and of other values of its body, in all iterations."""
    wanted = set(results)
    while True:
        found = dependencies(body, {*numbers, *(body.program.outputs[i] for i in wanted)})
        if found is None:
            return None
        before = {i - consts for i in found if consts <= i < consts + carry}
        if before <= wanted:
            return found | {consts + i for i in wanted if i < carry}
        wanted |= before
