"""`sepsa stream` and `sepsa predict`: a table in, predictions out, and a model that can be resumed after a crash.

At a checkpoint the files of predictions and of quarantined rows are synced, and their sizes are saved with the model
and the position in the table. A resumed run truncates both files to these sizes and continues at that row, so that in
the end they equal, byte for byte, those of a run without interruption.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import numpy as np

from sepsa.states.file import lock, write
from sepsa.states.objects import pack
from sepsa.stream.tables.cells import RowBlock, TableError
from sepsa.stream.tables.formats import TableReader, open_table
from sepsa.stream.tables.inspection import column_names, load_model, spelled
from sepsa.stream.tables.model import BlockResult, TableModel, at_rows
from sepsa.stream.tables.output import (
    AS_TEXT,
    Misuse,
    Output,
    RunningLine,
    as_csv,
    describe,
    error_of,
    say,
    silence_stdout,
    write_stdout,
)
from sepsa.stream.tables.report import write_report

FINISHED, FAILED, MISUSED, PIPE_CLOSED, INTERRUPTED, TERMINATED = 0, 1, 2, 141, 130, 143
SHOWN = 3  # quarantined rows that are shown in the terminal; the file has all
IDLE = 10.0  # seconds without new rows after which a checkpoint is written


class Stopped(BaseException):
    """A signal that stops the command at once, with its exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


@dataclass
class StreamOptions:
    """The options of `sepsa stream`; None is an option that was not given."""

    source: Path | None
    target: str | Sequence[str] | None = None
    classify: bool | None = None
    drop: Sequence[str] | None = None
    categorical: Sequence[str] | None = None
    categories: int | None = None
    forgetting: float | str | None = None
    ridge: float | str | None = None
    seed: int | None = None
    separator: str | None = None
    decimal: str = "."
    follow: bool = False
    strict: bool = False
    predictions: Path | None = None
    quarantine: Path | None = None
    checkpoint: Path | None = None
    every: int = 10_000
    keep: int = 1
    report: Path | None = None
    kind: ClassVar[str] = "sepsa stream"
    table: ClassVar[Any] = TableModel
    of_model: ClassVar[tuple[str, ...]] = (
        "target", "classify", "drop", "categorical", "categories", "forgetting", "ridge", "seed",
    )  # fmt: skip

    def model(self) -> dict[str, Any]:
        """The options of the model that were given."""
        given = {name: getattr(self, name) for name in self.of_model}
        return {
            name: tuple(value) if isinstance(value, (list, tuple)) else value
            for name, value in given.items()
            if value is not None
        }


def stream(options: StreamOptions, kind: type[StreamRun] | None = None) -> int:
    """Learn a table as it comes, by a run of this kind; returns the exit code, after all messages."""
    with contextlib.ExitStack() as held:
        signals = held.enter_context(Signals())
        return exit_code(lambda: (kind or StreamRun)(options, signals, held).run())


def exit_code(run: Callable[[], int]) -> int:
    """The exit code of a command; an error becomes a message of one line."""
    try:
        return run()
    except Stopped as stopped:
        return stopped.code
    except Misuse as error:
        say(str(error))
        return MISUSED
    except BrokenPipeError:
        silence_stdout()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError, MemoryError) as error:
        say(describe(error))
        return FAILED


