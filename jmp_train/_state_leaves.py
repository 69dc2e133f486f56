"""Each leaf of an optimizer's state: which parameter it belongs to, whether it starts as a copy, whether it may narrow.

Decides which leaves are stored in 16 bits. Does not decide how; see `_low_precision_state.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ._jaxpr import flatten, trace
from ._master_weights import MasterWeightsState
from ._paths import check_glob, glob_matches, leaf_paths, nothing_matches
from ._values import is_array

Where: TypeAlias = str | Sequence[str] | Callable[[str, Any], bool]

# Primitives that return their operand's values.
_SAME = frozenset({"copy", "convert_element_type", "device_put", "sharding_constraint", "optimization_barrier"})


class StateLeaf(NamedTuple):
    """A leaf of the state that a transformation makes.

    Attributes:
      path: in that state.
      shape, dtype: as the transformation makes it.
      parameter: the path of the parameter that it belongs to and has the shape of, if there is one.
      lane: how many leaves before it belong to the same parameter.
      is_copy: whether it starts as a parameter.
      is_master: whether it is one of the copies of `with_master_weights`, which are the parameters.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    parameter: str | None
    lane: int
    is_copy: bool
    is_master: bool

    @property
    def can_be_stored(self) -> bool:
        return self.dtype == np.float32 and len(self.shape) > 0 and not self.is_master


def traced_state(init: Callable[[Any], Any], params: Any) -> tuple[Any, tuple[StateLeaf, ...]]:
    """The state of `init(params)`, with shapes for arrays, and what its leaves are; nothing is computed."""
    leaves, structure = jax.tree.flatten(params)
    known = [None if is_array(x) else x for x in leaves]  # models may have functions as leaves

    def of_arrays(*arrays: Any) -> Any:
        rest = iter(arrays)
        return init(jax.tree.unflatten(structure, [next(rest) if x is None else x for x in known]))

    jaxpr, state = trace(of_arrays, *(x for x in leaves if is_array(x)))
    shapes = {path: jnp.shape(x) for path, x in zip(leaf_paths(params), leaves, strict=True) if is_array(x)}
    facts = zip(leaf_paths(state), jax.tree.leaves(state), _copies(jaxpr), _masters(state), strict=True)
    seen: Counter[str] = Counter()
    found = []
    for path, x, is_copy, is_master in facts:
        parameter, lane = _parameter_of(path, x.shape, shapes), 0
        if parameter is not None and jnp.issubdtype(x.dtype, np.floating):
            lane = seen[parameter]
            seen[parameter] += 1
        found.append(StateLeaf(path, x.shape, x.dtype, parameter, lane, is_copy, is_master))
    return state, tuple(found)


def _parameter_of(path: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The parameter whose path is the longest end of a leaf's path, if it has the leaf's shape."""
    segments = path.split("/")
    if "hyperparams" in segments:  # of `optax.inject_hyperparams`; the path of a parameter that is no tree is empty
        return None
    ends = ("/".join(segments[start:]) for start in range(len(segments) + 1))
    return next((end for end in ends if shapes.get(end) == shape), None)


def _copies(jaxpr: Any) -> list[bool]:
    """Which results of a program are arguments of it, perhaps in another dtype or place."""
    program = flatten(jaxpr)
    same = set(program.inputs)
    for node in program.nodes:
        if node.name in _SAME:
            same.update(out for given, out in zip(node.ins, node.outs, strict=False) if given in same)
    return [number in same for number in program.outputs]


def _masters(state: Any) -> list[bool]:
    """Which leaves of a state are masters; a list, since a tree may ask its leaves for dtypes."""
    found = []
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, MasterWeightsState)):
        if isinstance(node, MasterWeightsState):
            inner, masters = (len(jax.tree.leaves(part)) for part in node)
            found += [False] * inner + [True] * masters
        else:
            found.append(False)
    return found


def check_where(where: Any) -> Any:
    """One of: `None`, a function, a tuple of globs.

    Raises:
      TypeError: it is none of what `Where` allows.
      ValueError: a glob has an empty segment.
    """
    if where is None or callable(where):
        return where
    several = isinstance(where, Iterable) and not isinstance(where, Mapping)
    globs = (where,) if isinstance(where, str) else tuple(where) if several else ()
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(
            f"`where` must be a glob over the state's paths such as 'nu', several, or a function (path, leaf) -> bool; "
            f"got {where!r}."
        )
    return tuple(check_glob("where", glob) for glob in globs)


def chosen(leaves: Sequence[StateLeaf], values: Sequence[Any], where: Any) -> list[bool]:
    """Which leaves are to be stored in 16 bits.

    Raises:
      ValueError: a glob matches none of the leaves that can be.
    """
    if where is None:
        picked = [leaf.parameter is not None and not leaf.is_copy for leaf in leaves]
    elif callable(where):
        picked = [leaf.can_be_stored and bool(where(leaf.path, x)) for leaf, x in zip(leaves, values, strict=True)]
    else:
        paths = [leaf.path for leaf in leaves if leaf.can_be_stored]
        for glob in where:
            if not any(glob_matches(glob, path) for path in paths):
                raise ValueError(
                    f"{nothing_matches('where', glob, paths)} Only float32 arrays of one dimension or more can be "
                    f"stored in 16 bits, and no master weights."
                )
        picked = [any(glob_matches(glob, leaf.path) for glob in where) for leaf in leaves]
    return [leaf.can_be_stored and pick for leaf, pick in zip(leaves, picked, strict=True)]
