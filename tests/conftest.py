"""Eight simulated CPU devices for every test; 64-bit types stay off, as in most users' programs."""

import os
from pathlib import Path

import lengths

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)


def pytest_terminal_summary(terminalreporter):
    for line in lengths.summary(Path(__file__).parents[1] / "jmp_train"):
        terminalreporter.write_line(f"long: {line}")
