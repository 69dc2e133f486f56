"""The cost that decides between saving and rematerializing, in straight code and in scans."""

from collections.abc import Iterable
from typing import Any

import pytest
from jax import export

from jmp_train._autocast.analysis.residual_costs import ResidualCosts

DOT, OTHER, FLOAT32, BIAS, VALUE, NEXT = range(6)
N = 1024


def costs_of(dot_results: int = 1, numbers: Any = N, **sizes: Any) -> ResidualCosts:
    """Costs of 16-bit `DOT` and `OTHER`, the first `dot_results` of them in memory, of `FLOAT32`, and of new values."""
    bytes = {DOT: 2 * numbers, OTHER: 2 * numbers, FLOAT32: 4 * numbers, BIAS: sizes.get("bias", 4)}
    bytes |= {VALUE: sizes.get("value", 4 * numbers), NEXT: sizes.get("next", 4 * numbers)}
    costs = ResidualCosts(bytes.__getitem__, in_memory=range(dot_results))
    for number in (FLOAT32, BIAS, VALUE, NEXT):
        costs.state(number)
    return costs


def again(costs: ResidualCosts, number: int, operands: Iterable[int]) -> bool:
    return costs.rematerialize(number, costs.sources_of(operands))


@pytest.mark.parametrize(
    ("size", "in_memory", "operands", "is_again"),
    [
        (4 * N, False, [DOT], True),  # 2 bytes are read in place of 8
        (2 * N, False, [DOT], True),  # 2 bytes are read in place of 4
        (2 * N, True, [DOT], False),  # either reads 2 bytes: the value is in memory, so it is read
        (2 * N, False, [DOT, OTHER], True),  # either moves 4 bytes, but rematerialization holds no memory
        (2 * N, False, [DOT, OTHER, BIAS], True),  # the few bytes of a bias do not decide
        (2 * N, False, [DOT, FLOAT32], False),
        (4 * N, False, [FLOAT32], False),  # either moves 8 bytes: the source is not in memory
        (4, False, [DOT], False),  # small, as the statistics of many numbers
        (4 * N, False, [], True),  # known numbers
    ],
)
def test_a_value_is_rematerialized_where_its_sources_cost_less(size, in_memory, operands, is_again):
    costs = costs_of(2, value=size)
    costs.state(VALUE, in_memory)
    assert again(costs, VALUE, operands) == is_again
    assert costs.sources_of([VALUE]) == frozenset(operands if is_again else [VALUE])


@pytest.mark.parametrize(("size", "is_again"), [(N // 2 - 4, True), (N // 2, False)])
def test_a_source_counts_from_a_fourth_of_the_value(size, is_again):
    costs = costs_of(2, value=2 * N, bias=size)
    assert again(costs, VALUE, [DOT, OTHER, BIAS]) == is_again


@pytest.mark.parametrize("reads_part", [True, False])
def test_a_part_costs_its_own_bytes(reads_part):
    costs = costs_of(value=2 * N // 3)  # a third is read in place of being written and read, or all is read
    assert costs.rematerialize(VALUE, frozenset([DOT]), reads_part=reads_part) == reads_part


def test_what_is_computed_from_a_rematerialized_value_has_its_sources():
    costs = costs_of()
    assert again(costs, VALUE, [DOT]) and again(costs, NEXT, [VALUE, DOT])
    assert costs.sources_of([NEXT]) == {DOT}


def test_what_is_saved_after_all_is_its_own_source():
    costs = costs_of()
    assert again(costs, VALUE, [DOT])
    costs.state(VALUE, in_memory=True)
    assert costs.sources_of([VALUE]) == {VALUE} and again(costs, NEXT, [VALUE])


def test_a_source_that_another_value_has_saved_is_only_read():
    costs, sources = costs_of(), frozenset([FLOAT32])
    assert not costs.is_cheaper(sources, VALUE)
    assert costs.is_cheaper(sources, VALUE, saved={FLOAT32})


def test_at_equal_cost_no_source_is_written_for_it():
    costs = ResidualCosts([2 * N, 2 * N, 3 * N].__getitem__)
    for number, in_memory in enumerate([False, True, False]):
        costs.state(number, in_memory)
    assert not again(costs, 2, [0, 1])  # 4 bytes and 2 in place of 6


def test_a_value_of_very_many_sources_is_its_own():
    costs = ResidualCosts(lambda number: 4 * N if number == 17 else 1, in_memory=range(17))
    costs.state(17)
    assert not again(costs, 17, range(17)) and again(costs, 17, range(16))


def test_symbolic_sizes_are_compared_for_every_batch():
    (batch,) = export.symbolic_shape("b")
    costs = costs_of(numbers=batch, next=4)
    assert again(costs, VALUE, [DOT])
    assert not again(costs, NEXT, [DOT])  # less for some batches only
    costs = costs_of(2, numbers=batch, value=2 * batch)
    assert not again(costs, VALUE, [DOT, OTHER, BIAS])  # a bias is small for some batches only
