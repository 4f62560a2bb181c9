"""The command line: `sepsa demo`, `sepsa reproduce`, `sepsa report`, `sepsa stream` and `sepsa bench`."""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

NEEDS_EXTRA = "the command line needs {missing}, which is not installed: pip install 'sepsa[paper]'"

try:
    import typer
except ModuleNotFoundError as error:  # the core is torch and numpy alone
    sys.exit(NEEDS_EXTRA.format(missing=error.name))

app = typer.Typer(
    help="Train models with a linear head: the head by a stochastic Newton method, the body as before.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# What `sepsa reproduce all` does; "tuning" is asked for by name, because the others take its choices as given.
ALL = ("fig1", "fig2", "fig3", "fig4", "table3", "convergence")
REPRODUCIBLE = (*ALL, "tuning", "all")


@app.callback()
def sepsa() -> None:
    """Train models with a linear head: the head by a stochastic Newton method, the body as before."""


@contextmanager
def extras() -> Iterator[None]:
    """Within it a package that only an extra brings may be missing, which takes one line to say."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sepsa":
            raise
        sys.exit(NEEDS_EXTRA.format(missing=error.name))


def refuse(message: str) -> typer.Exit:
    """Say in one line what is wrong with the command."""
    typer.echo(message, err=True)
    return typer.Exit(2)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the figure goes: .png, .svg or .pdf.")] = Path("demo.png"),
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method and learning rate.")] = 3,
) -> None:
    """Train the paper's network online on Diabetes with five methods at three learning rates. No download."""
    with extras():
        from sepsa.paper import demo as demonstration
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
    """Run an experiment of the paper, or all of them. What the results hold already is not run again."""
    with extras():
        from rich.console import Console

        from sepsa.paper import convergence, experiments, runner, tuning
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
            run
            for each in (ALL if experiment == "all" else (experiment,))
            if each in experiments.EXPERIMENTS
            for run in experiments.plan(each, sets, names, wanted, quick)
        ]
    except ValueError as error:
        raise refuse(str(error)) from None
    if experiment in (*experiments.EXPERIMENTS, "all") and not runs:
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
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    console.print(f"the results are in {out}; `sepsa report --results {out}` draws them", highlight=False)


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="The folder that `sepsa reproduce` filled.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The folder for the page and the figures.")] = Path("report"),
    docs: Annotated[Path | None, typer.Option(help="A markdown file whose Table III is to be written anew.")] = None,
) -> None:
    """Draw the figures and tables from the results, beside the paper's, on one page that needs no network."""
    with extras():
        from sepsa.paper import report as reporting
    try:
        reporting.write(results, out, docs)
    except (FileNotFoundError, ValueError) as error:
        raise refuse(str(error)) from None
    typer.echo(f"the page is {out / 'report.html'}")


@app.command()
def stream(
    target: Annotated[str, typer.Option(help="The column to predict.")],
    source: Annotated[Path, typer.Argument(help="A .csv file with a header; - is what comes in.")] = Path("-"),
    classify: Annotated[bool, typer.Option("--classify", help="The target is a class, not a number.")] = False,
    forgetting: Annotated[float, typer.Option(help="Below 1 the learner follows what drifts, as 0.999.")] = 1.0,
) -> None:
    """Predict each row of a table as it comes, then learn it. Text becomes indicators, an empty cell is missing."""
    with extras():
        from sepsa.river import SepSAClassifier, SepSARegressor
    seen, wrong = 0, 0.0
    try:
        learner: Any = (SepSAClassifier if classify else SepSARegressor)(forgetting=forgetting)
        with sys.stdin if str(source) == "-" else source.open(newline="") as lines:
            for label, x in samples(csv.DictReader(lines), target):
                y: Any = label if classify else number(label)
                if y is None:
                    raise ValueError(f"{target} must be a number in every row, got {label!r}: or is it --classify?")
                before = learner.predict_one(x)
                learner.learn_one(x, y)
                typer.echo("" if before is None else before)
                seen, wrong = seen + 1, wrong + (before != y if classify else abs(before - y))
    except (OSError, ValueError) as error:
        raise refuse(str(error)) from None
    if not seen:
        raise refuse(f"{source} holds no rows below its header")
    score = f"accuracy {1 - wrong / seen:.4f}" if classify else f"mean absolute error {wrong / seen:.6g}"
    typer.echo(f"{seen} rows, {score}, each predicted before it was learned", err=True)


def samples(rows: csv.DictReader[str], target: str) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Each row's target and features: numbers as they are, text as an indicator, an empty cell as None."""
    if target not in (rows.fieldnames or ()):
        raise ValueError(f"--target must be a column of the table, {', '.join(rows.fieldnames or ())}, got {target!r}")
    known: dict[str, float] = {}  # the indicators met so far, at zero
    for row in rows:
        if None in row or None in row.values():
            raise ValueError(f"line {rows.line_num} must have {len(rows.fieldnames or ())} cells, as the header has")
        label = row.pop(target)
        if not label:
            raise ValueError(f"line {rows.line_num} has no {target}: drop the row, there is nothing to learn from it")
        x: dict[str, float | None] = {**known}
        for name, cell in row.items():
            if not cell:
                x[name] = None
            elif (value := number(cell)) is not None:
                x[name] = value
            else:
                x[f"{name}={cell}"] = 1.0
                known[f"{name}={cell}"] = 0.0
        yield label, x


def number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="stream: the price of one sample, beside whichever peers are installed.")],
    rounds: Annotated[int, typer.Option(min=1, help="Turns that each contestant takes.")] = 15,
    out: Annotated[Path | None, typer.Option(help="A .json for the raw numbers; a .png is drawn beside it.")] = None,
) -> None:
    """Measure the compiled engine beside its peers on the same stream, in one process, in turns."""
    if what != "stream":
        raise refuse(f"bench must be of stream, got {what!r}")
    if out is not None and out.suffix != ".json":
        raise refuse(f"--out must end in .json, got {out}")
    with extras():
        from rich.console import Console
        from rich.progress import track
        from rich.table import Table

        from sepsa import bench as benchmark

        console = Console()
        X, Y = benchmark.stream()
        rate = benchmark.attainable()
        turns = benchmark.compare(X, Y, rounds)
        for _ in track(range(rounds + 1), "turns", console=console, transient=True):
            next(turns)
        results = dict(item for item in turns if isinstance(item, tuple))
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
        benchmark.write(out, results, rate)
        benchmark.draw(results, out.with_suffix(".png"))
        console.print(f"written to {out} and {out.with_suffix('.png')}", highlight=False)


def chosen(option: str, given: str, valid: Sequence[str], short: Callable[[str], str]) -> list[str] | None:
    """The names that an option lists, in full; None where it lists none."""
    known = {short(name): name for name in valid}
    names = [part.strip() for part in given.split(",") if part.strip()]
    for name in names:
        if short(name) not in known:
            raise ValueError(f"{option} must be of {', '.join(known)}, got {name!r}")
    return [known[short(name)] for name in names] or None


def parse_seeds(given: str) -> int | list[int] | None:
    """A number of seeds, or the seeds: "10", "200-219", "233,640"."""
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
        raise ValueError(f"--seeds must go up in each range, got {given!r}")
    return [seed for several in seeds for seed in several]


def check_device(name: str) -> None:
    import torch

    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} is not to be had: torch finds no GPU here; take --device cpu")


def cores() -> int:
    """Those this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    app()
