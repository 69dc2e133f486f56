"""One training step, written as each library's users write it, all with the same signature.

Decides what is compared. Does not decide the models, nor what is measured.

Every step is `(state, batch) -> (state, loss)` with `state = (params, model_state, opt_state, scale)`, to be jitted
with its state donated; every `loss` is `(params, model_state, batch) -> (loss, model_state)`, where the model state
(BatchNorm's statistics) is a dictionary, empty for most. On a non-finite gradient parameters and optimizer state stay
as they were.
"""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale

import jmp_train

Tree = Any
Loss = Callable[[Tree, Tree, Tree], tuple[jax.Array, Tree]]
ADAM = optax.adam(1e-3)
FIRST_SCALE = 2.0**15


class Step(NamedTuple):
    """`init(params, model_state) -> state`; `step(state, batch) -> (state, loss)`."""

    init: Callable[[Tree, Tree], Tree]
    step: Callable[[Tree, Tree], tuple[Tree, jax.Array]]


class Scaling(NamedTuple):
    """What a library adds to a step besides the optimizer, as its documentation shows it.

    init: `() -> scale`.
    gradients: `(loss, scale, params, model_state, batch) -> (scale, grads_finite, loss, model_state, grads)`, the
        gradients unscaled.
    """

    init: Callable[[], Tree]
    gradients: Callable[..., tuple[Tree, jax.Array, jax.Array, Tree, Tree]]


def peer(name: str) -> Any:
    """Imports `jmp` or `mpx` and suppresses the warnings of that import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def plain(loss: Loss, tx: optax.GradientTransformation = ADAM, value_and_grad: Any = jax.value_and_grad) -> Step:
    """A step with no loss scale and no check for overflow."""

    def step(state, batch):
        params, model_state, opt_state, scale = state
        (value, model_state), grads = value_and_grad(loss, has_aux=True)(params, model_state, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), model_state, opt_state, scale), value

    return Step(lambda params, model_state: (params, model_state, tx.init(params), ()), step)


def selected(loss: Loss, scaling: Scaling, tx: optax.GradientTransformation = ADAM) -> Step:
    """A step with a loss scale; an overflow is skipped by `jnp.where`, as Flax, jmp and mpx document."""

    def step(state, batch):
        params, model_state, opt_state, scale = state
        scale, finite, value, model_state, grads = scaling.gradients(loss, scale, params, model_state, batch)
        updates, moved = tx.update(grads, opt_state, params)
        new, old = (optax.apply_updates(params, updates), moved), (params, opt_state)
        params, opt_state = jax.tree.map(functools.partial(jnp.where, finite), new, old)
        return (params, model_state, opt_state, scale), value

    return Step(lambda params, model_state: (params, model_state, tx.init(params), scaling.init()), step)


def conditional(loss: Loss, scaling: Scaling, tx: optax.GradientTransformation = ADAM) -> Step:
    """A step with a loss scale; an overflow is skipped by `lax.cond`, which saves the optimizer's work in that step."""

    def step(state, batch):
        params, model_state, opt_state, scale = state
        scale, finite, value, model_state, grads = scaling.gradients(loss, scale, params, model_state, batch)

        def apply(params, opt_state):
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = jax.lax.cond(finite, apply, lambda *old: old, params, opt_state)
        return (params, model_state, opt_state, scale), value

    return Step(lambda params, model_state: (params, model_state, tx.init(params), scaling.init()), step)


def checked_by_optax(loss: Loss, tx: optax.GradientTransformation = ADAM) -> Step:
    """A step with `optax.apply_if_finite` and a constant scale, because optax has no loss scale."""
    tx = optax.apply_if_finite(tx, 1000)

    def step(state, batch):
        params, model_state, opt_state, scale = state

        def scaled(params):
            value, moved = loss(params, model_state, batch)
            return value * FIRST_SCALE, moved

        (value, model_state), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g / FIRST_SCALE, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), model_state, opt_state, scale), value / FIRST_SCALE

    return Step(lambda params, model_state: (params, model_state, tx.init(params), ()), step)


