"""Values that are read across a dot: saved in 16 bits, saved as they are, or rematerialized.

    h:f32 = exp a:f16              h = exp a                       a: saved
    s:f32 = reduce_sum h           s = reduce_sum h                h: rematerialized from a
    y:f16 = dot_general h:f16 w    y = dot_general h:f16 w
    g:f32 = mul h y           ->   g = mul h* y                    (* read across the dot)

The backward pass of a network reads values that its forward pass computed, and the intermediate values of a GELU, a
softmax or a normalisation are float32. Saved as they are, they would cost the bytes that mixed precision saves;
rounded, they would cost accuracy and, in float16, range. But they are elementwise in values that are saved in 16 bits
anyway, since dots compute or read these. Elementwise equations fuse with their readers, so that rematerializing them
costs no memory traffic and changes no bit (Chen et al., "Training deep nets with sublinear memory cost", 2016, do so
for whole layers).

A value that is read across a dot is, in this order:

1. *saved in the compute dtype*, if a dot reads it in that dtype anyway and no reader minds the rounding
   (`Fact.has_low_copy`; dots of both sides read the same copy, and they alone if its sources are much smaller), or if
   it is in the compute dtype and a dot's result, or computed from one: then 2 bytes per number are written once, behind
   an `optimization_barrier`, and read by all. For a convolution, the sum with the bias is saved, or a relu of that or
   of a residual sum, if another convolution reads it: cuDNN computes these in the same kernel, if nothing else reads
   the convolution. All readers read that copy, even the mask of the relu's derivative: XLA simplifies `max(a, 0) > 0`
   to `a > 0`, for which it would store `a`. For dots that XLA joins a slice is saved, see `analysis/joined_dots.py`;
2. *rematerialized*, if it is elementwise in values that the reader can read with the same bits as the equation did, and
   if reading those costs fewer bytes than writing and reading it (`analysis/residual_costs.py`). If the equation read a
   value before it was rounded to its low copy, that is rematerialized too: `exp(x - softplus(x))` from `x`;
3. *saved as it is*, if it is a comparison (1 byte, where both operands would be saved otherwise), unless its operands
   are read there anyway, or are fewer values than there are comparisons of them;
4. *read as it is*: the compiler decides. This holds also for values that products or solvers of both sides read in
   float32, which are in memory in that dtype anyway.

Decides this for every value, and which operands are read that way. Does not decide dtypes; see `assign_dtypes.py`.
`save_for_sums.py` decides which values are stored for sums on the same side of a dot, and `body_residuals.py` which
values one scan or `shard_map` passes to another, by the same costs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._dtypes import FLOAT32
from ..._jaxpr import Node
from ..._sizes import is_less, size_in_bytes
from ..analysis.joined_dots import joined_dots
from ..analysis.relus import is_positive, relu_operand
from ..analysis.residual_costs import ResidualCosts, Sources, fuses, is_expensive
from ..ir import SHARED, Access, Equation, Precision, Program, Residuals, Use, is_on_host
from ..primitives import DOTS, SYSTEMS, Rule, Trait, having

_READS_MEMORY = DOTS | SYSTEMS
_MOVES = having(Trait.MOVES)


def save_or_remat(program: Program) -> Program:
    """The program with its `residuals`, and with those operands marked that are read as saved or rematerialized."""
    equations, decisions, summed = [], _Decisions(program), set[int]()
    values = decisions.values  # of the program's equations: arguments and constants are read as they are
    for equation in program.equations:
        for number in equation.results:
            decisions.add(equation, number)
        uses = equation.uses
        for position, use in enumerate(uses):
            crosses = use.value in values and (values[use.value].saved or values[use.value].remat)
            if crosses and decisions.is_residual(equation, use, equation.accesses[position]):
                uses = [*uses[:position], use._replace(residual=SHARED), *uses[position + 1 :]]
                if equation.accesses[position] is Access.SUMMED:
                    summed.add(use.value)
        equations.append(equation if uses is equation.uses else equation.replace(uses=uses))
    decisions.rematerialize_masks(equations)  # which asks what all other equations read across a dot
    saved = frozenset(number for number, value in values.items() if value.saved)
    remat = frozenset(number for number, value in values.items() if value.remat)
    in_full = frozenset(decisions.computed_again(equations, remat) - remat)
    residuals = Residuals(saved, remat, in_full, by_product=(joined_dots(program) | summed) & saved)
    return program.replace(equations=equations, residuals=residuals)


@dataclasses.dataclass(slots=True)
class _Value:
    """The decision for a value, and the facts on which it depends.

    Attributes:
      saved, remat: the decision; neither if readers read the value as it is.
      from_dot: a dot's result or a mean over windows, possibly rearranged by a kernel of its own: it is in memory.
      convolution: a convolution's result.
      biased: a convolution's result with its bias added: one kernel of cuDNN does both, unless something else reads the
        convolution.
      expensive: a sum on the near side reads it as rematerialized too, since XLA would store it for the sum in float32.
      dot_reads_relu: a relu's result that a dot reads in the compute dtype, so that it is in memory, whatever else
        reads it.
      epilogue: a convolution's result, perhaps with a bias or other values added: cuDNN can compute a relu of it in the
        same kernel.
      fused_relu: the result of a relu of an epilogue, if a dot reads it. Everything reads the saved copy.
    """

    saved: bool = False
    remat: bool = False
    from_dot: bool = False
    convolution: bool = False
    biased: bool = False
    expensive: bool = False
    dot_reads_relu: bool = False
    epilogue: bool = False
    fused_relu: bool = False


class _Decisions:
    """The decisions for all values, in the order in which they are computed.

    Values are in memory anyway if a dot reads or computes them, if they are saved, or if they come from outside.
    """

    def __init__(self, program: Program):
        self.values: dict[int, _Value] = {}
        self._program, self._saves_low, self._uses = program, program.context.saves_low, program.context.uses
        self._in_full: dict[int, Sources] = {}  # the sources of saved masks and of saved values with a low copy
        # By results that may be rematerialized: the operands that are computed again for them, in float32.
        self._reads_in_full: dict[int, list[int]] = {}
        self._costs = ResidualCosts(self._size_of, in_memory=(*program.inputs, *program.captured))

    def add(self, equation: Equation, number: int) -> None:
        """Decides how readers across a dot read result `number` of an equation."""
        fact, node, to_dot = self._program.facts[number], equation.node, self._uses.flags[number].to_dot
        values = self.values
        operands = [values[operand] for operand in node.ins if operand in values]
        value = values[number] = _Value()
        dot_reads_it = to_dot and (fact.has_low_copy or fact.precision is Precision.LOW)
        if fact.precision is Precision.LOW:
            value.from_dot = _is_from_dot(equation, operands)
            value.convolution = node.name == "conv_general_dilated"
            value.biased = node.name == "add" and self._is_biased(node)
            value.epilogue = value.convolution or (node.name == "add" and any([o.epilogue for o in operands]))
        is_stored = fact.precision is Precision.FULL and number in self._stored_in_float32
        self._costs.state(number, in_memory=value.biased or dot_reads_it or is_stored)
        if fact.precision is Precision.RECORDED:
            if self._is_mask(number):
                value.saved, sources = self._is_saved(node), self._sources_of(equation)
                if value.saved and sources is not None:
                    self._in_full[number] = sources
                elif sources is not None and node.name in _MOVES:
                    # The mask of an attention costs the bytes of the array that is broadcast to it.
                    self._costs.rematerialize(number, sources)
        elif (sources := self._sources_of(equation)) is not None:
            # XLA merges equal expressions: it would compute a value once, and store it in float32, if the value were
            # rematerialized from arguments alone, without a barrier.
            behind_barrier = any([operand.saved or operand.remat for operand in operands])
            if fact.has_low_copy:
                if behind_barrier:
                    self._in_full[number] = sources
                    # Radial basis functions on a grid of eight are eight numbers to read in place of one.
                    small = self._costs.are_negligible(sources, number)
                    value.remat = small and self._costs.rematerialize(number, sources)
            elif not is_stored and self._costs.rematerialize(number, sources, reads_part=self._is_part(node)):
                # Values of parameters alone, such as a scaled weight, are left to XLA, and so are a mask's zeros and
                # ones.
                value.remat = behind_barrier and fact.precision is not Precision.WEAK
        if fact.precision is Precision.LOW:
            # Computed from values in memory, but from too many of them to be rematerialized, such as a sum of three
            # results of dots. A value that a dot reads behind a convolution's bias needs no barrier of its own: without
            # one, the kernel that computes it may write it in the layout that the dot reads.
            reads_memory = any([operand.from_dot or (operand.biased and not to_dot) for operand in operands])
            value.saved = not value.remat and (value.from_dot or reads_memory or self._is_shared_with_dot(number, node))
        elif fact.has_low_copy:
            value.saved = not value.remat
        value.expensive = value.remat and is_expensive(equation)
        value.dot_reads_relu = dot_reads_it and relu_operand(node, self._program.recorded) is not None
        if value.dot_reads_relu and any([operand.epilogue for operand in operands]):
            value.saved = value.fused_relu = True
        if not self._saves_low:  # float32 values and masks are left to the compiler, and nothing is rematerialized
            value.saved, value.remat = fact.precision is Precision.LOW and (value.saved or value.remat), False
        if value.saved:
            # XLA fuses no transfer to the host with its readers, so that it runs once without a barrier, which would be
            # an equation on numbers in the host's memory.
            value.saved = not is_on_host(self._program.avals[number])
            self._costs.state(number, in_memory=True)

    def is_residual(self, equation: Equation, use: Use, access: Access) -> bool:
        """Whether a saved or rematerialized operand is read as that: across a dot, and by some kernels before it."""
        fact, value = self._program.facts[use.value], self.values[use.value]
        if value.fused_relu:
            return True
        starts_wide = access is Access.CARRIED and use.dtype == FLOAT32
        if fact.has_low_copy and starts_wide:
            return False
        # Dots of both sides read the same numbers in the same memory. XLA pads the operands of a dot whose sizes are no
        # multiples of 8; with a barrier between the sides it would do so for each: attention over 196 tokens would move
        # 1.2 times the bytes. And a relu of a dot's result, which both dots compute in their own kernels, would be
        # stored for one of them. A value that is rematerialized may be stored for a dot of the near side, such as a
        # concatenation: rematerialized for the other dot, it would be written and read once more.
        if equation.is_narrow_dot and (
            fact.has_low_copy or value.dot_reads_relu or (value.remat and use.value in self._read_by_near_dots)
        ):
            return False
        shared = fact.has_low_copy or (value.expensive and self._uses.readers[use.value] > 1)
        return equation.depth > fact.depth or (shared and access is not Access.FUSED)

    def _is_shared_with_dot(self, number: int, node: Node) -> bool:
        """Whether a value first rounded here is read by a dot and, across a dot, by another equation.

        A residual stream behind a relu is such a value.
        """
        return any([self._program.facts[n].has_low_copy for n in node.ins]) and number in self._read_by_both

    @functools.cached_property
    def _read_by_both(self) -> set[int]:
        facts, by_dots, far = self._program.facts, set(), set()
        for equation in self._program.equations:
            if equation.is_narrow_dot:
                by_dots.update(equation.operands)
            else:
                far.update([number for number in equation.operands if facts[number].depth < equation.depth])
        return by_dots & far

    @functools.cached_property
    def _read_by_near_dots(self) -> set[int]:
        facts, near = self._program.facts, set()
        for equation in self._program.equations:
            if equation.is_narrow_dot:
                near.update([number for number in equation.operands if facts[number].depth == equation.depth])
        return near

    @functools.cached_property
    def _stored_in_float32(self) -> set[int]:
        """The values that products or solvers of both sides read in float32: rematerialized, they were stored twice."""
        facts, near, far = self._program.facts, set(), set()
        for equation in self._program.equations:
            if equation.node.name in _READS_MEMORY and not equation.is_narrow_dot:
                for number in equation.operands:
                    (far if facts[number].depth < equation.depth else near).add(number)
        return near & far

    def _is_biased(self, node: Node) -> bool:
        """Whether an addition is that of a convolution and a parameter."""
        convolutions = [n for n in node.ins if n in self.values and self.values[n].convolution]
        biases = [n for n in node.ins if self._program.facts[n].parameter]
        return len(convolutions) == len(biases) == 1

    def _is_part(self, node: Node) -> bool:
        """Whether a node takes part of a cotangent, as the gradient of a concatenation does.

        Parts of activations count with the whole: behind a bias, several gates of one dense layer are better saved.
        """
        return node.name == "split" and self._program.place.is_backward(node)

    def _size_of(self, number: int) -> Any:
        aval, fact = self._program.avals[number], self._program.facts[number]
        # An input of a body counts with its recorded size. With 2 bytes per number, a sum of it and a dot's result
        # would be rematerialized in each kernel that reads it: for an H200, Transformers in a scan would move 0.4 to
        # 1.4 % more bytes.
        low = fact.precision is Precision.LOW and fact.computed
        return size_in_bytes(aval, self._program.low if low else None)

    def _is_saved(self, node: Node) -> bool:
        """Whether a mask compares numbers that were recorded in float32, or joins such masks.

        Not if it says where a relu's result is positive: a dot reads that result, so that it is in memory.
        """
        compares = [n in self._in_full or self._program.precision(n) is not Precision.RECORDED for n in node.ins]
        if not any(compares):
            return False
        relu = self.values.get(node.ins[0])
        return relu is None or not (relu.dot_reads_relu and is_positive(node, self._program.recorded))

    def _is_mask(self, number: int) -> bool:
        return getattr(self._program.avals[number], "dtype", None) == np.bool_

    def rematerialize_masks(self, equations: Sequence[Equation]) -> None:
        """Rematerializes saved masks where fewer values than masks have to be read for that.

        A mask costs a byte to write and one to read, a value in the compute dtype 2 bytes to read. Values that are read
        across a dot anyway do not count, nor do those that are smaller than the mask, such as a bias.
        """
        saved = {n for n, value in self.values.items() if value.saved and self._is_mask(n)}
        if not saved:
            return
        facts = self._program.facts
        far = {
            use.value
            for equation in equations
            for use in equation.uses
            if use.residual or (equation.entry.rule is Rule.LOW and equation.depth > facts[use.value].depth)
        }
        read = self._costs.sources_of(far)
        masks: dict[Sources, list[_Value]] = {}
        for number in saved & read & self._in_full.keys():
            sources = self._in_full[number]
            large = frozenset(n for n in sources if not is_less(self._size_of(n), self._size_of(number)))
            if all(n in self.values and self.values[n].saved for n in large):
                masks.setdefault(large, []).append(self.values[number])
        for sources, found in masks.items():
            if len(sources - read) < len(found):
                for value in found:
                    value.saved, value.remat = False, True

    def _sources_of(self, equation: Equation) -> Sources | None:
        """The sources from which readers across a dot could compute an equation's result; `None` if they must not.

        They have to read the same numbers as the equation. For an operand with a low copy these are the sources of the
        operand, if it is elementwise itself. For `1 + y` and `1 - y`, the derivative of a `tanh`, the low copy
        suffices, since `y` itself is read so. (With arguments on a mesh JAX records this one as the result of a
        `reshard`.)
        """
        facts, operands = self._program.facts, equation.node.ins
        # XLA gathers rows of an activation, for example one for each edge of a graph, in the kernels that read them.
        if not fuses(equation) and not (equation.node.name == "gather" and not facts[operands[0]].parameter):
            return None
        low = [n for n in operands if facts[n].has_low_copy and facts[n].depth >= equation.depth]
        if facts[equation.results[0]].precision is Precision.RECORDED:  # joins masks
            low += [n for n in operands if n in self._in_full]
        if not low:
            return self._costs.sources_of(operands)
        known = all([number in low or facts[number].numbers.range is not None for number in operands])
        if len(low) == 1 and known and equation.node.name in ("add", "sub"):
            return self._costs.sources_of(operands)
        # A relu that is in 16 bits although its operand is float32 passes the operand's low copy to a dot, and is in
        # memory itself. In a DenseNet its operand is computed from many results of dots.
        passes_copy_on = facts[equation.results[0]].precision is Precision.LOW
        if passes_copy_on or not self._in_full.keys() >= set(low):
            return None
        self._reads_in_full[equation.results[0]] = low
        others = self._costs.sources_of([number for number in operands if number not in low])
        return others.union(*[self._in_full[number] for number in low])

    def computed_again(self, equations: Sequence[Equation], remat: frozenset[int]) -> set[int]:
        """The rematerialized values, and those with a low copy that a rematerialized equation reads in full."""
        again = {use.value for equation in equations for use in equation.uses if use.residual and use.value in remat}
        for equation in reversed(equations) if self._reads_in_full else ():
            if not again.isdisjoint(equation.results):
                again.update(remat.intersection(equation.operands), self._reads_in_full.get(equation.results[0], ()))
        return again


def _is_from_dot(equation: Equation, operands: Sequence[_Value]) -> bool:
    """Whether a value in the compute dtype is in memory because a kernel of its own computed or rearranged it."""
    # Under this rule only a mean over windows says in which dtype it computes: float32, for a result in 16 bits.
    mean = equation.entry.rule is Rule.WIDEST and bool(equation.computes)
    moved = equation.entry.rule is Rule.SHAPE and not fuses(equation) and any([o.from_dot for o in operands])
    return equation.is_narrow_dot or mean or moved
