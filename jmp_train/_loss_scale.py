"""The loss scales: the number that multiplies the loss so that 16-bit gradients neither vanish nor overflow.

Decides how large the scale is and how it changes: `NoOpLossScale`, `StaticLossScale`, `DynamicLossScale`. Does not
decide what a finite gradient is, nor what a skipped step leaves unchanged; see `_finite.py` and `_optimizer.py`.

Float16 holds normal numbers down to 2^-14 and subnormal ones down to 2^-24; below, gradients are zero. Since
differentiation is linear, multiplying the loss by S multiplies every gradient by S, and dividing by S in float32
restores it:

    grad L = (1 / S) * grad (S * L)

Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2, https://arxiv.org/abs/1710.03740.
"""

import copy
import dataclasses
from functools import partial
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from ._finite import check_flag, map_gradients
from ._scaling import divide, multiply, widen
from ._values import as_count, as_leaf, as_number, register, set_fields

T = TypeVar("T")

_SMALLEST_SCALE = 2.0**-126  # both bounds: below and above, S or 1/S is subnormal, and subnormals are flushed to zero
_LARGEST_SCALE = 2.0**126


@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """A loss scale of 1 that never changes: for float32 and bfloat16, whose gradients reach down to 2^-126.

    It treats dtypes as the other two do (16-bit leaves become float32), so that exchanging one for the other changes
    no dtype downstream.

    Example:
      >>> NoOpLossScale().unscale({"w": np.float16(3)})["w"].dtype
      dtype('float32')
    """

    @property
    def loss_scale(self) -> np.float32:
        """The scale, float32 `[]`."""
        return np.float32(1)

    def scale(self, tree: T) -> T:
        """Returns the losses as they are, 16-bit ones as float32."""
        return map_gradients(widen, tree)

    def unscale(self, tree: T) -> T:
        """Returns the gradients as they are, 16-bit ones as float32."""
        return map_gradients(widen, tree)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Returns itself."""
        check_flag("grads_finite", grads_finite)
        return self


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that never changes.

    Any constant works that lifts small gradients above 2^-24 and keeps the largest below 65,504; powers of two are
    exact. Micikevicius et al. report constants from 8 to 32K.

    Attributes:
      loss_scale: the scale, a Python float: part of the program, not of the state. It is rounded to float32.

    Raises:
      ValueError: `loss_scale` is not one positive, finite number.

    Example:
      >>> loss_scale = StaticLossScale(128.0)
      >>> grads = loss_scale.unscale({"w": np.float16(384)})
      >>> float(grads["w"]), grads["w"].dtype
      (3.0, dtype('float32'))
    """

    loss_scale: float

    def __post_init__(self) -> None:
        set_fields(self, loss_scale=_as_scale("loss_scale", self.loss_scale))

    def scale(self, tree: T) -> T:
        """Multiplies every loss by the scale in float32; see `DynamicLossScale.scale`."""
        return multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides every gradient by the scale in float32; see `DynamicLossScale.unscale`."""
        return divide(tree, self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Returns itself."""
        check_flag("grads_finite", grads_finite)
        return self


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that searches for the largest value at which gradients are finite.

    With scale S, counter c and remaining hysteresis h, one `adjust` does

        finite:      c + 1 < growth_interval:  c <- c + 1
                     otherwise:                S <- min(S * growth_factor, max_loss_scale), c <- 0, h <- hysteresis
        non-finite:  c <- 0, h <- max(h - 1, 0);  where h is now 0:  S <- max(S * backoff_factor, min_loss_scale)

    The three values that change (S, c, h) are leaves of this pytree and have a fixed dtype from the start. They are
    NumPy scalars until a transformation's `init` puts them on a device, so that the constructor starts no backend. The
    other fields are static: part of the program, compared and hashed.

    The names in other libraries (Flax's DynamicScale grows one step later than its `growth_interval` says):

        here               jmp               torch.amp.GradScaler   flax DynamicScale
        loss_scale         loss_scale        init_scale             scale
        growth_factor      factor            growth_factor          growth_factor
        backoff_factor     1 / factor        backoff_factor         backoff_factor
        growth_interval    period            growth_interval        growth_interval + 1
        min_loss_scale     min_loss_scale    (none)                 minimum_scale
        counter            counter           _growth_tracker        fin_steps

    Attributes:
      loss_scale: S, float32 `[]`. A power of two makes scaling exact.
      growth_factor: what S is multiplied by after `growth_interval` finite steps in a row.
      backoff_factor: what S is multiplied by after a non-finite step.
      growth_interval: in steps. An overflow costs one skipped step, so 2000 bounds their share by about 1/2000.
      hysteresis: the number of non-finite steps until S backs off; with 1 it does on the first. Reset when S grows.
      min_loss_scale: S never backs off below it. At 1 gradients are no more likely to overflow than without scaling, so
        that a further overflow comes from the model itself.
      max_loss_scale: S never grows above it. 2^24 lifts the smallest float16 subnormal to 1; at most 2^126, since the
        reciprocal of a larger scale is subnormal and flushed to zero.
      counter: c, finite steps since S last changed or a step was skipped, int32 `[]`.
      hysteresis_left: h, int32 `[]`; `None` means `hysteresis`.

    Raises:
      ValueError: an argument is out of range; the message names it.

    Example:
      >>> loss_scale = DynamicLossScale(2.0**15, growth_interval=2)
      >>> for grads_finite in (True, True, False):
      ...     loss_scale = loss_scale.adjust(grads_finite)
      ...     print(float(loss_scale.loss_scale), int(loss_scale.counter))
      32768.0 1
      65536.0 0
      32768.0 0
    """

    loss_scale: jax.Array | np.floating | float = 2.0**15
    _: dataclasses.KW_ONLY
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_loss_scale: float = 1.0
    max_loss_scale: float = 2.0**24
    counter: jax.Array | np.integer | int = 0
    hysteresis_left: Any = None

    def __post_init__(self) -> None:
        left = self.hysteresis if self.hysteresis_left is None else self.hysteresis_left
        set_fields(
            self,
            loss_scale=as_leaf("loss_scale", self.loss_scale, np.float32, _as_scale),
            growth_factor=as_number("growth_factor", self.growth_factor),
            backoff_factor=as_number("backoff_factor", self.backoff_factor),
            growth_interval=as_count("growth_interval", self.growth_interval),
            hysteresis=as_count("hysteresis", self.hysteresis),
            min_loss_scale=_as_scale("min_loss_scale", self.min_loss_scale),
            max_loss_scale=_as_scale("max_loss_scale", self.max_loss_scale),
            counter=as_leaf("counter", self.counter, np.int32, partial(as_count, least=0)),
            hysteresis_left=as_leaf("hysteresis_left", left, np.int32, partial(as_count, least=0)),
        )
        _check_bounds(self)

    def scale(self, tree: T) -> T:
        """Multiplies every loss by S, in float32.

        Args:
          tree: the loss, or a tree of losses. Float16, bfloat16 and 8-bit floats become float32 before the product,
            since S itself exceeds what float16 holds; float64 and complex keep their dtype; other leaves are kept.

        Returns:
          The scaled loss or losses: differentiate these, but log the unscaled loss.
        """
        return multiply(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides every gradient by S, in float32.

        Args:
          tree: gradients of the scaled loss. Floating leaves of 32 bits and fewer are computed and returned in
            float32, for in float16 the quotient would vanish as it did before scaling; float64 and complex keep their
            dtype. Integers, booleans, PRNG keys, float0, `None` and the statistics that Flax's fp8 layers return
            under `_overwrite_with_gradient` are kept.

        Returns:
          The gradients of the loss, structure unchanged.
        """
        return divide(tree, self.loss_scale)

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """The loss scale for the next step.

        Args:
          grads_finite: whether this step's gradients were finite, bool `[]`.

        Raises:
          ValueError: `grads_finite` is not one boolean.
        """
        finite = check_flag("grads_finite", grads_finite)
        counter = jnp.asarray(self.counter, np.int32)
        scale = jnp.asarray(self.loss_scale, np.float32)
        grows = finite & (counter >= self.growth_interval - 1)
        before = jnp.asarray(self.hysteresis_left, np.int32)
        left = jnp.where(finite, before, jnp.maximum(before - 1, 0))
        grown = jnp.minimum(scale * self.growth_factor, self.max_loss_scale)
        reduced = jnp.maximum(scale * self.backoff_factor, self.min_loss_scale)
        new = copy.copy(self)  # not dataclasses.replace, which would validate
        set_fields(
            new,
            loss_scale=jnp.where(grows, grown, jnp.where(~finite & (left == 0), reduced, scale)),
            counter=jnp.where(finite & ~grows, counter + 1, 0),
            hysteresis_left=jnp.where(grows, self.hysteresis, left),
        )
        return new


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def _as_scale(argument: str, value: Any) -> float:
    number = as_number(argument, value)
    if not _SMALLEST_SCALE <= number <= _LARGEST_SCALE:
        raise ValueError(
            f"`{argument}` must lie in [2**-126, 2**126], got {number}: 1 / {argument} has to be a normal float32 "
            "number, or gradients are flushed to zero. Pass a positive number such as 2.0**15."
        )
    return number


def _check_bounds(scale: "DynamicLossScale") -> None:
    low, high = scale.min_loss_scale, scale.max_loss_scale
    if low > high:
        raise ValueError(
            f"`min_loss_scale` (={low}) must not exceed `max_loss_scale` (={high}). "
            "Swap them, or leave out one for its default."
        )
    start: Any = scale.loss_scale
    if not isinstance(start, Tracer) and not low <= start <= high:
        raise ValueError(
            f"`loss_scale` (={start}) must lie between `min_loss_scale` (={low}) and "
            f"`max_loss_scale` (={high}). Move the bound or the starting point."
        )
    if scale.growth_factor <= 1:
        raise ValueError(
            f"`growth_factor` must be greater than 1, got {scale.growth_factor}: it multiplies the scale. "
            "Pass 2.0, or use StaticLossScale for a scale that never grows."
        )
    if not 0 < scale.backoff_factor < 1:
        raise ValueError(
            f"`backoff_factor` must lie strictly between 0 and 1, got {scale.backoff_factor}: it multiplies the scale "
            "on overflow. Pass 0.5 (jmp's `factor=2` is growth_factor=2, backoff_factor=0.5)."
        )


register(NoOpLossScale, (), ())
register(StaticLossScale, (), ("loss_scale",))
register(
    DynamicLossScale,
    ("loss_scale", "counter", "hysteresis_left"),
    ("growth_factor", "backoff_factor", "growth_interval", "hysteresis", "min_loss_scale", "max_loss_scale"),
)
