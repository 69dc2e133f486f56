"""What does mixed precision cost and save in memory traffic, beside every other way to write it?

    python benchmarks/traffic.py [--models mlp resnet50] [--small]

Reads bytes moved, kernels, sums in 16 bits, copies and temporary memory of an optimizer step and of whole training
steps from modules compiled for an H200 (`.[gpu-report]`). Deterministic; nothing runs on a GPU, no figure is a time.
"""

import os
import time
from collections.abc import Callable, Collection
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on a GPU

import jax
import jax.numpy as jnp
import optax
from _behind import behind, by_model
from _cases import CASES, Case, given_gradients
from _peers import (
    Loss,
    Step,
    checked_by_optax,
    conditional,
    flax_scaling,
    hand_scaling,
    jmp_scaling,
    mpx_scaling,
    ours,
    ours_without_scale,
    plain,
    selected,
)
from _results import Results, arguments, show

from jmp_train import get_policy
from jmp_train.diagnostics import gpu_report

f16, bf16 = jnp.float16, jnp.bfloat16
REDUCED = get_policy("mixed_float16").replace(reduce_dtype="float16")
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

OPTIMIZER_STEPS: dict[str, Callable[[Loss], Step]] = {
    "bare Adam": plain,
    "by hand, where": lambda loss: selected(loss, hand_scaling()),
    "by hand, lax.cond": lambda loss: conditional(loss, hand_scaling()),
    "Flax DynamicScale": lambda loss: selected(loss, flax_scaling()),
    "jmp": lambda loss: selected(loss, jmp_scaling()),
    "mpx": lambda loss: selected(loss, mpx_scaling(mixed=False)),
    "optax.apply_if_finite": checked_by_optax,
    "ours": lambda loss: ours(loss, "float32"),
    "clipping, bare": lambda loss: plain(loss, CLIPPED),
    "clipping, Flax DynamicScale": lambda loss: selected(loss, flax_scaling(), CLIPPED),
    "clipping, ours": lambda loss: ours(loss, "float32", CLIPPED),
}

TRAINING_STEPS: dict[str, Callable[[Callable[..., Loss]], Step]] = {
    "float32 strict": lambda loss: strict(plain(loss())),
    "TF32": lambda loss: plain(loss()),
    "TF32, Flax DynamicScale": lambda loss: selected(loss(), flax_scaling()),
    "by hand, float16 layers": lambda loss: selected(loss(f16), hand_scaling(f16)),
    "Flax float16, no scale": lambda loss: plain(loss(f16)),
    "Flax float16, DynamicScale": lambda loss: selected(loss(f16), flax_scaling()),
    "Flax float16, apply_if_finite": lambda loss: checked_by_optax(loss(f16)),
    "jmp float16": lambda loss: selected(loss(), jmp_scaling(f16)),
    "mpx float16": lambda loss: selected(loss(), mpx_scaling()),
    "ours": lambda loss: ours(loss(), "mixed_float16"),
    "ours, reduce_dtype=float16": lambda loss: ours(loss(), REDUCED),
    "ours without autocast, Flax float16": lambda loss: ours(loss(f16), "mixed_float16", autocast=False),
    "Flax bfloat16, no scale": lambda loss: plain(loss(bf16)),
    "ours, mixed_bfloat16, no scale": lambda loss: ours_without_scale(loss(), "mixed_bfloat16"),
}


# The ways that a small run measures.
FEW_WAYS = (
    "TF32",
    "Flax float16, DynamicScale",
    "jmp float16",
    "mpx float16",
    "ours",
    "ours, reduce_dtype=float16",
    "ours, mixed_bfloat16, no scale",
)


def strict(step: Step) -> Step:
    """The step with float32 products in full precision: no TF32."""
    return step._replace(step=jax.default_matmul_precision("highest")(step.step))


def measure(step: Step, params: Any, model_state: Any, batch: Any) -> dict[str, Any]:
    """The figures of one step, its state donated."""
    start = time.perf_counter()
    state = jax.eval_shape(step.init, params, model_state)
    report = gpu_report(jax.jit(step.step, donate_argnums=0))(state, batch)
    return {
        "bytes": report.bytes,
        "kernels": report.launches,
        "sixteen_bit_sums": len(report.sixteen_bit_sums),
        "copies": sum(copy.times for copy in report.copies),
        "temporary": report.memory.temporary,
        "peak": report.memory.peak,
        "arithmetic": {unit: flops / report.flops for unit, flops in report.unit_flops.items() if flops},
        "least_seconds": report.least_seconds,
        "compile_seconds": round(time.perf_counter() - start, 1),
    }


def optimizer_steps(results: Results, case: Case) -> None:
    params, _, _ = case.shapes()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    # float16 gradients of one model are enough: they save as many bytes per parameter in any model, and the number of
    # kernels, which grows with the leaves, is measured with float32 gradients.
    for dtype in (jnp.float32, f16) if case.name == "mlp" else (jnp.float32,):
        grads = jax.tree.map(lambda p, dtype=dtype: jax.ShapeDtypeStruct(p.shape, dtype), params)
        for how, make in OPTIMIZER_STEPS.items():
            made = measure(make(given_gradients), params, {}, grads)
            about = {"model": case.name, "gradients": jnp.dtype(dtype).name, "how": how}
            results.add("optimizer step", about | {"bytes_per_parameter": made["bytes"] / size} | made)


