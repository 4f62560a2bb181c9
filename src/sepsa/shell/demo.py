"""`sepsa demo`: the runs of the paper's Fig. 1 on Diabetes, in seconds and without a download."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sepsa.heads import RLS
from sepsa.training.capture import first_order_step
from sepsa.training.optimizer import SepSA

# The optimizer and its options beside lr and weight decay; SepSA trains its body with Adam.
FIRST_ORDER: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "NAG": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
}
METHODS = ("SepSA", *FIRST_ORDER)
LEARNING_RATES = (1e-2, 1e-3, 1e-4)
TARGETS = ("standardized targets", "raw targets")
FIRST_SEED, HIDDEN, WEIGHT_DECAY = 233, 50, 1e-5  # the paper's

Runs = NDArray[np.float64]  # (seeds, samples + 1) test errors, NaN after the run diverged
Results = dict[tuple[str, float, str], Runs]  # by targets, learning rate and method


class Rows(NamedTuple):
    """Inputs (n, 10) and targets (n, 1) of Diabetes, float32."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def diabetes() -> Rows:
    """Divide Diabetes as the paper does; the inputs are standardized by the training rows."""
    inputs, targets = load_diabetes(return_X_y=True)
    x, x_test, y, y_test = train_test_split(inputs, targets[:, None], test_size=0.2, random_state=123)
    x, _, y, _ = train_test_split(x, y, test_size=0.2, random_state=123)  # the paper leaves a fifth unused
    standardize = StandardScaler().fit(x).transform
    return Rows(*(torch.tensor(part, dtype=torch.float32) for part in (standardize(x), y, standardize(x_test), y_test)))


def network(inputs: int) -> nn.Sequential:
    """The paper's network for one target, and its initial weights."""
    body, head = nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, 1)
    for layer in (body, head):
        nn.init.kaiming_uniform_(layer.weight, mode="fan_in", nonlinearity="relu")
        nn.init.constant_(layer.bias, 0.01)
    return nn.Sequential(body, nn.ReLU(), head)


def learner(method: str, model: nn.Module, lr: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The function that trains the model on one batch."""
    if method == "SepSA":
        solver = RLS(bias_ridge="ridge")
        return SepSA(model, torch.optim.Adam, solver=solver, lr=lr, weight_decay=WEIGHT_DECAY).learn
    base, options = FIRST_ORDER[method]
    optimizer = base(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY, **options)
    return lambda inputs, targets: first_order_step(model, optimizer, mse_loss, inputs, targets)


def online(rows: Rows, method: str, lr: float, seed: int, targets: str = "raw targets") -> NDArray[np.float64]:
    """The test error before the first sample and after each, one pass over the shuffled training rows.

    Errors are in the units of the targets, also for a network that learns standardized targets.
    """
    torch.manual_seed(seed)
    model = network(rows.train_inputs.shape[1])
    learn = learner(method, model, lr)
    order = torch.randperm(len(rows.train_inputs))
    mean, std = torch.zeros(1), torch.ones(1)
    if targets == "standardized targets":
        mean, std = rows.train_targets.mean(0), rows.train_targets.std(0)
    learned = (rows.train_targets - mean) / std

    @torch.no_grad()
    def test_error() -> float:
        return mse_loss(model(rows.test_inputs) * std + mean, rows.test_targets).item()

    errors = np.full(len(order) + 1, np.nan)
    for k, i in enumerate(order.tolist()):
        errors[k] = test_error()
        if not np.isfinite(errors[k]):
            break  # diverged
        learn(rows.train_inputs[i : i + 1], learned[i : i + 1])
    else:
        errors[-1] = test_error()
    return errors


def run(seeds: int) -> Results:
    """Train all methods, and print a table of their final errors."""
    console = Console()
    rows = diabetes()
    baseline = mse_loss(rows.train_targets.mean(0).expand_as(rows.test_targets), rows.test_targets).item()
    start = time.perf_counter()
    results: Results = {}
    name, bar = TextColumn("{task.description:<40}"), BarColumn(bar_width=None)
    with Progress(name, bar, MofNCompleteColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=len(TARGETS) * len(LEARNING_RATES) * len(METHODS) * seeds)
        for kind, lr, method in itertools.product(TARGETS, LEARNING_RATES, METHODS):
            progress.update(task, description=f"{method}, {kind}, lr {lr:g}")
            runs = []
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                runs.append(online(rows, method, lr, seed, kind))
                progress.advance(task)
            results[kind, lr, method] = np.array(runs)
        progress.update(task, description="done")
    console.print(summary(results, seeds))
    console.print(f"Predicting the mean target for everybody gives {baseline:,.0f}.", highlight=False)
    console.print(f"{time.perf_counter() - start:.0f} s", highlight=False)
    return results


def quantile(runs: Runs, share: float) -> NDArray[np.float64]:
    """A quantile over the seeds of each column; a run that diverged is worse than any other."""
    worst = np.where(np.isfinite(runs), runs, np.inf)
    return np.asarray(np.quantile(worst, share, axis=0, method="nearest"))


def summary(results: Results, seeds: int) -> Table:
    """The final test errors, a row for each kind of targets and method, a column for each learning rate."""
    table = Table("targets", "method", title=f"Diabetes, test error after one pass, median of {seeds}")
    for lr in LEARNING_RATES:
        table.add_column(f"lr {lr:g}", justify="right")
    final = {of: float(quantile(runs[:, -1:], 0.5)[0]) for of, runs in results.items()}
    for kind, name in itertools.product(TARGETS, METHODS):
        cells = []
        for lr in LEARNING_RATES:
            error = final[kind, lr, name]
            cell = f"{error:,.0f}" if np.isfinite(error) else "diverged"
            cells.append(f"[bold]{cell}[/bold]" if error == min(final[kind, lr, of] for of in METHODS) else cell)
        table.add_row(kind.partition(" ")[0], name, *cells, end_section=name == METHODS[-1])
    return table
