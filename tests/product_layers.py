"""Cases whose products are layers, though each looks like a product that is not: they must stay in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from product_case import NARROW, Case, convolutions, dense_params, kernel_params, mean_square, normal, uniform

TEACHER = dense_params(np.random.default_rng(11), 32, 64, 16)


def adapter(net, params, batch):
    """A low-rank adapter of rank 4 beside a frozen layer (Hu et al. 2022): `x @ W + (x @ A) @ B`."""
    h = net.dense(batch["x"], batch["frozen"]) + net.dot(net.dot(batch["x"], params["down"]), params["up"])
    return mean_square(net.mlp(params, jnp.tanh(h)) - batch["y"])


def merged_adapter(net, params, batch):
    """A low-rank adapter that is added to the weight: `x @ (W + A @ B)`."""
    weight = batch["frozen"] + net.dot(params["down"], params["up"])
    return mean_square(net.mlp(params, jnp.tanh(net.dense(batch["x"], weight))) - batch["y"])


def adapter_data(rng):
    params = dense_params(rng, 64, 8) | {"down": normal(rng, 64, 4, scale=0.1), "up": normal(rng, 4, 64, scale=0.3)}
    return params, {"x": normal(rng, 128, 64), "frozen": normal(rng, 64, 64, scale=0.125), "y": normal(rng, 128, 8)}


def small_head(net, params, batch):
    """A classifier of 10 classes: the backward product of its head contracts 10 numbers."""
    logits = net.mlp(params, batch["x"])
    return -jnp.mean(jnp.sum(batch["target"] * jax.nn.log_softmax(logits), -1))


def small_head_data(rng):
    target = np.eye(10, dtype=np.float32)[rng.integers(0, 10, 128)]
    return dense_params(rng, 32, 64, 10), {"x": normal(rng, 128, 32), "target": target}


def two_towers(net, params, batch):
    """Contrastive logits of two encoders (Radford et al. 2021)."""

    def unit(x):
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    one, two = unit(net.mlp(params, batch["x"], "one_")), unit(net.mlp(params, batch["y"], "two_"))
    logits = net.dot(one, two.T) * jnp.exp(params["temperature"])
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(logits)) + jnp.diag(jax.nn.log_softmax(logits.T))) / 2


def two_towers_data(rng):
    params = dense_params(rng, 32, 64, 32, name="one_") | dense_params(rng, 32, 64, 32, name="two_")
    x = normal(rng, 128, 32)
    return params | {"temperature": np.float32(1.5)}, {"x": x, "y": x + normal(rng, 128, 32)}


def distillation(captured):
    """A student beside a teacher that is frozen, passed as data or captured."""

    def loss(net, params, batch):
        teacher = jax.tree.map(jnp.asarray, TEACHER) if captured else batch["teacher"]
        wanted = jax.nn.softmax(jax.lax.stop_gradient(net.mlp(teacher, batch["x"])))
        return -jnp.mean(jnp.sum(wanted * jax.nn.log_softmax(net.mlp(params, batch["x"])), -1))

    return loss


def distillation_data(captured):
    def data(rng):
        batch = {"x": normal(rng, 128, 32)}
        return dense_params(rng, 32, 32, 16), batch if captured else batch | {"teacher": TEACHER}

    return data


def squared_relu(net, params, batch):
    """A Transformer's block of layers with squared relu between them (So et al. 2021)."""
    h = jax.nn.relu(net.dense(batch["x"], params["w0"], params["b0"])) ** 2
    return mean_square(batch["x"] + net.dense(h, params["w1"], params["b1"]) - batch["y"])


