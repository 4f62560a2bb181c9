"""One update of all members of a self-tuning head, and the progress that it replaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepsa.heads.base.newton import NewtonHead
from sepsa.heads.base.parameters import heads_of, join, width
from sepsa.heads.logistic import LogisticNewton
from sepsa.heads.math import evidence
from sepsa.heads.math import score as scores
from sepsa.heads.math.cross_entropy import is_large
from sepsa.heads.math.least_squares import SAMPLES, STEPS
from sepsa.heads.math.score import Score
from sepsa.heads.protocols import NotFinite
from sepsa.heads.rls import RLS
from sepsa.heads.softmax import SoftmaxNewton
from sepsa.states import schema

RESTS = -1  # no comparison runs
HISTORY_LIMIT = 1000
# Members that are not active look at their ridges as if they had this forgetting: once in 64 updates.
IDLE = 1 - 1 / (64 * evidence.CHECKS)
# Of the members for least squares, whose ridges are by evidence; the first is active before any has made another error.
FORGETTINGS = (1.0, 0.98, 0.9)
# Ridges of the members for cross-entropy.
RIDGES, START_RIDGE = (0.01, 0.3, 10.0, 300.0, 1e4), 10.0
# In mini-batches of a deep network the loss at the next batch would let the ridge grow without end, because the body
# changes the features anyway.
BATCHES = 3.0


class Choice(NamedTuple):
    """From this update on, a member with these settings sets the head's weights."""

    step: int
    forgetting: float
    ridge: float


class Progress(NamedTuple):
    """What an update replaces beside the members."""

    score: Score
    active: int  # the member that sets the head's weights
    learned: tuple[int, ...]  # how many updates each member has learned
    steps: int = 0  # the updates
    scale: float = 0.0  # of the ridges; 0 before the first update
    started: int = 0  # the update before which the running comparison started, or `RESTS`
    history: tuple[Choice, ...] = ()


def members_of(kind: type, **settings: Any) -> list[Any]:
    """The members for one kind of solver, where settings that are given have one value."""
    make: Any = kind
    if kind not in (RLS, SoftmaxNewton, LogisticNewton):
        raise TypeError(f"kind must be RLS, SoftmaxNewton or LogisticNewton, got {kind!r}: pass members instead")
    if kind is not RLS:
        return [make(**({"ridge": ridge} | settings)) for ridge in (RIDGES[:1] if "ridge" in settings else RIDGES)]
    forgettings = [settings.pop("forgetting")] if "forgetting" in settings else FORGETTINGS
    return [make(**({"ridge": "evidence", "forgetting": lam} | settings)) for lam in forgettings]


def compiled_backends(members: Sequence[RLS], rows: int) -> list[Any] | None:
    """The backends of solvers that can learn the same rows by one compiled call; None where they cannot."""
    backends: list[Any] = [member._backend_for(rows) for member in members]
    return backends if all(backend.learns_together for backend in backends) else None


def learn_together(
    members: Sequence[RLS], backends: list[Any], samples: Sequence[Tensor | None], lam_error: Any
) -> list[bool]:
    """Let solvers of copies of one head learn the same samples, checked already, by one compiled call.

    `lam_error` (J, 2) gets the forgetting of each, and the sum of its squared errors before. Returns which of them have
    learned.
    """
    lam_error[:, 0] = [member._forgetting_now for member in members]
    learned: list[bool] = backends[0].learn_together(backends, *samples, lam_error)
    return learned


class Learning:
    """One update of all members, which an interrupt may make run twice: a member learns its samples once."""

    def __init__(self, members: Sequence[Any], samples: Any, before: Progress, backends: Any, squared: bool) -> None:
        self.members, self.samples, self.before = members, samples, before
        self.backends, self.squared = backends, squared
        self.errors: list[float] | None = None
        self.size = 0.0
        self.refusals: list[Any] = [None] * len(members)
        self.lam_error = np.empty((len(members), 2))
        self.known = [(float(own.counters[SAMPLES]), int(own.counters[STEPS])) for own in backends or ()]
        self.again = False

    def run(self) -> None:
        """Let every member learn the samples that has not learned them yet."""
        again, self.again = self.again, True
        have = [again and member.steps > count for member, count in zip(self.members, self.before.learned, strict=True)]
        if self.backends is None:
            for k, member in enumerate(self.members):
                if not have[k]:
                    self.refusals[k] = refusal(member, self.samples, self.squared, self._schedule(k))
            return
        if not any(have):
            have = learn_together(self.members, self.backends, self.samples, self.lam_error)
        self.refusals[:] = [not one for one in have]
        for k, member in enumerate(self.members):
            if have[k] and member.ridge == "evidence":
                member._choose_ridge(*self.known[k], max(float(self.lam_error[k, 0]), self._schedule(k)))
        if self.errors is None and len(self.members) > 1:
            targets = self.samples[1]
            self.errors, self.size = (self.lam_error[:, 1] / targets.numel()).tolist(), mean_square(targets)

    def _schedule(self, k: int) -> float:
        """The least forgetting by which a member looks at its ridge."""
        return 0.0 if k == self.before.active else IDLE


