"""Where a peer's compiled step needs less than this library's, and why.

Decides which rows of `traffic.py` are compared with which peers, and holds the reasons for the known differences, which
were found by reading the compiled modules. Which rows need more than a peer is computed from the results.
"""

import itertools
from collections.abc import Iterator

from _cases import CASES
from _results import Results, Row

# For each of our rows, the beginnings of the names of those peers' rows that do the same work.
SCALED = ("by hand", "Flax float16, DynamicScale", "Flax float16, apply_if_finite", "jmp", "mpx")
PEERS = {
    "ours": (*SCALED, "Flax DynamicScale", "optax"),
    "clipping, ours": ("clipping, Flax",),
    "ours, mixed_bfloat16, no scale": ("Flax bfloat16",),
}
FIGURES = ("bytes", "kernels", "copies", "temporary")

BOOKKEEPING = "which leaf overflowed is kept for `overflow_report`: a few kernels in all, none a leaf"
FLOAT32_GRADIENTS = "weights' gradients leave their products in float32 (`reduce_dtype`); with float16 it is less"
OVER_STEPS = "a weight's gradient is summed over the steps in float32, by hand in float16"
WHY = {
    ("mlp optimizer", "kernels"): BOOKKEEPING,
    ("mlp", "kernels"): BOOKKEEPING,
    ("cnn", "kernels"): BOOKKEEPING,
    ("mlp", "bytes"): FLOAT32_GRADIENTS,
    ("transformer", "copies"): "one layer norm's scale, 6 kB, which is updated in place while it is still to be read",
    ("lstm", "bytes"): OVER_STEPS,
}


def by_model(results: Results, table: str) -> dict[str, list[Row]]:
    """The rows of a table, by model in the order of `CASES`."""
    rows = sorted(results.tables.get(table, []), key=lambda row: list(CASES).index(row["model"]))
    return {name: list(group) for name, group in itertools.groupby(rows, lambda row: row["model"])}


def behind(results: Results) -> list[Row]:
    """One row for each of our rows and each figure in which the best peer is better by more than 1 %."""
    found = []
    for table, suffix in (("optimizer step", " optimizer"), ("training step", "")):
        for name, rows in by_model(results, table).items():
            for mine, peers in _compared(rows):
                for figure in FIGURES:
                    best = min(peers, key=lambda row: row[figure])
                    if mine[figure] > 1.01 * best[figure] and _counts(mine, figure):
                        how = ", ".join([mine["how"], *([mine["gradients"]] if "gradients" in mine else [])])
                        found.append({"model": name + suffix, "how": how, "figure": figure, "ours": mine[figure]})
                        found[-1] |= {"peer": best["how"], "theirs": best[figure], "sums": best["sixteen_bit_sums"]}
                        found[-1]["why"] = WHY.get((name + suffix, figure), "not explained")
    return found


def _compared(rows: list[Row]) -> Iterator[tuple[Row, list[Row]]]:
    for mine in (row for row in rows if row["how"] in PEERS):
        same = (row for row in rows if row.get("gradients") == mine.get("gradients"))
        if peers := [row for row in same if row["how"].startswith(PEERS[mine["how"]])]:
            yield mine, peers


def _counts(row: Row, figure: str) -> bool:
    """Whether a figure is large enough to report: temporary memory below 1 % of the peak is not."""
    return figure != "temporary" or row[figure] > 0.01 * row["peak"]
