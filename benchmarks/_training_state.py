"""The memory of parameters, optimizer state and activations in a training step, by which of them are in 16 bits.

Decides these choices and the models: GPT-2, and decoders of the width of GPT-2 XL with as many layers as fit. Part of
`memory.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from _cases import workload
from _peers import ours_without_scale, plain
from _results import Results

import jmp_train as jmp

SIZES: dict[str, dict[str, int]] = {
    "GPT-2": {"layers": 12, "width": 768, "heads": 12, "batch_size": 16},
    "GPT-2 XL": {"layers": 48, "width": 1600, "heads": 25, "batch_size": 8},
}
IN_BFLOAT16 = "params=bfloat16,compute=bfloat16,output=float32"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A policy (`None`: plain JAX) and the transformation that wraps AdamW."""

    name: str
    policy: str | None
    wrap: Callable[[Any], Any] = lambda tx: tx


CHOICES = (
    Choice("float32", None),
    Choice("mixed_bfloat16", "mixed_bfloat16"),
    Choice("+ state stochastic", "mixed_bfloat16", jmp.with_low_precision_state),
    Choice(
        "+ masters, state stochastic", IN_BFLOAT16, lambda tx: jmp.with_master_weights(jmp.with_low_precision_state(tx))
    ),
    Choice("+ parameters stochastic", IN_BFLOAT16, jmp.with_stochastic_rounding),
    Choice("+ both stochastic", IN_BFLOAT16, lambda tx: jmp.with_stochastic_rounding(jmp.with_low_precision_state(tx))),
)


def size_of(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def held(memory: Callable[..., dict[str, int]], choice: Choice, **sizes: int) -> dict[str, Any]:
    """The memory of a training step with its state donated, in bytes; `parameters` is the number of parameters."""
    case = workload("gpt2", "", "", scanned=True, **sizes)
    params, model_state, batch = case.shapes()
    tx = choice.wrap(optax.adamw(1e-4))
    if choice.policy is None:
        step = plain(case.loss(), tx)
    else:
        params = jmp.get_policy(choice.policy).cast_to_param(params)
        step = ours_without_scale(case.loss(), choice.policy, tx)
    state = jax.eval_shape(step.init, params, model_state)
    made = memory(step.step, state, batch, donate_argnums=0)
    number = sum(x.size for x in jax.tree.leaves(params))
    return {"parameters": number, "params_bytes": size_of(state[0]), "optimizer": size_of(state[2])} | made


def training_state(
    results: Results, memory: Callable[..., dict[str, int]], largest: Callable[..., int], budget: float, small: bool
) -> None:
    """Adds the memory of GPT-2's training step to the results, and the most layers that fit into the budget.

    Args:
      memory: `memory.memory`.
      largest: `memory.largest`.
      budget: in bytes.
    """
    sizes = {"layers": 2, "width": 64, "heads": 1, "batch_size": 8, "length": 64, "vocabulary": 512}
    choices = (CHOICES[0], CHOICES[-1]) if small else CHOICES
    for choice in choices:
        row = held(memory, choice, **(sizes if small else SIZES["GPT-2"]))
        results.add("training state", {"model": "GPT-2", "choice": choice.name} | row)
    shape = sizes if small else SIZES["GPT-2 XL"]
    for choice in choices:

        @functools.cache
        def row_of(layers: int, choice: Choice = choice) -> dict[str, Any]:
            return held(memory, choice, **(shape | {"layers": layers}))

        known = {layers: row_of(layers)["peak"] for layers in ((4, 8) if small else (48, 96))}
        layers = largest(lambda layers: row_of(layers)["peak"], budget, known, step=1)
        row = row_of(layers) if layers else {}
        results.add("largest model", {"choice": choice.name, "budget": budget, "layers": layers} | row)
