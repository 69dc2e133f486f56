"""How tests compare results: bit for bit, or within a tolerance.

Bits are compared where both sides are one compiled program, or the operation is exact: a skipped step, a selection, a
cast, a restored checkpoint. XLA may round two compilations differently: whether it contracts a multiplication and an
addition, and in which order it sums, depends on fusion and on the CPU's vector width. Programs that must be equal are
compared before they are compiled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jmp_train import autocast

Tree = Any


class Tolerance(NamedTuple):
    """Tolerances for results that were computed in one dtype.

    programs: relative to the largest number of an array, for two programs that compute the same: a few units in the
        last place for each of some dozen operations, and a subtraction that cancels a few bits.
    value, gradient: relative, in the Euclidean norm, for a model's output and its gradient against float64: a rounding
        for each layer, forward and backward, with room for its amplification.
    """

    programs: float
    value: float
    gradient: float


TOLERANCE = {
    "float64": Tolerance(1e-13, 1e-13, 1e-12),
    "float32": Tolerance(1e-5, 1e-5, 1e-4),
    "float16": Tolerance(1e-2, 2e-3, 1e-2),
    "bfloat16": Tolerance(1e-1, 2e-2, 1e-1),
}


def plain(tree: Tree) -> Tree:
    """The tree with the integers of its PRNG keys."""
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def assert_same_bits(got: Tree, want: Tree) -> None:
    """Shapes, dtypes and numbers are equal, and so is the sign of each zero."""
    got, want = plain(got), plain(want)
    chex.assert_trees_all_equal(got, want, strict=True)
    chex.assert_trees_all_equal(*(jax.tree.map(bits, tree) for tree in (got, want)))


def bits(leaf: Any) -> np.ndarray:
    return np.frombuffer(np.asarray(leaf).tobytes(), np.uint8)


def same_bits(got: Tree, want: Tree) -> bool:
    try:
        assert_same_bits(got, want)
    except AssertionError:
        return False
    return True


def assert_two_programs_agree(got: Tree, want: Tree, computed_in: str | None = None) -> None:
    """Shapes and dtypes are equal, and numbers within the rounding of their dtypes, or of `computed_in`."""
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for one, two in zip(jax.tree.leaves(plain(got)), jax.tree.leaves(plain(want)), strict=True):
        name = np.asarray(two).dtype.name
        name = computed_in if computed_in and name in TOLERANCE else name
        tolerance = TOLERANCE[name].programs if name in TOLERANCE else 0
        size = np.max(np.abs(np.asarray(two, np.float64)), initial=0) if tolerance else 0
        chex.assert_trees_all_close(one, two, rtol=tolerance, atol=tolerance * size)


def as_written(fn: Callable[..., Any]) -> Any:
    """`fn` compiled with all of its roundings, as without `jit`; XLA may drop a cast that a later one undoes."""
    return jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})


def with_and_without(fn: Callable[..., Any], policy: str, *args: Any) -> Any:
    """The results of `fn` under autocast, and without it, as NumPy arrays."""
    return jax.tree.map(np.asarray, as_written(lambda *args: (autocast(fn, policy)(*args), fn(*args)))(*args))


def lowered(fn: Callable[..., Any], *args: Any) -> str:
    """The text of the program that JAX passes to XLA."""
    return jax.jit(fn).lower(*args).as_text()


def assert_only_the_precision_differs(under_float32: Callable[..., Any], fn: Callable[..., Any], *args: Any) -> None:
    """Asserts that the float32 policy sets the precision of products to `HIGHEST` and changes nothing else."""
    assert lowered(under_float32, *args) == lowered(fn, *args).replace("DEFAULT", "HIGHEST")


def assert_close(got: Tree, want: Tree, rtol: float = 2e-3) -> None:
    """Each leaf differs by at most `rtol` times the largest number of the wanted leaf."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=rtol * np.abs(b).max()), got, want)
