"""Cases of class 1: products for which the program requests float32, in each of the ways that JAX has.

All contract 16 numbers or more and multiply no value with itself, so that only the request keeps them in float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
from product_case import Case, conv, convolutions, dense_params, kernel_params, mean_square, normal

HIGHEST = jax.lax.Precision.HIGHEST


def raw_records(net, params, batch):
    """Raw columns (years, prices) times a learned matrix, then centred: the result is 1/300 of the sums' terms."""
    turned = jnp.dot(batch["x"], params["turn"], precision="highest")
    centre = jnp.dot(batch["mean"], params["turn"], precision="highest")
    return mean_square(net.mlp(params, turned - centre) - batch["y"])


def raw_records_data(rng):
    mean = rng.uniform(50, 500, 32)
    batch = {"x": (mean + rng.standard_normal((256, 32))).astype(np.float32), "mean": mean.astype(np.float32)}
    return dense_params(rng, 32, 32, 8) | {"turn": normal(rng, 32, 32, scale=32**-0.5)}, batch | {
        "y": normal(rng, 256, 8)
    }


def codebook(net, params, batch):
    """Soft vector quantisation: squared distances from encoded inputs to codes, far from the origin."""
    z = net.mlp(params, batch["x"])
    cross = jnp.einsum("nd,kd->nk", z, params["codes"], precision=HIGHEST)
    distance = jnp.sum(z**2, -1)[:, None] + jnp.sum(params["codes"] ** 2, -1) - 2 * cross
    return jnp.mean(jnp.sum(jax.nn.softmax(-distance / 8) * distance, -1))


def codebook_data(rng):
    centre = normal(rng, 32, scale=8.0)
    params = dense_params(rng, 32, 32, 32) | {"codes": centre + normal(rng, 64, 32)}
    return params | {"b1": centre}, {"x": normal(rng, 128, 32)}


def unrolled_recovery(net, params, batch):
    """Unrolled gradient descent on `|D x - y|^2` (Gregor and LeCun 2010), under `default_matmul_precision`, scanned."""

    def step(x, rate):
        with jax.default_matmul_precision("float32"):
            residual = batch["y"] - x @ batch["dictionary"]
            return x + rate * residual @ batch["dictionary"].T, jnp.mean(residual**2)

    start = net.dense(batch["y"], params["first"])
    x, residuals = jax.lax.scan(step, start, params["rates"])
    return 1000 * residuals[-1] + 0.1 * mean_square(net.mlp(params, x) - batch["label"])


def unrolled_recovery_data(rng):
    dictionary = normal(rng, 64, 48, scale=48**-0.5)
    truth = normal(rng, 32, 64)
    y = truth @ dictionary + normal(rng, 32, 48, scale=0.01)
    params = dense_params(rng, 64, 32, 4) | {"first": normal(rng, 48, 64, scale=0.1)}
    return params | {"rates": np.full(24, 0.4, np.float32)}, {
        "y": y,
        "dictionary": dictionary,
        "label": normal(rng, 32, 4),
    }


def inducing_points(net, params, batch):
    """An RBF kernel between features and inducing points, its cross term a dot with a float32 `DotAlgorithmPreset`."""
    x, z = 20 + net.mlp(params, batch["x"]), params["z"]
    presets = jax.lax.DotAlgorithmPreset
    preset = presets.F64_F64_F64 if x.dtype == jnp.float64 else presets.F32_F32_F32
    cross = jax.lax.dot_general(x, z, (((1,), (1,)), ((), ())), precision=preset)
    distance = jnp.sum(x**2, -1)[:, None] + jnp.sum(z**2, -1) - 2 * cross
    return mean_square(net.dot(jnp.exp(-distance / 32), params["weights"]) - batch["y"])


def inducing_points_data(rng):
    params = dense_params(rng, 32, 32, 16) | {"z": 20 + normal(rng, 48, 16), "weights": normal(rng, 48, scale=0.3)}
    return params, {"x": normal(rng, 128, 32), "y": normal(rng, 128)}


def image_recovery(net, params, batch):
    """Data consistency of image recovery: a known blur that mixes 8 channels, `precision="highest"`, minus the data."""
    image = batch["start"] + 0.05 * convolutions(net, params, batch["start"])
    residual = conv(image, batch["blur"], precision="highest") - batch["y"]
    return mean_square(residual / 0.05)


