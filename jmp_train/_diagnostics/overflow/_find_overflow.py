"""`find_overflow`: which equation made a call's results infinite or NaN, and what to do about it.

Decides which of the equations that made non-finite values is to blame, the first whose value reached a result, and how
it and its operands are described. Does not decide how values are followed (`_taint.py`), what cures it (`_verdict.py`),
nor which line is the user's (`_source_lines.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._text import as_lists, count
from ..._values import check_callable
from ..interpreter import Call, Interpreter, Loop, Value, Watcher, is_narrow, to_host, traced_call
from ._source_lines import between_user_and_jax, user_line
from ._taint import UNTAINTED, Taint, TaintTracker, argument_tag, has_nonfinite
from ._verdict import Captured, Verdict, capture, diagnose


@dataclasses.dataclass(frozen=True, slots=True)
class ArrayRange:
    """The values of an operand or a result.

    Attributes:
      shape, dtype: of the array.
      min, max, abs_max: of its finite elements (of complex ones the real parts, and the modulus); `None` without any.
      infs, nans: how many elements are infinite, and NaN.
      zeros: how many are zero.
    """

    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    abs_max: float | None
    infs: int
    nans: int
    zeros: int

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}"
        if self.min is not None:
            text += f" {self.min:.4g}" if self.min == self.max else f" from {self.min:.4g} to {self.max:.4g}"
        counts = {"infinite": self.infs, "NaN": self.nans, "zero": self.zeros}
        return ", ".join([text, *(f"{number} {name}" for name, number in counts.items() if number)])


@dataclasses.dataclass(frozen=True)
class Found:
    """What `find_overflow` found: a value to read, to test and to print. False if nothing was to blame.

    Attributes:
      operations: how many operations ran.
      not_entered: primitives that hold programs but ran as one operation.
      primitive: the name of the one to blame, `None` if nothing was. Then all that follows is `None` or empty, but for
        `reached` and the line of a NaN or infinity of these results that is written in the program.
      written: `"NaN"` or `"infinity"` in that case.
      file, line, function, text: the user's own line that recorded it, or that writes such a number.
      through: what stands between that line and the operation: the library's own `file:line (function)`, or a rule.
      scope: its `jax.named_scope` path.
      backward: whether it belongs to a backward pass, or computes a derivative that only the backward pass reads.
      loops: the iterations of the loops around it, outermost first: `(primitive, iteration from 0, length or None)`.
      device: inside `shard_map` and `pmap`, the device that it ran on: `(axis, position)` for each axis of the mesh.
      operands, results: what it read and made; of a collective the operands of all devices along a new first axis.
      verdict: a `Verdict`.
      why, cure: the reason for it, and the line to paste.
      loss_scale: the loss scale of the call, if it had one above 1.
      fitting_loss_scale: the largest power of two under which the call is finite, for `Verdict.LOWER_SCALE`.
      reached: paths of the results that became non-finite; if nothing was to blame, of those.
    """

    operations: int
    not_entered: tuple[str, ...] = ()
    primitive: str | None = None
    written: str | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = None
    text: str = ""
    through: str | None = None
    scope: str = ""
    backward: bool = False
    loops: tuple[Loop, ...] = ()
    device: tuple[tuple[str, int], ...] = ()
    operands: tuple[ArrayRange, ...] = ()
    results: tuple[ArrayRange, ...] = ()
    verdict: Verdict | None = None
    why: str = ""
    cure: str = ""
    loss_scale: float | None = None
    fitting_loss_scale: float | None = None
    reached: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.primitive is not None

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as dictionaries, lists, strings and numbers, none of them infinite."""
        values = dataclasses.asdict(self)
        values["device"] = {str(axis): position for axis, position in self.device}
        values["loops"] = [loop._asdict() for loop in self.loops]
        values["verdict"] = None if self.verdict is None else str(self.verdict)
        return as_lists(values)

    def __str__(self) -> str:
        not_entered = [f"Not looked into: {', '.join(self.not_entered)}"] if self.not_entered else []
        if not self:
            lines = [f"No operation of {self.operations} is to blame for an infinity or NaN."]
            if self.reached:
                at = f", at {self.file}:{self.line} ({self.function})" if self.file else ""
                lines.append(f"The {self.written} of {', '.join(self.reached)} is written in the program{at}.")
                lines += [f"          {self.text}"] if self.text else []
            return "\n".join([*lines, *not_entered])
        infs, nans = sum(x.infs for x in self.results), sum(x.nans for x in self.results)
        lines = [
            f"{self.primitive} made {count(infs, 'infinity', 'infinities')} and {nans} NaN",
            f"  at      {self.file}:{self.line} ({self.function})" if self.file else "  at      no line of a file",
            *([f"          {self.text}"] if self.text else []),
            *([f"  through {self.through}"] if self.through else []),
            f"  in      {self._place()}",
            *(f"  operand {operand}" for operand in self.operands),
            *(f"  result  {result}" for result in self.results),
            f"  reached {', '.join(self.reached[:4])}{', ...' if len(self.reached) > 4 else ''}",
            f"Verdict: {_TITLES[self.verdict]}. {self.why}" if self.verdict else "",
            f"Cure: {self.cure}",
        ]
        return "\n".join([*lines, *not_entered])

    def _place(self) -> str:
        parts = ["the backward pass" if self.backward else "the forward pass", self.scope]
        parts += [f"device {position} of {axis}" for axis, position in self.device]
        for loop in self.loops:
            of = "" if loop.length is None else f" of {loop.length}"
            parts.append(f"{loop.primitive} iteration {loop.iteration}{of}")
        return ", ".join(filter(None, parts))


