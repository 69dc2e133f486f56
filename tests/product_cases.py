"""Programs whose products are not all layers, and the error of each way of computing them, against float64.

The programs are in the other `product_*.py`. `how` names a way: "float32" as written, "mixed_float16" under autocast,
"hand_float16" with only the layers in that dtype by hand, "marked_float16" under autocast that is told which products
are layers; likewise for bfloat16.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from battery_tools import HALVES, OPTIMISED, leaves, relative_error
from product_case import Case, Layers
from product_filters import CASES as FILTERS
from product_guards import CASES as GUARDS
from product_layers import CASES as LAYERS
from product_results import CASES as RESULTS
from product_short import CASES as SHORT
from product_squares import CASES as SQUARES
from product_systems import CASES as SYSTEMS

import jmp_train as jmp

CASES: tuple[Case, ...] = (*GUARDS, *SHORT, *SQUARES, *SYSTEMS, *RESULTS, *FILTERS, *LAYERS)
BY_NAME = {case.name: case for case in CASES}

# Bounds: on the gradient's error divided by the error by hand, and on the error of the loss.
RATIO = 2.0
LOSS_BOUND = {"float16": 5e-3, "bfloat16": 1e-2}

ALL_WIDE = jmp.DEFAULT_RULES.replace({"dot_general": "high", "conv_general_dilated": "high"})

# XLA's older emitters, by which tests compile, round the float16 logits of one softmax differently in two kernels.
NEWER_EMITTERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None

Tree = Any


class Errors(NamedTuple):
    """Relative errors against float64, of the loss and of the gradients (Euclidean norm over all leaves)."""

    loss: float
    gradient: float


@functools.cache
def example(case: Case, seed: int = 0) -> tuple[Tree, Tree]:
    return case.data(np.random.default_rng(seed))


def gradient_function(case: Case, how: str) -> Any:
    """`(params, batch) -> (loss, unscaled gradients)`."""
    kind, _, dtype = how.rpartition("_")
    if kind in ("mixed", "marked"):
        marked = kind == "marked"
        loss = functools.partial(case.loss, Layers(marked=marked))
        grad_fn = jmp.value_and_grad(loss, f"mixed_{dtype}", rules=ALL_WIDE if marked else None)
        return functools.partial(grad_fn, loss_scale=jmp.StaticLossScale(case.scale))
    net = Layers(jnp.dtype(dtype) if kind == "hand" else None)

    def scaled_loss(params: Tree, batch: Tree) -> Any:
        loss = case.loss(net, params, batch)
        return loss * case.scale, loss

    def run(params: Tree, batch: Tree) -> Any:
        grads, loss = jax.grad(scaled_loss, has_aux=True)(params, batch)
        return loss, jax.tree.map(lambda g: g / case.scale, grads)

    return run


@functools.cache
def _compiled(case: Case, how: str) -> Any:
    options = OPTIMISED if how == "float64" else NEWER_EMITTERS if case.name == "barometers" else None
    return jax.jit(gradient_function(case, how), compiler_options=options)


def _in_float64(tree: Tree) -> Tree:
    # NumPy casts, because JAX would compile a program for each shape.
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@functools.cache
def truth(case: Case, seed: int = 0) -> tuple[float, Tree]:
    """The loss and its gradients, computed in float64."""
    with jax.enable_x64(True):
        loss, grads = _compiled(case, "float64")(*(_in_float64(tree) for tree in example(case, seed)))
        assert all(g.dtype == np.float64 for g in jax.tree.leaves(grads))
        return float(loss), leaves(grads)


def errors(case: Case, how: str, seed: int = 0) -> Errors:
    """The errors of one seed; infinite where a result is not finite."""
    loss, grads = _compiled(case, how)(*example(case, seed))
    true_loss, true_grads = truth(case, seed)
    found = abs(float(loss) - true_loss) / abs(true_loss), relative_error(leaves(grads), true_grads)
    return Errors(*(each if np.isfinite(each) else float("inf") for each in found))


def forget() -> None:
    """Frees all compiled programs; several hundred exceed the number of memory maps that a process may have."""
    _compiled.cache_clear()
    truth.cache_clear()
    jax.clear_caches()


def median_errors(case: Case, how: str, seeds: int = 3) -> Errors:
    measured = [errors(case, how, seed) for seed in range(seeds)]
    return Errors(*(float(np.median(each)) for each in zip(*measured, strict=True)))


def low_shares(case: Case, dtype: str = "float16") -> tuple[float, float]:
    """The share of FLOPs with 16-bit operands, under autocast and by hand."""
    ours = jmp.explain(jax.grad(functools.partial(case.loss, Layers())), f"mixed_{dtype}")
    hand = jmp.explain(jax.grad(functools.partial(case.loss, Layers(jnp.dtype(dtype)))), "float32")
    return ours(*example(case)).low_flop_share, hand(*example(case)).low_flop_share


def ways(marked: bool = False) -> list[str]:
    """The ways that are compared with float64."""
    kinds = ("mixed", "hand", "marked") if marked else ("mixed", "hand")
    return [f"{kind}_{dtype}" for dtype in HALVES for kind in kinds]


def faults(ours: Errors, hand: Errors, dtype: str) -> list[str]:
    """The names of the bounds that do not hold."""
    found = [f"{name} not finite" for name, value in zip(Errors._fields, ours, strict=True) if not np.isfinite(value)]
    if not found and ours.gradient > RATIO * hand.gradient:
        found.append("gradient")
    if not found and ours.loss > LOSS_BOUND[dtype]:
        found.append("loss")
    return found
