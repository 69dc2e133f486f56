"""The tables and the figure of the suite."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from .._results import show
from ._application import REFERENCE, Application, Precision
from ._store import Store
from ._verdicts import Summary, Verdict, summarise


def summaries(store: Store, application: Application, precisions: Sequence[Precision], seeds: int):
    """The rows of one application that have all their runs: `{precision's name: Summary}`."""
    reference = store.runs(application, REFERENCE)[: REFERENCE.seeds(seeds)]
    rows: dict[str, Summary] = {}
    for precision in precisions:
        runs = store.runs(application, precision)[: precision.seeds(seeds)]
        if len(runs) == precision.seeds(seeds) and len(reference) == REFERENCE.seeds(seeds):
            rows[precision.name] = summarise(application, runs, reference)
    return rows


def show_tables(store: Store, applications: Sequence[Application], precisions: Sequence[Precision], seeds: int) -> None:
    """Prints a table of all verdicts, one of the gradients that float16 loses, and a table for each application.

    Applications of which no precision has all its runs yet are left out.
    """
    judged = [(each, rows) for each in applications if (rows := summaries(store, each, precisions, seeds))]
    _show_verdicts(judged, precisions)
    _show_lost(store, [application for application, _ in judged])
    for application, rows in judged:
        _show_application(application, rows, seeds)


def _show_verdicts(
    judged: Sequence[tuple[Application, Mapping[str, Summary]]], precisions: Sequence[Precision]
) -> None:
    rows = []
    for application, summaries in judged:
        cells = {name: _cell(row) for name, row in summaries.items()}
        rows.append({"application": application.name, "metric": application.metric, **cells})
    columns = {"application": "", "metric": "", **{precision.name: "" for precision in precisions}}
    show("**Mean over the seeds, and the verdict where it is not that it matches float32**", columns, rows)


def _cell(row: Summary) -> str:
    verdict = "" if row.verdict is Verdict.MATCHES else f", {row.verdict}"
    return f"{row.mean:.4g}{verdict}"


def _show_lost(store: Store, applications: Sequence[Application]) -> None:
    """One row for each network; a GAN has two."""
    rows = [
        {"application": application.name, **part} for application in applications for part in store.lost(application)
    ]
    columns = {
        "application": "",
        "zero unscaled as zero unscaled, %": ".1f",
        "subnormal unscaled as subnormal unscaled, %": ".1f",
        "zero scaled as zero at that scale, %": ".1f",
        "suggested scale": _power,
    }
    show("**Activation gradients in float16, after training in float32**", columns, rows)


def _show_application(application: Application, summaries: Mapping[str, Summary], seeds: int) -> None:
    rows = [
        {
            "precision": name,
            "metric": f"{row.mean:.4g} ± {row.deviation:.2g}",
            "loss gap": None if row.gap is None else f"{100 * row.gap:+.1f} %",
            "skipped": " ".join(map(str, row.skipped)),
            "loss scale": " ".join(map(_power, row.scales)),
            "verdict": row.verdict,
        }
        for name, row in summaries.items()
    ]
    columns = dict.fromkeys(("precision", "metric", "loss gap", "skipped", "loss scale", "verdict"), "")
    margin = [*summaries.values()][-1].margin
    title = f"{application.name}: {application.metric}, {application.steps} steps, {seeds} seeds"
    show(f"**{title}; chance explains {margin:.2g}**", columns, rows)


def _power(scale: float) -> str:
    return f"2^{np.log2(scale):.0f}"


def draw_curves(
    store: Store, applications: Sequence[Application], precisions: Sequence[Precision], path: pathlib.Path
) -> None:
    """One panel an application: the training loss of each precision's first seed, in the range of float32's."""
    from matplotlib.figure import Figure

    applications = [each for each in applications if store.runs(each, REFERENCE)]
    if not applications:
        return
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
        reference = np.array(store.runs(application, REFERENCE)[0]["losses"][0], float)
        panel.set_ylim(0.7 * reference.min(), 1.4 * reference.max())
        panel.tick_params(which="both", labelsize=7)
    for panel in panels[len(applications) :]:
        panel.remove()
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("training loss", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
