"""Runs a program that `insert_casts` has written: one equation after the other.

Decides nothing. A value is dropped after its last reader, so that an eager call holds no more memory than the function
itself would. A body is traced anew, never bound as recorded: a jaxpr has the dtypes with which it was traced, and fails
with others.
"""

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._dtypes import FLOAT32
from .._jaxpr import (
    ClosedJaxpr,
    JaxprEqn,
    bind,
    bind_with_bodies,
    bind_with_rules,
    contexts,
    convert,
    last_reads,
    trace,
)
from .._sizes import is_static
from .ir import Equation, Op, Program

# For casts in a body without equations, such as a branch that returns its operand: no equation gives a context.
_NO_CONTEXTS = contextlib.nullcontext(), contextlib.nullcontext()


def emit(program: Program, args: Sequence[Any]) -> list[Any]:
    """Runs `program`, which has no implicit casts, on `args`, which may come in any floating dtype."""
    values = dict(program.constants)
    values.update(zip(program.inputs, map(cast, args, _dtypes(program, program.inputs)), strict=True))
    reads = [(equation.operands, equation.results) for equation in program.equations]
    last = last_reads(reads, {*program.outputs, *program.constants})  # constants are kept by the program anyway
    traced: dict[int, ClosedJaxpr] = {}
    steps = zip([equation.at or equation.node for equation in program.equations], program.equations, last, strict=True)
    # The casts that an equation needs stand in front of it: they share its contexts, which are Python calls to enter.
    for node, group in itertools.groupby(steps, key=operator.itemgetter(0)):
        source, settings = contexts(node) if node else _NO_CONTEXTS
        with source, settings:
            for _, equation, dying in group:
                results = _run(equation, [values[number] for number, _, _ in equation.uses], traced)
                values.update(zip(equation.results, results, strict=True))
                for number in dying:
                    del values[number]
    return [values[number] for number in program.outputs]


def _dtypes(program: Program, numbers: Sequence[int]) -> list[Any]:
    return [getattr(program.avals[number], "dtype", None) for number in numbers]


def cast(value: Any, dtype: np.dtype | None) -> Any:
    if dtype is None or getattr(value, "dtype", None) == dtype:
        return value
    return convert(value, dtype)


def to_jaxpr(program: Program) -> ClosedJaxpr:
    """`program` as a jaxpr of its arguments."""
    return trace(lambda *args: emit(program, args), *(program.avals[number] for number in program.inputs))[0]


def _run(equation: Equation, operands: list[Any], traced: dict[int, ClosedJaxpr]) -> list[Any]:
    """The results of `equation`. Bodies that several equations run, by their ids in `traced`, are traced once."""
    if equation.op is not Op.RECORDED:
        return [_ADDED[equation.op](*operands, **equation.params)]
    if equation.rewrite is not None:
        return equation.rewrite(equation.node, operands)
    if equation.bodies:
        run = _BODIES.get(equation.node.name)
        return run(equation, operands) if run else _with_bodies(equation, operands, traced)
    return bind(equation.node.eqn, operands, **equation.params)


def _round(value: Any, dtype: np.dtype, residual: int = 0) -> Any:
    # With float32's exponent: a narrower one would flush float16's subnormal numbers to zero. A wider one changes no
    # number, but makes an expression of its own, which XLA does not find equal to the other readers'.
    return lax.reduce_precision(value, jnp.finfo(FLOAT32).nexp + residual, jnp.finfo(dtype).nmant)


def _chained(value: Any, last: Any, dtype: np.dtype) -> Any:
    """`value`, float32, in the dtype of `last`, which is NaN only where `value` is: the selection changes no number."""
    return _copy_of(value, lax.select(lax.ne(last, last), last, convert(value, dtype)))


def _copy_of(value: Any, copy: Any) -> Any:
    """`copy`, with the derivative of a cast of `value`, so that its gradient accumulates in the dtype of `value`."""
    (result,) = bind_with_rules(_copy_equation(), [value, copy], lambda *_: (lambda _, copy: [copy], _copy_jvp))
    return result


def _copy_jvp(_: Any, copy: Any, tangent: Any, __: Any) -> list[Any]:
    return [copy, lax.convert_element_type(tangent, copy.dtype)]


@functools.cache
def _copy_equation() -> JaxprEqn:
    """A `custom_jvp_call` to bind with other rules, which costs a third of the tracing time of `jax.custom_jvp`."""

    @jax.custom_jvp
    def copy_of(value: Any, copy: Any) -> Any:
        del value
        return copy

    copy_of.defjvp(lambda primals, tangents: (primals[1], tangents[1]))
    return trace(copy_of, 0.0, 0.0)[0].eqns[0]


def _saved(x: Any, by_product: bool = False) -> Any:
    """`x` behind a barrier: expressions of the result are equal to no expression on the other side of a dot.

    With `by_product` XLA would copy `x` for a barrier, or compute it in a kernel without its reader. The product with a
    one that is behind a barrier is a different expression as well; it has the same bits, and fuses with its readers.
    """
    return lax.mul(x, lax.optimization_barrier(np.ones((), x.dtype))) if by_product else lax.optimization_barrier(x)


