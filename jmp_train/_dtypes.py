"""Names and limits of the floating formats, and the one cast that all other casts use.

Decides which names mean which dtype, what each format can hold, and which leaves of a tree a cast touches. Does not
decide which dtype goes where (see `_policy.py`), and never looks at a device: `half` is float16 everywhere.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ._text import short_repr

Tree = TypeVar("Tree")

FLOAT16 = np.dtype(jnp.float16)
BFLOAT16 = np.dtype(jnp.bfloat16)
FLOAT32 = np.dtype(jnp.float32)
FLOAT64 = np.dtype(jnp.float64)

# The short names are jmp's, except that `half` does not depend on the device.
SHORT_NAMES = {
    "half": FLOAT16,
    "f16": FLOAT16,
    "bf16": BFLOAT16,
    "full": FLOAT32,
    "f32": FLOAT32,
    "f64": FLOAT64,
}
_NARROW = (
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
)
_BY_NAME = {dtype.name: dtype for dtype in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)}
_BY_NAME |= SHORT_NAMES
_BY_NAME |= {name: np.dtype(getattr(jnp, name)) for name in _NARROW}

DTYPE_NAMES = tuple(_BY_NAME)
"""Every name `to_dtype` reads: `float16`, `f16`, `half`, ..."""

# One spelling for each of `jax.lax.Precision`, so that equal policies compare equal.
_PRECISIONS = {
    "default": "default",
    "bfloat16": "default",
    "high": "tensorfloat32",
    "tensorfloat32": "tensorfloat32",
    "highest": "highest",
    "float32": "highest",
} | {preset.name: preset.name for preset in jax.lax.DotAlgorithmPreset if preset.name != "DEFAULT"}


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns ` (did you mean 'x'?)` for the nearest of `valid`, or nothing if none is near.

    >>> did_you_mean("flaot16", ["float16", "float32"])
    " (did you mean 'float16'?)"
    >>> did_you_mean("xyz", ["float16"])
    ''
    """
    folded = {candidate.casefold(): candidate for candidate in valid}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    return f" (did you mean '{folded[near[0]]}'?)" if near else ""


def to_dtype(dtype: DTypeLike, argument: str = "dtype") -> np.dtype:
    """Returns the floating `np.dtype` that a name, scalar type or dtype stands for.

    Args:
      dtype: `"float16"`, `"f16"`, `"half"`, `jnp.bfloat16`, `np.dtype("float32")`, `"float8_e4m3fn"`, ...
      argument: the caller's argument, for the error.

    Raises:
      ValueError: an unknown name, a code of NumPy's such as `"f8"`, or a dtype that is not a real floating one.
      TypeError: not a dtype at all.

    >>> to_dtype("bf16")
    dtype(bfloat16)
    >>> to_dtype("half") == to_dtype(jnp.float16) == np.float16
    True
    """
    if isinstance(dtype, str) and dtype in _BY_NAME:
        return _BY_NAME[dtype]
    # np.dtype(None) and np.dtype(float) are float64; neither is what a JAX user means.
    if dtype is None or dtype is float:
        raise TypeError(
            f"`{argument}` must be a floating dtype such as 'float16' or jnp.float32, "
            f"got {'None' if dtype is None else 'float'}; name the width you want."
        )
    if isinstance(dtype, jax.Array | np.ndarray | np.generic):
        raise TypeError(
            f"`{argument}` must be a floating dtype such as 'float16' or jnp.float32, got an array; pass its dtype, "
            f"'{dtype.dtype}'."
        )
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError, SyntaxError):  # a dict, a list or "f4,f4" is read as the fields of a structure
        if not isinstance(dtype, str):
            raise TypeError(
                f"`{argument}` must be a floating dtype such as 'float16' or jnp.float32, "
                f"got {short_repr(dtype)} of type {type(dtype).__name__}."
            ) from None
        raise ValueError(
            f"`{argument}`: unknown dtype {dtype!r}{did_you_mean(dtype, _BY_NAME)}; "
            f"the floating dtypes are {', '.join(DTYPE_NAMES[:10])} and the 8-, 6- and 4-bit formats of jax.numpy."
        ) from None
    if isinstance(dtype, str) and len(dtype) <= 2 and name in _BY_NAME:  # "f8", where "f16" and "f32" count bits
        raise ValueError(
            f"`{argument}`: {dtype!r} is NumPy's code for {name}, while 'f16' and 'f32' count bits; write {name!r}."
        )
    if name not in _BY_NAME:
        raise ValueError(
            f"`{argument}` must be a floating dtype such as 'float16', 'bfloat16' or 'float32', got {name}; "
            f"leaves that are not real floating numbers are never cast."
        )
    return _BY_NAME[name]


def to_precision(value: str | jax.lax.Precision | None) -> str | None:
    """Returns the one spelling of a matmul precision; `None` stays `None`, which means JAX's default.

    Raises:
      ValueError: an unknown name.
      TypeError: neither a name nor a `jax.lax.Precision`.

    >>> to_precision("float32"), to_precision("high"), to_precision(jax.lax.Precision.HIGHEST)
    ('highest', 'tensorfloat32', 'highest')
    """
    if value is None:
        return None
    name = value.name.lower() if isinstance(value, jax.lax.Precision) else value
    if not isinstance(name, str):
        raise TypeError(f"`matmul_precision` must be a name such as 'highest' or None, got {value!r}.")
    if name not in _PRECISIONS:
        raise ValueError(
            f"`matmul_precision` must be one of 'highest' (float32), 'tensorfloat32', 'default', None or a "
            f"jax.lax.DotAlgorithmPreset, got {name!r}{did_you_mean(name, _PRECISIONS)}."
        )
    return _PRECISIONS[name]


