"""Every Python block of the README runs, in order and in one namespace, as a reader would type it."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()
COMMANDS = (
    'pip install -e ".[examples]" && python examples/digits.py',
    'pip install -e ".[test]" && pytest',
)


def blocks():
    """(first line, code) of each block marked `python`."""
    for match in re.finditer(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
        yield TEXT[: match.start(1)].count("\n") + 1, match.group(1)


def test_blocks():
    found = list(blocks())
    assert len(found) >= 5
    # Dataclasses and Flax modules look up the module that they say they are in.
    namespace: dict[str, Any] = {"__name__": "readme"}
    for line, code in found:
        exec(compile("\n" * (line - 1) + code, str(README), "exec"), namespace)
    assert jax.numpy.isfinite(namespace["loss"])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_two_commands_stand_as_written(command):
    assert f"\n```\n{command}\n```\n" in TEXT


def test_commands_name_extras_and_files_that_exist():
    metadata = (README.parent / "pyproject.toml").read_text()
    for extra in set(re.findall(r'pip install -e "\.\[([\w-]+)\]"', TEXT)):
        assert re.search(rf"^{extra} = \[", metadata, re.MULTILINE), extra
    for path in set(re.findall(r"(?:examples/\w+\.py|\.ci/run|CHANGELOG\.md)", TEXT)):
        assert (README.parent / path).exists(), path
