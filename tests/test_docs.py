"""The pages of the documentation: their code runs, and nothing public is missing from the API pages.

`mkdocs build`, which is strict about links and names, runs in CI.
"""

import re
from pathlib import Path
from typing import Any

import pytest

import jmp_train
from jmp_train import flax_bridge

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
README = (ROOT / "README.md").read_text()


@pytest.mark.integration
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks(page):
    text, namespace = page.read_text(), {"__name__": "docs"}
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        lines = "\n" * text[: match.start(1)].count("\n")
        exec(compile(lines + match.group(1), str(page), "exec"), namespace)


def test_every_page_is_in_the_navigation_and_every_entry_a_page():
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES}


def test_sections_taken_from_the_readme_are_there():
    wanted = {name for page in PAGES for name in re.findall(r'--8<-- "README.md:([\w-]+)"', page.read_text())}
    for edge in ("start", "end"):
        assert wanted == set(re.findall(rf"<!-- --8<-- \[{edge}:([\w-]+)\] -->", README))


def test_every_public_name_is_in_the_api_pages():
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    named = re.findall(r"^::: jmp_train\.(\S+)$", text, re.MULTILINE)
    inside = {"diagnostics": jmp_train.diagnostics, "checks": jmp_train.checks, "flax_bridge": flax_bridge}
    public = [f"{module}.{name}" for module in inside for name in _public(inside[module])]
    assert sorted(named) == sorted([*_public(jmp_train), *public])


def _public(module: Any) -> list[str]:
    """What a module imports under its own name, `from ._policy import Policy as Policy`."""
    text = Path(module.__file__).read_text()
    return re.findall(r"^from \.\S+ import (?!__)(\w+) as \1$", text, re.MULTILINE)
