"""Two compiled programs side by side.

Decides how two sets of figures are set against each other. Does not decide the figures; see `_report.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..._text import columns, megabytes


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `GPUReport.compare` returns; `str` is a table.

    Attributes:
      names: what the two reports are called.
      rows: `(figure, of the first, of the second)`.
    """

    names: tuple[str, str]
    rows: tuple[tuple[str, float, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns `{figure: {"first": ..., "second": ...}}` and the names."""
        figures = {name: {"first": first, "second": second} for name, first, second in self.rows}
        return {"names": list(self.names), "figures": figures}

    def __str__(self) -> str:
        rows = [
            (name, _text(name, first), _text(name, second), f"{second / first:.3f}" if first else "")
            for name, first, second in self.rows
        ]
        return columns(("", *self.names, "second / first"), rows)


def _text(name: str, value: float) -> str:
    if "bytes" in name or "memory" in name:
        return megabytes(int(value))
    if "share" in name:
        return f"{value:.1%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def compare(names: tuple[str, str], first: Mapping[str, float], second: Mapping[str, float]) -> Comparison:
    """Sets two mappings with the same keys side by side."""
    return Comparison(names, tuple((name, first[name], second[name]) for name in first))
