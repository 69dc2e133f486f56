"""Checkpoints with Orbax: bit for bit, at every phase, asynchronously, under another policy, and after a SIGKILL."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint_worker import consistent_at, open_manager
from comparisons import assert_same_bits
from flax_models import digits, linen_training, nnx_training, spoiled

import jmp_train as jmp
from jmp_train import with_loss_scale
from jmp_train.flax_bridge import TrainState

# Orbax writes and reads files, in threads and processes of its own.
pytestmark = pytest.mark.integration


def shapes(state):
    """What a restore needs of a state: structure, shapes, dtypes and shardings."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


def save(directory, step, state, data=None):
    with open_manager(directory) as manager:
        args = {"state": ocp.args.StandardSave(state), "data": ocp.args.JsonSave(data or {})}
        manager.save(step, args=ocp.args.Composite(**args))


def restore(directory, like, step=None):
    """The state and the data position of a step, the last by default."""
    with open_manager(directory) as manager:
        args = {"state": ocp.args.StandardRestore(shapes(like)), "data": ocp.args.JsonRestore()}
        restored = manager.restore(manager.latest_step() if step is None else step, args=ocp.args.Composite(**args))
    return restored.state, restored.data


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2)


def make(tx, policy="mixed_float16", **fields):
    """A small state, and a step that compiles quickly."""
    params = {"w": jax.random.normal(jax.random.key(0), (5, 3)), "b": jnp.ones(3)}
    params = jmp.get_policy(policy).cast_to_param(params)
    state = TrainState.create(apply_fn=loss_fn, params=params, tx=tx, **fields)
    grad_fn = jmp.value_and_grad(loss_fn, policy)

    def step(state, x):
        loss, grads = grad_fn(state.params, x, loss_scale=jmp.get_loss_scale(state))
        return state.apply_gradients(grads=grads), loss

    return state, jax.jit(step, donate_argnums=0)


def everything():
    """Training with accumulation, clipping, a schedule, masters and a scale that has used some of its hysteresis."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 8)))
    accumulated = optax.MultiSteps(inner, 3)
    return with_loss_scale(accumulated, jmp.DynamicLossScale(2.0**8, growth_interval=4, hysteresis=2))


INPUTS = np.random.default_rng(0).normal(size=(14, 8, 5)).astype(np.float32)
INPUTS[[3, 9, 10], 0, 0] = np.inf  # skips at the first, the last and the middle micro-batch


def run(state, step, inputs=INPUTS):
    for x in inputs:
        state, _ = step(state, x)
    return state


def test_random_roundings_resume_bit_for_bit(tmp_path):
    """The random bits of a step depend on the saved key and step only."""
    tx = jmp.with_stochastic_rounding(jmp.with_low_precision_state(optax.adamw(0.1), key=1), key=2)
    state, step = make(with_loss_scale(tx, jmp.DynamicLossScale(2.0**8)), "params=bfloat16,compute=bfloat16,output=f32")
    state = run(state, step, INPUTS[:5])
    save(tmp_path, 5, state)
    restored, _ = restore(tmp_path, state)
    assert_same_bits(run(restored, step, INPUTS[5:]), run(state, step, INPUTS[5:]))


def test_resuming_at_every_phase_equals_the_uninterrupted_run(tmp_path):
    state, step = make(everything(), ema_decay=0.9, rngs={"noise": jax.random.key(7)})
    template = shapes(state)
    with open_manager(tmp_path) as manager:
        for i, x in enumerate(INPUTS):
            # The state is donated right after an asynchronous save has begun.
            manager.save(i, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
            state, _ = step(state, x)
    assert step._cache_size() == 1
    phases = set()
    for i in range(len(INPUTS)):
        with open_manager(tmp_path) as manager:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(template))
            resumed = manager.restore(i, args=args).state
        scale, accumulated = jmp.get_loss_scale(resumed), resumed.opt_state.inner_state
        phases.add((int(accumulated.mini_step), int(scale.counter), int(scale.hysteresis_left)))
        assert_same_bits(*map(jax.tree.leaves, (run(resumed, step, INPUTS[i:]), state)))
        assert jax.tree.structure(resumed) == jax.tree.structure(state)
    assert len(phases) > 10  # each save was at another phase
    metrics = jmp.step_metrics(state)
    assert metrics["skipped_steps"] == 3
    assert state.opt_state.overflow_counts.tolist() == [0, 3]


@pytest.mark.slow
@pytest.mark.parametrize("training", [linen_training, nnx_training])
def test_models_resume_with_their_data(training, tmp_path):
    """BatchNorm statistics, dropout's keys and counters, the average, and the position in shuffled data."""
    batches = digits(6)
    batches[2] = spoiled(batches[2])
    state, step = training(ema_decay=0.9)
    order = np.random.default_rng(0)
    for i in range(8):
        if i == 4:
            save(tmp_path, i, state, order.bit_generator.state)
        state, _ = step(state, batches[order.integers(6)])
    like, step = training(ema_decay=0.9)  # as another process would
    resumed, position = restore(tmp_path, like)
    order = np.random.default_rng()
    order.bit_generator.state = position
    for _ in range(4):
        resumed, _ = step(resumed, batches[order.integers(6)])
    assert_same_bits(*map(jax.tree.leaves, (resumed, state)))


