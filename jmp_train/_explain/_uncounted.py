"""What the FLOP count of `explain` leaves out: products in programs that are not jaxprs, or of unknown size or number.

Decides which operations are listed as not counted. Does not decide what is counted; see `_operations.py` and
`_flops.py`.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from .._autocast.ir import TOP
from .._autocast.primitives import TABLE, UNKNOWN, Trait, having
from .._flops import ATTENTION, PRODUCTS, attention_flops
from .._jaxpr import Node
from .._sizes import is_static
from ._operations import Operation, Visit, bodies_of, shapes_of, visits

_OPAQUE_DOTS = having(Trait.OPAQUE_DOT)
_ONCE = {
    "while": "counted as one iteration",
    "custom_linear_solve": "each of its functions counted once",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Uncounted:
    """Operations of one kind that `flops` leaves out, or counts once though they may run more often.

    Attributes:
      primitive: its name.
      number: how many of them the program has.
      dtype: the widest dtype in which their operands are read; `None` for operations with a program inside.
      reason: why they are not counted.
      flops: their own estimate, loops multiplied out: the `cost_estimate` of a `pallas_call`, the products of cuDNN's
        attention. `None` if one of them has none.
    """

    primitive: str
    number: int
    dtype: str | None
    reason: str
    flops: int | None


def uncounted(found: Iterable[tuple[Operation, Visit]]) -> tuple[Uncounted, ...]:
    """What is left out of the count of these operations, those of one primitive, dtype and reason together."""
    kinds: dict[tuple[str, str | None, str], list[int | None]] = {}
    for op, visit in found:
        reason = _reason(visit)
        if reason is not None:
            estimate = _estimate(visit)  # `None` or 0 stay what they are
            kinds.setdefault((op.primitive, op.dtype, reason), []).append(estimate and estimate * visit.times)
    return tuple(
        Uncounted(name, len(flops), dtype, reason, None if None in flops else sum(filter(None, flops)))
        for (name, dtype, reason), flops in kinds.items()
    )


def _reason(visit: Visit) -> str | None:
    """Why the products of an operation are not counted; `None` if they are, or if it has none."""
    node = visit.node
    if node.name in PRODUCTS:
        return None if is_static(*shapes_of(visit)) else "symbolic dimensions"
    if node.name in _ONCE:
        return _ONCE[node.name] if _multiplies(node) else None
    if node.name == "scan":
        numbered = is_static((node.params["length"],))
        return None if numbered or not _multiplies(node) else "counted as one iteration: symbolic length"
    # An unknown primitive may multiply, too. One of integers alone has no FLOPs.
    if node.name in _OPAQUE_DOTS or node.name not in TABLE:
        return TABLE.get(node.name, UNKNOWN).reason if any(map(_is_inexact, _avals(visit))) else None
    return None


def _multiplies(node: Node) -> bool:
    """Whether the programs inside a node have products, or operations that may have products."""
    inner = (visit.node.name for body in bodies_of(node) for visit in visits(body, TOP))
    return any(name in PRODUCTS or name in _OPAQUE_DOTS or name not in TABLE for name in inner)


def _estimate(visit: Visit) -> int | None:
    """The FLOPs of an operation by its own account; `None` if it gives none."""
    node = visit.node
    if node.name == "pallas_call":
        return getattr(node.params.get("cost_estimate"), "flops", None)
    shapes = shapes_of(visit)
    return attention_flops(node.name, shapes, node.params) if node.name in ATTENTION and is_static(*shapes) else None


def _avals(visit: Visit) -> list[Any]:
    return visit.avals((*visit.node.ins, *visit.node.outs)) if visit.node.outs else []


def _is_inexact(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
