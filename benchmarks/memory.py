"""How much memory does a training step need under each policy, and what is the largest batch, or model, that fits?

    python benchmarks/memory.py [--models transformer] [--budget 80] [--small]

Activations (temporary memory at its peak) and peak memory (arguments, results and activations) of whole steps with
Adam, as the compiler for an H200 plans them (`.[gpu-report]`). Deterministic; nothing runs on a GPU. The memory of the
runtime itself and the cost of fragmentation are not included.
"""

import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on a GPU

import jax
import jax.numpy as jnp
from _cases import Case, of_battery, workload
from _peers import Loss, Step, flax_scaling, ours, ours_without_scale, plain, selected
from _results import Results, arguments, show
from _training_state import training_state

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from autocast_references import DEEP, FILLING
from battery_models import BY_NAME
from battery_tools import abstract_example, gradient_function

from jmp_train._diagnostics.gpu._compile import compile_for_gpu

GIGA = 1e9
POLICIES: dict[str, Callable[[Callable[..., Loss]], Step]] = {
    "float32": lambda loss: plain(loss()),
    "Flax float16, DynamicScale": lambda loss: selected(loss(jnp.float16), flax_scaling()),
    "mixed_float16": lambda loss: ours(loss(), "mixed_float16"),
    "mixed_bfloat16": lambda loss: ours_without_scale(loss(), "mixed_bfloat16"),
}
MODELS: dict[str, Callable[[int], Case]] = {
    "transformer": lambda batch: workload(
        "gpt2", "transformer", "GPT-2's width and vocabulary, 2 layers, length 1024", layers=2, batch_size=batch
    ),
    "cnn": lambda batch: of_battery(
        "cnn_groupnorm", "cnn", "two convolutions with group norm, 32x32", dataclasses.replace(FILLING, batch=batch)
    ),
    "lstm": lambda batch: workload(
        "lstm", "lstm", "two layers of 1536, vocabulary 10,000, length 64", batch_size=batch
    ),
    "resnet50": lambda batch: workload("resnet50", "resnet50", "224x224", batch_size=batch),
}
STEP = 8
"""Batches are multiples of it, for the Tensor Cores."""


def memory(fn: Callable[..., Any], *args: Any, **options: Any) -> dict[str, int]:
    """Bytes of a compiled function: its activations, and all its memory at the peak."""
    found: Any = compile_for_gpu(fn, *args, **options).memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return {"activations": found.temp_size_in_bytes, "peak": held + found.temp_size_in_bytes}


def step_memory(results: Results, model: str, policy: str, batch: int) -> dict[str, Any]:
    """The memory of one training step, its state donated."""
    case = MODELS[model](batch)
    step, (params, model_state, examples) = POLICIES[policy](case.loss), case.shapes()
    state = jax.eval_shape(step.init, params, model_state)
    made = memory(step.step, state, examples, donate_argnums=0)
    return results.add("compiled", {"model": model, "policy": policy, "batch": batch} | made)


