"""Two ways in which 16 bits stop a network from learning, measured in the network, and what cures them.

    python examples/underflow.py            both experiments, some minutes on two CPU cores, two pictures

An autoencoder learns two photographs from scikit-learn and their mirror images. Its loss is the mean over all pixels,
about six million numbers, so that the gradient of one pixel is smaller than float16 can hold.

1. Gradients (`underflow_gradients.png`). Without a loss scale most activation gradients are zero in float16, and
   learning stops; with a dynamic scale the loss falls as in float32.
2. Updates (`underflow_updates.png`). Parameters stored in bfloat16 have 8 bits of precision, so that an update of less
   than about 1/512 of the parameter is rounded away. Float32 masters cure this, and so does stochastic rounding.

The pictures are those of Micikevicius et al., "Mixed Precision Training", ICLR 2018, figures 2 and 3, for this network.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_sample_images

import jmp_train as jmp
from jmp_train import diagnostics


class Autoencoder(nn.Module):
    """Encodes each patch of 8x8 pixels as `features` numbers, applies two convolutions, and decodes to pixels."""

    features: int = 32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images `[batch, height, width, 3]` in [0, 1] to images of that shape."""
        x = nn.relu(nn.Conv(self.features, (8, 8), strides=(8, 8))(x))
        x = self.perturb("code", x)  # adds zero; its gradient is the gradient of this activation
        for i in range(2):
            x = nn.relu(nn.Conv(self.features, (3, 3))(x))
            x = self.perturb(f"hidden_{i}", x)
        return nn.sigmoid(nn.ConvTranspose(3, (8, 8), strides=(8, 8))(x))


