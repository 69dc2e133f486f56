"""A training state compiled for an H200: it is donated as one pytree, and nothing is copied."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax_models import linen_training, nnx_training

import jmp_train as jmp
from jmp_train._diagnostics.gpu._compile import gpu_module
from jmp_train._diagnostics.gpu._findings import copies
from jmp_train._diagnostics.gpu._kernels import kernels, traffic

pytestmark = pytest.mark.slow

BATCH = jax.ShapeDtypeStruct((64, 8, 8, 1), np.float32), jax.ShapeDtypeStruct((64,), np.int32)
TRANSFORMATIONS = {
    "adam": optax.adam(1e-3),
    "clipped, decayed": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 9))),
    "accumulating": optax.MultiSteps(optax.adam(1e-3), 4),
}


# Dense layers: what a convolution of this size returns is copied for its layout, whatever the optimizer.
class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(256, use_bias=False)(x.reshape(len(x), -1))
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


class NNXMLP(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(64, 256, use_bias=False, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(256, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.first(x.reshape(len(x), -1))))
        return self.last(self.dropout(x))


def linen(tx=None):
    return linen_training(tx=tx, model=MLP(), ema_decay=0.999)


def nnx_(tx=None):
    return nnx_training(tx=tx, model=NNXMLP(nnx.Rngs(0)), ema_decay=0.999)


@pytest.mark.parametrize("training", [linen, nnx_])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_no_copies_in_the_step(training, name):
    state, step = training(jmp.with_loss_scale(TRANSFORMATIONS[name]))
    text = gpu_module(step.__wrapped__, jax.eval_shape(lambda s: s, state), BATCH, donate_argnums=0)
    print(f"{len(kernels(text))} kernels, {len(jax.tree.leaves(state))} leaves")
    assert copies(text) == ()
    assert "conditional(" not in text or name == "accumulating"


def test_the_check_sees_a_state_in_another_order():
    state, step = linen()

    def disordered(state, batch):
        state, loss = step.__wrapped__(state, batch)
        return loss, state.ema_params, state.opt_state, state.params

    text = gpu_module(disordered, jax.eval_shape(lambda s: s, state), BATCH, donate_argnums=0)
    assert copies(text) != ()


def test_what_skipping_everything_costs():
    """A state of one large matrix: Adam's 32 bytes a parameter, and 8 for reading and writing the average."""

    def bytes_per_parameter(ema_decay):
        from jmp_train.flax_bridge import TrainState

        tx = jmp.with_loss_scale(optax.adam(1e-3))
        make = lambda w: TrainState.create(apply_fn=print, params={"w": w}, tx=tx, ema_decay=ema_decay)  # noqa: E731
        w = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
        state = jax.eval_shape(make, w)
        step = lambda state, grads: state.apply_gradients(grads=grads)  # noqa: E731
        text = gpu_module(step, state, {"w": w}, donate_argnums=0)
        assert copies(text) == ()
        return traffic(text) / w.size

    plain, averaged = bytes_per_parameter(None), bytes_per_parameter(0.999)
    print(f"{plain:.2f} bytes a parameter, {averaged:.2f} with an average")
    assert plain <= 32.1 and averaged <= 40.1
