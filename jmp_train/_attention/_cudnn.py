"""cuDNN's fused attention: what it takes, and how it is called.

The one file that imports a private module of JAX: its public function refuses float32 operands while tracing, gives the
log-sum-exp in 16 bits, and has no call for the backward pass alone. The primitives bound here are those of JAX 0.10 to
0.12; with another one, `why_not_fused` says so and the reference runs.

Decides which attentions the kernels take. Does not decide dtypes: operands are in 16 bits, or the reference runs.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from ._partition import partitioned
from ._reference import allowed, merged, sum_to, zero_padding
from ._settings import Settings

_dispatch: Any = None
_fused: Any = None
if jax.__version_info__ < (0, 13):
    try:
        from jax._src import dispatch as _dispatch
        from jax._src.cudnn import fused_attention_stablehlo as _fused
    except ImportError:
        pass

_FORWARD: Any = getattr(_fused, "_dot_product_attention_fwd_p", None)
_BACKWARD: Any = getattr(_fused, "_dot_product_attention_bwd_p", None)
# The largest heads, by the compute capability from which on they are fused.
_LARGEST = {(8, 0): 128, (9, 0): 256}
_GENERATIONS = {(8, 0): "Ampere", (9, 0): "Hopper"}


def fused_from(query: Any) -> tuple[int, int]:
    """The least compute capability on which cuDNN takes heads of the size of the query's."""
    return next(capability for capability, size in _LARGEST.items() if query.shape[-1] <= size)


def generation(query: Any) -> str:
    """The name of the first generation of GPUs on which it does."""
    return _GENERATIONS[fused_from(query)]


def why_not_fused(query: Any, key: Any, extras: Sequence[Any], settings: Settings) -> str | None:
    """Why cuDNN's kernels do not take an attention of these operands in 16 bits; `None` if they do.

    Args:
      query, key: arrays or abstract values, `[B, T, N, H]` and `[B, S, K, H]`.
      extras: what `settings.extras` names.
      settings: the static part.
    """
    if _FORWARD is None or _BACKWARD is None:
        return f"its kernels are called as in JAX 0.10 to 0.12, and this is JAX {jax.__version__}"
    named = settings.named(extras)
    shapes = [x.shape for x in (query, key, *extras)]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return "its dimensions are symbolic"
    (_, rows, _, size), columns = query.shape, key.shape[1]
    if size % 8 or size > max(_LARGEST.values()):
        return f"cuDNN takes heads of a multiple of 8 up to {max(_LARGEST.values())}, and these have {size}"
    if min(*query.shape, *key.shape) == 0:
        return "it is empty"
    masks = [named[name].shape for name in ("bias", "mask") if named[name] is not None]
    if masks and (rows % 2 or columns % 2):
        return f"with a bias or a mask cuDNN takes even lengths, and these are {rows} and {columns}"
    if (settings.is_causal or settings.window) and rows != columns:
        return f"a causal mask or a window is fused for equal lengths, and these are {rows} and {columns}"
    if settings.window is not None:
        if settings.window[1] > 0 and not settings.is_causal:
            return "cuDNN has no window to the right"
        if named["query_seq_lengths"] is not None or named["key_value_seq_lengths"] is not None:
            return "it has a window and lengths"
    return None


