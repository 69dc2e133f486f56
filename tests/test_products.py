"""Which products autocast runs in float32, forward and backward, because they are not layers, and which in 16 bits."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery_tools import primitives_of
from jax import lax
from jax.scipy.linalg import solve_triangular
from pass_tools import with_batching_rule
from test_autocast import equations

from jmp_train import DEFAULT_RULES, autocast, explain, full_precision, get_policy, low_precision
from jmp_train._autocast.analysis.uses import RETURNED
from jmp_train._autocast.analysis.whole_program.derivatives import are_mapped
from jmp_train._autocast.analysis.wide_product import Cause, WideProduct
from jmp_train._autocast.autocast import make_planned, matmul_precision
from jmp_train._autocast.ir import Precision
from jmp_train._autocast.planner import Planner
from jmp_train._explain._operations import operations_of

HIGHEST = lax.Precision.HIGHEST
RNG = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


def products(fn, *args, policy: Any = "mixed_float16", rules=DEFAULT_RULES, argnums: Any = 0):
    """The dots and convolutions of a program: (dtype of the operands, dtype of the result, reason, backward).

    The same rows as those of `explain`, which would trace the program three times.
    """
    policy = get_policy(policy)
    with matmul_precision(policy):
        plan, _ = make_planned(fn, policy, rules, argnums)(*args)
    return [(op.dtype, op.result, op.reason, op.backward) for op, _ in operations_of(plan.program) if op.flops]


def causes(fn, *args, **options):
    """The cause why each product runs in float32; `None` for a product in 16 bits."""
    of_reason = {cause.value: cause for cause in Cause}
    return [
        of_reason.get(reason.rpartition(": ")[2]) or of_reason.get(reason)
        for _, _, reason, _ in products(fn, *args, **options)
    ]


def loss_of(fn):
    return lambda *args: jnp.sum(jnp.sin(fn(*args)))


X, W, SMALL = normal(32, 64), normal(64, 64), normal(4, 4)
POSITIONS, FREQUENCIES = np.arange(512, dtype=np.float32), normal(8)
POINTS = normal(256, 3)


def unit(v):
    return v / jnp.linalg.norm(v)


def blocks(w, x):
    """Activations in four blocks of eight rows."""
    return jnp.tanh(x @ w).reshape(4, 8, -1)


def apart_from(x, of_row):
    """Squared distances, without one of the squared norms, of rows that a loop computes from data to other rows."""
    rows, sums = lax.map(lambda r: (lambda made: (made, jnp.sum(made**2, -1)))(of_row(r)), x.reshape(4, 8, 64))
    return sums.reshape(32, 1) - 2 * (rows.reshape(32, 64) @ jnp.exp(x).T)


def attended(h, p, feature):
    """A linear attention (Katharopoulos et al. 2020) and its residual connection."""
    q, k = feature(h @ p), feature(h @ p.T)
    return h + ((q @ (k.T @ h)) / (q @ jnp.sum(k, 0)[:, None] + 9)) @ p


def stacked(w):
    return jnp.stack([w, w, w])


def squared_blocks(w, x):
    """Activations in blocks of 8 by 8."""
    return blocks(w, x)[..., :8]


def apart(a, b):
    """The squared distances between the rows of two blocks."""
    return squares(a)[:, None] + squares(b) - 2 * a @ b.T


def squares(x):
    return jnp.sum(x**2, -1)


@jax.custom_jvp
def halved(x):
    return x / 2


halved.defjvp(lambda primals, tangents: (primals[0] / 2, tangents[0] / 2))


def fifth_power(a):
    return a @ ((a @ a) @ (a @ a))


def reflected(x, v):
    return x - 2 * (x @ v)[:, None] * v / jnp.sum(v**2)


def raised(p):
    """A covariance with 1e-6 added to its diagonal, then clipped."""
    at = jnp.arange(len(p))
    return jnp.clip(jnp.fill_diagonal(p.at[at, at].add(1e-6), jnp.diag(p), inplace=False), -9.0, 9.0)


def covariances_of(x):
    """Covariances `[2, 64, 64]` that a loop carries."""
    step = lambda p, _: (jnp.linalg.solve(jnp.eye(64) + p, p),) * 2  # noqa: E731
    return lax.scan(step, jnp.eye(64) + x[0], None, 2)[1]


# The Laplacian of a ring of 64 points.
RING = (
    2 * np.eye(64, dtype=np.float32)
    - np.roll(np.eye(64, dtype=np.float32), 1, 0)
    - np.roll(np.eye(64, dtype=np.float32), -1, 0)
)
# name: (function of (parameters, data), parameters, data, cause)
WIDE = {
    "precision of an einsum": (
        lambda w, x: jnp.einsum("ij,jk->ik", x, w, precision="highest"), W, X, Cause.PRECISION),
    "precision of a convolution": (
        lambda w, x: lax.conv(x, w, (1, 1), "SAME", precision=HIGHEST), normal(8, 8, 3, 3), normal(2, 8, 8, 8),
        Cause.PRECISION),
    "a preset": (
        lambda w, x: jnp.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32), W, X, Cause.PRECISION),
    "a preset that emulates float32": (
        lambda w, x: jnp.dot(x, w, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X6), W, X, Cause.PRECISION),
    "an outer product of data": (
        lambda f, p: jnp.einsum("i,j->ij", p, 1 / f), FREQUENCIES, POSITIONS, Cause.SHORT),
    "an outer product of integers": (
        lambda f, p: jnp.einsum("i,j->ij", jnp.arange(512), jnp.exp(f)), FREQUENCIES, POSITIONS, Cause.SHORT),
    "coordinates": (lambda w, x: x @ w, normal(3, 64), POINTS, Cause.SHORT),
    "coordinates times data": (lambda w, x: w[0, 0] * x @ x[:3, :3].T, W, POINTS, Cause.SHORT),
    "dynamics": (lambda a, x: a @ a @ a.T, SMALL, SMALL, Cause.SHORT),
    "an inner product": (lambda w, x: jnp.vdot(w, x), W, W + 1, Cause.INNER),
    "inner products of a batch": (lambda w, x: jnp.einsum("bi,bi->b", x * w[0], x + 1), W, X, Cause.INNER),
    "a trace": (lambda w, x: jnp.trace((x * w[0]).T @ (x + 1)), W, X, Cause.DIAGONAL),
    "a diagonal of a parameter times data": (lambda w, x: jnp.diag(x @ w[:, :32]), W, X, Cause.DIAGONAL),
    "a trace of activations, by an einsum": (
        lambda w, x: jnp.einsum("ii->", jnp.tanh(x @ w) @ jnp.tanh(x @ w.T).T), W, X, Cause.DIAGONAL),
    "traces of a batch": (
        lambda w, x: jnp.trace((x * w[0]).reshape(4, 8, 64) @ (x + 1).reshape(4, 64, 8), axis1=1, axis2=2), W, X,
        Cause.DIAGONAL),
    "a Gram matrix": (lambda w, x: (x * w[0]).T @ (x * w[0]), W, X, Cause.SQUARE),
    "scaled": (lambda w, x: 2 * (x * w[0]) @ (x * w[0]).T, W, X, Cause.SQUARE),
    "through moves": (
        lambda w, x: jnp.dot(jnp.reshape(w, (8, 8, 64)).reshape(64, 64), -w.T[::1].T.T / 3), W, X, Cause.SQUARE),
    "batched by vmap": (lambda w, x: jax.vmap(lambda a: a.T @ a)(w.reshape(4, 16, 64)), W, X, Cause.SQUARE),
    "an exponential table": (
        lambda w, x: jax.nn.softmax(x @ w) @ jnp.sinh(jnp.linspace(-20, 20, 64)), W, X, Cause.TABLE),
    "a table of large integers": (
        lambda w, x: jax.nn.softmax(x @ w) @ jnp.stack([jnp.arange(64) * 1001, jnp.arange(64)], 1), W, X, Cause.TABLE),
    "a table of large numbers from a call": (
        lambda w, x: jax.nn.softmax(x @ w) @ jax.nn.relu(jnp.linspace(-1e6, 1e6, 64)), W, X, Cause.TABLE),
    "a table of large numbers from a rematerialized call": (
        lambda w, x: jax.nn.softmax(x @ w) @ jax.checkpoint(jnp.sinh)(jnp.linspace(-20, 20, 64)), W, X, Cause.TABLE),
    "a transform of data": (
        lambda w, x: (x * w[0]) @ jnp.cos(jnp.arange(4096.0).reshape(64, 64)), W, X, Cause.GRID),
    "a table of tiny numbers": (
        lambda w, x: (x @ w) @ (1e-9 * jnp.cos(jnp.arange(4096.0).reshape(64, 64))), W, X, Cause.TABLE),
    "an expectation over a grid": (
        lambda w, x: jax.nn.softmax(x @ w) @ jnp.stack([jnp.linspace(-1, 1, 64)] * 2, 1), W, X, Cause.GRID),
    "an expectation of exact numbers": (
        lambda w, x: jax.nn.softmax(x @ w) @ jnp.arange(64.0), W, X, Cause.GRID),
    "a matrix of data times a vector": (lambda w, x: x @ (x[0] * w[0]), W, X, Cause.INNER),
    "a weighted Gram matrix": (lambda w, x: (x * w[0]).T @ (x * w[0] * jnp.exp(x[:, :1])), W, X, Cause.SQUARE),
    "weighted by an einsum": (
        lambda w, x: jnp.einsum("ni,n,nj->ij", x * w[0], jnp.exp(x[:, 0]), x * w[0]), W, X, Cause.SQUARE),
    "weighted on the left": (lambda w, x: (x * w[0] * jnp.exp(x[:, :1])).T @ (x * w[0]) / 2, W, X, Cause.SQUARE),
    "a matrix of data times a part of a vector": (
        lambda w, x: jnp.sinh(w[:32, :60] * x[:32, :60]) @ jnp.concatenate([x[0]])[2:62], W, X, Cause.INNER),
    "a matrix of data times zeros": (lambda w, x: (x * w[0]) @ jnp.zeros(64), W, X, Cause.INNER),
    "covariances of a filter": (
        lambda w, x: lax.scan(
            lambda p, _: (x[:, :32] @ p @ x[:, :32].T * w[:32, :32] + jnp.eye(32), None), jnp.eye(32), None, 2)[0],
        W, X, Cause.STATE),
    "a normalised recurrence": (
        lambda w, x: lax.scan(
            lambda a, _: ((a @ x[:, :32]) / jnp.sum(a @ x[:, :32], -1, keepdims=True), None), x[:8, 32:] * w[0, :32],
            None, 2)[0],
        W, jnp.abs(X), Cause.STATE),
    "a rematerialized recurrence": (
        lambda w, x: lax.scan(
            jax.checkpoint(lambda a, _: (a @ x[:, :32] / 8, None)), x[:8, 32:] * w[0, :32], None, 2)[0],
        W, X, Cause.STATE),
    "a recurrence with a rule of its own": (
        lambda w, x: lax.scan(lambda a, _: (halved(a) @ x[:, :32] / 4, None), x[:8, 32:] * w[0, :32], None, 2)[0],
        W, X, Cause.STATE),
    "covariances of a rematerialized filter": (
        lambda w, x: lax.scan(
            jax.checkpoint(lambda p, _: (w @ jnp.linalg.solve(jnp.eye(64) + p, p) @ w.T, None)), jnp.eye(64),
            None, 2)[0],
        W / 8, X, Cause.SOLUTION),
    "a solution": (
        lambda w, x: (x * w[0]) @ jnp.linalg.solve(jnp.eye(64) + jnp.outer(x[0], x[0]), x.T), W, X, Cause.SOLUTION),
    "a Cholesky factor": (
        lambda w, x: (x * w[0]) @ (2 * jnp.linalg.cholesky(jnp.diag(1 + x[1] ** 2))).T, W, X, Cause.SOLUTION),
    "covariances of a learned filter": (
        lambda w, x: lax.scan(
            lambda p, _: (w @ jnp.linalg.solve(jnp.eye(64) + p, p) @ w.T, None), jnp.eye(64), None, 2)[0],
        W / 8, X, Cause.SOLUTION),
    "covariances of a learned filter, their diagonal raised and bounded": (
        lambda w, x: lax.scan(
            lambda p, _: (w @ raised(jnp.linalg.solve(jnp.eye(64) + p, p)) @ w.T, None), jnp.eye(64), None, 2)[0],
        W / 8, X, Cause.SOLUTION),
    "means of a learned filter": (
        lambda w, x: lax.scan(
            lambda c, _: ((jnp.linalg.solve(jnp.eye(64) + c[0], c[0]),
                           jnp.linalg.solve(jnp.eye(64) + c[0], x.T) + w @ c[1]), None),
            (jnp.eye(64), x.T), None, 2)[0][1],
        W / 8, X, Cause.SOLUTION),
    "recursive least squares on activations": (
        lambda w, x: lax.scan(
            lambda p, h: (p - jnp.outer(p @ h / (1 + jnp.sum((p @ h) * h)), h @ p), None), jnp.eye(64), jnp.tanh(x @ w)
        )[0],
        W / 8, X, Cause.SOLUTION),
    "means of a learned smoother": (
        lambda w, x: lax.scan(
            lambda m, row: (jnp.linalg.solve(jnp.eye(64) + row, x.T) + w @ m, None), x.T, covariances_of(x))[0],
        W / 8, X, Cause.SOLUTION),
    "covariances that a learned smoother is given": (
        lambda w, x: lax.scan(
            lambda p, row: (jnp.linalg.solve(jnp.eye(64) + p, p), w @ row), jnp.eye(64), covariances_of(x))[1],
        W / 8, X, Cause.SOLUTION),
    "the matrix of a system": (
        lambda w, x: jnp.linalg.cholesky(100 * jnp.eye(32) + (x * w[0]) @ (x + 1).T), W / 8, X, Cause.IN_SYSTEM),
    "a covariance that a system reads": (
        lambda w, x: jnp.linalg.cholesky(1e4 * jnp.eye(32) + (x * w[0]) @ jnp.exp(w) @ x.T), W / 8, X,
        Cause.IN_SYSTEM),
    "a right-hand side made of a parameter": (
        lambda w, x: solve_triangular(9 * jnp.eye(32) + jnp.diag(x[0, :32]), x @ w + 1), W / 8, X, Cause.IN_SYSTEM),
    "a right-hand side of activations and targets": (
        lambda w, x: solve_triangular(9 * jnp.eye(64), jnp.tanh(x @ w).T @ x[:, ::-1]), W / 8, X, Cause.IN_SYSTEM),
    "a right-hand side of activations": (
        lambda w, x: solve_triangular(9 * jnp.eye(64), jnp.tanh(x @ w).T @ jnp.sin(x @ w)), W / 8, X, Cause.IN_SYSTEM),
    "a weighted square of a parameter": (lambda w, x: w.T @ (jnp.exp(x[0])[:, None] * w), W / 8, X, Cause.SQUARE),
    "a quadratic form": (lambda w, x: (x * w[0]) @ jnp.exp(w) @ (x * w[0]).T, W / 8, X, Cause.REPEATED),
    "a fifth power of a matrix of data": (
        lambda w, x: fifth_power((x * w[0])[:, :32] / 8), W, X, Cause.REPEATED),
    "a power of a matrix of data": (lambda w, x: (x * w[0])[:, :32] @ (x * w[0])[:, :32], W, X, Cause.REPEATED),
    "a power iteration": (lambda w, x: unit(x[0] @ w) @ w.T, W, X, Cause.REPEATED),
    "a power iteration of rows of one": (lambda w, x: unit(x[:1] @ w) @ w.T, W, X, Cause.REPEATED),
    "a reflection": (lambda w, x: reflected(x, w[0]), W, X, Cause.REPEATED),
    "components over the square of a length": (
        lambda w, x: x - ((x @ w[0]) / jnp.sum(w[0] ** 2))[:, None] * w[0], W, X, Cause.REPEATED),
    "reflections, one after the other": (
        lambda w, x: reflected(reflected(reflected(x, w[0]), w[1]), w[2]), W, X, Cause.REPEATED),
    "reflections in a loop": (
        lambda w, x: lax.scan(lambda x, v: (reflected(x, v), None), x, w[:4])[0], W, X, Cause.REPEATED),
    "reflections in a loop that reads its vectors by their number": (
        lambda w, x: lax.fori_loop(0, 4, lambda i, x: x - 2 * jnp.outer(x @ w[i], w[i]) / jnp.sum(w[i] ** 2), x),
        W, X, Cause.REPEATED),
    "Gram matrices in a loop that reads rows twice by their number": (
        lambda w, x: lax.fori_loop(
            0, 4, lambda i, c: c + (lambda a: a[i].T @ a[i])((x * w[0]).reshape(4, 8, 64)), jnp.zeros((64, 64))),
        W, X, Cause.SQUARE),
    "a centred Gram matrix": (
        lambda w, x: (w.T @ w) @ (jnp.eye(64) - jnp.full((64, 64), 1 / 64)), W, X, Cause.SOLUTION),
    "a centred kernel of a Gram matrix": (
        lambda w, x: jnp.exp(w.T @ w / 8) @ (jnp.eye(64) - jnp.full((64, 64), 1 / 64)), W, X, Cause.SOLUTION),
    "a kernel of a Gram matrix times another": (
        lambda w, x: jnp.tanh((x * w[0]).T @ (x * w[0])) @ jnp.exp((x * w[1]).T @ (x * w[1]) / 64),
        W, X, Cause.SOLUTION),
    "a kernel of a Gram matrix between data": (
        lambda w, x: (x * w[0]) @ jnp.exp((x * w[1]).T @ (x * w[1]) / 64) @ x.T, W, X, Cause.SOLUTION),
    "differences of a parameter": (
        lambda w, x: (2 * jnp.eye(64) - jnp.eye(64, k=1) - jnp.eye(64, k=-1))[1:-1] @ (w + 100), W, X,
        Cause.DIFFERENCES),
    "a Laplacian that was captured": (lambda w, x: RING @ (x.T[:, :8] * w[:, :8]), W, X, Cause.DIFFERENCES),
    "running sums of data": (lambda w, x: (x * w[0]) @ jnp.tril(jnp.ones((64, 64))), W, X, Cause.CUMULATIVE),
    "running sums of activations": (
        lambda w, x: jnp.tanh(x @ w) @ jnp.triu(jnp.ones((64, 64)), 1), W, X, Cause.CUMULATIVE),
    "running sums of activations in a batch": (
        lambda w, x: jnp.einsum("ts,bsd->btd", np.tri(8, dtype=np.float32), (x @ w).reshape(4, 8, 64)), W, X,
        Cause.CUMULATIVE),
    "distances between blocks of activations, in a loop inside of a loop": (
        lambda w, x: lax.map(lambda a: lax.map(lambda b: apart(a, b), blocks(w, x)), blocks(w, x)),
        W / 8, X, Cause.DISTANCE),
    "a Gram matrix of activations that a loop transposes": (
        lambda w, x: jnp.einsum("bij,bjk->bik", squared_blocks(w, x), lax.map(jnp.transpose, squared_blocks(w, x))),
        W / 8, X, Cause.SQUARE),
    "distances to rows that a loop doubles, behind a layer of activations": (
        lambda w, x: (lambda z: apart_from(x, lambda r: 2 * r) + 0 * z)(jnp.sum(jnp.tanh(x @ w))),
        W / 8, X, Cause.DISTANCE),
    "distances to rows that a loop computes, behind a layer of activations": (
        lambda w, x: (lambda z: apart_from(x, jnp.sin) + 0 * z)(jnp.sum(jnp.tanh(x @ w))), W / 8, X, Cause.DISTANCE),
    "a Gram matrix of activations that a loop transposes and returns twice": (
        lambda w, x: (lambda t: jnp.einsum("bij,bjk->bik", squared_blocks(w, x), t[0]) + t[1][0, 0, 0])(
            lax.map(lambda r: (lambda t: (t, t))(r.T), squared_blocks(w, x))), W / 8, X, Cause.SQUARE),
    "a value twice, doubled by a loop, behind a layer of activations": (
        lambda w, x: (lambda z, doubled: (x @ jnp.exp(x).T) @ doubled + 0 * z)(
            jnp.sum(jnp.tanh(x @ w)), lax.map(lambda r: 2 * r, x)), W / 8, X, Cause.REPEATED),
    "distances between every two blocks of activations": (
        lambda w, x: lax.scan(
            lambda c, a: (lax.scan(lambda c, b: (c + apart(b, a), None), c, blocks(w, x))[0], None),
            jnp.zeros((8, 8)), blocks(w, x))[0],
        W / 8, X, Cause.DISTANCE),
    "distances between two sets": (
        lambda w, x: squares(x * w[0])[:, None] + squares(x + 1) - 2 * (x * w[0]) @ (x + 1).T, W, X, Cause.DISTANCE),
    "squares of codes beside a product with activations": (
        lambda w, x: squares(w) - 2 * jnp.tanh(x @ w) @ w.T, W, X, Cause.DISTANCE),
    "an angle": (lambda w, x: jnp.cos(7 + (x * w[0]) @ (x + 1).T / 3), W, X, Cause.DELICATE),
    "under a logarithm": (
        lambda w, x: jnp.log(jnp.maximum((x * w[0]) ** 2 @ jnp.exp(x.T), 1e-6)), W, X, Cause.DELICATE),
    "a power under a logarithm": (
        lambda w, x: jnp.log(((x * w[0]) @ (x + 1).T) ** 2 + 1e-6), W, X, Cause.DELICATE),
    "a convolution of data under a logarithm": (
        lambda w, x: jnp.log(jnp.sqrt(jnp.abs(lax.conv(
            (x * w[0]).reshape(4, 8, 64), x.reshape(8, 8, 32)[..., :16], (4,), "SAME")) + 1e-3)), W, X, Cause.DELICATE),
    "an average of data by exponentials of activations": (
        lambda w, x: (lambda k: k @ x.T / jnp.sum(k, 1, keepdims=True))(jnp.exp(jnp.tanh(x @ w))), W, X, Cause.AVERAGE),
    "an average of data by activations": (
        lambda w, x: (lambda k: (x.T[:, :32] @ k).T / (jnp.sum(k, 0) + 1e-9)[:, None])(jax.nn.sigmoid(x @ w)), W, X,
        Cause.AVERAGE),
    "a choice from attention over one-hot rows, under a logarithm": (
        lambda w, x: jnp.log(jnp.take_along_axis(
            jax.nn.softmax(x @ w) @ jax.nn.one_hot(jnp.argmax(x, 0), 32), jnp.argmax(x[:, :32], 1)[:, None], 1) + 1e-9),
        W, X, Cause.PROBABILITY),
    "a mixture under a logarithm, its weights and a gate from activations": (
        lambda w, x: jnp.log(
            jax.nn.sigmoid(x @ w[:, :1]) * (jax.nn.softmax(x @ w.T) @ jax.nn.softmax(w + 1)) + x[0] ** 2),
        W, X, Cause.PROBABILITY),
    "a sum of exponentials of activations times data, under a logarithm": (
        lambda w, x: jnp.log2(jnp.sum(jnp.exp(x @ w) @ x.T ** 2, -1)), W, X, Cause.PROBABILITY),
    "sigmoids of activations times a frozen array, bounded under a logarithm": (
        lambda w, x: jnp.log1p(-jnp.clip(jax.nn.sigmoid(x @ w) @ FROZEN**2 / 64, 0, 0.9)), W, X, Cause.PROBABILITY),
    "probabilities of rows that are looked up, under a logarithm": (
        lambda w, x: jnp.log(jax.nn.one_hot(jnp.argmax(x, 1), 64) @ jnp.exp(w)), W, X, Cause.PROBABILITY),
    "a chain of activations' probabilities under a logarithm": (
        lambda w, x: jnp.log((jax.nn.softmax(x @ w) @ jax.nn.softmax(w + 1)) @ jax.nn.softmax(w.T)), W, X,
        Cause.PROBABILITY),
    "a divisor": (lambda w, x: x[:, :32] / (jnp.exp(x * w[0] / 8) @ jnp.exp(x.T)), W, X, Cause.DELICATE),
    "a blur": (
        lambda w, x: lax.conv_general_dilated(
            x.reshape(1, 8, 16, 16) * w[0, 0], jnp.ones((8, 1, 3, 3)) / 9, (1, 1), "SAME", feature_group_count=8),
        W, X, Cause.FILTER),
    "a blur passed as data": (
        lambda w, x: lax.conv(
            x[:16, :16].reshape(1, 1, 16, 16) * w[0, 0], x[:3, :3].reshape(1, 1, 3, 3), (1, 1), "SAME"),
        W, X, Cause.FILTER),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDE)
def test_kept_in_float32_with_its_derivatives(name):
    fn, w, x, cause = WIDE[name]
    forward = causes(fn, w, x)
    others = {None, Cause.SQUARE} if "Gram" in name else {None, Cause.SHORT}  # within `diag` and `outer`
    assert forward[-1] is cause and set(forward) <= {cause, *others}
    both = products(jax.grad(loss_of(fn), (0, 1)), w, x)
    mine = [each for each in both if each[2].endswith(cause.value)]
    assert len(mine) >= 2 or name.startswith(("an exponential", "a table of large")), both
    assert {dtype for dtype, *_ in mine if _[1] != cause.value or cause is not Cause.SQUARE} <= {"float32"}
    assert all(result == "float32" for _, result, _, _ in mine)


@pytest.mark.parametrize("name", ["distances between two sets", "an angle", "a quadratic form"])
def test_products_that_a_checkpoint_saves_are_found_by_what_reads_them(name):
    fn, w, x, cause = WIDE[name]
    saved = jax.checkpoint(loss_of(fn), policy=jax.checkpoint_policies.dots_saveable)
    found = products(jax.grad(saved), w, x)
    assert {dtype for dtype, *_ in found} == {"float32"} and any(
        reason.endswith(cause.value) for _, _, reason, _ in found
    )


@pytest.mark.parametrize("saved, number", [(None, 4), (jax.checkpoint_policies.dots_saveable, 3)])
def test_probabilities_are_float32_where_they_are_computed_again_without_their_logarithm(saved, number):
    fn, w, x, cause = WIDE["a mixture under a logarithm, its weights and a gate from activations"]
    loss = lambda w, x: jnp.mean(fn(w, x))  # noqa: E731  (linear in the logarithm: the backward pass does not need it)
    found = products(jax.grad(jax.checkpoint(loss, policy=saved)), w, x)
    assert [dtype for dtype, _, reason, _ in found if reason.endswith(cause.value)] == ["float32"] * number
    assert {dtype for dtype, _, reason, _ in found if not reason.endswith(cause.value)} == {"float16"}


NARROW = {
    "a layer": (lambda w, x: x @ w, W, X),
    "a preset of TF32": (lambda w, x: jnp.dot(x, w, precision=lax.DotAlgorithmPreset.TF32_TF32_F32), W, X),
    "two factors of a weight": (lambda w, x: (x @ w) @ (w[:, :4] @ w[:4]), W, X),
    "a low-rank adapter": (lambda w, x: (x @ w[:, :4]) @ w[:4], W, X),
    "a head of ten classes": (lambda w, x: jax.nn.log_softmax(x @ w[:, :10]), W, X),
    "two towers": (lambda w, x: (x @ w) @ (x @ (w + 1)).T, W, X),
    "a power of a matrix": (lambda w, x: w @ w, W, X),
    "a vector through a weight and its transpose": (lambda w, x: jnp.tanh(x[0] @ w) @ w.T, W, X),
    "rows through a weight and its transpose": (lambda w, x: unit(x @ w) @ w.T, W, X),
    "a power iteration of activations": (lambda w, x: unit(jnp.tanh(x @ w)[0] @ w) @ w.T, W, X),
    "a projection of activations": (lambda w, x: reflected(jnp.tanh(x @ w), w[0]), W, X),
    "beside rows that a loop moves, given squares of the weight": (
        lambda w, x: lax.map(
            lambda row: row[0][::-1], (x.reshape(4, 8, 64), jnp.sum(w**2, 0).reshape(4, 16))).reshape(32, 64) + x @ w,
        W, X),
    "linear attentions in a loop": (
        lambda w, x: lax.scan(lambda h, p: (attended(h, p, jax.nn.relu), None), x, stacked(w))[0], W / 8, X),
    "linear attentions without features in a loop": (
        lambda w, x: lax.scan(lambda h, p: (attended(h, p, lambda x: x), None), x, stacked(w))[0], W / 8, X),
    "gated by bounds in a loop": (
        lambda w, x: lax.scan(
            lambda h, p: (h + (h @ p) * jnp.clip(h @ p.T, 0, 6) / (1 + jax.nn.relu(h @ p)), None), x, stacked(w))[0],
        W / 8, X),
    "where a mask picks columns": (
        lambda w, x: jnp.where((jnp.arange(64) == jnp.arange(64) + (x[0] > 1).astype(int))[None], x @ w, 0.0), W, X),
    "where data pick a number of each row": (
        lambda w, x: jnp.where(jnp.arange(32)[:, None] + (x > 1).astype(int) == jnp.arange(64), x @ w, 0.0), W, X),
    "a gate times its weight": (lambda w, x: jax.nn.sigmoid(x @ w[0])[:, None] * w[0], W, X),
    "data times a head of its own": (lambda w, x: (x @ w[0])[:, None] * x, W, X),
    "a head times another": (lambda w, x: (x @ w[0])[:, None] * w[1], W, X),
    "a vector through a matrix and times itself": (lambda w, x: (w @ w[0]) * w[0], W, X),
    "a power iteration in a loop": (
        lambda w, x: lax.fori_loop(0, 3, lambda _, v: unit(unit(v @ w) @ w.T), x[0]), W, X),
    "a power iteration of computed data": (
        lambda w, x: (lambda data: w[0, 0] * (unit(jnp.sin(x[0]) @ data.T) @ data))(jnp.exp(x)), W, X),
    "activations times gated ones": (lambda w, x: (x @ w) @ (jnp.tanh(x @ w.T) * (x @ w)).T, W, X),
    "attention": (lambda w, x: jax.nn.softmax((x @ w) @ (x @ w.T).T) @ (x @ w), W, X),
    "a frozen network": (lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ jnp.asarray(FROZEN)) @ jnp.asarray(FROZEN), W, X),
    "attention in a frozen network": (
        lambda w, x: jax.nn.softmax((x @ jnp.asarray(FROZEN)) @ (x @ jnp.asarray(FROZEN.T)).T) @ (x @ w), W, X),
    "a frozen layer of data": (lambda w, x: jnp.tanh(x @ jnp.asarray(FROZEN)) @ w, W, X),
    "activations under a logarithm": (lambda w, x: jnp.log(jnp.tanh(x @ w) ** 2 @ jnp.asarray(FROZEN) ** 2), W, X),
    "a layer of exponentials under a logarithm": (lambda w, x: jnp.log(1e3 + jnp.exp(x @ w / 9) @ w), W, X),
    "an average of activations": (
        lambda w, x: (lambda k: k @ (x.T @ w[:32]) / jnp.sum(k, 1, keepdims=True))(jnp.exp(jnp.tanh(x @ w))), W, X),
    "an average of parameters": (
        lambda w, x: (lambda k: k @ w / jnp.sum(k, 1, keepdims=True))(jnp.exp(jnp.tanh(x @ w))), W, X),
    "a layer of data that is divided by the sum of its weights": (
        lambda w, x: x @ w / (64 + jnp.sum(w, 0)), W, X),
    "a trace beside its logits": (
        lambda w, x: (lambda logits: jnp.trace(logits) - jax.nn.logsumexp(logits, 1))(x @ w[:, :32]), W, X),
    "attention under a logarithm": (
        lambda w, x: jnp.log(9 + jax.nn.softmax((x @ w) @ (x @ w.T).T) @ (x @ w)), W, X),
    "probabilities under no logarithm": (lambda w, x: jax.nn.softmax(x @ w) @ jax.nn.softmax(w + 1), W, X),
    "a softplus of a mixture": (
        lambda w, x: jnp.log(1 + jnp.exp(jax.nn.softmax(x @ w) @ jax.nn.softmax(w + 1))), W, X),
    "a layer and a penalty": (lambda w, x: jnp.tanh(x @ w + 1e-4 * jnp.sum(w**2)), W, X),
    "a layer and a norm": (lambda w, x: jnp.tanh(x @ w + jnp.linalg.norm(x, axis=1, keepdims=True)), W, X),
    "a layer and an energy": (lambda w, x: jnp.tanh(x @ w + 0.5 * squares(x)[:, None]), W, X),
    "a recurrence beside a linear system": (
        lambda w, x: lax.scan(
            lambda h, row: (jnp.sum(jnp.linalg.solve(9 * jnp.eye(32) + row[:, :32], row)) * 0 + row + h @ w, None),
            x, jnp.stack([x, x]))[0], W / 8, X),
    "layers on solutions, row by row": (
        lambda w, x: lax.scan(
            lambda h, row: (jnp.tanh(h @ w), jnp.linalg.solve(9 * jnp.eye(64) + jnp.tanh(row), h.T).T + row[:32] @ w),
            x, jnp.linalg.inv(jnp.diag(9 + x[0]))[None])[1], W / 8, X),
    "squares of other values": (lambda w, x: squares(x)[:, None] + squares(w) - 2 * (x @ w) @ jnp.tanh(w), W, X),
    "layers of whose results a system reads a function of a product": (
        lambda w, x: jnp.linalg.solve(jnp.diag(2 + x[0, :32]), jnp.tanh((x @ w) @ jnp.tanh(x @ w).T)), W, X),
    "a layer of whose result a system reads a product of products": (
        lambda w, x: jnp.linalg.solve(jnp.diag(2 + x[0, :32]), (x @ w @ w) @ jnp.tanh(x @ w).T @ w[:32]), W, X),
    "a layer that a system reads": (
        lambda w, x: jnp.linalg.solve(jnp.diag(2 + x[0, :32]), jnp.tanh(x @ w) @ w), W, X),
    "a network inside a filter": (
        lambda w, x: lax.scan(
            lambda c, row: ((c[0] + (row - jnp.tanh(jnp.tanh(c[0] @ w) @ w)) * c[1][:32],
                             jnp.linalg.solve(9 * jnp.eye(64) + c[1], c[1])), None),
            (x, jnp.eye(64)), jnp.stack([x, x]))[0][0], W / 8, X),
    "layers on what a filter returns": (
        lambda w, x: jnp.tanh(lax.scan(
            lambda p, _: (jnp.linalg.solve(9 * jnp.eye(32) + p, p), None), x[:, :32], None, 2)[0] @ w[:32]) @ w, W, X),
    "differences of activations": (lambda w, x: RING @ (x @ w).T, W, X),
    "a causal average": (
        lambda w, x: (jnp.tril(jnp.ones((32, 32))) / jnp.arange(1, 33)[:, None]) @ (x @ w), W, X),
    "two groups of rows": (lambda w, x: jnp.repeat(jnp.eye(32)[:2], 32, 0) @ (x @ w), W, X),
    "one-hot numbers": (lambda w, x: jax.nn.one_hot(jnp.arange(10) % 3, 10) @ w[:10], W, X),
    "a resized image of activations": (lambda w, x: jax.image.resize((x @ w)[:8], (16, 64), "linear"), W, X),
    "a layer whose weight is a solution": (
        lambda w, x: x @ jnp.linalg.solve(jnp.eye(64) + w - w.T, jnp.eye(64) - w + w.T), W, X),
    "a depthwise layer": (
        lambda w, x: lax.conv_general_dilated(
            x.reshape(1, 8, 16, 16), w[:8, :9].reshape(8, 1, 3, 3), (1, 1), "SAME", feature_group_count=8), W, X),
    "a first layer of grey images": (
        lambda w, x: lax.conv(x.reshape(8, 1, 16, 16), w[:16, :9].reshape(16, 1, 3, 3), (1, 1), "SAME"), W, X),
}  # fmt: skip
FROZEN = normal(64, 64)
SYSTEMS = (Cause.SYSTEM.value, Cause.PRECISION.value, "inside custom_linear_solve, as recorded")


# Cases that also run in bfloat16, because it depends on the dtype whether a table is exact.
OF_TABLES = (
    "a causal average", "differences of activations", "two groups of rows", "one-hot numbers",
    "a resized image of activations", "attention in a frozen network", "activations under a logarithm",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in NARROW), *((name, "bfloat16") for name in OF_TABLES)]
)
def test_layers_stay_narrow(name, dtype):
    fn, w, x = NARROW[name]
    found = products(jax.grad(loss_of(fn)), w, x, policy=f"mixed_{dtype}")
    found = [each for each in found if each[2] not in SYSTEMS]
    assert found and {read for read, *_ in found} == {dtype}


def test_a_number_among_the_arguments_is_no_norm_of_a_power_iteration():
    found = products(lambda w, x, scale: (x[0] @ w / scale) @ w.T, W, X, np.float32(2))
    assert {read for read, *_ in found} == {"float16"}


# Functions that contain no layer. The others are measured in `product_cases.py`.
WITHOUT_LAYERS = [
    name
    for name, (fn, *_) in WIDE.items()
    if not ("softmax" in fn.__code__.co_names or "tiny" in name or "activations" in name)
]
FIRST_OF_CAUSE = {WIDE[name][-1]: name for name in reversed(WITHOUT_LAYERS)}


def gradients_under_autocast(fn):
    loss = loss_of(fn)
    return {
        "autocast(grad), float16": autocast(jax.grad(loss), "mixed_float16"),
        "grad(autocast), bfloat16": jax.grad(autocast(loss, "mixed_bfloat16")),
    }


@pytest.mark.parametrize("name", WITHOUT_LAYERS)
def test_gradients_have_no_number_in_16_bits(name):
    fn, w, x, _ = WIDE[name]
    for how, gradient in gradients_under_autocast(fn).items():
        found = primitives_of(jax.make_jaxpr(gradient)(w, x))
        assert found and not any("float16" in dtype for _, *dtypes in found for dtype in dtypes), how
        assert "reduce_precision" not in {primitive for primitive, *_ in found}, how


@pytest.mark.parametrize("name", [*FIRST_OF_CAUSE.values(), "a recurrence with a rule of its own"])
def test_gradients_are_those_of_float32(name):
    """The rounding of a layer would be a thousand times larger than this tolerance."""
    fn, w, x, _ = WIDE[name]
    gradient = jax.grad(loss_of(fn))
    made = gradients_under_autocast(fn) | {
        "autocast(grad), bfloat16": autocast(gradient, "mixed_bfloat16"),
        "float32": gradient,
    }
    found = jax.device_get(jax.jit(lambda *args: {how: grad(*args) for how, grad in made.items()})(w, x))
    want = found["float32"]
    for how, got in found.items():
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max(), err_msg=how)


@pytest.mark.parametrize("within", ["scan", "remat", "vmap", "cond", "jit", "custom_jvp", "map over blocks"])
def test_found_inside_other_programs(within):
    def gram(a):
        return a.T @ a

    def fn(w, x):
        a = x.reshape(4, 8, 64) * w[0]
        if within == "scan":
            return lax.scan(lambda total, a: (total + gram(a), None), jnp.zeros((64, 64)), a)[0]
        if within == "remat":
            return jax.checkpoint(gram)(a[0])
        if within == "vmap":
            return jax.vmap(gram)(a)
        if within == "cond":
            return lax.cond(x[0, 0] > 0, gram, lambda a: 2 * gram(a), a[0])
        if within == "custom_jvp":
            made = jax.custom_jvp(gram)
            made.defjvp(lambda primals, tangents: jax.jvp(gram, primals, tangents))
            return made(a[0])
        if within == "map over blocks":
            b = a.reshape(-1, 64)
            return lax.map(lambda rows: rows @ b.T, a)
        return jax.jit(gram)(a[0])

    found = products(jax.grad(loss_of(fn)), W, X)
    assert len(found) >= 3 and {dtype for dtype, *_ in found} == {"float32"}
    assert sum(reason.endswith(Cause.SQUARE.value) for _, _, reason, _ in found) == len(found)


# Functions of data whose transpose runs, once or mapped over cotangents.
TRANSPOSED = {
    "the Jacobian of a matrix times a vector": lambda a, b: jax.jacrev(lambda v: jnp.tanh(a @ v))(b[0]),
    "of a rotation": lambda a, b: jax.jacrev(lambda r, x: x @ r, (0, 1))(SMALL, a[:32, :4]),
    "of a Gram matrix": lambda a, b: jax.jacrev(lambda x: jnp.sin(x.T @ x))(a[:24, :20]),
    "of distances": lambda a, b: jax.jacrev(
        lambda x: squares(x)[:, None] + squares(b[:20]) - 2 * x @ b[:20].T)(a[:24]),
    "of a product in a loop": lambda a, b: jax.jacrev(
        lambda v: lax.scan(lambda s, _: (jnp.tanh(a @ s), None), v, None, 3)[0])(b[0]),
    "a Hessian": lambda a, b: jax.hessian(lambda v: jnp.sum(jnp.tanh(a @ v)))(b[0]),
    "transposed functions": lambda a, b: [
        jax.linear_transpose(lambda v, m=m: m @ v, b[0])(b[1])[0] for m in (a, b, a + b)],
    "in a solver": lambda a, b: jax.scipy.sparse.linalg.cg(
        lambda v: jax.linear_transpose(lambda v: a @ v, b[0])(a @ v)[0], b[0], maxiter=3)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSPOSED)
def test_functions_of_data_transposed_are_float32(name):
    found = products(TRANSPOSED[name], W, W, argnums=())
    assert any(backward for *_, backward in found)
    assert {dtype for dtype, *_ in found} == {"float32"}


@jax.custom_vjp
def dense(x, w):
    return x @ w


def dense_backward(operands, cotangent):
    x, w = operands
    to_w = x.T @ cotangent
    return cotangent @ w.T, to_w


dense.defvjp(lambda x, w: (x @ w, (x, w)), dense_backward)


@jax.custom_vjp
def chunked(x, w):
    """A layer whose derivative rule loops over chunks of rows, and calls `jax.vjp` on the function for each."""
    return jnp.tanh(x @ w)


def chunked_backward(operands, cotangent):
    x, w = operands

    def step(to_w, chunk):
        to_x, more = jax.vjp(lambda x, w: jnp.tanh(x @ w), chunk[0], w)[1](chunk[1])
        return to_w + more, to_x

    chunks = x.reshape(2, -1, x.shape[1]), cotangent.reshape(2, -1, w.shape[1])
    to_w, to_x = lax.scan(step, jnp.zeros_like(w), chunks)
    return to_x.reshape(x.shape), to_w


chunked.defvjp(lambda x, w: (jnp.tanh(x @ w), (x, w)), chunked_backward)
LAYERS_TRANSPOSED = {
    "the Jacobian of a network": lambda w, x: jax.jacrev(lambda x: jnp.tanh(x @ w) @ w[:, :20])(x[0]),
    "gradients of each example": lambda w, x: jax.vmap(
        jax.grad(lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))), (None, 0))(w, x),
    "a cotangent of data": lambda w, x: jax.grad(lambda w: jnp.sum(x[:8] * (x[8:16] @ w)))(w),
    "a transposed layer": lambda w, x: jax.linear_transpose(lambda h: h @ w, x)(x)[0],
    "a layer with a rule of its own": lambda w, x: jax.grad(lambda w: jnp.sum(jnp.sin(dense(x[:8], w))))(w),
    "a layer whose rule has a loop": lambda w, x: jax.grad(lambda w: jnp.sum(jnp.sin(chunked(x[:8], w))))(w),
    "layers of data in a loop": lambda w, x: jax.grad(
        lambda w: jnp.sum(lax.scan(lambda c, row: (c, row @ w), 0, x.reshape(2, 16, 64))[1] * jnp.cos(x)[:16]))(w),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS_TRANSPOSED)
def test_layers_transposed_stay_narrow(name):
    found = products(LAYERS_TRANSPOSED[name], W, X)
    assert any(backward for *_, backward in found)
    assert {dtype for dtype, *_ in found} == {"float16"}


def solved(step):
    """The fixed point of `x = b + step(x, a)`, whose derivative rule solves the transposed system by iterating, too."""

    def solve(a, b):
        return lax.fori_loop(0, 9, lambda _, x: b + step(x, a), b)

    def backward(a, cotangent):
        y = lax.scan(lambda y, _: (cotangent + jax.vjp(step, y, a)[1](y)[0], None), cotangent, length=9)[0]
        return jnp.zeros_like(a), lax.cond(a[0, 0] > 0, lambda: y + solve(a, y), lambda: y)

    rule = jax.custom_vjp(solve)
    rule.defvjp(lambda a, b: (solve(a, b), a), backward)
    return rule


STEPS = {
    "of a vector": (lambda x, a: a @ x / 64, X[0, :16]),
    "of a matrix": (lambda x, a: a @ x @ a / 64**2, X[:16, 16:32]),
}


@pytest.mark.parametrize("argnums", [0, ()])
@pytest.mark.parametrize("name", STEPS)
def test_solvers_in_derivative_rules_are_float32_in_loops_and_branches(name, argnums):
    step, b = STEPS[name]
    a = np.abs(X[:16, :16] @ X[:16, :16].T) / 64
    loss = jax.grad(lambda w, a, b: jnp.sum(solved(step)(a, w * b) * b))
    found = products(loss, np.float32(1), a, b, argnums=argnums)
    assert {dtype for dtype, *_ in found} == {"float32"} and any(backward for *_, backward in found)


@jax.custom_vjp
def layer_and_solver(h, w, a):
    return h @ w


def layer_and_solver_backward(operands, cotangent):
    h, w, a = operands
    solution = lax.fori_loop(0, 9, lambda _, y: 1 + a @ y / 64, jnp.ones(len(a)))
    return cotangent @ w.T, h.T @ cotangent * jnp.sum(solution), jnp.zeros_like(a)


layer_and_solver.defvjp(lambda h, w, a: (h @ w, (h, w, a)), layer_and_solver_backward)


def test_a_solver_beside_a_layer_in_one_derivative_rule():
    """JAX gives all equations of a rule the source line of its call, so that the line does not tell them apart."""

    def loss(w, x, a):
        return jnp.sum(jnp.sin(layer_and_solver(layer_and_solver(jnp.tanh(x @ w), w, a), w, a)))

    found = products(jax.grad(loss), W, X, np.abs(X[:16, :16]))
    assert [dtype for dtype, _, reason, _ in found if reason == Cause.INNER.value] == ["float32"] * 2
    assert {dtype for dtype, _, reason, _ in found if reason != Cause.INNER.value} == {"float16"}


def test_the_rule_of_a_layer_is_narrow_from_outside():
    """With the gradient outside of autocast, the residuals and cotangents of the rule are float32, as data are."""
    loss = autocast(lambda w: jnp.sum(jnp.sin(dense(X[:4], w))), "mixed_float16")
    found = [dtypes[0] for name, dtypes, _ in equations(jax.grad(loss), W) if name == "dot_general"]
    assert len(found) == 3 and set(found) == {np.dtype("float16")}


def shared_attention(w, x):
    queries = x @ w
    return jax.nn.softmax(queries @ queries.T) @ (x @ w.T)


def frozen_network_of_features(w, x):
    features = jnp.sum(jnp.exp(-((x @ x.T)[..., None] - jnp.linspace(0, 1, 64) ** 2)), 1)
    return jnp.tanh(features @ FROZEN) @ w


def layer_of_a_kernel(w, x):
    return jnp.exp(x.T @ x / 64) @ w @ w


@pytest.mark.parametrize("fn", [shared_attention, frozen_network_of_features, layer_of_a_kernel])
def test_layers_that_read_functions_of_a_gram_matrix_stay_narrow(fn):
    """For example attention weights, and features made from a kernel matrix. The Gram matrix itself is float32."""
    found = products(jax.grad(loss_of(fn)), W, X)
    assert {reason.rpartition(": ")[2] for dtype, _, reason, _ in found if dtype == "float32"} <= {Cause.SQUARE.value}
    assert sum(dtype == "float16" and not backward for dtype, _, _, backward in found) >= 2


def test_a_layer_on_the_line_of_a_gram_matrix_stays_narrow():
    def loss(w, x):
        gram, y = (x @ each for each in (x.T, w))  # one source line; `w` has twice as many columns as the Gram matrix
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(gram))

    found = products(jax.grad(loss), W, X)
    assert [dtype for dtype, *_ in found] == ["float32", "float16", "float16"]


def test_the_derivative_of_a_product_of_data_beside_a_layer_of_other_sizes_is_float32_if_it_is_mapped():
    def fn(w, x):
        def parts(v):
            data, layer = (each @ v for each in (x, w[:5]))  # one source line
            return jnp.concatenate([jnp.tanh(data), jnp.tanh(layer)])

        return jax.jacrev(parts)(x[0])

    assert [(dtype, backward) for dtype, _, _, backward in products(fn, W, X[:, :64])] == [
        ("float32", False), ("float16", False), ("float16", True), ("float32", True),
    ]  # fmt: skip


@pytest.mark.parametrize("sizes, others, expected", [
    ((60, 40, 24), (60, 20, 12), True),
    ((40, 24, 60), (12, 60, 20), True),
    ((60, 40, 24), (60, 20, 24), False),  # not all sizes grew
    ((120, 40, 24), (60, 20, 12), False),  # every size grew
    ((60, 40, 24), (61, 20, 12), False),
    ((60, 30, 18), (60, 20, 12), False),  # by a factor of one and a half
    ((60, 20, 12), (60, 40, 24), False),
    ((60, 0, 0), (60, 20, 12), False),
])  # fmt: skip
def test_sizes_of_derivatives_that_are_mapped_over(sizes, others, expected):
    one, other = ([jax.ShapeDtypeStruct((size,), "float32") for size in each] for each in (sizes, others))
    assert are_mapped(one, other) == expected


def cross_of_rows(a):
    return lax.map(lambda rows: rows @ a.T, a.reshape(4, 8, -1)).reshape(32, 32)


def cross_in_a_branch(a):
    return lax.cond(a[0, 0] < 1e9, lambda a: a @ a.T, lambda a: jnp.zeros((32, 32)), a)


def cross_of_all(a):
    return a @ a.T


@pytest.mark.parametrize(
    ("cross", "dtype"),
    [
        (cross_of_all, "float16"),
        (cross_of_all, "bfloat16"),
        (cross_of_rows, "float16"),
        (cross_in_a_branch, "float16"),
    ],
)
def test_a_square_of_16_bit_values_reads_them_as_they_are(cross, dtype):
    """Products of 16-bit values are exact in float32, and the cross term, wherever it is, reads the same values."""

    def distances(w, x):
        a = x @ w
        squares = jnp.sum(a**2, -1)
        return squares[:, None] + squares[None] - 2 * cross(a)

    x = np.concatenate([X, np.ones((32, 1), np.float32)], 1)
    w = np.concatenate([W / 8, np.full((1, 64), 50.0, np.float32)])
    policy = f"mixed_{dtype}"
    _, square = products(distances, w, x, policy=policy)
    assert square[:3] == (dtype, "float32", Cause.SQUARE.value)
    got = jax.jit(autocast(distances, policy))(w, x)
    a = np.asarray(jax.jit(autocast(lambda w, x: x @ w, policy))(w, x), jnp.dtype(dtype)).astype(np.float64)
    want = np.sum((a[:, None] - a[None]) ** 2, -1)
    np.testing.assert_allclose(got, want, atol=0.5)  # of differences of sums of 160,000


def blocks_of_rows(a, b, squares_a, squares_b):
    rows = a.reshape(4, 8, -1), squares_a.reshape(4, 8)
    return lax.map(lambda row: row[1][:, None] + squares_b - 2 * row[0] @ b.T, rows).reshape(32, 32)


def blocks_of_both(a, b, squares_a, squares_b):
    def columns(row):
        rows = b.reshape(2, 16, -1), squares_b.reshape(2, 16)
        return lax.map(lambda column: row[1][:, None] + column[1] - 2 * row[0] @ column[0].T, rows)

    found = lax.map(columns, (a.reshape(4, 8, -1), squares_a.reshape(4, 8)))
    return jnp.moveaxis(found, 1, 2).reshape(32, 32)


def slices_of_rows(a, b, squares_a, squares_b):
    def step(i, found):
        rows, squares = (lax.dynamic_slice_in_dim(each, 8 * i, 8) for each in (a, squares_a))
        return lax.dynamic_update_slice_in_dim(found, squares[:, None] + squares_b - 2 * rows @ b.T, 8 * i, 0)

    return lax.fori_loop(0, 4, step, jnp.zeros((32, 32)))


def rematerialized(a, b, squares_a, squares_b):
    return jax.checkpoint(lambda a, b, one, other: one[:, None] + other - 2 * a @ b.T)(a, b, squares_a, squares_b)


def in_a_branch(a, b, squares_a, squares_b):
    return lax.cond(a[0, 0] < 1e9, lambda: squares_a[:, None] + squares_b - 2 * a @ b.T, lambda: jnp.zeros((32, 32)))


DISTANCES = [blocks_of_rows, blocks_of_both, slices_of_rows, rematerialized, in_a_branch]


@pytest.mark.parametrize(
    ("distances", "dtype"), [*((fn, "float16") for fn in DISTANCES), *((fn, "bfloat16") for fn in DISTANCES[::2])]
)
def test_distances_whose_norms_come_from_outside(distances, dtype):
    """Distances of the results of two layers, 50 from the origin; and of data, of which nothing may be rounded."""

    def of_towers(w, x):
        a, b = x @ w, jnp.flip(x) @ w
        return distances(a, b, squares(a), squares(b))

    x = np.concatenate([X, np.ones((32, 1), np.float32)], 1)
    w = np.concatenate([W / 8, np.full((1, 64), 6.0, np.float32)])
    x[:, 0], w[0] = 1, 6  # the flipped rows have the same mean
    policy = get_policy(f"mixed_{dtype}")
    *_, cross = products(of_towers, w, x, policy=policy)
    assert cross[1:3] == ("float32", Cause.DISTANCE.value)
    got = jax.jit(autocast(of_towers, policy))(w, x)
    narrow = autocast(lambda w, x: (x @ w, jnp.flip(x) @ w), policy)
    a, b = (np.asarray(each, jnp.dtype(dtype)).astype(np.float64) for each in jax.jit(narrow)(w, x))
    want = np.sum((a[:, None] - b[None]) ** 2, -1)
    np.testing.assert_allclose(got, want, atol=0.1)  # of differences of squared norms of 10,000 and more

    def of_data(w, x):
        a, b = x + w[0], x * w[1]
        return distances(a, b, squares(a), squares(b))

    assert causes(of_data, W, X, policy=policy) == [Cause.DISTANCE]


def test_the_derivatives_of_a_factorization_are_float32():
    found = products(jax.grad(loss_of(lambda w: jnp.linalg.qr(w)[0])), W)
    assert {(dtype, reason) for dtype, _, reason, _ in found} == {("float32", Cause.SYSTEM.value)}


def test_a_constant_cotangent_leaves_data_in_float32():
    """If the result of a `vdot` is the loss, its derivative multiplies data by a cotangent of one."""
    found = products(jax.vmap(jax.grad(lambda x: 0.5 * jnp.vdot(x, 2 * x + 1))), X, argnums=())
    assert found and {dtype for dtype, *_ in found} == {"float32"}


def test_the_state_of_a_linear_system_stays_in_float32():
    def fn(a, x, nonlinear=False):
        step = lambda s, _: (jnp.tanh(s @ a[:8, :8]) if nonlinear else s @ a[:8, :8] + 0.1 * x[0, :8], None)  # noqa: E731
        return lax.scan(step, (x @ a)[:, :8], None, 50)[0]

    linear, plain = (products(lambda a, x, n=n: fn(a, x, n), W / 8, X) for n in (False, True))
    assert [dtype for dtype, *_ in linear] == ["float16", "float32"]
    assert [dtype for dtype, *_ in plain] == ["float16", "float16"]


def as_sums(fn, *args):
    """For each float32 product, forward and backward, whether it is written as multiplications and additions."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    precisions = [Precision.WEAK] + [Precision.FULL] * (len(args) - 1)
    planner = Planner(get_policy("mixed_float16"), DEFAULT_RULES)
    program = planner.plan_whole(jaxpr, precisions, [RETURNED] * len(jaxpr.out_avals))
    wide = [(each.entry, each.rewrite) for each in program.equations if isinstance(each.entry, WideProduct)]
    return tuple([bool(by) for entry, by in wide if entry.of_derivative is derived] for derived in (False, True))


