"""Which products are no layers of a network, so that rounding their operands would lose what they compute.

A dot with a weight averages over many numbers, and networks are robust to its rounding: that is what 16 bits are for.
Programs around networks contain other dots. The angle of a rotary embedding is a position times a frequency, and with
half of its digits it is wrong; a Gram matrix sums squares; a table of bins holds numbers that float16 cannot.

    dot_general x w                                      x: data, w: a parameter; a layer: no cause
    dot_general x (transpose x)                          SQUARE
    dot_general positions[512,1] frequencies[1,8]        SHORT: contracts one number
    dot_general (softmax h) (sinh (linspace -20 20))     TABLE: sinh(20) is 2.4e8, and float16 ends at 65,504

Decides this for one product, by its operands (a value times itself, few numbers, constants, solutions of linear
systems) and by its readers. Does not decide about derivatives, nor about products whose precision was asked for; see
`products.py`.
"""

import math
import operator
from collections.abc import Sequence

import numpy as np

from ...._jaxpr import Node
from ...._sizes import static_size
from ..constants import Table, table_of
from ..dot_sizes import TENSOR_CORE_DEPTH, DotSizes
from ..wide_product import Cause
from .provenance import FLOAT32_PROVENANCES, ROUNDED_PROVENANCES, UNROUNDED_PROVENANCES, Provenance, Values

# There is an instruction for half as many (`mma.m16n8k8`). Data times a weight of that depth is a layer. So it is with
# more numbers, if the result is larger than both operands: in float32 it would move more bytes.
_HALF_DEPTH = 8
# An expectation has at least this many times fewer results than numbers that it averages: for 64 bins, at most four.
_LEAST_AVERAGED = 16
# A kernel with at most this many different filters of one channel, known when planning, is no layer: a blur repeats
# one filter, a Sobel operator two.
_FEW_FILTERS = 4

_COMPUTED = (Provenance.SCALAR, Provenance.TABLE)  # of constants other than captured arrays