def largest(peak: Callable[[int], int], budget: float, known: dict[int, int], step: int = STEP) -> int:
    """The largest multiple of `step` whose peak fits, 0 if none does.

    Bisects. The first guesses interpolate linearly, because memory is nearly linear in the batch and in the layers.

    Args:
      peak: `batch -> bytes`, which grows with the batch.
      budget: bytes.
      known: the peaks of two batches or more, for the first guesses.
    """
    known = dict(known)
    for attempt in range(40):
        fits = max((batch for batch, needed in known.items() if needed <= budget), default=0)
        over = min((batch for batch, needed in known.items() if needed > budget), default=None)
        if over is not None and over - fits <= step:
            return fits
        if over is not None and attempt >= 4:
            guess = (fits + over) // 2
        else:
            near = sorted(known, key=lambda batch: abs(known[batch] - budget))[:2]
            slope = (known[near[0]] - known[near[1]]) / (near[0] - near[1])
            guess = int(near[0] + (budget - known[near[0]]) / slope) if slope > 0 else 2 * max(known)
        guess = max(step * (guess // step), fits + step)
        guess = guess if over is None else min(guess, over - step)
        known[guess] = peak(guess)
    raise RuntimeError(f"no end to the batches that fit {budget:.3g} bytes: {known}")


def deep(results: Results) -> None:
    """Measures the gradients alone of a deep Transformer, for which the documented bound on activations holds."""
    ways = {
        "float32": ("transformer", "float32"),
        "Flax float16": ("transformer", "flax_float16"),
        "mixed_float16": ("transformer", "mixed_float16"),
        "mixed_float16, our attention_fn": ("transformer_fused", "mixed_float16"),
    }
    for policy, (name, how) in ways.items():
        row = BY_NAME[name]
        made = memory(gradient_function(row, how, DEEP), *abstract_example(row, DEEP))
        results.add("12-layer transformer, gradients", {"policy": policy} | made)


def measure(results: Results, model: str, policies: list[str], batches: list[int], budget: float) -> None:
    for policy in policies:
        known = {batch: step_memory(results, model, policy, batch)["peak"] for batch in batches}
        peak = functools.partial(lambda *args: step_memory(results, *args)["peak"], model, policy)
        batch = largest(peak, budget, known)
        results.add("largest batch", {"model": model, "policy": policy, "budget": budget, "batch": batch})


def relative(rows: list[dict[str, Any]], figures: tuple[str, ...], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows with each figure divided by that of the float32 row with the same keys, as `FIGURE_ratio`."""
    wide = {tuple(row[key] for key in keys): row for row in rows if row["policy"] == "float32"}
    return [
        row | {f"{figure}_ratio": row[figure] / wide[tuple(row[key] for key in keys)][figure] for figure in figures}
        for row in rows
    ]


def giga(value: float) -> str:
    return f"{value / GIGA:.2f}"


def print_tables(results: Results) -> None:
    figures = {
        "activations as activations, GB": giga,
        "activations_ratio as / float32": ".2f",
        "peak as peak, GB": giga,
        "peak_ratio as / float32 ": ".2f",
    }
    for model in dict.fromkeys(row["model"] for row in results.tables["compiled"]):
        rows = [row for row in results.tables["compiled"] if row["model"] == model]
        seen = [{row["batch"] for row in rows if row["policy"] == policy} for policy in {row["policy"] for row in rows}]
        rows = [row for row in rows if row["batch"] in set.intersection(*seen)]  # each search tried other batches
        rows = sorted(relative(rows, ("activations", "peak"), ("batch",)), key=lambda row: row["batch"])
        show(f"memory of a training step, {model}", {"batch": "d", "policy": ""} | figures, rows)
    rows = relative(results.tables["largest batch"], ("batch",), ("model", "budget"))
    columns = {"model": "", "policy": "", "batch as largest batch": "d", "batch_ratio as / float32": ".2f"}
    show(f"largest batch that fits {giga(rows[0]['budget'])} GB", columns, rows)
    parts = {
        "choice": "",
        "params_bytes as parameters, GB": giga,
        "optimizer as optimizer, GB": giga,
        "activations as gradients and activations, GB": giga,
        "peak as peak, GB": giga,
    }
    show("training state of GPT-2, batch 16", parts, results.tables["training state"])
    rows = results.tables["largest model"]
    fits = {"choice": "", "layers": "d", "parameters as parameters, 1e9": giga} | dict(list(parts.items())[1:])
    show(f"largest model that fits {giga(rows[0]['budget'])} GB", fits, rows)
    if gradients := results.tables.get("12-layer transformer, gradients"):
        columns = {"policy": ""} | figures
        show("12-layer transformer, gradients", columns, relative(gradients, ("activations", "peak"), ()))


def draw(results: Results) -> None:
    rows = results.tables["largest batch"]
    models = list(dict.fromkeys(row["model"] for row in rows))

    def picture(figure: Any) -> None:
        figure.suptitle(f"largest batch that fits {giga(rows[0]['budget'])} GB, compiled for an H200", fontsize=11)
        for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
            chosen = [row for row in rows if row["model"] == model]
            colours = ["tab:orange" if row["policy"].startswith("mixed") else "tab:blue" for row in chosen]
            axes.bar(
                [row["policy"].replace(", ", ",\n") for row in chosen], [row["batch"] for row in chosen], color=colours
            )
            axes.bar_label(axes.containers[0], fontsize=8)
            axes.set_title(model, fontsize=10, loc="left")
            axes.tick_params(axis="x", labelsize=8, rotation=60)

    results.picture("largest batch", picture, (10.0, 4.2))


def main() -> None:
    options = arguments(
        __doc__,
        models={"nargs": "*", "choices": list(MODELS), "default": ["transformer"]},
        budget={"type": float, "default": 80.0, "help": "in GB (10^9 bytes)"},
    )
    results = Results(
        "memory", "planned by the compiler for an NVIDIA H200; not run", small=options.small, out=options.out
    )
    batches, budget = ([16, 64], 0.5 * GIGA) if options.small else ([8, 32], options.budget * GIGA)
    policies = ["float32", "mixed_float16"] if options.small else list(POLICIES)
    for model in ["cnn"] if options.small else options.models:
        measure(results, model, policies, batches, budget)
    training_state(results, memory, largest, 0.01 * GIGA if options.small else budget, options.small)
    if not options.small:
        deep(results)
    print_tables(results)
    draw(results)
    results.write()


if __name__ == "__main__":
    main()