def test_short_products_are_written_as_sums_and_so_are_their_derivatives_if_they_are_short_or_one_long_sum():
    def gradients(product):
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(product(w, x))), (0, 1))

    def coordinates(w, x):
        return x @ w

    # The derivative with respect to coordinates contracts 64 numbers, that with respect to weights one per point.
    assert as_sums(gradients(coordinates), normal(3, 64), normal(256, 3)) == ([True], [True, False])
    assert as_sums(gradients(coordinates), normal(3, 64), normal(192, 3)) == ([True], [False, False])
    assert as_sums(gradients(coordinates), normal(3, 15), normal(32, 3)) == ([True], [False, True])
    assert as_sums(gradients(coordinates), normal(3, 16), normal(32, 3)) == ([True], [False, False])
    assert as_sums(gradients(lambda w, x: x.T @ x), W, normal(64, 15)) == ([False], [False, False])


def test_derivatives_of_derivatives_share_an_operand_with_a_derivative():
    """In the derivative of a gradient penalty, the products of the Gram matrix are found through shared operands."""

    def gram(w, x):
        h = jnp.tanh(x @ w)
        return jnp.sum(jnp.tanh(h @ h.T))

    penalty = lambda w, x: jnp.sum(jnp.square(jax.grad(gram, 1)(w, x)))  # noqa: E731
    w, x = normal(16, 24), normal(32, 16)
    found = causes(jax.grad(penalty), w, x)
    assert [cause for cause in found if cause] == [Cause.SQUARE] * 9
    assert found.count(None) == 5  # `x @ w` and its derivatives


