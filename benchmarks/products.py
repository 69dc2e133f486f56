"""Prints how right autocast is on the products that are no layers, beside the same layers by hand in 16 bits.

    python benchmarks/products.py [--cases rotary_512 2 narrow] [--seeds 3] [--json FILE] [--before FILE] [--marked]

Each case of `tests/product_cases.py` is a loss; its gradients' and its own relative errors against float64 are medians
over seeds. "by hand" has the layers' dots and convolutions in 16 bits and everything else in float32. A case is marked
that is not finite, whose gradient error is more than twice that by hand, or whose loss error is above 5e-3 (float16) or
1e-2 (bfloat16). `--marked` adds autocast that is told which products are layers: what a planner can reach. `--before`
shows the errors of an earlier run. Everything runs on the CPU; no figure needs a GPU.
"""

import argparse
import json
import os
import pathlib
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import jax
from _results import commit, show
from battery_tools import HALVES
from product_cases import CASES, Case, Errors, faults, low_shares, median_errors, ways

Row = dict[str, Any]


def measure(case: Case, seeds: int, marked: bool) -> Row:
    """The errors of one case in each way, the share of FLOP in 16 bits, and what is wrong."""
    start = time.perf_counter()
    found = {how: median_errors(case, how, seeds) for how in ways(marked)}
    ours, hand = low_shares(case)
    return {
        "case": case.name,
        "class": case.group,
        "note": case.note,
        "errors": {how: each._asdict() for how, each in found.items()},
        "low_share": ours,
        "hand_low_share": hand,
        "faults": {dtype: faults(found[f"mixed_{dtype}"], found[f"hand_{dtype}"], dtype) for dtype in HALVES},
        "seconds": time.perf_counter() - start,
    }


def error(row: Row | None, how: str, of: str) -> float | None:
    return row["errors"][how][of] if row and how in row["errors"] else None


def ratio(row: Row | None, how: str, dtype: str) -> float | None:
    ours, hand = error(row, f"{how}_{dtype}", "gradient"), error(row, f"hand_{dtype}", "gradient")
    return None if ours is None or hand is None else ours / hand


def line(row: Row, before: Row | None) -> Row:
    """What is shown of a row, and of the same case in an earlier run."""
    made = {"case": row["case"], "class": str(row["class"])}
    for dtype, short in zip(HALVES, ("f16", "bf16"), strict=True):
        made |= {
            f"{short} before": error(before, f"mixed_{dtype}", "gradient"),
            f"{short} ours": error(row, f"mixed_{dtype}", "gradient"),
            f"{short} by hand": error(row, f"hand_{dtype}", "gradient"),
            f"{short} ratio": ratio(row, "mixed", dtype),
            f"{short} marked": ratio(row, "marked", dtype),
            f"{short} loss before": error(before, f"mixed_{dtype}", "loss"),
            f"{short} loss": error(row, f"mixed_{dtype}", "loss"),
            f"{short} loss by hand": error(row, f"hand_{dtype}", "loss"),
            f"{short} wrong": ", ".join(row["faults"][dtype]),
        }
    share = f"{row['low_share']:.3f}/{row['hand_low_share']:.3f}"
    return made | {"FLOP in 16 bits ours/by hand": share, "note": row["note"]}


def columns(before: bool, marked: bool) -> Mapping[str, str]:
    made = {"case": "", "class": ""}
    for short in ("f16", "bf16"):
        made |= {f"{short} before": ".1e"} if before else {}
        made |= {f"{short} ours": ".1e", f"{short} by hand": ".1e", f"{short} ratio": ".3g"}
        made |= {f"{short} marked": ".2g"} if marked else {}
        made |= {f"{short} loss before": ".0e"} if before else {}
        made |= {f"{short} loss": ".0e", f"{short} loss by hand": ".0e", f"{short} wrong": ""}
    return made | {"FLOP in 16 bits ours/by hand": "", "note": ""}


def chosen(names: list[str]) -> list[Case]:
    """The cases of those names and classes; all for none."""
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
    # Infinities are what is measured.
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
    lines = [line(row, earlier.get(row["case"])) for row in rows]
    show("products: relative errors of gradients", columns(bool(before), options.marked), lines)
    marked = sum(any(row["faults"].values()) for row in rows)
    print(f"\n{marked} of {len(rows)} cases outside of the bounds, in {sum(row['seconds'] for row in rows):.0f} s")


if __name__ == "__main__":
    main()
