"""`tensor_core_report`: which products of a program Tensor Cores run, without compiling or running it.

Decides what is looked at. Does not decide what is said of one product (`_products.py`), nor how it is summed up
(`_tensor_core_report.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..._autocast import autocast
from ..._autocast._flow import TOP
from ..._explain._operations import Visit, visits
from ..._flops import PRODUCTS
from ..._policy import Policy, get_policy
from ..gpu import abstract_mesh, get_gpu, traced_program
from ._amdahl import estimate, other_bytes
from ._products import products_of
from ._tensor_core_report import TensorCoreReport

# What may multiply matrices where a trace does not show it.
_OPAQUE = frozenset(
    {"pallas_call", "ffi_call", "pure_callback", "io_callback", "scaled_matmul_wrapper", "cudnn_fusion"}
)


def tensor_core_report(
    fn: Callable[..., Any],
    policy: Policy | str | None = None,
    gpu: str = "H200",
    devices: int | Mapping[str, int] | None = None,
) -> Callable[..., TensorCoreReport]:
    """Returns a function that lists every dot and convolution of `fn` and tells whether Tensor Cores run it well.

    `fn` is traced, not run, and no GPU is needed. Report what you train with, gradient included, so that the products
    of the backward pass are seen:

        tensor_core_report(jmp.value_and_grad(loss_fn, policy))(params, batch, loss_scale=scale)
        tensor_core_report(jax.grad(loss_fn), policy)(params, batch)

    What the compiler makes of it, bytes and kernels included, is in `gpu_report`.

    Args:
      fn: any function of arrays: plain, jitted, under `autocast`, or what `value_and_grad` returned.
      policy: a policy to `autocast` `fn` with first; `None` takes `fn` as it is.
      gpu: whose rates to reckon with: `"A100"`, `"H100"`, `"H200"`, or the text of a target description.

      devices: a mesh to trace `fn` in, for `shard_map` without one, as for `gpu_report`; `None` for that of the caller.

    Returns:
      A function of `fn`'s arguments (arrays or `jax.ShapeDtypeStruct`s) that returns a `TensorCoreReport`.

    Raises:
      TypeError: `fn` is not callable, or `gpu` is no text.
      ValueError: `gpu` or `policy` is unknown, or `devices` are none.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.mean(x @ w)
    >>> report = tensor_core_report(jax.grad(loss), "mixed_float16")(jnp.ones((512, 50257)), jnp.ones((64, 512)))
    >>> print(report.products[0].reason)
    no multiple of 8: pad N 50257 -> 50264
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be callable, got {fn!r}; pass the function whose products are to be listed.")
    described = get_gpu(gpu)
    program = fn if policy is None else autocast(fn, policy)
    mesh = None if devices is None else abstract_mesh(devices)

    def report(*args: Any, **kwargs: Any) -> TensorCoreReport:
        with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh):
            found = list(visits(traced_program(program, args, kwargs), TOP))
        products = tuple(products_of(found, described))
        others = other_bytes(found)
        return TensorCoreReport(
            gpu=described.name,
            policy=None if policy is None else str(get_policy(policy)),
            products=products,
            estimate=estimate(products, others, described, repaired=False),
            repaired=estimate(products, others, described, repaired=True),
            opaque=tuple(dict.fromkeys(visit.node.name for visit in found if visit.node.name in _OPAQUE)),
            uncounted_loops=_uncounted_loops(found),
        )

    return report


def _uncounted_loops(found: Sequence[Visit]) -> int:
    """How many `while` loops hold a product: their length is not in the program."""
    bodies = (visit.node.params["body_jaxpr"] for visit in found if visit.node.name == "while")
    return sum(any(visit.node.name in PRODUCTS for visit in visits(body, TOP)) for body in bodies)
