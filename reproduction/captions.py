"""The figures of the report with their captions, which state what the records behind them show."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from reproduction import figures
from reproduction.data import NAMES, TITLES, metric
from reproduction.experiments import EXPERIMENTS, FIGURES
from reproduction.figures import Curve, Panels
from reproduction.formatting import interval, plural
from reproduction.table3 import Record


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure, its caption, and the alternative text for screen readers."""

    figure: Figure
    caption: str
    alt: str


def draw(records: Sequence[Record], convergence: Path) -> dict[str, CaptionedFigure]:
    """All figures for which there are records, by the name of the experiment."""
    drawn = {name: figure for name in FIGURES if (figure := _draw(records, name))}
    if convergence.exists():
        drawn["convergence"] = _convergence(json.loads(convergence.read_text(encoding="utf-8")))
    return drawn


def _draw(records: Sequence[Record], name: str) -> CaptionedFigure | None:
    experiment = EXPERIMENTS[name]
    rows = [
        figures.PanelRow(
            label=f"{TITLES[dataset]}\n{split} {'mean squared error' if metric(dataset) == 'mse' else 'accuracy, %'}",
            xlabel="samples seen" if experiment.modes == ("online",) else "epoch",
            metric=metric(dataset),
            panels=panels,
        )
        for dataset in NAMES
        for split in experiment.splits
        if (panels := _panels(records, name, dataset, split, experiment.learning_rates))
    ]
    if not rows:
        return None
    caption = _caption(rows)
    alt = f"A grid of learning curves, a row per data set and split, a column per learning rate. {caption}"
    return CaptionedFigure(figures.curve_grid(rows, experiment.learning_rates), caption, alt)


def _panels(records: Iterable[Record], experiment: str, dataset: str, split: str, rates: Sequence[float]) -> Panels:
    """The curves of one figure on one data set, by learning rate and method."""
    found: dict[float, dict[str, list[Curve]]] = {}
    for record in records:
        if (record.experiment, record.dataset) != (experiment, dataset):
            continue
        for run in record.runs:
            values = run.curve.get(split, ())
            if run.lr in rates and (values or run.diverged):
                x = np.array(run.curve["x"], dtype=np.float64)
                y = np.full(len(x), np.nan)  # a diverged run may have recorded fewer values
                y[: len(values)] = np.array(values, dtype=np.float64)
                found.setdefault(run.lr, {}).setdefault(record.method, []).append(Curve(x, y, run.diverged))
    return {lr: found[lr] for lr in rates if lr in found}


def _caption(rows: Sequence[figures.PanelRow]) -> str:
    """What the lines are, in how many panels SepSA ends ahead, and which methods diverge."""
    ahead, diverged = 0, Counter[str]()
    panels = [(row.metric, methods) for row in rows for methods in row.panels.values()]
    for error, methods in panels:
        ends = {name: figures.last(curves, error) for name, curves in methods.items()}
        best = (min if error == "mse" else max)(ends, key=lambda name: ends[name])
        ahead += best == "SepSA" and math.isfinite(ends[best])
        diverged.update(name for name, curves in methods.items() if any(curve.diverged for curve in curves))
    most = max(len(runs) for _, methods in panels for runs in methods.values())
    lines = "A line is one run." if most == 1 else f"A line is the median of up to {most} runs, the shade their range."
    counts = ", ".join(f"{name} in {plural(n, 'panel')}" for name, n in diverged.items())
    if any(figures.near_perfect(row) for row in rows):
        lines += " On an axis that nears 100 % equal steps are equal ratios of the errors left."
    return f"{lines} SepSA ends ahead in {ahead} of {len(panels)} panels. Diverged: {counts or 'none'}."


def _convergence(raw: Mapping[str, Any]) -> CaptionedFigure:
    parts = {"bumps apart": raw, "bumps overlapping": raw["overlapping"]} if "overlapping" in raw else {"SepSA": raw}
    problems = {name: _convergence_curves(part) for name, part in parts.items()}
    cost = {
        key: (_floats(at[key] for at in of), _floats(at["seconds"] for at in of)) for key, of in raw["cost"].items()
    }
    slopes = "; ".join(
        f"{name}: objective gap {interval(curves.slopes['objective'])}, gradient norm "
        f"{interval(curves.slopes['gradient'])}"
        for name, curves in problems.items()
    )
    caption = (
        f"SepSA on a synthetic separable problem with a known optimum, mean and spread over {raw['seeds']} seeds. "
        f"Slopes in log–log with their intervals, {slopes}. O(1/k) in the objective means O(1/√k) in the gradient "
        "norm. Below, the time of one step against the paper's O(p²) for the head and O(q) for the body."
    )
    alt = f"Four log–log panels: gradient norm, objective gap, cost over p, cost over q. {caption}"
    return CaptionedFigure(figures.convergence(problems, cost), caption, alt)


def _convergence_curves(raw: Mapping[str, Any]) -> figures.ConvergenceCurves:
    named = {"gradient": raw["gradient_norm"], "objective": raw["objective_gap"]}
    bands = {name: {key: _floats(band[key]) for key in ("mean", "low", "high")} for name, band in named.items()}
    return figures.ConvergenceCurves(_floats(raw["k"]), bands, raw["slope"])


def _floats(values: Iterable[float]) -> figures.Floats:
    return np.array(list(values), dtype=np.float64)
