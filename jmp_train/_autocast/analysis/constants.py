"""The numbers of values that depend on no argument, and the effect of rounding them to 16 bits on a product.

    a = iota; b = exp a           `b` is a constant: it depends on no argument
    c = dot_general x b           `table_of` its numbers `exceeds` float16, which is infinite from exp(12) on

Decides both by running the equations that compute such a value, while the program is planned. Does not decide what
follows from them; see `whole_program/causes.py`.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..._dtypes import facts
from ..._jaxpr import FlatJaxpr, Node, bind
from ..._sizes import static_size
from ..primitives import TABLE, Rule, Trait, having

# A value of more numbers, or of more equations, counts as not known: planning would take time and memory.
_MOST_NUMBERS = 2**20
_MOST_EQUATIONS = 256
# Up to this many equations run one by one; more are compiled as one program; see `_run`.
_FEW_EQUATIONS = 8
# A sum this many times smaller than its terms counts as zero, given float32's rounding (its `eps` is 1.2e-7).
_ROUNDED_TO_ZERO = 1e-6

_ARITHMETIC = (Rule.LOW, Rule.HIGH, Rule.FOLLOW, Rule.SHAPE, Rule.WIDEST)
# Primitives that give the same result for the same operands wherever they run, and that cost little to run. No loops:
# how long a loop takes is not known before it ends.
_MAKES_CONSTANTS = having(Trait.CONSTANT) | {"jit", "custom_jvp_call", "custom_vjp_call"}
_MAKES_CONSTANTS |= {name for name, entry in TABLE.items() if entry.rule in _ARITHMETIC}


def is_zero(value: Any) -> bool:
    """Whether a literal or captured array is known to hold zeros only.

    On the host: under `jit`, an operation on an array of the device would be traced.
    """
    return not isinstance(value, Tracer) and not np.asarray(value).any()


class Constants:
    """The values of one program that depend on no argument, and their numbers: evaluated once, and only if asked for.

    Args:
      program: the program.

    Attributes:
      is_constant: for every value, whether it is one; known after the node that computes it was added.
    """

    def __init__(self, program: FlatJaxpr):
        self._program = program
        self._given: dict[int, Callable[[], np.ndarray | None]] = {}
        self._numbers: dict[int, np.ndarray | None] = {}
        self.is_constant = [False] * len(program.avals)
        for number, value in program.known.items():
            self.is_constant[number] = not isinstance(value, Tracer)

    def give(self, number: int, numbers: Callable[[], np.ndarray | None]) -> None:
        """Notes that an input, or the result of a call, is a constant of another program, and its numbers."""
        self._given[number], self.is_constant[number] = numbers, True

    def add(self, node: Node) -> bool:
        """Notes whether the results of a node are constants, after the nodes before it; returns that.

        Like `Values.add`, this runs for every equation.
        """
        constant = True
        for number in node.ins:
            constant = constant and self.is_constant[number]
        constant = constant and node.name in _MAKES_CONSTANTS and not node.eqn.effects
        for number in node.outs:
            self.is_constant[number] = constant
        return constant

    def numbers(self, number: int) -> np.ndarray | None:
        """The numbers of a value; `None` if it is no constant, is large, or is not known before the program runs."""
        if number not in self._numbers:
            nodes = self._nodes_of(number) if self.is_constant[number] else None
            self._numbers[number] = None if nodes is None else self._run(nodes, number)
        return self._numbers[number]

    def _nodes_of(self, number: int) -> list[Node] | None:
        """The nodes that compute a constant, in order; `None` if they are many, or some of their values large."""
        nodes, values, pending = [], {number}, {number}
        for node in reversed(self._program.nodes):
            # Values that are known, or that the program around gives, are not computed here.
            pending = {each for each in pending if each not in self._program.known and each not in self._given}
            if not pending or len(nodes) > _MOST_EQUATIONS:
                break
            if not pending.isdisjoint(node.outs):
                nodes.append(node)
                values.update(node.ins)
                pending.difference_update(node.outs)
                pending.update(node.ins)
        sizes = [static_size(self._program.avals[each].shape) for each in values]
        small = all(size is not None and size <= _MOST_NUMBERS for size in sizes)
        return nodes[::-1] if small and len(nodes) <= _MOST_EQUATIONS else None

    def _run(self, nodes: list[Node], number: int) -> np.ndarray | None:
        program, values = self._program, dict[int, Any]()

        def read(each: int) -> Any:
            if each in values:
                return values[each]
            value = program.known_array(each) if each in program.known else self._given[each]()
            if value is None:
                raise LookupError(f"constant {each} is not known")
            return value

        def run() -> Any:
            for node in nodes:
                values.update(zip(node.outs, bind(node.eqn, list(map(read, node.ins))), strict=True))
            return read(number)

        # Outside of `jit`, XLA compiles each equation by itself; it takes less time to compile many, such as those of
        # random numbers, together.
        made = jax.jit(run) if len(nodes) > _FEW_EQUATIONS else run
        # In a thread of its own, since JAX keeps the current trace and mesh by thread: in this thread the equations
        # would be traced if a `jit` is around, or placed on the devices of a mesh, rather than give numbers.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            try:
                return thread.submit(lambda: np.asarray(made())).result()
            except Exception:  # an array of another process, an axis without a mesh: not known before the program runs
                return None


@dataclasses.dataclass(frozen=True)
class Table:
    """What is known of an array of constants.

    Attributes:
      exceeds: whether the compute dtype cannot represent it: some numbers are infinite there; or all are integers, some
        of which it cannot hold (in float16 above 2,048); or so many numbers are too small for it that their sum along
        the contracted axes is lost.
      exact: the compute dtype holds all of them, without rounding.
      averages: it is exact, and no number is larger than one: the weights of an average or a selection.
      ordered: it is one row of numbers that rise or fall, such as bins and grids.
      uniform: all numbers are equal, as in a sum.
      differences: along the contracted axes the numbers add up to zero, as in a derivative.
      staircase: it has zeros and ones in a triangle, as in a cumulative sum.
    """

    exceeds: bool
    exact: bool
    averages: bool
    ordered: bool
    uniform: bool
    differences: bool
    staircase: bool


def table_of(value: np.ndarray, contracted: Sequence[int], low: np.dtype, captured: bool = False) -> Table:
    """The facts of the floating array `value`, over whose axes `contracted` a product sums.

    If it was captured, it may be a frozen network's weight: a row of tiny numbers is then no reason for float32.
    """
    # Infinities and NaN are the same in every dtype.
    wide = np.where(np.isfinite(value), value, 0).astype(np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(low).astype(np.float64)
    infinite, exact = not np.all(np.isfinite(narrow)), bool(np.array_equal(narrow, wide))
    # Rounding a normal number loses at most half of `eps`, relative to it, and the bound below is four times that: only
    # subnormal numbers lose more. They matter if a whole row loses that much, since one result sums over a row; in a
    # captured array, only if all numbers together do.
    rows = None if captured else tuple(contracted)
    errors = np.sum(np.where(np.isfinite(narrow), narrow - wide, 0) ** 2, axis=rows)
    sums, sizes = (np.sum(each, axis=tuple(contracted)) for each in (wide, np.abs(wide)))
    vanishing = np.any(errors > (2 * facts(low).eps) ** 2 * np.sum(wide**2, axis=rows))
    # An integer that is rounded becomes another one: a position or a label off by one.
    loses_integers = not exact and np.array_equal(np.round(wide), wide)
    steps = np.diff(wide.reshape(-1))
    is_row = max(value.shape, default=0) == value.size > 1
    return Table(
        exceeds=bool(infinite or vanishing or loses_integers),
        exact=exact,
        averages=exact and bool(np.all(np.abs(wide) <= 1)),
        ordered=is_row and bool(np.all(steps > 0) or np.all(steps < 0)),
        uniform=not wide.size or bool(np.all(wide == wide.flat[0])),
        differences=bool(np.any(sizes) and np.all(np.abs(sums) <= _ROUNDED_TO_ZERO * sizes)),
        staircase=_is_staircase(wide),
    )


def _is_staircase(value: np.ndarray) -> bool:
    """Whether a matrix holds zeros and ones, with all ones on one side of a line that only falls or only rises."""
    value = value.squeeze()
    if value.ndim != 2 or not np.all((value == 0) | (value == 1)):
        return False
    fewer, counts = np.diff(value, axis=1), np.diff(value.sum(axis=1))
    nested = np.all(fewer <= 0) or np.all(fewer >= 0)  # the ones of a row are its first or its last
    return bool(nested and np.any(counts) and (np.all(counts >= 0) or np.all(counts <= 0)))