_TITLES = {
    Verdict.LOWER_SCALE: "lower the loss scale",
    Verdict.KEEP_FLOAT32: "keep this operation in float32",
    Verdict.MODEL: "a fault of the model",
    Verdict.INPUT: "a fault of the data",
    Verdict.UNKNOWN: "unknown",
}


def find_overflow(fn: Callable[..., Any]) -> Callable[..., Found]:
    """Returns a function that runs `fn` operation by operation and tells which one first made a non-finite value.

    It is for the call that failed: the same arguments, and as `fn` the loss, its gradient, what
    `jmp_train.value_and_grad` returned, or the whole training step. Of all operations whose finite operands gave an
    infinity or NaN, it names the first that reached a result (or, in a step that skips, the check of the gradients).
    What is masked away is not to blame, nor is an infinity that was written into the program or given to it, unless it
    turned into NaN. If nothing else is, the report tells the line that wrote it.

    Operations run one by one, without a compiler's freedom to keep intermediate 16-bit results in 32 bits: thousands
    take seconds, most of it to compile each kind once. Inside `shard_map` and `pmap` they run for one device after
    another, and the report says for which it failed. Kernels and solvers run as one operation each, and so does a
    `shard_map` inside another; the report lists them (`not_entered`).

    Args:
      fn: any function of arrays, jitted or not.

    Returns:
      A function of `fn`'s arguments that returns a `Found`.

    Raises:
      TypeError: `fn` is not callable, or it is called inside `jit`.
      ValueError: an argument was donated to an earlier call.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w):
    ...     return jnp.sum(jnp.log(w))
    >>> found = find_overflow(jax.grad(loss))(jnp.array([1.0, 0.0]))
    >>> found.primitive, found.backward, found.text, found.verdict
    ('div', True, 'return jnp.sum(jnp.log(w))', <Verdict.MODEL: 'model'>)
    """
    check_callable("fn", fn, "pass the function whose call gave infinities or NaN")

    def find(*args: Any, **kwargs: Any) -> Found:
        call = traced_call("find_overflow", fn, args, kwargs)
        call = call._replace(args=[Value(x, argument_tag(i, x)) for i, (x, _) in enumerate(call.args)])
        tracker, blamed, written = _run(call)
        return _report_written(call, tracker, written) if blamed is None else _report_blamed(call, tracker, blamed)

    return find


class _Blamed(NamedTuple):
    """What is to blame.

    Attributes:
      number: of the equation.
      given: the arguments and captured arrays that are to blame instead, by their positions in `TaintTracker.given`.
      reached: the paths of the results that became non-finite by it.
    """

    number: int
    given: frozenset[int]
    reached: tuple[str, ...]


class _Written(NamedTuple):
    """Non-finite numbers that are written in the program.

    Attributes:
      what: `"NaN"` or `"infinity"`.
      paths: of the results that hold one.
      number: of the first equation that reads one, `None` if none does.
    """

    what: str
    paths: tuple[str, ...]
    number: int | None


