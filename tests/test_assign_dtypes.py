"""The dtypes in which equations read their operands, and the precision of their results, in one-line programs.

Results are `low` (in the compute dtype), `weak` (float32 that takes the dtype of what it meets), `full` (float32) or
`recorded` (as in the original program).
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from pass_tools import after, with_batching_rule

import jmp_train as jmp
from jmp_train._autocast.ir import Access, Precision, Program

RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 16)).astype(np.float32)
X = RNG.normal(size=(2, 16)).astype(np.float32)
KEY = jax.random.key(0)
DATA = jnp.asarray(RNG.normal(size=(2, 16)).astype(np.float32))


def found(fn: Any, primitive: str, *args: Any, **options: Any) -> list[str]:
    """For each equation of a primitive, its operands' dtypes (`-`: as recorded) and the precision of its results."""

    def visit(program: Program) -> Iterator[str]:
        for equation in program.equations:
            if equation.node.name == primitive:
                reads = ["-" if dtype is None else dtype.name for dtype in equation.reads]
                yield " ".join([*reads, "->", *(program.precision(number).value for number in equation.results)])
            for body in equation.bodies:
                yield from visit(body)

    return list(visit(after("assign_dtypes", fn, *args, **options)))


NARROW, WIDE = "float16 float16 -> low", "float32 float32 -> full"


def pooled(x: Any, operation: Any = lax.max, start: float = -jnp.inf) -> Any:
    return lax.reduce_window(x, start, operation, (1, 2), (1, 2), "VALID")


def filled(x: Any, value: float) -> Any:
    return x.at[np.array([0, 9])].get(mode="fill", fill_value=value)


@jax.custom_vjp
def masked_backward(x: Any) -> Any:
    return x


masked_backward.defvjp(lambda x: (x, x), lambda x, g: (g * (x > 0).astype(np.float32),))


