"""`TensorCoreReport`: what `tensor_core_report` returns. Values first, text second.

Decides how products are summed up. Does not decide what is said of one; see `_products.py`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from ..._paths import glob_matches
from ..._text import as_lists
from ..gpu import UNITS, flops_by_unit
from ._amdahl import Estimate
from ._products import Padding, Product
from ._tensor_core_text import product_table, report_text


@dataclasses.dataclass(frozen=True)
class TensorCoreReport:
    """The dots and convolutions of a program: a value to read, print and test.

    `str(report)` sums it up and groups what is slow by its reason; `table()` lists every product; `as_dict()` is ready
    for JSON. FLOPs have the lengths of scans and the devices of a `shard_map` multiplied; every branch counts.

    Attributes:
      gpu: whose rates are reckoned with.
      policy: that of `tensor_core_report`, as text, if it was given one.
      products: every dot and convolution, in the order of the program.
      estimate: by Amdahl's law, how much faster than strict float32 the program can be as it is.
      repaired: the same if every product ran in 16 bits (or 8) and were aligned.
      opaque: primitives that may multiply matrices where this report cannot look.
      uncounted_loops: how many `while` loops hold products; they count as one iteration.
    """

    gpu: str
    policy: str | None
    products: tuple[Product, ...]
    estimate: Estimate
    repaired: Estimate
    opaque: tuple[str, ...]
    uncounted_loops: int

    @property
    def flops(self) -> int:
        """FLOPs of all products, loops multiplied out."""
        return sum(product.flops * product.times for product in self.products)

    @property
    def unit_flops(self) -> dict[str, int]:
        """FLOPs by what multiplies: `8 bits`, `16 bits`, `tf32`, `float32`, `float64`."""
        return flops_by_unit(self.products, UNITS)

    @property
    def tensor_core_share(self) -> float:
        """The share of `flops` that Tensor Cores run in 16 or 8 bits on aligned sizes; 0 without any FLOPs."""
        fast = sum(product.flops * product.times for product in self.products if product.on_tensor_cores)
        return fast / self.flops if self.flops else 0.0

    @property
    def padding(self) -> tuple[tuple[Padding, float], ...]:
        """What to pad, with the share of `flops` of the products it is in, the largest share first."""
        found: Counter[tuple[int, int]] = Counter()
        first: dict[tuple[int, int], Padding] = {}
        for product in self.products:
            for key in {(each.size, each.padded) for each in product.padding}:
                found[key] += product.flops * product.times
            for each in product.padding:
                first.setdefault((each.size, each.padded), each)
        return tuple((first[key], flops / self.flops) for key, flops in found.most_common())

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as dictionaries, lists, strings and numbers, the sums of the properties included."""
        values = dataclasses.asdict(self)
        for row, product in zip(values["products"], self.products, strict=True):
            row["intensity"] = product.intensity
        for name in ("estimate", "repaired"):
            values[name]["speedup"] = getattr(self, name).speedup
        sums = {name: getattr(self, name) for name in ("flops", "unit_flops", "tensor_core_share")}
        padding = [dataclasses.asdict(each) | {"flop_share": share} for each, share in self.padding]
        return sums | {"padding": padding} | as_lists(values)

    def table(self, scope: str | None = None) -> str:
        """Returns a line for every product, those with the most FLOPs first.

        Args:
          scope: a glob over scope paths; only products that it matches are listed.
        """
        return product_table(self, [each for each in self.products if scope is None or glob_matches(scope, each.scope)])

    def __str__(self) -> str:
        return report_text(self)
