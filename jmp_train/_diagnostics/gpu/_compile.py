"""Compiles a function for an NVIDIA GPU on a machine that has none.

Decides how arguments are placed on GPUs that are described, not present, which error says that they cannot be, and that
no machine code is made. Does not decide what is read from the compiled module; see `_gpu_report.py`.
"""

import functools
import importlib.metadata
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh

from ..._jaxpr import ClosedJaxpr, Jaxpr, trace
from ..._paths import argument_leaves
from ..._sizes import is_static
from ..._static import hide_static, is_argument, of_hidden
from ..._values import as_count
from ._gpus import get_gpu

_PLUGIN = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
# XLA's error where the tile sizes that it uses without autotuning do not divide a product, such as one of 8 x 197 rows.
_NO_TILES = "Couldn't find output tile sizes"


def gpu_mesh(devices: int | Mapping[str, int] = 1, gpu: str = "H200") -> Mesh:
    """A mesh of GPUs that are described, not present.

    Args:
      devices: how many, along one axis `"data"`; or the size of each named axis, `{"data": 4, "model": 2}`.
      gpu: as for `get_gpu`.
    """
    axes = mesh_axes(devices)
    sizes, described = list(axes.values()), get_gpu(gpu)
    if not described.is_compiled_for:
        raise ValueError(
            f"`gpu`: the compiler of CUDA 13 makes no kernels for Volta and older, such as {described.name} of compute "
            f"capability {'.'.join(map(str, described.capability))}; the oldest it compiles for is the T4."
        )
    target = described.target
    _check_plugin()
    try:
        topology = topologies.get_topology_desc("", "cuda", target_config=target, topology=f"1x1x{math.prod(sizes)}")
    except NotImplementedError as error:  # JAX knows no such platform: it left the plugin out when it started
        raise RuntimeError(
            "JAX looked for a GPU when it started, and left out the GPU compiler as it found none. Without a GPU, "
            "set the environment variable JAX_PLATFORMS=cpu, or call jax.config.update('jax_platforms', 'cpu') before "
            "anything else of JAX."
        ) from error
    except Exception as error:  # the plugin's exceptions have no common type
        raise RuntimeError(
            f"the GPU compiler of jax {jax.__version__} does not start for this target description. If it is one of "
            f"the named GPUs, reinstall the plugin: {_install_command()}"
        ) from error
    return Mesh(np.array(topology.devices).reshape(sizes), tuple(axes))


def mesh_axes(devices: int | Mapping[str, int]) -> dict[str, int]:
    """The size of each axis of a mesh, by name."""
    axes = dict(devices) if isinstance(devices, Mapping) else {"data": devices}
    if not axes or not all(isinstance(name, str) for name in axes):
        raise ValueError(f"`devices` must be a number of GPUs or the size of each named axis, got {devices!r}.")
    return {name: as_count("devices", size) for name, size in axes.items()}


def abstract_mesh(devices: int | Mapping[str, int]) -> AbstractMesh:
    """The same mesh without devices, to trace in."""
    axes = mesh_axes(devices)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def _install_command() -> str:
    return "pip install " + " ".join(f'"{name}=={jax.__version__}"' for name in _PLUGIN)


def _check_plugin() -> None:
    """Raises unless the compiler plugin is there, in the version of jax: with another one it crashes or miscompiles."""
    found = {name: _version(name) for name in _PLUGIN}
    missing = [name for name, version in found.items() if version is None]
    if missing:
        raise RuntimeError(
            f"compiling for a GPU needs {' and '.join(missing)} (Linux; no GPU, no driver and no CUDA libraries): "
            f"{_install_command()}"
        )
    others = [f"{name} {version}" for name, version in found.items() if version != jax.__version__]
    if others:
        raise RuntimeError(
            f"compiling for a GPU needs a plugin of exactly jax's version {jax.__version__}, got "
            f"{' and '.join(others)}: {_install_command()}"
        )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def lower_for_gpu(
    fn: Callable[..., Any], mesh: Mesh, args: tuple, kwargs: Mapping[str, Any], **jit_options: Any
) -> jax.stages.Lowered:
    """Lowers `fn`, or what `jax.jit` made of it, for the GPUs of `mesh`.

    Args:
      fn: the function. If it is jitted already, its own options hold and `jit_options` must be empty.
      args, kwargs: its arguments, arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes are read. Where they live
        does not matter: `in_shardings` (of partition specs over the mesh's axes) says how they are split.
    """
    jitted: Any = fn if is_jitted(fn) else jax.jit(fn, **jit_options)
    args, kwargs = jax.tree.map(_abstract, (args, dict(kwargs)))
    with jax.set_mesh(mesh):
        try:
            lowered = jitted.lower(*args, **kwargs)
        except RuntimeError as error:
            if "Unknown backend" not in str(error):
                raise
            raise ValueError(
                "`fn` calls back to Python (jax.debug.print, jax.pure_callback), which cannot be compiled for a GPU "
                "that is not there; leave the call out for the report."
            ) from error
        except ValueError as error:
            if "device" not in str(error) and "mesh" not in str(error) and "emory kind" not in str(error):
                raise
            raise ValueError(
                f"`fn` names devices or a mesh of this machine, and the {mesh.size} described GPUs are no part of it. "
                f"Leave the mesh out: write partition specs over the axes {', '.join(map(repr, mesh.axis_names))}, and "
                f"shard_map without `mesh`; they meet the described mesh when the report is made, and jax.set_mesh's "
                f"when you run."
            ) from error
    return getattr(lowered, "lowered", lowered)  # flax.nnx.jit has its own type around it


