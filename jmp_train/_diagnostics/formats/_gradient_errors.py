"""The relative error of a gradient under different rules, for one batch.

Decides which gradient counts as exact and the norm of the difference. Does not decide under which rules gradients are
taken; see `_sensitivity_search.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..._autocast import Rules
from ..._dtypes import at_least_float32
from ..._explain import Explanation, explain
from ..._grad import grad
from ..._grad_inputs import check_loss_scale
from ..._loss_scale import LossScale, NoOpLossScale
from ..._paths import leaf_paths
from ..._policy import Policy, get_policy
from ..._static import hide_static, reveal_static
from ..._values import check_readable

_STRICT = get_policy("float32")
# The policy under which `plan` records the program: a matmul precision would keep all products in float32.
_AS_RECORDED = _STRICT.replace(matmul_precision=None)


class GradientErrors:
    """Measures `|g - g32| / |g32|` over all leaves of a gradient together, g32 being the strict float32 one.

    Remembers what it measured. `compiled` counts the gradients that were compiled and run, the strict one included.

    Raises:
      TypeError: as the function that `value_and_grad` returns.
      ValueError: the strict gradient is zero or not finite.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        policy: Policy,
        argnums: int | tuple[int, ...],
        has_aux: bool,
        loss_scale: LossScale | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self._loss_fn, self._policy, self._argnums, self._has_aux = loss_fn, policy, argnums, has_aux
        for path, leaf in zip(leaf_paths((args, kwargs)), jax.tree.leaves((args, kwargs)), strict=True):
            check_readable("sensitivity", f"the argument '{path.partition('/')[2]}'", leaf)
            if isinstance(leaf, Tracer):
                raise TypeError("an argument is traced: sensitivity needs numbers; call it outside jit, on arrays.")
        chosen = (argnums,) if isinstance(argnums, int) else argnums
        differentiated = [args[i] for i in chosen if -len(args) <= i < len(args)]
        self._scale = check_loss_scale(loss_scale, policy, differentiated)
        self._args = hide_static((kwargs, *args))
        self._errors: dict[Rules, float] = {}
        self.compiled = 0
        self._strict = self._gradient(_STRICT, None, NoOpLossScale())
        size = float(_largest(self._strict))
        if size == 0:
            raise ValueError(
                "the gradient is zero everywhere in float32, so that no error is relative to it; take another batch."
            )
        if not size < math.inf:
            raise ValueError(
                "the gradient holds infinities or NaN in float32 already, whatever the policy; find_overflow(fn)(*args)"
                " finds the operation that makes the first one."
            )

    def error(self, rules: Rules) -> float:
        """The error under the policy with these rules; infinite where the gradient is not finite."""
        if rules not in self._errors:
            error = float(_relative_error(self._gradient(self._policy, rules, self._scale), self._strict))
            self._errors[rules] = error if math.isfinite(error) else math.inf
        return self._errors[rules]

    def plan(self, rules: Rules) -> Explanation:
        """What `explain` says of the gradient under the policy with these rules."""
        chosen = (self._argnums,) if isinstance(self._argnums, int) else self._argnums
        shifted = [i + 2 if i >= 0 else i for i in chosen]  # after the scale and the keywords
        recorded = self._program(_AS_RECORDED, None)
        return explain(recorded, self._policy, rules, shifted)(self._scale, *self._args)

    def _gradient(self, policy: Policy | str, rules: Rules | None, scale: LossScale) -> Any:
        self.compiled += 1
        return jax.jit(self._program(policy, rules))(scale, *self._args)

    def _program(self, policy: Policy | str, rules: Rules | None) -> Callable[..., Any]:
        gradient = grad(self._loss_fn, policy, argnums=self._argnums, has_aux=self._has_aux, rules=rules)

        def program(scale: LossScale, kwargs: Any, *args: Any) -> Any:
            found = gradient(*reveal_static(args), loss_scale=scale, **reveal_static(kwargs))
            return found[0] if self._has_aux else found

        return program


@jax.jit
def _largest(tree: Any) -> jax.Array:
    """The largest magnitude, float32 or float64 `[]`; NaN if there is one."""
    largest = [jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(tree)]
    return jnp.max(jnp.stack(largest), initial=0.0) if largest else jnp.zeros(())


@jax.jit
def _relative_error(tree: Any, truth: Any) -> jax.Array:
    """`|tree - truth| / |truth|`, `[]`."""
    # Both norms in units of the largest magnitude: the square of a number below 1e-19 is zero in float32.
    size = _largest(truth)

    def square(leaf: jax.Array) -> jax.Array:
        magnitude = jnp.abs(leaf)
        return jnp.sum(jnp.square(magnitude.astype(at_least_float32(magnitude.dtype)) / size))

    leaves = list(zip(jax.tree.leaves(tree), jax.tree.leaves(truth), strict=True))
    return jnp.sqrt(sum(square(one - true) for one, true in leaves) / sum(square(true) for _, true in leaves))
