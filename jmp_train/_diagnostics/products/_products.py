"""Every dot and convolution of a traced program: its size as a matrix product, its arithmetic, and why it is slow.

Decides what M, N and K of a dot or a convolution are, which of them Tensor Cores want padded, and why a product does
not run on them as fast as it could. Does not decide what the products come to together; see `_tensor_core_report.py`.

Reference: NVIDIA, Matrix Multiplication Background User's Guide, and Convolutional Layers User's Guide.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..._explain._operations import Visit, dtype_name
from ..._flops import ATTENTION, PRODUCTS, attention_flops, product_flops
from ..._jaxpr import Node, source_line
from ..._sizes import size_in_bytes
from ..._values import as_count
from ..gpu import GPU, NARROW_UNITS, UNITS

Shape = Sequence[int]

# What the sizes of a product must be multiples of: 16 bytes.
_MULTIPLES = {"8 bits": 16, "16 bits": 8}


def round_up(n: int, multiple: int = 8) -> int:
    """Returns the least multiple of `multiple` that is not below `n`: the size to pad a vocabulary or a layer to.

    Tensor Cores want every size of a product to be a multiple of 8 in 16 bits, of 16 in 8 bits; large ones run best at
    multiples of 64.

    Args:
      n: a size, at least 0.
      multiple: at least 1.

    Raises:
      ValueError: either is no such integer.

    >>> round_up(50257), round_up(50257, 64), round_up(768)
    (50264, 50304, 768)
    """
    n, multiple = as_count("n", n, 0), as_count("multiple", multiple)
    return -(-n // multiple) * multiple


class Matrix(NamedTuple):
    """A product as `batch` products of `[m, k]` by `[k, n]`.

    `sizes` are those that must be aligned, by name: M, N and K, or the channels of a convolution.
    """

    batch: int
    m: int
    n: int
    k: int
    sizes: Mapping[str, int]
    is_depthwise: bool = False


def _matrix_of(node: Node, left: Shape, right: Shape, result: Shape, backward: bool) -> Matrix:
    """The matrix product that a dot, a ragged dot or a convolution is.

    Args:
      node: the operation.
      left, right, result: shapes of its operands and its result.
      backward: whether it belongs to a backward pass, where a convolution may be the gradient of a kernel.
    """
    if node.name == "conv_general_dilated":
        return _convolution_matrix(node.params, left, right, result, backward)
    if node.name == "dot_general":
        contracted, batched = node.params["dimension_numbers"]
    else:
        contracted, batched = node.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    batch = math.prod(left[d] for d in batched[0])
    k = math.prod(left[d] for d in contracted[0])
    m = math.prod(left) // max(batch * k, 1)
    columns = set(range(len(right))) - {*batched[1], *contracted[1]}
    if node.name != "dot_general":
        # The right operand has one matrix for each group of rows, and a row is multiplied by one of them.
        columns -= set(node.params["ragged_dot_dimension_numbers"].rhs_group_dimensions)
    n = math.prod(right[d] for d in columns)
    return Matrix(batch, m, n, k, {"M": m, "N": n, "K": k})


def _convolution_matrix(params: Mapping[str, Any], left: Shape, right: Shape, result: Shape, backward: bool) -> Matrix:
    numbers = params["dimension_numbers"]
    groups = max(params["feature_group_count"], params["batch_group_count"])
    batch, features, *spatial = numbers.out_spec
    positions = math.prod(result[d] for d in spatial)
    window = math.prod(right[d] for d in numbers.rhs_spec[2:])
    inner = right[numbers.rhs_spec[1]]
    outer = result[features] // groups
    if backward and numbers.lhs_spec[0] > numbers.lhs_spec[1]:
        # The gradient of a kernel, for which JAX takes channels for examples: its result is the kernel, and the sum
        # runs over examples and positions.
        inputs = result[batch]
        return _group_matrix(groups, inputs * positions, outer, inner * window, inputs, outer)
    return _group_matrix(groups, result[batch] * positions, outer, inner * window, inner, outer)


def _group_matrix(groups: int, m: int, n: int, k: int, inputs: int, outputs: int) -> Matrix:
    sizes = {"input channels": inputs, "output channels": outputs}
    return Matrix(groups, m, n, k, sizes, is_depthwise=groups > 1 and min(inputs, outputs) == 1)


def _is_strict(precision: Any) -> bool:
    """Whether a product's `precision` forbids rounding float32 operands to TF32."""
    found = precision if isinstance(precision, tuple | list) else (precision,)
    names = {getattr(each, "name", str(each)) for each in found if each is not None}
    return bool(names & {lax.Precision.HIGHEST.name, "F32_F32_F32", "F64_F64_F64"})


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
        if visit.node.name in ATTENTION:
            yield _attention(visit, gpu)
        elif visit.node.name in PRODUCTS:
            yield _product(visit, gpu)


