"""`sepsa demo`: the runs of the paper's Fig. 1 on Diabetes, in seconds and without a download."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from sepsa.heads import RLS
from sepsa.shell.options import DemoOptions
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
    errors = np.full(len(order) + 1, np.nan)
    for k, i in enumerate([None, *order.tolist()]):
        if i is not None:
            learn(rows.train_inputs[i : i + 1], learned[i : i + 1])
        with torch.no_grad():
            errors[k] = mse_loss(model(rows.test_inputs) * std + mean, rows.test_targets).item()
        if not np.isfinite(errors[k]):
            break  # diverged
    return errors


def run(options: DemoOptions) -> int:
    """Train all methods, and print the median of their final errors."""
    rows = diabetes()
    print(f"Diabetes, test error after one pass, median of {options.seeds}")
    print(f"{'targets':<14}{'method':<9}", *(f"{f'lr {lr:g}':>10}" for lr in LEARNING_RATES))
    for kind, method in itertools.product(TARGETS, METHODS):
        cells = []
        for lr in LEARNING_RATES:
            last = [online(rows, method, lr, FIRST_SEED + i, kind)[-1] for i in range(options.seeds)]
            error = np.median(np.nan_to_num(last, nan=np.inf, posinf=np.inf))
            cells.append(f"{error:,.0f}" if np.isfinite(error) else "diverged")
        print(f"{kind.partition(' ')[0]:<14}{method:<9}", *(f"{cell:>10}" for cell in cells), flush=True)
    mean = mse_loss(rows.train_targets.mean(0).expand_as(rows.test_targets), rows.test_targets).item()
    print(f"Predicting the mean target for everybody gives {mean:,.0f}.")
    return 0
