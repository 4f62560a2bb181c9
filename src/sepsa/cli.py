"""The command line: `sepsa demo`, `stream`, `predict`, `forecast`, `report`, `inspect`, `compile`.

Exit codes: 0 done; 1 the data, a file or the system stopped it; 2 the command is wrong; 3 more than a twentieth of the
rows was left out; 4 a table to forecast is newest first; 130 Ctrl-C; 143 SIGTERM; 141 the reader of the output has
closed it.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

from sepsa.stream.tables.reading import MEANINGS, Reading
from sepsa.validation import printable

NEEDS_EXTRA = "the command line needs {missing}, which is not installed: pip install 'sepsa[{extra}]'"

try:
    import typer
except ModuleNotFoundError as error:  # the core is torch and numpy alone
    sys.exit(NEEDS_EXTRA.format(missing=error.name, extra="stream"))


def setting(text: str, default: object, **options: Any) -> Any:
    """An option of the model: a checkpoint knows its value, so None is one that was not given."""
    return typer.Option(help=f"{text} (default {default})", show_default=False, **options)


# Without rich, whose import takes three times as long as all else that help and errors of usage need.
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
PredictionsFile = Annotated[
    Path | None, typer.Option("--predictions", "--out", help="A .csv for the predictions; else they are printed.")
]
Intervals = Annotated[
    float | None, typer.Option(help="Also low and high ends that hold this share of targets, as 0.9.")
]
Probabilities = Annotated[
    bool, typer.Option("--probabilities", help="Also the probability of each class, as a JSON object.")
]
Follow = Annotated[bool, typer.Option("--follow", help="Wait for rows that are appended to the file.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first row that cannot be used.")]
Quarantine = Annotated[Path | None, typer.Option(help="A .csv for rows that cannot be used.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Where the model is saved, and resumed from if it is there.")]
Every = Annotated[int, typer.Option(min=1, help="Rows between two checkpoints.")]
Keep = Annotated[int, typer.Option(min=1, help="How many checkpoints stay, the older as .1, .2, ...")]

STDIN = Path("-")
EXIT_CODES = (
    "Exit codes: 0 done; 1 stopped by the data, a file or the system; 2 a wrong command; 3 done, but more than a "
    "twentieth of the rows was left out; 4 a table for sepsa forecast is newest first; 130 Ctrl-C; 143 SIGTERM."
)


def reads_files(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the settings of `Reading` as options, which it gets as `reading` where they were given."""
    own = [one for one in signature(command, eval_str=True).parameters.values() if one.name != "reading"]
    added = []
    for each in fields(Reading):
        words = each.metadata["help"] + (f" (default {each.default})" if each.default else "")
        option = Annotated[str | None, typer.Option(help=words, show_default=False)]
        added.append(Parameter(each.name, Parameter.KEYWORD_ONLY, default=None, annotation=option))

    @wraps(command)
    def with_reading(**given: Any) -> None:
        reading = {name: value for name in MEANINGS if (value := given.pop(name)) is not None}
        if "na_values" in reading:
            reading["na_values"] = names("--na-values", reading["na_values"]) or ()
        command(**given, reading=reading)

    with_reading.__signature__ = Signature([*own, *added])  # type: ignore[attr-defined]
    with_reading.__annotations__ = {one.name: one.annotation for one in [*own, *added]}
    return with_reading


def print_version(wanted: bool) -> None:
    if wanted:
        from sepsa import __version__

        typer.echo(f"sepsa {__version__}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def sepsa(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Say which version this is.")
    ] = False,
) -> None:
    """Train models with a linear head: the head by a stochastic Newton method, the body as before."""


