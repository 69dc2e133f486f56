"""Prints what autocast costs in bytes, memory and tracing time, each figure beside the same step written by hand.

    python benchmarks/autocast_bounds.py [--json bounds.json]

Compiled for an H200 (`.[gpu-report]`); no figure needs a GPU. The same figures are bounded in
`tests/test_gpu_autocast.py`.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
from autocast_references import (
    DEEP,
    FILLING,
    by_hand_loss,
    flax_state,
    flax_step,
    mlp_arguments,
    mlp_loss,
    our_state,
    our_step,
    plain_state,
    plain_step,
)
from battery_models import BY_NAME
from battery_tools import abstract_example, figures, gradient_function, tracing_seconds

from jmp_train import get_policy


def show(results: dict[str, Any], name: str, fn, *args, **options) -> None:
    made = figures(fn, *args, **options)
    results[name] = {
        "megabytes": made.bytes / 1e6,
        "temporary": made.temporary / 1e6,
        "sixteen_bit_sums": len(made.sixteen_bit_sums),
        "wide_products": len(made.wide_products),
    }
    print(f"{name:44s}" + "".join(f"{value:12.1f}" for value in results[name].values()), flush=True)


def mlp_steps(results: dict[str, Any]) -> None:
    params, batch = mlp_arguments()
    donated = {"donate_argnums": 0}
    show(results, "mlp float32 without a scale", plain_step(mlp_loss()), plain_state(params), batch, **donated)
    show(results, "mlp float32 DynamicScale", flax_step(mlp_loss()), flax_state(params), batch, **donated)
    show(results, "mlp Flax float16", flax_step(mlp_loss(jnp.float16)), flax_state(params), batch, **donated)
    for dtype in ("float16", "float32"):
        by_hand = by_hand_loss(jnp.float16, jnp.dtype(dtype))
        show(results, f"mlp by hand, reduce {dtype}", flax_step(by_hand), flax_state(params), batch, **donated)
        policy = get_policy("mixed_float16").replace(reduce_dtype=dtype)
        show(results, f"mlp ours, reduce {dtype}", our_step(mlp_loss(), policy), our_state(params), batch, **donated)


def model_steps(results: dict[str, Any]) -> None:
    donated = {"donate_argnums": 0}
    for name in ("cnn_groupnorm", "transformer"):
        row = BY_NAME[name]
        params, batch = abstract_example(row, FILLING)
        float32, float16 = row.loss(None, FILLING), row.loss(jnp.float16, FILLING)
        show(results, f"{name} float32", plain_step(float32), plain_state(params), batch, **donated)
        show(results, f"{name} Flax float16", flax_step(float16), flax_state(params), batch, **donated)
        ours = our_step(float32, get_policy("mixed_float16"))
        show(results, f"{name} ours", ours, our_state(params), batch, **donated)


def deep_memory(results: dict[str, Any]) -> None:
    row = BY_NAME["transformer"]
    args = abstract_example(row, DEEP)
    for how in ("float32", "flax_float16", "mixed_float16"):
        show(results, f"12-layer transformer, {how}", gradient_function(row, how, DEEP), *args)


def tracing(results: dict[str, Any]) -> None:
    for name in ("mlp", "cnn_groupnorm", "transformer", "lstm"):
        row = BY_NAME[name]
        args = abstract_example(row)
        plain = tracing_seconds(lambda row=row: gradient_function(row, "float32"), *args)
        ours = tracing_seconds(lambda row=row: gradient_function(row, "mixed_float16"), *args)
        results[f"tracing {name}"] = {"plain_ms": 1e3 * plain, "autocast_ms": 1e3 * ours, "ratio": ours / plain}
        print(f"tracing {name:36s}{1e3 * plain:10.1f} ms{1e3 * ours:10.1f} ms{ours / plain:12.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"jax": jax.__version__}
    print(f"jax {jax.__version__}{'':34s}          MB     temp MB 16-bit sums   wide dots")
    for part in (mlp_steps, model_steps, deep_memory, tracing):
        part(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
