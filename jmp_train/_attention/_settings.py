"""What describes an attention beside its arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

config: Any = jax.config  # its flags are attributes that no type checker knows
DROPOUT = "jmp_train_attention_with_dropout"  # what an inner `jit` around it is called
EXTRAS = ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The static part of an attention, a parameter of its primitives.

    Attributes:
      extras: which of `EXTRAS` follow query, key and value among the operands, in that order.
      scale: the factor of the logits.
      is_causal: whether position t attends to positions up to t only.
      window: how many positions to the left and to the right of its own a position attends to; `None` for all.
      precision: of the products in float32, as `jax.default_matmul_precision` was when they were recorded.
      bias_has_gradient: whether the derivatives include the bias's.
    """

    extras: tuple[str, ...] = ()
    scale: float = 1.0
    is_causal: bool = False
    window: tuple[int, int] | None = None
    precision: Any = None
    bias_has_gradient: bool = False

    def named(self, extras: Sequence[Any]) -> dict[str, Any]:
        """The further operands by name, `None` for those that are not given."""
        return {**dict.fromkeys(EXTRAS), **dict(zip(self.extras, extras, strict=True))}
