"""Every dot and convolution of a traced program, with its size, its arithmetic and what keeps it off Tensor Cores.

Decides what is said of one product. Does not decide what they come to together; see `_tensor_core_report.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from ..._explain._operations import Visit, dtype_name
from ..._flops import ATTENTION, PRODUCTS, attention_flops, product_flops
from ..._jaxpr import source_line
from ..gpu import GPU, NARROW_UNITS, UNITS, product_unit
from ._matrices import MULTIPLES, Matrix, is_strict, matrix_of, round_up


@dataclasses.dataclass(frozen=True, slots=True)
class Padding:
    """A size that is no multiple of what Tensor Cores need.

    Attributes:
      what: `M`, `N`, `K`, `input channels` or `output channels`.
      size: what it is.
      padded: the least multiple above.
    """

    what: str
    size: int
    padded: int


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """A dot or a convolution.

    Attributes:
      primitive: its name, as `jax.make_jaxpr` prints it.
      scope, source, backward, times: as for an `Operation` of `explain`.
      shapes: of its two operands and its result.
      dtypes: of the same.
      batch, m, n, k: it is `batch` products of `[m, k]` by `[k, n]`; a convolution, of its groups.
      flops: of one run.
      bytes: its operands and its result, each once: the least that one run moves.
      unit: which arithmetic multiplies: `8 bits`, `16 bits`, `tf32`, `float32` or `float64`.
      ridge: FLOP per byte above which that arithmetic, not memory, is the GPU's limit.
      padding: what is misaligned.
      on_tensor_cores: whether it runs on Tensor Cores in 16 or 8 bits, as fast as they can.
      reason: why, or why not.
    """

    primitive: str
    scope: str
    source: str
    backward: bool
    times: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    batch: int
    m: int
    n: int
    k: int
    flops: int
    bytes: int
    unit: str
    ridge: float
    padding: tuple[Padding, ...]
    on_tensor_cores: bool
    reason: str

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def is_memory_bound(self) -> bool:
        """Whether memory, not arithmetic, is the limit: Tensor Cores then help only by halving the bytes."""
        return self.intensity < self.ridge


def products_of(found: Iterable[Visit], gpu: GPU) -> Iterator[Product]:
    """Describes every product among some visited operations."""
    for visit in found:
        if visit.node.name in PRODUCTS:
            yield _product(visit, gpu)
        elif visit.node.name in ATTENTION:
            yield _attention(visit, gpu)


def _product(visit: Visit, gpu: GPU) -> Product:
    node = visit.node
    backward = visit.place.is_backward(node)
    left, right, result = (tuple(aval.shape) for aval in _three(visit))
    flops = product_flops(node.name, [tuple(aval.shape) for aval in visit.avals(node.ins)], result, node.params)
    matrix = matrix_of(node, left, right, result, backward)
    return _described(visit, gpu, matrix, flops, is_strict(node.params.get("precision")))


def _attention(visit: Visit, gpu: GPU) -> Product:
    query, key, _ = (tuple(aval.shape) for aval in _three(visit))
    flops = attention_flops(visit.node.name, (query, key), visit.node.params)
    length, heads, keys = (2, 1, 2) if visit.node.params.get("layout") else (1, 2, 1)
    size = query[-1]
    matrix = Matrix(query[0] * query[heads], query[length], key[keys], size, {"head size": size})
    return _described(visit, gpu, matrix, flops, False)


def _three(visit: Visit) -> list[Any]:
    return [*visit.avals(visit.node.ins[:2]), visit.program.avals[visit.node.outs[0]]]


def _described(visit: Visit, gpu: GPU, matrix: Matrix, flops: int, strict: bool) -> Product:
    three = _three(visit)
    dtypes = tuple(str(dtype_name(aval.dtype)) for aval in three)
    unit = product_unit(dtypes[:2], strict)
    padding = _padding(matrix, unit)
    moved = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in three)
    reason = _why_not(matrix, dtypes[:2], unit, padding)
    fast = reason is None
    if reason is None:
        intensity, ridge = flops / max(moved, 1), gpu.ridge(unit)
        bound = "bound by memory" if intensity < ridge else "bound by arithmetic"
        reason = f"Tensor Cores in {unit}; {bound}: {intensity:.0f} FLOP/B, ridge {ridge:.0f}"
    return Product(
        primitive=visit.node.name,
        scope=visit.place.scope_of(visit.node),
        source=source_line(visit.node),
        backward=visit.place.is_backward(visit.node),
        times=visit.times,
        shapes=tuple(tuple(aval.shape) for aval in three),
        dtypes=dtypes,
        batch=matrix.batch,
        m=matrix.m,
        n=matrix.n,
        k=matrix.k,
        flops=flops,
        bytes=moved,
        unit=unit,
        ridge=gpu.ridge(unit),
        padding=padding,
        on_tensor_cores=fast,
        reason=reason,
    )


def _padding(matrix: Matrix, unit: str) -> tuple[Padding, ...]:
    """What to pad. A size of 1 is a vector, which padding makes no matrix of."""
    if unit not in NARROW_UNITS or matrix.is_depthwise:
        return ()
    multiple = MULTIPLES[unit]
    sizes = ((what, size) for what, size in matrix.sizes.items() if size > 1 and size % multiple)
    return tuple(Padding(what, size, round_up(size, multiple)) for what, size in sizes)


def _why_not(matrix: Matrix, dtypes: Sequence[str], unit: str, padding: tuple[Padding, ...]) -> str | None:
    """Why a product is not on Tensor Cores as it could be; `None` if it is."""
    if unit == "float32":
        return f"{_widest(dtypes)} operands at the highest precision: no Tensor Cores; narrow them, or allow TF32"
    if unit not in NARROW_UNITS:
        return f"{_widest(dtypes)} operands: {UNITS[unit]}; narrow them"
    if matrix.is_depthwise:
        return "one channel a group: there is no matrix in it, Tensor Cores are not used"
    if min(matrix.m, matrix.n) == 1:
        return "a matrix times a vector: it reads all of the matrix for one row; give it more rows at a time"
    if padding:
        pads = ", ".join(f"{each.what} {each.size} -> {each.padded}" for each in padding)
        return f"no multiple of {MULTIPLES[unit]}: pad {pads}"
    return None


def _widest(dtypes: Sequence[str]) -> str:
    return max(dtypes, key=lambda name: jnp.dtype(name).itemsize)
