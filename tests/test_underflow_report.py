"""underflow_report and suggest_loss_scale against exact rational arithmetic, for every 16- and 8-bit format."""

import functools
import json
import math
from fractions import Fraction

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from float_tools import TARGETS, all_values, awkward, rounding
from hypothesis import given, settings
from hypothesis import strategies as st

import jmp_train as jmp
from jmp_train import diagnostics
from jmp_train._diagnostics.formats._bits import DOUBLE, SINGLE, magnitudes, target_format
from jmp_train._diagnostics.formats._underflow import OUTCOMES, floor_log2, outcome
from jmp_train._dtypes import facts

F32 = functools.partial(np.array, dtype=np.float32)
VALUES = awkward(np.float32, seed=3)  # one size for many tests, so that each format has one program
SCALES = [1.0, 2.0**15, 2.0**-20, 3.0, 1000.7, 2.0**24, 2.0**126, 2.0**-126, float(np.float32(1 / 3))]


# Few formats, because each needs a large program. Other tests cover every format.
each_target = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "float16")) for name in TARGETS]
)


def near_boundaries(name, scale, dtype):
    """The numbers of `dtype` next to those that scale `S` maps to a boundary between two outcomes."""
    target = facts(name)
    step = target.smallest_subnormal
    last = target.max * target.eps / 2 if math.log2(target.max) % 1 else 0
    points = [step / 2, step, target.smallest_normal - step / 2, target.smallest_normal, target.max, target.max + last]
    points += [target.max * factor for factor in (1.0001, 1.04, 1.07, 1.1)]
    middles = [(target.max + other) / 2 for other in (2.0 ** math.ceil(math.log2(target.max)),)]
    with np.errstate(all="ignore"):
        found = np.array([*points, *middles], np.float64) / scale
        found = found.astype(dtype)
        found = np.concatenate([found, np.nextafter(found, dtype(np.inf)), np.nextafter(found, dtype(0))])
    return found[np.isfinite(found) & (found > 0)]


OUTCOME = jax.jit(lambda x, scale, wide, target: outcome(magnitudes(x), wide, scale, target), static_argnums=(2, 3))


def check_outcomes(name, scale, values, wide):
    # One size for all, so that each format has one program.
    got = OUTCOME(np.resize(values, 64), jnp.float32(scale), wide, target_format(name))
    oracle = rounding(name)
    for value, index in zip(values, np.asarray(got)[: len(values)], strict=True):
        exact = Fraction(float(value)) * Fraction(float(np.float32(scale)))
        assert OUTCOMES[index] == oracle.outcome(exact), (name, scale, value)


@pytest.mark.parametrize("name", TARGETS)
def test_every_boundary_is_exact(name):
    generator = np.random.default_rng(0)
    for scale in SCALES:
        random = np.ldexp(generator.uniform(1, 2, 20), generator.integers(-40, 20, 20)) / scale
        with np.errstate(over="ignore", under="ignore"):
            random = random.astype(np.float32)
        random = random[np.isfinite(random) & (random > 0)]
        check_outcomes(name, scale, np.concatenate([near_boundaries(name, scale, np.float32), random]), SINGLE)


@each_target
def test_every_boundary_is_exact_in_float64(name):
    with jax.enable_x64(True):
        for scale in SCALES[:5]:
            check_outcomes(name, scale, near_boundaries(name, scale, np.float64), DOUBLE)


@settings(max_examples=60)
@given(
    st.floats(2.0**-149, 2.0**127, width=32),
    st.floats(2.0**-126, 2.0**126, width=32),
    st.sampled_from(["float16", "bfloat16", "float8_e4m3fn"]),
)
def test_any_number_times_any_scale(value, scale, name):
    report = diagnostics.underflow_report({"g": np.full_like(VALUES, value)}, name, scale).total
    shares = {"zero": report.becomes_zero, "subnormal": report.becomes_subnormal, "infinite": report.becomes_infinite}
    found = next((what for what, share in shares.items() if share), "normal")
    assert found == rounding(name).outcome(Fraction(value) * Fraction(scale))


