"""Planted faults: functions that overflow at the line marked `# here NN`, with the expected report of each.

`Fault.make` makes the function and its arguments when a test needs them. Marks are inline comments, so that a test can
find the line in this file.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jmp_train as jmp

F16, F32 = jnp.float16, jnp.float32
SCALE = "lower_scale"
WIDE = "keep_float32"
MODEL = "model"
INPUT = "input"


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
      mark: the number in the comment of the faulty line.
      make: returns the function, its arguments and its keywords.
      primitive, verdict, backward, loops: as expected in the report.
      cure: words that the report's cure must contain.
    """

    mark: str
    make: Callable[[], tuple[Callable, tuple, dict]]
    primitive: str
    verdict: str
    backward: bool = False
    loops: tuple[tuple[str, int], ...] = ()
    cure: str = ""


FAULTS: list[Fault] = []


def fault(mark: str, primitive: str, verdict: str, **expected: Any) -> Callable:
    def register(make: Callable) -> Callable:
        FAULTS.append(Fault(mark, make, primitive, verdict, **expected))
        return make

    return register


def mixed(loss: Callable, *args: Any, scale: float = 8.0, **kwargs: Any) -> tuple[Callable, tuple, dict]:
    return jmp.value_and_grad(loss, "mixed_float16", **kwargs), args, {"loss_scale": jmp.StaticLossScale(scale)}


X = np.linspace(0.5, 2.0, 16, dtype=np.float32).reshape(2, 8)
W = np.eye(8, dtype=np.float32) + 0.05


# Forward, in float32


@fault("01", "log", MODEL, cure="jnp.log(jnp.maximum(x, 1e-6))")
def log_of_zero():
    def loss(x):
        y = jnp.log(jax.nn.relu(x))  # here 01
        return jnp.mean(y)

    return loss, (X - 1,), {}


@fault("02", "div", MODEL, cure="jnp.where(d == 0, 1, d)")
def zero_over_zero():
    def loss(x):
        norms = jnp.sum(jnp.abs(x), axis=1, keepdims=True)
        return jnp.mean(x / norms)  # here 02

    return jax.jit(loss), (X * np.array([[1.0], [0.0]], np.float32),), {}


@fault("03", "exp", MODEL, cure="subtract the maximum")
def softmax_by_hand():
    def loss(x):
        scores = jnp.exp(100 * x)  # here 03
        return jnp.mean(scores / jnp.sum(scores))

    return loss, (X,), {}


@fault("04", "sub", MODEL, cure="-1e9")
def row_masked_everywhere():
    def loss(x, mask):
        return jnp.mean(jax.nn.softmax(jnp.where(mask, x, -jnp.inf)))  # here 04

    return loss, (X, np.array([[True], [False]])), {}


@fault("05", "dot_general", INPUT, cure="Look at the data")
def infinity_in_the_data():
    def loss(w, batch):
        return jnp.mean((batch["x"] @ w) ** 2)  # here 05

    bad = X.copy()
    bad[1, 2] = np.inf
    return jax.value_and_grad(loss), (W, {"x": bad}), {}


# Forward, in 16 bits


@fault("06", "mul", WIDE, backward=True, cure="widen the operands with .astype(jnp.float32)")
def gelu_by_hand():
    def gelu(x):
        cube = x**3  # here 06
        return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.044715 * cube)))

    def loss(x):
        return jnp.sum(gelu(x.astype(F16)).astype(F32) ** 2)

    return jax.grad(loss), (100 * X,), {}


@fault("07", "convert_element_type", WIDE, cure="Leave out this cast")
def large_targets():
    def loss(w, x, y):
        target = y.astype(F16)  # here 07
        return jnp.mean((x.astype(F16) @ w.astype(F16) - target).astype(F32) ** 2)

    return loss, (W, X, 1e5 * X), {}


@fault("08", "dot_general", WIDE, cure='DEFAULT_RULES.with_scopes({"Head": "float32"})')
def logits_beyond_float16():
    def loss(w, x):
        with jax.named_scope("Head"):
            y = x @ w  # here 08
        return jnp.mean(jnp.abs(y)) * 1e-6

    return mixed(loss, 200 * W, 200 * X, scale=1.0)


