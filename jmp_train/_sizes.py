"""Sizes of shapes that may have symbolic dimensions: `jax.export` traces a function for every batch size at once.

A symbolic dimension is an expression such as `4*b`. Python's `<`, `sorted`, `max` and `int` raise
`InconclusiveDimensionOperation` for it; `==` and `hash` work, and `==` is False unless both are equal for all values.

Decides what is known of a size before the dimensions have values.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import export

# What a symbolic dimension is assumed to be: a batch or a length, with which most arrays are large.
_SYMBOLIC = 1024


def is_static(*shapes: Sequence[Any]) -> bool:
    """Whether every dimension of the shapes is a number.

    >>> is_static((2, 3), ()), is_static((2,), export.symbolic_shape("b, 3"))
    (True, False)
    """
    return not any(export.is_symbolic_dim(dimension) for shape in shapes for dimension in shape)


def static_size(shape: Sequence[Any]) -> int | None:
    """The number of elements, `None` if a dimension is symbolic.

    >>> static_size((2, 3)), static_size(export.symbolic_shape("b, 3"))
    (6, None)
    """
    return math.prod(shape) if is_static(shape) else None


def assumed(size: Any) -> int:
    """The size of an axis, a symbolic one taken for a large one."""
    return size if isinstance(size, int) else _SYMBOLIC


def assumed_shape(aval: Any) -> list[int]:
    """The shape of a value, symbolic dimensions taken for large ones."""
    return list(map(assumed, aval.shape))


def assumed_size(aval: Any) -> int:
    """The number of elements of a value, symbolic dimensions taken for large ones.

    >>> assumed_size(jax.ShapeDtypeStruct((2, 3), "int8"))
    6
    >>> assumed_size(jax.ShapeDtypeStruct(export.symbolic_shape("b, 3"), "int8"))
    3072
    """
    size = math.prod(aval.shape)
    return size if isinstance(size, int) else math.prod(assumed_shape(aval))


def is_single(aval: Any) -> bool:
    """Whether a value is one number. Flax's mutable variables are values without a shape.

    >>> [is_single(jax.ShapeDtypeStruct(shape, "int8")) for shape in ((), (1, 1), (0,), (2,))], is_single("text")
    ([True, True, False, False], False)
    """
    shape = getattr(aval, "shape", None)
    return shape is not None and math.prod(shape) == 1


def itemsize(dtype: Any) -> int:
    """The bytes of one element; zero for an extended dtype without a size, such as those of Flax's fp8 scales.

    >>> itemsize(jax.numpy.dtype("float32")), itemsize(jax.random.key(0).dtype), itemsize(object())
    (4, 8, 0)
    """
    return getattr(dtype, "itemsize", 0)


def size_in_bytes(aval: Any, dtype: Any = None) -> Any:
    """The bytes of a value, in `dtype` if that is given.

    >>> size_in_bytes(jax.ShapeDtypeStruct((2, 3), "float32")), size_in_bytes(jax.ShapeDtypeStruct((2,), "int8"))
    (24, 2)
    >>> size_in_bytes(jax.ShapeDtypeStruct((2, 3), "float32"), jax.numpy.dtype("float16"))
    12
    """
    # The same as `itemsize` without a call, since planning asks for the size of every value.
    return math.prod(aval.shape) * getattr(dtype or aval.dtype, "itemsize", 0)


def is_less(left: Any, right: Any) -> bool:
    """Whether `left < right` for all values of the symbolic dimensions.

    >>> (b,) = export.symbolic_shape("b")
    >>> is_less(2 * b, 3 * b), is_less(b, 8), is_less(8, b), is_less(2, 3)
    (True, False, False, True)
    """
    try:
        return bool(left < right)
    except jax.errors.InconclusiveDimensionOperation:
        return False
