"""`plot_exponents` and `plot_loss_scale`: the pictures of the loss-scaling literature, from the user's own run.

Decides what is drawn and how. Does not decide what is counted (`_exponent_histogram.py`), nor what a format does to a
number (`_underflow.py`). The only file that imports matplotlib, and only when it draws.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; regions are hatched as well, and lines
differ in style, for print without colours.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ..._dtypes import Format
from ..._text import count
from ._bits import check_single, target_format
from ._exponent_histogram import ExponentHistogram, exponent_histogram
from ._underflow import as_scale, underflow_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _ORANGE, _RED, _PURPLE, _BLACK = "#0072B2", "#E69F00", "#D55E00", "#CC79A7", "#000000"
_MARGIN = 0.03  # of the range of exponents, left empty at both ends


def plot_exponents(
    tree_or_histogram: Any, dtype: DTypeLike = "float16", loss_scale: Any = None, ax: "Axes | None" = None
) -> "Axes":
    """Draws the share of values at every exponent, over the regions where a 16- or 8-bit format loses them.

    Shaded are the exponents whose numbers become zero, subnormal (with fewer bits of precision) and infinite in the
    format. With a loss scale S, an outline shows where it moves the values: log2(S) to the right. All leaves are
    counted together; the shares are of the finite non-zero values, on a logarithmic axis.

    Args:
      tree_or_histogram: any pytree of arrays, or an `ExponentHistogram`.
      dtype: float16, bfloat16 or an 8-bit format.
      loss_scale: S: a number, an array, a loss scale, or `None` for the values as they are.
      ax: where to draw; by default a new figure.

    Returns:
      The axes.

    Raises:
      ImportError: matplotlib is not installed.
      TypeError: `ax` is no axes.
      ValueError: as `underflow_report`; or the histogram is a stack.

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018, figures 2 and 3.

    >>> import matplotlib
    >>> matplotlib.use("Agg")
    >>> axes = plot_exponents({"w": np.float32(2.0**-30)}, "float16", 1024.0)
    >>> [text.get_text() for text in axes.get_legend().get_texts()][:2]
    ['zero in float16', 'subnormal in float16']
    """
    target = target_format(dtype)
    histogram = tree_or_histogram
    if not isinstance(histogram, ExponentHistogram):
        histogram = exponent_histogram(histogram)
    check_single(histogram.counts, "histogram")
    whole = histogram.total()
    used = np.flatnonzero(whole.values[0])
    shift = 0.0 if loss_scale is None else math.log2(float(as_scale(loss_scale)))
    if ax is not None and not hasattr(ax, "axvspan"):
        raise TypeError(f"`ax` must be matplotlib's axes, got {ax!r}; leave it out for a new figure.")
    axes: Axes = _new_axes("plot_exponents", 1)[0] if ax is None else ax
    limits = _limits(whole.exponents[used], shift, target)
    _draw_regions(axes, target, limits)
    _draw_values(axes, whole, target, None if loss_scale is None else shift)
    if not used.size:
        _note(axes, "no finite, non-zero values")
    axes.set(xlabel="exponent of |x| (powers of 2)", ylabel="% of finite, non-zero values")
    axes.set(xlim=limits, yscale="log", ylim=(_bottom(whole), 150))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _legend_above(axes, _left_out(whole))
    return axes


def _shares(whole: ExponentHistogram) -> np.ndarray:
    return 100 * whole.values[0] / max(1, whole.values[0].sum())


def _bottom(whole: ExponentHistogram) -> float:
    """Where the axis of shares begins: below the smallest there is."""
    shares = _shares(whole)
    return min(0.5 * shares[shares > 0].min(initial=100.0), 0.05)


def _draw_values(axes: "Axes", whole: ExponentHistogram, target: Format, shift: float | None) -> None:
    shares, bottom = _shares(whole), _bottom(whole)
    edges = np.append(whole.exponents, whole.exponents[-1] + 1)
    style: dict[str, Any] = {"fill": True, "facecolor": _BLUE, "edgecolor": _BLUE, "baseline": bottom, "zorder": 2}
    axes.stairs(shares, edges, label=_label("as they are", whole, target, 1.0), **style)
    if shift is not None:
        label = _label(f"times {_power(shift)}", whole, target, 2.0**shift)
        axes.stairs(shares, edges + shift, baseline=bottom, color=_BLACK, linewidth=1.6, label=label, zorder=3)


def _note(ax: "Axes", text: str) -> None:
    """Says why there is nothing to see."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", zorder=4)


