"""The paper's experiments as one table of records, and the runs that each consists of.

To add an experiment, add a record to `EXPERIMENTS`: `python -m reproduction run` then runs it and `python -m
reproduction report` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from reproduction.augmentation import Padding
from reproduction.data import CLASSIFICATIONS, REGRESSIONS
from reproduction.data import NAMES as DATASETS
from reproduction.methods import (
    CROSS_ENTROPY,
    EVIDENCE,
    IMAGE_SETTINGS,
    NEWTON,
    PAPER,
    PUBLISHED,
    STANDARDIZED,
    TUNED,
    VARIANTS,
    applies,
    head_settings,
)
from reproduction.methods import NAMES as METHODS

Mode = Literal["online", "mini-batch"]
Schedule = Literal["constant", "linear"]
MODES: tuple[Mode, ...] = ("online", "mini-batch")
LEARNING_RATES = (1e-2, 1e-3, 1e-4)
WIDE_LEARNING_RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)

# The paper's seeds; an experiment with n seeds takes the first n.
FIGURE_SEEDS = tuple(range(233, 333))
REGRESSION_SEEDS = tuple(range(200, 300))
CLASSIFICATION_SEEDS = (699, 822, 644, 179, 538, 237, 820, 871, 496, 565)
# Fewer seeds on images: slimTrain computes an SVD in each step, and Newton's step takes three times as long as Adam's.
_SEED_COUNTS = {"slimTrain": 3, PUBLISHED: 3, NEWTON: 5}


@dataclass(frozen=True)
class Experiment:
    """The runs of one experiment, and how the report shows their results.

    `methods` lists the methods of each data set; data sets that it lacks are not run. An experiment with `splits` is a
    figure: its runs record learning curves, drawn for these splits, with a panel for each learning rate. The others
    are tables.

    `compared` says which row of the paper's Table III stands beside ours: that of the "same method", that of the method
    that ours is a "variant" of, or none. `title` heads the section of the report and `text` introduces it.
    `crops_and_flips` augments CIFAR-10 alone: a flipped digit is another sign.
    """

    heading: str
    title: str
    methods: Mapping[str, tuple[str, ...]]
    modes: tuple[Mode, ...] = MODES
    learning_rates: tuple[float, ...] = (1e-3,)
    splits: tuple[str, ...] = ()
    crops_and_flips: bool = False
    schedule: Schedule = "constant"
    compared: Literal["same method", "variant"] | None = None
    text: str = ""


EXPERIMENTS = {
    "fig1": Experiment(
        heading="Fig. 1",
        title="Fig. 1: online learning, one pass, one sample at a time",
        methods=dict.fromkeys(DATASETS, PAPER),
        modes=("online",),
        learning_rates=LEARNING_RATES,
        splits=("test",),
    ),
    "fig2": Experiment(
        heading="Fig. 2",
        title="Fig. 2: regression in mini-batches of 32",
        methods=dict.fromkeys(REGRESSIONS, PAPER),
        modes=("mini-batch",),
        learning_rates=LEARNING_RATES,
        splits=("train", "test"),
    ),
    "fig3": Experiment(
        heading="Fig. 3",
        title="Fig. 3: classification in mini-batches of 64",
        methods=dict.fromkeys(CLASSIFICATIONS, PAPER),
        modes=("mini-batch",),
        learning_rates=LEARNING_RATES,
        splits=("train", "test"),
    ),
    "fig4": Experiment(
        heading="Fig. 4",
        title="Fig. 4: Energy over a wide range of learning rates",
        methods={"energy": PAPER},
        modes=("mini-batch",),
        learning_rates=WIDE_LEARNING_RATES,
        splits=("train",),
    ),
    "table3": Experiment(
        heading="Table III",
        title="Table III, side by side",
        methods=dict.fromkeys(REGRESSIONS, (*PAPER, TUNED, EVIDENCE, STANDARDIZED))
        | dict.fromkeys(CLASSIFICATIONS, ("SepSA", "slimTrain", "Adam", TUNED, CROSS_ENTROPY)),
        compared="same method",
    ),
    "augmented": Experiment(
        heading="Table III with crops and flips",
        title="CIFAR-10 with random crops and flips",
        methods={"cifar10": ("SepSA", "slimTrain", "Adam")},
        crops_and_flips=True,
        compared="same method",
        text="In the paper’s CIFAR-10 rows training accuracy lies below test accuracy, as it does when training images "
        "are cropped and flipped at random and training accuracy is measured on such images too. The paper does not "
        "say so. These are the same settings with the usual augmentation: 32 pixels cut from the image padded by 4, "
        "and a flip with probability a half.",
    ),
    "variants": Experiment(
        heading="Table III with one setting changed",
        title="With one setting changed",
        methods={"mnist": (PUBLISHED,), "cifar10": VARIANTS},
        crops_and_flips=True,
        compared="variant",
        text="What the rows that still differ may have been made with: CIFAR-10 with crops and flips and without "
        "weight decay on what the first-order method trains, and slimTrain’s head in the arithmetic of its published "
        "code (on MNIST with images as they are).",
    ),
    # SepSA and Adam as one would use them: a falling learning rate, and settings chosen on images held out.
    "images": Experiment(
        heading="Images with tuned settings",
        title="Images with tuned settings",
        methods=dict.fromkeys(CLASSIFICATIONS, (TUNED, CROSS_ENTROPY, NEWTON)),
        schedule="linear",
    ),
    "images-augmented": Experiment(
        heading="Images with tuned settings, with crops and flips",
        title="Images with tuned settings",
        methods={"cifar10": (TUNED, CROSS_ENTROPY, NEWTON)},
        crops_and_flips=True,
        schedule="linear",
    ),
}
FIGURES = tuple(name for name, experiment in EXPERIMENTS.items() if experiment.splits)
TABLES = tuple(name for name, experiment in EXPERIMENTS.items() if not experiment.splits)


@dataclass(frozen=True)
class RunSpec:
    """The complete specification of one training run: equal specifications give equal results.

    `ridge` and `forgetting` are those of SepSA's head, None for other methods. `padding` fills the border of random
    crops; None trains on the images without crops and flips. A "linear" `schedule` lowers the learning rate to zero.
    `smoothing` is the label smoothing.
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
    schedule: Schedule = "constant"
    smoothing: float = 0.0