@pytest.mark.parametrize("name", TARGETS)
def test_shares_equal_a_cast_by_ml_dtypes(name):
    """Without a scale, rounding is the cast of ml_dtypes."""
    values = VALUES
    target = np.dtype(getattr(jnp, name))
    ordinary = values[np.isfinite(values) & (values != 0)]
    with np.errstate(all="ignore"):
        rounded = ordinary.astype(target).astype(np.float32)
    tiny = float(ml_dtypes.finfo(target).smallest_normal)
    total = diagnostics.underflow_report({"g": values}, name).total
    assert total.becomes_zero == np.mean(rounded == 0)
    small = (np.abs(rounded.astype(np.float64)) < tiny) & (rounded != 0)
    assert total.becomes_subnormal == pytest.approx(np.mean(small), abs=1e-12)
    assert total.becomes_infinite == np.mean(~np.isfinite(rounded))
    assert (total.values, total.zeros) == (values.size, np.sum(values == 0))
    assert total.not_finite == np.sum(~np.isfinite(values))
    assert total.largest == np.abs(ordinary).max()


@pytest.mark.parametrize("source", TARGETS)
def test_every_narrow_source(source):
    """A format rounded to itself loses nothing, apart from its own subnormal numbers."""
    values = all_values(source)
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float32)
    ordinary = np.isfinite(wide) & (values.view(np.uint8 if values.itemsize == 1 else np.uint16) != 0)
    total = jax.jit(lambda values: diagnostics.underflow_report([values], source))(values).total
    assert total.becomes_zero == total.becomes_infinite == 0
    assert total.largest == facts(source).max and total.headroom == 0
    small = np.abs(wide[ordinary].astype(np.float64)) < facts(source).smallest_normal
    numbers = np.sum(small & (np.abs(wide[ordinary].astype(np.float64)) > 0))
    assert total.becomes_subnormal == pytest.approx(numbers / (total.values - total.zeros - total.not_finite))


def test_leaves_total_headroom_and_text():
    grads = {"a": jnp.array([2.0**-30, 2.0**-20, 0.0, 2.0]), "b": {"c": jnp.array([1e6, jnp.inf, jnp.nan])}, "n": None}
    report = diagnostics.underflow_report(grads, "float16", jmp.StaticLossScale(8.0))
    a, c = report.leaves
    assert (a.path, a.values, a.zeros, a.not_finite) == ("a", 4, 1, 0)
    assert (a.becomes_zero, a.becomes_subnormal, a.becomes_infinite, a.largest) == (1 / 3, 1 / 3, 0, 2)
    assert (c.path, c.values, c.not_finite, c.becomes_infinite, c.largest) == ("b/c", 3, 2, 1, 1e6)
    assert a.headroom == pytest.approx(math.log2(65504 / 16))
    assert c.headroom == pytest.approx(math.log2(65504 / 8e6)) and report.total.headroom == c.headroom
    assert report.total.becomes_zero == report.total.becomes_infinite == 0.25
    values = json.loads(json.dumps(report.as_dict()))
    assert (values["dtype"], values["loss_scale"], values["exact"]) == ("float16", 8.0, True)
    assert values["leaves"][1]["path"] == "b/c" and values["total"]["becomes_zero"] == 0.25
    assert str(report).splitlines() == [
        "Rounded to float16 after scaling by 8",
        "leaf   values  zero  not finite  becomes zero  subnormal  infinite  largest  headroom",
        "a      4       1     0           33.3%         33.3%      0.0%      2        2^12.0",
        "b/c    3       0     2           0.0%          0.0%       100.0%    1e+06    2^-6.9",
        "total  7       1     2           25.0%         25.0%      25.0%     1e+06    2^-6.9",
    ]


