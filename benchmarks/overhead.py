"""How much time does the library cost on the host, per step, and while a program is traced and compiled?

    python benchmarks/overhead.py [--rounds 100] [--small]

Runs on a CPU with everything in float32, so that the differences are the work around the products. Steps: every round
runs every way once, in random order, and divides its time by that of the bare step in the same round; the table has
medians over rounds, of wall time and of processor time, which a busy machine disturbs less. Tracing and compiling:
processor seconds, the best of several, each of a new function, which is not in JAX's caches.
"""

import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # the host is measured

import jax
import jax.numpy as jnp
import numpy as np
from _peers import (
    Step,
    Tree,
    checked_by_optax,
    conditional,
    flax_scaling,
    hand_scaling,
    jmp_scaling,
    mpx_scaling,
    ours,
    plain,
    selected,
)
from _results import Results, arguments, show
from _timing import compile_seconds

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from battery_models import BY_NAME
from battery_tools import abstract, abstract_example, gradient_function, tracing_calls

from jmp_train import autocast, get_policy

SEED = 0
BARE = "bare Adam, no scale"
WAYS: dict[str, Callable[..., Step]] = {
    BARE: plain,
    "with_loss_scale": lambda loss: ours(loss, "float32"),
    "by hand, where": lambda loss: selected(loss, hand_scaling()),
    "by hand, lax.cond": lambda loss: conditional(loss, hand_scaling()),
    "Flax DynamicScale": lambda loss: selected(loss, flax_scaling()),
    "jmp": lambda loss: selected(loss, jmp_scaling()),
    "mpx": lambda loss: selected(loss, mpx_scaling(mixed=False)),
    "optax.apply_if_finite": checked_by_optax,
}


def dense_layers(count: int, width: int, batch: int) -> tuple[Any, Tree, Tree]:
    """`count` dense layers of `width` with a bias each: (loss, params, batch)."""

    def loss(params, model_state, batch):
        x = batch
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean(x**2), model_state

    rng = np.random.default_rng(SEED)
    params = [
        {
            "w": jnp.asarray(rng.standard_normal((width, width)) / np.sqrt(width), jnp.float32),
            "b": jnp.zeros(width, jnp.float32),
        }
        for _ in range(count)
    ]
    return loss, params, jnp.asarray(rng.standard_normal((batch, width)), jnp.float32)


def timed(step: Any, state: Tree, batch: Tree, steps: int) -> tuple[np.ndarray, Tree]:
    """(wall, processor) seconds of one step, the mean of `steps` consecutive ones."""
    start = np.array([time.perf_counter(), time.process_time()])
    for _ in range(steps):
        state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    return (np.array([time.perf_counter(), time.process_time()]) - start) / steps, state


def step_times(results: Results, model: str, made: tuple[Any, Tree, Tree], rounds: int, steps: int) -> None:
    loss, params, batch = made
    running: dict[str, tuple[Any, Tree]] = {}
    for how, make in WAYS.items():
        way = make(loss)
        state = jax.tree.map(jnp.array, way.init(params, {}))  # new buffers, because they are donated
        step = jax.jit(way.step, donate_argnums=0)
        running[how] = step, timed(step, state, batch, steps)[1]
    seconds: dict[str, list[np.ndarray]] = {how: [] for how in WAYS}
    rng = np.random.default_rng(SEED)
    for _ in range(rounds):
        for how in rng.permutation(list(WAYS)):
            step, state = running[how]
            took, state = timed(step, state, batch, steps)
            running[how] = step, state
            seconds[how].append(took)
    bare = np.array(seconds[BARE])
    for how in WAYS:
        mine = np.array(seconds[how])
        row: dict[str, Any] = {"model": model, "how": how, "rounds": rounds, "steps_a_round": steps}
        for column, clock in enumerate(("wall", "processor")):
            quartiles = np.quantile(mine[:, column] / bare[:, column], [0.25, 0.5, 0.75])
            row[f"{clock}_microseconds"] = 1e6 * float(np.median(mine[:, column]))
            row |= dict(zip((f"{clock}_lower", f"{clock}_ratio", f"{clock}_upper"), map(float, quartiles), strict=True))
        results.add("step time", row)


