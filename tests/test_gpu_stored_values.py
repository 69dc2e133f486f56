"""The bytes of activations, norms, heads and recurrent cells compiled for an H200, compared with Flax in float16."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from battery_tools import compile_for_gpu, figures, module_text
from flax import linen as nn

from jmp_train import DEFAULT_RULES, autocast, get_policy
from jmp_train._autocast import planner
from jmp_train._autocast.passes.rewrites import REWRITES
from jmp_train._autocast.passes.save_or_remat import _Decisions
from jmp_train._autocast.passes.separate_sums import separate_sums

pytestmark = pytest.mark.slow


class Normed(nn.Module):
    """Convolutions, each followed by BatchNorm and ReLU."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.Conv(128, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return nn.Conv(128, (1, 1), dtype=self.dtype)(x)


class Joined(nn.Module):
    """A dense block after a transition (Huang et al., 2017): every layer reads the results of all layers before it."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        x = nn.avg_pool(conv(128, (1, 1))(x), (2, 2), (2, 2))
        for _ in range(6):
            y = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            y = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(conv(128, (1, 1))(y)))
            x = jnp.concatenate([x, conv(32, (3, 3))(y)], axis=-1)
        return conv(128, (1, 1))(nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)))


class Pooled(nn.Module):
    """Convolutions with GroupNorm, each followed by an average pool."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        for _ in range(2):
            x = nn.relu(nn.GroupNorm(16, dtype=self.dtype)(nn.Conv(256, (3, 3), dtype=self.dtype)(x)))
            x = nn.avg_pool(x, (2, 2), (2, 2))
        return nn.Conv(128, (1, 1), dtype=self.dtype)(x)


class MaxPooled(nn.Module):
    """Convolutions with BatchNorm and ReLU, each followed by a max-pool of overlapping windows, as in ResNets."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        for _ in range(2):
            x = nn.Conv(128, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        return nn.Conv(128, (1, 1), dtype=self.dtype)(x)


class BehindBias(nn.Module):
    """Convolutions with a bias, each followed by a norm and an activation."""

    norm: Any
    activation: Any
    dtype: Any = None

    def after(self, x: Any):
        return self.activation(self.norm(dtype=self.dtype)(x))

    @nn.compact
    def __call__(self, x: Any):
        for _ in range(3):
            x = self.after(nn.Conv(128, (3, 3), dtype=self.dtype)(x))
        return nn.Conv(8, (1, 1), dtype=self.dtype)(x)


class ActivatedThenNormed(BehindBias):
    """The activation before the norm, as in ConvMixer (Trockman and Kolter, 2022)."""

    def after(self, x: Any):
        return self.norm(dtype=self.dtype)(self.activation(x))


class Residual(nn.Module):
    """Convolutions with a bias, each added to its input."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        for _ in range(3):
            x = nn.gelu(x + nn.Conv(128, (3, 3), dtype=self.dtype)(x))
        return nn.Conv(8, (1, 1), dtype=self.dtype)(x)


class NormedResidual(nn.Module):
    """Residual blocks that normalise the sum before its activation, as in a diffusion model's U-Net."""

    norm: Any
    activation: Any
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        x = nn.Conv(128, (3, 3), dtype=self.dtype)(x)
        for _ in range(2):
            h = self.activation(self.norm(dtype=self.dtype)(x))
            x = x + nn.Conv(128, (3, 3), dtype=self.dtype)(h)
        return nn.Conv(8, (1, 1), dtype=self.dtype)(self.norm(dtype=self.dtype)(x))