# name: (a function of parameters `w` and data `x`, a primitive, the results of `found`)
CASES = {
    # Operators with operands of one dtype run in float32 if one operand needs it; parameters and small literals do not.
    "a product of results": (lambda w, x: (x @ w) * (x @ w.T), "mul", [NARROW]),
    "a product with a parameter": (lambda w, x: (x @ w) * w[0], "mul", [NARROW]),
    "a product with data": (lambda w, x: (x @ w) * x, "mul", [WIDE]),
    "a product with a captured array": (lambda w, x: (x @ w) * DATA, "mul", [WIDE]),
    "a product with a captured number": (lambda w, x: (x @ w) * DATA[0, 0], "mul", [WIDE]),
    "a product with a literal": (lambda w, x: (x @ w) * 3, "mul", [NARROW]),
    "a product with a NumPy number": (lambda w, x: (x @ w) * np.float32(3), "mul", [NARROW]),
    "a quotient by a parameter": (lambda w, x: (x @ w) / w[0], "div", [WIDE]),
    "a quotient by what parameters make": (lambda w, x: (x @ w) / (jnp.abs(w[0]) + 1e-6), "div", [WIDE]),
    "a mean of windows that is squared": (lambda w, x: (pooled(x @ w, lax.add, 0.0) / 2) ** 2, "div", [WIDE]),
    "a quotient by a literal": (lambda w, x: (x @ w) / 3, "div", [NARROW]),
    "a quotient of results": (lambda w, x: (x @ w) / (x @ w.T), "div", [NARROW]),
    "a product with what is too small": (lambda w, x: (x @ w) * 1e-12, "mul", [WIDE]),
    "a product with what is too large": (lambda w, x: (x @ w) * 1e6, "mul", [WIDE]),
    # A constant that changes the units of a returned value: float32 from there on.
    "a large factor": (lambda w, x: (x @ w) * 8, "mul", [WIDE]),
    "a factor that is not large": (lambda w, x: (x @ w) * 7, "mul", [NARROW]),
    "a large factor on the left": (lambda w, x: -8 * (x @ w), "mul", [WIDE]),
    "a large addend": (lambda w, x: (x @ w) + 8, "add", [WIDE]),
    "a large subtrahend": (lambda w, x: (x @ w) - 8, "sub", [WIDE]),
    "a small addend": (lambda w, x: (x @ w) + 0.1, "add", [NARROW]),
    "a small factor": (lambda w, x: (x @ w) * 0.125, "mul", [WIDE]),
    "a factor that is not small": (lambda w, x: (x @ w) * 0.126, "mul", [NARROW]),
    "a small divisor": (lambda w, x: (x @ w) / 0.125, "div", [WIDE]),
    "a divisor that is not small": (lambda w, x: (x @ w) / 0.126, "div", [NARROW]),
    "a divisor that is not large": (lambda w, x: (x @ w) / 7, "div", [NARROW]),
    "a large bound": (lambda w, x: jnp.maximum(x @ w, 8), "max", [NARROW]),
    "a large divisor": (lambda w, x: (x @ w) / 8, "div", [WIDE]),
    "a large dividend": (lambda w, x: 8 / (x @ w), "div", [WIDE]),
    "a large factor of parameters": (lambda w, x: 100 * w[0], "mul", ["float32 float32 -> weak"]),
    "a large factor, then a small one": (lambda w, x: (x @ w) * 8 * 0.5, "mul", [WIDE, WIDE]),
    "a small factor, then a large one": (lambda w, x: (x @ w) * 0.5 * 8, "mul", [NARROW, WIDE]),
    "a large factor of what is returned too": (lambda w, x: (x @ w, (x @ w) * 8), "mul", [WIDE]),
    "a large factor of what is moved": (lambda w, x: ((x @ w) * 8)[0], "mul", [WIDE]),
    "a large factor of what is sorted": (lambda w, x: jnp.sort((x @ w) * 8), "mul", [WIDE]),
    "a large factor of what is summed": (lambda w, x: jnp.sum(jnp.sort((x @ w) * 8)), "mul", [WIDE]),
    "a large factor of what a dot reads": (lambda w, x: ((x @ w) * 8) @ w, "mul", [NARROW]),
    "a large factor of what a dot reads too": (lambda w, x: (y := (x @ w) * 8, y @ w), "mul", [NARROW]),
    "a large factor in a branch": (
        lambda w, x: lax.cond(x[0, 0] > 0, lambda y: y * 8, lambda y: y, x @ w),
        "mul",
        [WIDE],
    ),
    "a large factor in each iteration": (lambda w, x: lax.map(lambda y: y * 8, x @ w), "mul", [WIDE]),
    "a large factor in a carry": (
        lambda w, x: lax.scan(lambda c, row: ((row @ w) * 8, None), x, jnp.stack([x, x]))[0],
        "mul",
        [WIDE],
    ),
    "a large factor in a narrow carry": (
        lambda w, x: lax.scan(lambda c, _: ((c @ w) * 8, None), x @ w, None, 2)[0],
        "mul",
        [NARROW],
    ),
    # A returned complement, which is zero where the function is one in 16 bits.
    "a complement": (lambda w, x: 1 - jax.nn.sigmoid(x @ w), "logistic", ["float32 -> full"]),
    "a complement of one side": (lambda w, x: 1 + jnp.tanh(x @ w), "tanh", ["float32 -> full"]),
    "a complement of a part": (lambda w, x: 1 - jax.nn.sigmoid(x @ w)[:, 0], "logistic", ["float32 -> full"]),
    "a complement of a product": (
        lambda w, x: 1 - jax.nn.sigmoid(x @ w) * jnp.tanh(x @ w), "logistic", ["float32 -> full"]),
    "a complement that a dot reads": (lambda w, x: (1 - jax.nn.sigmoid(x @ w)) @ w, "logistic", ["float16 -> low"]),
    "a complement of parameters": (lambda w, x: 1 - jax.nn.sigmoid(w), "logistic", ["float32 -> weak"]),
    "a function and its complement": (
        lambda w, x: (lambda s: (s, 1 - s))(jax.nn.sigmoid(x @ w)), "logistic", ["float32 -> full"]),
    "a function that is returned": (lambda w, x: jax.nn.sigmoid(x @ w), "logistic", ["float16 -> low"]),
    "a difference of functions": (
        lambda w, x: jax.nn.sigmoid(x @ w) - jnp.tanh(x @ w), "logistic", ["float16 -> low"]),
    "a product of parameters": (lambda w, x: w * w[0], "mul", ["float32 float32 -> weak"]),
    "a product with what sums computed": (lambda w, x: (x @ w) * jnp.sum(x @ w), "mul", [WIDE]),
    "a product with booleans": (lambda w, x: (x @ w) * (x > 0), "mul", [NARROW]),
    "a product with integers": (lambda w, x: (x @ w) * jnp.arange(16), "mul", [WIDE]),
    "a product with a padded parameter": (lambda w, x: (x @ w) * jnp.pad(w[0, :8], 4), "mul", [NARROW]),
    "a product of what is too small in the end": (
        lambda w, x: (x @ w) * jnp.where(x > 0, 1e-4, 0.0) * jnp.where(x > 1, 1e-4, 0.0) @ w, "mul", [NARROW, NARROW]),
    "what is too small before it is multiplied": (
        lambda w, x: (x @ w) * (jnp.where(x > 0, 1e-4, 0.0) * jnp.where(x > 1, 1e-4, 0.0)), "mul",
        ["float32 float32 -> full", WIDE]),
    "a product with zeros and ones drawn from a captured key": (
        lambda w, x: (x @ w) * (jax.random.bits(KEY, (2, 16)) > 5), "mul", [NARROW]),
    "a comparison with data": (lambda w, x: x @ w > x, "gt", ["float32 float32 -> recorded"]),
    "a choice": (lambda w, x: jnp.where(x > 0, x @ w, x), "select_n", ["- float32 float32 -> full"]),
    # Operations that round run in float32 if only float32 operations read them.
    "a product that only a sum reads": (lambda w, x: jnp.sum((x @ w) * (x @ w.T)), "mul", [WIDE]),
    "a quotient by a literal that only a sum reads": (lambda w, x: jnp.sum((x @ w) / 3), "div", [WIDE]),
    "a largest number that only a sum reads": (lambda w, x: jnp.sum(jnp.maximum(x @ w, x @ w.T)), "max", [NARROW]),
    # A float32 value that a dot reads is rounded for the dot. Readers across the dot read the copy, others do not.
    "on the near side": (lambda w, x: (lambda h: (h * (x @ w), h @ w))(jnp.exp(x @ w)), "mul", [WIDE]),
    "a range, on the near side": (
        lambda w, x: (lambda h: (h * w[:2], h @ w))(lax.broadcasted_iota(np.float32, (2, 16), 1)), "mul", [WIDE]),
    "on the far side": (lambda w, x: (lambda h: h * (h @ w))(jnp.exp(x @ w)), "mul", [NARROW]),
    "on the far side of another dot": (
        lambda w, x: (lambda h: ((x @ w @ w) * h, h @ w))(jnp.exp(x @ w)), "mul", [NARROW]),
    "without a dot that reads it": (lambda w, x: jnp.exp(x @ w) * (x @ w @ w), "mul", [WIDE]),
    "with a dot behind a function": (
        lambda w, x: (lambda h: ((x @ w @ w) * h, jnp.sin(h) @ w))(jnp.exp(x @ w)), "mul", [WIDE]),
    "that something divides by": (
        lambda w, x: (lambda h: ((x @ w @ w) * h, h @ w, 1 / h))(jnp.exp(x @ w)), "mul", [WIDE]),
    "that an exponential reads": (
        lambda w, x: (lambda h: ((x @ w @ w) * h, h @ w, jnp.exp(h)))(jnp.exp(x @ w)), "mul", [WIDE]),
    "rearranged": (lambda w, x: (lambda h: h * (h @ w))(jnp.exp(x @ w)[:, ::-1]), "mul", [NARROW]),
    "picked": (
        lambda w, x: (lambda h: h * (h @ w))(lax.dynamic_slice(jnp.exp(x @ w), (0, 0), (1, 16))), "mul", [NARROW]),
    "data, which nothing computed": (lambda w, x: x * (x @ w), "mul", [WIDE]),
    "data, rearranged": (lambda w, x: (lambda h: h * (h @ w))(x[::-1]), "mul", [WIDE]),
    # Operations that are kernels of their own read what is stored, on the near side of the dot, too.
    "a pool": (lambda w, x: pooled(jnp.exp(x @ w)), "reduce_window_max", ["float32 -> full"]),
    "a pool of what a dot reads": (
        lambda w, x: (lambda h: (pooled(h), h @ w))(jnp.exp(x @ w)), "reduce_window_max", ["float16 -> low"]),
    "a rematerialized call": (
        lambda w, x: (lambda h: (jax.checkpoint(jnp.tanh)(h), h @ w))(jnp.exp(x @ w)), "remat2", ["float16 -> low"]),
    # Operations that follow their operands.
    "a function of a result": (lambda w, x: jnp.tanh(x @ w), "tanh", ["float16 -> low"]),
    "a function of data": (lambda w, x: jnp.tanh(x), "tanh", ["float32 -> full"]),
    "a function whose logarithm is taken": (lambda w, x: jnp.log(jnp.tanh(x @ w)), "tanh", ["float32 -> full"]),
    "a largest number whose logarithm is taken": (
        lambda w, x: jnp.log(jnp.max(x @ w, 0)), "reduce_max", ["float16 -> low"]),
    "sorted with data": (lambda w, x: lax.sort((x @ w, x), num_keys=1), "sort", ["float16 float32 -> low full"]),
    "a dot of what was sorted beside what is too large": (
        lambda w, x: lax.sort((jnp.where(x > 0, x @ w, -1e9), x @ w), num_keys=1)[1] @ w, "dot_general", [NARROW] * 3),
    "a gate of a parameter in a loop": (
        lambda w, x: lax.scan(lambda h, _: (jax.nn.sigmoid(w[0]) * h, None), x, length=2)[0], "logistic",
        ["float32 -> weak"]),
    "the place of the largest": (lambda w, x: jnp.argmax(x @ w, 1), "argmax", ["float16 -> recorded"]),
    "picked, or a literal": (lambda w, x: filled(x @ w, 0.0), "gather", ["float16 - -> low"]),
    "picked, or a literal that is too large": (lambda w, x: filled(x @ w, 1e9), "gather", ["float32 - -> full"]),
    "integers picked, or a literal": (
        lambda w, x: filled(x.astype(int), 10**6), "gather", ["- - -> recorded"]),
    "a transposed parameter for a dot": (lambda w, x: x @ w.T, "transpose", ["float32 -> weak"]),
    "a reversed parameter for a dot": (lambda w, x: x @ w[::-1], "rev", ["float16 -> low"]),
    "a reversed parameter for two dots": (
        lambda w, x: (lambda r: (x @ r, jnp.sin(x) @ r))(w[::-1]), "rev", ["float16 -> low"]),
    "a reversed parameter for a dot and more": (
        lambda w, x: (lambda r: (x @ r, r))(w[::-1]), "rev", ["float32 -> weak"]),
    "a reversed parameter": (lambda w, x: jnp.tanh(w[::-1]), "rev", ["float32 -> weak"]),
    "reversed data for a dot": (lambda w, x: x[::-1] @ w, "rev", ["float16 -> low"]),
    "reversed data for a dot, masked": (
        lambda w, x: jnp.where(x > 0, -1e9, x)[::-1] @ w, "rev", ["float32 -> full"]),
    "reversed data for a dot and more": (
        lambda w, x: (lambda r: (r @ w, r))(x[::-1]), "rev", ["float32 -> full"]),
    # Operations that need the range of float32, and sums.
    "an exponential": (lambda w, x: jnp.exp(x @ w), "exp", ["float32 -> full"]),
    "a sum of what was recorded in 16 bits": (
        lambda w, x: lax.reduce_sum_p.bind(x.astype(np.float16), axes=(0,), out_sharding=None), "reduce_sum",
        ["float32 -> recorded"]),
    "a sum of integers": (lambda w, x: jnp.sum(jnp.arange(3)), "reduce_sum", ["- -> recorded"]),
    # Casts that the user wrote.
    "a cast to the compute dtype": (
        lambda w, x: (x @ w).astype(np.float16), "convert_element_type", ["float16 -> recorded"]),
    "a cast to another dtype": (
        lambda w, x: (x @ w).astype(jnp.bfloat16), "convert_element_type", ["float32 -> recorded"]),
    "a cast of data": (lambda w, x: x.astype(np.float16), "convert_element_type", ["float32 -> recorded"]),
    "a cast of booleans": (lambda w, x: (x > 0).astype(np.float32), "convert_element_type", ["- -> weak"]),
    "a cast of booleans in a backward pass": (
        lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(masked_backward(x @ w) @ w)))(x), "convert_element_type",
        ["- -> weak"]),
    "a cast of booleans to integers": (lambda w, x: (x > 0).astype(int), "convert_element_type", ["- -> recorded"]),
    "a product of what was cast by hand": (
        lambda w, x: jnp.full(2, 1e9).astype(jnp.bfloat16) * jnp.full(2, 1e9).astype(jnp.bfloat16), "mul",
        ["- - -> recorded"]),
    "a cast of integers": (lambda w, x: jnp.arange(3).astype(np.float32), "convert_element_type", ["- -> full"]),
    "a cast from 16 bits": (
        lambda w, x: x.astype(np.float16).astype(np.float32) * (x @ w), "mul", [WIDE]),
    # Means over windows of a value in the compute dtype are in its range, so they are stored in the compute dtype.
    "a mean over windows": (
        lambda w, x: jnp.tanh(pooled(x @ w, lax.add, 0.0) / 2), "div", ["float32 float32 -> low"]),
    "a mean with zeros beside": (
        lambda w, x: jnp.tanh(pooled(x @ w, lax.add, 0.0) / 3), "div", ["float32 float32 -> low"]),
    "a sum over windows, divided by more": (
        lambda w, x: jnp.tanh(pooled(x @ w, lax.add, 0.0) / 5), "div", [WIDE]),
    "a sum over windows, divided by less": (
        lambda w, x: jnp.tanh(pooled(x @ w, lax.add, 0.0) / 1.5), "div", [WIDE]),
    "a mean over windows of data": (lambda w, x: jnp.tanh(pooled(x, lax.add, 0.0) / 2), "div", [WIDE]),
    "a mean over windows that is returned": (lambda w, x: pooled(x @ w, lax.add, 0.0) / 2, "div", [WIDE]),
    "a mean over windows that something divides by": (
        lambda w, x: 1 / jnp.abs(pooled(x @ w, lax.add, 0.0) / 2), "div", [WIDE, WIDE]),
    "a mean over windows that an exponential reads": (
        lambda w, x: jnp.exp(pooled(x @ w, lax.add, 0.0) / 2), "div", [WIDE]),
    # Products.
    "a dot of data and parameters": (lambda w, x: x @ w, "dot_general", [NARROW]),
    "a dot of integers and parameters": (lambda w, x: jnp.ones((2, 16), int) @ w, "dot_general", ["- float16 -> low"]),
    "a dot of a precision": (lambda w, x: jnp.dot(x, w, precision="highest"), "dot_general", [WIDE]),
    "a dot of a precision, of results": (
        lambda w, x: jnp.dot(x @ w, (x @ w.T).T, precision="highest"), "dot_general", [NARROW, NARROW, WIDE]),
    "a dot that was asked for another dtype": (
        lambda w, x: lax.dot(x, w, preferred_element_type=jnp.bfloat16), "dot_general",
        ["float16 float16 -> recorded"]),
    "a dot cast by hand": (
        lambda w, x: lax.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=np.float32),
        "dot_general", ["- - -> full"]),
    "a dot with what is too large": (
        lambda w, x: jnp.where(x > 0, x @ w, -1e9) @ w, "dot_general", [NARROW, WIDE]),
    "a value times itself": (
        lambda w, x: (lambda h: h @ h.T)(x @ w), "dot_general", [NARROW, "float16 float16 -> full"]),
    "the derivative of a value times itself": (
        lambda w, x: jax.grad(lambda h: jnp.sum(jnp.sin((h @ h.T) @ w)))(jnp.tile(x, (8, 1)) @ w), "dot_general",
        [NARROW, "float16 float16 -> full", NARROW, NARROW, WIDE, WIDE]),
    "data times themselves": (lambda w, x: x @ x.T, "dot_general", [WIDE]),
    "a small result": (
        lambda w, x: (lambda h: jnp.tanh(h[:, :1]).T @ h)(jnp.tile(x, (128, 1)) @ w), "dot_general",
        [NARROW, "float16 float16 -> full"]),
    "a large result": (
        lambda w, x: (lambda h: jnp.tanh(h[:, :1]).T @ h)(jnp.tile(x, (32, 1)) @ w), "dot_general",
        [NARROW, NARROW]),
    "a weight times a vector": (
        lambda w, x: lax.dynamic_slice(jnp.tile(w, (16, 1)), (0, 0), (256, 16)) @ (x @ w)[0], "dot_general",
        [NARROW, NARROW]),
    # The dot of a weight's gradient has the policy's `reduce_dtype` as result, that of an activation's does not.
    "the gradient of a weight": (
        jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w))), "dot_general", [NARROW, "float16 float16 -> full"]),
    "the gradient of a part of a weight, scaled": (
        jax.grad(lambda w, x: jnp.sum(jnp.sin(jnp.tanh(x @ w).reshape(4, 8) @ (2 * w[:8, :4])))), "dot_general",
        [NARROW, NARROW, "float16 float16 -> full", NARROW, "float16 float16 -> full"]),
    "the gradient of an activation": (
        lambda w, x: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x) * x, "dot_general", [NARROW, NARROW]),
    "a gradient that is written into zeros": (
        jax.grad(lambda w, x: jnp.sum(jnp.sin(lax.dynamic_slice(x @ w, (0, 0), (2, 8)) @ w[:8]))),
        "dynamic_update_slice", ["float16 float16 - - -> low"]),
    "a small gradient of an activation": (
        lambda w, x: jax.grad(lambda h: jnp.sum(jnp.sin(h @ jnp.tile(w, (1, 256)))))(x) * x, "dot_general",
        [NARROW, NARROW]),
    "the gradient of an argument": (
        lambda w, x: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x), "dot_general",
        [NARROW, "float16 float16 -> full"]),
    "the gradient of a kernel": (
        jax.grad(lambda w, x: jnp.sum(jnp.sin(lax.conv(x[:, None], w[:, None, :3], (1,), "SAME")))),
        "conv_general_dilated", [NARROW, NARROW]),
    # Operands and results of bodies.
    "a dot in a function with a batching rule": (
        lambda w, x: with_batching_rule(jnp.matmul)(x, w), "dot_general", [NARROW]),
    "a dot in a loop that starts with what is too large": (
        lambda w, x: lax.scan(lambda h, w: (h[::-1], h @ w), jnp.where(x > 0, x @ w, -1e9), w[None])[1], "dot_general",
        [NARROW, WIDE]),
    "a dot of what a loop carries and returns, and is too large": (
        lambda w, x: lax.scan(lambda c, _: (2 * c, c), jnp.where(x > 0, 0, -1e9), length=2)[1][0] @ w,
        "dot_general",
        [WIDE],
    ),
    "a dot in a loop of what it makes too large": (
        lambda w, x: lax.scan(lambda h, w: (jnp.where(x > 0, h, -1e9), h @ w), x, w[None])[1], "dot_general", [WIDE]),
    "a dot in a counted loop, of what its products chose": (
        lambda w, x: lax.fori_loop(0, x[0, 0].astype(int), lambda _, i: jnp.argmax(x @ w.at[i].set(0.0)), 0),
        "dot_general", [NARROW]),
    "a dot in a call with what is too large": (
        lambda w, x: jax.checkpoint(jnp.dot)(jnp.where(x > 0, x @ w, -1e9), w), "dot_general", [NARROW, WIDE]),
    "a sum in a call with what is too large": (
        lambda w, x: jax.checkpoint(jnp.add)(jnp.where(x > 0, x @ w, -1e9), x @ w), "add", [WIDE]),
    "a call of what was cast by hand, and is not too large for that": (
        lambda w, x: jax.checkpoint(jnp.sin)(jnp.full(2, -1e9).astype(jnp.bfloat16)), "remat2",
        ["- -> recorded"]),
    "a sum after a branch with what is too large": (
        lambda w, x: lax.cond(x[0, 0] > 0, lambda h: h, lambda h: jnp.where(x > 0, h, -1e9), x @ w) + x @ w.T,
        "add", [WIDE]),
    "a dot after a branch with what is too large": (
        lambda w, x: lax.cond(x[0, 0] > 0, lambda h: h, lambda h: jnp.where(x > 0, h, -1e9), x @ w) @ w,
        "dot_general", [NARROW, WIDE]),
    "a parameter in a call": (
        lambda w, x: jax.checkpoint(lambda h, w: h * w)(x @ w, w[0]), "mul", [NARROW]),
    "a branch for a dot": (
        lambda w, x: lax.cond(x[0, 0] > 0, jnp.exp, jnp.sin, x @ w) @ w, "cond", ["- float16 -> low"]),
    "a branch for a dot, of data": (
        lambda w, x: lax.cond(x[0, 0] > 0, lambda x: x, lambda x: x[::-1], x) @ w, "cond", ["- float32 -> full"]),
    "a branch for a dot that something divides by": (
        lambda w, x: (lambda h: (h @ w, 1 / h))(lax.cond(x[0, 0] > 0, jnp.exp, jnp.cosh, x @ w)), "cond",
        ["- float16 -> full"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_operands_are_read_in_and_what_results_are(name):
    fn, primitive, expected = CASES[name]
    assert found(fn, primitive, W, X) == expected


def test_what_the_user_has_follow_its_operands_has_one_dtype_for_all():
    rules = jmp.DEFAULT_RULES.replace({"mul": "follow"})
    assert found(lambda w, x: (x @ w) * x, "mul", W, X, rules=rules) == [WIDE]


def layers(w: Any, start: Any, around: Any = lambda layer: layer) -> Any:
    """A residual stream."""
    layer = around(lambda h, w: h + jnp.tanh(h @ w))
    return lax.scan(lambda h, w: (layer(h, w), None), start, jnp.stack([w, w]))[0]


def wide_layer(h: Any, w: Any) -> Any:
    return h + jnp.sin(h @ w)


# A residual stream is carried in the compute dtype, also if its first value is float32 and a dot would round it.
CARRIES = {
    "a result": (lambda w, x: layers(w, x @ w), "low"),
    "a parameter": (lambda w, x: layers(w, w), "full"),
    "a parameter, scaled": (lambda w, x: layers(w, 2 * w), "low"),
    "an exponential": (lambda w, x: layers(w, jnp.exp(x @ w)), "low"),
    "a result, in rematerialized layers": (lambda w, x: layers(w, x @ w, jax.checkpoint), "low"),
    "a result, in layers of scaled weights": (
        lambda w, x: layers(w, x @ w, lambda layer: lambda h, w: layer(h, 2 * w)), "low"),
    "a result, in layers of data": (lambda w, x: layers(jnp.tile(x, (8, 1)), x @ w), "full"),
    "a result, in layers that compute in float32": (lambda w, x: layers(w, x @ w, lambda _: wide_layer), "low"),
    "a result, in layers whose results something divides by": (
        lambda w, x: lax.scan(lambda h, w: ((y := wide_layer(h, w)), 1 / y), x @ w, jnp.stack([w, w]))[0], "full"),
    "a result, in a linear system": (
        lambda w, x: lax.scan(lambda h, _: (h @ w[:8, :8], None), (x @ w)[:, :8], None, 2)[0], "full"),
    "a result, in layers of one weight": (
        lambda w, x: lax.fori_loop(0, 2, lambda _, h: h + jnp.tanh(h @ w), x @ w), "full"),
    "a result, in a plain recurrence": (
        lambda w, x: lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ w), x @ w), "low"),
    "an exponential that something divides by": (
        lambda w, x: (lambda h: (layers(w, h), 1 / h))(jnp.exp(x @ w)), "full"),
    "data": (lambda w, x: layers(w, x), "full"),
}  # fmt: skip