def test_another_product_of_the_same_line_is_no_derivative():
    dot = lambda x, w, precision=None: jnp.dot(x, w, precision=precision)  # noqa: E731
    assert causes(lambda w, x: (dot(x, w, "highest"), dot(x, w + 1)), W, X) == [Cause.PRECISION, None]


def test_a_convolution_is_no_derivative_of_a_dot_that_the_same_line_records():
    def called(product, x, w):
        return product(x, w)

    # `functools.partial` makes functions without a stack frame of their own, so that both have one source line.
    dot = functools.partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    conv = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME")

    def loss(w, x):
        one, other = called(dot, x, w), called(conv, x.reshape(1, 4, 16), w.reshape(16, 4, 1))
        return jnp.sum(jnp.sin(one)) + jnp.sum(jnp.sin(other))

    found = explain(jax.grad(loss), "mixed_float16")(normal(4, 16), normal(16, 4)).operations
    assert {op.dtype for op in found if op.primitive == "conv_general_dilated"} == {"float16"}
    assert {op.dtype for op in found if op.primitive == "dot_general"} == {"float32"}


def test_products_without_numbers_are_planned():
    assert causes(lambda w, x: (x[:0] @ w, x[:, :0] @ w[:0], x.T[:0] @ x), W, X) == []  # without FLOPs, not listed


