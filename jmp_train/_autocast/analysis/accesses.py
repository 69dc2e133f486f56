"""How an equation gets an operand: computed in the same kernel, or read from memory, where a 16-bit copy suffices.

    h:f32 = exp a                      a dot reads `h`, so that a copy of it is stored in 16 bits
    c = dot_general h w
    d = mul 2.0 h                      fused: XLA computes `h` in the kernel of `d`, which reads float32
    s = reduce_sum h                   stored: the kernel of the sum reads memory, where the copy is half of the bytes

A sum is a kernel of its own and reads memory, and so do transfers to other devices or to the host. Three kinds of sum
in a backward pass, each the gradient of a bias, are exceptions, since XLA for GPUs can add up the cotangent in the
kernel that computes it:

* behind the loss's own softmax, whose cotangent is known only after the sum over each row. This sum reads the numbers
  in 16 bits that the kernel writes for dots, behind no barrier (`Residuals.by_product`): if it read float32, XLA would
  store that as well where the targets are smoothed;
* before a norm, whose backward pass computes the cotangent after its own sums over rows or batches, unless an expensive
  activation is between;
* of a cotangent that repeats numbers, as behind a mean: only the repeated numbers are stored, in float32.

The last two read float32, which moves no more bytes. The sum of a cotangent that is small beside the activations of
its layer, such as that of a value function, reads float32 too: its terms may cancel, and it moves hardly more bytes.

A carry of a loop has one dtype, that of its first value. The first value of a residual stream is an embedding, which is
a parameter; the first value of the stream's gradient comes from a network's head in float32. Outside of a loop the
first layer would narrow either. Here both may be narrowed before the loop.

Decides the `Access` of each operand, and which carries may start in the compute dtype. Does not decide whether they
do: a carry that a loop builds up over many iterations (the state of a recurrent cell, a sum, weights that an inner loop
updates) keeps its dtype; see `passes.control_flow`.
"""

import functools
from collections.abc import Container, Sequence

from ..._jaxpr import FlatJaxpr, Node, scan_counts
from ..._sizes import assumed_size
from ..ir import Access, Fact, Place, Precision
from ..primitives import EXPENSIVE, FUSED, PLAIN_DOTS, Entry, Rule, Trait, having

_KERNELS = having(Trait.POOL | Trait.TRANSFERS)  # kernels of their own
# Compiled for an H200, the sum of a head with fewer logits is a kernel of its own, for which XLA stores float32.
_MANY_LOGITS = 2**20
# The same for the cotangent of a norm: with fewer numbers in all, or fewer rows that are added up into one, its sum is
# a kernel of its own.
_MANY, _MANY_ROWS = 2**22, 2**13
# How many times smaller a small cotangent is than its layer's activations. With a float32 sum of it, the gradients of
# two or more layers of 64 to 4,096 units, the last with so few outputs, move from 0.2 % fewer to 0.5 % more bytes on an
# H200.
_SMALL = 64


