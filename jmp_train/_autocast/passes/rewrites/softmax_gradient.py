"""The gradient of a softmax as one equation, which reads only the scores and the cotangent.

    r:f32 = reduce_max a                    r:f32 = reduce_max a
    h:f32 = exp (sub a r)                   h:f32 = exp (sub a r)
    s:f32 = reduce_sum h*                   s:f32 = reduce_sum h
    p:f16 = div h s                         p:f16 = div h s
    ...                              ->     ...
    t:f32 = reduce_sum (g / s**2 * h*)      d:f32 = mul[softmax_gradient] g h* s*     (p * (g - sum(g * p)), p = h / s)
    d:f32 = mul (g / s - t) h*

Here the largest score and the sum of each row are rematerialized with the exponentials. XLA for GPUs then computes the
softmax in one kernel, from 16-bit scores to 16-bit probabilities, and its gradient in another. If the two numbers of
each row were saved, it would take three kernels and two, and each of them would read the scores. XLA has one kernel
only for a gradient in this form: it computes the recorded form in several kernels where the length of rows is no power
of two, and writes float32 between them. A kernel with sums inside cannot write in place, so that a single layer of
attention may need more temporary memory, for one more array as large as its scores.

Decides which gradients those are: of exponentials over sums along the last axis, which are rematerialized anyway.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...._dtypes import FLOAT32
from ...._jaxpr import Node
from ...ir import SHARED, Equation, Program, Use


class _Gradient(NamedTuple):
    """The values that the gradient of a softmax reads, and the values of rows that are rematerialized for it."""

    cotangent: Use
    exponentials: int
    total: int
    rows: list[int]


def softmax_gradient(program: Program) -> Program:
    """The program with one equation for each gradient of a softmax, for which the whole softmax is rematerialized."""
    found = dict(_Softmaxes(program).gradients())
    if not found:
        return program
    exponentials = {gradient.exponentials for gradient in found.values()}
    equations = [*program.equations]
    for i, equation in enumerate(equations):
        if i in found:
            cotangent, *others, _ = found[i]
            uses = [cotangent, *(Use(number, FLOAT32, SHARED) for number in others)]
            equations[i] = equation.replace(uses=uses, rewrite=gradient_of_softmax)
        elif not exponentials.isdisjoint(equation.operands):
            # The sum reads the same expression as the quotient, which would otherwise be in another kernel.
            is_near = [equation.depth <= program.facts[number].depth for number in equation.operands]
            pairs = zip(equation.uses, is_near, strict=True)
            uses = [use._replace(residual=0) if near and use.value in exponentials else use for use, near in pairs]
            equations[i] = equation.replace(uses=uses)
    remat = program.residuals.remat.union(*[gradient.rows for gradient in found.values()])
    return program.replace(equations=equations, residuals=dataclasses.replace(program.residuals, remat=remat))


class _Softmaxes:
    """Finds the gradients of the softmaxes of one program, by their positions."""

    def __init__(self, program: Program):
        self._program, self._producers = program, program.producers()

    def gradients(self) -> Iterator[tuple[int, _Gradient]]:
        remat = self._program.residuals.remat
        for i, equation in enumerate(self._program.equations if remat else ()):
            if equation.node.name == "mul" and not remat.isdisjoint(equation.operands):
                for factor, exponentials in _both_ways(equation):
                    if exponentials in remat and (found := self._gradient(factor, exponentials)) is not None:
                        yield i, found

    def _gradient(self, factor: int, exponentials: int) -> _Gradient | None:
        """Of `factor * exponentials`, where `factor` is `g / s + -sum(g * s**-2 * exponentials)`."""
        largest, terms = self._largest(exponentials), self._made_by("add_any", factor)
        if largest is None or terms is None:
            return None
        for one, other in _both_ways(terms):
            quotient, (product, between) = self._made_by("div", one), self._of_rows("reduce_sum", other, {"neg"})
            if quotient is None or [self._producers[number].node.name for number in between].count("neg") != 1:
                continue
            cotangent, total = quotient.uses
            summed, rows = self._of_rows("reduce_sum", total.value)
            if summed == exponentials and self._is_product(product, cotangent.value, total.value, exponentials):
                return _Gradient(cotangent, exponentials, total.value, [*rows, *largest])
        return None

    def _largest(self, exponentials: int) -> list[int] | None:
        """The largest score of each row and the values between: it is subtracted before the exponentials are taken."""
        exponential = self._made_by("exp", exponentials)
        difference = exponential and self._made_by("sub", exponential.operands[0])
        if difference is None:
            return None
        scores, subtracted = difference.operands
        of_which, rows = self._of_rows("reduce_max", subtracted, {"max", "stop_gradient"})
        return rows if of_which == scores else None

    def _is_product(self, number: int | None, cotangent: int, total: int, exponentials: int) -> bool:
        """Whether a value is `cotangent * total**-2 * exponentials`."""
        product = self._made_by("mul", number)
        for scaled, one in _both_ways(product) if product else ():
            inner = self._made_by("mul", scaled) if one == exponentials else None
            for other, inverse in _both_ways(inner) if inner else ():
                power = self._made_by("integer_pow", inverse)
                if other == cotangent and power and power.operands[0] == total and power.node.params["y"] == -2:
                    return True
        return False

    def _made_by(self, name: str, number: int | None) -> Equation | None:
        equation = None if number is None else self._producers.get(number)
        return equation if equation is not None and equation.node.name == name else None

    def _of_rows(self, name: str, number: int, through: Collection[str] = ()) -> tuple[int | None, list[int]]:
        """The value whose sum or maximum over each row another value holds, and the values between the two."""
        between: list[int] = []
        while (equation := self._producers.get(number)) is not None:
            between.append(number)
            (operand, *others) = [n for n in equation.operands if n not in self._program.constants] or (number, number)
            before, after = (self._program.avals[n].shape for n in (operand, number))
            if equation.node.name == name and before[-1:] != (1,):
                rows, found = _axes(before[:-1]), _axes(self._program.avals[between[0]].shape)
                at_rows = equation.node.params["axes"] == (len(before) - 1,) and found[: len(rows)] == rows
                return (operand, between) if at_rows else (None, [])
            if others or not (equation.node.name in through or _keeps_rows(equation.node, before, after)):
                break
            number = operand
        return None, []


def _axes(shape: tuple[Any, ...]) -> list[int]:
    """The axes that have more than one number."""
    return [axis for axis, size in enumerate(shape) if size != 1]


def _keeps_rows(node: Node, before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether a node adds or drops axes of one number, or repeats numbers along a last axis."""
    if node.name == "broadcast_in_dim":
        kept = [node.params["broadcast_dimensions"][axis] for axis in _axes(before)]
        return kept == _axes(after)[: len(kept)]
    kept = [[shape[axis] for axis in _axes(shape)] for shape in (before, after)]
    return kept[0] == kept[1] and node.name in ("reshape", "squeeze", "reduce_sum")


def _both_ways(equation: Equation) -> tuple[tuple[int, int], tuple[int, int]]:
    one, other = equation.operands
    return (one, other), (other, one)


def gradient_of_softmax(_: Node, operands: Sequence[Any]) -> list[jax.Array]:
    """The gradient `[..., n]` of a softmax by its scores.

    Its operands are a cotangent `[..., n]`, exponentials `[..., n]` and their sums `[..., 1]`.
    """
    cotangent, exponentials, total = operands
    probabilities = exponentials / total
    return [probabilities * (cotangent - jnp.sum(cotangent * probabilities, -1, keepdims=True))]
