"""Every cast, saved copy, rematerialization and rounding as an equation of its own.

    a:f16 = dot_general x:f16 w:f16          b:f16 = cast w
    h:f32 = exp a:f32                        a:f16 = dot_general x b
    ...                                ->    c:f32 = cast a
    g:f32 = mul h* y:f32                     h:f32 = exp c
                                             d:f16 = saved a
                                             e:f32 = cast d
                                             f:f32 = remat exp e
                                             g:f32 = mul f y

Decides where these equations are placed: in front of the first equation that reads them, once for each value, dtype and
side of a dot. Does not decide which are needed; see `assign_dtypes.py` and `save_or_remat.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._dtypes import BFLOAT16
from ..._jaxpr import Node
from ..ir import (
    SEPARATE,
    SHARED,
    Equation,
    Op,
    Precision,
    Program,
    Residuals,
    Use,
    added,
    is_float32,
    is_on_host,
    with_dtype,
)


def insert_casts(program: Program) -> Program:
    """The program in which no use names a dtype."""
    return _Writer(program).written()


class _Writer:
    """Writes the explicit program, equation by equation."""

    def __init__(self, program: Program):
        self.source, self.residuals = program, program.residuals
        self.program = program.replace(
            avals=[*program.avals], constants=dict(program.constants), equations=[], residuals=Residuals()
        )
        self.avals, self.equations = self.program.avals, self.program.equations
        for number, fact in enumerate(program.facts):
            if fact is not None and fact.precision is Precision.LOW:
                self.avals[number] = with_dtype(self.avals[number], program.low)
        self.producers = program.producers()
        self.has_backward = program.context.planner.has_backward
        self.copies: dict[Use, Use] = {}
        self.rematerialized: dict[int, dict[int, int]] = {}  # of each kind of residual

    def written(self) -> Program:
        for equation in self.source.equations:
            if not equation.dead:
                self.write(equation)
        # Casts of results run under the source line of the last equation: no equation reads them.
        last = self.source.recorded.nodes[-1] if self.source.recorded.nodes else None
        results = zip(self.source.outputs, self.source.dtypes_of(self.source.result_precisions), strict=True)
        return self.program.replace(outputs=tuple(self.read(Use(n, dtype), last).value for n, dtype in results))

    def write(self, equation: Equation) -> None:
        node = equation.node
        uses = [self.read(use, node) for use in equation.uses]
        stored = equation.results
        computed = stored
        if equation.computes:
            computed = [
                number if dtype is None or dtype == self.avals[number].dtype else self._new(number, dtype)
                for number, dtype in zip(stored, equation.computes, strict=True)
            ]
        self.equations.append(equation.replace(uses=uses, results=tuple(computed)))
        for number, result in zip(stored, computed, strict=True):
            if number != result:
                self._add(Op.CAST, (result,), number, node)

    def read(self, use: Use, at: Node | None) -> Use:
        """A use of a value that, read as it is, equals a use in the equation `at`."""
        if not use.residual and (use.dtype is None or use.dtype == self.avals[use.value].dtype):
            return use if use.dtype is None else Use(use.value)
        if use not in self.copies:
            self.copies[use] = Use(self._derived(use, at) if use.residual else self._copy(use, at))
        return self.copies[use]

    def _copy(self, use: Use, at: Node | None) -> int:
        """The value in another dtype than its own."""
        value, dtype = use.value, use.dtype
        constants = self.program.constants
        # A literal in another dtype is another literal. A captured array may be a tracer, or large: XLA casts it.
        if value in constants and value not in self.source.captured:
            with np.errstate(over="ignore"):  # becomes infinity without a warning, as on a device
                constants[self._new(value, dtype)] = np.asarray(constants[value], dtype)
            return len(self.avals) - 1
        return self._cast(value, value, dtype, at)

    def _derived(self, use: Use, at: Node | None) -> int:
        """The value that a use across a dot reads; if `jax.grad` may follow, it has the derivative of the near cast.

        A value in 16 bits that float32 equations read on both sides of a dot is cast twice, and `jax.grad` would round
        the cotangent of each cast before it adds them, though they may cancel. `Op.COPY_OF` passes the cotangent of the
        far cast to the near one, so that they are added in float32.
        """
        copy, plain = self._residual(use, at), self.copies.get(Use(use.value, use.dtype))
        is_widened = is_float32(self.avals[copy]) and self.avals[use.value].dtype == self.source.low
        if plain is None or self.has_backward or not is_widened:
            return copy
        return self._add(Op.COPY_OF, (plain.value, copy), self._new(copy), at, {})

    def _residual(self, use: Use, at: Node | None) -> int:
        (value, dtype, residual), low = use, self.source.low
        if value in self.residuals.remat:
            again = self._rematerialized(value, residual, at)
            return self._cast(value, again, dtype, at) if dtype not in (None, self.avals[again].dtype) else again
        if dtype not in (None, low):
            saved = self.read(Use(value, low, SHARED), at).value
            copy = self._add(Op.CAST, (saved,), self._new(value, dtype), at)
            # XLA for CPUs computes bfloat16 in float32, and drops the rounding of values behind a barrier: without this
            # the probabilities of a softmax summed to 0.998 or 1.002.
            is_rounded = low == BFLOAT16 or residual >= SEPARATE
            return self._round(value, copy, at, residual=residual) if is_rounded else copy
        # Without a barrier XLA may compute the value again in the kernel of each reader, and store its sources for
        # that: float32 values, or several arrays.
        copy = self.read(Use(value, dtype), at).value
        params = {"by_product": True} if value in self.residuals.by_product else {}
        return self._add(Op.SAVED, (copy,), self._new(copy), at, params)

    def _cast(self, value: int, source: int, dtype: np.dtype | None, at: Node | None) -> int:
        """`source`, which is `value` or equal to it, in another dtype, on the compute dtype's grid where it must be."""
        put = self.producers.get(value)
        if put is not None and put.node.name == "device_put" and is_on_host(self.avals[value]):
            # A value on the host is cast on the device that it comes from: XLA casts slowly on the host.
            (operand,) = put.uses
            result = self._new(value, dtype)
            self.equations.append(put.replace(uses=[self.read(operand._replace(dtype=dtype), at)], results=(result,)))
            return result
        return self._round(value, self._add(Op.CAST, (source,), self._new(value, dtype), at), at)

    def _round(self, value: int, copy: int, at: Node | None, **params: Any) -> int:
        """A float32 copy of a value, on the compute dtype's grid if all its readers have to see that."""
        if value not in self.residuals.rounded:
            return copy
        return self._add(Op.ROUND, (copy,), self._new(copy), at, {"dtype": self.source.low, **params})

    def _rematerialized(self, value: int, residual: int, at: Node | None) -> int:
        # Not by recursion: an unrolled iteration is a chain of hundreds of equations.
        made = self.rematerialized.setdefault(residual, {})
        needed, pending = set(), {value} - made.keys()
        while pending:
            needed |= pending
            uses = [use for each in pending for use in self.producers[each].uses]
            again = {use.value for use in uses if use.value in self.residuals.remat or self._is_in_full(use)}
            pending = again - made.keys() - needed
        for each in sorted(needed):  # values are numbered in the order in which they are computed
            if each in made:  # another part of a `split`
                continue
            equation = self.producers[each]
            operands = [self._again(use, residual, at) for use in equation.uses]
            results = tuple([self._new(number) for number in equation.results])
            made.update(zip(equation.results, results, strict=True))
            self.equations.append(equation.replace(uses=operands, results=results, at=at, remat=True, dead=False))
        return made[value]

    def _is_in_full(self, use: Use) -> bool:
        """Whether a rematerialized equation reads an operand in float32, rather than the low copy."""
        return use.value in self.residuals.in_full and not use.residual

    def _again(self, use: Use, residual: int, at: Node | None) -> Use:
        """The operand of a rematerialized equation, for readers that read the equation's result as `residual`."""
        if self._is_in_full(use):
            return Use(self.rematerialized[residual][use.value])
        is_residual = use.value in self.residuals.saved or use.value in self.residuals.remat
        return self.read(use._replace(residual=residual if is_residual else 0), at)

    def _add(
        self, op: Op, operands: Sequence[int], result: int, at: Node | None, params: dict[str, Any] | None = None
    ) -> int:
        params = {"dtype": self.avals[result].dtype} if params is None else params
        self.equations.append(added(op, at, operands, result, **params))
        return result

    def _new(self, value: int, dtype: np.dtype | None = None) -> int:
        return self.program.new(with_dtype(self.avals[value], dtype))