def attention(net, params, batch):
    """Causal attention, queries and keys of two projections of one value."""
    n, length, width = batch["x"].shape
    q, k, v = (net.dense(batch["x"], params[name]).reshape(n, length, 4, width // 4) for name in "qkv")
    scores = net.einsum("bqhd,bkhd->bhqk", q, k) / (width // 4) ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9))
    out = net.einsum("bhqk,bkhd->bqhd", weights, v).reshape(n, length, width)
    return mean_square(net.dense(out, params["o"]) - batch["y"])


def attention_data(rng):
    params = {name: normal(rng, 64, 64, scale=0.125) for name in "qkvo"}
    return params, {"x": normal(rng, 2, 64, 64), "y": normal(rng, 2, 64, 64)}


def embedding(net, params, batch):
    """An embedding looked up by a one-hot matrix, and its transpose as the last layer (Press and Wolf 2017)."""
    x = net.dot(jax.nn.one_hot(batch["tokens"], 64), params["table"])
    logits = net.dot(net.mlp(params, x), params["table"].T)
    return -jnp.mean(jnp.sum(jax.nn.one_hot(batch["next"], 64) * jax.nn.log_softmax(logits), -1))


def embedding_data(rng):
    params = dense_params(rng, 32, 64, 32) | {"table": normal(rng, 64, 32, scale=0.3)}
    return params, {"tokens": rng.integers(0, 64, 256), "next": rng.integers(0, 64, 256)}


def depthwise(net, params, batch):
    """A learned depthwise convolution of 5 x 5 between pointwise layers (Liu et al. 2022)."""
    x = net.conv(batch["image"], params["k0"], params["c0"])
    x = x + net.conv(x, params["wide"], groups=16)
    x = jnp.mean(jax.nn.gelu(net.dense(x, params["w0"], params["b0"])), (1, 2))
    return mean_square(net.dense(x, params["w1"], params["b1"]) - batch["y"])


def depthwise_data(rng):
    params = kernel_params(rng, 3, 16) | dense_params(rng, 16, 32, 8) | {"wide": normal(rng, 5, 5, 1, 16, scale=0.2)}
    return params, {"image": normal(rng, 2, 24, 24, 3), "y": normal(rng, 2, 8)}


def grey_image(net, params, batch):
    """The first convolution of grey pictures: 9 numbers contracted."""
    x = jnp.mean(jnp.tanh(convolutions(net, params, batch["image"])), (1, 2))
    return mean_square(net.mlp(params, x) - batch["y"])


def grey_image_data(rng):
    params = kernel_params(rng, 1, 16, 16) | dense_params(rng, 16, 8)
    return params, {"image": uniform(rng, 0, 1, 4, 28, 28, 1), "y": normal(rng, 4, 8)}


def experts(net, params, batch):
    """Tokens sent to four experts and back by einsum with a matrix of gates (Lepikhin et al. 2021)."""
    x = batch["x"]
    gates = jax.nn.softmax(net.dense(x, params["gate"]))
    best = jax.nn.one_hot(jnp.argmax(gates + batch["jitter"], -1), 4)
    place = jnp.cumsum(best, 0) * best - 1
    send = best[..., None] * jax.nn.one_hot(place.astype(int), 48)
    h = net.einsum("nec,nd->ecd", send, x)
    h = net.einsum("ecf,efd->ecd", jnp.tanh(net.einsum("ecd,edf->ecf", h, params["in"])), params["out"])
    return mean_square(x + net.einsum("nec,ecd->nd", send * gates[..., None], h) - batch["y"])


def experts_data(rng):
    params = {"gate": normal(rng, 32, 4, scale=0.1), "in": normal(rng, 4, 32, 64, scale=0.2)}
    params["out"] = normal(rng, 4, 64, 32, scale=0.2)
    # The choice of experts is given: a gate that rounds the other way would not be an error of a product.
    jitter = 100 * np.eye(4, dtype=np.float32)[rng.integers(0, 4, 128)]
    return params, {"x": normal(rng, 128, 32), "jitter": jitter, "y": normal(rng, 128, 32)}


class Encoder(nn.Module):
    """Convolutions, a layer of attention over pixels, a head of 10: as Flax has them."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Conv(16, (3, 3), strides=2, dtype=self.dtype)(x))
        x = x.reshape(x.shape[0], -1, 16)
        x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(jnp.mean(x, 1))


def flax_encoder(net, params, batch):
    """A Flax model; by hand, its layers have Flax's own `dtype=`."""
    # `dtype=None` follows the parameters, which are float64 in the reference.
    logits = jnp.asarray(Encoder(net.dtype).apply({"params": params}, batch["image"]))
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return -jnp.mean(jnp.sum(batch["target"] * jax.nn.log_softmax(logits), -1))


def flax_encoder_data(rng):
    image = normal(rng, 8, 16, 16, 3)
    shapes = jax.eval_shape(Encoder().init, jax.random.key(0), image)["params"]
    around = lambda path: 1.0 if "scale" in str(path[-1]) else 0.0  # noqa: E731
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: around(path) + normal(rng, *x.shape, scale=max(x.size // x.shape[-1], 16) ** -0.5), shapes
    )
    return params, {"image": image, "target": np.eye(10, dtype=np.float32)[rng.integers(0, 10, 8)]}


def learned_filters(net, params, batch):
    """A learned convolution of one channel each way: kernel and scale are parameters, so it is a layer."""
    line = jnp.tanh(params["line"])
    kernel = (line[:, None] * line[None])[:, :, None, None] * params["gain"]
    x = net.conv(batch["image"], jnp.reshape(kernel, (5, 5, 1, 8)))
    return mean_square(x - batch["y"])


def learned_filters_data(rng):
    params = {"line": normal(rng, 5), "gain": normal(rng, 8)}
    return params, {"image": normal(rng, 2, 24, 24, 1), "y": normal(rng, 2, 24, 24, 8)}


CASES = (
    Case("adapter", NARROW, adapter, adapter_data, low_share=1.0),
    Case("merged_adapter", NARROW, merged_adapter, adapter_data, low_share=1.0),
    Case("small_head", NARROW, small_head, small_head_data, low_share=1.0),
    Case("two_towers", NARROW, two_towers, two_towers_data, low_share=1.0),
    Case("teacher_as_data", NARROW, distillation(False), distillation_data(False), low_share=1.0),
    Case("teacher_captured", NARROW, distillation(True), distillation_data(True), low_share=1.0),
    Case(
        "squared_relu",
        NARROW,
        squared_relu,
        lambda rng: (dense_params(rng, 32, 128, 32), {"x": normal(rng, 128, 32), "y": normal(rng, 128, 32)}),
        low_share=1.0,
    ),
    Case("attention", NARROW, attention, attention_data, low_share=1.0),
    Case("embedding", NARROW, embedding, embedding_data, low_share=1.0),
    Case("depthwise", NARROW, depthwise, depthwise_data, low_share=1.0),
    Case("grey_image", NARROW, grey_image, grey_image_data, low_share=1.0),
    Case("experts", NARROW, experts, experts_data, low_share=1.0),
    Case("flax_encoder", NARROW, flax_encoder, flax_encoder_data, low_share=1.0),
    Case("learned_filters", NARROW, learned_filters, learned_filters_data, low_share=1.0),
)
