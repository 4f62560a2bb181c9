"""`sepsa forecast`: the columns of a table as series, forecast row by row, with gaps, a fan chart and resumption."""

from __future__ import annotations

import math
import shlex
import time as clock_time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.states import schema
from sepsa.states.objects import rebuilt_as
from sepsa.states.output import replace
from sepsa.stream.columns.cells import read_cell, read_date
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.forecast import SepSAForecaster
from sepsa.stream.forecast.clock import Moments
from sepsa.stream.kernels.robust import HUGE
from sepsa.stream.tables.cells import BadRow, RowBlock, TableError
from sepsa.stream.tables.checks import check_first_target, check_names
from sepsa.stream.tables.command import StreamRun, name_of
from sepsa.stream.tables.exits import NEWEST_FIRST
from sepsa.stream.tables.formats import TextReader
from sepsa.stream.tables.inspection import spelled
from sepsa.stream.tables.model import BlockResult, at_rows
from sepsa.stream.tables.options import SeriesOptions, values_of
from sepsa.stream.tables.output import Misuse, Predictions, error_of, print_text, quote, say
from sepsa.stream.tables.reading import Reading, cure_of
from sepsa.stream.tables.report import ticks
from sepsa.stream.tables.trace import ErrorTrace

SHOWN = 4  # horizons of past rows in the chart
TEXTS = 8  # inputs of a column of texts: one for each of its first texts, the last for all others


