"""The training state for Linen: one pytree that a step replaces as a whole or not at all.

Decides what belongs to a training state and that all of it is skipped together. Does not decide which step is skipped
(`with_loss_scale`) nor what runs in 16 bits (`jmp_train.value_and_grad`).
"""

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from .._finite import is_gradient, map_gradients
from .._scaling import widen
from .._values import check_transformation
from ._skip import init_optimizer, keep_unless, optimizer_step


class BaseState(struct.PyTreeNode):
    """What the states for Linen and NNX share; see `TrainState`."""

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    ema_params: Any
    tx: Any = struct.field(pytree_node=False)
    ema_decay: float | None = struct.field(pytree_node=False)

    def apply_gradients(
        self, *, grads: Any, value: Any = None, extra_args: Mapping[str, Any] | None = None, **changes: Any
    ) -> Self:
        """The state after one step, or, if a gradient is not finite, this state with another loss scale.

        Args:
          grads: unscaled gradients, shaped like `params`: what `value_and_grad` returns.
          value: the loss, so that `step_metrics(state)` counts losses that are not finite; see `with_loss_scale`. The
            optimizer gets it too, as `optax.contrib.reduce_on_plateau` wants it.
          extra_args: further keywords for the optimizer's `update`.
          **changes: new values of other fields: `model_state`, or fields that a subclass adds and that are not static.

        Returns:
          A state of the same structure, shapes and dtypes, and in the same order: donating this one copies nothing.
          After a skipped step every leaf but those of `LossScaleState` has the bits that it had.

        Raises:
          ValueError: a change has another structure or other shapes than the field holds; or, where JAX can tell (in a
            `shard_map` that checks), devices whose states are equal would not agree on the new one.
          TypeError: a change is no field, or one that only this method may change.
        """
        own = {"step", "params", "opt_state", "ema_params", "tx", "ema_decay"}
        fields = [field for field in dataclasses.fields(self) if field.name not in own]
        allowed = [field.name for field in fields if field.metadata.get("pytree_node", True)]
        if unknown := sorted(set(changes) - set(allowed)):
            raise TypeError(
                f"`apply_gradients` cannot change {unknown}; it changes {allowed}, and the rest by itself. Static "
                "fields are for `state.replace`, and keywords of the optimizer's update go into `extra_args`."
            )
        extra = dict(extra_args or {}) | ({} if value is None else {"value": value})
        start, changes = self._start(changes)
        finite, params, opt_state = optimizer_step(self.tx, grads, self.opt_state, self.params, start, **extra)
        kept = {name: keep_unless(finite, new, getattr(self, name), name) for name, new in changes.items()}
        return self.replace(
            step=self.step + finite,
            params=params,
            opt_state=opt_state,
            ema_params=self._averaged(finite, params),
            **kept,
        )

    def _start(self, changes: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The parameters that a step moves, and the changes of other fields."""
        return self.params, changes

    def _averaged(self, finite: jax.Array, params: Any) -> Any:
        if self.ema_decay is None:
            return None
        decay = np.float32(self.ema_decay)

        def average(path: Any, mean: Any, param: Any) -> Any:
            # Counters and the statistics of fp8 layers are taken as they are.
            return mean + (1 - decay) * (param.astype(mean.dtype) - mean) if is_gradient(path, mean) else param

        averaged = jax.tree_util.tree_map_with_path(average, self.ema_params, params)
        return keep_unless(finite, averaged, self.ema_params, "ema_params")


class TrainState(BaseState):
    """Everything that training a Linen model changes, as one immutable pytree; a skipped step changes no part of it.

    With `with_loss_scale` and Flax's `TrainState` a skipped step keeps parameters and optimizer state, but BatchNorm's
    statistics have seen the bad batch, the step counter and with it dropout's keys have moved on, and an average of the
    parameters has decayed. Here the one decision that `with_loss_scale` records selects all of these, so that a run
    with a bad batch equals a run without it, bit for bit.

    Make one with `create`. It can be donated (`jax.jit(train_step, donate_argnums=0)`), saved and restored whole.
    Subclasses may add fields; `apply_gradients` takes their new values as keywords and skips them as well.

    Attributes:
      step: steps applied so far, int32 `[]`. A skipped step does not count. Under `optax.MultiSteps` it counts
        micro-batches.
      params: the parameters that are differentiated. It may be `{"params": ..., "_overwrite_with_gradient": ...}`, as
        fp8 layers need: then the optimizer gets the first, and the second is replaced by its gradient.
      opt_state: the optimizer's state, with the loss scale in it; `jmp_train.get_loss_scale(state)` finds it.
      model_state: the other variable collections, such as `{"batch_stats": ...}`; `{}` if there are none. On several
        devices pass `apply_gradients` values that are equal on all: `jax.lax.pmean(model_state, axis_name)`, or the
        statistics of a `BatchNorm(axis_name=...)`.
      ema_params: an exponential average of the parameters, float32 where they have 16 bits, or `None`. It starts at
        the initial parameters: m <- m + (1 - ema_decay) (p - m).
      tx: the optax transformation; static.
      ema_decay: static.
      rngs: a PRNG key for each name that the model draws from, `{}` if it draws nothing. They never change:
        `step_rngs` derives a step's keys from them.
      apply_fn: the model's `apply`; static.

    Example:
      >>> from flax import linen as nn
      >>> import jmp_train as jmp
      >>> model, x = nn.Dense(2), jnp.ones((4, 3))
      >>> tx = jmp.with_loss_scale(optax.adam(0.1))
      >>> state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), x)["params"], tx=tx)
      >>> def loss_fn(params, x):
      ...     return jnp.mean(state.apply_fn({"params": params}, x) ** 2)
      >>> grad_fn = jmp.value_and_grad(loss_fn, "mixed_float16")
      >>> for batch in (x, x.at[0, 0].set(jnp.inf)):
      ...     loss, grads = grad_fn(state.params, batch, loss_scale=jmp.get_loss_scale(state))
      ...     state = state.apply_gradients(grads=grads)
      ...     print(int(state.step), float(jmp.get_loss_scale(state).loss_scale))
      1 32768.0
      1 16384.0
    """

    rngs: Any
    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: optax.GradientTransformation,
        model_state: Any = None,
        rngs: Mapping[str, jax.Array] | None = None,
        ema_decay: float | None = None,
        **fields: Any,
    ) -> Self:
        """The state before the first step; see `TrainState` for the arguments.

        Raises:
          ValueError: `tx` has no `with_loss_scale`, or one inside of `optax.MultiSteps`; `ema_decay` is not in [0, 1).
          TypeError: `tx` is no optax transformation, or `rngs` no mapping of names to keys.
        """
        if rngs is not None and not isinstance(rngs, Mapping):
            raise TypeError(
                f"`rngs` must map the names that the model draws from to keys, got {type(rngs).__name__}; "
                f"pass rngs={{'dropout': jax.random.key(0)}}."
            )
        return cls(
            **initial_fields(params, tx, {} if model_state is None else model_state, ema_decay),
            rngs={} if rngs is None else dict(rngs),
            apply_fn=apply_fn,
            **fields,
        )

    @property
    def step_rngs(self) -> dict[str, jax.Array]:
        """The keys of this step, for `apply_fn(..., rngs=state.step_rngs)`: each of `rngs` folded with `step`.

        They change with each applied step, so that a skipped step does not advance them. They are equal on all devices:
        in a `shard_map`, fold `jax.lax.axis_index` into them for a different dropout on each device.
        """
        return {name: jax.random.fold_in(key, self.step) for name, key in self.rngs.items()}


def initial_fields(params: Any, tx: Any, model_state: Any, ema_decay: float | None) -> dict[str, Any]:
    """The fields of `BaseState` before the first step."""
    # No array either: the field is static, which has to be hashable.
    if ema_decay is not None and not (isinstance(ema_decay, numbers.Real) and 0 <= ema_decay < 1):
        raise ValueError(
            f"`ema_decay` must be a number in [0, 1), got {ema_decay!r}: it is the share that an average keeps at each "
            "step. Pass a number such as 0.999, or None for no average."
        )
    return {
        "step": jnp.zeros((), np.int32),
        "params": params,
        "opt_state": init_optimizer(check_transformation(tx, "with_loss_scale"), params),
        "model_state": model_state,
        # Buffers of its own: a state that holds one twice cannot be donated.
        "ema_params": None if ema_decay is None else jax.tree.map(lambda x: jnp.array(x, copy=True), _wide(params)),
        "tx": tx,
        "ema_decay": ema_decay,
    }


def _wide(params: Any) -> Any:
    return map_gradients(widen, params)
