"""The file of results, `convergence.json`: rewritten after each run, so that an interrupted suite continues from there.

Decides when a stored run is still valid: for the same application, precision and seed, and the same source of the
application.
"""

import datetime
import hashlib
import inspect
import json
import pathlib
import re
import sys
from typing import Any

from .._results import commit, device, versions
from ._application import Application, Precision


class Store:
    """Runs by application, precision and seed.

    The file has `about` (date, device, versions and commit of the last run) and `applications`: for each its `source`
    (a hash), `metric`, `steps`, `gradients_lost` (see `_training.gradients_lost`) and `runs`: by precision, by seed.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"applications": {}}

    def has(self, application: Application, precision: Precision, seed: int) -> bool:
        """Whether the file has this run, of the application's present source."""
        return seed < len(self.runs(application, precision))

    def runs(self, application: Application, precision: Precision) -> list[Any]:
        """The runs of one row, by seed."""
        return self._kept(application).get("runs", {}).get(precision.name, [])

    def lost(self, application: Application) -> list[dict[str, float]]:
        """The stored results of `gradients_lost`, one for each player."""
        return self._kept(application).get("gradients_lost", [])

    def add(self, application: Application, precision: Precision, seed: int, record: dict[str, Any]) -> None:
        """Stores a run as the next seed of its row."""
        runs = self._of(application)["runs"].setdefault(precision.name, [])
        assert len(runs) == seed
        runs.append(record)
        self._write()

    def add_lost(self, application: Application, lost: list[dict[str, float]]) -> None:
        """Stores the results of `gradients_lost`."""
        self._of(application)["gradients_lost"] = lost
        self._write()

    def _kept(self, application: Application) -> dict[str, Any]:
        """The file's entry for the application's present source; empty if there is none."""
        kept = self.content["applications"].get(application.name, {})
        return kept if kept.get("source") == source(application) else {}

    def _of(self, application: Application) -> dict[str, Any]:
        kept = self._kept(application)
        if not kept:
            kept = {
                "source": source(application),
                "metric": application.metric,
                "steps": application.steps,
                "gradients_lost": [],
                "runs": {},
            }
            self.content["applications"][application.name] = kept
        return kept

    def _write(self) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.content["about"] = {"date": now, "device": device(), "versions": versions(), "commit": commit()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        text = json.dumps(self.content, indent=1)
        partial.write_text(re.sub(r"\[[^\[\]{}]*\]", _in_one_line, text) + "\n")
        partial.replace(self.path)


def _in_one_line(found: re.Match[str]) -> str:
    """A list of numbers, a run's losses, in one line instead of a hundred."""
    return " ".join(found.group().split())


def source(application: Application) -> str:
    """A hash of the file that defines the application."""
    return hashlib.sha256(inspect.getsource(sys.modules[application.evaluate.__module__]).encode()).hexdigest()[:12]
