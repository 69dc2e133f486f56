"""An optimizer's state stored in bfloat16, stochastically rounded.

Decides which leaves of a state are stored in 16 bits, and converts them, so that the transformation inside reads and
writes float32. Does not decide how a number is rounded; see `_stochastic_rounding.py`.

Moments change by less than bfloat16's last bit: Adam's second moment falls by 0.1 % per step, and half of that bit is
0.2 % to 0.4 %. Rounded to the nearest number it never falls; rounded stochastically it falls by the right amount on
average.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from ._dtypes import to_dtype
from ._finite import map_gradients
from ._master_weights import MasterWeightsState, StochasticRoundingState
from ._scaling import widen
from ._state_leaves import StateLeaf, Where, check_where, chosen, traced_state
from ._stochastic_rounding import check_key, noise_at, round_stochastically, start_key
from ._values import check_state, check_transformation, is_array


class LowPrecisionState(NamedTuple):
    """State of `with_low_precision_state`.

    Attributes:
      inner_state: the inner transformation's state, of its own structure: some float32 leaves are bfloat16.
      key: uint32 `[2]`, the data of a PRNG key, the same throughout.
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
    """Wraps an optimizer so that each number of state that it holds for a parameter takes two bytes instead of four.

    With s the stored state, g gradients and p parameters, one update is

        u, t <- inner.update(float32(g), float32(s), float32(p))
        s    <- round(t)                    stochastically, so that E[s] = t; see `with_stochastic_rounding`

    The transformation inside computes in float32, whatever the parameters' dtype. It goes inside `with_loss_scale`, and
    inside or around `with_stochastic_rounding` and `with_master_weights`:
    `with_loss_scale(with_stochastic_rounding(with_low_precision_state(adam)))`.

    The float32 leaves whose path ends with the path of a parameter, and that have its shape, are stored in 16 bits:
    moments, traces, accumulated gradients. Other leaves stay as they are: scalars, counts, keys, leaves smaller than
    the parameter (the factors of Adafactor) or of another shape (preconditioners), and copies of the parameters, from
    which small differences are taken (the starting point in Prodigy, the masters of `with_master_weights`). If there
    are leaves as large as parameters and none is stored in 16 bits, a warning names them.

    Args:
      inner: any optax transformation but L-BFGS, line searches and centred RMSProp, which take differences of what
        they store.
      dtype: bfloat16. In float16 the squares of gradients below 2^-12 would be zero.
      key: where the random bits come from: a seed or a PRNG key. The same key gives the same run; a step that an outer
        `with_loss_scale` skips draws nothing. Give each of several wrappers in one optimizer a key of its own.
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
    key, where = check_key(key), check_where(where)

    def plan_for(params: Any) -> tuple[Any, tuple[StateLeaf, ...]]:
        leaves, structure = jax.tree.flatten(params)
        return _plan(inner_tx.init, structure, tuple(_type_of(x) for x in leaves))

    def stored(inner_state: Any, is_low: Sequence[bool], leaves: Sequence[StateLeaf], key: Any, step: Any) -> Any:
        noise = noise_at(key, step)

        def rounded(x: jax.Array, leaf: StateLeaf) -> jax.Array:
            # The leaves of one parameter share the calls of the random generator.
            name = f"state/{leaf.path}" if leaf.parameter is None else f"parameter state/{leaf.parameter}"
            return round_stochastically(x, noise(name, x.shape, leaf.lane)).astype(stored_dtype)

        values, structure = jax.tree.flatten(inner_state)
        each = zip(values, is_low, leaves, strict=True)
        return jax.tree.unflatten(structure, [rounded(x, leaf) if low else x for x, low, leaf in each])

    def init(params: Any) -> Any:
        wide = map_gradients(widen, params)
        (state, leaves), (_, of_wide) = plan_for(params), plan_for(wide)
        if _rounds_parameters(state):
            _check_wide(leaves, of_wide)
        else:
            params, leaves = wide, of_wide
        inner_state = inner_tx.init(params)
        is_low = chosen(leaves, jax.tree.leaves(inner_state), where)
        _warn_if_nothing(leaves, is_low, params)
        start, step = start_key(key), jnp.zeros((), np.uint32)
        return LowPrecisionState(stored(inner_state, is_low, leaves, start, step), start, step + np.uint32(1))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        check_state(state, LowPrecisionState)
        updates = map_gradients(widen, updates)
        if not _rounds_parameters(state.inner_state):
            params = map_gradients(widen, params)
        # Some optimizers are updated without parameters, or with a whole model; then a gradient has the type of its
        # parameter.
        has_types = params is not None and all(map(is_array, jax.tree.leaves(params)))
        _, leaves = plan_for(params if has_types else updates)
        values, structure = jax.tree.flatten(state.inner_state)
        if len(values) != len(leaves):
            raise ValueError(
                f"`state` must be what `init` made for these parameters: it has {len(values)} leaves inside, and "
                f"`inner` makes {len(leaves)}. Call update(grads, state, params)."
            )
        is_low = [
            getattr(x, "dtype", None) == stored_dtype and leaf.dtype != stored_dtype
            for x, leaf in zip(values, leaves, strict=True)
        ]
        wide = [x.astype(np.float32) if low else x for x, low in zip(values, is_low, strict=True)]
        updates, inner_state = inner_tx.update(updates, jax.tree.unflatten(structure, wide), params, **extra_args)
        inner_state = stored(inner_state, is_low, leaves, state.key, state.step)
        return updates, LowPrecisionState(inner_state, state.key, state.step + np.uint32(1))

    return optax.GradientTransformationExtraArgs(init, update)


@functools.lru_cache(maxsize=64)
def _plan(init: Any, structure: Any, types: tuple[Any, ...]) -> tuple[Any, tuple[StateLeaf, ...]]:
    """What `init` makes for parameters of these types: a state with shapes for arrays, and its leaves."""
    state, leaves = traced_state(init, jax.tree.unflatten(structure, types))
    _check_state(state)
    return state, leaves


def _type_of(leaf: Any) -> Any:
    """Shape and dtype of an array, by which plans are kept; anything else as it is."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) if is_array(leaf) else leaf


