"""The benchmarks: small runs work and meet the bounds, and the tables in the repository match its result files.

No test asserts a time.
"""

import functools
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.integration

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
RESULTS = BENCHMARKS / "results"
README = BENCHMARKS.parent / "README.md"
NAMES = ("traffic", "overhead", "compile_time", "memory", "optimizer_state", "compare")
KEYS = {
    "benchmark", "command", "date", "measured", "device", "versions", "commit", "seeds", "small", "complete", "tables",
}  # fmt: skip


@pytest.fixture
def load(monkeypatch):
    """Imports a benchmark, with its folder on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def run(name, out, *options):
    """The results of a run in a separate process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *options, "--out", str(out)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (path,) = out.glob("*.json")
    results = checked(path)
    assert sorted(out.glob("*.png"))
    assert ran.stdout.count("| -") >= len(results["tables"])  # each was printed
    return results


def small_run(name, out):
    """The tables of a small run."""
    results = run(name, out, "--small")
    assert results["small"]
    return results["tables"]


def checked(path):
    results = json.loads(path.read_text())
    assert set(results) - {"kept"} == KEYS
    assert results["complete"] and results["versions"]["jax"] and results["device"]["kind"]
    assert all(isinstance(row, dict) for rows in results["tables"].values() for row in rows)
    return results


def compilers(results):
    """The versions on which compiled modules depend."""
    return {name: version for name, version in results["versions"].items() if name not in ("python", "numpy", "torch")}


def figures(rows, model):
    """The figures of a model, without the compile time."""
    return [{**row, "compile_seconds": None} for row in rows if row["model"] == model]


def by(rows, *keys):
    return {tuple(row[key] for key in keys): row for row in rows}


def check_optimizer_steps(rows):
    """The bounds on what loss scaling may add to a step of Adam."""
    for (_, gradients, how), row in by(rows, "model", "gradients", "how").items():
        if "ours" in how:
            assert row["bytes_per_parameter"] <= 1.01 * (32 if gradients == "float32" else 28)
            assert row["copies"] == 0


def check_mlp_steps(rows):
    rows = by(rows, "model", "how")
    for ours, by_hand in (
        ("ours", "by hand, custom_vjp, reduce float32"),
        ("ours, reduce_dtype=float16", "by hand, custom_vjp, reduce float16"),
    ):
        assert rows["mlp", ours]["bytes"] <= 1.01 * rows["mlp", by_hand]["bytes"]


def check_sums_and_products(rows):
    for row in rows:
        if row["how"] in ("ours", "ours, reduce_dtype=float16", "ours, mixed_bfloat16, no scale"):
            assert row["sixteen_bit_sums"] == 0, row
            assert row["arithmetic"].keys() == {"16 bits"}, row


def check_figures(again, row, same):
    """Figures are equal to the byte under the same versions; under others they may be a little larger."""
    assert again == row if same else again["bytes"] <= 1.05 * row["bytes"], row


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_traffic(tmp_path, model):
    """Every way at full size gives the figures in the repository."""
    results = run("traffic", tmp_path, "--models", model)
    tables, before = results["tables"], checked(RESULTS / "traffic.json")
    check_sums_and_products(tables["training step"])
    if model == "mlp":
        check_optimizer_steps(tables["optimizer step"])
        check_mlp_steps(tables["training step"])
    same = compilers(results) == compilers(before)
    for name, rows in tables.items():
        for again, row in zip(figures(rows, model), figures(before["tables"][name], model), strict=True):
            check_figures(again, row, same)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["transformer", "lstm"])
def test_traffic_of_our_step(model, load):
    """Only ours: the other ways take minutes to compile, and change only with their libraries."""
    traffic, case = load("traffic"), load("_cases").CASES[model]()
    made = traffic.measure(traffic.TRAINING_STEPS["ours"](case.loss), *case.shapes())
    before = checked(RESULTS / "traffic.json")
    row = by(before["tables"]["training step"], "model", "how")[model, "ours"]
    again = row | made | {"compile_seconds": row["compile_seconds"]}
    check_figures(again, row, same=compilers({"versions": load("_results").versions()}) == compilers(before))


