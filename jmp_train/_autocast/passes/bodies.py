"""Scans and `shard_map`s that pass values to one another: the operands and results of each, and their layouts.

`body_residuals.py` exchanges operands and results of these. Decides nothing.
"""

import abc
import math
import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray

from ..._jaxpr import scan_counts
from ..ir import Equation, Op, Program, Use, added
from ..primitives import DOTS
from .dead_code import remove_dead_code


class Crossing(NamedTuple):
    """An operand or result of a scan or `shard_map`.

    Attributes:
      layout: which part of the value the body has. For a scan it is one of `Scan`'s layouts, for a `shard_map` a
        `PartitionSpec`.
      number: its number in the program around.
      inner: its number in the body.
    """

    layout: Any
    number: int
    inner: int


class WithBody(abc.ABC):
    """A scan or `shard_map` whose operands and results are exchanged.

    Attributes:
      equation: the equation before the exchange.
      body: its body.
      operands, results: those of equation and body.
      alike: equal for bodies that can pass values to each other. All scans can: a stack is read row by row in whichever
        direction a scan runs.
      shares: whether passing the operands of this body to another body costs nothing.
    """

    operands: list[Crossing]
    results: list[Crossing]
    alike: Any
    shares = False

    def __init__(self, equation: Equation):
        self.equation, self.params = equation, equation.node.params
        self.body = equation.bodies[0].replace(avals=[*equation.bodies[0].avals])

    @property
    def handed_on(self) -> list[Crossing]:
        """The results that may be passed to another body."""
        return self.results

    @property
    def passed(self) -> dict[int, Crossing]:
        """The operands that may be passed to another body as well, by the inputs of this body."""
        return {operand.inner: operand for operand in self.operands}

    def in_memory(self, program: Program) -> Collection[int]:
        """The values of the body that are in memory, whether or not they are passed to another body."""
        return ()

    @abc.abstractmethod
    def layout_of(self, number: int) -> Any:
        """The layout in which a value of the body is passed on; `None` if it cannot be."""

    @abc.abstractmethod
    def whole(self, number: int) -> Any:
        """The abstract value in the program around of a value of the body."""

    def input_of(self, number: int, layout: Any) -> int | None:
        """The body's input for a value of the program around in a layout, if no other input has the same value."""
        found = [each for each in self.operands if each.number == number]
        return found[0].inner if len(found) == 1 and found[0].layout == layout else None

    def given(self, layout: Any, number: int, aval: Any) -> int:
        """The body's input for a value in a layout, which has `aval` inside; added if there is none yet."""
        for operand in self.operands:
            if operand[:2] == (layout, number):
                return operand.inner
        self.operands.append(Crossing(layout, number, self.body.new(aval)))
        return self.operands[-1].inner

    def reads_once(self, given: int) -> bool:
        """Whether one equation reads an input of this body, and nothing else does."""
        readers = [equation for equation in self.body.equations if given in equation.operands]
        return len(readers) == 1 and given not in [result.inner for result in self.results]

    def copies(self) -> dict[int, int]:
        """The results of casts to the compute dtype, by the value that is cast."""
        casts = [equation for equation in self.body.equations if equation.op is Op.CAST]
        return {e.operands[0]: e.results[0] for e in casts if self.body.avals[e.results[0]].dtype == self.body.low}

    def reading(self, given: int) -> tuple[int, list[Equation]]:
        """The value that rematerialized equations of this body read for an input, and the equations that compute it."""
        return given, []

    def finished(self) -> Equation:
        """The equation with the new operands and results, and without dead code in its body."""
        body = remove_dead_code(self.body.replace(outputs=tuple([result.inner for result in self.results])))
        self.operands = self.needed({*body.outputs}.union(*(equation.operands for equation in body.equations)))
        body.inputs = tuple([operand.inner for operand in self.operands])
        return self.equation.replace(
            uses=[Use(operand.number) for operand in self.operands],
            results=tuple([result.number for result in self.results]),
            bodies=(body,),
        )

    def needed(self, read: Collection[int]) -> list[Crossing]:
        """The operands that are left, in their order, if some inputs of the body are `read`."""
        return [operand for operand in self.operands if operand.inner in read]