def _limits(used: np.ndarray, shift: float, target: Format) -> tuple[float, float]:
    """The ends of the axis: the whole range of the format, the values, and the values scaled."""
    ends = [math.log2(target.smallest_subnormal) - 1, math.log2(target.max)]
    if used.size:
        first, last = float(used[0]), float(used[-1]) + 1
        ends += [first, last, first + shift, last + shift]
    margin = max(2, math.ceil(_MARGIN * (max(ends) - min(ends))))
    return math.floor(min(ends)) - margin, math.ceil(max(ends)) + margin


def _draw_regions(ax: "Axes", target: Format, limits: tuple[float, float]) -> None:
    # Half the smallest subnormal number rounds to zero; half a step above the largest number rounds to infinity.
    lost, normal = math.log2(target.smallest_subnormal) - 1, math.log2(target.smallest_normal)
    top = math.log2(target.max + target.max * target.eps / 4)
    beyond = "infinite" if np.isinf(np.float32(np.inf).astype(target.name)) else "NaN"
    for start, end, name, colour, hatch in (
        (limits[0], lost, "zero", _RED, "////"),
        (lost, normal, "subnormal", _ORANGE, ""),
        (top, limits[1], beyond, _PURPLE, "\\\\\\\\"),
    ):
        style: dict[str, Any] = {
            "facecolor": (colour, 0.22),
            "edgecolor": (colour, 0.6),
            "hatch": hatch,
            "linewidth": 0,
        }
        ax.axvspan(start, end, zorder=0, label=f"{name} in {target.name}", **style)


def _power(exponent: float) -> str:
    return f"$2^{{{exponent:.4g}}}$"


def _label(what: str, whole: ExponentHistogram, target: Format, scale: float) -> str:
    row = underflow_report(whole, target.name, scale).total
    if row.values == row.zeros + row.not_finite:
        return ""  # which keeps it out of the legend
    lost = f"{what}: {row.becomes_zero:.1%} become zero"
    return lost + (f", {row.becomes_infinite:.2%} overflow" if row.becomes_infinite else "")


def _left_out(whole: ExponentHistogram) -> str:
    numbers = {"zero": whole.zeros[0], "infinite": whole.infinities[0], "NaN": whole.nans[0]}
    values = max(1, int(whole.values[0].sum() + sum(numbers.values())))
    shares = {name: 100 * number / values for name, number in numbers.items() if number}
    found = ", ".join(
        f"{share:.0f}% {name}" if share >= 10 else f"{share:.2g}% {name}" for name, share in shares.items()
    )
    return found and f"Not drawn: {found} already"


def _legend_above(ax: "Axes", note: str) -> None:
    """A legend above the axes, where no data can be under it."""
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(0, 1.01),
        ncols=2,
        frameon=False,
        fontsize="small",
        borderaxespad=0,
        title=note or None,
        alignment="left",
    )


