"""How did a change affect every model? Compares the library of this checkout with that of another one.

    git worktree add ../before main~1
    python benchmarks/compare.py --before ../before [--rows mlp transformer] [--models transformer] [--small]

Both run in one process, on the same models and data, and are measured by the same tools. Measures the gradients of each
model of the battery and of `traffic.py`: bytes and temporary memory, read from modules compiled for an H200
(`.[gpu-report]`), and the function calls of one trace; for the battery also the error against float64, the median over
seeds, at the tests' size. Bytes and memory are exact, and both errors are of the same seeds.
"""

import importlib.util
import os
import pathlib
import statistics
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on a GPU
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import jax
import numpy as np
from _cases import CASES
from _results import Results, arguments, commit, show
from battery_models import BY_NAME, LARGE, SMALL, Row
from battery_tools import abstract_example, errors, example, figures, oracle_gradients, tracing_calls, unscaled

import jmp_train

HALVES = ("float16", "bfloat16")
# A figure is listed as risen if its ratio, now to before, is above this. Other roundings change the median of an error
# by about 1 % either way; the library that is traced second makes 0.1 % fewer calls, because of JAX's caches.
ROSE = {"bytes": 1.005, "temporary": 1.005, "error": 1.02, "calls": 1.005}


class Model(NamedTuple):
    """The gradients of a model, the shapes of their arguments and, for the battery, the row that gives the errors."""

    name: str
    grads: Callable[..., Any]
    shapes: tuple[Any, ...]
    row: Row | None


def library_of(checkout: pathlib.Path) -> ModuleType:
    """`jmp_train` of another checkout, imported under another name, which works because its imports are relative."""
    name, folder = "jmp_train_before", checkout / "jmp_train"
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    if spec is None or spec.loader is None or not folder.is_dir():
        raise FileNotFoundError(f"`--before` must be a checkout of this project, but there is no {folder}")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_battery(name: str, small: bool) -> Model:
    row, size = BY_NAME[name], SMALL if small else LARGE
    return Model(name, row.grads(size=size), abstract_example(row, size), row)


def of_traffic(name: str) -> Model:
    case = CASES[name]()
    return Model(f"{case.name} of traffic.py", jax.grad(case.loss(), has_aux=True), case.shapes(), None)


def cast(library: ModuleType, grads: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    return library.autocast(grads, library.get_policy(f"mixed_{dtype}"))


def error(library: ModuleType, row: Row, dtype: str, seeds: int) -> float:
    """The median over seeds of the relative error of all gradients against float64."""
    grads = jax.jit(cast(library, row.grads(), dtype))
    made = [
        errors(unscaled(row, grads(*example(row, seed))), oracle_gradients(row, seed))["all"] for seed in range(seeds)
    ]
    return float(np.median(made))


def measure(library: ModuleType, model: Model, dtype: str, seeds: int) -> dict[str, float | None]:
    compiled = figures(cast(library, model.grads, dtype), *model.shapes)
    return {
        "bytes": compiled.bytes,
        "temporary": compiled.temporary,
        "calls": tracing_calls(lambda: cast(library, model.grads, dtype), *model.shapes),
        "error": error(library, model.row, dtype, seeds) if model.row else None,
    }


def ratio(now: float | None, before: float | None) -> float | None:
    return now / before if now is not None and before else None


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How the ratios of each figure, now to before, are distributed over the models and dtypes."""
    made = []
    for figure in ROSE:
        ratios = [row[f"{figure}_ratio"] for row in rows if row[f"{figure}_ratio"] is not None]
        if ratios:
            found = {"least": min(ratios), "median": statistics.median(ratios), "greatest": max(ratios)}
            made.append({"figure": figure, "programs": len(ratios)} | found)
    return made


def risen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures that rose by more than `ROSE` allows, the largest ratios first."""
    made = []
    for figure, least in ROSE.items():
        for row in sorted(rows, key=lambda row: -(row[f"{figure}_ratio"] or 0)):
            if (row[f"{figure}_ratio"] or 0) >= least:
                found = {name: row[f"{figure}_{name}"] for name in ("before", "now", "ratio")}
                made.append({"figure": figure, "model": row["model"], "dtype": row["dtype"]} | found)
    return made


def print_tables(results: Results) -> None:
    ratios = dict.fromkeys(("least", "median", "greatest"), ".3f")
    show("now, of what was before", {"figure": "", "programs": "d"} | ratios, summary(results.tables["models"]))
    columns = {"figure": "", "model": "", "dtype": "", "before": ".4g", "now": ".4g", "ratio": ".3f"}
    show("what rose", columns, risen(results.tables["models"]))


def main() -> None:
    options = arguments(
        __doc__,
        before={"required": True, "type": pathlib.Path, "help": "another checkout of this project"},
        rows={"nargs": "*", "choices": list(BY_NAME), "default": list(BY_NAME), "help": "of the battery"},
        models={"nargs": "*", "choices": list(CASES), "default": list(CASES), "help": "of traffic.py"},
        dtypes={"nargs": "*", "choices": HALVES, "default": HALVES},
        seeds={"type": int, "default": 5},
    )
    results = Results(
        "compare",
        f"gradients by the library at {commit(options.before)} and at this commit, compiled for an NVIDIA H200",
        seeds=range(options.seeds),
        small=options.small,
        out=options.out,
    )
    before = library_of(options.before)
    models = [lambda name=name: of_battery(name, options.small) for name in options.rows]
    models += [lambda name=name: of_traffic(name) for name in options.models]
    for make in models:
        model = make()
        for dtype in options.dtypes:
            was, now = (measure(library, model, dtype, options.seeds) for library in (before, jmp_train))
            row: dict[str, Any] = {"model": model.name, "dtype": dtype}
            for figure in was:
                row |= {f"{figure}_before": was[figure], f"{figure}_now": now[figure]}
                row[f"{figure}_ratio"] = ratio(now[figure], was[figure])
            results.add("models", row)
    print_tables(results)
    results.write()


if __name__ == "__main__":
    main()