@contextmanager
def extras(extra: str = "stream") -> Iterator[None]:
    """Convert the error for a missing package into one line that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sepsa":
            raise
        raise stopped(NEEDS_EXTRA.format(missing=error.name, extra=extra)) from None


@contextmanager
def system_errors() -> Iterator[None]:
    """Convert an error of the operating system about a file or a folder into one line."""
    try:
        yield
    except OSError as error:
        own = f"{error.filename}: {(error.strerror or '').lower()}: check the path and its permissions"
        raise stopped(own if error.filename else str(error)) from None


def check_output(option: str, path: Path, suffixes: Sequence[str]) -> None:
    """Raise an error for an output file with a wrong suffix or folder before any work is done."""
    if path.suffix not in suffixes:
        raise refuse(f"{option} must end in {' or '.join(suffixes)}, got {path}")
    if not path.absolute().parent.is_dir():
        raise refuse(f"{option} must lie in a folder that exists, got {path}: make {path.parent} first")


def stopped(message: object, code: int = 1) -> typer.Exit:
    """Print one line on what stopped the command; returns the exception to raise."""
    typer.echo(printable(str(message)), err=True)
    return typer.Exit(code)


refuse = partial(stopped, code=2)  # for a command that is wrong


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the figure goes: .png, .svg or .pdf.")] = Path("demo.png"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method and learning rate.")] = 3,
) -> None:
    """Train the paper's network online on Diabetes with five methods at three learning rates. No download."""
    with extras("demo"):
        from sepsa import demo as demonstration
    check_output("--out", out, (".png", ".svg", ".pdf"))
    with system_errors():
        demonstration.run(out, seeds)


@app.command()
def report(
    model: Annotated[Path, typer.Argument(help="What `sepsa stream` or `sepsa forecast` has saved.")],
    out: Annotated[Path, typer.Option(help="The folder for the page.")] = Path("report"),
) -> None:
    """Write the page of a saved model: an .html that needs no network."""
    with extras():
        import jinja2  # noqa: F401

        from sepsa.stream.tables import command, forecast, inspection, output
        from sepsa.stream.tables import report as reporting
    if model.is_dir():
        raise refuse(f"{model} is a folder: give a saved model")

    def write() -> int:
        found, header = inspection.load_model(model, "sepsa stream", "sepsa forecast")
        out.mkdir(parents=True, exist_ok=True)
        page = out / f"{model.stem}.html"
        if header.kind == "sepsa forecast":
            forecast.write_page(page, str(model), found)
        else:
            lost = header.position.get("quarantine") if isinstance(header.position, dict) else None
            reporting.write_report(page, str(model), found, Path(lost[0] if lost else os.devnull))
        output.say(f"the page is {page}")
        return command.FINISHED

    raise typer.Exit(command.exit_code(write))


@app.command(epilog=EXIT_CODES)
@reads_files
def stream(
    source: Annotated[
        Path, typer.Argument(help="CSV (plain, gzip or zstd), JSON lines, Parquet or Arrow; - is standard input.")
    ] = STDIN,
    target: Annotated[str | None, typer.Option(help="The column to predict; a checkpoint knows it already.")] = None,
    classify: Annotated[bool | None, typer.Option("--classify", help="The target is a class, not a number.")] = None,
    drop: Annotated[str, typer.Option(help="Columns to leave out, with commas between.")] = "",
    categorical: Annotated[str, typer.Option(help="Columns of numbers that are names, such as postal codes.")] = "",
    categories: Annotated[
        int | None,
        setting("Texts of a column with an input of their own; all others share the mean of their target.", 256, min=1),
    ] = None,
    forgetting: Annotated[
        str | None, setting("1: all rows count alike; 0.999 follows drift; auto weights such heads by error.", "auto")
    ] = None,
    ridge: Annotated[str | None, setting("How strongly the head is held at its start.", 10)] = None,
    seed: Annotated[int | None, setting("Same rows and same seed, same numbers.", 0, min=0)] = None,
    body: Annotated[
        str | None,
        setting(
            "experts: trees, neighbours and others beside the network; fourier: the network alone, faster.", "experts"
        ),
    ] = None,
    follow: Follow = False,
    strict: Strict = False,
    predictions: PredictionsFile = None,
    intervals: Intervals = None,
    probabilities: Probabilities = False,
    quarantine: Quarantine = None,
    checkpoint: Checkpoint = None,
    every: Every = 10_000,
    keep: Keep = 1,
    force: Annotated[bool, typer.Option("--force", help="Save a model with NaN or Inf over one without.")] = False,
    report: Annotated[Path | None, typer.Option(help="An .html page on what happened.")] = None,
    *,
    reading: dict[str, Any],
) -> None:
    """Predict each row of a table as it comes, then learn it. Text becomes indicators, an empty cell is missing."""
    with extras():
        from sepsa.stream.tables import command

        if report is not None:
            import jinja2  # noqa: F401  # the report needs it, after all rows were learned
    options = command.StreamOptions(
        source=None if source == STDIN else source,
        target=target, classify=classify or None, drop=names("--drop", drop),
        categorical=names("--categorical", categorical), categories=categories,
        forgetting=number("--forgetting", forgetting), ridge=number("--ridge", ridge),
        seed=seed, body=body, reading=reading, follow=follow, strict=strict,
        predictions=predictions, quarantine=quarantine, checkpoint=checkpoint, every=every, keep=keep, report=report,
        intervals=intervals, probabilities=probabilities, force=force,
    )  # fmt: skip
    raise typer.Exit(command.stream(options))


