"""A process that trains and saves until it is killed; `test_checkpoints.py` kills it.

python checkpoint_worker.py DIRECTORY
"""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jmp_train as jmp
from jmp_train.flax_bridge import TrainState

SIZE = 4_000_000  # large enough that writing takes a while


def open_manager(directory):
    """Saves are asynchronous, and a checkpoint has its final name only once it is complete."""
    return ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=None))


def start():
    tx = jmp.with_loss_scale(optax.sgd(1.0, momentum=0.5), jmp.DynamicLossScale(8.0, growth_interval=10**6))
    return TrainState.create(apply_fn=print, params={"w": jnp.zeros(SIZE)}, tx=tx)


def restored(manager):
    """The last checkpoint, or the beginning."""
    state = start()
    if manager.latest_step() is None:
        return state
    return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(jax.eval_shape(lambda: state)))


def consistent_at(directory):
    """The step of the last checkpoint, all leaves of which are of that step; 0 before the first."""
    with open_manager(directory) as manager:
        state, step = restored(manager), manager.latest_step() or 0
    expected = w = trace = 0.0
    for _ in range(step):
        trace = 0.5 * trace + 1
        w -= trace
    expected = np.full(SIZE, w, np.float32)
    np.testing.assert_array_equal(state.params["w"], expected)
    np.testing.assert_array_equal(state.opt_state.inner_state[0].trace["w"], np.full(SIZE, trace, np.float32))
    assert int(state.step) == int(jmp.get_loss_scale(state).counter) == step
    return step


def report(word, step):
    """Writes a line at once: `print` of several words writes them one by one under PYTHONUNBUFFERED."""
    sys.stdout.write(f"{word} {step}\n")
    sys.stdout.flush()


def main(directory):
    """Each step adds one of the same gradient, so that every leaf tells its step."""
    train_step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads), donate_argnums=0)
    with open_manager(directory) as manager:
        state = restored(manager)
        report("resumed", int(state.step))
        while True:
            state = train_step(state, {"w": jnp.ones(SIZE)})
            step = int(state.step)
            # Blocks until the save before is complete, then copies and returns; this one is written meanwhile.
            manager.save(step, args=ocp.args.StandardSave(state))
            report("saving", step)


if __name__ == "__main__":
    main(sys.argv[1])
