"""Battery rows in plain JAX: einsum, second derivatives, implicit differentiation, FFT, linear algebra, loops.

`SOLVERS` are loops that end at a tolerance, and return their number of iterations. `UNCHANGED` are programs in float64
or complex numbers, which no policy changes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from battery_row import Program, Row, normal
from jax.scipy.linalg import cho_solve
from jax.scipy.sparse.linalg import cg

from jmp_train import dot_product_attention

SOLVED_IN_FLOAT32 = "linear algebra and solvers run as recorded"


def dense_params(size, key):
    """A dictionary of He-initialised square matrices and of biases."""
    keys = jax.random.split(key, 6)
    made = {f"w{i}": jax.random.normal(k, (size.width, size.width)) * size.width**-0.5 for i, k in enumerate(keys[:3])}
    return made | {f"b{i}": 0.1 * jax.random.normal(k, (size.width,)) for i, k in enumerate(keys[3:])}


def pairs(size, rng):
    return {"x": normal(rng, size.batch, size.width), "y": normal(rng, size.batch, size.width)}


def plain(loss, batch=pairs, params=dense_params, grads=None):
    def make(size, dtype):
        del dtype  # plain JAX computes in the dtype of its arguments
        return Program(lambda rng: batch(size, rng), lambda key, _: params(size, key), loss, grads)

    return make


def mlp(params, x):
    h = jnp.tanh(x @ params["w0"] + params["b0"])
    h = jnp.tanh(h @ params["w1"] + params["b1"])
    return h @ params["w2"] + params["b2"]


def squared(params, batch):
    return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)


def sequence(size, rng):
    return {
        "x": normal(rng, size.batch, size.length, size.width),
        "y": normal(rng, size.batch, size.length, size.width),
    }


def einsum_attention(params, batch):
    heads = {k: params[k].reshape(-1, 4, params[k].shape[1] // 4) for k in ("w0", "w1", "w2")}
    q, k, v = (jnp.einsum("bld,dhk->blhk", batch["x"], heads[name]) for name in ("w0", "w1", "w2"))
    weights = jax.nn.softmax(jnp.einsum("bqhk,bvhk->bhqv", q, k) / q.shape[-1] ** 0.5)
    out = jnp.einsum("bhqv,bvhk->bqhk", weights, v).reshape(batch["x"].shape)
    return jnp.mean((out - batch["y"]) ** 2)


def fused_attention(params, batch):
    shape = (*batch["x"].shape[:-1], 4, batch["x"].shape[-1] // 4)
    q, k, v = ((batch["x"] @ params[name]).reshape(shape) for name in ("w0", "w1", "w2"))
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch["x"].shape)
    return jnp.mean((out - batch["y"]) ** 2)


def our_attention(params, batch):
    shape = (*batch["x"].shape[:-1], 4, batch["x"].shape[-1] // 4)
    q, k, v = ((batch["x"] @ params[name]).reshape(shape) for name in ("w0", "w1", "w2"))
    attend = jax.nn.dot_product_attention if q.dtype == jnp.float64 else dot_product_attention  # JAX's, in float64
    return jnp.mean((attend(q, k, v, is_causal=True).reshape(batch["x"].shape) - batch["y"]) ** 2)


def per_example_clipping(params, batch):
    """The norm of the mean clipped gradient (Abadi et al. 2016): a gradient of a vmapped gradient."""
    each = jax.vmap(jax.grad(lambda p, x, y: squared(p, {"x": x, "y": y})), (None, 0, 0))
    grads = each(params, batch["x"], batch["y"])
    norms = jax.vmap(optax.tree.norm)(grads)
    factors = 1 / jnp.maximum(1, norms)
    return optax.tree.norm(jax.tree.map(lambda g: jnp.tensordot(factors, g, 1) / len(norms), grads))


def laplacian(params, batch):
    """A physics-informed loss (Raissi et al. 2019): the trace of a Hessian against a source term."""

    def u(x):
        return jnp.sum(jax.nn.tanh(x @ params["w0"][:8] + params["b0"]) @ params["w1"] * params["b1"])

    points, source = batch["x"][:, :8], batch["y"][:, 0]
    residual = jax.vmap(lambda x: jnp.trace(jax.hessian(u)(x)))(points) - source
    return jnp.mean(residual**2)


def equilibrium(params, batch):
    """A deep equilibrium layer (Bai et al. 2019): a fixed point by `while_loop`, under `custom_root`."""

    def state(x):
        def residual(z):
            return jnp.tanh(0.3 * z @ params["w0"] + x @ params["w1"] + params["b0"]) - z

        def solve(f, start):
            unfinished = lambda c: (jnp.max(jnp.abs(f(c[0]))) > 1e-5) & (c[1] < 200)  # noqa: E731
            return jax.lax.while_loop(unfinished, lambda c: (c[0] + f(c[0]), c[1] + 1), (start, 0))[0]

        def tangent_solve(g, y):
            return jnp.linalg.solve(jax.jacobian(g)(y), y)

        return jax.lax.custom_root(residual, jnp.zeros_like(x), solve, tangent_solve)

    z = jax.vmap(state)(batch["x"])
    return jnp.mean((z @ params["w2"] - batch["y"]) ** 2)


def ridge(params, batch):
    """Ridge regression on learned features by conjugate gradients: `custom_linear_solve` inside."""
    features = jnp.tanh(batch["x"] @ params["w0"] + params["b0"])
    weights, _ = cg(lambda w: features.T @ (features @ w) + w, features.T @ batch["y"], tol=1e-6)
    return jnp.mean((jnp.tanh(batch["y"] @ params["w1"]) @ weights - batch["y"]) ** 2)


def gaussian_process(params, batch):
    """Negative log marginal likelihood with an RBF kernel on learned features (Rasmussen and Williams, 2.30)."""
    features = batch["x"] @ params["w0"]
    distance = jnp.sum((features[:, None] - features[None]) ** 2, -1)
    kernel = jnp.exp(-0.5 * distance / features.shape[1]) + 0.1 * jnp.eye(len(features))
    factor = jnp.linalg.cholesky(kernel)
    fit = jnp.sum(batch["y"] * cho_solve((factor, True), batch["y"]))
    return fit / batch["y"].size + jnp.mean(jnp.log(jnp.diag(factor)))


def fourier(params, batch):
    """A Fourier layer (Li et al. 2021): rfft, complex weights, irfft."""
    modes = jnp.fft.rfft(batch["x"], axis=1)
    mixed = jnp.einsum("bld,de->ble", modes, params["w0"] + 1j * params["w1"])
    h = jnp.fft.irfft(mixed, n=batch["x"].shape[1], axis=1) + params["b0"]
    return jnp.mean((jax.nn.gelu(h) @ params["w2"] - batch["y"]) ** 2)


def spectral_norm(params, batch):
    """Power iterations in a counted `fori_loop` (Miyato et al. 2018): the weight over its largest singular value."""

    def power(_, v):
        v = params["w0"].T @ (params["w0"] @ v)
        return v / jnp.linalg.norm(v)

    v = jax.lax.fori_loop(0, 5, power, jnp.ones_like(params["b0"]))
    sigma = jnp.linalg.norm(params["w0"] @ v)
    return squared(params | {"w0": params["w0"] / sigma}, batch)


def accumulated(scale):
    """Gradients summed over microbatches in a scan's carry."""

    def grads(params, batch):
        def add(total, piece):
            return jax.tree.map(jnp.add, total, jax.grad(lambda p: scale * squared(p, piece))(params)), None

        pieces = jax.tree.map(lambda x: x.reshape(8, -1, x.shape[-1]), batch)
        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), pieces)
        return jax.tree.map(lambda g: g / 8, total)

    return grads


