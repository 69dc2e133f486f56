"""Gradients on many devices: differentiate the local loss, then average the gradients in `reduce_dtype`.

Decides over which axes a gradient is averaged, where, and in which dtype it is sent. Does not decide whether a step is
skipped; `with_loss_scale(axis_name=...)` makes all devices agree on that (`_optimizer.py`).

In a `shard_map` that checks which values vary over its axes, JAX sums the gradient of a replicated parameter over the
devices on its own, in the dtype that the parameter was cast to. A mean taken later is then a mean of equal sums. So the
parameters are declared varying before the loss is differentiated: gradients then stay local, and the only sum over
devices is the one in this file.
"""

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike

from ._dtypes import FLOAT32, at_least_float32
from ._finite import is_gradient

T = TypeVar("T")
AxisName = Hashable | Sequence[Hashable]


def axes_of(axis_name: AxisName | None) -> tuple[Hashable, ...]:
    """The axes that `axis_name` names, one or several."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def check_axes(axes: Sequence[Hashable]) -> None:
    """Raises unless every axis belongs to an enclosing `shard_map`, `pmap` or `vmap`, and is named once."""
    for axis in axes:
        if isinstance(axis, int) or axes.count(axis) > 1:
            raise ValueError(
                f"`axis_name` must be the name of an axis, or a tuple of different names, got {axes!r}; "
                f"for a position pass the name that the axis has in the mesh."
            )
        try:
            jax.lax.axis_size(axis)
        except NameError:
            raise ValueError(
                f"`axis_name` must name an axis of an enclosing jax.shard_map, jax.pmap or jax.vmap, got {axis!r}, "
                f"which is none here; under jax.jit over a sharded mesh leave axis_name out: the mean over the whole "
                f"batch is in the loss already."
            ) from None


def local(tree: T, axes: Sequence[Hashable]) -> T:
    """`tree` declared to vary over `axes`, so that its gradient is not summed over devices; integers stay."""
    manual = set(jax.sharding.get_abstract_mesh().manual_axes) & set(axes)  # the axis of a vmap has no such notion

    def declare(leaf: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            return leaf
        missing = tuple(axis for axis in axes if axis in manual - varying_axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(declare, tree)


def varying_axes(leaf: Any) -> frozenset[Any]:
    """The mesh axes over which JAX knows a value to differ; none where it does not check."""
    return jax.typeof(leaf).manual_axis_type.varying


def check_local(loss: ArrayLike, axes: Sequence[Hashable]) -> None:
    """Raises for a loss that was averaged over one of `axes` already, where JAX can tell."""
    if not isinstance(loss, Tracer):
        return  # a constant, which is its own mean
    reduced = [axis for axis in axes if axis in _checked(axes) - varying_axes(loss)]
    if reduced:
        raise ValueError(
            f"`loss_fn` must return the mean loss of this device's part of the batch, got one that is equal on all "
            f"devices of axis {reduced[0]!r}; leave the jax.lax.pmean or psum over {reduced[0]!r} to "
            f"value_and_grad(axis_name={reduced[0]!r}), which averages loss and gradients."
        )


def mean_values(new: Sequence[Any], old: Sequence[Any], axes: Sequence[Hashable]) -> list[Any]:
    """`new` values of a model's state, such as BatchNorm's statistics, made equal on all devices of `axes` as `old` is.

    Floating and complex values are averaged, in at least float32. Integers and keys are returned as they are, and so
    are values that differed between devices from the start, or that are known to be equal already.
    """

    def mean(after: Any, before: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(after), jnp.inexact):
            return after
        known_equal = _checked(axes) - varying_axes(after)
        over = tuple(axis for axis in axes if axis not in known_equal | varying_axes(before))
        return _mean(after, over, jax.lax.axis_size(over), FLOAT32).astype(after.dtype) if over else after

    return [mean(after, before) for after, before in zip(new, old, strict=True)]


def mean_gradients(grads: T, like: Any, axes: Sequence[Hashable], reduce_dtype: Any) -> T:
    """The mean of every gradient over the devices of `axes`.

    Args:
      grads: gradients of the local mean loss; scaled or not.
      like: the values of which they are the gradients, before `local`. A leaf may vary over an axis from the start: a
        shard of a parameter that the loss gathers. The transpose of that gather has already summed the gradients of all
        devices, so that over such an axis the mean is a division, and nothing is sent.
      axes: the axes.
      reduce_dtype: the dtype in which floating gradients of 16 or 32 bits are sent. If it is narrower than float32,
        gradients are rounded after the division, so that the sum of the devices' shares is in range if the mean is.

    Returns:
      A tree like `grads`, in the same dtypes, except that 16-bit gradients become float32: the mean is not rounded
      again. Flax's `_overwrite_with_gradient` statistics (largest magnitudes, and scales computed from them) are the
      largest over the devices. Leaves that are no gradients (float0, integers) are returned as they are.
    """

    def mean(path: Any, grad: Any, value: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(grad), jnp.inexact):
            return grad
        over = tuple(axis for axis in axes if axis not in varying_axes(value))
        if not is_gradient(path, grad):
            return jax.lax.pmax(grad, over) if over else grad
        return _mean(grad, over, jax.lax.axis_size(tuple(axes)), reduce_dtype)

    return jax.tree_util.tree_map_with_path(mean, grads, like)


def _checked(axes: Sequence[Hashable]) -> frozenset[Any]:
    """Those of `axes` for which JAX knows what varies over them."""
    return varying_axes(local(jnp.zeros(()), axes))


def _mean(grad: jax.Array, over: tuple[Hashable, ...], devices: int, reduce_dtype: Any) -> jax.Array:
    """The sum over the axes `over`, divided by a number of devices; in at least float32."""
    wide = at_least_float32(grad.dtype)
    share = grad.astype(wide) / devices
    if not over:
        return share
    wire = reduce_dtype if wide == FLOAT32 else wide
    return jax.lax.psum(share.astype(wire), over).astype(wide)
