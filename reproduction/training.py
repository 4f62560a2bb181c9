"""The training loop of the experiments: a run's specification in, its errors and curves out.

The seed of a run decides all randomness in it, so runs give the same numbers in any order and in any process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from reproduction import networks
from reproduction.augmentation import Augmentation
from reproduction.data import REGRESSIONS, Dataset
from reproduction.experiments import FIGURES, RunSpec
from reproduction.methods import CROSS_ENTROPY, NEWTON, Trainer, build
from sepsa.heads import NotFinite

_ONLINE_POINTS = 150  # at most, in the curve of a regression
_ONLINE_STRIDE = 500  # iterations between the points in the curve of a classification
_EVALUATION_ROWS = 1000  # in one forward pass
# Training images, test images and iterations between points of a quick run.
QUICK_TRAIN, _QUICK_TEST, _QUICK_STRIDE = 640, 500, 160
_ORDER_STREAM = 1_000_000_007  # added to the seed, so that the order does not repeat the weights' random numbers
_WARM_EPOCHS = 8  # with halved rows for the head, each of which may need another kernel
_WARM: set[tuple[str, ...]] = set()  # the kinds of runs whose steps have been compiled in this process
_RATES = 200  # learning rates of a linear schedule: a CUDA graph is told its rate before each part of the run


@dataclass
class Outcome:
    """The results of a run: mean squared errors, or accuracies in percent; None from where it diverged.

    `seconds` is training alone, without evaluation. `x` counts iterations online and epochs in mini-batches.
    """

    seconds: float = 0.0
    train: float | None = None
    test: float | None = None
    diverged: bool = False
    x: list[int] = field(default_factory=list)
    train_curve: list[float | None] = field(default_factory=list)
    test_curve: list[float | None] = field(default_factory=list)
    note: str = ""


def advance(trainer: Trainer, inputs: Tensor, targets: Tensor, order: Tensor) -> None:
    """Train on batches in sequence: `order` (steps, batch) holds the rows of each, on the device of the data."""
    if trainer.step is None:
        trainer.step = trainer.capture(inputs[order[0]], targets[order[0]])
    trainer.step.run(inputs, targets, order)


def train(run: RunSpec, dataset: Dataset, device: torch.device | str = "cpu") -> Outcome:
    """Train from the run's seed to its end, or until it diverges."""
    device = torch.device(device)
    if run.quick and dataset.task == "classification":
        dataset = _few_images(dataset)
    dataset = _moved(dataset, device)
    inputs, targets = dataset.train_inputs, dataset.train_targets
    if run.smoothing:
        targets = (1 - run.smoothing) * targets + run.smoothing / targets.shape[1]
    _warm_up(run, dataset, targets, device)
    trainer = _build(run, dataset, device)
    augmentation = None if run.padding is None else Augmentation(dataset, run.seed)
    outcome = Outcome(note=dataset.note)

    def score(inputs: Tensor, targets: Tensor) -> float | None:
        if outcome.diverged:
            return None
        value = evaluate(trainer, inputs, targets, dataset.task)
        outcome.diverged = not math.isfinite(value)
        return None if outcome.diverged else value

    generator = torch.Generator().manual_seed(run.seed + _ORDER_STREAM)
    total, done = run.epochs * math.ceil(len(inputs) / run.batch), 0
    for x, orders in _orders(run, len(inputs), generator):
        if augmentation is not None and orders:
            inputs = augmentation.draw()
        if not outcome.diverged:
            trainer.begin_epoch(x)
            for order in _constant_rate_parts(run, orders, total):
                if run.schedule == "linear":
                    trainer.set_rate(run.lr * (1 - done / total))
                seconds, outcome.diverged = _timed(trainer, inputs, targets, order.to(device))
                outcome.seconds += seconds
                done += len(order)
                if outcome.diverged:
                    break
        if run.experiment in FIGURES:
            outcome.x.append(x)
            outcome.test_curve.append(score(dataset.test_inputs, dataset.test_targets))
            if run.mode == "mini-batch":
                outcome.train_curve.append(score(dataset.train_inputs, dataset.train_targets))
    # Training accuracy is measured on augmented images, as it seems to be in the paper.
    seen = dataset.train_inputs if augmentation is None else augmentation.draw()
    outcome.train = score(seen, dataset.train_targets)
    outcome.test = score(dataset.test_inputs, dataset.test_targets)
    return replace(outcome, train=None) if outcome.diverged else outcome