class Bottlenecks(nn.Module):
    """Residual blocks of three convolutions (He et al., 2016), squeezed and excited or not (Hu et al., 2018)."""

    activation: Any
    excited: bool
    frozen: bool = False
    dtype: Any = None

    def excitation(self, x: Any):
        conv = functools.partial(nn.Conv, kernel_size=(1, 1), dtype=self.dtype)
        weights = self.activation(conv(16)(x.mean((1, 2), keepdims=True)))
        return nn.sigmoid(conv(x.shape[-1])(weights))

    @nn.compact
    def __call__(self, x: Any):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=self.frozen, dtype=self.dtype)
        x = conv(256, (3, 3))(x)
        for _ in range(3):
            y = self.activation(norm()(conv(64, (1, 1))(x)))
            y = self.activation(norm()(conv(64, (3, 3))(y)))
            y = y * self.excitation(y) if self.excited else y
            x = self.activation(x + norm()(conv(256, (1, 1))(y)))
        return nn.Dense(16, dtype=self.dtype)(x.mean((1, 2)))


class Convolutions(nn.Module):
    """Convolutions with a bias and an activation whose derivative JAX computes with masks."""

    activation: Any
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        for _ in range(3):
            x = self.activation(nn.Conv(128, (3, 3), dtype=self.dtype)(x))
        return nn.Conv(8, (1, 1), dtype=self.dtype)(x)


class PlainResidual(nn.Module):
    """Residual blocks without norms: a relu of a convolution, then one of a convolution plus the block's input."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        conv = functools.partial(nn.Conv, 128, (3, 3), dtype=self.dtype)
        x = conv()(x)
        for _ in range(3):
            x = nn.relu(x + conv()(nn.relu(conv()(x))))
        return nn.Conv(8, (1, 1), dtype=self.dtype)(x)


class NormedThenActivated(nn.Module):
    """Convolution, LayerNorm, GELU, as in wav2vec 2.0's feature extractor and, between other layers, in ConvNeXt."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.Conv(128, (3, 3), dtype=self.dtype)(x)
            x = nn.gelu(nn.LayerNorm(dtype=self.dtype)(x))
        return x


class ResponseNorm(nn.Module):
    """The global response normalization of ConvNeXt V2 (Woo et al., 2023)."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        scale, bias = (self.param(name, nn.initializers.zeros, (x.shape[-1],)) for name in ("scale", "bias"))
        wide = x.astype(jnp.float32)
        norms = jnp.sqrt(jnp.sum(wide**2, (1, 2), keepdims=True))
        scaled = scale * (wide * (norms / (jnp.mean(norms, -1, keepdims=True) + 1e-6))) + bias + wide
        return scaled.astype(self.dtype or jnp.float32)


class Dense(nn.Module):
    """Dense layers with an activation between every two."""

    activation: Any
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = self.activation(nn.Dense(2048, dtype=self.dtype)(x))
            x = nn.Dense(512, dtype=self.dtype)(x)
        return x


class FeedForward(nn.Module):
    """Residual blocks of two dense layers without biases, as in T5 (Raffel et al., 2020)."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        for _ in range(3):
            x = x + dense(512)(nn.relu(dense(2048)(nn.RMSNorm(dtype=self.dtype)(x))))
        return dense(128)(x)


class Gated(nn.Module):
    """Residual blocks of gated linear units (Shazeer, 2020), with biases or without."""

    activation: Any
    use_bias: bool
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        dense = functools.partial(nn.Dense, use_bias=self.use_bias, dtype=self.dtype)
        for _ in range(3):
            x = x + dense(512)(self.activation(dense(1024)(x)) * dense(1024)(x))
        return dense(128)(x)


class Parts(nn.Module):
    """Dense layers whose result is split in two parts, which are multiplied."""

    parts: Any  # of the result, given the layers' dtype
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        for _ in range(3):
            left, right = self.parts(nn.Dense(2048, dtype=self.dtype)(x), self.dtype)
            x = nn.Dense(512, dtype=self.dtype)(left * right)
        return nn.Dense(128, dtype=self.dtype)(x)


def gated_parts(x: Any, dtype: Any):
    gate, value = jnp.split(x, 2, -1)
    return nn.silu(gate), value


def relu_parts(x: Any, dtype: Any):
    return jnp.split(nn.relu(x), 2, -1)