@app.command(epilog=EXIT_CODES)
@reads_files
def forecast(
    source: Annotated[Path, typer.Argument(help="A table as `sepsa stream` takes it; - is standard input.")] = STDIN,
    target: Annotated[str, typer.Option(help="The columns to forecast, with commas between.")] = "",
    time: Annotated[
        str | None, typer.Option(help="The column of times: dates or seconds; rows left out are gaps.")
    ] = None,
    horizon: Annotated[int | None, setting("Rows ahead.", 24, min=1)] = None,
    inputs: Annotated[str, typer.Option(help="Columns that help to forecast, with commas between.")] = "",
    seasons: Annotated[str, typer.Option(help="Periods in rows, with commas between; else found by itself.")] = "",
    lags: Annotated[int | None, typer.Option(min=1, help="Past rows that are inputs.", show_default=False)] = None,
    step: Annotated[
        str, typer.Option(help="Seconds between rows, or day, business day, week, month, ...; else found by itself.")
    ] = "",
    bounds: Annotated[str, typer.Option(help="Least and largest value, as 0, or 0,100; else none.")] = "",
    same_time: Annotated[
        str | None, typer.Option(help="Several rows at a time: first, last, mean or sum; else all but one are bad.")
    ] = None,
    known_ahead: Annotated[
        bool, typer.Option("--known-ahead", help="Rows without a target at the end have the inputs of rows ahead.")
    ] = False,
    follow: Follow = False,
    strict: Strict = False,
    predictions: Annotated[Path | None, typer.Option(help="A .csv for the forecasts made after each row.")] = None,
    quarantine: Quarantine = None,
    checkpoint: Checkpoint = None,
    every: Every = 10_000,
    keep: Keep = 1,
    report: Annotated[Path | None, typer.Option(help="An .html page with the forecasts as fan charts.")] = None,
    *,
    reading: dict[str, Any],
) -> None:
    """Forecast columns of a table, learning each row as it comes; prints the forecast after the last row."""
    with extras():
        from sepsa.stream.tables import command
        from sepsa.stream.tables import forecast as forecasting
    given = [number("--seasons", period) for period in seasons.split(",") if period]
    periods = [period for period in given if isinstance(period, float)] or None
    ends: Any = [number("--bounds", end) if end.strip() else None for end in bounds.split(",")] if bounds else None
    options = forecasting.ForecastOptions(
        source=None if source == STDIN else source,
        target=names("--target", target), time=time, horizon=horizon, inputs=names("--inputs", inputs),
        seasons=periods, lags=lags,
        step=number("--step", step) if step[:1].isdigit() else step or None, bounds=ends, same_time=same_time,
        known_ahead=known_ahead or None, reading=reading, follow=follow, strict=strict,
        predictions=predictions, quarantine=quarantine, checkpoint=checkpoint, every=every, keep=keep, report=report,
    )  # fmt: skip
    raise typer.Exit(command.stream(options, forecasting.ForecastRun))


