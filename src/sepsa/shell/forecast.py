"""`sepsa forecast`: its checks of a table, and the forecasts that it writes and prints."""

from __future__ import annotations

from typing import Any

import numpy as np

from sepsa.shell.cells import RowBlock, TableError
from sepsa.shell.command import StreamRun, check_names, stream
from sepsa.shell.messages import NEWEST_FIRST, Misuse, print_text, say
from sepsa.shell.model import BlockResult
from sepsa.shell.options import ForecastOptions
from sepsa.shell.output import Predictions, speller
from sepsa.shell.reading import quote
from sepsa.shell.records import TextReader
from sepsa.shell.series import ForecastTable
from sepsa.shell.source import name_of


def forecast(options: ForecastOptions) -> int:
    """Learn a table as it comes, and forecast; returns the exit code."""
    return stream(options, ForecastRun)


class ForecastFile(Predictions):
    """A CSV file with the forecasts made after each row; nothing where there is none."""

    def add(self, result: BlockResult) -> None:
        if not self.printed:
            made_of = (",".join(map(self.spell, made.ravel().tolist())) for made in result.predictions)
            self.write("".join(map("{},{}\n".format, result.lines.tolist(), made_of)))


class ForecastRun(StreamRun):
    """One run of `sepsa forecast`."""

    kind = "sepsa forecast"
    new_model = ForecastTable

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
        super()._check_first(block)
        at, _ = self.model.times(block)
        there = np.flatnonzero(~np.isnan(at))
        apart = np.diff(at[there])
        if (apart < 0).sum() > (apart > 0).sum():
            i = int(np.flatnonzero(apart < 0)[0])
            said = f"line {block.lines[there[i + 1]]} is earlier than line {block.lines[there[i]]}"
            cure = f"sort it by {self.model.time!r}, oldest first"
            raise Misuse(f"{name_of(self.options.source)} is newest first ({said}): {cure}", NEWEST_FIRST)

    def _check_columns(self) -> None:
        model = self.model
        time = () if model.time is None else (model.time,)
        check_names(self.table, {"target": model.target, "time": time, "inputs": model.inputs})
        self.table.reads = {*model.target, *model.inputs, *time}.__contains__
        if model.reading.date_format is not None and isinstance(self.table, TextReader):
            self.table.categorical = frozenset(time)  # 01022026 is not the number 1022026

    def _position(self, block: RowBlock) -> Any:
        """Before the rows that wait for their targets, which a later run reads again."""
        ahead = self.model.ahead
        if not len(ahead):
            return block.position
        first = int(ahead[0, 1])
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
        timed = model.time is not None and clock.last is not None
        for h, at in enumerate(model.ahead[:rows, 0] if timed else (), 1):
            if clock.index(at) != clock.last + h:
                raise Misuse(
                    f"rows without a target at the end must be those ahead, without a gap: row {h} of them must be at "
                    f"{clock.ahead(h)}, got {clock.label(at)}"
                )

    def _finish(self) -> None:
        """Print the forecast after the last row, and write the page."""
        if np.isnan(self.model.history).all():
            raise TableError(
                f"--target {', '.join(self.model.target)} has no number in the last rows: nothing to forecast"
            )
        self._check_ahead()
        rows, spell = self.model.last_forecast(), speller(self.options.digits, printed=True)
        cells = ([spell(cell) if isinstance(cell, float) else quote(str(cell)) for cell in row] for row in rows)
        print_text("".join(",".join(row) + "\n" for row in cells))
        if any(row[-1] == "" for row in rows):
            say("no interval where low and high are empty: no error of such a forecast has been measured yet")
        for line in self.model.beside_naive():
            say(line)
        super()._finish()
