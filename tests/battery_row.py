"""The type of a row of the battery: a model, its loss, its data, and how it is differentiated.

The models are in `battery_images.py`, `battery_sequences.py` and `battery_plain.py`; `battery_models.py` lists them.
`battery_tools.py` measures them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any
Loss = Callable[[Tree, Tree], jax.Array]


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of the models in one run; all are multiples of 8, as Tensor Cores need."""

    batch: int
    width: int
    length: int
    image: int
    layers: int


SMALL = Size(batch=16, width=32, length=16, image=16, layers=2)
LARGE = Size(batch=32, width=512, length=256, image=64, layers=4)


def gradient_of(loss: Loss) -> Callable[[float], Loss]:
    """scale -> the gradient of `scale * loss` with respect to the parameters."""
    return lambda scale: jax.grad(lambda params, batch: loss(params, batch) * scale)


class Program(NamedTuple):
    """One model at one size with its layers in one dtype.

    batch: `rng -> batch`, NumPy arrays and keys.
    init: `(key, batch) -> params`, float32.
    loss: `(params, batch) -> scalar`.
    grads: `scale -> ((params, batch) -> gradients of the scaled loss)`, for models whose gradient is not that of
        `loss`: two players, microbatches.
    """

    batch: Callable[[np.random.Generator], Tree]
    init: Callable[[jax.Array, Tree], Tree]
    loss: Loss
    grads: Callable[[float], Callable[[Tree, Tree], Tree]] | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One model of the battery.

    name: unique, a Python identifier.
    make: `(size, dtype) -> Program`. `dtype` None is the model as a user writes it; float16 puts every Flax layer in
        float16, the way Flax documents; float64 is for the oracle.
    flax16: whether Flax can write the model in 16 bits.
    scale: the power of two the loss is multiplied by before a float16 backward pass, for both sides of a comparison.
    oracle: the dtype of the reference; float32 where random bits depend on the dtype (dropout under x64 draws others).
    float32_dots: why the compiled module may hold float32 dots; empty where none is allowed.
    slack: the factor by which the error in 16 bits may exceed the tolerance, where a rounding changes the choice of a
        relu or of pooling; such an error is a jump, for Flax too.
    seeds: the number of seeds in the median that is compared with Flax; more where such jumps make it noisy.
    fast: whether the fast tier runs it.
    """

    name: str
    make: Callable[[Size, Any], Program]
    flax16: bool = False
    scale: float = 2.0**10
    oracle: Any = np.float64
    float32_dots: str = ""
    slack: float = 1.0
    seeds: int = 20
    fast: bool = False

    def __str__(self) -> str:
        return self.name

    def loss(self, dtype=None, size: Size = SMALL) -> Loss:
        return self.make(size, dtype).loss

    def grads(self, dtype=None, size: Size = SMALL, scale: float | None = None) -> Callable[[Tree, Tree], Tree]:
        """The gradients of the loss times `scale` (the row's own by default), still scaled."""
        made = self.make(size, dtype)
        return (made.grads or gradient_of(made.loss))(self.scale if scale is None else scale)


def layer_dtypes(dtype) -> dict[str, Any]:
    """Keywords for a Flax layer. In float64 `param_dtype` is float64, too, because `nn.RNN` starts its carry in it."""
    if dtype is None:
        return {}
    return {"dtype": dtype, "param_dtype": dtype} if dtype == jnp.float64 else {"dtype": dtype}


def wide(x: jax.Array) -> jax.Array:
    """`x` in at least float32, as Flax's examples cast their logits. Adds no equation if `x` is float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def linen(model_of, batch_of, head, *, call=None) -> Callable[[Size, Any], Program]:
    """A Linen row: `model_of(size, layer keywords)`, `batch_of(size, rng)`, `head(outputs, batch) -> scalar`.

    The model is called with `batch["x"]`, or by `call(model, batch)` if it needs other arguments. BatchNorm runs in
    training mode, and its new running statistics are dropped.
    """
    call = call or (lambda model, batch: model(batch["x"]))

    def make(size, dtype):
        model = model_of(size, layer_dtypes(dtype))

        def loss(params, batch):
            rngs = {"dropout": batch["key"]} if "key" in batch else None
            out, _ = model.apply(
                {"params": params}, batch, rngs=rngs, mutable=["batch_stats"], method=lambda m, b: call(m, b)
            )
            return head(out, batch)

        def init(key, batch):
            return model.init({"params": key, "dropout": key}, batch, method=lambda m, b: call(m, b))["params"]

        return Program(lambda rng: batch_of(size, rng), init, loss)

    return make


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float32)