def _product(visit: Visit, gpu: GPU) -> Product:
    node = visit.node
    backward = visit.place.is_backward(node)
    left, right, result = (tuple(aval.shape) for aval in _three_avals(visit))
    flops = product_flops(node.name, [tuple(aval.shape) for aval in visit.avals(node.ins)], result, node.params)
    matrix = _matrix_of(node, left, right, result, backward)
    return _describe(visit, gpu, matrix, flops, _is_strict(node.params.get("precision")))


def _attention(visit: Visit, gpu: GPU) -> Product:
    """Attention, with the size of its product `query @ key`."""
    query, key, _ = (tuple(aval.shape) for aval in _three_avals(visit))
    flops = attention_flops(visit.node.name, (query, key), visit.node.params)
    length, heads, keys = (2, 1, 2) if visit.node.params.get("layout") else (1, 2, 1)
    size = query[-1]
    matrix = Matrix(query[0] * query[heads], query[length], key[keys], size, {"head size": size})
    return _describe(visit, gpu, matrix, flops, False)


def _three_avals(visit: Visit) -> list[Any]:
    """Of the two operands that are multiplied, and of the result."""
    return [*visit.avals(visit.node.ins[:2]), visit.program.avals[visit.node.outs[0]]]


def _describe(visit: Visit, gpu: GPU, matrix: Matrix, flops: int, strict: bool) -> Product:
    avals = _three_avals(visit)
    dtypes = tuple(str(dtype_name(aval.dtype)) for aval in avals)
    unit = gpu.unit(dtypes[:2], strict)
    padding = _padding(matrix, unit)
    moved = sum(map(size_in_bytes, avals))
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
        shapes=tuple(tuple(aval.shape) for aval in avals),
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
    """What to pad. A size of 1 makes a vector, and padding a vector only multiplies zeros."""
    if unit not in NARROW_UNITS or matrix.is_depthwise:
        return ()
    multiple = _MULTIPLES[unit]
    sizes = ((what, size) for what, size in matrix.sizes.items() if size > 1 and size % multiple)
    return tuple(Padding(what, size, round_up(size, multiple)) for what, size in sizes)


def _why_not(matrix: Matrix, dtypes: Sequence[str], unit: str, padding: tuple[Padding, ...]) -> str | None:
    """Why a product is not on Tensor Cores as it could be; `None` if it is."""
    widest = max(map(jnp.dtype, dtypes), key=lambda dtype: dtype.itemsize)
    if jnp.issubdtype(widest, jnp.complexfloating):
        return f"{widest} operands: 16 bits have no complex numbers"
    if jnp.issubdtype(widest, jnp.integer) and unit not in NARROW_UNITS:
        return f"{widest} operands: of integers, Tensor Cores multiply int8"
    if unit == "float32":
        return f"{widest} operands at the highest precision: no Tensor Cores; narrow them, or allow TF32"
    if unit not in NARROW_UNITS:
        return f"{widest} operands: {UNITS[unit]}; narrow them"
    if matrix.is_depthwise:
        return "one channel a group: there is no matrix in it, Tensor Cores are not used"
    if matrix.m == 1:
        return "a matrix times a vector: it reads all of the matrix for one row; give it more rows at a time"
    if matrix.n == 1:
        return "a matrix times a vector: it reads all of the matrix for one column; memory bounds it"
    if padding:
        pads = ", ".join(f"{each.what} {each.size} -> {each.padded}" for each in padding)
        return f"no multiple of {_MULTIPLES[unit]}: pad {pads}"
    return None
