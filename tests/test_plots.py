"""The plots, read back from matplotlib's own objects."""

# Matplotlib's artists are typed as their base class.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOptionalMemberAccess=false

import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import StepPatch

import jmp_train as jmp
from jmp_train import diagnostics

VALUES = np.array([2.0**-30] * 3 + [1.5 * 2.0**-20, 4.0, 0.0, np.inf, np.nan], np.float32)


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def stairs(ax):
    """{exponent: share} of each histogram that is drawn."""
    found = [patch.get_data() for patch in ax.patches if isinstance(patch, StepPatch)]
    return [{edges[i]: values[i] for i in np.flatnonzero(values)} for values, edges, _ in found]


def regions(ax):
    """{label: (left, right)} of the shaded spans."""
    spans = {patch.get_label(): patch.get_extents().transformed(ax.transData.inverted()) for patch in ax.patches}
    return {name: (box.x0, box.x1) for name, box in spans.items() if " in " in name}


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


class TestExponents:
    def test_shares_and_the_effect_of_the_scale(self):
        ax = diagnostics.plot_exponents({"a": VALUES}, loss_scale=1024.0)
        assert stairs(ax) == [{-30: 60, -20: 20, 2: 20}, {-20: 60, -10: 20, 12: 20}]
        assert legend(ax)[3:] == ["as they are: 60.0% become zero", "times $2^{10}$: 0.0% become zero"]
        assert ax.get_legend().get_title().get_text() == "Not drawn: 12% zero, 12% infinite, 12% NaN already"
        assert ax.get_yscale() == "log" and ax.get_xlabel() == "exponent of |x| (powers of 2)"

    @pytest.mark.parametrize(
        "dtype, beyond, lost, normal, top",
        [
            ("float16", "infinite", -25, -14, 16),
            ("float8_e4m3fn", "NaN", -10, -6, np.log2(464)),
            pytest.param("bfloat16", "infinite", -134, -126, 128, marks=pytest.mark.slow),
            pytest.param("float8_e5m2", "infinite", -17, -14, np.log2(61440), marks=pytest.mark.slow),
            pytest.param("float8_e4m3fnuz", "NaN", -11, -7, np.log2(248), marks=pytest.mark.slow),
        ],
    )
    def test_regions(self, dtype, beyond, lost, normal, top):
        ax = diagnostics.plot_exponents({"a": VALUES}, dtype)
        found = regions(ax)
        assert list(found) == [f"{name} in {dtype}" for name in ("zero", "subnormal", beyond)]
        (_, zero), (start, end), (infinite, _) = found.values()
        assert zero == pytest.approx(lost) and (start, end) == pytest.approx((lost, normal))
        assert infinite == pytest.approx(top, abs=2e-2)

    def test_everything_is_inside_the_picture(self):
        ax = diagnostics.plot_exponents({"a": VALUES}, loss_scale=jmp.StaticLossScale(2.0**20))
        low, high = ax.get_xlim()
        assert low < -30 and high > 23
        ax.figure.canvas.draw()
        assert ax.get_legend().get_window_extent().y0 >= ax.get_window_extent().y1
        assert ax.figure.bbox.containsx(ax.get_legend().get_window_extent().x1)

    def test_a_histogram_a_scale_that_is_no_power_of_two_and_given_axes(self):
        _, given = plt.subplots()
        ax = diagnostics.plot_exponents(
            diagnostics.exponent_histogram([VALUES]), loss_scale=jmp.DynamicLossScale(3.0), ax=given
        )
        assert ax is given and min(stairs(ax)[1]) == pytest.approx(-30 + np.log2(3))
        assert len(plt.get_fignums()) == 1

    def test_without_a_scale(self):
        ax = diagnostics.plot_exponents({"a": VALUES})
        assert stairs(ax) == [{-30: 60, -20: 20, 2: 20}]
        bottom, top = ax.get_ylim()
        assert bottom == 0.05 and top > 100

    def test_a_small_share_is_inside_the_picture(self):
        values = np.full(10_000, 4, np.float32)
        values[0] = 1
        assert diagnostics.plot_exponents(values).get_ylim()[0] == pytest.approx(0.005)

    def test_a_small_share_that_is_not_drawn_has_a_decimal(self):
        ax = diagnostics.plot_exponents(np.float32([0] + [1] * 39))
        assert ax.get_legend().get_title().get_text() == "Not drawn: 2.5% zero already"

    def test_overflow_is_told(self):
        ax = diagnostics.plot_exponents(jnp.float32(2.0), loss_scale=2.0**17)
        assert legend(ax)[-1] == "times $2^{17}$: 0.0% become zero, 100.00% overflow"

    def test_nothing_to_draw(self):
        for tree in ({}, jnp.zeros(3)):
            assert stairs(diagnostics.plot_exponents(tree, loss_scale=2.0)) == [{}, {}]

    def test_a_stack_is_an_error(self):
        with pytest.raises(ValueError, match="this is a stack of histograms"):
            diagnostics.plot_exponents(jax.vmap(diagnostics.exponent_histogram)(jnp.ones((2, 3))))