def tiny_row(shape):
    """A table with a row below float16's range: negligible beside the other rows, but sums within it would be zero."""
    return jnp.cos(jnp.arange(math.prod(shape)) * 1.0).reshape(shape).at[0].multiply(1e-9)


def waves(rows, columns):
    return jnp.cos(jnp.arange(rows * columns) * 1.0).reshape(rows, columns)


def filtered(x, kernels):
    """Convolves images with one 3 x 3 kernel for each channel."""
    kernels = kernels.reshape(-1, 1, 3, 3)
    images = x.reshape(-1, len(kernels), 16, 16)
    return lax.conv_general_dilated(images, kernels, (1, 1), "SAME", feature_group_count=len(kernels))


# name: (function of (parameters, data), the cause why its last product runs in float32, `None` for 16 bits)
CONDITIONS = {
    "a matrix of data times a vector": (lambda w, x: x @ x[0], Cause.INNER),
    "a matrix of ones times twos": (lambda w, x: jnp.ones((64, 64)) @ jnp.full(64, 2.0), None),
    "a matrix of computed data times a vector": (lambda w, x: jnp.exp(x) @ jnp.sin(x[0]), None),
    "results times a vector of data": (lambda w, x: (x @ w) @ x[0], None),
    "a parameter times a vector of data": (lambda w, x: w @ x[0], None),
    "a moved value times itself": (lambda w, x: w.reshape(8, 8, 64).reshape(64, 64) @ w.T, Cause.SQUARE),
    "a value times itself, moved": (lambda w, x: w.T @ w.reshape(8, 8, 64).reshape(64, 64), Cause.SQUARE),
    "a power of a matrix": (lambda w, x: w @ w, None),
    "one number that is too small": (lambda w, x: w[:, :1] @ jnp.full((1, 1), 1e-12), Cause.TABLE),
    "a table with a tiny row": (lambda w, x: w @ tiny_row((64, 64)).T, Cause.TABLE),
    "a table with a tiny column": (lambda w, x: w @ tiny_row((64, 64)), None),
    "a captured array with a tiny row": (lambda w, x: w @ CAPTURED.T, None),
    "kernels of a table of large numbers": (
        lambda w, x: lax.conv(w.reshape(2, 8, 16, 16), 1e9 * jnp.ones((8, 8, 3, 3)), (1, 1), "SAME"), Cause.TABLE),
    "kernels of a table, one of them tiny": (
        lambda w, x: lax.conv(w.reshape(2, 8, 16, 16), tiny_row((8, 8, 3, 3)), (1, 1), "SAME"), None),
    # Contractions of fewer than 16 numbers: parameters times parameters.
    "dynamics": (lambda w, x: w[:4, :4] @ w[4:8, :4], Cause.SHORT),
    "dynamics of eight": (lambda w, x: w[:8, :8] @ w[8:16, :8], None),
    "dynamics of twelve": (lambda w, x: w[:12, :12] @ w[12:24, :12], Cause.SHORT),
    "two factors": (lambda w, x: w[:, :4] @ w[:4], Cause.SHORT),
    "two factors of twelve": (lambda w, x: w[:, :12] @ w[:12], None),
    "two factors of a weight": (lambda w, x: x @ (w + w[:, :4] @ w[:4]), None),
    "dynamics of results": (lambda w, x: (x @ w)[:, :4] @ (w[:4, :4] @ w[4:8, :4]), Cause.SHORT),
    # Contractions of fewer than 16 numbers: results of layers.
    "a narrow layer": (lambda w, x: (x @ w)[:, :4] @ w[:4], None),
    "a narrow layer of an exponential": (lambda w, x: jnp.exp(x @ w)[:, :4] @ w[:4], Cause.SHORT),
    "results times results": (lambda w, x: (x @ w)[:, :4] @ (x @ w.T)[:, :4].T, None),
    "exponentials times exponentials": (lambda w, x: jnp.exp(x @ w)[:, :4] @ jnp.exp(x @ w.T)[:, :4].T, Cause.SHORT),
    "exponentials times exponentials, eight": (lambda w, x: jnp.exp(x @ w)[:, :8] @ jnp.exp(x @ w.T)[:, :8].T, None),
    "exponentials times data": (lambda w, x: jnp.exp(x @ w)[:, :8] @ x[:, :8].T, Cause.SHORT),
    # Contractions of fewer than 16 numbers: data.
    "a first layer of four": (lambda w, x: x[:, :4] @ w[:4], Cause.SHORT),
    "a first layer of eight": (lambda w, x: x[:, :8] @ w[:8], None),
    "a first layer of twelve": (lambda w, x: x[:, :12] @ w[:12], None),
    "a transform of eight": (lambda w, x: x[:8, :8] @ w[:8, :8], None),
    "a transform of twelve": (lambda w, x: x[:12, :12] @ w[:12, :12], Cause.SHORT),
    "a transform of sixteen": (lambda w, x: x[:16, :16] @ w[:16, :16], None),
    "data times data": (lambda w, x: x[:, :12] @ jnp.exp(x[:, :12]).T, Cause.SHORT),
    # Contractions of fewer than 16 numbers: selections and averages, with weights that are exact in float16.
    "a permutation of results": (lambda w, x: jnp.eye(4)[::-1] @ (x @ w)[:4], None),
    "a permutation of exponentials": (lambda w, x: jnp.eye(4)[::-1] @ jnp.exp(x @ w)[:4], None),
    "repeated exponentials": (lambda w, x: jnp.repeat(jnp.eye(4), 2, 0) @ jnp.exp(x @ w)[:4], Cause.SHORT),
    "one exponential, repeated": (lambda w, x: jnp.ones((4, 1)) @ jnp.exp(x @ w)[:1], Cause.SHORT),
    "scaled exponentials": (lambda w, x: 3 * jnp.eye(4) @ jnp.exp(x @ w)[:4], Cause.SHORT),
    # Selections and averages of a requested precision, which run in float32 if 16 bits would round an operand.
    "a precision in a function with a batching rule": (
        lambda w, x: with_batching_rule(lambda x: jnp.dot(x, x + 1, precision="highest"))(x[:32, :32]),
        Cause.PRECISION),
    "a precision in a function with a transpose of its own": (
        lambda w, x: jax.custom_derivatives.linear_call(
            lambda r, x: jnp.dot(r, x, precision="highest"), lambda r, ct: r.T @ ct, x, w), Cause.PRECISION),
    "an interpolation of results, of a precision": (
        lambda w, x: jnp.dot((x @ w)[:, :8], jnp.repeat(jnp.eye(8), 2, 1), precision="highest"), Cause.PRECISION),
    "an average of exponentials, of a precision": (
        lambda w, x: jnp.dot(jnp.full((4, 32), 1 / 32), jnp.exp(x[:32] @ w), precision="highest"), Cause.PRECISION),
    "an image of data resized": (lambda w, x: jax.image.resize(x[:8] + w[:8], (16, 64), "linear"), Cause.PRECISION),
    "an interpolation of data, of a precision": (
        lambda w, x: jnp.dot(jnp.repeat(jnp.eye(8), 2, 0), x[:8], precision="highest"), Cause.PRECISION),
    "a sum of results, scaled, of a precision": (
        lambda w, x: jnp.dot((x @ w)[:, :8], 3 * jnp.eye(8), precision="highest"), Cause.PRECISION),
    "an average of an image of results, of a precision": (
        lambda w, x: lax.conv(
            (w @ w).reshape(16, 1, 16, 16), jnp.full((1, 1, 2, 2), 0.25), (1, 1), "SAME", precision=HIGHEST),
        Cause.PRECISION),
    # Products with tables, and expectations over the numbers of a table.
    "a transform": (lambda w, x: x @ waves(64, 64), Cause.GRID),
    "a transform of results": (lambda w, x: (x @ w) @ waves(64, 64), None),
    "a transform by a captured array": (lambda w, x: x @ WAVES, None),
    "a sum of data": (lambda w, x: x @ jnp.ones((64, 64)), None),
    "a transform by more than is evaluated": (lambda w, x: x @ waves(64, 2**15), None),
    "a row looked up": (lambda w, x: jax.nn.one_hot(jnp.argmax(x[:1], 1), 64) @ waves(64, 2), Cause.GRID),
    "four expectations": (lambda w, x: jax.nn.softmax(x @ w) @ waves(64, 4), Cause.GRID),
    "five expectations": (lambda w, x: jax.nn.softmax(x @ w) @ waves(64, 5), None),
    "expectations of captured numbers": (lambda w, x: jax.nn.softmax(x @ w) @ WAVES[:, :4], None),
    "the expectation of a captured grid": (lambda w, x: jax.nn.softmax(x @ w) @ GRID, Cause.GRID),
    "two classes": (lambda w, x: jax.nn.softmax(x @ w) @ (jnp.arange(128).reshape(64, 2) % 2 * 1.0), None),
    "expectations of exact numbers": (
        lambda w, x: jax.nn.softmax(x @ w) @ jnp.arange(128.0).reshape(64, 2), Cause.GRID),
    "results times exact numbers": (lambda w, x: (x @ w) @ jnp.arange(128.0).reshape(64, 2), None),
    "results times others": (lambda w, x: (x @ w) @ waves(64, 2), Cause.GRID),
    # Filters of one channel.
    "a filter of data": (lambda w, x: filtered(x, x[:1, :9]), Cause.FILTER),
    "filters of data": (lambda w, x: filtered(x, x[:8, :9]), None),
    "a filter of data, repeated": (lambda w, x: filtered(x, jnp.tile(x[:1, :9], (8, 1))), Cause.FILTER),
    "filters of parameters": (lambda w, x: filtered(x, w[:8, :9]), None),
    "a filter of results": (lambda w, x: filtered(x, (x @ w)[:1, :9]), None),
    "a filter of an exponential": (lambda w, x: filtered(x, jnp.exp(x @ w)[:1, :9]), None),
    "filters of a table": (lambda w, x: filtered(x, waves(8, 9)), Cause.FILTER),
    "four captured filters": (lambda w, x: filtered(x, WAVES[np.arange(8) % 4, :9]), Cause.FILTER),
    "four captured filters, along the last axis": (
        lambda w, x: lax.conv_general_dilated(
            x.reshape(1, 16, 16, 8), WAVES[np.arange(8) % 4, :9].T.reshape(3, 3, 1, 8), (1, 1), "SAME",
            feature_group_count=8, dimension_numbers=("NHWC", "HWIO", "NHWC")), Cause.FILTER),
    "five captured filters": (lambda w, x: filtered(x, WAVES[np.arange(8) % 5, :9]), None),
    "filters of two channels": (
        lambda w, x: lax.conv(x.reshape(4, 2, 16, 16), waves(8, 18).reshape(8, 2, 3, 3), (1, 1), "SAME"), None),
    "data of which one operand is squared beside": (
        lambda w, x: squares(x)[:, None] - 2 * x @ jnp.exp(x).T, Cause.DISTANCE),
    "results of which one operand is squared beside": (
        lambda w, x: squares(x @ w)[:, None] - 2 * (x @ w) @ jnp.exp(x).T, None),
    "a layer of a Gram matrix": (lambda w, x: (x.T @ x) @ w, Cause.SQUARE),
    "a table of infinite numbers, captured": (lambda w, x: w @ (1e9 * CAPTURED), Cause.TABLE),
}  # fmt: skip
CAPTURED, WAVES, GRID = tiny_row((64, 64)), waves(64, 64), np.linspace(-1, 1, 64, dtype=np.float32)


