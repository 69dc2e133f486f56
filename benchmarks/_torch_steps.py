"""Training steps in torch: strict float32, TF32, or torch.amp; eager or compiled; channels last.

Decides how a torch user trains in mixed precision: `torch.autocast`, `torch.amp.GradScaler` under float16, the fused
optimizers. Does not decide the models. Imported only where torch is installed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

AMP = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    """Returns when the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allow_tf32(allowed: bool) -> None:
    """Sets whether float32 products may run in TF32; by default, torch allows it in convolutions only."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def to_device(batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """A NumPy batch on the device: images `[n, h, w, c]` become `[n, c, h, w]`, channels last; tokens int64."""

    def move(name: str, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(device())
        if tensor.ndim == 4:
            return tensor.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        return tensor if name == "weights" else tensor.long()

    return {name: move(name, array) for name, array in batch.items()}


def loss_of(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The mean cross-entropy; where the batch has weights, over the positions of weight 1."""
    if "weights" not in batch:
        return F.cross_entropy(outputs.flatten(0, -2), batch["labels"].flatten())
    losses = F.cross_entropy(outputs.flatten(0, -2), batch["labels"].flatten(), reduction="none")
    weights = batch["weights"].flatten()
    return (losses * weights).sum() / weights.sum().clamp(min=1.0)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the workload of that name, fused."""
    if name in ("bert_base", "gpt2"):
        return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    if name == "lstm":
        return torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    # SGD allocates its momentum buffers in the first step. If a GradScaler skips that step, they are never written, and
    # the next step reads them (torch 2.13); so they are zeros from the start.
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class TorchStepper:
    """A training step in torch, to be run many times over the same batch.

    Args:
      name: of the workload, for its optimizer; the LSTM's gradients are clipped.
      model: in float32.
      batch: NumPy arrays.
      precision: `"float32"` (strict), `"tf32"`, `"bfloat16"` or `"float16"`, the last two by torch.amp.
      compiled: whether the model is compiled.

    Attributes:
      compile_seconds: of the first two steps, which compile and choose kernels.
      losses: of the first step and of the last one.
    """

    def __init__(
        self, name: str, model: nn.Module, batch: Mapping[str, np.ndarray], precision: str, compiled: bool
    ) -> None:
        allow_tf32(precision != "float32")
        torch.backends.cudnn.benchmark = True
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._model = model.to(device(), memory_format=torch.channels_last).train()
        self._optimizer = optimizer_of(name, self._model)
        self._call: Callable[..., Any] = torch.compile(self._model) if compiled else self._model
        self._batch = to_device(batch)
        self._dtype = AMP.get(precision)
        self._scaler = torch.amp.GradScaler(device().type, enabled=precision == "float16")
        self._clip = name == "lstm"
        self.losses: list[float] = []
        start = time.perf_counter()
        self(1)
        self(1)
        self.compile_seconds = time.perf_counter() - start

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes that were allocated at once since the model was made; None without a GPU."""
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            loss = self._step()
        wait()
        self.losses[1:] = [float(loss)]

    def _step(self) -> torch.Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device().type, dtype=self._dtype or torch.bfloat16, enabled=self._dtype is not None):
            loss = loss_of(self._call(self._batch["inputs"]), self._batch)
        self._scaler.scale(loss).backward()
        if self._clip:
            self._scaler.unscale_(self._optimizer)
            nn.utils.clip_grad_norm_(self._model.parameters(), 10.0)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return loss.detach()


class AdamStepper:
    """Adam over random parameters with given gradients, bare or under a `GradScaler`.

    Args:
      shapes: of the parameters.
      fused: the fused kernels; else the `foreach` ones.
      scaled: whether a `GradScaler` unscales, checks and adjusts. It unscales gradients in place at every step, so its
        scale is 1, which leaves them unchanged.
      overflow: whether the first gradient holds an infinity.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], fused: bool, scaled: bool, overflow: bool) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self._params = [nn.Parameter(0.01 * torch.randn(*shape, device=device())) for shape in shapes]
        for parameter in self._params:
            parameter.grad = 0.01 * torch.randn_like(parameter)
        if overflow:
            self._params[0].grad.view(-1)[0] = torch.inf  # pyright: ignore[reportOptionalMemberAccess]
        self._optimizer = torch.optim.Adam(self._params, lr=1e-3, fused=fused, foreach=not fused)
        self._scaler = torch.amp.GradScaler(
            device().type, init_scale=1.0, backoff_factor=0.999, growth_interval=2**30, enabled=scaled
        )
        self._loss = torch.zeros((), device=device())

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            self._scaler.scale(self._loss)
            self._scaler.step(self._optimizer)
            self._scaler.update()
        wait()


def release() -> None:
    """Frees the memory of the last model and its compiled code."""
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
