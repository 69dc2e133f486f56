"""What do a loss scale and a check for overflow cost per step, and what does a skipped step cost?

    python benchmarks/loss_scaling.py [--parameters gpt2 resnet50] [--out results]
    python benchmarks/loss_scaling.py --small              # tiny, on a CPU too, to see that it works

Times one Adam step over the parameters of a model with given gradients: unscale, check, update, adjust the scale.
GPT-2's parameters are large, so that bytes decide; ResNet-50's are many and small, so that kernel launches do. Every
row is timed with finite gradients and with an infinity in the first one. `bare` scales and checks nothing. A JAX
program runs many steps, so that the host's cost of a call is not counted; in training the device's work hides it.
torch's gradients have a scale of 1, because torch unscales them in place.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # leaves half to torch, which runs in the same process

import gc
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import _peers
import jax
import jax.numpy as jnp
import models
from _results import Results, Row, arguments, show
from _timing import Stepper, time_steps

Tree = Any
STEPS = 20
"""In one program."""


@jax.custom_vjp
def given(params: Tree, model_state: Tree, grads: Tree) -> tuple[jax.Array, Tree]:
    """A loss of zero whose gradient with respect to `params` is `grads`."""
    return jnp.float32(0), model_state


def _forward(params, model_state, grads):
    return given(params, model_state, grads), (model_state, grads)


def _backward(saved, cotangents):
    model_state, grads = saved
    zeros = jax.tree.map(jnp.zeros_like, (model_state, grads))
    return jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), grads), *zeros


given.defvjp(_forward, _backward)


def jmp_or_none() -> Callable[[], _peers.Step] | None:
    if not importlib.util.find_spec("jmp"):
        return None
    return lambda: _peers.selected(given, _peers.jmp_scaling())


CASES: dict[str, Callable[[], _peers.Step] | None] = {
    "bare": lambda: _peers.plain(given),
    "ours": lambda: _peers.ours(given, "float32", autocast=False),
    "flax DynamicScale": lambda: _peers.selected(given, _peers.flax_scaling()),
    "jmp": jmp_or_none(),
    "by hand, jnp.where": lambda: _peers.selected(given, _peers.hand_scaling()),
    "by hand, lax.cond": lambda: _peers.conditional(given, _peers.hand_scaling()),
    "optax.apply_if_finite": lambda: _peers.checked_by_optax(given),
}
TORCH = tuple(f"torch Adam {kind}, {scaler}" for kind in ("fused", "foreach") for scaler in ("bare", "GradScaler"))


def parameters(name: str, small: bool) -> Tree:
    """The parameters of a model, as shapes."""
    return jax.eval_shape(models.make(name, tiny=small).init, jax.random.key(0))[0]


def random_like(shapes: Tree, seed: int, overflow: bool = False) -> Tree:
    """Normal values of standard deviation 0.01; with `overflow`, the very first value is infinite."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    made = [0.01 * jax.random.normal(key, leaf.shape, jnp.float32) for key, leaf in zip(keys, leaves, strict=True)]
    if overflow:
        made[0] = made[0].at[(0,) * made[0].ndim].set(jnp.inf)
    return jax.tree.unflatten(structure, made)


def many(step: Callable[[Tree, Tree], tuple[Tree, jax.Array]]) -> Callable[[Tree, Tree], tuple[Tree, jax.Array]]:
    """`STEPS` steps in one program, each with the same gradients."""

    def steps(state, grads):
        state, losses = jax.lax.scan(lambda state, _: step(state, grads), state, length=STEPS)
        return state, losses[-1]

    return steps


def measure_jax(make: Callable[[], _peers.Step], shapes: Tree, overflow: bool, seconds: float) -> Row:
    step = make()
    stepper = Stepper(many(step.step), step.init(random_like(shapes, 0), {}), random_like(shapes, 1, overflow))
    timing = time_steps(stepper, seconds)
    return {"step_seconds": timing.seconds / STEPS, "spread": timing.spread, "peak_bytes": stepper.peak_bytes}


