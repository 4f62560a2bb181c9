"""The command line: `sepsa demo`, `reproduce`, `report`, `stream`, `forecast`, `predict`, `inspect`, `bench`.

Exit codes: 0 done; 1 the data, a file or the system stopped it; 2 the command is wrong; 3 more than a twentieth of the
rows was left out; 4 a table to forecast is newest first; 130 Ctrl-C; 143 SIGTERM; 141 the reader of the output has
closed it.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

from sepsa.paper.experiments import EXPERIMENTS, plan
from sepsa.stream.tables.reading import MEANINGS, Reading
from sepsa.validation import printable

NEEDS_EXTRA = "the command line needs {missing}, which is not installed: pip install 'sepsa[{extra}]'"

try:
    import typer
except ModuleNotFoundError as error:  # the core is torch and numpy alone
    sys.exit(NEEDS_EXTRA.format(missing=error.name, extra="paper"))


def setting(text: str, default: object, **options: Any) -> Any:
    """An option of the model: a checkpoint knows its value, so None is one that was not given."""
    return typer.Option(help=f"{text} (default {default})", show_default=False, **options)


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
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


# "all" leaves "tuning" out, because the other experiments use the settings that it has chosen.
REPRODUCIBLE = (*EXPERIMENTS, "convergence", "tuning", "all")


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
def extras(extra: str = "paper") -> Iterator[None]:
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
    with extras():
        from sepsa.paper import demo as demonstration
    check_output("--out", out, (".png", ".svg", ".pdf"))
    with system_errors():
        demonstration.run(out, seeds)


@app.command()
def reproduce(
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(REPRODUCIBLE)}.")],
    datasets: Annotated[str, typer.Option(help="Of energy, diabetes, mnist, cifar10, with commas between.")] = "",
    methods: Annotated[str, typer.Option(help="Such as sepsa,adam,slimtrain; a wrong name lists them all.")] = "",
    seeds: Annotated[str, typer.Option(help="5: the first five of the paper's; 200-209 or 233,640: these.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:0.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one a core on a CPU, one in all on a GPU.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The folder of results; results, or results-quick if quick.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small version: few seeds, epochs and images.")] = False,
) -> None:
    """Run an experiment of the paper, or all of them. Runs that are already recorded are not repeated."""
    with extras():
        from rich.console import Console

        from sepsa.paper import convergence, runner, tuning
        from sepsa.paper.data import NAMES as DATASETS
        from sepsa.paper.methods import NAMES as METHODS
        from sepsa.paper.methods import slug
    if experiment not in REPRODUCIBLE:
        raise refuse(f"experiment must be one of {', '.join(REPRODUCIBLE)}, got {experiment!r}")
    try:
        sets = chosen("--datasets", datasets, DATASETS, str)
        names = chosen("--methods", methods, METHODS, slug)
        wanted = parse_seeds(seeds)
        check_device(device)
        runs = [
            run for each in EXPERIMENTS if experiment in (each, "all") for run in plan(each, sets, names, wanted, quick)
        ]
    except ValueError as error:
        raise refuse(error) from None
    if experiment in (*EXPERIMENTS, "all") and not runs:
        raise refuse(f"{experiment} has no runs for --datasets {datasets or 'all'} and --methods {methods or 'all'}")
    console = Console()
    out = out or Path("results-quick" if quick else "results")
    jobs = jobs or (cores() if device == "cpu" else 1)
    if quick:
        console.print(f"a small version (--quick), into {out}: its numbers are not the paper's", highlight=False)
    try:
        if runs:
            runner.reproduce(runs, out, device, jobs, console)
        if experiment in ("convergence", "all"):
            convergence.run(out, jobs, quick, console)
        if experiment == "tuning":
            tuning.tune(out, sets, device, jobs, quick, console)
    except KeyboardInterrupt:
        console.print(f"stopped; what was done is in {out}, and the same command goes on from there", highlight=False)
        raise typer.Exit(130) from None
    except (OSError, runner.Unusable) as error:
        raise stopped(error) from None
    console.print(f"the results are in {out}; `sepsa report --results {out}` draws them", highlight=False)


@app.command()
def report(
    model: Annotated[
        Path | None, typer.Argument(help="What `sepsa stream` or `sepsa forecast` has saved: the page of that model.")
    ] = None,
    results: Annotated[Path, typer.Option(help="The folder that `sepsa reproduce` filled.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The folder for the page and the figures.")] = Path("report"),
    docs: Annotated[Path | None, typer.Option(help="A markdown file whose Table III is updated.")] = None,
) -> None:
    """Draw the figures and tables from the results, beside the paper's, on one page that needs no network; or the page
    of a saved model.
    """
    if model is not None:
        raise typer.Exit(report_of_model(model, out))
    with extras():
        from sepsa.paper import report as reporting
    try:
        reporting.write(results, out, docs)
    except (FileNotFoundError, ValueError) as error:
        raise refuse(error) from None
    except OSError as error:
        raise stopped(error) from None
    typer.echo(f"the page is {out / 'report.html'}")


def report_of_model(path: Path, out: Path) -> int:
    """Write the page of a saved model into a folder; returns the exit code."""
    with extras("stream"):
        import jinja2  # noqa: F401

        from sepsa.stream.tables import command, forecast, inspection, output
        from sepsa.stream.tables import report as reporting
    if path.is_dir():
        raise refuse(f"{path} is a folder: give a saved model, or a folder of `sepsa reproduce` by --results")

    def write() -> int:
        model, header = inspection.load_model(path, "sepsa stream", "sepsa forecast")
        out.mkdir(parents=True, exist_ok=True)
        page = out / f"{path.stem}.html"
        if header.kind == "sepsa forecast":
            forecast.write_page(page, str(path), model)
        else:
            lost = header.position.get("quarantine") if isinstance(header.position, dict) else None
            reporting.write_report(page, str(path), model, Path(lost[0] if lost else os.devnull))
        output.say(f"the page is {page}")
        return command.FINISHED

    return command.exit_code(write)


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
    with extras("stream"):
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
    with extras("stream"):
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
    with extras("stream"):
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
    with extras("stream"):
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
def compile_engine() -> None:
    """Compile the stream learners now, so that their first row is fast: when a container is built, or before tests."""
    with extras(), system_errors():
        from sepsa.stream.engine.compiled import compile_for_learners

        compile_for_learners()


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="stream: the price of one sample, beside a linear model of River.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in each of which every contestant runs once.")] = 15,
    out: Annotated[Path | None, typer.Option(help="A .json for the raw numbers.")] = None,
) -> None:
    """Measure the learners of sepsa and a linear model of River on the same stream, alternating in one process."""
    if what != "stream":
        raise refuse(f"bench must be one of stream, got {what!r}")
    if out is not None:
        check_output("--out", out, (".json",))
    with extras(), system_errors():
        from rich.console import Console
        from rich.progress import track
        from rich.table import Table

        from sepsa import bench as benchmark

        console = Console()
        X, Y = benchmark.stream()
        comparison = benchmark.compare(X, Y, rounds)
        for _ in track(range(rounds + 1), "rounds", console=console, transient=True):
            next(comparison)
        results = dict(item for item in comparison if isinstance(item, tuple))
    table = Table("", "µs a sample", "samples a second", "mean absolute error", f"time / {benchmark.OURS}")
    for name, result in sorted(results.items(), key=lambda item: item[1]["microseconds"]["median"]):
        us, times = result["microseconds"], result["times_ours"]
        table.add_row(
            name,
            f"{us['median']:.2f} [{us['q25']:.2f}, {us['q75']:.2f}]",
            f"{result['samples_per_second']:,.0f}",
            f"{result['mean_absolute_error']:.3g}",
            f"{times['median']:.2f} [{times['q25']:.2f}, {times['q75']:.2f}]",
        )
    console.print(table)
    if out is not None:
        benchmark.write(out, results)
        console.print(f"written to {out}", highlight=False)


def chosen(option: str, given: str, valid: Sequence[str], short: Callable[[str], str]) -> list[str] | None:
    """The full names that an option lists; None where it lists none."""
    known = {short(name): name for name in valid}
    names = [part.strip() for part in given.split(",") if part.strip()]
    for name in names:
        if short(name) not in known:
            raise ValueError(f"{option} must be one of {', '.join(known)}, got {name!r}")
    return [known[short(name)] for name in names] or None


def parse_seeds(given: str) -> int | list[int] | None:
    """A number of seeds, or the seeds themselves: "10", "200-219", "233,640"."""
    text = given.replace(" ", "")
    if not text:
        return None
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ValueError(f"--seeds must be a number such as 10, a range such as 200-219 or a list, got {given!r}")
    if text.isdecimal():
        return int(text)
    ends = [part.partition("-") for part in text.split(",")]
    seeds = [range(int(low), int(high or low) + 1) for low, _, high in ends]
    if not all(seeds):
        raise ValueError(f"--seeds must have increasing ranges, got {given!r}")
    return [seed for several in seeds for seed in several]


def check_device(name: str) -> None:
    import torch

    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} is not available: torch finds no GPU here; use --device cpu")


def cores() -> int:
    """The number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """Run the command line, also where the shell has closed a standard stream, as `2>&-` does."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # it takes the stream's number, which no other file may get
            if name != "stdin":  # whose absence is an error that a command reports
                setattr(sys, name, open(null, "w"))  # noqa: SIM115
    app()
