"""Passing a tree with leaves that are no arrays through JAX's tracing.

Decides what counts as an array: a leaf with one of JAX's dtypes. All other leaves (flags, strings, functions, Python
numbers) are moved into the tree's structure, which JAX compares and caches by, and back.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer

Tree = TypeVar("Tree")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class _Static:
    """A leaf as part of the structure, equal to one of the same type and value; if not comparable, to itself only."""

    value: Any

    def _key(self) -> Any:
        if isinstance(self.value, float):
            return self.value.hex()  # 0.0 == -0.0
        try:
            hash(self.value)
        except TypeError:
            return id(self.value)
        return self.value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or type(self.value) is not type(other.value):
            return False
        return bool(self._key() == other._key())

    def __hash__(self) -> int:
        return hash((type(self.value), self._key()))


def is_argument(leaf: Any) -> bool:
    """Whether a leaf is an array, or a number that JAX makes an array; a Python boolean is a static flag.

    >>> [is_argument(leaf) for leaf in (np.ones(2), 0.1, 3, True, "train")]
    [True, True, True, False, False]
    """
    return _is_array(leaf) or (isinstance(leaf, int | float | complex) and not isinstance(leaf, bool))


def of_hidden(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as a function of arguments that `hide_static` returned."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*reveal_static(args), **reveal_static(kwargs))
        except (TypeError, ValueError) as error:
            note_numbers(error, (args, kwargs))
            raise

    return run


# Parts of JAX's errors for a traced number where Python needs its value, or where a `jit` of the user has it static.
_NEEDS_NUMBER = ("concrete value", "Non-hashable static arguments")


def note_numbers(error: Exception, args: Any) -> None:
    """Adds a note to JAX's errors about a number that Python code needs to know, but that is traced in `args`.

    JAX's own message advises `static_argnums` of a `jit`, which does not help here.
    """
    if any(sign in str(error) for sign in _NEEDS_NUMBER) and any(map(_is_traced_number, jax.tree.leaves(args))):
        error.add_note(
            "Numbers among the arguments are traced, as by jax.jit, but there is no `static_argnums` here. Bind one "
            "that Python code needs to know, such as a length: `functools.partial(fn, n=3)` instead of `fn`."
        )


def _is_traced_number(leaf: Any) -> bool:
    return isinstance(leaf, Tracer) and leaf.shape == () and leaf.weak_type


def is_jax_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"  # objects, text and dates, which JAX has no arrays of
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape") and not isinstance(leaf, type)  # as np.float32 is


def hide_static(tree: Tree, is_array: Callable[[Any], bool] = _is_array) -> Tree:
    """Returns `tree` with every leaf that is no array moved into its structure.

    >>> jax.tree.leaves(hide_static({"x": jax.numpy.ones(2), "train": True}))
    [Array([1., 1.], dtype=float32)]
    """
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else _Static(leaf), tree)


def reveal_static(tree: Tree) -> Tree:
    """Undoes `hide_static`.

    >>> reveal_static(hide_static({"name": "Dense", "train": True}))
    {'name': 'Dense', 'train': True}
    """
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, _Static) else leaf,
        tree,
        is_leaf=lambda leaf: isinstance(leaf, _Static),
    )