def _run(call: Call, scale: float | None = None) -> tuple[TaintTracker, _Blamed | None, _Written | None]:
    """Runs the call, with another loss scale if one is given; what is to blame, and what the program writes itself."""
    tracker = TaintTracker([value.array for value in call.args], scale)
    results = call.interpreter.run(call.args, tracker)
    program = call.interpreter.program
    tainted: list[tuple[str, Taint]] = []
    kept: list[tuple[str, Taint]] = []
    nans, infinities = list[tuple[str, Taint]](), list[tuple[str, Taint]]()
    for path, number, value in zip(call.out_paths, program.outputs, results, strict=True):
        # A number that is written in the program and returned as it is has no tag: no operation read it.
        if value.tag is not None:
            is_nonfinite, taint = value.tag.nonfinite, value.tag.taint
        else:
            is_written = number in program.known and number not in program.captured
            is_nonfinite, taint = is_written and has_nonfinite(program.known_array(number)), UNTAINTED
        if not is_nonfinite or number in program.inputs:
            continue
        found, result = (path or "the result", taint), to_host(value.array)
        given = [to_host(tracker.given[i]) for i in taint.given]
        if not any(np.array_equal(result, array) for array in given):
            (kept if any(_keeps_nonfinite(result, array) for array in given) else tainted).append(found)
        if not given:
            (nans if np.any(np.isnan(result)) else infinities).append(found)
    # A step that skips returns finite values only: the non-finite gradients end in the loss scale's check. What stays
    # where an argument had it comes last: it may be a state's, as an infinity is the lowest loss so far at first.
    checks = [("the check of the gradients", taint) for _, taint in tracker.checks]
    blamed = next(filter(None, (_blame(tracker, found) for found in (tainted, checks, kept))), None)
    written = [("NaN", nans), ("infinity", infinities)]
    return tracker, blamed, next((_written(what, found) for what, found in written if found), None)


def _blame(tracker: TaintTracker, tainted: Sequence[tuple[str, Taint]]) -> _Blamed | None:
    """What is to blame for the taints of some results, by path; arguments and captured arrays before equations."""
    total = functools.reduce(Taint.union, (taint for _, taint in tainted), UNTAINTED)
    given = frozenset(i for i in total.given if not _is_mask(tracker.given[i]))
    if given:
        # What only moves it is named where nothing else reads it.
        readers = total.given_readers or {tracker.first_uses[i] for i in given}
        number = min(total.nan_origins, default=min(readers))
        return _Blamed(number, given, _reached(tainted, "given", given))
    if total.origins:
        # JAX computes the derivative of a line just before the line itself, whose own failure says more. That of a
        # backward pass, which reads the derivative, does not.
        first = min(total.origins, key=lambda number: (tracker.origins[number].derivative, number))
        if tracker.origins[first].backward:
            first = min(total.origins)
        return _Blamed(first, frozenset(), _reached(tainted, "origins", {first}))
    if total.nan_origins:
        first = min(total.nan_origins)
        return _Blamed(first, total.given, _reached(tainted, "nan_origins", {first}))
    return None


def _written(what: str, found: Sequence[tuple[str, Taint]]) -> _Written:
    numbers = [number for _, taint in found for number in taint.written_readers]
    return _Written(what, tuple(path for path, _ in found), min(numbers, default=None))


def _keeps_nonfinite(result: Any, argument: Any) -> bool:
    """Whether each infinity and NaN of a result is where an argument of its shape has the same."""
    if np.shape(result) != np.shape(argument):
        return False
    finite = np.isfinite(result)
    return np.array_equal(*(np.where(finite, 0, array) for array in (result, argument)), equal_nan=True)


def _is_mask(array: Any) -> bool:
    """Whether what is non-finite in an argument is -inf only, which is how masks are written."""
    numbers = to_host(array)
    return not np.iscomplexobj(numbers) and not np.any(np.isnan(numbers) | (numbers == np.inf))


def _reached(tainted: Sequence[tuple[str, Taint]], field: str, blamed: Iterable[int]) -> tuple[str, ...]:
    """The paths of the results that have one of `blamed` in this field of their taint."""
    return tuple(dict.fromkeys(path for path, taint in tainted if not getattr(taint, field).isdisjoint(blamed)))


def _report_written(call: Call, tracker: TaintTracker, written: _Written | None) -> Found:
    """The report where nothing is to blame, with the line of an infinity or NaN that the program writes itself."""
    not_entered = tuple(call.interpreter.not_entered())
    if written is None:
        return Found(tracker.ran, not_entered)
    at = None if written.number is None else capture(call.interpreter, call.args, written.number)
    fields = {} if at is None else _line_of(at)
    return Found(tracker.ran, not_entered, written=written.what, reached=written.paths, **fields)


def _report_blamed(call: Call, tracker: TaintTracker, blamed: _Blamed) -> Found:
    """The report on the equation to blame, which runs a second time for its operands and results."""
    found = capture(call.interpreter, call.args, blamed.number)
    assert found is not None, "a program runs the same operations twice"
    verdict, why, cure, fitting = _judge(call, tracker, blamed, found)
    return Found(
        operations=tracker.ran,
        not_entered=tuple(call.interpreter.not_entered()),
        primitive=found.site.primitive,
        **_line_of(found),
        scope=found.site.scope,
        backward=found.site.backward or found.site.derivative,
        loops=found.site.loops,
        device=found.site.device,
        operands=_ranges(found.operands),
        results=_ranges(found.results),
        verdict=verdict,
        why=why,
        cure=cure,
        loss_scale=tracker.loss_scale if tracker.loss_scale > 1 else None,
        fitting_loss_scale=fitting,
        reached=blamed.reached,
    )


