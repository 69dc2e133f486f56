"""Runs a traced program one operation at a time, on concrete values, and shows each operation to a watcher.

Decides the order of operations, and which of them are taken apart. Does not decide what is looked for; see `_taint.py`
and `_backward_histogram.py`.

Every operation runs by itself, as outside `jit`: the numbers are those of the recorded program, without a compiler's
freedom to keep intermediate 16-bit results in 32 bits. Calls, loops, branches, rematerialised parts and functions with
derivative rules of their own are entered, and so is `shard_map`, in which every device's program runs by itself until
it meets the others in a collective. What cannot be entered (kernels, callbacks, linear solvers, nested `shard_map`s)
runs as recorded, as one operation. A value is dropped after its last reader.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._autocast._flow import TOP, Place
from ..._jaxpr import ClosedJaxpr, Jaxpr, Node, Program, context, flatten, scan_counts, sub_jaxprs
from ._derivatives import Kept, kept_for_backward
from ._lanes import Request, Steps, finished, together
from ._shard_map import Device, can_enter, devices_of, shards, stack, whole
from ._site import Loop, Site, Value, Watcher
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
_ENTERED = frozenset({*_BODY, "scan", "while", "cond"})


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
        self._can_enter: dict[int, bool] = {}

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
        run = _Run(self, watcher)
        return finished(run.program(self.jaxpr, [self.widened(arg) for arg in args], _Where()), run.execute)

    def widened(self, value: Value) -> Value:
        return value._replace(array=widened(value.array)) if self.wide else value

    def enters(self, node: Node) -> bool:
        """Whether an operation is taken apart."""
        if node.name != "shard_map":
            return node.name in _ENTERED
        if id(node) not in self._can_enter:
            self._can_enter[id(node)] = can_enter(node.eqn, _ENTERED.__contains__)
        return self._can_enter[id(node)]

    def not_entered(self) -> list[str]:
        """The primitives that hold programs but run as one operation."""
        return list(dict.fromkeys(_not_entered(self, self.jaxpr)))


class _Where(NamedTuple):
    """Where a program runs, which of its outputs only the backward pass reads, and on which device of a `shard_map`."""

    place: Place = TOP
    loops: tuple[Loop, ...] = ()
    around: tuple[Node, ...] = ()
    kept: frozenset[int] = frozenset()
    device: Device = ()

    def inside(self, node: Node, kept: frozenset[int]) -> _Where:
        return self._replace(place=self.place.inside(node), around=(node, *self.around), kept=kept)

    def iteration(self, *loop: Any) -> _Where:
        return self._replace(loops=(*self.loops, Loop(*loop)))


_NONE: frozenset[int] = frozenset()
_NO_MESH = jax.sharding.AbstractMesh((), ())


class _Run:
    """One run of a machine. A program hands out one operation after another, and is handed their results."""

    def __init__(self, machine: Machine, watcher: Watcher):
        self._machine, self._watcher = machine, watcher

    def program(self, jaxpr: ClosedJaxpr | Jaxpr, args: Sequence[Value], where: _Where) -> Steps:
        program, dying = self._machine.prepared(jaxpr)
        values = dict(zip(program.inputs, args, strict=True))

        def read(number: int) -> Value:
            if number in values:
                return values[number]
            return self._machine.widened(Value(_concrete(program.known[number], program.avals[number])))

        kept = self._machine.kept(jaxpr, where.place, where.kept)
        for position, (node, dead) in enumerate(zip(program.nodes, dying, strict=True)):
            inside = where.inside(node, kept.results.get(position, _NONE))
            site = Site(node, where.place, where.loops, where.around, position in kept.nodes, where.device)
            outputs = yield from self._node(site, [read(number) for number in node.ins], inside)
            values.update(zip(node.outs, outputs, strict=True))
            for number in dead:
                values.pop(number, None)
        return [read(number) for number in program.outputs]

    def execute(self, sites: Sequence[Site], inputs: list[Value]) -> list[list[Value]]:
        """Runs an operation, shows it, and returns the results for each site: one, or all devices of a collective."""
        site, inputs = sites[0], self._watcher.before(sites[0], inputs)
        arrays = [value.array for value in inputs]
        mesh = jax.sharding.use_abstract_mesh(_NO_MESH) if site.device else contextlib.nullcontext()
        with context(site.node), mesh:
            outputs = bind_wide(site, arrays) if self._machine.wide else site.bind(arrays)
        rows = [[output[i] for output in outputs] for i in range(len(sites))] if site.crosses else [outputs]
        return [self._shown(each, inputs, row) for each, row in zip(sites, rows, strict=True)]

    def _shown(self, site: Site, inputs: Sequence[Value], outputs: Sequence[Any]) -> list[Value]:
        tags = self._watcher.watch(site, inputs, outputs)
        return [Value(output, tag) for output, tag in zip(outputs, tags, strict=True)]

    def _node(self, site: Site, inputs: list[Value], inside: _Where) -> Steps:
        node = site.node
        if not self._machine.enters(node):
            return (yield Request(site, inputs))
        if node.name == "scan":
            return (yield from self._scan(node, inputs, inside))
        if node.name == "while":
            return (yield from self._while(node, inputs, inside))
        if node.name == "shard_map":
            return self._shard_map(node, inputs, inside)
        if node.name == "cond":
            branches = node.params["branches"]
            chosen = min(max(int(inputs[0].array), 0), len(branches) - 1)
            return (yield from self.program(branches[chosen], inputs[1:], inside))
        return (yield from self.program(node.params[_BODY[node.name]], inputs, inside))

    def _shard_map(self, node: Node, inputs: list[Value], inside: _Where) -> list[Value]:
        params, devices = node.params, devices_of(node.eqn)
        specs = zip(inputs, params["in_specs"], strict=True)
        columns = [[Value(x, value.tag) for x in shards(value.array, spec, devices)] for value, spec in specs]
        programs = {
            device: self.program(params["jaxpr"], list(args), inside._replace(device=device))
            for device, *args in zip(devices, *columns, strict=True)
        }
        results = zip(*together(programs, self.execute, self._watcher.join), strict=True)
        return [
            Value(whole([piece.array for piece in pieces], spec, devices), self._watcher.join(pieces))
            for pieces, spec in zip(results, params["out_specs"], strict=True)
        ]

    def _scan(self, node: Node, inputs: list[Value], inside: _Where) -> Steps:
        consts, count = scan_counts(node.eqn)
        length, reverse = node.params["length"], node.params["reverse"]
        carry, xs = inputs[consts : consts + count], inputs[consts + count :]
        inside = inside._replace(kept=inside.kept - set(range(count)))  # the next iteration reads the carry
        rows: list[list[Value]] = []
        for i in reversed(range(length)) if reverse else range(length):
            row = [Value(_row(x.array, np.int32(i)), x.tag) for x in xs]
            at = inside.iteration("scan", i, length)
            outs = yield from self.program(node.params["jaxpr"], [*inputs[:consts], *carry, *row], at)
            carry = outs[:count]
            rows.append(outs[count:])
        if not rows:
            avals: list[Any] = [var.aval for var in node.eqn.outvars[count:]]
            empty = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
            return [*carry, *map(Value, empty)]
        columns = zip(*(reversed(rows) if reverse else rows), strict=True)
        return [*carry, *(Value(stack([v.array for v in col]), self._watcher.join(col)) for col in columns)]

    def _while(self, node: Node, inputs: list[Value], inside: _Where) -> Steps:
        params, skip = node.params, node.params["cond_nconsts"]
        consts = skip + params["body_nconsts"]
        carry, i, inside = inputs[consts:], 0, inside._replace(kept=_NONE)
        while True:
            at = inside.iteration("while", i, None)
            (more,) = yield from self.program(params["cond_jaxpr"], [*inputs[:skip], *carry], at)
            if not np.any(more.array):
                return carry
            new = yield from self.program(params["body_jaxpr"], [*inputs[skip:consts], *carry], at)
            carry = [_kept(more.array, *pair) for pair in zip(new, carry, strict=True)]
            i += 1


_row = jax.jit(lambda x, i: lax.dynamic_index_in_dim(x, i, keepdims=False))


def _kept(more: Any, new: Value, old: Value) -> Value:
    """The new carry; under `vmap` the condition has a value for each example, and those that are done stay."""
    if np.all(more):
        return new
    more = np.asarray(more).reshape(np.shape(more) + (1,) * (np.ndim(new.array) - np.ndim(more)))
    return new._replace(array=jnp.where(more, new.array, old.array))


def _concrete(value: Any, aval: Any) -> Any:
    """A literal in the dtype it was recorded with; captured arrays as they are."""
    return value if isinstance(value, jax.Array) or not hasattr(aval, "shape") else np.asarray(value, aval.dtype)


def _not_entered(machine: Machine, jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[str]:
    for node in machine.prepared(jaxpr)[0].nodes:
        if machine.enters(node):
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
