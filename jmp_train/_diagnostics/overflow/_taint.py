"""Taint analysis of infinities and NaN: which equation each non-finite value comes from.

Decides which equations a non-finite value originates in. Does not decide why one of them failed nor what to do; see
`_verdict.py`.

Every non-finite value carries a taint. An equation is an *origin* if it gave a non-finite value from finite operands,
and a *NaN origin* if it gave NaN from infinities that are meant to be there: constants written in the program (the
-inf of a mask), arguments and captured arrays. A finite value carries none, so that what was masked away is forgotten.
For selections and elementwise primitives taint spreads element by element, so that a branch that `jnp.where` did not
select leaves none; for all others every non-finite operand taints a non-finite result. A boolean carries the taint of
what was tested: where it selects a NaN that is written in the program, as `jnp.median` does for data with NaN, that NaN
comes from the data. What an equation leaves in a `jax.Ref` is a result of it.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._autocast.primitives import Trait, having
from ..._jaxpr import BARRIER
from ..._tracebacks import is_asked_for
from ..interpreter import Site, Value, Watcher, is_narrow, to_host
from ._source_lines import is_finite_check, is_library_function

_MOST = 8  # the first origins of a value are enough: the one to blame is the first of them
_ELEMENTWISE = having(Trait.ELEMENTWISE)
_MOVES = having(Trait.MOVES | Trait.PICKS | Trait.TRANSFERS) | {"convert_element_type"}


class Taint(NamedTuple):
    """Where a non-finite value comes from.

    Attributes:
      origins, nan_origins: numbers of equations in the order they ran, from 1.
      given: the arguments and captured arrays that brought non-finite values, by their positions in
        `TaintTracker.given`.
      given_readers: the equations that read such a value, but for those that only move or cast it.
      written_readers: the same for an infinity or NaN that is written in the program.
    """

    origins: frozenset[int] = frozenset()
    nan_origins: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()
    given_readers: frozenset[int] = frozenset()
    written_readers: frozenset[int] = frozenset()

    def union(self, other: "Taint") -> "Taint":
        return Taint(*(_earliest(a | b) for a, b in zip(self, other, strict=True)))


UNTAINTED = Taint()


class Tag(NamedTuple):
    """What is remembered of a value.

    Attributes:
      nonfinite: whether it holds an infinity or NaN.
      taint: where that comes from; of a boolean, the taint of the values that were tested.
      narrowed_by_user: whether it has 16 bits because the program itself asks for them, rather than autocast.
    """

    nonfinite: bool
    taint: Taint
    narrowed_by_user: bool


class Origin(NamedTuple):
    """What is remembered of an origin.

    Attributes:
      narrowed_by_user: whether the program itself, rather than autocast, computes it in 16 bits.
      derivative: whether it is a forward equation that only the backward pass uses.
      backward: whether it is in a backward pass.
    """

    narrowed_by_user: bool
    derivative: bool
    backward: bool


@dataclasses.dataclass(eq=False)
class TaintTracker(Watcher):
    """Follows non-finite values through a run.

    Attributes:
      given: the arguments; and the captured arrays that hold infinities or NaN, as they are met.
      ran: how many equations have run; an equation's number is this when it ran, from 1.
      origins: the origins and NaN origins, by number.
      checks: for each value that the program itself tests for being finite: the answer, and the value's taint.
      first_uses: by position in `given`, the first equation that used it.
      scopes: the scopes of all equations.
      loss_scale: the largest loss scale of this package that multiplied anything; 1 without.
      replace_scale: the loss scale to run with instead; `None` for the program's own.
    """

    given: list[Any] = dataclasses.field(default_factory=list)
    replace_scale: float | None = None
    ran: int = 0
    origins: dict[int, Origin] = dataclasses.field(default_factory=dict)
    checks: list[tuple[Any, Taint]] = dataclasses.field(default_factory=list)
    first_uses: dict[int, int] = dataclasses.field(default_factory=dict)
    scopes: set[str] = dataclasses.field(default_factory=set)
    loss_scale: float = 1.0
    _is_scaling: dict[int, bool] = dataclasses.field(default_factory=dict)
    _stored: dict[jax.Ref, Tag] = dataclasses.field(default_factory=dict)  # of what each holds
    _captured: dict[int, int] = dataclasses.field(default_factory=dict)  # by the id of an array, its place in `given`

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
        if id(node) not in self._is_scaling:  # nodes outlive this: their interpreter holds them
            # By its source line: in the jaxpr a loss scale is a scalar like any other.
            self._is_scaling[id(node)] = node.name == "mul" and is_library_function(node, "_scaling.py", "multiply")
            self.scopes.add(site.scope)
        return self._is_scaling[id(node)]

    def watch(self, site: Site, inputs: Sequence[Value], outputs: Sequence[Any]) -> list[Tag]:
        self.ran += 1
        tags = list(map(self._tag_of, inputs))
        if site.primitive == BARRIER:
            return tags
        outputs = [*outputs, *contents_of_refs(inputs)]
        nonfinite = list(map(has_nonfinite, outputs))
        narrow = list(map(is_narrow, outputs))
        by_user = any(tag.narrowed_by_user for tag in tags) or self._user_narrows(site, inputs, any(narrow))
        for position in (position for tag in tags for position in tag.taint.given):
            self.first_uses.setdefault(position, self.ran)
        if is_finite_check(site.node):
            self.checks.append((outputs[0], tags[0].taint))
        if site.primitive == "select_n" and np.ndim(inputs[0].array):  # a mask of single numbers, no check of gradients
            self.checks = [check for check in self.checks if check[0] is not inputs[0].array]
        taint = self._taint_of(site, inputs, tags, outputs) if any(nonfinite) else UNTAINTED
        if self.ran in taint.origins | taint.nan_origins:
            self.origins[self.ran] = Origin(by_user, site.derivative, site.backward)
        tested = _union(tags) if any(map(_is_boolean, outputs)) else UNTAINTED
        found = [
            Tag(bad, taint if bad else tested if _is_boolean(output) else UNTAINTED, by_user and low)
            for output, bad, low in zip(outputs, nonfinite, narrow, strict=True)
        ]
        refs = [value.array for value in inputs if isinstance(value.array, jax.Ref)]
        self._stored.update(zip(refs, found[len(found) - len(refs) :], strict=True))
        return found[: len(found) - len(refs)]

    def _tag_of(self, value: Value) -> Tag:
        array: Any = value.array
        if isinstance(array, jax.Ref) and array in self._stored:
            return self._stored[array]
        if value.tag is not None and not value.tag.nonfinite:
            return value.tag
        if not has_nonfinite(array):  # a row of an array, or one device's part, may be finite where the whole is not
            return Tag(False, UNTAINTED, value.tag is not None and value.tag.narrowed_by_user)
        if value.tag is not None:
            return value.tag
        if not array.ndim:  # a number that is written in the program
            return Tag(True, UNTAINTED, False)
        if id(array) not in self._captured:
            self._captured[id(array)] = len(self.given)
            self.given.append(array)
        return Tag(True, Taint(given=frozenset({self._captured[id(array)]})), False)

    def _user_narrows(self, site: Site, inputs: Sequence[Value], narrow: bool) -> bool:
        """Whether 16 bits begin here because the program says so, rather than autocast."""
        if not narrow or any(is_narrow(value.array) for value in inputs):
            return False
        # Autocast narrows by casts of its own; random numbers and constants are made in the dtype that was asked for.
        return site.primitive != "convert_element_type" or is_asked_for(site.node)

    def join(self, pieces: Sequence[Value]) -> Tag:
        tags = [piece.tag for piece in pieces if piece.tag is not None]
        by_user = any(tag.narrowed_by_user for tag in tags)
        return Tag(any(has_nonfinite(piece.array) for piece in pieces), _union(tags), by_user)

    def _taint_of(self, site: Site, inputs: Sequence[Value], tags: Sequence[Tag], outputs: Sequence[Any]) -> Taint:
        """The taint of a non-finite result."""
        arrays, causes = [value.array for value in inputs], [tag.nonfinite for tag in tags]
        if site.primitive == "select_n":
            causes = _selected(arrays, causes)
        is_origin, is_nan_origin = not any(causes), makes_nan(arrays, causes, outputs)
        if site.primitive in _ELEMENTWISE and any(causes):
            causes, is_origin, is_nan_origin = _by_element(arrays, causes, outputs[0])
        taint = _union([tag for tag, is_cause in zip(tags, causes, strict=True) if is_cause])
        if site.primitive == "select_n" and not (taint.origins or taint.nan_origins or taint.given):
            taint = taint.union(tags[0].taint)  # the program writes a NaN, for what was tested
        this, none = frozenset({self.ran}), frozenset[int]()
        reads = any(causes) and site.primitive not in _MOVES
        return taint.union(
            Taint(
                origins=this if is_origin else none,
                nan_origins=this if is_nan_origin else none,
                given_readers=this if reads and taint.given else none,
                written_readers=this if reads and not taint.given else none,
            )
        )


def _union(tags: Sequence[Tag]) -> Taint:
    return functools.reduce(Taint.union, (tag.taint for tag in tags), UNTAINTED)


def argument_tag(position: int, array: Any) -> Tag:
    """The tag of an argument: its 16 bits, if it has them, are the user's."""
    bad = has_nonfinite(array)
    return Tag(bad, Taint(given=frozenset({position})) if bad else UNTAINTED, is_narrow(array))


