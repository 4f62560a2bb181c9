"""`sepsa forecast`: its checks of a table, the forecasts that it prints, and the page with fan charts."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from sepsa.learner.memory.parts import Floats
from sepsa.shell.cells import RowBlock, TableError
from sepsa.shell.command import StreamRun, check_first_target, check_names, name_of
from sepsa.shell.inspection import Chart, spelled, write_template
from sepsa.shell.model import BlockResult
from sepsa.shell.output import NEWEST_FIRST, Misuse, Predictions, error_of, print_text, quote, say, speller
from sepsa.shell.reading import cure_of
from sepsa.shell.records import TextReader
from sepsa.shell.series import ForecastTable


class ForecastFile(Predictions):
    """A CSV file with the forecasts made after each row; nothing where there is none."""

    def write(self, result: BlockResult) -> None:
        if not self.printed:
            made_of = (",".join(map(self.spell, made.ravel().tolist())) for made in result.predictions)
            self.output.write("".join(map("{},{}\n".format, result.lines.tolist(), made_of)))


class ForecastRun(StreamRun):
    """One run of `sepsa forecast`."""

    kind = "sepsa forecast"
    new_model = ForecastTable

    def _details(self) -> None:
        """A forecast has intervals already."""

    def _open_predictions(self, recorded: Any) -> ForecastFile:
        if self.options.predictions is not None and self.model.every > 1 and self.model.known_ahead:
            raise Misuse(
                "--predictions must be left out with --every and --known-ahead, as a row's forecast needs inputs of "
                "later rows: prequential in Python returns them"
            )
        steps = range(1, self.model.horizon + 1)
        header = ",".join(["line", *(quote(f"{name}+{h}") for h in steps for name in self.model.target)])
        return ForecastFile(self.options.predictions, header + "\n", self.options.digits, recorded)

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
        at, _ = model.times(block)
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
        self.table.only = frozenset({*model.target, *model.inputs, *time})
        if model.reading.date_format is not None and isinstance(self.table, TextReader):
            self.table.categorical = frozenset(time)  # 01022026 is not the number 1022026

    def _position(self, block: RowBlock) -> Any:
        """Before the rows that wait for their targets, which a later run reads again."""
        lines = self.model.ahead_lines
        if not len(lines):
            return block.position
        first = int(lines[0])
        return self.position if first < block.lines[0] else self.table.position(first)

    def _check_ahead(self) -> None:
        """Raise an error where inputs known ahead are not in the table."""
        model, rows = self.model, len(self.model.forecaster.times())
        if model.every > 1 and model.known_ahead and model.inputs and len(model.ahead) < rows:
            raise Misuse(
                f"--known-ahead with --every {model.every} needs {rows} rows without a target at the end, with the "
                f"inputs of the rows ahead, got {len(model.ahead)}"
            )
        clock = model.forecaster.clock()
        for h, at in enumerate(model.ahead_at[:rows] if model.time is not None and clock.last is not None else (), 1):
            if clock.index(at) != clock.last + h:
                raise Misuse(
                    f"rows without a target at the end must be those ahead, without a gap: row {h} of them must be at "
                    f"{clock.ahead(h)}, got {clock.label(at)}"
                )
        late = len(model.history) - int(np.flatnonzero(~np.isnan(model.history).all(1))[-1]) - 1
        if model.known_ahead and late:
            say(
                f"more than {model.horizon} rows at the end have no target: the last {len(model.ahead)} are forecast, "
                f"and {late} before them count as missing values"
            )

    def _finish(self) -> None:
        """Print the forecast after the last row, and write the page."""
        if np.isnan(self.model.history).all():
            raise TableError(
                f"--target {', '.join(self.model.target)} has no number in the last rows: nothing to forecast"
            )
        self._check_ahead()
        rows, spell = last_forecast(self.model), speller(self.options.digits, printed=True)
        cells = ([spell(cell) if isinstance(cell, float) else quote(str(cell)) for cell in row] for row in rows)
        print_text("".join(",".join(row) + "\n" for row in cells))
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


def last_forecast(model: ForecastTable) -> list[tuple[Any, ...]]:
    """The forecast after the last row as a table: step and time, series, forecast and the ends of the 90 % interval."""
    made, *ends = model.forecaster.predict(X=model.ahead_inputs(), coverage=0.9)
    seen = model.seen()
    rows: list[tuple[Any, ...]] = [("step", "time", "series", "forecast", "low", "high")]
    for h, time in enumerate(model.forecaster.times()):
        for j, name in enumerate(model.target):
            value, low, high = (float(part[h, j]) for part in (made, *ends))
            known = seen[j] > h + 1 or low < high  # no interval is without an error that was measured
            shown = [end if known and math.isfinite(end) else "" for end in (low, high)]
            first = "" if math.isnan(value) or not (seen[j] or known) else value
            rows.append((h + 1, "" if time is None else time, name, first, *shown))
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


def write_page(path: Path, source: str, model: ForecastTable) -> None:
    """Write a page with a fan chart for each series, which needs no network."""
    forecaster = model.forecaster
    made, ends = forecaster.predict(X=model.ahead_inputs(), coverage=(0.9, 0.8, 0.5))
    bands = [np.stack(pair, -1) for pair in ends.values()]
    write_template(
        path,
        "forecast.html.jinja",
        source=source,
        model=model,
        score=error_of(model),  # type: ignore[arg-type]
        charts=[
            (name, fan_chart(model.history[:, j], made[:, j], [band[:, j] for band in bands]))
            for j, name in enumerate(model.target)
        ],
        table=last_forecast(model),
        naive=beside_naive(model),
        settings={name: spelled(value) for name, value in model.get_params().items()}
        | {"seasons used": spelled(forecaster.seasons_), "bounded outliers": str(forecaster.outliers_)},
    )


def fan_chart(past: Floats, made: Floats, bands: list[Floats]) -> dict[str, Any]:
    """Past values, forecasts and their intervals over the rows after the last one: the chart, its lines and bands."""
    values = np.concatenate([past, made, *map(np.ravel, bands)])
    values = values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)
    low, rows, ahead = float(values.min()), np.arange(1 - len(past), 1), np.arange(1, 1 + len(made))
    chart = Chart((min(rows[0], 0), max(len(made), 1)), (low, low + max(float(np.ptp(values)), 1e-12) * 1.04))

    def line(x: Any, y: Any) -> str:
        pairs = zip(x.tolist(), y.tolist(), strict=True)
        return " ".join("{},{}".format(*chart.at(*pair)) for pair in pairs if math.isfinite(pair[1]))

    last = np.flatnonzero(~np.isnan(past))[-1:]  # the forecasts are joined to the last value
    return {
        "chart": chart,
        "past": line(rows, past),
        "made": line(np.append(rows[last], ahead), np.append(past[last], made)),
        "bands": [line(np.append(ahead, ahead[::-1]), np.append(band[:, 0], band[::-1, 1])) for band in bands],
        "now": chart.at(0, low)[0],
    }
