"""Emitting a gradient's dot in the order that needs no transpose.

JAX differentiates `x @ w` into `transpose(dot(ct, x))`. `dot(x, ct)` is the same matrix. Besides sparing an operation,
this keeps bfloat16 running on CPUs: XLA rejects there, at run time, a transposed bfloat16 dot whose result is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._jaxpr import Program, bind
from ._steps import Step
from ._table import Rule


def fold_transposes(program: Program, steps: Sequence[Step]) -> None:
    """Makes no operation of the transposes that follow a dot as its only readers, where a swap of its operands can."""
    readers: dict[int, list[Step | None]] = {}
    for step in steps:
        for number in step.node.ins:
            readers.setdefault(number, []).append(step)
    for number in program.outputs:
        readers.setdefault(number, []).append(None)
    for dot in steps:
        if dot.node.name != "dot_general" or dot.entry.rule is not Rule.LOW or dot.node.params.get("out_sharding"):
            continue
        order, chain = tuple(range(len(program.avals[dot.node.outs[0]].shape))), []
        while (following := _only_transpose(readers, (chain or [dot])[-1])) is not None:
            chain.append(following)
            order = tuple(order[axis] for axis in following.node.params["permutation"])
        unchanged = order == tuple(sorted(order))
        if chain and (unchanged or order == _swap(program, dot)):
            dot.run = None if unchanged else _swapped(dot)
            for step in chain:
                step.run = list


def _only_transpose(readers: dict[int, list[Step | None]], step: Step) -> Step | None:
    found = readers.get(step.node.outs[0], [])
    return found[0] if len(found) == 1 and found[0] is not None and found[0].node.name == "transpose" else None


def _swap(program: Program, dot: Step) -> tuple[int, ...]:
    """The permutation that brings the free dimensions of the right operand before those of the left one."""
    (left, _), (batch, _) = dot.node.params["dimension_numbers"]
    leading, total = len(batch), len(program.avals[dot.node.outs[0]].shape)
    split = len(program.avals[dot.node.ins[0]].shape) - len(left)
    return (*range(leading), *range(split, total), *range(leading, split))


def _swapped(dot: Step) -> Any:
    (left, right), (left_batch, right_batch) = dot.node.params["dimension_numbers"]
    numbers = ((right, left), (right_batch, left_batch))

    def run(operands: list[Any]) -> list[Any]:
        return bind(dot.node.eqn, operands[::-1], **dot.params, dimension_numbers=numbers)

    return run
