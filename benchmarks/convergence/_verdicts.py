"""Judges the runs of an application by a rule stated beforehand.

Decides when a precision matches float32. The rule compares means over seeds. With m seeds in float32, s their standard
deviation, n seeds of the other precision, and t the 97.5 % quantile of Student's distribution with m - 1 degrees of
freedom, the margin, the difference that chance explains, is t s sqrt(1 / n + 1 / m), at least the metric's resolution:
the mean of n more runs in float32 would be within it. The spread of the other precision's seeds does not widen it.

- `matches`: the mean is not worse than float32's by more than the margin;
- `worse`: the mean is worse than float32's by more than the margin;
- `fails`: the metric or the final loss is not finite, the parameters never changed, or the training loss fell by less
  than half of its decrease in float32.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from ._application import Application


class Verdict(enum.StrEnum):
    """The verdict on a precision, relative to float32."""

    MATCHES = "matches"
    WORSE = "worse"
    FAILS = "fails"


class Summary(NamedTuple):
    """The figures of one precision: a row of the table.

    Attributes:
      mean, deviation: of the metric over seeds; `deviation` has n - 1 in its denominator. NaN if a run gave no number.
      gap: the final training loss minus float32's, as a share of the decrease of the loss in float32; None for several
        players, whose losses depend on each other. The final loss is the mean of the last tenth of the steps.
      skipped: skipped steps of each seed, all players.
      scales: each player's loss scale at the end, of the first seed.
      margin: the difference that chance explains.
      verdict: by the rule above.
    """

    mean: float
    deviation: float
    gap: float | None
    skipped: list[int]
    scales: list[float]
    margin: float
    verdict: Verdict


def summarise(application: Application, runs: Sequence[Any], reference: Sequence[Any]) -> Summary:
    """Judges the `runs` of one precision beside float32's."""
    metrics, truth = (np.array([_number(run["metric"]) for run in rows]) for rows in (runs, reference))
    final, true_final = (_final_loss(rows) for rows in (runs, reference))
    first = float(np.mean([_number(run["losses"][0][0]) for run in reference]))
    margin = max(margin_of(truth, len(metrics)), application.resolution)
    worse_by = truth.mean() - metrics.mean() if application.higher_is_better else metrics.mean() - truth.mean()
    idle = any(min(run["skipped"]) >= application.steps for run in runs)
    gap = (final - true_final) / abs(first - true_final) if len(application.players) == 1 else None
    learned = gap is None or gap <= 0.5
    if idle or not math.isfinite(worse_by) or not math.isfinite(final) or not learned:
        verdict = Verdict.FAILS
    else:
        verdict = Verdict.WORSE if worse_by > margin else Verdict.MATCHES
    return Summary(
        mean=float(metrics.mean()),
        deviation=float(metrics.std(ddof=1)) if len(metrics) > 1 else math.nan,
        gap=gap,
        skipped=[sum(run["skipped"]) for run in runs],
        scales=list(runs[0]["loss_scale"]),
        margin=float(margin),
        verdict=verdict,
    )


def margin_of(truth: np.ndarray, n: int) -> float:
    """The difference that chance explains between the mean of `truth` and that of `n` more runs; 0 for one run."""
    m = len(truth)
    return float(special.stdtrit(m - 1, 0.975) * truth.std(ddof=1)) * math.sqrt(1 / n + 1 / m) if m > 1 else 0.0


def _final_loss(runs: Sequence[Any]) -> float:
    losses = [run["losses"][0] for run in runs]
    return float(np.mean([_number(value) for curve in losses for value in curve[-max(1, len(curve) // 10) :]]))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
