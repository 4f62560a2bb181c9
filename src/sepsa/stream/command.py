"""`sepsa stream`, `sepsa predict` and `sepsa inspect`: a table in, predictions out, and a model that survives anything.

At a checkpoint the files of predictions and of quarantined rows are synced and their sizes are saved with the model
and the position in the table. Who resumes cuts both files to these sizes and goes on at that row, so that in the end
they are, to the byte, what one undisturbed run would have written.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import numpy as np

from sepsa.states.file import CheckpointError, Header, lock, older, read_path, write
from sepsa.states.objects import build, pack
from sepsa.states.tree import tensors_of
from sepsa.stream.table import Block, Table, TableError, open_table
from sepsa.stream.table_learner import Outcome, TableLearner

FINISHED, FAILED, MISUSED, PIPE_CLOSED, INTERRUPTED, TERMINATED = 0, 1, 2, 141, 130, 143
SHOWN = 3  # quarantined rows that are told in the terminal; the file has all
REFRESH = 0.5  # seconds between two running lines
AS_TEXT: Any = {"encoding": "utf-8", "newline": "", "errors": "backslashreplace"}
IDLE = 10.0  # seconds after which rows that wait for no others are saved


class Misuse(ValueError):
    """A command that asks for what cannot be."""


class Stopped(BaseException):
    """A signal came while nothing was under way."""


@dataclass
class Settings:
    """What `sepsa stream` was asked for; None stands for an option that was not given."""

    source: Path | None
    target: str | None = None
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

    def model(self) -> dict[str, Any]:
        """The options that make the model, those that were given."""
        names = ("target", "classify", "drop", "categorical", "categories", "forgetting", "ridge", "seed")
        given = {name: getattr(self, name) for name in names}
        return {
            name: tuple(value) if isinstance(value, (list, tuple)) else value
            for name, value in given.items()
            if value is not None
        }


# ---------------------------------------------------------------------- sepsa stream


def stream(settings: Settings) -> int:
    """Learn a table as it comes; returns the exit code, with everything said."""
    with contextlib.ExitStack() as held:
        try:
            signals = held.enter_context(Signals())
            if settings.checkpoint is not None:
                held.enter_context(lock(Path(os.path.realpath(settings.checkpoint))))
            return Run(settings, signals, held).go()
        except Stopped:
            return signals.code
        except Misuse as error:
            say(str(error))
            return MISUSED
        except BrokenPipeError:
            silence_stdout()
            return PIPE_CLOSED
        except (OSError, ValueError, MemoryError) as error:
            say(describe(error))
            return FAILED


class Run:
    """One run of `sepsa stream`: what is open, and what has been done since the last checkpoint."""

    def __init__(self, settings: Settings, signals: Signals, held: contextlib.ExitStack) -> None:
        self.settings, self.signals = settings, signals
        check_files(settings)
        position: dict[str, Any] = {}
        if settings.checkpoint is not None and settings.checkpoint.exists():
            self.model, position = resume(settings)
        else:
            if settings.target is None:
                raise Misuse("--target must name the column to predict")
            self.model = make_model(settings)
        self.table = open_table(
            settings.source,
            held,
            separator=settings.separator,
            decimal=settings.decimal,
            follow=settings.follow,
            resume=position.get("table"),
        )
        check_columns(self.table, self.model, settings)
        self.position = position.get("table")
        if position and not self.table.resumed:
            say("this is another table than the checkpoint's: learning goes on with it, from its first row")
            self.position = None
        self.predictions = None
        if settings.predictions is not None:
            self.predictions = open_output(settings.predictions, position.get("predictions"), "line,prediction\n", held)
        place = settings.quarantine or default_quarantine(settings)
        self.quarantine = open_output(place, position.get("quarantine"), "line,reason,text\n", held, lazy=True)
        self.rows_at_start, self.quarantined_at_start = self.model.trace.rows, self.model.quarantined
        self.started = self.saved_at = time.monotonic()
        self.unsaved = 0
        self.told = 0
        self.line = RunningLine(self.model, self.rows_at_start)

    # ------------------------------------------------------------------

    def go(self) -> int:
        code, reason = FINISHED, None
        self.signals.at_work = True
        try:
            for block in self.table.blocks():
                if block is None:
                    self._idle()
                else:
                    reason = self._take(block)
                if reason is not None or self.signals.code:
                    break
        except TableError as error:  # what came before it stands
            code, reason = FAILED, str(error)
        self.line.end()
        if reason is not None:
            say(reason)
            code = FAILED
        else:
            code = code or self.signals.code
        if not (self.settings.strict and reason):
            self.save()
        if self.settings.report is not None and self.model.trace.rows:
            write_report(self.settings.report, self)
        return self._summary(code)

    def _take(self, block: Block) -> str | None:
        """Learn a block; returns why to stop, if so."""
        reason = None
        if self.settings.strict and (bad := self.model.unusable(block)):
            first = bad[0]
            block = before(block, first.line)
            reason = f"line {first.line}: {first.reason} (--strict)"
        outcome = self.model.learn(block)
        self.position = block.position
        for text in outcome.warnings:
            self.line.say(text)
        self._write(outcome)
        self.unsaved += len(outcome.lines) + len(outcome.bad)
        if self.unsaved >= self.settings.every and reason is None:
            self.save()
        self.line.show()
        return reason

    def _write(self, outcome: Outcome) -> None:
        if self.predictions is not None:
            self.predictions.write(as_csv(outcome))
        else:
            write_stdout(outcome)
        if outcome.bad and self.quarantine is not None:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(outcome.bad)
            self.quarantine.write(text.getvalue().replace("\0", "\\0"))
        for bad in outcome.bad[: max(0, SHOWN - self.told)]:
            self.line.say(f"line {bad.line} is quarantined: {bad.reason}")
        self.told += len(outcome.bad)

    def _idle(self) -> None:
        if self.predictions is not None:
            self.predictions.flush()
        if self.unsaved and time.monotonic() - self.saved_at > IDLE:
            self.save()
        self.line.show()

    def save(self) -> None:
        """A checkpoint, where one is wanted: first the files it speaks of, then the model."""
        path = self.settings.checkpoint
        sizes = {
            name: [str(output.path), output.sync()]
            for name, output in (("predictions", self.predictions), ("quarantine", self.quarantine))
            if output is not None
        }
        if path is not None and (self.unsaved or not path.exists()):
            header, tensors = pack(self.model, {"table": self.position, **sizes})
            write(Path(os.path.realpath(path)), header, tensors, self.settings.keep)
        self.unsaved, self.saved_at = 0, time.monotonic()

    def _summary(self, code: int) -> int:
        model, rows = self.model, self.model.trace.rows
        new = rows - self.rows_at_start
        lost = model.quarantined - self.quarantined_at_start
        where = "" if self.quarantine is None or not lost else f", {lost} quarantined in {self.quarantine.path}"
        if not new and not lost and code == FINISHED:
            if self.table.resumed:
                say(f"no new rows behind the {rows} that the checkpoint has learned")
                return FINISHED
            say(f"{name_of(self.settings.source)} holds no rows")
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
            how = "and saved; the same command goes on from there" if self.settings.checkpoint else "and not saved"
            say(f"stopped behind row {rows + model.quarantined} {how}")
        return code


def open_output(path: Path, recorded: Any, header: str, held: contextlib.ExitStack, lazy: bool = False) -> Output:
    """A file of the run, at the size that the checkpoint recorded, if it is the same file."""
    output = Output(path, header, recorded[1] if recorded and recorded[0] == str(path) else None, lazy)
    held.callback(output.close)
    return output


class Output:
    """A file that grows, and is cut back to where a checkpoint left it."""

    def __init__(self, path: Path, header: str, size: int | None, lazy: bool) -> None:
        self.path, self._header = path, header
        self._file: TextIO | None = None
        if size is not None and size > 0:
            self._file = open(path, "r+", **AS_TEXT)  # noqa: SIM115  # `close` is its end
            self._file.seek(0, os.SEEK_END)
            there = self._file.tell()
            if there < size:
                self._file.close()
                raise TableError(
                    f"{path} has {there} bytes where it had {size} at the checkpoint: put it back, or name another file"
                )
            self._file.seek(size)
            self._file.truncate()
        elif not lazy:
            self._make()
        elif path.exists():
            with path.open("rb") as file:
                if not header.encode().startswith(file.readline()):  # a part of it is what a killed run leaves
                    raise Misuse(f"{path} is no file of quarantined rows: name another by --quarantine")
            path.unlink()  # of another run: there is nothing in quarantine yet

    def _make(self) -> TextIO:
        self._file = open(self.path, "w", **AS_TEXT)  # noqa: SIM115
        self._file.write(self._header)
        return self._file

    def write(self, text: str) -> None:
        (self._file or self._make()).write(text)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def sync(self) -> int:
        """Let all that was written reach the disk; returns the size."""
        if self._file is None:
            return 0
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


class Signals:
    """SIGINT and SIGTERM as a wish to stop, granted at once while nothing is under way, else between two blocks."""

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
        if again or not self.at_work:  # who asks twice does not want to wait
            raise Stopped

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class RunningLine:
    """Rows, rows a second and the recent error, in the last line of a terminal."""

    def __init__(self, model: TableLearner, rows: int) -> None:
        self.model, self.rows = model, rows
        self.wanted = sys.stderr.isatty()
        self.started = self.last = time.monotonic()
        self._shown = False

    def show(self) -> None:
        now = time.monotonic()
        if not self.wanted or now - self.last < REFRESH:
            return
        self.last, self._shown = now, True
        rate = (self.model.trace.rows - self.rows) / (now - self.started)
        text = f"{self.model.trace.rows:,} rows, {rate:,.0f} a second, {error_of(self.model, recent=True)}"
        if self.model.quarantined:
            text += f", {self.model.quarantined:,} quarantined"
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    def end(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            self._shown = False

    def say(self, text: str) -> None:
        self.end()
        say(text)


def check_files(settings: Settings) -> None:
    """Refuse to write over the table, or two things into one file."""
    files = {
        "the table": settings.source, "--predictions": settings.predictions, "--quarantine": settings.quarantine,
        "--checkpoint": settings.checkpoint, "--report": settings.report,
    }  # fmt: skip
    seen: dict[str, str] = {}
    for option, path in files.items():
        if path is not None and (other := seen.setdefault(os.path.realpath(path), option)) != option:
            raise Misuse(f"{option} must be another file than {other}, got {path} for both")


def make_model(settings: Settings) -> TableLearner:
    try:
        return TableLearner(**settings.model())
    except (TypeError, ValueError) as error:
        raise Misuse(f"--{error}") from None


def resume(settings: Settings) -> tuple[TableLearner, dict[str, Any]]:
    """The model of the checkpoint and its position; the options must be those it was made with."""
    model, header = load_model(settings.checkpoint)
    own = model.get_params()
    for name, value in settings.model().items():
        if value != own[name]:
            raise Misuse(
                f"{settings.checkpoint} was made with --{name} {spelled(own[name])}, got {spelled(value)}: "
                "leave the option out, or give another --checkpoint"
            )
    return model, header.position if isinstance(header.position, dict) else {}


def load_model(path: Path | None) -> tuple[TableLearner, Header]:
    """A model that `sepsa stream` has saved."""
    assert path is not None
    try:
        header, state = read_path(path)
        if header.kind != "sepsa stream":
            raise CheckpointError(
                f"{path} holds a {header.kind}, and this command takes what `sepsa stream --checkpoint` saves: "
                "load it in Python by sepsa.load"
            )
        model = build(header.kind, header.configuration, state, str(path))
    except CheckpointError as error:
        earlier = older(path, 1)
        raise CheckpointError(f"{error}{f' ({earlier} is one)' if earlier.exists() else ''}") from None
    return model, header


def check_columns(table: Table, model: TableLearner, settings: Settings) -> None:
    """Tell the table what the model knows of its columns, and refuse names that are not its own."""
    table.drop = frozenset(model.drop)
    table.categorical = frozenset((*model.categorical, model.target) if model.classify else model.categorical)
    if table.names is None:
        return
    shown = ", ".join(table.names[:20]) + (", ..." if len(table.names) > 20 else "")
    for option, names in (("target", (model.target,)), ("drop", model.drop), ("categorical", model.categorical)):
        for name in names:
            if name not in table.names:
                hint = "" if len(table.names) > 1 else "; if they are not separated rightly, give --sep"
                raise Misuse(f"--{option} must be a column of the table, {shown}, got {name!r}{hint}")


def before(block: Block, line: int) -> Block:
    """The rows of a block that come before a line."""
    kept = np.flatnonzero(block.lines < line)
    columns = {name: column.rows(kept) for name, column in block.columns.items()}
    return Block(columns, block.lines[kept], block.raw, [], block.position)


def default_quarantine(settings: Settings) -> Path:
    near = settings.checkpoint or settings.predictions
    return Path("quarantine.csv") if near is None else near.with_name(near.stem + ".quarantine.csv")


def as_csv(outcome: Outcome) -> str:
    """The predictions with their lines."""
    pairs = zip(outcome.lines.tolist(), cells(outcome), strict=True)
    return "".join(["%d,%s\n" % pair for pair in pairs])  # noqa: UP031  # a third faster than format


def cells(outcome: Outcome) -> list[str]:
    """Predictions as CSV cells."""
    values = outcome.predictions
    if values and isinstance(values[0], float):
        return list(map(repr, values))
    quoted = {v: '"' + v.replace('"', '""') + '"' if any(mark in v for mark in ',"\r\n') else v for v in set(values)}
    return [quoted[value] for value in values]


def write_stdout(outcome: Outcome) -> None:
    """A line for each row, empty for one that is quarantined, so that the lines stay beside the table's."""
    lines = cells(outcome)
    if outcome.bad:
        pairs = [*zip(outcome.lines.tolist(), lines, strict=True), *((bad.line, "") for bad in outcome.bad)]
        lines = [text for _, text in sorted(pairs, key=lambda pair: pair[0])]
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def silence_stdout() -> None:
    """Whoever read it has gone: nothing more is written, and nothing is said about it at the exit either."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def error_of(model: TableLearner, recent: bool = False) -> str:
    value = model.trace.recent if recent else model.trace.mean
    if model.classify:
        return f"{'recent ' if recent else ''}accuracy {1 - value:.4f}"
    return f"{'recent' if recent else 'mean'} absolute error {value:.6g}"


def spelled(value: Any) -> str:
    return (",".join(map(str, value)) or "nothing") if isinstance(value, tuple) else str(value)


def name_of(source: Path | None) -> str:
    return "standard input" if source is None else str(source)


def describe(error: BaseException) -> str:
    """An error in one line, with its cure where the system's own word needs one."""
    if isinstance(error, MemoryError):
        return "there is not enough memory: leave out wide text columns by --drop, or lower --categories"
    text = " ".join(str(error).split())
    cures = {
        2: "check the path", 13: "check its permissions", 21: "give a file", 28: "make room",
        30: "give a folder that can be written",
    }  # fmt: skip
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename else ""
        cure = cures.get(error.errno or 0)
        return f"{name}{error.strerror.lower()}{f': {cure}' if cure else ''}"
    return text or type(error).__name__


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- sepsa predict


