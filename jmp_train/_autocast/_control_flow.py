"""Operations with programs inside: how what is known enters them, and how they are put together again.

Decides the dtype of loop carries and of what branches return, and keeps derivative rules and rematerialisation
policies. Does not decide dtypes inside the programs; see `_plan.py`. A body is never bound with other dtypes than it
was traced with: it is planned and traced anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .._dtypes import FLOAT32
from .._jaxpr import ClosedJaxpr, Node, bind, bind_with_rules, consts_of, flatten, open_jaxpr, scan_counts, trace
from . import _plan
from ._decisions import narrowed_decision, narrowed_stop
from ._evaluate import as_jaxpr_function, captured_arrays, cast, evaluate, recorded_dtypes
from ._flow import DOTS, Backward, Flags, Kind, Place, is_float32, joined
from ._hoisted import Copies, read_by_dots, run_scan
from ._loops import is_counted, may_be_narrow
from ._steps import Plan, Step
from ._table import Entry, Rule

if TYPE_CHECKING:
    from ._plan import Planner

Run = Callable[[list[Any]], list[Any]]
Entered = tuple[Run, list[np.dtype | None], list[Kind], tuple["Plan", ...]]


def flags(planner: Planner, node: Node, inside: Place, outs: list[Flags]) -> list[Flags]:
    """What becomes of the operands of a node with a body, given what becomes of its results."""
    params = node.params
    if node.name == "cond":
        branches = [planner.in_flags(branch, inside, outs) for branch in params["branches"]]
        return [Flags(), *map(_merge, *branches)] if len(branches) > 1 else [Flags(), *branches[0]]
    if node.name == "scan":
        consts, carry = scan_counts(node.eqn)
        return _loop_flags(planner, params["jaxpr"], inside, outs, consts, carry)
    if node.name == "while":
        skip, consts = params["cond_nconsts"], params["body_nconsts"]
        carry = len(node.ins) - skip - consts
        return [Flags()] * skip + _loop_flags(planner, params["body_jaxpr"], inside, outs, consts, carry)
    if node.name in _BODY:
        return planner.in_flags(params[_BODY[node.name]], inside, outs)
    return [Flags(reaches_dot=True)] * len(node.ins)


def _loop_flags(planner: Planner, body: Any, inside: Place, outs: list[Flags], consts: int, carry: int) -> list[Flags]:
    first = planner.in_flags(body, inside, outs)
    pairs = zip(outs[:carry], first[consts : consts + carry], strict=True)
    fed_back = [_merge(a, b)._replace(only_wide=False) for a, b in pairs]
    return planner.in_flags(body, inside, [*fed_back, *outs[carry:]])


def _merge(*all_flags: Flags) -> Flags:
    reaches, to_dot, only_wide, exact, in_exponent = zip(*all_flags, strict=True)
    return Flags(any(reaches), any(to_dot), all(only_wide), any(exact), any(in_exponent))


def enter(
    planner: Planner, node: Node, entry: Entry, place: Place, kinds: list[Kind], flow: Backward
) -> tuple[Step, list[Kind], bool]:
    """Plans a node with a body: the step, what its results are, and whether a dot is inside."""
    out_flags = [flow[number] for number in node.outs]
    handler = _HANDLERS.get(node.name, _boundary)
    entered = handler(planner, node, place.inside(node), kinds, out_flags)
    if isinstance(entered, str):
        reads: list[np.dtype | None] = [None if kind is Kind.FIXED else FLOAT32 for kind in kinds]
        out_kinds = _recorded_kinds([var.aval for var in node.eqn.outvars])
        return Step(node, Entry(Rule.RECORDED, entered), reads), out_kinds, False
    run, reads, out_kinds, bodies = entered
    step = Step(node, entry, reads, run=run, bodies=bodies)
    return step, out_kinds, any(map(_has_dot, bodies))


def _has_dot(plan: Plan) -> bool:
    return any((s.node.name in DOTS and s.entry.rule is Rule.LOW) or any(map(_has_dot, s.bodies)) for s in plan.steps)


def _recorded_kinds(avals: Sequence[Any]) -> list[Kind]:
    return [Kind.WIDE if is_float32(aval) else Kind.FIXED for aval in avals]


def _retrace(plan: Plan, out_dtypes: Sequence[np.dtype | None]) -> ClosedJaxpr:
    run, avals = as_jaxpr_function(plan, out_dtypes)
    captured = captured_arrays(plan)
    return trace(lambda *args: run(*captured, *args), *avals[len(captured) :])[0]


def _call(planner: Planner, node: Node, inside: Place, kinds: list[Kind], outs: list[Flags]) -> Entered:
    """`jit` with shardings of its own and `remat2`: everything but the body stays as recorded."""
    name = _BODY[node.name]
    plan = planner.plan(node.params[name], kinds, outs, inside)
    out_dtypes = plan.dtypes_of(plan.out_kinds)

    def run(args: list[Any]) -> list[Any]:
        if node.name != "remat2":
            return bind(node.eqn, args, **{name: _retrace(plan, out_dtypes)})
        function, avals = as_jaxpr_function(plan, out_dtypes)
        body = trace(function, *avals)[0]
        leading = [*consts_of(body), *captured_arrays(plan)]
        return bind(node.eqn, [*leading, *args], **{name: open_jaxpr(body)})

    return run, plan.in_dtypes, plan.out_kinds, (plan,)


def _cond(planner: Planner, node: Node, inside: Place, kinds: list[Kind], outs: list[Flags]) -> Entered:
    plans = tuple(planner.plan(branch, kinds[1:], outs, inside) for branch in node.params["branches"])
    out_kinds = [joined(kinds) for kinds in zip(*(plan.out_kinds for plan in plans), strict=True)]
    out_dtypes = plans[0].dtypes_of(out_kinds)

    def run(args: list[Any]) -> list[Any]:
        return bind(node.eqn, args, branches=tuple(_retrace(plan, out_dtypes) for plan in plans))

    return run, [None, *plans[0].in_dtypes], out_kinds, plans


def _scan(planner: Planner, node: Node, inside: Place, kinds: list[Kind], outs: list[Flags]) -> Entered | str:
    consts, carry = scan_counts(node.eqn)
    plan, carry_kinds = _plan_loop(planner, node.params["jaxpr"], inside, kinds, outs, consts, carry)
    if (reason := narrowed_stop(plan, consts, carry)) is not None:
        return reason
    out_kinds = [*carry_kinds, *plan.out_kinds[carry:]]
    out_dtypes = plan.dtypes_of(out_kinds)
    weights = read_by_dots(plan, {number: place for place, number in enumerate(plan.program.inputs[:consts])})

    def run(args: list[Any]) -> list[Any]:
        if not weights:
            return bind(node.eqn, args, jaxpr=_retrace(plan, out_dtypes))
        return run_scan(node.params, args, consts, carry, Copies(plan, weights, args).body(out_dtypes))

    return run, plan.in_dtypes, out_kinds, (plan,)


def _while(planner: Planner, node: Node, inside: Place, kinds: list[Kind], outs: list[Flags]) -> Entered | str:
    params, skip, consts = node.params, node.params["cond_nconsts"], node.params["body_nconsts"]
    plan, carry_kinds = _plan_loop(planner, params["body_jaxpr"], inside, kinds[skip:], outs, consts, len(node.outs))
    condition = planner.plan(params["cond_jaxpr"], [*kinds[:skip], *carry_kinds], [Flags()], inside)
    if not is_counted(params) and (reason := narrowed_decision(condition, plan, skip, consts)) is not None:
        return reason
    out_dtypes = plan.dtypes_of(carry_kinds)

    def run(args: list[Any]) -> list[Any]:
        return bind(node.eqn, args, body_jaxpr=_retrace(plan, out_dtypes), cond_jaxpr=_retrace(condition, [None]))

    return run, [*condition.in_dtypes[:skip], *plan.in_dtypes], carry_kinds, (plan, condition)


def _plan_loop(
    planner: Planner, body: Any, inside: Place, kinds: list[Kind], outs: list[Flags], consts: int, carry: int
) -> tuple[Plan, list[Kind]]:
    """The plan of a loop's body and the kinds of its carry, which starts as its initial value is and can only widen."""
    program, _ = planner.program(body, inside)
    first, starts = consts + carry, kinds[consts : consts + carry]
    recorded = _recorded_kinds([program.avals[number] for number in program.inputs[consts:first]])
    whole = flatten(body, also=("remat2",)) if Kind.LOW in starts else program
    weights = [n for n, kind in zip(whole.inputs[first:], kinds[first:], strict=True) if kind is Kind.SOFT]
    ends = zip(starts, whole.inputs[consts:first], whole.outputs[:carry], strict=True)
    low = [kind is Kind.LOW and may_be_narrow(whole, inside, weights, *end, wide=planner.wide) for kind, *end in ends]
    pairs = zip(starts, recorded, low, strict=True)
    carried = [kind if kind is Kind.HUGE or is_low else wide for kind, wide, is_low in pairs]
    while True:
        out_flags = [*(Flags(kind is Kind.LOW, kind is Kind.LOW, False) for kind in carried), *outs[carry:]]
        in_kinds = [*kinds[:consts], *carried, *kinds[first:]]
        plan = planner.plan(body, in_kinds, out_flags, inside, roundable=range(consts, first))
        wider = [joined(pair) for pair in zip(carried, plan.out_kinds, strict=False)]
        if wider == carried:
            return plan, carried
        carried = wider


