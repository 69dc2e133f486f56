"""Two networks that fail in mixed precision; the library's diagnostics find the cause, explain it and name the cure.

    python examples/diagnose.py              about a minute on two CPU cores, two pictures in --out

1. Overflow. A classifier of scikit-learn's wines sees raw measurements and their products, up to 1680 squared: float16
   holds at most 65,504. The loss scale collapses; `overflow_report` names the parameters, `find_overflow` the line.
2. Underflow. An autoencoder of photographs has a mean over six million values as its loss: the gradient of one value is
   smaller than float16 holds. `backward_histogram`, `underflow_report` and `suggest_loss_scale` show this before the
   first step.
"""

import argparse
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.console import Console
from sklearn.datasets import load_sample_images, load_wine

import jmp_train as jmp
from jmp_train import diagnostics

matplotlib.use("Agg")
console = Console(width=120)
RATE = 5e-3  # learning rate of the second network


class Wines(nn.Module):
    """A classifier of 13 raw measurements and all their products."""

    @nn.compact
    def __call__(self, x):
        products = (x[:, :, None] * x[:, None, :]).reshape(x.shape[0], -1)
        h = nn.Dense(32, name="encoder")(jnp.concatenate([x, products], axis=-1))
        return nn.Dense(3, name="head")(nn.relu(nn.LayerNorm()(h)))


class Autoencoder(nn.Module):
    """Encodes each patch of 8x8 pixels as 32 numbers, applies two convolutions, and decodes to pixels."""

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Conv(32, (8, 8), strides=(8, 8), name="encoder")(x))
        for i in range(2):
            h = nn.relu(nn.Conv(32, (3, 3), name=f"hidden_{i}")(h))
        return nn.sigmoid(nn.ConvTranspose(3, (8, 8), strides=(8, 8), name="decoder")(h))


def train(
    model, loss_fn, batch, loss_scale, steps: int, *, rules=None, rate=1e-2, policy="mixed_float16"
) -> dict[str, Any]:
    """Trains with Adam; returns a curve per metric, and what the diagnostics need: the step and its last arguments."""
    params = model.init(jax.random.key(0), batch[0])["params"]
    tx = jmp.with_loss_scale(optax.adam(rate), loss_scale)
    grad_fn = jmp.value_and_grad(loss_fn, policy, rules=rules)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = grad_fn(params, *batch, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss, **jmp.step_metrics(opt_state)}

    opt_state, history = tx.init(params), []
    for _ in range(steps):
        params, opt_state, metrics = step(params, opt_state, batch)
        history.append(jax.device_get(metrics))
    curves = {name: np.array([metrics[name] for metrics in history]) for name in history[0]}
    return curves | {"step": step, "args": (params, opt_state, batch), "params": params, "opt_state": opt_state}


def overflow(steps: int) -> tuple[dict[str, Any], diagnostics.Found, dict[str, Any]]:
    """Returns a run that collapses, what `find_overflow` reports of it, and the run with the cure that it names."""
    x, y = load_wine(return_X_y=True)
    batch = jnp.asarray(x, jnp.float32), jnp.asarray(y)
    model = Wines()

    def loss_fn(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": params}, x), y).mean()

    console.rule("1. a scale that collapses")
    broken = train(model, loss_fn, batch, jmp.DynamicLossScale(), steps)
    print(diagnostics.overflow_report(broken["opt_state"], broken["params"]))
    # `find_overflow` evaluates the training step itself, from the state in which the training ended.
    found = diagnostics.find_overflow(broken["step"])(*broken["args"])
    print(f"\n{found}")
    console.rule("the same with the encoder in float32")
    rules = jmp.DEFAULT_RULES.with_scopes({"encoder": "float32"})
    cured = train(model, loss_fn, batch, jmp.DynamicLossScale(), steps, rules=rules)
    print_ends(cured)
    return broken, found, cured


def underflow(steps: int, stride: int) -> tuple[dict[str, Any], diagnostics.ExponentHistogram, dict[str, Any]]:
    """Returns a run whose gradients vanish, the exponents of its backward pass, and a run with the suggested scale."""
    photos = np.stack(load_sample_images().images)[:, :424:stride, ::stride].astype(np.float32) / 255
    photos = photos[:, : photos.shape[1] // 8 * 8, : photos.shape[2] // 8 * 8]
    batch = (jnp.concatenate([photos, photos[:, ::-1], photos[:, :, ::-1], photos[:, ::-1, ::-1]]),)
    model = Autoencoder()

    def loss_fn(params, x):
        return jnp.mean((model.apply({"params": params}, x) - x) ** 2)

    console.rule("2. gradients that vanish")
    reference = train(model, loss_fn, batch, jmp.NoOpLossScale(), steps, rate=RATE, policy="float32")
    print_ends(reference, "float32: ")
    broken = train(model, loss_fn, batch, jmp.NoOpLossScale(), steps, rate=RATE)
    print_ends(broken, "mixed_float16, unscaled: ")
    params = model.init(jax.random.key(0), batch[0])["params"]
    # Of the float32 gradient, before any training: it shows which exponents float16 would lose.
    histogram = diagnostics.backward_histogram(jax.grad(loss_fn))(params, *batch)
    print(diagnostics.underflow_report(histogram, "float16"))
    scale = float(diagnostics.suggest_loss_scale(histogram))
    console.rule(f"the same with a loss scale of {scale:g}, as suggested")
    print(diagnostics.underflow_report(histogram.total(), "float16", scale))
    # Dynamic, although the start is known: gradients shrink or grow as the network learns.
    cured = train(model, loss_fn, batch, jmp.DynamicLossScale(scale), steps, rate=RATE)
    print_ends(cured, "mixed_float16, scaled: ")
    return broken, histogram, cured | {"suggested": scale, "reference": reference}


def print_ends(run: dict[str, Any], title: str = "") -> None:
    print(f"{title}loss {run['loss'][0]:.5f} -> {run['loss'][-1]:.5f}, {run['skipped_steps'][-1]} steps skipped")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stride", type=int, default=1, help="use every n-th pixel")
    parser.add_argument("--out", type=Path, default=Path("."))
    options = parser.parse_args(argv)
    collapsed, found, held = overflow(options.steps)
    vanished, histogram, kept = underflow(options.steps, options.stride)

    options.out.mkdir(parents=True, exist_ok=True)
    diagnostics.plot_loss_scale(collapsed["loss_scale"], ~collapsed["grads_finite"])
    plt.savefig(options.out / "loss_scale.png", dpi=150)
    diagnostics.plot_exponents(histogram, "float16", kept["suggested"])
    plt.savefig(options.out / "exponents.png", dpi=150)
    print(f"pictures: {options.out / 'loss_scale.png'}, {options.out / 'exponents.png'}")
    return {"found": found, "collapsed": collapsed, "held": held, "vanished": vanished, "kept": kept}


if __name__ == "__main__":
    main()