def shared_weight(params, batch):
    """One weight and one bias at every step of a scan: the backward pass carries their sums."""

    def step(h, x):
        h = jnp.tanh(h @ params["w0"] + x @ params["w1"] + params["b0"])
        return h, h

    _, states = jax.lax.scan(step, batch["x"][:, 0], jnp.swapaxes(batch["x"], 0, 1))
    return jnp.mean((jnp.swapaxes(states, 0, 1) @ params["w2"] - batch["y"]) ** 2)


def state_space(params, batch):
    """A diagonal linear recurrence by `associative_scan` (Smith et al. 2023)."""
    decay = jax.nn.sigmoid(params["b0"])
    inputs = batch["x"] @ params["w0"]
    combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
    _, states = jax.lax.associative_scan(combine, (jnp.broadcast_to(decay, inputs.shape), inputs), axis=1)
    return jnp.mean((jax.nn.silu(states) @ params["w1"] + params["b1"] - batch["y"]) ** 2)


def branches(params, batch):
    """A `cond` on data inside a `switch`, each branch with its own dot."""
    choice = jnp.sum(batch["y"] > 0) % 3
    layers = [lambda x, w=f"w{i}": jnp.tanh(x @ params[w]) for i in range(3)]
    h = jax.lax.switch(choice, layers, batch["x"])
    h = jax.lax.cond(jnp.mean(h) > 0, lambda h: h @ params["w1"] + params["b1"], lambda h: 2 * h + params["b2"], h)
    return jnp.mean((h - batch["y"]) ** 2)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (jnp.clip(g, -1, 1),))


