"""How every benchmark stores and shows its measurements: a JSON file, a table, a plot.

Decides the form of `benchmarks/results/NAME.json` and of the printed tables. Does not decide what is measured.

The file: `benchmark`, `command`, `date` (UTC), `measured` (what was measured, and where), `device`, `versions`,
`commit`, `seeds`, `small`, `complete`, and `tables`, which maps a table's name to its rows, each a dictionary. It is
rewritten after every row, so that an interrupted run leaves the rows that it had measured; `complete` is true if the
run was not interrupted. A run of some models alone takes over the rows of the other models; `kept` then holds the
command, date and commit that measured those.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "numpy", "jmp-train", "jmp", "mixed-precision-for-JAX", "jax-cuda13-plugin",
    "torch",
)  # fmt: skip

Row = dict[str, Any]
Columns = Mapping[str, str | Callable[[Any], str]]


class Results:
    """The results of one benchmark: rows in named tables, written to the file as they are added.

    Args:
      name: of the benchmark; the file is `NAME.json`, or `NAME-small.json` for a small run.
      measured: one sentence: what was measured, and where (compiled for a GPU, run on a CPU, ...).
      seeds: of everything random in it.
      small: whether this is the quick run that only shows that the benchmark works.
      out: the folder to write to.
    """

    def __init__(
        self, name: str, measured: str, *, seeds: Sequence[int] = (0,), small: bool = False, out: pathlib.Path = RESULTS
    ) -> None:
        self.stem = out / (f"{name}-small" if small else name)
        self.path = self.stem.with_name(self.stem.name + ".json")
        self.tables: dict[str, list[Row]] = {}
        self._about = {
            "benchmark": name,
            "command": _command(sys.argv),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "measured": measured,
            "device": device(),
            "versions": versions(),
            "commit": commit(),
            "seeds": list(seeds),
            "small": small,
        }

    def add(self, table: str, row: Row) -> Row:
        """Appends a row (JSON values only) to a table, prints it to standard error and writes the file."""
        self.tables.setdefault(table, []).append(row)
        print(f"{table}: " + ", ".join(_brief(name, value) for name, value in row.items()), file=sys.stderr, flush=True)
        self.write(complete=False)
        return row

    def keep(self, wanted: Callable[[str, Row], bool]) -> None:
        """Takes over those rows of the existing file for which `wanted(table, row)` is true.

        Does nothing if another version of Python or of a package wrote the file.
        """
        if not self.path.exists():
            return
        before = json.loads(self.path.read_text())
        if before["versions"] != self._about["versions"]:
            return
        for table, rows in before["tables"].items():
            if kept := [row for row in rows if wanted(table, row)]:
                self.tables[table] = kept
        if self.tables:
            self._about["kept"] = {name: before[name] for name in ("command", "date", "commit")}

    def write(self, complete: bool = True) -> pathlib.Path:
        """Writes the file and returns its path; replaces the old file at once, so that a reader sees a whole one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(json.dumps(self._about | {"complete": complete, "tables": self.tables}, indent=1) + "\n")
        partial.replace(self.path)
        return self.path

    def picture(self, table: str, draw: Callable[[Any], None], size: tuple[float, float] = (9.0, 4.5)) -> None:
        """Saves the figure that `draw(figure)` fills as `NAME-TABLE.png`, if matplotlib is installed."""
        if importlib.util.find_spec("matplotlib") is None:
            print("matplotlib is not installed: no plots", file=sys.stderr)
            return
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(f"{self.stem}-{table.replace(' ', '-')}.png", dpi=110)


def arguments(doc: str | None, argv: Sequence[str] | None = None, **more: Mapping[str, Any]) -> argparse.Namespace:
    """Reads `--small`, `--out` and a benchmark's own options: `models={"nargs": "*"}` is `--models`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a quick run that shows that the benchmark works")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the JSON file and the plots")
    for name, options in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser.parse_args(argv)


def show(title: str, columns: Columns, rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints a table: with rich on a terminal, in Markdown elsewhere.

    Args:
      title: printed above the table.
      columns: for each column the key of its values, which is also its heading, and how a value is written: a format
        such as `".1f"`, or a function. A key such as `"bytes as MB"` reads `bytes` and is headed `MB`. A value that is
        missing or None is printed as a dash.
      rows: one dictionary a row.
    """
    heads = [name.rpartition(" as ")[2] for name in columns]
    cells = [[_cell(row.get(name.partition(" as ")[0]), form) for name, form in columns.items()] for row in rows]
    if sys.stdout.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.table import Table

        made = Table(title=title, title_justify="left")
        for index, head in enumerate(heads):
            made.add_column(head, justify="left" if index == 0 else "right")
        for row in cells:
            made.add_row(*row)
        Console().print(made)
        return
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    dashes = ["-" * width if index == 0 else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    print(f"\n{title}\n")
    for row in (heads, dashes, *cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")


def _cell(value: Any, form: str | Callable[[Any], str]) -> str:
    if value is None:
        return "-"
    return form(value) if callable(form) else format(value, form)


def _command(argv: Sequence[str]) -> str:
    """The command line as from the root of a checkout, without `--out`, which does not change the results."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out")
    return " ".join(["python", f"benchmarks/{pathlib.Path(argv[0]).name}", *parser.parse_known_args(argv[1:])[1]])


def _brief(name: str, value: Any) -> str:
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"


def device() -> dict[str, Any]:
    """The devices, CPU and cores of this process."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


def _cpu() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    """The version of Python and of each package, None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit(checkout: pathlib.Path = HERE.parent) -> str | None:
    """The commit of a checkout, with `-dirty` if the library or a benchmark differs from it; None without git."""
    git = ["git", "-C", str(checkout)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "jmp_train", "benchmarks/*.py"]).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("-dirty" if changed else "")
