"""The cost that decides between saving and rematerializing, in straight code and in scans."""

import jax.numpy as jnp
import pytest
from jax import export

from jmp_train._autocast.analysis.residual_costs import ResidualCosts, Storage

DOT, OTHER, FLOAT32, VALUE, NEXT = range(5)
N = 1024


def costs_of(dot_results: int = 1, numbers=N):
    """Costs of `DOT` and perhaps `OTHER`, in 16 bits and in memory, and of `FLOAT32`, which is not."""
    costs = ResidualCosts()
    for number in range(dot_results):
        costs.state(number, 2 * numbers, Storage.IN_MEMORY)
    costs.state(FLOAT32, 4 * numbers, Storage.NEW)
    return costs


@pytest.mark.parametrize(
    ("bytes", "storage", "operands", "again"),
    [
        (4 * N, Storage.NEW, [DOT], True),  # 2 bytes are read in place of 8
        (2 * N, Storage.NEW, [DOT], True),  # in place of 4
        (2 * N, Storage.IN_MEMORY, [DOT], False),  # both only read 2: what is in memory is read
        (2 * N, Storage.NEW, [DOT, OTHER], True),  # both move 4, and nothing is held for it
        (2 * N, Storage.NEW, [DOT, FLOAT32], False),
        (4 * N, Storage.NEW, [FLOAT32], False),  # both move 8: the source is not in memory either
        (4, Storage.NEW, [DOT], False),  # the statistics of many numbers
        (4 * N, Storage.NEW, [], True),  # known numbers
    ],
)
def test_a_value_is_rematerialized_where_its_sources_cost_less(bytes, storage, operands, again):
    costs = costs_of(2)
    costs.state(VALUE, bytes, storage)
    assert costs.rematerialize(VALUE, operands) == again
    assert costs.sources(VALUE) == frozenset(operands if again else [VALUE])


def test_what_is_computed_from_a_rematerialized_value_has_its_sources():
    costs = costs_of()
    costs.state(VALUE, 4 * N, Storage.NEW)
    costs.state(NEXT, 4 * N, Storage.NEW)
    assert costs.rematerialize(VALUE, [DOT]) and costs.rematerialize(NEXT, [VALUE, DOT])
    assert costs.sources(NEXT) == {DOT}


def test_a_source_that_another_value_has_saved_is_only_read():
    costs = costs_of()
    costs.state(VALUE, 4 * N, Storage.NEW)
    sources = frozenset([FLOAT32])
    assert not costs.is_cheaper(sources, VALUE)
    assert costs.is_cheaper(sources, VALUE, saved={FLOAT32})


def test_a_value_of_very_many_sources_is_its_own():
    costs = ResidualCosts()
    for number in range(17):
        costs.state(number, 1, Storage.IN_MEMORY)
    costs.state(17, 4 * N, Storage.NEW)
    assert costs.sources_of(range(17)) is None and not costs.rematerialize(17, range(17))
    assert costs.rematerialize(17, range(16))


def test_symbolic_sizes_are_compared_for_every_batch():
    (batch,) = export.symbolic_shape("b")
    costs = costs_of(numbers=batch)
    costs.state(VALUE, 4 * batch, Storage.NEW)
    assert costs.rematerialize(VALUE, [DOT])
    costs.state(NEXT, jnp.float32(0).nbytes, Storage.NEW)
    assert not costs.rematerialize(NEXT, [DOT])  # less for some batches only