def quantised(params, batch):
    """Straight-through rounding: a `custom_vjp` whose rule is not the derivative."""
    h = jax.nn.softplus(batch["x"] @ params["w0"] + params["b0"])
    return jnp.mean((straight_through(4 * h) / 4 @ params["w1"] - batch["y"]) ** 2)


def mapped_remat(params, batch):
    """`lax.map` over rows of a checkpointed layer with a saving policy."""
    layer = jax.checkpoint(lambda x: mlp(params, x), policy=jax.checkpoint_policies.dots_saveable)
    pieces = jax.tree.map(lambda x: x.reshape(-1, 8, x.shape[-1]), batch)
    return jnp.mean((jax.lax.map(layer, pieces["x"]) - pieces["y"]) ** 2)


def newton_sqrt(params, batch):
    """Elementwise Newton iterations for a square root, until the step is below 1e-6."""
    target = 1 + (batch["x"] @ params["w0"]) ** 2

    def body(carry):
        x, _, count = carry
        new = 0.5 * (x + target / x)
        return new, jnp.max(jnp.abs(new - x) / new), count + 1

    start = (target, jnp.ones((), target.dtype), 0)
    root, _, count = jax.lax.while_loop(lambda c: (c[1] > 1e-6) & (c[2] < 500), body, start)
    return root, count


def fixed_point(params, batch):
    """Iterations of a contraction with a dot inside, until the residual is below 1e-5."""

    def body(carry):
        z, _, count = carry
        new = jnp.tanh(0.3 * z @ params["w0"] + batch["x"] @ params["w1"])
        return new, jnp.max(jnp.abs(new - z)), count + 1

    start = (jnp.zeros_like(batch["x"]), jnp.ones((), batch["x"].dtype), 0)
    z, _, count = jax.lax.while_loop(lambda c: (c[1] > 1e-5) & (c[2] < 500), body, start)
    return z, count


SOLVERS = {"newton_sqrt": newton_sqrt, "fixed_point": fixed_point}

UNCHANGED = {
    "float64": (squared, np.float64),
    "float64_attention": (einsum_attention, np.float64),
    "complex64": (lambda p, b: jnp.sum(jnp.abs(b["x"] @ p["w0"] + p["b0"]) ** 2), np.complex64),
    "complex128": (lambda p, b: jnp.sum(jnp.abs(jnp.exp(b["x"] @ p["w0"]) + p["b0"]) ** 2), np.complex128),
}

ROWS = [
    Row("plain_mlp", plain(squared), fast=True),
    Row("einsum_attention", plain(einsum_attention, sequence)),
    Row("fused_attention", plain(fused_attention, sequence)),
    Row("our_attention", plain(our_attention, sequence), fast=True),
    Row("per_example_clipping", plain(per_example_clipping)),
    Row("laplacian", plain(laplacian)),
    Row("equilibrium", plain(equilibrium), float32_dots=SOLVED_IN_FLOAT32, fast=True),
    Row("ridge", plain(ridge), float32_dots=SOLVED_IN_FLOAT32),
    Row("gaussian_process", plain(gaussian_process), float32_dots=SOLVED_IN_FLOAT32),
    Row("fourier", plain(fourier, sequence)),
    Row("spectral_norm", plain(spectral_norm)),
    Row("gradient_accumulation", plain(squared, grads=accumulated)),
    Row("shared_weight", plain(shared_weight, sequence), fast=True),
    Row("state_space", plain(state_space, sequence)),
    Row("branches", plain(branches)),
    Row("quantised", plain(quantised)),
    Row("mapped_remat", plain(mapped_remat)),
]
