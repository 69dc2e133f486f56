"""The examples at a size that takes seconds: they run, and print and return what their documentation says."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

import jmp_train as jmp
from jmp_train import diagnostics

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_digits(tmp_path, capsys):
    runs = load("digits").main(["--epochs", "1", "--plot", str(tmp_path / "curves.png")])
    (run,) = runs["mixed_float16, scaled"]
    assert run["losses"][-5:].mean() < run["losses"][:5].mean()
    assert run["test_accuracy"] > 50
    assert run["scales"].dtype == np.float32 and run["scales"][0] == 2.0**15
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "mixed_float16, scaled" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["float32", "bfloat16", "c=bf16,o=f32,@BatchNorm*=f32"])
def test_digits_with_other_policies(policy, tmp_path):
    runs = load("digits").main(
        ["--policy", policy, "--epochs", "1", "--batch-size", "256", "--plot", str(tmp_path / "curves.png")]
    )
    (run,) = runs[policy]
    assert np.all(run["scales"] == 1)
    assert np.all(np.isfinite(run["losses"]))


def test_digits_keeps_statistics_on_an_overflow():
    """A batch with an infinite pixel is skipped, and nothing of it remains."""
    digits = load("digits")
    images, _, labels, _ = digits.load_data(0)
    state, train_step, _ = digits.make_training(jmp.get_policy("mixed_float16"), True, 10, 0)
    images = images[:64].copy()
    images[0, 0, 0, 0] = np.inf
    after, metrics = train_step(state, images, labels[:64], jax.random.key(0))
    assert not metrics["grads_finite"] and metrics["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, after.batch_stats, state.batch_stats)


@pytest.mark.slow
def test_diagnose(tmp_path, capsys):
    results = load("diagnose").main(["--steps", "6", "--stride", "8", "--out", str(tmp_path)])
    assert results["found"].verdict is diagnostics.Verdict.KEEP_FLOAT32
    assert results["collapsed"]["skipped_steps"][-1] == 6 and results["held"]["skipped_steps"][-1] == 0
    assert results["held"]["loss"][-1] < results["held"]["loss"][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exponents.png", "loss_scale.png"]
    assert 'with_scopes({"Wines/encoder": "float32"})' in capsys.readouterr().out


def test_data_parallel_routes_agree_on_a_skip():
    results = load("data_parallel").main(["--steps", "4", "--overflow-at", "1"])
    one = results.pop("one device")
    assert len(results) == 3 and np.isfinite(one["losses"]).tolist() == [True, False, True, True]
    for result in results.values():
        np.testing.assert_allclose(result["losses"][2:], one["losses"][2:], rtol=1e-3)
        assert result["skipped_steps"] == one["skipped_steps"] == 1
        assert result["loss_scale"] == one["loss_scale"] == 2.0**14


def test_underflow(tmp_path, capsys):
    gradients, updates = load("underflow").main(["--steps", "2", "2", "--stride", "8", "--out", str(tmp_path)])
    assert len(gradients) == 3 and len(updates) == 5
    assert len(list(tmp_path.glob("*.png"))) == 2
    assert "Gradients that float16 cannot hold" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_well")
def test_digits_is_as_accurate_as_float32(tmp_path):
    digits = load("digits")
    rows = [("float32", False), ("mixed_bfloat16", False), ("mixed_float16", True)]
    results = digits.run_all(rows, seeds=3, epochs=20, batch_size=32)
    accuracy = {title: np.mean([run["test_accuracy"] for run in runs]) for title, runs in results.items()}
    assert accuracy["float32"] > 97
    for title in ("mixed_bfloat16", "mixed_float16, scaled"):
        assert accuracy[title] >= accuracy["float32"] - 0.5, accuracy


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_well")
def test_underflow_stops_learning_and_scaling_cures_it():
    underflow = load("underflow")
    runs = underflow.experiment_gradients(steps=50, stride=1)
    loss = {title: run["loss"][-8:].mean() for title, run in runs.items()}
    assert loss["mixed_float16, unscaled"] > 1.6 * loss["float32"], loss
    assert loss["mixed_float16, dynamic scale"] < 1.15 * loss["float32"], loss
    assert runs["mixed_float16, unscaled"]["zeros"][-8:].mean() > 0.8
    assert runs["mixed_float16, dynamic scale"]["zeros"][-8:].mean() < 0.05


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_well")
def test_updates_are_lost_and_masters_and_stochastic_rounding_cure_it():
    runs = load("underflow").experiment_updates(steps=150, stride=1)
    loss = {title: run["loss"][-15:].mean() for title, run in runs.items()}
    assert loss["bfloat16 parameters"] > 1.3 * loss["float32 parameters"], loss
    for title in ("with float32 masters", "with stochastic rounding", "with stochastic rounding, state too"):
        assert loss[title] < 1.1 * loss["float32 parameters"], loss
