"""Parameters stored in 16 bits that still learn from small updates.

Decides what is kept beside or done to a 16-bit parameter so that updates below half its last bit are not lost: a
float32 master copy, or stochastic rounding. Does not decide which steps are skipped; see `_optimizer.py`.

A bfloat16 number has 8 significant bits: added to a parameter of 1, an update below 2^-9 rounds to nothing, at every
step anew.
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from ._dtypes import to_dtype
from ._finite import map_gradients
from ._paths import leaf_paths, path_string
from ._scale_state import find_states
from ._scaling import widen
from ._stochastic_rounding import check_key, noise_at, round_stochastically, start_key
from ._values import check_state, check_transformation

T = TypeVar("T")


class MasterWeightsState(NamedTuple):
    """State of `with_master_weights`.

    Attributes:
      inner_state: the inner transformation's state, made for and kept in the masters' dtype.
      masters: a tree like the parameters: the full-precision copy of each 16-bit leaf, `None` for every other leaf.
    """

    inner_state: Any
    masters: Any


class StochasticRoundingState(NamedTuple):
    """State of `with_stochastic_rounding`.

    Attributes:
      inner_state: the inner transformation's state, in float32 where parameters are bfloat16.
      key: uint32 `[2]`, the data of a PRNG key, the same throughout.
      step: uint32 `[]`, how many updates there were: the random bits of an update follow from it and from `key`.
    """

    inner_state: Any
    key: jax.Array
    step: jax.Array


def with_master_weights(
    inner: optax.GradientTransformation, dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that 16-bit parameters are roundings of full-precision masters.

    With parameters p, masters m (at first m = p) and gradients g, one update is

        u, s <- inner.update(float32(g), s, m)
        m    <- m + u
        p    <- p + (round(m) - p)                       what `optax.apply_updates` does with the update returned

    The masters are the parameters of record. The difference is computed in the masters' dtype, and p is the rounding of
    m to the last bit, except where an update changes a parameter's magnitude so much that p + (round(m) - p) itself
    rounds in float32; such an error is below 2^-23 of the old parameter and gone after the next update, which starts
    from the p that is there then. A float16 parameter whose master leaves the range is infinite, and no difference
    added to it makes it finite again.

    Leaves that are wide already get no copy, and their updates are the inner transformation's. The wrapper goes last in
    a chain, since a transformation after it would change the difference, and inside `with_loss_scale`:
    `with_loss_scale(with_master_weights(optax.chain(clip, adam)))`.

    A leaf without a master is `None` in the state, so `optax.tree_map_params`, as for shardings, needs
    `is_leaf=lambda x: x is None` where only some parameters have 16 bits.

    Args:
      inner: any optax transformation. It sees the masters as parameters.
      dtype: the masters' dtype, float32 or float64.

    Returns:
      A transformation with a `MasterWeightsState`. Its `update` raises a ValueError without `params`.

    Raises:
      TypeError: `inner` is no optax transformation.
      ValueError: `dtype` has fewer than 32 bits.

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.

    Example: 100 updates of 2^-10, each of which a bfloat16 parameter of 1 would lose.

      >>> tx = with_master_weights(optax.sgd(2.0**-10))
      >>> params = jnp.ones((), jnp.bfloat16)
      >>> opt_state = tx.init(params)
      >>> for _ in range(100):
      ...     updates, opt_state = tx.update(-jnp.ones(()), opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params, params.dtype, master_params(opt_state))
      1.09375 bfloat16 1.0976562
    """
    wide = to_dtype(dtype)
    if jnp.finfo(wide).bits < 32:
        raise ValueError(f"`dtype` must be float32 or float64, got {wide}: masters keep what 16 bits cannot hold.")
    if jax.dtypes.canonicalize_dtype(wide) != wide:
        raise ValueError(
            f"`dtype` is {wide}, and 64-bit types are disabled. "
            "Call jax.config.update('jax_enable_x64', True) first, or leave it float32."
        )
    inner_tx = optax.with_extra_args_support(check_transformation(inner, "with_master_weights"))

    def init(params: Any) -> Any:
        masters = jax.tree.map(lambda p: jnp.asarray(p).astype(wide) if _is_16_bit(p) else None, params)
        return MasterWeightsState(_start(inner_tx, _masters_or(masters, params), "with_master_weights"), masters)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        check_state(state, MasterWeightsState)
        _require_params(params, "with_master_weights")
        full = _masters_or(state.masters, params)
        updates, inner_state = inner_tx.update(map_gradients(widen, updates), state.inner_state, full, **extra_args)
        new = _map_masters(lambda m, u: (m + u).astype(m.dtype), state.masters, updates)
        moved = _map_masters(lambda m, p: m.astype(p.dtype).astype(m.dtype) - p.astype(m.dtype), new, params)
        return _masters_or(moved, updates), MasterWeightsState(inner_state, new)

    return optax.GradientTransformationExtraArgs(init, update)


