"""Figures of learning curves and of convergence, drawn from recorded numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from reproduction.data import Metric
from reproduction.formatting import interval

# Okabe and Ito's colours, which colour-blind readers tell apart; line styles differ as well.
STYLES: dict[str, dict[str, Any]] = {
    "SepSA": {"color": "#D55E00", "linestyle": "-", "linewidth": 2.2, "zorder": 5},
    "slimTrain": {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1))},
    "Adam": {"color": "#0072B2", "linestyle": "--"},
    "RMSprop": {"color": "#009E73", "linestyle": "-."},
    "NAG": {"color": "#56B4E9", "linestyle": (0, (3, 1, 1, 1))},
    "SGD": {"color": "#000000", "linestyle": ":"},
    "SepSA, tuned": {"color": "#E69F00", "linestyle": "-", "linewidth": 2.2, "zorder": 4},
    "Adam, cross-entropy": {"color": "#0072B2", "linestyle": (0, (1, 1))},
    "SepSA, cross-entropy": {"color": "#D55E00", "linestyle": (0, (1, 1)), "linewidth": 2.2, "zorder": 4},
    "Adam, standardized targets": {"color": "#0072B2", "linestyle": (0, (1, 1))},
}
GUIDE = "#707070"
_NEAR_PERFECT = 97.0  # %: above it an axis shows the remaining errors, in which the methods differ

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Curve:
    """One run: values y over x, NaN from where it diverged."""

    x: Floats
    y: Floats
    diverged: bool = False


Panels = Mapping[float, Mapping[str, Sequence[Curve]]]  # the runs of each panel, by learning rate and method


@dataclass(frozen=True)
class PanelRow:
    """One row of a grid of panels, which share their vertical axis."""

    label: str
    xlabel: str
    metric: Metric
    panels: Panels


@dataclass(frozen=True, eq=False)
class ConvergenceCurves:
    """How fast the method converges on one problem with a known optimum.

    bands["gradient"] and bands["objective"] hold mean, low and high over k; slopes (estimate, low, high) in log–log.
    """

    k: Floats
    bands: Mapping[str, Mapping[str, Floats]]
    slopes: Mapping[str, Sequence[float]]


def curve_grid(rows: Sequence[PanelRow], rates: Sequence[float]) -> Figure:
    """A row per data set and split, a column per learning rate; diverged methods are marked and named."""
    figure = Figure(figsize=(max(12.0, 3.0 * len(rates)), 0.7 + 3.0 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(rates), squeeze=False)
    for row, line in zip(rows, axes, strict=True):
        limits = _limits(row.metric, _all(row.panels))
        for axis, lr in zip(line, rates, strict=True):
            _panel(axis, row.panels.get(lr, {}), row.metric, limits, f"learning rate {lr:g}" if row is rows[0] else "")
            axis.set_xlabel(row.xlabel)
            if axis is not line[0]:
                axis.tick_params(labelleft=False)
        line[0].set_ylabel(row.label)
    _legend(figure, axes.flat)
    return figure


def convergence(problems: Mapping[str, ConvergenceCurves], cost: Mapping[str, tuple[Floats, Floats]]) -> Figure:
    """Gradient norm and objective gap over iterations with their slopes, and the cost of a step over p and q.

    The legend names the problems by their keys; cost["p"] and cost["q"] are (size, seconds).
    """
    figure = Figure(figsize=(12.0, 8.0), layout="constrained")
    (top, bottom) = figure.subplots(2, 2)
    color = STYLES["SepSA"]["color"]
    for axis, which, ylabel, guides in (
        (top[0], "gradient", "gradient norm, ‖∇f(w$_k$)‖", {"O(1/k)": -1.0, "O(1/√k)": -0.5}),
        (top[1], "objective", "objective gap, f(w$_k$) − f*", {"O(1/k)": -1.0}),
    ):
        for (name, problem), style in zip(problems.items(), (STYLES["SepSA"], STYLES["Adam"]), strict=False):
            band = problem.bands[which]
            axis.fill_between(problem.k, band["low"], band["high"], color=style["color"], alpha=0.15, lw=0)
            label = f"{name}: slope {interval(problem.slopes[which])}"
            axis.plot(problem.k, band["mean"], label=label, **(style | {"linewidth": 2}))
        first = next(iter(problems.values()))
        k, mean = first.k, first.bands[which]["mean"]
        for (guide, power), line in zip(guides.items(), ((0, (1, 2)), (0, (6, 3))), strict=False):
            # Through the last point, where the slope is fitted; the start is far from the asymptote.
            axis.plot(k, mean[-1] * (k / k[-1]) ** power, color=GUIDE, linestyle=line, label=guide, zorder=1)
        axis.set(xscale="log", yscale="log", xlabel="iteration k", ylabel=ylabel)
        bands = [problem.bands[which] for problem in problems.values()]
        least, most = min(float(b["low"].min()) for b in bands), max(float(b["high"].max()) for b in bands)
        axis.set_ylim(least / (most / least) ** 0.35, most * 2)  # the legend stands below the curves
        axis.legend(frameon=False, loc="lower left")
        axis.grid(which="major", alpha=0.3)
    for axis, name, what, order in (
        (bottom[0], "p", "features of the head, p", 2),
        (bottom[1], "q", "parameters of the body, q", 1),
    ):
        size, micro = cost[name][0], cost[name][1] * 1e6
        axis.plot(size, micro, color=color, marker="o", linewidth=2, label="SepSA")
        guide = micro[-1] * (size / size[-1]) ** order
        axis.plot(size, guide, color=GUIDE, linestyle="--", label=f"O({name}{'²' if order == 2 else ''})", zorder=1)
        axis.set(xscale="log", yscale="log", xlabel=what, ylabel="one step, µs")
        _log_limits(axis, (float(micro.min()) / 3, float(micro.max()) * 3))
        axis.legend(frameon=False, loc="upper left")
        axis.grid(which="major", alpha=0.3)
    return figure


def near_perfect(row: PanelRow) -> bool:
    """Whether the axis of the row shows the remaining errors instead of the accuracies."""
    return row.metric == "accuracy" and _limits(row.metric, _all(row.panels))[1] > _NEAR_PERFECT


def last(curves: Sequence[Curve], metric: Metric) -> float:
    """The median of the runs' last values; a diverged run counts as worse than any other."""
    worst = np.inf if metric == "mse" else -np.inf
    return float(np.quantile([worst if c.diverged else c.y[-1] for c in curves], 0.5, method="nearest"))


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format of the file's suffix; equal figures give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without these matplotlib writes the time, its version and random ids.
    metadata = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}.get(path.suffix)
    with matplotlib.rc_context({"svg.hashsalt": "sepsa"}):
        figure.savefig(path, dpi=150, metadata=metadata)