class TestLossScale:
    scales = (8.0, 4.0, 4.0, 8.0)
    skipped = (False, True, False, False)

    def test_scale_skips_and_loss(self):
        upper, lower = diagnostics.plot_loss_scale(
            jnp.array(self.scales), np.array(self.skipped), [3.0, np.inf, 2.0, 0.1]
        )
        scale, skips = upper.lines
        assert scale.get_ydata().tolist() == [8, 4, 4, 8] and scale.get_drawstyle() == "steps-post"
        assert (skips.get_xdata().tolist(), skips.get_ydata().tolist()) == ([1], [4])
        assert legend(upper) == ["loss scale", "1 skipped step"]
        assert upper.yaxis.get_transform().base == 2 and lower.get_yscale() == "log"
        mark, loss = lower.lines
        assert mark.get_xdata() == [1, 1]
        np.testing.assert_array_equal(loss.get_ydata(), [3, np.nan, 2, 0.1])
        assert (upper.get_ylabel(), lower.get_ylabel(), lower.get_xlabel()) == ("loss scale", "loss", "step")

    def test_a_loss_that_changes_little_or_sign_is_linear(self):
        for loss in ([1.0, 1.1, 1.2, 0.9], [-1.0, 50.0, 2.0, 1.0], [np.nan] * 4):
            assert diagnostics.plot_loss_scale(self.scales, loss=loss)[1].get_yscale() == "linear"

    def test_given_axes(self):
        _, given = plt.subplots(2)
        assert diagnostics.plot_loss_scale(self.scales, self.skipped, self.scales, given) == tuple(given)
        assert all(float(step).is_integer() for step in given[1].get_xticks())
        assert diagnostics.plot_loss_scale(self.scales, axes=[given[0]]) == (given[0],)

    @pytest.mark.parametrize(
        "arguments, sentence",
        [
            (
                ([1.0, 2.0], [True]),
                "one number for each step is drawn, got the shapes `loss_scale` (2,), `skipped` (1,). "
                "Pass arrays of one length.",
            ),
            (
                (2.0, None, 3.0),
                "one number for each step is drawn, got the shapes `loss_scale` (), `skipped` (), `loss` (). "
                "Pass arrays of one length.",
            ),
            (
                ([1.0, 2.0], [0, 1]),
                "`skipped` must be true for each step that was skipped, got int64. Pass the negated `grads_finite` of "
                "step_metrics, not the number of skipped steps.",
            ),
            (([1.0], None, None, ()), "`axes` must be 1, got 0: one for the scale, and one for the loss if given."),
        ],
    )
    def test_bad_input(self, arguments, sentence):
        with pytest.raises(ValueError) as error:
            diagnostics.plot_loss_scale(*arguments)
        assert str(error.value) == sentence


@pytest.mark.parametrize(
    "call", [lambda: diagnostics.plot_exponents(VALUES), lambda: diagnostics.plot_loss_scale([1.0])]
)
def test_without_matplotlib(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r'draws with matplotlib: pip install "jmp-train\[plot\]"$'):
        call()


def notes(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(
    ("tree", "left_out"),
    [
        ({}, ""),
        (np.zeros(10, np.float32), "Not drawn: 100% zero already"),
        (np.array([np.inf, np.nan, 0], np.float32), "Not drawn: 33% zero, 33% infinite, 33% NaN already"),
    ],
)
def test_a_picture_of_nothing_says_so(tree, left_out):
    ax = diagnostics.plot_exponents(tree, "float16", 8.0)
    legend = ax.get_legend()
    assert notes(ax) == ["no finite, non-zero values"] and legend.get_title().get_text() == left_out
    assert not any("become zero" in text.get_text() for text in legend.get_texts())
    assert notes(diagnostics.plot_exponents(np.float32(3))) == []


def test_runs_of_no_step_one_step_and_no_finite_loss():
    assert list(map(notes, diagnostics.plot_loss_scale([], loss=[]))) == [["no steps"], []]
    (ax,) = diagnostics.plot_loss_scale([8.0], [True])
    assert ax.lines[0].get_marker() == "o" and notes(ax) == []
    assert all(float(tick).is_integer() for tick in ax.get_xticks())
    assert notes(diagnostics.plot_loss_scale([8.0, 4.0], loss=[np.nan, np.inf])[1]) == ["no finite loss"]


def test_the_ends_of_a_wide_format_are_seen():
    first, last = diagnostics.plot_exponents(np.float32(1), "bfloat16").get_xlim()
    assert first <= -134 - 0.03 * 262 and last >= 128 + 0.03 * 262


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: diagnostics.plot_loss_scale(["a"]),
            "`loss_scale` must hold one number for each step, got ['a']; pass an array.",
        ),
        (
            lambda: diagnostics.plot_loss_scale([1.0], loss=["a"]),
            "`loss` must hold one number for each step, got ['a']; pass an array.",
        ),
        (
            lambda: diagnostics.plot_loss_scale([1.0], axes=3),  # type: ignore[arg-type]
            "`axes` must be a sequence of matplotlib's axes, got 3; pass [ax] for one.",
        ),
        (
            lambda: diagnostics.plot_loss_scale([8.0, 0.0]),
            "`loss_scale` must be positive, got 0; pass the scales themselves, no logarithms.",
        ),
        (
            lambda: diagnostics.plot_exponents(VALUES, ax=3),  # type: ignore[arg-type]
            "`ax` must be matplotlib's axes, got 3; leave it out for a new figure.",
        ),
    ],
)
def test_what_is_no_number_and_no_axes(call, sentence):
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert str(error.value) == sentence