def plan(
    experiment: str,
    datasets: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    seeds: int | Sequence[int] | None = None,
    quick: bool = False,
) -> list[RunSpec]:
    """The runs of an experiment; without the other arguments those the paper's figure or table needs.

    `seeds` is a number n, for the first n seeds of the experiment, or the seeds themselves. `quick` makes the same
    experiment smaller: fewer seeds, epochs, images and learning rates.
    """
    _check_names("experiment", [experiment], tuple(EXPERIMENTS))
    _check_names("dataset", datasets or (), DATASETS)
    _check_names("method", methods or (), METHODS)
    record = EXPERIMENTS[experiment]
    return [
        _specify(experiment, dataset, mode, method, lr, seed, quick)
        for dataset in (DATASETS if datasets is None else datasets)
        if dataset in record.methods
        for mode in record.modes
        for method in (record.methods[dataset] if methods is None else methods)
        if applies(method, "regression" if dataset in REGRESSIONS else "classification")
        for lr in ((1e-3,) if quick and dataset in CLASSIFICATIONS else record.learning_rates)
        for seed in _seeds(experiment, dataset, method, seeds, quick)
    ]


def _check_names(what: str, given: Sequence[str], valid: Sequence[str]) -> None:
    for name in given:
        if name not in valid:
            raise ValueError(f"{what} must be one of {', '.join(map(repr, valid))}, got {name!r}")


def _seeds(experiment: str, dataset: str, method: str, seeds: int | Sequence[int] | None, quick: bool) -> Sequence[int]:
    if seeds is not None and not isinstance(seeds, int):
        return seeds
    if experiment in FIGURES:
        own, usual = FIGURE_SEEDS, 1
    elif dataset in REGRESSIONS:
        own, usual = REGRESSION_SEEDS, len(REGRESSION_SEEDS)
    else:
        own, usual = CLASSIFICATION_SEEDS, _SEED_COUNTS.get(method, len(CLASSIFICATION_SEEDS))
    few = 2 if dataset in REGRESSIONS else 1
    count = (min(usual, few) if quick else usual) if seeds is None else seeds
    if not 1 <= count <= len(own):
        raise ValueError(
            f"seeds must be a number of 1 to {len(own)} for {experiment} on {dataset}, got {count}; "
            f"the seed {count} itself is [{count}], or {count}-{count} on the command line"
        )
    return own[:count]


def _specify(experiment: str, dataset: str, mode: Mode, method: str, lr: float, seed: int, quick: bool) -> RunSpec:
    record = EXPERIMENTS[experiment]
    if mode == "online":
        epochs, batch = 1, 1
    elif dataset in REGRESSIONS:
        epochs, batch = 5 if quick else 50, 32
    else:
        epochs, batch = 2 if quick else 20, 64
    untuned = (lr, *head_settings(method, dataset, mode), 0.0)
    lr, ridge, forgetting, smoothing = IMAGE_SETTINGS.get((experiment, dataset, mode, method), untuned)
    padding: Padding | None = "black" if record.crops_and_flips and dataset == "cifar10" else None
    return RunSpec(
        *(experiment, dataset, mode, method, lr, seed, epochs, batch, ridge, forgetting, quick),
        padding=padding,
        schedule=record.schedule,
        smoothing=smoothing,
    )
