"""Tree paths as text, and the globs that pick leaves by them.

Decides how a path is written (`params/Block_1/BatchNorm_0/scale`), when a glob matches it and which of several
overrides wins. Does not decide what becomes of a leaf that is picked; see `Policy.overrides` in `_policy.py`.
"""

import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from glob import escape
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.typing import DTypeLike

from ._text import short_repr

OverrideFunction: TypeAlias = Callable[[str, Any], DTypeLike | None]
Override: TypeAlias = tuple[str, np.dtype] | OverrideFunction
OverridesLike: TypeAlias = (
    Mapping[str, DTypeLike] | OverrideFunction | Iterable[tuple[str, DTypeLike] | OverrideFunction]
)

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Flax keeps fp8 scales and maxima under this key and replaces them by their "gradient": nobody else may touch them."""

# The boxes that put an attribute `value` between the name a user knows and the array: nnx.Param, nn.Partitioned.
# Known by name, so that Flax need not be installed.
_BOXES = {"flax.nnx.variablelib.Variable", "flax.core.meta.AxisMetadata"}


@functools.cache
def _is_box_type(kind: type) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" in _BOXES for base in kind.__mro__)


def _is_box(node: Any) -> bool:
    return _is_box_type(type(node))


def path_string(path: Sequence[Any]) -> str:
    """Writes a path of `jax.tree_util` key entries as segments with slashes between them.

    >>> tree = {"params": {"Dense_0": [1.0, 2.0]}}
    >>> [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    ['params/Dense_0/0', 'params/Dense_0/1']
    """
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def leaf_paths(tree: Any) -> list[str]:
    """Returns the path of every leaf, in the order of `jax.tree.leaves`.

    The `value` that an NNX variable (or a Linen metadata box) adds to the path is left out.

    >>> leaf_paths({"b": {"w": 1.0, "x": (2.0, None)}, "a": 3.0})
    ['a', 'b/w', 'b/x/0']
    >>> leaf_paths(1.0)
    ['']
    """
    paths = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_box):
        if _is_box(node):
            inside = jax.tree_util.tree_leaves_with_path(node)
            paths += [path_string((*path, *rest[1:])) for rest, _ in inside]
        else:
            paths.append(path_string(path))
    return paths


def argument_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Returns `(path, leaf)` for every leaf of a call's arguments.

    >>> argument_leaves(({"w": 1.0},), {"scale": 2.0})
    [('0/w', 1.0), ('scale', 2.0)]
    """
    paths = [path.partition("/")[2] for path in leaf_paths((args, kwargs))]  # without the number of `args` or `kwargs`
    return list(zip(paths, jax.tree.leaves((args, kwargs)), strict=True))


def missing_and_extra(tree: Any, like: Any) -> tuple[list[str], list[str]]:
    """The paths of leaves that `tree` has not and `like` has, and the other way round.

    >>> missing_and_extra({"w": 1, "scale": 2}, {"w": 1, "bias": 2})
    (['bias'], ['scale'])
    """
    found, expected = set(leaf_paths(tree)), set(leaf_paths(like))
    return sorted(expected - found), sorted(found - expected)


def node_difference(tree: Any, like: Any, path: tuple[Any, ...] = ()) -> str | None:
    """Where the nodes of two trees whose leaves have the same paths first differ, as text; `None` if nowhere.

    >>> node_difference({"a": [1.0]}, {"a": (1.0,)})
    "a list and a tuple at 'a'"
    >>> node_difference({"a": 1.0}, {"a": {"": 1.0}})
    "a leaf and a dict at 'a'"
    """
    if jax.tree.structure(tree) == jax.tree.structure(like):
        return None
    children, kind = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    others, other_kind = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda node: node is not like)
    if kind != other_kind:
        leaf = jax.tree.structure(0)
        one, other = ("leaf" if jax.tree.structure(x) == leaf else type(x).__name__ for x in (tree, like))
        what = f"a {one} and a {other}" if one != other else f"two of type {one} with other keys or static fields"
        return f"{what} at {path_string(path)!r}"
    found = (node_difference(x, y, (*path, *key)) for (key, x), (_, y) in zip(children, others, strict=True))
    return next(filter(None, found), None)


def glob_matches(glob: str, path: str) -> bool:
    """Returns whether the segments of `glob` match as many consecutive whole segments of `path`, at any depth.

    Within a segment `*`, `?` and `[...]` have their meaning in file names, upper and lower case differ, and no wildcard
    crosses a slash. Paths below a match are matched as well: the glob of a layer finds its parameters. With a last
    segment `.` they are not: `Net/.` matches paths that end with `Net`, and `.` only the empty path.

    >>> glob_matches("BatchNorm*", "params/Block_1/BatchNorm_0/scale")
    True
    >>> glob_matches("Block_?/*/scale", "params/Block_1/BatchNorm_0/scale")
    True
    >>> glob_matches("Norm", "params/Block_1/BatchNorm_0/scale")
    False
    >>> glob_matches("Block_1/.", "Net/Block_1"), glob_matches("Block_1/.", "Net/Block_1/Dense_0")
    (True, False)
    """
    wanted, found = glob.split("/"), path.split("/")
    if wanted[-1] == ".":
        # At the end only; the empty path has no segments, and no other path ends in none.
        wanted = wanted[:-1] or [""]
        starts = range(max(0, len(found) - len(wanted)), len(found) - len(wanted) + 1)
    else:
        starts = range(len(found) - len(wanted) + 1)
    return any(all(map(fnmatch.fnmatchcase, found[start:], wanted)) for start in starts)