def _median_and_range(axis: Axes, name: str, x: Floats, runs: Floats, top: float) -> None:
    finite = np.where(np.isfinite(runs), runs, np.inf)  # a diverged run is worse than any other
    middle, low, high = (np.quantile(finite, q, axis=0, method="nearest") for q in (0.5, 0.0, 1.0))
    style = STYLES[name]
    axis.plot(x, middle, label=name, **style)
    if len(runs) > 1:
        axis.fill_between(x, low, np.minimum(high, 10 * top), color=style["color"], alpha=0.12, lw=0)


def _panel(
    axis: Axes, methods: Mapping[str, Sequence[Curve]], metric: Metric, limits: tuple[float, float], heading: str
) -> None:
    """Draw the methods of one panel, with a cross where a diverging run leaves it and a note that names the method."""
    _scale(axis, metric, limits)
    if heading:
        axis.set_title(heading, fontsize=11.5, fontweight="bold", pad=19)
    axis.grid(which="major", alpha=0.3)
    if not methods:
        axis.text(0.5, 0.5, "not run yet", transform=axis.transAxes, ha="center", va="center", color=GUIDE)
        axis.set(xticks=[], xlim=(0, 1))
        return
    width = max(float(curve.x[-1]) for several in methods.values() for curve in several)
    gone, above, exits = [], [], []
    for name in sorted(methods, key=list(STYLES).index):
        x = np.unique(np.concatenate([curve.x for curve in methods[name]]))
        runs = np.full((len(methods[name]), len(x)), np.nan)
        for values, curve in zip(runs, methods[name], strict=True):
            values[np.searchsorted(x, curve.x)] = curve.y
        _median_and_range(axis, name, x, runs, limits[1])
        diverged = [curve for curve in methods[name] if curve.diverged]
        exits += [(_exit(curve, limits), name) for curve in diverged]
        if diverged:
            gone.append(name if len(methods[name]) == 1 else f"{name} ({len(diverged)} of {len(methods[name])})")
        if limits[1] < last(methods[name], metric) < np.inf:
            above.append(name)
    place = -np.inf
    for end, name in sorted(exits):
        place = max(end, place + 0.035 * width)  # side by side, where several leave at once
        _mark(axis, place, limits[1] if metric == "mse" else limits[0], name, "x")
    axis.set_xlim(0, width)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e4 else f"{value / 1e3:g}k"))
    for i, name in enumerate(above):
        _mark(axis, width * (1 - 0.035 * i), limits[1], name, "^")
    notes = {"× diverged": gone, "▲ ended above": above}
    _note(axis, "; ".join(f"{what}: {', '.join(names)}" for what, names in notes.items() if names))


