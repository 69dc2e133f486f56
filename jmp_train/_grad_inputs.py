"""Which arguments of `value_and_grad` and which results of a loss function are accepted, and the errors for all others.

Decides what is accepted. Does not decide what is computed; see `_grad.py`.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._dtypes import FLOAT16, is_floating
from ._loss_scale import LossScale, NoOpLossScale
from ._paths import leaf_paths
from ._policy import Policy, get_policy, uses_float16
from ._values import as_argnums, check_callable, is_array


def split_result(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the loss, an array or a number, and aux."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            f"`loss_fn` must return the pair (loss, aux) because has_aux=True, got {_describe(result)}; "
            f"return both, or leave has_aux out."
        )
    loss, aux = result if has_aux else (result, None)
    if isinstance(loss, tuple):
        hint = "pass has_aux=True if that is (loss, aux)"
    elif not isinstance(loss, jax.Array | np.ndarray | np.generic | int | float | complex):
        hint = "return the loss, such as jnp.mean(errors**2)"
    elif jnp.shape(loss):
        hint = "take its mean or its sum"
    elif not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        hint = "convert it, or take its real part or absolute value"
    else:
        return loss, aux
    raise TypeError(f"`loss_fn` must return a real floating scalar, got {_describe(loss)}; {hint}.")


def _describe(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"{value.dtype}{list(value.shape)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def check_policy(policy: Any) -> Policy:
    if isinstance(policy, int) or (isinstance(policy, Sequence) and not isinstance(policy, str)):
        raise TypeError(
            f"`policy` must be a Policy or a name such as 'mixed_float16', got {policy!r}; the argument that comes "
            f"second in jax.value_and_grad and jax.grad is a keyword here: argnums={policy!r}."
        )
    return get_policy(policy)


def check_loss_fn(loss_fn: Any) -> None:
    check_callable("loss_fn", loss_fn, "pass the function to differentiate")


def own_loss_scale(loss_fn: Any) -> float:
    """Returns how many positional arguments reach an argument that `loss_fn` needs and calls `loss_scale`.

    >>> own_loss_scale(lambda params, x, loss_scale: 0.0), own_loss_scale(lambda params, x: 0.0)
    (3, 0)
    >>> own_loss_scale(lambda params, *, loss_scale: 0.0)
    inf
    """
    try:
        # Not the signature of the function that a decorator wraps: the wrapper may pass the argument itself.
        parameters = inspect.signature(loss_fn, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return 0
    own = parameters.get("loss_scale")
    if own is None or own.default is not own.empty or own.kind in (own.VAR_POSITIONAL, own.VAR_KEYWORD):
        return 0
    return math.inf if own.kind is own.KEYWORD_ONLY else [*parameters].index("loss_scale") + 1


def check_reaches(loss_scale: Any, given: int, needed: float) -> None:
    """Raises if `loss_fn` needs an argument `loss_scale`, see `own_loss_scale`, which the keyword never reaches."""
    if loss_scale is not None and given < needed:
        raise TypeError(
            "`loss_scale=` scales the gradients and is not handed to `loss_fn`, which has an argument of this name; "
            "rename that argument, or remove it if all it did was scale the loss: that is done here."
        )


def check_argnums(argnums: Any) -> int | tuple[int, ...]:
    found = as_argnums(argnums)
    if found == ():
        raise ValueError("`argnums` must name an argument to differentiate with respect to, got none.")
    return found


def check_no_modules(arguments: Any) -> None:
    """Raises for modules: the traced program gets a copy, so that changes which the loss function makes are lost."""
    for node in jax.tree.leaves(arguments, is_leaf=_is_nnx_module):
        if _is_nnx_module(node):
            raise TypeError(
                f"an argument is or holds the NNX module {type(node).__name__}: updates that the loss function makes "
                f"to it, such as BatchNorm's statistics, would be lost; flax_bridge.value_and_grad (from jmp_train "
                f"import flax_bridge) takes a module as its first argument and returns them. A module that does not "
                f"change can be closed over."
            )


def check_differentiated(arguments: Sequence[Any], allow_int: bool) -> None:
    """Raises for leaves that have no gradient; with `allow_int`, integers, booleans and keys have one of float0."""
    for argument in arguments:
        for path, leaf in zip(leaf_paths(argument), jax.tree.leaves(argument), strict=True):
            number = is_array(leaf)
            if number and (allow_int or jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)):
                continue
            where = f"the leaf '{path}'" if path else "the argument"
            held = "numbers and keys only" if allow_int else "floating or complex numbers only"
            remedy = ", or pass allow_int=True for a gradient of float0" if number else ""
            raise TypeError(
                f"a differentiated argument must hold {held}, got {_describe(leaf)} for {where}; "
                f"pass it as an argument that `argnums` does not name{remedy}."
            )


def _is_nnx_module(node: Any) -> bool:
    # By name, so that Flax need not be installed.
    return any(
        base.__module__.startswith("flax.nnx.") and base.__name__ in ("Module", "Object", "Pytree")
        for base in type(node).__mro__
    )


def check_loss_scale(loss_scale: Any, policy: Policy, arguments: Sequence[Any]) -> LossScale:
    if loss_scale is None:
        if _meets_float16(policy, arguments):
            raise TypeError(
                f"`loss_scale` is required because float16 gradients vanish without it (the policy is '{policy}'); "
                f"pass loss_scale=get_loss_scale(opt_state) with an optimizer from with_loss_scale, a StaticLossScale, "
                f"or NoOpLossScale() to go without."
            )
        return NoOpLossScale()
    if isinstance(loss_scale, type) or not (hasattr(loss_scale, "scale") and hasattr(loss_scale, "unscale")):
        if isinstance(loss_scale, type):
            got, remedy = f"the class {loss_scale.__name__}", f"build one: {loss_scale.__name__}()"
        elif isinstance(loss_scale, jax.Array | np.ndarray | np.generic | int | float):
            got, remedy = _describe(loss_scale), "wrap the number: StaticLossScale(number)"
        else:
            got, remedy = _describe(loss_scale), "take it out of the optimizer's state: get_loss_scale(opt_state)"
        raise TypeError(
            f"`loss_scale` must be a NoOpLossScale, StaticLossScale or DynamicLossScale, got {got}; {remedy}."
        )
    if shape := np.shape(getattr(loss_scale, "loss_scale", 1)):
        raise ValueError(
            f"`loss_scale` must be one number, got the shape {shape}, as the states of jax.vmap(tx.init) hold; "
            f"compute the gradients inside jax.vmap, too."
        )
    return loss_scale


def _meets_float16(policy: Policy, arguments: Sequence[Any]) -> bool:
    stored = [leaf.dtype for leaf in jax.tree.leaves(arguments) if is_floating(leaf)]
    return uses_float16(policy) or FLOAT16 in stored or FLOAT16 in policy.override_dtypes(arguments)