class Scan(WithBody):
    """Passes values to another scan as stacks, which it writes for that and the other reads row by row."""

    _CONST, _CARRY, _ROW = range(3)
    alike, shares = "scan", True

    def __init__(self, equation: Equation):
        super().__init__(equation)
        consts, self._carry = scan_counts(equation.node.eqn)  # `hoist_weight_casts`, which changes them, runs later
        rows, stacked = len(equation.uses) - consts - self._carry, len(equation.results) - self._carry
        carries = [self._CARRY] * self._carry
        layouts = [self._CONST] * consts + carries + [self._ROW] * rows
        self.operands = list(map(Crossing, layouts, equation.operands, self.body.inputs))
        self.results = list(map(Crossing, carries + [self._ROW] * stacked, equation.results, self.body.outputs))

    @property
    def handed_on(self) -> list[Crossing]:
        return self.results[self._carry :]

    @property
    def passed(self) -> dict[int, Crossing]:
        return {operand.inner: operand for operand in self.operands if operand.layout != self._CARRY}

    def layout_of(self, number: int) -> Any:
        return self._ROW

    def whole(self, number: int) -> Any:
        aval, length = self.body.avals[number], self.params["length"]
        rows = aval.sharding.spec.update(partitions=(None, *aval.sharding.spec.partitions))  # with explicit mesh axes
        return aval.update(shape=(length, *aval.shape), sharding=aval.sharding.update(spec=rows))

    def needed(self, read: Collection[int]) -> list[Crossing]:
        # A scan returns all its carries. JAX wants constants, then carries, then rows; added operands are last.
        left = [operand for operand in self.operands if operand.layout == self._CARRY or operand.inner in read]
        return sorted(left, key=operator.itemgetter(0))

    def finished(self) -> Equation:
        equation = super().finished()
        consts = sum(operand.layout == self._CONST for operand in self.operands)
        return equation.replace(counts=(consts, self._carry))


class ShardMap(WithBody):
    """Passes values of each device to a `shard_map` over the same devices."""

    def __init__(self, equation: Equation):
        super().__init__(equation)
        self.operands = list(map(Crossing, self.params["in_specs"], equation.operands, self.body.inputs))
        self.results = list(map(Crossing, self.params["out_specs"], equation.results, self.body.outputs))
        self.alike = [self.params[key] for key in ("mesh", "newly_manual_axes", "check_vma")]

    def in_memory(self, program: Program) -> Collection[int]:
        arguments = {*program.inputs, *program.captured}
        found = {operand.inner for operand in self.operands if operand.number in arguments}
        dots = [equation for equation in self.body.equations if equation.name in DOTS]
        return found.union(*(equation.operands + equation.results for equation in dots))

    def layout_of(self, number: int) -> Any:
        mesh, manual = self.params["mesh"], self.params["newly_manual_axes"]
        axes = tuple([name for name in mesh.axis_names if name in manual])
        aval = self.body.avals[number]
        spec = aval.nospec(mesh, self.params["check_vma"], axes)  # as JAX hands on residuals
        # A value that differs between devices is passed on concatenated along its first axis, which a scalar has not.
        return spec if len(spec) <= len(aval.shape) else None

    def whole(self, number: int) -> Any:
        aval, spec = self.body.avals[number], self.layout_of(number)
        devices = math.prod([self.params["mesh"].shape[name] for name in jax.tree.leaves(spec.partitions)])
        return ShapedArray((devices * aval.shape[0], *aval.shape[1:]) if spec.partitions else aval.shape, aval.dtype)

    def reading(self, given: int) -> tuple[int, list[Equation]]:
        # To XLA both bodies are parts of one program, unlike those of two scans. Without a barrier XLA would find a
        # rematerialized expression equal to that of the forward body, compute it once, and store it.
        saved, node = self.body.new(self.body.avals[given]), self.equation.node
        return saved, [added(Op.SAVED, node, [given], saved)]

    def finished(self) -> Equation:
        equation = super().finished()
        specs = [tuple([each.layout for each in values]) for values in (self.operands, self.results)]
        return equation.replace(params={**equation.params, "in_specs": specs[0], "out_specs": specs[1]})


KINDS: dict[str, type[WithBody]] = {"scan": Scan, "shard_map": ShardMap}
"""The primitives whose bodies exchange values."""
