"""What does the library cost in time, on the host: per step, and while a program is traced and compiled?

    python benchmarks/overhead.py [--rounds 200] [--small]

On a CPU, everything in float32, so that what is timed is the work around the products. Steps: every way takes its turn
in every round, in an order drawn anew, and is set against the bare step of the same round; medians over rounds. Tracing
and compiling: processor seconds, the best of several, each of a function that JAX has not seen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _cases import BY_NAME, abstract, abstract_example, gradient_function, tracing_calls, tracing_seconds
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
from _results import Results

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
    """`count` layers of `width` with a bias each: (loss, params, batch)."""

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


def timed(step: Any, state: Tree, batch: Tree, steps: int) -> tuple[float, Tree]:
    """Wall seconds of one step, the mean of `steps` in a row."""
    start = time.perf_counter()
    for _ in range(steps):
        state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    return (time.perf_counter() - start) / steps, state


def step_times(results: Results, model: str, made: tuple[Any, Tree, Tree], rounds: int, steps: int) -> None:
    loss, params, batch = made
    running: dict[str, tuple[Any, Tree]] = {}
    for how, make in WAYS.items():
        way = make(loss)
        state = jax.tree.map(jnp.array, way.init(params, {}))  # fresh buffers: they are donated
        step = jax.jit(way.step, donate_argnums=0)
        running[how] = step, timed(step, state, batch, steps)[1]
    seconds: dict[str, list[float]] = {how: [] for how in WAYS}
    rng = np.random.default_rng(SEED)
    for _ in range(rounds):
        for how in rng.permutation(list(WAYS)):
            step, state = running[how]
            took, state = timed(step, state, batch, steps)
            running[how] = step, state
            seconds[how].append(took)
    for how in WAYS:
        ratios = [mine / bare for mine, bare in zip(seconds[how], seconds[BARE], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        row = {"model": model, "how": how, "microseconds": 1e6 * statistics.median(seconds[how])}
        row |= {"ratio": statistics.median(ratios), "lower_quartile": quartiles[0], "upper_quartile": quartiles[2]}
        results.add("step time", row | {"rounds": rounds, "steps_a_round": steps})


def growing(kind: str, count: int) -> tuple[Callable[..., Any], tuple[Tree, Tree]]:
    """A loss of about `count` equations over one weight, or over `count` leaves, with its arguments' shapes."""
    layers = count if kind == "leaves" else max(count // 6, 1)  # a layer and its gradient are six equations

    def loss(weights, x):
        for layer in range(layers):
            x = jnp.tanh(x @ weights[layer if kind == "leaves" else 0])
        return jnp.sum(x)

    leaves = count if kind == "leaves" else 1
    return loss, abstract(([jnp.ones((8, 8))] * leaves, jnp.ones((8, 8))))


def equations(fn: Callable[..., Any], *args: Any) -> int:
    return len(jax.make_jaxpr(fn)(*args).eqns)


def compile_seconds(fn: Callable[..., Any], *args: Any) -> float:
    """Processor seconds from the traced program to the executable."""
    lowered = jax.jit(fn).lower(*args)
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


def growth(results: Results, kind: str, counts: list[int], compiled_up_to: int) -> None:
    for count in counts:
        loss, args = growing(kind, count)

        def plain_gradient(loss=loss):
            return jax.grad(lambda *args: loss(*args))

        def cast_gradient(loss=loss):
            return autocast(jax.grad(lambda *args: loss(*args)), get_policy("mixed_float16"))

        bare, ours_ = tracing_seconds(plain_gradient, *args), tracing_seconds(cast_gradient, *args)
        size = equations(plain_gradient(), *args)
        row = {"growing": kind, "count": count, "equations": size, "plain_seconds": bare, "autocast_seconds": ours_}
        row |= {"ratio": ours_ / bare, "plain_microseconds_each": 1e6 * bare / size}
        row |= {"autocast_microseconds_each": 1e6 * ours_ / size}
        if count <= compiled_up_to:
            row["plain_compile_seconds"] = compile_seconds(plain_gradient(), *args)
            row["autocast_compile_seconds"] = compile_seconds(cast_gradient(), *args)
        results.add("growing models", row)


def models(results: Results, names: list[str]) -> None:
    for name in names:
        row, args = BY_NAME[name], abstract_example(BY_NAME[name])

        def make(how, row=row):
            return lambda: gradient_function(row, how)

        bare = tracing_seconds(make("float32"), *args)
        ours_ = tracing_seconds(make("mixed_float16"), *args)
        calls = [tracing_calls(make(how), *args) for how in ("float32", "mixed_float16")]
        results.add(
            "tracing models",
            {"model": name, "plain_seconds": bare, "autocast_seconds": ours_, "ratio": ours_ / bare}
            | {"plain_calls": calls[0], "autocast_calls": calls[1], "calls_ratio": calls[1] / calls[0]},
        )
