"""The types of the convergence suite: an application, and a precision in which it is trained.

Decides what differs between the rows of one application: only the policy, the loss scale and how 16-bit parameters are
updated. Does not train; see `_training.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax

import jmp_train as jmp

Variables = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Player:
    """A network with a loss and an optimizer of its own. Most applications have one, a GAN has two.

    Attributes:
      init: variables `{"params": ..., other collections ...}` from a key, in float32.
      loss: `loss(variables of each player, batch, key)` -> the mean loss, float32 `[]`, and the new values of this
        player's other collections, `{}` if it has none. Says nothing about precision.
      optimizer: an ordinary optax transformation, the same for every policy.
    """

    init: Callable[[jax.Array], Variables]
    loss: Callable[[Sequence[Variables], Any, jax.Array], tuple[jax.Array, Any]]
    optimizer: optax.GradientTransformation


@dataclasses.dataclass(frozen=True)
class Application:
    """One row of the suite, the same for every policy.

    Attributes:
      name: as in the table.
      metric: what `evaluate` returns, with its unit.
      higher_is_better: which way the metric improves.
      resolution: the smallest difference of the metric that means anything, such as one test image. Two policies
        closer than this are equal whatever the seeds say.
      steps: training steps.
      players: trained in turn within a step, each with the updated parameters of the players before it.
      batches: `batches(seed)` -> training batches without end, the same for every policy.
      evaluate: the metric of the trained variables of each player, in float32 on held-out data.
    """

    name: str
    metric: str
    higher_is_better: bool
    resolution: float
    steps: int
    players: tuple[Player, ...]
    batches: Callable[[int], Iterator[Any]]
    evaluate: Callable[[Sequence[Variables]], float]


@dataclasses.dataclass(frozen=True)
class Precision:
    """One way to train.

    Attributes:
      name: as in the table.
      policy: a name that `jmp_train.get_policy` knows.
      scaled: with a dynamic loss scale, or with none.
      update: wraps the optimizer: how parameters stored in 16 bits take small updates.
    """

    name: str
    policy: str
    scaled: bool = False
    update: Callable[[optax.GradientTransformation], optax.GradientTransformation] = lambda optimizer: optimizer

    def optimizer(self, inner: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns `inner` with this precision's loss scale and update."""
        # Runs here take hundreds of steps; the default would wait 2,000 before it tries a larger scale.
        loss_scale = jmp.DynamicLossScale(growth_interval=100) if self.scaled else jmp.NoOpLossScale()
        return jmp.with_loss_scale(self.update(inner), loss_scale)

    def seeds(self, n: int) -> int:
        """The number of seeds where others run `n`; the reference runs more, because its spread judges all others."""
        return n + 2 if self.name == REFERENCE.name else n


def everything_stochastic(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Stochastic rounding of bfloat16 parameters and of the optimizer's state."""
    return jmp.with_stochastic_rounding(jmp.with_low_precision_state(inner))


REFERENCE = Precision("float32", "float32")
PRECISIONS = (
    REFERENCE,
    Precision("mixed_bfloat16", "mixed_bfloat16"),
    Precision("mixed_float16", "mixed_float16", scaled=True),
    Precision("mixed_float16, unscaled", "mixed_float16"),
    Precision("float16 parameters", "O2", scaled=True),
    Precision("float16 parameters, masters", "O2", scaled=True, update=jmp.with_master_weights),
    Precision("bfloat16 parameters", "bfloat16"),
    Precision("bfloat16 parameters, masters", "bfloat16", update=jmp.with_master_weights),
    Precision("bfloat16 parameters, stochastic rounding", "bfloat16", update=jmp.with_stochastic_rounding),
    Precision("bfloat16 everything, stochastic", "bfloat16", update=everything_stochastic),
)
