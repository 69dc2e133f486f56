"""Does mixed precision reach float32's accuracy with unchanged hyperparameters? Trains and judges.

    python -m benchmarks.convergence                      every application, precision and seed: about two hours
    python -m benchmarks.convergence --only GAN ResNet    those whose name contains a word
    python -m benchmarks.convergence --quick              three short rows, two seeds: two minutes

Run from the root of a checkout with the `examples` extra. Runs that the file of results already has are not repeated,
so that an interrupted suite continues; runs of an application whose code has changed since are repeated. At the end it
prints tables and draws a figure of loss curves.
"""

import argparse
import pathlib
import sys

from .._results import RESULTS
from . import _report, _store
from ._application import PRECISIONS, REFERENCE, Application, Precision
from ._rows import QUICK, QUICK_PRECISIONS, applications
from ._training import gradients_lost, trainer


def main(argv: list[str] | None = None) -> _store.Store:
    """Reads the arguments, runs what is missing, prints the tables and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the short form that CI runs")
    parser.add_argument("--only", nargs="*", default=[], help="applications whose name contains one of these words")
    parser.add_argument(
        "--seeds", type=int, default=None, help="seeds of each row (default: 3, with --quick 2; float32 two more)"
    )
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--report", action="store_true", help="train nothing, show what is there")
    args = parser.parse_args(argv)

    chosen = [
        app
        for app in applications()
        if (not args.quick or app.name in QUICK) and (not args.only or any(word in app.name for word in args.only))
    ]
    if not chosen:
        parser.error(f"no application's name contains one of {args.only}: {'; '.join(a.name for a in applications())}")
    if args.seeds is not None and args.seeds < 1:
        parser.error(f"--seeds is {args.seeds} and has to be at least 1")
    precisions = [p for p in PRECISIONS if not args.quick or p.name in QUICK_PRECISIONS]
    seeds = args.seeds or (2 if args.quick else 3)
    store = _store.Store(args.out / ("convergence-quick.json" if args.quick else "convergence.json"))
    if not args.report:
        for application in chosen:
            for precision in precisions:
                _complete(store, application, precision, seeds)
    _report.show_tables(store, chosen, precisions, seeds)
    _report.draw_curves(store, chosen, precisions, store.path.with_suffix(".png"))
    return store


def _complete(store: _store.Store, application: Application, precision: Precision, seeds: int) -> None:
    missing = [seed for seed in range(precision.seeds(seeds)) if not store.has(application, precision, seed)]
    if not missing:
        return
    train = trainer(application, precision)
    for seed in missing:
        run = train(seed)
        store.add(application, precision, seed, run.record)
        print(f"{application.name}, {precision.name}, seed {seed}: {_brief(run.record)}", file=sys.stderr, flush=True)
        if precision is REFERENCE and seed == 0:
            store.add_lost(application, gradients_lost(application, run))


def _brief(record: dict) -> str:
    keys = ("metric", "skipped", "loss_scale", "seconds")
    return ", ".join(f"{key} {record[key]}" for key in keys)


if __name__ == "__main__":
    main()