def _custom_jvp(planner: Planner, node: Node, inside: Place, kinds: list[Kind], outs: list[Flags]) -> Entered:
    plan = planner.plan(node.params["call_jaxpr"], kinds, outs, inside)
    out_dtypes = plan.dtypes_of(plan.out_kinds)
    of_args = [*kinds, *(Kind.WIDE if kind is Kind.HUGE else kind for kind in kinds)]  # and of tangents

    def wrap(_: Callable, jvp: Callable) -> tuple[Callable, Callable]:
        def rule(*args: Any) -> list[Any]:
            pairs = zip(args, of_args, strict=True)
            recorded = [x if kind is Kind.FIXED or not _is_array(x) else cast(x, FLOAT32) for x, kind in pairs]
            results = replan(planner, jvp, recorded, of_args, inside)
            return [cast(x, d) if _is_array(x) else x for x, d in zip(results, [*out_dtypes, *out_dtypes], strict=True)]

        return (lambda *args: evaluate(plan, args, out_dtypes)), rule

    def run(args: list[Any]) -> list[Any]:
        return bind_with_rules(node.eqn, args, wrap)

    return run, plan.in_dtypes, plan.out_kinds, (plan,)


def _custom_vjp(planner: Planner, node: Node, inside: Place, kinds: list[Kind], outs: list[Flags]) -> Entered:
    """Keeps float32 at the boundary, since a rule's residuals may be the operands themselves; the inside is planned."""
    plan = planner.plan(node.params["call_jaxpr"], kinds, outs, inside)

    def wrap(_: Callable, fwd: Callable, bwd: Callable) -> tuple[Callable, Callable, Callable]:
        def forward(*args: Any) -> Any:
            values, nonzeros = args[::2], args[1::2]

            def rule(*values: Any) -> Any:
                return fwd(*(x for pair in zip(values, nonzeros, strict=True) for x in pair))

            return replan(planner, rule, values, kinds, inside)

        def backward(*args: Any) -> Any:
            kinds_of_args = [_recorded_kinds([jax.typeof(x)])[0] if _is_array(x) else Kind.FIXED for x in args]
            return replan(planner, bwd, args, kinds_of_args, inside._replace(backward=True))

        return (lambda *args: evaluate(plan, args, recorded_dtypes(plan))), forward, backward

    def run(args: list[Any]) -> list[Any]:
        results = bind_with_rules(node.eqn, args, wrap)
        return [cast(x, d) for x, d in zip(results, plan.dtypes_of(plan.out_kinds), strict=True)]

    reads = [None if kind is Kind.FIXED else FLOAT32 for kind in kinds]
    return run, reads, plan.out_kinds, (plan,)


