"""The program that autocast makes of a jaxpr: passes read and write it, and the last one runs.

A `Program` starts as the recorded equations over numbered values. `assign_dtypes` writes into each use of a value the
dtype in which it is read, `save_or_remat` whether it is read through a saved copy. `insert_casts` turns both into
equations, so that the last program has an equation for everything that will run. `format_program.py` prints programs.
Decides nothing.
"""

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import numpy as np

from .._dtypes import BFLOAT16, FLOAT16, FLOAT32
from .._jaxpr import FlatJaxpr, Node, loop_of
from .analysis.ranges import UNKNOWN_NUMBERS, Numbers
from .primitives import ADDED, DOTS, Entry, Rule

if TYPE_CHECKING:
    from .analysis.uses import Flags, Uses
    from .planner import Planner


class Precision(enum.Enum):
    """What autocast knows of a value that was recorded in float32."""

    LOW = "low"  # is in the compute dtype
    WEAK = "weak"  # float32, but a parameter or a small literal: narrows beside 16-bit operands, as a weak type does
    FULL = "full"  # float32, and widens the operands beside it: data, and results of float32 operations
    OVERFLOWS = "overflows"  # FULL, at the boundary of a body: some of its numbers are infinite in the compute dtype
    RECORDED = "recorded"  # was not recorded in float32: its dtype never changes


# In an order in which each can hold the numbers of those before it.
_BY_RANGE = (Precision.WEAK, Precision.LOW, Precision.FULL, Precision.OVERFLOWS, Precision.RECORDED)


def joined_precision(precisions: Sequence[Precision]) -> Precision:
    """The precision of a value that may be any one of several values, such as the result of a branch.

    It has one dtype. Float32 can hold all of them, and a weak value narrows beside a value in 16 bits.
    """
    return max(precisions, key=_BY_RANGE.index)


def dtype_of(precision: Precision, low: np.dtype) -> np.dtype | None:
    """The dtype of a value, `None` where that is the recorded one."""
    if precision is Precision.RECORDED:
        return None
    return low if precision is Precision.LOW else FLOAT32


def precision_of(aval: Any, precision: Precision = Precision.FULL) -> Precision:
    """`precision` for a value that was recorded in float32, `RECORDED` for any other."""
    return precision if is_float32(aval) else Precision.RECORDED


def recorded_reads(precisions: Iterable[Precision]) -> list[np.dtype | None]:
    """The dtypes in which an equation reads operands of some precisions as they were recorded."""
    return [None if precision is Precision.RECORDED else FLOAT32 for precision in precisions]


class Place(NamedTuple):
    """The equation to which a body belongs, as far as the name stacks inside the body do not say it.

    Attributes:
      scope: the scope path of its call.
      low_region: whether its call is marked `low_precision`.
      backward: whether it belongs to a backward pass.
      body_of: the primitive whose body it is; empty for a whole program.
    """

    scope: str = ""
    low_region: bool = False
    backward: bool = False
    body_of: str = ""

    @property
    def is_scan(self) -> bool:
        return self.body_of == "scan"

    def scope_of(self, node: Node) -> str:
        return "/".join(filter(None, (self.scope, node.scope.path)))

    def is_backward(self, node: Node) -> bool:
        # The body of a rematerialized call holds the forward pass, which runs again, beside the backward pass.
        return node.scope.is_backward or (self.backward and not node.scope.is_recomputed)

    def inside(self, node: Node) -> "Place":
        """The place of the bodies of a node of this program."""
        low_region = self.low_region or node.low_region
        return Place(self.scope_of(node), low_region, self.is_backward(node), node.name)


TOP = Place()


def is_float32(aval: Any) -> bool:
    try:
        return aval.dtype == FLOAT32
    except AttributeError:  # a token
        return False


