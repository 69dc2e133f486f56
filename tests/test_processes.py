"""`examples/multihost.py` in several processes that share nothing but a loopback address."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "multihost.py"
LINE = re.compile(r"loss ([\d.]+) -> ([\d.]+), scale (\d+), (\d+) skipped, sum of parameters (-?[\d.]+)")


def run(processes):
    """The report of each process: first and last loss, scale, skipped steps and a sum of the parameters."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(SCRIPT), "--steps", "8", "--overflow-at", "3"]
    ranks = [{"RANK": str(rank), "WORLD_SIZE": str(processes)} for rank in range(processes)]
    started = [
        subprocess.Popen(command, env=env | rank, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in ranks
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [tuple(map(float, found.groups())) for out, _ in outputs if (found := LINE.search(out))]


@pytest.mark.slow
def test_two_and_four_processes_train_as_one():
    (alone,) = run(1)
    for processes in (2, 4):
        reports = run(processes)
        assert len(reports) == processes and len(set(reports)) == 1, reports
        assert reports[0] == pytest.approx(alone, rel=1e-3)
        assert reports[0][2:4] == alone[2:4] == (16384, 1)  # one overflow, in the last process: one skip in all