def contents_of_refs(values: Sequence[Value]) -> list[jax.Array]:
    """What each `jax.Ref` among operands holds."""
    return [value.array[...] for value in values if isinstance(value.array, jax.Ref)]


def is_inexact(array: Any) -> bool:
    # Not a `jax.Ref`, whose contents are looked at after each equation that is given it.
    return not isinstance(array, jax.Ref) and hasattr(array, "dtype") and bool(jnp.issubdtype(array.dtype, jnp.inexact))


def has_nonfinite(array: Any) -> bool:
    """Whether an array holds an infinity or a NaN."""
    return is_inexact(array) and not np.all(np.isfinite(to_host(array)))


def makes_nan(arrays: Sequence[Any], causes: Sequence[bool], outputs: Sequence[Any]) -> bool:
    """Whether NaN comes out of operands that hold infinities but no NaN."""
    operands = [array for array, is_cause in zip(arrays, causes, strict=True) if is_cause]
    return bool(operands) and any(map(_has_nan, outputs)) and not any(map(_has_nan, operands))


def _nonfinite(array: Any) -> np.ndarray:
    return ~np.isfinite(to_host(array)) if is_inexact(array) else np.zeros(np.shape(array), bool)


def _is_boolean(array: Any) -> bool:
    return getattr(array, "dtype", None) == np.bool_