class ProductCauses:
    """The causes for which products of one program have to run in float32.

    Args:
      values: what is known of the program's values, once the nodes before a product were added.
      low: the compute dtype.
      in_loop: whether it is the body of a loop.
    """

    def __init__(self, values: Values, low: np.dtype, in_loop: bool):
        self._values, self._low, self._in_loop = values, low, in_loop
        self._program, self._producers = values.program, values.producers
        self._consumers = values.consumers

    def of(self, node: Node) -> Cause | None:
        """The cause of a dot or convolution; `None` for a layer's."""
        # A `ragged_dot_general` multiplies tokens by the weights of experts, and is a layer's.
        if node.name == "conv_general_dilated":
            return self._of_convolution(node)
        sizes = DotSizes.of(self._program, node)
        return None if sizes is None else self._of_dot(node, sizes)

    def _of_convolution(self, node: Node) -> Cause | None:
        if self._is_fixed_filter(node):
            return Cause.FILTER
        if any(table.exceeds for table in self._tables(node) if table is not None):
            return Cause.TABLE
        return self._magnified(node, self._provenances(node))

    def _of_dot(self, node: Node, sizes: DotSizes) -> Cause | None:
        # The order decides which cause `explain` prints where several hold, and what derivatives inherit.
        provenances = self._provenances(node)
        are_data, are_one = _are_data(provenances), self._producers.are_one(*node.ins)
        # A value that a product has rounded to 16 bits has no further digits that could cancel.
        rounded = any(each in ROUNDED_PROVENANCES for each in provenances)
        # A value times itself is a square even if it is rounded: the squares to which it is added or from which it is
        # subtracted, as in a distance, then read the same 16-bit numbers; see `WideProduct.meets_squares`.
        if self._contracts_one_axis(node) if are_one else not rounded and self._is_weighted_square(node):
            return Cause.SQUARE
        free = (sizes.left, sizes.right)
        # No free axis on either side: one number for each batch element. On one side alone: a matrix times a vector,
        # which reads the matrix once, so that its bytes decide; see `_is_in_memory`.
        if max(free) == 1 or (min(free) == 1 and self._is_in_memory(node, provenances)):
            return Cause.INNER
        if node.outs[0] in self._consumers.diagonals:
            return Cause.DIAGONAL
        if sizes.contracted < TENSOR_CORE_DEPTH and self._is_data(node, provenances, sizes):
            return Cause.SHORT
        tables = self._tables(node)  # after the causes that need no numbers: to compute numbers takes time
        known = [table for table in tables if table is not None]
        if any(table.exceeds for table in known):
            return Cause.TABLE
        if any(table.staircase for table in known):  # in float32 as `cumsum`, whatever it sums
            return Cause.CUMULATIVE
        if self._is_cross_term(node, provenances):
            return Cause.DISTANCE
        # Times a parameter, a solution or Gram matrix is the input of a layer.
        solution = Provenance.SOLUTION in provenances and Provenance.PARAMETER not in provenances
        # Times activations, a kernel matrix is the weights of an attention.
        kernel = Provenance.KERNEL in provenances and Provenance.PARAMETER not in provenances
        if solution or Provenance.ESTIMATE in provenances or (kernel and not rounded):
            return Cause.SOLUTION
        if not rounded and any(table.differences for table in known):
            return Cause.DIFFERENCES
        if are_data and Provenance.STATE in provenances:  # times a parameter, it may be a layer
            return Cause.STATE
        if self._is_expectation(node, tables, sizes):
            return Cause.GRID
        directly = self._consumers.repeated.get(node.outs[0])
        # The result of a power iteration scales a whole weight. (In a loop, the weight would be read in float32 many
        # times.)
        iterates = min(free) == 1 and Provenance.PARAMETER in provenances and not (rounded or self._in_loop)
        # A reflection or projection returns its rows in float32, with the errors of their components.
        component = min(free) == 1 and not rounded and node.outs[0] in self._consumers.components
        if (are_data and directly) or (iterates and directly is not None) or component:
            return Cause.REPEATED
        return self._magnified(node, provenances)

    def scales(self, node: Node) -> bool:
        """Whether an operand is one number known while planning, such as a loss's own cotangent."""
        operands = zip(node.ins, self._provenances(node), strict=False)  # an attention has more than two operands
        return any(p is Provenance.SCALAR and static_size(self._program.avals[n].shape) == 1 for n, p in operands)

    def reads_data(self, node: Node) -> bool:
        """Whether all operands of a product are float32 values that no product has rounded."""
        return _are_data(self._provenances(node))

    def interpolates(self, node: Node) -> bool:
        """Whether a dot averages or selects rounded values with exact weights, which rounds no operand."""
        rounded = [provenance in ROUNDED_PROVENANCES for provenance in self._provenances(node)]
        table = self._table(node, rounded.index(False)) if sum(rounded) == 1 else None
        return table is not None and table.averages

    def _provenances(self, node: Node) -> list[Provenance]:
        return [self._values.provenances[number] for number in node.ins[:2]]

    def _tables(self, node: Node) -> list[Table | None]:
        return [self._table(node, operand) for operand in (0, 1)]

    def _table(self, node: Node, operand: int) -> Table | None:
        """What is known of an operand that is an array of constants."""
        number = node.ins[operand]
        numbers = self._values.constants.numbers(number)
        if numbers is None:
            return None
        if node.name != "dot_general":  # of a convolution's kernel: all its numbers together
            return table_of(numbers, range(numbers.ndim), self._low)
        captured = self._values.provenances[number] not in _COMPUTED
        return table_of(numbers, node.params["dimension_numbers"][0][operand], self._low, captured)

    def _is_weighted_square(self, node: Node) -> bool:
        """Whether a product sums squares of one value, times weights: `x.T @ (w * x)`."""
        left, right = node.ins
        pairs = [(each, right) for each in self._producers.factors(left)]
        pairs += [(left, each) for each in self._producers.factors(right)]
        return any(self._producers.are_one(*pair) for pair in pairs)

    def _is_cross_term(self, node: Node, provenances: Sequence[Provenance]) -> bool:
        """Whether a product is a cross term of distances, or would round codes whose squares are not rounded."""
        squared = self._consumers.squared_beside.get(node.outs[0], frozenset())
        # A codebook is a parameter, whose squares are summed in float32. A layer to which a norm or energy is added
        # does not count, since there the layer's input is squared.
        codes = any(provenances[i] is Provenance.PARAMETER for i in squared)
        return len(squared) == 2 or codes or (bool(squared) and _are_data(provenances))

    def _contracts_one_axis(self, node: Node) -> bool:
        """Whether a product of a value with itself sums squares: a power of a matrix contracts two axes of it."""
        pairs = zip(node.ins, node.params["dimension_numbers"][0], strict=True)
        one, other = (self._producers.axes_of_source(number, axes) for number, axes in pairs)
        # After a reshape the axes are not known: this counts as a square, which runs in float32.
        return one is None or other is None or one == other

    def _is_in_memory(self, node: Node, provenances: Sequence[Provenance]) -> bool:
        """Whether a product of float32 data reads an operand that is in memory in float32 anyway."""
        # Zeros and ones may be an operand where a solver starts, and as the weights of a sum.
        found = [provenance for provenance in provenances if provenance is not Provenance.SCALAR]
        return bool(found) and _are_data(found) and any(self._producers.is_stored(number) for number in node.ins)

    def _is_data(self, node: Node, provenances: Sequence[Provenance], sizes: DotSizes) -> bool:
        """Whether a short contraction reads float32 data, which it keeps as a multiplication does."""
        grows, fills = sizes.result > max(sizes.operands), sizes.contracted == _HALF_DEPTH
        # `grows`: float32 results would move more bytes than the operands do. `fills`: the product fills the narrower
        # instruction of a Tensor Core.
        wide = [provenance in FLOAT32_PROVENANCES for provenance in provenances]
        if not any(wide):
            # Parameters times parameters are dynamics and geometry, except for the two factors of a weight.
            both = provenances[0] is provenances[1] is Provenance.PARAMETER
            if not both or fills or (grows and sizes.contracted > _HALF_DEPTH):
                return False
            # A low-rank adapter is two thin factors, whose product is larger than both and is added to a weight.
            return not (grows and self._producers.becomes_weight(node.outs[0]))
        if fills and all(provenance in ROUNDED_PROVENANCES for provenance in provenances):
            return False  # activations times activations, as in attention
        # Data times a weight. Not the state of a linear recurrence, whose roundings add up at any depth.
        if not all(wide) and Provenance.STATE not in provenances and (grows or fills):
            return sizes.contracted < _HALF_DEPTH
        return not self.interpolates(node)

    def _is_expectation(self, node: Node, tables: Sequence[Table | None], sizes: DotSizes) -> bool:
        """Whether a product is a transform of float32 data by a table, or averages the numbers of one."""
        provenances, is_constant = self._provenances(node), self._values.constants.is_constant
        operands = list(zip(node.ins, tables, provenances, reversed(provenances), strict=True))
        for number, table, provenance, other in operands:
            # A table that the program computes. A captured array may be a frozen network's weight.
            if is_constant[number] and provenance in _COMPUTED and other in UNROUNDED_PROVENANCES:
                # `None`: more numbers than are computed while planning.
                return table is not None and not table.uniform  # uniform: a sum, which dots accumulate in float32
        if sizes.result * _LEAST_AVERAGED > max(sizes.operands):
            return False
        for _, table, provenance, other in operands:
            if table is not None and (provenance is Provenance.TABLE or table.ordered):
                # Weights of an average that are rounded already lose nothing more if 16 bits hold the numbers.
                return not table.exact or not (other is Provenance.NARROW or table.averages)
        return False

    def _magnified(self, node: Node, provenances: Sequence[Provenance]) -> Cause | None:
        """The cause of a product whose error its readers magnify."""
        # A factor of parameters alone is a weight, such as that of an orthogonal layer.
        if Provenance.FACTOR in provenances:
            return None
        directly = self._consumers.in_systems.get(node.outs[0])
        if any(each in ROUNDED_PROVENANCES for each in provenances):
            if Provenance.PARAMETER in provenances:
                return None
            # Activations times activations or targets, such as the right-hand side of a regression on learned features,
            # are no layer. For other readers the operands have been rounded already.
            if directly:
                return Cause.IN_SYSTEM
            # Averages of data only: an attention averages activations, whose roundings are as large as its weights'.
            data = [i for i, provenance in enumerate(provenances) if provenance in UNROUNDED_PROVENANCES]
            if data and 1 - data[0] in self._consumers.averages.get(node.outs[0], ()):
                return Cause.AVERAGE
            return Cause.PROBABILITY if self._is_probability(node, provenances) else None
        are_data = _are_data(provenances)
        # A product with a parameter only if the system reads it directly: that is no network.
        if directly or (are_data and directly is not None):
            return Cause.IN_SYSTEM
        if are_data and node.outs[0] in self._consumers.delicate:
            return Cause.DELICATE
        return Cause.PROBABILITY if self._is_probability(node, provenances) else None

    def _is_probability(self, node: Node, provenances: Sequence[Provenance]) -> bool:
        """Whether a product under a logarithm multiplies exponentials by others, or by float32 numbers or one-hot rows.

        In float16 its operands and its result are zero below 3e-8, although the exponents that a network computed still
        have digits: the logarithm is then that of the number that was added, such as 1e-12, and its derivative is 1e12.
        """
        # A parameter may be negative: a product with it is a layer, whatever its readers.
        if Provenance.PARAMETER in provenances or node.outs[0] not in self._consumers.under_logarithms:
            return False
        made = [number in self._consumers.are_exponentials for number in node.ins[:2]]
        unrounded = [each in UNROUNDED_PROVENANCES or each is Provenance.SCALAR for each in provenances]
        return any(made) and all(map(operator.or_, made, unrounded))

    def _is_fixed_filter(self, node: Node) -> bool:
        """Whether a convolution blurs, differentiates or interpolates each channel by itself, with known weights."""
        kernel, numbers = node.ins[1], node.params["dimension_numbers"]
        shape, provenance = self._program.avals[kernel].shape, self._values.provenances[kernel]
        filters, channels = (shape[axis] for axis in numbers.rhs_spec[:2])
        # A parameter is a depthwise layer's kernel, however few filters it has.
        if channels != 1 or provenance not in (*_COMPUTED, Provenance.DATA):
            return False
        source = self._producers.source(kernel)
        size = static_size(self._program.avals[source].shape) if isinstance(source, int) else None
        repeated = size is not None and size * filters <= math.prod(shape)  # one filter, for every channel
        if filters == 1 or repeated or provenance is not Provenance.DATA:
            return True
        # An array of as many filters as channels belongs to a frozen network, unless there are only few different ones.
        values = self._values.constants.numbers(kernel)
        if values is None:
            return False
        rows = np.moveaxis(values, numbers.rhs_spec[0], 0).reshape(filters, -1)
        return len(np.unique(rows, axis=0)) <= _FEW_FILTERS


def _are_data(provenances: Sequence[Provenance]) -> bool:
    """Whether all operands are float32 values that no product has rounded."""
    return all(provenance in UNROUNDED_PROVENANCES for provenance in provenances)
