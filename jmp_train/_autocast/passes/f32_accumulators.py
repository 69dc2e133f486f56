"""Sums that a loop carries in 16 bits, as hand-cast code and 16-bit parameters record them, carried in float32.

    c:f16 = 0                                     d:f32 = cast c
    s:f16 = scan { b:f16 = add a:f16 x } c x  ->  t:f32 = scan { y:f32 = cast x; b:f32 = add a:f32 y } d x
                                                  s:f16 = cast t

The backward pass of a loop adds the gradient of a weight to a carry of the weight's dtype in every iteration. In
float16 such a sum stops growing after 2,048 equal terms.

Decides which carries are such sums and writes the loop anew, before anything is planned: the carry, and the carry with
terms added, are computed in float32; whatever else reads them sees them rounded to the recorded dtype. Does not decide
the dtype of carries recorded in float32; see `control_flow.py`.
"""

from collections.abc import Collection
from typing import Any

import jax

from ..._dtypes import FLOAT32
from ..._jaxpr import (
    ClosedJaxpr,
    FlatJaxpr,
    Jaxpr,
    JaxprEqn,
    Node,
    bind,
    bind_with_bodies,
    branches_of,
    contexts,
    flatten,
    loop_of,
    trace,
    trace_in_place_of,
)
from ..analysis.loops import HANDED_ON, HOLDS_SUMS, accumulates, is_counted, relations, relations_through
from ..emit import cast
from ..ir import is_sixteen_bit
from ..rules import low_precision

Positions = Collection[int]


def f32_accumulators(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """The loop that `eqn` is, with its 16-bit sums carried in float32 and rounded at the end; `None` without any."""
    loop: Any = loop_of(eqn)
    avals: list[Any] = [var.aval for var in eqn.invars]
    start = loop.skip + loop.consts
    narrow = [i for i in range(loop.carry) if is_sixteen_bit(avals[start + i])]
    if not narrow or not is_counted(loop):
        return None
    body = flatten(loop.body)
    sums = [i for i in narrow if accumulates(body, body.inputs[loop.consts + i], body.outputs[i])]
    if not sums:
        return None
    wide = [start + i for i in sums]

    def run(*args: jax.Array) -> list[jax.Array]:
        results = _bind_wide(eqn, [cast(arg, FLOAT32) if i in wide else arg for i, arg in enumerate(args)], wide, sums)
        return [cast(result, avals[start + i].dtype) if i in sums else result for i, result in enumerate(results)]

    return trace_in_place_of(eqn, run)


def _bind_wide(eqn: JaxprEqn, args: list[Any], wide: Positions, results: Positions) -> list[Any]:
    """Runs a loop, branch or rematerialized call, its operands at `wide` and its results at `results` in float32."""
    loop = loop_of(eqn)
    skip, bodies = branches_of(eqn) if loop is None else (loop.skip, [loop.body])
    made = [_with_wide(body, [i - skip for i in wide], results) for body in bodies]
    if loop is not None and loop.condition is not None:
        made.append(_with_wide(loop.condition, [i - loop.consts for i in wide], ()))
    return bind_with_bodies(eqn, args, made)


def _with_wide(jaxpr: ClosedJaxpr | Jaxpr, wide: Positions, results: Positions) -> ClosedJaxpr:
    """`jaxpr` with its arguments at `wide`, sums of the loop around it, and its results at `results` in float32."""
    program = flatten(jaxpr)
    avals = [program.avals[number] for number in program.inputs]
    sums: set[int] = set()
    for i in wide:
        found = relations(program, program.inputs[i])
        sums.update(number for number, relation in found.items() if relation in HANDED_ON)

    def run(*args: Any) -> list[Any]:
        values = {number: program.known_array(number) for number in program.known}
        values.update(zip(program.inputs, args, strict=True))
        for node in program.nodes:
            source, settings = contexts(node)
            with source, settings:
                values.update(zip(node.outs, _run(program, node, values, sums), strict=True))
        dtypes = [FLOAT32 if i in results else _dtype(program, number) for i, number in enumerate(program.outputs)]
        return [cast(values[number], dtype) for number, dtype in zip(program.outputs, dtypes, strict=True)]

    return trace(run, *(aval.update(dtype=FLOAT32) if i in wide else aval for i, aval in enumerate(avals)))[0]


def _dtype(program: FlatJaxpr, number: int) -> Any:
    return getattr(program.avals[number], "dtype", None)


def _run(program: FlatJaxpr, node: Node, values: dict[int, Any], sums: set[int]) -> list[Any]:
    """Runs a node as recorded or, where its result is a sum, in float32, as the sums among the `values` are."""
    results = [i for i, number in enumerate(node.outs) if number in sums]
    unrounded = [values[number] for number in node.ins]
    operands = [cast(values[number], _dtype(program, number)) for number in node.ins]
    if not results:
        if node.low_region:  # binding alone would lose the mark of the call that was inlined
            return low_precision(lambda *args: bind(node.eqn, args))(*operands)
        return bind(node.eqn, operands)
    if node.name == "convert_element_type":  # of a sum to another width: its float32 value is the same
        return unrounded
    if node.name in HOLDS_SUMS:
        related = {i: relations_through(node, i) for i, number in enumerate(node.ins) if number in sums}
        wide = [i for i, found in related.items() if any(found[k] in HANDED_ON for k in results)]
        given = [unrounded[i] if i in wide else operand for i, operand in enumerate(operands)]
        return _bind_wide(node.eqn, given, wide, results)
    return bind(node.eqn, [cast(x, FLOAT32) if is_sixteen_bit(x) else x for x in unrounded])
