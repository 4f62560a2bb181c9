"""`sepsa demo`: the paper's Fig. 1 on Diabetes, in seconds and without a download."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sepsa.capture import first_order_step
from sepsa.heads import RLS
from sepsa.optimizer import SepSA

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
# Okabe and Ito's colours, which colour-blind readers tell apart; line styles differ as well.
STYLES: dict[str, dict[str, Any]] = {
    "SepSA": {"color": "#D55E00", "linestyle": "-", "linewidth": 2.2, "zorder": 5},
    "SGD": {"color": "#000000", "linestyle": ":"},
    "NAG": {"color": "#56B4E9", "linestyle": (0, (3, 1, 1, 1))},
    "RMSprop": {"color": "#009E73", "linestyle": "-."},
    "Adam": {"color": "#0072B2", "linestyle": "--"},
}

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


def run(out: Path, seeds: int) -> None:
    """Train all methods, print a table of their final errors and draw their learning curves."""
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
    save(draw(results, seeds), out)
    console.print(f"{time.perf_counter() - start:.0f} s; the figure is in [bold]{out}[/bold]", highlight=False)


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


# ---------------------------------------------------------------------- the figure


def draw(results: Results, seeds: int) -> Figure:
    """A row of panels for each kind of targets, a panel for each learning rate."""
    figure = Figure(figsize=(max(12.0, 3.0 * len(LEARNING_RATES)), 6.7), layout="constrained")
    axes = figure.subplots(len(TARGETS), len(LEARNING_RATES), squeeze=False, sharex=True, sharey="row")
    for line, kind in zip(axes, TARGETS, strict=True):
        of_kind = np.concatenate([runs for of, runs in results.items() if of[0] == kind])
        line[0].set(ylabel=f"test error, {kind}", yscale="log", ylim=limits(of_kind))
        line[0].yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        line[0].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        line[0].yaxis.set_minor_locator(NullLocator())
        for axis, lr in zip(line, LEARNING_RATES, strict=True):
            panel(axis, {method: results[kind, lr, method] for method in METHODS})
    for top, bottom, lr in zip(axes[0], axes[-1], LEARNING_RATES, strict=True):
        top.set_title(f"learning rate {lr:g}", fontsize=11.5, fontweight="bold", pad=19)
        bottom.set_xlabel("samples seen")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, handlelength=3)
    samples = of_kind.shape[1] - 1
    figure.suptitle(
        f"Diabetes, online, one pass over {samples} samples: mean squared error on the test rows, "
        f"median and range of {seeds} runs\n(× marks where a run diverges; curves above a panel are cut at its edge)",
        fontsize=11,
    )
    return figure


def limits(runs: Runs) -> tuple[float, float]:
    """The ends of an axis on which every run that does not diverge is visible."""
    stable = runs[np.isfinite(runs[:, -1])]
    return stable.min() / 1.3, min(np.quantile(stable, 0.99) * 1.4, 30 * np.median(runs[:, 0]))


def panel(axis: Axes, methods: dict[str, Runs]) -> None:
    """Draw the runs of each method, with a cross where a diverging run leaves the panel and a note that names it."""
    top, diverged, exits = axis.get_ylim()[1], [], []
    for name, runs in methods.items():
        x = np.arange(runs.shape[1])
        low, middle, high = (quantile(runs, share) for share in (0.0, 0.5, 1.0))
        axis.plot(x, middle, label=name, **STYLES[name])
        axis.fill_between(x, low, np.minimum(high, 10 * top), color=STYLES[name]["color"], alpha=0.12, lw=0)
        gone = runs[~np.isfinite(runs[:, -1])]
        if len(gone):
            diverged.append(name if len(gone) == len(runs) == 1 else f"{name} ({len(gone)} of {len(runs)})")
        exits += [(np.flatnonzero(np.append(True, run <= top))[-1], name) for run in gone]
    place = -np.inf
    for end, name in sorted(exits):
        place = max(end, place + 0.035 * len(x))  # side by side, where several leave at once
        axis.plot([place], [top], "x", clip_on=False, ms=7, mew=2, zorder=6, color=STYLES[name]["color"])
    axis.set_xlim(0, len(x) - 1)
    axis.grid(alpha=0.3)
    if diverged:
        at: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center"}
        axis.annotate(f"× diverged: {', '.join(diverged)}", (0.5, 1.0), xytext=(0, 7), fontsize=8.5, **at)


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format of the file's suffix; equal figures give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without these matplotlib writes the time, its version and random ids.
    metadata = {".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}}.get(path.suffix)
    with matplotlib.rc_context({"svg.hashsalt": "sepsa"}):
        figure.savefig(path, dpi=150, metadata=metadata)