def _judge(
    call: Call, tracker: TaintTracker, blamed: _Blamed, found: Captured
) -> tuple[Verdict, str, str, float | None]:
    """The verdict, why, the cure, and the largest loss scale that is finite, if that is the cure."""
    scale = tracker.loss_scale
    if blamed.given:
        names = [_name_of(call, tracker, i) for i in sorted(blamed.given)]
        why = f"{' and '.join(names)} {'hold' if names[1:] else 'holds'} infinities or NaN."
        cure = (
            "Look at the data; a parameter or a state got them in an earlier call, on which find_overflow tells more. "
            "For a mask, use a finite number such as -1e9 where whole rows are masked."
        )
        return Verdict.INPUT, why[0].upper() + why[1:], cure, None
    if scale > 1 and (fitting := _largest_finite_scale(call, scale)) is not None:
        why = f"Only the loss scale of {scale:.10g} makes it: at {fitting:.10g} all is finite."
        cure = (
            f"Use a loss scale of {fitting:.10g} or less; DynamicLossScale finds it by itself, skipping steps, "
            f"unless its min_loss_scale is larger."
        )
        return Verdict.LOWER_SCALE, why, cure, fitting
    by_user = tracker.origins[blamed.number].narrowed_by_user
    verdict, why, cure = diagnose(call.interpreter, call.args, blamed.number, found, by_user, tracker.scopes)
    if verdict is Verdict.KEEP_FLOAT32 and found.site.backward and (path := _too_narrow(call, blamed)):
        why += f" Besides, {path} itself is too large for the 16 bits that the program returns it in."
        cure += f" Have {path} in float32 first: a gradient has the dtype that its parameter is stored in."
    return verdict, why + (" No loss scale cures it." if scale > 1 else ""), cure, None


def _name_of(call: Call, tracker: TaintTracker, position: int) -> str:
    """How an argument or captured array, by its position in `TaintTracker.given`, is named."""
    if position < len(call.in_paths):
        return f"the argument '{call.in_paths[position]}'"
    array = tracker.given[position]
    return f"an array {array.dtype.name}{list(array.shape)} that the function captures"


def _too_narrow(call: Call, blamed: _Blamed) -> str | None:
    """The first of the results reached that its own 16 bits cannot hold, were everything before it in float32."""
    wide = Interpreter(call.interpreter.jaxpr, wide=True).run(call.args, Watcher())
    for path, value, aval in zip(call.out_paths, wide, call.interpreter.jaxpr.out_avals, strict=True):
        dtype = getattr(aval, "dtype", None)
        if (path or "the result") in blamed.reached and is_narrow(aval):
            if not has_nonfinite(value.array) and has_nonfinite(value.array.astype(dtype)):
                return repr(path) if path else "the result"
    return None


def _largest_finite_scale(call: Call, scale: float) -> float | None:
    """The largest power of two below `scale` under which no equation is to blame; `None` if 1 is too large already."""

    def fails(scale: float) -> bool:
        _, blamed, _ = _run(call, scale)
        return blamed is not None and not blamed.given

    if fails(1.0):
        return None
    low, high = 0, math.ceil(math.log2(scale))
    while high - low > 1:
        middle = (low + high) // 2
        if fails(2.0**middle):
            high = middle
        else:
            low = middle
    return 2.0**low


def _line_of(found: Captured) -> dict[str, Any]:
    """The fields of `Found` that say where an equation was recorded."""
    own = user_line(found.site)
    fields = {"file": own.file, "line": own.number, "function": own.function, "text": own.text} if own else {}
    return {**fields, "through": between_user_and_jax(found.site)}


def _ranges(arrays: Sequence[Any]) -> tuple[ArrayRange, ...]:
    return tuple(_range(array) for array in arrays if hasattr(array, "dtype"))


def _range(array: Any) -> ArrayRange:
    shape, name = tuple(array.shape), getattr(array.dtype, "name", str(array.dtype))
    if isinstance(array, jax.Ref) or not jnp.issubdtype(array.dtype, jnp.number):
        return ArrayRange(shape, name, None, None, None, 0, 0, 0)
    numbers = to_host(array)
    finite = numbers[np.isfinite(numbers)]
    real = np.real(finite).astype(np.float64)
    low, high, largest = None, None, None
    if finite.size:
        low, high, largest = float(real.min()), float(real.max()), float(np.abs(finite).max())
    infs, nans, zeros = (int(np.sum(of)) for of in (np.isinf(numbers), np.isnan(numbers), numbers == 0))
    return ArrayRange(shape, name, low, high, largest, infs, nans, zeros)