def is_on_host(aval: Any) -> bool:
    """Whether a value of a device's program is in the memory of the host, where XLA computes slowly."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def is_sixteen_bit(aval: Any) -> bool:
    return getattr(aval, "dtype", None) in (FLOAT16, BFLOAT16)


@dataclasses.dataclass(slots=True)
class Fact:
    """What is known of a recorded value.

    Attributes:
      precision: its precision.
      depth: how many dots precede it on the longest path. A reader of greater depth is on the far side of a dot.
      has_low_copy: whether it is computed in float32, with a copy in the compute dtype for readers across a dot.
      computed: whether the program computes it; false for an argument, also a rearranged one.
      parameter: whether it is a differentiated argument, possibly rearranged or updated.
      sensitive: whether a rounding of it would be more than a rounding to its readers; see `Flags` in `uses.py`.
      numbers: what is known of its numbers.
    """

    precision: Precision
    depth: int = 0
    has_low_copy: bool = False
    computed: bool = False
    parameter: bool = False
    sensitive: bool = False
    numbers: Numbers = UNKNOWN_NUMBERS


class Access(enum.Enum):
    """How an operand gets to its equation."""

    FUSED = "fused"  # XLA computes it in the kernel that reads it
    STORED = "stored"  # from memory: it reads the copy in the compute dtype, if a dot reads that anyway
    SUMMED = "summed"  # by the gradient of a bias: the copy in the compute dtype, computed in the same kernel or stored
    CARRIED = "carried"  # as the first value of a loop's carry, in its own dtype: never the copy that a dot reads


# What `Use.residual` says of an operand that is not read as it is.
SHARED = 1  # it is read as the saved copy or the rematerialized value, as all readers across a dot do
SEPARATE = 2  # from this number on: it is rematerialized, one expression for each number, and none equal to another


class Use(NamedTuple):
    """An operand of an equation.

    Attributes:
      value: its number.
      dtype: the dtype in which it is read; `None` for the dtype of the value.
      residual: 0 if it is read as it is, else `SHARED` or a number from `SEPARATE` on.
    """

    value: int
    dtype: np.dtype | None = None
    residual: int = 0


_VALUE, _DTYPE = operator.itemgetter(0), operator.itemgetter(1)


class Op(enum.Enum):
    """What an equation does."""

    RECORDED = "recorded"  # what was recorded, perhaps with other parameters and bodies, or computed in another way
    CAST = "cast"  # a conversion that autocast adds
    SAVED = "saved"  # behind an optimization barrier: XLA stores the operand once, and all later readers read that
    ROUND = "rounded"  # keeps float32 numbers on the compute dtype's grid, where XLA might drop a cast and its inverse
    CHAINED = "chained"  # a cast of the first operand, which is NaN where the second is; see `rewrites.chained_casts`
    COPY_OF = "copy_of"  # the second operand, with the derivative of a cast of the first, which is equal to it

    __hash__ = object.__hash__  # `Enum`'s own is a function in Python, and `emit` has a table by `Op`


class _Copied:
    """A dataclass of which every pass makes copies, one for each equation that it changes.

    `dataclasses.replace` takes three times as long: it looks at every field in Python and calls `__init__` by names.
    """

    __slots__ = ()

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        copy = type(self)(*_fields(type(self))(self))
        for name in changes:
            setattr(copy, name, changes[name])
        return copy


@functools.cache
def _fields(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return operator.attrgetter(*(field.name for field in dataclasses.fields(kind)))


@dataclasses.dataclass(slots=True)
class Equation(_Copied):
    """One equation of a `Program`.

    Attributes:
      node: the recorded equation that it runs; of an equation that autocast adds, the one for which it was added.
      entry: the rule that holds for it, with the reason.
      uses: its operands.
      results: the values it defines.
      op: what it does.
      params: parameters of the primitive that differ from the recorded ones.
      computes: the dtype in which the primitive returns each result, `None` for the result's own; `insert_casts` adds a
        cast where the two differ. Empty where all results are returned in their own.
      rewrite: computes the results from the operands, in place of the primitive.
      bodies: the programs inside.
      counts: how many of a loop's operands are constants of its body and carries, where they are not the recorded ones.
      wide: of a scan whose carries were narrowed to 16 bits, the scan as it was before. The derivative is that of this
        scan, so that cotangents of the carries are summed in float32.
      derive: plans and runs derivative rules, which are callables until JAX asks for them.
      depth: the number of dots before it on the longest path; a use at greater depth than its value's is residual.
      accesses: the `Access` of each operand.
      dead: whether it need not run at its place. It may still be rematerialized: then its readers are across a dot.
      at: the recorded equation that reads the result of a cast, saved copy or rematerialization: this one runs under
        its source line and scope.
      remat: whether it runs a second time, for the backward pass.
    """

    node: Node
    entry: Entry
    uses: list[Use]
    results: tuple[int, ...]
    op: Op = Op.RECORDED
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    computes: list[np.dtype | None] = dataclasses.field(default_factory=list)
    rewrite: Callable[[Node, Sequence[Any]], list[Any]] | None = None
    bodies: "tuple[Program, ...]" = ()
    counts: tuple[int, int] | None = None
    wide: "Equation | None" = None
    derive: Any = None
    depth: int = 0
    accesses: list[Access] = dataclasses.field(default_factory=list)
    dead: bool = False
    at: Node | None = None
    remat: bool = False

    @property
    def name(self) -> str:
        """The primitive's name, or that of the `Op` that autocast adds."""
        return self.node.name if self.op is Op.RECORDED else self.op.value

    @property
    def is_narrow_dot(self) -> bool:
        """Whether it multiplies matrices of 16-bit numbers, so that its results are one deeper than itself."""
        return self.entry.rule is Rule.LOW and self.node.name in DOTS

    @property
    def has_narrow_dot(self) -> bool:
        """Whether it, or an equation of a body inside, is such a dot."""
        return self.is_narrow_dot or any(inner.has_narrow_dot for body in self.bodies for inner in body.equations)

    @property
    def loop_counts(self) -> tuple[int, int] | None:
        """How many constants and carries a loop's body has; `None` for an equation that is no loop or as recorded."""
        loop = loop_of(self.node.eqn) if self.bodies else None
        return loop and (self.counts or (loop.consts, loop.carry))

    @property
    def given(self) -> tuple[int, ...]:
        """The operands that are passed to its body, or to each branch: the last ones."""
        return self.operands[len(self.uses) - len(self.bodies[0].inputs) :]

    @property
    def operands(self) -> tuple[int, ...]:
        return tuple(map(_VALUE, self.uses))

    @property
    def reads(self) -> list[np.dtype | None]:
        return list(map(_DTYPE, self.uses))


