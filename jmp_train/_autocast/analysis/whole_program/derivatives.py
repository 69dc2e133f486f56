"""Which product of a program is the derivative of which.

    c[m,n] = dot_general a[m,k] b[k,n]       recorded at line 7
    d[m,k] = dot_general g[m,n] b[k,n]       transposed, at line 7, of the sizes {mn, mk, kn} too: a derivative of `c`

A jaxpr does not say this, but the line in the user's code does: JAX records a derivative under the line and the scope
of the product that it differentiates, on values of the same three sizes, or of larger ones where the derivative is
mapped over cotangents.

Decides this for products whose derivatives matter: those that run in float32, and those whose precision was set. Does
not decide why a product runs in float32; see `causes.py`.
"""

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...._sizes import static_size
from ..wide_product import Cause


class Forward(NamedTuple):
    """A product whose derivatives run in the same dtype as it does.

    Attributes:
      site: the program that contains it, as the nodes that lead there.
      sources: the sources of its operands, and of the operands of its derivatives so far.
      avals: of its two operands and its result.
      cause: why it is in float32; `None` where it is narrow although its precision was set.
    """

    site: tuple
    sources: set[Any]
    avals: Sequence[Any]
    cause: Cause | None


class Registry:
    """The products whose derivatives are to be found, by the key that both share: primitive, line and scope."""

    def __init__(self):
        self._by_key: dict[Any, dict[tuple, Forward]] = {}  # by primitive, line and scope; then by place
        self.systems: set[tuple] = set()  # the lines and scopes of linear systems, whose derivatives are products
        # The values of the narrow products of the forward pass so far, by line and scope.
        self.layers = collections.defaultdict[tuple, list[Sequence[Any]]](list)

    def add(self, where: tuple, key: Any, product: Forward) -> None:
        self._by_key.setdefault(key, {})[where] = product

    def forget(self, where: tuple, key: Any) -> None:
        """Takes out the product with this key at a place, if one was added there."""
        self._by_key.get(key, {}).pop(where, None)

    def forward_of(
        self, key: tuple, site: tuple, sources: set[Any], avals: Sequence[Any], backward: bool
    ) -> Forward | None:
        """The product whose derivative a product with this key is; in the same program both must share an operand."""
        if not self._by_key.get(key):  # as of most products
            return None
        # In one program a derivative shares an operand with its product. Two products of one line that share none, as
        # of a lambda that is called twice, are no derivatives of each other. Across the boundary of a loop or call,
        # values have other numbers, and nothing is known of what they share.
        products = self._by_key[key].values()
        products = [p for p in products if p.site != site or not sources.isdisjoint(p.sources)]
        derived = [p for p in products if _are_of_same_sizes(avals, p.avals)]
        if not derived and backward:  # only what is transposed is mapped over cotangents
            derived = [p for p in products if are_mapped(avals, p.avals)]
            if derived and any(_are_of_same_sizes(avals, each) for each in self.layers[key[1:]]):
                return None  # of a layer on the same line
        if not derived:
            return None
        derived[0].sources.update(sources)  # derivatives of derivatives share an operand with these
        return derived[0]


def _are_of_same_sizes(avals: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether the values have the same sizes in some order. As text: symbolic ones cannot be sorted."""
    one, other = (sorted([str(math.prod(aval.shape)) for aval in each]) for each in (avals, others))
    return one == other


def are_mapped(avals: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether one value is as large as one of the others, and two are larger than the rest by one factor.

    This is so if a function is transposed and then mapped over cotangents, as `jax.jacrev` does: the cotangent and the
    result computed from it are larger, the other operand is not.
    """
    larger, smaller = ([static_size(aval.shape) or 0 for aval in each] for each in (avals, others))
    return all([*larger, *smaller]) and any(
        one == same and two % first == 0 and two * second == three * first
        for one, two, three in itertools.permutations(larger)
        for same, first, second in itertools.permutations(smaller)
    )
