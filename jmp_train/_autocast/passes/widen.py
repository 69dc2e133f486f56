"""Float32 for values that only float32 equations read.

    c:f16 = add a:f16 b:f16             c:f32 = add a:f32 b:f32
    d:f32 = exp c:f32             ->    d:f32 = exp c:f32

Rounding the sum saves nothing here: it fuses with its reader, which widens it again. Only the whole program shows
that: the readers have to be on the same side of a dot, or to rematerialize the sum, since across a dot a value in 16
bits is saved. Equations that pick, join or bound numbers may be between: a normal distribution's `cdf` chooses among
`erf` and `erfc`, the derivative of a `cumprod` slices and pads products of which a logarithm is taken, and a softmax
subtracts the largest logit.

The sum of a dot's result and a bias stays rounded, unless it is small. The values of states are an example of small
sums: a loss may depend on their differences, and bfloat16 holds numbers around 200 to one half only. Two kernels may
read a large sum, and XLA then stores one value of the chain that they share, in the dtype that it has there: on an H200
the loss of a dense network moves a third more bytes with that sum in float32. In a scan the sum of two dots' results
stays rounded too, as a gate reads it: it is stacked for the backward pass, which rematerializes the gate from it.
"""

import dataclasses
from typing import Any

from ..._dtypes import FLOAT32
from ..._jaxpr import Node
from ..._sizes import assumed_size
from ..ir import Equation, Precision, Program
from ..primitives import ADDS, COMPARISONS, DOTS, ROUNDS, Rule, Trait, having

# A value this many times smaller than another one costs next to nothing in float32: an eighth of the other's bytes.
_SMALL = 8
# Primitives that return numbers of their operands within a kernel. Transfers to other devices are none of them. XLA
# updates the operand of a `scatter` or `dynamic_update_slice` in place, so that it is a buffer in memory.
_UNROUNDED = having(Trait.JOINS | Trait.BOUNDS | Trait.FLIPS | Trait.PICKS | Trait.EXTREMES) | {"stop_gradient"}
_UNROUNDED |= having(Trait.MOVES) & having(Trait.FUSES)
_UNROUNDED -= {"scatter", "dynamic_update_slice"}


def widen(program: Program) -> Program:
    """The program with equations that round run in float32 where every reader reads float32 anyway."""
    wide, facts = _wide(program), [*program.facts]
    if not wide:
        return program
    for number in wide:
        facts[number] = dataclasses.replace(facts[number], precision=Precision.FULL)
    equations = [*program.equations]
    for i, equation in enumerate(equations):
        compares = equation.node.name in COMPARISONS and not wide.isdisjoint(equation.operands)
        if compares or not wide.isdisjoint(equation.results):
            uses = [use._replace(dtype=FLOAT32) if use.dtype == program.low else use for use in equation.uses]
            equations[i] = equation.replace(uses=uses)
    return program.replace(facts=facts, equations=equations)


def _wide(program: Program) -> set[int]:
    """The results that run in float32.

    A comparison does not count as a reader: it does not keep a value in 16 bits, and reads a widened value in float32.
    """
    remat, facts, avals, heads = program.residuals.remat, program.facts, program.avals, _small_heads(program)
    rounded, sums = _rounded(program, heads)
    narrow_readers, wide, saved = set(program.outputs), set(), rounded - remat
    for equation in program.equations:
        # An equation that is rematerialized across a dot reads saved values, and these are in 16 bits. The results that
        # are marked for it without a reader there stay narrow too: for an H200, Transformers would move 1 % more bytes
        # with such a relu in float32. Values that are small beside the result, such as statistics of rows, cost nothing
        # in float32, nor do the few outputs of a layer.
        if not remat.isdisjoint(equation.results):
            result = avals[equation.results[0]]
            for number in (saved - heads).intersection(equation.operands):
                if not _is_small(avals[number], result):
                    narrow_readers.add(number)
    for equation in reversed(program.equations):
        widens = narrow_readers.isdisjoint(equation.results) and not rounded.isdisjoint(equation.results)
        if widens and equation.node.name in ADDS:
            # A scan stacks such a sum for its backward pass, in float32 with twice the bytes.
            stacked = program.place.is_scan and not sums.isdisjoint(equation.results)
            widens = not stacked and not (_is_biased(program, equation) and _has_large_dot(program, equation))
        if widens:
            wide.update(equation.results)
        depth, reads_any = equation.depth, widens or equation.node.name in COMPARISONS
        narrow_readers.update(
            [
                number
                for number, dtype, _ in equation.uses
                if not (reads_any or dtype == FLOAT32) or (depth > facts[number].depth and number not in remat)
            ]
        )
    return wide


