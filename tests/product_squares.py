"""Cases of class 3: a value times itself, or added to squares: Gram matrices, sums of squares, distances."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve
from product_case import (
    Case,
    convolutions,
    dense_params,
    kernel_params,
    mean_square,
    normal,
    smooth_images,
    uniform,
)
from product_guards import codebook_data

# Gram matrices


def style_loss(spec=None):
    """Gram matrices of a feature map (Gatys et al. 2016), by `f.T @ f` or by einsum."""

    def loss(net, params, batch):
        features = jnp.tanh(convolutions(net, params, batch["image"])) + 1
        _, h, w, c = features.shape
        if spec is None:
            flat = features.reshape(-1, c)
            gram = flat.T @ flat / (h * w)
        else:
            gram = jnp.einsum(spec, features, features) / (h * w)
        return mean_square(gram - batch["gram"])

    return loss


def style_loss_data(n, size, gram):
    return lambda rng: (
        kernel_params(rng, 3, 8),
        {"image": smooth_images(rng, n, size, 3), "gram": 1 + normal(rng, *gram, scale=0.3)},
    )


def orthogonality(net, params, batch):
    """A weight kept near orthogonal: `|w.T @ w - 1|^2`, beside the layer that it belongs to."""
    w = params["w0"]
    penalty = jnp.sum((w.T @ w - jnp.eye(w.shape[1])) ** 2)
    return mean_square(net.mlp(params, batch["x"]) - batch["y"]) + 10 * penalty


def orthogonality_data(rng):
    w = np.linalg.qr(rng.standard_normal((48, 48)))[0][:, :32] + 0.002 * rng.standard_normal((48, 32))
    params = dense_params(rng, 48, 32, 8) | {"w0": w.astype(np.float32)}
    return params, {"x": normal(rng, 128, 48), "y": normal(rng, 128, 8)}


def orthogonal_layer(net, params, batch):
    """A weight made orthogonal by ten steps of Bjorck and Bowie, scanned: `w @ w.T` of the carry."""

    def step(w, _):
        return 1.5 * w - 0.5 * (w @ w.T) @ w, None

    w, _ = jax.lax.scan(step, params["square"] / 2, None, 10)
    return mean_square(net.mlp(params, net.dot(batch["x"], w)) - batch["y"])


def orthogonal_layer_data(rng):
    square = np.linalg.qr(rng.standard_normal((32, 32)))[0] + 0.1 * rng.standard_normal((32, 32)) / 6
    params = dense_params(rng, 32, 32, 8) | {"square": square.astype(np.float32)}
    return params, {"x": normal(rng, 128, 32), "y": normal(rng, 128, 8)}


# Covariance


def uncentred_covariance(net, params, batch):
    """The Gaussian likelihood of features by their second moments, `x.T @ x / n`."""
    x = net.mlp(params, batch["x"])
    moments = x.T @ x / len(x) + 0.01 * jnp.eye(x.shape[1])
    factor = jnp.linalg.cholesky(moments)
    return jnp.sum(jnp.log(jnp.diag(factor))) + mean_square(x - batch["y"])


def uncentred_covariance_data(rng):
    params = dense_params(rng, 32, 64, 32)
    params["b1"] = params["b1"] + 1
    return params, {"x": normal(rng, 512, 32), "y": normal(rng, 512, 32)}


def vicreg(net, params, batch):
    """VICReg (Bardes et al. 2022): variances and covariances of two views, and their distance; einsum under `vmap`."""
    views = net.mlp(params, batch["views"])
    centred = views - jnp.mean(views, axis=1, keepdims=True)
    covariance = jax.vmap(lambda z: jnp.einsum("ni,nj->ij", z, z) / (len(z) - 1))(centred)
    spread = jnp.sqrt(jnp.diagonal(covariance, axis1=1, axis2=2) + 1e-4)
    off = jnp.sum(covariance**2) - jnp.sum(jnp.diagonal(covariance, axis1=1, axis2=2) ** 2)
    return mean_square(views[0] - views[1]) + jnp.mean(jax.nn.softplus(1 - spread)) + off / views.shape[-1]


def vicreg_data(rng):
    x = normal(rng, 256, 32)
    return dense_params(rng, 32, 64, 32), {"views": np.stack([x, x + normal(rng, 256, 32, scale=0.3)])}


def whitening(net, params, batch):
    """Features of each group whitened by Newton-Schulz on their covariance (Huang et al. 2019), rematerialised."""

    @jax.checkpoint
    def whiten(x):
        x = x - jnp.mean(x, 0)
        sigma = x.T @ x / len(x) + 1e-3 * jnp.eye(x.shape[1])
        trace = jnp.trace(sigma)
        p = jnp.eye(x.shape[1])
        for _ in range(5):
            p = 1.5 * p - 0.5 * p @ p @ p @ (sigma / trace)
        return x @ p / jnp.sqrt(trace)

    h = net.mlp(params, batch["x"]).reshape(4, -1, 16)
    return mean_square(net.dense(jax.vmap(whiten)(h), params["out"]) - batch["y"])


def whitening_data(rng):
    params = dense_params(rng, 32, 64, 16) | {"out": normal(rng, 16, 8, scale=0.25)}
    params["b1"] = params["b1"] + 3
    return params, {"x": normal(rng, 512, 32), "y": normal(rng, 4, 128, 8)}


# Sums of squares


def residual_sum(net, params, batch):
    """`vdot(r, r) / n` over 100,000 residuals."""
    r = (net.mlp(params, batch["x"]) - batch["y"]).reshape(-1)
    return jnp.vdot(r, r) / r.size


def residual_sum_data(rng):
    return dense_params(rng, 16, 16, 10), {"x": normal(rng, 10_000, 16), "y": 2 * normal(rng, 10_000, 10)}


def weight_decay(net, params, batch):
    """A mean squared error and a penalty on weights, each by `einsum` of a vector with itself."""
    r = net.mlp(params, batch["x"]) - batch["y"]
    flat = jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(params)])
    return jnp.mean(jnp.einsum("ni,ni->n", r, r)) + jnp.dot(flat, flat) * 3e-3


def weight_decay_data(rng):
    return dense_params(rng, 32, 64, 32), {"x": normal(rng, 256, 32), "y": 100 + normal(rng, 256, 32, scale=40.0)}


# Distances


def distances(a, form):
    """Squared distances `[n, n]` of the rows of `a`, each way that people write the cross term."""
    if form == "helper":
        return between(a, a)
    if form == "chunks":
        return jax.lax.map(lambda rows: between(rows, a), a.reshape(4, -1, a.shape[1])).reshape(len(a), -1)
    cross = {
        "matmul": lambda: 2 * (a @ a.T),
        "scaled": lambda: 2 * a @ a.T,
        "einsum": lambda: 2 * jnp.einsum("id,jd->ij", a, a),
        "vmap": lambda: 2 * jax.vmap(lambda x: a @ x)(a),
        "slices": lambda: 2 * jnp.dot(a[:], jnp.transpose(a.reshape(len(a), -1))),
    }[form]()
    squares = jnp.sum(a**2, axis=-1)
    return squares[:, None] + squares[None] - cross


@jax.jit
def between(a, b):
    """Squared distances of the rows of `a` to those of `b`: a function that everybody has."""
    return jnp.sum(a**2, -1)[:, None] + jnp.sum(b**2, -1)[None] - 2 * a @ b.T


def neighbours(form):
    """Stochastic neighbours of learned features (van der Maaten 2009), which lie 50 from the origin."""

    def loss(net, params, batch):
        away = distances(net.mlp(params, batch["x"]), form)
        logits = jnp.where(jnp.eye(len(away), dtype=bool), -1e9, -away / 8)
        return -jnp.mean(jnp.sum(batch["target"] * jax.nn.log_softmax(logits), -1))

    return loss


def neighbours_data(rng):
    params = dense_params(rng, 32, 64, 32)
    params["b1"] = params["b1"] + normal(rng, 32, scale=50 / 32**0.5)
    target = rng.dirichlet(np.full(128, 0.1), 128) * (1 - np.eye(128))
    target /= target.sum(1, keepdims=True)
    return params, {"x": normal(rng, 128, 32), "target": target.astype(np.float32)}


def discrepancy(net, params, batch):
    """Maximum mean discrepancy (Gretton et al. 2012) of two samples, one Gram matrix over both, five widths."""
    both = net.mlp(params, jnp.concatenate([batch["x"], batch["y"]]))
    away = jax.nn.relu(distances(both, "matmul"))
    width = jnp.mean(away)
    kernel = jnp.sum(jnp.exp(-away / (width * jnp.array([0.25, 0.5, 1.0, 2.0, 4.0])[:, None, None])), 0)
    n = len(batch["x"])
    return jnp.mean(kernel[:n, :n] + kernel[n:, n:] - kernel[:n, n:] - kernel[n:, :n])


def discrepancy_data(rng):
    params = dense_params(rng, 32, 64, 32)
    params["b1"] = params["b1"] + 3
    return params, {"x": normal(rng, 96, 32), "y": normal(rng, 96, 32) + 0.7}


def codebook(net, params, batch):
    """Soft vector quantisation (Agustsson et al. 2017): squared distances of features to codes, far from the origin."""
    away = between(net.mlp(params, batch["x"]), params["codes"])
    return jnp.mean(jnp.sum(jax.nn.softmax(-away / 8) * away, -1))


def prototypes(net, params, batch):
    """Prototypical networks (Snell et al. 2017): distances of queries to the means of classes, by a nested `vmap`."""
    support, query = net.mlp(params, batch["support"]), net.mlp(params, batch["query"])
    means = jnp.mean(support.reshape(16, 8, -1), 1)
    away = jax.vmap(lambda q: jax.vmap(lambda m: q @ q + m @ m - 2 * q @ m)(means))(query)
    return -jnp.mean(jnp.sum(batch["target"] * jax.nn.log_softmax(-away), -1))


def prototypes_data(rng):
    params = dense_params(rng, 32, 64, 32)
    params["b1"] = params["b1"] + normal(rng, 32, scale=50 / 32**0.5)
    target = np.eye(16, dtype=np.float32)[rng.integers(16, size=64)]
    return params, {"support": normal(rng, 128, 32), "query": normal(rng, 64, 32), "target": target}


def two_samples(net, params, batch):
    """Maximum mean discrepancy (Gretton et al. 2012), its terms one by one, cross terms by `einsum`."""

    def kernel(a, b):
        squares = jnp.einsum("id,id->i", a, a)[:, None] + jnp.einsum("jd,jd->j", b, b)
        away = jnp.maximum(squares - 2 * jnp.einsum("id,jd->ij", a, b), 0)
        return jnp.mean(jnp.exp(-away / jnp.array([16, 32, 64.0])[:, None, None]))

    x, y = net.mlp(params, batch["x"]), net.mlp(params, batch["y"])
    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


def kernel_regression(net, params, batch):
    """Radial basis functions (Broomhead and Lowe 1988) at given places, of records far from the origin, then layers."""
    features = jnp.exp(-between(batch["x"], batch["places"]) / 64)
    return mean_square(net.mlp(params, features) - batch["y"])


def kernel_regression_data(rng):
    centre = uniform(rng, 5, 20, 32)
    x, places = centre + normal(rng, 256, 32), centre + normal(rng, 64, 32)
    return dense_params(rng, 64, 32, 4), {"x": x, "places": places, "y": normal(rng, 256, 4)}


# Kernels


def gaussian_process(net, params, batch):
    """The likelihood of a Gaussian process with an RBF kernel on learned features (Rasmussen and Williams, 2.30)."""
    x = net.mlp(params, batch["x"])
    kernel = jnp.exp(-distances(x, "matmul") / 64) + 0.01 * jnp.eye(len(x))
    factor = jnp.linalg.cholesky(kernel)
    fit = 0.5 * batch["y"] @ cho_solve((factor, True), batch["y"])
    return (fit + jnp.sum(jnp.log(jnp.diag(factor)))) / len(x)


def gaussian_process_data(rng):
    return dense_params(rng, 32, 64, 32), {"x": normal(rng, 96, 32), "y": normal(rng, 96)}


def kernel_ridge(net, params, batch):
    """Ridge regression with a kernel, solved on a support set, tested on another (Bertinetto et al. 2019)."""
    support, query = net.mlp(params, batch["support"]), net.mlp(params, batch["query"])
    weights = jnp.linalg.solve(support @ support.T + 0.5 * jnp.eye(len(support)), batch["support_y"])
    return mean_square(net.dot(query, support.T) @ weights - batch["query_y"])


def ridge_data(rng, examples=48):
    true = normal(rng, 32, 4, scale=0.3)
    support, query = normal(rng, examples, 32), normal(rng, 96, 32)
    batch = {"support": support, "query": query, "support_y": support @ true, "query_y": query @ true}
    return dense_params(rng, 32, 64, 32), batch


def determinantal(net, params, batch):
    """A diverse choice: minus the log determinant of the chosen items' kernel, einsum over batches and a slice."""
    items = net.mlp(params, batch["items"])
    items = items / jnp.linalg.norm(items, axis=-1, keepdims=True) * jnp.exp(0.1 * batch["quality"])[..., None]
    kernel = jnp.einsum("bid,bjd->bij", items, items)
    factor = jnp.linalg.cholesky(kernel[:, :8, :8] + 1e-3 * jnp.eye(8))
    diagonal = jnp.diagonal(factor, axis1=1, axis2=2)
    return jnp.mean(jnp.mean(kernel**2, (1, 2)) - jnp.sum(jnp.log(diagonal), -1))


