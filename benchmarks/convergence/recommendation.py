"""Recommendation: neural collaborative filtering on preferences drawn from a published model of them.

Real: the network (NeuMF: a product of embeddings beside a tower of dense layers), negative sampling, the metric (a hit
among the ten best of a hundred). Made: the data, from probabilistic matrix factorisation (Salakhutdinov and Mnih,
2007): users and items are Gaussian vectors, and a user chooses items by a softmax of the products, with a popularity
of each item that falls like Zipf's law. Stands for MovieLens (He et al., "Neural Collaborative Filtering", 2017).
"""

import functools
from collections.abc import Iterator, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._application import Application, Player, Variables

STEPS, BATCH, USERS, ITEMS, CHOSEN = 800, 1024, 1000, 600, 40


class NeuMF(nn.Module):
    """Scores of pairs `[batch]` of users and items."""

    @nn.compact
    def __call__(self, users: jax.Array, items: jax.Array) -> jax.Array:
        product = nn.Embed(USERS, 16)(users) * nn.Embed(ITEMS, 16)(items)
        tower = jnp.concatenate([nn.Embed(USERS, 32)(users), nn.Embed(ITEMS, 32)(items)], axis=-1)
        for features in (64, 32, 16):
            tower = nn.relu(nn.Dense(features)(tower))
        return nn.Dense(1)(jnp.concatenate([product, tower], axis=-1))[..., 0]


@functools.cache
def preferences() -> np.ndarray:
    """For each user `CHOSEN` different items, int32 `[USERS, CHOSEN]`; the last is for testing."""
    rng = np.random.default_rng(0)
    taste, kind = rng.normal(size=(USERS, 8)), rng.normal(size=(ITEMS, 8))
    popularity = -np.log(np.arange(1, ITEMS + 1))
    # Gumbel's trick draws without replacement from a softmax.
    scores = taste @ kind.T + 0.5 * popularity + rng.gumbel(size=(USERS, ITEMS))
    chosen = np.argsort(-scores, axis=1)[:, :CHOSEN].astype(np.int32)
    return rng.permuted(chosen, axis=1)


@functools.cache
def contest() -> np.ndarray:
    """For each user the item to find and 99 that were not chosen, `[USERS, 100]`."""
    rng, chosen = np.random.default_rng(1), preferences()
    others = [rng.choice(np.setdiff1d(np.arange(ITEMS), row), 99, replace=False) for row in chosen]
    return np.concatenate([chosen[:, -1:], np.array(others, np.int32)], axis=1)


def pairs(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Users, items and labels: a fifth of the items were chosen, four fifths are random."""
    rng, chosen = np.random.default_rng(seed), preferences()[:, :-1]
    while True:
        users = rng.integers(0, USERS, BATCH).astype(np.int32)
        positive = rng.random(BATCH) < 0.2
        known = chosen[users, rng.integers(0, CHOSEN - 1, BATCH)]
        yield users, np.where(positive, known, rng.integers(0, ITEMS, BATCH).astype(np.int32)), positive


def applications() -> list[Application]:
    """The row of this file."""
    model = NeuMF()

    def loss(variables: Sequence[Variables], batch, key):
        users, items, labels = batch
        return optax.sigmoid_binary_cross_entropy(model.apply(variables[0], users, items), labels).mean(), {}

    @jax.jit
    def hits(variables: Variables):
        users = np.broadcast_to(np.arange(USERS)[:, None], (USERS, 100))
        scores = model.apply(variables, users, contest())
        return jnp.mean(jnp.sum(scores[:, 1:] >= scores[:, :1], axis=1) < 10)

    def init(key: jax.Array) -> Variables:
        return model.init(key, np.zeros(1, np.int32), np.zeros(1, np.int32))

    return [
        Application(
            name="recommendation, NeuMF",
            metric="hits among the best ten of a hundred, %",
            higher_is_better=True,
            resolution=1.0,
            steps=STEPS,
            players=(Player(init, loss, optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))),),
            batches=pairs,
            evaluate=lambda variables: 100 * float(hits(variables[0])),
        )
    ]
