"""`explain`: the plan of a program, without running it.

Decides what is reported about a plan. Does not decide the plan (`_autocast`) nor how it is printed (`_report.py`).
"""

import dataclasses
import glob
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._autocast.autocast import make_planned, matmul_precision
from .._autocast.format_program import format_program
from .._autocast.ir import TOP, Program, dtype_of, is_float32, is_sixteen_bit
from .._autocast.primitives import TABLE, Rule
from .._autocast.rules import DEFAULT_RULES, Rules
from .._dtypes import FLOAT32, did_you_mean, facts
from .._flops import PRODUCTS
from .._jaxpr import source_line, trace
from .._paths import glob_matches, leaf_paths
from .._policy import Policy, get_policy
from .._sizes import is_static
from .._static import hide_static, is_argument, of_hidden
from .._tracebacks import is_asked_for, user_rules
from .._values import check_callable
from ._emitted import count_casts, emitted_jaxpr, emitted_of, is_cast
from ._operations import REQUESTED, Operation, Visit, dtype_name, operations_of, visits
from ._report import Explanation, Output
from ._saved import saved_values
from ._uncounted import uncounted

# The user asks for these by name, so that they are no surprise in the list of what runs as recorded.
_CONVERSIONS = frozenset({"convert_element_type", "bitcast_convert_type", "reduce_precision"})


def explain(
    fn: Callable[..., Any], policy: Policy | str, rules: Rules = DEFAULT_RULES, argnums: int | Sequence[int] = 0
) -> Callable[..., Explanation]:
    """Returns a function that reports what `autocast` does to `fn`, without running anything.

    Explain the function that you train with: `explain(jax.grad(loss_fn), policy)(params, batch)` includes the backward
    pass.

    Args:
      fn, policy, rules, argnums: as for `autocast`.

    Returns:
      A function of `fn`'s arguments (arrays or `jax.ShapeDtypeStruct`s) that returns an `Explanation`.

    Raises:
      TypeError: `fn` is not callable, or `rules` or `argnums` is something else.

    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.mean(x @ w)
    >>> report = explain(loss, "mixed_float16")(jnp.ones((16, 8)), jnp.ones((8, 16)))
    >>> report.summary
    'Converted 1/3 operations to float16 using 3 casts'
    >>> [(op.primitive, op.rule, op.dtype) for op in report.operations if op.flops]
    [('dot_general', 'low', 'float16')]
    """
    check_callable("fn", fn, "pass the function whose precision is to be explained")
    policy = get_policy(policy)
    narrows = facts(policy.compute_dtype).bits <= 16
    fn = of_hidden(fn)
    planned = make_planned(fn, policy, rules if narrows else _as_recorded(rules), argnums)

    def report(*args: Any, **kwargs: Any) -> Explanation:
        args, kwargs = hide_static((args, kwargs), is_argument)
        with matmul_precision(policy):
            recorded = trace(fn, *args, **kwargs)[0]
            plan, tree = planned(*args, **kwargs)
            emitted = emitted_jaxpr(plan.lowered) if narrows else recorded
            hidden, error = _hidden_casts(fn, policy, args, kwargs, recorded) if narrows else ((), None)
        found = list(operations_of(plan.program))
        operations, saved = tuple(_with_reason(op, narrows) for op, _ in found), list(saved_values(plan.lowered))
        return Explanation(
            policy=str(policy),
            compute_dtype=policy.compute_dtype.name,
            reduce_dtype=policy.reduce_dtype.name,
            operations=operations,
            emitted=tuple(emitted_of(emitted)),
            outputs=tuple(_outputs(plan.program, tree)),
            casts=count_casts(visits(emitted, TOP)) - _casts_by_hand(found),
            uncounted=uncounted(found),
            kept_bytes=_bytes_by_dtype(saved),
            kept_symbolic=sum(size is None for _, size in saved),
            opaque=_opaque(found) if narrows else (),
            derivative_rules=tuple(dict.fromkeys(rule for _, visit in found for rule in user_rules(visit.node))),
            unmatched_scopes=_unmatched(rules, operations),
            hidden_casts=hidden,
            hidden_casts_error=error,
            text=format_program(plan.lowered),
        )

    return report


# The reason of every operation under a policy that narrows nothing.
_WIDE_POLICY = "the policy computes in 32 bits or more"


def _as_recorded(rules: Rules) -> Any:
    """Rules under which every operation runs as recorded, as it does under a policy that narrows nothing."""
    if not isinstance(rules, Rules):
        return rules  # make_planned says what is wrong with it
    return dataclasses.replace(rules, edits=tuple((name, Rule.RECORDED) for name in TABLE))