@app.command(epilog=EXIT_CODES)
@reads_files
def predict(
    model: Annotated[Path, typer.Argument(help="What `sepsa stream --checkpoint` has saved.")],
    source: Annotated[Path, typer.Argument(help="A table as `sepsa stream` takes it; - is standard input.")] = STDIN,
    predictions: PredictionsFile = None,
    intervals: Intervals = None,
    probabilities: Probabilities = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Predict the rows of a table with a saved model, without learning them."""
    with extras():
        from sepsa.stream.tables import command
    table = None if source == STDIN else source
    options = command.PredictOptions(model, table, predictions, reading, intervals, probabilities)
    raise typer.Exit(command.predict(options))


@app.command(epilog=EXIT_CODES)
def inspect(
    model: Annotated[Path, typer.Argument(help="A checkpoint: of `sepsa stream`, or written by sepsa.save.")],
    as_json: Annotated[bool, typer.Option("--json", help="For a program to read.")] = False,
) -> None:
    """Show what a checkpoint contains, its age, and whether it is intact."""
    with extras():
        from sepsa.stream.tables import command, inspection, output

    def show() -> int:
        output.check_stdout("open it, or redirect it to a file")
        contents = inspection.inspect(model)
        width = max(map(len, contents))
        lines = [f"{name:<{width}}  {plain(value)}\n" for name, value in contents.items()]
        output.print_text(json.dumps(contents, default=str) + "\n" if as_json else "".join(lines))
        return command.FINISHED

    raise typer.Exit(command.exit_code(show))


def plain(value: Any) -> str:
    """A value of `inspect` in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        shown = ", ".join(map(str, value[:12]))
        return f"{shown}, ... ({len(value)})" if len(value) > 12 else shown or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def names(option: str, given: str) -> list[str] | None:
    """The columns or texts that an option lists; None where it was not given."""
    try:
        return next(csv.reader([given])) if given else None
    except csv.Error:
        cure = "must be a list with commas between, with quotes around a name that has a line break"
        raise refuse(f"{option} {cure}, got {given!r}") from None


def number(option: str, given: str | None) -> float | str | None:
    """A number, or "auto"."""
    if given is None or given == "auto":
        return given
    try:
        return float(given)
    except ValueError:
        raise refuse(f"{option} must be a number or auto, got {given!r}") from None


@app.command("compile")
def compile_kernels(
    to: Annotated[
        Path | None, typer.Option(help="A folder for the code, which SEPSA_CACHE names where it is used.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many at once (default: as many as there are idle cores).")
    ] = None,
) -> None:
    """Compile all kernels now, so that the first row is fast: when a container is built, or before tests."""
    if to is not None:
        with system_errors():
            to.mkdir(parents=True, exist_ok=True)
        if not os.access(to, os.W_OK):
            raise refuse(f"--to must be a folder that can be written, got {to}: give another one")
        os.environ["SEPSA_CACHE"] = str(to.absolute())
    with extras(), system_errors(), warnings.catch_warnings():
        warnings.filterwarnings("error", "sepsa: no folder for compiled code", RuntimeWarning)
        try:
            from sepsa.ahead import compile_all

            compile_all(processes)
        except RuntimeWarning as nowhere:
            raise stopped(nowhere) from None
    if to is not None:
        typer.echo(f"export SEPSA_CACHE={shlex.quote(str(to.absolute()))}")


def main() -> None:
    """Run the command line, also where the shell has closed a standard stream, as `2>&-` does."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # it takes the stream's number, which no other file may get
            if name != "stdin":  # whose absence is an error that a command reports
                setattr(sys, name, open(null, "w"))  # noqa: SIM115
    app()