def _warm_up(run: RunSpec, dataset: Dataset, targets: Tensor, device: torch.device) -> None:
    """Let a trainer of its own take a few steps of the first such run of a process: nothing is compiled later."""
    kind = run.method, run.dataset, run.mode, str(run.batch), str(device)
    if kind in _WARM:
        return
    _WARM.add(kind)
    trainer, inputs = _build(run, dataset, device), dataset.train_inputs
    epochs = islice(_orders(run, len(inputs), torch.Generator()), _WARM_EPOCHS)
    with suppress(NotFinite):
        for x, orders in epochs:
            trainer.begin_epoch(x)
            for order in orders:
                advance(trainer, inputs, targets, order[:1].to(device))


def _build(run: RunSpec, dataset: Dataset, device: torch.device) -> Trainer:
    torch.manual_seed(run.seed)
    # Initialized on the CPU and then moved: the weights are the same on every device.
    model = networks.for_dataset(dataset, default_init=run.method in (CROSS_ENTROPY, NEWTON)).to(device)
    return build(
        run.method,
        model,
        run.lr,
        body="RMSprop" if run.mode == "mini-batch" and dataset.task == "regression" else "Adam",
        ridge=1.0 if run.ridge is None else run.ridge,
        forgetting=1.0 if run.forgetting is None else run.forgetting,
        memory=0 if run.mode == "online" and dataset.task == "classification" else 5,
        halving=run.mode == "mini-batch" and run.schedule == "constant",
        train_targets=dataset.train_targets,
        samples_per_epoch=len(dataset.train_targets) if run.mode == "mini-batch" else None,
    )


def _orders(run: RunSpec, n: int, generator: torch.Generator) -> Iterator[tuple[int, list[Tensor]]]:
    """For each point of the curve its x, and the batches since the last point as orders (steps, batch) of rows."""
    if run.mode == "mini-batch":
        for epoch in range(1, run.epochs + 1):
            rows, ragged = torch.randperm(n, generator=generator), n % run.batch
            orders = [rows[: n - ragged].view(-1, run.batch), rows[n - ragged :][None]]
            yield epoch, [order for order in orders if order.numel()]
        return
    rows = torch.randperm(n, generator=generator)[:, None]
    if run.experiment not in FIGURES:
        stride = n
    elif run.dataset in REGRESSIONS:
        stride = math.ceil(n / _ONLINE_POINTS)
    else:
        stride = _QUICK_STRIDE if run.quick else _ONLINE_STRIDE
    yield 0, []
    for start in range(0, n, stride):
        yield min(start + stride, n), [rows[start : start + stride]]


def _constant_rate_parts(run: RunSpec, orders: list[Tensor], total: int) -> Iterator[Tensor]:
    """The orders, cut into parts that have one learning rate each."""
    for order in orders:
        yield from (order,) if run.schedule == "constant" else torch.split(order, math.ceil(total / _RATES))


def _timed(trainer: Trainer, inputs: Tensor, targets: Tensor, order: Tensor) -> tuple[float, bool]:
    """Train on the batches of `order`; returns the seconds it took, and whether the model diverged."""
    trainer.model.train()
    start = time.perf_counter()
    try:
        advance(trainer, inputs, targets, order)
    except NotFinite:
        return time.perf_counter() - start, True
    finite = trainer.is_finite()  # waits for the device, so that the time below includes all of its work
    return time.perf_counter() - start, not finite


@torch.no_grad()
def evaluate(trainer: Trainer, inputs: Tensor, targets: Tensor, task: str) -> float:
    """The mean squared error, or the accuracy in percent, over all rows, with the model in evaluation mode."""
    trainer.model.eval()
    outputs = torch.cat([trainer.predict(rows) for rows in torch.split(inputs, _EVALUATION_ROWS)])
    if task == "regression":
        return mse_loss(outputs.double(), targets.double()).item()
    return 100 * (outputs.argmax(1) == targets.argmax(1)).double().mean().item()


def _few_images(dataset: Dataset) -> Dataset:
    # Evenly spaced, because some copies of the set are sorted by class.
    train = slice(None, None, max(1, len(dataset.train_inputs) // QUICK_TRAIN))
    test = slice(None, None, max(1, len(dataset.test_inputs) // _QUICK_TEST))
    return replace(
        dataset,
        train_inputs=dataset.train_inputs[train][:QUICK_TRAIN],
        train_targets=dataset.train_targets[train][:QUICK_TRAIN],
        test_inputs=dataset.test_inputs[test][:_QUICK_TEST],
        test_targets=dataset.test_targets[test][:_QUICK_TEST],
    )


def _moved(dataset: Dataset, device: torch.device) -> Dataset:
    tensors = {f.name: value for f in fields(dataset) if isinstance(value := getattr(dataset, f.name), Tensor)}
    return replace(dataset, **{name: tensor.to(device) for name, tensor in tensors.items()})  # type: ignore[arg-type]