def _rounds_parameters(inner_state: Any) -> bool:
    """Whether a wrapper inside must get the parameters in their own dtype, since it widens them itself."""

    def is_wrapper(node: Any) -> bool:
        return isinstance(node, MasterWeightsState | StochasticRoundingState)

    return any(map(is_wrapper, jax.tree.leaves(inner_state, is_leaf=is_wrapper)))


def _check_wide(leaves: Sequence[StateLeaf], of_wide: Sequence[StateLeaf]) -> None:
    """Raises if a transformation beside a wrapper that needs 16-bit parameters would compute in 16 bits."""
    wide = {leaf.path for leaf in of_wide if leaf.dtype == np.float32}
    for leaf in leaves:
        if leaf.path in wide and leaf.dtype in (jnp.bfloat16, np.float16):
            raise ValueError(
                f"`inner` has a wrapper for 16-bit parameters, and beside it, at {leaf.path!r}, a transformation that "
                f"would compute in {leaf.dtype}. Put with_stochastic_rounding or with_master_weights around all of it."
            )


def _warn_if_nothing(leaves: Sequence[StateLeaf], is_low: Sequence[bool], params: Any) -> None:
    sizes = [math.prod(jnp.shape(x)) for x in jax.tree.leaves(params) if is_array(x)]
    could = [
        leaf.path or "the state itself"
        for leaf in leaves
        if leaf.can_be_stored and not leaf.is_copy and math.prod(leaf.shape) >= max([*sizes, 2])
    ]
    # `optax.tree_utils.tree_map_params` initialises with placeholders for the parameters.
    if could and sizes and not any(is_low):
        warnings.warn(
            f"with_low_precision_state stores nothing in 16 bits: no array of the state has the path and the shape of "
            f"a parameter. Pick some with `where`; large ones are {', '.join(could[:3])}{', ...' * (len(could) > 3)}.",
            stacklevel=3,
        )


def _check_state(inner_state: Any) -> None:
    def is_refused(node: Any) -> bool:
        return type(node).__name__ in _REFUSED

    for node in jax.tree.leaves(inner_state, is_leaf=is_refused):
        if is_refused(node):
            raise ValueError(f"`inner` has {_REFUSED[type(node).__name__]}")


_DIFFERENCES = (
    "{}, which learns from differences of what it stores: in 16 bits these would be roundings. Leave "
    "with_low_precision_state off, or put it around the rest of the chain."
)
_CENTRED = _DIFFERENCES.format("a centred second moment, nu - mu^2") + " Without `centered` it works."
# By name, since optax does not export all of them.
_REFUSED = {
    "LossScaleState": (
        "with_loss_scale, which must see the state that it restores on a skipped step. "
        "Write with_loss_scale(with_low_precision_state(optax.adam(1e-3)))."
    ),
    "LowPrecisionState": (
        "with_low_precision_state already. Use it once around all, or around each part, each with a `key` of its own."
    ),
    "ScaleByLBFGSState": _DIFFERENCES.format("L-BFGS"),
    "ScaleByBacktrackingLinesearchState": _DIFFERENCES.format("a line search"),
    "ScaleByZoomLinesearchState": _DIFFERENCES.format("a line search"),
    "ScaleByRStdDevState": _CENTRED,
    "ScaleByRStdDevWithCountState": _CENTRED,
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
