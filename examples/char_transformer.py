"""Trains a small decoder to write Python, on the standard library's own source text, in a few minutes on a CPU.

    python examples/char_transformer.py                       float16 with a dynamic loss scale
    python examples/char_transformer.py --policy float32      the same in float32
    python examples/char_transformer.py --resume              continues from the last checkpoint, bit for bit
    python examples/char_transformer.py --tiny --steps 20     a tiny model, in seconds

Shows how mixed precision combines with what training at scale needs: gradient accumulation, clipping, a schedule, an
average of the parameters, checkpoints with the position in the data, metrics in a CSV file, and sampling with 16-bit
weights. The order of operations in a step is in `train_step`.
"""

import argparse
import csv
import dataclasses
import functools
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import jmp_train as jmp
from jmp_train import flax_bridge

VOCABULARY = 128  # ASCII, and a multiple of 8 for Tensor Cores


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model and the data; a micro-batch is `batch` windows of `context` characters."""

    width: int = 128
    heads: int = 4
    layers: int = 3
    context: int = 64
    batch: int = 32
    characters: int = 4_000_000


TINY = Size(width=32, heads=2, layers=1, context=32, batch=8, characters=200_000)


class Block(nnx.Module):
    """A pre-norm Transformer block on `[batch, length, width]`."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(size.width, rngs=rngs) for _ in range(2)])
        attend = functools.partial(flax_bridge.dot_product_attention, is_causal=True)  # fused on a GPU
        self.attention = nnx.MultiHeadAttention(size.heads, size.width, decode=False, attention_fn=attend, rngs=rngs)
        self.up = nnx.Linear(size.width, 4 * size.width, rngs=rngs)
        self.down = nnx.Linear(4 * size.width, size.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    """Maps characters `[batch, length]` to logits of the next ones `[batch, length, 128]`."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.characters = nnx.Embed(VOCABULARY, size.width, rngs=rngs)
        self.positions = nnx.Embed(size.context, size.width, rngs=rngs)
        self.blocks = nnx.List([Block(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)
        self.head = nnx.Linear(size.width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.characters(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def load_text(characters: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the standard library's source text as ASCII codes, uint8: 95 % for training, the rest for validation."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join(path.read_text(errors="replace") for path in sorted(library.glob("*.py")))[:characters]
    codes = np.frombuffer(text.encode("ascii", errors="replace"), np.uint8)
    return codes[: -len(codes) // 20], codes[-len(codes) // 20 :]


def windows(codes: np.ndarray, rng: np.random.Generator, size: Size) -> np.ndarray:
    """A batch of random windows `[batch, context + 1]`, int32: the inputs, and each input's next character."""
    starts = rng.integers(len(codes) - size.context - 1, size=size.batch)
    return np.stack([codes[start : start + size.context + 1] for start in starts]).astype(np.int32)


def loss_fn(model: Decoder, batch: jax.Array) -> jax.Array:
    """Cross-entropy of the next character, in nats, float32 `[]`."""
    logits = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def make_training(size: Size, policy: jmp.Policy, steps: int, accumulate: int) -> Any:
    """Returns the initial state, the training step, and the function that computes the validation loss."""
    scaled = policy.compute_dtype == np.float16  # bfloat16 has the range of float32 and needs no loss scale
    loss_scale = jmp.DynamicLossScale(growth_interval=200) if scaled else jmp.NoOpLossScale()
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, max(1, steps // 10), steps)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    # `with_loss_scale` goes outermost, so that a skipped step leaves all state inside it unchanged: a micro-batch that
    # overflows is left out of the accumulated gradient.
    tx = jmp.with_loss_scale(optax.MultiSteps(inner, accumulate), loss_scale)  # pyright: ignore[reportArgumentType]
    state = flax_bridge.NNXTrainState.create(model=Decoder(size, nnx.Rngs(0)), tx=tx, ema_decay=0.98)
    grad_fn = flax_bridge.value_and_grad(loss_fn, policy)

    def train_step(state: Any, batch: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        loss, grads, model_state = grad_fn(state.model, batch, loss_scale=jmp.get_loss_scale(state))
        state = state.apply_gradients(grads=grads, model_state=model_state)
        return state, {"loss": loss, **jmp.step_metrics(state)}

    def validation_loss(state: Any, batch: jax.Array) -> jax.Array:
        return loss_fn(state.ema_model, batch)  # of the averaged parameters, in float32

    return state, jax.jit(train_step, donate_argnums=0), jax.jit(validation_loss)


def make_manager(directory: Path) -> ocp.CheckpointManager:
    """Saves in the background; renames a checkpoint when it is complete, so that a killed run leaves no partial one."""
    return ocp.CheckpointManager(directory.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))


def save(manager: ocp.CheckpointManager, step: int, state: Any, rng: np.random.Generator) -> None:
    """Saves the training state, whose parameters and moments are float32 under every policy, and the data generator's.

    For parameters stored in 16 bits, see the README.
    """
    items = {"state": ocp.args.StandardSave(state), "data": ocp.args.JsonSave(rng.bit_generator.state)}
    manager.save(step, args=ocp.args.Composite(**items))


def restore(manager: ocp.CheckpointManager, like: Any, rng: np.random.Generator) -> tuple[int, Any]:
    """Returns the last saved step and its state; sets `rng` to its state at that step, so that the data continues."""
    step = manager.latest_step()
    if step is None:
        raise SystemExit(f"there is no checkpoint in {manager.directory}; start without --resume")
    template = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    items = {"state": ocp.args.StandardRestore(template), "data": ocp.args.JsonRestore()}
    restored = manager.restore(step, args=ocp.args.Composite(**items))
    rng.bit_generator.state = restored.data
    return step, restored.state


def sample(state: Any, policy: jmp.Policy, size: Size, count: int, temperature: float = 0.6) -> str:
    """Samples `count` characters from the averaged model, with weights in the compute dtype: half the bytes."""
    weights = jmp.export_params(state.ema_params, policy)

    def logits_of(params: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(state.graphdef, params, state.model_state)(tokens)

    run = jmp.autocast(logits_of, policy)

    @jax.jit
    def write(weights: Any, key: jax.Array) -> jax.Array:
        def one(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = run(weights, window[None])[0, -1]
            character = jax.random.categorical(key, logits / temperature)
            return jnp.append(window[1:], character), character

        start = jnp.full((size.context,), ord("\n"), jnp.int32)
        return jax.lax.scan(one, start, jax.random.split(key, count))[1]

    return "".join(map(chr, np.asarray(write(weights, jax.random.key(0)))))


def make_bar(title: str) -> Progress:
    """A progress bar that shows the losses and the loss scale of the last checkpoint."""
    columns = "loss {task.fields[loss]:.3f}  held out {task.fields[held_out]:.3f}  scale {task.fields[scale]:g}"
    return Progress(TextColumn(title), BarColumn(20), MofNCompleteColumn(), TextColumn(columns), TimeRemainingColumn())


def train(args: argparse.Namespace, size: Size, policy: jmp.Policy) -> dict[str, Any]:
    """Trains, saves and logs; returns the last state and `(micro-batch, loss, held-out loss)` of every checkpoint."""
    train_codes, held_out_codes = load_text(size.characters)
    held_out = [windows(held_out_codes, np.random.default_rng(i), size) for i in range(8)]
    state, train_step, validation_loss = make_training(size, policy, args.steps, args.accumulate)
    rng, first, total = np.random.default_rng(0), 0, args.steps * args.accumulate
    losses = []
    args.out.mkdir(parents=True, exist_ok=True)
    mode = "a" if args.resume else "w"
    with make_manager(args.out / "checkpoints") as manager, open(args.out / "metrics.csv", mode, 1, newline="") as file:
        log = csv.writer(file)
        if args.resume:
            first, state = restore(manager, state, rng)
        else:
            log.writerow(["micro_batch", "loss", "held_out_loss", "loss_scale", "skipped_steps"])
        with make_bar(args.policy) as bar:
            task = bar.add_task("", total=total, completed=first, loss=np.nan, held_out=np.nan, scale=1)
            for step in range(first + 1, total + 1):
                state, metrics = train_step(state, windows(train_codes, rng, size))
                if step % args.every == 0 or step == total:
                    save(manager, step, state, rng)
                    loss, scale = float(metrics["loss"]), float(metrics["loss_scale"])
                    averaged = float(np.mean([validation_loss(state, batch) for batch in held_out]))
                    losses.append((step, loss, averaged))
                    log.writerow([*losses[-1], scale, int(metrics["skipped_steps"])])
                    bar.update(task, loss=loss, held_out=averaged, scale=scale)
                bar.update(task, advance=1)
    return {"state": state, "losses": losses}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Reads the arguments, trains, and prints what the model writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="mixed_float16", help="a name or a spec (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="steps of the optimizer (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step (default: %(default)s)")
    parser.add_argument(
        "--every", type=int, default=100, help="micro-batches between checkpoints (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model and text, to try things out")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    parser.add_argument("--write", type=int, default=600, help="characters to write at the end (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("char_transformer"), help="for checkpoints and metrics.csv")
    args = parser.parse_args(argv)

    size, policy = TINY if args.tiny else Size(), jmp.get_policy(args.policy)
    result = train(args, size, policy)
    result["text"] = sample(result["state"], policy, size, args.write)
    step, loss, valid = result["losses"][-1]
    print(f"{args.policy}: {step} micro-batches, loss {loss:.4f}, held out {valid:.4f}; it writes\n{result['text']}")
    return result


if __name__ == "__main__":
    main()
