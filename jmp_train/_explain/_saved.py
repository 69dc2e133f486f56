"""The values that the backward pass reads from the forward pass, and the dtypes in which they are saved.

Decides which values of a lowered program forward equations compute and backward equations read. Does not decide what
the compiler saves: it may rematerialize more of them than autocast does.
"""

from collections.abc import Iterator

import numpy as np

from .._autocast.ir import Equation, Op, Program
from .._autocast.primitives import Trait, having
from .._sizes import itemsize, static_size
from ._operations import dtype_name

_MOVES = having(Trait.MOVES)  # what these return is their operand, saved once


def saved_values(program: Program) -> Iterator[tuple[str, int | None]]:
    """The dtype and the bytes, `None` if a dimension is symbolic, of values made forward and read backward.

    Arguments and captured arrays are not among them. In place of a rematerialized value its sources count; in place of
    a value that is cast or only rearranged its operand counts, in the narrowest dtype on the way. Each counts once.
    Where the backward pass is inside a loop or a `shard_map`, one iteration (one device) counts.
    """
    producers = program.producers()
    saved: dict[int, np.dtype] = {}
    for equation in program.equations:
        if not _is_backward(program, equation):  # a forward loop may contain a backward pass of its own
            for body in equation.bodies:
                yield from saved_values(body)
            continue
        for number in equation.operands:
            for source, dtype in _sources(program, producers, number):
                # Read in 16 bits here and in float32 there, it is saved in float32.
                saved[source] = max(saved.get(source, dtype), dtype, key=itemsize)
    for number, dtype in saved.items():
        size = static_size(getattr(program.avals[number], "shape", ()))
        yield dtype_name(dtype) or "", None if size is None else size * itemsize(dtype)


def _is_backward(program: Program, equation: Equation) -> bool:
    """Whether an equation is of the backward pass. Casts, saved copies and rematerialization for it are forward."""
    return equation.op is Op.RECORDED and not equation.remat and program.place.is_backward(equation.node)


def _sources(program: Program, producers: dict[int, Equation], number: int) -> Iterator[tuple[int, np.dtype]]:
    """The forward values that reading `number` needs, and the dtype in which each is saved."""
    pending, seen = [(number, program.avals[number].dtype)], set()
    while pending:
        number, dtype = pending.pop()
        equation = producers.get(number)
        if equation is None or number in seen or _is_backward(program, equation):
            continue
        seen.add(number)
        added = equation.op is not Op.RECORDED  # a cast, a saved copy or a rounding, of its first operand
        if equation.remat:
            pending.extend((operand, program.avals[operand].dtype) for operand in equation.operands)
        elif added or equation.node.name in _MOVES:
            own = program.avals[equation.operands[0]].dtype
            pending.append((equation.operands[0], min(dtype, own, key=itemsize)))
        else:
            yield number, dtype
