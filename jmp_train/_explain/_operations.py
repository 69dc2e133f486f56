"""The plan as a list: one `Operation` for each equation, those inside loops, branches and calls included.

Decides how a planned equation is described. Does not decide anything about it; see `_autocast`.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._autocast.ir import Equation, Place, Precision, Program, dtype_of, is_float32
from .._autocast.primitives import TABLE, WITH_PROGRAMS, Rule
from .._dtypes import FLOAT32
from .._flops import PRODUCTS, product_flops
from .._jaxpr import ClosedJaxpr, FlatJaxpr, Jaxpr, Node, flatten, source_line, sub_jaxprs
from .._sizes import is_static

REQUESTED = ("full_precision region", "with_scopes: float32")
"""Reasons for which an operation runs as recorded because the user said so."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """What happens to one operation of the program.

    Attributes:
      primitive: its name, as `jax.make_jaxpr` prints it.
      source: `file:line:column (function)` of the code that recorded it.
      scope: its `jax.named_scope` path, that of the loops and calls around it included.
      rule: the rule that holds for it, a `Rule`'s value; `"enter"` for an operation with a program inside.
      recorded: the widest floating dtype among its operands (its results, if it has none) as it was traced, or another
        dtype where no operand is floating; `None` if none has a dtype.
      dtype: the widest dtype in which its operands are read under the plan; `None` for an operation with a program
        inside.
      result: the dtype of its first result.
      reason: why it runs in that dtype.
      backward: whether it belongs to a backward pass.
      times: how often it runs: the lengths of the scans around it and the devices of a `shard_map`, multiplied. A
        `while`, and a scan of symbolic length, counts as one iteration, a branch as taken.
      flops: of one run, for dots and convolutions whose dimensions are numbers; else 0.
      holds_program: whether it is a loop, a branch or a call, whose operations are listed after it.
      unread: whether it does not run where it stands: its readers across a dot rematerialize it, which fuses with them,
        so that its float32 result need not be saved; or nothing reads it.
    """

    primitive: str
    source: str
    scope: str
    rule: str
    recorded: str | None
    dtype: str | None
    result: str | None
    reason: str
    backward: bool
    times: int
    flops: int
    holds_program: bool
    unread: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Visit:
    """A node, the program it is in, where that stands, and how often it runs."""

    program: FlatJaxpr
    node: Node
    place: Place
    times: int

    def avals(self, numbers: Sequence[int]) -> list[Any]:
        return [self.program.avals[number] for number in numbers]


def visits(jaxpr: ClosedJaxpr | Jaxpr, place: Place, times: int = 1) -> Iterator[Visit]:
    """Every node of a program and of the programs inside it, in order."""
    program = flatten(jaxpr)
    for node in program.nodes:
        yield Visit(program, node, place, times)
        for body in bodies_of(node):
            yield from visits(body, place.inside(node), times * repeats(node))


def bodies_of(node: Node) -> list[ClosedJaxpr | Jaxpr]:
    """The programs inside a node that are written in the language of the one around it."""
    return list(sub_jaxprs(node.params)) if node.name in WITH_PROGRAMS else []


def repeats(node: Node) -> int:
    """How often a node runs the programs inside it; 1 where that is not known."""
    if node.name == "scan":
        return node.params["length"] if is_static((node.params["length"],)) else 1
    if node.name == "shard_map":  # once on each device of the axes that it takes over from the compiler
        return math.prod(node.params["mesh"].shape[axis] for axis in node.params["newly_manual_axes"])
    return 1


def is_floating_dtype(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def widest_dtype(avals: Sequence[Any]) -> np.dtype | None:
    """The widest floating dtype of some values, or else the first of their dtypes."""
    dtypes = [aval.dtype for aval in avals if getattr(aval, "dtype", None) is not None]
    floating = [dtype for dtype in dtypes if is_floating_dtype(dtype)]
    return max(floating, key=lambda dtype: dtype.itemsize) if floating else next(iter(dtypes), None)


def dtype_name(dtype: Any) -> str | None:
    if dtype == jax.dtypes.float0:
        return "float0"  # NumPy calls it void
    return None if dtype is None else getattr(dtype, "name", str(dtype))


def shapes_of(visit: Visit) -> list[Any]:
    """The shapes of a node's operands and of its results."""
    return [getattr(aval, "shape", ()) for aval in visit.avals((*visit.node.ins, *visit.node.outs))]