_ADDED: dict[Op, Callable[..., Any]] = {
    Op.CAST: cast,
    Op.SAVED: _saved,
    Op.ROUND: _round,
    Op.CHAINED: _chained,
    Op.COPY_OF: _copy_of,
}


def _scan(equation: Equation, operands: list[Any]) -> list[Any]:
    if (wide := equation.wide) is None:
        return _run_scan(equation, operands)

    @jax.custom_jvp
    def run(*args: Any) -> list[Any]:
        return _run_scan(equation, list(args))

    def run_wide(*args: Any) -> list[Any]:
        # `hoist_weight_casts` may have added operands to the narrow scan, but not to `wide`: they are the last ones.
        operands = zip(args[: len(wide.uses)], _dtypes(wide.bodies[0], wide.bodies[0].inputs), strict=True)
        results = _run_scan(wide, [cast(x, dtype) for x, dtype in operands])
        return list(map(cast, results, _dtypes(equation.bodies[0], equation.bodies[0].outputs)))

    run.defjvp(lambda primals, tangents: jax.jvp(run_wide, primals, tangents))
    return run(*operands)


def _run_scan(equation: Equation, operands: list[Any]) -> list[Any]:
    """Through `jax.lax.scan` where the scan has other operands than it was recorded with.

    The primitive's parameters say how many operands are constants and carries, and in which of them it is linear:
    `lax.scan` makes them anew.
    """
    if equation.counts is None:
        return _with_bodies(equation, operands, {})
    (body,), (consts, carry), params = equation.bodies, equation.counts, equation.node.params
    start, rows, length = operands[consts : consts + carry], operands[consts + carry :], params["length"]

    def iteration(state: list[Any], row: Any) -> tuple[list[Any], list[Any]]:
        results = emit(body, [*operands[:consts], *state, *row])
        return results[:carry], results[carry:]

    xs: Any = rows
    if not is_static((length,)):  # `lax.scan` takes a symbolic length as the size of its rows only
        xs, length = rows or jnp.zeros((length, 0)), None
    last, stacked = lax.scan(iteration, start, xs, length, params["reverse"], params["unroll"])
    return [*last, *stacked]


def _custom_jvp(equation: Equation, operands: list[Any]) -> list[Any]:
    (body,), derive = equation.bodies, equation.derive

    def wrap(_: Callable, jvp: Callable) -> tuple[Callable, Callable]:
        def rule(*args: Any) -> list[Any]:
            pairs = zip(derive(jvp, args), _dtypes(body, body.outputs) * 2, strict=True)  # the results, their tangents
            return [cast(x, dtype) if is_array(x) else x for x, dtype in pairs]

        return (lambda *args: emit(body, args)), rule

    return bind_with_rules(equation.node.eqn, operands, wrap)


def _custom_vjp(equation: Equation, operands: list[Any]) -> list[Any]:
    """Its operands and results are as recorded, float32: see `control_flow.py`."""
    (body,), derive = equation.bodies, equation.derive

    def wrap(_: Callable, fwd: Callable, bwd: Callable) -> tuple[Callable, Callable, Callable]:
        def forward(*args: Any) -> Any:
            # JAX passes each operand to `fwd` followed by a boolean: whether the operand is differentiated.
            values, nonzeros = args[::2], args[1::2]

            def rule(*values: Any) -> Any:
                return fwd(*(x for pair in zip(values, nonzeros, strict=True) for x in pair))

            return derive(rule, values)

        return (lambda *args: emit(body, args)), forward, lambda *args: derive(bwd, args, backward=True)

    return bind_with_rules(equation.node.eqn, operands, wrap)


def is_array(x: Any) -> bool:
    """Whether `x` is an array to trace: no symbolic zero, and no `float0`, which the tangent of an integer has."""
    return isinstance(x, jax.Array | np.ndarray | np.generic) and x.dtype != jax.dtypes.float0


def _shard_map(equation: Equation, operands: list[Any]) -> list[Any]:
    params, (body,) = {**equation.node.params, **equation.params}, equation.bodies
    function = jax.shard_map(  # JAX does not export its primitive
        lambda *local: tuple(emit(body, local)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    # Outside of `jit` JAX runs no `shard_map` inside of another.
    return list((jax.jit(function) if _holds_shard_map(body) else function)(*operands))


def _holds_shard_map(program: Program) -> bool:
    return any(each.name == "shard_map" or any(map(_holds_shard_map, each.bodies)) for each in program.equations)


def _with_bodies(equation: Equation, operands: list[Any], traced: dict[int, ClosedJaxpr]) -> list[Any]:
    """Runs a primitive whose parameters stay as recorded, except its bodies and the number of a `while`'s constants."""
    counts = {} if equation.counts is None else {"body_nconsts": equation.counts[0]}
    for body in equation.bodies:
        if id(body) not in traced:
            traced[id(body)] = to_jaxpr(body)
    return bind_with_bodies(equation.node.eqn, operands, [traced[id(body)] for body in equation.bodies], **counts)


_BODIES: dict[str, Callable[[Equation, list[Any]], list[Any]]] = {
    "scan": _scan,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "shard_map": _shard_map,
}
