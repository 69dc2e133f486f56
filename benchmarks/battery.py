"""Prints costs and errors of every model of the battery under autocast, beside Flax in 16 bits and float32.

    python benchmarks/battery.py [--rows mlp transformer] [--seeds 20] [--large] [--json battery.json]

Products, sums, megabytes and temporary memory are read from modules compiled for an H200 (`.[gpu-report]`) that compute
gradients, without an optimizer. Errors are medians over seeds against float64, at the tests' size. No figure needs a
GPU.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import jax
from battery_models import BY_NAME, LARGE, ROWS, SMALL, Row, Size
from battery_tools import (
    Figures,
    abstract_example,
    gradient_function,
    median_errors,
    row_figures,
    tracing_calls,
    tracing_seconds,
)

COLUMNS = {
    "model": "{name:24s}",
    "dots low/all": "{dots_low:>4d}/{dots:<4d}",
    "convs low/all": "{convolutions_low:>4d}/{convolutions:<4d}",
    "16-bit sums ours/Flax": "{sums:>3d}/{flax_sums:<3}",
    "error ours/Flax": "{error:.2e}/{flax_error:8}",
    "MB ours/Flax/float32": "{megabytes:8.2f}/{flax_megabytes:>8}/{float32_megabytes:8.2f}",
    "temp MB ours/Flax/float32": "{temporary:8.2f}/{flax_temporary:>8}/{float32_temporary:8.2f}",
    "MB, temp MB, of those with float32 residuals": "{of_wide_megabytes:5.3f}, {of_wide_temporary:5.3f}",
    "trace ratio, of seconds and calls": "{trace_ratio:5.2f}, {call_ratio:5.2f}",
}


def low_and_all(products: tuple[tuple[str, ...], ...]) -> tuple[int, int]:
    return sum("f32" not in dtypes for dtypes in products), len(products)


def memory(made: Figures, prefix: str = "") -> dict[str, float]:
    return {f"{prefix}megabytes": made.bytes / 1e6, f"{prefix}temporary": made.temporary / 1e6}


def measure(row: Row, size: Size, seeds: int) -> dict[str, Any]:
    """Every figure of one row; those of Flax in 16 bits are None for a model that Flax's layers cannot express."""
    ours, float32 = row_figures(row, "mixed_float16", size), row_figures(row, "float32", size)
    flax = row_figures(row, "flax_float16", size) if row.flax16 else None
    args = abstract_example(row, size)
    plain = tracing_seconds(lambda: gradient_function(row, "float32", size), *args)
    cast = tracing_seconds(lambda: gradient_function(row, "mixed_float16", size), *args)
    calls = {
        how: tracing_calls(lambda how=how: gradient_function(row, how, size), *args)
        for how in ("float32", "mixed_float16")
    }
    dots_low, dots = low_and_all(ours.dots)
    convolutions_low, convolutions = low_and_all(ours.convolutions)
    counts = {"dots_low": dots_low, "dots": dots, "convolutions_low": convolutions_low, "convolutions": convolutions}
    sums = {"sums": len(ours.sixteen_bit_sums), "flax_sums": len(flax.sixteen_bit_sums) if flax else None}
    errors = {
        "errors": median_errors(row, "mixed_float16", seeds),
        "flax_errors": median_errors(row, "flax_float16", seeds) if flax else None,
    }
    nothing = {"flax_megabytes": None, "flax_temporary": None}
    bytes_moved = memory(ours) | (memory(flax, "flax_") if flax else nothing) | memory(float32, "float32_")
    wide = row_figures(row, "wide_residuals_float16", size)
    of_wide = {"of_wide_megabytes": ours.bytes / wide.bytes, "of_wide_temporary": ours.temporary / wide.temporary}
    ratios = {"trace_ratio": cast / plain, "call_ratio": calls["mixed_float16"] / calls["float32"]}
    return {"name": row.name} | counts | sums | errors | bytes_moved | of_wide | ratios


def line(figures: dict[str, Any]) -> str:
    flax = figures["flax_errors"]
    shown = figures | {"error": figures["errors"]["all"], "flax_error": f"{flax['all']:.2e}" if flax else "-"}
    for key in ("flax_megabytes", "flax_temporary", "flax_sums"):
        value = figures[key]
        shown[key] = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else value
    return " | ".join(form.format(**shown) for form in COLUMNS.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=list(BY_NAME), default=[row.name for row in ROWS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--large", action="store_true", help="compile models of a size that fills a GPU")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    print(f"jax {jax.__version__}, mixed_float16\n{' | '.join(COLUMNS)}")
    results = []
    for name in options.rows:
        results.append(measure(BY_NAME[name], LARGE if options.large else SMALL, options.seeds))
        print(line(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"jax": jax.__version__, "rows": results}, indent=1))


if __name__ == "__main__":
    main()