def image_recovery_data(rng):
    blur = normal(rng, 3, 3, 8, 8, scale=72**-0.5)
    start = normal(rng, 2, 24, 24, 8) + 2
    padded = np.pad(start, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    y = np.einsum("nhwcij,ijcd->nhwd", windows, blur) + normal(rng, 2, 24, 24, 8, scale=0.05)
    return kernel_params(rng, 8, 16, 8), {"blur": blur, "start": start, "y": y.astype(np.float32)}


def rotations(rng, n):
    return np.linalg.qr(rng.standard_normal((n, n)))[0].astype(np.float32)


def long_rollout(net, params, batch):
    """64 steps of a linear system of 24 states, rematerialised, each product with `precision="float32"`."""

    @jax.checkpoint
    def step(state, drive):
        state = jnp.matmul(state, params["step"], precision="float32") + 0.01 * drive
        return state, state

    start = net.mlp(params, batch["x"])
    _, states = jax.lax.scan(step, start, batch["drive"])
    return mean_square(states[::8] - batch["y"])


def long_rollout_data(rng):
    params = dense_params(rng, 16, 32, 24) | {"step": rotations(rng, 24)}
    return params, {"x": normal(rng, 32, 16), "drive": normal(rng, 64, 1, 24), "y": normal(rng, 8, 32, 24)}


@jax.custom_jvp
def project(x, matrix, inverse, target):
    """The nearest point to `x` with `matrix @ x = target`."""
    residual = jnp.matmul(x, matrix.T, precision="highest") - target
    return x - jnp.matmul(jnp.matmul(residual, inverse, precision="highest"), matrix, precision="highest")


@project.defjvp
def project_jvp(primals, tangents):
    x, matrix, inverse, target = primals
    residual = jnp.matmul(tangents[0], matrix.T, precision="highest")
    change = jnp.matmul(jnp.matmul(residual, inverse, precision="highest"), matrix, precision="highest")
    return project(x, matrix, inverse, target), tangents[0] - change


def constrained(net, params, batch):
    """Predictions forced to obey conservation laws, by a projection with a derivative rule of its own."""
    rough = batch["prior"] + net.mlp(params, batch["x"])
    exact = project(rough, batch["laws"], batch["inverse"], batch["totals"])
    return mean_square(exact - batch["y"])


def constrained_data(rng):
    laws = normal(rng, 16, 32)
    prior = 100 + normal(rng, 128, 32)
    inverse = np.linalg.inv(laws.astype(np.float64) @ laws.T).astype(np.float32)
    y = prior + normal(rng, 128, 32)
    batch = {"prior": prior, "x": normal(rng, 128, 16), "laws": laws, "inverse": inverse, "totals": y @ laws.T, "y": y}
    return dense_params(rng, 16, 32, 32), batch


def refined(net, params, batch):
    """A learned solver whose result is refined where a flag says so: `cond` under `vmap`, `precision="highest"`."""

    def one(x, y, matrix, wanted):
        def refine(x):
            return x + params["rate"] * jnp.matmul(matrix.T, y - jnp.matmul(matrix, x, precision=HIGHEST))

        with jax.default_matmul_precision("highest"):
            return jax.lax.cond(wanted, lambda x: refine(refine(x)), lambda x: x, x)

    start = batch["guess"] + 0.02 * net.mlp(params, batch["y"] / 100)
    x = jax.vmap(one)(start, batch["y"], batch["matrix"], batch["wanted"])
    return mean_square(10 * (x - batch["x"]))


def refined_data(rng):
    matrix = np.eye(32, dtype=np.float32) + normal(rng, 32, 32, 32, scale=0.05)
    x = 100 + normal(rng, 32, 32)
    y = np.einsum("bij,bj->bi", matrix, x)
    wanted = np.arange(32) % 2 == 0
    guess = x + normal(rng, 32, 32, scale=0.1)
    batch = {"matrix": matrix, "x": x, "y": y, "wanted": wanted, "guess": guess}
    return dense_params(rng, 32, 32, 32) | {"rate": np.float32(0.4)}, batch


def force_matching(net, params, batch):
    """Forces of a learned potential beside stiff springs, matched to data: a gradient of a gradient."""

    def energy(x):
        with jax.default_matmul_precision("highest"):
            springs = 0.5 * jnp.sum(x * (x @ batch["stiffness"]))
        return springs * jnp.exp(params["stiffer"] / 1000) + jnp.sum(net.mlp(params, x))

    return mean_square(jax.grad(energy)(batch["x"]) - batch["force"])


def force_matching_data(rng):
    root = normal(rng, 48, 48)
    stiffness = 4 * root @ root.T
    x = normal(rng, 64, 48)
    batch = {"x": x, "stiffness": stiffness, "force": x @ stiffness + normal(rng, 64, 48)}
    return dense_params(rng, 48, 48, 1) | {"stiffer": np.float32(1.0)}, batch


CASES = (
    Case("raw_records", 1, raw_records, raw_records_data),
    Case("codebook", 1, codebook, codebook_data),
    Case("unrolled_recovery", 1, unrolled_recovery, unrolled_recovery_data),
    Case("inducing_points", 1, inducing_points, inducing_points_data),
    Case("image_recovery", 1, image_recovery, image_recovery_data),
    Case("long_rollout", 1, long_rollout, long_rollout_data),
    Case("constrained", 1, constrained, constrained_data),
    Case("refined", 1, refined, refined_data),
    Case("force_matching", 1, force_matching, force_matching_data, note="second order"),
)