def _small_heads(program: Program) -> set[int]:
    """The sums of a layer with few outputs, such as a value function, and its bias; they may be returned in parts."""
    totals = [equation for equation in program.equations if equation.node.name in ADDS]
    return {
        total.results[0]
        for total in totals
        if _is_biased(program, total) and _dots(program, total) and not _has_large_dot(program, total)
    }


def _dots(program: Program, total: Equation) -> list[Node]:
    """The dots of layers whose results are terms of a sum."""
    nodes = [program.recorded.producers.get(number) for number in total.operands]
    return [node for node in nodes if node is not None and node.name in DOTS and not _is_of_activations(program, node)]


def _is_of_activations(program: Program, node: Node) -> bool:
    """Whether a dot multiplies activations by activations, as for the scores of an attention."""
    has_batch = node.name == "dot_general" and any(node.params["dimension_numbers"][1])
    return has_batch and not any([program.facts[number].parameter for number in node.ins])


def _is_biased(program: Program, total: Equation) -> bool:
    return any([program.facts[number].parameter for number in total.operands])


def _has_large_dot(program: Program, total: Equation) -> bool:
    """Whether a term is the result of a dot, and not much smaller than the activations that the dot reads."""
    for dot in _dots(program, total):
        activations = [program.avals[number] for number in dot.ins if not program.facts[number].parameter]
        if not any([_is_small(program.avals[dot.outs[0]], each) for each in activations]):
            return True
    return False


def _is_small(aval: Any, other: Any) -> bool:
    """Whether one array has at most an eighth of the other's numbers."""
    return _SMALL * assumed_size(aval) <= assumed_size(other)


def _rounded(program: Program, heads: set[int]) -> tuple[set[int], set[int]]:
    """The results in the compute dtype that their equation rounds, or that hold such numbers; and the stored sums.

    Not those that an edit of the table or a region asks for. Sums of values in the compute dtype and of biases are
    stored, as a residual stream is, unless they join parts beside zeros, are among `heads`, the same kernel computes
    all terms, or some terms are the scores of an attention. Values made of stored ones do not count as rounded.
    """
    rounded, sums, parts, scores = set(), set(), set(), set()
    for equation in program.equations:
        name, operands = equation.node.name, equation.operands
        of_scores = name in ROUNDS and not scores.isdisjoint(operands)
        if of_scores or (name in DOTS and _is_of_activations(program, equation.node)):
            scores.update(equation.results)
        rounds = name in ROUNDS or (
            name in _UNROUNDED and not rounded.isdisjoint(operands) and sums.isdisjoint(operands)
        )
        if rounds and program.low in equation.reads and equation.entry.rule is not Rule.LOW:
            rounded.update(equation.results)
            if name in ADDS and not any([_widens(program, equation, number) for number in operands]):
                here = all([number in rounded and number not in sums for number in operands])
                stored = parts.isdisjoint(operands) and not here and heads.isdisjoint(equation.results)
                sums.update(equation.results if stored and scores.isdisjoint(operands) else ())
            if name == "pad":
                parts.update(equation.results)
    return rounded, sums


def _widens(program: Program, total: Equation, number: int) -> bool:
    """Whether a term is a literal, float32 that widens the others, or a parameter as large as the sum.

    Such a parameter is no bias: the network's result is added to it, as to the corners of a mesh.
    """
    fact = program.facts[number]
    widens = fact.precision is Precision.FULL or fact.numbers.range is not None
    own = fact.parameter and number in program.inputs and not program.place.is_scan
    return widens or (own and program.avals[number].shape == program.avals[total.results[0]].shape)
