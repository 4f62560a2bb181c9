"""`sepsa demo`: the paper's Fig. 1 on Diabetes, in seconds and without a download."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.nn.functional import mse_loss

from sepsa.paper import figures, methods, networks
from sepsa.paper.data import Dataset, load

METHODS = ("SepSA", "SGD", "NAG", "RMSprop", "Adam")
LEARNING_RATES = (1e-2, 1e-3, 1e-4)
FIRST_SEED = 233  # the paper's


def online(dataset: Dataset, method: str, lr: float, seed: int) -> NDArray[np.float64]:
    """The test error before the first sample and after each, one pass over the shuffled training set."""
    torch.manual_seed(seed)
    model = networks.for_dataset(dataset)
    learner = methods.build(method, model, lr)
    order = torch.randperm(len(dataset.train_inputs))
    errors = np.full(len(order) + 1, np.nan)
    for k, i in enumerate(order.tolist()):
        errors[k] = test_error(model, dataset)
        if not np.isfinite(errors[k]):
            break  # diverged
        learner.learn(dataset.train_inputs[i : i + 1], dataset.train_targets[i : i + 1])
    else:
        errors[-1] = test_error(model, dataset)
    return errors


@torch.no_grad()
def test_error(model: torch.nn.Module, dataset: Dataset) -> float:
    return mse_loss(model(dataset.test_inputs), dataset.test_targets).item()


def run(out: Path, seeds: int) -> None:
    """Train all methods, print a table of their final errors and draw their learning curves."""
    console = Console()
    dataset = load("diabetes")
    constant = dataset.train_targets.mean(0).expand_as(dataset.test_targets)
    baseline = mse_loss(constant, dataset.test_targets).item()
    start = time.perf_counter()
    curves: dict[float, dict[str, NDArray[np.float64]]] = {lr: {} for lr in LEARNING_RATES}
    name, bar = TextColumn("{task.description:<18}"), BarColumn(bar_width=None)
    with Progress(name, bar, MofNCompleteColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=len(LEARNING_RATES) * len(METHODS) * seeds)
        for lr in LEARNING_RATES:
            for method in METHODS:
                progress.update(task, description=f"{method}, lr {lr:g}")
                runs = []
                for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                    runs.append(online(dataset, method, lr, seed))
                    progress.advance(task)
                curves[lr][method] = np.stack(runs)
        progress.update(task, description="done")
    console.print(summary(curves, seeds))
    console.print(f"Predicting the mean target for everybody gives {baseline:,.0f}.", highlight=False)
    figure = figures.learning_curves(
        curves,
        f"Diabetes, online, one pass over {len(dataset.train_inputs)} samples (median and range of {seeds} runs)",
        "samples seen",
        "test mean squared error",
        ylim=(2e3, 1e5),
    )
    figures.save(figure, out)
    console.print(f"{time.perf_counter() - start:.0f} s; the figure is in [bold]{out}[/bold]", highlight=False)


def summary(curves: dict[float, dict[str, NDArray[np.float64]]], seeds: int) -> Table:
    table = Table("method", title=f"Diabetes, test error after one pass, median of {seeds}")
    for lr in curves:
        table.add_column(f"lr {lr:g}", justify="right")
    final = {
        name: [np.median(np.where(np.isfinite(c := curves[lr][name][:, -1]), c, np.inf)) for lr in curves]
        for name in METHODS
    }
    best = [min(final[name][i] for name in METHODS) for i in range(len(curves))]
    for name in METHODS:
        cells = [f"{v:,.0f}" if np.isfinite(v) else "diverged" for v in final[name]]
        marked = (f"[bold]{c}[/bold]" if v == b else c for c, v, b in zip(cells, final[name], best, strict=True))
        table.add_row(name, *marked)
    return table
