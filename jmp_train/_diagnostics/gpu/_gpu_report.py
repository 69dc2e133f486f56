"""`gpu_report`: what a compiler makes of a function for a GPU that need not be there.

Decides what is read from a compiled program and passed on to `GPUReport`. Does not decide how that is summed up and
printed; see `_report.py`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ..._autocast import autocast
from ..._explain._emitted import Emitted, emitted_of
from ..._flops import PRODUCTS
from ..._jaxpr import LOOPS
from ..._policy import Policy, get_policy
from ..._values import check_callable
from ._compile import (
    check_sizes,
    compile_lowered,
    gpu_mesh,
    is_jitted,
    lower_for_gpu,
    mesh_axes,
    module_text,
    traced_program,
)
from ._compiled_products import products
from ._copies import explained_copies, unused_donors
from ._gpus import GPU, get_gpu
from ._hlo import parse
from ._kernels import collective_kernels, kernels, narrow_sums, opcode_of, unknown_loops
from ._report import Collective, GPUReport, Memory, NarrowSum

# The warning of `jax.jit` for donated arguments that fit no result.
_WITHOUT_TRITON = (
    "Triton's tile sizes do not divide a product, and only a GPU can try others: all products are counted as cuBLAS's, "
    "which fuse with less of what is around them."
)
_UNUSED = re.compile(r"^Some donated buffers were not usable: (.*)\.$", re.M)


def gpu_report(
    fn: Callable[..., Any],
    gpu: str = "H200",
    devices: int | Mapping[str, int] = 1,
    *,
    policy: Policy | str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    in_shardings: Any = None,
) -> Callable[..., GPUReport]:
    """Returns a function that compiles `fn` for a GPU and tells what became of it. Nothing is run.

    Report what you train with, the whole step, jitted as it is in training:

        before = gpu_report(jax.jit(float32_step, donate_argnums=0))(state, batch)
        after = gpu_report(jax.jit(mixed_step, donate_argnums=0))(state, batch)
        print(before.compare(after))

    The machine needs no GPU, no driver and no CUDA libraries, only `pip install "jmp-train[gpu-report]"` on Linux and,
    without a GPU, the environment variable `JAX_PLATFORMS=cpu`: else JAX looks for one and leaves the compiler out. The
    figures are bytes and FLOPs as compiled, the same every time; no kernel is timed and none is tuned, so the choice
    between cuBLAS, cuDNN and Triton may differ from that of a run on the GPU itself.

    Args:
      fn: any function of arrays, jitted or not, under `autocast` or not.
      gpu: one of the names of `gpus()`, such as `"H200"`, `"L40S"` or `"T4"`, or the text of another GPU's target
        description (XLA's `GpuTargetConfigProto`).
      devices: how many GPUs, along one mesh axis `"data"`; or `{"data": 4, "model": 2}`. The mesh is set while `fn` is
        traced: `shard_map` without `mesh` and partition specs in `jit`'s `in_shardings` find it. All figures are those
        of one GPU.
      policy: a policy to `autocast` a function that is not jitted with, for a first look; `None` leaves `fn` as it is.
      donate_argnums, in_shardings: for a function that is not jitted, as for `jax.jit`; shardings are partition specs
        over the axes of `devices`. By default nothing is donated and the compiler shards as it likes.

    Returns:
      A function of `fn`'s arguments (arrays or `jax.ShapeDtypeStruct`s) that returns a `GPUReport`.

    Warns:
      UserWarning: of products in bfloat16 for a GPU that has none.

    Raises:
      TypeError: `fn` is not callable, or is jitted and given options of `jit` here.
      ValueError: `gpu` or `devices` name none, `gpu` is older than the compiler knows, `fn` uses devices of this
        machine, or an argument has a symbolic dimension.
      RuntimeError: the compiler is not installed, or not in jax's version; the error has the command.

    ```python
    report = gpu_report(lambda w, x: x @ w)(jnp.ones((512, 512)), jnp.ones((64, 512)))
    report.bytes, report.tensor_core_share, report.memory.peak
    ```

    >>> gpu_report(3)
    Traceback (most recent call last):
      ...
    TypeError: `fn` must be callable, got 3; pass the function to compile.
    """
    check_callable("fn", fn, "pass the function to compile")
    options = {"donate_argnums": donate_argnums, "in_shardings": in_shardings}
    options = {name: value for name, value in options.items() if value is not None}
    if is_jitted(fn) and (options or policy is not None):
        given = [*options, *(["policy"] if policy is not None else [])]
        raise TypeError(
            f"`fn` is jitted, so `{given[0]}` belongs inside: jax.jit(fn, donate_argnums=...), "
            f"jax.jit(autocast(fn, policy)). Pass either a jitted function or options."
        )
    described = get_gpu(gpu)
    mesh_axes(devices)  # complains here rather than at the first report
    program = fn if policy is None else autocast(fn, policy)

    def report(*args: Any, **kwargs: Any) -> GPUReport:
        check_sizes(args, kwargs)
        mesh = gpu_mesh(devices, gpu)
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            lowered = lower_for_gpu(program, mesh, args, kwargs, **options)
            compiled, with_triton = compile_lowered(lowered)
        text = module_text(compiled)
        unused = _unused_donations(raised)
        with jax.set_mesh(mesh):
            emitted = tuple(emitted_of(traced_program(program, args, kwargs)))
        notes = tuple(_notes(emitted, described))
        for note in notes:
            warnings.warn(note, stacklevel=2)
        notes = notes if with_triton else (*notes, _WITHOUT_TRITON)
        return GPUReport(
            gpu=described.name,
            bandwidth=described.bandwidth,
            rates=described.rates,
            devices=mesh.size,
            policy=None if policy is None else str(get_policy(policy)),
            jax_version=jax.__version__,
            kernels=tuple(kernels(text)),
            products=tuple(products(text, described)),
            collectives=_collectives(text),
            sixteen_bit_sums=(*_narrow_sums(text), *_carried_sums(emitted)),
            copies=explained_copies(text, lowered.out_info),
            unused_donations=(*unused, *unused_donors(text)),
            unknown_loops=unknown_loops(text),
            memory=_memory(compiled),
            notes=notes,
        )

    return report


def _unused_donations(raised: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """The buffers that JAX says it could not donate; other warnings are warned of again."""
    unused: list[str] = []
    for each in raised:
        if found := _UNUSED.search(str(each.message)):
            unused += re.findall(r"\w+\[[\d,]*\]", found.group(1))
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return tuple(unused)


def _memory(compiled: jax.stages.Compiled) -> Memory:
    analysis: Any = compiled.memory_analysis()
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        results=analysis.output_size_in_bytes,
        donated=analysis.alias_size_in_bytes,
        temporary=analysis.temp_size_in_bytes,
    )


def _collectives(text: str) -> tuple[Collective, ...]:
    return tuple(
        Collective(opcode, kernel.writes, kernel.written, kernel.times, kernel.scope, kernel.source)
        for opcode, kernel in collective_kernels(text)
    )


def _narrow_sums(text: str) -> tuple[NarrowSum, ...]:
    module, found = parse(text), []
    for each, add in narrow_sums(text):
        # XLA rewrites running sums as reduce-window in float32; only the addition inside keeps its dtype and line.
        _, _, shape = each.result.strip("()").split("{")[0].partition("[")
        result = f"{add.result.partition('[')[0]}[{shape}"
        found.append(NarrowSum(opcode_of(each), result, each.scope, module.source_of(each) or module.source_of(add)))
    return tuple(found)


def _notes(emitted: Sequence[Emitted], gpu: GPU) -> Iterator[str]:
    """What a program asks for that the GPU does not have."""
    if not gpu.has_bfloat16 and any(each.primitive in PRODUCTS and "bfloat16" in each.operands for each in emitted):
        yield (
            f"{gpu.name} has no bfloat16: products of it are computed in float32 there and move twice the bytes; use "
            f"mixed_float16."
        )


def _carried_sums(emitted: Sequence[Emitted]) -> tuple[NarrowSum, ...]:
    """Sums that a loop carries from iteration to iteration. In the compiled module they are additions like any other,
    hence they are read from the jaxpr."""
    return tuple(
        NarrowSum(f"{each.primitive} carry", each.sums_in, each.scope, each.source)
        for each in emitted
        if each.primitive in LOOPS and each.sums_in in ("float16", "bfloat16")
    )
