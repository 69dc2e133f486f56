"""Whether a planned loop takes the same steps as in float32, whatever the dtype of its products.

    while t < 1:  t, s = t + 0.1, s @ w          no product decides `t`: those of the loop may run in 16 bits
    while |s| > 0.1:  s = s @ w                  products decide when it ends, so that it runs as recorded

A solver of differential equations with constant steps adds up its time beside its state: the time decides when the loop
ends, and no product decides the time. Its products may run in 16 bits. If a loop ends on a residual, or if an error
estimate chooses the next step, products decide, and in 16 bits the number of steps would change.

Decides which values of a loop are decisions, and whether all values from which they are computed run as recorded. Reads
planned programs, so that the answer holds for every rule, edit and region. Does not decide what follows; see
`passes.control_flow`.
"""

from collections.abc import Collection, Iterable, Sequence

import jax.numpy as jnp

from ..._jaxpr import Loop, branches_of, loop_of
from ..ir import Equation, Precision, Program, is_float32, is_sixteen_bit


def narrowed_decision(condition: Program, body: Program, loop: Loop) -> str | None:
    """The decision of a `while` that depends on values that do not run as recorded; `None` if no decision does.

    Decisions are its end, and the integers and booleans that it carries: no rounding of these is small. They matter
    when a backward pass takes the steps of an adaptive solver again: it knows the number of steps, but decides again
    which of them are rejected.

    Args:
      condition, body: both programs, planned.
      loop: as recorded.
    """
    if _dependencies_of_loop((body, condition), loop) is None:
        return "its end depends on a product, or on another value that 16 bits change"
    avals = [body.avals[number] for number in body.outputs]
    exact = [i for i, aval in enumerate(avals) if not jnp.issubdtype(aval.dtype, jnp.inexact)]
    if _dependencies_of_loop((body,), loop, exact) is None:
        return "an integer or boolean that it carries depends on a product, or on another value that 16 bits change"
    return None


def narrowed_stop(body: Program, loop: Loop) -> str | None:
    """As `narrowed_decision`, for a `scan` that from some iteration on returns its carry unchanged.

    That is a `while` with a bound, written so that JAX can differentiate it. Like the condition of a `while`, its stop
    is computed from the carry alone; an update that is skipped because of its own result does not stop the loop.
    """
    stops = _stops(body, loop)
    # Within one iteration the stop has to be computed as recorded; only the carry from earlier iterations may narrow
    # it. If products of this iteration decide, that is a skipped update and no stop.
    of_carry = dependencies(body, stops) is not None
    if of_carry and _dependencies_of_loop((body,), loop, numbers=stops) is None:
        return "when it stops depends on a product, or on another value that 16 bits change"
    return None


def _stops(body: Program, loop: Loop) -> set[int]:
    """The predicates by which a scan returns all its carries unchanged; none if it never does."""
    producers, same = body.producers(), _copies(body)
    cases, found = {0, 1}, set()  # the values of the predicates for which all carries seen so far stay as they are
    for start, result in zip(body.inputs[loop.consts :], body.outputs[: loop.carry], strict=False):
        if same.get(result, result) != start:
            equation = producers.get(result)  # none of a constant or of another carry: this one changes
            cases &= _unchanged(equation, result, start, same) if equation else set()
            found.update(equation.node.ins[:1] if equation else ())
    return found if cases else set()


def _copies(body: Program) -> dict[int, int]:
    """The values that are copies of others, by number.

    JAX writes a branch under `vmap` as a selection of both results. Each operand `x` of the branch that does not run
    is then `select_n(p, stop_gradient(x), x)`, which is `x`.
    """
    same: dict[int, int] = {}
    for node in body.recorded.nodes:
        cases = node.ins[1:] if node.name == "select_n" else node.ins
        found = {same.get(number, number) for number in cases}
        if node.name in ("select_n", "stop_gradient", "copy") and len(found) == 1:
            same[node.outs[0]] = found.pop()
    return same