def equation_of(node: Node, entry: Entry, reads: Sequence[np.dtype | None], **fields: Any) -> Equation:
    """The equation of a recorded node that reads its operands in some dtypes."""
    return Equation(node, entry, list(map(Use, node.ins, reads)), node.outs, **fields)


def added(op: Op, node: Any, operands: Iterable[int], result: int, **params: Any) -> Equation:
    """An equation that autocast adds for a recorded node; `None` in a branch that returns its operand."""
    return Equation(node, ADDED, list(map(Use, operands)), (result,), op, params)


Decided = tuple[Equation, list[Precision]]  # an equation, and the precisions of its results


@dataclasses.dataclass(frozen=True, slots=True)
class Residuals:
    """How readers on the far side of a dot read a program's values.

    Attributes:
      saved: values of which a copy is saved, in the compute dtype if they are floating.
      remat: values that are rematerialized instead.
      in_full: saved values that are also rematerialized in float32, for rematerialized equations that read them before
        they were rounded.
      rounded: values in the compute dtype that every float32 reader has to read rounded; see `shared_roundings`.
      squared: those among them that a product, here or in a body, multiplies with themselves.
      by_product: saved values for which a barrier would cost, so that a product with one tells them from equal
        expressions: slices of one dot (`joined_dots.py`), cotangents that the gradient of a bias sums (`accesses.py`).
    """

    saved: frozenset[int] = frozenset()
    remat: frozenset[int] = frozenset()
    in_full: frozenset[int] = frozenset()
    rounded: frozenset[int] = frozenset()
    squared: frozenset[int] = frozenset()
    by_product: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """Facts that a pass may ask for and that are not in the program itself.

    Attributes:
      planner: plans bodies; it has the policy, the rules and the rewrites.
      entries: the rule of each recorded equation.
      uses: how each value is used; see `uses.py`.
      precisions: the precisions of the arguments.
      out_flags: how the results are used outside.
      roundable: positions of arguments that are carries of a loop: float32 ones may leave the body in the compute dtype
        where a dot outside reads them, though no equation of the body computed them.
    """

    planner: "Planner"
    entries: list[Entry]
    uses: "Uses"
    precisions: Sequence[Precision]
    out_flags: "Sequence[Flags]"
    roundable: Sequence[int]

    @property
    def saves_low(self) -> bool:
        """Whether float32 residuals are saved in the compute dtype."""
        return self.planner.rules.low_residuals


