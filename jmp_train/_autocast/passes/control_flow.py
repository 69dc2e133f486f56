"""Equations with programs inside: the facts of their operands go in, and the precisions of their results come out.

    b:f32 = scan { c -> ... } w x:f32     ->     b:f16 = scan { c:f16 -> ... } w:f32 x:f16

Decides the dtype of loop carries and of what branches return. Does not decide dtypes inside the programs; see
`assign_dtypes.py`. Loops that decide something by a float32 value, such as when to stop, run as recorded where 16 bits
would decide otherwise (`analysis/loop_ends.py`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..._dtypes import FLOAT32
from ..._jaxpr import Loop, Node, branches_of, loop_of, open_jaxpr, sub_jaxprs, trace
from ..._static import hide_static, reveal_static
from ..analysis.loop_ends import narrowed_decision, narrowed_stop
from ..analysis.loops import is_counted, may_be_narrow
from ..analysis.uses import RETURNED, Flags
from ..emit import cast, emit, is_array
from ..ir import (
    Context,
    Decided,
    Equation,
    Place,
    Precision,
    Program,
    equation_of,
    joined_precision,
    precision_of,
    recorded_reads,
)
from ..primitives import Entry, Rule


@dataclasses.dataclass(frozen=True, slots=True)
class _Entered:
    """A node with a body.

    Attributes:
      context: of the program around.
      node, entry: the node and the rule that holds for it.
      inside: the place of its body.
      seen: the precisions of its operands.
      outs: how its results are used.
    """

    context: Context
    node: Node
    entry: Entry
    inside: Place
    seen: list[Precision]
    outs: list[Flags]

    def plan(self, *args: Any, **options: Any) -> Program:
        return self.context.planner.plan(*args, place=self.inside, **options)

    def equation(self, reads: Sequence[np.dtype | None], *bodies: Program, **fields: Any) -> Equation:
        return equation_of(self.node, self.entry, reads, bodies=bodies, **fields)


def enter(context: Context, node: Node, entry: Entry, place: Place, seen: list[Precision]) -> Decided:
    """Plans a node with a body."""
    out_flags = [context.uses.flags[number] for number in node.outs]
    call = _Entered(context, node, entry, place.inside(node), seen, out_flags)
    default = _branches if branches_of(node.eqn)[1] else _boundary
    # A string is the reason for which the bodies stay as recorded.
    decided = _HANDLERS.get(node.name, default)(call)
    return _as_recorded(node, Entry(Rule.RECORDED, decided), seen) if isinstance(decided, str) else decided


def _recorded(variables: Sequence[Any]) -> list[Precision]:
    return [precision_of(var.aval) for var in variables]


def _as_recorded(node: Node, entry: Entry, seen: Sequence[Precision], bodies: Sequence[Program] = ()) -> Decided:
    return equation_of(node, entry, recorded_reads(seen), bodies=tuple(bodies)), _recorded(node.eqn.outvars)


def _branches(call: _Entered) -> Decided:
    """`cond`, and calls such as `jit` with shardings of its own: everything but the bodies stays as recorded."""
    skip, recorded = branches_of(call.node.eqn)
    branches = [call.plan(branch, call.seen[skip:], call.outs) for branch in recorded]
    # JAX demands the same dtypes of all branches, so that each returns what the widest one does.
    made = [joined_precision(each) for each in zip(*(branch.result_precisions for branch in branches), strict=True)]
    # A body that several equations run stays one program.
    bodies = [b if b.result_precisions == made else b.replace(result_precisions=made) for b in branches]
    return call.equation(bodies[0].dtypes_of(call.seen), *bodies), made


def _loop(call: _Entered) -> Decided | str:
    loop: Any = loop_of(call.node.eqn)
    body, carried = _plan_loop(call, loop)
    made = [*carried, *body.result_precisions[loop.carry :]]
    returned = body.replace(result_precisions=made)
    reads = body.dtypes_of([*call.seen[: loop.skip], *body.context.precisions])
    if loop.condition is None:
        return narrowed_stop(body, loop) or (call.equation(reads, returned), made)
    condition = call.plan(loop.condition, [*call.seen[: loop.skip], *carried], [Flags()])
    reason = None if is_counted(loop) else narrowed_decision(condition, body, loop)
    return reason or (call.equation(reads, returned, condition.returning_recorded()), made)


def _plan_loop(call: _Entered, loop: Loop) -> tuple[Program, list[Precision]]:
    """The plan of a loop's body, and the precisions of its carries: those of the initial values, perhaps widened."""
    planner, (body, consts, carry, *_), seen = call.context.planner, loop, call.seen[loop.skip :]
    whole, rows, starts = planner.inlined(body, call.inside), consts + carry, seen[consts : consts + carry]
    # Parameters that come row by row, one layer's at a time. One that every iteration reads is a recurrence's.
    weights = [n for n, p in zip(whole.inputs[rows:], seen[rows:], strict=True) if p is Precision.WEAK]
    carries = zip(starts, whole.inputs[consts:rows], whole.outputs[:carry], strict=True)
    carried = []
    for precision, *ends in carries:
        narrow = precision is Precision.LOW and may_be_narrow(whole, call.inside, weights, *ends, wide=planner.wide)
        # A carry that starts as a parameter is float32 data to the body, which makes it from the second iteration on.
        stays = narrow or precision in (Precision.OVERFLOWS, Precision.RECORDED)
        carried.append(precision if stays else Precision.FULL)
    while True:  # a carry can only widen, so this ends
        # A narrow carry is rounded at the end of each iteration, as for a dot; others are returned like results.
        returned = [Flags(reaches_dot=True, to_dot=True) if each is Precision.LOW else RETURNED for each in carried]
        arguments = [*seen[:consts], *carried, *seen[rows:]]
        program = call.plan(body, arguments, [*returned, *call.outs[carry:]], roundable=range(consts, rows))
        wider = [joined_precision(pair) for pair in zip(carried, program.result_precisions, strict=False)]
        if wider == carried:
            return program, carried
        carried = wider


