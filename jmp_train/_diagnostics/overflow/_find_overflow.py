"""`find_overflow`: which operation made a call's results infinite or NaN, and what to do about it.

Decides which of the operations that made non-finite values is the culprit: the first whose value reached a result.
Does not decide how values are followed (`_taint.py`) nor what cures the culprit (`_verdict.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..interpreter import Call, Value, traced_call
from ._found import Found, describe
from ._taint import CLEAN, Taint, Tracker, input_tag
from ._verdict import Verdict, capture, judge


def find_overflow(fn: Callable[..., Any]) -> Callable[..., Found]:
    """Returns a function that runs `fn` operation by operation and tells which one first made a non-finite value.

    It is for the call that failed: the same arguments, and as `fn` the loss, its gradient, what
    `jmp_train.value_and_grad` returned, or the whole training step. Of all operations whose finite operands gave an
    infinity or NaN, it names the first that reached a result (or, in a step that skips, the check of the gradients).
    What is masked away is no culprit, nor is an infinity that was written into the program or given to it, unless it
    turned into NaN.

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
    if not callable(fn):
        raise TypeError(f"`fn` must be callable, got {fn!r}; pass the function whose call gave infinities or NaN.")

    def find(*args: Any, **kwargs: Any) -> Found:
        call = traced_call("find_overflow", fn, args, kwargs)
        call = call._replace(args=[Value(x, input_tag(i, x)) for i, (x, _) in enumerate(call.args)])
        tracker, fault = _faulty(call)
        if fault is None:
            return Found(operations=tracker.count, not_entered=tuple(call.interpreter.not_entered()))
        return _judged(call, tracker, fault)

    return find


class _Fault(NamedTuple):
    """The number of the operation to blame, the arguments to blame instead, and the results that it reached."""

    number: int
    inputs: frozenset[int]
    reached: tuple[str, ...]


def _faulty(call: Call, scale: float | None = None) -> tuple[Tracker, _Fault | None]:
    """Runs the call, with another loss scale if one is given, and looks for what is to blame."""
    tracker = Tracker(scale)
    results = call.interpreter.run(call.args, tracker)
    program = call.interpreter.program
    sinks: list[tuple[str, Taint]] = []
    for path, number, value in zip(call.out_paths, program.outputs, results, strict=True):
        if value.tag is not None and value.tag.bad and number not in program.inputs:
            sinks.append((path or "the result", value.tag.taint))
    fault = _culprit(call, tracker, sinks)
    if fault is None:
        fault = _culprit(call, tracker, [("the check of the gradients", taint) for taint in tracker.checked])
    return tracker, fault


def _culprit(call: Call, tracker: Tracker, sinks: Sequence[tuple[str, Taint]]) -> _Fault | None:
    total = CLEAN
    for _, taint in sinks:
        total = total.with_that_of(taint)
    loud = frozenset(i for i in total.inputs if not _is_mask(call.args[i].array))
    if loud:
        readers = [tracker.readers[i] for i in loud]
        return _Fault(min(total.mixers, default=min(readers)), loud, _reached(sinks, loud, 2))
    if total.makers:
        # JAX computes the derivative of a line just before the line itself, whose own fault says more.
        first = min(total.makers, key=lambda number: (tracker.notes[number].derivative, number))
        return _Fault(first, frozenset(), _reached(sinks, {first}, 0))
    if total.mixers:
        first = min(total.mixers)
        return _Fault(first, total.inputs, _reached(sinks, {first}, 1))
    return None


def _is_mask(array: Any) -> bool:
    """Whether what is non-finite in an argument is -inf only, which is how masks are written."""
    numbers = np.asarray(array)
    return not np.iscomplexobj(numbers) and not np.any(np.isnan(numbers) | (numbers == np.inf))


def _reached(sinks: Sequence[tuple[str, Taint]], origins: Any, kind: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for path, taint in sinks if not taint[kind].isdisjoint(origins)))


def _judged(call: Call, tracker: Tracker, fault: _Fault) -> Found:
    scale, number = tracker.loss_scale, fault.number
    found = capture(call.interpreter, call.args, number)
    assert found is not None, "a program runs the same operations twice"
    fitting = None
    if fault.inputs:
        paths = ", ".join(f"'{call.in_paths[i]}'" for i in sorted(fault.inputs))
        verdict, why = Verdict.INPUT, f"The argument {paths} holds infinities or NaN."
        cure = "Look at the data; for a mask, use a finite number such as -1e9 where whole rows are masked."
    elif scale > 1 and (fitting := _fitting_scale(call, scale)) is not None:
        verdict, why = (
            Verdict.LOWER_SCALE,
            f"Only the loss scale of {scale:.10g} makes it: at {fitting:.10g} all is finite.",
        )
        cure = f"Use a loss scale of {fitting:.10g} or less; DynamicLossScale finds it by itself, skipping steps."
    else:
        by_hand = tracker.notes[number].by_hand
        verdict, why, cure = judge(call.interpreter, call.args, number, found, by_hand, tracker.scopes)
        if scale > 1:
            why += " No loss scale cures it."
    return describe(
        found,
        verdict=verdict,
        why=why,
        cure=cure,
        loss_scale=scale if scale > 1 else None,
        fitting_loss_scale=fitting,
        reached=fault.reached,
        operations=tracker.count,
        not_entered=tuple(call.interpreter.not_entered()),
    )


def _fitting_scale(call: Call, scale: float) -> float | None:
    """The largest power of two below `scale` under which nothing is to blame; `None` if 1 is too large already."""
    if _faulty(call, 1.0)[1] is not None:
        return None
    fits, fails = 0, math.ceil(math.log2(scale))
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if _faulty(call, 2.0**middle)[1] is None:
            fits = middle
        else:
            fails = middle
    return 2.0**fits
