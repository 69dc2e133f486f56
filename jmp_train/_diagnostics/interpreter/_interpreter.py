"""Runs a traced program one equation at a time, on concrete values, and shows each equation to a watcher.

Decides the order of equations, which of them are entered, and what is accepted as an argument. Does not decide how one
equation runs (`_site.py`), how devices take turns (`_shard_map.py`), nor what is looked for (`_taint.py` in `overflow`,
`_exponent_histogram.py` in `formats`).

Every equation runs by itself, as outside `jit`: the numbers are those of the recorded program, without a compiler's
freedom to keep intermediate 16-bit results in 32 bits. Calls, loops, branches, rematerialized parts and functions with
derivative rules of their own are entered, and so is `shard_map`, in which every device's program runs by itself until
it meets the others in a collective. What cannot be entered (kernels, callbacks, linear solvers, nested `shard_map`s)
runs as recorded, as one equation. A value is dropped after its last use.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..._autocast.ir import TOP, Place
from ..._flops import PRODUCTS
from ..._jaxpr import ClosedJaxpr, FlatJaxpr, Jaxpr, Node, contexts, flatten, last_reads, scan_counts, sub_jaxprs, trace
from ..._paths import argument_leaves, leaf_paths
from ..._static import hide_static, reveal_static
from ..._values import check_readable
from ._shard_map import Coroutine, Request, assemble, can_enter, devices_of, run_devices, run_program, shards_of, stack
from ._site import Device, Loop, Site, Value, Watcher, widened

# The derivative rules of a call have been applied already, or are not needed: what runs here is not differentiated any
# more.
_ENTERED = frozenset("jit remat2 composite custom_jvp_call custom_vjp_call custom_vmap_call scan while cond".split())


class Interpreter:
    """A program ready to be run, more than once, each time with a watcher.

    Args:
      jaxpr: the program.
      wide: whether every 16-bit floating value is computed in float32 instead: the same program without the limits of
        16 bits. What cannot be entered still gets and returns what it was recorded with.
    """

    def __init__(self, jaxpr: ClosedJaxpr | Jaxpr, wide: bool = False):
        self.jaxpr, self.wide = jaxpr, wide
        self._prepared: dict[int, tuple[Any, FlatJaxpr, list[list[int]]]] = {}
        self._backward_only: dict[tuple[int, Place, frozenset[int]], BackwardOnly] = {}
        self._can_enter: dict[int, bool] = {}

    @property
    def program(self) -> FlatJaxpr:
        return self.prepared(self.jaxpr)[0]

    def prepared(self, jaxpr: ClosedJaxpr | Jaxpr) -> tuple[FlatJaxpr, list[list[int]]]:
        """The flattened program and, for each of its equations, the values that nothing uses afterwards."""
        if id(jaxpr) not in self._prepared:
            program = flatten(jaxpr)
            # The jaxpr is stored too: were it freed, another one could get its id.
            steps = [(node.ins, node.outs) for node in program.nodes]
            self._prepared[id(jaxpr)] = (jaxpr, program, last_reads(steps, program.outputs))
        return self._prepared[id(jaxpr)][1:]

    def backward_only(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place, outputs: frozenset[int]) -> "BackwardOnly":
        """What of the program only the backward pass uses, if only that uses these outputs."""
        key = (id(jaxpr), place, outputs)
        if key not in self._backward_only:
            self._backward_only[key] = find_backward_only(self.prepared(jaxpr)[0], place, outputs)
        return self._backward_only[key]

    def run(self, args: Sequence[Value], watcher: Watcher) -> list[Value]:
        """Returns the results for `args`, as many as the program's inputs."""
        run = _Run(self, watcher)
        return run_program(run.program(self.jaxpr, list(map(run.from_outside, args)), _Context()), run.execute)

    def widened(self, value: Value) -> Value:
        return value._replace(array=widened(value.array)) if self.wide else value

    def enters(self, node: Node) -> bool:
        """Whether an equation is entered: its body runs equation by equation."""
        if node.name != "shard_map":
            return node.name in _ENTERED
        if id(node) not in self._can_enter:
            self._can_enter[id(node)] = can_enter(node.eqn, _ENTERED.__contains__)
        return self._can_enter[id(node)]

    def not_entered(self) -> list[str]:
        """The primitives that hold programs but run as one equation."""
        return list(dict.fromkeys(_not_entered(self, self.jaxpr)))