def determinantal_data(rng):
    common = 1 + normal(rng, 4, 1, 32)
    return dense_params(rng, 32, 64, 32), {"items": common + normal(rng, 4, 32, 32), "quality": normal(rng, 4, 32)}


def alignment(net, params, batch):
    """Centred kernel alignment (Kornblith et al. 2019) of two layers: three products, one of two different values."""

    def centred(x):
        return x - jnp.mean(x, 0)

    one = centred(net.mlp(params, batch["x"], "one_"))
    two = centred(net.mlp(params, batch["x"], "two_"))
    norm = lambda x: jnp.sqrt(jnp.sum(x**2))  # noqa: E731
    return -jnp.log(norm(one.T @ two) ** 2 / (norm(one.T @ one) * norm(two.T @ two)))


def alignment_data(rng):
    return dense_params(rng, 32, 32, 24, name="one_") | dense_params(rng, 32, 32, 16, name="two_"), {
        "x": normal(rng, 256, 32)
    }


# Of gradients


def tangent_kernel(net, params, batch):
    """The empirical neural tangent kernel, made like a given one: a Gram matrix of gradients, differentiated again."""

    def output(params, x):
        return net.mlp(params, x)[0]

    grads = jax.vmap(jax.grad(output), (None, 0))(params, batch["x"])
    rows = jnp.concatenate([g.reshape(len(batch["x"]), -1) for g in jax.tree.leaves(grads)], axis=1)
    kernel = rows @ rows.T
    return mean_square(kernel / jnp.mean(jnp.diag(kernel)) - batch["kernel"])