@pytest.mark.parametrize("name", CONDITIONS)
def test_what_makes_a_product_no_layer(name):
    fn, expected = CONDITIONS[name]
    assert set(causes(fn, W, X)) - {None} == {expected} - {None}


def test_one_filter_may_be_an_argument():
    assert causes(lambda kernel, x: filtered(x, kernel), X[:1, :9], X, argnums=()) == [Cause.FILTER]


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: jnp.sum(jnp.sin((x @ w)[:, :1] @ w[:1, :1])),  # contracts one number
        lambda w, x: jnp.sum(jnp.sin(jax.nn.one_hot(jnp.argmax(x[:4], 1), 64) @ w)),  # contracts four zeros and ones
    ],
)
def test_gradients_of_layers_are_products_of_layers_however_few_numbers_they_contract(loss):
    found = causes(jax.grad(loss), W, X)
    assert len(found) >= 2 and set(found) == {None}


def test_the_derivative_of_a_resized_image_is_narrow_as_well():
    resized = lambda w, x: jax.image.resize((x @ w)[:8], (16, 64), "linear")  # noqa: E731
    found = causes(jax.grad(lambda w, x: jnp.sum(resized(w, x) * x[:16])), W, X)
    assert len(found) == 4 and set(found) == {None}


def test_a_function_of_the_users_that_has_the_name_of_resize_has_its_precision():
    def _resize(image):
        return jnp.dot(jnp.repeat(jnp.eye(8), 2, 0), image, precision="highest")

    assert causes(lambda w, x: jax.jit(_resize)((x @ w)[:8]), W, X) == [None, Cause.PRECISION]


