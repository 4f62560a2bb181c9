"""The paper's experiments: what is run, with which settings, and the one loop that runs it.

A `Run` says everything that decides a result. Its seed alone decides the chance in it, so runs may come in any order,
in any process, and give the same numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from sepsa.heads import NotFinite
from sepsa.paper import networks
from sepsa.paper.augmentation import Augmentation, Padding
from sepsa.paper.data import NAMES as DATASETS
from sepsa.paper.data import Dataset
from sepsa.paper.methods import (
    CROSS_ENTROPY,
    NEWTON,
    PAPER,
    PUBLISHED,
    SELF_TUNING,
    STANDARDIZED,
    TUNED,
    VARIANTS,
    Learner,
    applies,
    build,
    head_settings,
    image_settings,
)
from sepsa.paper.methods import NAMES as METHODS

Mode = Literal["online", "mini-batch"]

# "augmented" is the paper's Table III with images cropped and flipped at random; "images" is SepSA and Adam on images
# as one would use them, at a falling rate, with settings chosen on images held out; "images-augmented" is both.
# "variants" is MNIST of "table3" and CIFAR-10 of "augmented" with one thing more changed.
EXPERIMENTS = ("fig1", "fig2", "fig3", "fig4", "table3", "augmented", "variants", "images", "images-augmented")
_DRAWN = ("fig1", "fig2", "fig3", "fig4")  # the experiments that keep curves
REGRESSIONS, CLASSIFICATIONS = ("energy", "diabetes"), ("mnist", "cifar10")
LEARNING_RATES = (1e-2, 1e-3, 1e-4)
WIDE_LEARNING_RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)

# The seeds of each experiment, of which the paper takes the first so many.
FIGURE_SEEDS = tuple(range(233, 333))
REGRESSION_SEEDS = tuple(range(200, 300))
CLASSIFICATION_SEEDS = (699, 822, 644, 179, 538, 237, 820, 871, 496, 565)
_SLIMTRAIN_SEEDS = 3  # of the classifications: its SVD a step makes these the longest runs by far
_NEWTON_SEEDS = 5  # of the classifications, where a step costs three times as much as the others'

_ONLINE_POINTS = 150  # at most, in the curve of a regression
_ONLINE_STRIDE = 500  # iterations between the points in the curve of a classification
_EVALUATION_ROWS = 1000  # in one forward pass
# A small version: so many images to train on, to test on, and iterations between points.
QUICK_TRAIN, _QUICK_TEST, _QUICK_STRIDE = 640, 500, 160
_ORDER_STREAM = 1_000_000_007  # keeps the order's chance apart from the weights', which have the same seed
_RATES = 200  # that a falling rate takes in a whole training: a graph is told its rate before so many stretches


@dataclass(frozen=True)
class Run:
    """One training, specified whole. `ridge` and `forgetting` are SepSA's, None for the others.

    `padding` is what random crops and flips fill the border with, None for images as they are. A `schedule` of "linear"
    lets the learning rate fall to zero. `smoothing` is the share of a label that goes to all classes alike.
    """

    experiment: str
    dataset: str
    mode: Mode
    method: str
    lr: float
    seed: int
    epochs: int
    batch: int
    ridge: float | None = None
    forgetting: float | None = None
    quick: bool = False
    padding: Padding | None = None
    schedule: Literal["constant", "linear"] = "constant"
    smoothing: float = 0.0


@dataclass
class Outcome:
    """What a run gave: mean squared errors, or accuracies in percent; None from where it diverged.

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


def metric(dataset: str) -> str:
    return "mse" if dataset in REGRESSIONS else "accuracy"


# ---------------------------------------------------------------------- what is run


def plan(
    experiment: str,
    datasets: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    quick: bool = False,
) -> list[Run]:
    """The runs of an experiment; without the other arguments those the paper's figure or table needs.

    `seeds` is a number, for the first so many of the experiment's own, or the seeds themselves. `quick` makes the same
    experiment smaller: fewer seeds, epochs, images and learning rates.
    """
    _known("experiment", [experiment], EXPERIMENTS)
    _known("dataset", datasets or (), DATASETS)
    _known("method", methods or (), METHODS)
    runs = []
    for dataset in DATASETS if datasets is None else datasets:
        for mode in _modes(experiment, dataset):
            for method in _default_methods(experiment, dataset) if methods is None else methods:
                if applies(method, "regression" if dataset in REGRESSIONS else "classification"):
                    runs += [
                        _run(experiment, dataset, mode, method, lr, seed, quick)
                        for lr in _learning_rates(experiment, dataset, quick)
                        for seed in _seeds(experiment, dataset, method, seeds, quick)
                    ]
    return runs


