"""The table of primitives has exactly JAX's primitives: those that a new JAX release adds or drops fail here, by name.

Only this file reads `jax._src`, to enumerate what has a lowering; `conftest.py` replaces a function of it.
"""

import warnings

import jax
import jax.extend.core.primitives as exported
import numpy as np
import pytest
from jax import lax
from jax._src.interpreters import mlir

from jmp_train._autocast import primitives
from jmp_train._autocast.primitives import OPAQUE, OPAQUE_DOTS, TABLE, UNKNOWN, Rule, Trait

# Modules that register primitives when they are imported; some warn of their own deprecation.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import jax.custom_batching
    import jax.experimental.buffer_callback
    import jax.experimental.checkify
    import jax.experimental.multihost_utils
    import jax.experimental.pallas
    import jax.experimental.sparse
    import jax.experimental.xla_metadata
    import jax.numpy.linalg
    import jax.scipy.linalg
    import jax.scipy.special

# Names that some supported releases have and others do not: which of 0.10, 0.11 and 0.12 have them.
SOMETIMES = {
    "call": "10",
    "closed_call": "10",
    "core_map": "10",
    "eval_jaxpr": "11 12",
    "log2": "11 12",
    "one_minus_square": "11 12",
    "pbroadcast_done": "10",
    "pbroadcast_dynamic": "12",
    "pbroadcast_start": "10",
    "polynomial": "12",
    "program_order": "11",
    "psum_start": "10",
    "reduced_vary_cast": "12",
    "reduced_vary_cast_p": "10 11",
    "relayout": "11 12",
    "unreduced_pmax": "11 12",
    "unreduced_pmin": "11 12",
    "unreduced_psum_start": "10",
    "unreduced_reduce_scatter_start": "10",
    "vary_unreduced_cast": "12",
    "vary_unreduced_cast_p": "10 11",
    "xla_metadata_call": "11 12",
}


def _primitives() -> frozenset[str]:
    platforms = mlir._platform_specific_lowerings.values()
    lowered = {primitive.name for table in (mlir._lowerings, *platforms) for primitive in table}
    return frozenset(lowered | {thing.name for name, thing in vars(exported).items() if name.endswith("_p")})


# Read now: other libraries that tests import later, such as equinox, register primitives of their own.
PRIMITIVES = _primitives()


def test_every_primitive_is_classified():
    known = set(TABLE)
    missing = sorted(PRIMITIVES - known)
    assert not missing, f"JAX {jax.__version__} has primitives that primitives.py does not classify: {missing}"


def test_no_name_is_unknown_to_jax():
    unknown = set(TABLE) - PRIMITIVES - set(SOMETIMES)
    assert not unknown, f"primitives.py names what JAX {jax.__version__} does not have: {sorted(unknown)}"


def test_the_list_of_exceptions_is_exact():
    minor = jax.__version__.split(".")[1]
    assert minor in ("10", "11", "12"), f"say in SOMETIMES which of its names JAX {jax.__version__} has"
    expected = {name for name, releases in SOMETIMES.items() if minor in releases.split()}
    assert set(SOMETIMES) & PRIMITIVES == expected


def test_traits_name_primitives_of_the_table():
    names = {name for line in primitives.TRAITS.values() for name in line.split()}
    assert names | primitives.DELICATE_OPERAND.keys() | primitives.DATA_OPERANDS.keys() <= TABLE.keys()


def is_elementwise(name):
    """Whether a function of `jax.lax`, mapped over a batch, is the same primitive with the same parameters."""
    fn, x = getattr(lax, name), np.full(3, 0.5, np.float32)
    for operands in (1, 2, 3):
        try:
            (one,) = jax.make_jaxpr(fn)(*[x] * operands).eqns
        except (TypeError, ValueError):
            continue
        if one.outvars[0].aval != one.invars[0].aval:
            return False
        (many,) = jax.make_jaxpr(jax.vmap(fn))(*[x[None]] * operands).eqns
        return one.primitive.name == name and str(one.params) == str(many.params)
    return False


def test_which_primitives_are_elementwise():
    """Except for functions that optimizers do not apply to gradients."""
    arithmetic = (Rule.HIGH, Rule.FOLLOW, Rule.WIDEST)
    names = [name for name, entry in TABLE.items() if entry.rule in arithmetic and hasattr(lax, name)]
    others = "bessel_i0e bessel_i1e igamma igamma_grad_a igammac polygamma zeta".split()
    of_parameters = "add_any convert_element_type copy integer_pow reduce_precision".split()
    of_later_versions = {name for name in ("log2", "one_minus_square") if not hasattr(lax, name)}
    found = {name for name in names if is_elementwise(name)}
    assert found - {*others} == primitives.having(Trait.ELEMENTWISE) - {*of_parameters} - of_later_versions


def test_every_row_has_a_reason():
    for name, entry in (*TABLE.items(), ("unknown", UNKNOWN)):
        assert isinstance(entry.rule, Rule) and len(entry.reason) > 2, name


def test_no_primitive_has_two_rows():
    # TABLE is built from several dictionaries: a name in two of them would silently take the later one.
    named = {name: value for name, value in vars(primitives).items() if not name.startswith("__")}
    tables = [value for value in named.values() if isinstance(value, dict) and value is not TABLE]
    sections = [table for table in tables if all(isinstance(x, str) for x in (*table, *table.values()))]
    lines = [line for section in sections for line in section]
    names = [name for line in lines for name in line.split()]
    assert len(names) == len(set(names)) == len(TABLE)


@pytest.mark.parametrize("names", OPAQUE_DOTS | OPAQUE)
def test_opaque_names_run_as_recorded(names):
    assert all(TABLE[name].rule is Rule.RECORDED for name in names.split())


def test_what_accumulates_is_never_low():
    sums = "reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum scatter-add scatter-sub psum"
    assert all(TABLE[name].never_low for name in sums.split())
    assert {TABLE[name].rule for name in sums.split()} == {Rule.HIGH, Rule.COLLECTIVE}