def predict(
    model_path: Path, source: Path | None, out: Path | None, separator: str | None = None, decimal: str = "."
) -> int:
    """Predict the rows of a table by a saved model; a row that cannot be used leaves an empty line."""
    try:
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
                outcome = model.predict(block)
                if file is None:
                    write_stdout(outcome)
                else:
                    file.write(as_csv(outcome))
                for bad in outcome.bad[: max(0, SHOWN - lost)]:
                    say(f"line {bad.line} is not predicted: {bad.reason}")
                rows, lost = rows + len(outcome.lines), lost + len(outcome.bad)
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
    if not rows and not lost:
        say(f"{name_of(source)} holds no rows")
        return MISUSED
    say(f"{rows} rows predicted" + (f", {lost} not" if lost else ""))
    return FINISHED if rows else FAILED


def column_names(model: TableLearner) -> list[str]:
    """The columns that the model's inputs came from."""
    inputs = model.inputs
    names = [name for name in inputs.names if name not in inputs.indicators]
    return list(dict.fromkeys([*(name.rpartition(":")[0] or name for name in names), *names, *inputs.texts]))


# ---------------------------------------------------------------------- sepsa inspect


def inspect(path: Path) -> dict[str, Any]:
    """What a checkpoint is, how old, what it knows and whether it is sound."""
    header, state = read_path(path)
    arrays = list(tensors_of(state))
    told: dict[str, Any] = {
        "file": str(path),
        "kind": header.kind,
        "format": header.format,
        "written by": f"sepsa {header.library}",
        "saved": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(header.saved)),
        "age": age(time.time() - header.saved),
        "configuration": header.configuration,
        "tensors": len(header.tensors),
        "bytes": header.bytes,
        "checksums": "all fit",
        "finite": all(finite(array) for array in arrays),
    }
    if header.kind == "sepsa stream":
        model: TableLearner = build(header.kind, header.configuration, state, str(path))
        told |= known_to(model, header)
    return told


