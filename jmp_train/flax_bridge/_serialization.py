"""Loss scales in Flax's own serialization, `flax.serialization.to_bytes` and the checkpoints that rest on it.

Decides which fields are written: those that change. Without this registration Flax treats a loss scale as a leaf, which
it cannot write.
"""

import copy
from typing import Any

from flax import serialization

from .._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from .._values import set_fields

_CHANGING = ("loss_scale", "counter", "hysteresis_left")


def _to_state_dict(scale: LossScale) -> dict[str, Any]:
    return {name: getattr(scale, name) for name in _CHANGING} if isinstance(scale, DynamicLossScale) else {}


def _from_state_dict(target: LossScale, state: dict[str, Any]) -> LossScale:
    """The settings of `target` with the values of `state`."""
    expected = _to_state_dict(target)
    if state.keys() != expected.keys():
        raise ValueError(
            f"`target` has a {type(target).__name__}, whose state is {sorted(expected)}, and what was saved is "
            f"{sorted(state)}. Restore with the loss scale that it was saved with."
        )
    new = copy.copy(target)  # not dataclasses.replace, which would validate: values may be stacked
    set_fields(new, **state)
    return new


for _kind in (DynamicLossScale, StaticLossScale, NoOpLossScale):
    serialization.register_serialization_state(_kind, _to_state_dict, _from_state_dict, override=True)
