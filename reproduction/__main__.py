"""`python -m reproduction run` trains, `python -m reproduction report` draws: the paper's experiments."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from reproduction import convergence, runner, tuning
from reproduction import report as reporting
from reproduction.data import NAMES as DATASETS
from reproduction.experiments import EXPERIMENTS, plan
from reproduction.methods import NAMES as METHODS
from reproduction.methods import slug

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def stopped(message: object, code: int = 1) -> typer.Exit:
    """Print one line on what stopped the command; returns the exception to raise."""
    typer.echo(str(message), err=True)
    return typer.Exit(code)


refuse = partial(stopped, code=2)  # for a command that is wrong

# "all" leaves "tuning" out, because the other experiments use the settings that it has chosen.
REPRODUCIBLE = (*EXPERIMENTS, "convergence", "tuning", "all")


@app.callback()
def reproduction() -> None:
    """The paper's experiments: run them, and set their results beside those that the paper prints."""


@app.command()
def run(
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
    draw = f"python -m reproduction report --results {out}"
    console.print(f"the results are in {out}; `{draw}` draws them", highlight=False)


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="The folder that `run` filled.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The folder for the page and the figures.")] = Path("report"),
    docs: Annotated[Path | None, typer.Option(help="A markdown file whose Table III is updated.")] = None,
) -> None:
    """Draw the figures and tables from the results, beside the paper's, on one page that needs no network."""
    try:
        reporting.write(results, out, docs)
    except (FileNotFoundError, ValueError) as error:
        raise refuse(error) from None
    except OSError as error:
        raise stopped(error) from None
    typer.echo(f"the page is {out / 'report.html'}")


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
    """Raise an error for a device that torch does not know or this machine does not have."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} is not available: torch finds no GPU here; use --device cpu")


def cores() -> int:
    """The number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    app()
