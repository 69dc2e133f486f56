"""The primitives that attention is recorded as, and how they are differentiated, batched and lowered.

    out, lse = jmp_attention query key value ...            derivative:  d_out = jmp_attention_tangent ... d_query ...
    d_query, ... = jmp_attention_backward ... out lse d_out              (its transpose)

Forward and backward are one equation each, so that autocast sees an attention as a whole, and so that query, key,
value, output and log-sum-exp are the only residuals. Second derivatives are JAX's derivatives of `_reference.py`.

Decides the rules. Does not decide the arithmetic (`_reference.py`), nor where a fused kernel runs (`_cudnn.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from .._jaxpr import Primitive
from . import _cudnn, _reference
from ._settings import Settings, config

ATTENTION = "jmp_attention"
ATTENTION_TANGENT = "jmp_attention_tangent"
ATTENTION_BACKWARD = "jmp_attention_backward"

_DIFFERENTIABLE = ("query", "key", "value", "bias")


def names_of_operands(primitive: str, settings: Settings) -> tuple[str, ...]:
    """What each operand of a primitive is; `d_` before the name of an operand stands for its tangent."""
    given = ("query", "key", "value", *settings.extras)
    if primitive == ATTENTION:
        return given
    if primitive == ATTENTION_BACKWARD:
        return (*given, "out", "lse", "d_out")
    return (*given, "out", "lse", *(f"d_{name}" for name in _differentiated(settings)))


def _differentiated(settings: Settings) -> tuple[str, ...]:
    return _DIFFERENTIABLE if settings.bias_has_gradient else _DIFFERENTIABLE[:3]


def tangent(*operands: Any, settings: Settings) -> tuple[Any]:
    """The tangent of the output, given those of what is differentiated; `out` and `lse` are there for its transpose."""
    count = len(_differentiated(settings))
    output, inputs = _function_of_differentiated(operands[: -count - 2], settings)
    return (jax.jvp(output, inputs, operands[-count:])[1],)


def backward_of_inputs(*operands: Any, settings: Settings) -> tuple[Any, ...]:
    """What `jmp_attention_backward` computes, as a function of the inputs alone: to be differentiated again."""
    *given, _, _, gradient = operands
    output, inputs = _function_of_differentiated(given, settings)
    return jax.vjp(output, *inputs)[1](gradient)


def _function_of_differentiated(given: Sequence[Any], settings: Settings) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The output as a function of the operands that are differentiated, and these operands."""
    names = names_of_operands(ATTENTION, settings)
    positions = [names.index(name) for name in _differentiated(settings)]

    def output(*differentiated: Any) -> Any:
        full = list(given)
        for position, value in zip(positions, differentiated, strict=True):
            full[position] = value
        return _reference.output(*full, settings=settings)

    return output, tuple(given[position] for position in positions)


