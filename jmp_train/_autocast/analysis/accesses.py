"""How an equation gets an operand: computed in the same kernel, or read from memory, where a 16-bit copy suffices.

    h:f32 = exp a                      a dot reads `h`, so that a copy of it is stored in 16 bits
    c = dot_general h w
    d = mul 2.0 h                      fused: XLA computes `h` in the kernel of `d`, which reads float32
    s = reduce_sum h                   stored: the kernel of the sum reads memory, where the copy is half of the bytes

A sum is a kernel of its own and reads memory, and so do transfers to other devices or to the host. A sum of a cotangent
in a backward pass that the program returns is the gradient of a bias. XLA for GPUs can add up the cotangent in the
kernel that computes it, from the numbers in 16 bits that it writes for dots. So these numbers are not behind a barrier
for the sum (`Residuals.by_product`). Of a cotangent that repeats numbers, as behind a mean, only the repeated numbers
are stored, in float32: their sum reads float32. So does that of a cotangent which is small beside the activations of
its layer, such as that of a value function: its terms may cancel, and it moves hardly more bytes.

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
from ..primitives import PLAIN_DOTS, Entry, Rule, Trait, having

_KERNELS = having(Trait.POOL | Trait.TRANSFERS)  # kernels of their own
# How many times smaller a small cotangent is than its layer's activations. With a float32 sum of it, the gradients of
# two or more layers of 64 to 4,096 units, the last with so few outputs, move from 0.2 % fewer to 0.5 % more bytes on an
# H200.
_SMALL = 64


class Accesses:
    """The accesses of each equation of a program."""

    def __init__(self, program: FlatJaxpr, place: Place, returned: Container[int]):
        self._program, self._place, self._returned = program, place, returned

    def of(self, node: Node, entry: Entry, facts: Sequence[Fact]) -> list[Access]:
        """The access of each operand of `node`, given the facts of every value so far."""
        if entry.rule is not Rule.ENTER:
            if node.name == "reduce_sum" and entry.has_own_kernel and self._place.is_backward(node):
                return [self._of_cotangent(node, facts)]
            kernel = entry.has_own_kernel or node.name in _KERNELS
            return [Access.STORED if kernel else Access.FUSED] * len(node.ins)
        if node.name != "scan":  # JAX puts a barrier before a rematerialized call, so that XLA fuses nothing into it
            return [Access.STORED if node.name == "remat2" else Access.FUSED] * len(node.ins)
        consts, carry = scan_counts(node.eqn)
        accesses = [Access.STORED] * len(node.ins)  # a loop is no kernel: it reads memory
        accesses[consts : consts + carry] = [Access.CARRIED] * carry
        return accesses

    def _of_cotangent(self, total: Node, facts: Sequence[Fact]) -> Access:
        """The access of a sum in a backward pass."""
        (cotangent,) = total.ins
        if self._is_of_few_outputs(cotangent, facts):
            return Access.FUSED
        # If the program computes something from the sum rather than return it, it may be no gradient of a bias.
        if total.outs[0] not in self._returned:
            return Access.STORED
        return Access.FUSED if self._repeats(cotangent) else Access.SUMMED

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
