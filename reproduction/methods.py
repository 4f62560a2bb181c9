"""The paper's methods and some others, with one interface: `learn(inputs, targets)` trains on one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import Optimizer

from reproduction.slimtik import PublishedSlimTik, SlimTik
from sepsa.heads import RLS, Capturable, HeadSolver, SoftmaxNewton
from sepsa.training.capture import PlainStep, Step, capture, first_order_step
from sepsa.training.optimizer import SepSA

Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHT_DECAY = 1e-5

# The paper's first-order methods: the optimizer and its options beside lr and weight decay.
FIRST_ORDER: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9}),
    "NAG": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD": (torch.optim.SGD, {}),
}
PAPER = ("SepSA", "slimTrain", "SGD", "NAG", "RMSprop", "Adam")
TUNED, CROSS_ENTROPY, STANDARDIZED = "SepSA, tuned", "Adam, cross-entropy", "Adam, standardized targets"
NEWTON, EVIDENCE = "SepSA, cross-entropy", "SepSA, ridge by evidence"
# The paper's methods with one setting changed, to find out which settings the paper used.
PUBLISHED = "slimTrain, as published"
VARIANTS = ("SepSA, no weight decay", "Adam, no weight decay", PUBLISHED)
NAMES = (*PAPER, TUNED, EVIDENCE, CROSS_ENTROPY, NEWTON, STANDARDIZED, *VARIANTS)

# Ridge and forgetting of "SepSA, tuned". `python -m reproduction run tuning` chose those of the regressions
# (results/tuning.json); the classifications were not tuned: they have the defaults, or the forgetting that was best in
# a first trial.
TUNED_SETTINGS: dict[tuple[str, str], tuple[float, float]] = {
    ("energy", "online"): (0.1, 1.0),
    ("energy", "mini-batch"): (0.1, 0.8),
    ("diabetes", "online"): (1.0, 1.0),
    ("diabetes", "mini-batch"): (10_000.0, 0.95),
    ("mnist", "online"): (1.0, 1.0),
    ("mnist", "mini-batch"): (1.0, 1.0),
    ("cifar10", "online"): (1.0, 0.9999),
    ("cifar10", "mini-batch"): (1.0, 1.0),
}

# The ridge of "SepSA, cross-entropy", of 1 to 10,000 the best online on a fifth of the training images held out.
NEWTON_RIDGE = {"online": 1000.0, "mini-batch": 1.0}

# Learning rate, ridge, forgetting and label smoothing that `python -m reproduction run tuning` chose on held-out
# training images, from equally many settings for each method; by experiment, data set, mode and method.
IMAGE_SETTINGS: dict[tuple[str, str, str, str], tuple[float, float | None, float | None, float]] = {
    ("images", "cifar10", "mini-batch", CROSS_ENTROPY): (0.0005, None, None, 0.0),
    ("images", "cifar10", "mini-batch", NEWTON): (0.001, 1.0, 0.9999, 0.0),
    ("images", "cifar10", "mini-batch", TUNED): (0.002, 1.0, 1.0, 0.0),
    ("images", "cifar10", "online", CROSS_ENTROPY): (0.0005, None, None, 0.0),
    ("images", "cifar10", "online", NEWTON): (0.001, 1000.0, 0.9999, 0.0),
    ("images", "cifar10", "online", TUNED): (0.002, 1.0, 1.0, 0.0),
    ("images", "mnist", "mini-batch", CROSS_ENTROPY): (0.001, None, None, 0.1),
    ("images", "mnist", "mini-batch", NEWTON): (0.001, 1.0, 0.999, 0.1),
    ("images", "mnist", "mini-batch", TUNED): (0.001, 1.0, 0.9999, 0.0),
    ("images", "mnist", "online", CROSS_ENTROPY): (0.0005, None, None, 0.1),
    ("images", "mnist", "online", NEWTON): (0.001, 1000.0, 0.9999, 0.0),
    ("images", "mnist", "online", TUNED): (0.001, 1.0, 0.9999, 0.0),
    ("images-augmented", "cifar10", "mini-batch", CROSS_ENTROPY): (0.002, None, None, 0.1),
    ("images-augmented", "cifar10", "mini-batch", NEWTON): (0.001, 1.0, 0.999, 0.1),
    ("images-augmented", "cifar10", "mini-batch", TUNED): (0.002, 1.0, 0.999, 0.0),
    ("images-augmented", "cifar10", "online", CROSS_ENTROPY): (0.0005, None, None, 0.1),
    ("images-augmented", "cifar10", "online", NEWTON): (0.001, 1000.0, 1.0, 0.1),
    ("images-augmented", "cifar10", "online", TUNED): (0.001, 1.0, 0.9999, 0.0),
}


def slug(name: str) -> str:
    """The method's name for files and command lines: "Adam, cross-entropy" is adam-cross-entropy."""
    return name.lower().replace(",", "").replace(" ", "-")


def applies(name: str, task: str) -> bool:
    """Whether the method can learn this task, "regression" or "classification"."""
    only = {CROSS_ENTROPY: "classification", NEWTON: "classification", STANDARDIZED: "regression"}
    return only.get(name, task) == task