@fault("09", "convert_element_type", WIDE, cure="jax.named_scope('wide')")
def activations_beyond_float16():
    def loss(w, x):
        h = jnp.exp(x @ w)
        return jnp.mean(h @ w) * 1e-6  # here 09

    return mixed(loss, W, 6 * X, scale=1.0)


@fault("10", "log", WIDE)
def probability_that_underflows():
    def loss(x):
        p = jax.nn.softmax(x.astype(F16))
        return -jnp.mean(jnp.log(p.astype(F32)))  # here 10

    return loss, (40 * X,), {}


@fault("11", "div", MODEL, cure="is zero in float16")
def epsilon_that_vanishes():
    def normalise(x):
        return x / (jnp.sum(jnp.abs(x), axis=1, keepdims=True) + 1e-8)  # here 11

    def loss(x):
        return jnp.mean(normalise(x.astype(F16)).astype(F32))

    return loss, (X * np.array([[1.0], [0.0]], np.float32),), {}


# Backward


@fault("12", "div", MODEL, backward=True, cure="jnp.where(x == 0, 1, x)")
def root_at_zero():
    def loss(x):
        return jnp.mean(jnp.sqrt(x))  # here 12

    return jax.grad(loss), (jax.nn.relu(X - 1),), {}


@fault("13", "div", MODEL, backward=True)
def norm_at_zero():
    def loss(x):
        return jnp.sum(jnp.linalg.norm(x, axis=1))  # here 13

    return jax.value_and_grad(loss), (X * np.array([[1.0], [0.0]], np.float32),), {}


@fault("14", "div", MODEL, backward=True)
def branch_that_was_not_taken():
    def loss(x):
        safe = jnp.where(x > 0, jnp.log(x), 0.0)  # here 14
        return jnp.mean(safe)

    return jax.grad(loss), (np.array([1.0, 0.0], np.float32),), {}


@fault("15", "convert_element_type", SCALE, backward=True, cure="32768 or less")
def scale_too_large():
    def loss(w, x):
        return jnp.sum(x @ w)  # here 15

    return mixed(loss, W, X, scale=2.0**17)


@fault("16", "dot_general", SCALE, backward=True)
def scale_too_large_for_a_deep_layer():
    def loss(w, x):
        with jax.named_scope("First"):
            h = jnp.sin(x @ w)
            h = h @ (64 * w)  # here 16
        return jnp.mean(h @ w)

    return mixed(loss, W, X, scale=2.0**15)


# Loops, branches, calls


@fault("17", "mul", WIDE, loops=(("scan", 4),))
def scan_that_grows():
    def loss(x):
        def body(h, factor):
            return h * factor, None  # here 17

        return lax.scan(body, x.astype(F16), jnp.full(9, 8, F16))[0].astype(F32).sum()

    return loss, (X,), {}


@fault("18", "mul", SCALE, backward=True, loops=(("scan", 3),))
def scan_backward():
    def loss(x):
        def body(h, _):
            return h * jnp.float16(4), None  # here 18

        return jnp.sum(lax.scan(body, 1e-3 * x.astype(F16), None, length=6)[0].astype(F32))

    return mixed(loss, X, scale=2.0**10)


@fault("19", "mul", MODEL, loops=(("while", 7),), cure="make its operands smaller")
def while_that_diverges():
    def solve(x):
        return lax.while_loop(lambda c: jnp.max(jnp.abs(c)) < jnp.inf, lambda c: c * 1e5, x)  # here 19

    return solve, (X,), {}


@fault("20", "log", MODEL)
def branch_of_a_cond():
    def loss(x):
        def taken(x):
            return jnp.log(x)  # here 20

        return jnp.mean(lax.cond(x[0] == 0, taken, lambda x: x, x))

    return loss, (np.array([0.0, 1.0], np.float32),), {}


@fault("21", "div", MODEL, backward=True)
def rematerialised():
    @jax.checkpoint
    def layer(w, x):
        return jnp.sqrt(x @ w)  # here 21

    def loss(w, x):
        return jnp.mean(layer(w, x))

    return jax.grad(loss), (W, np.zeros_like(X)), {}


@fault("22", "div", MODEL, loops=(("scan", 1), ("scan", 2)))
def nested_scans():
    def loss(x):
        def inner(c, row):
            return c + 1 / row, None  # here 22

        def outer(c, rows):
            return lax.scan(inner, c, rows)[0], None

        return lax.scan(outer, 0.0, x)[0]

    return loss, (np.array([[1, 2, 3], [1, 2, 0]], np.float32),), {}


