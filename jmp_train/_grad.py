"""Gradients under a policy: the scaled, mixed-precision counterpart of `jax.value_and_grad`.

Decides the order of the steps: scale the loss, differentiate, run both under autocast, unscale in float32. No scaled
number leaves this file. Does not decide which operation runs in which dtype (`_autocast`), how large
the scale is (`_loss_scale.py`) nor what happens to a step whose gradients are not finite (`_optimizer.py`).
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ._autocast import DEFAULT_RULES, Rules, autocast, matmul_precision
from ._dtypes import FLOAT64, at_least_float32
from ._grad_inputs import (
    check_argnums,
    check_differentiated,
    check_loss_fn,
    check_loss_scale,
    check_no_modules,
    check_policy,
    check_reaches,
    own_loss_scale,
    split_result,
)
from ._loss_scale import LossScale, StaticLossScale
from ._policy import Policy
from ._scaling import multiply
from ._sharding import AxisName, axes_of, check_axes, check_local, local, mean_gradients
from ._static import hide_static, is_jax_array, reveal_static


def value_and_grad(
    loss_fn: Callable[..., Any],
    policy: Policy | str,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    autocast: bool = True,
    rules: Rules | None = None,
    axis_name: AxisName | None = None,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Returns a function that evaluates `loss_fn` and its gradient under `policy`; use it as `jax.value_and_grad`.

    With the scale S and the parameters p, it computes

        grad = 1/S * d/dp [S * loss_fn(p)]

    and runs all of it, forward and backward, in mixed precision: `loss_fn` and the model it calls stay as they are,
    written for float32. The loss is differentiated first and autocast second, so that autocast sees every sum of the
    backward pass and accumulates it in float32. Gradients are unscaled in float32. The policy's `matmul_precision`
    holds for the whole computation; `output_dtype` is not applied here, but is there for models to use.

    Args:
      loss_fn: a function that returns the loss, a real floating scalar `[]`, or `(loss, aux)`. It is traced, as under
        `jax.jit`; arguments that are no arrays (flags, strings, Python numbers) reach it as they are. Under autocast
        the trace is kept for arguments of equal shapes and dtypes, as `jax.checkpoint` keeps its own: a value that
        `loss_fn` reads from elsewhere, such as a global or `self.beta`, is then the one of the first call. Pass it as
        an argument.
      policy: a `Policy`, or a name for `get_policy`.
      argnums: which positional arguments to differentiate with respect to; under autocast, these are the parameters.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      autocast: whether to move the operations of `loss_fn` and of its derivative to the compute dtype by the rules of
        `jmp_train.autocast`. If `False`, the differentiated arguments are cast to the compute dtype (or their override;
        float64 stays unless the policy stores parameters in it), all other arguments are passed as given, and the
        dtypes of the model's own layers decide.
      rules: which operations run in the compute dtype, for autocast; `None` for `DEFAULT_RULES`.
      axis_name: the axis, or axes, of an enclosing `jax.shard_map` or `jax.pmap` over which the batch is spread.
        `loss_fn` then returns the mean loss of this device's part, and loss and gradients are averaged over the devices
        here, the gradients in the policy's `reduce_dtype`; aux is returned as it is. Parameters may be replicated or,
        in a `shard_map` that checks (`check_vma=True`, JAX's default), sharded and gathered by `loss_fn`. Under
        `jax.jit` over a sharded mesh leave it out: the loss is over the whole batch.
      allow_int: whether differentiated arguments may hold integers, booleans and PRNG keys. As in `jax.grad`, their
        gradient has the dtype `jax.dtypes.float0`, which has no bits. Unscaling and averaging leave it as it is, and
        `with_loss_scale` takes that of integers and booleans for a gradient of zero. An optimizer cannot add to keys:
        give it trees without them.

    Returns:
      A function of `loss_fn`'s arguments and keywords, and of the keyword `loss_scale` (a `LossScale`; required where
      the policy or a differentiated leaf is float16). It returns `(loss, grads)` or `((loss, aux), grads)`:
      loss: float32 `[]` (float64 if the loss was): the unscaled loss, finite even if the scaled one was not.
      aux: as `loss_fn` returned it.
      grads: shaped like the differentiated arguments, unscaled, float32 (float64 and complex stay what they are; see
        `allow_int`). They hold infinities or NaN where float16 overflowed; `with_loss_scale` skips such a step.

    Raises:
      TypeError: `policy`, `argnums`, `rules` or `loss_scale` is something else, the loss scale is missing under
        float16, the loss is not a real floating scalar, a differentiated leaf is not floating or complex, an
        argument holds an NNX module (use `flax_bridge.value_and_grad`), or `loss_fn` needs an argument `loss_scale` of
        its own.
      ValueError: `axis_name` names no enclosing axis, JAX can tell that the loss was averaged over it already, or the
        loss scale is not one number.

    Reference: Micikevicius et al., Mixed Precision Training, ICLR 2018, sections 3.1 and 3.2.

    >>> from jmp_train import StaticLossScale
    >>> grad_fn = value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), "mixed_float16")
    >>> loss, grads = grad_fn(jnp.ones(2), jnp.ones((4, 2)), loss_scale=StaticLossScale(1024.0))
    >>> print(loss, grads, grads.dtype)
    4.0 [4. 4.] float32
    """
    check_loss_fn(loss_fn)
    policy = check_policy(policy)
    argnums = check_argnums(argnums)
    chosen = (argnums,) if isinstance(argnums, int) else argnums
    axes = axes_of(axis_name)
    own_scale = own_loss_scale(loss_fn)
    run = _under_autocast if autocast else _as_written
    scaled_grad = functools.partial(_scaled_grad, loss_fn, argnums, has_aux, axes)
    differentiate = run(scaled_grad, policy, rules, chosen)

    def with_policy(*args: Any, loss_scale: LossScale | None = None, **kwargs: Any) -> Any:
        check_reaches(loss_scale, len(args), own_scale)
        check_no_modules((args, kwargs))
        differentiated = [args[i] for i in chosen if -len(args) <= i < len(args)]  # jax.grad complains of the others
        check_differentiated(differentiated, allow_int)
        scale = check_loss_scale(loss_scale, policy, differentiated)
        check_axes(axes)
        scaled_grads, (loss, aux) = differentiate(scale, args, kwargs)
        loss = loss.astype(at_least_float32(loss.dtype))
        if axes:
            like = differentiated[0] if isinstance(argnums, int) else tuple(differentiated)
            scaled_grads = mean_gradients(scaled_grads, like, axes, policy.reduce_dtype)
            loss = jax.lax.pmean(loss, axes)
        grads = scale.unscale(scaled_grads)
        return ((loss, aux), grads) if has_aux else (loss, grads)

    return _named_after(loss_fn, with_policy)