def test_two_carries_of_a_loop_are_two_values():
    def fn(w, x):
        step = lambda s, _: ((s[1] + x, s[0]), s[0] @ s[1].T @ w[:32, :4])  # noqa: E731
        return lax.scan(step, (x @ w, x @ w.T), None, 3)[1]

    assert set(causes(fn, W, X)) == {None}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_short_product_that_is_cast_by_hand_is_no_short_product_of_data(dtype):
    assert causes(lambda w, x: lax.dot(x[:, :4].astype(jnp.bfloat16), x.T[:4]), W, X) == [None]
    assert causes(lambda w, x: lax.dot(x[:, :4], w[:4], preferred_element_type=dtype), W, X) == [None]


def test_a_product_that_a_later_iteration_makes_a_layer_has_the_derivatives_of_one():
    """It multiplies parameters by parameters in the first iteration, and the result of a layer in all others."""

    def fn(w, x):
        step = lambda s, _: (x[:4] @ w[:, :4], s @ w[:4, :4])  # noqa: E731
        return lax.scan(step, w[4:8, :4], None, 3)[1]

    found = products(jax.grad(loss_of(fn)), W, X)
    assert len(found) >= 4 and {dtype for dtype, *_ in found} == {"float16"}


def test_the_result_of_a_large_contraction_does_not_overflow():
    a, b = jnp.full((1 << 14, 16), 8.0), jnp.full((1 << 14, 16), 9.0)
    cross = lambda a, b: a.T @ b  # noqa: E731
    assert products(cross, a, b, argnums=(0, 1))[0][:2] == ("float16", "float32")
    np.testing.assert_array_equal(autocast(cross, "mixed_float16", argnums=(0, 1))(a, b), 72.0 * (1 << 14))


