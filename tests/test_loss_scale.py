"""Loss scales against a model in plain Python, and their state through everything that carries a pytree."""

import dataclasses
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmp_train import DynamicLossScale, NoOpLossScale, StaticLossScale

LEAVES = ("loss_scale", "counter", "hysteresis_left")

# Every field differs from its default.
UNUSUAL = DynamicLossScale(
    2.0**9,
    growth_factor=4.0,
    backoff_factor=0.25,
    growth_interval=3,
    hysteresis=3,
    min_loss_scale=2.0,
    max_loss_scale=2.0**20,
    counter=2,
    hysteresis_left=1,
)


def values(scale):
    return tuple(float(getattr(scale, name)) for name in LEAVES)


def model(start, steps):
    """The documented rules of `DynamicLossScale`, in Python numbers; products with the scale are float32."""
    scale, counter, left = values(start)
    for finite in steps:
        if finite:
            counter += 1
            if counter == start.growth_interval:
                with np.errstate(over="ignore"):
                    grown = float(np.float32(scale) * np.float32(start.growth_factor))
                scale, counter, left = min(grown, start.max_loss_scale), 0, start.hysteresis
        else:
            counter, left = 0, max(left - 1, 0)
            if left == 0:
                scale = max(float(np.float32(scale) * np.float32(start.backoff_factor)), start.min_loss_scale)
        yield scale, counter, left


@st.composite
def scales(draw):
    low, start, high = sorted(draw(st.lists(st.integers(-30, 30), min_size=3, max_size=3)))
    return DynamicLossScale(
        2.0**start,
        growth_factor=draw(st.sampled_from([1.5, 2.0, 4.0, 1e30])),
        backoff_factor=draw(st.sampled_from([0.5, 0.3, 1e-20])),
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 4)),
        min_loss_scale=2.0**low,
        max_loss_scale=2.0**high,
    )


@settings(max_examples=30)
@given(scales(), st.lists(st.booleans(), min_size=1, max_size=25))
def test_adjust_equals_the_model(start, steps):
    scale = start
    for finite, expected in zip(steps, model(start, steps), strict=True):
        scale = scale.adjust(finite)
        assert values(scale) == expected
        assert start.min_loss_scale <= scale.loss_scale <= start.max_loss_scale


@pytest.mark.parametrize("steps, grown", [(4, False), (5, True), (6, True)])
def test_growth_comes_on_exactly_the_interval(steps, grown):
    scale = DynamicLossScale(8.0, growth_interval=5)
    for _ in range(steps):
        scale = scale.adjust(True)
    assert values(scale)[:2] == (16.0 if grown else 8.0, steps % 5)


def test_eight_overflows_in_a_row_back_off_to_the_minimum():
    scale = DynamicLossScale(64.0, min_loss_scale=2.0)
    seen = []
    for _ in range(8):
        scale = scale.adjust(False)
        seen.append(float(scale.loss_scale))
    assert seen == [max(64.0 / 2**k, 2.0) for k in range(1, 9)]


def test_a_huge_growth_factor_never_gives_infinity():
    scale = DynamicLossScale(2.0**24, growth_factor=3e38, growth_interval=1, max_loss_scale=2.0**126)
    for _ in range(3):
        scale = scale.adjust(True)
    assert float(scale.loss_scale) == 2.0**126


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("overflows", [1, 2, 3, 4])
def test_hysteresis_is_spent_then_refilled_on_growth(hysteresis, overflows):
    start = DynamicLossScale(1024.0, hysteresis=hysteresis, growth_interval=2)
    scale = start
    for _ in range(overflows):
        scale = scale.adjust(False)
    assert float(scale.loss_scale) == 1024.0 / 2 ** max(overflows - hysteresis + 1, 0)
    assert int(scale.adjust(True).hysteresis_left) == max(hysteresis - overflows, 0)
    assert int(scale.adjust(True).adjust(True).hysteresis_left) == hysteresis


def test_reaching_the_maximum_still_counts_as_growth():
    scale = DynamicLossScale(4.0, max_loss_scale=4.0, hysteresis=2, growth_interval=2).adjust(False)
    assert values(scale.adjust(True).adjust(True)) == (4.0, 0, 2)


def test_a_run_resumed_mid_way_equals_the_uninterrupted_one():
    steps = [True, True, False, True, True, True, False, False, True]
    whole = resumed = UNUSUAL
    for i, finite in enumerate(steps):
        whole = whole.adjust(finite)
        if i == 4:
            leaves, structure = jax.tree.flatten(resumed)
            resumed = pickle.loads(pickle.dumps(jax.tree.unflatten(structure, [np.asarray(x) for x in leaves])))
        resumed = resumed.adjust(finite)
        assert values(resumed) == values(whole)