class StreamRun:
    """One run of `sepsa stream`: its model, table and files, and the rows since the last checkpoint."""

    def __init__(self, options: StreamOptions, signals: Signals, held: contextlib.ExitStack) -> None:
        self.options, self.signals = options, signals
        if options.checkpoint is not None:
            held.enter_context(lock(Path(os.path.realpath(options.checkpoint))))
        check_files(options)
        position: dict[str, Any] = {}
        if options.checkpoint is not None and options.checkpoint.exists():
            self.model, position = resume(options.checkpoint, options)
        else:
            if not options.target:
                raise Misuse("--target must name the column to predict")
            self.model = make_model(options)
        self.table = open_table(
            options.source,
            held,
            separator=options.separator,
            decimal=options.decimal,
            follow=options.follow,
            resume=position.get("table"),
        )
        self._check_columns()
        self.position = position.get("table")
        if position and not self.table.resumed:
            say("this is another table than the checkpoint's: learning goes on with it, from its first row")
            self.position = None
        self.predictions = None
        if options.predictions is not None:
            self.predictions = Output(options.predictions, self._header(), position.get("predictions"))
            held.callback(self.predictions.close)
        place = options.quarantine or default_quarantine(options)
        self.quarantine = Output(place, "line,reason,text\n", position.get("quarantine"), lazy=True)
        held.callback(self.quarantine.close)
        self.rows_at_start, self.quarantined_at_start = self.model.trace.rows, self.model.quarantined
        self.started = self.saved_at = time.monotonic()
        self.unsaved = 0  # rows
        self.shown = 0  # quarantined rows
        self.line = RunningLine(self.model, self.rows_at_start)

    def run(self) -> int:
        """Learn the table; returns the exit code."""
        code, reason = FINISHED, None
        self.signals.at_work = True
        try:
            for block in self.table.blocks():
                if block is None:
                    self._idle()
                else:
                    reason = self._learn_block(block)
                if reason is not None or self.signals.code:
                    break
        except TableError as error:  # the rows before it are kept
            code, reason = FAILED, str(error)
        self.line.end()
        if reason is not None:
            say(reason)
            code = FAILED
        else:
            code = code or self.signals.code
        if not (self.options.strict and reason):
            self.save()
        if self.model.trace.rows:
            self._finish()
        return self._summary(code)

    def _check_columns(self) -> None:
        check_columns(self.table, self.model)

    def _finish(self) -> None:
        """Write the report, if it was asked for."""
        if self.options.report is not None:
            write_report(self.options.report, name_of(self.options.source), self.model, self.quarantine)

    def _header(self) -> str:
        """The first line of the file of predictions."""
        return "line,prediction\n"

    def _learn_block(self, block: RowBlock) -> str | None:
        """Learn a block; returns the reason to stop, if there is one."""
        reason = None
        if self.options.strict and (bad := self.model.unusable(block)):
            first = bad[0]
            block = before(block, first.line)
            reason = f"line {first.line}: {first.reason} (--strict)"
        result = self.model.learn(block)
        self.position = block.position
        for text in result.warnings:
            self.line.say(text)
        self._write(result)
        self.unsaved += len(result.lines) + len(result.bad)
        if self.unsaved >= self.options.every and reason is None:
            self.save()
        self.line.show()
        return reason

    def _write_predictions(self, result: BlockResult) -> None:
        if self.predictions is not None:
            self.predictions.write(as_csv(result))
        else:
            write_stdout(result)

    def _write(self, result: BlockResult) -> None:
        self._write_predictions(result)
        if result.bad:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(result.bad)
            self.quarantine.write(text.getvalue().replace("\0", "\\0"))
        for bad in result.bad[: max(0, SHOWN - self.shown)]:
            self.line.say(f"line {bad.line} is quarantined: {bad.reason}")
        self.shown += len(result.bad)

    def _idle(self) -> None:
        if self.predictions is not None:
            self.predictions.flush()
        if self.unsaved and time.monotonic() - self.saved_at > IDLE:
            self.save()
        self.line.show()

    def save(self) -> None:
        """Sync the files, then write a checkpoint, if there is one to write."""
        path = self.options.checkpoint
        sizes = {
            name: [str(output.path), output.sync()]
            for name, output in (("predictions", self.predictions), ("quarantine", self.quarantine))
            if output is not None
        }
        if path is not None and (self.unsaved or not path.exists()):
            header, tensors = pack(self.model, {"table": self.position, **sizes})
            write(Path(os.path.realpath(path)), header, tensors, self.options.keep)
        self.unsaved, self.saved_at = 0, time.monotonic()

    def _summary(self, code: int) -> int:
        model, rows = self.model, self.model.trace.rows
        new = rows - self.rows_at_start
        lost = model.quarantined - self.quarantined_at_start
        where = "" if not lost else f", {lost} quarantined in {self.quarantine.path}"
        if not new and not lost and code == FINISHED:
            if self.table.resumed:
                say(f"no new rows behind the {rows} that the checkpoint has learned")
                return FINISHED
            say(f"{name_of(self.options.source)} holds no rows")
            return MISUSED
        if not rows and code == FINISHED:
            say(f"none of {lost} rows could be used{where}: is --target {model.target!r} right?")
            return FAILED
        if not rows:
            return code
        seconds = max(time.monotonic() - self.started, 1e-9)
        since = "" if new == rows else f" ({new} now)"
        say(
            f"{rows} rows{since}, {error_of(model)}, each predicted before it was learned{where}"
            f"; {new / seconds:,.0f} rows a second"
        )
        if code in (INTERRUPTED, TERMINATED):
            how = "and saved; the same command goes on from there" if self.options.checkpoint else "and not saved"
            say(f"stopped behind row {rows + model.quarantined} {how}")
        return code


