"""The dtype of every equation of a program, decided with the whole program in view.

    w:f32[8,4] x:f32[2,8] (data)             w:f32[8,4] x:f32[2,8]
    a = dot_general x w                      a:f16 = dot_general x:f16 w:f16
    b = exp a                        ->      b:f32 = exp a:f32
    c = reduce_sum b                         c:f32 = reduce_sum b:f32

Decides the dtype in which each operand is read, the dtype of each result, and for which float32 values readers across a
dot read a rounded copy. Does not decide whether that copy is saved (`save_or_remat.py`), nor where casts are placed
(`insert_casts.py`). Bodies of loops, branches and calls are planned by `control_flow.py`.

One forward walk over the equations computes a `Fact` per value. Two things make it more than a table look-up:

* A value that a dot reads is rounded for that dot anyway. If it was computed in float32 and is read again on the far
  side of a dot (by a residual connection, by the backward pass), the rounded copy is read there, so that the float32
  value need not be saved. Equations on the near side read the float32 value, which costs nothing since they fuse.
* A pairwise equation runs in float32 too if all its readers are float32 equations on the same side of the dots.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._attention import ATTENTION, DROPOUT, generation, names_of_operands, why_not_fused
from ..._dtypes import FLOAT32
from ..._jaxpr import BARRIER, Node
from ..analysis.accesses import Accesses
from ..analysis.dot_sizes import asks_for_float32, leaves_small_result
from ..analysis.producers import keeps_float32
from ..analysis.ranges import UNKNOWN_NUMBERS, Numbers, Range, divides_by_terms, filled_with, numbers_through, range_of
from ..analysis.uses import Flags, axes_of
from ..analysis.whole_program.updates import GRADIENT, STEP, UPDATE
from ..analysis.wide_product import WideProduct
from ..ir import (
    SHARED,
    Access,
    Decided,
    Equation,
    Fact,
    Precision,
    Program,
    Use,
    dtype_of,
    equation_of,
    is_float32,
    is_on_host,
    is_sixteen_bit,
    precision_of,
    recorded_reads,
)
from ..primitives import ADDS, CAST_FIRST, DOTS, ROUNDS, Entry, Rule, Trait, having
from . import control_flow

_ATTENTION = having(Trait.ATTENTION)
# Constants from this one on are large: added to a number of about one, they cost it three of its 11 or 8 bits.
_LARGE = 8
_TRANSFERS = having(Trait.TRANSFERS | Trait.PLACES)
_HAVE_NUMBERS = frozenset({"convert_element_type", "gather"})  # of a boolean: zeros and ones; of what is out of bounds


def assign_dtypes(program: Program) -> Program:
    """The program with the dtype of every operand and result, and the precision of each result for readers outside."""
    walk = _Walk(program)
    for node, entry in zip(program.recorded.nodes, program.context.entries, strict=True):
        walk.visit(node, entry)
    return walk.finished()


def precision_of_known(known: Range | None, aval: Any, low: np.dtype) -> Precision:
    """Literals and captured scalars that `low` can hold are WEAK, other float32 values of the program are FULL."""
    return precision_of(aval, Precision.WEAK if known is not None and known.fits(low) else Precision.FULL)


class _Walk:
    """The forward walk over one program."""

    def __init__(self, program: Program):
        context = program.context
        self.program, self.recorded, self.context = program, program.recorded, context
        self.low, self.uses, self.place = program.low, context.uses, program.place
        self.avals = self.recorded.avals
        self.accesses = Accesses(self.recorded, self.place, context.uses.returned)
        self.equations: list[Equation] = []
        self.forward_depth, self.saves_low = 0, context.saves_low
        self.states, self.starts = context.planner.states, context.planner.starts
        self.reduce_dtype = context.planner.policy.reduce_dtype
        self.facts: list[Any] = [None] * len(self.avals)
        for number, precision in zip(program.inputs, context.precisions, strict=True):
            numbers = UNKNOWN_NUMBERS
            if precision is Precision.OVERFLOWS:
                precision, numbers = Precision.FULL, Numbers(overflows=True)
            self.facts[number] = Fact(precision, parameter=precision is Precision.WEAK, numbers=numbers)
        # By the sizes of their axes in any order: the gradient of a weight is recorded transposed, too.
        self.weights = {axes_of(self.avals[number]) for number in program.inputs if self.facts[number].parameter}
        for number, value in program.constants.items():
            known = range_of(value) if is_float32(self.avals[number]) else None
            precision = precision_of_known(known, self.avals[number], self.low)
            self.facts[number] = Fact(precision, numbers=Numbers(known))

    def finished(self) -> Program:
        # A carry that the body returns or stacks unchanged was computed in the iteration before. It is rounded for a
        # dot outside as if it were computed in this iteration.
        carried = {self.program.inputs[position] for position in self.context.roundable if self.saves_low}
        outputs = zip(self.program.outputs, self.context.out_flags, strict=True)
        results = [self._for_readers_outside(number, flags, number in carried) for number, flags in outputs]
        return self.program.replace(facts=self.facts, equations=self.equations, result_precisions=results)

    def _seen(self, number: int, depth: int, access: Access) -> Precision:
        """The precision in which a reader at `depth` reads a value with a low copy."""
        fact = self.facts[number]
        # A fused reader on the near side computes the float32 value anew in its own kernel, and pays no bytes for it.
        narrow = access is Access.STORED or (access is Access.FUSED and depth > fact.depth)
        return Precision.LOW if narrow else fact.precision

    def _across(self, number: int, precision: Precision) -> Precision:
        """The precision that a value has on the other side of a body's boundary."""
        overflows = precision is Precision.FULL and self.facts[number].numbers.exceed(self.low)
        return Precision.OVERFLOWS if overflows else precision

    def visit(self, node: Node, entry: Entry) -> None:
        depth = 0
        for number in node.ins:  # as `Values.add`, this runs for every equation, and calls no function that need not be
            if self.facts[number].depth > depth:
                depth = self.facts[number].depth
        backward = self.place.is_backward(node)
        if backward:
            # It runs after the whole forward pass, whose values it therefore reads across a dot, whatever their depth.
            depth = depth if depth > self.forward_depth else self.forward_depth
        accesses = self.accesses.of(node, entry, self.facts)
        seen = [
            self._seen(number, depth, access) if self.facts[number].has_low_copy else self.facts[number].precision
            for number, access in zip(node.ins, accesses, strict=True)
        ]
        equation, made = self._DECIDE[entry.rule](self, node, entry, seen)
        has_dot = (entry.rule is Rule.LOW or entry.rule is Rule.ENTER) and equation.has_narrow_dot
        equation.depth, equation.accesses = depth, accesses
        for number, precision in zip(node.outs, made, strict=True):
            self.facts[number] = self._fact(equation, number, precision, depth + has_dot)
        self.equations.append(equation)
        if not backward and depth + has_dot > self.forward_depth:
            self.forward_depth = depth + has_dot

    def _fact(self, equation: Equation, number: int, precision: Precision, depth: int) -> Fact:
        """The fact of result `number` of an equation."""
        operands = [self.facts[operand] for operand in equation.node.ins]
        if equation.node.name in (BARRIER, "sort"):  # each result has the numbers of the operand at the same position
            operands = [operands[equation.node.outs.index(number)]]
        moves = equation.entry.rule is Rule.SHAPE
        fact = Fact(
            Precision.FULL if precision is Precision.OVERFLOWS else precision,
            depth,
            computed=not moves or any([operand.computed for operand in operands]),
            parameter=(moves and any([operand.parameter for operand in operands])) or equation.entry is UPDATE,
            numbers=_numbers_of(equation.node, operands, precision, self.low),
        )
        flags = self.uses.flags[number]
        # The comparison spares most values the call: nothing is known of their numbers.
        exceeds = fact.numbers != UNKNOWN_NUMBERS and fact.numbers.exceed(self.low)
        fact.sensitive = flags.sensitive or exceeds or bool(self.states and id(equation.node) in self.states)
        if fact.precision is Precision.FULL and fact.computed and self.saves_low:
            # JAX records values that a policy of `jax.checkpoint` saves as roundings to float32's own digits. The
            # result of a dot that is saved so holds 16-bit numbers.
            saved = equation.node.name == "reduce_precision" and keeps_float32(equation.node)
            exact = saved and operands[0].precision is Precision.LOW
            fact.has_low_copy = (flags.to_dot or exact) and not fact.sensitive
        values = fact.numbers.range
        if fact.precision is Precision.WEAK and values is not None:
            # A backward pass starts from a literal, one over a mean's terms, and autodiff broadcasts it to the shape of
            # the loss's terms. No dot is between, so that 16 bits would round the first cotangents and save nothing.
            # Zeros are no start: the gradient of a slice is zeros that `dynamic_update_slice` writes a cotangent into,
            # and would be float32 with them.
            seed = self.place.is_backward(equation.node) and values != Range() and self._is_constant(equation.node)
            if seed or not values.fits(self.low):
                fact.precision = Precision.FULL
        return fact

    def _is_constant(self, node: Node) -> bool:
        """Whether all operands of a node are literals or captured arrays."""
        return all([number in self.program.constants for number in node.ins])

    def _made(self, node: Node, precision: Precision = Precision.FULL) -> list[Precision]:
        """The precisions of a node's results: this one for those recorded in float32."""
        return [precision_of(self.avals[number], precision) for number in node.outs]

    def _wide_product(self, node: Node, entry: WideProduct, seen: list[Precision]) -> Decided:
        if entry.meets_squares and not entry.of_derivative and all(p is Precision.LOW for p in seen):
            # Products of 16-bit numbers are exact in float32, so that 16-bit operands lose nothing. They are read as
            # residuals, behind a barrier: a compiler that computes the product in float32 would otherwise drop the
            # rounding of its operands, while the squares that meet the product are of rounded numbers.
            uses = [Use(number, self.low, SHARED) for number in node.ins]
            return Equation(node, entry, uses, node.outs, params={"preferred_element_type": FLOAT32}), self._made(node)
        return self._pairwise(node, entry, seen, Precision.FULL)

    def _as_recorded(self, node: Node, entry: Entry, seen: list[Precision]) -> Decided:
        if isinstance(entry, WideProduct):
            return self._wide_product(node, entry, seen)
        reads, made = recorded_reads(seen), self._made(node)
        if node.name == "convert_element_type":
            if seen[0] is Precision.LOW and node.params["new_dtype"] == self.low:
                reads = [self.low]  # the user asks for the dtype that the value already has
            if node.ins[0] in self.program.constants:  # as jnp.pad's zero is
                known = range_of(self.program.constants[node.ins[0]])
                made = [precision_of_known(known, self.avals[node.outs[0]], self.low)]
            elif self.avals[node.ins[0]].dtype == np.bool_:
                made = [Precision.WEAK if p is Precision.FULL else p for p in made]  # zeros and ones fit anywhere
        return equation_of(node, entry, reads), made

    def _high(self, node: Node, entry: Entry, seen: list[Precision]) -> Decided:
        equation, made = self._in_dtype(node, entry, FLOAT32)
        # The update of a parameter is a parameter: float32 in memory, and narrowed beside 16-bit operands.
        weak = entry is UPDATE or entry is STEP or entry is GRADIENT
        return equation, [Precision.WEAK] if weak else made

    def _follow(self, node: Node, entry: Entry, seen: list[Precision]) -> Decided:
        floating = [precision for precision in seen if precision is not Precision.RECORDED]
        if len(floating) > 1 and len(node.outs) != len(node.ins):
            # The user's `rules` let a primitive of several operands follow them. JAX wants one dtype for all of these.
            return self._widest(node, entry, seen)
        flags = self.uses.flags[node.outs[0]]
        if node.name == "rev" and flags.only_dots and not self.facts[node.ins[0]].numbers.exceed(self.low):
            # XLA for GPUs recognises a convolution with a reversed kernel as cuDNN's gradient by the data, but not if a
            # cast is between reversal and convolution: a strided one would then be padded. So the kernel is cast before
            # it is reversed, even that of a frozen network, which is data.
            return self._pairwise(node, entry, seen, Precision.LOW)
        if node.name in _TRANSFERS and seen == [Precision.WEAK] and self._is_weight_for_dots(node):
            return equation_of(node, CAST_FIRST, [FLOAT32], computes=[FLOAT32]), [Precision.LOW]
        fill = filled_with(node)
        if fill is not None and not fill.fits(self.low):
            high = Entry(Rule.HIGH, f"{self.low.name} cannot hold its fill_value")
            return self._pairwise(node, high, seen, Precision.FULL)
        # A gate near one would be rounded to one, and a loop multiplies its state by it again and again. In float32 it
        # costs no bytes: the scan stacks its 16-bit operand, from which the backward pass computes it again. A gate
        # that a dot reads is stored, and rounded, for that anyway.
        gate = node.name == "logistic" and self.place.is_scan and seen[0] is Precision.LOW and not flags.to_dot
        # Nothing is left of `1 - sigmoid(x)` where the sigmoid is rounded to one.
        cancels = node.outs[0] in self.uses.from_constant and seen[0] is Precision.LOW and not self.place.is_scan
        if node.name in ROUNDS and (gate or cancels or flags.delicate or flags.is_position):
            return self._pairwise(node, entry, seen, Precision.FULL)
        first = next(iter(floating), Precision.RECORDED)
        sources = seen if len(node.outs) == len(node.ins) else [first] * len(node.outs)
        made = [precision_of(self.avals[n], precision) for n, precision in zip(node.outs, sources, strict=True)]
        params = {}
        if node.name == "convert_element_type" and made == [Precision.LOW]:
            params = {"new_dtype": self.low}  # recorded from float32 to float32: it changes the weak type alone
        return equation_of(node, entry, [dtype_of(precision, self.low) for precision in seen], params=params), made

    def _is_weight_for_dots(self, node: Node) -> bool:
        """Whether a node sends a value between devices, and only dots read the value that arrives."""
        (sent,), (received,) = node.ins, node.outs
        flags, on_host = self.uses.flags[received], is_on_host(self.avals[sent]) or is_on_host(self.avals[received])
        return flags.only_dots and not on_host

    def _widest(self, node: Node, entry: Entry, seen: list[Precision]) -> Decided:
        flags = self.uses.flags[node.outs[0]]
        wide = flags.only_wide or (flags.is_position and not self._is_stream(node, seen))
        wide = wide and node.name in ROUNDS  # an operation that rounds nothing is as exact in its operands' dtype
        if node.name == "div" and not wide and self._is_mean_to_store(node):
            # The sum is float32, and with it the quotient would be. A pool writes its result to memory, so that 16 bits
            # are half of the bytes.
            entry = Entry(entry.rule, "a mean of 16-bit values, which fits where they do")
            return equation_of(node, entry, [FLOAT32, FLOAT32], computes=[FLOAT32]), [Precision.LOW]
        narrow = Precision.LOW if Precision.LOW in seen else Precision.WEAK
        if node.name == "div" and seen == [Precision.LOW, Precision.WEAK]:
            # In float16 a parameter below 3e-8 is zero. `jax.grad(autocast(f))` divides by its square, in the dtype of
            # the quotient: in float16 that is infinite below 2^-8. A literal is in 16 bits only if they hold it.
            wide = wide or self.facts[node.ins[1]].numbers.range is None
        if flags.only_results and Precision.LOW in seen and self._changes_units(node):
            entry, wide = Entry(entry.rule, "float32, since a constant changes the units of what is returned"), True
        if self.starts and self._starts(node):
            entry, wide = Entry(entry.rule, "float32, as the state or running sum of an unrolled loop starts"), True
        precision = Precision.FULL if wide or Precision.FULL in seen else narrow
        return self._pairwise(node, entry, seen, precision)

    def _starts(self, node: Node) -> bool:
        """Whether the state of an unrolled loop, or a running sum, may start with a node's result.

        A product with a constant array may only if that holds zeros: others are mostly masks or scales.
        """
        if id(node) not in self.starts:
            return False
        return node.name in ADDS or any([self.facts[number].numbers.range == Range() for number in node.ins])

    def _changes_units(self, node: Node) -> bool:
        """Whether a node adds a large constant, or multiplies by a large or small one, as `2000 * y + 5000` does.

        This is how predictions get the units of their data, in which float16 may be infinite or zero, and 16 bits have
        few decimals.
        """
        known = [values for number in node.ins if (values := self.facts[number].numbers.range) is not None]
        largest = max([values.largest for values in known], default=1.0)
        if node.name in ADDS:
            return largest >= _LARGE
        return node.name in ("mul", "div") and not 1 / _LARGE < largest < _LARGE

    def _is_stream(self, node: Node, seen: list[Precision]) -> bool:
        """Whether a node adds narrow values or a bias: its sum, which is stored, is little less exact than they are."""
        pairs = zip(node.ins, seen, strict=True)
        return node.name in ADDS and all([p is Precision.LOW or self.facts[n].parameter for n, p in pairs])

    def _is_mean_to_store(self, node: Node) -> bool:
        """Whether a node makes means of windows of values in the compute dtype."""
        sums, divisor = node.ins
        pool = self.recorded.producers.get(sums)
        if pool is None or pool.name != "reduce_window_sum" or self.facts[pool.ins[0]].precision is not Precision.LOW:
            return False
        mean = divides_by_terms(math.prod(pool.params["window_dimensions"]), self.facts[divisor].numbers.range)
        # A result of the program is returned in float32: a rounding before that would be visible and save nothing.
        return mean and not (node.outs[0] in self.program.outputs or self.uses.flags[node.outs[0]].sensitive)

    def _pairwise(self, node: Node, entry: Entry, seen: list[Precision], precision: Precision) -> Decided:
        reads = [None if p is Precision.RECORDED else dtype_of(precision, self.low) for p in seen]
        return equation_of(node, entry, reads), self._made(node, precision)

    def _low(self, node: Node, entry: Entry, seen: list[Precision]) -> Decided:
        if node.name not in DOTS:
            return self._pairwise(node, entry, seen, Precision.LOW)
        settings = node.params["settings"] if node.name in _ATTENTION else None
        names = [""] * len(node.ins) if settings is None else names_of_operands(node.name, settings)
        # A bias of -1e9 masks, and does so where it is minus infinity too.
        pairs = zip(names, node.ins, strict=True)
        if any(name != "bias" and self.facts[number].numbers.exceed(self.low) for name, number in pairs):
            infinite = Entry(Rule.RECORDED, f"some of its numbers are infinite in {self.low.name}")
            return self._as_recorded(node, infinite, seen)
        avals = [self.avals[number] for number in node.ins[:3]]  # not of an attention's bias
        low = next((aval.dtype for aval in avals if is_sixteen_bit(aval)), self.low)
        pairs = zip(names, seen, strict=True)
        # The log-sum-exp of a row of scores, an operand of the backward pass, is float32 as cuDNN made it.
        reads = [None if precision is Precision.RECORDED or name == "lse" else low for name, precision in pairs]
        return self._dot(node, entry, reads) if settings is None else self._attention(node, entry, reads)

    def _dot(self, node: Node, entry: Entry, reads: list[np.dtype | None]) -> Decided:
        """A matrix product or convolution of 16-bit operands, and the dtype that it returns."""
        low = next(dtype for dtype in reads if dtype is not None)
        if not is_float32(self.avals[node.outs[0]]):
            return equation_of(node, entry, reads), [Precision.RECORDED]
        are_parameters = [self.facts[number].parameter for number in node.ins]
        # cuDNN has no convolution of 16-bit operands with a float32 result: asked for one, XLA casts both operands and
        # runs it in float32, in three times the bytes.
        gradient = node.name != "conv_general_dilated" and self.place.is_backward(node)
        # A product with a parameter is mostly the gradient of an activation, and need not return float32.
        weights = self.weights if any(are_parameters) else None
        leaves = self.reduce_dtype if gradient and self.uses.ends_at(node.outs[0], weights) else low
        # In the backward pass a dot returns float32 only if no other dot follows. Any other cotangent is read by the
        # elementwise derivatives up to the next dot, which would then run in float32.
        if not self.place.is_backward(node) and leaves_small_result(self.recorded, node, are_parameters):
            entry, leaves = Entry(entry.rule, f"{entry.reason}; its small result stays in float32"), FLOAT32
        if any([call.params.get("name") == DROPOUT for call in node.calls]):
            entry = Entry(entry.rule, f"{entry.reason}; of an attention with dropout, which cuDNN does not take")
        params: dict[str, Any] = {"preferred_element_type": leaves}
        if asks_for_float32(node.params.get("precision"), None):
            params["precision"] = None  # of 16-bit operands there is one precision; compilers widen them for another
        if leaves == self.low:
            return equation_of(node, entry, reads, params=params), [Precision.LOW]
        return equation_of(node, entry, reads, params=params, computes=[leaves]), [Precision.FULL]

    def _attention(self, node: Node, entry: Entry, reads: list[np.dtype | None]) -> Decided:
        settings, avals = node.params["settings"], [self.avals[number] for number in node.ins]
        why = why_not_fused(avals[0], avals[1], avals[3 : 3 + len(settings.extras)], settings)
        fused = f"fused by cuDNN on GPUs from {generation(avals[0])} on" if why is None else ""
        reason = fused or f"in jax.numpy, every sum in float32: {why}"
        made = self._made(node, Precision.LOW)
        if node.name == ATTENTION:  # its second result is the log-sum-exp of each row, which cuDNN gives in float32
            made[1] = Precision.FULL
        return equation_of(node, dataclasses.replace(entry, reason=reason), reads), made

    def _collective(self, node: Node, entry: Entry, seen: list[Precision]) -> Decided:
        """Gradients are sent in the policy's `reduce_dtype`, statistics of the forward pass in float32."""
        return self._in_dtype(node, entry, self.reduce_dtype if self.place.is_backward(node) else FLOAT32)

    def _in_dtype(self, node: Node, entry: Entry, dtype: np.dtype) -> Decided:
        """Computes in `dtype`, and returns the recorded dtype: for hand-cast 16-bit operands a 16-bit result."""
        avals = [self.avals[number] for number in (*node.ins, *node.outs)]
        dtypes = [dtype if is_float32(aval) or is_sixteen_bit(aval) else None for aval in avals]
        return equation_of(node, entry, dtypes[: len(node.ins)], computes=dtypes[len(node.ins) :]), self._made(node)

    def _enter(self, node: Node, entry: Entry, seen: list[Precision]) -> Decided:
        # `control_flow` knows the body, and decides which of these carries are float32 after all.
        for i in self.accesses.may_start_narrow(node, self.facts) if node.name == "scan" else ():
            seen[i] = Precision.LOW
        seen = [self._across(number, precision) for number, precision in zip(node.ins, seen, strict=True)]
        return control_flow.enter(self.context, node, entry, self.place, seen)

    _DECIDE = {  # noqa: RUF012
        Rule.LOW: _low,
        Rule.HIGH: _high,
        Rule.FOLLOW: _follow,
        Rule.SHAPE: _follow,
        Rule.WIDEST: _widest,
        Rule.COLLECTIVE: _collective,
        Rule.ENTER: _enter,
        Rule.RECORDED: _as_recorded,
    }

    def _for_readers_outside(self, number: int, flags: Flags, carried: bool) -> Precision:
        """The precision of a result for readers outside: rounded, if a dot outside reads it."""
        fact = self.facts[number]
        precision = self._across(number, fact.precision)
        is_rounded = (fact.has_low_copy or carried) and precision is Precision.FULL
        return Precision.LOW if is_rounded and flags.to_dot and not flags.sensitive else precision


def _numbers_of(node: Node, operands: Sequence[Fact], precision: Precision, low: np.dtype) -> Numbers:
    for operand in operands:  # a loop: nothing is known of most values, nor of values computed from them
        if operand.numbers != UNKNOWN_NUMBERS:
            break
    else:
        if precision is not Precision.OVERFLOWS and node.name not in _HAVE_NUMBERS:
            return UNKNOWN_NUMBERS
    floats = [operand.numbers for operand in operands if operand.precision is not Precision.RECORDED]
    found = numbers_through(node, floats, low)
    return found._replace(overflows=True) if precision is Precision.OVERFLOWS else found
