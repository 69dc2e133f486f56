"""Values that XLA would store in float32 for a sum and for equations that need the sum, saved in 16 bits instead.

    t:f32 = tanh x:f16                       t:f32 = tanh x
    h:f32 = mul x t                          h:f32 = mul x t
    s:f32 = reduce_sum h          ->         s:f32 = reduce_sum h*        (* the saved copy, in the compute dtype)
    n:f32 = sub h s                          n:f32 = sub h* s

The sums of a norm are a kernel of their own, which ends before anything can be normalised, and XLA does not repeat the
whole computation before them in both kernels. It stores the values that both kernels share in float32, and reads them
at least twice. A copy in 16 bits is half of the bytes. Flax's `dtype` and torch.amp round the same numbers.

A value that a dot depends on is saved so if

* it is the result of an activation function that a norm reads, perhaps squared or reshaped first: expensive, and no
  larger than the values in the compute dtype that it is computed from (`analysis/activations.py`), so that it is finite
  where they are;
* or it is a cotangent that a sum reads directly, such as the gradient of a GELU behind a norm: sums over its rows are
  subtracted from it. If it overflows, the loss scale skips the step. XLA computes selections and sums of 16-bit
  numbers, such as the gradients of a relu and a leaky relu, again in each kernel, so that these are left out.

Up to that rounding it is computed in float32. Decides which values these are. `save_or_remat.py` has decided before
which values are saved for readers across a dot.
"""

from __future__ import annotations

import dataclasses

from ..._dtypes import FLOAT32
from ..analysis.activations import activations
from ..ir import SHARED, Equation, Precision, Program, is_sixteen_bit
from ..primitives import EXPONENTIALS, FUSED, Rule

_KEEPS_DTYPE = frozenset({Rule.WIDEST, Rule.FOLLOW, Rule.SHAPE})


def save_for_sums(program: Program) -> Program:
    """The program whose sums, and equations that need them, read saved copies of values that XLA would store."""
    found = _shared_with_sums(program) if program.context.saves_low else None
    if not found:
        return program
    facts, equations = [*program.facts], []
    for equation in program.equations:
        uses = equation.uses
        if not found.isdisjoint(equation.operands):
            uses = [use._replace(residual=SHARED) if use.value in found else use for use in uses]
        for number in found.intersection(equation.results):
            # It is rounded once, where it is saved: equations that follow the dtype of their operands compute it in
            # float32. An equation that a region or an edit has in 16 bits stays so.
            if facts[number].precision is Precision.LOW and equation.entry.rule is not Rule.LOW:
                uses = [use._replace(dtype=FLOAT32) for use in uses]
                facts[number] = dataclasses.replace(facts[number], precision=Precision.FULL)
        equations.append(equation if uses is equation.uses else equation.replace(uses=uses))
    residuals = program.residuals
    residuals = dataclasses.replace(residuals, saved=residuals.saved | found, remat=residuals.remat - found)
    return program.replace(facts=facts, equations=equations, residuals=residuals)


def _shared_with_sums(program: Program) -> set[int]:
    """The values that are stored for sums and for equations that need these, and that may be rounded."""
    found = _read_around_sums(program)
    forward, cotangents = set[int](), set[int]()
    narrow = _narrow(program) if found else ()
    for equation, number, is_read_by_sum in found:
        fact, name, uses = program.facts[number], equation.node.name, program.context.uses.flags[number]
        is_operand = fact.has_low_copy or (fact.precision is Precision.LOW and uses.to_dot)  # in memory, in 16 bits
        if is_operand or fact.sensitive or uses.is_position or not uses.reaches_dot:
            continue
        if not program.place.is_backward(equation.node):
            forward.add(number)
        elif name in EXPONENTIALS:
            continue  # belongs to a softmax that is rematerialized
        elif is_read_by_sum and (name == "mul" or not (narrow[number] or name == "select_n")):
            cotangents.add(number)
    if forward:
        inner = activations(program)
        forward &= inner.keys()
        forward.difference_update(*[inner[number] for number in forward])  # of `h * tanh(h)` the product is stored
    return (forward | cotangents).difference(program.outputs)


def _read_around_sums(program: Program) -> list[tuple[Equation, int, bool]]:
    """The elementwise equations whose results XLA would store for a sum and for readers of it, and these results.

    Such a result has a reader from which a sum is computed, and another one from which an equation is computed that
    also reads a value computed from a sum. The boolean says whether a sum reads the result itself, rather than a value
    that is elementwise in it. Like `assign_dtypes`, this runs for every equation, and so avoids calls of functions.
    """
    # Forwards: values computed from a sum on the same side of a dot, and values that an elementwise equation reads
    # beside these.
    after_sum, beside = ([False] * len(program.facts) for _ in range(2))
    for equation in program.equations:
        elementwise, is_sum = equation.node.name in FUSED, equation.entry.has_own_kernel
        waits = is_sum
        if elementwise or equation.entry.rule is Rule.SHAPE:
            for number, _, residual in equation.uses:
                waits = waits or (after_sum[number] and not residual)
        if waits:
            for number in equation.results:
                after_sum[number] = True
            for number, _, residual in equation.uses if elementwise else ():
                beside[number] = beside[number] or not residual
    if True not in beside:
        return []
    # Backwards: all values from which the latter are computed, and those among them from which elementwise equations
    # also compute a sum.
    readers, summed, read_by_sum = [0] * len(beside), [False] * len(beside), [False] * len(beside)
    found: list[tuple[Equation, int, bool]] = []
    for equation in reversed(program.equations):
        elementwise, is_sum = equation.node.name in FUSED, equation.entry.has_own_kernel
        is_before, is_summed, last = False, is_sum, -1
        for number in equation.results:
            if summed[number] and (elementwise or equation.entry.rule is Rule.SHAPE):
                is_summed = True
            if beside[number] and not after_sum[number]:
                is_before = True
                if elementwise and summed[number] and readers[number] > 1:
                    found.append((equation, number, read_by_sum[number]))
        for number, _, residual in equation.uses:
            beside[number] = beside[number] or is_before
            if not residual:
                readers[number] += number != last  # `h * h` is one kernel, which reads `h` once
                summed[number] = summed[number] or is_summed
                read_by_sum[number] = read_by_sum[number] or is_sum
            last = number
    return found


def _narrow(program: Program) -> list[bool]:
    """Which values are in the compute dtype, or would be if their readers were.

    Sums and selections of values cast from 16 bits count too, as in a program that has been through autocast before.
    """
    narrow = [fact is None or fact.precision is not Precision.FULL for fact in program.facts]
    for equation in program.equations:
        operands = equation.node.ins
        if equation.node.name == "convert_element_type":
            narrow[equation.results[0]] |= is_sixteen_bit(program.avals[operands[0]])
        elif equation.entry.rule in _KEEPS_DTYPE:
            all_are = True
            for number in operands:
                all_are = all_are and narrow[number]
            for number in equation.results:
                narrow[number] = narrow[number] or all_are
    return narrow