def _unchanged(equation: Equation, result: int, start: int, same: dict[int, int]) -> set[int]:
    """The values of an equation's predicate for which its result is the value `start`."""
    operands = [same.get(number, number) for number in equation.node.ins[1:]]
    if equation.node.name == "select_n":
        return {case for case, number in enumerate(operands) if number == start}
    if equation.node.name != "cond":
        return set()
    position = equation.results.index(result)
    pairs = ((dict(zip(branch.inputs, operands, strict=True)), branch.outputs[position]) for branch in equation.bodies)
    return {case for case, (given, inside) in enumerate(pairs) if given.get(inside) == start}


def dependencies(program: Program, numbers: Iterable[int]) -> set[int] | None:
    """The arguments, by position, from which some values are computed; `None` if any equation between is changed."""
    needed = set(numbers)
    rounded = _rounded_residuals(program)
    for equation in reversed(program.equations):
        results = [i for i, number in enumerate(equation.results) if number in needed]
        if not results:
            continue
        operands = _operands(equation, results)
        if operands is None or not _runs_as_recorded(equation, operands, rounded):
            return None
        # In an equation with programs inside, a result need not depend on every operand.
        needed.update(equation.operands[i] for i in operands)
    # `avals` are the recorded ones here: a value in 16 bits by hand is not LOW.
    if any(program.precision(n) is Precision.LOW or is_sixteen_bit(program.avals[n]) for n in needed):
        return None
    return {i for i, number in enumerate(program.inputs) if number in needed}


def _runs_as_recorded(equation: Equation, operands: Iterable[int], rounded: Collection[int]) -> bool:
    """Whether an equation runs as recorded, on operands in their recorded dtypes."""
    for i in operands:
        number, read, residual = equation.uses[i]
        if (read is not None and read.itemsize < 4) or (residual and number in rounded):
            return False
    # For an equation with bodies, these gave its operands. An effect depends on more than operands, such as on values
    # that another operation wrote.
    return bool(equation.bodies) or not (equation.rewrite or equation.node.eqn.effects)


def _rounded_residuals(program: Program) -> set[int]:
    """The values that are saved in 16 bits, and all that are computed from these, which differ across a dot."""
    found = {number for number in program.residuals.saved if is_float32(program.avals[number])}
    for equation in program.equations:
        if not found.isdisjoint(equation.operands):
            found.update(equation.results)
    return found


def _operands(equation: Equation, results: Collection[int]) -> Collection[int] | None:
    """The operands of an equation from which some of its results are computed; `None` as for `dependencies`."""
    bodies = equation.bodies
    if not bodies:
        return range(len(equation.node.ins))
    if (loop := loop_of(equation.node.eqn)) is not None:
        return _dependencies_of_loop(bodies, loop, results)
    skip, called = branches_of(equation.node.eqn)
    each = [dependencies(body, [body.outputs[i] for i in results]) for body in bodies]
    found = [inside for inside in each if inside is not None]
    if len(found) < len(bodies) or not called:  # nothing is known of a call that is planned behind a boundary
        return None
    return {*range(skip), *(skip + i for inside in found for i in inside)}


def _dependencies_of_loop(
    bodies: Sequence[Program], loop: Loop, results: Iterable[int] = (), numbers: Iterable[int] = ()
) -> set[int] | None:
    """`dependencies` of some of a loop's results and of other values of its body, in all iterations.

    Also those of its end, if a condition is the second of the `bodies`.
    """
    (body, *conditions), (consts, carry, skip) = bodies, (loop.consts, loop.carry, loop.skip)
    ends = dependencies(conditions[0], conditions[0].outputs) if conditions else set()
    if ends is None:
        return None
    wanted = {*results, *(i - skip for i in ends if i >= skip)}
    while True:  # each iteration adds a carry, so this ends
        found = dependencies(body, {*numbers, *(body.outputs[i] for i in wanted)})
        if found is None:
            return None
        before = {i - consts for i in found if consts <= i < consts + carry}
        if before <= wanted:
            # The first value of a carry is an operand even if the body does not read it: the loop may not run.
            inside = found | {consts + i for i in wanted if i < carry}
            return {skip + i for i in inside} | {i for i in ends if i < skip}
        wanted |= before
