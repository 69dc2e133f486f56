"""Trains a Flax CNN on scikit-learn's handwritten digits in mixed precision, on a CPU, in under a minute.

    python examples/digits.py                               float16 with a dynamic loss scale
    python examples/digits.py --policy mixed_bfloat16       any policy in the README, or a spec such as "c=f16,o=f32"
    python examples/digits.py --compare --seeds 3           a table of policies, with equal seeds and hyperparameters

The order of operations in a step is in `train_step`; everything else is data, a progress bar and a table.
"""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jmp_train as jmp

# What `--compare` trains: a policy, and whether the loss is scaled.
COMPARED = (
    ("float32", False),
    ("mixed_bfloat16", False),
    ("mixed_float16", True),
    ("mixed_float16", False),
    ("float16", True),
    ("float16", False),
)


class CNN(nn.Module):
    """An ordinary Flax model, which says nothing about precision: `value_and_grad` applies the policy."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Classifies images `[batch, 8, 8, 1]`; returns logits `[batch, 10]`."""
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(len(x), -1)
        x = nn.relu(nn.Dense(64)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10)(x)


class State(NamedTuple):
    """Everything that a training step changes."""

    params: Any
    batch_stats: Any
    opt_state: Any


def load_data(seed: int) -> Any:
    """Training images `[898, 8, 8, 1]` in [0, 1], test images `[899, 8, 8, 1]`, and the labels of both.

    Half of the images are for testing: with fewer, one seed's accuracy says little about half a point.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    return train_test_split(images, labels, test_size=0.5, random_state=seed, stratify=labels)


def make_training(policy: jmp.Policy, scaled: bool, steps: int, seed: int):
    """Returns the initial state, the training step and the function that counts correct predictions."""
    model = CNN()
    variables = model.init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)), train=False)
    params = policy.cast_to_param(variables["params"])  # float32 under a mixed policy, 16 bits under "float16"

    # The default waits 2,000 steps before it tries a larger scale; this training is shorter than that.
    loss_scale = jmp.DynamicLossScale(growth_interval=50) if scaled else jmp.NoOpLossScale()
    tx = jmp.with_loss_scale(optax.sgd(optax.cosine_decay_schedule(0.1, steps), momentum=0.9), loss_scale)

    def loss_fn(params, batch_stats, images, labels, key):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updated = model.apply(variables, images, train=True, mutable="batch_stats", rngs={"dropout": key})
        logits = policy.cast_to_output(logits)  # float32 for the loss under O2, whose logits are float16
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, (updated["batch_stats"], jnp.mean(logits.argmax(-1) == labels))

    grad_fn = jmp.value_and_grad(loss_fn, policy, has_aux=True)

    @jax.jit
    def train_step(state: State, images: jax.Array, labels: jax.Array, key: jax.Array):
        scale = jmp.get_loss_scale(state.opt_state)
        (loss, (batch_stats, accuracy)), grads = grad_fn(
            state.params, state.batch_stats, images, labels, key, loss_scale=scale
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = jmp.step_metrics(opt_state)
        # If a gradient overflowed, `tx.update` has left parameters and optimizer state unchanged. It does not see the
        # statistics of BatchNorm, so that these are set back here.
        batch_stats = jmp.select_tree(metrics["grads_finite"], batch_stats, state.batch_stats)
        return State(params, batch_stats, opt_state), {"loss": loss, "accuracy": accuracy, **metrics}

    @jax.jit
    def count_correct(state: State, images: jax.Array, labels: jax.Array):
        # Inference without autocast: Flax's layers compute in the dtype of their parameters and inputs.
        variables = {"params": policy.cast_to_compute(state.params), "batch_stats": state.batch_stats}
        logits = model.apply(variables, images.astype(policy.compute_dtype), train=False)
        return jnp.sum(logits.argmax(-1) == labels)

    return State(params, variables["batch_stats"], tx.init(params)), train_step, count_correct


def train(policy: jmp.Policy, scaled: bool, seed: int, epochs: int, batch_size: int, report) -> dict[str, Any]:
    """Trains one model; returns its test accuracy and the curves of loss and loss scale."""
    train_images, test_images, train_labels, test_labels = load_data(seed)
    batches = len(train_images) // batch_size
    state, train_step, count_correct = make_training(policy, scaled, epochs * batches, seed)
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    losses, scales, metrics = [], [], {}
    started = time.perf_counter()
    for epoch in range(epochs):
        order = rng.permutation(len(train_images))
        for i in range(batches):
            chosen = order[i * batch_size : (i + 1) * batch_size]
            step_key = jax.random.fold_in(key, epoch * batches + i)
            state, metrics = train_step(state, train_images[chosen], train_labels[chosen], step_key)
            losses.append(metrics["loss"])
            scales.append(metrics["loss_scale"])
        report(metrics, batches)
    correct = int(count_correct(state, test_images, test_labels))
    return {
        "test_accuracy": 100 * correct / len(test_images),
        "losses": np.asarray(jnp.stack(losses), np.float32),
        "scales": np.asarray(jnp.stack(scales), np.float32),
        "skipped": int(metrics["skipped_steps"]),
        "seconds": time.perf_counter() - started,
    }


def run_all(rows, seeds: int, epochs: int, batch_size: int) -> dict[str, list[dict[str, Any]]]:
    """Trains every row with every seed, behind a progress bar."""
    columns = "loss {task.fields[loss]:7.4f}  acc {task.fields[acc]:6.1%}  scale {task.fields[scale]:<9.0f} skipped "
    progress = Progress(
        TextColumn("{task.description:24s}"),
        BarColumn(20),
        TextColumn(columns + "{task.fields[skipped]}"),
        TimeRemainingColumn(),
    )
    results: dict[str, list[dict[str, Any]]] = {}
    with progress:
        for policy, scaled in rows:
            title = f"{policy}, scaled" if scaled else policy
            steps = seeds * epochs * (898 // batch_size)
            task = progress.add_task(title, total=steps, loss=float("nan"), acc=0.0, scale=1.0, skipped=0)

            def report(metrics, done, task=task):
                loss, acc, scale = (float(metrics[name]) for name in ("loss", "accuracy", "loss_scale"))
                skipped = int(metrics["skipped_steps"])
                progress.update(task, advance=done, loss=loss, acc=acc, scale=scale, skipped=skipped)

            runs = [train(jmp.get_policy(policy), scaled, seed, epochs, batch_size, report) for seed in range(seeds)]
            results[title] = runs
    return results


def print_table(results: dict[str, list[dict[str, Any]]]) -> None:
    """One row per policy; accuracies are percentages of the test set."""
    table = Table(title="scikit-learn digits")
    for column in ("policy", "test accuracy", "each seed", "final loss", "loss scale", "skipped", "seconds/seed"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for title, runs in results.items():
        accuracies = [run["test_accuracy"] for run in runs]
        table.add_row(
            title,
            f"{np.mean(accuracies):.2f}",
            " ".join(f"{accuracy:.2f}" for accuracy in accuracies),
            f"{np.mean([run['losses'][-20:].mean() for run in runs]):.4f}",
            f"{runs[-1]['scales'][-1]:.0f}",
            "/".join(str(run["skipped"]) for run in runs),
            f"{np.mean([run['seconds'] for run in runs]):.1f}",
        )
    # Rich assumes 80 columns when the output is not a terminal; the table is wider.
    Console(width=None if Console().is_terminal else 120).print(table)


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws loss and loss scale of each row's first seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1))
    window = max(1, len(next(iter(results.values()))[0]["losses"]) // 40)
    for title, runs in results.items():
        losses = runs[0]["losses"]
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        top.plot(np.arange(len(smooth)) + window, smooth, label=title)
        bottom.step(np.arange(len(losses)) + 1, runs[0]["scales"])
    top.set(yscale="log", ylabel=f"training loss (mean of {window} steps)")
    top.legend(frameon=False)
    bottom.set_yscale("log", base=2)
    bottom.set(ylabel="loss scale", xlabel="step")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> dict[str, list[dict[str, Any]]]:
    """Reads the arguments, trains, prints the table and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="mixed_float16", help="a name or a spec (default: %(default)s)")
    parser.add_argument("--no-scaling", action="store_true", help="leave the loss unscaled")
    parser.add_argument("--compare", action="store_true", help="train with several policies instead of one")
    parser.add_argument("--seeds", type=int, default=None, help="seeds per policy (default: 1, with --compare 3)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--plot", type=Path, default=Path(__file__).with_name("digits.png"))
    args = parser.parse_args(argv)

    needs_scale = jmp.get_policy(args.policy).compute_dtype == np.float16
    rows = COMPARED if args.compare else [(args.policy, needs_scale and not args.no_scaling)]
    seeds = args.seeds or (3 if args.compare else 1)
    results = run_all(rows, seeds, args.epochs, args.batch_size)
    print_table(results)
    plot(results, args.plot)
    print(f"Curves of loss and loss scale: {args.plot}")
    return results


if __name__ == "__main__":
    main()
