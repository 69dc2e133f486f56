"""Products of float32 numbers that are computed in float32, not in TF32.

    a:f32 = dot_general x:f32 w:f32      ->      a:f32 = dot_general[precision=HIGHEST] x:f32 w:f32

Without a precision of its own a float32 product runs in TF32 on GPUs since Ampere: with 10 bits of mantissa, as float16
has. A product that is kept out of 16 bits, by the plan, by rules or in a `full_precision` region, is so for its digits.
Programs that run as recorded, such as solvers, are included. A precision that was asked for, of the product or by the
policy, stays.

Decides nothing else. Programs of kernels (`pallas_call`) and rules of derivatives are left as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from jax import lax

from ..._dtypes import FLOAT32
from ..._jaxpr import JaxprEqn, with_params, with_programs
from ..ir import Program
from ..primitives import DOTS, TABLE, Rule, Trait, having

if TYPE_CHECKING:
    from ..planner import Context

_ATTENTION = having(Trait.ATTENTION)
_WITH_PROGRAMS = frozenset(name for name, entry in TABLE.items() if entry.rule is Rule.ENTER) | {"custom_linear_solve"}


def without_tf32(program: Program, context: Context) -> Program:
    """The program whose products of float32 numbers say that they are."""
    del context
    equations, avals = [*program.equations], program.avals
    for i, equation in enumerate(equations):
        name, params = equation.node.name, {}
        if name in DOTS:
            dtypes = [read_in or avals[number].dtype for number, read_in, _ in equation.uses[:2]]
            params = _of_product(name, equation.node.params, dtypes, avals[equation.results[0]].dtype)
        elif name in _WITH_PROGRAMS and not equation.bodies:
            params = _of_programs(equation.node.params)
        if params:
            equations[i] = equation.replace(params={**params, **equation.params})
    return dataclasses.replace(program, equations=equations)


def _of_programs(params: dict[str, Any]) -> dict[str, Any]:
    """What changes of the parameters of an equation whose programs run as recorded."""
    return with_programs(params, lambda jaxpr: with_params(jaxpr, _of_recorded))


def _of_recorded(eqn: JaxprEqn) -> dict[str, Any]:
    name = eqn.primitive.name
    if name in DOTS:
        left, right, result = (cast(Any, var.aval).dtype for var in (*eqn.invars[:2], eqn.outvars[0]))
        return _of_product(name, eqn.params, (left, right), result)
    return _of_programs(eqn.params) if name in _WITH_PROGRAMS else {}


def _of_product(name: str, params: dict[str, Any], operands: Sequence[np.dtype], result: np.dtype) -> dict[str, Any]:
    if FLOAT32 not in operands or result != FLOAT32:
        return {}
    if name in _ATTENTION:
        settings = params["settings"]
        return {"settings": dataclasses.replace(settings, precision="highest")} if settings.precision is None else {}
    is_open = "precision" in params and params["precision"] is None
    return {"precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)} if is_open else {}
