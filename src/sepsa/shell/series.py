"""The model of `sepsa forecast`: the columns of a table as series, forecast row by row, with gaps. It can be saved."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sepsa.forecast import SepSAForecaster
from sepsa.forecast.times import Moments, integer_dates
from sepsa.learner.arithmetic.robust import HUGE
from sepsa.learner.columns.cells import read_cell, read_date
from sepsa.learner.columns.reader import Column
from sepsa.learner.memory.parts import Floats
from sepsa.shell.cells import RowBlock
from sepsa.shell.messages import Misuse
from sepsa.shell.model import LARGEST_ERROR, BlockResult
from sepsa.shell.options import SeriesOptions
from sepsa.shell.reading import ABSENT, NOT_FINITE, Reading, cure_of, wrong_cell
from sepsa.shell.trace import ErrorTrace
from sepsa.states.objects import rebuilt_as
from sepsa.states.sealed import sealed, unsealed

SHOWN = 4  # horizons of past rows in the chart
TEXTS = 8  # inputs of a column of texts: one for each of its first texts, the last for all others
OWN = ("quarantined", "next", "history", "texts")  # what is saved as it is


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
        own = ("target", "time", "inputs")
        options = {k: v for k, v in asdict(self).items() if k not in own}
        options["known_ahead"] &= self.every > 1  # else forecasts would depend on how rows are divided
        self.forecaster = SepSAForecaster(**options)
        self.trace = ErrorTrace()
        self.quarantined = 0
        self.texts: dict[str, list[str]] = {}  # the first texts of columns of inputs that have texts
        self.next: Floats = np.full(len(self.target), np.nan)  # the forecast of the next row
        self.history: Floats = np.empty((0, len(self.target)))
        self.ahead: Floats = np.empty((0, 2))  # rows after the last one with a target: time, line, targets, inputs

    def get_params(self) -> dict[str, Any]:
        return asdict(self) | asdict(self.reading)

    def learn(self, block: RowBlock, asked: object = None) -> BlockResult:
        """Learn the rows that can be used; the predictions are the forecasts (series, horizon) made after each."""
        at, dated = self.refuse_rows(block)
        rows = block.rows
        lines, result = block.lines[rows], BlockResult(block.lines[:0], [], [], [])
        if len(rows):
            targets = (block.column(name).numbers[rows] for name in self.target)
            inputs = (self._numbers(name, block.column(name).rows(rows)) for name in self.inputs)
            table = np.column_stack([at[rows], lines, *targets, *inputs])
            if self.known_ahead:
                table = self._hold(table)
            if len(table):
                result = self._learn(table, dated)
        self.quarantined += len(block.bad)
        return result._replace(bad=sorted(block.bad))

    def _hold(self, table: Floats) -> Floats:
        """Rows to learn now, with those held back before unless there is another of their time.

        Rows without any target at the end are held back, at most as many as are forecast; the line of others without
        any is 0.
        """
        held = self.ahead.reshape(-1, table.shape[1])
        if self.time is None:
            table = np.concatenate([held, table])
        else:
            held = held[~np.isin(held[:, 0], table[:, 0])]
            table = np.insert(table, np.searchsorted(table[:, 0], held[:, 0]), held, 0)
        empty = np.isnan(table[:, 2 : 2 + len(self.target)]).all(1)
        stop = max(0, *(np.flatnonzero(~empty)[-1:] + 1), len(table) - self.horizon)
        self.ahead = table[stop:].copy()
        table[empty, 1] = 0
        return table[:stop]

    def _learn(self, table: Floats, dated: bool) -> BlockResult:
        """Learn rows; the predictions are the forecasts after each."""
        at, lines = table[:, :2].T
        Y, E = np.split(table[:, 2:], [len(self.target)], axis=1)
        times = None if self.time is None else np.round(at * 1e6).astype("datetime64[us]") if dated else at
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = self.forecaster.prequential(Y, E if self.inputs else None, times=times)
        errors = np.abs(Y - np.vstack([self.next, made[:-1, 0]]))
        known = (~np.isnan(errors)).sum(1)
        mean = np.minimum(np.nansum(errors, 1) / np.maximum(known, 1), LARGEST_ERROR)
        self.trace.add(np.where(known, mean, -1.0))
        self.next = made[-1, 0].copy()
        if self.every > 1 and self.known_ahead and 0 < len(self.forecaster.times()) <= len(self.ahead):
            self.next = self.forecaster.predict(X=self.ahead_inputs())[0].copy()
        self.history = np.concatenate([self.history, Y])[-SHOWN * self.horizon :]
        filled = lines > 0
        told = [str(one.message) for one in caught]
        return BlockResult(lines[filled].astype(np.int64), [*made[filled]], [], told)

    def _numbers(self, name: str, column: Column) -> Floats:
        """A column of inputs (n,), or (n, TEXTS) indicators of its texts."""
        if column.is_text.any() and self.forecaster.rows == 0:
            self.texts.setdefault(name, [])
        if name not in self.texts:
            return column.numbers
        known, out = self.texts[name], np.zeros((len(column.numbers), TEXTS))
        for i in np.flatnonzero(column.is_text).tolist():
            text = column.text(i)
            if text not in known and len(known) < TEXTS - 1:
                known.append(text)
            out[i, known.index(text) if text in known else TEXTS - 1] = 1.0
        return out

    def seen(self) -> NDArray[np.intp]:
        """How many of the last rows, at different times, have a value of each series."""
        return np.minimum((~np.isnan(self.history)).sum(0), self.forecaster.rows)

    def ahead_inputs(self) -> Floats | None:
        """The inputs of the rows to forecast, as far as they are known."""
        inputs = self.ahead[:, 2 + len(self.target) :]
        return inputs[: len(self.forecaster.times())] if inputs.size else None

    def refuse_rows(self, block: RowBlock, first: bool = False) -> tuple[Floats, bool]:
        """Leave out the rows that cannot be learned; returns the times of all rows, and whether these are dates."""
        for name in (*self.target, *self.inputs):
            column = block.column(name)
            reason, texts = wrong_cell(name, column, self.reading), column.is_text
            if name in self.texts or (name in self.inputs and not self.forecaster.rows and self._are_names(column)):
                texts[:] = False
            block.refuse(np.abs(column.numbers) > HUGE, f"{name!r} is not finite", NOT_FINITE)
            block.refuse(texts | column.is_time, reason, "")
        at, dated = self.times(block)
        if self.time is not None:
            self._refuse_times(block, at, dated)
        return at, dated

    def _are_names(self, column: Column) -> bool:
        """Whether the first cells of an input are texts, none of which is meant as a number."""
        texts = {column.text(i) for i in np.flatnonzero(column.is_text).tolist()}
        cures = (cure_of(text, self.reading, otherwise="none") for text in texts)
        return bool(np.isnan(column.numbers).all()) and all(cure == "none" for cure in cures)

    def _refuse_times(self, block: RowBlock, at: Floats, dated: bool) -> None:
        """Leave out the rows whose time cannot follow the rows before."""
        clock, learned = self.forecaster.clock(), self.forecaster.rows
        column, form = block.column(self.time), self.reading.date_format
        said = "a date as 2026-01-31" if form is None else f"in the --date-format {form}"
        block.refuse(~column.present, f"there is no {self.time!r}", ABSENT)
        more = {"kind": "date", "otherwise": "give --date-format, as %d.%m.%Y %H:%M"}
        no_time = wrong_cell(str(self.time), column, self.reading, f"which is not {said}", **more)
        block.refuse(np.isnan(at), no_time, "")
        if not dated and learned < 2 and (form := integer_dates(np.append(clock.first, at[block.rows][:100]))):
            raise Misuse(
                f"{self.time!r} has dates without marks between their parts, as {at[block.rows[0]]:.0f}: give "
                f"--date-format {form}, or leave --time out if its numbers count rows"
            )
        rows, held = block.rows, self.ahead[:, 0]
        held = held[~np.isin(held, at)]
        order = np.insert(rows, np.searchsorted(at[rows], held), -1 - np.arange(len(held)))
        times = np.append(at, held[::-1])[order]
        try:
            clock.begin(Moments(times, dated))
            if len(times):
                clock.find(times)
        except ValueError as error:
            refuse_time(block, rows, error)
            return
        for i, time in zip(order.tolist(), times.tolist(), strict=True):
            trial = copy(clock)
            try:
                trial.place(time, learned)
            except ValueError as error:
                refuse_time(block, [i] if i >= 0 else [], error)
                continue
            clock, learned = trial, learned + 1

    def times(self, block: RowBlock) -> tuple[Floats, bool]:
        """The times of a block in seconds, NaN where there is none, and whether they are dates; 0 without a column."""
        if self.time is None:
            return np.zeros(len(block)), False
        column, given = block.column(self.time), self.reading.date_format
        if given is None:
            return (column.numbers if column.times is None else column.times), column.times is not None
        # Cell by cell: with a format, digits alone such as 01022026 are a date, which the reader takes for a number.
        return np.array([date_of(column.text(i), given) for i in range(len(block))]), True

    def last_forecast(self) -> list[tuple[Any, ...]]:
        """The forecast after the last row: steps and times, series, forecasts and the ends of 90 % intervals."""
        made, *ends = self.forecaster.predict(X=self.ahead_inputs(), coverage=0.9)
        seen = self.seen()
        rows: list[tuple[Any, ...]] = [("step", "time", "series", "forecast", "low", "high")]
        for h, time in enumerate(self.forecaster.times()):
            for j, name in enumerate(self.target):
                value, low, high = (float(part[h, j]) for part in (made, *ends))
                known = seen[j] > h + 1 or low < high  # no interval is without an error that was measured
                shown = [end if known and math.isfinite(end) else "" for end in (low, high)]
                first = "" if math.isnan(value) or not (seen[j] or known) else value
                rows.append((h + 1, "" if time is None else time, name, first, *shown))
        return rows

    def beside_naive(self) -> list[str]:
        """The recent errors at some steps, beside those of the best naive forecast, for each series."""
        errors, H, seen = self.forecaster.errors_, self.horizon, self.seen()
        ours, naive = errors.pop("forecast"), list(errors)
        lines = []
        for j, name in enumerate(self.target):
            for h in sorted(h for h in {1, (H + 1) // 2, H} if seen[j] > h):
                best = min(naive, key=lambda one: errors[one][j, h - 1])
                lines.append(
                    f"{name}, {h} ahead: recent absolute error {ours[j, h - 1]:.4g}, best naive forecast "
                    f"({best}) {errors[best][j, h - 1]:.4g}"
                )
        return lines

    def state_dict(self) -> dict[str, Any]:
        """The model's state as plain data; a model that loads it continues bit for bit.

        Rows held back are not part of it: they are read again, with the targets that have come.
        """
        own = {name: vars(self)[name] for name in OWN}
        return sealed(deepcopy(own) | {"forecaster": self.forecaster.state_dict(), "trace": asdict(self.trace)})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue as a new model from the result of `state_dict`; a ValueError changes nothing."""
        new = unsealed("state", state_dict, {*OWN, "forecaster", "trace"})
        self.forecaster.load_state_dict(new["forecaster"])
        vars(self).update(deepcopy({name: new[name] for name in OWN}), trace=ErrorTrace(**deepcopy(new["trace"])))


def refuse_time(block: RowBlock, rows: Any, error: ValueError) -> None:
    """Leave out rows whose times the clock refuses."""
    reason, _, cure = str(error).replace("step=", "--step ").partition(": ")
    block.refuse(rows, reason, cure)


def date_of(text: str, date_format: str) -> float:
    """Seconds since 1970 of a date in this format or in ISO 8601; NaN for other texts."""
    time = read_date(text, date_format)
    if math.isnan(time):
        kind, value = read_cell(text)
        return value if kind == "date" else math.nan
    return time
