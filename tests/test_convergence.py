"""The convergence suite: its statistical rule, its file of results, and its short form.

The rule is tested on numbers whose verdict is known; the short form trains.
"""

import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.convergence._application import PRECISIONS, REFERENCE, Application, Player
from benchmarks.convergence._report import show_tables, summaries
from benchmarks.convergence._store import Store
from benchmarks.convergence._verdicts import Verdict, margin_of, summarise

pytestmark = pytest.mark.integration

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def rows():
    """The applications of the suite, imported only when needed, because that takes a second."""
    from benchmarks.convergence._rows import applications

    return applications()


def evaluate(variables):
    return 0.0


PLAYER = Player(lambda key: {}, lambda variables, batch, key: (jnp.float32(0), {}), optax.identity())
APPLICATION = Application("made up", "accuracy, %", True, 0.5, 100, (PLAYER,), lambda seed: iter(()), evaluate)


def run(metric: float | None, final: float | None = 0.1, skipped: int = 0):
    return {"metric": metric, "losses": [[1.0, final]], "skipped": [skipped], "loss_scale": [1.0], "seconds": 1.0}


FLOAT32 = [run(90.0), run(91.0), run(92.0)]


@pytest.mark.parametrize("m, n", [(5, 3), (4, 2), (3, 8)])
def test_the_margin_holds_the_mean_of_more_runs_95_times_in_100(m, n):
    rng = np.random.default_rng(0)
    truth, more = 7.0 * rng.normal(size=(10_000, m)), 7.0 * rng.normal(size=(10_000, n))
    held = [abs(a.mean() - b.mean()) <= margin_of(a, n) for a, b in zip(truth, more, strict=True)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.008)  # four standard deviations of 10,000 throws


@pytest.mark.parametrize(
    "runs, verdict",
    [
        (FLOAT32, Verdict.MATCHES),
        ([run(95.0), run(96.0), run(97.0)], Verdict.MATCHES),  # better than float32
        ([run(89.0), run(90.0), run(91.0)], Verdict.MATCHES),  # one point worse, where seeds differ by one
        ([run(80.0), run(81.0), run(82.0)], Verdict.WORSE),
        ([run(90.0), run(92.0), run(40.0)], Verdict.WORSE),  # the spread of these seeds does not widen the margin
        ([run(90.0), run(91.0), run(None)], Verdict.FAILS),
        ([run(90.0, final=None)] * 3, Verdict.FAILS),
        ([run(90.0, final=0.9)] * 3, Verdict.FAILS),  # learned a tenth of what float32 learned
        ([run(90.0, skipped=100)] * 3, Verdict.FAILS),
    ],
)
def test_verdicts(runs, verdict):
    assert summarise(APPLICATION, runs, FLOAT32).verdict is verdict


def test_where_lower_is_better_more_is_worse():
    lower = Application("made up", "errors", False, 0.5, 100, (PLAYER,), lambda seed: iter(()), evaluate)
    assert summarise(lower, [run(97.0), run(98.0), run(99.0)], FLOAT32).verdict is Verdict.WORSE
    assert summarise(lower, [run(70.0), run(71.0), run(72.0)], FLOAT32).verdict is Verdict.MATCHES


def test_equal_seeds_leave_the_resolution_as_margin():
    same = [run(90.0)] * 3
    assert summarise(APPLICATION, [run(89.6)] * 3, same).verdict is Verdict.MATCHES
    assert summarise(APPLICATION, [run(89.4)] * 3, same).verdict is Verdict.WORSE


def test_a_suite_goes_on_where_it_was_cut_short(tmp_path):
    store = Store(tmp_path / "results.json")
    store.add(APPLICATION, REFERENCE, 0, run(90.0))
    again = Store(tmp_path / "results.json")
    assert again.has(APPLICATION, REFERENCE, 0) and not again.has(APPLICATION, REFERENCE, 1)
    assert not again.has(APPLICATION, PRECISIONS[1], 0)
    assert again.runs(APPLICATION, REFERENCE) == [run(90.0)]


def test_runs_of_an_application_that_has_changed_are_not_kept(tmp_path):
    store = Store(tmp_path / "results.json")
    store.add(APPLICATION, REFERENCE, 0, run(90.0))
    store.content["applications"]["made up"]["source"] = "another"
    assert not store.has(APPLICATION, REFERENCE, 0)
    store.add(APPLICATION, REFERENCE, 0, run(80.0))
    assert store.runs(APPLICATION, REFERENCE) == [run(80.0)]


@pytest.mark.slow
def test_the_readme_holds_the_tables_of_the_results(rows, capsys):
    show_tables(Store(RESULTS / "convergence.json"), rows, PRECISIONS, seeds=3)
    readme = (ROOT / "benchmarks" / "README.md").read_text().splitlines()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("|", "**"))]
    assert printed and not [line for line in printed if line not in readme]


@pytest.mark.slow
def test_mixed_precision_matches_float32_in_the_results(rows):
    store, found = Store(RESULTS / "convergence.json"), {}
    for application in rows:
        for name, row in summaries(store, application, PRECISIONS, seeds=3).items():
            found.setdefault(name, []).append(row.verdict)
    for name in ("mixed_bfloat16", "mixed_float16", "float16 parameters, masters", "bfloat16 everything, stochastic"):
        assert found[name] == [Verdict.MATCHES] * len(rows)
    for name, verdict in (("float16 parameters", Verdict.FAILS), ("mixed_float16, unscaled", Verdict.WORSE)):
        assert {Verdict.MATCHES, verdict} <= {*found[name]} and len(found[name]) == len(rows)


@pytest.mark.slow
def test_the_short_form_matches_float32(rows, tmp_path):
    from benchmarks.convergence._rows import QUICK

    command = [sys.executable, "-m", "benchmarks.convergence", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "convergence-quick.png").exists()
    store = Store(tmp_path / "convergence-quick.json")
    for application in rows:
        if application.name in QUICK:
            found = summaries(store, application, PRECISIONS, seeds=2)
            assert {name: row.verdict for name, row in found.items()} == dict.fromkeys(
                ("float32", "mixed_bfloat16", "mixed_float16"), Verdict.MATCHES
            ), done.stdout
            assert found["mixed_float16"].scales[0] > 1
