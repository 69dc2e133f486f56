"""Translation: numbers in English words into German ones, by an LSTM with attention and by a Transformer.

Real: the two languages' rules for numerals, which reorder ("one thousand forty-two" is "eintausendzweiundvierzig"),
fuse and inflect; encoder, decoder, attention, label smoothing. Made: the sentences, by those rules. Smaller: all of it.
Stands for WMT English-German: GNMT and the paper's LSTM sequence-to-sequence models, and the Transformer.
"""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._application import Application, Player, Variables
from ._images import shuffled
from ._layers import Block

BATCH, WIDTH, PAD, START = 32, 96, 0, 1
LETTERS = "abcdefghijklmnopqrstuvwxyzßüö -"
ENGLISH = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
ENGLISH += "seventeen eighteen nineteen"
ENGLISH_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
GERMAN = "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
GERMAN += "siebzehn achtzehn neunzehn"
GERMAN_TENS = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"


def english(n: int) -> str:
    """A number, 1 to 999,999, in English words."""
    if n >= 1000:
        return f"{english(n // 1000)} thousand{' ' + english(n % 1000) if n % 1000 else ''}"
    if n >= 100:
        return f"{english(n // 100)} hundred{' ' + english(n % 100) if n % 100 else ''}"
    if n >= 20:
        return ENGLISH_TENS.split()[n // 10 - 2] + (f"-{english(n % 10)}" if n % 10 else "")
    return ENGLISH.split()[n]


def german(n: int, last: bool = True) -> str:
    """The same in German; "eins" is "ein" before another word."""
    if n >= 1000:
        return f"{german(n // 1000, last=False)}tausend{german(n % 1000) if n % 1000 else ''}"
    if n >= 100:
        return f"{german(n // 100, last=False)}hundert{german(n % 100, last) if n % 100 else ''}"
    if n >= 20:
        tens = GERMAN_TENS.split()[n // 10 - 2]
        return f"{german(n % 10, last=False)}und{tens}" if n % 10 else tens
    return "ein" if n == 1 and not last else GERMAN.split()[n]


def encode(sentences: Sequence[str]) -> np.ndarray:
    """`[sentences, length]` int32: letters from 2 on, padded with `PAD`, at least one at the end."""
    length = -(-(max(map(len, sentences)) + 1) // 8) * 8
    return np.array([[LETTERS.index(c) + 2 for c in s] + [PAD] * (length - len(s)) for s in sentences], np.int32)


@functools.cache
def pairs() -> tuple[np.ndarray, np.ndarray]:
    """The numbers from 1 to 9,999 in English and in German; the last 512 are for testing."""
    numbers = np.random.default_rng(0).permutation(np.arange(1, 10_000))
    return encode([english(n) for n in numbers]), encode([german(n) for n in numbers])


class LSTM(nn.Module):
    """A bidirectional encoder, and a decoder that attends to it (Luong et al., 2015)."""

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        x = nn.Embed(40, WIDTH)(source)
        lengths = jnp.sum(source != PAD, axis=1)
        encoder = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(WIDTH // 2)), nn.RNN(nn.OptimizedLSTMCell(WIDTH // 2)))
        memory = encoder(x, seq_lengths=lengths)
        y = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(nn.Embed(40, WIDTH)(target))
        scores = jnp.einsum("btd,bsd->bts", nn.Dense(WIDTH)(y), memory) / WIDTH**0.5
        weights = jax.nn.softmax(jnp.where((source != PAD)[:, None], scores, -1e9))
        y = nn.tanh(nn.Dense(WIDTH)(jnp.concatenate([y, jnp.einsum("bts,bsd->btd", weights, memory)], axis=-1)))
        y = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(y)
        return nn.Dense(40)(y)


class Transformer(nn.Module):
    """Two layers each of encoder and decoder."""

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        there = (source != PAD)[:, None, None]
        memory = nn.Embed(40, WIDTH)(source) + nn.Embed(source.shape[1], WIDTH)(jnp.arange(source.shape[1]))
        for _ in range(2):
            memory = Block()(memory, mask=there)
        memory = nn.LayerNorm()(memory)
        y = nn.Embed(40, WIDTH)(target) + nn.Embed(target.shape[1], WIDTH)(jnp.arange(target.shape[1]))
        for _ in range(2):
            y = Block()(y, nn.make_causal_mask(target), memory, there)
        return nn.Dense(40)(nn.LayerNorm()(y))


def translator(name: str, model: nn.Module, rate: float, steps: int) -> Application:
    """The application that trains one of the networks."""
    english_text, german_text = pairs()

    def logits_of(variables: Variables, source: jax.Array, target: jax.Array) -> jax.Array:
        before = jnp.concatenate([jnp.full_like(target[:, :1], START), target[:, :-1]], axis=1)
        return model.apply(variables, source, before)

    def asked(target: jax.Array) -> jax.Array:
        """All letters and the first padding, which ends the sentence."""
        return jnp.arange(target.shape[1]) <= jnp.sum(target != PAD, axis=1, keepdims=True)

    def loss(variables: Sequence[Variables], batch, key):
        source, target = batch
        labels = optax.smooth_labels(jax.nn.one_hot(target, 40), 0.1)
        losses = optax.softmax_cross_entropy(logits_of(variables[0], source, target), labels)
        return jnp.sum(losses * asked(target)) / jnp.sum(asked(target)), {}

    @jax.jit
    def right(variables: Variables):
        source, target = english_text[-512:], german_text[-512:]
        found = logits_of(variables, source, target).argmax(-1)
        return jnp.sum((found == target) & asked(target)) / jnp.sum(asked(target))

    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 50, steps)
    return Application(
        name=name,
        metric="held-out letters foretold, %",
        higher_is_better=True,
        resolution=0.2,
        steps=steps,
        players=(
            Player(
                lambda key: model.init(key, english_text[:1], german_text[:1]),
                loss,
                optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.98)),
            ),
        ),
        batches=lambda seed: shuffled(seed, BATCH, english_text[:-512], german_text[:-512]),
        evaluate=lambda variables: 100 * float(right(variables[0])),
    )


def applications() -> list[Application]:
    """The rows of this file."""
    return [
        translator("translation, LSTM with attention", LSTM(), 4e-3, 500),
        translator("translation, Transformer", Transformer(), 3e-3, 250),
    ]