def load_photos(mirrored: bool, stride: int) -> np.ndarray:
    """Two photographs `[2, 424, 640, 3]` in [0, 1], or eight with their mirror images; every `stride`-th pixel."""
    photos = np.stack(load_sample_images().images)[:, ::stride, ::stride].astype(np.float32) / 255
    photos = photos[:, : photos.shape[1] // 8 * 8, : photos.shape[2] // 8 * 8]
    if not mirrored:
        return photos
    return np.concatenate([photos, photos[:, ::-1], photos[:, :, ::-1], photos[:, ::-1, ::-1]])


def train(
    title: str, policy_name: str, tx: optax.GradientTransformation, photos: np.ndarray, steps: int
) -> dict[str, Any]:
    """Trains the autoencoder; returns a curve per metric, and histograms from half-way through the training."""
    policy = jmp.get_policy(policy_name)
    model = Autoencoder()
    variables = model.init(jax.random.key(0), photos[:1])
    params = policy.cast_to_param(variables["params"])
    opt_state = tx.init(params)
    # Zeros that `perturb` adds to the activations of the whole batch; `init` saw one image.
    probes = jax.tree.map(lambda x: jnp.zeros((len(photos), *x.shape[1:])), variables["perturbations"])

    def loss_fn(params, probes, photos):
        reconstructed = model.apply({"params": params, "perturbations": probes}, photos)
        return jnp.mean(jnp.square(reconstructed - photos))

    grad_fn = jmp.value_and_grad(loss_fn, policy, argnums=(0, 1))

    @jax.jit
    def train_step(params, opt_state, photos):
        loss, (grads, activation_grads) = grad_fn(params, probes, photos, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        zeros = jnp.mean(jnp.stack([jnp.mean(g == 0) for g in jax.tree.leaves(activation_grads)]))
        metrics = {"loss": loss, "zeros": zeros, **jmp.step_metrics(opt_state)}
        return optax.apply_updates(params, updates), opt_state, metrics, (activation_grads, updates)

    history, seen, started = [], None, time.perf_counter()
    for step in track(range(steps), f"{title:32s}"):
        params, opt_state, metrics, (activation_grads, updates) = train_step(params, opt_state, photos)
        history.append(jax.tree.map(float, metrics))
        if step == steps // 2:
            # An update is lost where it is small beside its parameter, so the histogram is of their ratio.
            ratios = jax.tree.map(lambda u, p: u / p, updates, params)
            seen = {
                "gradients": diagnostics.exponent_histogram(activation_grads),
                "ratios": diagnostics.exponent_histogram(ratios),
            }
            seen["scale"] = float(metrics["loss_scale"])
    curves = {name: np.array([metrics[name] for metrics in history]) for name in history[0]}
    return {**curves, **(seen or {}), "seconds": time.perf_counter() - started}


def experiment_gradients(steps: int, stride: int) -> dict[str, dict[str, Any]]:
    """Trains in float32, in float16 without a loss scale and with a dynamic one; all parameters are float32."""
    photos = load_photos(mirrored=True, stride=stride)
    adam = optax.adam(optax.cosine_decay_schedule(5e-3, steps))
    unscaled = jmp.with_loss_scale(adam, jmp.NoOpLossScale())
    # The default waits 2,000 steps before it tries a larger scale; this training is shorter than that.
    scaled = jmp.with_loss_scale(adam, jmp.DynamicLossScale(growth_interval=20))
    return {
        title: train(title, policy, tx, photos, steps)
        for title, policy, tx in (
            ("float32", "float32", unscaled),
            ("mixed_float16, unscaled", "mixed_float16", unscaled),
            ("mixed_float16, dynamic scale", "mixed_float16", scaled),
        )
    }


def experiment_updates(steps: int, stride: int) -> dict[str, dict[str, Any]]:
    """Trains with parameters in float32, in bfloat16, and in bfloat16 with each cure; all compute in bfloat16."""
    # Fewer pixels than above, for speed: which updates are lost does not depend on the number of pixels.
    photos = load_photos(mirrored=False, stride=2 * stride)
    adam = optax.adam(1e-4)  # as small as for fine-tuning, so that updates are small beside their parameters
    return {
        title: train(title, policy, jmp.with_loss_scale(inner, jmp.NoOpLossScale()), photos, steps)
        for title, policy, inner in (
            ("float32 parameters", "mixed_bfloat16", adam),
            ("bfloat16 parameters", "bfloat16", adam),
            ("with float32 masters", "bfloat16", jmp.with_master_weights(adam)),
            ("with stochastic rounding", "bfloat16", jmp.with_stochastic_rounding(adam)),
            (
                "with stochastic rounding, state too",
                "bfloat16",
                jmp.with_stochastic_rounding(jmp.with_low_precision_state(adam)),
            ),
        )
    }


def print_table(title: str, runs: dict[str, dict[str, Any]]) -> None:
    """One row per run; the final loss and the share of zeros are means over the last tenth of the steps."""
    table = Table(title=title)
    for column in ("run", "first loss", "final loss", "zero activation gradients", "loss scale", "skipped", "seconds"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, run in runs.items():
        last = -max(1, len(run["loss"]) // 10)
        table.add_row(
            name,
            f"{run['loss'][0]:.4f}",
            f"{run['loss'][last:].mean():.5f}",
            f"{run['zeros'][last:].mean():.1%}",
            f"{run['loss_scale'][-1]:.0f}",
            f"{run['skipped_steps'][-1]:.0f}",
            f"{run['seconds']:.0f}",
        )
    Console(width=None if Console().is_terminal else 120).print(table)


def plot_losses(axis: Any, runs: dict[str, dict[str, Any]]) -> None:
    """Plots the training loss over the steps, a line per run."""
    for (title, run), style in zip(runs.items(), ("-", "-", "--", ":", "-."), strict=False):
        axis.plot(run["loss"], style, label=title)
    axis.set(xlabel="step", ylabel="training loss (mean over all pixels)", yscale="log")
    axis.legend(frameon=False)


def draw(gradients: dict[str, dict[str, Any]], updates: dict[str, dict[str, Any]], folder: Path) -> list[Path]:
    """Writes the two pictures and returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    paths = [folder / "underflow_gradients.png", folder / "underflow_updates.png"]

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2))
    scale = gradients["mixed_float16, dynamic scale"]["scale"]
    diagnostics.plot_exponents(gradients["float32"]["gradients"], "float16", scale, ax=left)
    left.set(xlabel="exponent of activation gradients (powers of 2)")
    plot_losses(right, gradients)
    figure.tight_layout()
    figure.savefig(paths[0], dpi=150)
    plt.close(figure)

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2))
    left.axvspan(-30, -9, color="tab:red", alpha=0.12, lw=0, label="lost in bfloat16")
    left.axvspan(-9, -8, color="tab:orange", alpha=0.3, lw=0, label="lost or not, by the parameter's last bits")
    ratios = updates["float32 parameters"]["ratios"].total()
    shares = 100 * ratios.values[0] / max(1, ratios.values[0].sum())
    edges = np.append(ratios.exponents, ratios.exponents[-1] + 1)
    left.stairs(shares, edges, label="half-way through training", fill=True, color="tab:blue", alpha=0.85)
    left.set(xlabel="exponent of update / parameter, log2", ylabel="% of parameters", xlim=(-30, 4))
    left.legend(frameon=False, loc="upper left")
    plot_losses(right, updates)
    figure.tight_layout()
    figure.savefig(paths[1], dpi=150)
    plt.close(figure)
    return paths


def main(argv: list[str] | None = None) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Reads the arguments, runs both experiments, prints two tables and writes two pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs=2, default=(100, 400), help="of the two experiments")
    parser.add_argument("--stride", type=int, default=1, help="take every n-th pixel: faster, and less underflow")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the pictures")
    args = parser.parse_args(argv)

    gradients = experiment_gradients(args.steps[0], args.stride)
    print_table("Gradients that float16 cannot hold", gradients)
    updates = experiment_updates(args.steps[1], args.stride)
    print_table("Updates that bfloat16 parameters lose", updates)
    for path in draw(gradients, updates, args.out):
        print(path)
    return gradients, updates


if __name__ == "__main__":
    main()