class Accesses:
    """The accesses of each equation of a program; asked for in the order of the equations."""

    def __init__(self, program: FlatJaxpr, place: Place, returned: Container[int]):
        self._program, self._place, self._returned = program, place, returned
        self._summed: dict[int, list[int]] = {}  # the sizes of the gradients summed and returned so far, by depth
        # Values computed from sums of the forward pass, such as a softmax's, without a dot between, and the size of the
        # largest of these sums; and the same of values computed from sums of the backward pass, such as a norm's.
        self._after_sum: dict[int, int] = {}
        self._after_statistic: dict[int, int] = {}

    def of(self, node: Node, entry: Entry, facts: Sequence[Fact]) -> list[Access]:
        """The access of each operand of `node`, given the facts of every value so far."""
        if entry.rule is not Rule.ENTER:
            is_sum = entry.has_own_kernel
            backward, adds = is_sum and self._place.is_backward(node), node.name == "reduce_sum"
            # JAX records the gradient of a bias as the sum of a cotangent. If the program computes something from the
            # sum rather than return it, it may be no gradient.
            gradient = backward and adds and node.outs[0] in self._returned
            fused = gradient and (self._repeats(node.ins[0]) or self._is_bias_before_norm(node, facts))
            fused = fused or (backward and adds and self._is_of_few_outputs(node.ins[0], facts))
            of_head = gradient and not fused and self._is_bias_of_head(node, facts)
            # A stack of layers, such as experts, has a sum for each: XLA computes these in another kernel.
            summed = of_head and node.params["axes"] == tuple(range(len(self._program.avals[node.ins[0]].shape) - 1))
            fused = fused or (of_head and not summed)
            if gradient:
                self._summed.setdefault(facts[node.ins[0]].depth, []).append(self._size(node.outs[0]))
            if self._after_sum or (is_sum and not backward):
                self._note(self._after_sum, node, entry, facts, is_sum and not backward)
            if self._after_statistic or (backward and adds):
                self._note(self._after_statistic, node, entry, facts, backward and adds)
            if summed:
                return [Access.SUMMED]
            kernel = (is_sum and not fused) or node.name in _KERNELS
            return [Access.STORED if kernel else Access.FUSED] * len(node.ins)
        if node.name != "scan":  # JAX puts a barrier before a rematerialized call, so that XLA fuses nothing into it
            return [Access.STORED if node.name == "remat2" else Access.FUSED] * len(node.ins)
        consts, carry = scan_counts(node.eqn)
        accesses = [Access.STORED] * len(node.ins)  # a loop is no kernel: it reads memory
        accesses[consts : consts + carry] = [Access.CARRIED] * carry
        return accesses

    @functools.cached_property
    def _factors(self) -> dict[int, list[int]]:
        """The values by which dots multiply each value."""
        found: dict[int, list[int]] = {}
        for node in self._program.nodes:
            if node.name in PLAIN_DOTS:
                left, right, *_ = node.ins
                found.setdefault(left, []).append(right)
                found.setdefault(right, []).append(left)
        return found

    def _is_of_few_outputs(self, number: int, facts: Sequence[Fact]) -> bool:
        """Whether a value is the cotangent of a layer that has few outputs: small beside the layer's activations."""
        # Not compared with weights: beside these all cotangents of a small batch are small, and the bytes of all layers
        # would add up. There is no fact yet of a value that a later node computes, such as a transposed weight in a
        # rule of the user's.
        known = [other for other in self._factors.get(number, ()) if facts[other] and not facts[other].parameter]
        return any([_SMALL * self._size(number) <= self._size(other) for other in known])

    def _repeats(self, number: int) -> bool:
        """Whether a value repeats fewer numbers, as the cotangent behind a mean does: only these are stored."""
        producer = self._program.producers.get(number)
        return producer is not None and producer.name == "broadcast_in_dim"

    def _is_bias_of_head(self, node: Node, facts: Sequence[Fact]) -> bool:
        """Whether a sum is the gradient of the bias of a network's head: over a large cotangent of the loss's softmax.

        Only the first sum at its depth. Where a norm stands between the head and the loss, the kernel of the cotangent
        adds up the gradient of the norm's scale already, and XLA would store float32 for another sum.
        """
        (logits,) = node.ins
        first = facts[logits].depth not in self._summed  # a dot between two sums puts them at different depths
        return first and logits in self._after_sum and self._size(logits) >= _MANY_LOGITS

    def _is_bias_before_norm(self, node: Node, facts: Sequence[Fact]) -> bool:
        """Whether a sum is the gradient of a bias before a norm: over a large cotangent that the norm hands back.

        The kernel of that cotangent adds up the gradients of the norm's parameters already, unless the norm's
        statistics, which come first, are over some of the same axes, as those of a BatchNorm are. A third such sum does
        not fit: each takes 16.5 KiB of shared memory in float32, of the 48 KiB that XLA allows a kernel.
        """
        (cotangent,) = node.ins
        # A statistic is one of the norm's own sums in the backward pass.
        size, statistic = self._size(cotangent), self._after_statistic.get(cotangent)
        if statistic is None or size < _MANY or size < _MANY_ROWS * self._size(node.outs[0]):
            return False
        # If two sums are over disjoint axes, each axis remains in one of them, and the product of their sizes is no
        # less than the size of the cotangent. If they are over the same axes, it is less.
        gradients = self._summed.get(facts[cotangent].depth, ())
        beside = any([gradient * statistic >= size for gradient in gradients])
        return not (beside or self._is_behind_activation(cotangent, facts))

    def _is_behind_activation(self, cotangent: int, facts: Sequence[Fact]) -> bool:
        """Whether the norm is of an expensive function, whose derivative is a factor of the cotangent.

        XLA stores the product of both anyway, rather than compute the function in one more kernel; for a sum that reads
        the product in float32 it would store it in float32.
        """
        size, seen, rest = self._size(cotangent), {cotangent}, [cotangent]
        while rest:
            result = rest.pop()
            node = self._program.producers[result]
            # The result of a tanh in the compute dtype is stored itself, and its derivative is computed from that.
            if node.name in EXPENSIVE and not (node.name == "tanh" and facts[node.ins[0]].precision is Precision.LOW):
                return True
            for number in node.ins:
                producer = self._program.producers.get(number)
                # A smaller value, such as a row of parameters or statistics, is computed in a kernel of its own.
                if number in seen or producer is None or producer.name not in FUSED or self._size(number) < size:
                    continue
                if self._place.is_backward(producer):  # equations before the norm's sums are in another kernel
                    follows = number in self._after_statistic
                else:  # between two dots of the forward pass, as a norm and the activation that it reads are
                    follows = self._place.is_backward(node) or facts[number].depth == facts[result].depth
                if follows:
                    seen.add(number)
                    rest.append(number)
        return False

    def _note(self, sums: dict[int, int], node: Node, entry: Entry, facts: Sequence[Fact], is_one: bool) -> None:
        """Adds the results of a node to `sums` if it computes them from values there, or is itself such a sum.

        Like `Values.add`, this runs for every equation, and so avoids calls of functions.
        """
        depth, largest = -1, self._size(node.outs[0]) if is_one else 0
        for number in node.ins:
            if facts[number].depth > depth:
                depth = facts[number].depth
        # A dot separates an operand of less depth from the others: only operands of the same depth count.
        for number in node.ins:
            if number in sums and facts[number].depth == depth and sums[number] > largest:
                largest = sums[number]
        if largest and (entry.has_own_kernel or node.name in FUSED or entry.rule is Rule.SHAPE):
            for number in node.outs:
                sums[number] = largest

    def _size(self, number: int) -> int:
        return assumed_size(self._program.avals[number])

    def may_start_narrow(self, node: Node, facts: Sequence[Fact]) -> set[int]:
        """The operands of a scan, by position, that are carries which may start in the compute dtype."""
        consts, carry = scan_counts(node.eqn)
        candidates = {i for i in range(consts, consts + carry) if self._can_start_narrow(facts[node.ins[i]])}
        if candidates and self._place.inside(node).backward:
            shapes = self._narrow_shapes(node, facts)
            # A carry of any other shape is the gradient of weights that the loop reads in every iteration. That is a
            # running sum, and has to be float32.
            candidates = {i for i in candidates if self._program.avals[node.ins[i]].shape in shapes}
        return candidates

    @staticmethod
    def _can_start_narrow(fact: Fact) -> bool:
        # A parameter that is carried as it is may be a weight that the loop updates, by steps too small for 16 bits.
        return fact.has_low_copy or (fact.precision is Precision.WEAK and fact.computed)

    def _narrow_shapes(self, node: Node, facts: Sequence[Fact]) -> set[tuple[int, ...]]:
        """The shapes of the streams whose gradients a backward scan carries: those of the scans that it reads."""
        producers = [self._program.producers[number] for number in node.ins if number in self._program.producers]
        scans = [producer for producer in dict.fromkeys(producers) if producer.name == "scan"]
        carried = [number for scan in scans for number in scan.outs[: scan_counts(scan.eqn)[1]]]
        return {self._program.avals[number].shape for number in carried if facts[number].precision is Precision.LOW}