def test_results_tell_what_was_asked_for_and_no_path_of_a_machine(load):
    command = load("_results")._command
    asked = ["/somewhere/benchmarks/traffic.py", "--models", "mlp", "cnn", "--out", "/somewhere/else", "--small"]
    assert command(asked) == "python benchmarks/traffic.py --models mlp cnn --small"
    for path in RESULTS.glob("*.json"):
        assert "/tmp" not in path.read_text() and "/home" not in path.read_text()


@pytest.mark.parametrize(
    ("model", "how", "start", "unit"),
    [
        ("mlp", "ours, reduce_dtype=float16", "6\u00d71024 MLP, ", "MB"),
        ("mlp", "ours", "the same, `reduce_dtype=float32`", "MB"),
        ("cnn", "ours", "CNN with group norm", "MB"),
        ("resnet50", "ours", "ResNet-50, batch 256", "GB"),
        ("transformer", "ours", "Transformer, 4 layers of GPT-2", "GB"),
        ("transformer", "ours, our attention_fn", "the same with `flax_bridge", "GB"),
        ("lstm", "ours", "LSTM, 2 layers", "GB"),
    ],
)
def test_the_readme_gives_the_traffic_that_was_measured(model, how, start, unit):
    (line,) = (line for line in README.read_text().splitlines() if line.startswith(f"| {start}"))
    row = by(checked(RESULTS / "traffic.json")["tables"]["training step"], "model", "how")[model, how]
    told = line.split("|")[2].strip()
    assert told.endswith(f" {unit}")
    # The last digit is 0.1, and a half may be rounded either way.
    assert abs(float(told.split()[0]) - row["bytes"] / {"MB": 1e6, "GB": 1e9}[unit]) <= 0.0501


@pytest.mark.slow
def test_overhead(tmp_path):
    tables = small_run("overhead", tmp_path)
    assert {row["how"] for row in tables["step time"]} >= {"with_loss_scale", "jmp", "mpx", "Flax DynamicScale"}
    assert all(row["autocast_seconds"] > 0 for row in tables["growing models"])
    assert all(row["calls_ratio"] <= 2 for row in tables["tracing models"])


@pytest.mark.slow
def test_compile_time(tmp_path):
    rows = by(small_run("compile_time", tmp_path)["compile time"], "how")
    assert all(row["seconds"] > 0 for row in rows.values())
    # XLA's time depends on the size of the program, which is exact.
    for dtype in ("float16", "bfloat16"):
        assert rows[f"ours, {dtype}",]["instructions"] <= 1.15 * rows[f"Flax {dtype}",]["instructions"]


@pytest.mark.slow
def test_memory(tmp_path):
    tables = small_run("memory", tmp_path)
    largest = by(tables["largest batch"], "policy")
    peaks = by(tables["compiled"], "policy", "batch")
    for (policy,), row in largest.items():
        assert peaks[policy, row["batch"]]["peak"] <= row["budget"] < peaks[policy, row["batch"] + 8]["peak"]
    assert largest["mixed_float16",]["batch"] >= 1.5 * largest["float32",]["batch"]


def check_state_bytes(rows):
    """The bounds on what a step of Adam moves, without and with a loss scale; random bits cost no bytes."""
    rows = by(rows, "parameters", "state")
    for key, moved, scaled, held in (
        (("float32", "stochastic"), 20, 24, 8),
        (("bfloat16 stochastic", "float32"), 22, 24, 10),
        (("bfloat16 stochastic", "stochastic"), 14, 16, 6),
    ):
        row = rows[key]
        assert row["moved"] <= 1.01 * moved and row["scaled_moved"] <= 1.01 * scaled and row["held"] <= 1.01 * held
        assert row["copies"] == row["scaled_copies"] == 0


@pytest.mark.slow
def test_optimizer_state(tmp_path):
    tables = small_run("optimizer_state", tmp_path)
    check_state_bytes(tables["optimizer step"])
    assert len(tables["digits"]) == len(tables["optimizer step"])


