"""`Rewrite`: another way of computing what a part of a program computes, which moves fewer bytes.

A rewrite may be left out: the program is then another one, not its results beyond roundings. It hooks into the stage
where what it asks for is known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ...._jaxpr import FlatJaxpr, Node, loop_of
from ...ir import Equation, Program
from ...primitives import Entry

Computation = Callable[[Node, Sequence[Any]], list[Any]]  # of an equation's results, given its operands


def loop_counts(equation: Equation) -> tuple[int, int] | None:
    """How many constants and carried values a loop's body is given; `None` of what is no loop, or runs as recorded."""
    loop = loop_of(equation.node.eqn) if equation.bodies else None
    return loop and (equation.counts or (loop.consts, loop.carry))


class Rewrite:
    """A rewrite that does nothing; each file of this folder has one that overrides what it needs.

    Attributes:
      primitives: what `entry` and `of_equation` are asked about.
    """

    primitives: frozenset[str] = frozenset()

    def of_recorded(self, program: FlatJaxpr) -> FlatJaxpr:
        """Rewrites a program as it was recorded."""
        return program

    def entry(self, node: Node) -> Entry | None:
        """The rule for `node` once it is rewritten; `None` if that of its primitive holds."""
        return None

    def of_equation(self, program: Program, equation: Equation) -> Computation | None:
        """What computes the results of an equation, whose dtypes are decided; `None` if its primitive does."""
        return None

    def of_planned(self, program: Program) -> Program:
        """Rewrites a program whose dtypes and residuals are decided."""
        return program

    def of_lowered(self, program: Program) -> Program:
        """Rewrites a program whose casts are equations."""
        return program

    def __repr__(self) -> str:
        return type(self).__name__


@functools.cache
def steps(rewrites: tuple[Rewrite, ...], stage: str) -> tuple[Callable[[Any], Any], ...]:
    """The methods named `stage` of the rewrites that have one of their own.

    >>> from jmp_train._autocast.passes.rewrites import REWRITES
    >>> [step.__self__ for step in steps(REWRITES, "of_recorded")]
    [JoinedShardMaps, ReluMask]
    """
    own = [rewrite for rewrite in rewrites if getattr(type(rewrite), stage) is not getattr(Rewrite, stage)]
    return tuple([getattr(rewrite, stage) for rewrite in own])
