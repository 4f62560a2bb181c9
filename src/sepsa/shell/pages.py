"""The HTML pages of saved models: what happened in a stream, and a forecast with fan charts. They need no network."""

from __future__ import annotations

import csv
import math
import os
import time
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from sepsa.shell.inspection import load_model, spelled
from sepsa.shell.messages import FINISHED, say
from sepsa.shell.model import TableModel
from sepsa.shell.options import ReportOptions
from sepsa.shell.output import error_of
from sepsa.shell.reading import Reading
from sepsa.shell.series import ForecastTable
from sepsa.shell.trace import WINDOW
from sepsa.states.output import replace


def report(options: ReportOptions) -> int:
    """Write the page of a saved model."""
    model, files = load_model(options.model, "sepsa stream", "sepsa forecast")
    options.out.mkdir(parents=True, exist_ok=True)
    page = options.out / f"{options.model.stem}.html"
    write_page(page, str(options.model), model, Path((files.get("quarantine") or [os.devnull])[0]))
    say(f"the page is {page}")
    return FINISHED


def write_page(path: Path, source: str, model: Any, quarantine: Path) -> None:
    """Write the page of a model; `quarantine` is the file of rows that could not be used."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sepsa.shell", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.globals |= {"ticks": ticks, "zip": zip, "error_of": error_of, "spelled": spelled, "window": WINDOW}
    forecasts, chosen = isinstance(model, ForecastTable), model.get_params()
    page = environment.get_template("forecast.html.jinja" if forecasts else "stream.html.jinja").render(
        source=source,
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        model=model,
        options=[(each, chosen[each.name]) for each in (*fields(model), *fields(Reading))],
        quarantine=quarantine,
        lost=lost_rows(quarantine) if model.quarantined else [],
        **(of_forecast(model) if forecasts else of_stream(model)),
    )
    replace(path, [page.encode()])


def lost_rows(quarantine: Path) -> list[list[str]]:
    """The first rows of a file of quarantined rows; none where the file is gone."""
    if not quarantine.is_file():
        return []
    with open(quarantine, encoding="utf-8", newline="") as lines:
        return list(islice(csv.reader(lines), 1, 21))  # behind the header


@dataclass
class Chart:
    """A plane of numbers as SVG coordinates, with room for the labels of its ticks."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: int = 300
    WIDTH, LEFT, RIGHT, TOP, BOTTOM = 700, 92, 40, 16, 62

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a pair of numbers."""
        right, down = self.WIDTH - self.LEFT - self.RIGHT, self.height - self.TOP - self.BOTTOM
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return round(self.LEFT + across * right, 1), round(self.TOP + (1 - up) * down, 1)

    def line(self, x: Any, y: Any) -> str:
        """The points of a line, without those that are not finite."""
        pairs = zip(np.asarray(x).tolist(), np.asarray(y).tolist(), strict=True)
        return " ".join("{},{}".format(*self.at(*pair)) for pair in pairs if math.isfinite(pair[1]))


def ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers from `low` to `high`."""
    span = high - low
    if not 0 < span < math.inf:
        return [low]
    step = 10 ** math.floor(math.log10(span))
    step = next(step * f for f in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if span / (step * f) <= 7)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def of_stream(model: TableModel) -> dict[str, Any]:
    """The chart of the page of `sepsa stream`, and the points of its curve."""
    trace = model.trace
    errors = [*trace.points, *([math.fsum(trace.part) / len(trace.part)] if trace.part else [])] or [trace.mean]
    return {
        "curve": Chart((0.0, max(1, trace.rows)), (0.0, max(max(errors), 1e-12) * 1.08)),
        "points": ((np.arange(len(errors)) + 0.5) * trace.rows / len(errors), errors),
    }


def of_forecast(model: ForecastTable) -> dict[str, Any]:
    """The charts of the page of `sepsa forecast`."""
    made, known = model.forecaster.predict(X=model.ahead_inputs(), quantiles=(0.05, 0.1, 0.25, 0.75, 0.9, 0.95))
    parts = zip(model.target, model.history.T, made.T, np.stack([*known.values()]).T, strict=True)
    return {"charts": [(name, fan_chart(*of_series)) for name, *of_series in parts]}


def fan_chart(past: Any, made: Any, quantiles: Any) -> dict[str, Any]:
    """Past values, forecasts and their quantiles (h, 6) over the rows after the last: the chart, lines and bands."""
    values = np.concatenate([past, made, quantiles.ravel()])
    values = values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)
    low, rows, ahead = float(values.min()), np.arange(1 - len(past), 1), np.arange(1, 1 + len(made))
    span = max(float(np.ptp(values)), 1e-12, 1e-12 * abs(low))  # of a constant series too
    chart = Chart((min(rows[0], 0), max(len(made), 1)), (low, low + span * 1.04))
    last = np.flatnonzero(~np.isnan(past))[-1:]  # the forecasts are joined to the last value
    around = np.append(ahead, ahead[::-1])
    return {
        "chart": chart,
        "past": chart.line(rows, past),
        "made": chart.line(np.append(rows[last], ahead), np.append(past[last], made)),
        "bands": [chart.line(around, np.append(quantiles[:, i], quantiles[::-1, -1 - i])) for i in range(3)],
    }
