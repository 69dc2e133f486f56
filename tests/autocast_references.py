"""The training steps for which bounds on bytes are stated, each beside the same step written by hand.

Six dense layers of 1024 with bias, gelu between them, a mean squared error over a batch of 512, Adam, a dynamic loss
scale; and the gradients of a CNN and of a Transformer from the battery at a size that fills a GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from battery_row import Size
from flax import linen as nn
from flax.training.dynamic_scale import DynamicScale

import jmp_train as jmp

LAYERS, WIDTH, BATCH = 6, 1024, 512
DEEP = Size(batch=16, width=512, length=512, image=64, layers=12)
FILLING = Size(batch=64, width=256, length=128, image=32, layers=2)

Tree = Any


class MLP(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for layer in range(LAYERS):
            x = nn.Dense(WIDTH, dtype=self.dtype)(x)
            x = nn.gelu(x) if layer < LAYERS - 1 else x
        return x


def mlp_loss(dtype=None):
    """`(params, (x, y)) -> loss` of the Flax model with its layers in `dtype`."""

    def loss(params, batch):
        x, y = batch
        out = jnp.asarray(MLP(dtype).apply({"params": params}, x))
        return jnp.mean((out.astype(jnp.float32) - y) ** 2)

    return loss


def mlp_arguments() -> tuple[Tree, Tree]:
    """Shapes of (params, (x, y))."""
    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    return jax.eval_shape(MLP().init, jax.random.key(0), x)["params"], (x, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def dense(x, weight, bias, dtype, reduce_dtype):
    """`x @ weight + bias` in `dtype`; its gradient leaves the dot in `reduce_dtype`, the bias's is a float32 sum."""
    return _dense_forward(x, weight, bias, dtype, reduce_dtype)[0]


def _dense_forward(x, weight, bias, dtype, reduce_dtype):
    del reduce_dtype
    weight = weight.astype(dtype)
    return x @ weight + bias.astype(dtype), (x, weight)


def _dense_backward(dtype, reduce_dtype, saved, gradient):
    del dtype
    x, weight = saved
    weight_gradient = jax.lax.dot_general(x, gradient, (((0,), (0,)), ((), ())), preferred_element_type=reduce_dtype)
    return gradient @ weight.T, weight_gradient.astype(jnp.float32), jnp.sum(gradient.astype(jnp.float32), axis=0)


dense.defvjp(_dense_forward, _dense_backward)


def by_hand_loss(dtype, reduce_dtype):
    """The same model by hand: 16-bit dots, bias and gelu, every sum in float32."""

    def loss(params, batch):
        x, y = batch
        x: Any = x.astype(dtype)
        for layer in range(LAYERS):
            layer_params = params[f"Dense_{layer}"]
            x = dense(x, layer_params["kernel"], layer_params["bias"], dtype, reduce_dtype)
            x = nn.gelu(x) if layer < LAYERS - 1 else x
        return jnp.mean((x.astype(jnp.float32) - y) ** 2)

    return loss


OPTIMIZER = optax.adam(1e-3)


def plain_step(loss):
    """`((params, opt_state), batch) -> ((params, opt_state), loss)`: Adam without a loss scale."""

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def flax_step(loss):
    """`((params, opt_state, DynamicScale), batch) -> (the same, loss)`: Adam under Flax's DynamicScale."""

    def step(state, batch):
        params, opt_state, scale = state
        scale, finite, value, grads = scale.value_and_grad(loss)(params, batch)
        updates, moved = OPTIMIZER.update(grads, opt_state, params)
        new, old = (optax.apply_updates(params, updates), moved), (params, opt_state)
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return (params, opt_state, scale), value

    return step


def flax_state(params: Tree) -> Tree:
    """Shapes of `flax_step`'s state. Its counters are arrays; with Python scalars the step compiles twice."""
    scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2.0**15))  # pyright: ignore[reportArgumentType]
    return params, jax.eval_shape(OPTIMIZER.init, params), scale


SCALED_OPTIMIZER = jmp.with_loss_scale(optax.adam(1e-3))


def our_step(loss, policy):
    """`((params, opt_state), batch) -> (the same, loss)`: the step as a user of this library writes it."""
    differentiate = jmp.value_and_grad(loss, policy)

    def step(state, batch):
        params, opt_state = state
        value, grads = differentiate(params, batch, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = SCALED_OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def our_state(params: Tree) -> Tree:
    return params, jax.eval_shape(SCALED_OPTIMIZER.init, params)


def plain_state(params: Tree) -> Tree:
    return params, jax.eval_shape(OPTIMIZER.init, params)


def needless_casts(fn, *args) -> list[str]:
    """Casts that undo the cast of their operand: both are needless."""
    found = []

    def visit(jaxpr):
        source = {e.outvars[0]: e.invars[0] for e in jaxpr.eqns if e.primitive.name == "convert_element_type"}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "convert_element_type" and not hasattr(eqn.invars[0], "val"):
                before, after = source.get(eqn.invars[0]), eqn.outvars[0].aval.dtype
                if before is not None and after.itemsize == 2 and before.aval.dtype == after:
                    found.append(str(eqn))
            for leaf in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(leaf, "eqns"):
                    visit(getattr(leaf, "jaxpr", leaf))

    visit(jax.make_jaxpr(fn)(*args).jaxpr)
    return found