def spatial_parts(x: Any, dtype: Any):
    """Up to the product across tokens, a spatial gating unit (Liu et al., "Pay attention to MLPs", 2021)."""
    left, right = jnp.split(nn.gelu(x), 2, -1)
    return left, nn.LayerNorm(dtype=dtype)(right)


def grouped_parts(x: Any, dtype: Any):
    return jnp.split(nn.silu(nn.GroupNorm(16, dtype=dtype)(x)), 2, -1)


class PartialStages(nn.Module):
    """Stages in which half of the features pass a layer, and are joined with all (Wang et al., "CSPNet", 2020)."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        for _ in range(3):
            left, right = jnp.split(nn.silu(batch_norm(dtype=self.dtype)(dense(512)(x))), 2, -1)
            passed = nn.silu(batch_norm(dtype=self.dtype)(dense(256)(right)))
            x = dense(512)(jnp.concatenate([left, right, passed], -1))
        return dense(128)(x)


class Recurrent(nn.Module):
    """Two layers of LSTM, whose cells join their kernels."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(1024, dtype=self.dtype))(x)
        return x


class Attention(nn.Module):
    """Attention over a number of tokens that is padded for Tensor Cores."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        q, k, v = (nn.DenseGeneral((8, 64), dtype=self.dtype)(x) for _ in range(3))
        x = nn.dot_product_attention(q, k, v, dtype=self.dtype)
        return nn.DenseGeneral(512, (-2, -1), dtype=self.dtype)(x)


class GroupedQueries(nn.Module):
    """Causal attention with two query heads for each head of keys (Ainslie et al., "GQA", 2023)."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        queries = nn.DenseGeneral((4, 2, 64), dtype=self.dtype)(x)
        keys, values = (nn.DenseGeneral((4, 64), dtype=self.dtype)(x) for _ in range(2))
        scores = jnp.einsum("bqgrd,bkgd->bgrqk", queries, keys).astype(jnp.float32) / 8
        scores = jnp.where(jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)), scores, -1e30)
        weights = nn.softmax(scores).astype(self.dtype or jnp.float32)
        x = jnp.einsum("bgrqk,bkgd->bqgrd", weights, values)
        return nn.DenseGeneral(512, (-3, -2, -1), dtype=self.dtype)(x)


class RadialBasis(nn.Module):
    """Dense layers of radial basis functions of every number, as in FastKAN (Li, 2024)."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        for _ in range(3):
            distances = x.astype(jnp.float32)[..., None] - jnp.linspace(-2, 2, 8)
            basis = jnp.exp(-jnp.square(2 * distances)).reshape(len(x), -1)
            x = nn.Dense(128, use_bias=False, dtype=self.dtype)(basis)
        return x


class Viewed(nn.Module):
    """Features of points beside an encoding of the direction of each ray, as in NeRF (Mildenhall et al., 2020)."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        direction = jnp.sin(x[:, :1, :9])
        x = nn.Dense(256, dtype=self.dtype)(nn.relu(nn.Dense(256, dtype=self.dtype)(x)))
        x = jnp.concatenate([x, jnp.broadcast_to(direction, (*x.shape[:2], 9)).astype(x.dtype)], -1)
        return nn.Dense(3, dtype=self.dtype)(nn.relu(nn.Dense(128, dtype=self.dtype)(x)))