@dataclasses.dataclass(frozen=True)
class Format:
    """What a floating format can hold.

    Attributes:
      name: the dtype's full name.
      bits: its width.
      max: the largest finite value.
      smallest_normal: the smallest positive value with full precision.
      smallest_subnormal: the smallest positive value; half of it and everything below becomes zero.
      eps: the distance from 1 to the next larger value.
    """

    name: str
    bits: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float


@functools.cache
def _facts(dtype: np.dtype) -> Format:
    info = jnp.finfo(to_dtype(dtype))
    numbers = (info.max, info.smallest_normal, info.smallest_subnormal, info.eps)
    return Format(dtype.name, info.bits, *map(float, numbers))


def facts(dtype: DTypeLike) -> Format:
    """Returns the limits of a floating format, as Python numbers.

    >>> facts("float16").max, facts("f16").smallest_subnormal == 2.0**-24
    (65504.0, True)
    >>> facts("bfloat16").smallest_normal == facts("float32").smallest_normal == 2.0**-126
    True
    """
    return _facts(dtype if isinstance(dtype, np.dtype) else to_dtype(dtype))


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """The dtype in which sums of such numbers are computed: the dtype itself if it is 32 bits or wider, else float32.

    As `jnp.promote_types(dtype, float32)`, which raises under `jax_numpy_dtype_promotion="strict"`.

    >>> at_least_float32("bfloat16"), at_least_float32("float64")
    (dtype('float32'), dtype('float64'))
    """
    return FLOAT32 if np.dtype(dtype).itemsize < 4 else np.dtype(dtype)


def is_floating(leaf: Any) -> bool:
    """Returns whether `leaf` is an array, NumPy scalar or `ShapeDtypeStruct` of real floating numbers, of any width.

    Integers, bools, PRNG keys, complex numbers, `float0` and all other objects are not. Python scalars are not either:
    they have no dtype of their own, since JAX promotes them to the dtype of the other operand.

    >>> is_floating(jnp.ones(3)), is_floating(jax.ShapeDtypeStruct((3,), jnp.bfloat16)), is_floating(np.float16(1))
    (True, True, True)
    >>> is_floating(1.0), is_floating(jnp.arange(3)), is_floating(jax.random.key(0)), is_floating("text")
    (False, False, False, False)
    """
    array = isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
    return array and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def cast_leaf(leaf: Any, dtype: np.dtype) -> Any:
    """Casts one leaf, if it is a floating number of 16 bits or more; see `cast_floating`."""
    if not is_floating(leaf) or leaf.dtype == dtype or facts(leaf.dtype).bits < 16:
        return leaf
    if isinstance(leaf, np.ndarray | np.generic):
        # On the host, a value too large for the target becomes infinite as quietly as it does on a device.
        with np.errstate(over="ignore"):
            return leaf.astype(dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            "cannot cast a JAX array to float64 while 64-bit types are disabled: JAX would return float32; "
            "call jax.config.update('jax_enable_x64', True) first, or choose float32."
        )
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(dtype=dtype, weak_type=False)
    return leaf.astype(dtype)


def cast_floating(tree: Tree, dtype: DTypeLike) -> Tree:
    """Casts the floating leaves of `tree` to `dtype` and leaves everything else alone.

    It casts JAX and NumPy arrays, NumPy scalars and `ShapeDtypeStruct`s of 16, 32 or 64 bits; a NumPy array stays one.
    A leaf that already has the dtype is returned itself, not a copy. Integers, bools, PRNG keys, complex numbers,
    `float0`, `None`, Python scalars and objects that are no arrays pass through. Floats of 8 bits and fewer pass
    through too: they are a storage format whose scale is kept elsewhere, so that a cast would yield wrong numbers.

    Args:
      tree: any pytree.
      dtype: the target; see `to_dtype`.

    Returns:
      A tree of the same structure and shapes.

    Raises:
      ValueError: float64 for a JAX array without `jax_enable_x64`, where JAX itself would return float32.

    >>> cast_floating({"step": np.int32(3), "w": np.ones(2, np.float32)}, "float16")
    {'step': np.int32(3), 'w': array([1., 1.], dtype=float16)}
    """
    target = to_dtype(dtype)
    return jax.tree.map(lambda leaf: cast_leaf(leaf, target), tree)


def cast_to_full(tree: Tree) -> Tree:
    """Casts the floating leaves of `tree` to float32; see `cast_floating`.

    >>> cast_to_full(np.ones(2, np.float16)).dtype
    dtype('float32')
    """
    return cast_floating(tree, FLOAT32)


def cast_to_half(tree: Tree) -> Tree:
    """Casts the floating leaves of `tree` to float16, on every device; see `cast_floating`.

    (`jmp.cast_to_half` asks the first device and gives bfloat16 on a TPU; here that is `cast_floating(tree, "bf16")`.)

    >>> cast_to_half(np.ones(2, np.float32)).dtype
    dtype('float16')
    """
    return cast_floating(tree, FLOAT16)
