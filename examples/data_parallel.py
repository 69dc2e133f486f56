"""The same training on eight devices by each of JAX's routes, beside one device: digits, SGD, a float16 policy.

    python examples/data_parallel.py                          eight simulated CPU devices
    python examples/data_parallel.py --reduce-dtype float16   gradients cross the devices in float16
    python examples/data_parallel.py --overflow-at 7          one device gets an infinite image: all skip the step

The functions in `ROUTES` differ in who makes the mesh and in who averages the gradients; all run the step of
`make_step`. The program ends with an error if the devices disagree about the loss scale or the skipped steps.
"""

import argparse
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import jmp_train as jmp

BATCH, STEPS, AXIS = 256, 60, "data"


class Net(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(16, (3, 3))(images)).reshape(images.shape[0], -1)
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def loss_fn(params, images, labels):
    """The mean over its images: one device's part under `shard_map` and `pmap`, else the whole batch."""
    return optax.softmax_cross_entropy_with_integer_labels(Net().apply(params, images), labels).mean()


def make_step(policy: jmp.Policy, axis_name: str | None):
    """Returns the initial state and a step.

    `axis_name` is the mapped axis that holds the devices, over which gradients are averaged. Under `jit` with sharded
    inputs it is None: there the loss is already the mean over the whole batch.
    """
    tx = jmp.with_loss_scale(optax.sgd(0.1, momentum=0.9), axis_name=axis_name)
    grad_fn = jmp.value_and_grad(loss_fn, policy, axis_name=axis_name)
    params = policy.cast_to_param(Net().init(jax.random.key(0), jnp.zeros((1, 8, 8, 1))))

    def step(state, images, labels):
        params, opt_state = state
        loss, grads = grad_fn(params, images, labels, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return (params, tx.init(params)), step


def one_device(policy):
    state, step = make_step(policy, None)
    return state, jax.jit(step)


def jit(policy):
    """The compiler splits the program by its inputs' shardings: parameters on every device, the batch split."""
    state, step = make_step(policy, None)
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    replicated, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.device_put(state, replicated), jax.jit(step, in_shardings=(replicated, split, split))


def shard_map(policy):
    """Every device runs the step on its part of the batch.

    With `axis_name`, `value_and_grad` averages loss and gradients, and `with_loss_scale` makes all devices skip a step
    if one has to.
    """
    state, step = make_step(policy, AXIS)
    mesh, split = Mesh(np.array(jax.devices()), (AXIS,)), PartitionSpec(AXIS)
    specs: dict[str, Any] = {"in_specs": (PartitionSpec(), split, split), "out_specs": PartitionSpec()}
    return state, jax.jit(jax.shard_map(step, mesh=mesh, **specs))


def pmap(policy):
    """The older way to write what `shard_map` does: inputs have a leading axis of devices."""
    state, step = make_step(policy, AXIS)
    devices = jax.device_count()
    mapped = jax.pmap(step, axis_name=AXIS)

    def run(state, images, labels):
        split = [part.reshape(devices, -1, *part.shape[1:]) for part in (images, labels)]
        state, loss = mapped(state, *split)
        return state, loss[0]

    return jax.tree.map(lambda leaf: jnp.stack([leaf] * devices), state), run


ROUTES = {"one device": one_device, "jit, sharded": jit, "shard_map": shard_map, "pmap": pmap}


def train(route, policy: jmp.Policy, steps: int, overflow_at: int | None) -> dict[str, Any]:
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    rng = np.random.default_rng(0)
    state, run = route(policy)
    losses = []
    for number in range(steps):
        chosen = rng.choice(len(images), BATCH, replace=False)
        batch = images[chosen]
        if number == overflow_at:
            batch[-1] = np.inf
        state, loss = run(state, batch, labels[chosen])
        losses.append(float(loss))
    # Under `pmap` each metric has one value per device; the devices agree if one value is left.
    metrics = {name: np.unique(value) for name, value in jmp.step_metrics(state[1]).items()}
    if any(value.size > 1 for value in metrics.values()):
        raise RuntimeError(f"the devices disagree: {metrics}")
    return {"losses": losses, "params": state[0]} | {name: value.item() for name, value in metrics.items()}


def main(argv: list[str] | None = None) -> dict[str, dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="mixed_float16")
    parser.add_argument("--reduce-dtype", default="float32")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--overflow-at", type=int)
    options = parser.parse_args(argv)
    policy = jmp.get_policy(options.policy).replace(reduce_dtype=options.reduce_dtype)
    run = functools.partial(train, policy=policy, steps=options.steps, overflow_at=options.overflow_at)
    results = {name: run(route) for name, route in ROUTES.items()}
    table = Table(
        "route", "first loss", "last loss", "loss scale", "skipped", title=f"{policy}, {jax.device_count()} devices"
    )
    for name, result in results.items():
        ends = (f"{result['losses'][i]:.5f}" for i in (0, -1))
        table.add_row(name, *ends, f"{result['loss_scale']:g}", str(result["skipped_steps"]))
    Console().print(table)
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
