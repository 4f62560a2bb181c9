"""`sepsa forecast`: the columns of a table as series, forecast row by row, with gaps, a fan chart and resumption."""

from __future__ import annotations

import sys
import time as clock_time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sepsa.states import schema
from sepsa.states.output import replace
from sepsa.stream.engine.kernels.robust import HUGE
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.forecast import SepSAForecaster
from sepsa.stream.tables.cells import BadRow, RowBlock
from sepsa.stream.tables.command import StreamOptions, StreamRun, check_names, name_of
from sepsa.stream.tables.inspection import spelled
from sepsa.stream.tables.model import BlockResult, at_rows
from sepsa.stream.tables.output import Predictions, error_of
from sepsa.stream.tables.report import ticks
from sepsa.stream.tables.trace import ErrorTrace

SHOWN = 4  # horizons of past rows in the chart


class ForecastTable:
    """A forecaster of columns of a table: `target` are its series, `inputs` exogenous inputs, `time` their time.

    An empty cell is a missing value; rows that are left out, by their time, are a gap. The result does not depend on
    how rows are divided into blocks.
    """

    classify = False

    def __init__(
        self,
        target: Sequence[str],
        *,
        time: str | None = None,
        horizon: int = 24,
        inputs: Sequence[str] = (),
        lags: int | str = "auto",
        seasons: Sequence[float] | str = "auto",
        step: float | None = None,
    ) -> None:
        self.target, self.time, self.horizon = tuple(target), time, horizon
        self.inputs, self.lags, self.step = tuple(inputs), lags, step
        self.seasons = seasons if isinstance(seasons, str) else tuple(seasons)
        self.forecaster = SepSAForecaster(horizon, lags=lags, seasons=seasons, step=step)  # type: ignore[arg-type]
        self.trace = ErrorTrace()
        self.quarantined = 0
        self.next: Floats = np.full(len(self.target), np.nan)  # the forecast of the next row
        self.history: Floats = np.empty((0, len(self.target)))

    def get_params(self) -> dict[str, Any]:
        names = ("target", "time", "horizon", "inputs", "lags", "seasons", "step")
        return {name: getattr(self, name) for name in names}

    def learn(self, block: RowBlock, asked: object = None) -> BlockResult:
        """Learn the rows that can be used; the predictions are the forecasts (series, horizon) made after each."""
        bad = list(block.bad)
        rows, times = self._usable(block, bad)
        made = np.empty((0, self.horizon, len(self.target)))
        if len(rows):
            columns = at_rows(block.columns, rows)

            def numbers(names: Sequence[str]) -> Floats:
                empty = np.full(len(rows), np.nan)
                return np.column_stack([columns[n].numbers if n in columns else empty for n in names])

            Y = numbers(self.target)
            made = self.forecaster.prequential(
                Y, numbers(self.inputs) if self.inputs else None, times=None if self.time is None else times.tolist()
            )
            before = np.vstack([self.next, made[:-1, 0]])
            there = ~np.isnan(Y - before)
            total = np.where(there, np.abs(Y - before), 0.0).sum(1)
            self.trace.add(np.minimum(total / np.maximum(there.sum(1), 1), 1e300))
            self.next = made[-1, 0].copy()
            self.history = np.concatenate([self.history, Y])[-SHOWN * self.horizon :]
        self.quarantined += len(bad)
        return BlockResult(block.lines[rows], list(made), sorted(bad), [])

    def unusable(self, block: RowBlock) -> list[BadRow]:
        """The rows of a block that `learn` cannot use."""
        bad = list(block.bad)
        self._usable(block, bad)
        return sorted(bad)

    def _usable(self, block: RowBlock, bad: list[BadRow]) -> tuple[NDArray[np.intp], Floats]:
        """Which rows can be learned, and their times; the others are added to `bad`."""
        good = np.ones(len(block), bool)
        for name in (*self.target, *self.inputs):
            column = block.columns.get(name)
            if column is None:
                continue
            texts = np.zeros(len(block), bool) if column.codes is None else column.codes >= 0
            dates = np.zeros(len(block), bool) if column.times is None else ~np.isnan(column.times)
            large = np.abs(column.numbers) > HUGE
            for wrong, reason in ((texts | dates, f"{name!r} is not a number"), (large, f"{name!r} is not finite")):
                bad.extend(block.bad_row(int(i), reason) for i in np.flatnonzero(wrong & good))
                good &= ~wrong
        times = np.zeros(len(block))
        if self.time is not None:
            times = self._times(block)
            clock, learned = self.forecaster.clock(), self.forecaster.rows
            for i in np.flatnonzero(good):
                try:
                    learned += 1 + clock.advance(float(times[i]), learned)
                except ValueError as error:  # noqa: PERF203
                    reason = f"there is no {self.time!r}" if np.isnan(times[i]) else str(error).partition(":")[0]
                    bad.append(block.bad_row(int(i), reason))
                    good[i] = False
        rows = np.flatnonzero(good)
        return rows, times[rows]

    def _times(self, block: RowBlock) -> Floats:
        column = block.columns.get(self.time or "")
        if column is None:
            return np.full(len(block), np.nan)
        return (
            column.numbers if column.times is None else np.where(np.isnan(column.times), column.numbers, column.times)
        )

    def state_dict(self) -> dict[str, Any]:
        """The model's state as plain data; a model that loads it continues bit for bit."""
        return {
            "forecaster": self.forecaster.state_dict(),
            "trace": self.trace.state_dict(),
            "quarantined": self.quarantined,
            "next": self.next.copy(),
            "history": self.history.copy(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`; a ValueError changes nothing."""
        new = schema.read("state", state_dict, {"forecaster", "trace", "quarantined", "next", "history"})
        trace, quarantined, m = ErrorTrace.from_state(new["trace"]), new.integer("quarantined"), len(self.target)
        following, history = new.array("next", (m,), missing=True), new.array("history", (None, m), missing=True)
        self.forecaster.load_state_dict(new["forecaster"])
        self.trace, self.quarantined, self.next, self.history = trace, quarantined, following, history


@dataclass
class ForecastOptions(StreamOptions):
    """The options of `sepsa forecast`; None is an option that was not given."""

    time: str | None = None
    horizon: int | None = None
    inputs: Sequence[str] | None = None
    lags: int | None = None
    seasons: Sequence[float] | None = None
    step: float | None = None
    kind: ClassVar[str] = "sepsa forecast"
    table: ClassVar[Any] = ForecastTable
    of_model: ClassVar[tuple[str, ...]] = ("target", "time", "horizon", "inputs", "lags", "seasons", "step")


class ForecastFile(Predictions):
    """A CSV file with the forecasts made after each row; nothing where there is none."""

    def write(self, result: BlockResult) -> None:
        if self.output is not None:
            rows = zip(result.lines.tolist(), result.predictions, strict=True)
            self.output.write("".join([f"{line},{numbers(made)}\n" for line, made in rows]))


class ForecastRun(StreamRun):
    """One run of `sepsa forecast`."""

    def _open_predictions(self, recorded: Any) -> ForecastFile:
        steps = range(1, self.model.horizon + 1)
        header = ",".join(["line", *(f'"{name}+{h}"' for h in steps for name in self.model.target)])
        return ForecastFile(self.options.predictions, header + "\n", recorded)

    def _check_first(self, block: RowBlock) -> None:
        """A text among the targets is a bad row, which says so."""

    def _warn_of_columns(self) -> None:
        """Columns that are not named are not read."""

    def _check_columns(self) -> None:
        model = self.model
        time = () if model.time is None else (model.time,)
        check_names(self.table, {"target": model.target, "time": time, "inputs": model.inputs})
        if self.table.names is not None:
            self.table.drop = frozenset(self.table.names) - {*model.target, *model.inputs, *time}

    def _finish(self) -> None:
        """Print the forecast after the last row, and write the page."""
        rows = last_forecast(self.model)
        sys.stdout.write("".join(",".join(map(str, row)) + "\n" for row in rows))
        sys.stdout.flush()
        if self.options.report is not None:
            write_page(self.options.report, name_of(self.options.source), self.model)


def numbers(made: Floats) -> str:
    """Forecasts (horizon, series) as cells of a row, with as many digits as they need."""
    return ",".join(map(repr, made.ravel().tolist()))


def last_forecast(model: ForecastTable) -> list[tuple[Any, ...]]:
    """The forecast after the last row as a table: step and time, series, forecast and the ends of the 90 % interval."""
    forecaster = model.forecaster
    clock = forecaster.clock()
    made, ends = forecaster.forecast(), forecaster.intervals(coverage=0.9)
    rows: list[tuple[Any, ...]] = [("step", "time", "series", "forecast", "low", "high")]
    for h, (values, pairs) in enumerate(zip(made, ends, strict=True), 1):
        clock.advance(None, 1)
        for j, name in enumerate(model.target):
            rows.append((h, "" if clock.last is None else stamp(clock.last), name, values[j], *pairs[j]))
    return rows


def stamp(seconds: float) -> str:
    """A time as it is printed: a date where it is one of this era, else the number."""
    if 0 < seconds < 4e9:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    return f"{seconds:g}"


def write_page(path: Path, source: str, model: ForecastTable) -> None:
    """Write a page with a fan chart for each series, which needs no network."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sepsa.stream.tables", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    forecaster = model.forecaster
    made = np.array([list(step.values()) for step in forecaster.forecast()])
    bands = [
        np.array([list(step.values()) for step in forecaster.intervals(coverage=coverage)])
        for coverage in (0.9, 0.8, 0.5)
    ]
    page = environment.get_template("forecast.html.jinja").render(
        source=source,
        model=model,
        score=error_of(model),  # type: ignore[arg-type]
        charts=[
            (name, Fan(model.history[:, j], made[:, j], [band[:, j] for band in bands]))
            for j, name in enumerate(model.target)
        ],
        table=last_forecast(model),
        settings={name: spelled(value) for name, value in model.get_params().items()}
        | {"seasons used": spelled(forecaster.seasons_), "bounded outliers": str(forecaster.outliers_)},
        when=clock_time.strftime("%Y-%m-%d %H:%M UTC", clock_time.gmtime()),
    )
    replace(path, [page.encode()])


class Fan:
    """Past values, forecasts and their intervals as SVG coordinates."""

    WIDTH, HEIGHT, LEFT, BOTTOM = 860, 260, 70, 20

    def __init__(self, past: Floats, made: Floats, bands: list[Floats]) -> None:
        values = np.concatenate([past[~np.isnan(past)], made, *(band.ravel() for band in bands)])
        self.low, high = float(values.min()), float(values.max())
        self.span = max(high - self.low, 1e-12) * 1.04
        self.step = (self.WIDTH - self.LEFT) / max(1, len(past) + len(made) - 1)
        at = len(past)
        there = np.flatnonzero(~np.isnan(past))
        self.past = self._line(there, past[there])
        start = there[-1:]  # the forecasts are joined to the last value
        self.made = self._line(np.append(start, at + np.arange(len(made))), np.append(past[start], made))
        steps = at + np.arange(len(made))
        self.bands = [self._line(np.append(steps, steps[::-1]), np.append(band[:, 0], band[::-1, 1])) for band in bands]
        self.now = f"{self.LEFT + (at - 1) * self.step:.1f}"
        self.across = [(f"{self._y(v):.1f}", f"{v:,.5g}") for v in ticks(self.low, self.low + self.span)]

    def _line(self, rows: Any, values: Any) -> str:
        pairs = zip(rows.tolist(), values.tolist(), strict=True)
        return " ".join(f"{self.LEFT + i * self.step:.1f},{self._y(value):.1f}" for i, value in pairs)

    def _y(self, value: float) -> float:
        return (self.HEIGHT - self.BOTTOM) * (1 - (value - self.low) / self.span) + 4