def test_the_results_show_that_stochastic_rounding_trains_like_float32():
    """Its mean differs from float32's by no more than float32's seeds from each other; rounding to nearest by more."""
    tables = checked(RESULTS / "optimizer_state.json")["tables"]
    check_state_bytes(tables["optimizer step"])
    losses = {key: np.array(row["losses"]) for key, row in by(tables["digits"], "parameters", "state").items()}
    exact = losses["float32", "float32"]
    spread = exact.max() - exact.min()
    for parameters in ("float32", "bfloat16 stochastic"):
        assert abs(losses[parameters, "stochastic"].mean() - exact.mean()) <= spread
    assert losses["float32", "nearest"].mean() > exact.mean() + 5 * spread
    moments = {row["state"]: row["nu"] for row in tables["second moment"]}
    assert moments["stochastic"] == pytest.approx(moments["float32"], rel=0.01) and moments["nearest"] > 1


def test_the_results_show_larger_models_in_16_bits():
    tables = checked(RESULTS / "memory.json")["tables"]
    largest = {row["choice"]: row for row in tables["largest model"]}
    for row in largest.values():
        assert row["peak"] <= row["budget"]
    assert largest["+ both stochastic"]["parameters"] > 2 * largest["float32"]["parameters"]
    state = by(tables["training state"], "choice")
    assert state["+ state stochastic",]["optimizer"] == pytest.approx(state["float32",]["optimizer"] / 2, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_readme_holds_the_tables_of_the_results(name, load, capsys):
    results = checked(RESULTS / f"{name}.json")
    assert not results["small"] and results["versions"]["jmp-train"]
    module = load(name)
    made = load("_results").Results(name, results["measured"])
    made.tables = results["tables"]
    module.print_tables(made)
    readme = (BENCHMARKS / "README.md").read_text().splitlines()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert printed and not [line for line in printed if line not in readme]


def test_the_results_keep_the_bounds():
    traffic = checked(RESULTS / "traffic.json")["tables"]
    check_optimizer_steps(traffic["optimizer step"])
    check_mlp_steps(traffic["training step"])
    check_sums_and_products(traffic["training step"])
    deep = by(checked(RESULTS / "memory.json")["tables"]["12-layer transformer, gradients"], "policy")
    assert deep["mixed_float16",]["activations"] <= 0.60 * deep["float32",]["activations"]
    assert all(row["calls_ratio"] <= 2 for row in checked(RESULTS / "overhead.json")["tables"]["tracing models"])


@pytest.mark.parametrize("model", ["cnn", "transformer", "resnet50", "lstm"])
def test_the_results_move_the_bytes_of_flax(model):
    rows = by(checked(RESULTS / "traffic.json")["tables"]["training step"], "model", "how")
    assert rows[model, "ours"]["bytes"] <= 1.05 * rows[model, "Flax float16, DynamicScale"]["bytes"]


@pytest.mark.slow
def test_a_library_compared_with_itself_has_the_same_figures(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "compare.py"), "--before", str(BENCHMARKS.parent), "--rows", "mlp"]
    command += ["--models", "--dtypes", "float16", "--seeds", "2", "--small", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    (row,) = checked(tmp_path / "compare-small.json")["tables"]["models"]
    assert [row[f"{figure}_ratio"] for figure in ("bytes", "temporary", "error")] == [1.0] * 3
    assert row["calls_ratio"] == pytest.approx(1, abs=2e-3)  # the second trace finds some of the first in JAX's caches
    assert "float16" not in ran.stdout  # nothing rose


def test_the_tables_of_a_comparison(load):
    compare = load("compare")
    figures = {f"{figure}_{name}": 2.0 for figure in compare.ROSE for name in ("before", "now")}
    same, half = (dict.fromkeys((f"{figure}_ratio" for figure in compare.ROSE), each) for each in (1.0, 0.5))
    changed = {"bytes_now": 2.5, "bytes_ratio": 1.25, "error_ratio": None}
    rows = [{"model": "a", "dtype": "float16"} | figures | same | changed, {"model": "b"} | figures | half]
    found, *others = compare.summary(rows)
    assert found == {"figure": "bytes", "programs": 2, "least": 0.5, "median": 0.875, "greatest": 1.25}
    assert [each["programs"] for each in others] == [2, 1, 2]
    (rose,) = compare.risen(rows)
    assert rose == {"figure": "bytes", "model": "a", "dtype": "float16", "before": 2.0, "now": 2.5, "ratio": 1.25}
    assert compare.ratio(3, 2) == 1.5 and compare.ratio(None, 2) is None and compare.ratio(3, 0) is None


def test_a_comparison_needs_another_checkout(load, tmp_path):
    with pytest.raises(FileNotFoundError, match="`--before` must be a checkout of this project"):
        load("compare").library_of(tmp_path)


def test_the_readme_says_why_figures_rose(load):
    compare = load("compare")
    rows = checked(RESULTS / "compare.json")["tables"]["models"]
    rose = {row["model"] for row in compare.risen(rows) if row["figure"] != "calls"}
    _, _, readme = (BENCHMARKS / "README.md").read_text().partition("Why they rose:")
    reasons, _, _ = readme.partition("\n## ")
    assert rose and not [name for name in rose if not re.search(rf"^- .*`{name}`", reasons, re.M)]


@pytest.mark.slow
def test_every_way_takes_the_same_step(load):
    """And all but the bare one skip a batch that overflows."""
    overhead = load("overhead")
    loss, params, batch = overhead.dense_layers(2, 8, 16)
    reached = {}
    for how, make in overhead.WAYS.items():
        way = make(loss)
        state, value, step = way.init(params, {}), None, jax.jit(way.step)
        for _ in range(3):
            state, value = step(state, batch)
        reached[how] = jax.tree.map(np.asarray, state[0])
        assert value == pytest.approx(float(loss(params, {}, batch)[0]), rel=0.1)
        skipped, _ = step(state, jnp.full_like(batch, jnp.nan))
        unchanged = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), skipped[0], state[0])
        assert all(jax.tree.leaves(unchanged)) == (how != overhead.BARE), how
    for how, found in reached.items():
        check = functools.partial(np.testing.assert_allclose, atol=2e-6, err_msg=how)
        jax.tree.map(check, found, reached[overhead.BARE])