def _with_reason(op: Operation, narrows: bool) -> Operation:
    """The operation with its reason: not "set by Rules.replace", where `_as_recorded` did that."""
    return op if narrows else dataclasses.replace(op, reason=_WIDE_POLICY)


def _casts_by_hand(found: Sequence[tuple[Operation, Visit]]) -> int:
    """How many conversions of the program itself remain: not those to the value's own dtype, nor those never read."""
    return sum(is_cast(visit) and op.dtype != op.result and not op.unread for op, visit in found)


def _outputs(program: Program, tree: Any) -> list[Output]:
    avals = [program.recorded.avals[number] for number in program.outputs]
    paths = leaf_paths(jax.tree.unflatten(tree, avals))  # not of numbers: a tree may ask its leaves for dtypes
    outputs = []
    for path, number in zip(paths, program.outputs, strict=True):
        aval = program.avals[number]
        computed = dtype_name(dtype_of(program.precision(number), program.low) or aval.dtype)
        shape = tuple(size if is_static((size,)) else str(size) for size in aval.shape)
        outputs.append(Output(path, shape, str(dtype_name(aval.dtype)), str(computed)))
    return outputs


def _bytes_by_dtype(saved: Sequence[tuple[str, int | None]]) -> tuple[tuple[str, int], ...]:
    """The bytes of each dtype, summed over the values of known size, the largest sum first."""
    total: Counter[str] = Counter()
    for dtype, size in saved:
        if size:
            total[dtype] += size
    return tuple(total.most_common())


def _opaque(found: Sequence[tuple[Operation, Visit]]) -> tuple[tuple[str, int, str], ...]:
    """Operations on float32 values that run as recorded although nobody asked for that.

    Products are left out, since `Explanation.products` lists them with their reasons; so are operations without
    operands, and operations inside another one that is listed.
    """
    counted: Counter[tuple[str, str]] = Counter()
    for op, visit in found:
        recorded = op.rule == Rule.RECORDED.value and op.reason not in REQUESTED
        if (
            recorded
            and visit.node.ins
            and op.primitive not in _CONVERSIONS | PRODUCTS
            and not op.reason.startswith("inside ")
        ):
            if any(map(is_float32, visit.avals((*visit.node.ins, *visit.node.outs)))):
                counted[op.primitive, op.reason] += 1
    return tuple((name, number, reason) for (name, reason), number in counted.items())


def _unmatched(rules: Rules, operations: Sequence[Operation]) -> tuple[str, ...]:
    """The globs of the rules that match no scope, each with a suggestion if a segment of some scope is like it."""
    scopes = {op.scope for op in operations}
    segments = {glob.escape(segment) for scope in scopes for segment in scope.split("/")}
    return tuple(
        dict.fromkeys(
            f"{pattern!r}{did_you_mean(pattern, segments)}"
            for pattern, _ in rules.scopes
            if not any(glob_matches(pattern, scope) for scope in scopes)
        )
    )


def _hidden_casts(
    fn: Callable, policy: Policy, args: tuple, kwargs: dict, recorded: Any
) -> tuple[tuple[str, ...], str | None]:
    """Casts from 16 bits to float32 that appear when the arguments are narrow, and why that trace failed if it did."""

    def narrowed(leaf: Any) -> Any:
        is_wide = getattr(leaf, "dtype", None) == FLOAT32
        return jax.ShapeDtypeStruct(leaf.shape, policy.compute_dtype) if is_wide else leaf

    try:
        # Suppressed: the overflow of a literal beyond float16, which the program itself does not cast; and warnings of
        # code that gets 16-bit arguments, as JAX warns of float32 numbers that are written into such an array.
        with np.errstate(over="ignore"), warnings.catch_warnings(action="ignore"):
            narrow = trace(fn, *jax.tree.map(narrowed, args), **jax.tree.map(narrowed, kwargs))[0]
    except Exception as error:  # user code that does not accept 16-bit arguments may raise anything
        return (), f"the function cannot be traced with {policy.compute_dtype.name} arguments ({type(error).__name__})"
    # Casts that a float32 trace shows are not hidden. JAX's own casts (as in `jnp.sum` of 16-bit numbers) do not count:
    # nobody asked for them.
    shown = {source_line(visit.node) for visit in visits(recorded, TOP) if _widens(visit)}
    appeared = [source_line(v.node) for v in visits(narrow, TOP) if _widens(v) and is_asked_for(v.node)]
    return tuple(line for line in dict.fromkeys(appeared) if line not in shown), None


def _widens(visit: Visit) -> bool:
    """Whether a node casts 16-bit numbers to float32."""
    node = visit.node
    if node.name != "convert_element_type":
        return False
    return is_sixteen_bit(visit.program.avals[node.ins[0]]) and is_float32(visit.program.avals[node.outs[0]])