class _Context(NamedTuple):
    """Where a program runs, which of its outputs only the backward pass uses, and on which device of a `shard_map`."""

    place: Place = TOP
    loops: tuple[Loop, ...] = ()
    around: tuple[Node, ...] = ()
    backward_outputs: frozenset[int] = frozenset()
    device: Device = ()

    def inside(self, node: Node, backward_outputs: frozenset[int]) -> "_Context":
        place, around = self.place.inside(node), (node, *self.around)
        return self._replace(place=place, around=around, backward_outputs=backward_outputs)

    def iteration(self, loop: Loop) -> "_Context":
        return self._replace(loops=(*self.loops, loop))


_NO_OUTPUTS: frozenset[int] = frozenset()
# One device's shard has another shape than the array, and an equation under the caller's mesh would reject it.
_NO_MESH = jax.sharding.AbstractMesh((), ())


class _Run:
    """One run of an interpreter. A program yields one equation after another, and is sent their results."""

    def __init__(self, interpreter: Interpreter, watcher: Watcher):
        self._interpreter, self._watcher = interpreter, watcher
        self._refs: dict[jax.Ref, jax.Ref] = {}  # copies of those from outside: only this run writes to them

    def from_outside(self, value: Value) -> Value:
        """An argument or a captured array as this run reads it."""
        ref = value.array
        if not isinstance(ref, jax.Ref):
            return self._interpreter.widened(value)
        if ref not in self._refs:
            self._refs[ref] = jax.new_ref(self._interpreter.widened(Value(ref[...])).array)
        return value._replace(array=self._refs[ref])

    def program(self, jaxpr: ClosedJaxpr | Jaxpr, args: Sequence[Value], where: _Context) -> Coroutine:
        program, last_uses = self._interpreter.prepared(jaxpr)
        values = dict(zip(program.inputs, args, strict=True))

        def read(number: int) -> Value:
            if number in values:
                return values[number]
            return self.from_outside(Value(_concrete(program.known[number], program.avals[number])))

        backward_only = self._interpreter.backward_only(jaxpr, where.place, where.backward_outputs)
        for position, (node, last_used) in enumerate(zip(program.nodes, last_uses, strict=True)):
            inside = where.inside(node, backward_only.results.get(position, _NO_OUTPUTS))
            site = Site(node, where.place, where.loops, where.around, position in backward_only.nodes, where.device)
            outputs = yield from self._node(site, [read(number) for number in node.ins], inside)
            values.update(zip(node.outs, outputs, strict=True))
            for number in last_used:
                values.pop(number, None)
        return [read(number) for number in program.outputs]

    def execute(self, sites: Sequence[Site], inputs: list[Value]) -> list[list[Value]]:
        """Runs an equation, shows it, and returns the results for each site: one, or all devices of a collective."""
        site, inputs = sites[0], self._watcher.before(sites[0], inputs)
        arrays = [value.array for value in inputs]
        mesh = jax.sharding.use_abstract_mesh(_NO_MESH) if site.device else contextlib.nullcontext()
        source, settings = contexts(site.node)
        with source, settings, mesh:
            outputs = site.bind_wide(arrays) if self._interpreter.wide else site.bind(arrays)
        rows = [[output[i] for output in outputs] for i in range(len(sites))] if site.collective_axes else [outputs]
        return [self._shown(each, inputs, row) for each, row in zip(sites, rows, strict=True)]

    def _shown(self, site: Site, inputs: Sequence[Value], outputs: Sequence[Any]) -> list[Value]:
        tags = self._watcher.watch(site, inputs, outputs)
        return [Value(output, tag) for output, tag in zip(outputs, tags, strict=True)]

    def _node(self, site: Site, inputs: list[Value], inside: _Context) -> Coroutine:
        node = site.node
        if not self._interpreter.enters(node):
            return (yield Request(site, inputs))
        if node.name == "scan":
            return (yield from self._scan(node, inputs, inside))
        if node.name == "while":
            return (yield from self._while(node, inputs, inside))
        if node.name == "shard_map":
            return self._shard_map(node, inputs, inside)
        if node.name == "cond":
            branches = node.params["branches"]
            chosen = min(max(int(inputs[0].array), 0), len(branches) - 1)  # lax.switch clamps its index too
            return (yield from self.program(branches[chosen], inputs[1:], inside))
        return (yield from self.program(next(sub_jaxprs(node.params)), inputs, inside))

    def _shard_map(self, node: Node, inputs: list[Value], inside: _Context) -> list[Value]:
        params, devices = node.params, devices_of(node.eqn)
        specs = zip(inputs, params["in_specs"], strict=True)
        columns = [[Value(x, value.tag) for x in shards_of(value.array, spec, devices)] for value, spec in specs]
        programs = {
            device: self.program(params["jaxpr"], list(args), inside._replace(device=device))
            for device, *args in zip(devices, *columns, strict=True)
        }
        results = zip(*run_devices(programs, self.execute, self._watcher.join), strict=True)
        avals = [var.aval for var in node.eqn.outvars]
        return [
            Value(assemble([piece.array for piece in pieces], spec, devices, aval), self._watcher.join(pieces))
            for pieces, spec, aval in zip(results, params["out_specs"], avals, strict=True)
        ]

    def _scan(self, node: Node, inputs: list[Value], inside: _Context) -> Coroutine:
        consts, carries = scan_counts(node.eqn)
        length, reverse = node.params["length"], node.params["reverse"]
        carry, xs = inputs[consts : consts + carries], inputs[consts + carries :]
        # The next iteration uses a carry.
        inside = inside._replace(backward_outputs=inside.backward_outputs - set(range(carries)))
        rows: list[list[Value]] = []
        for i in reversed(range(length)) if reverse else range(length):
            row = [Value(_row(x.array, np.int32(i)), x.tag) for x in xs]
            at = inside.iteration(Loop("scan", i, length))
            outs = yield from self.program(node.params["jaxpr"], [*inputs[:consts], *carry, *row], at)
            carry = outs[:carries]
            rows.append(outs[carries:])
        avals: list[Any] = [var.aval for var in node.eqn.outvars[carries:]]
        if not rows:
            empty = [jnp.zeros(aval.shape, aval.dtype) for aval in avals]
            return [*carry, *map(Value, empty)]
        columns = zip(avals, *(reversed(rows) if reverse else rows), strict=True)
        return [*carry, *(Value(stack([v.array for v in c], aval), self._watcher.join(c)) for aval, *c in columns)]

    def _while(self, node: Node, inputs: list[Value], inside: _Context) -> Coroutine:
        params, skip = node.params, node.params["cond_nconsts"]
        consts = skip + params["body_nconsts"]
        # Reverse-mode differentiation does not pass a `while`: none of its results is a residual.
        carry, i, inside = inputs[consts:], 0, inside._replace(backward_outputs=_NO_OUTPUTS)
        while True:
            at = inside.iteration(Loop("while", i, None))
            (more,) = yield from self.program(params["cond_jaxpr"], [*inputs[:skip], *carry], at)
            if not np.any(more.array):
                return carry
            new = yield from self.program(params["body_jaxpr"], [*inputs[skip:consts], *carry], at)
            carry = [_carry_where(more.array, *pair) for pair in zip(new, carry, strict=True)]
            i += 1


