"""The table and the figure of the suite."""

import pathlib
from collections.abc import Sequence

import numpy as np

from .._results import show
from ._application import REFERENCE, Application, Precision
from ._store import Store
from ._verdicts import Summary, summarise

# What the short form trains beside float32.
QUICK_PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16", "mixed_float16, unscaled")


def summaries(store: Store, application: Application, precisions: Sequence[Precision], seeds: int):
    """The rows of one application that have all their runs: `{precision's name: Summary}`."""
    reference = store.runs(application, REFERENCE)[: REFERENCE.seeds(seeds)]
    rows: dict[str, Summary] = {}
    for precision in precisions:
        runs = store.runs(application, precision)[: precision.seeds(seeds)]
        if len(runs) == precision.seeds(seeds) and len(reference) == REFERENCE.seeds(seeds):
            rows[precision.name] = summarise(application, runs, reference)
    return rows


def show_table(store: Store, applications: Sequence[Application], precisions: Sequence[Precision], seeds: int) -> None:
    """Prints a table for each application."""
    columns = {
        "precision": "",
        "metric": "",
        "loss gap": "",
        "skipped": "",
        "loss scale": "",
        "verdict": "",
    }
    for application in applications:
        rows = []
        for name, row in summaries(store, application, precisions, seeds).items():
            rows.append(
                {
                    "precision": name,
                    "metric": f"{row.mean:.4g} ± {row.deviation:.2g}",
                    "loss gap": f"{100 * row.gap:+.1f} %",
                    "skipped": " ".join(map(str, row.skipped)),
                    "loss scale": " ".join(f"2^{np.log2(scale):.0f}" for scale in row.scales),
                    "verdict": row.verdict,
                }
            )
        lost = "; ".join(
            f"{part['zero unscaled']:.1f} % of the activation gradients are zero in float16 unscaled, "
            f"{part['zero scaled']:.1f} % at 2^{np.log2(part['suggested scale']):.0f}"
            for part in store.lost(application)
        )
        show(
            f"{application.name}: {application.metric}, {application.steps} steps, {seeds} seeds. {lost}", columns, rows
        )


def draw_curves(
    store: Store, applications: Sequence[Application], precisions: Sequence[Precision], path: pathlib.Path
) -> None:
    """One panel an application: the training loss of each precision's first seed."""
    from matplotlib.figure import Figure

    across = min(4, len(applications))
    down = -(-len(applications) // across)
    figure = Figure(figsize=(3.6 * across, 2.8 * down + 0.8), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel, application in zip(panels, applications, strict=False):
        for number, precision in enumerate(precisions):
            runs = store.runs(application, precision)
            if runs:
                losses = np.array(runs[0]["losses"][0], float)
                steps = np.linspace(0, application.steps, len(losses))
                style = {"color": "black", "linewidth": 2.5} if precision is REFERENCE else {"color": f"C{number - 1}"}
                panel.plot(steps, losses, label=precision.name, alpha=0.8, **style)
        panel.set_title(application.name, fontsize=9)
        panel.set_yscale("log")
        panel.tick_params(labelsize=7)
    for panel in panels[len(applications) :]:
        panel.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("training loss", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