def pick(overrides: Iterable[Override], tree: Any, to_dtype: Callable[[DTypeLike], np.dtype]) -> list[np.dtype | None]:
    """Returns for each of `jax.tree.leaves(tree)` the dtype of the last override that applies to it, or `None`.

    Raises:
      ValueError: a glob matches nothing in a tree that has leaves; the message names near misses.
    """
    leaves, paths = jax.tree.leaves(tree), leaf_paths(tree)
    chosen: list[np.dtype | None] = [None] * len(leaves)
    for entry in overrides:
        if callable(entry):
            answers = [entry(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
            found = [None if answer is None else to_dtype(answer) for answer in answers]
        else:
            found = [entry[1] if glob_matches(entry[0], path) else None for path in paths]
            if paths and not any(found):
                raise ValueError(nothing_matches("overrides", entry[0], paths))
        chosen = [new or old for new, old in zip(found, chosen, strict=True)]
    return chosen


def to_overrides(value: OverridesLike, to_dtype: Callable[[DTypeLike], np.dtype]) -> tuple[Override, ...]:
    """Returns overrides in canonical form: a tuple of `(glob, np.dtype)` pairs and functions.

    Args:
      value: a dictionary, a function `(path, leaf) -> dtype | None`, or a sequence of pairs and functions.
      to_dtype: returns the canonical form of a dtype, or raises.

    Raises:
      TypeError: something else.
      ValueError: a glob that can match nothing, or that the text form of a policy could not carry.
    """
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if callable(value):
        value = (value,)
    entries = None if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if entries is None or not all(callable(entry) or _is_pair(entry) for entry in entries):
        raise TypeError(
            f"`overrides` must be (glob, dtype) pairs such as (('BatchNorm*', 'float32'),), or functions "
            f"(path, leaf) -> dtype | None; got {short_repr(value)}."
        )
    return tuple(entry if callable(entry) else (_check_text_form(entry[0]), to_dtype(entry[1])) for entry in entries)


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], str)


def glob_of(path: str) -> str:
    """A glob for `overrides` that matches this path.

    >>> glob_of("layers/w[0]"), glob_of("a=b"), glob_of(""), glob_of("a/"), glob_of(" a")
    ('layers/w[[]0]', 'a?b', '.', 'a/*', '?a')
    """
    glob = "/".join(segment or "*" for segment in escape(path).split("/")) if path else "."
    glob = glob.replace(",", "?").replace("=", "?")
    glob = f"?{glob[1:]}" if glob[0] in "< " else glob
    return f"{glob[:-1]}?" if glob.endswith(" ") else glob


def check_glob(argument: str, glob: str) -> str:
    """The glob without spaces around it.

    Raises:
      ValueError: a segment is empty.
    """
    glob = glob.strip()
    if not all(glob.split("/")):
        raise ValueError(
            f"`{argument}`: the glob {glob!r} has an empty segment; write whole segments such as 'BatchNorm*' or "
            f"'Block_1/Dense_0', without a slash at either end."
        )
    return glob


def _check_text_form(glob: str) -> str:
    glob = check_glob("overrides", glob)
    # `str(policy)` separates with these; '@<' is how it shows a function.
    if "," in glob or "=" in glob or glob.startswith("<"):
        raise ValueError(
            f"`overrides`: the glob {glob!r} has a ',', a '=' or a '<' in front, which the text form of a policy uses; "
            f"write '?' in its place."
        )
    return glob


def nothing_matches(argument: str, glob: str, paths: Sequence[str]) -> str:
    """The message for a glob that picks no leaf, with the nearest segments there are."""
    segments = dict.fromkeys(segment for path in paths for segment in path.split("/"))
    near = difflib.get_close_matches(glob.split("/")[-1].strip("*?"), segments, n=3, cutoff=0.5)
    hint = f" (near: {', '.join(map(repr, near))})" if near else ""
    if any(f"/{path}".endswith(f"/{glob}") for path in paths):  # but for what stands in brackets
        hint = f" (write {escape(glob)!r}: brackets in a glob hold characters of which one is to be there)"
    shown = ", ".join(map(repr, paths[:3])) + ", ..." * (len(paths) > 3)
    return (
        f"`{argument}`: the glob {glob!r} matches none of the tree's leaves{hint}; their paths are {shown}. "
        f"A glob matches whole segments, at any depth."
    )
