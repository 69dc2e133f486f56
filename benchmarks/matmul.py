"""Do dots through the library reach the GPU's speed, and do the reports predict which do not?

    python benchmarks/matmul.py [--out results]
    python benchmarks/matmul.py --small                    # tiny, on a CPU too, to see that it works

Three tables. `dots`: products of aligned and misaligned sizes, float32 in and out, through the library, in plain jnp
with casts by hand, and in torch, in strict float32, TF32, bfloat16 and float16. `predictions`: what
`tensor_core_report` predicts for each size, beside the measurement: a product counts as fast if it takes at most twice
the time of the GPU's own roofline (the rate of an 8192x8192 product, the bandwidth of a large copy, both measured).
`programs`: the bytes that `gpu_report` counts and the least time that it derives from them, beside the measured time.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # leaves half to torch, which runs in the same process

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _results import Results, Row, arguments, show
from _timing import caller, copy_bandwidth, matmul_peak, time_steps

import jmp_train
from jmp_train import diagnostics

POLICIES = {
    "float32": "float32",
    "tf32": "tensorfloat32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}
SIZES = (
    (4096, 4096, 4096), (8192, 8192, 8192),
    (4095, 4096, 4096), (4096, 4095, 4096), (4096, 4096, 4095), (4095, 4095, 4095),
    (4098, 4098, 4098), (4100, 4100, 4100), (4104, 4104, 4104),
    (16384, 768, 50304), (16384, 768, 50257), (16384, 768, 3072), (16384, 770, 3072),
    (4096, 1504, 6016), (4096, 1500, 6000), (16384, 16384, 8), (16384, 16384, 1),
)  # fmt: skip
"""(M, K, N) of `[M, K] @ [K, N]`, large enough that launching takes no part of the time."""
SMALL_SIZES = ((64, 64, 64), (64, 63, 64))


def dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def by_hand(precision: str) -> Callable[..., jax.Array]:
    """The product as a user writes it in jnp, of float32 `[M, K]` and `[K, N]`, to float32 `[M, N]`."""
    if precision in ("float32", "tf32"):
        flag = jax.lax.Precision.HIGHEST if precision == "float32" else jax.lax.DotAlgorithmPreset.TF32_TF32_F32
        return lambda x, w: jnp.matmul(x, w, precision=flag)
    return lambda x, w: (x.astype(precision) @ w.astype(precision)).astype(jnp.float32)


def operands(size: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    m, k, n = size
    left, right = jax.random.split(jax.random.key(0))
    return jax.random.normal(left, (m, k)), jax.random.normal(right, (k, n)) / k**0.5


def as_float16(size: Sequence[int]) -> list[jax.Array]:
    return [each.astype(jnp.float16) for each in operands(size)]


def torch_dot(x: jax.Array, w: jax.Array, precision: str) -> Callable[[int], None]:
    """The same product in torch, under torch.amp for 16 bits."""
    import numpy as np
    import torch
    from _torch_steps import AMP, allow_tf32, device, wait

    left, right = (torch.from_numpy(np.array(each)).to(device()) for each in (x, w))
    dtype = AMP.get(precision)

    def run(steps: int) -> None:
        allow_tf32(precision == "tf32")
        with torch.no_grad(), torch.autocast(device().type, dtype or torch.bfloat16, enabled=dtype is not None):
            for _ in range(steps):
                (left @ right).float()
        wait()

    return run


def runners(x: jax.Array, w: jax.Array, precision: str) -> dict[str, Callable[[], Callable[[int], None]]]:
    """For each way, a function that makes its `run` for `time_steps`."""
    found = {
        "ours": lambda: caller(jmp_train.autocast(dot, jmp_train.get_policy(POLICIES[precision])), x, w),
        "jnp": lambda: caller(by_hand(precision), x, w),
    }
    if importlib.util.find_spec("torch"):
        found["torch"] = lambda: torch_dot(x, w, precision)
    return found


def dots(results: Results, sizes: Sequence[Sequence[int]], seconds: float) -> None:
    for size in sizes:
        x, w = operands(size)
        for precision in POLICIES:
            row: Row = {"size": "x".join(map(str, size)), "precision": precision}
            for name, make in runners(x, w, precision).items():
                try:
                    timing = time_steps(make(), seconds)
                    rate = 2 * size[0] * size[1] * size[2] / timing.seconds
                    row |= {name: rate, f"{name}_seconds": timing.seconds, f"{name}_spread": timing.spread}
                except Exception as error:  # a precision that this device lacks, for one
                    row[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:200]}"
            results.add("dots", row)


def padded(size: Sequence[int], product: Any) -> list[int]:
    """The size with every padding that the report recommends."""
    wanted = {each.size: each.padded for each in product.padding}
    return [wanted.get(dim, dim) for dim in size]


def predictions(results: Results, sizes: Sequence[Sequence[int]], small: bool, seconds: float) -> None:
    """Times products of float16 operands as they are and padded; the FLOPs that padding adds are not counted."""
    peak, bandwidth = (matmul_peak(256, 0.02), copy_bandwidth(256)) if small else (matmul_peak(), copy_bandwidth())
    results.add("card", {"flops_per_second": peak, "bytes_per_second": bandwidth})
    for size in sizes:
        m, k, n = size
        product = diagnostics.tensor_core_report(dot)(*as_float16(size)).products[0]
        floor = max(2 * m * k * n / peak, 2 * (m * k + k * n + m * n) / bandwidth)
        took, took_padded = (
            time_steps(caller(dot, *as_float16(dims)), seconds).seconds for dims in (size, padded(size, product))
        )
        fast = took <= 2 * floor
        row = {"size": "x".join(map(str, size)), "predicted": product.on_tensor_cores, "measured": fast}
        row |= {"right": product.on_tensor_cores == fast, "of_roofline": floor / took}
        row |= {"of_roofline_padded": floor / took_padded, "seconds": took, "reason": product.reason}
        results.add("predictions", row)


def programs(scale: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Programs limited by memory, by arithmetic and by kernel launches, with their arguments."""
    params = {f"w{i}": jnp.ones((scale, scale)) for i in range(8)}
    adam = optax.adam(1e-3)
    state = adam.init(params)

    def update(params, state, grads):
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def mlp(params, x):
        for w in params.values():
            x = jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    x = jax.random.normal(jax.random.key(0), (scale, scale))
    images = jax.random.normal(jax.random.key(1), (32, scale // 64, scale // 64, 256))
    kernel = 0.01 * jax.random.normal(jax.random.key(2), (3, 3, 256, 256))
    small = {f"w{i}": jnp.ones((8, 8)) for i in range(100)}

    def convolution(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return {
        "softmax": (jax.nn.softmax, (x,)),
        "sum of squares": (lambda x: jnp.sum(x * x, axis=0), (x,)),
        "Adam, 8 large leaves": (update, (params, state, params)),
        "Adam, 100 small leaves": (update, (small, adam.init(small), small)),
        "float16 product": (dot, (x.astype(jnp.float16), x.astype(jnp.float16))),
        "float16 convolution": (convolution, (images.astype(jnp.float16), kernel.astype(jnp.float16))),
        "MLP gradient, mixed_float16": (
            jmp_train.autocast(jax.grad(mlp), jmp_train.get_policy("mixed_float16")),
            (params, x),
        ),
    }


def report_against_time(results: Results, scale: int, seconds: float) -> None:
    for name, (fn, args) in programs(scale).items():
        try:
            report = diagnostics.gpu_report(jax.jit(fn))(*args)
        except Exception as error:  # the compiler plugin is missing, or does not start beside a real GPU
            results.add("programs", {"program": name, "left_out": str(error)[:200]})
            continue
        timing = time_steps(caller(fn, *args), seconds)
        row = {"program": name, "bytes": report.bytes, "launches": report.launches, "measured": timing.seconds}
        row |= {"least": report.least_seconds, "spread": timing.spread, "ratio": timing.seconds / report.least_seconds}
        results.add("programs", row | {"bytes_per_second": report.bytes / timing.seconds})


def tera(value: float) -> str:
    return f"{value / 1e12:.1f}"


def micro(value: float) -> str:
    return f"{value * 1e6:,.1f}"


Columns = dict[str, str | Callable[[Any], str]]
DOTS: Columns = {
    "size as M x K x N": "", "precision": "", "ours as ours, TFLOP/s": tera, "jnp": tera, "torch": tera,
    "ours_spread as spread": ".1%",
}  # fmt: skip
PREDICTIONS: Columns = {
    "size as M x K x N": "", "predicted as predicted fast": str, "measured as measured fast": str, "right": str,
    "of_roofline as of roofline": ".0%", "of_roofline_padded as padded": ".0%", "reason": "",
}  # fmt: skip
PROGRAMS: Columns = {
    "program": "", "bytes as MB": lambda value: f"{value / 1e6:,.1f}", "launches": "d", "least as least us": micro,
    "measured as measured us": micro, "ratio": ".2f", "bytes_per_second as TB/s": lambda value: f"{value / 1e12:.2f}",
    "left_out as left out": "",
}  # fmt: skip


def draw_dots(rows: Sequence[Row]) -> Callable[[Any], None]:
    def on(figure: Any) -> None:
        shown = [row for row in rows if row["precision"] == "float16"]
        axes = figure.subplots()
        for index, name in enumerate(("ours", "jnp", "torch")):
            heights = [row.get(name, 0.0) / 1e12 for row in shown]
            axes.bar([place + 0.27 * (index - 1) for place in range(len(shown))], heights, 0.27, label=name)
        axes.set_xticks(range(len(shown)), [row["size"] for row in shown], rotation=60, ha="right", fontsize=7)
        axes.set_ylabel("TFLOP/s, float16, casts included")
        axes.legend()

    return on


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(__doc__, argv, seconds={"type": float, "default": None, "help": "of measuring a case"})
    seconds = options.seconds or (0.01 if options.small else 0.3)
    sizes, scale = (SMALL_SIZES, 128) if options.small else (SIZES, 4096)
    measured = f"single programs on one {jax.devices()[0].device_kind}, wall clock, median"
    results = Results("matmul", measured, small=options.small, out=options.out)
    if not importlib.util.find_spec("torch"):
        print("torch is not installed: its column is left out")
    report_against_time(results, scale, seconds)
    predictions(results, sizes, options.small, seconds)
    dots(results, sizes, seconds)
    results.write()
    results.picture("dots", draw_dots(results.tables["dots"]), (11.0, 5.0))
    show(f"Dots: {measured}", DOTS, results.tables["dots"])
    show("tensor_core_report and the truth", PREDICTIONS, results.tables["predictions"])
    show("gpu_report's bytes and the time", PROGRAMS, results.tables["programs"])


if __name__ == "__main__":
    main()
