"""Cases of classes 4, 5 and 8: small results, constants that the program knows, and delicate functions."""

import jax
import jax.numpy as jnp
import numpy as np
from product_case import Case, convolutions, dense_params, kernel_params, mean_square, normal, uniform

# Small results


def policy_gradient(net, params, batch):
    """Log-probabilities times returns, 20,000 of them: one number, beyond 65,504 before it is divided by n."""
    logits = jax.nn.log_softmax(net.mlp(params, batch["x"]))
    chosen = jnp.sum(jnp.where(batch["action"][:, None] == jnp.arange(16), logits, 0), -1)
    return -jnp.vdot(chosen, batch["return"]) / len(chosen)


def policy_gradient_data(rng):
    batch = {"x": normal(rng, 20_000, 16), "action": rng.integers(0, 16, 20_000), "return": uniform(rng, 0, 4, 20_000)}
    return dense_params(rng, 16, 16, 16), batch


def distribution_head(net, params, batch):
    """The mean of a categorical distribution over 301 given returns, 0 to 300; its error in returns."""
    probabilities = jax.nn.softmax(net.mlp(params, batch["x"]))
    return mean_square((probabilities @ batch["returns"] - batch["y"]) / 10)


def distribution_head_data(rng):
    returns = np.arange(301, dtype=np.float32)
    return dense_params(rng, 32, 64, 301), {
        "x": normal(rng, 64, 32),
        "returns": returns,
        "y": uniform(rng, 130, 170, 64),
    }


def attention_pooling(net, params, batch):
    """Sets of 128 pooled to a vector by learned weights, then centred over the sets: what differs is small."""
    h = net.mlp(params, batch["x"])
    weights = jax.nn.softmax(h @ params["query"], axis=1)
    pooled = jnp.einsum("bn,bnd->bd", weights, h)
    pooled = (pooled - jnp.mean(pooled, 0)) / (jnp.std(pooled, 0) + 1e-3)
    return mean_square(net.dense(pooled, params["out"]) - batch["y"])


def attention_pooling_data(rng):
    params = dense_params(rng, 16, 32, 32) | {"query": normal(rng, 32, scale=0.2), "out": normal(rng, 32, 8, scale=0.2)}
    return params, {"x": normal(rng, 16, 128, 16), "y": normal(rng, 16, 8)}


def mean_by_ones(net, params, batch):
    """The mean of 32,768 rows as a product with `ones((1, n))`, subtracted from them."""
    h = net.mlp(params, batch["x"])
    mean = jnp.ones((1, len(h))) @ h / len(h)
    spread = jnp.ones((1, len(h))) @ (h - mean) ** 2 / len(h)
    return mean_square(mean - batch["mean"]) + mean_square(spread - batch["spread"])


def mean_by_ones_data(rng):
    params = dense_params(rng, 16, 16, 8)
    params["b1"] = params["b1"] + 3
    return params, {"x": normal(rng, 32_768, 16), "mean": normal(rng, 8), "spread": uniform(rng, 1, 3, 8)}


def survival(net, params, batch):
    """The likelihood of a death in one of 100 intervals: a difference of exponentials of summed hazards."""
    hazards = jax.nn.softplus(net.mlp(params, batch["x"]) - 2)
    alive = jnp.exp(-hazards @ jnp.triu(jnp.ones((100, 100), hazards.dtype)))
    alive = jnp.concatenate([jnp.ones_like(alive[:, :1]), alive], 1)
    died = jnp.take_along_axis(alive[:, :-1] - alive[:, 1:], batch["interval"][:, None], 1)
    return -jnp.mean(jnp.log(died + 1e-8))


def survival_data(rng):
    return dense_params(rng, 16, 64, 100), {"x": normal(rng, 64, 16), "interval": rng.integers(0, 60, 64)}


def molecules(net, params, batch):
    """Energies of molecules, sums over their atoms by a one-hot matrix: 7e4 each, whose errors are 30."""
    atoms = net.mlp(params, batch["x"]) + batch["level"][:, None]
    energies = (batch["member"].T @ atoms)[:, 0]
    return mean_square((energies - batch["energy"]) / 30)


def molecules_data(rng):
    member = np.eye(8, dtype=np.float32)[np.arange(2048) % 8]
    level = uniform(rng, -400, -200, 2048)
    energy = (member.T @ level.astype(np.float64) + normal(rng, 8, scale=30.0)).astype(np.float32)
    batch = {"x": normal(rng, 2048, 16), "level": level, "member": member, "energy": energy}
    params = dense_params(rng, 16, 32, 1)
    return params | {"w1": params["w1"] * 0.1, "b1": params["b1"] * 0}, batch