def ours(
    loss: Loss,
    policy: Any,
    tx: optax.GradientTransformation = ADAM,
    *,
    autocast: bool = True,
    loss_scale: Any = None,
) -> Step:
    """A step with this library; by default with a dynamic loss scale."""
    wrapped = jmp_train.with_loss_scale(tx, loss_scale)
    differentiate = jmp_train.value_and_grad(loss, policy, has_aux=True, autocast=autocast)

    def step(state, batch):
        params, model_state, opt_state, scale = state
        (value, model_state), grads = differentiate(
            params, model_state, batch, loss_scale=jmp_train.get_loss_scale(opt_state)
        )
        updates, opt_state = wrapped.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), model_state, opt_state, scale), value

    return Step(lambda params, model_state: (params, model_state, wrapped.init(params), ()), step)


def ours_without_scale(loss: Loss, policy: Any, tx: optax.GradientTransformation = ADAM) -> Step:
    """A step with this library's autocast and no loss scale, which bfloat16 does not need."""
    return plain(loss, tx, functools.partial(jmp_train.value_and_grad, policy=policy))


def flax_scaling() -> Scaling:
    """Flax's DynamicScale. Its counters are arrays; with Python scalars the step compiles twice."""

    def init():
        return DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(FIRST_SCALE))  # pyright: ignore[reportArgumentType]

    def gradients(loss, scale, params, model_state, batch):
        scale, finite, (value, moved), grads = scale.value_and_grad(loss, has_aux=True)(params, model_state, batch)
        return scale, finite, value, moved, grads

    return Scaling(init, gradients)


def jmp_scaling(compute: Any = jnp.float32) -> Scaling:
    """DeepMind's jmp: the loss function casts parameters and batch, and scales the loss.

    The state holds the scale's two arrays instead of the object, with which `jit(step).lower(...)` raises a TypeError.
    """
    jmp = peer("jmp")
    policy = jmp.Policy(jnp.float32, compute, jnp.float32)

    def gradients(loss, state, params, model_state, batch):
        scale = jmp.DynamicLossScale(*state)

        def scaled(params):
            low_params, low_batch = policy.cast_to_compute((params, batch))
            value, moved = loss(low_params, model_state, low_batch)
            value = policy.cast_to_output(value)
            return scale.scale(value), (value, moved)

        grads, (value, moved) = jax.grad(scaled, has_aux=True)(params)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        adjusted = scale.adjust(finite)
        return (adjusted.loss_scale, adjusted.counter), finite, value, moved, grads

    return Scaling(lambda: (jnp.float32(FIRST_SCALE), jnp.int32(0)), gradients)


def mpx_scaling(mixed: bool = True) -> Scaling:
    """mixed_precision_for_JAX.

    Without `mixed`, its loss scale alone, because `mpx.filter_value_and_grad` scales only what it casts to float16.
    """
    mpx = peer("mpx")

    def gradients(loss, scale, params, model_state, batch):
        def of(params, batch):  # the model state is closed over: as an argument it would be cast, too
            return loss(params, model_state, batch)

        if mixed:
            differentiate = mpx.filter_value_and_grad(of, scale, has_aux=True)
            (value, moved), scale, finite, grads = differentiate(params, batch)
            return scale, finite, value, moved, grads
        scaled = mpx.scaled(of, scale, has_aux=True)
        (value, moved), grads = jax.value_and_grad(scaled, has_aux=True)(params, batch)
        finite = mpx.all_finite(grads)
        adjusted = scale.adjust(finite)
        return adjusted, finite, adjusted.unscale(value), moved, adjusted.unscale(grads)

    def init():
        return mpx.DynamicLossScaling(jnp.float32(FIRST_SCALE), jnp.float32(1.0))

    return Scaling(init, gradients)


def hand_scaling(compute: Any = None) -> Scaling:
    """A loss scale by hand, with no library: cast, scale, differentiate, unscale in float32, check, adjust."""

    def init():
        return {"scale": jnp.float32(FIRST_SCALE), "good_steps": jnp.int32(0)}

    def cast(tree):
        floats = functools.partial(jnp.issubdtype, arg2=jnp.floating)
        return jax.tree.map(lambda x: x.astype(compute) if compute and floats(x.dtype) else x, tree)

    def gradients(loss, state, params, model_state, batch):
        scale = state["scale"]

        def scaled(params):
            value, moved = loss(cast(params), model_state, cast(batch))
            return value.astype(jnp.float32) * scale, (value, moved)

        grads, (value, moved) = jax.grad(scaled, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        good = jnp.where(finite, state["good_steps"] + 1, 0)
        grown = jnp.where(good == 2000, scale * 2, scale)
        state = {"scale": jnp.where(finite, grown, scale / 2), "good_steps": good % 2000}
        return state, finite, value, moved, grads

    return Scaling(init, gradients)
