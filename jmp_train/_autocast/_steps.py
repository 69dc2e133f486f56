"""What a plan is made of: the state of each value while planning, the steps, the whole.

Decides nothing: data that `_plan.py` makes and `_evaluate.py` runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._dtypes import FLOAT32
from .._jaxpr import Node, Program
from ._flow import Kind, Place
from ._magnitudes import UNKNOWN, Numbers
from ._table import Entry


@dataclasses.dataclass(slots=True)
class State:
    """A value on the way through the plan.

    Attributes:
      kind: what it is.
      depth: how many dots precede it on the longest path. A reader of greater depth is on the far side of a dot.
      kept: computed in float32, with a copy in the compute dtype that far readers use.
      computed: computed by the program, rather than an argument or a rearranged one.
      parameter: a differentiated argument, possibly rearranged.
      raw: a dot's result or a mean over windows, possibly rearranged.
      root: what far readers start from: they read it behind a barrier, so that the compiler stores it once, in 16 bits.
      again: what far readers compute again from roots, rather than have it kept; see `_recompute.py`.
      costly: computed again for kernels of their own too.
      relu: a relu's result that a dot reads in the compute dtype, so that it is in memory, whatever else reads it.
      origin: the one root that a value in the compute dtype is, or is computed again from, if it is one.
      numbers: what is known of them.
    """

    kind: Kind
    depth: int = 0
    kept: bool = False
    computed: bool = False
    parameter: bool = False
    raw: bool = False
    root: bool = False
    again: bool = False
    costly: bool = False
    relu: bool = False
    origin: int | None = None
    numbers: Numbers = UNKNOWN


@dataclasses.dataclass(slots=True)
class Step:
    """One planned operation.

    Attributes:
      reads: the dtype to read each operand in; `None` for operands that were not recorded in float32.
      far: whether each operand is read through its stored copy in the compute dtype; filled in by the walk.
      params: parameters of the primitive that change.
      casts: the dtype each result is cast to after the operation; `None` leaves it.
      run: runs a node that has a program inside, given its operands; `None` for every other.
      bodies: the plans of those programs.
      unread: whether nobody reads its results, so that it need not run.
    """

    node: Node
    entry: Entry
    reads: list[np.dtype | None]
    far: list[bool] = dataclasses.field(default_factory=list)
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    casts: list[np.dtype | None] = dataclasses.field(default_factory=list)
    run: Callable[..., list[Any]] | None = None
    bodies: tuple[Plan, ...] = ()
    unread: bool = False


@dataclasses.dataclass(slots=True)
class Plan:
    """A planned program.

    Attributes:
      program: the program.
      place: where it stands.
      steps: one for each of its nodes.
      in_dtypes, out_kinds: what each argument has to be, and what each result is.
      low: the compute dtype.
      kinds: what became of every value, by number; for `explain`.
      roots: values that far readers read through a stored copy.
      again: values that far readers compute again, and the step that does.
      barred: values that far readers start from as they are, behind a barrier: a product is computed again from them.
      squared: values in the compute dtype that a product, here or in a body, multiplies with themselves.
      rounded: values whose rounding no reader may lose: these, and those of `roots_of_exponents`.
    """

    program: Program
    place: Place
    steps: list[Step]
    in_dtypes: list[np.dtype | None]
    out_kinds: list[Kind]
    low: np.dtype
    kinds: list[Kind]
    roots: frozenset[int]
    again: dict[int, Step]
    barred: frozenset[int] = frozenset()
    squared: frozenset[int] = frozenset()
    rounded: frozenset[int] = frozenset()

    def dtypes_of(self, kinds: Sequence[Kind]) -> list[np.dtype | None]:
        return [dtype_of(kind, self.low) for kind in kinds]


def dtype_of(kind: Kind, low: np.dtype) -> np.dtype | None:
    return None if kind is Kind.FIXED else low if kind is Kind.LOW else FLOAT32
