"""`sepsa stream` and `sepsa predict`: a table in, predictions out, and a model that can be resumed after a crash.

At a checkpoint the files of predictions and of quarantined rows are synced, and their sizes are saved with the model
and the position in the table. A resumed run truncates both files to these sizes and continues at that row, so that in
the end they equal, byte for byte, those of a run without interruption.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from sepsa.learner.columns.cells import read_cell
from sepsa.shell.cells import RowBlock, TableError, TableReader
from sepsa.shell.formats import open_table
from sepsa.shell.inspection import load_model, spelled
from sepsa.shell.messages import FAILED, FINISHED, INTERRUPTED, MISUSED, TERMINATED, Misuse, few, say
from sepsa.shell.model import Details, TableModel
from sepsa.shell.options import DetailOptions, PredictOptions, RunOptions, flag_of
from sepsa.shell.output import LeftOut, Output, Predictions, RunningLine, Signals, error_of, header_of
from sepsa.shell.source import name_of
from sepsa.states.file import lock
from sepsa.states.objects import check_target, save_locked
from sepsa.states.output import check_writable

SHOWN_COLUMNS = 5  # unknown columns that are named
IDLE = 10.0  # seconds without new rows after which a checkpoint is written


class StreamRun:
    """One run of `sepsa stream`: its model, table and files, and the rows since the last checkpoint."""

    kind: ClassVar[str] = "sepsa stream"
    new_model: ClassVar[Any] = TableModel

    def __init__(self, options: Any, signals: Signals, held: contextlib.ExitStack) -> None:
        self.options, self.signals = options, signals
        files = {
            "--predictions": options.predictions,
            "--quarantine": options.quarantine or default_quarantine(options),
            "--checkpoint": options.checkpoint,
            "--report": options.report,
        }
        check_files({"the table": options.source, **files})
        position: dict[str, Any] = {}
        if options.checkpoint is not None:
            self.target = check_target(options.checkpoint)
            held.enter_context(lock(self.target))
        if options.report is not None:
            import jinja2  # noqa: F401  # the report needs it, after all rows were learned

            check_writable(options.report)
        if options.quarantine is not None and not options.quarantine.exists():  # `Output` opens one that is there
            check_writable(options.quarantine)
        if options.checkpoint is not None and options.checkpoint.exists():
            self.model, position = self._resume(options.checkpoint)
        else:
            with wrong_options():
                self.model = self.new_model(**options.settings, **options.reading)
        self.asked = check_details(options, self.model) if isinstance(options, DetailOptions) else None
        self.table = open_read(options.source, held, self.model, follow=options.follow, resume=position.get("table"))
        self._check_columns()
        self.position = position.get("table")
        if position and not self.table.resumed:
            say("this is another table than the checkpoint's: learning goes on with it, from its first row")
            self.position = None
            if isinstance(self.model, TableModel) and self.table.names is not None and self.model.trace.rows:
                warn_of_columns(self.table.names, self.model, "learned from here on")
        self.predictions = self._open_predictions(position.get("predictions"))
        held.callback(self.predictions.close)
        self.quarantine = Output(files["--quarantine"], "line,reason,text\n", position.get("quarantine"), lazy=True)
        self.outputs = {"predictions": self.predictions, "quarantine": self.quarantine}
        held.callback(self.quarantine.close)
        self.saved_at = time.monotonic()
        self.started = False  # whether a row was read
        self.unsaved = 0  # rows
        self.left_out = LeftOut()
        self.line = RunningLine(self.model, self.table.share)

    def run(self) -> int:
        """Learn the table; returns the exit code."""
        code, self.signals.at_work = None, True
        try:
            for block in self.table.blocks():
                if block is None:
                    self._idle()
                else:
                    self._learn_block(block)
                if self.signals.code:
                    break
        except TableError as error:  # the rows before it are kept
            self.line.say(str(error))
            code = FAILED
        self.line.end()
        seconds = time.monotonic() - self.line.started
        self.save()
        if self.model.trace.rows:
            self._finish()
        return self._summary(self.signals.code if code is None else code, seconds)

    def _resume(self, path: Path) -> tuple[Any, dict[str, Any]]:
        """The model of the checkpoint and its position; the options must be those it was made with."""
        model, position = load_read(path, self.kind, self.options.reading)
        for name, value in self.options.settings.items():
            if value != (own := getattr(model, name)):
                raise Misuse(
                    f"{path} was made with {flag_of(name)} {spelled(own)}, got {spelled(value)}: leave the option out, "
                    "or give another --checkpoint"
                )
        return model, position

    def _check_columns(self) -> None:
        """Set which columns the reader drops and reads as texts; refuse names that the table does not have."""
        model = self.model
        self.table.reads = lambda name: name not in model.drop
        self.table.categorical = frozenset((*model.categorical, *[model.target] * model.classify))
        if model.target in model.drop:
            raise Misuse(f"--drop must leave the target in the table, got {model.target!r} for both")
        check_names(self.table, {"target": (model.target,), "drop": model.drop, "categorical": model.categorical})

    def _finish(self) -> None:
        """Write the report, if it was asked for."""
        if self.options.report is not None:
            from sepsa.shell.pages import write_page

            self.quarantine.flush()
            write_page(self.options.report, name_of(self.options.source), self.model, self.quarantine.path)

    def _check_first(self, block: RowBlock) -> None:
        """Raise an error if the first rows show that the table is not read rightly."""
        self.model.refuse_rows(block, first=True)
        block.check_first()

    def _open_predictions(self, recorded: Any) -> Predictions:
        return Predictions(self.options.predictions, header_of(self.asked), self.options.digits, recorded)

    def _learn_block(self, block: RowBlock) -> None:
        if len(block) and not self.started:
            if not self.table.resumed:
                self._check_first(block)
            self.line.started = self.line.last = time.monotonic()  # the seconds before are not those of rows
            self.started = True
        result = self.model.learn(block, self.asked)
        self.position = self._position(block)
        for text in result.warnings:
            self.line.say(text)
        self.predictions.add(result)
        aside = csv.writer(self.quarantine, lineterminator="\n")
        aside.writerows([bad.line, bad.reason, bad.text.replace("\0", "\\0")] for bad in result.bad)
        self.left_out.add(result, "quarantined", self.line.say)
        self.unsaved += len(result.lines) + len(result.bad)
        if self.unsaved >= self.options.save_every:
            self.save()
        self.line.show()

    def _position(self, block: RowBlock) -> Any:
        """Where a resumed run continues after this block."""
        return block.position

    def _idle(self) -> None:
        self.predictions.flush()
        if self.unsaved and time.monotonic() - self.saved_at > IDLE:
            self.save()
        self.line.show()

    def save(self) -> None:
        """Sync the files, then write a checkpoint, if there is one to write."""
        path = self.options.checkpoint
        files = {name: [str(output.path), output.sync()] for name, output in self.outputs.items()}
        position = {"table": self.position, **files}
        if path is not None and (self.unsaved or not path.exists()):
            save_locked(self.model, self.target, position, self.options.force)
        self.unsaved, self.saved_at = 0, time.monotonic()

    def _summary(self, code: int, seconds: float) -> int:
        """Print what was learned and written; returns the exit code."""
        options, model, rows, lost = self.options, self.model, self.model.trace.rows, self.left_out.lost
        new, name = rows - self.line.rows, name_of(options.source)
        kept = str(self.quarantine.path) != os.devnull
        where = f", {lost} " + (f"quarantined in {self.quarantine.path}" if kept else "left out") if lost else ""
        if code == FINISHED and not new and not lost:
            known = f"no new rows behind the {rows} that the checkpoint has learned"
            say(known if self.table.resumed else f"{name} holds no rows")
            return FINISHED if self.table.resumed else MISUSED
        if not rows:
            if code == FINISHED:
                say(f"none of {lost} rows could be used{where}")
            return self.left_out.exit_code(code or FAILED)
        share = getattr(model, "bounded", 0.0)
        bounded = f", {share:.2%} bounded as outliers" if share else ""
        since = "" if new == rows else f" ({new} now)"
        say(
            f"{rows} rows{since}, {error_of(model)}, each predicted before it was learned{bounded}{where}"
            f"; {new / max(seconds, 1e-9):,.0f} rows a second"
        )
        if code in (INTERRUPTED, TERMINATED):
            how = "and saved; the same command goes on from there" if options.checkpoint else "and not saved"
            say(f"stopped behind row {rows + model.quarantined} {how}")
        files = {
            "the predictions": options.predictions or "standard output",
            "the bad rows": self.quarantine.path if lost and kept else None,
            "the model": options.checkpoint,
            "the report": options.report,
        }
        written = ", ".join(f"{what} to {path}" for what, path in files.items() if path is not None)
        say(f"written: {written}" + "; the model is not saved" * (options.checkpoint is None))
        return self.left_out.exit_code(code)


def stream(options: RunOptions, kind: type[StreamRun] = StreamRun) -> int:
    """Learn a table as it comes, by a run of this kind; returns the exit code."""
    with contextlib.ExitStack() as held:
        return kind(options, Signals(held), held).run()


def predict(options: PredictOptions) -> int:
    """Predict the rows of a table by a saved model; returns the exit code."""
    check_files({"the model": options.model, "the table": options.source, "--predictions": options.predictions})
    model, _ = load_read(options.model, "sepsa stream", options.reading)
    if model.learner.body is None:
        raise Misuse(f"{options.model} has not learned any row yet and cannot predict: learn a table by sepsa stream")
    asked, left_out = check_details(options, model), LeftOut()
    own, predictions = sorted(model.inputs.cells), None
    with contextlib.ExitStack() as held:
        table = open_read(options.source, held, model)
        table.reads = lambda name: name not in model.drop and name != model.target
        table.categorical = frozenset(model.categorical)
        if table.names is not None and not {*table.names} & {*own}:
            raise Misuse(f"the table has none of the model's columns, {few(own)}{separated(table.names)}")
        for block in table.blocks():
            if block is None:
                continue
            if predictions is None:
                model.refuse_rows(block, learning=False, first=True)
                warn_of_columns(table.names or [*block.columns], model)
                predictions = Predictions(options.predictions, header_of(asked), options.digits)
                held.callback(predictions.close)
            result = model.predict(block, asked)
            predictions.add(result)
            left_out.add(result, "not predicted")
        if predictions is not None:
            predictions.sync()
    rows, lost = left_out.used, left_out.lost
    if not rows and not lost:
        say(f"{name_of(options.source)} holds no rows")
        return MISUSED
    where = options.predictions or "standard output"
    say(f"{rows} rows predicted" + (f", {lost} not" if lost else "") + f", written to {where}")
    return left_out.exit_code(FINISHED if rows else FAILED)


def load_read(path: Path, kind: str, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A saved model and its position, with the settings of reading that it was saved with where none are given now."""
    model, position = load_model(path, kind)
    with wrong_options():
        model.reading = replace(model.reading, **given)
    return model, position


