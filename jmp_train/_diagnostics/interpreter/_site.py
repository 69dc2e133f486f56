"""What a watcher is told of an operation as it runs: what it is, where it stands, what it read and made.

Decides the terms in which running operations are described. Does not decide the order they run in; see
`_interpreter.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ..._autocast._flow import Place
from ..._jaxpr import Node, bind
from ._shard_map import Device, bind_across, crossed


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
      device: which device of a `shard_map` runs it: `(axis, position)` for each axis of its mesh; empty outside.
    """

    node: Node
    place: Place
    loops: tuple[Loop, ...]
    around: tuple[Node, ...]
    derivative: bool
    device: Device = ()

    @property
    def primitive(self) -> str:
        return self.node.name

    @property
    def scope(self) -> str:
        return self.place.scope_of(self.node)

    @property
    def backward(self) -> bool:
        return self.place.is_backward(self.node)

    @property
    def crosses(self) -> tuple[str, ...]:
        """The mesh axes that a collective runs along; its operands are those of all devices there, stacked."""
        return crossed(self.node.eqn, [axis for axis, _ in self.device])

    def bind(self, arrays: Sequence[Any], **changed: Any) -> list[Any]:
        """Runs the operation on `arrays`, some of its parameters changed; of a collective the results are stacked."""
        if self.device:  # the shards are on no mesh
            params = self.node.params.items()
            changed |= {key: None for key, value in params if isinstance(value, jax.sharding.Sharding)}
        if self.crosses:
            return bind_across(self.node.eqn, self.crosses, arrays, **changed)
        return bind(self.node.eqn, arrays, **changed)


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
        """What to remember of an array that was put together: a loop's rows, the shards of several devices."""
        del pieces
