"""The HTML report of `sepsa stream`: the curve of errors, alarms, quarantined rows and options."""

from __future__ import annotations

import csv
import math
import time
from pathlib import Path

from sepsa.states.output import replace
from sepsa.stream.tables.inspection import column_names, spelled
from sepsa.stream.tables.model import TableModel
from sepsa.stream.tables.output import Output, error_of


def write_report(path: Path, source: str, model: TableModel, quarantine: Output) -> None:
    """Write a page that needs no network."""
    import jinja2

    trace = model.trace
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sepsa.stream.tables", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    lost = []
    if quarantine.path.is_file() and model.quarantined:
        quarantine.flush()
        with open(quarantine.path, encoding="utf-8", newline="") as lines:
            rows = csv.reader(lines)
            next(rows, None)
            lost = [row for row, _ in zip(rows, range(20), strict=False)]
    points = [*trace.points, *([math.fsum(trace.part) / len(trace.part)] if trace.part else [])]
    if not points:
        points = [trace.mean]
    page = environment.get_template("report.html.jinja").render(
        source=source,
        model=model,
        rows=trace.rows,
        quarantined=model.quarantined,
        score=error_of(model),
        recent=error_of(model, recent=True),
        measure="share of wrong predictions" if model.classify else "mean absolute error",
        chart=Chart(points, trace.rows, [alarm[0] for alarm in trace.alarms]),
        alarms=[[int(row), before, at] for row, before, at in trace.alarms],
        alarm_count=trace.alarm_count,
        lost=lost,
        settings=options_of(model),
        columns=column_names(model),
        inputs=len(model.inputs.names),
        quarantine=quarantine.path,
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    replace(path, [page.encode()])


def options_of(model: TableModel) -> dict[str, str]:
    """The options of the model, and the head that it has chosen."""
    chosen = {} if model.learner is None else model.learner.engine.chosen
    return {name: spelled(value) for name, value in (model.get_params() | chosen).items()}


class Chart:
    """The curve of errors as SVG coordinates."""

    WIDTH, HEIGHT, LEFT, BOTTOM = 860, 260, 70, 34

    def __init__(self, points: list[float], rows: int, alarms: list[float]) -> None:
        self.top = max(max(points), 1e-12) * 1.08
        self.rows = rows
        step = (self.WIDTH - self.LEFT) / max(1, len(points))
        self.line = " ".join(
            f"{self.LEFT + (i + 0.5) * step:.1f},{self._y(value):.1f}" for i, value in enumerate(points)
        )
        self.dots = [tuple(pair.split(",")) for pair in self.line.split()] if len(points) < 3 else []
        self.alarms = [f"{self.LEFT + (self.WIDTH - self.LEFT) * row / max(1, rows):.1f}" for row in alarms]
        self.across = [(f"{self._y(v):.1f}", f"{v:.3g}") for v in ticks(self.top)]
        self.along = [
            (f"{self.LEFT + (self.WIDTH - self.LEFT) * v / max(1, rows):.1f}", f"{v:,.0f}") for v in ticks(rows)
        ]

    def _y(self, value: float) -> float:
        return (self.HEIGHT - self.BOTTOM) * (1 - value / self.top) + 4


def ticks(top: float) -> list[float]:
    """Four to eight round numbers from 0 up."""
    if not 0 < top < math.inf:
        return [0.0]
    step = 10 ** math.floor(math.log10(top))
    step = next(step * f for f in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if top / (step * f) <= 7)
    return [i * step for i in range(int(top / step) + 1)]