def head_settings(name: str, dataset: str, mode: str) -> tuple[float | None, float | None]:
    """The ridge and the forgetting factor of the method's head; None where it has no such settings."""
    if name == TUNED:
        return TUNED_SETTINGS[dataset, mode]
    if name == NEWTON:
        return NEWTON_RIDGE[mode], 1.0
    return (1.0, 1.0) if name in ("SepSA", "SepSA, no weight decay") else (None, None)


class Trainer:
    """A model and the optimizer that trains it on one loss, batch by batch.

    `halving` is the paper's mini-batch rule: in each epoch the head learns from half as many rows as in the last.
    `units` (mean, std) of the targets, each (n_outputs,), are given where the model predicts standardized targets.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Loss = mse_loss,
        *,
        halving: bool = False,
        units: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.model, self.optimizer, self.loss_fn, self.halving, self.units = model, optimizer, loss_fn, halving, units
        self.step: Step | None = None

    def capture(self, inputs: Tensor, targets: Tensor) -> Step:
        """The training step for batches of this shape: one CUDA graph on a GPU where the head can be captured.

        Not compiled: compilation takes longer than it saves in one run, and every process would compile again.
        """
        if isinstance(self.optimizer, SepSA):
            if not isinstance(self.optimizer.solver, Capturable):
                return PlainStep(self.learn)
            return self.optimizer.capture(inputs, targets, self.loss_fn, compile=False)
        return capture(self.model, self.optimizer, inputs, targets, self.loss_fn, compile=False)

    def begin_epoch(self, epoch: int) -> None:
        """Prepare for an epoch, counted from 1."""
        if self.halving and isinstance(self.optimizer, SepSA):
            self.optimizer.head_fraction = 0.5 ** (epoch - 1)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of all parameter groups."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def learn(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on one batch; returns the loss whose gradient the body followed."""
        if isinstance(self.optimizer, SepSA):
            return self.optimizer.learn(inputs, targets, self.loss_fn)
        return first_order_step(self.model, self.optimizer, self.loss_fn, inputs, targets)

    def predict(self, inputs: Tensor) -> Tensor:
        """The model's outputs in the units of the data set's targets."""
        outputs: Tensor = self.model(inputs)
        if self.units is None:
            return outputs
        mean, std = self.units
        return outputs * std + mean

    def is_finite(self) -> bool:
        """Whether every weight and running statistic is still a number."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.model.state_dict().values())


def build(
    name: str,
    model: nn.Module,
    lr: float,
    *,
    body: str = "Adam",
    ridge: float = 1.0,
    forgetting: float = 1.0,
    memory: int = 5,
    halving: bool = False,
    train_targets: Tensor | None = None,
    samples_per_epoch: int | None = None,
) -> Trainer:
    """The method `name` on `model`, with the paper's options unless others are given.

    `body` is the optimizer of SepSA's body and `memory` the number of blocks that slimTrain keeps. A method that
    standardizes targets takes their mean and deviation from `train_targets` (n, n_outputs). `samples_per_epoch` is told
    to SepSA's default head, where samples come again.
    """
    if name not in NAMES:
        raise ValueError(f"method must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    decay = 0.0 if name.endswith("no weight decay") else WEIGHT_DECAY
    if name in ("SepSA", "SepSA, no weight decay", TUNED):
        # In float64, where the authors' curvature is float32: the results are the same, also at a learning rate of 100.
        # As in the paper, the ridge penalizes the bias too, in this and in the other methods.
        optimizer = separable(model, RLS(ridge=ridge, forgetting=forgetting, bias_ridge="ridge"), body, lr, decay)
        return Trainer(model, optimizer, halving=halving and name != TUNED)
    if name == EVIDENCE:
        base, options = first_order(body, model)
        return Trainer(
            model, SepSA(model, base, samples_per_epoch=samples_per_epoch, lr=lr, weight_decay=decay, **options)
        )
    if name == NEWTON:
        solver = SoftmaxNewton(ridge=ridge, forgetting=forgetting, bias_ridge="ridge")
        return Trainer(model, separable(model, solver, "Adam", lr), solver.loss, halving=halving)
    if name in ("slimTrain", PUBLISHED):
        slim = SlimTik if name == "slimTrain" else PublishedSlimTik
        return Trainer(model, separable(model, slim(memory=memory), "Adam", lr))
    base, options = first_order(name if name in FIRST_ORDER else "Adam", model)
    optimizer = base(model.parameters(), lr=lr, weight_decay=decay, **options)
    if name == CROSS_ENTROPY:
        return Trainer(model, optimizer, cross_entropy)
    if name == STANDARDIZED:
        if train_targets is None:
            raise ValueError(f"train_targets must be given for {name!r}, got None: their mean and deviation are needed")
        mean, std = train_targets.mean(0), train_targets.std(0, correction=0)
        return Trainer(model, optimizer, lambda o, t: mse_loss(o, (t - mean) / std), units=(mean, std))
    return Trainer(model, optimizer)


def first_order(name: str, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """The optimizer class and its options; fused on a GPU, where torch has a fused version."""
    base, options = FIRST_ORDER[name]
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    return base, options | ({"fused": True} if on_gpu and name != "RMSprop" else {})


def separable(model: nn.Module, solver: HeadSolver, body: str, lr: float, decay: float = WEIGHT_DECAY) -> SepSA:
    """SepSA with this head solver and a first-order optimizer for the body."""
    base, options = first_order(body, model)
    return SepSA(model, base, solver=solver, lr=lr, weight_decay=decay, **options)
