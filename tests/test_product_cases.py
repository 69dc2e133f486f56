"""The cases of products that are not layers: their errors by hand and in float32, and autocast within the bounds."""

import collections

import jax
import numpy as np
import pytest
from product_case import NARROW
from product_cases import BY_NAME, CASES, errors, faults, forget, low_shares


def test_names_are_unique_and_every_class_has_cases():
    groups = collections.Counter(case.group for case in CASES)
    assert len(BY_NAME) == len(CASES)
    assert set(groups) == {*range(1, 9), NARROW} and min(groups.values()) >= 3


@pytest.mark.parametrize(
    "name",
    [
        "raw_records",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("fourier_features_data", "orthogonality", "trajectories", "edges")
        ),
    ],
)
def test_layers_by_hand_round_and_float32_does_not(name):
    case = BY_NAME[name]
    assert 1e-5 < errors(case, "hand_float16").gradient < 5e-3
    assert errors(case, "float32").gradient < 1e-4
    assert low_shares(case)[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_autocast_is_as_right_as_layers_by_hand(case):
    """For one seed in float16; `benchmarks/products.py` measures more, and bfloat16."""
    ours, hand = errors(case, "mixed_float16"), errors(case, "hand_float16")
    forget()
    assert not faults(ours, hand, "float16")
    if case.low_share is not None:
        ours, hand = low_shares(case)
        assert ours >= case.low_share * hand


@pytest.mark.parametrize("case", CASES, ids=str)
def test_data_is_float32_and_the_same_for_a_seed(case):
    made, again = (case.data(np.random.default_rng(3)) for _ in range(2))
    for one, two in zip(jax.tree.leaves(made), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)
        assert np.asarray(one).dtype in (np.float32, np.int64, np.bool_)
