"""For the tests of `gpu_report`: arguments without data, a step of Adam, and the products of a compiled module."""

import jax
import jax.numpy as jnp
import optax

from jmp_train._diagnostics.gpu._compiled_products import products
from jmp_train.diagnostics import gpu_report

f16, f32 = jnp.float16, jnp.float32


def array(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def report(fn, *args, **options):
    return gpu_report(fn, **options)(*args)


def dots(text):
    """The dtypes of the operands of every matrix product."""
    return [each.operands for each in products(text) if each.kind == "dot"]


def convolutions(text):
    return [each.operands for each in products(text) if each.kind == "convolution"]


def wide(found):
    """The products with a float32 operand. XLA makes one even of a 16-bit convolution with a float32 result."""
    return [dtypes for dtypes in found if "f32" in dtypes]


def adam_step(carry, grads):
    params, state = carry
    updates, state = optax.adam(1e-3).update(grads, state, params)
    return optax.apply_updates(params, updates), state


def adam_arguments(size=1024):
    params = {"w": array(size, size)}
    return (params, jax.eval_shape(optax.adam(1e-3).init, params)), params
