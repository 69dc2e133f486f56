"""NNX: gradients of modules, and training with them, without losing the changes that a module makes to itself.

Decides how a module is split for `jmp_train.value_and_grad` and when updates are written into it. Does not decide which
step is skipped (`with_loss_scale`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import optax
from flax import nnx, struct

from .. import _grad
from .._autocast import full_precision
from .._grad_inputs import check_loss_fn, check_reaches, own_loss_scale, split_result
from .._paths import leaf_paths
from .._policy import Policy, get_policy
from .._scale_state import step_metrics
from .._sharding import axes_of, mean_values
from ._assigned import check_precise, split_assigned, with_assigned
from ._skip import keep_unless, optimizer_step
from ._train_state import BaseState, initial_fields


def value_and_grad(
    loss_fn: Callable[..., Any], policy: Policy | str, *, has_aux: bool = False, wrt: Any = nnx.Param, **options: Any
) -> Callable[..., Any]:
    """Returns a function that evaluates `loss_fn` of a module, its gradient, and the module's new state.

    The counterpart of `nnx.value_and_grad`. That function updates a module's BatchNorm statistics and random counters
    in place while it computes the gradient, so that they hold NaN before anyone knows that the gradient does. Here the
    module stays as it is and its new state is returned; `update_module` or `NNXTrainState.apply_gradients` then applies
    or drops it together with the gradients.

    Args:
      loss_fn: a function of the module and other arguments that returns the loss, a real floating scalar `[]`, or
        `(loss, aux)`.
      policy: a `Policy`, or a name for `get_policy`.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      wrt: a filter for the variables to differentiate with respect to; under autocast, these are the parameters.
      **options: the other keywords of `jmp_train.value_and_grad`, such as `autocast` and `axis_name`; not `argnums`.

    Returns:
      A function of `loss_fn`'s arguments and keywords, the module first, and of `loss_scale`. It returns
      `(loss, grads, model_state)` or `((loss, aux), grads, model_state)`:
      loss, aux: as in `jmp_train.value_and_grad`.
      grads: an `nnx.State` of the variables `wrt`, unscaled, float32: what `nnx.Optimizer.update` takes.
      model_state: an `nnx.State` of all the module's other variables, after the call, and of those variables `wrt`
        that `loss_fn` assigned to, as `nnx.WeightNorm` does: a step that is applied starts from these. With
        `axis_name`, variables that the call changed are averaged over the devices in float32, so that the modules stay
        equal: a variance is then the mean of the devices' variances; `nnx.BatchNorm(..., axis_name=...)` computes that
        of the whole batch. Counters and keys are not averaged: with the same keys, devices drop the same units.

    Raises:
      TypeError: `loss_fn` is no function; the first argument is no module, or another one holds a module; and as
        `jmp_train.value_and_grad`.
      ValueError: `loss_fn` adds variables and leaves them in the module, or assigns to a variable `wrt` of which it
        was given a rounded copy (`autocast=False`); `wrt` chooses no variable.

    Example:
      >>> import jax.numpy as jnp
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> grad_fn = value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), "mixed_bfloat16")
      >>> loss, grads, model_state = grad_fn(model, jnp.ones((4, 2)))
      >>> grads["scale"].shape, model_state["mean"][...], model.mean[...]
      ((2,), Array([0.01, 0.01], dtype=float32), Array([0., 0.], dtype=float32))
    """

    if "argnums" in options:
        raise TypeError(
            "`argnums` is not for modules: the first argument is differentiated, and `wrt` chooses among its variables."
        )

    check_loss_fn(loss_fn)
    axes = axes_of(options.get("axis_name"))
    own_scale = own_loss_scale(loss_fn)

    def functional(params: Any, rest: Any, graphdef: Any, args: Any, kwargs: Any) -> Any:
        def run(params: Any) -> tuple[Any, Any, Any]:
            # A copy: merging shares the variables, and the caller's would change.
            model = nnx.merge(graphdef, params, rest, copy=True)
            result = loss_fn(model, *args, **kwargs)
            _, after, model_state = nnx.split(model, wrt, ...)
            return result, after, model_state

        result, after, model_state = run(params)
        loss, aux = split_result(result, has_aux)
        _check_added((params, rest), (after, model_state))
        model_state = with_assigned(model_state, params, after, lambda params: run(params)[1])
        return loss, (aux, _agreed(model_state, rest, axes))

    grad_fn = _grad.value_and_grad(functional, policy, has_aux=True, **options)

    def with_policy(module: Any, /, *args: Any, loss_scale: Any = None, **kwargs: Any) -> Any:
        if not isinstance(module, nnx.Module):
            raise TypeError(
                f"the first argument must be an NNX module, got {type(module).__name__}; for trees of parameters use "
                f"jmp_train.value_and_grad."
            )
        check_reaches(loss_scale, 1 + len(args), own_scale)
        graphdef, params, rest = _split(module, wrt)
        (loss, (aux, model_state)), grads = grad_fn(params, rest, graphdef, args, kwargs, loss_scale=loss_scale)
        if not options.get("autocast", True):
            check_precise(model_state, params, jax.eval_shape(get_policy(policy).cast_to_compute, params))
        # Here and not inside, where each device has parameters of its own.
        model_state = _agreed(model_state, params, axes)
        return ((loss, aux) if has_aux else loss), grads, model_state

    return with_policy


def update_module(module: Any, optimizer: nnx.Optimizer, grads: Any, model_state: Any, **extra_args: Any) -> None:
    """Applies one step to a module and its `nnx.Optimizer` in place, or, if a gradient is not finite, to neither.

    `optimizer.update(module, grads)` skips parameters and moments when its transformation is `with_loss_scale`; this
    also skips the optimizer's step counter and everything in `model_state`.

    Args:
      module: the module that was differentiated.
      optimizer: built as `nnx.Optimizer(module, with_loss_scale(...), wrt=nnx.Param)`.
      grads: from `value_and_grad` with the same `wrt`.
      model_state: from the same call.
      **extra_args: keywords for the optimizer's `update`, such as `value=loss`; see `with_loss_scale`.

    Raises:
      ValueError: the optimizer has no `with_loss_scale`, or the states are not the module's.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_train as jmp
      >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, jmp.with_loss_scale(optax.adam(0.1)), wrt=nnx.Param)
      >>> grad_fn = value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), "mixed_float16")
      >>> @nnx.jit
      ... def train_step(model, optimizer, x):
      ...     loss, grads, model_state = grad_fn(model, x, loss_scale=jmp.get_loss_scale(optimizer))
      ...     update_module(model, optimizer, grads, model_state)
      ...     return loss
      >>> for x in (jnp.ones((4, 3)), jnp.full((4, 3), jnp.inf)):
      ...     _ = train_step(model, optimizer, x)
      ...     print(int(optimizer.step[...]), float(jmp.get_loss_scale(optimizer).loss_scale))
      1 32768.0
      1 16384.0
    """
    step_metrics(optimizer)  # raises if there is no loss scale, before anything has changed
    others, params = nnx.state(module, nnx.Not(optimizer.wrt)), nnx.state(module, optimizer.wrt)
    start, model_state = split_assigned(model_state, params)
    # As plain arrays, which is what an nnx.Optimizer gives its transformation.
    trees = (grads, optimizer.opt_state, params, start)
    extra: Any = nnx.as_pure(extra_args)
    finite, params, opt_state = optimizer_step(optimizer.tx, *map(nnx.as_pure, trees), **extra)
    kept = keep_unless(finite, model_state, others, "model_state")
    nnx.update(module, params)
    nnx.update(module, kept)
    nnx.update(optimizer.opt_state, nnx.state(opt_state))
    optimizer.step[...] += finite


class NNXTrainState(BaseState):
    """Everything that training an NNX module changes, as one immutable pytree; a skipped step changes no part of it.

    The functional counterpart of a module and its `nnx.Optimizer`, for `jax.jit`, `scan` and checkpoints. The fields
    are `TrainState`'s, with `params` the `nnx.State` of the variables `wrt`, `model_state` that of all others (keys and
    counters of `nnx.Rngs` included), and `graphdef`, which is static.

    Example:
      >>> import jax.numpy as jnp
      >>> import jmp_train as jmp
      >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
      >>> state = NNXTrainState.create(model=model, tx=jmp.with_loss_scale(optax.adam(0.1)), ema_decay=0.9)
      >>> grad_fn = value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), "mixed_float16")
      >>> @jax.jit
      ... def train_step(state, x):
      ...     loss, grads, model_state = grad_fn(state.model, x, loss_scale=jmp.get_loss_scale(state))
      ...     return state.apply_gradients(grads=grads, model_state=model_state), loss
      >>> state, loss = train_step(state, jnp.ones((4, 3)))
      >>> int(state.step), state.model(jnp.ones((1, 3))).shape
      (1, (1, 2))
    """

    graphdef: Any = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        *,
        model: nnx.Module,
        tx: optax.GradientTransformation,
        wrt: Any = nnx.Param,
        ema_decay: float | None = None,
        **fields: Any,
    ) -> Self:
        """The state before the first step; `model` may be used and changed afterwards, unless the state is donated.

        Raises:
          ValueError: `tx` has no `with_loss_scale`, or one inside of `optax.MultiSteps`; `ema_decay` is not in [0, 1);
            `wrt` chooses no variable.
          TypeError: `tx` is no optax transformation, or `model` no NNX module.
        """
        if not isinstance(model, nnx.Module):
            raise TypeError(
                f"`model` must be an NNX module, got {type(model).__name__}; for Linen there is TrainState."
            )
        graphdef, params, rest = _split(model, wrt)
        return cls(**initial_fields(_frozen(params), tx, _frozen(rest), ema_decay), graphdef=graphdef, **fields)

    def _start(self, changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        start, model_state = split_assigned(changes.get("model_state"), self.params)
        return start, changes | {"model_state": model_state} if "model_state" in changes else changes

    @property
    def model(self) -> Any:
        """A module with this state's variables; changing it leaves the state alone."""
        return nnx.merge(self.graphdef, self.params, self.model_state, copy=True)

    @property
    def ema_model(self) -> Any:
        """A module with the averaged parameters.

        Raises:
          ValueError: the state was created without `ema_decay`.
        """
        if self.ema_decay is None:
            raise ValueError("there is no average of the parameters; create the state with ema_decay=0.999.")
        return nnx.merge(self.graphdef, self.ema_params, self.model_state, copy=True)


