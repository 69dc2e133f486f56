"""Runs a traced program one operation at a time, on concrete values, and shows each operation to a watcher.

Decides the order of operations and what an operation is told to be (primitive, source line, scope, forward or backward,
iteration). Does not decide what is looked for; see `_taint.py` and `_activations.py`.

Every operation runs by itself, as outside `jit`: the numbers are those of the recorded program, without a compiler's
freedom to keep intermediate 16-bit results in 32 bits. Calls, loops, branches, rematerialised parts and functions with
derivative rules of their own are entered. What cannot be entered (`shard_map`, kernels, callbacks, linear solvers) runs
as recorded, as one operation. A value is dropped after its last reader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._autocast._flow import TOP, Place
from .._jaxpr import ClosedJaxpr, Jaxpr, Node, Program, bind, context, flatten, scan_counts, sub_jaxprs
from ._derivatives import Kept, kept_for_backward
from ._widening import bind_wide, widened

# Where the body of a call is that changes no value; the derivative rules beside it have been used or are not needed.
_BODY = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "composite": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}


class Value(NamedTuple):
    """A concrete array, and what a watcher wants to remember of it (`None` for what no operation has made)."""

    array: Any
    tag: Any = None


class Loop(NamedTuple):
    """One iteration of a loop: `scan` or `while`, which iteration from 0, and of how many, if that is known before."""

    primitive: str
    iteration: int
    length: int | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Site:
    """One operation as it runs.

    Attributes:
      node: the operation.
      place: where its program stands.
      loops: the iterations of the loops around it, outermost first.
      around: the loops, branches and other operations that were entered on the way, innermost first.
      derivative: whether it is a forward operation that only the backward pass reads.
    """

    node: Node
    place: Place
    loops: tuple[Loop, ...]
    around: tuple[Node, ...]
    derivative: bool

    @property
    def primitive(self) -> str:
        return self.node.name

    @property
    def scope(self) -> str:
        return self.place.scope_of(self.node)

    @property
    def backward(self) -> bool:
        return self.place.is_backward(self.node)


class Watcher:
    """Sees every operation of a program as it runs; the base class looks at nothing."""

    def before(self, site: Site, inputs: list[Value]) -> list[Value]:
        """Returns the operands to run with."""
        del site
        return inputs

    def watch(self, site: Site, inputs: Sequence[Value], outputs: Sequence[Any]) -> Sequence[Any]:
        """Is shown the results; returns what to remember of each."""
        del site, inputs
        return [None] * len(outputs)

    def join(self, pieces: Sequence[Value]) -> Any:
        """What to remember of the rows that a loop has put together."""
        del pieces


class Machine:
    """A program ready to be run, more than once, under the eyes of a watcher.

    Args:
      jaxpr: the program.
      wide: whether every 16-bit floating value is computed in float32 instead: the same program without the limits of
        16 bits. What cannot be entered still gets and returns what it was recorded with.
    """

    def __init__(self, jaxpr: ClosedJaxpr | Jaxpr, wide: bool = False):
        self.jaxpr, self.wide = jaxpr, wide
        self._prepared: dict[int, tuple[Any, Program, list[list[int]]]] = {}
        self._kept: dict[tuple[int, Place, frozenset[int]], Kept] = {}

    @property
    def program(self) -> Program:
        return self.prepared(self.jaxpr)[0]

    def prepared(self, jaxpr: ClosedJaxpr | Jaxpr) -> tuple[Program, list[list[int]]]:
        """The flattened program and, for each of its nodes, the values that nothing reads afterwards."""
        if id(jaxpr) not in self._prepared:
            program = flatten(jaxpr)
            self._prepared[id(jaxpr)] = (jaxpr, program, _last_reads(program))
        return self._prepared[id(jaxpr)][1:]

    def kept(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place, outputs: frozenset[int]) -> Kept:
        """What of the program only serves the backward pass, if only that reads these outputs."""
        key = (id(jaxpr), place, outputs)
        if key not in self._kept:
            self._kept[key] = kept_for_backward(self.prepared(jaxpr)[0], place, outputs)
        return self._kept[key]

    def run(self, args: Sequence[Value], watcher: Watcher) -> list[Value]:
        """Returns the results for `args`, as many as the program's inputs."""
        return _Run(self, watcher).program(self.jaxpr, [self.widened(arg) for arg in args], _Where())

    def widened(self, value: Value) -> Value:
        return value._replace(array=widened(value.array)) if self.wide else value

    def not_entered(self) -> list[str]:
        """The primitives that hold programs but run as one operation."""
        return list(dict.fromkeys(_not_entered(self, self.jaxpr)))


class _Where(NamedTuple):
    """Where a program runs, and which of its outputs only the backward pass reads."""

    place: Place = TOP
    loops: tuple[Loop, ...] = ()
    around: tuple[Node, ...] = ()
    kept: frozenset[int] = frozenset()

    def inside(self, node: Node, kept: frozenset[int]) -> _Where:
        return _Where(self.place.inside(node), self.loops, (node, *self.around), kept)

    def iteration(self, *loop: Any) -> _Where:
        return self._replace(loops=(*self.loops, Loop(*loop)))


_NONE: frozenset[int] = frozenset()