def open_read(source: Path | None, held: contextlib.ExitStack, model: Any, **more: Any) -> TableReader:
    """The table, read as the model says."""
    table = open_table(source, held, model.reading, **more)
    if table.is_utf8:
        said = f"{name_of(source)} is read as {model.reading.encoding}, and may be in utf-8"
        say(f"{said}: give --encoding utf-8 if its texts look wrong")
    form = model.reading.date_format
    if form and isinstance(model, TableModel) and read_cell(datetime(2001, 1, 1).strftime(form))[0] == "number":
        say(f"dates in the --date-format {form} look like numbers and are read as numbers: write them as 2026-01-31")
    return table


def default_quarantine(options: RunOptions) -> Path:
    """The quarantine file beside the checkpoint or the predictions."""
    near = options.checkpoint or options.predictions
    return Path("quarantine.csv") if near is None else near.with_name(near.stem + ".quarantine.csv")


# ---------------------------------------------------------------------- checks


@contextlib.contextmanager
def wrong_options() -> Iterator[None]:
    """Convert the error for an argument into one that names the option."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, _, words = str(error).partition(" ")
        raise Misuse(f"{flag_of(name)} {words}") from None


def check_files(files: dict[str, Path | None]) -> None:
    """Raise an error if an output would overwrite the table or another output."""
    seen: dict[str, str] = {}
    for option, path in files.items():
        if path is None or (path.exists() and not path.is_file()):  # a device takes what several write
            continue
        if (other := seen.setdefault(os.path.realpath(path), option)) != option:
            raise Misuse(f"{option} must be another file than {other}, got {path} for both")


def check_details(options: DetailOptions, model: TableModel) -> Details | None:
    """What is computed beside each prediction; an error if it does not fit the model."""
    intervals, wanted = options.intervals, options.probabilities
    if intervals is not None and (model.classify or not 0 < intervals < 1):
        raise Misuse(
            f"--intervals must be a share in (0, 1) of the targets, which are numbers, got {intervals}"
            f"{': --probabilities is for classes' if model.classify else ''}"
        )
    if wanted and not model.classify:
        raise Misuse("--probabilities needs a target that is a class, and it is a number: use --intervals 0.9")
    return Details(intervals, wanted) if wanted or intervals is not None else None


def check_names(table: TableReader, given: Mapping[str, Sequence[str]]) -> None:
    """Raise an error for names of columns, by the option that gives them, that the table does not have."""
    if table.names is None:
        return
    for option, names in given.items():
        for name in names:
            if name not in table.names:
                said = f"--{option} must be a column of the table, {few(table.names)}, got {name!r}"
                raise Misuse(said + separated(table.names))


def separated(names: Sequence[str]) -> str:
    """What to do about a table with one column."""
    return "; if they are not separated rightly, give --sep; the first line must name them" * (len(names) == 1)


def warn_of_columns(names: Sequence[str], model: TableModel, becomes: str = "ignored") -> None:
    """Print which columns of the model the table lacks, and which columns of the table the model does not know."""
    own = sorted(model.inputs.cells)
    missing, known = [name for name in own if name not in names], {*own, *model.drop, model.target}
    unknown = [name for name in names if name not in known]
    for name in unknown[:SHOWN_COLUMNS]:
        near = difflib.get_close_matches(name, own, 1)
        say(f"column {name!r} is not one of the model's and is {becomes}" + (f": is it {near[0]!r}?" if near else ""))
    if len(unknown) > SHOWN_COLUMNS:
        say(f"{len(unknown) - SHOWN_COLUMNS} more columns are {becomes}")
    if missing:
        said = f"{len(missing)} of the model's {len(own)} columns are absent, taken as missing values"
        say(f"{said}: {few([*map(repr, missing)])}")