def _known(what: str, given: Sequence[str], valid: Sequence[str]) -> None:
    for name in given:
        if name not in valid:
            raise ValueError(f"{what} must be one of {', '.join(map(repr, valid))}, got {name!r}")


def _modes(experiment: str, dataset: str) -> tuple[Mode, ...]:
    if experiment == "table3":
        return ("online", "mini-batch")
    if experiment in ("augmented", "variants", "images", "images-augmented"):
        images = CLASSIFICATIONS if experiment in ("variants", "images") else ("cifar10",)
        return ("online", "mini-batch") if dataset in images else ()
    if experiment == "fig1":
        return ("online",)
    here = {"fig2": REGRESSIONS, "fig3": CLASSIFICATIONS, "fig4": ("energy",)}[experiment]
    return ("mini-batch",) if dataset in here else ()


def _default_methods(experiment: str, dataset: str) -> tuple[str, ...]:
    if experiment == "augmented":
        return ("SepSA", "slimTrain", "Adam")
    if experiment == "variants":
        return VARIANTS if dataset == "cifar10" else (PUBLISHED,)
    if experiment in ("images", "images-augmented"):
        return (TUNED, CROSS_ENTROPY, NEWTON)
    if experiment != "table3":
        return PAPER
    if dataset in REGRESSIONS:
        return (*PAPER, TUNED, SELF_TUNING, STANDARDIZED)
    return ("SepSA", "slimTrain", "Adam", TUNED, CROSS_ENTROPY)


def _learning_rates(experiment: str, dataset: str, quick: bool) -> tuple[float, ...]:
    if experiment not in _DRAWN or (quick and dataset in CLASSIFICATIONS):
        return (1e-3,)
    return WIDE_LEARNING_RATES if experiment == "fig4" else LEARNING_RATES


def _seeds(experiment: str, dataset: str, method: str, seeds: int | Sequence[int] | None, quick: bool) -> Sequence[int]:
    if seeds is not None and not isinstance(seeds, int):
        return seeds
    if experiment in _DRAWN:
        own, usual = FIGURE_SEEDS, 1
    elif dataset in REGRESSIONS:
        own, usual = REGRESSION_SEEDS, len(REGRESSION_SEEDS)
    else:
        own = CLASSIFICATION_SEEDS
        usual = {"slimTrain": _SLIMTRAIN_SEEDS, PUBLISHED: _SLIMTRAIN_SEEDS, NEWTON: _NEWTON_SEEDS}.get(
            method, len(own)
        )
    few = 2 if dataset in REGRESSIONS else 1
    count = (min(usual, few) if quick else usual) if seeds is None else seeds
    if not 1 <= count <= len(own):
        raise ValueError(
            f"seeds must be a number of 1 to {len(own)} for {experiment} on {dataset}, got {count}; "
            f"the seed {count} itself is [{count}], or {count}-{count} on the command line"
        )
    return own[:count]


def _run(experiment: str, dataset: str, mode: Mode, method: str, lr: float, seed: int, quick: bool) -> Run:
    regression = dataset in REGRESSIONS
    if mode == "online":
        epochs, batch = 1, 1
    else:
        epochs, batch = (5 if quick else 50, 32) if regression else (2 if quick else 20, 64)
    ridge, forgetting = head_settings(method, dataset, mode)
    run = Run(experiment, dataset, mode, method, lr, seed, epochs, batch, ridge, forgetting, quick)
    if dataset == "cifar10" and experiment in ("augmented", "variants", "images-augmented"):
        run = replace(run, padding="black")
    if experiment in ("images", "images-augmented"):
        run = replace(run, schedule="linear", **image_settings(method, experiment, dataset, mode))
    return run


# ---------------------------------------------------------------------- the one loop


def advance(learner: Learner, inputs: Tensor, targets: Tensor, order: Tensor) -> None:
    """Learn batches one after the other: `order` (steps, batch) holds the rows of each, on the device of the data."""
    if learner.step is None:
        learner.step = learner.capture(inputs[order[0]], targets[order[0]])
    learner.step.run(inputs, targets, order)