def energy_model(net, params, batch):
    """Forces from an energy, `vdot` of springs and a network, that also counts itself: a gradient of a gradient."""

    def energy(x):
        return 0.5 * jnp.vdot(x, batch["stiff"] * x) + net.mlp(params, x / 10)[0]

    energies, forces = jax.vmap(jax.value_and_grad(energy))(batch["x"])
    return mean_square(energies - batch["energy"]) + mean_square((forces - batch["force"]) / 0.1)


def energy_model_data(rng):
    x, stiff = normal(rng, 64, 32, scale=10.0), uniform(rng, 1, 3, 32)
    energy = 0.5 * np.sum(x.astype(np.float64) ** 2 * stiff, -1) + rng.standard_normal(64)
    force = x * stiff + 0.1 * rng.standard_normal((64, 32))
    batch = {"x": x, "stiff": stiff, "energy": energy.astype(np.float32), "force": force.astype(np.float32)}
    return dense_params(rng, 32, 64, 1), batch


def hopfield(net, params, batch):
    """Noise contrast of energies `s @ W @ s / 2 + b @ s` (Gutmann and Hyvarinen 2010) of features of data and noise."""

    def energy(s):
        return -0.5 * jnp.einsum("ni,ij,nj->n", s, params["couplings"], s) - s @ params["field"]

    states = jnp.tanh(net.mlp(params, batch["x"]))
    energies = energy(states)
    return jnp.mean(jax.nn.softplus(energies[:128])) + jnp.mean(jax.nn.softplus(-energies[128:]))


def hopfield_data(rng):
    couplings = normal(rng, 32, 32, scale=0.2)
    params = dense_params(rng, 32, 64, 32) | {"couplings": couplings + couplings.T, "field": normal(rng, 32)}
    return params, {"x": normal(rng, 256, 32)}


def barlow_twins(net, params, batch):
    """The cross-correlation of two views (Zbontar et al. 2021), 32 x 32 from 512 rows: two different values."""

    def scaled(z):
        return (z - jnp.mean(z, 0)) / jnp.std(z, 0)

    one, two = scaled(net.mlp(params, batch["one"])), scaled(net.mlp(params, batch["two"]))
    c = one.T @ two / len(one)
    diagonal = jnp.diag(c)
    return jnp.sum((1 - diagonal) ** 2) + 0.005 * (jnp.sum(c**2) - jnp.sum(diagonal**2))


def barlow_twins_data(rng):
    x = normal(rng, 512, 32)
    views = {name: x + normal(rng, 512, 32, scale=0.1) for name in ("one", "two")}
    return dense_params(rng, 32, 64, 32), views


def spectral_norm(net, params, batch):
    """A layer over its largest singular value, by 20 scanned power iterations (Miyato et al. 2018)."""
    w = params["w0"]

    def step(v, _):
        v = w.T @ (w @ v)
        return v / jnp.linalg.norm(v), None

    v, _ = jax.lax.scan(step, batch["v"], None, 20)
    sigma = jnp.linalg.norm(w @ v)
    return mean_square(net.mlp(params | {"w0": w / sigma}, batch["x"]) - batch["y"]) + 0.1 * sigma


def spectral_norm_data(rng):
    v = normal(rng, 64)
    batch = {"x": normal(rng, 128, 32), "y": normal(rng, 128, 8), "v": v / np.linalg.norm(v)}
    params = dense_params(rng, 32, 64, 8)
    # A singular value well above the others: the iterations end.
    outer = np.outer(normal(rng, 32, scale=32**-0.5), v) / np.linalg.norm(v)
    return params | {"w0": (params["w0"] + 4 * outer).astype(np.float32)}, batch


# Constants of the program


def symexp(x):
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


def symlog(x):
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def value_head(net, params, batch):
    """The value of DreamerV3 (Hafner et al. 2023): softmax over 255 bins, exponentially spaced to 4.8e8."""
    bins = symexp(jnp.linspace(-20, 20, 255))
    probabilities = jax.nn.softmax(net.mlp(params, batch["x"]) - 0.5 * symlog(bins) ** 2)
    return mean_square(probabilities @ bins - batch["y"])


def value_head_data(rng):
    return dense_params(rng, 32, 64, 255), {"x": normal(rng, 64, 32), "y": uniform(rng, -3, 3, 64)}


