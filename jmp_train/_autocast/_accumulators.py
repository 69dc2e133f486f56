"""Sums that a scan carries in 16 bits, as hand-cast code and 16-bit parameters record them, carried in float32.

The backward pass of a loop adds the gradient of a weight at every iteration to a carry of the weight's dtype. After
2,048 equal terms such a sum in float16 stops growing.

Decides which carries are such sums and writes the loop anew, before anything is planned. Does not decide the dtype of
carries recorded in float32; see `_control_flow.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._dtypes import FLOAT32
from .._jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, as_function, flatten, scan_counts, trace_in_place_of
from ._flow import is_sixteen_bit
from ._loops import adds_terms


def widened(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """The scan that `eqn` is, with its 16-bit sums carried in float32 and rounded at the end; `None` without any."""
    if eqn.primitive.name != "scan":
        return None
    consts, carried = scan_counts(eqn)
    avals: list[Any] = [var.aval for var in eqn.invars]
    narrow = [i for i in range(carried) if is_sixteen_bit(avals[consts + i])]
    body = flatten(eqn.params["jaxpr"]) if narrow else None
    sums = {i for i in narrow if body is not None and adds_terms(body, consts + i, i)}
    if not sums:
        return None
    run, params = as_function(eqn.params["jaxpr"]), eqn.params

    dtypes = [aval.dtype for aval in avals[consts : consts + carried]]

    def loop(*args: jax.Array) -> list[jax.Array]:
        def step(carry: list[jax.Array], rows: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            # Given zero, the body returns what it adds.
            given = [jnp.zeros_like(c, dtypes[i]) if i in sums else c for i, c in enumerate(carry)]
            results = run(*args[:consts], *given, *rows)
            pairs = enumerate(zip(carry, results[:carried], strict=True))
            return [c + new.astype(FLOAT32) if i in sums else new for i, (c, new) in pairs], list(results[carried:])

        starts = enumerate(args[consts : consts + carried])
        carry = [c.astype(FLOAT32) if i in sums else c for i, c in starts]
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, stacked = lax.scan(step, carry, list(args[consts + carried :]), **options)
        return [c.astype(dtypes[i]) if i in sums else c for i, c in enumerate(carry)] + stacked

    return trace_in_place_of(eqn, loop)