def growing(kind: str, count: int) -> tuple[Callable[..., Any], tuple[Tree, Tree]]:
    """A loss of about `count` equations over one weight, or over `count` leaves, with its arguments' shapes."""
    layers = count if kind == "leaves" else max(count // 6, 1)  # a layer and its gradient are six equations

    def loss(weights, x):
        for layer in range(layers):
            x = jnp.tanh(x @ weights[layer if kind == "leaves" else 0])
        return jnp.sum(x)

    leaves = count if kind == "leaves" else 1
    return loss, abstract(([jnp.ones((8, 8))] * leaves, jnp.ones((8, 8))))


def gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: loss(*args))  # a new function, not in JAX's caches


def cast_gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    return autocast(gradient(loss), get_policy("mixed_float16"))


def trace_seconds(make: Callable[[], Callable[..., Any]], args: tuple[Any, ...], repeats: int) -> tuple[float, int]:
    """Processor seconds of the fastest of several traces, each of a new function, and their number of equations."""
    seconds, size = [], 0
    for _ in range(repeats):
        fn = make()
        start = time.process_time()
        size = len(jax.make_jaxpr(fn)(*args).eqns)
        seconds.append(time.process_time() - start)
    return min(seconds), size


def growth(results: Results, kind: str, counts: list[int], compiled_up_to: int) -> None:
    """Measures tracing and compiling of models of growing size, plain and under autocast."""
    for count in counts:
        loss, args = growing(kind, count)
        row: dict[str, Any] = {"growing": kind, "count": count, "equations": 0}
        for name, made in (("plain", gradient), ("autocast", cast_gradient)):
            make = functools.partial(made, loss)
            seconds, size = trace_seconds(make, args, repeats=5 if count <= 1000 else 1)
            row["equations"] = row["equations"] or size  # of the plain gradient
            row |= {f"{name}_seconds": seconds, f"{name}_microseconds_each": 1e6 * seconds / row["equations"]}
            row[f"{name}_compile_seconds"] = (
                compile_seconds(jax.jit(make()).lower(*args)) if count <= compiled_up_to else None
            )
        results.add("growing models", row | {"ratio": row["autocast_seconds"] / row["plain_seconds"]})


def real_models(results: Results, names: list[str]) -> None:
    """Measures tracing of real models' gradients, in seconds and in function calls, which the load does not change."""
    for name in names:
        model, args = BY_NAME[name], abstract_example(BY_NAME[name])
        row: dict[str, Any] = {"model": name}
        for kind, how in (("plain", "float32"), ("autocast", "mixed_float16")):
            make = functools.partial(gradient_function, model, how)
            row[f"{kind}_calls"] = tracing_calls(make, *args)
            row[f"{kind}_seconds"], _ = trace_seconds(make, args, repeats=5)
        row["ratio"] = row["autocast_seconds"] / row["plain_seconds"]
        results.add("tracing models", row | {"calls_ratio": row["autocast_calls"] / row["plain_calls"]})