def tangent_kernel_data(rng):
    x = normal(rng, 32, 16) + 0.5
    return dense_params(rng, 16, 64, 1), {"x": x, "kernel": np.exp(-((x[:, None] - x) ** 2).sum(-1) / 16)}


def shampoo(net, params, batch):
    """A loss after one step preconditioned by `(g @ g.T)^-1/2` (Gupta et al. 2018), its rate and start learned."""

    def fit(w):
        return mean_square(net.dense(jnp.tanh(net.mlp(params, batch["x"])), w) - batch["y"])

    g = jax.grad(fit)(params["out"])
    values, vectors = jnp.linalg.eigh(g @ g.T + 1e-2 * jnp.mean(g**2) * len(g) * jnp.eye(len(g)))
    step = vectors @ ((vectors.T @ g) / jnp.sqrt(values)[:, None])
    return fit(params["out"] - params["rate"] * step)


def shampoo_data(rng):
    params = dense_params(rng, 16, 32, 16) | {"out": normal(rng, 16, 32, scale=0.25), "rate": np.float32(0.05)}
    return params, {"x": normal(rng, 128, 16), "y": normal(rng, 128, 32)}


CASES = (
    Case("style_loss_256", 3, style_loss(), style_loss_data(1, 256, (8, 8))),
    Case("style_loss_einsum", 3, style_loss("bhwc,bhwd->bcd"), style_loss_data(2, 64, (2, 8, 8))),
    Case("orthogonality", 3, orthogonality, orthogonality_data),
    Case("orthogonal_layer", 3, orthogonal_layer, orthogonal_layer_data),
    Case("uncentred_covariance", 3, uncentred_covariance, uncentred_covariance_data),
    Case("vicreg", 3, vicreg, vicreg_data),
    Case("whitening", 3, whitening, whitening_data),
    Case("residual_sum", 3, residual_sum, residual_sum_data),
    Case("weight_decay", 3, weight_decay, weight_decay_data, scale=2.0**4),
    *(
        Case(f"neighbours_{form}", 3, neighbours(form), neighbours_data)
        for form in ("matmul", "scaled", "einsum", "vmap", "slices", "helper")
    ),
    Case("neighbours_chunks", 3, neighbours("chunks"), neighbours_data, note="a scan over parts of one operand"),
    Case("codebook_unguarded", 3, codebook, codebook_data),
    Case("prototypes", 3, prototypes, prototypes_data),
    Case("two_samples", 3, two_samples, discrepancy_data),
    Case("kernel_regression", 3, kernel_regression, kernel_regression_data, note="two arrays of data"),
    Case("discrepancy", 3, discrepancy, discrepancy_data),
    Case("gaussian_process", 3, gaussian_process, gaussian_process_data),
    Case("kernel_ridge", 3, kernel_ridge, ridge_data, note="also a product of two towers, a layer"),
    Case("determinantal", 3, determinantal, determinantal_data),
    Case("alignment", 3, alignment, alignment_data),
    Case("tangent_kernel", 3, tangent_kernel, tangent_kernel_data, note="second order"),
    Case("shampoo", 3, shampoo, shampoo_data, note="second order"),
)
