"""How many samples per second does each model train on in each precision, beside Flax's and torch's mixed precision?

    python benchmarks/throughput.py --models resnet50 [--cases 'float*' 'torch*'] [--minutes 9] [--out results]
    python benchmarks/throughput.py --small                # tiny models, on a CPU too, to see that it works

Times whole training steps on one GPU: forward, backward, loss scale, optimizer; the data are synthetic and on the
device, the state is donated. Convolutional nets are NHWC in JAX and channels last in torch. Every case is compiled,
warmed up and run for some seconds in several repetitions; each row is written when it is measured. Share of peak: FLOPs
of all dots and convolutions divided by the time, relative to the rate of an 8192x8192 float16 product on the same GPU.
Cases for which no time is left, and torch's where torch is not installed, are left out with a message.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # leaves half to torch, which runs in the same process

import fnmatch
import gc
import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import _peers
import jax
import jax.numpy as jnp
import models
from _results import Results, Row, arguments, show
from _timing import Stepper, matmul_peak, time_steps

import jmp_train
from jmp_train import diagnostics

Tree = Any

PUBLISHED = {  # images a second on an A100: strict float32, TF32, mixed float16 (NVIDIA)
    "resnet50": {"tensorfloat32": 1.65, "mixed_float16": 2.38},
    "vgg19": {"tensorfloat32": 2.59, "mixed_float16": 5.17},
    "densenet121": {"tensorfloat32": 1.51, "mixed_float16": 2.24},
}
"""Speed-ups over strict float32 that were published for an A100, by model and precision."""

CASES = (
    "mixed_float16", "torch float16 compile", "float32", "mixed_bfloat16", "tensorfloat32", "torch float32",
    "torch float16", "flax float16", "torch bfloat16 compile", "torch tf32 compile", "torch float32 compile",
    "flax bfloat16", "torch bfloat16", "torch tf32",
)  # fmt: skip
"""What is measured, what tells most first: time may run out."""

PEER_OF = {
    "float32": "torch float32 compile",
    "tensorfloat32": "torch tf32 compile",
    "mixed_bfloat16": "torch bfloat16 compile",
    "mixed_float16": "torch float16 compile",
}


def loss_of(workload: models.Workload, dtype: Any = None) -> _peers.Loss:
    loss_fn = workload.loss_fn(dtype)
    return lambda params, model_state, batch: loss_fn(params, model_state, batch["data"], batch["key"])


def jax_step(workload: models.Workload, case: str) -> _peers.Step:
    """The step of a case that runs in JAX: float16 has a loss scale, mixed_bfloat16 only the check for overflow."""
    tx = workload.optimizer()
    if case in ("float32", "tensorfloat32"):
        return _peers.ours_without_scale(loss_of(workload), case, tx)
    if case == "mixed_bfloat16":
        return _peers.ours(loss_of(workload), case, tx, loss_scale=jmp_train.NoOpLossScale())
    if case == "mixed_float16":
        return _peers.ours(loss_of(workload), case, tx)
    dtype = case.removeprefix("flax ")
    if dtype == "bfloat16":
        return _peers.plain(loss_of(workload, jnp.dtype(dtype)), tx)
    return _peers.selected(loss_of(workload, jnp.dtype(dtype)), _peers.flax_scaling(), tx)


def jax_stepper(workload: models.Workload, case: str, variables: tuple[Tree, Tree]) -> Stepper:
    step = jax_step(workload, case)
    params, model_state = jax.device_put(variables)
    batch = {"data": jax.device_put(workload.batch()), "key": jax.random.key(1)}
    return Stepper(step.step, step.init(params, model_state), batch)


def torch_stepper(workload: models.Workload, case: str, small: bool) -> Any:
    from _torch_models import make_torch
    from _torch_steps import TorchStepper

    model = make_torch(workload.name, models.TINY[workload.name] if small else None)
    _, precision, *how = case.split()
    return TorchStepper(workload.name, model, workload.batch(), precision, compiled=bool(how))


def release() -> None:
    """Frees the last case's memory on the device."""
    gc.collect()
    jax.clear_caches()
    if importlib.util.find_spec("torch"):
        from _torch_steps import release as release_torch

        release_torch()


def step_flops(workload: models.Workload) -> int:
    """FLOPs of the dots and convolutions of one gradient, from its trace: the same for every case."""
    params, model_state = jax.eval_shape(workload.init, jax.random.key(0))
    gradient = jax.grad(workload.loss_fn(), has_aux=True)
    return diagnostics.tensor_core_report(gradient)(params, model_state, workload.batch(), jax.random.key(0)).flops


def measure(workload: models.Workload, case: str, variables: tuple[Tree, Tree], small: bool, seconds: float) -> Row:
    """One row: times, memory, losses. `variables` is the result of `workload.init`, on the host."""
    if case.startswith("torch"):
        stepper = torch_stepper(workload, case, small)
    else:
        stepper = jax_stepper(workload, case, variables)
    timing = time_steps(stepper, seconds)
    return {
        "samples_per_second": workload.batch_size / timing.seconds,
        "spread": timing.spread,
        "step_seconds": timing.seconds,
        "least_seconds": timing.least,
        "most_seconds": timing.most,
        "repetitions": timing.repetitions,
        "steps": timing.steps,
        "peak_bytes": stepper.peak_bytes,
        "compile_seconds": stepper.compile_seconds,
        "first_loss": stepper.losses[0],
        "last_loss": stepper.losses[-1],
    }


