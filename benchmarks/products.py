"""Prints autocast's errors on programs with products that are not layers, beside mixed precision by hand.

    python benchmarks/products.py [--cases rotary_512 2 narrow] [--seeds 3] [--json FILE] [--before FILE] [--marked]

Each case of `tests/product_cases.py` is a loss; the relative errors of the loss and of its gradients against float64
are medians over seeds. "by hand" computes the layers, biases included, in 16 bits and everything else in float32.
A case is marked if a value is not finite, if its gradient error is more than twice that by hand, or if its loss error
is above 5e-3 (float16) or 1e-2 (bfloat16). `--marked` adds autocast that is told which products are layers, the best
that a planner could reach. `--before` adds the errors of an earlier run. Everything runs on the CPU; no figure needs a
GPU.
"""

import argparse
import json
import os
import pathlib
import sys
import time
import warnings
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import jax
from _results import commit, show
from battery_tools import HALVES
from product_cases import CASES, Case, faults, forget, low_shares, median_errors, ways

Row = dict[str, Any]


def measure(case: Case, seeds: int, marked: bool) -> Row:
    """The errors of one case in each way, the share of FLOP in 16 bits, and what is wrong."""
    start = time.process_time()
    found = {how: median_errors(case, how, seeds) for how in ways(marked)}
    ours, hand = low_shares(case)
    forget()
    return {
        "case": case.name,
        "class": case.group,
        "note": case.note,
        "errors": {how: each._asdict() for how, each in found.items()},
        "low_share": ours,
        "hand_low_share": hand,
        "faults": {dtype: faults(found[f"mixed_{dtype}"], found[f"hand_{dtype}"], dtype) for dtype in HALVES},
        "seconds": time.process_time() - start,
    }


def error(row: Row | None, how: str, of: str) -> float | None:
    return row["errors"][how][of] if row and how in row["errors"] else None


def ratio(row: Row | None, how: str, dtype: str) -> float | None:
    ours, hand = error(row, f"{how}_{dtype}", "gradient"), error(row, f"hand_{dtype}", "gradient")
    return None if ours is None or hand is None else ours / hand


def line(row: Row, before: Row | None, dtype: str) -> Row:
    """The printed line of a row in one dtype, with the errors of the same case in an earlier run."""
    ours, hand = f"mixed_{dtype}", f"hand_{dtype}"
    return {
        "case": row["case"],
        "class": str(row["class"]),
        "before": error(before, ours, "gradient"),
        "ours": error(row, ours, "gradient"),
        "by hand": error(row, hand, "gradient"),
        "ratio": ratio(row, "mixed", dtype),
        "marked": ratio(row, "marked", dtype),
        "loss before": error(before, ours, "loss"),
        "loss": error(row, ours, "loss"),
        "loss by hand": error(row, hand, "loss"),
        "outside": ", ".join(row["faults"][dtype]),
        "16-bit FLOP": row["low_share"],
        "16-bit FLOP by hand": row["hand_low_share"],
        "note": row["note"],
    }


COLUMNS = {
    "case": "",
    "class": "",
    "before": ".1e",
    "ours": ".1e",
    "by hand": ".1e",
    "ratio": ".3g",
    "marked as ratio, marked": ".2g",
    "loss before": ".0e",
    "loss": ".0e",
    "loss by hand": ".0e",
    "16-bit FLOP": ".3f",
    "16-bit FLOP by hand as by hand": ".3f",
    "outside": "",
    "note": "",
}


def chosen(names: list[str]) -> list[Case]:
    """The cases of these names and classes; all cases if there are none."""
    unknown = set(names) - {case.name for case in CASES} - {str(case.group) for case in CASES}
    if unknown:
        raise SystemExit(
            f"`--cases` names {sorted(unknown)}; use names, or classes (1 to 7, narrow), of product_cases."
        )
    return [case for case in CASES if not names or case.name in names or str(case.group) in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[], metavar="NAME", help="names of cases, or classes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--marked", action="store_true", help="also measure autocast that is told the layers")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--before", type=pathlib.Path, help="the JSON file of an earlier run")
    options = parser.parse_args()
    # Overflows are among the results, so that their warnings are suppressed.
    warnings.filterwarnings("ignore", "overflow encountered", RuntimeWarning)
    before = json.loads(options.before.read_text())["rows"] if options.before else []
    earlier = {row["case"]: row for row in before}
    rows = []
    for case in chosen(options.cases):
        rows.append(measure(case, options.seeds, options.marked))
        wrong = {dtype: found for dtype, found in rows[-1]["faults"].items() if found}
        print(f"{case.name}: {rows[-1]['seconds']:.1f} s {wrong or ''}", file=sys.stderr, flush=True)
        if options.json:
            found = {"jax": jax.__version__, "commit": commit(), "seeds": options.seeds, "rows": rows}
            options.json.write_text(json.dumps(found, indent=1))
    hidden = ({"before", "loss before"} if not before else set()) | ({"marked"} if not options.marked else set())
    columns = {name: form for name, form in COLUMNS.items() if name.partition(" as ")[0] not in hidden}
    for dtype in HALVES:
        show(f"{dtype}: relative errors", columns, [line(row, earlier.get(row["case"]), dtype) for row in rows])
    marked = sum(any(row["faults"].values()) for row in rows)
    seconds = sum(row["seconds"] for row in rows)
    print(f"\n{marked} of {len(rows)} cases outside of the bounds; {seconds:.0f} s of processor time")


if __name__ == "__main__":
    main()