class Messages(nn.Module):
    """Gated messages along the edges of a graph, each node with eight of them."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        edges = np.arange(8 * len(x))
        sources, targets = edges * 7919 % len(x), edges // 8
        for _ in range(2):
            x = nn.Dense(256, dtype=self.dtype)(x)
            messages = nn.sigmoid(x[:, :1])[targets] * x[sources]
            x = jax.ops.segment_sum(messages.astype(jnp.float32), targets, len(x)).astype(x.dtype)
        return nn.Dense(16, dtype=self.dtype)(x)


group_norm = functools.partial(nn.GroupNorm, 8)
plain_norm = functools.partial(nn.GroupNorm, 8, use_scale=False, use_bias=False)
batch_norm = functools.partial(nn.BatchNorm, use_running_average=False)


def exact_gelu(x):
    return nn.gelu(x, approximate=False)


def mish(x):
    return x * jnp.tanh(nn.softplus(x))


def mean_square(out):
    return 1024 * jnp.mean(out**2)


def cross_entropy(logits):
    labels = jnp.arange(len(logits)) % logits.shape[1]
    return 1024 * optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def smoothed_cross_entropy(logits):
    labels = jax.nn.one_hot(jnp.arange(len(logits)) % logits.shape[1], logits.shape[1])
    return 1024 * optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, 0.1)).mean()


IMAGES, ROWS, STEPS = ((64, 56, 56, 128), (16384, 512), (128, 32, 1024))
FEWER_IMAGES = (32, 56, 56, 128)
SMALL_IMAGES = (32, 28, 28, 128)
TOKENS = (16, 196, 512)  # of a Vision Transformer, of patches of 16 x 16
# Relative to Flax's bytes. Flax stores the gradient of the logits in float32 and casts it in a separate kernel.
ROWS_OF_TABLE = {
    "batch norm": (Normed, IMAGES, mean_square, 1.03),
    "dense block": (Joined, IMAGES, mean_square, 1.0),
    "max pool": (MaxPooled, FEWER_IMAGES, mean_square, 0.6),
    "average pool": (Pooled, IMAGES, mean_square, 0.93),
    "relu": (lambda dtype: Dense(nn.relu, dtype), ROWS, mean_square, 1.03),
    "relu without biases": (FeedForward, ROWS, mean_square, 1.03),
    "swiglu": (lambda dtype: Gated(nn.silu, False, dtype), ROWS, mean_square, 0.93),
    "swiglu with biases": (lambda dtype: Gated(nn.silu, True, dtype), ROWS, mean_square, 1.0),
    "swiglu of one layer": (lambda dtype: Parts(gated_parts, dtype), ROWS, mean_square, 0.95),
    "relu, then parts": (lambda dtype: Parts(relu_parts, dtype), ROWS, mean_square, 1.01),
    "gelu, then layer norm of a part": (lambda dtype: Parts(spatial_parts, dtype), ROWS, mean_square, 0.87),
    "group norm, silu, then parts": (lambda dtype: Parts(grouped_parts, dtype), TOKENS, mean_square, 0.83),
    "partial stages": (PartialStages, TOKENS, mean_square, 1.23),
    "exact gelu": (lambda dtype: Dense(exact_gelu, dtype), ROWS, mean_square, 1.03),
    "silu": (lambda dtype: Dense(nn.silu, dtype), ROWS, mean_square, 1.03),
    "tanh": (lambda dtype: Dense(nn.tanh, dtype), ROWS, mean_square, 1.03),
    "layer norm, then relu": (
        lambda dtype: Dense(lambda x: nn.relu(nn.LayerNorm(dtype=dtype)(x)), dtype),
        ROWS,
        mean_square,
        1.02,
    ),
    "RMS norm, then relu": (
        lambda dtype: Dense(lambda x: nn.relu(nn.RMSNorm(dtype=dtype)(x)), dtype),
        ROWS,
        mean_square,
        0.97,
    ),
    "lstm": (Recurrent, STEPS, mean_square, 1.03),
    "head": (lambda dtype: nn.Dense(32768, dtype=dtype), (4096, 256), cross_entropy, 0.62),
    "head of smoothed targets": (lambda dtype: nn.Dense(32768, dtype=dtype), (4096, 256), smoothed_cross_entropy, 1.0),
    "head without bias": (lambda dtype: nn.Dense(32768, use_bias=False, dtype=dtype), (4096, 256), cross_entropy, 0.62),
    "group norm": (lambda dtype: BehindBias(group_norm, nn.relu, dtype), FEWER_IMAGES, mean_square, 0.95),
    "group norm, then silu": (lambda dtype: BehindBias(group_norm, nn.silu, dtype), FEWER_IMAGES, mean_square, 0.78),
    "batch norm, then gelu": (lambda dtype: BehindBias(batch_norm, nn.gelu, dtype), FEWER_IMAGES, mean_square, 0.92),
    "batch norm, then tanh": (lambda dtype: BehindBias(batch_norm, nn.tanh, dtype), FEWER_IMAGES, mean_square, 1.03),
    "batch norm, then mish": (lambda dtype: BehindBias(batch_norm, mish, dtype), FEWER_IMAGES, mean_square, 1.03),
    "batch norm, then softplus": (
        lambda dtype: BehindBias(batch_norm, nn.softplus, dtype),
        FEWER_IMAGES,
        mean_square,
        1.03,
    ),
    "batch norm, then leaky relu": (
        lambda dtype: BehindBias(batch_norm, nn.leaky_relu, dtype),
        FEWER_IMAGES,
        mean_square,
        0.93,
    ),
    "layer norm, then leaky relu": (
        lambda dtype: BehindBias(nn.LayerNorm, nn.leaky_relu, dtype),
        FEWER_IMAGES,
        mean_square,
        0.98,
    ),
    "residual convolutions": (Residual, FEWER_IMAGES, mean_square, 0.7),
    "bottlenecks": (lambda dtype: Bottlenecks(nn.relu, False, dtype=dtype), SMALL_IMAGES, mean_square, 0.96),
    "bottlenecks, gelu": (lambda dtype: Bottlenecks(nn.gelu, False, dtype=dtype), SMALL_IMAGES, mean_square, 0.97),
    "bottlenecks, excited": (lambda dtype: Bottlenecks(nn.relu, True, dtype=dtype), SMALL_IMAGES, mean_square, 0.95),
    "bottlenecks, excited, silu": (
        lambda dtype: Bottlenecks(nn.silu, True, dtype=dtype),
        SMALL_IMAGES,
        mean_square,
        0.95,
    ),
    "bottlenecks, excited, fine-tuned": (
        lambda dtype: Bottlenecks(nn.relu, True, frozen=True, dtype=dtype),
        SMALL_IMAGES,
        mean_square,
        0.95,
    ),
    "relu of convolutions": (lambda dtype: Convolutions(nn.relu, dtype), FEWER_IMAGES, mean_square, 0.88),
    "relu of residual sums": (PlainResidual, FEWER_IMAGES, mean_square, 0.88),
    "leaky relu": (lambda dtype: Convolutions(nn.leaky_relu, dtype), FEWER_IMAGES, mean_square, 1.003),
    "hard tanh": (lambda dtype: Convolutions(nn.hard_tanh, dtype), FEWER_IMAGES, mean_square, 1.003),
    "elu": (lambda dtype: Convolutions(nn.elu, dtype), FEWER_IMAGES, mean_square, 0.95),
    "a square beyond a threshold": (
        lambda dtype: Convolutions(lambda x: jnp.where(x > 0.5, x * x, x), dtype),
        FEWER_IMAGES,
        mean_square,
        1.003,
    ),
    "attention of 196 tokens": (Attention, TOKENS, mean_square, 1.1),
    "messages of a graph": (Messages, (8192, 256), mean_square, 1.2),  # gradients of gathers add up in float32
    "attention of grouped queries": (GroupedQueries, (4, 512, 512), mean_square, 0.7),
    "radial basis functions": (RadialBasis, (8192, 128), mean_square, 1.003),
    "features beside directions": (Viewed, (1024, 64, 256), mean_square, 1.01),
    "gelu, then layer norm": (
        lambda dtype: ActivatedThenNormed(nn.LayerNorm, nn.gelu, dtype),
        FEWER_IMAGES,
        mean_square,
        0.93,
    ),
    "exact gelu, then layer norm": (
        lambda dtype: ActivatedThenNormed(nn.LayerNorm, exact_gelu, dtype),
        FEWER_IMAGES,
        mean_square,
        0.93,
    ),
    "silu, then RMS norm": (
        lambda dtype: ActivatedThenNormed(nn.RMSNorm, nn.silu, dtype),
        FEWER_IMAGES,
        mean_square,
        1.13,
    ),
    "gelu, then batch norm": (
        lambda dtype: ActivatedThenNormed(batch_norm, nn.gelu, dtype),
        FEWER_IMAGES,
        mean_square,
        0.86,
    ),
    "silu, then group norm": (
        lambda dtype: ActivatedThenNormed(group_norm, nn.silu, dtype),
        FEWER_IMAGES,
        mean_square,
        0.79,
    ),
    "gelu, then response norm": (
        lambda dtype: ActivatedThenNormed(ResponseNorm, nn.gelu, dtype),
        FEWER_IMAGES,
        mean_square,
        0.95,
    ),
    "elu, then layer norm": (
        lambda dtype: ActivatedThenNormed(nn.LayerNorm, nn.elu, dtype),
        FEWER_IMAGES,
        mean_square,
        1.06,
    ),
    "elu, then batch norm": (
        lambda dtype: ActivatedThenNormed(batch_norm, nn.elu, dtype),
        FEWER_IMAGES,
        mean_square,
        0.85,
    ),
    "tanh, then layer norm": (
        lambda dtype: ActivatedThenNormed(nn.LayerNorm, nn.tanh, dtype),
        FEWER_IMAGES,
        mean_square,
        1.06,
    ),
    "tanh, then batch norm": (
        lambda dtype: ActivatedThenNormed(batch_norm, nn.tanh, dtype),
        FEWER_IMAGES,
        mean_square,
        0.91,
    ),
    "norm, then gelu": (NormedThenActivated, FEWER_IMAGES, mean_square, 1.03),
    "residual sums, then group norm": (
        lambda dtype: NormedResidual(group_norm, nn.silu, dtype),
        FEWER_IMAGES,
        mean_square,
        0.67,
    ),
    "residual sums, then group norm without parameters": (
        lambda dtype: NormedResidual(plain_norm, nn.gelu, dtype),
        FEWER_IMAGES,
        mean_square,
        0.72,
    ),
}
# In a recurrent cell, whose gates XLA fuses, float32 residuals move fewer bytes for 1.24 times the temporary memory.
OF_FLOAT32_RESIDUALS = {"lstm": 1.04}


def gradients_of(name, dtype):
    """The gradient function of a row with its layers in `dtype`, and the shapes of its arguments."""
    make, shape, loss_of, _ = ROWS_OF_TABLE[name]
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    variables = jax.eval_shape(make(None).init, jax.random.key(0), x)

    def loss(params, state, x):
        out, _ = make(dtype).apply({"params": params, **state}, x, mutable=["batch_stats"])
        return loss_of(jnp.asarray(out).astype(jnp.float32))

    return jax.grad(loss), (variables["params"], {"batch_stats": variables.get("batch_stats", {})}, x)


@functools.cache
def ours_of(name, rules=DEFAULT_RULES):
    gradients, args = gradients_of(name, None)
    return figures(autocast(gradients, get_policy("mixed_float16"), rules=rules), *args)


@pytest.mark.parametrize("name", ROWS_OF_TABLE)
def test_no_more_bytes_than_flax_in_float16(name):
    gradients, args = gradients_of(name, jnp.float16)
    ours, flax = ours_of(name), figures(gradients, *args)
    assert ours.bytes <= ROWS_OF_TABLE[name][3] * flax.bytes
    assert ours.temporary <= (1.01 if name in ("batch norm", "relu") else 1.2) * flax.temporary
    assert not ours.wide_products and not ours.sixteen_bit_sums


@pytest.mark.parametrize("name, relus", [("relu of convolutions", 3), ("relu of residual sums", 6)])
def test_a_relu_runs_in_the_kernel_of_its_convolution(name, relus):
    """Then the relu's input is not stored; Flax's layers store it for the mask of the derivative."""
    gradients, args = gradients_of(name, None)
    text = module_text(compile_for_gpu(autocast(gradients, get_policy("mixed_float16")), *args))
    assert text.count('"activation_mode":"kRelu"') == relus
    gradients, args = gradients_of(name, jnp.float16)
    assert ours_of(name).temporary <= 0.77 * figures(gradients, *args).temporary


def test_strided_convolutions_of_a_frozen_network_are_not_padded_in_its_gradient():
    """Their kernels are data that the gradient reverses; a cast after that would move 1.8 times the bytes of Flax."""

    class Critic(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x: Any):
            for width in (64, 128, 256):
                x = nn.leaky_relu(nn.Conv(width, (4, 4), (2, 2), dtype=self.dtype)(x), 0.2)
            return x

    x, colours = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 64, 64, 3), (3, 3)))
    frozen = jax.eval_shape(Critic().init, jax.random.key(0), x)

    def loss(colours, frozen, x, dtype=None):
        x, colours = (x, colours) if dtype is None else (x.astype(dtype), colours.astype(dtype))
        return 1024 * jnp.mean(jnp.square(jnp.asarray(Critic(dtype).apply(frozen, x @ colours)).astype(jnp.float32)))

    ours = figures(autocast(jax.grad(loss), "mixed_float16"), colours, frozen, x)
    flax = figures(jax.grad(functools.partial(loss, dtype=jnp.float16)), colours, frozen, x)
    assert ours.bytes <= 1.06 * flax.bytes and ours.temporary <= flax.temporary


def test_the_value_of_a_summed_loss_costs_what_that_of_a_mean_does():
    """The sum that a program returns is not the gradient of a bias, and does not change how these are computed."""
    x = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    head = nn.Dense(32768)
    params = jax.eval_shape(head.init, jax.random.key(0), x)

    def losses(params, x):
        logits = jnp.asarray(head.apply(params, x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(4096))

    found = [
        figures(autocast(jax.value_and_grad(lambda *args, r=r: r(losses(*args))), "mixed_float16"), params, x).bytes
        for r in (jnp.sum, jnp.mean)
    ]
    assert found[0] <= 1.001 * found[1]


@pytest.mark.parametrize("name", ROWS_OF_TABLE)
def test_no_more_bytes_than_with_residuals_in_float32(name):
    wide = ours_of(name, DEFAULT_RULES.with_residuals("float32"))
    assert ours_of(name).bytes <= OF_FLOAT32_RESIDUALS.get(name, 1.01) * wide.bytes
    assert ours_of(name).temporary <= 1.01 * wide.temporary


def times_gram(y):
    h = jax.nn.softmax(y)
    return h @ (h.T @ h)


def whitened(y):
    h = y - y.mean(0)
    h = h / jnp.sqrt((h**2).mean(0) + 1e-3)
    return h @ jnp.linalg.inv(h.T @ h / len(h) + 1e-2 * jnp.eye(h.shape[1]))


def regressed(y):
    h = jnp.exp(-jnp.abs(y))
    return h @ jnp.linalg.solve(h.T @ h + jnp.eye(h.shape[1]), h.T @ y)


@pytest.mark.parametrize(
    ("layer", "moved", "temporary"), [(times_gram, 0.83, 0.98), (whitened, 0.98, 0.75), (regressed, 0.79, 0.69)]
)
def test_what_products_of_both_sides_read_in_float32_is_stored_once(layer, moved, temporary, monkeypatch):
    """Bytes and temporary memory of eight layers, relative to those that compute it again from 16 bits."""

    def loss(weights, x):
        for weight in weights:
            x = layer(x @ weight)
        return 1024 * jnp.sum(x**2)

    def found():
        weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8
        return figures(
            autocast(jax.grad(loss), "mixed_float16"), weights, jax.ShapeDtypeStruct((4096, 256), jnp.float32)
        )

    once = found()
    monkeypatch.setattr(_Decisions, "_stored_in_float32", frozenset())
    again = found()
    print(f"{layer.__name__}: {once.bytes / again.bytes:.3f} {once.temporary / again.temporary:.3f}")
    assert once.bytes <= moved * again.bytes and once.temporary <= temporary * again.temporary


def causal(scores):
    i = jnp.arange(scores.shape[-1])
    return jnp.where(i[:, None] >= i, scores, -1e9)


def linearly_biased(scores):
    i = jnp.arange(scores.shape[-1])
    return scores - jnp.abs(i[:, None] - i) * jnp.exp2(-1.0 - jnp.arange(scores.shape[1]))[:, None, None]


def padded(scores):
    return scores + jnp.where(np.arange(scores.shape[-1]) < 700, 0.0, -1e9)


def capped(scores):
    return 50 * jnp.tanh(scores / 50)


def share_expressions(monkeypatch):
    passes = [each for each in planner.PLANNING if each is not separate_sums]
    assert len(passes) == len(planner.PLANNING) - 1
    monkeypatch.setattr(planner, "PLANNING", passes)


def print_ratios(name, separate, shared):
    print(f"{name}: {separate.bytes / shared.bytes:.3f} {separate.temporary / shared.temporary:.3f}")
    assert separate.bytes <= shared.bytes and separate.temporary <= shared.temporary


@functools.cache
def attention_figures(mask, policy, layers=1):
    def loss(weights, x):
        for layer in weights:
            q, k, v = ((x @ weight).reshape(1, 1024, 8, 64) for weight in layer)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
            probabilities = jax.nn.softmax(mask(scores) if mask else scores)
            x = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(1, 1024, 512)
        return 1024 * jnp.mean(jnp.square(x))

    weights = [[jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 3] * layers
    return figures(autocast(jax.grad(loss), policy), weights, jax.ShapeDtypeStruct((1, 1024, 512), jnp.float32))


@pytest.mark.parametrize(
    ("mask", "layers", "moved", "temporary"),
    [(None, 1, 0.79, 1.46), (causal, 1, 0.79, 1.46), (linearly_biased, 1, 0.79, 1.46), (padded, 1, 0.79, 1.46),
     (capped, 1, 0.84, 1.46), (causal, 6, 0.78, 1.07)],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_softmax_and_its_gradient_are_a_kernel_each(mask, layers, moved, temporary, policy, monkeypatch):
    """Neither the 8 x 1024 x 1024 scores nor exponentials of masked ones are stored in float32, or read twice.

    Bytes and temporary memory are relative to those without the rewrite of the gradient. While the gradient's kernel
    runs, there is one more array of scores, 17 MB: much for one layer, little for a network.
    """
    found, plain = attention_figures(mask, policy, layers), attention_figures(None, policy, layers)
    assert found.bytes <= 1.07 * plain.bytes and found.temporary <= 1.01 * plain.temporary
    others = tuple(rewrite for rewrite in REWRITES if rewrite.name != "softmax_gradient")
    monkeypatch.setattr(planner.Planner.__init__, "__defaults__", (others,))
    without = attention_figures.__wrapped__(mask, policy, layers)
    name = mask.__name__ if mask else "plain"
    print(f"{name} {layers} {policy}: {found.bytes / without.bytes:.3f} {found.temporary / without.temporary:.3f}")
    assert found.bytes <= moved * without.bytes and found.temporary <= temporary * without.temporary


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_cross_entropy_of_capped_logits_stores_nothing_for_the_cap(policy, monkeypatch):
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2048, 512), (512, 32768)))

    def found(cap):
        def loss(weight, x):
            logits = cap(x @ weight)
            return 1024 * optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(2048)).mean()

        return figures(autocast(jax.grad(loss), policy), weight, x)

    with_cap, without = found(capped), found(lambda logits: logits)
    assert with_cap.bytes <= 1.01 * without.bytes and with_cap.temporary <= 1.01 * without.temporary
    share_expressions(monkeypatch)
    print_ratios(f"head {policy}", with_cap, found(capped))
