"""The HTML report of `sepsa stream`: errors over time, predicted against actual, alarms, bad rows and options."""

from __future__ import annotations

import csv
import math
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from sepsa.states.output import replace
from sepsa.stream.tables.inspection import column_names, spelled
from sepsa.stream.tables.model import TableModel
from sepsa.stream.tables.options import TableOptions
from sepsa.stream.tables.reading import Reading
from sepsa.stream.tables.trace import WINDOW


def write_report(path: Path, source: str, model: TableModel, quarantine: Path) -> None:
    """Write a page that needs no network; `quarantine` is the file of rows that could not be used."""
    trace = model.trace
    lost = []
    if quarantine.is_file() and model.quarantined:
        with open(quarantine, encoding="utf-8", newline="") as lines:
            rows = csv.reader(lines)
            next(rows, None)
            lost = [row for row, _ in zip(rows, range(20), strict=False)]
    points = [*trace.points, *([math.fsum(trace.part) / len(trace.part)] if trace.part else [])]
    if not points:
        points = [trace.mean]
    write_template(
        path,
        "report.html.jinja",
        source=source,
        model=model,
        rows=trace.rows,
        quarantined=model.quarantined,
        score=f"{1 - trace.mean:.1%}" if model.classify else f"{trace.mean:.4g}",
        recent=f"{1 - trace.recent:.1%}" if model.classify else f"{trace.recent:.4g}",
        measure="accuracy" if model.classify else "mean absolute error",
        curve=error_curve(points, trace.rows, [alarm[0] for alarm in trace.alarms]),
        latest=by_class(model) if model.classify else actual_and_predicted(model),
        latest_rows=len(model.latest),
        window=WINDOW,
        alarms=[[int(row), before, at] for row, before, at in trace.alarms],
        alarm_count=trace.alarm_count,
        lost=lost,
        settings=options_of(model),
        columns=column_names(model),
        inputs=len(model.inputs.names),
        quarantine=quarantine,
        coverage=coverage_of(model),
        mixture=mixture_in_words({} if model.learner is None else model.learner.engine.chosen),
    )


def write_template(path: Path, name: str, **values: Any) -> None:
    """Write a page with these values, and the time as `when`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sepsa.stream.tables", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    replace(path, [environment.get_template(name).render(**values, when=when).encode()])


EXPERTS = {
    "network": "the network",
    "neighbours": "the nearest neighbours",
    "products": "products of inputs",
    "last target": "the last target",
    "mean": "the mean of the targets",
    "stack": "a weighted sum of all of them",
}
FEATURES = {"both": "hidden units and inputs", "inputs": "inputs alone", "hidden": "hidden units alone"}


def options_of(model: TableModel) -> list[tuple[str, str, str]]:
    """The options of the model: name, value and meaning."""
    options, declared = model.get_params(), (*fields(TableOptions), *fields(Reading))
    return [(each.name, spelled(options[each.name]), each.metadata["help"]) for each in declared]


def coverage_of(model: TableModel) -> tuple[str, str, str] | None:
    """The share of targets that the intervals should hold, the share that they held, and of how many rows."""
    if model.coverage is None or not model.coverage[1]:
        return None
    share, rows, inside = model.coverage
    return f"{share:.0%}", f"{inside / rows:.1%}", f"{rows:,}"


def mixture_in_words(chosen: dict[str, Any]) -> list[str]:
    """Which experts and which heads have the weight in the predictions, as sentences."""
    if not chosen:
        return []
    weights, said = chosen["weights"], []
    experts = sorted(chosen.get("experts", {}).items(), key=lambda item: -item[1])
    if experts:
        names = [f"{EXPERTS.get(name, name)} {weight:.0%}" for name, weight in experts if weight >= 0.01]
        said.append(
            f"A prediction is a mean with these weights, by recent errors: {', '.join(names)}. The first has led since "
            f"row {chosen['expert_since']:,}."
        )
    leads = f"ridge {chosen['ridge']:g}, forgetting {chosen['forgetting']:g}"
    said.append(
        f"Of the network's {len(weights)} heads the one on {FEATURES.get(chosen['features'], chosen['features'])} "
        f"({leads}) has the largest weight, {max(weights):.0%}, since row {chosen['since']:,}."
    )
    return said


class Chart:
    """A plane of numbers as SVG coordinates, with round ticks and room for their labels."""

    WIDTH, LEFT, RIGHT, TOP, BOTTOM = 700, 92, 40, 16, 62

    def __init__(self, x: tuple[float, float], y: tuple[float, float], height: int = 300) -> None:
        self.x, self.y, self.height = x, y, height
        self.across = [(self.at(x[0], v)[1], f"{v:,.5g}") for v in ticks(*y)]
        self.along = [(self.at(v, y[0])[0], f"{v:,.5g}") for v in ticks(*x)]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a pair of numbers."""
        right, down = self.WIDTH - self.LEFT - self.RIGHT, self.height - self.TOP - self.BOTTOM
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return round(self.LEFT + across * right, 1), round(self.TOP + (1 - up) * down, 1)


def error_curve(points: list[float], rows: int, alarms: list[float]) -> dict[str, Any]:
    """The mean error over rows: the chart, the line, its points where these are few, and the places of alarms."""
    chart = Chart((0.0, max(1, rows)), (0.0, max(max(points), 1e-12) * 1.08))
    step = rows / len(points)
    places = [chart.at((i + 0.5) * step, value) for i, value in enumerate(points)]
    line = " ".join(f"{x},{y}" for x, y in places)
    dots = places if len(places) < 3 else []
    return {"chart": chart, "line": line, "dots": dots, "alarms": [chart.at(row, 0.0) for row in alarms]}


def actual_and_predicted(model: TableModel) -> dict[str, Any]:
    """The last rows as points, with their mean absolute error and that of their mean as the prediction."""
    if not model.latest:
        return {}
    actual, predicted = np.array(model.latest, np.float64).T
    low, high = float(min(actual.min(), predicted.min())), float(max(actual.max(), predicted.max()))
    room = 0.04 * (high - low) or max(abs(low), 1.0)
    ends = low - room, high + room
    chart = Chart(ends, ends, height=460)
    return {
        "chart": chart,
        "dots": [chart.at(a, p) for a, p in zip(actual.tolist(), predicted.tolist(), strict=True)],
        "ends": (chart.at(ends[0], ends[0]), chart.at(ends[1], ends[1])),
        "error": f"{np.abs(actual - predicted).mean():.4g}",
        "of_mean": f"{np.abs(actual - actual.mean()).mean():.4g}",
    }


def by_class(model: TableModel) -> list[tuple[str, int, str, str]]:
    """The last rows by class: the class, its rows, the share predicted right, and the most frequent mistake."""
    rows = []
    for label, count in Counter(actual for actual, _ in model.latest).most_common(20):
        wrong = Counter(predicted for actual, predicted in model.latest if actual == label and predicted != label)
        mistake = ", ".join(f"{other or 'none yet'} ({times})" for other, times in wrong.most_common(1))
        rows.append((label, count, f"{1 - wrong.total() / count:.0%}", mistake or "none"))
    return rows


def ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers from `low` to `high`."""
    span = high - low
    if not 0 < span < math.inf:
        return [low]
    step = 10 ** math.floor(math.log10(span))
    step = next(step * f for f in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if span / (step * f) <= 7)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