def measure_torch(case: str, shapes: Tree, overflow: bool, seconds: float) -> Row:
    import torch
    from _torch_steps import AdamStepper, release

    dims = [leaf.shape for leaf in jax.tree.leaves(shapes)]
    stepper = AdamStepper(dims, "fused" in case, "GradScaler" in case, overflow)
    timing = time_steps(stepper, seconds)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    del stepper
    release()
    return {"step_seconds": timing.seconds, "spread": timing.spread, "peak_bytes": peak}


def missing(case: str) -> str | None:
    """The reason why a case cannot run here."""
    if case.startswith("torch"):
        return None if importlib.util.find_spec("torch") else "torch is not installed"
    return None if CASES[case] else f"{case} is not installed"


def measure(case: str, shapes: Tree, overflow: bool, seconds: float) -> Row:
    if reason := missing(case):
        return {"left_out": reason}
    try:
        if make := CASES.get(case):
            return measure_jax(make, shapes, overflow, seconds)
        return measure_torch(case, shapes, overflow, seconds)
    except Exception as error:  # the other cases can still be measured
        return {"left_out": f"{type(error).__name__}: {str(error)[:300]}"}


def run(results: Results, name: str, small: bool, seconds: float) -> None:
    """Measures one model's parameters: each case with finite gradients and, except for `bare`, with an overflow."""
    shapes = parameters(name, small)
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    about = {"parameters": name, "count": count, "leaves": len(jax.tree.leaves(shapes))}
    bare: dict[bool, float] = {}
    for case in (*CASES, *TORCH):
        row = about | {"case": case} | measure(case, shapes, False, seconds)
        of_torch = case.startswith("torch")
        if case.endswith("bare"):
            bare[of_torch] = row.get("step_seconds", float("nan"))
        else:
            skipped = measure(case, shapes, True, seconds)
            row |= {"skipped_seconds": skipped.get("step_seconds"), "skipped_spread": skipped.get("spread")}
        if "step_seconds" in row:
            row |= {
                "over_bare": row["step_seconds"] / bare[of_torch],
                "bytes_per_second": 28 * count / row["step_seconds"],
            }
        results.add("loss scaling", row)
        gc.collect()


def microseconds(value: float) -> str:
    return f"{value * 1e6:,.0f}"


COLUMNS: dict[str, str | Callable[[Any], str]] = {
    "parameters": "",
    "case": "",
    "step_seconds as step us": microseconds,
    "spread": ".1%",
    "over_bare as over bare": ".3f",
    "skipped_seconds as skipped us": microseconds,
    "bytes_per_second as TB/s of 28 B": lambda value: f"{value / 1e12:.2f}",
    "peak_bytes as peak GB": lambda value: f"{value / 1e9:.2f}",
    "left_out as left out": "",
}


def draw(rows: Sequence[Row]) -> Callable[[Any], None]:
    """Draws bars of each case's time divided by bare Adam's, one plot for each model's parameters."""

    def on(figure: Any) -> None:
        names = list(dict.fromkeys(row["parameters"] for row in rows))
        for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
            shown = [row for row in rows if row["parameters"] == name and "step_seconds" in row][::-1]
            axes.barh([row["case"] for row in shown], [row["step_seconds"] * 1e6 for row in shown])
            axes.set_xlabel("microseconds a step")
            axes.set_title(f"{name}: {shown[0]['count'] / 1e6:.1f} M in {shown[0]['leaves']} leaves", fontsize=10)

    return on


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(
        __doc__,
        argv,
        parameters={"nargs": "+", "choices": list(models.MAKERS), "default": ["gpt2", "resnet50"]},
        seconds={"type": float, "default": None, "help": "of measuring a case, after its warm-up"},
    )
    seconds = options.seconds or (0.02 if options.small else 3.0)
    measured = f"one Adam step with given gradients on one {jax.devices()[0].device_kind}, wall clock, median"
    results = Results("loss_scaling", measured, seeds=(0, 1), small=options.small, out=options.out)
    for name in options.parameters:
        run(results, name, options.small, seconds)
    rows = results.tables["loss scaling"]
    results.write()
    results.picture("loss scaling", draw(rows), (12.0, 4.0))
    show(measured, COLUMNS, rows)


if __name__ == "__main__":
    main()