def training_steps(results: Results, case: Case, ways: Collection[str]) -> None:
    arrays = case.shapes()
    for how, make in {**TRAINING_STEPS, **case.by_hand}.items():
        if how in TRAINING_STEPS and how not in ways:
            continue
        made = measure(make(case.loss), *arrays)
        results.add("training step", {"model": case.name, "how": how} | made)


def mega(value: float) -> str:
    return f"{value / 1e6:.1f}"


def count(value: float) -> str:
    return f"{value / 1e6:.1f} MB" if value > 1e6 else str(value)


def arithmetic(shares: dict[str, float]) -> str:
    """The units on which the FLOPs of products run, with their shares, the largest first."""
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(unit if share > 0.995 else f"{unit} {share:.0%}" for unit, share in ranked)


FIGURES = {
    "kernels": "d",
    "sixteen_bit_sums as 16-bit sums": "d",
    "copies": "d",
    "temporary as temporary MB": mega,
}


def print_tables(results: Results) -> None:
    optimizer = {"gradients": "", "how": "", "bytes_per_parameter as bytes a parameter": ".2f"} | FIGURES
    training = {"how": "", "bytes as MB": mega} | FIGURES | {"arithmetic as products in": arithmetic}
    for table, columns in (("optimizer step", optimizer), ("training step", training)):
        for name, rows in by_model(results, table).items():
            show(f"{table}, {name}", columns, rows)

    columns = {
        "model": "",
        "how": "",
        "figure": "",
        "ours": count,
        "peer as the best peer": "",
        "theirs": count,
        "why": "",
    }
    show("where a peer needs less, by more than 1 %", columns, behind(results))


def colour(how: str) -> str:
    wide = how.startswith(("float32", "TF32", "bare", "clipping, bare"))
    return "tab:orange" if "ours" in how else "tab:grey" if wide else "tab:blue"


def bars(axes: Any, rows: list[dict[str, Any]], values: list[float], title: str, labels: list[str]) -> None:
    axes.barh([row["how"] for row in rows], values, color=[colour(row["how"]) for row in rows])
    axes.bar_label(axes.containers[0], labels, padding=3, fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    axes.invert_yaxis()
    axes.margins(x=0.35)
    axes.tick_params(labelsize=8)


def draw(results: Results) -> None:
    """Draws one plot of the training steps and one of the optimizer steps."""
    for table, panels, columns in (("training step", panel_of_training, 1), ("optimizer step", panels_of_optimizer, 2)):
        models = by_model(results, table)

        def picture(figure: Any, table=table, panels=panels, columns=columns, models=models) -> None:
            figure.suptitle(f"{table}: memory traffic, compiled for an H200 (orange: jmp_train)", fontsize=11)
            heights = [len(rows) + 2 for rows in models.values()]
            grid = figure.subplots(len(models), columns, squeeze=False, height_ratios=heights)
            for axes, (name, rows) in zip(grid, models.items(), strict=True):
                panels(axes, rows, name)

        if models:
            lines = sum(len(rows) + 2 for rows in models.values())
            results.picture(table, picture, (10.0, 0.6 + 0.21 * lines))


def panel_of_training(panels: Any, rows: list[dict[str, Any]], name: str) -> None:
    sums = [f", {row['sixteen_bit_sums']} sums in 16 bits" if row["sixteen_bit_sums"] else "" for row in rows]
    labels = [f"{mega(row['bytes'])} MB{each}" for row, each in zip(rows, sums, strict=True)]
    bars(panels[0], rows, [row["bytes"] / 1e6 for row in rows], name, labels)


def panels_of_optimizer(panels: Any, rows: list[dict[str, Any]], name: str) -> None:
    rows = [row | {"how": f"{row['how']}, {row['gradients']}"} for row in rows]
    values = [row["bytes_per_parameter"] for row in rows]
    bars(panels[0], rows, values, f"{name}: bytes a parameter", [f"{value:.1f}" for value in values])
    kernels = [row["kernels"] for row in rows]
    bars(panels[1], rows, kernels, "kernels", [str(count) for count in kernels])
    panels[1].set_yticklabels([])


def main() -> None:
    options = arguments(__doc__, models={"nargs": "*", "choices": list(CASES), "default": list(CASES)})
    results = Results(
        "traffic", "compiled for an NVIDIA H200, which need not be there; not run", small=options.small, out=options.out
    )
    names = ["mlp"] if options.small else options.models
    if not options.small and set(names) < set(CASES):
        results.keep(lambda table, row: row["model"] not in names)
    for name in names:
        if name in ("mlp", "resnet50"):
            optimizer_steps(results, CASES[name]())
    for name in names:
        training_steps(results, CASES[name](), FEW_WAYS if options.small else TRAINING_STEPS)
    print_tables(results)
    draw(results)
    results.write()


if __name__ == "__main__":
    main()
