"""Values that XLA would store in float32 for a sum and for equations that need the sum, saved in 16 bits instead.

    t:f32 = tanh x:f16                       t:f32 = tanh x
    h:f32 = mul x t                          h:f32 = mul x t
    s:f32 = reduce_sum h          ->         s:f32 = reduce_sum h*        (* the saved copy, in the compute dtype)
    n:f32 = sub h s                          n:f32 = sub h* s

The sums of a norm are a kernel of their own, which ends before anything can be normalised, and XLA does not repeat the
whole computation before them in both kernels. It stores the values that both kernels share in float32, and reads them
at least twice. A copy in 16 bits is half of the bytes. Flax's `dtype` and torch.amp round the same numbers.

A value that a dot depends on is saved so if

* it is the result of an activation function that a norm reads, perhaps squared, reshaped or split first: expensive, and
  no larger than the values in the compute dtype that it is computed from (`analysis/activations.py`), so that it is
  finite where they are;
* or it is a cotangent that a sum reads directly, such as the gradient of a GELU behind a norm: sums over its rows are
  subtracted from it. If it overflows, the loss scale skips the step. XLA computes selections and sums of 16-bit
  numbers, such as the gradients of a relu and a leaky relu, again in each kernel, so that these are left out. A norm
  whose parameters are frozen multiplies the cotangent by them and its own scale first. The sum may then read the
  product, unless it is over the last axis alone: a softmax has such sums, too, and XLA computes these in the kernel
  that reads the row.

Up to that rounding it is computed in float32.

A sum of two values in 16 bits, such as a residual stream before a GroupNorm, is stored for the norm as it is.
`save_or_remat.py`, which decides what readers across a dot read, does not know this: it would have them read both
values and add these again. They read the sum.

Decides which values these are.
"""

import dataclasses

from ..._dtypes import BFLOAT16, FLOAT32
from ..analysis.activations import activations
from ..ir import SHARED, Equation, Precision, Program, is_sixteen_bit
from ..primitives import ADDS, EXPONENTIALS, FUSED, Rule

_KEEPS_DTYPE = frozenset({Rule.WIDEST, Rule.FOLLOW, Rule.SHAPE})
_VIEWS = frozenset({"reshape", "split"})  # in the kernels of their readers: their operand is stored for these
# Kinds of sums, as bits: over the last axis alone, which XLA computes in the kernel that reads the row, and others.
_OF_ROWS, _ACROSS_ROWS = 1, 2
_NEGATED, _SCALED, _DIRECTLY = 1, 2, 3  # how a sum reads a value


def save_for_sums(program: Program) -> Program:
    """The program whose sums, and equations that need them, read saved copies of values that XLA would store."""
    if not program.context.saves_low:
        return program
    found, stored = _shared_with_sums(program)
    if not found and not stored:
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
    residuals, saved = program.residuals, found | stored
    # XLA for CPUs computes bfloat16 in float32, and drops the rounding for the norm, but not that of the saved copy: in
    # the backward pass the normalised values would not have a mean of zero.
    rounded = frozenset(stored if program.low == BFLOAT16 else ())
    residuals = dataclasses.replace(
        residuals, saved=residuals.saved | saved, remat=residuals.remat - saved, rounded=rounded
    )
    return program.replace(facts=facts, equations=equations, residuals=residuals)


def _shared_with_sums(program: Program) -> tuple[set[int], set[int]]:
    """The values that are stored for sums and equations that need these: those to round, and sums in 16 bits."""
    found = _read_around_sums(program)
    forward, cotangents, stored = set[int](), set[int](), set[int]()
    narrow = _narrow(program) if found else ()
    for equation, number, sums, is_read_by_sum in found:
        fact, name, uses = program.facts[number], equation.node.name, program.context.uses.flags[number]
        is_operand = fact.has_low_copy or (fact.precision is Precision.LOW and uses.to_dot)  # in memory, in 16 bits
        if is_operand or fact.sensitive or uses.is_position or not uses.reaches_dot:
            continue
        if not program.place.is_backward(equation.node):
            forward.add(number)
            shapes = {program.avals[each].shape for each in (number, *equation.operands)}
            is_stored = sums == _ACROSS_ROWS and name in ADDS and len(shapes) == 1 and fact.precision is Precision.LOW
            if is_stored and number in program.residuals.remat:
                stored.add(number)
        elif name in EXPONENTIALS:
            continue  # belongs to a softmax that is rematerialized
        elif is_read_by_sum and (name == "mul" or not (narrow[number] or name == "select_n")):
            cotangents.add(number)
    if forward:
        inner = activations(program)
        forward &= inner.keys()
        forward.difference_update(*[inner[number] for number in forward])  # of `h * tanh(h)` the product is stored
    return (forward | cotangents).difference(program.outputs), stored


def _read_around_sums(program: Program) -> list[tuple[Equation, int, int, bool]]:
    """The elementwise equations whose results XLA would store for a sum and for readers of it, and these results.

    Such a result has a reader from which a sum is computed, and another one from which an equation is computed that
    also reads a value computed from a sum. With each result come the kinds of such sums, and whether a sum reads the
    result itself, or scaled if all sums are across rows, rather than another value that is elementwise in it. Like
    `assign_dtypes`, this runs for every equation, and so avoids calls of functions.
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
    readers, summed, read_by_sum = ([0] * len(beside) for _ in range(3))
    found: list[tuple[Equation, int, int, bool]] = []
    for equation in reversed(program.equations):
        name = equation.node.name
        elementwise, moves = name in FUSED, equation.entry.rule is Rule.SHAPE
        is_view = name in _VIEWS
        sums, reads, kernels, is_before, last = 0, 0, 0 if is_view else 1, False, -1
        if equation.entry.has_own_kernel:
            sums, reads = _OF_ROWS, _DIRECTLY
            shape = program.avals[equation.node.ins[0]].shape
            if name == "reduce_sum" and equation.node.params["axes"] != (len(shape) - 1,):
                sums = _ACROSS_ROWS
        for number in equation.results:
            if elementwise or moves:
                sums |= summed[number]
            is_before = is_before or (beside[number] and not after_sum[number])
            reader = read_by_sum[number]
            if is_view:
                kernels, reads = kernels + readers[number], max(reads, reader)
                continue
            if name == "neg":
                reads = _NEGATED if reader == _DIRECTLY else reader
            elif reader and name == "mul" and _scales(program, equation):
                reads = _SCALED
            if is_before and elementwise and summed[number] and readers[number] > 1:
                is_read = reader == _DIRECTLY or (reader == _SCALED and summed[number] == _ACROSS_ROWS)
                found.append((equation, number, summed[number], is_read))
        for number, _, residual in equation.uses:
            beside[number] = beside[number] or is_before
            if not residual:
                readers[number] += kernels if number != last else 0  # `h * h` is one kernel, which reads `h` once
                summed[number] |= sums
                if reads > read_by_sum[number]:
                    read_by_sum[number] = reads
            last = number
    return found


def _scales(program: Program, product: Equation) -> bool:
    """Whether a product multiplies a value by one with fewer numbers, as a norm does."""
    one, other = [program.avals[number].shape for number in product.node.ins]
    return one != other


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
