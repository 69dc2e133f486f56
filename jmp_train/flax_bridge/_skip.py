"""One optimizer step that is taken as a whole or not at all.

Decides that a skipped step changes nothing but the state of `with_loss_scale`. Does not decide which step is skipped:
`with_loss_scale` records that in the optimizer's state.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from .._finite import select_tree
from .._paths import leaf_paths, missing_and_extra
from .._scale_state import LossScaleState, get_loss_scale, step_metrics
from .._sharding import varying_axes

T = TypeVar("T")


def trainable(tree: Any) -> Any:
    """The part of parameters or gradients that an optimizer sees: all but the statistics of Flax's fp8 layers."""
    return tree["params"] if _has_statistics(tree) else tree


def init_optimizer(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns `tx.init` of the trainable parameters.

    Raises:
      ValueError: the state records no decision for the whole step.
    """
    opt_state = tx.init(trainable(params))
    try:
        get_loss_scale(opt_state)
    except ValueError as error:
        raise ValueError(
            f"`tx` must hold exactly one with_loss_scale, which decides for the whole state whether a step is skipped: "
            f"{error} Where no loss scale is needed, with_loss_scale(tx, NoOpLossScale()) skips without scaling."
        ) from None
    if any(map(_holds_scale, _nodes(opt_state, _is_accumulating))):
        raise ValueError(
            "`tx` has optax.MultiSteps around with_loss_scale, where a non-finite gradient is accumulated before "
            "it is checked. Turn them round: with_loss_scale(optax.MultiSteps(optimizer, steps))."
        )
    return opt_state


def optimizer_step(
    tx: Any, grads: Any, opt_state: Any, params: Any, start: Any, **extra_args: Any
) -> tuple[jax.Array, Any, Any]:
    """Whether the step was applied, the parameters, and the optimizer's state: both the old ones if it was not.

    Args:
      tx, grads, opt_state, params: the optimizer and what it is given.
      start: the parameters that the step moves, where the loss function assigned to some.
      **extra_args: keywords for `tx.update`.

    Raises:
      ValueError: JAX can tell that devices with the same state would take different steps.
    """
    updates, new_state = tx.update(trainable(grads), opt_state, trainable(start), **extra_args)
    finite = step_metrics(new_state)["grads_finite"]
    for new, old in ((finite, step_metrics(opt_state)["grads_finite"]), *_pairs(updates, trainable(params))):
        for axis in _drifting(new, old):
            raise ValueError(
                f"`grads` differ between the devices of axis {axis!r}, whose states are equal and would drift apart: "
                f"average them with value_and_grad(..., axis_name={axis!r}), and let all devices skip together with "
                f"with_loss_scale(..., axis_name={axis!r})."
            )
    moved = optax.apply_updates(trainable(start), updates)
    if _has_statistics(params):
        # Flax replaces these by their "gradient", and so does a step that is applied.
        statistics = grads[OVERWRITE_WITH_GRADIENT]
        moved = {**params, "params": moved, OVERWRITE_WITH_GRADIENT: statistics}
    return finite, keep_unless(finite, moved, params, "params"), select_state(finite, new_state, opt_state)


def select_state(finite: jax.Array, new: Any, old: Any) -> Any:
    """The optimizer's new state; after a skipped step it is the old one, except for the state of `with_loss_scale`.

    That wrapper selects the state inside it. There may be state around it: the counter of `optax.inject_hyperparams`,
    or of a schedule that follows in a chain.
    """

    def select(new: Any, old: Any) -> Any:
        return new if _is_scale_state(new) else _select(finite, new, old)

    return jax.tree.map(select, new, old, is_leaf=_is_scale_state)


def keep_unless(finite: jax.Array, new: T, old: T, name: str) -> T:
    """`new` where the step was applied, else `old`; each leaf in the dtype of `old`, so that nothing is traced again.

    Raises:
      ValueError: `new` has leaves at other paths, or of other shapes, or ones that JAX knows to differ between devices
        where those of `old` are equal.
    """
    found, expected = leaf_paths(new), leaf_paths(old)
    if found != expected:
        missing, extra = missing_and_extra(new, old)
        raise ValueError(
            f"`{name}` must have the structure that the state holds: missing {missing}, not in the state {extra}. "
            "Return every collection that the state was created with, and take out what a step adds (nnx.pop)."
        )
    for path, a, b in zip(found, jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        if jnp.shape(a) != jnp.shape(b):
            raise ValueError(f"`{name}`: {path!r} has the shape {jnp.shape(a)}, and the state's is {jnp.shape(b)}.")
        for axis in _drifting(a, b):
            raise ValueError(
                f"`{name}`: {path!r} differs between the devices of axis {axis!r}, and the state's is equal on all of "
                f"them; pass jax.lax.pmean({name}, {axis!r}), or give the layer that computes it axis_name={axis!r}."
            )
    leaves = [_select(finite, a, b) for a, b in _pairs(new, old)]
    return jax.tree.unflatten(jax.tree.structure(old), leaves)


def _pairs(new: Any, old: Any) -> Any:
    return zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)


def _drifting(new: Any, old: Any) -> list[Any]:
    """The mesh axes over which JAX knows `new` to differ and `old` not to."""
    return sorted(varying_axes(new) - varying_axes(old), key=str)


def _select(finite: jax.Array, new: Any, old: Any) -> Any:
    same = jnp.result_type(new) == jnp.result_type(old)
    return select_tree(finite, new if same else jnp.asarray(new).astype(jnp.result_type(old)), old)


def _has_statistics(tree: Any) -> bool:
    return hasattr(tree, "keys") and OVERWRITE_WITH_GRADIENT in tree


def _is_scale_state(node: Any) -> bool:
    return isinstance(node, LossScaleState)


def _is_accumulating(node: Any) -> bool:
    return isinstance(node, optax.MultiStepsState)


def _holds_scale(node: Any) -> bool:
    return any(map(_is_scale_state, _nodes(node, _is_scale_state)))


def _nodes(tree: Any, is_leaf: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_leaf)