@fault("23", "exp", MODEL)
def mapped():
    def one(x):
        return jnp.exp(x[0]) * x[1]  # here 23

    return jax.jit(jax.vmap(one)), (np.array([[1, 1], [200, 1]], np.float32),), {}


# Custom derivative rules


@jax.custom_jvp
def cube_root(x):
    return jnp.cbrt(x)


@cube_root.defjvp
def cube_root_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    y = cube_root(x)
    return y, t / (3 * y**2)  # here 24


@fault("24", "div", MODEL, backward=True)
def custom_jvp():
    return jax.grad(lambda x: jnp.sum(cube_root(x))), (np.array([0.0, 1.0], np.float32),), {}


@jax.custom_vjp
def inverse(x):
    return 1 / x


def inverse_fwd(x):
    y = 1 / x  # here 25
    return y, y


def inverse_bwd(y, ct):
    half = ct.astype(F16)
    return ((-half * y.astype(F16) ** 2).astype(F32),)


inverse.defvjp(inverse_fwd, inverse_bwd)


@fault("25", "div", MODEL)
def custom_vjp_forward():
    return jax.value_and_grad(lambda x: jnp.sum(inverse(x))), (np.array([0.0, 1.0], np.float32),), {}


@fault("26", "integer_pow", WIDE, backward=True)
def custom_vjp_backward():
    def loss(x):
        return jnp.sum(inverse(x))  # here 26

    return jax.value_and_grad(loss), (np.array([1e-3, 1.0], np.float32),), {}


# Losses and models from libraries, and whole training steps


@fault("27", "integer_pow", WIDE)
def optax_loss():
    def loss(x, y):
        errors = optax.losses.squared_error(x.astype(F16), y.astype(F16))  # here 27
        return jnp.mean(errors.astype(F32))

    return loss, (X, 300 * X), {}


@fault("28", "div", MODEL, backward=True)
def optax_loss_backward():
    def loss(x):
        return jnp.mean(optax.losses.cosine_similarity(x, jnp.ones_like(x)))  # here 28

    return jax.grad(loss), (np.zeros_like(X),), {}


class Net(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dtype=self.dtype)(x)
        return nn.Dense(8, dtype=self.dtype)(x)  # here 29, and here 30

    @staticmethod
    def params(size):
        layer = {"kernel": np.full((8, 8), size, np.float32), "bias": np.zeros(8, np.float32)}
        return {"params": {"Dense_0": layer, "Dense_1": layer}}


@fault("29", "dot_general", WIDE, cure="the Flax module `Net/Dense_1` dtype=jnp.float32")
def linen():
    model = Net(dtype=F16)
    params = Net.params(100.0)
    return lambda params, x: jnp.mean(jnp.asarray(model.apply(params, x), F32)), (params, X), {}


