"""How each value of a program is used: a walk from its results back to its arguments.

    a = mul 2.0 x           reaches_dot, only_wide, in_exponent: `exp` alone reads it, in float32
    b = exp a               reaches_dot, to_dot, only_dots
    c = dot_general b w     only_wide, as the sum alone reads it
    d = reduce_sum c

Decides whether a dot reads a value, whether any dot depends on it, whether only float32 equations read it, and whether
a rounding of it would become a larger error later. Does not decide dtypes; see `passes.assign_dtypes`.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._jaxpr import BARRIER, FlatJaxpr, Node, branches_of, loop_of
from ..ir import Place
from ..primitives import ADDS, ARITHMETIC, COMPARISONS, DELICATE_OPERAND, DOTS, EXPONENTIALS, Entry, Rule, Trait, having
from .wide_product import WideProduct

if TYPE_CHECKING:
    from ..planner import Planner

# To round before these is to round after them: every element of the result is one of an operand's, or its negative.
_EXACT = having(Trait.JOINS | Trait.BOUNDS | Trait.FLIPS)
_EXACT_OR_POOLS = _EXACT | having(Trait.POOL)  # a pool's results are elements of its operand
_AFFINE = ADDS | {"mul"}
_PERIODIC = having(Trait.PERIODIC)
_FOLLOWS = (Rule.FOLLOW, Rule.SHAPE, Rule.WIDEST)  # where the dtypes of operands decide that of the result


class Flags(NamedTuple):
    """How a value is used.

    Attributes:
      reaches_dot: some dot depends on it.
      to_dot: a dot reads it, directly or through operations that do not change its numbers.
      only_wide: only operations that run in float32 read it, in this program or around it: then a product, which may be
        infinite in the compute dtype, runs in float32 too. (`passes.widen` asks the same about rounding, and only for
        readers on the same side of a dot.)
      only_dots: only dots in the compute dtype read it, directly or moved.
      only_results: only results that the whole program returns in float32, float32 operations and comparisons are
        computed from it.
      delicate: a result that is finite for the value may not be for its copy in the compute dtype: something divides by
        it, takes its logarithm or bounds it first, or does so to its distance from a constant.
      in_exponent: an exponential is computed from it, or from sums and products of it: the absolute error of its copy
        would become a relative one, and numbers normalised with the value itself would no longer sum to one.
      is_position: an angle, or a number that is rounded to an integer, is computed from it by sums, products and
        quotients: a position in an image, or among bins. Of a large number only the fraction counts, which a copy does
        not have.
    """

    reaches_dot: bool = False
    to_dot: bool = False
    only_wide: bool = False
    only_dots: bool = False
    only_results: bool = False
    delicate: bool = False
    in_exponent: bool = False
    is_position: bool = False

    @property
    def sensitive(self) -> bool:
        """Whether a rounding of the value would become a larger error in its readers."""
        return self.delicate or self.in_exponent


_UNREAD = Flags()  # compared by identity: this object says that nothing reads a value
RETURNED = Flags(only_results=True)  # of the results of a whole program


def merged(flags: Sequence[Flags]) -> Flags:
    """The flags of several values together."""
    reaches, to_dot, wide, dots, results, *others = zip(*flags, strict=True) if flags else [()] * len(_UNREAD)
    return Flags(any(reaches), any(to_dot), all(wide), all(dots), all(results), *map(any, others))


class Uses:
    """Accumulates `Flags` of every value of a program, from its results back to its arguments.

    Attributes:
      flags: the flags of each value.
      readers: how many equations read a value.
      returned: the results, and values from which they were moved or summed.
      from_constant: the operands `x` of `1 - x` and the like that are used for results alone.
    """

    def __init__(self, program: FlatJaxpr, out_flags: Sequence[Flags]):
        self.flags = [_UNREAD] * len(program.avals)
        self._known, self._avals = program.known, program.avals
        self.returned, self.readers = set(program.outputs), [0] * len(program.avals)
        self.from_constant: set[int] = set()
        for number, flags in zip(program.outputs, out_flags, strict=True):
            self.add(number, flags)

    def add(self, number: int, flags: Flags) -> None:
        known, flags = self.flags[number], Flags(*flags) if flags is _UNREAD else flags
        self.flags[number] = flags if known is _UNREAD or known == flags else merged((known, flags))
        self.readers[number] += 1

    def ends_at(self, number: int, weights: Collection[frozenset[Any]] | None) -> bool:
        """Whether a backward product is the last on its path, as for a weight's gradient: no other dot rounds it.

        A product with a parameter is the gradient of an activation, on its path to a norm, a bias or an embedding. The
        exceptions are a product that the program returns (perhaps rearranged or summed with others), and one whose
        `axes_of` are those of one of the `weights`: a weight that is multiplied by another one first, as in low-rank
        adaptation. `weights` is `None` for products without a parameter.
        """
        if self.flags[number].reaches_dot:  # the next dot rounds it
            return False
        return weights is None or number in self.returned or axes_of(self._avals[number]) in weights

    def step(self, node: Node, entry: Entry) -> None:
        """Passes the flags of a node's results on to its operands, for every rule but ENTER."""
        if node.name == BARRIER and entry.rule is Rule.SHAPE:
            for number, result in zip(node.ins, node.outs, strict=True):
                if result in self.returned:
                    self.returned.add(number)
                self.add(number, self.flags[result])
            return
        read = [flags for number in node.outs if (flags := self.flags[number]) is not _UNREAD]
        name, rule, out = node.name, entry.rule, read[0] if len(read) == 1 else merged(read)
        # For an equation without results, such as a callback, `merged` gives only_wide: nothing narrow reads them.
        reaches, to_dot, only_wide = out.reaches_dot, False, rule is Rule.HIGH
        if rule is Rule.LOW:
            reaches, to_dot = True, True
        elif rule is Rule.SHAPE or rule is Rule.WIDEST:
            # Behind a sum or product a dot rounds another number than a copy of this one.
            to_dot = out.to_dot and (rule is Rule.SHAPE or name in _EXACT)
            only_wide = out.only_wide
        elif isinstance(entry, WideProduct):
            reaches, only_wide = True, True  # it reads float32, as a sum does
        elif rule is not Rule.HIGH:
            to_dot = out.to_dot and name in _EXACT_OR_POOLS
            # A dot kept in float32 counts too: the result of a narrow dot that it reads is no weight's gradient.
            reaches = reaches or name in DOTS
            # Not `neg`: an activation's gradient has one on its path to a norm, and would be stored in float32.
            only_wide = out.only_wide and name == "abs"
        # The gradients of a weight that several dots read are summed before they are returned.
        if (rule is Rule.SHAPE or name == "add_any") and not self.returned.isdisjoint(node.outs):
            self.returned.update(node.ins)
        passes = rule is Rule.SHAPE or name in _EXACT
        only_dots = rule is Rule.LOW or (rule is Rule.SHAPE and out.only_dots)
        only_results = only_wide or name in COMPARISONS or (out.only_results and rule in _FOLLOWS)
        # The same is true of slices and products of such a value.
        leads_there = (passes or name in _AFFINE) and not self.from_constant.isdisjoint(node.outs)
        if leads_there or (out.only_results and name in ADDS and self._measures_from_constant(node)):
            self.from_constant.update(node.ins)
        # A value bounded from above (`min`) may be infinite in float16, and a divisor zero, also that of a negative
        # power. An operation that runs as recorded may have both.
        delicate = rule is Rule.RECORDED or (out.delicate and (passes or self._measures_from_constant(node)))
        delicate = delicate or name == "min" or (name == "integer_pow" and node.params["y"] < 0)
        exponent = name in EXPONENTIALS or (out.in_exponent and (passes or name in _AFFINE))
        position = name in _PERIODIC or (out.is_position and (passes or name in ARITHMETIC))
        flags = Flags(reaches, to_dot, only_wide, only_dots, only_results, delicate, exponent, position)
        # Most primitives have one delicate operand only: the divisor of a quotient.
        one = DELICATE_OPERAND.get(name)
        one = None if one is None else node.ins[one]
        for number in node.ins:
            self.add(number, flags._replace(delicate=True) if number == one else flags)

    def _measures_from_constant(self, node: Node) -> bool:
        """Whether a node is a step of `1 - x**2` and the like, which is zero where rounding makes `x` one."""
        if node.name in ("add", "sub"):
            return not self._known.keys().isdisjoint(node.ins)
        return node.name in ("square", "integer_pow") or (node.name == "mul" and node.ins[0] == node.ins[1])