def replan(planner: Planner, fn: Callable, args: Sequence[Any], kinds: Sequence[Kind], place: Place) -> Any:
    """Runs `fn`, a derivative rule, on `args` as recorded with its inside autocast; what is no array passes through."""
    structure: list[Any] = []
    positions = [i for i, arg in enumerate(args) if _is_array(arg)]

    def arrays_of(*arrays: Any) -> list[Any]:
        traced = dict(zip(positions, arrays, strict=True))
        leaves, tree = jax.tree.flatten(fn(*(traced.get(i, arg) for i, arg in enumerate(args))))
        structure[:] = [tree, [None if _is_array(leaf) else leaf for leaf in leaves]]
        return [leaf for leaf in leaves if _is_array(leaf)]

    given = [args[i] for i in positions]
    jaxpr, _ = trace(arrays_of, *given)
    fresh = _plan.Planner(planner.policy, planner.rules)
    out_flags = [Flags()] * len(open_jaxpr(jaxpr).outvars)
    plan = fresh.plan_whole(jaxpr, [kinds[i] for i in positions], out_flags, place)
    arrays = iter(evaluate(plan, given, recorded_dtypes(plan)))
    tree, others = structure
    return jax.tree.unflatten(tree, [next(arrays) if other is None else other for other in others])


def _is_array(x: Any) -> bool:
    """Whether `x` is an array to trace: no symbolic zero, nor the tangent of an integer."""
    return isinstance(x, jax.Array | np.ndarray | np.generic) and x.dtype != jax.dtypes.float0


def _shard_map(planner: Planner, node: Node, inside: Place, kinds: list[Kind], outs: list[Flags]) -> Entered:
    params = node.params
    plan = planner.plan(params["jaxpr"], kinds, outs, inside)
    out_dtypes = plan.dtypes_of(plan.out_kinds)

    def run(args: list[Any]) -> list[Any]:
        function = jax.shard_map(
            lambda *local: tuple(evaluate(plan, local, out_dtypes)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return list(function(*args))

    return run, plan.in_dtypes, plan.out_kinds, (plan,)


def _boundary(planner: Planner, node: Node, inside: Place, kinds: list[Kind], outs: list[Flags]) -> Entered:
    """Any other operation with closed bodies: float32 at the boundary, the bodies planned behind it."""
    plans = {}
    for key, body in node.params.items():
        if isinstance(body, ClosedJaxpr):
            avals = [var.aval for var in open_jaxpr(body).invars]
            plans[key] = planner.plan(body, _recorded_kinds(avals), [Flags()] * len(open_jaxpr(body).outvars), inside)

    def run(args: list[Any]) -> list[Any]:
        return bind(node.eqn, args, **{key: _retrace(plan, recorded_dtypes(plan)) for key, plan in plans.items()})

    reads = [None if kind is Kind.FIXED else FLOAT32 for kind in kinds]
    return run, reads, _recorded_kinds([var.aval for var in node.eqn.outvars]), tuple(plans.values())


_BODY = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "shard_map": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_HANDLERS: dict[str, Callable[..., Entered | str]] = {
    "jit": _call,
    "remat2": _call,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "shard_map": _shard_map,
}
