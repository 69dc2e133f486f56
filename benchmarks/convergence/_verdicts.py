"""What the runs of an application say, by a rule stated beforehand.

Decides when a precision matches float32. The rule compares means over seeds. With n seeds each, s the pooled standard
deviation of the two, and t the 97.5 % quantile of Student's distribution with 2n - 2 degrees of freedom, the difference
that chance explains is t s sqrt(2 / n), at least the metric's resolution.

- `matches`: the mean is not worse than float32's by more than that;
- `worse`: it is;
- `fails`: no number came out, the parameters never moved, or less than half of what float32 learned was learned, as
  measured by the training loss.
"""

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ._application import Application

# 97.5 % quantiles of Student's t for 2n - 2 degrees of freedom, n from 2 to 10.
STUDENT = (4.303, 2.776, 2.447, 2.306, 2.228, 2.179, 2.145, 2.120, 2.101)


class Verdict(enum.StrEnum):
    """How a precision did beside float32."""

    MATCHES = "matches"
    WORSE = "worse"
    FAILS = "fails"


class Summary(NamedTuple):
    """A row of the table.

    Attributes:
      mean, deviation: of the metric over seeds; `deviation` has n - 1 in its denominator. NaN if a run gave no number.
      gap: the final training loss less float32's, as a share of what float32 took off the initial loss; the first
        player's. Final is the mean of the last tenth.
      skipped: skipped steps of each seed, all players.
      scales: where each player's loss scale settled, the first seed's.
      margin: the difference that chance explains.
      verdict: by the rule above.
    """

    mean: float
    deviation: float
    gap: float
    skipped: list[int]
    scales: list[float]
    margin: float
    verdict: Verdict


def summarise(application: Application, runs: Sequence[Any], reference: Sequence[Any]) -> Summary:
    """Judges the `runs` of one precision beside float32's, seed for seed the same in number."""
    metrics, truth = (np.array([_number(run["metric"]) for run in rows]) for rows in (runs, reference))
    final, true_final = (_final_loss(rows) for rows in (runs, reference))
    first = float(np.mean([_number(run["losses"][0][0]) for run in reference]))
    margin = max(margin_of(metrics, truth), application.resolution)
    worse_by = truth.mean() - metrics.mean() if application.higher_is_better else metrics.mean() - truth.mean()
    idle = any(min(run["skipped"]) >= application.steps for run in runs)
    learned = len(application.players) > 1 or first - final >= (first - true_final) / 2
    if idle or not math.isfinite(worse_by) or not math.isfinite(final) or not learned:
        verdict = Verdict.FAILS
    else:
        verdict = Verdict.WORSE if worse_by > margin else Verdict.MATCHES
    return Summary(
        mean=float(metrics.mean()),
        deviation=float(metrics.std(ddof=1)) if len(metrics) > 1 else math.nan,
        gap=(final - true_final) / abs(first - true_final),
        skipped=[sum(run["skipped"]) for run in runs],
        scales=list(runs[0]["loss_scale"]),
        margin=float(margin),
        verdict=verdict,
    )


def margin_of(metrics: np.ndarray, truth: np.ndarray) -> float:
    """The difference of two means of n values that chance explains; 0 where there is one value, or no number."""
    n = len(metrics)
    if n < 2 or not np.isfinite(metrics).all():
        return 0.0
    pooled = math.sqrt((metrics.var(ddof=1) + truth.var(ddof=1)) / 2)
    return STUDENT[n - 2] * pooled * math.sqrt(2 / n)


def _final_loss(runs: Sequence[Any]) -> float:
    losses = [run["losses"][0] for run in runs]
    return float(np.mean([_number(value) for curve in losses for value in curve[-max(1, len(curve) // 10) :]]))


def _number(value: float | None) -> float:
    return math.nan if value is None else value
