"""Figures, drawn from curves that were measured elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

# Okabe and Ito's colours, which the colour-blind tell apart; line styles say the same again.
STYLES: dict[str, dict[str, object]] = {
    "SepSA": {"color": "#D55E00", "linestyle": "-", "linewidth": 2.2, "zorder": 5},
    "slimTrain": {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1))},
    "Adam": {"color": "#0072B2", "linestyle": "--"},
    "RMSprop": {"color": "#009E73", "linestyle": "-."},
    "NAG": {"color": "#56B4E9", "linestyle": (0, (3, 1, 1, 1))},
    "SGD": {"color": "#000000", "linestyle": ":"},
}


def learning_curves(
    curves: Mapping[float, Mapping[str, NDArray[np.float64]]],
    title: str,
    xlabel: str,
    ylabel: str,
    ylim: tuple[float, float],
) -> Figure:
    """One panel per learning rate; curves[lr][method] is (runs, points), drawn as median and range."""
    figure = Figure(figsize=(4.2 * len(curves), 4.4), layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axis, (lr, methods) in zip(axes, curves.items(), strict=True):
        for name, runs in methods.items():
            left = np.where(np.isfinite(runs), runs, np.inf)  # a diverged run is worse than any other
            middle, low, high = (np.quantile(left, q, axis=0, method="nearest") for q in (0.5, 0.0, 1.0))
            steps = np.arange(runs.shape[1])
            style = STYLES[name]
            axis.plot(steps, middle, label=name, **style)  # type: ignore[arg-type]
            axis.fill_between(steps, low, np.minimum(high, 10 * ylim[1]), color=str(style["color"]), alpha=0.12, lw=0)
        axis.set_yscale("log")
        axis.set_ylim(*ylim)
        axis.set_xlim(0, None)
        axis.set_title(f"learning rate {lr:g}")
        axis.set_xlabel(xlabel)
        axis.grid(which="major", alpha=0.3)
    axes[0].set_ylabel(ylabel)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title)
    return figure


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