def plot_loss_scale(
    loss_scale: ArrayLike,
    skipped: ArrayLike | None = None,
    loss: ArrayLike | None = None,
    axes: "Sequence[Axes] | None" = None,
) -> "tuple[Axes, ...]":
    """Draws the loss scale over the steps of a run, the steps that were skipped, and the loss below.

    Args:
      loss_scale: S after each step, `[steps]`: `step_metrics(opt_state)["loss_scale"]`, collected.
      skipped: bool `[steps]`, true where the step was skipped: the negated `grads_finite` of `step_metrics`.
      loss: the loss of each step, `[steps]`; what is infinite or NaN leaves a gap.
      axes: where to draw: one, or two with a loss; by default a new figure.

    Returns:
      The axes: that of the scale and, with a loss, that of the loss.

    Raises:
      ImportError: matplotlib is not installed.
      TypeError: the arrays hold no numbers, or `axes` is no sequence.
      ValueError: the arrays are not of one length, a scale is not positive, `skipped` is not boolean, or there are not
        as many axes as panels.

    >>> import matplotlib
    >>> matplotlib.use("Agg")
    >>> (axes,) = plot_loss_scale([32768.0, 16384.0, 16384.0], [False, True, False])
    >>> axes.get_ylabel()
    'loss scale'
    """
    scales = _numbers("loss_scale", loss_scale)
    skips = np.zeros(scales.shape, np.bool_) if skipped is None else np.asarray(skipped)
    losses = None if loss is None else _numbers("loss", loss)
    _check_lengths(scales, skips, losses)
    panels = 1 if losses is None else 2
    drawn: Sequence[Axes] = _new_axes("plot_loss_scale", panels) if axes is None else axes
    if not isinstance(drawn, Sequence | np.ndarray):
        raise TypeError(f"`axes` must be a sequence of matplotlib's axes, got {drawn!r}; pass [ax] for one.")
    if len(drawn) != panels:
        raise ValueError(
            f"`axes` must be {panels}, got {len(drawn)}: one for the scale, and one for the loss if given."
        )
    _draw_scale(drawn[0], scales, skips)
    if losses is not None:
        _draw_loss(drawn[1], losses, skips)
    drawn[-1].set_xlabel("step")
    locator: Any = drawn[-1].xaxis.get_major_locator()
    locator.set_params(integer=True, min_n_ticks=1)
    return tuple(drawn)


def _new_axes(caller: str, panels: int) -> "Sequence[Axes]":
    pyplot, size = _pyplot(caller), (7, 2.4 + 1.6 * panels)
    return pyplot.subplots(panels, 1, sharex=True, squeeze=False, figsize=size, layout="constrained")[1][:, 0]


def _draw_scale(ax: "Axes", scales: np.ndarray, skips: np.ndarray) -> None:
    steps = np.arange(len(scales))
    if not steps.size:
        _note(ax, "no steps")
    style: dict[str, Any] = {"drawstyle": "steps-post", "color": _BLUE, "linewidth": 1.8, "label": "loss scale"}
    ax.plot(steps, scales, marker="o" if steps.size == 1 else None, zorder=2, **style)
    if skips.any():
        label = count(int(skips.sum()), "skipped step")
        style = {
            "color": _RED,
            "marker": "v",
            "markersize": 6,
            "linestyle": "none",
            "markeredgecolor": "white",
        }
        ax.plot(steps[skips], scales[skips], label=label, zorder=3, **style)
    ax.set_yscale("log", base=2)
    ax.set_ylabel("loss scale")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), ncols=2, frameon=False, borderaxespad=0)


def _draw_loss(ax: "Axes", losses: np.ndarray, skips: np.ndarray) -> None:
    steps = np.arange(len(losses))
    for step in steps[skips]:
        ax.axvline(step, color=_RED, linewidth=0.8, linestyle=":", zorder=1)
    finite = np.where(np.isfinite(losses), losses, np.nan)
    ax.plot(steps, finite, color=_BLACK, linewidth=1.4, zorder=2)
    shown = finite[np.isfinite(finite)]
    if steps.size and not shown.size:
        _note(ax, "no finite loss")
    if shown.size and 0 < 10 * shown.min() < shown.max():
        ax.set_yscale("log")
    ax.set_ylabel("loss")


def _numbers(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` must hold one number for each step, got {values!r}; pass an array.") from None


def _check_lengths(scales: np.ndarray, skips: np.ndarray, losses: np.ndarray | None) -> None:
    shapes = {"loss_scale": scales.shape, "skipped": skips.shape}
    if losses is not None:
        shapes["loss"] = losses.shape
    if len(scales.shape) != 1 or len(set(shapes.values())) > 1:
        found = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        raise ValueError(f"one number for each step is drawn, got the shapes {found}. Pass arrays of one length.")
    if np.any(scales <= 0):
        raise ValueError(
            f"`loss_scale` must be positive, got {scales.min():g}; pass the scales themselves, no logarithms."
        )
    if skips.dtype != np.bool_:
        raise ValueError(
            f"`skipped` must be true for each step that was skipped, got {skips.dtype}. Pass the negated "
            "`grads_finite` of step_metrics, not the number of skipped steps."
        )


def _pyplot(caller: str) -> Any:
    try:
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        raise ImportError(f'{caller} draws with matplotlib: pip install "jmp-train[plot]"') from error
    return pyplot