class Signals:
    """A handler of SIGINT and SIGTERM that stops at once before the first block, and later between two blocks."""

    def __init__(self) -> None:
        self.code = 0
        self.at_work = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):  # only the main thread may
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.code
        self.code = INTERRUPTED if number == signal.SIGINT else TERMINATED
        if again or not self.at_work:  # a second signal stops at once
            raise Stopped(self.code)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def check_files(options: StreamOptions) -> None:
    """Refuse to write over the table, or two things into one file."""
    files = {
        "the table": options.source, "--predictions": options.predictions, "--quarantine": options.quarantine,
        "--checkpoint": options.checkpoint, "--report": options.report,
    }  # fmt: skip
    seen: dict[str, str] = {}
    for option, path in files.items():
        if path is not None and (other := seen.setdefault(os.path.realpath(path), option)) != option:
            raise Misuse(f"{option} must be another file than {other}, got {path} for both")


def make_model(options: StreamOptions) -> Any:
    """A new model with the given options."""
    try:
        return options.table(**options.model())
    except (TypeError, ValueError) as error:
        raise Misuse(f"--{error}") from None


def resume(checkpoint_path: Path, options: StreamOptions) -> tuple[Any, dict[str, Any]]:
    """The model of the checkpoint and its position; the options must be those it was made with."""
    model, header = load_model(checkpoint_path, options.kind)
    own = model.get_params()
    for name, value in options.model().items():
        if value != own[name]:
            raise Misuse(
                f"{checkpoint_path} was made with --{name} {spelled(own[name])}, got {spelled(value)}: "
                "leave the option out, or give another --checkpoint"
            )
    return model, header.position if isinstance(header.position, dict) else {}


def check_columns(table: TableReader, model: TableModel) -> None:
    """Set which columns the reader drops and reads as texts; refuse names of columns that the table does not have."""
    table.drop = frozenset(model.drop)
    table.categorical = frozenset((*model.categorical, model.target) if model.classify else model.categorical)
    check_names(table, {"target": (model.target,), "drop": model.drop, "categorical": model.categorical})


def check_names(table: TableReader, given: Mapping[str, Sequence[str]]) -> None:
    """Refuse names of columns, by the option that gives them, which the table does not have."""
    if table.names is None:
        return
    shown = ", ".join(table.names[:20]) + (", ..." if len(table.names) > 20 else "")
    for option, names in given.items():
        for name in names:
            if name not in table.names:
                hint = "" if len(table.names) > 1 else "; if they are not separated rightly, give --sep"
                raise Misuse(f"--{option} must be a column of the table, {shown}, got {name!r}{hint}")


def before(block: RowBlock, line: int) -> RowBlock:
    """The rows of a block that come before a line."""
    kept = np.flatnonzero(block.lines < line)
    return RowBlock(at_rows(block.columns, kept), block.lines[kept], block.raw, [], block.position)


def default_quarantine(options: StreamOptions) -> Path:
    """The quarantine file beside the checkpoint or the predictions."""
    near = options.checkpoint or options.predictions
    return Path("quarantine.csv") if near is None else near.with_name(near.stem + ".quarantine.csv")


def name_of(source: Path | None) -> str:
    """The table in messages."""
    return "standard input" if source is None else str(source)


def predict(
    model_path: Path, source: Path | None, out: Path | None, separator: str | None = None, decimal: str = "."
) -> int:
    """Predict the rows of a table by a saved model; returns the exit code. A bad row leaves an empty line."""
    return exit_code(lambda: predict_table(model_path, source, out, separator, decimal))


def predict_table(model_path: Path, source: Path | None, out: Path | None, separator: str | None, decimal: str) -> int:
    model, _ = load_model(model_path)
    rows = lost = 0
    with contextlib.ExitStack() as held:
        table = open_table(source, held, separator=separator, decimal=decimal)
        table.drop = frozenset(model.drop) | {model.target}
        table.categorical = frozenset(model.categorical)
        if table.names is not None and not set(table.names) & set(column_names(model)):
            raise Misuse(f"the table has none of the model's columns, {', '.join(column_names(model)[:20])}")
        file = None
        if out is not None:
            file = held.enter_context(open(out, "w", **AS_TEXT))
            file.write("line,prediction\n")
        for block in table.blocks():
            if block is None:
                continue
            result = model.predict(block)
            if file is None:
                write_stdout(result)
            else:
                file.write(as_csv(result))
            for bad in result.bad[: max(0, SHOWN - lost)]:
                say(f"line {bad.line} is not predicted: {bad.reason}")
            rows, lost = rows + len(result.lines), lost + len(result.bad)
    if not rows and not lost:
        say(f"{name_of(source)} holds no rows")
        return MISUSED
    say(f"{rows} rows predicted" + (f", {lost} not" if lost else ""))
    return FINISHED if rows else FAILED