@pytest.mark.parametrize("name", CARRIES)
def test_what_a_stream_is_carried_in(name):
    fn, expected = CARRIES[name]
    (line,) = found(fn, "scan", W, X)
    results = line.split(" -> ")[1].removeprefix("recorded ")  # that is the counter of a `fori_loop`
    assert results.split()[0] == expected


def accesses(fn: Any, primitive: str) -> list[list[Access]]:
    program = after("assign_dtypes", fn, W, X)
    return [equation.accesses for equation in program.equations if equation.node.name == primitive]


def test_how_operands_get_to_their_equation():
    def average(w, x):
        return lax.scan(lambda h, w: (0.9 * h + jnp.tanh(h @ w), None), x, jnp.stack([w, w]))[0]

    def summed(h):
        return h @ W, jnp.sum(h)

    assert accesses(lambda w, x: average(w, jnp.exp(x @ w)), "scan") == [[Access.CARRIED, Access.STORED]]
    for fn, start in ((layers, "float16"), (average, "float32")):
        program = after("assign_dtypes", lambda w, x, fn=fn: fn(w, jnp.exp(x @ w)), W, X)
        assert [each.reads[0] for each in program.equations if each.node.name == "scan"] == [start]
    assert accesses(lambda w, x: summed(jnp.exp(x @ w)), "reduce_sum") == [[Access.STORED]]
    assert accesses(lambda w, x: jnp.exp(x @ w), "exp") == [[Access.FUSED]]


