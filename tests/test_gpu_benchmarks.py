"""The benchmarks that need a GPU: their models are the published ones, and the scripts run, here at tiny sizes."""

import importlib
import json
import math
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import models
from jmp_train import diagnostics

pytestmark = pytest.mark.integration

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"

# As torchvision, Hugging Face (BertForMaskedLM of bert-base-uncased, gpt2) and Zaremba et al. (66 million) have them.
PUBLISHED = {
    "resnet50": ({}, 25_557_032),
    "vgg19": ({}, 143_667_240),
    "densenet121": ({}, 7_978_856),
    "bert_base": ({"vocabulary": 30522}, 109_514_298),
    "lstm": ({"width": 1500}, 66_022_000),
    "gpt2": ({"vocabulary": 50257}, 124_439_808),
    "gpt2_fused": ({"vocabulary": 50257}, 124_439_808),
}


@pytest.mark.parametrize("name", models.MAKERS)
def test_models_have_the_published_number_of_parameters(name):
    sizes, published = PUBLISHED[name]
    params, _ = jax.eval_shape(models.make(name, **sizes).init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == published


@pytest.mark.parametrize("name", ["vgg19", "bert_base", "gpt2", "lstm"])
def test_dimensions_are_multiples_of_8(name):
    """All dimensions of every weight, except the three colours of an image."""
    params, _ = jax.eval_shape(models.make(name).init, jax.random.key(0))
    wide = [leaf.shape for leaf in jax.tree.leaves(params) if len(leaf.shape) > 1]
    odd = {dim for shape in wide for dim in shape[-2:] if dim % 8}
    assert odd <= ({3} if name == "vgg19" else {2, 12})  # segments, heads


def test_the_masked_loss_counts_only_what_is_to_be_guessed():
    workload = models.make("bert_base", tiny=True)
    batch = workload.batch()
    outputs = np.random.default_rng(1).normal(size=(4, 16, 64)).astype(np.float32)
    logs = np.log(np.exp(outputs.astype(np.float64)).sum(-1))
    chosen = np.take_along_axis(outputs, batch["labels"][..., None], -1)[..., 0]
    masked = batch["weights"] > 0
    assert 0 < masked.sum() < masked.size
    np.testing.assert_allclose(workload.loss(jnp.asarray(outputs), batch), (logs - chosen)[masked].mean(), rtol=1e-5)


def run(script, out, *options):
    """The tables of a script's small run."""
    env = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--small", "--out", str(out), *options]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads((out / f"{script}-small.json").read_text())
    assert found["complete"] and found["small"]
    return found["tables"], done.stdout


def left_out(rows):
    return {row["left_out"] for row in rows if row.get("left_out")} - {"torch is not installed"}


@pytest.mark.slow
def test_throughput_runs(tmp_path):
    cases = ["mixed_float16", "torch bfloat16"]  # torch on a CPU has no float16 LSTM
    tables, shown = run("throughput", tmp_path, "--models", *models.MAKERS, "--cases", *cases, "--seconds", "0.01")
    rows = tables["throughput"]
    assert not left_out(rows) and len(rows) == len(cases) * len(models.MAKERS)
    ours = [row for row in rows if row["case"] == "mixed_float16"]
    assert all(row["samples_per_second"] > 0 and row["peak_bytes"] > 0 for row in ours)
    assert all(math.isfinite(row["last_loss"]) and row["first_loss"] > 0 for row in ours)
    assert "densenet121" in shown and (tmp_path / "throughput-small-throughput.png").exists()


@pytest.mark.slow
def test_throughput_knows_every_case(tmp_path):
    tables, _ = run("throughput", tmp_path, "--models", "gpt2", "--cases", "[!t]*", "tensor*", "--seconds", "0.01")
    rows = {row["case"]: row for row in tables["throughput"]}
    assert not left_out(rows.values())
    assert set(rows) == {
        "float32", "tensorfloat32", "mixed_bfloat16", "mixed_float16", "flax bfloat16", "flax float16"
    }  # fmt: skip
    assert rows["float32"]["speedup"] == 1 and rows["flax float16"]["speedup"] > 0
    first = [row["first_loss"] for row in rows.values()]
    assert max(first) - min(first) < 2e-3 * min(first)  # one model, one batch


@pytest.mark.slow
def test_throughput_stops_in_time_and_says_so(tmp_path):
    tables, _ = run("throughput", tmp_path, "--models", "lstm", "--minutes", "0")
    assert left_out(tables["throughput"]) == {"no time is left"}


@pytest.mark.slow
def test_loss_scaling_runs(tmp_path):
    tables, _ = run("loss_scaling", tmp_path, "--parameters", "lstm", "--seconds", "0.01")
    rows = tables["loss scaling"]
    assert not left_out(rows)
    here = {row["case"]: row for row in rows if "step_seconds" in row}
    assert {"bare", "ours", "flax DynamicScale", "by hand, lax.cond"} <= set(here)
    assert all(row["skipped_seconds"] > 0 for case, row in here.items() if not case.endswith("bare"))
    assert (tmp_path / "loss_scaling-small-loss-scaling.png").exists()


@pytest.mark.slow
def test_attention_runs(tmp_path):
    tables, _ = run("attention", tmp_path)
    assert all(0 < row["ours"] < 1e-2 for row in tables["errors"]) and len(tables["errors"]) == 24
    assert all(row["ours seconds"] > 0 for row in tables["times"]) and len(tables["times"]) == 14


def milliseconds(digits):
    return lambda value: f"{value * 1e3:.{digits}f}"


STEPS = {
    "model": "", "case": "", "batch_size as batch": "d", "samples_per_second as samples/s": ",.1f", "spread": ".1%",
    "step_seconds as step ms": milliseconds(2), "kernel_seconds as kernels ms": milliseconds(2),
    "peak_bytes as peak GB": lambda value: f"{value / 1e9:.1f}",
}  # fmt: skip
KERNELS = {"case": "", "kernels": "", "seconds as ms": milliseconds(1), "launches": "d"}


@pytest.mark.parametrize(
    "name, table, columns",
    [
        *(
            (f"throughput-{name}", "throughput", lambda: importlib.import_module("throughput").COLUMNS)
            for name in ("resnet50", "resnet50-float32", "vgg19", "gpt2_fused", "densenet121")
        ),
        ("throughput-profile", "steps", lambda: STEPS),
        ("throughput-profile", "kernels", lambda: KERNELS),
        ("attention", "errors", lambda: importlib.import_module("attention").ERRORS),
        ("attention-times", "times", lambda: importlib.import_module("attention").TIMES),
    ],
)
def test_the_readme_holds_what_a_gpu_measured(name, table, columns, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    results = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    assert results["device"]["platform"] == "gpu" and not results["small"]
    importlib.import_module("_results").show(name, columns(), results["tables"][table])
    readme = (BENCHMARKS / "README.md").read_text().splitlines()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(printed) > 2 and not [line for line in printed if line not in readme]


def test_the_module_that_ran_is_the_one_that_gpu_report_compiles():
    rows = json.loads((BENCHMARKS / "results" / "throughput-profile.json").read_text())["tables"]["modules"]
    ran, compiled = (row for row in rows if (row["model"], row["case"]) == ("resnet50", "mixed_float16"))
    assert (ran["bytes"], ran["launches"]) == (compiled["bytes"], compiled["launches"])


@pytest.mark.slow
def test_matmul_runs(tmp_path):
    tables, _ = run("matmul", tmp_path)
    assert not left_out(tables["programs"]) and all(row["bytes"] > 0 for row in tables["programs"])
    assert all("ours" in row for row in tables["dots"])
    assert [row["predicted"] for row in tables["predictions"]] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["bare", "ours", "optax.apply_if_finite"])
def test_many_steps_of_the_optimizer_in_one_program_do_all_of_each(case, monkeypatch):
    """Checking and unscaling stay in the loop, although the gradients are the same in all steps."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    loss_scaling = importlib.import_module("loss_scaling")
    shapes, step = loss_scaling.parameters("resnet50", small=True), loss_scaling.CASES[case]()
    state = jax.eval_shape(lambda: step.init(loss_scaling.random_like(shapes, 0), {}))
    one, many = (
        diagnostics.gpu_report(jax.jit(fn, donate_argnums=0))(state, shapes)
        for fn in (step.step, loss_scaling.many(step.step))
    )
    assert one.bytes < many.bytes / loss_scaling.STEPS < 1.001 * one.bytes