def grad(
    loss_fn: Callable[..., Any],
    policy: Policy | str,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    autocast: bool = True,
    rules: Rules | None = None,
    axis_name: AxisName | None = None,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Returns a function that evaluates the gradient of `loss_fn` under `policy`; use it as `jax.grad`.

    Arguments, keywords and errors are those of `value_and_grad`; the returned function returns `grads`, or
    `(grads, aux)`.

    >>> grad(lambda p: p**2, "mixed_bfloat16")(jnp.float32(3))
    Array(6., dtype=float32)
    """
    keywords = {"argnums": argnums, "has_aux": has_aux, "autocast": autocast, "rules": rules, "axis_name": axis_name}
    both = value_and_grad(loss_fn, policy, **keywords, allow_int=allow_int)

    def gradient(*args: Any, loss_scale: LossScale | None = None, **kwargs: Any) -> Any:
        value, grads = both(*args, loss_scale=loss_scale, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return _named_after(loss_fn, gradient)


def _scaled_grad(
    loss_fn: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    axes: Sequence[Hashable],
    scale_loss: Callable[[Any], Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cast: Callable[[Sequence[Any]], Sequence[Any]] = lambda args: args,
) -> tuple[Any, tuple[jax.Array, Any]]:
    """Returns the gradient of the scaled loss of `args` and `kwargs`, and the unscaled loss and aux."""

    def scaled_loss_fn(*args: Any) -> Any:
        loss, aux = split_result(loss_fn(*cast(args), **kwargs), has_aux)
        check_local(loss, axes)
        loss = jnp.asarray(loss)
        # The unscaled loss is returned as aux: dividing the scaled one by S would not undo an overflow.
        return scale_loss(loss), (loss, aux)

    chosen = (argnums,) if isinstance(argnums, int) else argnums
    positions = {i % len(args) for i in chosen if -len(args) <= i < len(args)}
    spread = [local(arg, axes) if i in positions else arg for i, arg in enumerate(args)]
    # Integers that are not allowed were refused before.
    return jax.grad(scaled_loss_fn, argnums, has_aux=True, allow_int=True)(*spread)


def _under_autocast(
    scaled_grad: Callable[..., Any], policy: Policy, rules: Rules | None, chosen: Sequence[int]
) -> Callable[..., Any]:
    # The program's arguments are the scale, then the number of a static scale, then one for all keywords. As a literal
    # of the program that number would be taken for a literal of the model, which autocast keeps from becoming infinite.
    def program(scale: LossScale, number: ArrayLike | None, kwargs: Any, *args: Any) -> Any:
        scale_loss = scale.scale if number is None else functools.partial(multiply, scale=number)
        grads, (loss, aux) = scaled_grad(scale_loss, reveal_static(args), reveal_static(kwargs))
        return grads, (loss, hide_static(aux, is_jax_array))  # a program would make int32 of NumPy's int64

    shifted = [i + 3 if i >= 0 else i for i in chosen]
    run_cast = autocast(program, policy, rules=DEFAULT_RULES if rules is None else rules, argnums=shifted)

    def run(scale: LossScale, args: Sequence[Any], kwargs: Any) -> Any:
        differentiated = {i % len(args) for i in chosen if -len(args) <= i < len(args)}
        hidden = [arg if i in differentiated else hide_static(arg) for i, arg in enumerate(args)]
        number = np.float32(scale.loss_scale) if type(scale) is StaticLossScale else None
        return reveal_static(run_cast(scale, number, hide_static(kwargs), *hidden))

    return run


def _as_written(
    scaled_grad: Callable[..., Any], policy: Policy, rules: Rules | None, chosen: Sequence[int]
) -> Callable[..., Any]:
    if rules is not None:
        raise TypeError("`rules` are for autocast, which `autocast=False` turns off; leave one of the two out.")

    def run(scale: LossScale, args: Sequence[Any], kwargs: Any) -> Any:
        with matmul_precision(policy):
            return scaled_grad(scale.scale, args, kwargs, cast=lambda args: _cast_arguments(args, chosen, policy))

    return run


def _cast_arguments(args: Sequence[Any], argnums: Sequence[int], policy: Policy) -> list[Any]:
    """Returns all of `args`, those at `argnums` cast to what they compute in."""
    cast = list(args)
    # One argument keeps its own paths; several are told apart by their place in a tuple. Globs match either.
    arguments = [args[i] for i in argnums] if len(argnums) > 1 else args[argnums[0]]
    before, treedef = jax.tree.flatten(arguments)
    after = jax.tree.leaves(policy.cast_to_compute(arguments))
    overrides = policy.override_dtypes(arguments)
    if policy.param_dtype != FLOAT64:
        # A Python integer, which `allow_int` lets through, has no dtype.
        wide = [getattr(leaf, "dtype", None) == FLOAT64 for leaf in before]
        parts = zip(before, after, overrides, wide, strict=True)
        after = [old if is_wide and override is None else new for old, new, override, is_wide in parts]
    arguments = treedef.unflatten(after)
    for i, argument in zip(argnums, arguments if len(argnums) > 1 else [arguments], strict=True):
        cast[i] = argument
    return cast


def _named_after(loss_fn: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(wrapper, loss_fn)
    # Without this, inspect.signature (and jit's static_argnames) would not see `loss_scale`.
    del vars(wrapper)["__wrapped__"]
    return wrapper
