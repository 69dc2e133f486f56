"""A gradient's dot in the order that needs no transpose.

    a = dot_general g x                b = dot_general x g
    b = transpose a             ->

JAX differentiates `x @ w` into `transpose(dot(ct, x))`. `dot(x, ct)` is the same matrix. Besides sparing an operation,
this keeps bfloat16 running on CPUs: XLA rejects there, at run time, a transposed bfloat16 dot whose result is float32.
"""

from __future__ import annotations

from ...ir import Equation, Program
from ...primitives import Rule


def fold_transposes(program: Program) -> Program:
    """The program without the transposes that follow a dot as its only readers, where a swap of operands can be."""
    if not any([equation.node.name == "transpose" for equation in program.equations]):
        return program
    readers = program.only_readers()
    changed: dict[int, Equation] = {}
    for dot in program.equations:
        if dot.node.name != "dot_general" or dot.entry.rule is not Rule.LOW:
            continue
        order, chain = tuple(range(len(program.avals[dot.node.outs[0]].shape))), [dot]
        while (following := _only_transpose(program, readers, chain[-1])) is not None:
            chain.append(following)
            order = tuple(order[axis] for axis in following.node.params["permutation"])
        unchanged = order == tuple(sorted(order))
        if len(chain) > 1 and (unchanged or order == _swap(program, dot)):
            folded = dot.replace(results=chain[-1].results)
            changed[id(dot)] = folded if unchanged else _swapped(folded, order)
            changed.update((id(transpose), transpose.replace(dead=True)) for transpose in chain[1:])
    equations = [changed.get(id(equation), equation) for equation in program.equations]
    return program.replace(equations=equations) if changed else program


def _only_transpose(program: Program, readers: dict[int, int | None], equation: Equation) -> Equation | None:
    """The transpose that alone reads what an equation computes, and can be folded into it; `None` if there is none."""
    at = readers.get(equation.results[0])
    only = None if at is None else program.equations[at]
    if only is None or only.node.name != "transpose" or only.entry.rule is not Rule.SHAPE:
        return None  # a region, a scope or an edit may ask for another dtype than the dot's
    # The transpose of a residual reads the saved copy of what the dot computes, which is another value.
    return None if only.uses[0].residual else only


def _swap(program: Program, dot: Equation) -> tuple[int, ...]:
    """The permutation that brings the free dimensions of the right operand before those of the left one."""
    (left, _), (batch, _) = dot.node.params["dimension_numbers"]
    leading, total = len(batch), len(program.avals[dot.node.outs[0]].shape)
    split = len(program.avals[dot.node.ins[0]].shape) - len(left)
    return (*range(leading), *range(split, total), *range(leading, split))


def _swapped(dot: Equation, order: tuple[int, ...]) -> Equation:
    """The dot with its operands in the other order, so that its result has its axes in `order`."""
    (left, right), (left_batch, right_batch) = dot.node.params["dimension_numbers"]
    params = {**dot.params, "dimension_numbers": ((right, left), (right_batch, left_batch))}
    sharding = dot.node.params.get("out_sharding")
    if sharding is not None:  # inside a `shard_map`, or with explicit axes
        spec = [*sharding.spec, *[None] * (len(order) - len(sharding.spec))]  # JAX leaves out the last ones if `None`
        params["out_sharding"] = sharding.update(spec=sharding.spec.update(partitions=[spec[axis] for axis in order]))
    return dot.replace(uses=dot.uses[::-1], params=params)