def _exit(curve: Curve, limits: tuple[float, float]) -> float:
    """The x from which on a diverging run stays outside its panel."""
    inside = np.flatnonzero(np.isfinite(curve.y) & (curve.y <= limits[1]))
    return float(curve.x[min(inside[-1] + 1, len(curve.x) - 1)]) if inside.size else float(curve.x[0])


def _mark(axis: Axes, place: float, edge: float, name: str, marker: str) -> None:
    style = {"color": STYLES[name]["color"], "markersize": 7, "markeredgewidth": 2, "zorder": 6}
    axis.plot([place], [edge], marker=marker, linestyle="", clip_on=False, **style)


def _note(axis: Axes, text: str) -> None:
    """A small line between the heading and the panel."""
    at: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
    if text:
        axis.annotate(text, (0.5, 1.0), xytext=(0, 7), fontsize=8.5, color="#303030", **at)


def _log_limits(axis: Axes, limits: tuple[float, float]) -> None:
    """Set a log axis that shows several numbers, however few decades it spans."""
    axis.set_yscale("log")
    axis.set_ylim(*limits)
    decades = np.log10(limits[1] / limits[0])
    subs = (1,) if decades > 2.6 else (1, 3) if decades > 1.6 else (1, 2, 5)
    axis.yaxis.set_major_locator(LogLocator(subs=subs))
    axis.yaxis.set_minor_locator(NullLocator())
    if decades < 7:
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))


def _scale(axis: Axes, metric: Metric, limits: tuple[float, float]) -> None:
    if metric == "mse":
        _log_limits(axis, limits)
    elif limits[1] > _NEAR_PERFECT:
        # Near 100 % the remaining errors matter: equal steps for equal ratios of them.
        axis.set_yscale(
            "function",
            functions=(
                lambda accuracy: -np.log10(np.maximum(100 - np.asarray(accuracy, dtype=float), 0.01)),
                lambda place: 100 - 10 ** -np.asarray(place, dtype=float),
            ),
        )
        axis.yaxis.set_major_locator(FixedLocator([0, 50, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 99.95]))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_ylim(*limits)


def _all(panels: Panels) -> list[Curve]:
    return [curve for methods in panels.values() for several in methods.values() for curve in several]


def _limits(metric: Metric, curves: Sequence[Curve]) -> tuple[float, float]:
    """The limits of an axis on which every curve that does not diverge is visible."""
    if metric == "accuracy":
        best = float(np.nanmax(np.concatenate([[0.0], *(curve.y for curve in curves)])))
        return 0.0, min(100 - (100 - best) * 0.7, 99.98) if best > _NEAR_PERFECT else min(97.0, best * 1.08 + 1)
    starts = [curve.y[:1][np.isfinite(curve.y[:1])] for curve in curves]
    stable = [curve.y[np.isfinite(curve.y)] for curve in curves if not curve.diverged]
    values = np.concatenate([*starts, *stable])
    if not values.size:
        return 0.1, 10.0
    start = float(np.median(np.concatenate(starts))) if any(map(len, starts)) else float(values[0])
    top = min(float(np.quantile(values, 0.99)) * 1.4, 30 * start)
    low = float(values.min()) / 1.3
    return (low, top) if 0 < low < top else (top / 1e4, top)


def _legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """One legend for all panels, below them."""
    found = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if found:
        figure.legend(
            found.values(), found, loc="outside lower center", ncols=len(found), frameon=False, handlelength=3
        )