def train(run: Run, dataset: Dataset, device: torch.device | str = "cpu") -> Outcome:
    """Train from the run's seed to its end, or to where it diverges."""
    device = torch.device(device)
    if run.quick and dataset.task == "classification":
        dataset = _few_images(dataset)
    dataset = _moved(dataset, device)
    learner = _learner(run, dataset, device)
    lesson = replace(dataset, train_targets=_smoothed(dataset.train_targets, run.smoothing))
    augmentation = None if run.padding is None else Augmentation(dataset, run.padding, run.seed)
    outcome = Outcome(note=dataset.note)

    def score(inputs: Tensor, targets: Tensor) -> float | None:
        if outcome.diverged:
            return None
        value = evaluate(learner, inputs, targets, dataset.task)
        outcome.diverged = not math.isfinite(value)
        return None if outcome.diverged else value

    generator = torch.Generator().manual_seed(run.seed + _ORDER_STREAM)
    total, done = run.epochs * math.ceil(len(dataset.train_inputs) / run.batch), 0
    for x, orders in _lessons(run, len(dataset.train_inputs), generator):
        if augmentation is not None and orders:
            lesson = replace(lesson, train_inputs=augmentation.draw())
        if not outcome.diverged:
            learner.begin_epoch(x)
            for order in _stretches(run, orders, total):
                if run.schedule == "linear":
                    learner.set_rate(run.lr * (1 - done / total))
                seconds, outcome.diverged = _teach(learner, lesson, order.to(device))
                outcome.seconds += seconds
                done += len(order)
                if outcome.diverged:
                    break
        if run.experiment in _DRAWN:
            outcome.x.append(x)
            outcome.test_curve.append(score(dataset.test_inputs, dataset.test_targets))
            if run.mode == "mini-batch":
                outcome.train_curve.append(score(dataset.train_inputs, dataset.train_targets))
    # As the paper seems to: training accuracy is that on images drawn anew where they are drawn.
    seen = dataset.train_inputs if augmentation is None else augmentation.draw()
    outcome.train = score(seen, dataset.train_targets)
    outcome.test = score(dataset.test_inputs, dataset.test_targets)
    return replace(outcome, train=None) if outcome.diverged else outcome


def _learner(run: Run, dataset: Dataset, device: torch.device) -> Learner:
    torch.manual_seed(run.seed)
    # Built on the CPU and then moved: the weights are the same on every device.
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
    )


def _lessons(run: Run, n: int, generator: torch.Generator) -> Iterator[tuple[int, list[Tensor]]]:
    """Each point of the curve, and the batches learned since the last, as orders (steps, batch) of rows."""
    if run.mode == "mini-batch":
        for epoch in range(1, run.epochs + 1):
            rows, ragged = torch.randperm(n, generator=generator), n % run.batch
            orders = [rows[: n - ragged].view(-1, run.batch), rows[n - ragged :][None]]
            yield epoch, [order for order in orders if order.numel()]
        return
    rows = torch.randperm(n, generator=generator)[:, None]
    if run.experiment not in _DRAWN:
        stride = n
    elif run.dataset in REGRESSIONS:
        stride = math.ceil(n / _ONLINE_POINTS)
    else:
        stride = _QUICK_STRIDE if run.quick else _ONLINE_STRIDE
    yield 0, []
    for start in range(0, n, stride):
        yield min(start + stride, n), [rows[start : start + stride]]


def _stretches(run: Run, orders: list[Tensor], total: int) -> Iterator[Tensor]:
    """The batches in stretches of one learning rate each."""
    for order in orders:
        yield from (order,) if run.schedule == "constant" else torch.split(order, math.ceil(total / _RATES))


def _smoothed(targets: Tensor, smoothing: float) -> Tensor:
    return targets if smoothing == 0 else (1 - smoothing) * targets + smoothing / targets.shape[1]


def _teach(learner: Learner, dataset: Dataset, order: Tensor) -> tuple[float, bool]:
    """Seconds spent, and whether the learner diverged."""
    learner.model.train()
    start = time.perf_counter()
    try:
        advance(learner, dataset.train_inputs, dataset.train_targets, order)
    except NotFinite:
        return time.perf_counter() - start, True
    finite = learner.is_finite()  # reads from the device, so the time below is that of finished work
    return time.perf_counter() - start, not finite


@torch.no_grad()
def evaluate(learner: Learner, inputs: Tensor, targets: Tensor, task: str) -> float:
    """The mean squared error, or the accuracy in percent, over all rows, with batch normalization at rest."""
    learner.model.eval()
    outputs = torch.cat([learner.predict(rows) for rows in torch.split(inputs, _EVALUATION_ROWS)])
    if task == "regression":
        return mse_loss(outputs.double(), targets.double()).item()
    return 100 * (outputs.argmax(1) == targets.argmax(1)).double().mean().item()


def _few_images(dataset: Dataset) -> Dataset:
    # From all over the set, because some copies of it are sorted by class.
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
