"""The type of a case in `product_cases.py`: a loss that contains a product that is not a layer.

A loss is written once and calls `net` for the products of its layers. `net` decides how these run: in plain JAX, in 16
bits by hand, or in float64. By hand, everything that does not go through `net` is float32.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp_train as jmp

Tree = Any
NARROW = "narrow"


@dataclasses.dataclass(frozen=True)
class Layers:
    """The products of a network's layers.

    dtype: with None, products are plain JAX. A 16-bit dtype is mixed precision by hand, as with Flax's `dtype=`:
        operands and result in 16 bits, the bias added in 16 bits; then the result is cast back to float32, and a bias's
        gradient is a float32 sum.
    marked: runs products under `low_precision`. With rules that keep all others in float32, autocast then runs exactly
        the layers in 16 bits.
    """

    dtype: Any = None
    marked: bool = False

    def _product(self, product: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
        if self.marked:
            return jmp.low_precision(product)(*operands)
        if self.dtype is None:
            return product(*operands)
        return product(*(jnp.asarray(x, self.dtype) for x in operands)).astype(jnp.float32)

    def _plus(self, y: jax.Array, bias: jax.Array | None) -> jax.Array:
        if bias is None:
            return y
        if self.dtype is None:
            return y + bias
        # A rounded float32 sum of two 16-bit numbers is their 16-bit sum.
        return (y + bias.astype(self.dtype).astype(jnp.float32)).astype(self.dtype).astype(jnp.float32)

    def dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._product(jnp.matmul, a, b)

    def einsum(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._product(lambda a, b: jnp.einsum(spec, a, b), a, b)

    def dense(self, x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """`x @ weight + bias`: `[..., n], [n, m], [m] -> [..., m]`."""
        return self._plus(self.dot(x, weight), bias)

    def conv(self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None, *, stride=1, groups=1) -> jax.Array:
        """`[n, h, w, c], [kh, kw, c / groups, d], [d] -> [n, h / stride, w / stride, d]`."""
        return self._plus(self._product(lambda x, k: conv(x, k, stride=stride, groups=groups), x, kernel), bias)

    def mlp(self, params: Tree, x: jax.Array, name: str = "") -> jax.Array:
        """Dense layers `params[f"{name}w{i}"]`, with tanh between them."""
        i = 0
        while f"{name}w{i}" in params:
            x = self.dense(jnp.tanh(x) if i else x, params[f"{name}w{i}"], params[f"{name}b{i}"])
            i += 1
        return x


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    name: unique.
    group: the class of product, 1 to 8: 1 an explicit precision, 2 outer products and short contractions, 3 a value
        times itself, or added to squares, 4 small results, 5 constants of the program, 6 fixed filters, 7 sums as
        trees, 8 angles, divisors and logarithms of data; or `NARROW`: all of its products are layers.
    loss: `(net, params, batch) -> scalar`.
    data: `rng -> (params, batch)`, NumPy arrays in float32 and integers.
    scale: the loss scale, under autocast and by hand.
    low_share: for `NARROW`, the share of FLOPs with 16-bit operands, which must not fall.
    note: what is particular to the case.
    """

    name: str
    group: int | str
    loss: Callable[[Layers, Tree, Tree], jax.Array]
    data: Callable[[np.random.Generator], tuple[Tree, Tree]]
    scale: float = 2.0**10
    low_share: float | None = None
    note: str = ""

    def __str__(self) -> str:
        return self.name


def conv(x, kernel, *, stride=1, groups=1, precision=None):
    """A convolution of images `[n, h, w, c]` with a kernel `[kh, kw, c / groups, d]`, padded to the input's size."""
    form = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=form, feature_group_count=groups, precision=precision
    )


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


def uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> np.ndarray:
    return rng.uniform(low, high, shape).astype(np.float32)


def dense_params(rng: np.random.Generator, *widths: int, name: str = "") -> dict[str, np.ndarray]:
    """Parameters for `Layers.mlp`."""
    made = {}
    for i, (n, m) in enumerate(itertools.pairwise(widths)):
        made |= {f"{name}w{i}": normal(rng, n, m, scale=n**-0.5), f"{name}b{i}": normal(rng, m, scale=0.1)}
    return made


def kernel_params(rng: np.random.Generator, *channels: int, size: int = 3, name: str = "") -> dict[str, np.ndarray]:
    """Parameters `{name}k{i}`, `{name}c{i}` of convolutions."""
    made = {}
    for i, (n, m) in enumerate(itertools.pairwise(channels)):
        kernel = normal(rng, size, size, n, m, scale=(size * size * n) ** -0.5)
        made |= {f"{name}k{i}": kernel, f"{name}c{i}": normal(rng, m, scale=0.1)}
    return made


def convolutions(net: Layers, params: Tree, x: jax.Array, name: str = "") -> jax.Array:
    """The convolutions of `kernel_params`, with tanh between them."""
    i = 0
    while f"{name}k{i}" in params:
        x = net.conv(jnp.tanh(x) if i else x, params[f"{name}k{i}"], params[f"{name}c{i}"])
        i += 1
    return x


def smooth_images(rng: np.random.Generator, n: int, size: int, channels: int, waves: int = 4) -> np.ndarray:
    """Images `[n, size, size, channels]` in 0 to 1: sums of a few waves across the image."""
    y, x = np.meshgrid(*2 * [np.linspace(0, 2 * np.pi, size, endpoint=False)], indexing="ij")
    made = np.zeros((n, size, size, channels))
    for image in range(n):
        for channel in range(channels):
            for _ in range(waves):
                a, b, phase = rng.integers(-3, 4), rng.integers(-3, 4), rng.uniform(0, 2 * np.pi)
                made[image, :, :, channel] += np.cos(a * x + b * y + phase)
    return (0.5 + 0.5 * made / waves).astype(np.float32)


def mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(x**2)
