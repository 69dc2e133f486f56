"""The examples of autocast run, and `three_lines.py` differs in three lines."""

import difflib
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def three_lines():
    importlib.import_module("flax")
    importlib.import_module("sklearn")
    return load("three_lines")


def test_three_lines_trains_alike_in_both(three_lines):
    train_set, _ = three_lines.load_data()
    batches = list(three_lines.batches_of(train_set, 1))[:8]
    params = three_lines.model.init(jax.random.key(0), train_set[0][:1])
    wide, wide_losses = three_lines.train_in_float32(params, batches)
    low, low_losses = three_lines.train_in_float16(params, batches)
    assert jax.tree.map(lambda x: x.dtype, wide) == jax.tree.map(lambda x: x.dtype, low)
    assert [float(loss) for loss in low_losses] == pytest.approx([float(loss) for loss in wide_losses], rel=1e-2)
    # A multiple of the precision of float16, and no float32 run in disguise.
    assert low_losses[-1] != wide_losses[-1]


@pytest.mark.slow
def test_three_lines_reaches_the_same_accuracy(three_lines):
    accuracies = three_lines.main(epochs=10)
    assert min(accuracies.values()) > 95 and abs(accuracies["train_in_float32"] - accuracies["train_in_float16"]) < 1


def test_three_lines_differ(three_lines):
    functions = three_lines.train_in_float32, three_lines.train_in_float16
    wide, low = (inspect.getsource(function).splitlines() for function in functions)
    removed, added = ([line for line in difflib.ndiff(wide, low) if line.startswith(sign)] for sign in "-+")
    # Beside the name of the function and its docstring.
    assert len(removed) == len(added) == 5
    assert [line[-1] for line in added if "  # " in line] == ["1", "2", "3"]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_explain_prints_the_plan_of_a_transformer(policy, capsys):
    importlib.import_module("flax")
    report = load("explain").main(["--policy", policy, "--scope", "Block_0"])
    printed = capsys.readouterr().out
    assert printed.startswith(report.summary) and report.low_flop_share == 1
    assert "Transformer/Block_0/LayerNorm_0" in printed and "exp" in printed
    assert "assert_policy: no wide dot" in printed
    assert all(op.dtype != "float32" for op in report.operations if op.flops)
