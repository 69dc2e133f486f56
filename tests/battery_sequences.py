"""Battery rows over sequences: recurrent nets, Transformers, masks, norms, rotary embeddings, remat, scan, experts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from battery_row import Row, linen, normal, wide
from flax import linen as nn

from jmp_train import flax_bridge

VOCABULARY = 64
F32_MIN = float(np.finfo(np.float32).min)


def tokens(size, rng):
    return {
        "x": rng.integers(0, VOCABULARY, (size.batch, size.length), np.int32),
        "y": rng.integers(0, VOCABULARY, (size.batch, size.length), np.int32),
    }


def vectors(size, rng):
    shape = (size.batch, size.length, size.width)
    return {"x": normal(rng, *shape), "y": normal(rng, *shape)}


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(wide(logits), batch["y"]).mean()


def squared_error(out, batch):
    return jnp.mean((wide(out) - batch["y"]) ** 2)


def recurrent(cell):
    class Recurrent(nn.Module):
        width: int
        kw: dict[str, Any]

        @nn.compact
        def __call__(self, x):
            x = nn.RNN(cell(self.width, **self.kw))(x)
            return nn.Dense(self.width, **self.kw)(x)

    return linen(lambda s, kw: Recurrent(s.width, kw), vectors, squared_error)


class Block(nn.Module):
    """A pre-norm Transformer block of Flax's own layers; `fused`: with this library's attention."""

    kw: dict[str, Any]
    dropout: float = 0.0
    fused: bool = False

    @nn.compact
    def __call__(self, x):
        mask = None if self.fused else nn.make_causal_mask(x[..., 0])
        attend = functools.partial(flax_bridge.dot_product_attention, is_causal=True)
        options = {"attention_fn": attend} if self.fused else {}
        h = nn.LayerNorm(**self.kw)(x)
        h = nn.MultiHeadDotProductAttention(4, dropout_rate=self.dropout, deterministic=False, **options, **self.kw)(
            h, mask=mask
        )
        x = x + nn.Dropout(self.dropout, deterministic=False)(h)
        h = nn.LayerNorm(**self.kw)(x)
        h = nn.Dense(2 * x.shape[-1], **self.kw)(h)
        h = nn.Dense(x.shape[-1], **self.kw)(nn.gelu(h))
        return x + nn.Dropout(self.dropout, deterministic=False)(h)


class Carried(nn.Module):
    """`Block` with the signature that `nn.scan` requires."""

    kw: dict[str, Any]
    remat: bool

    @nn.compact
    def __call__(self, x, _):
        return (nn.remat(Block, prevent_cse=False) if self.remat else Block)(self.kw)(x), None


class Transformer(nn.Module):
    """A causal language model with tied embeddings; `layers` is "loop", "fused", "remat", "scan" or "scan_remat"."""

    width: int
    depth: int
    kw: dict[str, Any]
    dropout: float = 0.0
    layers: str = "loop"

    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(VOCABULARY, self.width, **self.kw)
        positions = nn.Embed(x.shape[1], self.width, **self.kw)
        x = embed(x) + positions(jnp.arange(x.shape[1]))
        if self.layers.startswith("scan"):
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
            stack = nn.scan(Carried, length=self.depth, **axes)
            x, _ = stack(self.kw, self.layers == "scan_remat")(x, None)
        else:
            block = nn.remat(Block) if self.layers == "remat" else Block
            for _ in range(self.depth):
                x = block(self.kw, self.dropout, self.layers == "fused")(x)
        return embed.attend(nn.LayerNorm(**self.kw)(x))


def transformer(layers, dropout=0.0, depth=None):
    def batch(size, rng):
        key = {"key": jax.random.key(int(rng.integers(2**31)))} if dropout else {}
        return tokens(size, rng) | key

    def model(size, kw):
        # In another dtype, as in the reference, Flax's own attention is used.
        form = "loop" if layers == "fused" and kw else layers
        return Transformer(size.width, depth or size.layers, kw, dropout, form)

    return linen(model, batch, cross_entropy)


class MaskedAttention(nn.Module):
    """One attention layer whose padding mask arrives as a literal, as an argument or captured."""

    kind: str
    value: float
    kw: dict[str, Any]

    @nn.compact
    def __call__(self, x, padding, argument):
        q, k, v = (nn.DenseGeneral((4, x.shape[-1] // 4), **self.kw)(x) for _ in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        if self.kind == "literal":
            scores = jnp.where(padding[:, None, None, :], scores, self.value)
        elif self.kind == "argument":
            scores = scores + argument[:, None, None, :]
        else:
            scores = scores + np.where(np.arange(x.shape[1]) < x.shape[1] // 2, 0, self.value).astype(np.float32)
        out = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), **self.kw)(out)


def masked(kind, value):
    def batch(size, rng):
        padding = np.arange(size.length) < rng.integers(1, size.length, (size.batch, 1))
        argument = np.where(padding, 0, value).astype(np.float32)
        return vectors(size, rng) | {"padding": padding, "argument": argument}

    return linen(
        lambda s, kw: MaskedAttention(kind, value, kw),
        batch,
        squared_error,
        call=lambda m, b: m(b["x"], b["padding"], b["argument"]),
    )


class RMSNormNet(nn.Module):
    """Norms over activations near 1800, whose squares float16 cannot hold."""

    kw: dict[str, Any]

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(2 * x.shape[-1], **self.kw)(x)
        h = nn.Dense(x.shape[-1], **self.kw)(nn.silu(nn.RMSNorm(**self.kw)(h)))
        return nn.RMSNorm(**self.kw)(x + h)


def large_vectors(size, rng):
    batch = vectors(size, rng)
    return batch | {"x": 1800 * batch["x"]}


def rotate(x):
    """Rotary embeddings (Su et al. 2021) over `[batch, length, heads, features]`."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None, :], jnp.cos(angles)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class RotaryAttention(nn.Module):
    kw: dict[str, Any]

    @nn.compact
    def __call__(self, x):
        h = nn.RMSNorm(**self.kw)(x)
        q, k, v = (nn.DenseGeneral((4, x.shape[-1] // 4), use_bias=False, **self.kw)(h) for _ in range(3))
        mask = nn.make_causal_mask(x[..., 0])
        h = nn.dot_product_attention(rotate(q), rotate(k), v, mask=mask, dtype=self.kw.get("dtype"))
        return x + nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, **self.kw)(h)


class Experts(nn.Module):
    """Top-2 routing with a capacity (Lepikhin et al. 2021): top_k, cumsum, scatter-add, gather."""

    experts: int
    kw: dict[str, Any]

    @nn.compact
    def __call__(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        probabilities = nn.softmax(wide(nn.Dense(self.experts, use_bias=False, **self.kw)(x)))
        gates, chosen = jax.lax.top_k(probabilities, 2)
        capacity = 3 * x.shape[0] // self.experts
        places = jnp.cumsum(jax.nn.one_hot(chosen.ravel(), self.experts, dtype=jnp.int32), axis=0)
        place = jnp.take_along_axis(places, chosen.ravel()[:, None], axis=1)[:, 0] - 1
        token = jnp.repeat(jnp.arange(x.shape[0]), 2)
        slots = jnp.zeros((self.experts, capacity, x.shape[-1]), x.dtype)
        slots = slots.at[chosen.ravel(), place].add(x[token], mode="drop")
        per_expert = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        h = per_expert(x.shape[-1], **self.kw)(nn.gelu(per_expert(2 * x.shape[-1], **self.kw)(slots)))
        back = h.at[chosen.ravel(), place].get(mode="fill", fill_value=0) * gates.ravel()[:, None].astype(h.dtype)
        return jnp.zeros_like(back, shape=x.shape).at[token].add(back).reshape(shape)


def on_vectors(module):
    return linen(lambda s, kw: module(kw=kw), vectors, squared_error)


ROWS = [
    Row("lstm", recurrent(nn.OptimizedLSTMCell), flax16=True, fast=True),
    Row("gru", recurrent(nn.GRUCell), flax16=True),
    Row("transformer", transformer("loop"), flax16=True),
    Row("transformer_block", transformer("loop", depth=1), flax16=True, fast=True),
    Row("transformer_fused", transformer("fused"), flax16=True),
    Row("transformer_dropout", transformer("loop", 0.1), flax16=True, oracle=np.float32),
    Row("transformer_remat", transformer("remat"), flax16=True),
    Row("transformer_scan", transformer("scan"), flax16=True),
    Row("transformer_scan_remat", transformer("scan_remat"), flax16=True),
    *(
        Row(f"mask_{kind}_{name}", masked(kind, value), flax16=True)
        for kind in ("literal", "argument", "captured")
        for name, value in (("1e9", -1e9), ("finfo_min", F32_MIN))
    ),
    Row("rmsnorm_large", linen(lambda s, kw: RMSNormNet(kw), large_vectors, squared_error), flax16=True, fast=True),
    Row("rotary", on_vectors(RotaryAttention), flax16=True),
    Row("experts", linen(lambda s, kw: Experts(8, kw), vectors, squared_error), flax16=True),
]
