"""One operation of 16 bits run in float32 instead.

Decides how operands and parameters are widened. Does not decide which operations are; see `_interpreter.py`,
`_verdict.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..._dtypes import FLOAT32, is_floating
from ..._jaxpr import Node
from ._site import Site


def widened(array: Any) -> Any:
    return jnp.asarray(array, FLOAT32) if is_floating(array) and array.dtype.itemsize < 4 else array


def is_narrow_dtype(dtype: Any) -> bool:
    """Whether this is a floating dtype of fewer than 32 bits."""
    try:
        return bool(jnp.issubdtype(dtype, jnp.floating)) and np.dtype(dtype).itemsize < 4
    except TypeError:
        return False


def wide_params(node: Node) -> dict[str, Any]:
    """The parameters of a node that name a narrow floating dtype, naming float32 instead."""
    params = node.params.items()
    return {key: FLOAT32 for key, value in params if isinstance(value, np.dtype | type) and is_narrow_dtype(value)}


def bind_wide(site: Site, arrays: Sequence[Any]) -> list[Any]:
    """Runs an operation on operands that were widened; one that cannot (an opaque kernel, bit patterns) as recorded."""
    node = site.node
    if node.name == "reduce_precision":
        return list(arrays)
    if node.name != "bitcast_convert_type":
        try:
            return site.bind(arrays, **wide_params(node))
        except Exception:  # whatever a primitive says of operands it was not recorded with
            pass
    avals: list[Any] = [var.aval for var in node.eqn.invars]
    pairs = zip(arrays, avals, strict=True)
    recorded = [jnp.asarray(x, aval.dtype) if is_floating(x) and x.dtype != aval.dtype else x for x, aval in pairs]
    return list(map(widened, site.bind(recorded)))