def test_a_sum_written_as_a_tree_is_float32():
    x = np.asarray(normal(4096, 16) + 1, jnp.bfloat16).astype(np.float32)

    def halved(x):
        while len(x) > 1:
            x = x[: len(x) // 2] + x[len(x) // 2 :]
        return x[0]

    def scanned(x):
        return lax.associative_scan(jnp.add, x)

    for fn in (halved, scanned):

        def narrow_input(w, x, fn=fn):
            return fn(x @ w)  # 16 bits

        ours = jax.jit(autocast(narrow_input, "mixed_bfloat16"))(jnp.eye(16), x)
        want = x.astype(np.float64).sum(0) if fn is halved else np.cumsum(x.astype(np.float64), 0)
        np.testing.assert_allclose(ours, want, rtol=1e-4, atol=1e-3)  # summed in bfloat16: 1e-2 to 1e-1


def test_what_is_no_tree_follows_its_operands():
    def fn(w, x):
        h = x @ w
        return h[:, :32] + h[:, 32:], h + h, h + h.T[:32, :32].T.repeat(2, 1)

    def no_tree(w, x):
        h, k = x @ w, x @ w.T
        part = h[:, :32]
        return part + part, part + k[:, 32:]

    def adds(fn, rules=DEFAULT_RULES):
        return [op.dtype for op in explain(fn, "mixed_float16", rules)(W, X).operations if op.primitive == "add"]

    assert adds(fn) in (["float32", "float16", "float32"], ["float32", "float16", "float16"])
    assert adds(no_tree) == ["float16", "float16"]
    assert adds(fn, DEFAULT_RULES.replace({"add": "follow"}))[0] == "float16"


def test_parts_that_are_joined_by_an_addition_are_no_sum():
    """`associative_scan` and derivatives of slices add parts of which one is zero wherever the other is not."""

    def interleaved(w, x):
        h = x @ w
        even, odd = (lax.pad(h[i::2], 0.0, [(i, 1 - i, 1), (0, 0, 0)]) for i in (0, 1))
        return even + odd

    def overlapping(w, x):
        h = x @ w
        return lax.pad(h[:20], 0.0, [(0, 12, 0), (0, 0, 0)]) + lax.pad(h[12:], 0.0, [(12, 0, 0), (0, 0, 0)])

    for fn, dtype in ((interleaved, "float16"), (overlapping, "float32")):
        adds = [op.dtype for op in explain(fn, "mixed_float16")(W, X).operations if op.primitive == "add"]
        assert adds == [dtype], fn
        got, want = jax.jit(lambda *args, fn=fn: (autocast(fn, "mixed_float16")(*args), fn(*args)))(W, X)
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=0.1)


