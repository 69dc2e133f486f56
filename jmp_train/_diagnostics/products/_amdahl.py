"""How much faster a program can become by Tensor Cores: Amdahl's law over a roofline.

    speed-up = 1 / ((1 - f) + f / s)

f is the share of the time in strict float32 that is spent in products which run on Tensor Cores, s how many times
faster these run there. Times are not measured but estimated: a product takes the longer of its FLOPs at peak rate and
its bytes at peak bandwidth; everything else is bound by memory.

Decides how many bytes everything else moves in float32: the least possible, as if all equations between two products
were one fusion. Does not credit the halved bytes of these fusions in 16 bits, and does not decide what a product is;
see `_products.py`.

Reference: Micikevicius et al., Mixed Precision Training, ICLR 2018; Williams et al., Roofline, CACM 2009.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ..._explain._operations import Visit, bodies_of, is_floating_dtype
from ..._flops import ATTENTION, PRODUCTS
from ..._jaxpr import FlatJaxpr
from ..._sizes import itemsize
from ..gpu import GPU, NARROW_UNITS
from ._products import Product

# Their result is their operand, or fuses with whatever reads it; in float32 there are no casts.
_FREE = frozenset({"reshape", "transpose", "squeeze", "convert_element_type", "copy", "name", "optimization_barrier"})


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Amdahl's law for a program.

    Attributes:
      f: the share of the float32 time that Tensor Cores can take.
      s: how many times faster they run that share.
    """

    f: float
    s: float

    @property
    def speedup(self) -> float:
        """Over strict float32, at best."""
        return 1 / ((1 - self.f) + self.f / self.s)


def estimate(products: Sequence[Product], other_bytes: int, gpu: GPU, repaired: bool) -> Estimate:
    """The estimate for a program.

    A product that is misaligned, or a vector's, counts as no faster than in float32: the worst case.

    Args:
      products: all of them.
      other_bytes: what everything else moves in float32.
      gpu: whose rates.
      repaired: whether every product is taken to run in 16 bits (or 8, where it does) and aligned.
    """
    all_before = other_bytes / gpu.bandwidth
    before = after = 0.0
    for product in products:
        wide = _bytes_in_float32(product)
        slow = product.times * max(product.flops / gpu.rate("float32"), wide / gpu.bandwidth)
        all_before += slow
        unit = product.unit
        fast = product.on_tensor_cores or unit == "tf32"
        if repaired:
            unit, fast = (unit if unit in NARROW_UNITS else "16 bits"), True
        if fast:
            # Bytes of 16-bit operands are half of float32's, unless they are 8-bit already.
            moved = min(product.bytes, wide // 2) if repaired else product.bytes
            before += slow
            after += product.times * max(product.flops / gpu.rate(unit), moved / gpu.bandwidth)
    if not before:
        return Estimate(0.0, 1.0)
    return Estimate(before / all_before, before / after)


def _bytes_in_float32(product: Product) -> int:
    return 4 * sum(map(math.prod, product.shapes))


def other_bytes(found: Sequence[Visit]) -> int:
    """The least bytes that everything but products moves in float32, in all programs, loops multiplied out."""
    times = {visit.program: visit.times for visit in found}
    return sum(_bytes_outside_products(program) * number for program, number in times.items())


def _bytes_outside_products(program: FlatJaxpr) -> int:
    """Bytes of what fusions read from products or as arguments, and of what they write for products or as results."""
    source = list(range(len(program.avals)))
    read: set[int] = set()
    written: set[int] = set()
    computed: set[int] = set()
    for node in program.nodes:
        operands = [source[number] for number in node.ins]
        if node.name in _FREE and len(node.ins) == 1:
            source[node.outs[0]] = operands[0]
        elif node.name in PRODUCTS or node.name in ATTENTION or bodies_of(node):
            written |= computed.intersection(operands)
        else:
            read |= set(operands) - computed
            computed |= set(node.outs)
    written |= computed.intersection(source[number] for number in program.outputs)
    literals = set(program.known) - program.captured
    return sum(_nbytes(program.avals[number]) for number in (*(read - literals), *written))


def _nbytes(aval: Any) -> int:
    """Of a value in strict float32: a 16-bit one would be twice as large there."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    return math.prod(aval.shape) * (max(itemsize(dtype), 4) if is_floating_dtype(dtype) else itemsize(dtype))
