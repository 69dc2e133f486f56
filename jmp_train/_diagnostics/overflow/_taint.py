"""Follows infinities and NaN through a program: where each was made, and which makers reach which results.

Decides which operation is to blame for a non-finite value. Does not decide why it failed nor what to do; see
`_verdict.py`.

Every non-finite value remembers its makers. An operation is a *maker* if it gave a non-finite value from finite ones,
and a *mixer* if it gave NaN from infinities that are meant to be there: constants written in the program (the -inf of
a mask) and arguments. A value that is finite remembers nothing: whatever was masked away is forgotten. For selections
and elementwise operations this is decided element by element, so that a branch that `jnp.where` did not select leaves
no trace; for all others a non-finite operand counts as the cause of a non-finite result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..._tracebacks import is_asked_for
from ..interpreter import Site, Value, Watcher, is_narrow_dtype
from ._source_lines import is_finite_check, is_library_function

_REMEMBERED = 8  # the first makers of a value; the culprit is the first of them
# One element of each operand makes one element of the result.
_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh digamma "
    "div erf erf_inv erfc exp exp2 expm1 floor integer_pow lgamma log log1p logistic max min mul neg nextafter pow "
    "reduce_precision rem round rsqrt sign sin sinh sqrt square sub tan tanh".split()
)


class Taint(NamedTuple):
    """What a non-finite value remembers.

    Attributes:
      makers, mixers: numbers of operations in the order they ran.
      inputs: positions of arguments that brought non-finite values.
    """

    makers: frozenset[int] = frozenset()
    mixers: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()

    def with_that_of(self, other: Taint) -> Taint:
        return Taint(*(_first(a | b) for a, b in zip(self, other, strict=True)))


CLEAN = Taint()


class Tag(NamedTuple):
    """Of a value: whether it is non-finite, what made it so, and whether its 16 bits were asked for by the user."""

    bad: bool
    taint: Taint
    by_hand: bool


class Note(NamedTuple):
    """Of a maker: whether the program itself, rather than autocast, computes it in 16 bits; and whether it is a forward
    operation that only the backward pass reads."""

    by_hand: bool
    derivative: bool


@dataclasses.dataclass(eq=False)
class Tracker(Watcher):
    """Watches a run for non-finite values.

    Attributes:
      count: how many operations have run; an operation's number is the count when it ran, from 1.
      notes: on the makers and mixers, by number.
      checked: what the values remember whose finiteness the program itself asked for.
      readers: by position, the first operation that read a non-finite argument.
      scopes: the scopes of all operations.
      loss_scale: the largest loss scale of this package that multiplied anything; 1 without.
      replace_scale: the loss scale to run with instead; `None` for the program's own.
    """

    replace_scale: float | None = None
    count: int = 0
    notes: dict[int, Note] = dataclasses.field(default_factory=dict)
    checked: list[Taint] = dataclasses.field(default_factory=list)
    readers: dict[int, int] = dataclasses.field(default_factory=dict)
    scopes: set[str] = dataclasses.field(default_factory=set)
    loss_scale: float = 1.0
    _scalings: dict[int, bool] = dataclasses.field(default_factory=dict)

    def before(self, site: Site, inputs: list[Value]) -> list[Value]:
        if not self._multiplies_by_scale(site):
            return inputs
        self.loss_scale = max(self.loss_scale, float(np.max(inputs[1].array)))
        if self.replace_scale is None:
            return inputs
        replaced = jnp.full_like(inputs[1].array, self.replace_scale)
        return [inputs[0], inputs[1]._replace(array=replaced)]

    def _multiplies_by_scale(self, site: Site) -> bool:
        node = site.node
        if id(node) not in self._scalings:  # nodes live as long as their interpreter, and so longer than this
            self._scalings[id(node)] = node.name == "mul" and is_library_function(node, "_scaling.py", "multiply")
            self.scopes.add(site.scope)
        return self._scalings[id(node)]

    def watch(self, site: Site, inputs: Sequence[Value], outputs: Sequence[Any]) -> list[Tag]:
        self.count += 1
        tags = [value.tag or Tag(is_bad(value.array), CLEAN, False) for value in inputs]
        bad = list(map(is_bad, outputs))
        narrow = [is_narrow_dtype(getattr(output, "dtype", None)) for output in outputs]
        by_hand = any(tag.by_hand for tag in tags) or self._narrows_by_hand(site, inputs, any(narrow))
        for position in (position for tag in tags for position in tag.taint.inputs):
            self.readers.setdefault(position, self.count)
        if is_finite_check(site.node) and tags[0].bad:
            self.checked.append(tags[0].taint)
        taint = self._blame(site, inputs, tags, outputs) if any(bad) else CLEAN
        if self.count in taint.makers | taint.mixers:
            self.notes[self.count] = Note(by_hand, site.derivative)
        return [Tag(is_, taint if is_ else CLEAN, by_hand and low) for is_, low in zip(bad, narrow, strict=True)]

    def _narrows_by_hand(self, site: Site, inputs: Sequence[Value], narrow: bool) -> bool:
        """Whether 16 bits begin here because the program says so, rather than autocast."""
        if not narrow or any(is_narrow_dtype(getattr(value.array, "dtype", None)) for value in inputs):
            return False
        # A cast by name; or random numbers, a constant: nothing that autocast narrows.
        return site.primitive != "convert_element_type" or is_asked_for(site.node)

    def join(self, pieces: Sequence[Value]) -> Tag:
        taint, by_hand = CLEAN, False
        for tag in (piece.tag for piece in pieces if piece.tag is not None):
            taint, by_hand = taint.with_that_of(tag.taint), by_hand or tag.by_hand
        return Tag(any(is_bad(piece.array) for piece in pieces), taint, by_hand)

    def _blame(self, site: Site, inputs: Sequence[Value], tags: Sequence[Tag], outputs: Sequence[Any]) -> Taint:
        """What a non-finite result remembers."""
        arrays, bad = [value.array for value in inputs], [tag.bad for tag in tags]
        if site.primitive == "select_n":
            bad = _selected(arrays, bad)
        made, mixed = not any(bad), _mixes(arrays, bad, outputs)
        if site.primitive in _ELEMENTWISE and any(bad):
            bad, made, mixed = _by_element(arrays, bad, outputs[0])
        taint = CLEAN
        for tag, is_cause in zip(tags, bad, strict=True):
            taint = taint.with_that_of(tag.taint) if is_cause else taint
        own = frozenset({self.count})
        none: frozenset[int] = frozenset()
        return taint.with_that_of(Taint(own if made else none, own if mixed else none))


def input_tag(position: int, array: Any) -> Tag:
    """The tag of an argument: its 16 bits, if it has them, are the user's."""
    bad = is_bad(array)
    return Tag(bad, Taint(inputs=frozenset({position})) if bad else CLEAN, is_narrow_dtype(array.dtype))


