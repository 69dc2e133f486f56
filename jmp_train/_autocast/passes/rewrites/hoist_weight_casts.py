"""Weights that a dot reads in every iteration of a loop, cast once before it.

    scan { b:f16 = cast w; c = dot x b }  w        b:f16 = cast w
                                            ->     scan { d:f16 = copy_of w b; c = dot x d }  w b

XLA moves few casts out of a loop: a recurrent network would read its float32 weights and write their copies at every
step, and text generation those of all layers for every token, which is four times the bytes of the copies. But if the
weight were only cast outside and somebody differentiates the loop, its gradient would be accumulated over the
iterations in 16 bits. So both are passed to the loop, and the copy's derivative is that of a cast inside.

The weight may be moved first, as in `x @ w.T`, or picked from a stack: then the moved weight is copied. A function that
the loop rematerializes, or that it maps over devices, may read the weight. Or a loop inside reads a stack of weights
row by row: then the stack is cast before the outer loop, unless that contains a backward pass. A program that
accumulates gradients of a stack needs the memory of such a copy for these, and its backward pass reads far more bytes
than the weights have.

Decides which casts are made before which loop. Does not decide that a dot reads a copy; see `assign_dtypes.py`.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

from ...._sizes import assumed_size
from ...ir import Equation, Op, Program, Use, with_dtype
from ...primitives import DOTS, Entry, Rule, Trait, having
from ..dead_code import computing

# Without transfers: iterations may put one part of the weights after another on a device that cannot hold all of them.
_MOVES = having(Trait.MOVES | Trait.PICKS) - having(Trait.TRANSFERS)
_COPY = Entry(Rule.RECORDED, "a weight's copy, made before the loop that reads it")


def hoist_weight_casts(program: Program) -> Program:
    """The program whose loops are given copies of the constants that their dots read in the compute dtype."""
    if not any([equation.bodies for equation in program.equations]):
        return program
    # Inner loops first: a copy made before an inner loop is a cast in the outer loop's body, which is hoisted next.
    equations = [_with_copies_inside(each) if each.bodies else each for each in program.equations]
    return _with_copies(program.replace(equations=equations), _constants)


class _Inputs(NamedTuple):
    """Inputs of an equation's body that are one value in all iterations of a loop.

    Attributes:
      positions: their positions.
      copies_at: the position of their copies among the inputs of the body.
      are_parts: whether the body gets a part of each: one row at a time, or that of a device.
    """

    positions: Sequence[int]
    copies_at: int
    are_parts: bool = False


def _constants(equation: Equation) -> _Inputs | None:
    counts = equation.loop_counts
    return counts and _Inputs(range(counts[0]), counts[0])


def _with_copies_inside(equation: Equation) -> Equation:
    """A loop in whose body casts of its constants stand before the equations that read them row by row, or again."""
    counts = equation.loop_counts
    if counts is None or not any([each.bodies for each in equation.bodies[0].equations]):
        return equation
    (body, *others), constant = equation.bodies, {*equation.bodies[0].inputs[: counts[0]]}
    constant.update(number for move in _moves(body, constant) for number in move.results)
    # With a backward pass the loop may accumulate gradients; see the docstring above.
    has_backward = any([body.place.is_backward(each.node) for each in body.equations])

    def inputs(inner: Equation) -> _Inputs | None:
        counts = inner.loop_counts if inner.node.name == "scan" and not has_backward else None
        if counts is None and inner.node.name not in ("remat2", "shard_map"):
            return None
        # The rows of a scan, whose constants are cast before it anyway, and all operands of other equations. A row or a
        # device's part that is moved inside cannot be moved outside.
        count, first, are_parts = len(inner.uses), sum(counts or ()), inner.node.name != "remat2"
        return _Inputs([i for i in range(first, count) if inner.operands[i] in constant], count, are_parts)

    return equation.replace(bodies=(_with_copies(body, inputs), *others))


def _with_copies(program: Program, inputs: Callable[[Equation], _Inputs | None]) -> Program:
    """The program in which casts of some inputs of equations' bodies stand before the equations."""
    program = program.replace(avals=[*program.avals])
    equations: list[Equation] = []
    for equation in program.equations:
        chosen = inputs(equation) if equation.bodies else None
        equations += [equation] if chosen is None else _hoisted(program, equation, chosen)
    return program.replace(equations=equations)