def states(w: Any, x: Any) -> Any:
    """Stacks the states that a loop carries in float32, and multiplies them by a matrix outside of it."""
    return lax.scan(lambda h, w: (jnp.cos(h) * jnp.sum(jnp.sin(h @ w)), h), x, jnp.stack([w, w]))[1] @ w


def test_a_state_that_no_dot_reads_or_that_was_recorded_in_16_bits_is_handed_out_as_it_is():
    def handed_out(w, x):
        return lax.scan(lambda h, w: (jnp.cos(h), h), x, None, 2)[1]

    assert found(handed_out, "scan", W, X) == ["float32 -> full full"]
    narrow = found(lambda w, x: lax.dot(handed_out(w, x.astype(jnp.bfloat16))[0], w), "scan", W, X)
    assert narrow == ["- -> recorded recorded"]


def test_a_state_that_a_dot_reads_is_handed_out_in_the_compute_dtype():
    assert found(states, "scan", W, X)[0].endswith("-> full low")
    assert found(states, "scan", W, X, rules=jmp.DEFAULT_RULES.with_residuals("float32"))[0].endswith("-> full full")


def recurrent(gate: Any, w: Any, x: Any) -> Any:
    def step(h, x):
        f = gate(h @ w + x @ w)
        return f * h + (1 - f) * x, f

    return lax.scan(step, x[0], x)


