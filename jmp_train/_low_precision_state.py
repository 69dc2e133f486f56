"""An optimizer's state stored in bfloat16, stochastically rounded.

Decides which leaves of a state are stored so, and keeps the transformation inside from seeing it: it reads and writes
float32. Does not decide how a number is rounded; see `_stochastic_rounding.py`.

Moments move by less than bfloat16's last bit: Adam's second one falls by 0.1 % a step, where half of that bit is 0.2 %
to 0.4 %. Rounded to the nearest number it never falls; rounded stochastically it falls on average by what it should.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from ._dtypes import to_dtype
from ._finite import map_gradients
from ._jaxpr import flatten, trace
from ._master_weights import MasterWeightsState, StochasticRoundingState
from ._paths import check_glob, glob_matches, leaf_paths, nothing_matches
from ._scale_state import LossScaleState
from ._scaling import widen
from ._stochastic_rounding import check_key, noise_at, round_stochastically, start_key
from ._values import check_transformation

Where: TypeAlias = str | Sequence[str] | Callable[[str, Any], bool]


class LowPrecisionState(NamedTuple):
    """State of `with_low_precision_state`.

    Attributes:
      inner_state: the inner transformation's state, of its own structure: some float32 leaves are bfloat16.
      key: a PRNG key `[]`, the same throughout.
      step: uint32 `[]`, how many updates there were: the random bits of an update follow from it and from `key`.
    """

    inner_state: Any
    key: jax.Array
    step: jax.Array


def with_low_precision_state(
    inner: optax.GradientTransformation,
    dtype: DTypeLike = "bfloat16",
    *,
    key: int | jax.Array = 0,
    where: Where | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that what it holds for each parameter takes two bytes instead of four.

    With s the stored state, g gradients and p parameters, one update is

        u, t <- inner.update(float32(g), float32(s), float32(p))
        s    <- round(t)                    stochastically, so that E[s] = t; see `with_stochastic_rounding`

    The transformation inside computes in float32, whatever the parameters' dtype. It goes inside `with_loss_scale`, and
    inside or around `with_stochastic_rounding` and `with_master_weights`:
    `with_loss_scale(with_stochastic_rounding(with_low_precision_state(adam)))`.

    Stored in 16 bits are the float32 leaves that have the path and shape of a parameter at their end: moments, traces,
    accumulated gradients. Left alone are scalars, counts, keys, what is smaller than the parameter (the factors of
    Adafactor) or of another shape (preconditioners), and copies of the parameters, from which small differences are
    taken (the starting point in Prodigy, the masters of `with_master_weights`).

    Args:
      inner: any optax transformation but line searches and L-BFGS, which learn from differences of what they store.
      dtype: bfloat16. In float16 the squares of gradients below 2^-12 would be zero.
      key: where the random bits come from: a seed or a PRNG key. The same key gives the same run; a step that an outer
        `with_loss_scale` skips draws nothing.
      where: which leaves to store in 16 bits instead of those above: a glob over the paths of `inner`'s state such as
        `"nu"` or `"0/mu/Dense_*"`, several, or a function `(path, leaf) -> bool`. Among float32 arrays of one dimension
        or more; all others stay.

    Returns:
      A transformation with a `LowPrecisionState`. Its `init` raises a ValueError for a state it cannot hold, and for a
      glob that matches none of its leaves.

    Raises:
      TypeError: `inner` is no optax transformation; `key` is no seed or key; `where` is none of the above.
      ValueError: `dtype` is not bfloat16; a glob has an empty segment.

    References: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, section 3; Zamirai et al.,
    "Revisiting BFloat16 Training", 2020.

    Example:
      >>> tx = with_low_precision_state(optax.adam(1e-3))
      >>> params = {"w": jnp.ones((4, 2))}
      >>> opt_state = tx.init(params)
      >>> _, opt_state = tx.update({"w": jnp.full((4, 2), 0.1)}, opt_state, params)
      >>> jax.tree.map(lambda x: str(x.dtype), opt_state.inner_state[0])
      ScaleByAdamState(count='int32', mu={'w': 'bfloat16'}, nu={'w': 'bfloat16'})
    """
    stored_dtype = _check_dtype(dtype)
    inner_tx = optax.with_extra_args_support(check_transformation(inner, "with_low_precision_state"))
    key, where = check_key(key), _check_where(where)

    @functools.lru_cache(maxsize=16)
    def plan(structure: Any, types: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[_Leaf, ...]:
        """What `inner` makes for parameters of these types, leaf by leaf."""
        params = jax.tree.unflatten(structure, types)
        return _leaves(jax.eval_shape(inner_tx.init, params), params)

    def plan_for(params: Any) -> tuple[_Leaf, ...]:
        leaves, structure = jax.tree.flatten(params)
        return plan(structure, tuple(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves))

    def stored(inner_state: Any, chosen: Sequence[bool], leaves: Sequence[_Leaf], key: Any, step: Any) -> Any:
        noise = noise_at(key, step)
        values, structure = jax.tree.flatten(inner_state)
        rounded = [
            round_stochastically(x, noise(leaf.name, x.shape, leaf.lane)).astype(stored_dtype) if is_low else x
            for x, is_low, leaf in zip(values, chosen, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, rounded)

    def init(params: Any) -> Any:
        if not _rounds_parameters(jax.eval_shape(inner_tx.init, params)):
            params = _widened(params)
        inner_state = inner_tx.init(params)
        _check_state(inner_state)
        chosen = _chosen(inner_state, plan_for(params), _copies(inner_tx.init, params), where)
        start, step = start_key(key), jnp.zeros((), np.uint32)
        return LowPrecisionState(stored(inner_state, chosen, plan_for(params), start, step), start, step + np.uint32(1))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        updates = map_gradients(widen, updates)
        if not _rounds_parameters(state.inner_state):
            params = _widened(params)
        # Some transformations are updated without parameters, whose shapes are those of their gradients.
        leaves = plan_for(updates if params is None else params)
        values, structure = jax.tree.flatten(state.inner_state)
        if len(values) != len(leaves):
            raise ValueError(
                f"`opt_state` must be what `init` made for these parameters: it has {len(values)} leaves inside, and "
                f"`inner` makes {len(leaves)}. Call update(grads, opt_state, params)."
            )
        is_low = [x.dtype == stored_dtype and leaf.dtype == np.float32 for x, leaf in zip(values, leaves, strict=True)]
        wide = [x.astype(np.float32) if low else x for x, low in zip(values, is_low, strict=True)]
        updates, inner_state = inner_tx.update(updates, jax.tree.unflatten(structure, wide), params, **extra_args)
        inner_state = stored(inner_state, is_low, leaves, state.key, state.step)
        return updates, LowPrecisionState(inner_state, state.key, state.step + np.uint32(1))

    return optax.GradientTransformationExtraArgs(init, update)


class _Leaf(NamedTuple):
    """A leaf of the inner transformation's state.

    Attributes:
      path: in that state.
      dtype: as the transformation makes it.
      parameter: the path of the parameter that it belongs to and has the shape of, if there is one.
      lane: how many leaves before it belong to the same. They share the calls of the random generator.
    """

    path: str
    dtype: np.dtype
    parameter: str | None
    lane: int

    @property
    def name(self) -> str:
        return f"state/{self.path}" if self.parameter is None else f"parameter state/{self.parameter}"


def _leaves(inner_state: Any, params: Any) -> tuple[_Leaf, ...]:
    shapes = {path: jnp.shape(x) for path, x in zip(leaf_paths(params), jax.tree.leaves(params), strict=True)}
    seen: Counter[str] = Counter()
    found = []
    for path, x in zip(leaf_paths(inner_state), jax.tree.leaves(inner_state), strict=True):
        segments = path.split("/")
        ends = ("/".join(segments[start:]) for start in range(len(segments) + 1))
        parameter = next((end for end in ends if shapes.get(end) == x.shape), None)
        lane = 0
        if parameter is not None and jnp.issubdtype(x.dtype, np.floating):
            lane = seen[parameter]
            seen[parameter] += 1
        found.append(_Leaf(path, x.dtype, parameter, lane))
    return tuple(found)


def _chosen(inner_state: Any, leaves: Sequence[_Leaf], copies: Sequence[bool], where: Any) -> list[bool]:
    """Which leaves are to be stored in 16 bits."""
    values = jax.tree.leaves(inner_state)
    can_be = [leaf.dtype == np.float32 and jnp.ndim(x) > 0 for leaf, x in zip(leaves, values, strict=True)]
    if where is None:
        picked = [leaf.parameter is not None and not copy for leaf, copy in zip(leaves, copies, strict=True)]
    elif callable(where):
        picked = [can and bool(where(leaf.path, x)) for can, leaf, x in zip(can_be, leaves, values, strict=True)]
    else:
        paths = [leaf.path for can, leaf in zip(can_be, leaves, strict=True) if can]
        for glob in where:
            if paths and not any(glob_matches(glob, path) for path in paths):
                raise ValueError(nothing_matches("where", glob, paths))
        picked = [any(glob_matches(glob, leaf.path) for glob in where) for leaf in leaves]
    return [can and pick for can, pick in zip(can_be, picked, strict=True)]


def _copies(init: Callable[[Any], Any], params: Any) -> list[bool]:
    """Which leaves of `init(params)` are parameters as they are, perhaps in another dtype."""
    program = flatten(trace(init, params)[0])
    same = set(program.inputs)
    for node in program.nodes:
        if node.name in ("copy", "convert_element_type") and node.ins[0] in same:
            same.update(node.outs)
    return [number in same for number in program.outputs]


def _widened(params: Any) -> Any:
    """Floating parameters of 16 bits in float32."""
    return map_gradients(lambda x: widen(x) if getattr(x, "dtype", None) in (jnp.bfloat16, np.float16) else x, params)


def _states(inner_state: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    def is_one(node: Any) -> bool:
        return isinstance(node, kinds)

    return [x for x in jax.tree.leaves(inner_state, is_leaf=is_one) if is_one(x)]


def _rounds_parameters(inner_state: Any) -> bool:
    """Whether a wrapper inside has to see the parameters in their own dtype; it widens them itself."""
    return bool(_states(inner_state, (MasterWeightsState, StochasticRoundingState)))


def _check_state(inner_state: Any) -> None:
    for kind, sentence in _REFUSED.items():
        if _states(inner_state, kind):
            raise ValueError(f"`inner` {sentence}")


_LEARNS_FROM_DIFFERENCES = (
    "has {}, which learns from differences of the parameters, gradients and losses that it stores: in 16 bits these "
    "would be roundings. Leave with_low_precision_state off, or put it around the rest of the chain."
)
_REFUSED: dict[type, str] = {
    LossScaleState: (
        "has with_loss_scale, which must see the state that it restores on a skipped step. "
        "Write with_loss_scale(with_low_precision_state(optax.adam(1e-3)))."
    ),
    LowPrecisionState: "has with_low_precision_state already. Use it once around all, or once around each part.",
    optax.ScaleByLBFGSState: _LEARNS_FROM_DIFFERENCES.format("L-BFGS"),
    optax.ScaleByBacktrackingLinesearchState: _LEARNS_FROM_DIFFERENCES.format("a line search"),
    optax.ScaleByZoomLinesearchState: _LEARNS_FROM_DIFFERENCES.format("a line search"),
}


def _check_dtype(dtype: DTypeLike) -> np.dtype:
    found = to_dtype(dtype)
    if found == np.float16:
        raise ValueError(
            "`dtype` is float16: squares of gradients below 2^-12 would be zero in it, and above 2^8 infinite. "
            "Use bfloat16, whose range is float32's."
        )
    if found != jnp.bfloat16:
        raise ValueError(f"`dtype` must be bfloat16, got {found}: rounding is by the upper half of a float32 number.")
    return found


def _check_where(where: Any) -> Any:
    """One of: `None`, a function, a tuple of globs."""
    if where is None or callable(where):
        return where
    globs = (where,) if isinstance(where, str) else tuple(where) if isinstance(where, Iterable) else ()
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(
            f"`where` must be a glob over the state's paths such as 'nu', several, or a function (path, leaf) -> bool; "
            f"got {where!r}."
        )
    return tuple(check_glob("where", glob) for glob in globs)