def _custom_jvp(call: _Entered) -> Decided:
    equation, made = _branches(call)
    # Of the arguments and their tangents. An argument may hold numbers beyond the compute dtype, such as the -1e9 of a
    # mask; its tangent need not.
    precisions = [*call.seen, *(Precision.FULL if p is Precision.OVERFLOWS else p for p in call.seen)]

    def derive(rule: Callable, args: Sequence[Any]) -> Any:
        pairs = zip(args, precisions, strict=True)
        recorded = [x if p is Precision.RECORDED or not is_array(x) else cast(x, FLOAT32) for x, p in pairs]
        return run_rule(call, rule, recorded, precisions, call.inside)

    return equation.replace(derive=derive), made


def _custom_vjp(call: _Entered) -> Decided:
    """Keeps float32 at the boundary; the inside is planned.

    The residuals that a user's `fwd` returns for `bwd` may be its operands. JAX then passes the operands of the call to
    `bwd`, not the values that `fwd` returned, and `bwd` expects the dtypes in which they were recorded.
    """
    equation, made = _branches(call)

    def derive(rule: Callable, args: Sequence[Any], backward: bool = False) -> Any:
        if not backward:
            return run_rule(call, rule, args, call.seen, call.inside)
        return run_rule(call, rule, args, list(map(precision_of, args)), call.inside._replace(backward=True))

    body = equation.bodies[0].returning_recorded()
    computes = body.dtypes_of(body.result_precisions)
    return call.equation(recorded_reads(call.seen), body, computes=computes, derive=derive), made


def run_rule(call: _Entered, rule: Callable, args: Sequence[Any], precisions: Sequence[Precision], place: Place) -> Any:
    """Runs a derivative rule on `args` as recorded, with its inside under autocast; leaves that are no arrays pass."""

    def hidden(*args: Any) -> Any:
        return hide_static(rule(*reveal_static(args)), is_array)

    given = hide_static(tuple(args), is_array)
    jaxpr, shape = trace(hidden, *given)
    of_arrays = [precision for precision, arg in zip(precisions, args, strict=True) if is_array(arg)]
    # JAX asks for a rule after the program around it was planned. By then the jaxprs may be gone by whose ids that
    # planner knows equations.
    fresh = call.context.planner.fresh()
    program = fresh.plan_whole(jaxpr, of_arrays, [Flags()] * len(open_jaxpr(jaxpr).outvars), place)
    results = emit(fresh.lower(program), jax.tree.leaves(given))
    return reveal_static(jax.tree.unflatten(jax.tree.structure(shape), results))


def _boundary(call: _Entered) -> Decided:
    """Any other primitive with bodies: float32 at the boundary, the bodies planned behind it."""
    bodies = []
    for body in sub_jaxprs(call.node.params):
        jaxpr = open_jaxpr(body)
        program = call.plan(body, _recorded(jaxpr.invars), [Flags()] * len(jaxpr.outvars))
        bodies.append(program.returning_recorded())
    return _as_recorded(call.node, call.entry, call.seen, bodies)


_HANDLERS: dict[str, Callable[[_Entered], Decided | str]] = {
    "scan": _loop,
    "while": _loop,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