class TestCarriers:
    """Every field keeps its value and dtype in everything that carries the pytree."""

    @staticmethod
    def check(scale):
        assert isinstance(scale, DynamicLossScale)
        for field in dataclasses.fields(DynamicLossScale):
            assert getattr(scale, field.name) == getattr(UNUSUAL, field.name), field.name
        assert [jnp.asarray(getattr(scale, name)).dtype for name in LEAVES] == [jnp.float32, jnp.int32, jnp.int32]

    def test_flatten(self):
        leaves, structure = jax.tree.flatten(UNUSUAL)
        assert leaves == [512.0, 2, 1]
        self.check(jax.tree.unflatten(structure, leaves))

    def test_paths(self):
        assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(UNUSUAL)] == [
            ".loss_scale",
            ".counter",
            ".hysteresis_left",
        ]

    def test_pickle(self):
        self.check(pickle.loads(pickle.dumps(UNUSUAL)))

    def test_jit(self):
        self.check(jax.jit(lambda scale: scale)(UNUSUAL))

    def test_lower(self):
        jax.jit(lambda scale: scale.adjust(True)).lower(UNUSUAL).compile()

    def test_scan(self):
        self.check(jax.lax.scan(lambda scale, _: (scale, None), UNUSUAL, length=3)[0])

    def test_cond(self):
        for pred in (True, False):
            self.check(jax.jit(lambda p: jax.lax.cond(p, lambda s: s, lambda s: s, UNUSUAL))(pred))

    def test_replace(self):
        self.check(dataclasses.replace(dataclasses.replace(UNUSUAL, counter=0), counter=2))

    def test_leaves_may_be_anything(self):
        assert jax.tree.map(lambda x: None, UNUSUAL).counter is None
        assert jax.tree.map(lambda x: 0, UNUSUAL).loss_scale == 0
        assert jax.eval_shape(lambda: UNUSUAL).counter.dtype == jnp.int32


def test_adjust_under_scan_cond_and_vmap_equals_eager():
    steps = np.array([True, True, True, False, False, True, False, False, False])
    eager = UNUSUAL
    for finite in steps:
        eager = eager.adjust(finite)
    scanned, _ = jax.lax.scan(lambda scale, finite: (scale.adjust(finite), None), UNUSUAL, steps)
    assert values(scanned) == values(eager)

    def either(scale, finite):
        return jax.lax.cond(finite, lambda s: s.adjust(True), lambda s: s.adjust(False), scale), None

    assert values(jax.lax.scan(either, UNUSUAL, steps)[0]) == values(eager)
    # Three scales under `vmap`; column `i` belongs to scale `i`.
    both = jnp.array([True, False, True])
    batched = jax.vmap(lambda scale, finite: scale.adjust(finite), in_axes=(None, 0))(UNUSUAL, both)
    for i, finite in enumerate(both):
        assert tuple(float(getattr(batched, name)[i]) for name in LEAVES) == values(UNUSUAL.adjust(finite))


def test_the_state_keeps_its_types_so_that_one_trace_serves_all_steps():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def adjust(scale, finite):
        return scale.adjust(finite)

    scale = jax.tree.map(jnp.array, UNUSUAL)
    for finite in (True, False, True):
        before = jax.tree.map(jax.typeof, scale)
        scale = adjust(scale, finite)
        assert jax.tree.map(jax.typeof, scale) == before


@pytest.mark.parametrize("finite", [True, False])
def test_a_state_of_python_numbers_gets_its_types_back(finite):
    """JSON restores Python numbers; with their weak types, the next step would be traced again."""
    read = jax.tree.map(lambda x: x.item(), UNUSUAL)
    wanted = jax.tree.map(jax.typeof, jax.tree.map(jnp.array, UNUSUAL))
    assert jax.tree.map(jax.typeof, read.adjust(finite)) == wanted


def test_traced_values_are_taken_as_they_are():
    def build(start):
        return DynamicLossScale(start, counter=jnp.int32(3)).adjust(False)

    assert values(jax.jit(build)(64)) == (32.0, 0, 0)


@pytest.mark.parametrize("scale", [NoOpLossScale(), StaticLossScale(8.0)])
def test_fixed_scales_never_move(scale):
    assert scale.adjust(True) is scale and scale.adjust(jnp.bool_(False)) is scale
    assert jax.tree.leaves(scale) == [] and jax.jit(lambda s: s)(scale) == scale
    assert hash(scale) == hash(pickle.loads(pickle.dumps(scale)))
    assert scale.loss_scale in (1.0, 8.0)


def test_the_largest_counter_there_can_be():
    scale = DynamicLossScale(4.0, growth_interval=2**31 - 1, counter=2**31 - 3)
    for size, counter in ((4.0, 2**31 - 2), (8.0, 0), (8.0, 1)):
        scale = scale.adjust(True)
        assert (float(scale.loss_scale), int(scale.counter)) == (size, counter)
    assert float(DynamicLossScale(4.0, counter=2**31 - 1).adjust(True).loss_scale) == 8.0