def _has_nan(array: Any) -> bool:
    return is_inexact(array) and bool(np.any(np.isnan(to_host(array))))


def _selected(arrays: Sequence[Any], nonfinite: Sequence[bool]) -> list[bool]:
    """Which operands of a selection are non-finite where they were selected."""
    which = np.asarray(arrays[0]).astype(np.int32)
    chosen = [nonfinite[k] and np.any(_nonfinite(array) & (which == k - 1)) for k, array in enumerate(arrays) if k]
    return [False, *map(bool, chosen)]


def _by_element(arrays: Sequence[Any], nonfinite: Sequence[bool], output: Any) -> tuple[list[bool], bool, bool]:
    """For an elementwise primitive: which operands taint the result, whether some element of it became non-finite here,
    and whether some became NaN here from infinities."""
    out, nan = _nonfinite(output), np.isnan(to_host(output))
    elements = [np.broadcast_to(_nonfinite(array), out.shape) for array in arrays]
    before = np.any(elements, axis=0)
    operands = [to_host(array) for array in arrays if is_inexact(array)]
    nan_before = np.any([np.broadcast_to(np.isnan(x), out.shape) for x in operands], axis=0)
    causes = [bad and bool(np.any(e & out)) for bad, e in zip(nonfinite, elements, strict=True)]
    return causes, bool(np.any(out & ~before)), bool(np.any(nan & before & ~nan_before))


def _earliest(numbers: frozenset[int]) -> frozenset[int]:
    return numbers if len(numbers) <= _MOST else frozenset(sorted(numbers)[:_MOST])
