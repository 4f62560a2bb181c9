"""The paper's methods, and some more, behind one verb: `learn(inputs, targets)` does one iteration on one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import Optimizer

from sepsa.capture import PlainStep, Step, capture, first_order_step
from sepsa.heads import RLS, Capturable, HeadSolver, SoftmaxNewton
from sepsa.optimizer import SepSA
from sepsa.paper.slimtik import SlimTik
from sepsa.paper.slimtrain import PublishedSlimTik

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
NEWTON, SELF_TUNING = "SepSA, cross-entropy", "SepSA, self-tuning"
# The paper's methods with one thing changed, to find out what its figures were made with.
PUBLISHED = "slimTrain, as published"
VARIANTS = ("SepSA, no weight decay", "Adam, no weight decay", PUBLISHED)
NAMES = (*PAPER, TUNED, SELF_TUNING, CROSS_ENTROPY, NEWTON, STANDARDIZED, *VARIANTS)

# Ridge and forgetting of "SepSA, tuned". Those of the regressions are what `sepsa reproduce tuning` chose, which leaves
# results/tuning.json; the classifications were not tuned: the defaults, and a forgetting that a first trial favoured.
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


# Learning rate, ridge, forgetting and smoothing of the methods on images as we would use them, by experiment, data set,
# mode and method: what `sepsa reproduce tuning` chose, of as many settings for each, on training images held out.
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
    """Whether the method is one for this task, "regression" or "classification"."""
    only = {CROSS_ENTROPY: "classification", NEWTON: "classification", STANDARDIZED: "regression"}
    return only.get(name, task) == task


def head_settings(name: str, dataset: str, mode: str) -> tuple[float | None, float | None]:
    """The ridge and the forgetting that the method gives its head, where they are settings of its own."""
    if name == TUNED:
        return TUNED_SETTINGS[dataset, mode]
    if name == NEWTON:
        return NEWTON_RIDGE[mode], 1.0
    return (1.0, 1.0) if name in ("SepSA", "SepSA, no weight decay") else (None, None)


def image_settings(name: str, experiment: str, dataset: str, mode: str) -> dict[str, Any]:
    """The settings of an experiment on images with a falling rate, as fields of its run."""
    default = (1e-3, *head_settings(name, dataset, mode), 0.0)  # of methods that were not tuned
    chosen = IMAGE_SETTINGS.get((experiment, dataset, mode, name), default)
    return dict(zip(("lr", "ridge", "forgetting", "smoothing"), chosen, strict=True))


class Learner:
    """A model and the optimizer that trains it on one loss, batch by batch.

    `halving` is the paper's mini-batch rule: each epoch shows the head half of what the last one showed it.
    `units` (mean, std) of the targets, each (n_outputs,), say that the model speaks in standardized targets.
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
        """The iteration for batches like these: one CUDA graph on a GPU, unless the head decides on the host.

        Not compiled: a run ends before that has paid for itself, and every process would compile for itself.
        """
        if isinstance(self.optimizer, SepSA):
            if not isinstance(self.optimizer.solver, Capturable):
                return PlainStep(self.learn)
            return self.optimizer.capture(inputs, targets, self.loss_fn, compile=False)
        return capture(self.model, self.optimizer, inputs, targets, self.loss_fn, compile=False)

    def begin_epoch(self, epoch: int) -> None:
        """Tell which epoch comes, the first being 1."""
        if self.halving and isinstance(self.optimizer, SepSA):
            self.optimizer.head_fraction = 0.5 ** (epoch - 1)

    def set_rate(self, rate: float) -> None:
        """Take this learning rate from here on."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def learn(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """One iteration on one batch. Returns the loss that the body's gradient was taken of."""
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
) -> Learner:
    """The method `name` on `model`, with the paper's options unless others are given.

    `body` is the optimizer of the body under SepSA, `memory` slimTrain's, in blocks; `train_targets` (n, n_outputs)
    are those to standardize by, where the method does so.
    """
    if name not in NAMES:
        raise ValueError(f"method must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    decay = 0.0 if name.endswith("no weight decay") else WEIGHT_DECAY
    if name in ("SepSA", "SepSA, no weight decay", TUNED):
        # In float64, where the authors' curvature is float32: the figures are the same, also at a learning rate of 100.
        # The paper's prior: the ridge holds the bias too, and so it does in the methods beside it.
        optimizer = separable(model, RLS(ridge=ridge, forgetting=forgetting, bias_ridge="ridge"), body, lr, decay)
        return Learner(model, optimizer, halving=halving and name != TUNED)
    if name == SELF_TUNING:
        return Learner(model, separable(model, RLS(ridge="auto", forgetting="auto", bias_ridge="ridge"), body, lr))
    if name == NEWTON:
        solver = SoftmaxNewton(ridge=ridge, forgetting=forgetting, bias_ridge="ridge")
        return Learner(model, separable(model, solver, "Adam", lr), solver.loss, halving=halving)
    if name in ("slimTrain", PUBLISHED):
        slim = SlimTik if name == "slimTrain" else PublishedSlimTik
        return Learner(model, separable(model, slim(memory=memory), "Adam", lr))
    base, options = first_order(name if name in FIRST_ORDER else "Adam", model)
    optimizer = base(model.parameters(), lr=lr, weight_decay=decay, **options)
    if name == CROSS_ENTROPY:
        return Learner(model, optimizer, cross_entropy)
    if name == STANDARDIZED:
        if train_targets is None:
            raise ValueError(f"train_targets must be given for {name!r}, got None: they tell the mean and deviation")
        mean, std = train_targets.mean(0), train_targets.std(0, correction=0)
        return Learner(model, optimizer, lambda o, t: mse_loss(o, (t - mean) / std), units=(mean, std))
    return Learner(model, optimizer)


def first_order(name: str, model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """The optimizer and its options; on a GPU in one kernel where torch has one."""
    base, options = FIRST_ORDER[name]
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    return base, options | ({"fused": True} if on_gpu and name != "RMSprop" else {})


def separable(
    model: nn.Module, solver: HeadSolver, body: str, lr: float, decay: float = WEIGHT_DECAY
) -> SepSA[HeadSolver]:
    base, options = first_order(body, model)
    return SepSA(model, base, solver=solver, lr=lr, weight_decay=decay, **options)
