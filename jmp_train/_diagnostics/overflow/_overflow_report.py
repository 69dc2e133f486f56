"""`overflow_report`: which parameters' gradients overflowed, read from the optimizer's state after the fact.

Decides how the record in `LossScaleState` is named, sorted and printed. Does not look for the equation that overflowed;
`_find_overflow.py` runs the step again for that.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..._paths import leaf_paths
from ..._scale_state import LossScaleState, ScaleStatus, find_state, step_metrics
from ..._text import columns, count

_AT_MINIMUM = (
    "The loss scale can go no lower. At 1 or less, overflows are the model's own: find_overflow(fn)(*args), with the "
    "step's gradient function and its arguments, finds the operation that makes the first one."
)


@dataclasses.dataclass(frozen=True, slots=True)
class OverflowedParameter:
    """A parameter whose gradient was not finite in some step.

    Attributes:
      path: where it is, as a tree path.
      shape: its shape.
      dtype: its dtype.
      at_last_skip: whether its gradient was non-finite in the last step that was skipped.
      skipped_steps: in how many skipped steps it was.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    at_last_skip: bool
    skipped_steps: int


@dataclasses.dataclass(frozen=True)
class OverflowReport:
    """Who was to blame for skipped steps.

    Attributes:
      parameters: those whose gradients were ever non-finite, the most often to blame first; among equals those of the
        last skip, then the tree's order.
      gradients: how many gradients there are, finite ones included.
      skipped_steps: steps skipped so far.
      consecutive_skips: steps skipped since the last one applied.
      loss_scale: the loss scale for the next step.
      status: `OK`, `BACKING_OFF` or `AT_MINIMUM`; see `ScaleStatus`.
    """

    parameters: tuple[OverflowedParameter, ...]
    gradients: int
    skipped_steps: int
    consecutive_skips: int
    loss_scale: float
    status: str

    @property
    def last(self) -> tuple[str, ...]:
        """The paths of those whose gradients were non-finite at the last skip."""
        return tuple(parameter.path for parameter in self.parameters if parameter.at_last_skip)

    def as_dict(self) -> dict[str, Any]:
        """Returns dictionaries, lists, strings and numbers, ready for JSON."""
        values = dataclasses.asdict(self)
        values["parameters"] = [row | {"shape": list(row["shape"])} for row in values["parameters"]]
        return values | {"last": list(self.last)}

    def __str__(self) -> str:
        advice = _AT_MINIMUM if self.status == ScaleStatus.AT_MINIMUM.name else ""
        scale = f"the loss scale is {self.loss_scale:g} ({self.status})"
        if not self.skipped_steps:
            text = f"No step was skipped: no gradient was infinite or NaN; {scale}."
            return "\n".join(filter(None, [text, advice]))
        skipped = f"{count(self.skipped_steps, 'step')} skipped, {self.consecutive_skips} since the last one applied"
        blamed = f"{len(self.parameters)} of {count(self.gradients, 'gradient')} overflowed"
        rows = [
            (row.path, f"{row.skipped_steps}/{self.skipped_steps}", "yes" if row.at_last_skip else "no", _array(row))
            for row in self.parameters
        ]
        table = columns(("parameter", "skipped steps", "at the last", "array"), rows)
        first = f"{skipped}; {scale}.\n{blamed}, {len(self.last)} at the last skip."
        return "\n".join(filter(None, [first, advice, table]))


def _array(row: OverflowedParameter) -> str:
    return f"{row.dtype}[{','.join(map(str, row.shape))}]"


def overflow_report(opt_state: Any, params: Any) -> OverflowReport:
    """Which parameters' gradients were infinite or NaN at the last skipped step, and how often each was to blame.

    `with_loss_scale` records it in every step without waiting for the device. This reads the record on the host: call
    it outside `jit`, only when the answer is needed.

    Args:
      opt_state: an optimizer's state that holds one `LossScaleState` at any depth, as for `get_loss_scale`.
      params: the parameters, their gradients, or any tree with their structure, as `with_loss_scale` saw them: what is
        frozen by a mask around it is `None` here.

    Returns:
      An `OverflowReport`.

    Raises:
      ValueError: `opt_state` holds none or several; the leaves of `params` are not as many as the gradients were; the
        state is traced, or a stack of states.

    >>> import jax.numpy as jnp, optax
    >>> from jmp_train import with_loss_scale
    >>> tx = with_loss_scale(optax.sgd(0.1))
    >>> params = {"bias": jnp.zeros(2), "kernel": jnp.ones((2, 2))}
    >>> grads = {"bias": jnp.ones(2), "kernel": jnp.full((2, 2), jnp.inf)}
    >>> _, opt_state = tx.update(grads, tx.init(params), params)
    >>> print(overflow_report(opt_state, params))
    1 step skipped, 1 since the last one applied; the loss scale is 16384 (BACKING_OFF).
    1 of 2 gradients overflowed, 1 at the last skip.
    parameter  skipped steps  at the last  array
    kernel     1/1            yes          float32[2,2]
    """
    state = find_state(opt_state)
    _check_readable(state)
    leaves, paths = jax.tree.leaves(params), leaf_paths(params)
    last, skips = np.asarray(state.last_overflow), np.asarray(state.overflow_counts)
    if len(paths) != len(skips):
        raise ValueError(
            f"`params` has {count(len(paths), 'leaf', 'leaves')}, and with_loss_scale saw gradients "
            f"with {len(skips)}. Pass the parameters that it was initialised with, those frozen by a mask as None (of "
            f"optax.lookahead's, params.fast)."
        )
    rows = [
        OverflowedParameter(path, np.shape(leaf), str(getattr(leaf, "dtype", type(leaf).__name__)), *flags)
        for path, leaf, *flags in zip(paths, leaves, last.tolist(), skips.tolist(), strict=True)
    ]
    metrics = step_metrics(opt_state)
    return OverflowReport(
        parameters=tuple(sorted((row for row in rows if row.skipped_steps), key=_sort_key)),
        gradients=len(rows),
        skipped_steps=int(metrics["skipped_steps"]),
        consecutive_skips=int(metrics["consecutive_skips"]),
        loss_scale=float(metrics["loss_scale"]),
        status=ScaleStatus(int(metrics["status"])).name,
    )


def _sort_key(row: OverflowedParameter) -> tuple[int, bool]:
    return -row.skipped_steps, not row.at_last_skip


def _check_readable(state: LossScaleState) -> None:
    if isinstance(state.skipped_steps, Tracer):
        raise ValueError(
            "`overflow_report` reads numbers on the host, and `opt_state` is being traced. Call it outside jit, on the "
            "state that the step returned."
        )
    if np.ndim(state.skipped_steps):
        raise ValueError(
            f"`opt_state` is a stack of states, of shape {np.shape(state.skipped_steps)}. Take one with "
            "jax.tree.map(lambda x: x[0], opt_state)."
        )