def settings_of(member: Any) -> tuple[float, float]:
    """The forgetting and the ridge of a solver."""
    ridge = member.ridge_now if isinstance(member, RLS) and member.linear is not None else getattr(member, "ridge", 0.0)
    return getattr(member, "forgetting", 1.0), ridge


def refusal(member: Any, samples: Any, checked: bool, schedule: float) -> NotFinite | bool | None:
    """Let a solver learn samples; an error, or True, for numbers that are not finite.

    `checked`: the solver is an `RLS`, and its samples are checked already; it looks at its ridge as often as one with
    the forgetting `schedule` at least.
    """
    if checked:
        return not member._learn(*samples, schedule=schedule)
    try:
        member.update(*samples)
    except NotFinite as error:
        return error
    return None


def loss_of(member: Any, features: Tensor, targets: Tensor, weight: Tensor | None) -> Tensor:
    """The mean loss of a member at samples, by their weights where it is a `NewtonHead`."""
    if isinstance(member, NewtonHead):
        return member._loss_at(features, targets, weight)
    loss: Tensor = member.loss(member.linear(features.detach().to(member.linear.weight.dtype)), targets)
    return loss


def errors_of(
    members: Sequence[Any], features: Tensor, targets: Tensor, weight: Tensor | None, squared: bool
) -> tuple[list[float] | None, float]:
    """The loss of every member at samples, None without others, and the mean square of the targets.

    `squared`: the members are `RLS`, whose errors are computed together.
    """
    if len(members) == 1:
        return None, 0.0
    if not squared:
        return [float(loss_of(member, features, targets, weight)) for member in members], 0.0
    weights: Any
    biases: Any
    weights, biases = heads_of(members)
    dtype = weights[0].dtype
    if dtype.itemsize < 4:
        dtype = torch.float32
        weights, biases = ([part.to(dtype) for part in parts] for parts in (weights, biases))
    x = features.detach().reshape(-1, features.shape[-1]).to(dtype)
    y = targets.detach().reshape(len(x), -1).to(dtype)
    errors = scores.squared_errors(weights, biases, x, y)
    if weight is None:
        mean = errors.mean(0)
    else:
        w = weight.detach().reshape(-1).to(dtype)
        mean = (errors * w[:, None]).sum(0) / w.sum().clip(min=1e-30)
    return mean.tolist(), float((y * y).mean())


def mean_square(targets: Tensor) -> float:
    """The mean square of all numbers."""
    values = targets.numpy(force=True).ravel()
    return float(values.dot(values)) / values.size


def resting(now: Progress) -> Progress:
    """The progress where the active member goes on alone."""
    return now._replace(
        score=scores.start(1), active=0, learned=now.learned[now.active : now.active + 1], started=RESTS
    )


def changed(now: Progress, active: int, members: Sequence[Any]) -> Progress:
    """The progress with this active member, which `history` notes where it is another."""
    if active == now.active:
        return now
    change = Choice(now.steps, *settings_of(members[active]))
    return now._replace(active=active, history=(*now.history, change)[-HISTORY_LIMIT:])


def heaviest(member: Any, now: Progress) -> float:
    """The ridge that weighs as much as `BATCHES` mean batches in the curvature; no limit for batches that are small."""
    linear, n = member.linear, member.samples / max(now.steps, 1)
    if not is_large(width(linear), int(n)):
        return math.inf
    unit = float(member._ridges(linear, join(linear).double(), 1.0)[0])
    return float(BATCHES * n * now.scale / unit)


def read_progress(saved: schema.Entries, learned: list[int]) -> Progress:
    """The progress in a saved state, whose members have learned so many updates."""
    J = len(learned)
    sums, products = (
        saved.tensor(name, (J,) * k, torch.float64).tolist() for name, k in (("sums", 1), ("products", 2))
    )
    score = Score(saved.number("count", 0.0), sums, products)
    history = saved.items("history")
    changes = tuple(
        Choice(one.integer(0), one.number(1, 0.0, 1.0), one.number(2, 0.0))
        for one in (history.items(k, 3) for k in range(len(history)))
    )
    numbers = saved.integer("steps"), saved.number("scale", 0.0), saved.integer("started", RESTS)
    return Progress(score, saved.integer("active", 0, J - 1), tuple(learned), *numbers, changes)
