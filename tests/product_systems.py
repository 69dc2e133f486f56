"""Cases of classes 3 and 8 that solve linear systems: a solution has digits that the next product cancels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve
from product_case import NARROW, Case, dense_params, mean_square, normal
from product_squares import distances, ridge_data


def gp_prediction(net, params, batch):
    """The mean that a Gaussian process predicts (Rasmussen and Williams, 2.25) for features of other inputs."""
    n = len(batch["y"])
    x = net.mlp(params, jnp.concatenate([batch["x"], batch["test"]]))
    kernel = jnp.exp(-distances(x, "matmul") / 64)
    factor = jnp.linalg.cholesky(kernel[:n, :n] + 0.01 * jnp.eye(n))
    return mean_square(kernel[n:, :n] @ cho_solve((factor, True), batch["y"]) - batch["test_y"])


def gp_prediction_data(rng):
    batch = {"x": normal(rng, 96, 32), "y": normal(rng, 96), "test": normal(rng, 32, 32), "test_y": normal(rng, 32)}
    return dense_params(rng, 32, 64, 32), batch


def ridge_head(net, params, batch):
    """A last layer that ridge regression on a support set solves for (Bertinetto et al. 2019), `inv` and all."""
    z = net.mlp(params, batch["support"])
    inverse = jnp.linalg.inv(z.T @ z + 0.1 * jnp.eye(z.shape[1]))
    weights = inverse @ (z.T @ batch["support_y"])
    return mean_square(net.mlp(params, batch["query"]) @ weights - batch["query_y"])


def ridge_layer(net, params, batch):
    """The same by `solve`, which reads the products of features and targets at once; the targets have a mean."""
    z = net.mlp(params, batch["support"])
    weights = jnp.linalg.solve(z.T @ z + 0.1 * jnp.eye(z.shape[1]), z.T @ (batch["support_y"] + 3))
    return mean_square(net.mlp(params, batch["query"]) @ weights - batch["query_y"] - 3)


def zca(net, params, batch):
    """Decorrelated batch normalisation (Huang et al. 2018): features times the inverse root of their covariance."""
    x = net.mlp(params, batch["x"])
    x = x - jnp.mean(x, 0)
    values, vectors = jnp.linalg.eigh(x.T @ x / len(x) + 1e-3 * jnp.eye(x.shape[1]))
    return mean_square(x @ ((vectors / jnp.sqrt(values)) @ vectors.T) - batch["y"])


def zca_data(rng):
    return dense_params(rng, 32, 64, 24), {"x": normal(rng, 256, 32), "y": normal(rng, 256, 24)}


def mahalanobis(net, params, batch):
    """Distances to the mean of a reference set, by the inverse of its covariance (Lee et al. 2018)."""
    x, reference = net.mlp(params, batch["x"]), net.mlp(params, batch["reference"])
    centre = jnp.mean(reference, 0)
    covariance = (reference - centre).T @ (reference - centre) / len(reference) + 1e-2 * jnp.eye(x.shape[1])
    away = x - centre
    return jnp.mean(jax.nn.softplus(jnp.einsum("ni,ij,nj->n", away, jnp.linalg.inv(covariance), away) / 32))


def mahalanobis_data(rng):
    return dense_params(rng, 32, 64, 32), {"x": normal(rng, 128, 32), "reference": normal(rng, 256, 32)}


def independence(net, params, batch):
    """The Hilbert-Schmidt criterion (Gretton et al. 2005) with its centring matrix: `trace(K H L H)`."""
    x, y = net.mlp(params, batch["x"]), batch["y"]
    n = len(x)
    centring = jnp.eye(n) - jnp.full((n, n), 1 / n)
    return jnp.log(jnp.trace((x @ x.T) @ centring @ (y @ y.T) @ centring) / n**2)


def independence_data(rng):
    params, x = dense_params(rng, 32, 64, 32), normal(rng, 128, 32)
    params["b1"] = params["b1"] + 4
    return params, {"x": x, "y": x[:, :8] + normal(rng, 128, 8) + 3}


def cayley(net, params, batch):
    """An orthogonal weight `(1 + A)^-1 (1 - A)` of a skew-symmetric parameter (Helfrich et al. 2018): a layer."""
    skew = params["free"] - params["free"].T
    one = jnp.eye(len(skew))
    x = jnp.tanh(net.mlp(params, batch["x"]))
    return mean_square(net.dot(x, jnp.linalg.solve(one + skew, one - skew)) - batch["y"])


def orthonormal(net, params, batch):
    """A layer whose weight is the orthonormal factor of a parameter."""
    x = jnp.tanh(net.mlp(params, batch["x"]))
    return mean_square(net.dot(x, jnp.linalg.qr(params["free"])[0]) - batch["y"])


def filtered(transition, emission, noise, z):
    """The means `[t, n]` and covariances `[t, n, n]` that a Kalman filter computes from measurements `[t, m]`."""
    n = len(transition)
    process, spread = 0.1 * jnp.eye(n), jnp.exp(noise) * jnp.eye(z.shape[1])

    def step(carry, z):
        mean, cov = carry
        mean, cov = transition @ mean, transition @ cov @ transition.T + process
        seen = emission @ cov @ emission.T + spread
        gain = jnp.linalg.solve(seen, emission @ cov).T
        mean, cov = mean + gain @ (z - emission @ mean), cov - gain @ seen @ gain.T
        return (mean, cov), (mean, cov)

    return jax.lax.scan(step, (jnp.zeros(n), jnp.eye(n)), z)[1]


def learned_filter(net, params, batch):
    """A Kalman filter of 24 states whose transition and emission are learned; layers read its means."""
    means, _ = filtered(params["transition"], params["emission"], params["noise"], batch["z"])
    return mean_square(net.mlp(params, means) - batch["y"])


def learned_smoother(net, params, batch):
    """Means and covariances smoothed backward in time (Rauch, Tung and Striebel 1965), transition and all learned."""
    transition, z = params["transition"], batch["z"] + 0.1 * net.mlp(params, batch["x"])
    means, covs = filtered(transition, params["emission"], params["noise"], z)

    def step(carry, row):
        (mean, cov), (later, later_cov) = row, carry
        ahead = transition @ cov @ transition.T + 0.1 * jnp.eye(len(transition))
        gain = jnp.linalg.solve(ahead, transition @ cov).T
        mean, cov = mean + gain @ (later - transition @ mean), cov + gain @ (later_cov - ahead) @ gain.T
        return (mean, cov), (mean, cov)

    last, rows = (means[-1], covs[-1]), (means[:-1], covs[:-1])
    means, covs = jax.lax.scan(step, last, rows, reverse=True)[1]
    return mean_square(means) + mean_square(covs)


def filter_data(rng):
    transition = 0.95 * np.linalg.qr(rng.standard_normal((24, 24)))[0].astype(np.float32)
    params = {"transition": transition, "emission": normal(rng, 20, 24), "noise": np.float32(-3)}
    return params, {"z": normal(rng, 60, 20, scale=3)}


def learned_filter_data(rng):
    params, batch = filter_data(rng)
    return params | dense_params(rng, 24, 32, 4), batch | {"y": normal(rng, 60, 4)}


def learned_smoother_data(rng):
    params, batch = filter_data(rng)
    return params | dense_params(rng, 32, 32, 20), batch | {"x": normal(rng, 60, 32)}


def regression_targets(net, params, batch):
    """Layers on the weights of a ridge regression of several targets, of records of very different sizes."""
    x, y = batch["x"], batch["y"]
    weights = jnp.linalg.solve(x.T @ x + 1e-4 * jnp.eye(x.shape[1]), x.T @ y)
    return mean_square(net.mlp(params, weights.T) - batch["z"])


def regression_targets_data(rng):
    x = normal(rng, 200, 24) * np.logspace(0, -2, 24).astype(np.float32)
    y = x @ normal(rng, 24, 32) + normal(rng, 200, 32, scale=1e-3)
    return dense_params(rng, 24, 32, 4), {"x": x, "y": y, "z": normal(rng, 32, 4)}


def precision_matrix(net, params, batch):
    """A Gaussian's precision by its likelihood, `tr(S T) - log det T`, near where the derivative `S - inv(T)` is zero.

    Layers beside it predict the mean.
    """
    precision = params["precision"]
    fit = jnp.trace(batch["covariance"] @ precision) - jnp.linalg.slogdet(precision)[1]
    return fit + mean_square(net.mlp(params, batch["x"]) - batch["y"])


def precision_matrix_data(rng):
    root = rng.standard_normal((32, 32)) / 32**0.5
    covariance = root @ root.T + np.eye(32)
    precision = np.linalg.inv(covariance) * (1 + 0.003 * rng.standard_normal((32, 32)))
    params = dense_params(rng, 16, 32, 4) | {"precision": precision.astype(np.float32)}
    x = normal(rng, 64, 16)
    return params, {"covariance": covariance.astype(np.float32), "x": x, "y": normal(rng, 64, 4, scale=0.3)}


def weight_data(rng):
    params = dense_params(rng, 32, 64, 32) | {"free": normal(rng, 32, 32, scale=0.3)}
    return params, {"x": normal(rng, 128, 32), "y": normal(rng, 128, 32)}


CASES = (
    Case("gp_prediction", 3, gp_prediction, gp_prediction_data),
    Case("ridge_head", 3, ridge_head, functools.partial(ridge_data, examples=128)),
    Case("ridge_layer", 8, ridge_layer, functools.partial(ridge_data, examples=128)),
    Case("zca", 3, zca, zca_data),
    Case("mahalanobis", 3, mahalanobis, mahalanobis_data),
    Case("independence", 3, independence, independence_data),
    Case("learned_filter", 3, learned_filter, learned_filter_data),
    Case("learned_smoother", 3, learned_smoother, learned_smoother_data),
    Case("regression_targets", 8, regression_targets, regression_targets_data),
    Case("precision_matrix", 3, precision_matrix, precision_matrix_data),
    Case("cayley", NARROW, cayley, weight_data, low_share=1.0),
    Case("orthonormal", NARROW, orthonormal, weight_data, low_share=1.0),
)
