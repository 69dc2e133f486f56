"""Random programs for property tests: operations drawn from a table, some inside jit, scan, cond, remat or vmap.

Every operation maps 8 by 8 matrices to one of the same shape and amplifies neither values nor errors by much, so that
the error of a program in 16 bits is a few roundings.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

SIDE = 8
INDICES = np.array([3, 0, 3, 7, 1, 1, 6, 2])

Array = jax.Array

UNARY: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "logistic": jax.nn.sigmoid,
    "erf": jax.lax.erf,
    "neg": jnp.negative,
    "abs": jnp.abs,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "stop_gradient": lambda x: x - jax.lax.stop_gradient(x) / 2,
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "sqrt": lambda x: jnp.sqrt(1 + x * x),
    "power": lambda x: x**3 / (1 + x**2),
    "rsqrt": lambda x: x * jax.lax.rsqrt(1 + jnp.square(x)),
    "epsilon": lambda x: x / (jnp.abs(x) + 1e-12 + 1),
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, axis=1, keepdims=True),
    "masked": lambda x: jax.nn.softmax(jnp.where(np.tri(SIDE, dtype=bool), x, -1e9)),
    "standardise": lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1),
    "mean": lambda x: jnp.broadcast_to(x.mean(1, keepdims=True), x.shape),
    "cumsum": lambda x: jnp.cumsum(x, axis=0) / SIDE,
    "window": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (3, 1), (1, 1), "SAME") / 3,
    "pool": lambda x: jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1, 3), (1, 1), "SAME"),
    "max": lambda x: x - jnp.max(x, axis=0),
    "sort": lambda x: jnp.sort(x, axis=1),
    "top": lambda x: jnp.concatenate([jax.lax.top_k(x, 4)[0]] * 2, axis=1),
    "clamp": lambda x: jnp.clip(x, -1, 1),
    "transpose": jnp.transpose,
    "reverse": lambda x: x[::-1],
    "reshape": lambda x: x.reshape(4, 16).reshape(x.shape),
    "gather": lambda x: x[INDICES],
    "scatter_add": lambda x: jnp.zeros_like(x).at[INDICES].add(x / 2),
    "pad": lambda x: jnp.pad(x, ((0, 1), (0, 0)))[1:],
    "convolve": lambda x: jnp.stack([jnp.convolve(row, np.array([0.25, 0.5, 0.25], np.float32), "same") for row in x]),
    "by_hand": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "integers": lambda x: x + jnp.argmax(jnp.abs(x) > 100, axis=0) / SIDE,
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda x, y: (x + y) / 2,
    "sub": lambda x, y: (x - y) / 2,
    "mul": lambda x, y: jnp.tanh(x) * jnp.tanh(y),
    "div": lambda x, y: x / (1 + y * y),
    "matmul": lambda x, y: x @ y / SIDE,
    "einsum": lambda x, y: jnp.einsum("ij,kj->ik", x, y) / SIDE,
    "maximum": jnp.maximum,
    "where": lambda x, y: jnp.where(np.eye(SIDE, dtype=bool), x, y),
    "concatenate": lambda x, y: jnp.concatenate([x[:3], y[3:]]),
    "update": lambda x, y: jax.lax.dynamic_update_slice(x, y[:2], (1, 0)),
    "residual": lambda x, y: jnp.clip(x + jnp.tanh(y @ x), -2, 2),
}


def scanned(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Two steps of `fn` over its first argument, the others constant."""
    return lambda x, *rest: jax.lax.scan(lambda carry, _: (fn(carry, *rest), ()), x, length=2)[0]


def mapped(fn: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *args: jax.vmap(fn)(*(jnp.stack([arg, -arg]) for arg in args))[1]


WRAPPERS: dict[str, Callable[[Callable[..., Array]], Callable[..., Array]]] = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": scanned,
    "loop": lambda fn: lambda x, *rest: jax.lax.fori_loop(0, 2, lambda _, carry: fn(carry, *rest), x),
    "cond": lambda fn: lambda *args: jax.lax.cond(jnp.sum(args[0]) < 1e9, fn, lambda *args: args[0], *args),
    "vmap": mapped,
}


class Step(NamedTuple):
    """One operation on earlier values, counted from the last."""

    name: str
    wrapper: str
    operands: tuple[int, ...]


def steps() -> st.SearchStrategy[Step]:
    def step(name: str) -> st.SearchStrategy[Step]:
        operands = st.tuples(*[st.integers(0, 3)] * (1 if name in UNARY else 2))
        wrapper = st.one_of(st.just("plain"), st.sampled_from(list(WRAPPERS)))
        return st.builds(Step, st.just(name), wrapper, operands)

    return st.sampled_from([*UNARY, *BINARY]).flatmap(step)


def programs(longest: int = 6) -> st.SearchStrategy[list[Step]]:
    return st.lists(steps(), min_size=1, max_size=longest)


def as_function(program: list[Step]) -> Callable[[Array, Array], list[Array]]:
    """`(params, x) -> every value computed`."""

    def run(params: Array, x: Array) -> list[Array]:
        values: list[Any] = [params, x]
        for name, wrapper, operands in program:
            fn = WRAPPERS[wrapper](UNARY.get(name) or BINARY[name])
            values.append(fn(*(values[-1 - min(operand, len(values) - 1)] for operand in operands)))
        return values[2:]

    return run


def as_gradient(program: list[Step]) -> Callable[[Array, Array], Array]:
    """`(params, x) -> gradient` of the mean of the last value."""
    run = as_function(program)
    return jax.grad(lambda params, x: jnp.mean(run(params, x)[-1]))