def completed(rows: Sequence[Row], peak: float) -> list[Row]:
    """The rows with figures that compare rows of one model: the speed-ups, and the ratio to torch.compile."""
    seconds = {(row["model"], row["case"]): row.get("step_seconds") for row in rows}

    def ratio(before: float | None, after: float | None) -> float | None:
        return before / after if before and after else None

    made = []
    for row in rows:
        model, case, took = row["model"], row["case"], row.get("step_seconds")
        baseline = "torch float32" if case.startswith("torch") else "float32"
        made.append(
            row
            | {
                "speedup": ratio(seconds.get((model, baseline)), took),
                "speedup_over_jax_float32": ratio(seconds.get((model, "float32")), took),
                "published_speedup": PUBLISHED.get(model, {}).get(case),
                "over_torch_compile": ratio(seconds.get((model, PEER_OF.get(case, ""))), took),
                "share_of_peak": row["flops"] / took / peak if took else None,
            }
        )
    return made


def run_model(results: Results, name: str, options: Any, deadline: float, peak: float) -> None:
    sizes = {} if options.batch_size is None else {"batch_size": options.batch_size}
    workload = models.make(name, tiny=options.small, **sizes)
    flops = step_flops(workload)
    variables = jax.device_get(jax.jit(workload.init)(jax.random.key(0)))
    longest = 0.0
    for case in CASES:
        if not any(fnmatch.fnmatch(case, pattern) for pattern in options.cases):
            continue
        about = {"model": name, "case": case, "batch_size": workload.batch_size, "flops": flops}
        started = time.monotonic()
        if case.startswith("torch") and not importlib.util.find_spec("torch"):
            results.add("throughput", about | {"left_out": "torch is not installed"})
        elif started + longest > deadline:
            results.add("throughput", about | {"left_out": "no time is left"})
        else:
            try:
                row = measure(workload, case, variables, options.small, options.seconds)
            except Exception as error:  # out of memory, for one: the other cases can still be measured
                row = {"left_out": f"{type(error).__name__}: {str(error)[:300]}"}
            results.add("throughput", about | row)
            release()
            longest = max(longest, time.monotonic() - started)
        results.tables["throughput"] = completed(results.tables["throughput"], peak)
        results.write(complete=False)


COLUMNS: dict[str, str | Callable[[Any], str]] = {
    "model": "",
    "case": "",
    "samples_per_second as samples/s": ",.1f",
    "spread": ".1%",
    "speedup as speed-up": ".2f",
    "published_speedup as published, A100": ".2f",
    "over_torch_compile as over torch.compile": ".2f",
    "share_of_peak as of peak": ".1%",
    "peak_bytes as peak GB": lambda value: f"{value / 1e9:.1f}",
    "compile_seconds as compile s": ".0f",
    "first_loss as first loss": ".4f",
    "left_out as left out": "",
}


def draw(rows: Sequence[Row]) -> Callable[[Any], None]:
    """Draws bars of samples per second divided by those of strict float32 in JAX, a group for each model."""

    def on(figure: Any) -> None:
        axes = figure.subplots()
        names = list(dict.fromkeys(row["model"] for row in rows))
        cases = [case for case in CASES if any(row["case"] == case and row.get("step_seconds") for row in rows)]
        heights = {(row["model"], row["case"]): row["speedup_over_jax_float32"] for row in rows}
        width = 0.8 / max(1, len(cases))
        for index, case in enumerate(cases):
            places = [place + (index - len(cases) / 2) * width for place in range(len(names))]
            axes.bar(places, [heights.get((name, case)) or 0.0 for name in names], width, align="edge", label=case)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("samples/s over JAX in strict float32")
        axes.legend(fontsize=7, ncols=2)

    return on


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(
        __doc__,
        argv,
        models={"nargs": "+", "choices": list(models.MAKERS), "default": list(models.MAKERS)},
        cases={"nargs": "+", "default": ["*"], "help": f"globs over {', '.join(CASES)}"},
        batch_size={"type": int, "help": "instead of the one that fills an H200"},
        seconds={"type": float, "default": None, "help": "of measuring a case, after its warm-up"},
        minutes={"type": float, "default": 9.0, "help": "after which no new case is begun"},
    )
    options.seconds = options.seconds or (0.05 if options.small else 6.0)
    deadline = time.monotonic() + 60 * options.minutes
    measured = f"training steps on one {jax.devices()[0].device_kind}, wall clock, median of repetitions"
    results = Results("throughput", measured, seeds=(0, 1), small=options.small, out=options.out)
    peak = matmul_peak(256, 0.05) if options.small else matmul_peak()
    results.add("peak", {"product": "float16, square", "flops_per_second": peak})
    for name in options.models:
        run_model(results, name, options, deadline, peak)
    rows = results.tables.get("throughput", [])
    results.write()
    results.picture("throughput", draw(rows), (11.0, 5.0))
    show(f"{measured}; {peak / 1e12:.0f} TFLOP/s in a float16 product", COLUMNS, rows)


if __name__ == "__main__":
    main()