def flops_of(visit: Visit) -> int:
    """The FLOPs of a dot or convolution; 0 of anything else, and of symbolic shapes."""
    node, shapes = visit.node, shapes_of(visit)
    if node.name not in PRODUCTS or not is_static(*shapes):
        return 0
    return product_flops(node.name, shapes[: len(node.ins)], shapes[len(node.ins)], node.params)


def operations_of(program: Program, times: int = 1) -> Iterator[tuple[Operation, Visit]]:
    """Describes every equation of a planned program, and of the programs inside it."""
    for equation in program.equations:
        node = equation.node
        visit = Visit(program.recorded, node, program.place, times)
        yield _planned(program, equation, visit), visit
        inside, more = program.place.inside(node), times * repeats(node)
        for body in equation.bodies:
            yield from operations_of(body, more)
        # What runs as recorded was not planned inside, and is listed from its jaxpr.
        if not equation.bodies:
            reason = equation.entry.reason if equation.entry.reason in REQUESTED else f"inside {node.name}, as recorded"
            for body in bodies_of(node):
                for inner in visits(body, inside, more):
                    yield _describe(inner, Rule.RECORDED, _recorded(inner), _result(inner), reason), inner


def _recorded(visit: Visit) -> Any:
    return widest_dtype(visit.avals(visit.node.ins) or visit.avals(visit.node.outs))


def _result(visit: Visit) -> Any:
    return getattr(visit.program.avals[visit.node.outs[0]], "dtype", None) if visit.node.outs else None


def _planned(program: Program, equation: Equation, visit: Visit) -> Operation:
    node = equation.node
    read = [dtype for dtype in equation.reads if dtype is not None]  # `None`: as it is
    dtype = max(read, key=lambda dtype: dtype.itemsize) if read else _recorded(visit)
    result = _result(visit)
    if node.outs and is_float32(program.recorded.avals[node.outs[0]]):
        result = dtype_of(program.precision(node.outs[0]), program.low)
    # Of an operation recorded in 16 bits that runs in float32, such as a sum of hand-cast code, the rule is the reason.
    wide = dtype == FLOAT32 and any(map(is_float32, visit.avals((*node.ins, *node.outs))))
    follows = wide and equation.entry.rule in _FOLLOWING
    reason = _why_wide(program, equation) if follows else equation.entry.reason
    return dataclasses.replace(_describe(visit, equation.entry.rule, dtype, result, reason), unread=equation.dead)


def _describe(visit: Visit, rule: Rule, dtype: Any, result: Any, reason: str) -> Operation:
    node = visit.node
    return Operation(
        primitive=node.name,
        source=source_line(node),
        scope=visit.place.scope_of(node),
        rule=rule.value,
        recorded=dtype_name(_recorded(visit)),
        dtype=None if bodies_of(node) else dtype_name(dtype),
        result=None if bodies_of(node) else dtype_name(result),
        reason=reason,
        backward=visit.place.is_backward(node),
        times=visit.times,
        flops=flops_of(visit),
        holds_program=bool(bodies_of(node)),
    )


_FOLLOWING = (Rule.FOLLOW, Rule.SHAPE, Rule.WIDEST)


def _why_wide(program: Program, equation: Equation) -> str:
    """What keeps an equation in float32 that could have followed a narrow operand."""
    precisions = [program.precision(use.value) for use in equation.uses]
    saved = program.residuals.saved  # in the compute dtype: a reader across a dot finds no float32 there
    wide = [
        use.value
        for use, precision in zip(equation.uses, precisions, strict=True)
        if precision is Precision.FULL and not (use.residual and use.value in saved)
    ]
    if wide:
        return f"float32, for {_origin(program, wide[0])}"
    if Precision.LOW in precisions:
        # An entry that was decided for this equation alone is not the table's.
        decided = equation.entry.reason != TABLE.get(equation.node.name, equation.entry).reason
        return equation.entry.reason if decided else "float32, for only float32 operations read it"
    return "float32, until a narrow value meets it"


def _origin(program: Program, number: int) -> str:
    """Why a value is float32 data, in words."""
    if (producer := program.recorded.producers.get(number)) is not None:
        return f"{producer.name} leaves its operand in float32"
    if number in program.captured:
        return "a captured array is data"
    if number in program.constants:
        return f"{program.low.name} cannot hold its literal"
    return "an argument is data, or float32 where this program begins"
