"""The figure of README: test errors of `sepsa demo` against samples seen, for each learning rate and kind of targets.

`python -m reproduction.demo_figure docs/demo.png` draws it.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from reproduction.figures import Curve, PanelRow, curve_grid, save
from sepsa.shell import demo

Results = dict[tuple[str, float, str], NDArray[np.float64]]  # (seeds, samples + 1), NaN after a run diverged


def train(seeds: int) -> Results:
    """The runs of all methods, by targets, learning rate and method."""
    rows, several = demo.diabetes(), range(demo.FIRST_SEED, demo.FIRST_SEED + seeds)
    return {
        (kind, lr, method): np.array([demo.online(rows, method, lr, seed, kind) for seed in several])
        for kind, lr, method in itertools.product(demo.TARGETS, demo.LEARNING_RATES, demo.METHODS)
    }


def draw(results: Results) -> Figure:
    """A row of panels for each kind of targets, a panel for each learning rate."""
    rows = []
    for kind in demo.TARGETS:
        panels: dict[float, dict[str, list[Curve]]] = {lr: {} for lr in demo.LEARNING_RATES}
        for (targets, lr, method), runs in results.items():
            if targets == kind:
                curves = [Curve(np.arange(float(len(run))), run, bool(np.isnan(run[-1]))) for run in runs]
                panels[lr][method] = curves
        rows.append(PanelRow(f"test error, {kind}", "samples seen", "mse", panels))
    figure = curve_grid(rows, demo.LEARNING_RATES)
    samples, seeds = runs.shape[1] - 1, len(runs)
    figure.suptitle(
        f"Diabetes, online, one pass over {samples} samples: mean squared error on the test rows, "
        f"median and range of {seeds} runs\n(× marks where a run diverges; curves above a panel are cut at its edge)",
        fontsize=11,
    )
    return figure


if __name__ == "__main__":
    save(draw(train(seeds=3)), Path(sys.argv[1]))
