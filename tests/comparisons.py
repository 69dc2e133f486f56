"""How tests compare results: bit for bit, or within a tolerance.

Bits are compared where both sides are one compiled program, or the operation is exact: a skipped step, a selection, a
cast, a restored checkpoint. What XLA compiles twice it may round twice: how it contracts a multiplication and an
addition, and in which order it sums, depends on what is fused and on the vectors of the CPU. Programs that are to be
the same are compared before they are compiled.
"""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

# Relative to the largest number of a leaf: of two programs that compute the same in this dtype. A few units in the last
# place for each of some dozen operations, and a subtraction that cancels a few bits.
TWO_PROGRAMS = {"float64": 1e-13, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-1}


def plain(tree: Tree) -> Tree:
    """The same with PRNG keys as the integers they are."""
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def assert_same_bits(got: Tree, want: Tree) -> None:
    """Shapes, dtypes and numbers are equal."""
    chex.assert_trees_all_equal(plain(got), plain(want), strict=True)


def same_bits(got: Tree, want: Tree) -> bool:
    try:
        assert_same_bits(got, want)
    except AssertionError:
        return False
    return True


def assert_two_programs_agree(got: Tree, want: Tree) -> None:
    """Shapes and dtypes are equal, and numbers up to how two programs round."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for one, two in zip(jax.tree.leaves(plain(got)), jax.tree.leaves(plain(want)), strict=True):
        tolerance = TWO_PROGRAMS.get(np.asarray(two).dtype.name, 0)
        size = np.max(np.abs(np.asarray(two, np.float64)), initial=0) if tolerance else 0
        chex.assert_trees_all_close(one, two, rtol=tolerance, atol=tolerance * size)


def lowered(fn: Callable[..., Any], *args: Any) -> str:
    """The program that XLA is given."""
    return jax.jit(fn).lower(*args).as_text()


def assert_only_the_precision_differs(under_float32: Callable[..., Any], fn: Callable[..., Any], *args: Any) -> None:
    """The float32 policy asks products for the precision `HIGHEST`, and changes nothing else."""
    assert lowered(under_float32, *args) == lowered(fn, *args).replace("DEFAULT", "HIGHEST")