class TestOtherSettings:
    """Checkpoints are float32 under every policy, so that any policy can continue from them."""

    def dtypes_on_disk(self, directory):
        with open_manager(directory) as manager:
            # Without a template, arrays come back as they were written.
            args = ocp.args.Composite(state=ocp.args.StandardRestore())
            written = manager.restore(manager.latest_step(), args=args).state
        return {str(leaf.dtype) for leaf in jax.tree.leaves(written) if jnp.issubdtype(leaf.dtype, jnp.floating)}

    @pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
    def test_parameters_stored_in_float32_are_saved_so(self, policy, tmp_path):
        state, _ = make(everything(), policy)
        save(tmp_path, 0, state)
        assert self.dtypes_on_disk(tmp_path) == {"float32"}

    @pytest.mark.parametrize("policy", ["float16", "bfloat16"])
    def test_16_bit_parameters_are_widened_and_come_back_bit_for_bit(self, policy, tmp_path):
        state, step = make(with_loss_scale(optax.adam(0.1)), policy)
        state = run(state, step, INPUTS[:3])
        save(tmp_path, 0, jmp.cast_to_full(state))
        assert self.dtypes_on_disk(tmp_path) == {"float32"}
        resumed, _ = restore(tmp_path, state)
        assert resumed.params["w"].dtype == jmp.get_policy(policy).param_dtype
        assert_same_bits(*map(jax.tree.leaves, (resumed, state)))

    def test_masters_are_the_parameters_of_a_float32_run(self, tmp_path):
        tx = with_loss_scale(jmp.with_master_weights(optax.adam(0.1)))
        state, step = make(tx, "O2")
        state = run(state, step, INPUTS[:3])
        save(tmp_path, 0, jmp.cast_to_full(state))
        old, _ = restore(tmp_path, jmp.cast_to_full(state))
        masters = jmp.master_params(old.opt_state, old.params)
        assert {x.dtype for x in jax.tree.leaves(masters)} == {np.dtype(np.float32)}
        assert_same_bits(masters, jmp.master_params(state.opt_state))

    def test_another_loss_scale(self, tmp_path):
        """From float16 with a dynamic scale to bfloat16 without: parameters and moments are kept, the scale is new."""
        adam = optax.adam(0.1)
        state, step = make(with_loss_scale(adam))
        state = run(state, step, INPUTS[:3])
        save(tmp_path, 0, state)

        old, _ = restore(tmp_path, state)
        new, step = make(with_loss_scale(adam, jmp.NoOpLossScale()), "mixed_bfloat16")
        opt_state = new.opt_state._replace(inner_state=old.opt_state.inner_state)
        resumed = new.replace(step=old.step, params=old.params, opt_state=opt_state)
        assert_same_bits(resumed.opt_state.inner_state, state.opt_state.inner_state)
        resumed = run(resumed, step, INPUTS[4:7])
        assert resumed.step == 6 and isinstance(jmp.get_loss_scale(resumed), jmp.NoOpLossScale)

    def test_without_loss_scaling(self, tmp_path):
        """The inner state is the bare optimizer's own."""
        adam = optax.adam(0.1)
        state, step = make(with_loss_scale(adam))
        state = run(state, step, INPUTS[:3])
        save(tmp_path, 0, state)
        old, _ = restore(tmp_path, state)
        bare = adam.init(old.params)
        assert jax.tree.structure(old.opt_state.inner_state) == jax.tree.structure(bare)
        adam.update(jax.tree.map(jnp.ones_like, old.params), old.opt_state.inner_state, old.params)

    def test_a_run_without_loss_scaling_can_start_to_scale(self, tmp_path):
        adam = optax.adam(0.1)
        params = {"w": jnp.ones((5, 3)), "b": jnp.ones(3)}
        with open_manager(tmp_path) as manager:
            item = {"params": params, "opt_state": adam.init(params)}
            manager.save(7, args=ocp.args.Composite(state=ocp.args.StandardSave(item)))
        old, step = make(with_loss_scale(adam))
        with open_manager(tmp_path) as manager:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes(item)))
            item = manager.restore(7, args=args).state
        state = old.replace(params=item["params"], opt_state=old.opt_state._replace(inner_state=item["opt_state"]))
        assert run(state, step, INPUTS[:3]).step == 3

    @pytest.mark.parametrize("before, after", [(8, 2), (2, 8)])
    def test_on_other_devices(self, before, after, tmp_path):
        """Leaves go where the template's shardings say: float16 parameters and masters, an average, typed keys."""

        def place(tree, devices):
            mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))
            split = {True: jax.NamedSharding(mesh, jax.P("data")), False: jax.NamedSharding(mesh, jax.P())}
            return jax.device_put(tree, jax.tree.map(lambda x: split[x.shape[:1] == (8,)], tree))

        def start():
            params = {"w": jnp.linspace(-1, 1, 24, dtype=jnp.float16).reshape(8, 3), "b": jnp.ones(3, jnp.float16)}
            tx = with_loss_scale(jmp.with_master_weights(optax.adam(0.1)), jmp.DynamicLossScale(8.0, hysteresis=2))
            rngs = {"a": jax.random.key(7), "b": jax.random.key(8, impl="rbg")}
            return TrainState.create(apply_fn=print, params=params, tx=tx, ema_decay=0.9, rngs=rngs)

        step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
        state = place(start(), before)
        for scale in (1.0, np.inf, 3.0):
            state = step(state, jax.tree.map(lambda x, s=scale: x.astype(jnp.float32) * s, state.params))
        save(tmp_path, 0, jmp.cast_to_full(state))
        like = place(start(), after)
        resumed, _ = restore(tmp_path, like)
        assert_same_bits(*map(jax.tree.leaves, (resumed, state)))
        assert resumed.params["w"].sharding == like.params["w"].sharding
        assert len(resumed.opt_state.inner_state.inner_state[0].mu["w"].addressable_shards) == after
        assert jmp.get_loss_scale(resumed).hysteresis_left == 1