def event_time(captured):
    """The expected time of an event on a logarithmic scale of seconds, 1 to 1e6, a table; compared in logarithms."""
    table = np.exp(np.linspace(0, 13.8, 64)).astype(np.float32)

    def loss(net, params, batch):
        seconds = jnp.asarray(table) if captured else jnp.exp(jnp.linspace(0, 13.8, 64))
        probabilities = jax.nn.softmax(net.mlp(params, batch["x"]))
        return mean_square(jnp.log(probabilities @ seconds) - batch["y"])

    return loss


def event_time_data(rng):
    return dense_params(rng, 32, 64, 64), {"x": normal(rng, 64, 32), "y": uniform(rng, 8, 12, 64)}


def boundaries(net, params, batch):
    """A soft argmax over 5,000 frames, to a frame: `softmax @ arange`."""
    scores = net.mlp(params, batch["x"])[..., 0] - ((jnp.arange(5000) - batch["guess"][:, None]) / 30) ** 2
    frame = jax.nn.softmax(scores) @ jnp.arange(5000.0)
    return mean_square((frame - batch["y"]) / 10)


def boundaries_data(rng):
    guess = uniform(rng, 1000, 4900, 4)
    return dense_params(rng, 16, 16, 1), {
        "x": normal(rng, 4, 5000, 16),
        "guess": guess,
        "y": guess + normal(rng, 4, scale=5.0),
    }


def keypoints(net, params, batch):
    """Integral regression of key points (Sun et al. 2018): heat maps times the pixels' places in a 512 x 512 image."""
    heat = convolutions(net, params, batch["image"])
    n, h, w, points = heat.shape
    probabilities = jax.nn.softmax(heat.reshape(n, h * w, points), axis=1).reshape(heat.shape)
    places = jnp.arange(w) * 16 + 7.5
    x = jnp.einsum("bhwk,w->bk", probabilities, places)
    y = jnp.einsum("bhwk,h->bk", probabilities, places)
    return mean_square((jnp.stack([x, y], -1) - batch["y"]) / 10)


def keypoints_data(rng):
    params = kernel_params(rng, 3, 16, 4)
    params["k1"] *= 2
    return params, {"image": normal(rng, 2, 32, 32, 3), "y": 256 + normal(rng, 2, 4, 2, scale=40.0)}


def categorical_values(net, params, batch):
    """C51 (Bellemare et al. 2017): 51 atoms from -10 to 10, the best of six actions by expectation, cross entropy."""
    atoms = jnp.linspace(-10, 10, 51)
    logits = net.mlp(params, batch["x"]).reshape(-1, 6, 51)
    values = jax.nn.softmax(logits) @ atoms
    entropy = -jnp.sum(batch["target"] * jax.nn.log_softmax(logits[:, 0]), -1)
    return jnp.mean(entropy) + mean_square(jax.nn.logsumexp(values, -1) - batch["best"])


def categorical_values_data(rng):
    target = rng.dirichlet(np.ones(51), 64).astype(np.float32)
    return dense_params(rng, 32, 64, 306), {"x": normal(rng, 64, 32), "target": target, "best": normal(rng, 64)}


YEARS = np.arange(1900, 2027)


def year_of_photo(net, params, batch):
    """The expected year of a photograph (Rothe et al. 2018 for ages): softmax over years, a captured table."""
    years = jax.nn.softmax(2 * net.mlp(params, batch["x"])) @ YEARS.astype(np.float32)
    return mean_square((years - batch["y"]) / 10)


def year_of_photo_data(rng):
    return dense_params(rng, 32, 64, len(YEARS)), {"x": normal(rng, 64, 32), "y": uniform(rng, 1950, 1980, 64)}


def trajectories(net, params, batch):
    """Predicted polynomials of degree 3 on 64 known times, 0 to 63 seconds: cubes to 250,047."""
    powers = jnp.vander(jnp.arange(64.0), 4, increasing=True)
    scale = jnp.array([1.0, 0.1, 1e-3, 2e-5])
    paths = (net.mlp(params, batch["x"]).reshape(-1, 2, 4) * scale) @ powers.T
    return mean_square(paths - batch["y"])


def trajectories_data(rng):
    return dense_params(rng, 32, 64, 8), {"x": normal(rng, 64, 32), "y": normal(rng, 64, 2, 64)}


def spectrum(net, params, batch):
    """A logarithmic spectrum by a matrix of cosines and sines: weak lines beside a strong one."""
    turns = jnp.outer(jnp.arange(129), jnp.arange(256)) % 256
    wave = batch["wave"] + 0.02 * net.mlp(params, batch["wave"] / 100)
    real, imaginary = wave @ jnp.cos(2 * jnp.pi * turns / 256).T, wave @ jnp.sin(2 * jnp.pi * turns / 256).T
    return mean_square(jnp.log(real**2 + imaginary**2 + 1) - batch["y"])