# A traced index, since every constant one would be compiled for itself.
_row = jax.jit(lambda x, i: lax.dynamic_index_in_dim(x, i, keepdims=False))


def _carry_where(more: Any, new: Value, old: Value) -> Value:
    """The new carry; under `vmap` the condition has a value for each example, and finished examples keep theirs."""
    if np.all(more):
        return new
    more = np.asarray(more).reshape(np.shape(more) + (1,) * (np.ndim(new.array) - np.ndim(more)))
    return new._replace(array=jnp.where(more, new.array, old.array))


def _concrete(value: Any, aval: Any) -> Any:
    """A literal in the dtype it was recorded with; captured arrays as they are."""
    is_array = isinstance(value, jax.Array | jax.Ref)
    return value if is_array or not hasattr(aval, "shape") else np.asarray(value, aval.dtype)


def _not_entered(interpreter: Interpreter, jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[str]:
    for node in interpreter.prepared(jaxpr)[0].nodes:
        if interpreter.enters(node):
            for body in sub_jaxprs(node.params):
                yield from _not_entered(interpreter, body)
        elif any(map(_computes_arrays, sub_jaxprs(node.params))):
            yield node.name


def _computes_arrays(body: ClosedJaxpr | Jaxpr) -> bool:
    """Whether a program is more than the combining function of a reduction or of a scatter."""
    return any(getattr(aval, "shape", ()) for aval in flatten(body).avals)


class BackwardOnly(NamedTuple):
    """What of a program only the backward pass uses.

    JAX computes the factor 1 / (2 sqrt(x)) of a root's derivative in the forward pass and saves it as a residual; by
    its name stack it is an ordinary forward equation, and only who uses it tells the difference.

    Attributes:
      nodes: positions of the forward equations of which nothing else uses any result.
      results: by position of an equation, the positions of its results that nothing else uses.
    """

    nodes: frozenset[int]
    results: dict[int, frozenset[int]]


def find_backward_only(program: FlatJaxpr, place: Place, backward_outputs: frozenset[int]) -> BackwardOnly:
    """Walks backwards through a program of which some outputs, by position, are only used by the backward pass."""
    outputs = list(enumerate(program.outputs))
    forward_uses = {number for position, number in outputs if position not in backward_outputs}
    backward_uses = {number for position, number in outputs if position in backward_outputs}
    nodes: set[int] = set()
    results: dict[int, frozenset[int]] = {}
    for position, node in reversed(list(enumerate(program.nodes))):
        if place.is_backward(node):
            # What a product reads is an activation, though nothing else may: autocast drops a loss that nobody reads.
            (forward_uses if node.name in PRODUCTS else backward_uses).update(node.ins)
            continue
        only = frozenset(i for i, n in enumerate(node.outs) if n in backward_uses and n not in forward_uses)
        if only:
            results[position] = only
        if only and forward_uses.isdisjoint(node.outs):
            nodes.add(position)
            backward_uses.update(node.ins)
        else:
            forward_uses.update(node.ins)
    return BackwardOnly(frozenset(nodes), results)


class Call(NamedTuple):
    """A traced call, to be run equation by equation: the program, its arguments, the paths of arguments and results."""

    interpreter: Interpreter
    args: list[Value]
    in_paths: list[str]
    out_paths: list[str]


def traced_call(caller: str, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Call:
    """Traces `fn` on concrete arguments, those that are no arrays left as they are; errors name the `caller`."""
    hidden = hide_static((args, kwargs))
    check_concrete(caller, *hidden)

    @functools.wraps(fn)
    def program(*args: Any, **kwargs: Any) -> Any:
        return hide_static(fn(*reveal_static(args), **reveal_static(kwargs)))

    jaxpr, shape = trace(program, *hidden[0], **hidden[1])
    leaves = argument_leaves(*hidden)
    arrays = [jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf for _, leaf in leaves]
    return Call(Interpreter(jaxpr), list(map(Value, arrays)), [path for path, _ in leaves], leaf_paths(shape))


def check_concrete(caller: str, args: tuple, kwargs: dict) -> None:
    """Raises where an argument has no numbers to compute with: it is traced, a shape only, or was donated."""
    for path, leaf in argument_leaves(args, kwargs):
        check_readable(caller, f"the argument '{path}'", leaf)
        if isinstance(leaf, Tracer):
            raise TypeError(f"the argument '{path}' is traced: {caller} needs numbers; call it outside jit, on arrays.")