def _primitive(name: str, run: Callable[..., tuple[Any, ...]]) -> Primitive:
    """A primitive that is `run` wherever nothing else is registered."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.cache
    def compiled(settings: Settings) -> Callable[..., Any]:
        return jax.jit(lambda *operands: primitive.bind(*operands, settings=settings))

    @functools.lru_cache(maxsize=4096)
    def results(settings: Settings, avals: tuple[Any, ...]) -> list[Any]:
        # Traced, since the results vary over the axes of a mesh, or are sharded, as those of `run`.
        return jax.make_jaxpr(functools.partial(run, settings=settings))(*avals).out_avals

    def eager(*operands: Any, settings: Settings) -> Any:
        if config.jax_disable_jit:
            return run(*operands, settings=settings)
        return compiled(settings)(*operands)

    primitive.def_impl(eager)
    primitive.def_abstract_eval(lambda *avals, settings: results(settings, avals))
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    return primitive


attention_p = _primitive(ATTENTION, _reference.forward)
tangent_p = _primitive(ATTENTION_TANGENT, tangent)
backward_p = _primitive(ATTENTION_BACKWARD, _reference.backward)

for _p, _run, _fused in (
    (attention_p, _reference.forward, _cudnn.forward),
    (backward_p, _reference.backward, _cudnn.backward),
):
    # CPUs have few products of 16-bit numbers that leave in float32; in float32 they are the same.
    _exact = functools.partial(_run, exact_products=True)
    mlir.register_lowering(_p, mlir.lower_fun(_exact, multiple_results=True), platform="cpu")
    mlir.register_lowering(_p, _cudnn.lowering(_run, _fused), platform="cuda")
    _cudnn.needs_devices(_p)


def _instantiated(primal: Any, tangent: Any) -> Any:
    return jnp.zeros_like(primal) if isinstance(tangent, ad.Zero) else tangent


def _attention_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, settings: Settings) -> Any:
    out, lse = attention_p.bind(*primals, settings=settings)
    names = names_of_operands(ATTENTION, settings)
    of_bias = "bias" in names and not isinstance(tangents[names.index("bias")], ad.Zero)
    settings = dataclasses.replace(settings, bias_has_gradient=of_bias)
    positions = [names.index(name) for name in _differentiated(settings)]
    given = [_instantiated(primals[position], tangents[position]) for position in positions]
    (of_out,) = tangent_p.bind(*primals, out, lse, *given, settings=settings)
    # Only derivatives read the log-sum-exp, and second derivatives are computed from the inputs.
    return (out, lse), (of_out, ad.Zero(jax.typeof(lse).to_tangent_aval()))


def _tangent_transpose(cotangents: Sequence[Any], *operands: Any, settings: Settings) -> list[Any]:
    (cotangent,) = cotangents
    count = len(_differentiated(settings))
    given, linear = operands[:-count], operands[-count:]
    if isinstance(cotangent, ad.Zero):
        return [None] * len(operands)
    found = backward_p.bind(*given, cotangent, settings=settings)
    wanted = [g if ad.is_undefined_primal(x) else None for g, x in zip(found, linear, strict=True)]
    return [None] * len(given) + wanted


def _jvp_of(run: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    def rule(primals: Sequence[Any], tangents: Sequence[Any], *, settings: Settings) -> Any:
        differentiable = [i for i, x in enumerate(primals) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]

        def function(*values: Any) -> tuple[Any, ...]:
            full = list(primals)
            for i, value in zip(differentiable, values, strict=True):
                full[i] = value
            return tuple(run(*full, settings=settings))

        given = tuple(_instantiated(primals[i], tangents[i]) for i in differentiable)
        return jax.jvp(function, tuple(primals[i] for i in differentiable), given)

    return rule


ad.primitive_jvps[attention_p] = _attention_jvp
ad.primitive_jvps[tangent_p] = _jvp_of(tangent)
ad.primitive_jvps[backward_p] = _jvp_of(backward_of_inputs)
ad.primitive_transposes[tangent_p] = _tangent_transpose


def _batcher(primitive: Primitive) -> Callable[..., Any]:
    """Examples of `vmap` become examples of the batch."""

    def rule(operands: Sequence[Any], axes: Sequence[Any], *, settings: Settings) -> Any:
        names = names_of_operands(primitive.name, settings)
        size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
        batch = _batch_of(operands[0], axes[0])  # of the query
        shared: dict[str, int] = {}
        given = []
        for x, axis, name in zip(operands, axes, names, strict=True):
            plain = name.removeprefix("d_")
            broadcasts = plain in ("bias", "mask")
            rows = _batch_of(x, axis)
            mapped = axis is not None
            if broadcasts and not mapped and rows == 1 and not (plain == "bias" and settings.bias_has_gradient):
                given.append(x)  # one for all examples
                continue
            x = jnp.moveaxis(x, axis, 0) if mapped else jnp.broadcast_to(x, (size, *x.shape))
            if broadcasts and rows != batch:
                shared[plain] = rows
                x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
            given.append(x.reshape(size * x.shape[1], *x.shape[2:]))
        found = primitive.bind(*given, settings=settings)
        found = [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in found]
        if primitive is backward_p and "bias" in shared:
            found[3] = jnp.sum(found[3], axis=1, keepdims=True)
        return found, [0] * len(found)

    return rule


def _batch_of(x: Any, axis: Any) -> int:
    """The size of the first axis of an example."""
    return x.shape[1] if axis == 0 else x.shape[0]


for _p in (attention_p, tangent_p, backward_p):
    batching.primitive_batchers[_p] = _batcher(_p)