@pytest.mark.parametrize("gate, expected", [(jax.nn.sigmoid, "float32"), (jnp.tanh, "float16")])
def test_a_gate_in_a_loop_is_float32_and_what_it_is_computed_from_is_not(gate, expected):
    program = after("widen", lambda w, x: recurrent(gate, w, jnp.stack([x, x])), W, X)
    (body,) = next(equation for equation in program.equations if equation.node.name == "scan").bodies
    name = "logistic" if gate is jax.nn.sigmoid else "tanh"
    assert [equation.reads for equation in body.equations if equation.node.name == name] == [[np.dtype(expected)]]
    (total,) = [e for e in body.equations if e.node.name == "add" and set(e.reads) == {np.dtype("float16")}]
    assert body.facts[total.results[0]].precision is Precision.LOW


def test_a_gate_outside_of_loops_or_that_a_dot_reads_is_narrow():
    assert found(lambda w, x: jax.nn.sigmoid(x @ w) * (x @ w), "logistic", W, X)[0].startswith("float16")
    looped = after("widen", lambda w, x: lax.scan(lambda h, _: (jax.nn.sigmoid(h @ w) @ w, None), x, None, 2), W, X)
    (body,) = next(equation for equation in looped.equations if equation.node.name == "scan").bodies
    assert [e.reads[0] for e in body.equations if e.node.name == "logistic"] == [np.float16]


