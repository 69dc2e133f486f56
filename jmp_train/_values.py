"""Frozen values: arguments checked and canonicalised once, and dataclasses that are pytrees.

Decides how a bad number is reported and how a value is rebuilt inside `jit`. Does not decide which numbers are valid;
see `_loss_scale.py`.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ._text import short_repr

_INT32_MAX = 2**31 - 1


def set_fields(value: Any, **fields: Any) -> None:
    """Sets fields of a frozen dataclass, in its own constructor or on a new copy."""
    for name, field in fields.items():
        object.__setattr__(value, name, field)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, its shape or a number; a Linen module, which has a `dtype` too, is not.

    >>> is_array(np.ones(2)), is_array(2.0), is_array("float32"), is_array(np.float32)
    (True, True, False, False)
    """
    has_both = hasattr(leaf, "dtype") and hasattr(leaf, "shape") and not isinstance(leaf, type)
    return has_both or isinstance(leaf, int | float | complex)


def check_callable(argument: str, value: Any, instead: str) -> None:
    """Raises a TypeError for what is no function, and says what to pass `instead`.

    >>> check_callable("fn", [0, 1], "pass the function to compile")
    Traceback (most recent call last):
    TypeError: `fn` must be callable, got [0, 1]; pass the function to compile.
    """
    if not callable(value):
        # Not a whole array: users pass gradients in place of the function that computes them.
        raise TypeError(f"`{argument}` must be callable, got {short_repr(value)}; {instead}.")


def as_argnums(argnums: Any) -> int | tuple[int, ...]:
    """The positions of arguments as JAX takes them: an integer, or a tuple of different ones.

    >>> as_argnums(np.int64(1)), as_argnums([0, 2])
    (1, (0, 2))
    """
    try:
        found = tuple(map(operator.index, argnums)) if isinstance(argnums, Sequence) else operator.index(argnums)
    except TypeError:
        got = short_repr(argnums)
        raise TypeError(f"`argnums` must be an integer or a sequence of integers, got {got}.") from None
    if isinstance(found, tuple) and len(set(found)) < len(found):
        raise ValueError(f"`argnums` must name each argument once, got {argnums!r}.")
    return found


def as_number(argument: str, value: Any) -> float:
    """A finite Python float, rounded to float32, from a number or an array of shape `[]` that is not traced."""
    if isinstance(value, Tracer):
        raise ValueError(f"`{argument}` is part of the program and cannot be traced. Pass a Python number.")
    try:
        array = np.asarray(value)
    except ValueError:  # a tree of arrays, say an optimizer's state
        array = np.empty(0)
    if array.shape or not jnp.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
        got = short_repr(value)
        raise ValueError(f"`{argument}` must be one real number, got {got}. Pass a number such as 2.0.")
    with np.errstate(over="ignore"):
        number = float(array.astype(np.float32))
    if not math.isfinite(number):
        raise ValueError(f"`{argument}` must be finite in float32, got {value!r}. Pass a number such as 2.0.")
    return number


def as_count(argument: str, value: Any, least: int = 1) -> int:
    """A Python int within int32, from an integer that is not traced."""
    try:
        count = operator.index(value)
    except TypeError:
        whole = isinstance(value, float) and value.is_integer() and least <= value <= _INT32_MAX
        example = int(value) if whole else least
        message = f"`{argument}` must be an integer, got {value!r}. Pass an integer such as {example}."
        raise ValueError(message) from None
    if isinstance(value, bool) or not least <= count <= _INT32_MAX:
        raise ValueError(f"`{argument}` must be an integer from {least} to 2**31 - 1, got {value!r}.")
    return count


def check_readable(caller: str, what: str, leaf: Any) -> None:
    """Raises if there are no numbers in an array: it is a shape only, or was donated.

    Raises:
      TypeError: `leaf` is a `jax.ShapeDtypeStruct`.
      ValueError: `leaf` was deleted.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(f"{what} is a shape without numbers, {leaf}: {caller} needs numbers; pass arrays.")
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
        return
    if leaf.is_deleted():
        raise ValueError(
            f"{what} was deleted, by donating it to an earlier call; keep a copy of the arguments, or call {caller} "
            "with fresh ones."
        )


def unreduced_axes(leaf: Any) -> tuple[str, ...]:
    """The mesh axes over which an array is unreduced: each device there holds a part of the sum that it stands for."""
    kind = jax.typeof(leaf)
    # A mesh axis is explicit or, inside a `shard_map` over it, manual.
    return tuple(sorted(kind.sharding.spec.unreduced | kind.manual_axis_type.unreduced))


def spec_of_sum(leaf: Any) -> PartitionSpec:
    """How an unreduced array is sharded once its parts are added up."""
    spec = jax.typeof(leaf).sharding.spec
    return PartitionSpec(*spec.partitions, reduced=spec.reduced)


def check_reduced(what: str, leaf: Any) -> None:
    """Raises a `ValueError` if an array is unreduced: JAX tests no number of it."""
    axes = unreduced_axes(leaf)
    if axes:
        is_manual = bool(jax.typeof(leaf).manual_axis_type.unreduced)
        cure = f"jax.lax.psum(x, {axes})" if is_manual else f"jax.reshard(x, jax.{spec_of_sum(leaf)})"
        raise ValueError(
            f"{what} is unreduced over the mesh axes {axes}: each device holds a part of a sum, and the sum is not "
            f"computed yet; add the parts up first, {cure}."
        )


def as_leaf(argument: str, value: Any, dtype: type, check: Callable[..., float]) -> ArrayLike:
    """A NumPy scalar, which starts no backend; for a traced value, which cannot be checked, a tracer."""
    return jnp.asarray(value, dtype) if isinstance(value, Tracer) else dtype(check(argument, value))


def register(cls: type, leaves: tuple[str, ...], static: tuple[str, ...]) -> None:
    """Registers a dataclass as a pytree whose reconstruction validates nothing.

    `jax.tree_util.register_dataclass` calls the constructor, but JAX also rebuilds trees with tracers, `object()`,
    `None`, shapes and the integers of `in_axes` as leaves.
    """

    def flatten_with_keys(x: Any) -> tuple[tuple, tuple]:
        children = tuple((jax.tree_util.GetAttrKey(name), getattr(x, name)) for name in leaves)
        return children, tuple(getattr(x, name) for name in static)

    def unflatten(aux: tuple, children: Any) -> Any:
        new = object.__new__(cls)
        set_fields(new, **dict(zip(static, aux, strict=True)), **dict(zip(leaves, children, strict=True)))
        return new

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)


def check_state(state: Any, kind: type) -> None:
    """Raises a `TypeError` if `state` is not the state of a transformation, which is a `kind`."""
    if not isinstance(state, kind):
        raise TypeError(
            f"`state` must be the {kind.__name__} that `init` or `update` returned, got {type(state).__name__}. "
            "Pass the whole state, not a part of it."
        )


def check_transformation(inner: Any, caller: str) -> Any:
    """Returns `inner`, or raises a `TypeError` if it is no optax transformation."""
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            f"`inner` must be an optax transformation, got {type(inner).__name__}. "
            f"Pass an optimizer, as in {caller}(optax.adam(1e-3))."
        )
    return inner
