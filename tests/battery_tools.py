"""Measures the battery: errors of gradients against float64, and the figures of their program compiled for an H200.

`how` names the way in which a program computes: "float32" as written, "float64" the reference, "flax_float16" with the
model's layers in that dtype, "mixed_float16" under autocast; likewise for bfloat16.
"""

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from battery_models import SMALL, Row, Size
from battery_row import gradient_of
from gpu_report_tools import convolutions, dots
from loop_carries import sixteen_bit_carries

from jmp_train import DEFAULT_RULES, autocast, get_policy
from jmp_train._diagnostics.gpu._compile import compile_for_gpu, module_text
from jmp_train._diagnostics.gpu._findings import NarrowSum, sixteen_bit_sums
from jmp_train._diagnostics.gpu._kernels import kernels, traffic

Tree = Any
Leaves = Mapping[str, np.ndarray]

HALVES = ("float16", "bfloat16")


# For references of many seeds or of convolutions, which would run longer than they compile.
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


def cast_floats(tree: Tree, dtype) -> Tree:
    return jax.tree.map(lambda x: np.asarray(x, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def abstract(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def primitives(fn: Callable[..., Any], *args: Any) -> Counter:
    """The number of equations of each primitive with each result dtype, sub-jaxprs included."""
    return primitives_of(jax.make_jaxpr(fn)(*args))


def primitives_of(program: Any) -> Counter:
    """`primitives` of a closed jaxpr."""
    found = Counter()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            found[eqn.primitive.name, *(str(getattr(v.aval, "dtype", None)) for v in eqn.outvars)] += 1
            for leaf in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(leaf, "eqns"):
                    visit(getattr(leaf, "jaxpr", leaf))

    visit(program.jaxpr)
    return found


def leaves(tree: Tree) -> dict[str, np.ndarray]:
    """The leaves in float64, by path."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x, np.float64) for path, x in named}


@functools.cache
def _initialiser(row: Row, size: Size):
    return jax.jit(row.make(size, None).init)


@functools.cache
def example(row: Row, seed: int = 0, size: Size = SMALL) -> tuple[Tree, Tree]:
    """(params, batch) of one seed, float32."""
    batch = row.make(size, None).batch(np.random.default_rng(seed))
    return _initialiser(row, size)(jax.random.key(seed), batch), batch


def gradient_function(row: Row, how: str, size: Size = SMALL) -> Callable[[Tree, Tree], Tree]:
    """`(params, batch) -> gradients` of the loss times the row's scale, computed in the way `how`."""
    kind, _, dtype = how.rpartition("_")
    if kind == "mixed":
        return autocast(row.grads(size=size), get_policy(how))
    if kind == "wide_residuals":
        rules = DEFAULT_RULES.with_residuals("float32")
        return autocast(row.grads(size=size), get_policy(f"mixed_{dtype}"), rules=rules)
    if how == "float64":
        return row.grads(row.oracle, size)
    return row.grads(jnp.dtype(dtype) if kind == "flax" else None, size)


@functools.cache
def _compiled_gradients(row: Row, how: str):
    is_oracle = how == "float64" and not row.fast
    return jax.jit(gradient_function(row, how), compiler_options=OPTIMISED if is_oracle else None)


def gradients(row: Row, how: str, seed: int = 0) -> Tree:
    """The scaled gradients of one seed, as the program returns them."""
    return gradients_at(row, how, *example(row, seed))


def gradients_at(row: Row, how: str, params: Tree, batch: Tree) -> Tree:
    if how != "float64":
        return _compiled_gradients(row, how)(params, batch)
    with jax.enable_x64(row.oracle == np.float64):
        return _compiled_gradients(row, how)(cast_floats(params, row.oracle), cast_floats(batch, row.oracle))


def loss_gradients(row: Row, seed: int = 0) -> Tree:
    """The reference's gradients of the scaled loss; in float32 where the row has gradients of its own."""
    if row.make(SMALL, None).grads is None:
        return gradients(row, "float64", seed)
    return jax.jit(gradient_of(row.loss())(row.scale))(*example(row, seed))


def unscaled(row: Row, grads: Tree) -> Leaves:
    return {path: leaf / row.scale for path, leaf in leaves(grads).items()}


def kind_of(path: str) -> str:
    """ "bias", "norm" or "embedding" for parameters that Flax's layers name so; "other" for all others."""
    names = {"bias": "bias", "scale": "norm", "embedding": "embedding"}
    segments = path.removesuffix("/value").split("/")
    return names.get(segments[-1], "other")


def relative_error(got: Leaves, want: Leaves) -> float:
    """|got - want| / |want| over all leaves together."""
    difference = sum(float(np.sum(np.square(np.asarray(got[path]) - want[path]))) for path in want)
    return float(np.sqrt(difference / sum(float(np.sum(np.square(leaf))) for leaf in want.values())))


def errors(got: Leaves, want: Leaves) -> dict[str, float]:
    """The relative error of "all" leaves, and of each kind that has a gradient.

    A leaf whose true gradient is zero (a bias before batch norm, a key's bias in attention) is rounding noise in both
    results. Leaves of at most 1e-5 of the largest are left out of the kinds.
    """
    largest = max(float(np.abs(leaf).max(initial=0)) for leaf in want.values())
    alive = {path for path, leaf in want.items() if float(np.abs(leaf).max(initial=0)) > 1e-5 * largest}
    kinds = {
        kind: {path: want[path] for path in alive if kind_of(path) == kind} for kind in ("bias", "norm", "embedding")
    }
    return {"all": relative_error(got, want)} | {
        kind: relative_error(got, part) for kind, part in kinds.items() if part
    }


@functools.cache
def oracle_gradients(row: Row, seed: int) -> Leaves:
    """The unscaled gradients of one seed, in float64."""
    return unscaled(row, gradients(row, "float64", seed))


@functools.cache
def median_errors(row: Row, how: str, seeds: int) -> dict[str, float]:
    """The median over seeds of the errors against the reference."""
    measured = [errors(unscaled(row, gradients(row, how, seed)), oracle_gradients(row, seed)) for seed in range(seeds)]
    return {kind: float(np.median([each[kind] for each in measured if kind in each])) for kind in measured[0]}


class Figures(NamedTuple):
    """The figures of a program compiled for an H200: bytes of one call, temporary memory at its peak.

    `converting` names the kernels that only cast.
    """

    dots: tuple[tuple[str, ...], ...]
    convolutions: tuple[tuple[str, ...], ...]
    sixteen_bit_sums: tuple[NarrowSum | str, ...]
    converting: tuple[str, ...]
    bytes: int
    temporary: int

    @property
    def wide_products(self) -> list[tuple[str, ...]]:
        return [dtypes for dtypes in self.dots + self.convolutions if "f32" in dtypes]


def figures(fn: Callable[..., Any], *args: Any, **options: Any) -> Figures:
    """Compiles `fn` for an H200. 16-bit sums are counted in kernels and in the carries of loops."""
    args = tuple(abstract(arg) for arg in args)
    compiled = compile_for_gpu(fn, *args, **options)
    text, memory = module_text(compiled), compiled.memory_analysis()
    assert memory is not None
    return Figures(
        tuple(dots(text)),
        tuple(convolutions(text)),
        (*sixteen_bit_sums(text), *sixteen_bit_carries(fn)(*args)),
        tuple(each.name for each in kernels(text) if each.name.startswith(("convert.", "wrapped_convert"))),
        traffic(text),
        memory.temp_size_in_bytes,
    )


def abstract_example(row: Row, size: Size = SMALL) -> tuple[Tree, Tree]:
    """The shapes of `example`, at any size; only the batch is computed."""
    made = row.make(size, None)
    batch = made.batch(np.random.default_rng(0))
    return jax.eval_shape(made.init, jax.random.key(0), batch), abstract(batch)


@functools.cache
def row_figures(row: Row, how: str, size: Size = SMALL) -> Figures:
    """The figures of the gradients of one row."""
    return figures(gradient_function(row, how, size), *abstract_example(row, size))


def tracing_seconds(make: Callable[[], Callable[..., Any]], *args: Any) -> float:
    """Processor time of the fastest of five traces, each of a new function, which is not in JAX's caches."""
    seconds = []
    for _ in range(5):
        fn = make()
        start = time.process_time()
        jax.make_jaxpr(lambda *args, fn=fn: fn(*args))(*args)
        seconds.append(time.process_time() - start)
    return min(seconds)


def tracing_calls(make: Callable[[], Callable[..., Any]], *args: Any) -> int:
    """The number of function calls in one trace: a cost that does not depend on the load of the machine."""
    jax.make_jaxpr(make())(*args)  # fills JAX's own caches, whose misses are not counted
    fn, calls = make(), 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        jax.make_jaxpr(lambda *args: fn(*args))(*args)
    finally:
        sys.setprofile(None)
    return calls
