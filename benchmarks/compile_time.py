"""How long does XLA take to compile a deep network's gradient for a CPU: in float32, with Flax's `dtype=`, with ours?

    python benchmarks/compile_time.py [--layers 6 12 24] [--small]

Gradients of a Llama-like network with a width of 128, over two rows of 64 tokens. Seconds are of processor time, from
the lowered program to the executable, the best of three. XLA's passes for GPUs are others; `throughput.py` times these.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from _results import Results, arguments, show
from _timing import compile_seconds

from jmp_train import autocast

WIDTH, HEADS, TOKENS, VOCABULARY = 128, 4, 64, 512
FLOAT32 = "float32"


def rotated(x: jax.Array) -> jax.Array:
    """Rotary position embeddings (Su et al., "RoFormer", 2021) of `[batch, position, head, feature]`."""
    frequencies = 1e4 ** (-jnp.arange(0, x.shape[-1], 2, dtype=jnp.float32) / x.shape[-1])
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(width: int) -> nn.Dense:
            return nn.Dense(width, use_bias=False, dtype=self.dtype)

        h = nn.RMSNorm(dtype=self.dtype)(x)
        q, k, v = (dense(WIDTH)(h).reshape(*h.shape[:2], HEADS, -1) for _ in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)) / (WIDTH // HEADS) ** 0.5
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), -1e9)).astype(scores.dtype)
        x = x + dense(WIDTH)(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape))
        h = nn.RMSNorm(dtype=self.dtype)(x)
        return x + dense(WIDTH)(nn.silu(dense(4 * WIDTH)(h)) * dense(4 * WIDTH)(h))


class Llama(nn.Module):
    """A decoder as in Touvron et al., "LLaMA", 2023."""

    layers: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = Block(self.dtype)(x)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=self.dtype)(x).astype(jnp.float32)


def gradient(layers: int, dtype: Any = None) -> Callable[..., Any]:
    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = Llama(layers, dtype).apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return jax.grad(loss)


WAYS: dict[str, Callable[[int], Callable[..., Any]]] = {
    FLOAT32: gradient,
    "Flax float16": lambda layers: gradient(layers, jnp.float16),
    "ours, float16": lambda layers: autocast(gradient(layers), "mixed_float16"),
    "Flax bfloat16": lambda layers: gradient(layers, jnp.bfloat16),
    "ours, bfloat16": lambda layers: autocast(gradient(layers), "mixed_bfloat16"),
}


def compile_times(results: Results, layers: int, repeats: int) -> None:
    tokens = jax.ShapeDtypeStruct((2, TOKENS), jnp.int32)
    params = jax.eval_shape(Llama(layers).init, jax.random.key(0), tokens)
    plain = None
    for how, make in WAYS.items():
        programs = [jax.jit(make(layers)).lower(params, tokens) for _ in range(repeats)]  # not in JAX's caches
        instructions, seconds = programs[0].as_text().count(" = "), min(map(compile_seconds, programs))
        plain = plain or seconds
        row = {"layers": layers, "how": how, "instructions": instructions, "seconds": seconds}
        results.add("compile time", row | {"ratio": seconds / plain})


def print_tables(results: Results) -> None:
    columns: dict[str, Any] = {
        "layers": "d",
        "how": "",
        "instructions as instructions before XLA": "d",
        "seconds as compile, s": ".2f",
        "ratio as of float32's": ".2f",
    }
    show("compile time", columns, results.tables["compile time"])


def draw(results: Results) -> None:
    def ratios(figure: Any) -> None:
        axes, rows = figure.subplots(), results.tables["compile time"]
        for how in list(WAYS)[1:]:
            chosen = [row for row in rows if row["how"] == how]
            axes.plot([row["layers"] for row in chosen], [row["ratio"] for row in chosen], "o-", label=how)
        axes.axhline(1.0, color="0.5", linewidth=0.8)
        axes.set(xlabel="layers", ylabel="compile time, of float32's")
        axes.legend(fontsize=8)

    results.picture("compile time", ratios, (6.0, 4.0))


def main() -> None:
    options = arguments(__doc__, layers={"type": int, "nargs": "*", "default": [6, 12, 24]})
    results = Results(
        "compile_time", "processor seconds that XLA takes on this CPU", small=options.small, out=options.out
    )
    for layers in [2] if options.small else options.layers:
        compile_times(results, layers, 1 if options.small else 3)
    print_tables(results)
    draw(results)
    results.write()


if __name__ == "__main__":
    main()