@fault("30", "convert_element_type", SCALE, backward=True)
def linen_training_step():
    model, tx = Net(), jmp.with_loss_scale(optax.sgd(1e-3), jmp.DynamicLossScale(2.0**18))

    def loss_fn(params, x):
        return jnp.sum((jnp.asarray(model.apply(params, x)) - 1) ** 2)

    grad_fn = jmp.value_and_grad(loss_fn, "mixed_float16")

    @jax.jit
    def step(params, opt_state, x):
        loss, grads = grad_fn(params, x, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = Net.params(0.1)
    return step, (params, tx.init(params), X), {}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        h = self.inner(x)
        return h / jnp.sqrt(jnp.sum(0 * h, axis=-1, keepdims=True))  # here 31


@fault("31", "div", MODEL)
def nnx_module():
    graph, state = nnx.split(Block(nnx.Rngs(0)))
    return jax.value_and_grad(lambda state, x: jnp.mean(nnx.merge(graph, state)(x) ** 2)), (state, X), {}


@fault("32", "mul", SCALE)
def scaled_loss_beyond_float32():
    def loss(x):
        return jnp.sum(x) * 1e30

    def scaled(x, loss_scale):
        return loss_scale.scale(loss(x))  # here 32

    return scaled, (X,), {"loss_scale": jmp.StaticLossScale(2.0**100)}


# Well-known pitfalls


@fault("33", "rsqrt", MODEL)
def batch_norm_without_epsilon():
    class Normalised(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False, epsilon=0.0)(x)  # here 33

    model = Normalised()
    ones = np.ones(8, np.float32)
    params, statistics = {"scale": ones, "bias": ones}, {"mean": ones, "var": ones}

    def loss(params, x):
        variables = {"params": {"BatchNorm_0": params}, "batch_stats": {"BatchNorm_0": statistics}}
        y, _ = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(jnp.asarray(y) ** 2)

    return loss, (params, np.ones_like(X)), {}


@fault("34", "log", MODEL)
def log_of_a_softmax():
    def loss(x, y):
        p = jax.nn.softmax(x)
        return -jnp.mean(jnp.log(p)[:, y])  # here 34

    return jax.jit(loss), (400 * X, 0), {}


@fault("35", "rsqrt", WIDE)
def rms_norm_of_small_numbers_in_float16():
    def loss(x):
        h = x.astype(F16)
        squares = jnp.mean((h * h).astype(F32), axis=1, keepdims=True)
        return jnp.mean(h * lax.rsqrt(squares))  # here 35

    return loss, (1e-5 * X,), {}


@fault("36", "sub", MODEL, loops=(("scan", 1),), cure="-1e9")
def attention_row_masked_in_a_scan():
    def loss(q, masks):
        def body(total, mask):
            return total + jnp.sum(jax.nn.softmax(jnp.where(mask, q @ q.T, -jnp.inf))), None  # here 36

        return lax.scan(body, 0.0, masks)[0]

    return jax.jit(loss), (X, np.array([[[1, 1], [1, 0]], [[1, 1], [0, 0]]], bool)), {}


@fault("37", "log", MODEL, loops=(("scan", 2),))
def cond_in_a_scan():
    def loss(x):
        def body(total, row):
            return total + lax.cond(row[0] > 1, jnp.sum, lambda row: jnp.sum(jnp.log(row)), row), None  # here 37

        return lax.scan(body, 0.0, x)[0]

    return loss, (np.array([[2, 0], [1, 1], [1, 0]], np.float32),), {}


@fault("38", "div", MODEL, loops=(("scan", 1), ("while", 3)))
def while_in_a_scan():
    def loss(x):
        def inner(state):
            i, y = state
            return i + 1, y / (3.0 - i)  # here 38

        def body(total, n):
            return total + lax.while_loop(lambda state: state[0] < n, inner, (0.0, 1.0))[1], None

        return lax.scan(body, 0.0, x)[0]

    return loss, (np.array([2, 5], np.float32),), {}


@fault("39", "div", MODEL, backward=True)
def arc_cosine_at_one():
    def loss(x):
        return jnp.sum(jnp.sqrt(1 - x * x))  # here 39

    return jax.grad(jax.checkpoint(loss)), (np.array([0.5, 1.0], np.float32),), {}


@fault("40", "log", MODEL)
def cross_entropy_of_optax():
    def loss(probabilities, y):
        return jnp.mean(optax.losses.kl_divergence(jnp.log(probabilities), y))  # here 40

    return loss, (X - 0.5, X), {}


@fault("41", "mul", SCALE, backward=True, loops=(("scan", 0),))
def recurrence_that_a_scale_breaks():
    def loss(w, x):
        def body(h, row):
            h = h.astype(F16) * jnp.float16(30)  # here 41
            return h.astype(F32) + row, None

        return jnp.sum(lax.scan(body, 1e-4 * w, x)[0]) * 4

    return mixed(loss, W[0], 0 * W[:2], scale=32.0)


@fault("42", "dot_general", WIDE)
def attention_scores_beyond_float16():
    def attention(q, k):
        return jax.nn.softmax(q @ k.T)  # here 42

    def loss(x):
        q = (100 * x).astype(F16)
        return jnp.sum(jax.jit(attention)(q, q).astype(F32) ** 2)

    return loss, (2 * X,), {}


@fault("43", "rsqrt", MODEL)
def layer_norm_of_a_constant():
    def loss(x):
        centred = x - jnp.mean(x, axis=1, keepdims=True)
        return jnp.sum(centred * lax.rsqrt(jnp.mean(centred**2, axis=1, keepdims=True)))  # here 43

    return jax.value_and_grad(loss), (np.ones_like(X),), {}