@pytest.mark.parametrize("limit", [0, 5, 8, 47, 48, 49, 1000, 4001])
@pytest.mark.parametrize("power", [0.5, 1.0, 1.7])
def test_the_largest_batch_is_found(limit, power, load):
    """Also where memory is not linear in the batch, and without compiling for every multiple of 8."""
    asked = []

    def peak(batch):
        asked.append(batch)
        return int(1000 * batch**power) + 5

    budget = 1000 * limit**power + 5
    found = load("memory").largest(peak, budget, {8: peak(8), 32: peak(32)})
    assert found == limit // 8 * 8
    assert len(asked) <= 25


def test_results_are_written_as_they_come_and_kept(tmp_path, load):
    module = load("_results")
    first = module.Results("trial", "nothing", seeds=(1, 2), out=tmp_path)
    first.add("steps", {"model": "a", "bytes": 1})
    first.add("steps", {"model": "b", "bytes": 2})
    assert not json.loads(first.path.read_text())["complete"]
    first.write()
    second = module.Results("trial", "nothing", out=tmp_path)
    second.keep(lambda table, row: row["model"] == "b")
    second.add("steps", {"model": "a", "bytes": 3})
    second.write()
    results = checked(second.path)
    assert results["tables"] == {"steps": [{"model": "b", "bytes": 2}, {"model": "a", "bytes": 3}]}
    assert results["kept"].keys() == {"command", "date", "commit"}
    small = module.Results("trial", "nothing", small=True, out=tmp_path)
    assert small.write().name == "trial-small.json" and second.path.exists()


def test_tables_are_markdown(load, capsys):
    module = load("_results")
    rows = [{"how": "ours", "bytes": 2_500_000}, {"how": "theirs", "bytes": None}]
    module.show("Steps", {"how": "", "bytes as MB": lambda value: f"{value / 1e6:.1f}"}, rows)
    assert capsys.readouterr().out.splitlines() == [
        "", "Steps", "", "| how    | MB  |", "| ------ | --: |", "| ours   | 2.5 |", "| theirs | -   |",
    ]  # fmt: skip