def axes_of(aval: Any) -> frozenset[Any]:
    """The sizes of an array's axes in any order; symbolic ones cannot be sorted. None of a token."""
    return frozenset(Counter(getattr(aval, "shape", ())).items())


def find_uses(
    planner: "Planner", program: FlatJaxpr, entries: Sequence[Entry], place: Place, out_flags: Sequence[Flags]
) -> Uses:
    """Runs the backward walk, through the programs inside too, of which the planner knows the uses."""
    uses = Uses(program, out_flags)
    for node, entry in zip(reversed(program.nodes), reversed(entries), strict=True):
        # An equation that nothing reads adds no flags to its operands: a derivative of a maximum that JAX drops again.
        read = 0
        for number in node.outs:  # a loop, since it runs for every equation
            read += uses.readers[number]
        if not read and not node.eqn.effects:
            continue
        if entry.rule is Rule.ENTER:
            found = _of_operands(planner, node, place.inside(node), [uses.flags[number] for number in node.outs])
            for number, flags in zip(node.ins, found, strict=True):
                uses.add(number, flags)
        else:
            uses.step(node, entry)
    return uses


def _of_operands(planner: "Planner", node: Node, inside: Place, outs: list[Flags]) -> list[Flags]:
    """The flags of the operands of a node with a body, given those of its results."""
    skip, bodies = branches_of(node.eqn)
    if bodies:
        each = [planner.in_flags(body, inside, outs) for body in bodies]
        # The predicate of a `cond` is an integer: no rounding.
        return [Flags()] * skip + list(map(merged, zip(*each, strict=True)))
    if (loop := loop_of(node.eqn)) is not None:
        # Twice: for the use of a carry after the loop, then for its use in the iterations between.
        first = planner.in_flags(loop.body, inside, outs)
        pairs = zip(outs[: loop.carry], first[loop.consts :], strict=False)
        # A carry's dtype is that of its first value; it is not widened because only float32 reads it at the end.
        fed_back = [merged(pair)._replace(only_wide=False, only_results=False) for pair in pairs]
        return [Flags()] * loop.skip + planner.in_flags(loop.body, inside, [*fed_back, *outs[loop.carry :]])
    # Planned behind float32 boundaries: the programs inside are not looked at, and may have dots.
    return [Flags(reaches_dot=True)] * len(node.ins)
