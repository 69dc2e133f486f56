"""Products of float32 numbers that are computed in float32, not in TF32.

    a:f32 = dot_general x:f32 w:f32      ->      a:f32 = dot_general[highest] x:f32 w:f32

Without a precision of its own a product of float32 numbers runs in TF32 on GPUs since Ampere: with 10 bits of mantissa,
as float16 has. A product that the plan, rules or a `full_precision` region keep in float32 is kept there for accuracy,
and so are products in programs that run as recorded, such as solvers. A precision that the product or the policy sets
stays.

Decides nothing else. Kernels, exported functions and rules that JAX calls later (of `custom_jvp`, `custom_vjp` and
`custom_vmap`) are left as they are.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from jax import lax

from ..._attention import ATTENTION_TANGENT
from ..._dtypes import FLOAT32
from ..._jaxpr import JaxprEqn, with_params, with_programs
from ..ir import Program
from ..primitives import DOTS, WITH_PROGRAMS, Trait, having

_ATTENTION = having(Trait.ATTENTION) | {ATTENTION_TANGENT}
_WITH_PRECISION = DOTS | _ATTENTION


def without_tf32(program: Program) -> Program:
    """The program whose products of float32 numbers have the precision of float32."""
    equations, avals = [*program.equations], program.avals
    known: dict[Any, Any] = {}  # a program that several calls share stays shared: JAX lowers it once
    for i, equation in enumerate(equations):
        name, params = equation.node.name, {}
        if name in _WITH_PRECISION:
            dtypes = [read_in or avals[number].dtype for number, read_in, _ in equation.uses[:2]]
            params = _precision_of(name, equation.node.params, dtypes, avals[equation.results[0]].dtype)
        elif name in WITH_PROGRAMS and not equation.bodies:  # planned bodies have been through this pass
            params = _programs_of(equation.node.params, known)
        if params:
            equations[i] = equation.replace(params={**params, **equation.params})
    return program.replace(equations=equations)


def _programs_of(params: dict[str, Any], known: dict[Any, Any]) -> dict[str, Any]:
    """The parameters of an equation that runs as recorded which hold products, with other programs."""

    def changed(eqn: JaxprEqn) -> dict[str, Any]:
        name = eqn.primitive.name
        if name in _WITH_PRECISION:
            left, right, result = (cast(Any, var.aval).dtype for var in (*eqn.invars[:2], eqn.outvars[0]))
            return _precision_of(name, eqn.params, (left, right), result)
        return _programs_of(eqn.params, known) if name in WITH_PROGRAMS else {}

    def without_tf32_inside(jaxpr: Any) -> Any:
        if jaxpr not in known:
            known[jaxpr] = with_params(jaxpr, changed)
        return known[jaxpr]

    return with_programs(params, without_tf32_inside)


def _precision_of(name: str, params: dict[str, Any], operands: Sequence[np.dtype], result: np.dtype) -> dict[str, Any]:
    # Operands of 16 bits are exact in TF32, which has the 10 bits of mantissa of float16 and the exponent of bfloat16.
    if FLOAT32 not in operands or result != FLOAT32:
        return {}
    if name in _ATTENTION:
        settings = params["settings"]
        return {"settings": dataclasses.replace(settings, precision="highest")} if settings.precision is None else {}
    return {"precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)} if params["precision"] is None else {}
