"""`Rewrite`: another way of computing the results of a part of a program, which moves fewer bytes.

A rewrite may be left out: that changes the program, but its results only by roundings. It hooks into the stage where
the facts that it needs are known.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ...._jaxpr import FlatJaxpr, Node
from ...ir import Equation, Program
from ...primitives import Entry

Computation = Callable[[Node, Sequence[Any]], list[Any]]  # of an equation's results, given its operands


class Rewrite(NamedTuple):
    """A rewrite; it hooks into one of the stages, or several.

    Attributes:
      name: that of its file.
      of_recorded: rewrites a program as it was recorded.
      entry: by primitive, the rule for an equation that is rewritten; `None` for others.
      of_equation: by primitive, what computes the results of an equation whose dtypes are decided; `None` for others.
      of_planned: rewrites a program whose dtypes and residuals are decided.
      of_lowered: rewrites a program whose casts are equations.
    """

    name: str
    of_recorded: Callable[[FlatJaxpr], FlatJaxpr] | None = None
    entry: Mapping[str, Callable[[Node], Entry | None]] = MappingProxyType({})
    of_equation: Mapping[str, Callable[[Program, Equation], Computation | None]] = MappingProxyType({})
    of_planned: Callable[[Program], Program] | None = None
    of_lowered: Callable[[Program], Program] | None = None
