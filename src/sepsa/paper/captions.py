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

from sepsa.paper import figures
from sepsa.paper.data import NAMES, TITLES, metric
from sepsa.paper.experiments import EXPERIMENTS, FIGURES
from sepsa.paper.figures import Curve, Panels
from sepsa.paper.formatting import interval, plural
from sepsa.paper.table3 import METHODS, Record


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
    return _sweep(rows[0].panels) if experiment.sweep else _grid(rows, experiment.learning_rates)


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


def _grid(rows: Sequence[figures.PanelRow], rates: Sequence[float]) -> CaptionedFigure:
    winners, lost = list[str](), list[str]()
    diverged: Counter[str] = Counter()
    for row in rows:
        for lr, methods in row.panels.items():
            ends = {name: figures.last(curves, row.metric) for name, curves in methods.items()}
            best = (min if row.metric == "mse" else max)(ends, key=lambda name: ends[name])
            winners.append(best if math.isfinite(ends[best]) else "nobody")
            if winners[-1] != "SepSA":
                lost.append(f"{winners[-1]} ({' '.join(row.label.split()[:2])}, {lr:g})")
            diverged.update(_diverged(methods))
    ahead = f"SepSA ends ahead in {winners.count('SepSA')} of {len(winners)} panels"
    ahead += f"; elsewhere {', '.join(lost)}." if lost else "."
    counts = ", ".join(f"{name} in {plural(n, 'panel')}" for name, n in diverged.items())
    sentences = [_lines_are(row.panels for row in rows), ahead, f"Diverged: {counts or 'none'}."]
    if any(figures.near_perfect(row) for row in rows):
        sentences.insert(1, "On an axis that nears 100 % equal steps are equal ratios of the errors left.")
    caption = " ".join(sentences)
    alt = f"A grid of learning curves, a row per data set and split, a column per learning rate. {caption}"
    return CaptionedFigure(figures.curve_grid(rows, rates), caption, alt)


def _lines_are(rows: Iterable[Panels]) -> str:
    most = max(len(runs) for panels in rows for methods in panels.values() for runs in methods.values())
    return "A line is one run." if most == 1 else f"A line is the median of up to {most} runs, the shade their range."


def _diverged(methods: Mapping[str, Sequence[Curve]]) -> list[str]:
    return [name for name, curves in methods.items() if any(curve.diverged for curve in curves)]


def _sweep(panels: Panels) -> CaptionedFigure:
    ends = {lr: {name: figures.last(runs, "mse") for name, runs in methods.items()} for lr, methods in panels.items()}
    sentences = []
    ours = {lr: ends[lr]["SepSA"] for lr in ends if "SepSA" in ends[lr]}
    if ours:
        worst = max(ours, key=lambda lr: ours[lr])
        error = f"{ours[worst]:.3g}" if math.isfinite(ours[worst]) else "diverged"
        sentences.append(f"SepSA's largest training error over {len(ours)} learning rates is {error} (at {worst:g}).")
    diverged = _where({lr: _diverged(methods) for lr, methods in panels.items()})
    top = figures.top(panels)
    above = _where({lr: [name for name, end in ends[lr].items() if top < end < math.inf] for lr in ends})
    sentences += [f"Diverged: {diverged or 'none'}."] + ([f"Ended above the panels: {above}."] if above else [])
    caption = " ".join([_lines_are([panels]), *sentences])
    alt = f"Training error at the end over the learning rate, and a panel of curves per learning rate. {caption}"
    return CaptionedFigure(figures.rate_sweep(panels, "epoch", "training error, MSE"), caption, alt)


def _where(names: Mapping[float, Sequence[str]]) -> str:
    """The learning rates of each method, in words."""
    rates = {method: [lr for lr in names if method in names[lr]] for method in METHODS}
    return "; ".join(f"{method} at {', '.join(f'{lr:g}' for lr in at)}" for method, at in rates.items() if at)


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
