"""One row per optimizer of optax: how it is built, and the extra arguments of its `update`."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib


def loss(params: Any) -> jax.Array:
    """A loss for line searches, defined for any tree, with its minimum away from zero."""
    return sum((jnp.sum(jnp.abs(x.astype(jnp.float32) - 1.5) ** 2) for x in jax.tree.leaves(params)), jnp.float32(0))


def no_extra(params: Any, grads: Any) -> dict[str, Any]:
    return {}


def with_value(params: Any, grads: Any) -> dict[str, Any]:
    return {"value": jnp.float32(2.5)}


def with_loss(params: Any, grads: Any) -> dict[str, Any]:
    """The extra arguments of a line search; after an overflow, too, `grad` is as it came and the loss may be finite."""
    return {"value": loss(params), "grad": grads, "value_fn": loss}


def with_objective(params: Any, grads: Any) -> dict[str, Any]:
    return {"obj_fn": loss}


@dataclasses.dataclass(frozen=True)
class Row:
    """`build()` makes the transformation, `extra(params, grads)` its extra arguments."""

    name: str
    build: Callable[[], optax.GradientTransformation]
    extra: Callable[[Any, Any], dict[str, Any]] = no_extra

    def __str__(self) -> str:
        return self.name


def quietly(build: Callable[[], optax.GradientTransformation]) -> Callable[[], optax.GradientTransformation]:
    """Builds a transformation without optax's deprecation warnings."""

    def built() -> optax.GradientTransformation:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return build()

    return built


ALIASES = [
    Row("adabelief", lambda: optax.adabelief(1e-2)),
    Row("adadelta", lambda: optax.adadelta(0.1)),
    Row("adafactor", lambda: optax.adafactor(5e-3, min_dim_size_to_factor=2)),
    Row("adagrad", lambda: optax.adagrad(1.0)),
    Row("adam", lambda: optax.adam(1e-1)),
    Row("adamax", lambda: optax.adamax(1e-1)),
    Row("adamaxw", lambda: optax.adamaxw(1e-1)),
    Row("adamw", lambda: optax.adamw(1e-1)),
    Row("adan", lambda: optax.adan(1e-1)),
    Row("amsgrad", lambda: optax.amsgrad(1e-1)),
    Row("fromage", lambda: optax.fromage(5e-3)),
    Row("lamb", lambda: optax.lamb(1e-3)),
    Row("lars", lambda: optax.lars(1.0)),
    Row("lbfgs", lambda: optax.lbfgs(), with_loss),
    Row("lion", lambda: optax.lion(1e-2, weight_decay=1e-4)),
    Row("nadam", lambda: optax.nadam(1e-2)),
    Row("nadamw", lambda: optax.nadamw(1e-2)),
    Row("noisy_sgd", lambda: optax.noisy_sgd(1e-3, eta=1e-4, key=0)),
    Row("novograd", lambda: optax.novograd(1e-3)),
    Row("optimistic_adam", quietly(lambda: optax.optimistic_adam(2e-3))),
    Row("optimistic_adam_v2", lambda: optax.optimistic_adam_v2(2e-3)),
    Row("optimistic_gradient_descent", lambda: optax.optimistic_gradient_descent(2e-3, alpha=0.7, beta=0.1)),
    Row("polyak_sgd", lambda: optax.polyak_sgd(1.0), with_value),
    Row("radam", lambda: optax.radam(5e-3)),
    Row("rmsprop", lambda: optax.rmsprop(5e-3, momentum=0.9)),
    Row("rprop", lambda: optax.rprop(1e-1)),
    Row("sgd", lambda: optax.sgd(optax.cosine_decay_schedule(1e-1, 100), momentum=0.9)),
    Row("sign_sgd", lambda: optax.sign_sgd(1e-1)),
    Row("signum", lambda: optax.signum(1e-2)),
    Row("sm3", lambda: optax.sm3(1.0)),
    Row("yogi", lambda: optax.yogi(1e-1)),
]

CONTRIBUTED = [
    Row("acprop", lambda: contrib.acprop(1e-3)),
    Row("ademamix", lambda: contrib.ademamix(1e-3)),
    Row("simplified_ademamix", lambda: contrib.simplified_ademamix(1e-3)),
    Row("adopt", lambda: contrib.adopt(1e-2)),
    Row("cocob", lambda: contrib.cocob(weight_decay=1e-2)),
    Row("dadapt_adamw", lambda: contrib.dadapt_adamw(1e-1)),
    Row("dog", lambda: contrib.dog(1.0)),
    Row("dowg", lambda: contrib.dowg(1.0)),
    Row("galore", lambda: contrib.galore(1e-2, rank=2)),
    Row("madgrad", lambda: contrib.madgrad(1e-2)),
    Row("mechanize", lambda: contrib.mechanize(optax.sgd(1e-1), weight_decay=0.0)),
    Row("momo", lambda: contrib.momo(1e-1), with_value),
    Row("momo_adam", lambda: contrib.momo_adam(1e-1), with_value),
    Row("muon", lambda: contrib.muon(1e-2)),
    Row("prodigy", lambda: contrib.prodigy(1e-1)),
    Row("reduce_on_plateau", lambda: optax.chain(optax.sgd(1e-3), contrib.reduce_on_plateau()), with_value),
    Row("sam", lambda: contrib.sam(optax.sgd(1e-2), optax.sgd(1e-2), sync_period=2)),
    Row("schedule_free_adamw", lambda: contrib.schedule_free_adamw(1e-2, warmup_steps=5)),
    Row("schedule_free_sgd", lambda: contrib.schedule_free_sgd(1e-2, warmup_steps=5)),
    Row("sophia", lambda: contrib.sophia(1e-2), with_objective),
]

WRAPPED = [
    Row("centred_rmsprop", lambda: optax.rmsprop(5e-3, centered=True)),
    Row("chain", lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))),
    Row("clip_block_rms", lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.centralize(), optax.sgd(0.1))),
    Row("ema", lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9))),
    Row("add_noise", lambda: optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.1))),
    Row("inject_hyperparams", lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)),
    Row("masked", lambda: optax.masked(optax.adam(1e-2), lambda p: jax.tree.map(lambda x: x.ndim > 1, p))),
    Row("multi_steps", lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()),
    Row(
        "partition",
        lambda: optax.partition(
            {"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, lambda p: jax.tree.map(lambda x: "ab"[x.ndim > 1], p)
        ),
    ),
    Row("backtracking", lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)), with_loss),
    Row("zoom", lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)), with_loss),
]

ROWS = ALIASES + CONTRIBUTED + WRAPPED
