"""Data-parallel training in several processes, on one machine or many; each process loads its part of every batch.

On this machine, in two terminals (CPUs, connected through the loopback interface):

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1234 python examples/multihost.py
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1234 python examples/multihost.py

On a cluster of GPUs the same script runs under Slurm, whose variables JAX reads, with one process per GPU or per node,

    srun --nodes 4 --ntasks-per-node 8 --gpus-per-task 1 python examples/multihost.py

or under a launcher that sets the four variables above, as torchrun does. Without either it runs in one process.

The training step does not depend on the number of processes: its loss is the mean over the whole batch, so that an
overflow in one process makes the gradients non-finite in all, and all skip the step.
"""

import argparse
import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import jmp_train as jmp

BATCH = 256


class Net(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(16, (3, 3))(images)).reshape(images.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def connect() -> None:
    """Joins the other processes; call it before the first JAX computation, which would start a backend without them."""
    if "RANK" in os.environ:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    elif "SLURM_JOB_ID" in os.environ:
        jax.distributed.initialize()


def train(policy: str, steps: int, overflow_at: int | None) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    tx = jmp.with_loss_scale(optax.sgd(0.1, momentum=0.9))

    def loss_fn(params, images, labels):
        return optax.softmax_cross_entropy_with_integer_labels(Net().apply(params, images), labels).mean()

    grad_fn = jmp.value_and_grad(loss_fn, policy)

    def init():
        params = Net().init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))
        return params, tx.init(params)

    def step(state, images, labels):
        params, opt_state = state
        loss, grads = grad_fn(params, images, labels, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss, **jmp.step_metrics(opt_state)}

    # Every process runs `init` with the same key, compiled for all devices: parameters are equal without a broadcast.
    state = jax.jit(init, out_shardings=replicated)()
    step = jax.jit(step, in_shardings=(replicated, split, split), out_shardings=replicated, donate_argnums=0)
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    rng = np.random.default_rng(0)  # the same in every process: all draw the same batch, and each takes its part
    history = []
    for number in range(steps):
        chosen = rng.choice(len(images), BATCH, replace=False)
        mine = np.array_split(chosen, jax.process_count())[jax.process_index()]
        batch = images[mine]
        if number == overflow_at and jax.process_index() == jax.process_count() - 1:
            batch[0] = np.inf
        local = (batch, labels[mine].astype(np.int32))
        state, metrics = step(state, *(jax.make_array_from_process_local_data(split, part) for part in local))
        history.append({name: value.item() for name, value in metrics.items()})
    total = sum(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(state[0]))
    return {"losses": [metrics["loss"] for metrics in history], "sum of parameters": total} | history[-1]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="mixed_float16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--overflow-at", type=int, help="the last process has an infinite pixel at this step")
    options = parser.parse_args(argv)
    result = train(options.policy, options.steps, options.overflow_at)
    print(
        f"process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} devices: "
        f"loss {result['losses'][0]:.6f} -> {result['losses'][-1]:.6f}, scale {result['loss_scale']:g}, "
        f"{result['skipped_steps']} skipped, sum of parameters {result['sum of parameters']:.6f}"
    )
    return result


if __name__ == "__main__":
    connect()
    main()