# Regions, edits, scopes and precisions, which are stronger than what a product looks like


def test_a_region_is_stronger_than_what_a_product_looks_like():
    gram = lambda w: w.T @ w  # noqa: E731
    assert products(low_precision(gram), W)[0][0] == "float16"
    assert products(low_precision(lambda w: jnp.dot(w, w.T, precision="highest")), W)[0][0] == "float16"
    assert products(full_precision(lambda w, x: x @ w), W, X)[0][2] == "full_precision region"


def test_an_edit_or_a_scope_narrows_every_product():
    gram = lambda w: w.T @ w  # noqa: E731
    assert products(gram, W, rules=DEFAULT_RULES.replace({"dot_general": "low"}))[0][0] == "float16"
    assert products(gram, W, rules=DEFAULT_RULES.with_scopes({".": "float16"}))[0][0] == "float16"


def test_the_precision_of_a_policy_is_no_request():
    for precision in ("highest", "tensorfloat32", "F32_F32_F32", None):
        policy = get_policy("mixed_float16").replace(matmul_precision=precision)
        assert products(lambda w, x: x @ w, W, X, policy=policy)[0][0] == "float16"


@pytest.mark.parametrize("setting", ["highest", "float32"])
def test_a_precision_around_the_program_is_a_guard(setting):
    def fn(w, x):
        with jax.default_matmul_precision(setting):
            x = x @ w
        return x @ w

    found = products(jax.grad(loss_of(fn)), W, X)
    assert [dtype for dtype, *_, backward in found if not backward] == ["float32", "float16"]
    assert sorted(str(dtype) for dtype, *_, backward in found if backward) == ["float16", "float16", "float32"]


def test_explain_says_in_its_first_line_what_a_global_precision_keeps():
    fn = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w))
    with jax.default_matmul_precision("highest"):
        first = str(explain(fn, "mixed_float16")(W, X)).splitlines()[0]
        policy = get_policy("mixed_float16").replace(matmul_precision="default")
        assert {dtype for dtype, *_ in products(fn, W, X, policy=policy)} == {"float16"}
    assert "5 products kept in float32 by an explicit precision" in first
    assert 'matmul_precision="default" in the policy lets them narrow' in first
    assert "kept in float32" not in str(explain(fn, "mixed_float16")(W, X))


def test_explain_counts_products_by_reason_and_lists_the_wide_ones():
    def fn(w, x):
        with jax.named_scope("Style"):
            return jnp.sum((x @ w) @ w) + jnp.sum(jnp.tanh(x).T @ jnp.tanh(x))

    report = explain(fn, "mixed_float16")(W, X)
    assert report.products[0][::2] == ("float16", 2)
    assert ("float32", Cause.SQUARE.value, 1) in report.products
    (wide,) = report.wide_products
    assert wide.scope == "Style" and wide.reason == Cause.SQUARE.value
    assert report.as_dict()["products"][1] == {"dtype": "float32", "reason": Cause.SQUARE.value, "number": 1}
    header, row = str(report).splitlines()[-2:]
    assert header.startswith("product in float32") and "Style" in row and row.endswith(Cause.SQUARE.value)


def test_a_product_kept_in_float32_does_not_use_tf32():
    """By default XLA may round the operands of a float32 product to TF32's 10 bits."""
    dots = [
        eqn.params["precision"]
        for eqn in jax.make_jaxpr(autocast(lambda w: w.T @ w, "mixed_float16"))(W).eqns
        if eqn.primitive.name == "dot_general"
    ]
    assert dots == [(HIGHEST, HIGHEST)]


def test_constants_are_evaluated_within_bounds():
    def fn(w, x):
        return (x @ w) @ jnp.exp(jnp.linspace(0, 20, 64 * 32768)).reshape(64, -1)

    assert products(fn, W, X)[-1][0] == "float16"  # two million numbers are too many to evaluate


def test_constants_are_known_under_a_mesh_and_inside_other_traces():
    fn, w, x, cause = WIDE["an exponential table"]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert causes(fn, w, x)[-1] is cause
        text = jax.jit(autocast(fn, "mixed_float16")).trace(w, x).jaxpr
    dots = [eqn for eqn in text.eqns if eqn.primitive.name == "dot_general"]
    assert {str(v.aval.dtype) for v in dots[-1].invars} == {"float32"}


def test_a_symbolic_size_is_no_short_contraction():
    (size,) = (jax.export.symbolic_shape("n"),)
    x = jax.ShapeDtypeStruct((8, *size), np.float32)
    w = jax.ShapeDtypeStruct((*size, 4), np.float32)
    made = jax.make_jaxpr(autocast(lambda w, x: x @ w, "mixed_float16"))(w, x)
    assert {str(eqn.invars[0].aval.dtype) for eqn in made.eqns if eqn.primitive.name == "dot_general"} == {"float16"}