def master_params(opt_state: Any, params: Any = None) -> Any:
    """The full-precision parameters, found at any depth of an optimizer state: what to evaluate, average and save.

    Args:
      opt_state: a pytree with exactly one `MasterWeightsState`.
      params: the parameters, from which leaves without a master are taken; without `params` they are `None`. It has the
        structure that `init` saw: of an `nnx.Optimizer`, pass `nnx.as_pure(...)` of both arguments.

    Returns:
      A tree like the parameters.

    Raises:
      ValueError: `opt_state` has no master weights, or more than one set; `params` has another structure.

    Example:
      >>> params = {"bias": jnp.zeros(2), "kernel": jnp.ones(2, jnp.float16)}
      >>> opt_state = with_master_weights(optax.sgd(0.1)).init(params)
      >>> master_params(opt_state)
      {'bias': None, 'kernel': Array([1., 1.], dtype=float32)}
    """
    masters = _find(opt_state).masters
    if params is None:
        return masters
    _check_same_leaves(masters, params)
    return _masters_or(masters, params)


def sync_master_weights(opt_state: T, params: Any) -> T:
    """The optimizer state with masters equal to `params`: for callers who changed the parameters themselves.

    Without it the next update would restore the old parameters, since updates start from the masters. The masters get
    new buffers, so that the state returned and `params` may both be donated to the next step.

    Args:
      opt_state: a pytree with exactly one `MasterWeightsState`.
      params: the parameters as changed, of the structure, shapes and dtypes that `init` saw; of an `nnx.Optimizer`,
        `nnx.as_pure(...)` of both arguments.

    Raises:
      ValueError: `opt_state` has no master weights, or more than one set; `params` has another structure or shape, or
        a leaf of it has 16 bits now and had not before, or the other way round.

    Example:
      >>> tx = with_master_weights(optax.sgd(1.0))
      >>> opt_state = sync_master_weights(tx.init(jnp.float16(1)), jnp.float16(3))
      >>> print(master_params(opt_state))
      3.0
    """
    old = _find(opt_state).masters
    _check_same_leaves(old, params, of_16_bits=True)
    new = _map_masters(lambda m, p: jnp.asarray(p).astype(m.dtype), old, params)
    for path, m, p in zip(leaf_paths(old), jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if m.shape != p.shape:
            raise ValueError(f"`params`: {path!r} has the shape {p.shape}, and its master weight {m.shape}.")
    return jax.tree.map(lambda x: x._replace(masters=new) if _is_state(x) else x, opt_state, is_leaf=_is_state)


def with_stochastic_rounding(
    inner: optax.GradientTransformation, *, key: int | jax.Array = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that bfloat16 parameters learn without masters: on average, no update is lost.

    With w = float32(p) + u the exact new value between its bfloat16 neighbours a < b,

        p <- b with probability (w - a) / (b - a), else a          so that E[p] = w

    Half the memory of masters, at the price of noise of up to one last bit (2^-7 relative) a step. The inner
    transformation sees float32 parameters and keeps its state for them; leaves that are not bfloat16 get its updates.

    Args:
      inner: any optax transformation.
      key: where the random bits come from: a seed or a PRNG key. The same key gives the same run; a step that an outer
        `with_loss_scale` skips draws nothing. Give each of several wrappers in one optimizer a key of its own.

    Returns:
      A transformation with a `StochasticRoundingState`. Its `init` raises a ValueError for float16 parameters, its
      `update` without `params`.

    Raises:
      TypeError: `inner` is no optax transformation, or `key` neither an integer nor one PRNG key.

    Reference: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, section 3.

    Example: about half of these parameters take a step of half a bit.

      >>> tx = with_stochastic_rounding(optax.sgd(2.0**-8))
      >>> params = jnp.ones(10_000, jnp.bfloat16)
      >>> updates, _ = tx.update(-jnp.ones(10_000), tx.init(params), params)
      >>> round(float(jnp.mean(updates != 0)), 1), round(float(jnp.mean(updates)) * 2**8, 1)
      (0.5, 1.0)
    """
    inner_tx = optax.with_extra_args_support(check_transformation(inner, "with_stochastic_rounding"))
    key = check_key(key)

    def init(params: Any) -> Any:
        for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
            if getattr(leaf, "dtype", None) == jnp.float16:
                raise ValueError(
                    f"`params`: {path!r} is float16; stochastic rounding is for bfloat16, whose range is float32's. "
                    "Use with_master_weights."
                )
        inner_state = _start(inner_tx, jax.tree.map(_widen_bfloat16, params), "with_stochastic_rounding")
        return StochasticRoundingState(inner_state, start_key(key), jnp.zeros((), np.uint32))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        check_state(state, StochasticRoundingState)
        _require_params(params, "with_stochastic_rounding")
        full = jax.tree.map(_widen_bfloat16, params)
        updates, inner_state = inner_tx.update(map_gradients(widen, updates), state.inner_state, full, **extra_args)
        noise = noise_at(state.key, state.step)
        paths = iter(leaf_paths(params))  # not a tree of them: a tree may ask its leaves for dtypes

        def rounded(p: Any, w: Any, u: Any) -> Any:
            name = f"parameter/{next(paths)}"
            return round_stochastically(w + u, noise(name, w.shape, 0)) - w if _is_bfloat16(p) else u

        updates = jax.tree.map(rounded, params, full, updates)
        return updates, StochasticRoundingState(inner_state, state.key, state.step + np.uint32(1))

    return optax.GradientTransformationExtraArgs(init, update)


def _is_16_bit(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, np.floating) and jnp.finfo(dtype).bits == 16


def _is_bfloat16(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) == jnp.bfloat16


def _widen_bfloat16(leaf: Any) -> Any:
    return leaf.astype(np.float32) if _is_bfloat16(leaf) else leaf


def _is_no_master(node: Any) -> bool:
    """Whether a parameter has no master here: it is wide, or `optax.masked` hides it."""
    return node is None or isinstance(node, optax.MaskedNode)


def _map_masters(fn: Any, masters: Any, tree: Any) -> Any:
    """`fn` of each master and the leaf at its place; a leaf without a master stays as it is."""
    return jax.tree.map(lambda m, x: m if _is_no_master(m) else fn(m, x), masters, tree, is_leaf=_is_no_master)


def _masters_or(masters: Any, tree: Any) -> Any:
    """The masters, completed by the leaves of `tree` that have none."""
    return jax.tree.map(lambda m, x: x if _is_no_master(m) else m, masters, tree, is_leaf=_is_no_master)


def _check_same_leaves(masters: Any, params: Any, of_16_bits: bool = False) -> None:
    """Raises unless the parameters are those that the masters were made for, and those with a master have 16 bits."""

    def check(path: Any, m: Any, p: Any) -> Any:
        if not isinstance(m, optax.MaskedNode) and (m is not None) != _is_16_bit(p):
            saw = "another dtype, which has no" if m is None else f"a dtype of 16 bits, which has a {m.dtype}"
            raise ValueError(
                f"`params`: {path_string(path)!r} is {getattr(p, 'dtype', type(p).__name__)}, and `init` saw {saw} "
                "master weight. Cast it to the dtype that it had, or make a new state with `init`."
            )
        return m

    try:
        jax.tree.map(lambda m, p: m, masters, params, is_leaf=_is_no_master)
    except ValueError:
        expected = leaf_paths(jax.tree.map(lambda m: 0 if m is None else m, masters, is_leaf=_is_no_master))
        raise ValueError(
            f"`params` must have the structure that the master weights were made for, with leaves {expected}; got "
            f"leaves {leaf_paths(params)}. Make a new state with `init` if the parameters changed; of an nnx.Optimizer "
            "pass nnx.as_pure(...) of the state and of the parameters."
        ) from None
    if of_16_bits:
        jax.tree_util.tree_map_with_path(check, masters, params, is_leaf=_is_no_master)


def _start(inner: optax.GradientTransformation, params: Any, wrapper: str) -> Any:
    """The initial state of a wrapper's inner transformation, in which there must be no loss scale."""
    state = inner.init(params)
    if find_states(state):
        raise ValueError(
            f"`inner` has with_loss_scale, which must see the state that it restores on a skipped step. Write "
            f"with_loss_scale({wrapper}(optax.adam(1e-3)))."
        )
    return state


def _require_params(params: Any, caller: str) -> None:
    if params is None:
        raise ValueError(f"`params` is missing: {caller} rounds them. Call update(grads, opt_state, params).")


def _is_state(node: Any) -> bool:
    return isinstance(node, MasterWeightsState)


def _find(opt_state: Any) -> MasterWeightsState:
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=_is_state) if _is_state(x)]
    if len(found) != 1:
        raise ValueError(
            f"`opt_state` must have the state of one with_master_weights, got {len(found)}. "
            "Build the optimizer as with_master_weights(optax.adam(1e-3))."
        )
    return found[0]