def lowering(reference: Callable[..., Any], fused: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering rule for CUDA: the kernels if they take the operands, else the reference."""

    def rule(ctx: Any, *operands: Any, settings: Settings) -> Any:
        query, key, _, *rest = ctx.avals_in
        takes = query.dtype in (jnp.float16, jnp.bfloat16)
        takes = takes and why_not_fused(query, key, rest[: len(settings.extras)], settings) is None
        if not (takes and _capability(ctx) >= fused_from(query)):
            return mlir.lower_fun(reference, multiple_results=True)(ctx, *operands, settings=settings)
        shapes = tuple(aval.shape for aval in ctx.avals_in)
        return mlir.lower_fun(partitioned(fused, settings, shapes), multiple_results=True)(ctx, *operands)

    return rule


def needs_devices(primitive: Any) -> None:
    """Tells JAX that lowering `primitive` reads the devices: over several of them, the kernels are partitioned."""
    if _dispatch is not None:
        _dispatch.prim_requires_devices_during_lowering.add(primitive)


def _capability(ctx: Any) -> tuple[int, ...]:
    """The compute capability of the devices that a program is lowered for; the least that is fused if it is unknown."""
    context = ctx.module_context.axis_context
    devices = getattr(context, "device_assignment", None) or getattr(
        getattr(context, "mesh", None), "_flat_devices_tuple", None
    )
    capability = getattr(devices[0], "compute_capability", None) if devices else None
    return tuple(map(int, str(capability).split("."))) if capability else min(_LARGEST)


def _arguments(query: Any, key: Any, extras: Sequence[Any], settings: Settings) -> tuple[list[Any], dict[str, Any]]:
    """What both calls have in common: the operands after query, key and value, and the parameters."""
    named = settings.named(extras)
    batch, rows, columns = *query.shape[:2], key.shape[1]
    none = jnp.zeros(0, query.dtype)
    bias: Any = none
    if named["bias"] is not None or named["mask"] is not None:
        # With the lengths, one mask for all examples would become one for each example.
        mask = allowed(rows, columns, settings, {**named, "query_seq_lengths": None, "key_value_seq_lengths": None})
        bias, _ = merged(named["bias"], mask, named["mask"], query.dtype)
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], rows, columns))
    lengths, valid = named["query_seq_lengths"], named["key_value_seq_lengths"]
    padded = lengths is not None or valid is not None
    if padded:
        lengths = jnp.full(batch, rows, jnp.int32) if lengths is None else lengths
        valid = jnp.full(batch, columns, jnp.int32) if valid is None else jnp.where(valid > 0, valid, columns)
    causal = settings.is_causal or settings.window is not None
    kinds = _fused.MaskType
    params = {
        "scale": settings.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not none, bias is not none and settings.bias_has_gradient),
        "mask_type": [kinds.NO_MASK, kinds.PADDING, kinds.CAUSAL, kinds.PADDING_CAUSAL][padded + 2 * causal],
        "layout": _fused.AttentionLayout.BTNH.value,
        "sliding_window_length": None if settings.window is None else settings.window[0] + 1,
    }
    if "score_mod" in inspect.signature(_fused._dot_product_attention_fwd_impl).parameters:  # from JAX 0.12
        params.update(score_mod_name=None, score_mod_jaxpr=None)
    return [bias, *((lengths, valid) if padded else (none, none)), none, none, none, none], params


def _attending(key: Any, rows: int, extras: Sequence[Any], settings: Settings) -> Any:
    """Which rows attend to anything, `[B, T, N, 1]` or broadcastable to it; `None` for all.

    The others average all values, as in `jax.nn`; the kernels would average only the positions that causality allows.
    """
    named = settings.named(extras)
    mask, lengths = named["mask"], named["key_value_seq_lengths"]
    if mask is None:
        return None if lengths is None else (lengths > 0)[:, None, None, None]
    inside: Any = allowed(rows, key.shape[1], settings, {**named, "query_seq_lengths": None})
    return jnp.moveaxis(jnp.any(inside, axis=-1), 1, 2)[..., None]


def forward(query: Any, key: Any, value: Any, *extras: Any, settings: Settings) -> tuple[Any, Any]:
    """As `_reference.forward`."""
    rest, params = _arguments(query, key, extras, settings)
    out, lse = _FORWARD.bind(query, key, value, *rest, is_training=True, **params)
    attending = _attending(key, query.shape[1], extras, settings)
    if attending is not None:
        average = jnp.mean(value, axis=1, keepdims=True, dtype=jnp.float32).astype(out.dtype)
        out = jnp.where(attending, out, jnp.repeat(average, query.shape[2] // key.shape[2], axis=2))
    return zero_padding(out, settings.named(extras)["query_seq_lengths"]), lse


def backward(query: Any, key: Any, value: Any, *rest: Any, settings: Settings) -> tuple[Any, ...]:
    """As `_reference.backward`."""
    *extras, out, lse, gradient = rest
    others, params = _arguments(query, key, extras, settings)
    gradient = zero_padding(gradient, settings.named(extras)["query_seq_lengths"])
    attending = _attending(key, query.shape[1], extras, settings)
    given = gradient if attending is None else jnp.where(attending, gradient, jnp.zeros((), gradient.dtype))
    found = list(_BACKWARD.bind(query, key, value, *others, lse, out, given, **params))
    if attending is not None:
        averaged = jnp.where(attending, jnp.zeros((), gradient.dtype), gradient)
        averaged = jnp.sum(averaged.reshape(*gradient.shape[:2], key.shape[2], -1, key.shape[3]), (1, 3), jnp.float32)
        found[2] = (found[2].astype(jnp.float32) + averaged[:, None] / key.shape[1]).astype(value.dtype)
    if settings.bias_has_gradient:
        bias = settings.named(extras)["bias"]
        found[3] = sum_to(found[3].astype(jnp.float32), bias.shape).astype(bias.dtype)
    return tuple(found)
