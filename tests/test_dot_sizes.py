"""How large a dot is, whether its result is small beside its operands, and which precision it was recorded with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train._autocast.analysis.dot_sizes import DotSizes, asks_for_float32, leaves_small_result
from jmp_train._autocast.analysis.whole_program.provenance import Provenance, carried_provenance, joined_provenance
from jmp_train._jaxpr import flatten

DEFAULT, HIGH, HIGHEST = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)
PRESETS = lax.DotAlgorithmPreset


def dot_of(equation, *shapes):
    """The program of an einsum, and its dot."""
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    program = flatten(jax.make_jaxpr(lambda x, y: jnp.einsum(equation, x, y))(*args))
    (node,) = (node for node in program.nodes if node.name == "dot_general")
    return program, node


@pytest.mark.parametrize(
    ("equation", "shapes", "expected"),
    [
        ("ij,jk->ik", [(2, 3), (3, 5)], (3, 2, 5, {6, 15}, 10)),
        ("bij,bjk->bik", [(7, 2, 3), (7, 3, 5)], (3, 2, 5, {42, 105}, 70)),
        ("i,j->ij", [(2,), (5,)], (1, 2, 5, {2, 5}, 10)),
        ("ij,ij->", [(2, 3), (2, 3)], (6, 1, 1, {6}, 1)),
    ],
)
def test_the_sizes_of_a_dot(equation, shapes, expected):
    sizes = DotSizes.of(*dot_of(equation, *shapes))
    assert sizes is not None
    contracted, left, right, operands, result = expected
    assert (sizes.contracted, {sizes.left, sizes.right}) == (contracted, {left, right})
    assert (set(sizes.operands), sizes.result) == (operands, result)


@pytest.mark.parametrize("shapes", [[(0, 3), (3, 5)], [(2, 3), (3, 0)], [(2, 0), (0, 5)]])
def test_a_dot_of_nothing_has_no_sizes(shapes):
    program, node = dot_of("ij,jk->ik", *shapes)
    assert DotSizes.of(program, node) is None and not leaves_small_result(program, node, [False, False])


def test_a_symbolic_size_is_taken_for_a_large_one():
    (batch,) = jax.export.symbolic_shape("batch")
    sizes = DotSizes.of(*dot_of("bi,ij->bj", (batch, 3), (3, 5)))
    assert sizes is not None and sizes.result == 1024 * 5


# A result is small if the larger operand has at least 128 times as many numbers, except for a weight times a vector.
SMALL = {
    "a sum of rows": ("bi,bj->ij", [(1024, 8), (1024, 8)], [False, False], True),
    "one number more": ("bi,bj->ij", [(1023, 8), (1023, 8)], [False, False], False),
    "a layer": ("bi,ij->bj", [(64, 8), (8, 8)], [False, True], False),
    "a weight times a vector": ("ij,j->i", [(512, 512), (512,)], [True, False], False),
    "data times a vector": ("ij,j->i", [(512, 512), (512,)], [False, True], True),
    "a vector times a weight": ("j,ij->i", [(512,), (512, 512)], [False, True], False),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_result_that_is_small_beside_its_operands(name):
    equation, shapes, are_parameters, expected = SMALL[name]
    program, node = dot_of(equation, *shapes)
    order = are_parameters if node.ins == program.inputs else are_parameters[::-1]
    assert leaves_small_result(program, node, order) == expected


def test_a_convolutions_result_is_never_small():
    x, kernel = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((8, 64, 4), (64, 4, 1)))
    numbers = ("NHC", "HIO", "NHC")
    convolve = lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", dimension_numbers=numbers)  # noqa: E731
    program = flatten(jax.make_jaxpr(convolve)(x, kernel))
    assert not leaves_small_result(program, program.nodes[-1], [False, False])


@pytest.mark.parametrize(
    ("precision", "policys", "asks"),
    [
        (None, None, False),
        ((DEFAULT, DEFAULT), None, False),
        ((HIGH, HIGH), None, False),  # three products of bfloat16 numbers: float16 has more digits
        ((HIGHEST, HIGHEST), None, True),
        ((HIGHEST, DEFAULT), None, True),
        ((HIGHEST, HIGHEST), "highest", False),  # the policy's own, under which everything was traced
        ((HIGHEST, HIGHEST), "tensorfloat32", True),
        (PRESETS.F32_F32_F32, None, True),
        (PRESETS.F32_F32_F32, "F32_F32_F32", False),
        (PRESETS.F16_F16_F32, None, False),
        (PRESETS.TF32_TF32_F32, None, False),
        (lax.DotAlgorithm(np.float32, np.float32, np.float32), None, True),
        (lax.DotAlgorithm(np.float16, np.float16, np.float32), None, False),
    ],
)
def test_which_precisions_ask_for_float32(precision, policys, asks):
    assert asks_for_float32(precision, policys) == asks


EXACT, TABLE, PARAMETER, NARROW = Provenance.SCALAR, Provenance.TABLE, Provenance.PARAMETER, Provenance.NARROW
DATA, ACTIVATION, STATE, SOLUTION = Provenance.DATA, Provenance.ACTIVATION, Provenance.STATE, Provenance.SOLUTION
ESTIMATE = Provenance.ESTIMATE
FACTOR, KERNEL = Provenance.FACTOR, Provenance.KERNEL


@pytest.mark.parametrize(
    ("provenances", "expected"),
    [
        ([], EXACT),
        ([EXACT, EXACT], EXACT),
        ([EXACT, NARROW], NARROW),
        ([TABLE, TABLE, EXACT], TABLE),
        ([NARROW, PARAMETER], NARROW),
        ([NARROW, DATA], DATA),
        ([NARROW, STATE], DATA),
        ([PARAMETER, TABLE], DATA),
        ([NARROW, TABLE], ACTIVATION),
        ([ACTIVATION, NARROW], ACTIVATION),
        ([ACTIVATION, PARAMETER], ACTIVATION),
        ([ACTIVATION, DATA], DATA),
        ([STATE, DATA], STATE),
        ([STATE, TABLE], STATE),
        ([STATE, PARAMETER], DATA),
        ([SOLUTION, DATA], SOLUTION),
        ([SOLUTION, STATE], SOLUTION),
        ([SOLUTION, NARROW], DATA),
        ([SOLUTION, PARAMETER], DATA),
        ([FACTOR, DATA], DATA),
        ([KERNEL, DATA], KERNEL),
        ([KERNEL, STATE], KERNEL),
        ([KERNEL, SOLUTION], SOLUTION),
        ([KERNEL, NARROW], DATA),
        ([ESTIMATE, KERNEL], ESTIMATE),
        ([ESTIMATE, SOLUTION], ESTIMATE),
        ([ESTIMATE, PARAMETER], ESTIMATE),
        ([ESTIMATE, NARROW], DATA),
    ],
)
def test_what_an_operation_makes_of_several_provenances(provenances, expected):
    assert joined_provenance(provenances) is joined_provenance(provenances[::-1]) is expected


@pytest.mark.parametrize("provenance", Provenance)
def test_what_a_loop_carries(provenance):
    adds_up = provenance in (DATA, STATE, SOLUTION, KERNEL, ESTIMATE, NARROW, ACTIVATION)
    assert carried_provenance(provenance, is_state=True, is_estimate=False) is (STATE if adds_up else provenance)
    for is_state in (True, False):
        assert carried_provenance(provenance, is_state, is_estimate=True) is ESTIMATE
    plain = SOLUTION if provenance is ESTIMATE else provenance
    assert carried_provenance(provenance, is_state=False, is_estimate=False) is plain
