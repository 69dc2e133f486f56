"""Finite gradients: which leaves of a tree are gradients, whether they are finite, and the choice that follows.

Decides what an overflow is: an infinity or a NaN in a floating or complex leaf. Does not decide what happens then; see
`_loss_scale.py` for the scale and `_optimizer.py` for the skipped step.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._paths import OVERWRITE_WITH_GRADIENT, missing_and_extra, node_difference, path_string
from ._sizes import is_less
from ._text import short_repr
from ._values import check_reduced, is_array

T = TypeVar("T")

# Leaves of up to 2^16 elements are checked 32 to a kernel. A GPU reads such a leaf in 0.05 us but takes a few us to
# start a kernel, so that 1,000 separate checks cost more than the optimizer's arithmetic. Groups have 32 leaves,
# because XLA computes the check of a smaller group in the kernels that make the leaves, and stores values that it would
# otherwise compute twice: with 16, ResNet-50's step moves 1 % more bytes. A larger leaf is checked alone: then its
# check can share one pass with a gradient norm, and leaves sharded in different ways are not exchanged between devices.
_SMALL_LEAF = 2**16
_LEAVES_PER_KERNEL = 32


def all_finite(tree: Any) -> jax.Array:
    """Whether no floating or complex leaf holds an infinity or a NaN, bool `[]`; true for a tree without such leaves.

    Args:
      tree: any pytree. Leaves that are not floating or complex count as finite, and so do Flax's
        `_overwrite_with_gradient` statistics, which are no gradients. While 64-bit types are disabled, a float64 array
        of NumPy is what JAX computes with, float32: a number beyond that is infinite.

    Raises:
      ValueError: a leaf is unreduced over axes of a mesh, as the gradients of "reduced" parameters are.

    Example:
      >>> bool(all_finite({"w": jnp.ones(3), "step": 7, "unused": None}))
      True
      >>> bool(all_finite([jnp.ones(3), jnp.array([1.0, jnp.inf])]))
      False
    """
    return jnp.all(leaves_finite(tree))


def leaves_finite(tree: Any) -> jax.Array:
    """Whether each leaf of `tree` is finite, bool `[n]` in the order of `jax.tree.leaves`; see `all_finite`."""
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    flags = [jnp.bool_(True)] * len(paths_and_leaves)
    groups: defaultdict[Any, list[tuple[int, jax.Array]]] = defaultdict(list)
    for index, (path, leaf) in enumerate(paths_and_leaves):
        if is_gradient(path, leaf):
            check_reduced(f"the leaf {path_string(path)!r}", leaf)
            finite = jnp.isfinite(leaf)
            # An array's type is its shape, its sharding and the mesh axes it varies over: what a reduction must share.
            small = not is_less(_SMALL_LEAF, finite.size)
            groups[jax.typeof(finite) if small else index].append((index, finite))
    for group in groups.values():
        for start in range(0, len(group), _LEAVES_PER_KERNEL):
            indices, arrays = zip(*group[start : start + _LEAVES_PER_KERNEL], strict=True)
            for index, flag in zip(indices, _all_of_each(arrays), strict=True):
                flags[index] = flag
    return jnp.stack(flags) if flags else jnp.zeros((0,), np.bool_)


def select_tree(pred: ArrayLike, on_true: T, on_false: T) -> T:
    """`on_true` where `pred`, else `on_false`, leaf by leaf and bit for bit.

    A selection, never a product with 0 or 1: 0 * NaN is NaN.

    Args:
      pred: bool `[]`.
      on_true: any pytree of arrays; PRNG keys, integers and float0 included.
      on_false: a tree of the same structure, shapes and dtypes.

    Raises:
      ValueError: `pred` is not one boolean, one tree has leaves or nodes that the other has not, or a leaf has another
        shape or dtype in one than in the other.
      TypeError: a leaf is no array or number.

    Example:
      >>> select_tree(False, {"w": jnp.array([1.0])}, {"w": jnp.array([2.0])})
      {'w': Array([2.], dtype=float32)}
    """
    flag = check_flag("pred", pred)
    if difference := node_difference(on_true, on_false):
        missing, extra = missing_and_extra(on_true, on_false)
        found = f"only in `on_true` are {extra}, only in `on_false` {missing}" if missing or extra else difference
        raise ValueError(f"`on_true` and `on_false` must have the same structure: {found}.")

    def select(path: Any, a: Any, b: Any) -> Any:
        for argument, x in (("on_true", a), ("on_false", b)):
            if not is_array(x):
                raise TypeError(
                    f"`{argument}` must be a tree of arrays, got {short_repr(x)} at {path_string(path)!r}. Select "
                    "between the arrays, and put functions and names back afterwards."
                )
        one, other = ((jnp.shape(x), jnp.result_type(x)) for x in (a, b))
        if one != other:
            raise ValueError(
                f"`on_true` and `on_false` must have the same shapes and dtypes, got {one} and {other} at "
                f"{path_string(path)!r}."
            )
        return jnp.where(flag, a, b)

    return jax.tree_util.tree_map_with_path(select, on_true, on_false)


def is_float0(leaf: Any) -> bool:
    """Whether the leaf is what JAX returns as the gradient of an integer: an array without bits."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def is_gradient(path: tuple, leaf: Any) -> bool:
    """Whether scaling applies to this leaf: a float or complex that is none of Flax's fp8 statistics."""
    dtype = getattr(leaf, "dtype", None)
    inexact = isinstance(leaf, float | complex) if dtype is None else jnp.issubdtype(dtype, np.inexact)
    return inexact and not any(getattr(k, "key", getattr(k, "name", None)) == OVERWRITE_WITH_GRADIENT for k in path)


def map_gradients(fn: Callable[[Any], Any], tree: T) -> T:
    """Applies `fn` to the leaves that `is_gradient`; the others are returned as they are."""
    return jax.tree_util.tree_map_with_path(lambda path, x: fn(x) if is_gradient(path, x) else x, tree)


def check_flag(argument: str, flag: ArrayLike) -> jax.Array:
    """The flag as a bool `[]`, or a `ValueError` that names the argument."""
    array = jnp.asarray(flag) if is_array(flag) else None
    if array is None or array.shape or array.dtype != np.bool_:
        found = type(flag).__name__ if array is None else f"{array.dtype} of shape {array.shape}"
        raise ValueError(f"`{argument}` must be one boolean, got {found}. Pass the result of all_finite(grads).")
    return array


def _all_of_each(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """`jnp.all` of each of several bool arrays of one shape, as a single reduction."""
    dimensions = tuple(range(arrays[0].ndim))
    return tuple(jax.lax.reduce(arrays, (np.True_,) * len(arrays), _and_each, dimensions))


def _and_each(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(a & b for a, b in zip(left, right, strict=True))
