"""Importing the package and building its values starts no backend."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.integration

PROGRAM = """
    import socket

    import jax
    import optax

    import jmp_train as jmp

    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        policy = jmp.get_policy(name)
    scales = [jmp.NoOpLossScale(), jmp.StaticLossScale(128.0), jmp.DynamicLossScale(hysteresis=2)]
    for scale in scales:
        repr(scale), hash(scale), jax.tree.leaves(scale)
        tx = jmp.with_loss_scale(jmp.with_master_weights(optax.adamw(1e-3)), scale)
    jmp.with_stochastic_rounding(optax.adamw(1e-3), key=3)
    jmp.value_and_grad(lambda params: params, policy)

    jax.config.update("jax_num_cpu_devices", 3)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    jax.distributed.initialize(f"localhost:{port}", num_processes=1, process_id=0)
    state = tx.init({"w": jax.numpy.ones(2)})
    print(len(jax.devices()), jmp.get_loss_scale(state).loss_scale.devices() <= set(jax.devices()))
    jax.distributed.shutdown()
"""


def test_devices_can_be_configured_after_everything_is_built():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "True"]
