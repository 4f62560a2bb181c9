"""`sepsa demo`: the paper's Fig. 1 on Diabetes, in seconds and without a download."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.nn.functional import mse_loss

from sepsa.paper import figures, methods, networks
from sepsa.paper.data import Dataset, load

METHODS = ("SepSA", "SGD", "NAG", "RMSprop", "Adam")
LEARNING_RATES = (1e-2, 1e-3, 1e-4)
TARGETS = ("standardized targets", "raw targets")
FIRST_SEED = 233  # the paper's

Results = dict[str, dict[float, dict[str, list[figures.Curve]]]]  # runs by targets, learning rate and method


def online(dataset: Dataset, method: str, lr: float, seed: int, targets: str = "raw targets") -> NDArray[np.float64]:
    """The test error before the first sample and after each, one pass over the shuffled training set.

    Errors are in the units of the data set's targets, also for a network that learns standardized targets.
    """
    torch.manual_seed(seed)
    model = networks.for_dataset(dataset)
    learner = methods.build(method, model, lr)
    order = torch.randperm(len(dataset.train_inputs))
    units = torch.zeros(1), torch.ones(1)
    if targets == "standardized targets":
        units = dataset.train_targets.mean(0), dataset.train_targets.std(0)
    learned = (dataset.train_targets - units[0]) / units[1]
    errors = np.full(len(order) + 1, np.nan)
    for k, i in enumerate(order.tolist()):
        errors[k] = test_error(model, dataset, units)
        if not np.isfinite(errors[k]):
            break  # diverged
        learner.learn(dataset.train_inputs[i : i + 1], learned[i : i + 1])
    else:
        errors[-1] = test_error(model, dataset, units)
    return errors


@torch.no_grad()
def test_error(model: torch.nn.Module, dataset: Dataset, units: tuple[Tensor, Tensor]) -> float:
    return mse_loss(model(dataset.test_inputs) * units[1] + units[0], dataset.test_targets).item()


def run(out: Path, seeds: int) -> None:
    """Train all methods, print a table of their final errors and draw their learning curves."""
    console = Console()
    dataset = load("diabetes")
    constant = dataset.train_targets.mean(0).expand_as(dataset.test_targets)
    baseline = mse_loss(constant, dataset.test_targets).item()
    start = time.perf_counter()
    results: Results = {kind: {lr: {} for lr in LEARNING_RATES} for kind in TARGETS}
    name, bar = TextColumn("{task.description:<40}"), BarColumn(bar_width=None)
    with Progress(name, bar, MofNCompleteColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=len(TARGETS) * len(LEARNING_RATES) * len(METHODS) * seeds)
        for kind, lr, method in itertools.product(TARGETS, LEARNING_RATES, METHODS):
            progress.update(task, description=f"{method}, {kind}, lr {lr:g}")
            runs = results[kind][lr][method] = []
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                errors = online(dataset, method, lr, seed, kind)
                runs.append(figures.Curve(np.arange(len(errors), dtype=np.float64), errors, bool(np.isnan(errors[-1]))))
                progress.advance(task)
        progress.update(task, description="done")
    console.print(summary(results, seeds))
    console.print(f"Predicting the mean target for everybody gives {baseline:,.0f}.", highlight=False)
    rows = [figures.PanelRow(f"test error, {kind}", "samples seen", "mse", results[kind]) for kind in TARGETS]
    figure = figures.curve_grid(rows, LEARNING_RATES)
    figure.suptitle(
        f"Diabetes, online, one pass over {len(dataset.train_inputs)} samples: mean squared error on the test rows, "
        f"median and range of {seeds} runs\n(× marks where a run diverges; curves above a panel are cut at its edge)",
        fontsize=11,
    )
    figures.save(figure, out)
    console.print(f"{time.perf_counter() - start:.0f} s; the figure is in [bold]{out}[/bold]", highlight=False)


def summary(results: Results, seeds: int) -> Table:
    """The final test errors, a row for each kind of targets and method, a column for each learning rate."""
    table = Table("targets", "method", title=f"Diabetes, test error after one pass, median of {seeds}")
    for lr in LEARNING_RATES:
        table.add_column(f"lr {lr:g}", justify="right")
    for kind, rates in results.items():
        final = [{name: figures.last(curves, "mse") for name, curves in runs.items()} for runs in rates.values()]
        for name in METHODS:
            cells = [f"{column[name]:,.0f}" if np.isfinite(column[name]) else "diverged" for column in final]
            best = [column[name] == min(column.values()) for column in final]
            marked = (f"[bold]{cell}[/bold]" if b else cell for cell, b in zip(cells, best, strict=True))
            table.add_row(kind.partition(" ")[0], name, *marked, end_section=name == METHODS[-1])
    return table
