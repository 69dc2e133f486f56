"""Parameters, good and bad gradients, and a training loop for the tests of the optimizer."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax

PARAMS = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float32), "c": np.float32(-0.0)}
PARAMS = jax.tree.map(jnp.asarray, PARAMS)
GOOD = jax.tree.map(lambda x: jnp.asarray(np.ones_like(x)), PARAMS)


def broken(*names, value=jnp.inf):
    return {name: jnp.full_like(x, value) if name in names else x for name, x in GOOD.items()}


def run(tx, steps, state=None, params=PARAMS):
    state = tx.init(params) if state is None else state
    for grads in steps:
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state
