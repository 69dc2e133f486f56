"""What a value was computed from, as far as it decides whether a product with it is a layer.

    w: parameter; x: data
    a = dot_general x w          narrow: a product has rounded it
    b = exp a                    activation: float32, of rounded values
    c = add b (iota)             activation: a table neither has roundings nor removes them
    d = dot_general x x          solution: a Gram matrix, since the product is a square
    e = cholesky d               solution

Decides this for the values of one program, equation by equation. Does not decide which product is a layer; see
`causes.py`. `products.py` passes provenances into and out of the programs inside.
"""

import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...._dtypes import BFLOAT16, FLOAT16
from ...._jaxpr import BARRIER, FlatJaxpr, Node
from ...._sizes import is_single
from ...primitives import DATA_OPERANDS, SYSTEMS, Entry, Rule
from ..constants import Constants
from ..producers import Producers
from ..wide_product import Cause, WideProduct
from .consumers import Consumers
from .recurrences import KEEPS_ESTIMATES

_LEAVES_ACTIVATIONS = (Cause.DELICATE, Cause.PROBABILITY, Cause.AVERAGE)
_BOOL = np.dtype(np.bool_)
_COMPUTES_FLOAT32 = (Rule.HIGH, Rule.COLLECTIVE, Rule.RECORDED)


class Provenance(enum.Enum):
    """What a value was computed from, which also says what its `Precision` will be, as far as products need it."""

    SCALAR = "scalar"  # single numbers and booleans: zeros, ones, a literal
    TABLE = "table"  # arrays that no argument decides
    PARAMETER = "parameter"  # narrows beside 16-bit operands
    NARROW = "narrow"  # rounded to 16 bits by a product, as activations are
    DATA = "data"  # float32: other arguments, captured arrays, and what float32 operations computed
    ACTIVATION = "activation"  # float32 computed from rounded values, as by a norm or a softmax
    STATE = "state"  # float32 data that is the carry of a loop which is linear in it
    FACTOR = "factor"  # float32 solutions and factors of linear systems of parameters alone
    SOLUTION = "solution"  # the same of linear systems of other values; and sums of squares, such as Gram matrices
    KERNEL = "kernel"  # results of nonlinear functions of solutions: kernel matrices, weights of attention
    ESTIMATE = "estimate"  # a carry for which a loop solves linear systems, such as the covariance of a Kalman filter


_SOLVED = (Provenance.FACTOR, Provenance.SOLUTION, Provenance.KERNEL, Provenance.ESTIMATE)
UNROUNDED_PROVENANCES = (Provenance.TABLE, Provenance.DATA, Provenance.STATE, *_SOLVED)
FLOAT32_PROVENANCES = (*UNROUNDED_PROVENANCES, Provenance.ACTIVATION)
_OF_PARAMETERS = (Provenance.SCALAR, Provenance.PARAMETER, Provenance.FACTOR)
ROUNDED_PROVENANCES = (Provenance.NARROW, Provenance.ACTIVATION)
_STAY = (Provenance.SCALAR, *_SOLVED)  # those that an operation which runs in float32 does not change


def joined_provenance(provenances: Iterable[Provenance]) -> Provenance:
    """The provenance of an operation's result, whose operands are read in one dtype: float32 data widens all others."""
    found = [each for each in provenances if each is not Provenance.SCALAR]  # no set: enums hash in Python
    if not found or found.count(found[0]) == len(found):
        return found[0] if found else Provenance.SCALAR
    if not any([each in FLOAT32_PROVENANCES for each in found]):
        return Provenance.NARROW
    # An estimate stays one beside a parameter: the transition of a Kalman filter may be learned.
    if Provenance.ESTIMATE in found and not any([each in ROUNDED_PROVENANCES for each in found]):
        return Provenance.ESTIMATE
    if all([each in UNROUNDED_PROVENANCES for each in found]):
        # A result of a solution or state and data is one, too, such as the covariance of a Kalman filter.
        strongest = (Provenance.SOLUTION, Provenance.KERNEL, Provenance.STATE)
        return next((each for each in strongest if each in found), Provenance.DATA)
    # A table (the first of these) beside rounded values leaves them rounded; data, or a solution beside a parameter,
    # makes data of all.
    if any([each in UNROUNDED_PROVENANCES[1:] for each in found]):
        return Provenance.DATA
    return Provenance.ACTIVATION if any([each in ROUNDED_PROVENANCES for each in found]) else Provenance.DATA


class Known(NamedTuple):
    """What is known of a value at the boundary of a program.

    Attributes:
      provenance: what it was computed from.
      token: equal for equal values.
      numbers: returns its numbers, if it is a constant.
      sums: returns the sums of squares that are terms of it.
    """

    provenance: Provenance
    token: Any = None
    numbers: Any = None
    sums: Any = None


def carried_provenance(provenance: Provenance, is_state: bool, is_estimate: bool) -> Provenance:
    """The provenance of a carry, given that of its first value or of its value in the last iteration.

    The roundings of the steps add up in the state of a linear recurrence (`recurrences.are_linear`), and in a value for
    which linear systems are solved (`recurrences.are_solved`), whatever its first value and its factors are.
    """
    if is_estimate:
        return Provenance.ESTIMATE
    # A carry that starts as a parameter, a table or a number has no roundings yet. It becomes a state when a product
    # comes back.
    starts = (*_OF_PARAMETERS, Provenance.TABLE)
    return Provenance.STATE if is_state and provenance not in starts else provenance_after_loop(provenance)


def provenance_after_loop(provenance: Provenance) -> Provenance:
    """The provenance of a loop's result after the loop, where nothing estimates it any more: layers may read it."""
    return Provenance.SOLUTION if provenance is Provenance.ESTIMATE else provenance