def is_inexact(array: Any) -> bool:
    return hasattr(array, "dtype") and bool(jnp.issubdtype(array.dtype, jnp.inexact))


def is_bad(array: Any) -> bool:
    """Whether an array holds an infinity or a NaN."""
    return is_inexact(array) and not np.all(np.isfinite(np.asarray(array)))


def _bad_elements(array: Any) -> np.ndarray:
    return ~np.isfinite(np.asarray(array)) if is_inexact(array) else np.zeros(np.shape(array), bool)


def _has_nan(array: Any) -> bool:
    return is_inexact(array) and bool(np.any(np.isnan(np.asarray(array))))


def _mixes(arrays: Sequence[Any], bad: Sequence[bool], outputs: Sequence[Any]) -> bool:
    """Whether NaN comes out of operands that hold infinities but no NaN."""
    causes = [array for array, is_cause in zip(arrays, bad, strict=True) if is_cause]
    return bool(causes) and any(map(_has_nan, outputs)) and not any(map(_has_nan, causes))


def _selected(arrays: Sequence[Any], bad: Sequence[bool]) -> list[bool]:
    """Which operands of a selection are non-finite where they were selected."""
    which = np.asarray(arrays[0]).astype(np.int32)
    chosen = [bad[k] and np.any(_bad_elements(array) & (which == k - 1)) for k, array in enumerate(arrays) if k]
    return [False, *map(bool, chosen)]


def _by_element(arrays: Sequence[Any], bad: Sequence[bool], output: Any) -> tuple[list[bool], bool, bool]:
    """Which operands an elementwise result has its non-finite values from, whether it made some, mixed some."""
    out, nan = _bad_elements(output), np.isnan(np.asarray(output))
    elements = [np.broadcast_to(_bad_elements(array), out.shape) for array in arrays]
    before = np.any(elements, axis=0)
    operands = [np.asarray(array) for array in arrays if is_inexact(array)]
    nan_before = np.any([np.broadcast_to(np.isnan(x), out.shape) for x in operands], axis=0)
    causes = [is_ and bool(np.any(e & out)) for is_, e in zip(bad, elements, strict=True)]
    return causes, bool(np.any(out & ~before)), bool(np.any(nan & before & ~nan_before))


def _first(numbers: frozenset[int]) -> frozenset[int]:
    return numbers if len(numbers) <= _REMEMBERED else frozenset(sorted(numbers)[:_REMEMBERED])
