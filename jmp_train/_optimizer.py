"""Loss scaling as an optax transformation.

Decides which steps are skipped, and that a skipped step changes nothing but the scale and its counters. Does not decide
how the scale changes (`_loss_scale.py`), and does not scale the loss: `value_and_grad` does, given `get_loss_scale`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._finite import all_finite, is_float0, leaves_finite, map_gradients
from ._loss_scale import DynamicLossScale, LossScale
from ._paths import leaf_paths, missing_and_extra, node_difference
from ._scale_state import LossScaleState, find_states
from ._scaling import widen
from ._sharding import axes_of, check_axes
from ._text import short_repr
from ._values import check_state, check_transformation, is_array


def with_loss_scale(
    inner: optax.GradientTransformation,
    loss_scale: LossScale | None = None,
    *,
    axis_name: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that it owns a loss scale and skips the steps whose gradients are not finite.

    With gradients g of the *unscaled* loss, parameters p and inner state s, one update is

        finite <- no element of g is infinite or NaN
        u, s'  <- inner.update(float32(g), s, p)
        u, s   <- (u, s') if finite else (0, s)          a selection, bit for bit
        S      <- S.adjust(finite)

    float32(g) widens 16-bit gradients (Adam's epsilon is zero in float16); wider ones keep their dtype, and so does
    every leaf of s, except integers that `inner` turns into fractions. The zero is -0.0, the only number that can be
    added to any parameter without changing its bits (except to subnormal ones where XLA flushes these to zero, as on
    CPUs).

    **It goes outermost.** A transformation that has state or changes gradients belongs inside, where a skip covers it:
    `with_loss_scale(optax.chain(clip, adamw))`, `with_loss_scale(optax.MultiSteps(adamw, 4))`. Otherwise

    - `chain(clip_by_global_norm(1.0), with_loss_scale(tx))` clips [inf, 1] to [nan, 0] and may hide the overflow;
    - `chain(trace(0.9), with_loss_scale(tx))` keeps the infinity in its trace for good;
    - `chain(with_loss_scale(tx), add_decayed_weights(0.1))` moves the parameters on a skipped step;
    - `MultiSteps(with_loss_scale(tx), 4)` keeps a NaN in its accumulator, which it resets by multiplying with 0.

    Only stateless maps that map zero to zero may follow it, such as `optax.scale` by a positive number.

    **Pass it the loss**, `tx.update(grads, opt_state, params, value=loss)`, and it counts the steps whose loss is
    infinite or NaN although the gradients are finite: a sum of squares may overflow in float16 where its derivative,
    2 x, does not. Such a step is applied, as it is without this wrapper; `step_metrics` has the count.

    Args:
      inner: any optax transformation; `value`, `grad`, `value_fn` and other extra arguments reach it as they are. It
        gets zeros in place of gradient elements that are not finite, so that loops inside it end. With 16-bit
        parameters it gets float32 gradients, which `novograd`, `galore`, `mechanize` and `apply_if_finite` (of `adam`,
        say) refuse; inside `with_master_weights` these get float32 parameters, too.
      loss_scale: where to start, or `None` for `DynamicLossScale()`.
      axis_name: the axis, or axes, of an enclosing `shard_map`, `pmap` or `vmap` over which gradients may differ. If
        one device overflows all skip, and all scales and counts stay equal. Not needed under `jit` over a sharded mesh.

    Returns:
      A transformation with a `LossScaleState`. Its `init` raises a TypeError if a parameter is a PRNG key; its `update`
      raises a ValueError if the gradients' structure differs from the parameters', if their shapes do (unless `inner`
      makes updates of the parameters' shapes from larger ones, as `optax.contrib.dpsgd` does), if a gradient is
      unreduced over axes of a mesh, or if `axis_name` names no enclosing axis.

    Raises:
      TypeError: `inner` is no optax transformation, or `loss_scale` no loss scale.

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.

    Example:
      >>> from jmp_train import get_loss_scale
      >>> tx = with_loss_scale(optax.sgd(0.5, momentum=0.9))
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> for grads in (jnp.array([1.0, 1.0]), jnp.array([jnp.inf, 1.0])):
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, float(get_loss_scale(opt_state).loss_scale))
      [0.5 1.5] 32768.0
      [0.5 1.5] 16384.0
    """
    start = DynamicLossScale() if loss_scale is None else _check_loss_scale(loss_scale)
    inner_tx = optax.with_extra_args_support(check_transformation(inner, "with_loss_scale"))
    axes = axes_of(axis_name)

    def init(params: Any) -> Any:
        _check_no_keys(params)
        inner_state = jax.tree.map(_strongly_typed, inner_tx.init(params))
        if find_states(inner_state):
            raise ValueError("`inner` already has a loss scale. Apply with_loss_scale once, outermost.")
        leaves = len(jax.tree.leaves(_differentiated(params)))
        return LossScaleState(
            inner_state=inner_state,
            loss_scale=jax.tree.map(lambda x: jnp.array(x, copy=True), start),  # donating these leaves `start` alone
            grads_finite=jnp.ones((), np.bool_),
            skipped_steps=jnp.zeros((), np.int32),
            consecutive_skips=jnp.zeros((), np.int32),
            nonfinite_losses=jnp.zeros((), np.int32),
            last_overflow=jnp.zeros((leaves,), np.bool_),
            overflow_counts=jnp.zeros((leaves,), np.int32),
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        _check_structure(updates, state, params)
        check_axes(axes)
        _check_loss(extra_args.get("value"))
        given = updates
        flags, loss_finite = _finite_on_all_devices(updates, extra_args.get("value"), axes)
        finite = jnp.all(flags)
        skipped = (~finite).astype(np.int32)
        nonfinite_losses = state.nonfinite_losses
        if loss_finite is not None:
            nonfinite_losses += (finite & ~loss_finite).astype(np.int32)
        grads = map_gradients(_finite_elements, jax.tree.map(_zero_for_float0, updates))
        try:
            updates, inner_state = inner_tx.update(grads, state.inner_state, params, **extra_args)
        except (TypeError, ValueError):
            _check_gradient_shapes(given, params)
            raise
        if params is not None and jax.tree.structure(updates) == jax.tree.structure(params):
            if _other_shape(updates, params) is not None:
                _check_gradient_shapes(given, params)
            _check_shapes("the updates of `inner`", updates, params)
        updates = jax.tree.map(lambda u: _update_or_zero(finite, u), updates)
        return _integers_stay(updates, given), LossScaleState(
            inner_state=_new_or_old_state(finite, inner_state, state.inner_state, _integer_paths(given)),
            loss_scale=state.loss_scale.adjust(finite),
            grads_finite=finite,
            skipped_steps=state.skipped_steps + skipped,
            consecutive_skips=jnp.where(finite, 0, state.consecutive_skips + 1),
            nonfinite_losses=nonfinite_losses,
            last_overflow=jnp.where(finite, state.last_overflow, ~flags),
            overflow_counts=state.overflow_counts + (~flags).astype(np.int32),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _finite_on_all_devices(grads: Any, loss: Any, axes: Any) -> tuple[jax.Array, jax.Array | None]:
    """Whether each gradient, bool `[n]`, and the loss, bool `[]` if there is one, are finite."""
    flags = leaves_finite(grads)
    if loss is not None:
        flags = jnp.append(flags, all_finite(loss))  # both cross the devices in one collective
    if axes:
        flags = jax.lax.pmin(flags.astype(np.int32), axes) == 1
    return (flags, None) if loss is None else (flags[:-1], flags[-1])


def _strongly_typed(leaf: Any) -> Any:
    """The leaf without a weak type, which the first update would drop, so that the second would be traced anew."""
    number = isinstance(leaf, bool | int | float | complex)
    return jnp.asarray(leaf).astype(jnp.result_type(leaf)) if number or getattr(leaf, "weak_type", False) else leaf


def _finite_elements(leaf: Any) -> jax.Array:
    """The gradient in at least float32, zero where it is not finite.

    Each element is tested by itself, so that nothing here waits for the check of the whole gradient: a norm that the
    inner transformation computes then shares one pass over the gradient with that check.
    """
    wide = widen(leaf)
    return jnp.where(jnp.isfinite(wide), wide, jnp.zeros_like(wide))


def _integer_paths(grads: Any) -> list[str]:
    """The paths of integer parameters, which have gradients of float0 or of integer zeros."""
    leaves = jax.tree.leaves(grads)
    integers = [is_float0(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    return [path for path, found in zip(leaf_paths(grads), integers, strict=True) if found] if any(integers) else []


def _zero_for_float0(leaf: Any) -> Any:
    """An integer parameter's gradient as a zero that optax can compute with, clip and add noise to."""
    return jnp.zeros(leaf.shape, np.float32) if is_float0(leaf) else leaf


def _integers_stay(updates: Any, grads: Any) -> Any:
    """The updates, with an integer zero where the gradient was float0, whatever the inner transformation made of that.

    Weight decay is a fraction, and so is -0.0: added to an integer, either would round it, 16,777,217 to 16,777,216.
    """
    if not any(map(is_float0, jax.tree.leaves(grads))):
        return updates
    if isinstance(updates, optax.LookaheadParams):
        return optax.LookaheadParams(*(_integers_stay(each, grads) for each in updates))
    return jax.tree.map(lambda u, g: jnp.zeros(np.shape(u), np.int32) if is_float0(g) else u, updates, grads)


def _update_or_zero(finite: jax.Array, update: Any) -> jax.Array:
    return jnp.where(finite, update, -jnp.zeros_like(update))


def _new_or_old_state(finite: jax.Array, new: Any, old: Any, integers: list[str]) -> Any:
    """Selects the inner state; leaves that only an update makes, as `optax.monitor` does, count as zero before it.

    Args:
      finite: whether the new one is taken.
      new, old: both states.
      integers: the paths of integer parameters. Their moments are zeros, of which a product makes floats.
    """
    leaves, structure = jax.tree.flatten(new)
    if structure != jax.tree.structure(old):
        known, paths = dict(zip(leaf_paths(old), jax.tree.leaves(old), strict=True)), leaf_paths(new)
        if lost := sorted(known.keys() - set(paths)):
            raise ValueError(f"`inner` made {lost} in its state, which its update left out: a skip has to restore it.")
        before = [known.get(path, jnp.zeros_like(x)) for path, x in zip(paths, leaves, strict=True)]
        old = jax.tree.unflatten(structure, before)
    moments = [False] * len(leaves)  # of integers
    if integers:
        moments = [any(_belongs_to(path, each) for each in integers) for path in leaf_paths(new)]
    triples = zip(leaves, jax.tree.leaves(old), moments, strict=True)
    return jax.tree.unflatten(structure, [_new_or_old(finite, *each) for each in triples])


def _belongs_to(path: str, parameter: str) -> bool:
    """Whether a leaf of a state is that of a parameter, as `0/mu/w` is of `w`."""
    return not parameter or path == parameter or path.endswith(f"/{parameter}")


def _new_or_old(finite: jax.Array, new: Any, old: Any, of_integer: bool) -> jax.Array:
    """Selects one leaf of the inner state; the dtype stays, also where float32 gradients meet 16-bit moments.

    An integer that `inner` itself turns into a fraction becomes one, but for the moment of an integer parameter.
    """
    to, old_type = jnp.result_type(new), jnp.result_type(old)
    grows = jnp.issubdtype(to, jnp.inexact) and not (jnp.issubdtype(old_type, jnp.inexact) or of_integer)
    if to == old_type or grows:
        return jnp.where(finite, new, old)
    return jnp.where(finite, jnp.asarray(new).astype(old_type), old)


def _check_loss_scale(loss_scale: Any) -> LossScale:
    if not isinstance(loss_scale, LossScale):
        got = short_repr(loss_scale)
        raise TypeError(
            f"`loss_scale` must be a DynamicLossScale, StaticLossScale or NoOpLossScale, got {got}. "
            "Wrap a number, as in StaticLossScale(2.0**15); a policy goes to value_and_grad."
        )
    if jax.tree_util.all_leaves([loss_scale]):
        raise TypeError(
            f"`loss_scale` is a {type(loss_scale).__name__}, a class that is not registered as a pytree. Call "
            "jax.tree_util.register_pytree_node for it, with the numbers that change (such as loss_scale, counter and "
            "hysteresis_left) as children; its constructor checks values, so rebuild it without calling that."
        )
    return loss_scale


def _differentiated(params: Any) -> Any:
    """The parameters that have gradients: the fast ones of `optax.lookahead`'s two sets."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _are_of_examples(grads: Any, params: Any) -> bool:
    """Whether each gradient has a dimension for the examples in front, as `optax.contrib.dpsgd` takes them."""
    shapes = zip(map(np.shape, jax.tree.leaves(grads)), map(np.shape, jax.tree.leaves(params)), strict=True)
    return all(len(shape) > len(expected) and shape[1:] == expected for shape, expected in shapes)


def _other_shape(tree: Any, params: Any) -> int | None:
    """The number of the first leaf whose shape is not its parameter's."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True)
    return next((number for number, (x, p) in enumerate(pairs) if np.shape(x) != np.shape(p)), None)


def _check_shapes(what: str, tree: Any, params: Any) -> None:
    if (number := _other_shape(tree, params)) is not None:
        shape, expected = (np.shape(jax.tree.leaves(each)[number]) for each in (tree, params))
        raise ValueError(
            f"{what} must have the shapes of `params`: {leaf_paths(params)[number]!r} has the shape {shape}, and the "
            f"parameter {expected}. Differentiate the mean over the batch with respect to the parameters given."
        )


def _check_gradient_shapes(grads: Any, params: Any) -> None:
    """Names the gradient that `inner` cannot use; if all are those of examples, `inner` may have another reason."""
    if params is not None and not _are_of_examples(grads, _differentiated(params)):
        _check_shapes("`grads`", grads, _differentiated(params))


def _is_stretched(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether arrays of the first shape, not of the second, become such of the second where both meet."""
    try:
        return shape != expected and np.broadcast_shapes(shape, expected) == expected
    except ValueError:
        return False


def _check_loss(value: Any) -> None:
    if not all(map(is_array, jax.tree.leaves(value))):
        raise TypeError(
            f"`value` must be the loss of this step, got {short_repr(value)}. Call update(grads, opt_state, params, "
            "value=loss)."
        )


def _check_no_keys(params: Any) -> None:
    for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
        if is_array(leaf) and jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
            raise TypeError(
                f"`params`: {path!r} is a PRNG key ({leaf.dtype}), to which no update can be added. Give the optimizer "
                "parameters and gradients without keys, and hand keys to the loss function in another argument."
            )


def _check_structure(grads: Any, state: Any, params: Any) -> None:
    check_state(state, LossScaleState)
    _check_loss_scale(state.loss_scale)
    leaves = jax.tree.leaves(grads)
    if params is not None:
        like = _differentiated(params)
        if difference := node_difference(grads, like):
            missing, extra = missing_and_extra(grads, like)
            what = f"missing {missing}, not in `params` {extra}" if missing or extra else difference
            raise ValueError(
                f"`grads` must have the structure of `params`: {what}. "
                "Differentiate with respect to the parameters that the optimizer holds."
            )
        # Most transformations would add such gradients to their state without an error. Larger ones `inner` may sum,
        # over examples or devices.
        if any(_is_stretched(np.shape(g), np.shape(p)) for g, p in zip(leaves, jax.tree.leaves(like), strict=True)):
            _check_shapes("`grads`", grads, like)
    if len(leaves) != state.last_overflow.shape[-1]:
        raise ValueError(
            f"`grads` has {len(leaves)} leaves, and `init` saw parameters with {state.last_overflow.shape[-1]}. "
            "Call `init` with the parameters that you differentiate with respect to."
        )
