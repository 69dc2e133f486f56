"""A dot with its operands in the order that needs no transpose, or only one that keeps the last axis.

    a = dot_general g x                b = dot_general x g
    b = transpose a             ->

JAX differentiates `x @ w` into `transpose(dot(ct, x))`. `dot(x, ct)` is the same matrix. This saves an operation, and
it makes bfloat16 run on CPUs, where XLA rejects, at run time, a transposed bfloat16 dot whose result is float32.

    a:f16[k,q,r] = dot_general y x              a:f16[q,r,k] = dot_general x y
    b:f16[r,q,k] = transpose[2,1,0] a    ->     b:f16[r,q,k] = transpose[1,0,2] a

`jnp.einsum` records the scores of a grouped-query attention in this way. XLA moves nothing for the transpose: `b` keeps
the layout of `a` in memory, so that a softmax along `k` has a stride of all queries, for which XLA has no fused kernel.
On an H200 such an attention would move 2.2 times the bytes. A transpose that another dot reads stays, since a dot reads
any layout.
"""

from collections.abc import Sequence
from typing import Any

from ...ir import Equation, Program
from ...primitives import Rule


def fold_transposes(program: Program) -> Program:
    """The program without transposes that alone read a dot, if swapping the dot's operands can replace them."""
    if not any([equation.node.name == "transpose" for equation in program.equations]):
        return program
    readers = program.only_readers()
    changed: dict[int, Equation] = {}
    avals = [*program.avals]
    for dot in program.equations:
        if dot.node.name != "dot_general" or dot.entry.rule is not Rule.LOW:
            continue
        order, chain = tuple(range(len(program.avals[dot.node.outs[0]].shape))), [dot]
        while (following := _only_transpose(program, readers, chain[-1])) is not None:
            chain.append(following)
            order = tuple(order[axis] for axis in following.node.params["permutation"])
        swap, last = swap_of(program, dot), chain[-1]
        if len(chain) == 1:
            continue
        if order in (tuple(sorted(order)), swap):
            folded = dot.replace(results=last.results)
            changed[id(dot)] = swapped(folded, swap) if order == swap else folded
        elif order[-1] == swap[-1] and not program.context.uses.flags[last.results[0]].to_dot:
            changed[id(dot)] = swapped(dot, swap)
            avals[dot.results[0]] = _transposed(avals[dot.results[0]], swap)
            permutation = tuple([swap.index(axis) for axis in order])
            changed[id(last)] = last.replace(
                uses=[last.uses[0]._replace(value=dot.results[0])], params={"permutation": permutation}
            )
            chain.remove(last)
        else:
            continue
        changed.update((id(transpose), transpose.replace(dead=True)) for transpose in chain[1:])
    equations = [changed.get(id(equation), equation) for equation in program.equations]
    return program.replace(equations=equations, avals=avals) if changed else program


def _only_transpose(program: Program, readers: dict[int, int | None], equation: Equation) -> Equation | None:
    """The transpose that alone reads an equation's result, and can be folded into it; `None` if there is none."""
    at = readers.get(equation.results[0])
    only = None if at is None else program.equations[at]
    if only is None or only.node.name != "transpose" or only.entry.rule is not Rule.SHAPE:
        return None  # a region, a scope or an edit may ask for another dtype than the dot's
    # The transpose of a residual reads the saved copy of what the dot computes, which is another value.
    return None if only.uses[0].residual else only


def swap_of(program: Program, dot: Equation) -> tuple[int, ...]:
    """The permutation that brings the free dimensions of the right operand before those of the left one."""
    (left, _), (batch, _) = params_of(dot)["dimension_numbers"]
    leading, total = len(batch), len(program.avals[dot.results[0]].shape)
    split = len(program.avals[dot.operands[0]].shape) - len(left)
    return (*range(leading), *range(split, total), *range(leading, split))


def swapped(dot: Equation, order: tuple[int, ...]) -> Equation:
    """The dot with its operands in the other order, so that its result has its axes in `order`."""
    params = params_of(dot)
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    changed = {**dot.params, "dimension_numbers": ((right, left), (right_batch, left_batch))}
    sharding = params.get("out_sharding")
    if sharding is not None:  # inside a `shard_map`, or with explicit axes
        changed["out_sharding"] = _transposed_sharding(sharding, order)
    return dot.replace(uses=dot.uses[::-1], params=changed)


def params_of(dot: Equation) -> dict[str, Any]:
    """The parameters that a dot runs with."""
    return {**dot.node.params, **dot.params}


def _transposed(aval: Any, order: Sequence[int]) -> Any:
    return aval.update(
        shape=tuple([aval.shape[axis] for axis in order]), sharding=_transposed_sharding(aval.sharding, order)
    )


def _transposed_sharding(sharding: Any, order: Sequence[int]) -> Any:
    partitions = sharding.spec.partitions
    partitions = [*partitions, *[None] * (len(order) - len(partitions))]  # JAX leaves out the last ones if `None`
    return sharding.update(spec=sharding.spec.update(partitions=[partitions[axis] for axis in order]))