def test_float32_residuals_are_read_as_they_are():
    fn, primitive, _ = CASES["on the far side"]
    assert found(fn, primitive, W, X, rules=jmp.DEFAULT_RULES.with_residuals("float32")) == [WIDE]


def test_depths_count_dots_and_a_backward_pass_begins_where_the_forward_pass_ended():
    def loss(b, w, x):
        h = jnp.exp(x @ w)
        first = jnp.sum(h * b)
        return first + jnp.sum(jnp.cos(h @ w))

    program = after("assign_dtypes", loss, W[0], W, X)
    depths = [("dot_general", 0), ("exp", 1), ("broadcast_in_dim", 0), ("mul", 1), ("reduce_sum", 1)]
    depths += [("dot_general", 1), ("cos", 2), ("reduce_sum", 2), ("add", 2)]
    assert [(equation.name, equation.depth) for equation in program.equations] == depths
    program = after("assign_dtypes", jax.grad(loss, (0, 1)), W[0], W, X)
    backward = [equation for equation in program.equations if program.place.is_backward(equation.node)]
    assert min(equation.depth for equation in backward) == 2 < max(equation.depth for equation in backward)
    (of_bias,) = (equation for equation in backward if program.outputs[0] in equation.results)
    assert of_bias.depth == 2


def test_a_call_with_a_dot_counts_as_one():
    def several(x, w):
        return jnp.tanh(jnp.tanh(x) @ w)

    def branches(x, w):
        return lax.cond(x[0, 0] > 0, several, lambda x, w: x, x, w)

    def loop(x, w):
        return lax.scan(lambda c, _: (several(c, w), None), x, None, 2)[0]

    def depth_after(call):
        program = after("assign_dtypes", lambda w, x: jnp.sin(jax.checkpoint(call)(x, w)), W, X)
        return program.equations[-1].depth

    assert [depth_after(call) for call in (several, branches, loop)] == [1, 1, 1]
    program = after("assign_dtypes", lambda w, x: jnp.sin(branches(x, w)), W, X)
    assert program.equations[-1].depth == 1
    assert depth_after(lambda x, w: jnp.tanh(x)) == depth_after(lambda x, w: x @ x.T) == 0  # not float32 dots


