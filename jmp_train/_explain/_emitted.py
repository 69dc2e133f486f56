"""The program that autocast hands to the compiler, as a list of operations.

Decides which operations of it multiply, sum or cast. Does not decide whether that is right; see `_checks.py`.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from .._autocast.analysis.loops import accumulates
from .._autocast.emit import emit
from .._autocast.ir import TOP, Program
from .._autocast.primitives import TABLE, Rule
from .._jaxpr import LOOPS, ClosedJaxpr, Jaxpr, Node, flatten, loop_of, source_line, sub_jaxprs, trace
from ._operations import Visit, dtype_name, is_floating_dtype, visits, widest_dtype

_COMPARISONS = frozenset({"pmax", "pmin", "unreduced_pmax", "unreduced_pmin"})  # collectives that compare: no rounding
SUMS = frozenset(name for name, entry in TABLE.items() if entry.never_low and name not in _COMPARISONS)
COLLECTIVE_SUMS = frozenset(name for name in SUMS if TABLE[name].rule is Rule.COLLECTIVE)


@dataclasses.dataclass(frozen=True, slots=True)
class Emitted:
    """One operation of the emitted program.

    Attributes:
      primitive, source, scope, backward, times: as in `Operation`.
      operands: the dtypes of its operands, in order, `None` for an operand without a dtype.
      result: the dtype of its first result.
      sums_in: the dtype in which it accumulates, if it is a sum or a loop that carries one; else `None`.
    """

    primitive: str
    source: str
    scope: str
    operands: tuple[str | None, ...]
    result: str | None
    sums_in: str | None
    backward: bool
    times: int


def emitted_jaxpr(program: Program) -> ClosedJaxpr:
    """The jaxpr that a lowered program makes, of arguments as they were recorded."""
    avals = [program.recorded.avals[number] for number in program.inputs]
    return trace(lambda *args: emit(program, args), *avals)[0]


def emitted_of(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[Emitted]:
    """Describes every equation of a jaxpr, and of the programs inside it."""
    for visit in visits(jaxpr, TOP):
        node = visit.node
        operands = [getattr(aval, "dtype", None) for aval in visit.avals(node.ins)]
        results = [getattr(aval, "dtype", None) for aval in visit.avals(node.outs)]
        yield Emitted(
            primitive=node.name,
            source=source_line(node),
            scope=visit.place.scope_of(node),
            operands=tuple(map(dtype_name, operands)),
            result=dtype_name(results[0]) if results else None,
            sums_in=dtype_name(_sums_in(visit)),
            backward=visit.place.is_backward(node),
            times=visit.times,
        )


def _sums_in(visit: Visit) -> Any:
    """The narrowest floating dtype in which a node accumulates."""
    node = visit.node
    if node.name == "select_and_scatter_add":
        # Windows that do not overlap give each element to one of them: nothing is added up.
        windows = zip(node.params["window_dimensions"], node.params["window_strides"], strict=True)
        if all(window <= stride for window, stride in windows):
            return None
    if node.name in SUMS or _sums_by_hand(node):
        dtype = widest_dtype(visit.avals(node.ins))  # of a scatter-add the indices are operands too
        return dtype if is_floating_dtype(dtype) else None
    if node.name in LOOPS:
        return min(_carried_sums(visit), key=lambda dtype: dtype.itemsize, default=None)
    return None


def _sums_by_hand(node: Node) -> bool:
    """Whether a reduction was given a function that adds or multiplies."""
    if node.name not in ("reduce", "reduce_window", "select_and_scatter"):
        return False
    return any(inner.name in ("add", "mul") for body in sub_jaxprs(node.params) for inner in flatten(body).nodes)


def _carried_sums(visit: Visit) -> Iterator[Any]:
    """The floating dtypes of the sums that a loop carries."""
    loop: Any = loop_of(visit.node.eqn)
    body = flatten(loop.body)
    for position in range(loop.carry):
        start = body.inputs[loop.consts + position]
        dtype = getattr(body.avals[start], "dtype", None)
        if dtype is not None and is_floating_dtype(dtype) and accumulates(body, start, body.outputs[position]):
            yield dtype


def count_casts(found: Iterable[Visit]) -> int:
    """How many conversions between two floating dtypes are written down in a program."""
    return sum(is_cast(visit) for visit in found)


def is_cast(visit: Visit) -> bool:
    """Whether a node converts between two floating dtypes."""
    if visit.node.name != "convert_element_type":
        return False
    source, target = (visit.program.avals[number].dtype for number in (visit.node.ins[0], visit.node.outs[0]))
    return is_floating_dtype(source) and is_floating_dtype(target) and source != target
