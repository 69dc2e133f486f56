"""The character model at a size that takes seconds: it learns, resumes bit for bit, and writes."""

import csv
import shutil

import jax
import pytest
from comparisons import assert_same_bits
from test_examples import load

pytestmark = pytest.mark.slow


def rows(directory):
    with open(directory / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_char_transformer(tmp_path, capsys):
    example = load("char_transformer")
    arguments = ["--tiny", "--steps", "30", "--every", "20", "--write", "50", "--out", str(tmp_path)]
    whole = example.main(arguments)
    assert len(whole["text"]) == 50 and whole["text"] in capsys.readouterr().out
    assert whole["losses"][-1][1] < whole["losses"][0][1]
    assert [row["micro_batch"] for row in rows(tmp_path)] == ["20", "40", "60"]

    # As if the process had been killed before the last two checkpoints, in the middle of an accumulation.
    shutil.rmtree(tmp_path / "checkpoints" / "60")
    resumed = example.main([*arguments, "--resume"])
    assert_same_bits(*(jax.tree.leaves(run["state"]) for run in (resumed, whole)))
    assert resumed["text"] == whole["text"] and resumed["losses"] == whole["losses"][2:]
    assert rows(tmp_path)[-1] == rows(tmp_path)[-2]


def test_nothing_to_resume(tmp_path):
    with pytest.raises(SystemExit, match="start without --resume"):
        load("char_transformer").main(["--tiny", "--resume", "--out", str(tmp_path)])