@dataclasses.dataclass(slots=True)
class Program(_Copied):
    """Equations over numbered values.

    Attributes:
      recorded: the flattened jaxpr from which it was made.
      context: further facts that passes may ask for.
      place: the equation to which it belongs, if it is a body.
      low: the compute dtype.
      avals: of every value, by number; after `insert_casts` in the dtype in which it runs.
      constants: values that are known: literals and captured arrays.
      inputs, outputs: numbers of the arguments and results.
      facts: what is known of every recorded value.
      result_precisions: the precisions in which the results are returned.
      equations: in the order in which they run.
      residuals: what is saved and rematerialized; empty before `save_or_remat` and after `insert_casts`.
    """

    recorded: FlatJaxpr
    context: Context
    place: Place
    low: np.dtype
    avals: list[Any]
    constants: dict[int, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    facts: list[Fact] = dataclasses.field(default_factory=list)
    result_precisions: list[Precision] = dataclasses.field(default_factory=list)
    equations: list[Equation] = dataclasses.field(default_factory=list)
    residuals: Residuals = dataclasses.field(default_factory=Residuals)

    @property
    def captured(self) -> frozenset[int]:
        """The constants that are arrays or tracers."""
        return self.recorded.captured

    def dtypes_of(self, precisions: Iterable[Precision]) -> list[np.dtype | None]:
        return [dtype_of(precision, self.low) for precision in precisions]

    def returning_recorded(self) -> "Program":
        """The program with results that are returned as they were recorded."""
        return self.replace(result_precisions=[precision_of(self.avals[number]) for number in self.outputs])

    def precision(self, number: int) -> Precision:
        return self.facts[number].precision

    def only_readers(self) -> dict[int, int | None]:
        """The equation that alone reads a value, and once, by its position; `None` for values that are read again."""
        readers: dict[int, int | None] = dict.fromkeys(self.outputs)
        for i, equation in enumerate(self.equations):
            for number, _, _ in equation.uses:
                readers[number] = None if number in readers else i
        return readers

    def producers(self) -> dict[int, Equation]:
        """The equation that computes each value."""
        return {number: equation for equation in self.equations for number in equation.results}

    def new(self, aval: Any) -> int:
        """A value that was not recorded."""
        self.avals.append(aval)
        return len(self.avals) - 1


def with_dtype(aval: Any, dtype: np.dtype | None) -> Any:
    """`aval` in a dtype; `None` leaves it."""
    # Casts are strongly typed: `emit` binds them with `weak_type=False`.
    return aval if dtype is None or aval.dtype == dtype else aval.update(dtype=dtype, weak_type=False)