def check_sizes(args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError where an argument has a symbolic dimension."""
    for path, leaf in argument_leaves(args, kwargs):
        shape = getattr(leaf, "shape", ())
        if not is_static(shape):
            raise ValueError(
                f"a report needs sizes in numbers, the argument {path!r} has the symbolic shape "
                f"{tuple(shape)}; pass arrays, or jax.ShapeDtypeStructs of the sizes that you run with."
            )


def traced_program(fn: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> ClosedJaxpr | Jaxpr:
    """The jaxpr of a function, jitted or not; a jitted one knows which of its arguments are static."""
    found = getattr(fn.trace(*args, **kwargs), "jaxpr", None) if is_jitted(fn) else None  # type: ignore[attr-defined]
    if found is not None:
        return found
    args, kwargs = hide_static((args, kwargs), is_argument)
    return trace(of_hidden(fn), *args, **kwargs)[0]


def is_jitted(fn: Callable[..., Any]) -> bool:
    """Whether `jax.jit` or its like made the function: it has JAX's ahead-of-time methods."""
    return hasattr(fn, "lower") and hasattr(fn, "trace")


def _abstract(leaf: Any) -> Any:
    # Keeps the weak type, on which promotion and so the program depend; drops the sharding, over devices of this host.
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))
    return leaf


def compile_for_gpu(
    fn: Callable[..., Any],
    *args: Any,
    gpu: str = "H200",
    devices: int | Mapping[str, int] = 1,
    **jit_options: Any,
) -> jax.stages.Compiled:
    """Compiles `jax.jit(fn, **jit_options)` for `args`."""
    return compile_lowered(lower_for_gpu(fn, gpu_mesh(devices, gpu), args, {}, **jit_options))[0]


def compile_lowered(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bool]:
    """Compiles a lowered function; also returns whether XLA could use Triton for its products, or cuBLAS only."""
    options: dict[str, Any] = {
        "xla_gpu_autotune_level": 0,  # autotuning times kernels, for which it needs a GPU
        "xla_gpu_cuda_data_dir": _cuda_without_assembler().name,
        # JAX's persistent cache ignores the directory in its keys, not this level: no program to run is found there.
        "xla_backend_optimization_level": 0,
    }
    try:
        return lowered.compile(compiler_options=options), True
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES not in str(error):
            raise
    return lowered.compile(compiler_options={**options, "xla_gpu_enable_triton_gemm": False}), False


def gpu_module(fn: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The text of the optimized module; the arguments are those of `compile_for_gpu`."""
    return module_text(compile_for_gpu(fn, *args, **options))


def module_text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    if text is None:
        raise RuntimeError(
            f"jax {jax.__version__} does not tell what it compiled; use the version this was tested with."
        )
    return text


# XLA hands every kernel to `ptxas`, CUDA's assembler, and waits for it about as long as for all else, though no report
# reads machine code. No option stops XLA before that, but one says where to look for CUDA first: there it finds this
# assembler, which assembles nothing, and a library of device functions without any. The optimized module is made before
# and stays the same. The version is that of the plugin's CUDA: XLA ignores an assembler that is too old for it.
_ASSEMBLER = """\
#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0, V13.0.88"
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && echo none > "$2"
  shift
done
exit 0
"""


@functools.cache
def _cuda_without_assembler() -> tempfile.TemporaryDirectory[str]:
    """Made once for a process, and removed when it ends.

    Where the directory may hold no programs, XLA goes on to look for a CUDA that is installed.
    """
    made = tempfile.TemporaryDirectory(prefix="jmp_train_")
    assembler = Path(made.name, "bin", "ptxas")
    assembler.parent.mkdir()
    assembler.write_text(_ASSEMBLER)
    assembler.chmod(0o755)
    functions = Path(made.name, "nvvm", "libdevice", "libdevice.10.bc")
    functions.parent.mkdir(parents=True)
    functions.write_text("; no functions\n")  # LLVM's assembly, of an empty module
    return made