def test_what_primitives_are_asked_for():
    def fn(w, x):
        preset = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
        return x @ w, x @ x.T, jnp.dot(x, w, precision="highest"), jnp.dot(x, w, precision=preset)

    program = after("assign_dtypes", fn, W, X)
    narrow, square, highest, emulated = (
        equation.params for equation in program.equations if equation.name != "transpose"
    )
    assert narrow == {"preferred_element_type": np.float16}
    assert square == highest == emulated == {}  # as recorded
    region = after("assign_dtypes", jmp.low_precision(lambda w, x: jnp.dot(x, w, precision="highest")), W, X)
    assert region.equations[0].params == {"preferred_element_type": np.float16, "precision": None}
    cast = after("assign_dtypes", lambda w, x: lax.cumsum(x.astype(np.float16)) + lax.cumsum(x), W, X)
    assert [e.computes for e in cast.equations if e.name == "cumsum"] == [[np.float32], [np.float32]]


def test_gradients_cross_devices_in_the_reduce_dtype_and_all_else_in_float32():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x):
        def local(w, x):
            total = jnp.sum(lax.psum(x.astype(jnp.float16), "data"))  # cast by hand
            return total + jnp.sum(jnp.sin(lax.psum(x @ w, "data")))

        return jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(w, x)

    for dtype in ("float32", "bfloat16"):
        policy = jmp.get_policy("mixed_float16").replace(reduce_dtype=dtype)
        forward, backward = ["float32 -> recorded", "float32 -> full"], [f"{dtype} -> full"] * 2
        assert found(jax.grad(loss), "psum", W, X, policy=policy) == [*forward, *backward]


def test_a_change_of_the_weak_type_alone_is_one_of_the_dtype_that_the_value_has():
    def fn(w, x):
        h = jnp.broadcast_to(w, (16, 16))
        return x + lax.convert_element_type(jnp.tanh(h) @ h, np.float32)[:2]

    program = after("assign_dtypes", fn, 2.0, X)
    (conversion,) = (each for each in program.equations if each.node.name == "convert_element_type")
    assert conversion.params == {"new_dtype": np.float16}