@pytest.mark.slow
def test_a_killed_process_loses_at_most_the_last_save(tmp_path):
    """SIGKILL at several moments, the first save included; each process continues from the last checkpoint."""
    resumed_at = []
    for begun, delay in ((1, 0.0), (2, 0.0), (2, 0.01), (1, 0.02), (2, 0.05), (3, 0.2)):
        worker = Path(__file__).with_name("checkpoint_worker.py")
        lines = []
        with subprocess.Popen([sys.executable, worker, tmp_path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.split())
                if len(lines) == 1 + begun:  # "resumed n", and some saves begun
                    time.sleep(delay)
                    process.kill()
        assert process.returncode == -signal.SIGKILL
        assert lines[0][0] == "resumed" and {line[0] for line in lines[1:]} == {"saving"} and len(lines) > begun
        resumed_at.append(int(lines[0][1]))
        step = consistent_at(tmp_path)
        # A save waits for the one before, so all but the last begun are complete.
        assert int(lines[-1][1]) - 1 <= step, (step, lines)
    assert resumed_at[0] == 0 and resumed_at == sorted(resumed_at) and resumed_at[-1] >= 3
    leftovers = [path.name for path in tmp_path.iterdir() if not path.name.isdigit()]
    print("resumed at", resumed_at, "left behind:", leftovers)