@rebuilt_as("sepsa forecast")
class ForecastTable(SeriesOptions):
    """A forecaster of columns of a table: `target` are its series, `inputs` exogenous inputs, `time` their time.

    An empty cell is a missing value; rows that are left out, by their time, are a gap. With `known_ahead`, rows at the
    end without any target have the inputs of the rows to forecast. The result does not depend on how rows are divided
    into blocks.
    """

    classify = False

    def __init__(self, target: Sequence[str], **options: Any) -> None:
        self.reading = Reading.take(options)
        super().__init__(tuple(target), **options)
        own = ("target", "time", "inputs", "known_ahead")
        self.forecaster = SepSAForecaster(**{k: v for k, v in values_of(self, SeriesOptions).items() if k not in own})
        self.trace = ErrorTrace()
        self.quarantined = 0
        self.texts: dict[str, list[str]] = {}  # the first texts of columns of inputs that have texts
        self.next: Floats = np.full(len(self.target), np.nan)  # the forecast of the next row
        self.history: Floats = np.empty((0, len(self.target)))
        self.ahead: Floats = np.empty((0, 0))  # inputs of rows after the last one with a target
        self.ahead_at: list[float] = []  # and their times

    def get_params(self) -> dict[str, Any]:
        return values_of(self, SeriesOptions) | vars(self.reading)

    def learn(self, block: RowBlock, asked: object = None) -> BlockResult:
        """Learn the rows that can be used; the predictions are the forecasts (series, horizon) made after each."""
        bad = list(block.bad)
        rows, at, dated = self._usable(block, bad)
        lines, made = block.lines[rows], np.empty((0, self.horizon, len(self.target)))
        told: list[str] = []
        if len(rows):
            columns = at_rows(block.columns, rows)
            empty = np.full(len(rows), np.nan)
            Y = np.column_stack([columns[n].numbers if n in columns else empty for n in self.target])
            E = np.column_stack(
                [np.empty((len(rows), 0)), *(self._numbers(columns, n, len(rows)) for n in self.inputs)]
            )
            stop = shown = len(Y)
            if self.known_ahead:
                Y, E, at, stop, shown = self._hold(Y, E, at)
                lines = lines[~np.isnan(Y[len(Y) - len(lines) :]).all(1)]
            if stop:
                made, told = self._learn(Y[:stop], E[:stop], at[:stop], dated, shown)
        self.quarantined += len(bad)
        return BlockResult(lines, list(made), sorted(bad), told)

    def _hold(self, Y: Floats, E: Floats, at: Floats) -> tuple[Floats, Floats, Floats, int, Any]:
        """Rows after those held back before, how many of them are learned now, and which of those have a target."""
        Y = np.vstack([np.full((len(self.ahead), Y.shape[1]), np.nan), Y])
        E, at = np.vstack([self.ahead.reshape(-1, E.shape[1]), E]), np.concatenate([self.ahead_at, at])
        filled: Any = ~np.isnan(Y).all(1)
        stop = max(int(np.flatnonzero(filled)[-1]) + 1 if filled.any() else 0, len(Y) - self.horizon)
        self.ahead, self.ahead_at = E[stop:].copy(), at[stop:].tolist()
        return Y, E, at, stop, np.flatnonzero(filled[:stop])

    def _learn(self, Y: Floats, E: Floats, at: Floats, dated: bool, shown: Any) -> tuple[Floats, list[str]]:
        """Learn rows; returns the forecasts after those that are shown, and warnings."""
        times = None if self.time is None else np.round(at * 1e6).astype("datetime64[us]") if dated else at
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = self.forecaster.prequential(Y, E if self.inputs else None, times=times)
        before = np.vstack([self.next, made[:-1, 0]])
        there = ~np.isnan(Y - before)
        total = np.where(there, np.abs(Y - before), 0.0).sum(1)
        self.trace.add(np.minimum(total / np.maximum(there.sum(1), 1), 1e300))
        self.next = made[-1, 0].copy()
        self.history = np.concatenate([self.history, Y])[-SHOWN * self.horizon :]
        return made[shown] if isinstance(shown, np.ndarray) else made, [str(one.message) for one in caught]

    def _numbers(self, columns: dict[str, Any], name: str, count: int) -> Floats:
        """A column of inputs (n,), or (n, TEXTS) indicators of its texts."""
        column = columns.get(name)
        if column is not None and column.codes is not None and self.forecaster.rows == 0 and name not in self.texts:
            self.texts[name] = []
        if name not in self.texts:
            return np.full(count, np.nan) if column is None else column.numbers
        known, out = self.texts[name], np.zeros((count, TEXTS))
        codes, texts = ([], []) if column is None or column.codes is None else (column.codes.tolist(), column.texts)
        for i, code in enumerate(codes):
            if code >= 0:
                text = texts[code]
                if text not in known and len(known) < TEXTS - 1:
                    known.append(text)
                out[i, known.index(text) if text in known else TEXTS - 1] = 1.0
        return out

    def seen(self) -> NDArray[np.intp]:
        """How many of the last rows, at different times, have a value of each series."""
        counts: NDArray[np.intp] = np.minimum((~np.isnan(self.history)).sum(0), self.forecaster.rows)
        return counts

    def ahead_inputs(self) -> list[dict[int, float]] | None:
        """The inputs of the rows to forecast, as far as they are known."""
        return [dict(enumerate(row)) for row in self.ahead.tolist()] or None

    def unusable(self, block: RowBlock) -> list[BadRow]:
        """The rows of a block that `learn` cannot use."""
        bad = list(block.bad)
        self._usable(block, bad)
        return sorted(bad)

    def _usable(self, block: RowBlock, bad: list[BadRow]) -> tuple[NDArray[np.intp], Floats, bool]:
        """Which rows can be learned, their times, and whether these are dates; the other rows are added to `bad`."""
        good = np.ones(len(block), bool)
        for name in (*self.target, *self.inputs):
            column = block.columns.get(name)
            if column is None:
                continue
            texts = np.zeros(len(block), bool) if column.codes is None else column.codes >= 0
            if name in self.inputs and (name in self.texts or not self.forecaster.rows):
                texts[:] = False
            dates = np.zeros(len(block), bool) if column.times is None else ~np.isnan(column.times)
            large = np.abs(column.numbers) > HUGE
            for i in np.flatnonzero((texts | dates | large) & good):
                cure = cure_of(column.text(int(i)), self.reading)
                reason = f"{name!r} is not finite" if large[i] else f"{name!r} is not a number: {cure}"
                bad.append(block.bad_row(int(i), reason))
                good[i] = False
        at, dated = np.zeros(len(block)), False
        if self.time is not None:
            at, dated = self.times(block)
            self._check_times(block, bad, good, at, dated)
        rows = np.flatnonzero(good)
        return rows, at[rows], dated

    def _check_times(self, block: RowBlock, bad: list[BadRow], good: Any, at: Floats, dated: bool) -> None:
        """Add to `bad` the rows whose time cannot follow the rows before."""
        clock, learned = self.forecaster.clock(), self.forecaster.rows
        held = [*self.ahead_at]
        waiting: list[Any] = []
        for i in [*(-1 - k for k in range(len(held))), *np.flatnonzero(good)]:
            if i >= 0 and np.isnan(at[i]):
                bad.append(block.bad_row(int(i), self.no_time(block, int(i))))
                good[i] = False
                continue
            trial = clock.copy()
            try:
                trial.begin(Moments(at, dated))
                place = trial.place(float(held[-1 - i] if i < 0 else at[i]), learned)
                if place.same and self.forecaster.same_time == "error":
                    raise ValueError(f"there is a row at this time, {trial.label(float(at[i]))}, already")
            except ValueError as error:
                bad.append(block.bad_row(int(i), str(error).partition(": ")[0]))
                good[i] = False
                continue
            clock = trial
            if place.dropped:
                for k in waiting:
                    bad.append(block.bad_row(int(k), "its time leaps ahead, and the rows after it do not"))
                    good[k] = False
            waiting = [] if place.gaps or place.same else [*waiting * (not place.dropped), i]
            learned += len(place.gaps)

    def no_time(self, block: RowBlock, row: int) -> str:
        """Why a row has no time."""
        column = block.columns.get(self.time or "")
        if column is None or (text := column.text(row)) == "nan":
            return f"there is no {self.time!r}"
        given = self.reading.date_format
        how = "a date as 2026-01-31" if given is None else f"in the --date-format {given}"
        cure = cure_of(text, self.reading, "date", "give --date-format, as %d.%m.%Y %H:%M")
        return f"{self.time!r} is {text[:40]!r}, which is not {how}: {cure}"

    def times(self, block: RowBlock) -> tuple[Floats, bool]:
        """The times of a block in seconds, NaN where there is none, and whether they are dates."""
        column, given = block.columns.get(self.time or ""), self.reading.date_format
        if column is None:
            return np.full(len(block), np.nan), False
        if given is None:
            return (column.numbers, False) if column.times is None else (column.times, True)
        return np.array([date_of(column.text(i), given) for i in range(len(block))]), True

    def state_dict(self) -> dict[str, Any]:
        """The model's state as plain data; a model that loads it continues bit for bit."""
        return {
            "forecaster": self.forecaster.state_dict(),
            "trace": self.trace.state_dict(),
            "quarantined": self.quarantined,
            "next": self.next.copy(),
            "history": self.history.copy(),
            "texts": {name: list(texts) for name, texts in self.texts.items()},
            "ahead": self.ahead.copy(),
            "ahead_at": np.array(self.ahead_at, np.float64),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`; a ValueError changes nothing."""
        keys = {"forecaster", "trace", "quarantined", "next", "history"}
        if isinstance(state_dict, dict) and set(state_dict) == keys:
            self.forecaster.load_state_dict(state_dict["forecaster"])  # of an older version: says what to do
        new = schema.read("state", state_dict, keys | {"texts", "ahead", "ahead_at"})
        trace, quarantined, m = ErrorTrace.from_state(new["trace"]), new.integer("quarantined"), len(self.target)
        following, history = new.array("next", (m,), missing=True), new.array("history", (None, m), missing=True)
        ahead, ahead_at = new.array("ahead", (None, None), missing=True), new.array("ahead_at", (None,))
        texts = {str(name): [str(text) for text in known][:TEXTS] for name, known in dict(new["texts"]).items()}
        self.forecaster.load_state_dict(new["forecaster"])
        self.texts, self.ahead, self.ahead_at = texts, ahead, ahead_at.tolist()
        self.trace, self.quarantined, self.next, self.history = trace, quarantined, following, history


class ForecastFile(Predictions):
    """A CSV file with the forecasts made after each row; nothing where there is none."""

    def write(self, result: BlockResult) -> None:
        if self.output is not None:
            rows = zip(result.lines.tolist(), result.predictions, strict=True)
            self.output.write("".join([f"{line},{numbers(made)}\n" for line, made in rows]))


class ForecastRun(StreamRun):
    """One run of `sepsa forecast`."""

    kind = "sepsa forecast"
    new_model = ForecastTable

    def _details(self) -> None:
        """A forecast has intervals already."""

    def _open_predictions(self, recorded: Any) -> ForecastFile:
        steps = range(1, self.model.horizon + 1)
        header = ",".join(["line", *(quote(f"{name}+{h}") for h in steps for name in self.model.target)])
        return ForecastFile(self.options.predictions, header + "\n", recorded)

    def _check_first(self, block: RowBlock) -> None:
        model = self.model
        for name in model.target:
            check_first_target(block, model, name, "give --na-values if it is a missing value")
        for name in model.inputs:
            if (column := block.columns.get(name)) is not None and column.codes is not None:
                i, mixed = int(np.argmax(column.codes >= 0)), not np.isnan(column.numbers).all()
                text, cure = column.text(i), cure_of(column.text(i), model.reading)
                if mixed or "--na-values" not in cure:
                    other = " where other rows have numbers" * mixed
                    raise Misuse(
                        f"line {block.lines[i]}: {name!r} of --inputs is the text {text[:40]!r}{other}: {cure}"
                    )
        if model.time is not None:
            self._check_times(block)

    def _check_times(self, block: RowBlock) -> None:
        """Raise an error if no time can be read or the newest row comes first."""
        model = self.model
        at, dated = model.times(block)
        if not dated and all(not math.isnan(date_of(f"{time:.15g}", "%Y%m%d")) for time in at[:100]):
            say(f"{model.time!r} is read as seconds, as {at[0]:.15g}: give --date-format %Y%m%d if these are dates")
        there = np.flatnonzero(~np.isnan(at))
        if not len(there):
            raise Misuse(f"line {block.lines[0]}: {model.no_time(block, 0)}")
        apart = np.diff(at[there])
        if (apart < 0).sum() > (apart > 0).sum():
            i = int(np.flatnonzero(apart < 0)[0])
            said = f"line {block.lines[there[i + 1]]} is earlier than line {block.lines[there[i]]}"
            cure = f"sort it by {model.time!r}, oldest first{reversing(self.options.source)}"
            raise Misuse(f"{name_of(self.options.source)} is newest first ({said}): {cure}", NEWEST_FIRST)

    def _warn_of_columns(self) -> None:
        """Columns that are not named are not read."""

    def _check_columns(self) -> None:
        model = self.model
        time = () if model.time is None else (model.time,)
        check_names(self.table, {"target": model.target, "time": time, "inputs": model.inputs})
        if self.table.names is not None:
            self.table.drop = frozenset(self.table.names) - {*model.target, *model.inputs, *time}
        if model.reading.date_format is not None and isinstance(self.table, TextReader):
            self.table.categorical = frozenset(time)  # 01022026 is not the number 1022026

    def _finish(self) -> None:
        """Print the forecast after the last row, and write the page."""
        if np.isnan(self.model.history).all():
            raise TableError(
                f"--target {', '.join(self.model.target)} has no number in the last rows: nothing to forecast"
            )
        rows = last_forecast(self.model)
        print_text("".join(",".join(quote(str(cell)) for cell in row) + "\n" for row in rows))
        if any(row[-1] == "" for row in rows):
            say("no interval where low and high are empty: no error of such a forecast has been measured yet")
        for line in beside_naive(self.model):
            say(line)
        if self.options.report is not None:
            write_page(self.options.report, name_of(self.options.source), self.model)


def reversing(source: Path | None) -> str:
    """The command that reverses the rows of a plain CSV file; empty for other tables."""
    if source is None or source.suffix not in (".csv", ".tsv", ".txt"):
        return ""
    name = shlex.quote(str(source))
    return f", as (head -n 1 {name}; tail -n +2 {name} | tac) > oldest-first.csv does"


def numbers(made: Floats) -> str:
    """Forecasts (horizon, series) as cells of a row, with as many digits as they need."""
    return ",".join(map(repr, made.ravel().tolist()))


def last_forecast(model: ForecastTable) -> list[tuple[Any, ...]]:
    """The forecast after the last row as a table: step and time, series, forecast and the ends of the 90 % interval."""
    forecaster, xs = model.forecaster, model.ahead_inputs()
    made, intervals = forecaster.forecast(xs=xs), forecaster.intervals(xs=xs, coverage=0.9)
    seen = model.seen()
    rows: list[tuple[Any, ...]] = [("step", "time", "series", "forecast", "low", "high")]
    for h, (time, values, pairs) in enumerate(zip(forecaster.times(), made, intervals, strict=True), 1):
        for j, name in enumerate(model.target):
            known = seen[j] > h or pairs[j][0] < pairs[j][1]  # no interval is without an error that was measured
            ends = [end if known and math.isfinite(end) else "" for end in pairs[j]]
            rows.append((h, "" if time is None else time, name, values[j] if seen[j] or known else "", *ends))
    return rows


def beside_naive(model: ForecastTable) -> list[str]:
    """The recent errors at some steps, beside those of the best naive forecast, for each series."""
    errors, H, seen = model.forecaster.errors_, model.horizon, model.seen()
    ours, naive = errors.pop("forecast"), list(errors)
    lines = []
    for j, name in enumerate(model.target):
        for h in sorted(h for h in {1, (H + 1) // 2, H} if seen[j] > h):
            best = min(naive, key=lambda one: errors[one][j, h - 1])
            lines.append(
                f"{name}, {h} ahead: recent absolute error {ours[j, h - 1]:.4g}, best naive forecast "
                f"({best}) {errors[best][j, h - 1]:.4g}"
            )
    return lines


def date_of(text: str, date_format: str) -> float:
    """Seconds since 1970 of a date in this format or in ISO 8601; NaN for other texts."""
    time = read_date(text, date_format)
    if math.isnan(time):
        kind, value = read_cell(text)
        return value if kind == "date" else math.nan
    return time


def write_page(path: Path, source: str, model: ForecastTable) -> None:
    """Write a page with a fan chart for each series, which needs no network."""
    import jinja2

    if not model.trace.rows:
        raise TableError(f"{source} has learned no rows: nothing to draw")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sepsa.stream.tables", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    forecaster = model.forecaster
    xs = model.ahead_inputs()
    made = np.array([list(step.values()) for step in forecaster.forecast(xs=xs)])
    bands = [
        np.array([list(step.values()) for step in forecaster.intervals(xs=xs, coverage=coverage)])
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
        naive=beside_naive(model),
        settings={name: spelled(value) for name, value in model.get_params().items()}
        | {"seasons used": spelled(forecaster.seasons_), "bounded outliers": str(forecaster.outliers_)},
        when=clock_time.strftime("%Y-%m-%d %H:%M UTC", clock_time.gmtime()),
    )
    replace(path, [page.encode()])


class Fan:
    """Past values, forecasts and their intervals as SVG coordinates."""

    WIDTH, HEIGHT, LEFT, BOTTOM = 860, 260, 70, 20

    def __init__(self, past: Floats, made: Floats, bands: list[Floats]) -> None:
        values = np.concatenate([past, made, *(band.ravel() for band in bands)])
        values = values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)
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
        pairs = [pair for pair in zip(rows.tolist(), values.tolist(), strict=True) if math.isfinite(pair[1])]
        return " ".join(f"{self.LEFT + i * self.step:.1f},{self._y(value):.1f}" for i, value in pairs)

    def _y(self, value: float) -> float:
        return (self.HEIGHT - self.BOTTOM) * (1 - (value - self.low) / self.span) + 4