def _hoisted(program: Program, equation: Equation, inputs: _Inputs) -> list[Equation]:
    """The casts of inputs of an equation's body for dots, after the equations that move these; then the equation."""
    body = equation.bodies[0]
    names = {body.inputs[i]: equation.given[i] for i in inputs.positions}
    moves = [] if inputs.are_parts else _moves(body, names)
    varying = _varying(body, names) if equation.node.name == "shard_map" else {}
    names.update({number: names[each.operands[0]] for number, each in varying.items()})
    casts = _casts(body, {*names}.union(*(move.results for move in moves)))
    before: list[Equation] = []
    for each in computing([*moves, *casts], [cast.results[0] for cast in casts]):
        operands = [names[number] for number in each.operands]
        of_cast = [with_dtype(program.avals[number], body.low) for number in operands if each.op is Op.CAST]
        results = tuple(map(program.new, of_cast or [body.avals[number] for number in each.results]))
        entry = _COPY if of_cast else each.entry
        before.append(each.replace(entry=entry, uses=list(map(Use, operands)), results=results, at=equation.node))
        names.update(zip(each.results, results, strict=True))
    copies = [names[cast.results[0]] for cast in casts]
    return [*before, _reading(equation, casts, copies, inputs.copies_at, varying)] if casts else [equation]


def _varying(body: Program, numbers: Container[int]) -> dict[int, Equation]:
    """The equations in a `shard_map` that only declare an input to vary over devices, by their results."""
    found = [each for each in body.equations if each.node.name == "pvary" and each.operands[0] in numbers]
    return {each.results[0]: each for each in found}


def _moves(body: Program, constant: Container[int]) -> list[Equation]:
    """The equations of a loop's body that move or pick from what is the same in every iteration."""
    found, moved = list[Equation](), set[int]()
    for equation in body.equations:
        if equation.op is Op.RECORDED and equation.node.name in _MOVES:
            same = all(number in constant or number in moved for number in equation.operands)
            # A copy of a repeated weight would be larger than the weight.
            sizes = [assumed_size(body.avals[number]) for number in (equation.operands[0], equation.results[0])]
            if same and sizes[0] >= sizes[1]:
                moved.update(equation.results)
                found.append(equation)
    return found


def _casts(body: Program, numbers: Container[int]) -> list[Equation]:
    """The casts of some values to the compute dtype whose results dots of a body read, or loops inside as copies."""
    read = {number for each in body.equations if each.name in DOTS for number in each.operands}
    return [
        each
        for each in body.equations
        if each.op is Op.CAST
        and each.operands[0] in numbers
        and (each.results[0] in read or each.entry is _COPY)
        and body.avals[each.results[0]].dtype == body.low
    ]


def _reading(
    equation: Equation, casts: Sequence[Equation], copies: Sequence[int], at: int, varying: Mapping[int, Equation]
) -> Equation:
    """The equation with `copies` at a position among the inputs of its body, which reads them in place of casts."""
    (body, *others), counts, params = equation.bodies, equation.loop_counts, equation.params
    body = body.replace(avals=[*body.avals])
    weights, inputs, hoisted = list[int](), list[int](), dict[int, list[Equation]]()
    for cast in casts:
        declared = varying.get(cast.operands[0])
        weights.append((declared or cast).operands[0])
        if cast.entry is _COPY:  # made for a loop inside, whose `Op.COPY_OF` has the derivative
            inputs.append(cast.results[0])
            hoisted[id(cast)] = []
            continue
        copy = body.new(with_dtype(body.avals[weights[-1]], body.low))
        inputs.append(copy)
        hoisted[id(cast)] = made = []
        if declared is not None:
            copy = body.new(body.avals[cast.results[0]])
            made.append(declared.replace(uses=[Use(inputs[-1])], results=(copy,)))
        made.append(cast.replace(op=Op.COPY_OF, uses=[*cast.uses, Use(copy)], params={}))
    if equation.node.name == "shard_map":  # a copy is on the devices that its weight is on
        specs = params.get("in_specs", equation.node.params["in_specs"])
        params = {**params, "in_specs": (*specs, *[specs[body.inputs.index(weight)] for weight in weights])}
    body = body.replace(
        inputs=(*body.inputs[:at], *inputs, *body.inputs[at:]),
        equations=[made for each in body.equations for made in hoisted.get(id(each), [each])],
    )
    uses, skip = [*equation.uses], len(equation.uses) - len(equation.bodies[0].inputs)
    uses[skip + at : skip + at] = map(Use, copies)
    if counts is not None and at == counts[0]:  # copies of constants; those of rows come after all operands
        counts = counts[0] + len(copies), counts[1]
    return equation.replace(uses=uses, bodies=(body, *others), counts=counts, params=params)