def test_float64_leaves():
    with jax.enable_x64(True):
        grads = {"w": np.array([1e-310, 2.0**-30, 3.0, np.nan])}
        exact = diagnostics.underflow_report(grads)
        binned = diagnostics.underflow_report(diagnostics.exponent_histogram(grads))
        assert exact.total.largest == 3.0 and binned.total.largest == 4.0 - 2.0**-51
        for report in (exact, binned):
            assert report.total.becomes_zero == 2 / 3 and report.total.not_finite == 1
            assert report.largest[0].dtype == jnp.float64


def test_nothing_to_report():
    report = diagnostics.underflow_report({"ids": np.arange(3), "w": np.zeros(2, np.float32)})
    assert report.total.headroom is None and report.total.zeros == 2 and report.total.becomes_zero == 0
    assert diagnostics.underflow_report({}).total.values == 0
    assert json.loads(json.dumps(report.as_dict()))["total"]["headroom"] is None
    assert str(report).splitlines()[-1].split() == ["total", "2", "2", "0", "0.0%", "0.0%", "0.0%", "0"]


def test_a_stack_of_reports_is_not_read():
    stack = jax.vmap(diagnostics.underflow_report)(jnp.ones((2, 3)))
    for read in (str, lambda x: x.as_dict(), lambda x: x.leaves, lambda x: x.total):
        with pytest.raises(ValueError, match=r"^this is a stack of reports, of shape \(2,\), as vmap and scan return"):
            read(stack)


@settings(max_examples=40)
@given(st.fractions(Fraction(1, 2**40), 2**40))
def test_the_power_of_two_below_a_fraction(number):
    assert Fraction(2) ** floor_log2(number) <= number < Fraction(2) ** (floor_log2(number) + 1)


def test_any_loss_scale_and_a_traced_one():
    grads = jnp.float32([2.0**-30, 1.0])
    for scale in (2.0**10, jnp.float32(1024), jmp.StaticLossScale(1024), jmp.DynamicLossScale(1024), np.float32(1024)):
        assert diagnostics.underflow_report(grads, loss_scale=scale).total.becomes_zero == 0
    for scale in (1024, jnp.float32(1024), jmp.StaticLossScale(1024), jmp.DynamicLossScale(1024)):
        assert jax.jit(lambda s: diagnostics.underflow_report(grads, loss_scale=s))(scale).total.becomes_zero == 0
    assert diagnostics.underflow_report(grads, loss_scale=jmp.NoOpLossScale()).total.becomes_zero == 0.5


def test_under_jit_vmap_and_scan():
    values = awkward(np.float32)[:300].reshape(3, 100)
    alone = [diagnostics.underflow_report({"x": row}, "bfloat16", 3.0) for row in values]
    assert jax.jit(lambda x: diagnostics.underflow_report(x, "bfloat16", 3.0))({"x": values[0]}).total == alone[0].total
    stack = jax.vmap(lambda x: diagnostics.underflow_report({"x": x}, "bfloat16", 3.0))(values)
    _, scanned = jax.lax.scan(lambda c, x: (c, diagnostics.underflow_report({"x": x}, "bfloat16", 3.0)), 0, values)
    for stacked in jax.tree.map(np.asarray, (stack, scanned)):
        assert [jax.tree.map(lambda x, i=i: x[i], stacked).as_dict() for i in range(3)] == [r.as_dict() for r in alone]
    with pytest.raises(ValueError) as error:
        str(stack)
    assert str(error.value) == (
        "this is a stack of reports, of shape (3,), as vmap and scan return; "
        "take one with jax.tree.map(lambda x: x[0], report)."
    )