def known_to(model: TableLearner, header: Header) -> dict[str, Any]:
    learner = model.learner
    told: dict[str, Any] = {
        "rows": model.trace.rows,
        "quarantined": model.quarantined,
        "error": error_of(model),
        "recent error": error_of(model, recent=True),
        "alarms": model.trace.alarm_count,
        "columns": column_names(model),
        "inputs": len(model.inputs.names),
        "position": (header.position or {}).get("table"),
    }
    if model.classify:
        told["classes"] = list(model.classes)
    if learner is not None:
        told["effective samples"] = learner.engine.samples
        if not model.classify:
            told["noise"] = float(np.sqrt(learner.noise_variance()[0]))
    return told


def finite(array: Any) -> bool:
    values = np.asarray(array.detach().cpu().float() if hasattr(array, "detach") else array)
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


def age(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"


# ---------------------------------------------------------------------- the report


def write_report(path: Path, run: Run) -> None:
    """One page that needs no network."""
    import jinja2

    model, trace = run.model, run.model.trace
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sepsa.stream", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    lost = []
    if run.quarantine is not None and run.quarantine.path.exists() and model.quarantined:
        run.quarantine.flush()
        with open(run.quarantine.path, encoding="utf-8", newline="") as lines:
            rows = csv.reader(lines)
            next(rows, None)
            lost = [row for row, _ in zip(rows, range(20), strict=False)]
    points = [*trace.points, *([math.fsum(trace.part) / len(trace.part)] if trace.part else [])]
    if not points:
        points = [trace.mean]
    page = environment.get_template("report.html.jinja").render(
        source=name_of(run.settings.source),
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
        settings=settings_of(model),
        columns=column_names(model),
        inputs=len(model.inputs.names),
        quarantine=None if run.quarantine is None else run.quarantine.path,
        when=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(page, encoding="utf-8")
    os.replace(fresh, path)


def settings_of(model: TableLearner) -> dict[str, Any]:
    """What the model was made with, and what it has chosen by itself."""
    settings = {name: spelled(value) for name, value in model.get_params().items()}
    chosen = getattr(getattr(model.learner, "engine", None), "chosen", None)
    return settings | (
        {str(name): spelled(value) for name, value in chosen.items()} if isinstance(chosen, dict) else {}
    )


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