def _split(module: nnx.Module, wrt: Any) -> tuple[Any, Any, Any]:
    """The module's graph, its variables `wrt`, and all others."""
    graphdef, params, rest = nnx.split(module, wrt, ...)
    if not jax.tree.leaves(params):
        found = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(rest)})
        raise ValueError(
            f"`wrt` (={getattr(wrt, '__name__', wrt)}) chooses no variable of {type(module).__name__}, which has "
            f"{found}; pass a type of variable or another filter of nnx."
        )
    return graphdef, params, rest


def _frozen(state: Any) -> Any:
    """The state with variables of its own, so that a module's assignments do not reach it."""
    return jax.tree.map(lambda x: x, state)


def _agreed(model_state: Any, old: Any, axes: Any) -> Any:
    """The state with the values that differ from `old` averaged over the devices; all others cost nothing."""
    if not axes:
        return model_state
    before = dict(zip(leaf_paths(old), jax.tree.leaves(old), strict=True))
    leaves, treedef = jax.tree.flatten(model_state)
    pairs = enumerate(zip(leaf_paths(model_state), leaves, strict=True))
    changed = {i: before[path] for i, (path, leaf) in pairs if leaf is not before.get(path, leaf)}
    # Outside of autocast, whose policy may reduce gradients in 16 bits.
    means = full_precision(mean_values)([leaves[i] for i in changed], list(changed.values()), axes)
    for i, mean in zip(changed, means, strict=True):
        leaves[i] = mean
    return jax.tree.unflatten(treedef, leaves)


def _check_added(before: Sequence[Any], after: Sequence[Any]) -> None:
    known, found = ({path for tree in trees for path in leaf_paths(tree)} for trees in (before, after))
    if extra := sorted(found - known):
        raise ValueError(
            f"`loss_fn` added the variables {extra} to the module; take them out before it returns, as in "
            f"nnx.pop(model, nnx.Intermediate), and return them as aux."
        )
