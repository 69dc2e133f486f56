"""The state of `with_loss_scale`, and the functions that read it: the loss scale, and the metrics to log.

Decides what is recorded about the steps. Does not decide what a step does; see `_optimizer.py`.
"""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._loss_scale import DynamicLossScale, LossScale


class ScaleStatus(enum.IntEnum):
    """The condition of the loss scale; the `status` of `step_metrics`."""

    OK = 0
    """The last step was applied, and the scale has not fallen to its minimum."""
    BACKING_OFF = 1
    """The last step was skipped, and the scale can still become smaller."""
    AT_MINIMUM = 2
    """A dynamic scale has met an overflow and is at its minimum, until it grows again, or one that cannot move met an
    overflow: the model overflows by itself, and scaling cures no further one. `find_overflow(train_step)(*args)` names
    the line and the cure. A dynamic scale that starts at its minimum is `OK` until the first overflow."""


class LossScaleState(NamedTuple):
    """State of `with_loss_scale`.

    Attributes:
      inner_state: the inner transformation's state, bit for bit the old one after a skipped step.
      loss_scale: the loss scale for the *next* step.
      grads_finite: whether the last step's gradients were finite, bool `[]`; true before the first.
      skipped_steps: steps skipped so far, int32 `[]`.
      consecutive_skips: steps skipped since the last one applied, int32 `[]`.
      nonfinite_losses: steps applied so far whose loss was infinite or NaN although their gradients were finite,
        int32 `[]`; counts only steps that were given the loss, `update(..., value=loss)`.
      last_overflow: which leaves of the gradient were non-finite at the last skip, bool `[n]` in the order of
        `jax.tree.leaves(params)`. All false before the first skip; steps that are applied do not change it.
      overflow_counts: in how many skipped steps each leaf was non-finite, int32 `[n]`.
    """

    inner_state: Any
    loss_scale: LossScale
    grads_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    nonfinite_losses: jax.Array
    last_overflow: jax.Array
    overflow_counts: jax.Array


def get_loss_scale(opt_state: Any) -> LossScale:
    """The loss scale for the next step, found at any depth of an optimizer state.

    Args:
      opt_state: a `LossScaleState`, or any pytree that holds exactly one: states of `chain`, `masked`,
        `multi_transform`, `inject_hyperparams`; an NNX optimizer or its `opt_state`.

    Raises:
      ValueError: it holds none, or more than one.

    Example:
      >>> import optax
      >>> from jmp_train import with_loss_scale
      >>> opt_state = optax.chain(with_loss_scale(optax.adam(1e-3)), optax.scale(0.5)).init(jnp.ones(3))
      >>> float(get_loss_scale(opt_state).loss_scale)
      32768.0
    """
    return find_state(opt_state).loss_scale


def step_metrics(opt_state: Any) -> dict[str, jax.Array]:
    """The metrics to log after a step, as scalars; works inside `jit`, and nothing waits for the device.

    Args:
      opt_state: as in `get_loss_scale`.

    Returns:
      `loss_scale`, float32: the scale for the next step; `grads_finite`, bool: whether the step was applied;
      `skipped_steps` and `consecutive_skips`, int32; `nonfinite_losses`, int32: steps applied with a loss that was not
      finite, if `update` is given `value=loss`; `status`, int32: a `ScaleStatus`. When that is `AT_MINIMUM`, or
      `nonfinite_losses` grows, call `find_overflow` with the step and its arguments.

    Raises:
      ValueError: `opt_state` holds no loss scale, or more than one.

    Example:
      >>> import optax
      >>> from jmp_train import with_loss_scale
      >>> opt_state = with_loss_scale(optax.adam(1e-3)).init(jnp.ones(3))
      >>> for name, value in step_metrics(opt_state).items():
      ...     print(name, value.item())
      loss_scale 32768.0
      grads_finite True
      skipped_steps 0
      consecutive_skips 0
      nonfinite_losses 0
      status 0
    """
    state = find_state(opt_state)
    value = jnp.asarray(state.loss_scale.loss_scale, np.float32)
    stuck = ~state.grads_finite
    if isinstance(state.loss_scale, DynamicLossScale):
        stuck = (value <= state.loss_scale.min_loss_scale) & (state.skipped_steps > 0)
    moving = jnp.where(state.grads_finite, np.int32(ScaleStatus.OK), np.int32(ScaleStatus.BACKING_OFF))
    return {
        "loss_scale": value,
        "grads_finite": state.grads_finite,
        "skipped_steps": state.skipped_steps,
        "consecutive_skips": state.consecutive_skips,
        "nonfinite_losses": state.nonfinite_losses,
        "status": jnp.where(stuck, np.int32(ScaleStatus.AT_MINIMUM), moving),
    }


def find_state(opt_state: Any) -> LossScaleState:
    """The one `LossScaleState` of an optimizer's state, with plain arrays; raises as `get_loss_scale` does."""
    found = find_states(opt_state)
    if not found:
        raise ValueError(
            "`opt_state` has no loss scale. Build the optimizer as with_loss_scale(optax.adam(1e-3)) and pass the "
            "state that its `init` or `update` returned."
        )
    if len(found) > 1:
        raise ValueError(
            f"`opt_state` has {len(found)} loss scales, at {', '.join(found)}. Pass the part that belongs to one loss."
        )
    return next(iter(found.values()))


def find_states(opt_state: Any) -> dict[str, LossScaleState]:
    """Every `LossScaleState`, by its path."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=lambda x: isinstance(x, LossScaleState))
    return {jax.tree_util.keystr(path): _unboxed(x) for path, x in nodes if isinstance(x, LossScaleState)}


def _unboxed(state: LossScaleState) -> LossScaleState:
    """The state with plain arrays; NNX puts every array of an optimizer state into a variable, a pytree of one leaf."""
    fields = jax.tree.map(
        lambda box: jax.tree.leaves(box)[0], state[1:], is_leaf=lambda x: not isinstance(x, tuple | LossScale)
    )
    return LossScaleState(state.inner_state, *fields)