def spectrum_data(rng):
    phase = uniform(rng, 0, 6.28, 32, 1)
    wave = 100 * np.cos(2 * np.pi * 5 * np.arange(256) / 256 + phase) + 0.3 * rng.standard_normal((32, 256))
    y = np.log(np.abs(np.fft.rfft(wave)) ** 2 + 1) + 0.3 * rng.standard_normal((32, 129))
    return dense_params(rng, 256, 32, 256), {"wave": wave.astype(np.float32), "y": y.astype(np.float32)}


def earth_mover(net, params, batch):
    """The earth mover's distance of histograms of 500 bins, cumulated by a triangle of ones, and their means."""
    triangle = jnp.tril(jnp.ones((500, 500)))
    probabilities = jax.nn.softmax(net.mlp(params, batch["x"]))
    distance = jnp.mean(jnp.sum(jnp.sqrt(((probabilities - batch["y"]) @ triangle.T) ** 2 + 1e-8), -1))
    return distance + mean_square((probabilities - batch["y"]) @ (jnp.arange(500) + 0.5)) / 100


def earth_mover_data(rng):
    centre = rng.uniform(220, 280, (64, 1))
    y = np.exp(-(((np.arange(500) - centre) / 60) ** 2))
    params = dense_params(rng, 32, 64, 500)
    return params, {"x": normal(rng, 64, 32), "y": (y / y.sum(1, keepdims=True)).astype(np.float32)}


# Of data


def fourier_features(net, params, batch):
    """Random Fourier features (Rahimi and Recht 2007) of 32 measured quantities; the frequencies are in the batch."""
    angles = batch["x"] @ batch["frequencies"] + batch["phase"]
    return mean_square(net.mlp(params, jnp.sqrt(2 / 64) * jnp.cos(angles)) - batch["y"])


def fourier_features_data(rng):
    x, phase = 10 + 3 * normal(rng, 256, 32), uniform(rng, 0, 6.28, 64)
    frequencies = normal(rng, 32, 64, scale=0.3)
    return dense_params(rng, 64, 32, 4), {"x": x, "frequencies": frequencies, "phase": phase, "y": normal(rng, 256, 4)}


def filterbank(net, params, batch):
    """A log-mel spectrogram, its filters in the batch: a power spectrum spans ten decades."""
    power = jnp.abs(jnp.fft.rfft(batch["wave"])) ** 2
    energies = jnp.log(jnp.maximum(power @ batch["filters"], 1e-10))
    return mean_square(net.mlp(params, energies / 10) - batch["y"])


def filterbank_data(rng):
    loudness = 10 ** rng.uniform(-6, 1, (64, 1))
    wave = loudness * np.cos(rng.uniform(0.1, 3, (64, 1)) * np.arange(256)) * np.hanning(256)
    centres = np.linspace(4, 120, 24)
    filters = np.maximum(0, 1 - np.abs(np.arange(129)[:, None] - centres) / 8).astype(np.float32)
    return dense_params(rng, 24, 32, 4), {"wave": wave.astype(np.float32), "filters": filters, "y": normal(rng, 64, 4)}


def transport(net, params, batch):
    """Sinkhorn's iterations (Cuturi 2013) for a batch of histograms and one kernel of costs, as input of layers."""

    def step(v, _):
        u = batch["a"] / (v @ batch["kernel"].T)
        return batch["b"] / (u @ batch["kernel"]), None

    v = jax.lax.scan(step, jnp.ones_like(batch["b"]), None, 20)[0]
    return mean_square(net.mlp(params, jnp.log(v)) - batch["y"])


def transport_data(rng):
    a, b = rng.dirichlet(np.ones(32), 64), rng.dirichlet(np.ones(32), 64)
    places = np.linspace(0, 1, 32)
    kernel = np.exp(-((places[:, None] - places) ** 2) / 0.05)
    batch = {"a": a, "b": b, "kernel": kernel, "y": rng.standard_normal((64, 4))}
    return dense_params(rng, 32, 32, 4), {name: value.astype(np.float32) for name, value in batch.items()}


# Probabilities under a logarithm, of which many are below 6e-8


def pointer_network(net, params, batch):
    """Words copied from a source (Gu et al. 2016): attention over its places, times what word stands at each."""
    queries, keys = net.dot(batch["h"], params["query"]), net.dot(batch["source"], params["key"])
    attention = jax.nn.softmax(net.dot(queries, jnp.swapaxes(keys, -1, -2)) / 32**0.5)
    copied = attention @ jax.nn.one_hot(batch["words"], 20)
    return -jnp.mean(jnp.log(jnp.take_along_axis(copied, batch["y"][..., None], -1) + 1e-12))