class _Run:
    """One run of a machine."""

    def __init__(self, machine: Machine, watcher: Watcher):
        self._machine, self._watcher = machine, watcher

    def program(self, jaxpr: ClosedJaxpr | Jaxpr, args: Sequence[Value], where: _Where) -> list[Value]:
        program, dying = self._machine.prepared(jaxpr)
        values = dict(zip(program.inputs, args, strict=True))

        def read(number: int) -> Value:
            if number in values:
                return values[number]
            return self._machine.widened(Value(_concrete(program.known[number], program.avals[number])))

        kept = self._machine.kept(jaxpr, where.place, where.kept)
        for position, (node, dead) in enumerate(zip(program.nodes, dying, strict=True)):
            inside = where.inside(node, kept.results.get(position, _NONE))
            site = Site(node, where.place, where.loops, where.around, position in kept.nodes)
            outputs = self._node(site, [read(number) for number in node.ins], inside)
            values.update(zip(node.outs, outputs, strict=True))
            for number in dead:
                values.pop(number, None)
        return [read(number) for number in program.outputs]

    def _node(self, site: Site, inputs: list[Value], inside: _Where) -> list[Value]:
        node = site.node
        if node.name in _BODY:
            return self.program(node.params[_BODY[node.name]], inputs, inside)
        if node.name == "cond":
            branches = node.params["branches"]
            chosen = min(max(int(inputs[0].array), 0), len(branches) - 1)
            return self.program(branches[chosen], inputs[1:], inside)
        if node.name == "scan":
            return self._scan(node, inputs, inside)
        if node.name == "while":
            return self._while(node, inputs, inside)
        inputs = self._watcher.before(site, inputs)
        arrays = [value.array for value in inputs]
        with context(node):
            outputs = bind_wide(node, arrays) if self._machine.wide else bind(node.eqn, arrays)
        tags = self._watcher.watch(site, inputs, outputs)
        return [Value(output, tag) for output, tag in zip(outputs, tags, strict=True)]

    def _scan(self, node: Node, inputs: list[Value], inside: _Where) -> list[Value]:
        consts, count = scan_counts(node.eqn)
        length, reverse = node.params["length"], node.params["reverse"]
        carry, xs = inputs[consts : consts + count], inputs[consts + count :]
        inside = inside._replace(kept=inside.kept - set(range(count)))  # the next iteration reads the carry
        rows: list[list[Value]] = []
        for i in reversed(range(length)) if reverse else range(length):
            row = [Value(_row(x.array, np.int32(i)), x.tag) for x in xs]
            at = inside.iteration("scan", i, length)
            outs = self.program(node.params["jaxpr"], [*inputs[:consts], *carry, *row], at)
            carry = outs[:count]
            rows.append(outs[count:])
        if not rows:
            avals: list[Any] = [var.aval for var in node.eqn.outvars[count:]]
            empty = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
            return [*carry, *map(Value, empty)]
        columns = zip(*(reversed(rows) if reverse else rows), strict=True)
        return [*carry, *(Value(_stack([v.array for v in col]), self._watcher.join(col)) for col in columns)]

    def _while(self, node: Node, inputs: list[Value], inside: _Where) -> list[Value]:
        params, skip = node.params, node.params["cond_nconsts"]
        consts = skip + params["body_nconsts"]
        carry, i, inside = inputs[consts:], 0, inside._replace(kept=_NONE)
        while True:
            at = inside.iteration("while", i, None)
            (more,) = self.program(params["cond_jaxpr"], [*inputs[:skip], *carry], at)
            if not np.any(more.array):
                return carry
            new = self.program(params["body_jaxpr"], [*inputs[skip:consts], *carry], at)
            carry = [_kept(more.array, *pair) for pair in zip(new, carry, strict=True)]
            i += 1


_row = jax.jit(lambda x, i: lax.dynamic_index_in_dim(x, i, keepdims=False))


def _kept(more: Any, new: Value, old: Value) -> Value:
    """The new carry; under `vmap` the condition has a value for each example, and those that are done stay."""
    if np.all(more):
        return new
    more = np.asarray(more).reshape(np.shape(more) + (1,) * (np.ndim(new.array) - np.ndim(more)))
    return new._replace(array=jnp.where(more, new.array, old.array))


def _stack(rows: Sequence[Any]) -> Any:
    if jnp.issubdtype(rows[0].dtype, jax.dtypes.extended):
        return jnp.stack(rows)
    # On the host: a concatenation of a thousand operands would be compiled for a minute.
    stacked = np.stack([np.asarray(row) for row in rows])
    return stacked if stacked.dtype == jax.dtypes.float0 else jnp.asarray(stacked)


def _concrete(value: Any, aval: Any) -> Any:
    """A literal in the dtype it was recorded with; captured arrays as they are."""
    return value if isinstance(value, jax.Array) or not hasattr(aval, "shape") else np.asarray(value, aval.dtype)


def _not_entered(machine: Machine, jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[str]:
    for node in machine.prepared(jaxpr)[0].nodes:
        if node.name in _BODY or node.name in ("scan", "while", "cond"):
            for body in sub_jaxprs(node.params):
                yield from _not_entered(machine, body)
        elif any(map(_has_many, sub_jaxprs(node.params))):
            yield node.name


def _has_many(body: ClosedJaxpr | Jaxpr) -> bool:
    """Whether a program is more than the combining function of a reduction or of a scatter."""
    return any(getattr(aval, "shape", ()) for aval in flatten(body).avals)


def _last_reads(program: Program) -> list[list[int]]:
    """For each node the values that nothing reads afterwards."""
    alive, dying = set(program.outputs), []
    for node in reversed(program.nodes):
        reads = {*node.ins, *node.outs}
        dying.append(list(reads - alive))
        alive |= reads
    return dying[::-1]
