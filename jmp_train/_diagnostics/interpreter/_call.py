"""A call to be run operation by operation: traced, with the concrete arguments and the paths of what goes in and out.

Decides what is accepted as an argument. Does not run anything; see `_interpreter.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..._jaxpr import trace
from ..._paths import leaf_paths
from ..._static import hide_static, reveal_static
from ..formats._bits import check_readable
from ._interpreter import Machine
from ._site import Value


class Call(NamedTuple):
    """A traced call: the program, its arguments, the paths of both its arguments and its results."""

    machine: Machine
    args: list[Value]
    in_paths: list[str]
    out_paths: list[str]


def traced_call(caller: str, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Call:
    """Traces `fn` on concrete arguments, those that are no arrays as they are; `caller` is for the errors."""
    hidden = hide_static((args, kwargs))
    leaves = jax.tree.leaves(hidden)
    in_paths = [path.partition("/")[2] for path in leaf_paths(hidden)]  # without the 0 of `args`, the 1 of `kwargs`
    for path, leaf in zip(in_paths, leaves, strict=True):
        check_readable(caller, f"the argument '{path}'", leaf)
        if isinstance(leaf, Tracer):
            raise TypeError(f"the argument '{path}' is traced: {caller} needs numbers; call it outside jit, on arrays.")

    def program(hidden: Any) -> Any:
        args, kwargs = reveal_static(hidden)
        return hide_static(fn(*args, **kwargs))

    jaxpr, shape = trace(program, hidden)
    arrays = [jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf for leaf in leaves]
    return Call(Machine(jaxpr), list(map(Value, arrays)), in_paths, leaf_paths(shape))