def pointer_network_data(rng):
    params = {name: normal(rng, 32, 32, scale=0.5) for name in ("query", "key")}
    words = np.stack([rng.permutation(20) for _ in range(8)])
    batch = {"h": normal(rng, 8, 10, 32), "source": normal(rng, 8, 20, 32), "words": words}
    return params, batch | {"y": rng.integers(0, 20, (8, 10))}


def topic_model(net, params, batch):
    """A mixture of topics (ProdLDA, Srivastava and Sutton 2017): a network's weights times learned probabilities."""
    weights = jax.nn.softmax(net.mlp(params, jnp.log1p(batch["counts"])))
    words = weights @ jax.nn.softmax(params["topics"])
    return -jnp.mean(jnp.sum(batch["counts"] * jnp.log(words + 1e-10), -1))


def topic_model_data(rng):
    params = dense_params(rng, 200, 32, 16) | {"topics": normal(rng, 16, 200, scale=8.0)}
    return params, {"counts": rng.poisson(0.2, (32, 200)).astype(np.float32)}


def word_alignment(net, params, batch):
    """IBM's first model (Brown et al. 1993): the mean over a sentence of what each of its words translates to."""
    table = jax.nn.softmax(net.dot(params["from"], params["to"]))
    mixed = jnp.mean(jax.nn.one_hot(batch["sentence"], 40), 1) @ table
    return -jnp.mean(jnp.log(jnp.take_along_axis(mixed, batch["translation"], -1) + 1e-12))


def word_alignment_data(rng):
    params = {"from": normal(rng, 40, 24, scale=3.0), "to": normal(rng, 24, 60)}
    return params, {"sentence": rng.integers(0, 40, (8, 20)), "translation": rng.integers(0, 60, (8, 16))}


def kernel_average(net, params, batch):
    """Kernel regression on learned features (Nadaraya and Watson 1964): targets of about 50, each from the others."""
    z = net.mlp(params, batch["x"])
    kernel = jnp.exp(-jnp.sum((z[:, None] - z) ** 2, -1)) * (1 - jnp.eye(len(z)))
    return mean_square(kernel @ batch["y"] / jnp.sum(kernel, 1, keepdims=True) - batch["y"])


def kernel_average_data(rng):
    x = normal(rng, 64, 16)
    return dense_params(rng, 16, 32, 4), {"x": x, "y": 50 + np.sin(x[:, :2])}


CASES = (
    Case("policy_gradient", 4, policy_gradient, policy_gradient_data),
    Case("distribution_head", 4, distribution_head, distribution_head_data),
    Case("attention_pooling", 4, attention_pooling, attention_pooling_data),
    Case("mean_by_ones", 4, mean_by_ones, mean_by_ones_data),
    Case("molecules", 4, molecules, molecules_data),
    Case("survival", 4, survival, survival_data),
    Case(
        "energy_model",
        4,
        energy_model,
        energy_model_data,
        note="second order; the operands cancel, not only the result",
    ),
    Case("hopfield", 4, hopfield, hopfield_data),
    Case("barlow_twins", 4, barlow_twins, barlow_twins_data),
    Case("spectral_norm", 4, spectral_norm, spectral_norm_data),
    Case("value_head", 5, value_head, value_head_data),
    Case("event_time_made", 5, event_time(False), event_time_data),
    Case("event_time_captured", 5, event_time(True), event_time_data),
    Case("boundaries", 5, boundaries, boundaries_data),
    Case("keypoints", 5, keypoints, keypoints_data),
    Case("categorical_values", 5, categorical_values, categorical_values_data),
    Case("year_of_photo", 5, year_of_photo, year_of_photo_data),
    Case("trajectories", 5, trajectories, trajectories_data),
    Case("spectrum", 5, spectrum, spectrum_data, note="float16 holds the constants, rounded"),
    Case("earth_mover", 5, earth_mover, earth_mover_data),
    Case("fourier_features_of_data", 8, fourier_features, fourier_features_data),
    Case("filterbank", 8, filterbank, filterbank_data),
    Case("transport", 8, transport, transport_data),
    Case("pointer_network", 8, pointer_network, pointer_network_data),
    Case("topic_model", 8, topic_model, topic_model_data),
    Case("kernel_average", 8, kernel_average, kernel_average_data, scale=16.0),
    Case("word_alignment", 8, word_alignment, word_alignment_data),
)