class Values:
    """What is known of the values of one program; its nodes are added in order.

    Args:
      program: the program.
      facts: what is known of its arguments.
    """

    def __init__(self, program: FlatJaxpr, facts: Sequence[Known]):
        self.program = program
        self.constants = Constants(program)
        self.producers = Producers(program, tuple(fact.token for fact in facts))
        sums = {number: fact.sums for number, fact in zip(program.inputs, facts, strict=True) if fact.sums}
        self.consumers = Consumers(program, self.producers, sums)
        self.provenances = [Provenance.DATA] * len(program.avals)
        for number, fact in zip(program.inputs, facts, strict=True):
            self.give(number, fact)
        for number in program.known:
            if number not in program.captured or is_single(program.avals[number]):  # literals are single
                self.provenances[number] = Provenance.SCALAR

    def fact(self, number: int) -> Known:
        """What is known of a value where it enters another program."""
        sums = functools.partial(self.consumers.sums_outside, number)
        return Known(self.provenances[number], self.producers.token(number), self._numbers(number), sums)

    def result(self, number: int) -> Known:
        """What is known of a result where a call returns it, without source and sums, which are of another program."""
        return Known(self.provenances[number], numbers=self._numbers(number))

    def _numbers(self, number: int) -> Callable[[], np.ndarray | None] | None:
        """Gives the numbers of a constant: computed only if a product asks for them."""
        return functools.partial(self.constants.numbers, number) if self.constants.is_constant[number] else None

    def give(self, number: int, fact: Known) -> None:
        """Notes what is known of an input, or of the result of a call."""
        self.provenances[number] = fact.provenance
        if fact.numbers is not None:
            self.constants.give(number, fact.numbers)

    def stack(self, results: Sequence[tuple[int, int]], inner: "Values", length: int) -> None:
        """Notes what is known of the arrays that a scan stacks: sums of squares of arrays that it stacks as well.

        Args:
          results: values of the body, each with the array of which it is a row.
          inner: what is known of the body's values.
          length: of the scan.
        """
        stacked, moved = dict[Any, Any](), False  # by sources inside, those of the arrays
        for number, result in results:
            source = inner.producers.source(number)
            if isinstance(source, tuple) and source[0] == "row":  # that the body is given, moved
                _, (_, rows, _) = source
                self.producers.give(result, rows)
                moved = True
            stacked.setdefault(source, self.producers.source(result))
        found = ((result, inner.consumers.sums_stacked(number, stacked, length)) for number, result in results)
        sums = {result: terms for result, terms in found if terms}
        if moved or sums:
            self.consumers.give(sums)

    def add(self, node: Node, entry: Entry) -> None:
        """Notes what is known of a node's results, given its operands and its entry.

        This runs for every equation of a program, and so avoids calls of functions.
        """
        if node.name == BARRIER:
            for number, result in zip(node.ins, node.outs, strict=True):
                self.give(result, self.result(number))
            return
        provenances, name, rule = self.provenances, node.name, entry.rule
        constant = self.constants.add(node)
        values = node.ins[DATA_OPERANDS[name]] if name in DATA_OPERANDS else node.ins
        # `joined_provenance` of all, called only where two differ.
        provenance = Provenance.SCALAR
        for number in values:
            if provenance is Provenance.SCALAR:
                provenance = provenances[number]
            elif provenances[number] is not provenance:
                provenance = joined_provenance((provenance, provenances[number]))
        if name in SYSTEMS:
            provenance = self._solution(node, provenance)
        elif provenance is Provenance.ESTIMATE and name not in KEEPS_ESTIMATES:  # a network reads it
            provenance = Provenance.DATA
        elif provenance is Provenance.SOLUTION and name not in KEEPS_ESTIMATES:
            provenance = Provenance.KERNEL
        elif provenance is Provenance.KERNEL and name == "reduce_sum":  # features of what a kernel compares
            provenance = Provenance.DATA
        cause = entry.cause if isinstance(entry, WideProduct) else None
        # A value without operands is a table or, if a callback returns it, data. A state times data stays a state,
        # although that product runs in float32.
        if not node.ins or (rule in _COMPUTES_FLOAT32 and provenance not in _STAY and cause is not Cause.STATE):
            square = cause is Cause.SQUARE
            computed = Provenance.ACTIVATION if provenance in ROUNDED_PROVENANCES else Provenance.DATA
            provenance = Provenance.TABLE if constant else Provenance.SOLUTION if square else computed
        # This may be the first layer of a frozen network.
        if cause is not None and cause in _LEAVES_ACTIVATIONS:
            provenance = Provenance.ACTIVATION
        for number in node.outs:
            try:
                dtype = self.program.avals[number].dtype
            except AttributeError:  # a token
                continue
            rounded = rule is Rule.LOW or dtype == FLOAT16 or dtype == BFLOAT16
            provenances[number] = Provenance.SCALAR if dtype == _BOOL else Provenance.NARROW if rounded else provenance

    def _solution(self, node: Node, provenance: Provenance) -> Provenance:
        """The provenance of a linear system's solution: unchanged if an iteration solves the system to a tolerance.

        Both `jnp.linalg.solve` and conjugate gradients are a `custom_linear_solve`; the former gets the factors of its
        matrix.
        """
        found = {self.provenances[number] for number in node.ins}
        if node.name == "custom_linear_solve" and found.isdisjoint(_SOLVED):
            return provenance
        if Provenance.ESTIMATE in found:
            return Provenance.ESTIMATE
        return Provenance.FACTOR if found.issubset(_OF_PARAMETERS) else Provenance.SOLUTION
