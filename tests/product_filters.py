"""Cases of classes 6 and 7: fixed filters of one channel each, and sums written as trees."""

import jax
import jax.numpy as jnp
import numpy as np
from product_case import Case, conv, convolutions, dense_params, kernel_params, mean_square, normal, smooth_images

# Fixed filters


def each_channel(x, kernel):
    """The convolution of each channel of `[n, h, w, c]` with one kernel `[kh, kw]`."""
    c = x.shape[-1]
    kernel = jnp.asarray(kernel, x.dtype)[:, :, None, None]
    return conv(x, jnp.tile(kernel, (1, 1, 1, c)), groups=c)


def window(size, sigma):
    """A Gaussian window `[size, size]`, made in the program."""
    line = jnp.exp(-0.5 * ((jnp.arange(size) - size // 2) / sigma) ** 2)
    line = line / jnp.sum(line)
    return line[:, None] * line[None]


def similarity(peak):
    """Structural similarity (Wang et al. 2004) of an autoencoder's picture, 0 to `peak`: variances within 11 x 11."""

    def loss(net, params, batch):
        blur = lambda x: each_channel(x, window(11, 1.5))  # noqa: E731
        x, y = peak * jax.nn.sigmoid(convolutions(net, params, batch["image"])), peak * batch["image"]
        mean_x, mean_y = blur(x), blur(y)
        var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
        both = blur(x * y) - mean_x * mean_y
        c1, c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2
        ratio = (2 * mean_x * mean_y + c1) * (2 * both + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
        return 1 - jnp.mean(ratio)

    return loss


def similarity_data(rng):
    return kernel_params(rng, 3, 16, 3), {"image": smooth_images(rng, 2, 32, 3)}


SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], np.float32)


def edges(net, params, batch):
    """Sobel edges of a restored picture in 0 to 255, beside those of the clean one; the network predicts the noise."""
    restored = batch["noisy"] + 2 * convolutions(net, params, batch["noisy"] / 255)
    error = restored - batch["clean"]
    across, down = each_channel(restored, SOBEL) - each_channel(batch["clean"], SOBEL), each_channel(error, SOBEL.T)
    return jnp.mean(jnp.sqrt(across**2 + down**2 + 1))


def edges_data(rng):
    clean = 255 * smooth_images(rng, 2, 32, 3)
    return kernel_params(rng, 3, 16, 3), {"clean": clean, "noisy": clean + normal(rng, 2, 32, 32, 3, scale=2.0)}


def poisson(net, params, batch):
    """A corrected solution of Poisson's equation: the five-point Laplacian, 64 points a side, against its source."""
    laplacian = jnp.array([[0, 1, 0], [1, -4, 1], [0, 1, 0.0]]) * 64**2
    u = batch["coarse"] + 1e-3 * convolutions(net, params, batch["coarse"])
    residual = each_channel(u, laplacian) - batch["source"]
    return mean_square(residual[:, 1:-1, 1:-1])


def poisson_data(rng):
    coarse = smooth_images(rng, 2, 64, 1)
    source = 64**2 * sum(np.roll(coarse, by, axis) - coarse for axis in (1, 2) for by in (-1, 1))
    return kernel_params(rng, 1, 16, 1), {"coarse": coarse, "source": source + normal(rng, 2, 64, 64, 1)}


def total_variation(net, params, batch):
    """A denoised picture: near the noisy one, with a small total variation by two filters of two taps."""
    clean = batch["noisy"] + 0.1 * convolutions(net, params, batch["noisy"])
    along, down = each_channel(clean, np.array([[1, -1]], np.float32)), each_channel(clean, np.array([[1], [-1.0]]))
    return mean_square(10 * (clean - batch["noisy"])) + jnp.mean(jnp.sqrt(along**2 + down**2 + 1e-4))


def total_variation_data(rng):
    noisy = 1 + smooth_images(rng, 2, 48, 3) + normal(rng, 2, 48, 48, 3, scale=0.01)
    return kernel_params(rng, 3, 16, 3), {"noisy": noisy}


def deblurring(net, params, batch):
    """Deconvolution of one channel: the known blur of what a network restored, minus the picture, over the noise."""
    restored = batch["blurred"] + 0.1 * convolutions(net, params, batch["blurred"])
    again = conv(restored, batch["blur"])
    return mean_square((again - batch["blurred"]) / 0.02)


def deblurring_data(rng):
    line = np.exp(-0.5 * ((np.arange(9) - 4) / 1.5) ** 2)
    blur = (np.outer(line, line) / line.sum() ** 2).astype(np.float32)[:, :, None, None]
    blurred = 2 + smooth_images(rng, 2, 48, 1) + normal(rng, 2, 48, 48, 1, scale=0.02)
    return kernel_params(rng, 1, 16, 1), {"blurred": blurred, "blur": blur}


def speech(net, params, batch):
    """Enhanced speech after a high-pass of 33 taps and pre-emphasis: hum of ten times its size is in the recording."""

    def filtered(wave, taps):
        return conv(wave[:, None, :, None], taps[None, :, None, None])[:, 0, :, 0]

    taps = jnp.sinc(0.1 * (jnp.arange(33) - 16)) * jnp.hanning(33)
    taps = -taps / jnp.sum(taps) + (jnp.arange(33) == 16)
    frames = batch["wave"].reshape(-1, 64)
    wave = batch["wave"] + 0.1 * net.mlp(params, frames / 10).reshape(batch["wave"].shape)
    emphasised = filtered(filtered(wave, taps), jnp.array([-0.97, 1.0, 0.0]))
    return mean_square(emphasised - batch["clean"])


def speech_data(rng):
    hum = 10 * np.sin(0.02 * np.arange(2048) + rng.uniform(0, 6, (4, 1)))
    wave = hum + 0.3 * rng.standard_normal((4, 2048))
    return dense_params(rng, 64, 32, 64), {"wave": wave.astype(np.float32), "clean": normal(rng, 4, 2048, scale=0.3)}


def scale_space(net, params, batch):
    """Differences of Gaussians: a picture blurred four times in a scan, rematerialised; each difference is compared."""

    @jax.checkpoint
    def blur(x, target):
        blurred = each_channel(x, window(7, 1.2))
        return blurred, mean_square(10 * (x - blurred) - target)

    picture = 2 * jax.nn.sigmoid(batch["image"] + 0.2 * convolutions(net, params, batch["image"]))
    _, losses = jax.lax.scan(blur, picture, batch["bands"])
    return jnp.sum(losses)


def scale_space_data(rng):
    return kernel_params(rng, 3, 16, 3), {
        "image": smooth_images(rng, 2, 32, 3),
        "bands": normal(rng, 4, 2, 32, 32, 3, scale=0.3),
    }


def blurred_pooling(net, params, batch):
    """A network whose pooling blurs first (Zhang 2019): a fixed filter between layers, where nothing cancels."""
    line = jnp.array([1, 2, 1.0]) / 4
    x = jax.nn.gelu(net.conv(batch["image"], params["k0"], params["c0"]))
    x = each_channel(x, line[:, None] * line[None])[:, ::2, ::2]
    x = jnp.mean(jax.nn.gelu(net.conv(x, params["k1"], params["c1"])), (1, 2))
    return mean_square(net.mlp(params, x) - batch["y"])


def blurred_pooling_data(rng):
    params = kernel_params(rng, 3, 16, 32) | dense_params(rng, 32, 8)
    return params, {"image": normal(rng, 4, 32, 32, 3), "y": normal(rng, 4, 8)}


# Sums as trees


def sequences(*widths, batch=2, length=4096, start=0.0):
    """Sequences, the parameters of a network for them, whose results lie around `start`, and targets."""

    def data(rng):
        params = dense_params(rng, *widths)
        last = f"b{len(widths) - 2}"
        params[last] = params[last] + np.float32(start)
        return params, {"x": normal(rng, batch, length, widths[0]), "y": normal(rng, batch, length, widths[-1])}

    return data


def sliding_mean(net, params, batch):
    """A signal over its sliding mean of 64, by differences of a cumulative sum by `associative_scan`."""
    x = net.mlp(params, batch["x"])
    total = jax.lax.associative_scan(jnp.add, x, axis=1)
    mean = (total[:, 64:] - total[:, :-64]) / 64
    return mean_square(x[:, 64:] / mean - 1 - 0.1 * batch["y"][:, 64:])


def halved_sum(net, params, batch):
    """The mean and variance of 65,536 numbers, each a sum that adds one half to the other until one is left."""

    def total(x):
        while len(x) > 1:
            x = x[: len(x) // 2] + x[len(x) // 2 :]
        return x[0]

    x = net.mlp(params, batch["x"]).reshape(-1, 4)
    mean = total(x) / len(x)
    variance = total((x - mean) ** 2) / len(x)
    return mean_square(mean - 3.1) + mean_square(variance - 1)


def paired_sum(net, params, batch):
    """Sequences summed by pairs, even to odd, then classified by what differs from the mean of all."""
    x = net.mlp(params, batch["x"])
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    pooled = x[:, 0] / batch["x"].shape[1]
    pooled = 30 * (pooled - jnp.mean(pooled, 0))
    return mean_square(net.dense(pooled, params["out"]) - batch["y"][:, 0])


def paired_sum_data(rng):
    params, batch = sequences(16, 32, 16, batch=16, length=512, start=2.0)(rng)
    return params | {"out": normal(rng, 16, 16, scale=0.25)}, batch


def box_filter(net, params, batch):
    """Local contrast by an integral image: cumulative sums along both axes, four corners, boxes of 8 x 8."""
    x = 2 + net.conv(batch["image"], params["k0"], params["c0"])
    total = jax.lax.associative_scan(jnp.add, jax.lax.associative_scan(jnp.add, x, axis=1), axis=2)
    box = total[:, 8:, 8:] - total[:, :-8, 8:] - total[:, 8:, :-8] + total[:, :-8, :-8]
    return mean_square(x[:, 8:, 8:] - box / 64 - batch["y"][:, 8:, 8:])


def box_filter_data(rng):
    return kernel_params(rng, 3, 8), {"image": normal(rng, 2, 32, 32, 3), "y": normal(rng, 2, 32, 32, 8)}


def decay_mask(net, params, batch):
    """The decay of a state space (Dao and Gu 2024): exponentials of differences of sums of logarithms, times scores."""
    decay = -jax.nn.softplus(net.dense(batch["x"], params["decay"]))
    total = jnp.moveaxis(jax.lax.associative_scan(jnp.add, decay, axis=1), 2, 1)
    exponent = total[..., :, None] - total[..., None, :]
    length = total.shape[-1]
    mask = jnp.exp(jnp.where(jnp.tril(jnp.ones((length, length), bool)), exponent, -1e9))
    q, k, v = (net.dense(batch["x"], params[name]).reshape(*batch["x"].shape[:2], 4, -1) for name in "qkv")
    scores = net.einsum("bqhd,bkhd->bhqk", q, k) * mask
    return mean_square(net.einsum("bhqk,bkhd->bqhd", scores, v).reshape(batch["x"].shape) / 4 - batch["y"])


def decay_mask_data(rng):
    params = {name: normal(rng, 32, 32, scale=32**-0.5) for name in "qkv"} | {"decay": normal(rng, 32, 4, scale=0.1)}
    return params, {"x": normal(rng, 1, 256, 32), "y": normal(rng, 1, 256, 32)}


def recurrence(net, params, batch):
    """A linear recurrence over 256 steps (Orvieto et al. 2023) by `associative_scan` of pairs, slow to forget."""

    def combine(one, two):
        return one[0] * two[0], two[0] * one[1] + two[1]

    drive = net.dense(batch["x"], params["w0"], params["b0"])
    rate = jnp.broadcast_to(jnp.exp(-jnp.exp(params["rate"])), drive.shape)
    _, states = jax.lax.associative_scan(combine, (rate, drive), axis=1)
    return mean_square(net.mlp(params, states / 10, "out_") - batch["y"])


def recurrence_data(rng):
    params = dense_params(rng, 16, 32) | dense_params(rng, 32, 16, name="out_")
    params["rate"] = rng.uniform(np.log(0.001), np.log(0.1), 32).astype(np.float32)
    return params, {"x": normal(rng, 2, 256, 16), "y": normal(rng, 2, 256, 16)}


def wavelet(net, params, batch):
    """Details of a Haar transform at eight scales: sums and differences of pairs, of a signal far from zero."""
    x = net.mlp(params, batch["x"])[..., 0]
    loss = jnp.zeros(())
    for _ in range(8):
        even, odd = x[:, 0::2], x[:, 1::2]
        loss = loss + jnp.mean(jnp.sqrt(0.5 * (even - odd) ** 2 + 1e-2))
        x = (even + odd) * 0.5**0.5
    return loss


def added_slices(net, params, batch):
    """The mean of 24 predictions of each row by Python's `sum` over slices, compared among rows."""
    x = net.mlp(params, batch["x"])[..., 0]
    mean = sum(x[:, i] for i in range(24)) / 24
    return mean_square(10 * (mean - jnp.mean(mean)) - batch["y"][:, 0, 0])


def dead_reckoning(net, params, batch):
    """A path from velocities by `associative_scan` over dictionaries, seen again as distances over 32 steps."""
    velocity = 1 + net.mlp(params, batch["x"])
    moved = {"east": velocity[..., 0], "north": velocity[..., 1]}
    path = jax.lax.associative_scan(lambda a, b: jax.tree.map(jnp.add, a, b), moved, axis=1)
    east, north = (x[:, 32:] - x[:, :-32] for x in (path["east"], path["north"]))
    return mean_square((jnp.sqrt(east**2 + north**2 + 1) - 45 - batch["y"][:, 32:, 0]) / 10)


CASES = (
    Case("similarity", 6, similarity(1.0), similarity_data),
    Case("similarity_255", 6, similarity(255.0), similarity_data),
    Case("edges", 6, edges, edges_data),
    Case("poisson", 6, poisson, poisson_data),
    Case("total_variation", 6, total_variation, total_variation_data),
    Case("deblurring", 6, deblurring, deblurring_data),
    Case("speech", 6, speech, speech_data),
    Case("scale_space", 6, scale_space, scale_space_data, note="scan and remat"),
    Case("blurred_pooling", 6, blurred_pooling, blurred_pooling_data),
    Case("sliding_mean", 7, sliding_mean, sequences(16, 32, 4, length=1024, start=4.0)),
    Case("halved_sum", 7, halved_sum, sequences(16, 16, 4, batch=1, length=65_536, start=3.0)),
    Case("paired_sum", 7, paired_sum, paired_sum_data),
    Case("box_filter", 7, box_filter, box_filter_data),
    Case("decay_mask", 7, decay_mask, decay_mask_data),
    Case("recurrence", 7, recurrence, recurrence_data),
    Case("wavelet", 7, wavelet, sequences(16, 32, 1, batch=4, length=512, start=3.0)),
    Case("added_slices", 7, added_slices, sequences(16, 32, 1, batch=64, length=24, start=2.0)),
    Case("dead_reckoning", 7, dead_reckoning, sequences(16, 32, 2, length=512)),
)