class TestHistogram:
    @each_target
    def test_equals_the_exact_report_away_from_boundaries(self, name):
        values = np.ldexp(F32([1.25, 1.5, 1.7]), np.arange(-40, 25)[:, None]).ravel()
        scales = jnp.float32([1.0, 2.0**-3, 2.0**7])
        reports = jax.jit(jax.vmap(lambda x, scale: diagnostics.underflow_report(x, name, scale), (None, 0)))
        histogram = diagnostics.exponent_histogram(values)
        both = jax.tree.map(np.asarray, [reports(each, scales) for each in (values, histogram)])
        for i in range(len(scales)):
            exact, binned = jax.tree.map(lambda x, i=i: x[i], both)
            assert exact.exact and not binned.exact and "to the accuracy of a histogram" in str(binned)
            for share in ("becomes_zero", "becomes_subnormal", "becomes_infinite"):
                assert getattr(binned.total, share) == getattr(exact.total, share)
            assert exact.total.largest <= binned.total.largest < 2 * exact.total.largest
            assert (binned.total.values, binned.paths) == (values.size, ("",))

    def test_the_middle_of_a_bin_stands_for_all_of_it(self):
        histogram = diagnostics.exponent_histogram({"ties": jnp.float32([2.0**-25] * 3), "top": jnp.float32([65530.0])})
        binned = diagnostics.underflow_report(histogram)
        assert [row.becomes_zero for row in binned.leaves] == [0, 0] and binned.total.becomes_infinite == 0
        assert [row.largest for row in binned.leaves] == [2.0**-24 - 2.0**-48, 2.0**16 - 2.0**-8]  # ends of the bins
        exact = diagnostics.underflow_report([jnp.float32([2.0**-25] * 3), jnp.float32([65530.0])])
        assert exact.leaves[0].becomes_zero == exact.leaves[1].becomes_infinite == 1

    def test_zeros_infinities_and_subnormals(self):
        values = F32([0, 0, np.inf, np.nan, 2.0**-149, 2.0**-140, 1])
        binned = diagnostics.underflow_report(diagnostics.exponent_histogram(values))
        exact = diagnostics.underflow_report(values)
        assert binned.as_dict()["total"] | {"largest": 1.0, "headroom": 0} == exact.as_dict()["total"] | {"headroom": 0}

    def test_of_a_long_run_beyond_32_bits(self):
        histogram = diagnostics.exponent_histogram(jnp.float32([1.0, 2.0**-30]))
        for _ in range(40):
            histogram = histogram + histogram
        total = diagnostics.underflow_report(histogram).total
        assert total.values == 2 * 2**40 and total.becomes_zero == 0.5

    def test_a_stack_is_an_error(self):
        stack = jax.vmap(diagnostics.exponent_histogram)(jnp.ones((2, 3)))
        for function in (diagnostics.underflow_report, diagnostics.suggest_loss_scale):
            with pytest.raises(ValueError, match="this is a stack of histograms"):
                function(stack)