def print_tables(results: Results) -> None:
    def milliseconds(seconds: float) -> str:
        return f"{1e3 * seconds:.1f}"

    steps: dict[str, Any] = {"how": ""}
    for clock in ("wall", "processor"):
        steps |= {
            f"{clock}_microseconds as {clock}, µs": ".0f",
            f"{clock}_ratio as {clock} / bare": ".2f",
            f"{clock}_lower as lower quartile": ".2f",
            f"{clock}_upper as upper quartile": ".2f",
        }
    rows = results.tables["step time"]
    for model in dict.fromkeys(row["model"] for row in rows):
        show(f"step time, {model}", steps, [row for row in rows if row["model"] == model])
    traced = {
        "plain_seconds as plain trace, ms": milliseconds,
        "autocast_seconds as autocast trace, ms": milliseconds,
        "ratio": ".2f",
    }
    each = {
        "plain_microseconds_each as plain, µs an equation": ".0f",
        "autocast_microseconds_each as autocast, µs an equation": ".0f",
        "plain_compile_seconds as plain compile, s": ".2f",
        "autocast_compile_seconds as autocast compile, s": ".2f",
    }
    rows = results.tables["growing models"]
    for kind in dict.fromkeys(row["growing"] for row in rows):
        columns = {f"count as {kind}": "d", "equations as equations of the gradient": "d"} | traced | each
        show(f"tracing, growing {kind}", columns, [row for row in rows if row["growing"] == kind])
    calls = {
        "plain_calls as plain calls": "d",
        "autocast_calls as autocast calls": "d",
        "calls_ratio as ratio of calls": ".2f",
    }
    show("tracing models", {"model": ""} | traced | calls, results.tables["tracing models"])


def draw(results: Results) -> None:
    def steps(figure: Any) -> None:
        rows = results.tables["step time"]
        names = list(dict.fromkeys(row["model"] for row in rows))
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            chosen = [row for row in rows if row["model"] == name]
            middle = np.array([row["processor_ratio"] for row in chosen])
            lower, upper = (np.array([row[f"processor_{end}"] for row in chosen]) for end in ("lower", "upper"))
            spread = [middle - lower, upper - middle]
            hows = [row["how"] for row in chosen]
            colours = ["tab:orange" if how == "with_loss_scale" else "tab:blue" for how in hows]
            axes.barh(hows, middle, xerr=spread, color=colours, ecolor="0.3")
            axes.axvline(1.0, color="0.5", linewidth=0.8)
            axes.set_title(f"{name}: processor time of a step / bare", fontsize=10, loc="left")
            axes.invert_yaxis()
            axes.tick_params(labelsize=8)

    def tracing(figure: Any) -> None:
        rows = results.tables["growing models"]
        kinds = list(dict.fromkeys(row["growing"] for row in rows))
        for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            chosen = [row for row in rows if row["growing"] == kind]
            sizes = [row["equations"] for row in chosen]
            for name, colour in (("plain", "tab:blue"), ("autocast", "tab:orange")):
                axes.loglog(sizes, [row[f"{name}_seconds"] for row in chosen], "o-", color=colour, label=name)
            ends = np.array([sizes[0], sizes[-1]])
            axes.loglog(ends, 1e-4 * ends, ":", color="0.5", label="100 µs an equation")
            axes.set(xlabel="equations of the gradient", ylabel="seconds to trace, CPU")
            axes.set_title(f"growing {kind}", fontsize=10, loc="left")
            axes.legend(fontsize=8)

    results.picture("step time", steps, (11.0, 3.6))
    results.picture("growing models", tracing, (10.0, 4.0))


def main() -> None:
    options = arguments(__doc__, rounds={"type": int, "default": 100})
    small = options.small
    results = Results(
        "overhead", "wall and processor seconds on this CPU, in float32", seeds=(SEED,), small=small, out=options.out
    )
    if small:
        step_times(results, "8 leaves", dense_layers(4, 64, 32), rounds=10, steps=2)
    else:
        step_times(results, "12 leaves", dense_layers(6, 256, 128), options.rounds, steps=5)
        step_times(results, "40 leaves", dense_layers(20, 32, 32), options.rounds, steps=5)
    for kind in ("equations", "leaves"):
        growth(results, kind, [10, 100] if small else [10, 100, 1000, 10_000], compiled_up_to=10 if small else 1000)
    real_models(results, ["mlp"] if small else ["mlp", "cnn_groupnorm", "transformer", "transformer_scan", "lstm"])
    print_tables(results)
    draw(results)
    results.write()


if __name__ == "__main__":
    main()
