"""Trained parameters cast to 16 bits for inference, with a check that none overflows.

Decides how trained parameters are cast for inference. Does not decide how the function that uses them is exported;
that is `jax.export`.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._dtypes import facts, is_floating
from ._paths import glob_of, leaf_paths
from ._policy import Policy, get_policy

Tree = TypeVar("Tree")


def export_params(params: Tree, policy: Policy | str) -> Tree:
    """Returns the parameters in the dtype in which they compute: half the bytes to store, send and read for inference.

    Casts as `policy.cast_to_compute` does, overrides included, and checks that no parameter overflows: a parameter
    beyond 65,504 would silently be infinite in float16. Pass the parameters alone. BatchNorm's statistics are no
    parameters and stay in float32, as in training; a variance can exceed float16's range.

    Run the model under `autocast`, which reads 16-bit parameters as they are and keeps the operations that need range
    in float32, as in training: softmax and the statistics of norms. A model whose layers choose their own dtype needs
    no `autocast`.

    Args:
      params: trained parameters: a tree of arrays, an `nnx.State`, or `master_params(opt_state, params)`. Traced values
        and `ShapeDtypeStruct`s are cast without the check.
      policy: a `Policy`, or a name for `get_policy`; only its compute dtype and `overrides` are used.

    Raises:
      ValueError: a parameter is finite and its cast is not; a glob of `overrides` matches nothing.

    Example: a function with its 16-bit parameters inside, for any batch size. `exported.serialize()` makes bytes of it
    (with the package flatbuffers), which `jax.export.deserialize` reads back without the model's code.

      >>> from jmp_train import autocast
      >>> params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
      >>> weights = export_params(params, "mixed_float16")
      >>> def predict(params, x):
      ...     return jax.nn.softmax(x @ params["w"] + params["b"])
      >>> run = autocast(predict, "mixed_float16")
      >>> x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 4"), jnp.float32)
      >>> exported = jax.export.export(jax.jit(lambda x: run(weights, x)))(x)
      >>> exported.call(jnp.ones((3, 4))).shape
      (3, 2)
    """
    policy = get_policy(policy)
    cast = policy.cast_to_compute(params)
    for path, before, after in zip(leaf_paths(params), jax.tree.leaves(params), jax.tree.leaves(cast), strict=True):
        if after is before or isinstance(before, Tracer | jax.ShapeDtypeStruct) or not is_floating(before):
            continue
        numbers: Any = np if isinstance(before, np.ndarray | np.generic) else jnp  # JAX would make float32 of float64
        magnitude = numbers.max(numbers.abs(before), initial=0, where=numbers.isfinite(before))
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(magnitude.astype(after.dtype))
        if not is_finite:
            wide = "float32" if magnitude <= facts("float32").max else "float64"
            choice = ", or choose bfloat16" if magnitude <= facts("bfloat16").max else ""
            raise ValueError(
                f"`params`: {path!r} holds {magnitude:.6g}, beyond the {facts(after.dtype).max:.6g} of {after.dtype}; "
                f"keep it wide with overrides={{{glob_of(path)!r}: '{wide}'}}{choice}."
            )
    return cast