class TestSuggestion:
    @settings(max_examples=50)
    @given(
        st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=4, max_size=4),
        st.sampled_from(["float16", "float8_e4m3fn"]),  # it reads their largest number, no more
        st.sampled_from([1.0, 1.5, 10.0]),
    )
    def test_is_the_largest_power_of_two_below_the_margin(self, numbers, name, margin):
        values = np.float32(numbers)
        scale = float(diagnostics.suggest_loss_scale([values], name, margin))
        largest, limit = Fraction(float(np.abs(values).max())), Fraction(facts(name).max) / Fraction(margin)
        assert 1 <= scale <= 2**24 and math.log2(scale) % 1 == 0
        assert scale == 1 or Fraction(scale) * largest < limit
        assert scale == 2**24 or 2 * Fraction(scale) * largest >= limit
        binned = float(diagnostics.suggest_loss_scale(diagnostics.exponent_histogram([values]), name, margin))
        assert binned <= scale <= max(2 * binned, 1)

    @pytest.mark.parametrize("largest, scale", [(1.0, 2**14), (0.9995, 2**15), (0.9994, 2**15), (32752 / 2**15, 2**14)])
    def test_strictly_below(self, largest, scale):
        assert diagnostics.suggest_loss_scale(jnp.float32(largest)) == scale

    def test_subnormal_gradients_and_wide_ones(self):
        assert diagnostics.suggest_loss_scale(jnp.float32(2.0**-149)) == 2**24
        assert diagnostics.suggest_loss_scale(np.array(0x0001, np.uint16).view(jnp.bfloat16)) == 2**24
        with jax.enable_x64(True):
            assert diagnostics.suggest_loss_scale({"a": jnp.float64(1e-310), "b": jnp.float32(1)}) == 2**14
            assert diagnostics.suggest_loss_scale({"a": jnp.float64(3.0), "b": jnp.float32(1)}) == 2**13
            assert diagnostics.suggest_loss_scale({"a": jnp.float64(1e300)}) == 1

    def test_what_is_not_finite_is_ignored(self):
        assert diagnostics.suggest_loss_scale(jnp.float32([jnp.inf, 1.0, -jnp.nan])) == 2**14
        assert diagnostics.suggest_loss_scale({"a": jnp.float32(jnp.inf), "b": jnp.float32(1)}) == 2**14

    @pytest.mark.parametrize("tree, scale", [([0.0], 2**24), ({}, 2**24), ([jnp.nan], 1), ([0.0, -jnp.inf], 1)])
    def test_nothing_finite_but_zeros(self, tree, scale):
        tree = jax.tree.map(jnp.float32, tree)
        assert diagnostics.suggest_loss_scale(tree) == scale
        assert diagnostics.suggest_loss_scale(jnp.stack([*jax.tree.leaves(tree), jnp.float32(0)])) == scale
        assert diagnostics.suggest_loss_scale(diagnostics.exponent_histogram(tree)) == scale

    def test_inside_jit_vmap_and_scan(self):
        values = jnp.float32([[1.0, 2.0], [2.0**-9, 0.0], [jnp.inf, 2.0]])
        expected = [2.0**13, 2.0**23, 2.0**13]
        histograms = jax.vmap(diagnostics.exponent_histogram)(values)
        for found in (
            jax.vmap(diagnostics.suggest_loss_scale)(values),
            2 * np.asarray(jax.vmap(diagnostics.suggest_loss_scale)(histograms)),  # bins taken as full
            jax.lax.scan(lambda c, x: (c, diagnostics.suggest_loss_scale(x)), 0, values)[1],
            np.stack([jax.jit(diagnostics.suggest_loss_scale)(x) for x in np.asarray(values)]),
        ):
            assert found.dtype == jnp.float32 and found.tolist() == expected

    def test_the_default_margin_of_a_dynamic_scale(self):
        scale = diagnostics.suggest_loss_scale(jnp.float32([5.0]))
        start = jmp.DynamicLossScale(float(scale))
        assert float(start.loss_scale) * 5 * 2 < 65504


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="out")(x)


def test_linen_and_nnx_gradients():
    x = jnp.ones((2, 4))
    params = jax.jit(Net().init)(jax.random.key(0), x)
    grads = jax.jit(jax.grad(lambda p: 1e-9 * jnp.mean(Net().apply(p, x) ** 2)))(params)  # pyright: ignore
    report = diagnostics.underflow_report(grads)
    assert report.paths == ("params/out/bias", "params/out/kernel") and report.total.becomes_zero == 1
    assert float(diagnostics.suggest_loss_scale(grads)) == 2**24

    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    grads = nnx.jit(nnx.grad(lambda m: 1e-9 * jnp.mean(m(x) ** 2)))(model)
    report = diagnostics.underflow_report(grads, loss_scale=2.0**24)
    assert set(report.paths) == {"bias", "kernel"} and report.total.becomes_zero == 0


def test_in_a_training_step_with_an_injected_infinity():
    tx = jmp.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(64.0))
    grad_fn = jmp.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), "mixed_float16")

    @jax.jit
    def step(w, opt_state, x):
        scale = jmp.get_loss_scale(opt_state)
        _, grads = grad_fn(w, x, loss_scale=scale)
        updates, opt_state = tx.update(grads, opt_state, w)
        report = diagnostics.underflow_report(grads, loss_scale=scale)
        return optax.apply_updates(w, updates), opt_state, report, diagnostics.suggest_loss_scale(grads)

    w, x = jnp.ones((4, 2)), np.ones((8, 4), np.float32)
    opt_state = tx.init(w)
    bad = np.where(np.arange(32).reshape(8, 4) == 0, np.float32(np.inf), x)
    seen = []
    for batch in (x, bad, x):
        w, opt_state, report, suggested = step(w, opt_state, batch)
        seen.append((float(report.loss_scale), report.total.not_finite, float(suggested)))
    # The gradient is 4 at w = 1, then 4 * (1 - 4 * 0.1 * 4) ...; the skipped step has nothing finite.
    assert [row[:2] for row in seen] == [(64, 0), (64, 8), (32, 0)]
    assert seen[1][2] == 1 and seen[0][2] == 2**12


@pytest.mark.parametrize(
    "call, sentence",
    [
        (
            lambda: diagnostics.underflow_report(jnp.ones(2), "float32"),
            "`dtype` must be a format of 16 or 8 bits that holds gradients, such as 'float16', 'bfloat16' or "
            "'float8_e5m2', got float32.",
        ),
        (
            lambda: diagnostics.underflow_report(jnp.ones(2), "float4_e2m1fn"),
            "`dtype` must be a format of 16 or 8 bits that holds gradients, such as 'float16', 'bfloat16' or "
            "'float8_e5m2', got float4_e2m1fn.",
        ),
        (
            lambda: diagnostics.suggest_loss_scale(jnp.ones(2), "float8_e8m0fnu"),
            "`dtype` must be a format of 16 or 8 bits that holds gradients, such as 'float16', 'bfloat16' or "
            "'float8_e5m2', got float8_e8m0fnu.",
        ),
        *(
            (
                lambda read=read: read({"w": print}),
                "`tree_or_histogram` has leaves, and none is floating; pass gradients.",
            )
            for read in (diagnostics.suggest_loss_scale, diagnostics.underflow_report)
        ),
        (
            lambda: diagnostics.underflow_report(
                jnp.ones(2), loss_scale=[jmp.with_loss_scale(optax.sgd(0.1)).init(jnp.ones(2))]
            ),
            "`loss_scale` must be a number or a loss scale, got an optimizer's state; pass get_loss_scale(opt_state).",
        ),
        (
            lambda: diagnostics.suggest_loss_scale(jnp.ones(2), margin=0.5),
            "`margin` must be at least 1, got 0.5. Pass how many times larger gradients may get.",
        ),
        (
            lambda: diagnostics.underflow_report(jnp.ones(2), loss_scale=-1.0),
            "`loss_scale` must lie in [2**-126, 2**126], got -1.0: 1 / loss_scale has to be a normal float32 "
            "number, or gradients are flushed to zero. Pass a positive number such as 2.0**15.",
        ),
        (
            lambda: diagnostics.underflow_report(jnp.ones(2), loss_scale="auto"),
            "`loss_scale` must be one real number, got 'auto'. Pass a number such as 2.0.",
        ),
        (
            lambda: diagnostics.underflow_report(jnp.ones(2), loss_scale=(1, (2, 3))),
            "`loss_scale` must be one real number, got (1, (2, 3)). Pass a number such as 2.0.",
        ),
        (
            lambda: diagnostics.underflow_report({"w": np.ones(2)}),
            "`underflow_report`: the leaf 'w' is float64 while 64-bit types are disabled, and JAX would round it to 32 "
            "bits; call jax.config.update('jax_enable_x64', True) first, or cast it yourself.",
        ),
    ],
)
def test_bad_input(call, sentence):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == sentence


@pytest.mark.parametrize(("mantissa", "exponent"), [(1.5, 19), (1.99, 19), (1.9995, 18)])
def test_a_scale_for_a_subnormal_number_under_an_enormous_margin(mantissa, exponent):
    """65504 / 2**126 is 1.999 * 2**-111."""
    gradient = np.float32(mantissa * 2.0**-130)
    assert diagnostics.suggest_loss_scale(gradient, margin=2.0**126) == 2.0**exponent
