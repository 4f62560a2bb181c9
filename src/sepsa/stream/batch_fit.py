"""Training on a table: several passes in mini-batches, by a committee of learners that each leave out a fold of rows.

The rows are cut into ten folds, and learner k is trained without fold k, so that the rows of the fold have a prediction
by a learner that has never seen them. These predictions decide how many passes are made and how wide intervals are, and
the learners are kept: the mean of their predictions errs less than any one of them, and no training is spent on the
choice alone. Where rows are many, three learners do, each without its tenth.

A pass takes the rows in random order, in mini-batches; over T passes the body's rate falls as cos from `rate` to zero
and the head forgets by `forgetting` per mini-batch, because its curvature is that of features which have moved since.
T is tried in factors of four, each time from the start, as a rate that has fallen cannot be continued; the trials end
with the first that raises the squared error on rows left out.

The variance of a target about the committee's mean is σ² (1 + c φᵀBφ), with φᵀBφ of the head's curvature. σ² and c are
those under which the errors on rows left out are most likely as normal errors.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sepsa.heads.protocols import NotFinite
from sepsa.states import schema
from sepsa.stream.engine import Floats
from sepsa.stream.learner import Learner, moments, reciprocal

FOLDS = 10
MEMBERS = (3, 10)  # as many as ROWS_OF_MEMBERS allows: where rows are many, each needs its passes
ROWS_OF_MEMBERS = 15_000
VISITS = 1_200_000  # of rows, over all learners and passes: some seconds
TOLERANCE = 1.02  # of a longer trial's squared error: what makes it worse for one learner is averaged out in several
ENOUGH = 250  # rows left out tell σ to 4 %, where the folds are of no other use
TRIALS = (64, 16, 4, 1)  # the most passes divided by this
INFLATIONS = [2.0**k for k in range(17)]

FORGET_EVERY = 8  # mini-batches, by λ⁸ at once: each time the ridge is restored, at the price of a mini-batch or two
RATE = 0.01
FORGETTING = 0.98
BATCHES = (8, 32)


class Schedule(NamedTuple):
    """What the passes of a fit are made with."""

    passes: int
    rate: float = RATE
    forgetting: float = FORGETTING
    batch: int | None = None  # None: by the number of rows
    visits: int = VISITS


class Chance(NamedTuple):
    """What is random in the training of one learner: drawn before, so that threads take nothing from each other."""

    seed: int
    orders: list[NDArray[np.intp]]  # of the rows, in each pass

    @classmethod
    def draw(cls, rng: np.random.RandomState, rows: int, passes: int) -> Chance:
        return cls(rng.randint(2**31 - 1), [rng.permutation(rows) for _ in range(passes)])


class Committee:
    """The mean of several learners, behind the interface of one; they all learn what it learns.

    `inflation` is c above.
    """

    def __init__(self, members: list[Any], inflation: float = 1.0) -> None:
        self.members, self.inflation = members, inflation

    @property
    def engine(self) -> Any:
        """The first member's, for sizes."""
        return self.members[0].engine

    @property
    def rows(self) -> int:
        return int(self.members[0].rows)

    def learn(self, X: Floats, Y: Floats, weight: Floats | None = None) -> Floats:
        """Learn rows in order; returns the predictions (n, outputs) made before. All members, or none."""
        members = [member.copy() for member in self.members]
        before: Floats = np.mean([member.learn(X, Y, weight) for member in members], axis=0)
        self.members = members
        return before

    def predict(self, X: Floats) -> Floats:
        """The predictions (n, outputs)."""
        mean: Floats = np.mean([member.predict(X) for member in self.members], axis=0)
        return mean

    def predict_with_leverage(self, X: Floats) -> tuple[Floats, Floats]:
        """The predictions (n, outputs) and c φᵀBφ (n,)."""
        told = [member.predict_with_leverage(X) for member in self.members]
        mean, leverage = (np.mean(part, axis=0) for part in zip(*told, strict=True))
        return mean, self.inflation * leverage

    def noise_variance(self) -> Floats:
        """The variance (outputs,) of targets about predictions."""
        variance: Floats = np.mean([member.noise_variance() for member in self.members], axis=0)
        return variance

    def add_outputs(self, count: int) -> None:
        """More outputs, whose targets were zero in all rows so far."""
        members = [member.copy() for member in self.members]
        for member in members:
            member.add_outputs(count)
        self.members = members

    def copy(self) -> Committee:
        return Committee([member.copy() for member in self.members], self.inflation)

    def state_dict(self) -> dict[str, Any]:
        """All that a further row depends on, as plain data."""
        states = [member.state_dict() for member in self.members]
        return {"inflation": self.inflation, "count": len(states), "members": states}

    def load_state_dict(self, state_dict: dict[str, Any], entry: str = "state_dict") -> None:
        """Continue from such a state, with as many members as it has, made like the first. Whole, or ValueError."""
        new = schema.read(entry, state_dict, {"inflation", "count", "members"})
        states = new.items("members", new.integer("count", 1))
        inflation = new.number("inflation", 0.0)
        members = [self.members[0].copy() for _ in states.values]
        for i, member in enumerate(members):
            member.load_state_dict(states[i], states.path(i))
        self.members, self.inflation = members, inflation


class Fit(NamedTuple):
    """What a fit found."""

    learner: Any  # a Committee
    passes: int
    rows: NDArray[np.intp]  # that were left out by one learner
    left_out: Floats  # its predictions of them


def fit(
    new_learner: Callable[[int], Learner],
    X: Floats,
    Y: Floats,
    weight: Floats,
    schedule: Schedule,
    *,
    early_stopping: bool,
    together: bool,
    threads: int,
    rng: np.random.RandomState,
) -> Fit:
    """A committee trained on the rows of X (n, inputs) and Y (n, outputs), all of positive weight.

    `new_learner` makes one from a seed, with the options by which it will go on after the fit. `together` trains one
    learner on all rows once the folds have told passes and noise: for a body that is none, or too dear to have many.
    The result does not depend on the number of `threads` that train the members.
    """
    n = len(X)
    if n == 1:
        learner = train(new_learner, X, Y, weight, schedule._replace(passes=1), Chance.draw(rng, 1, 1))
        learner.set_effective_samples(float(weight.sum()), learner.noise_variance())
        return Fit(Committee([learner]), 1, np.empty(0, np.intp), np.empty((0, Y.shape[1])))
    folds = np.array_split(rng.permutation(n), min(n, FOLDS))
    share = float(weight.sum()) * (1.0 if together else 1 - 1 / len(folds))
    few, many = MEMBERS
    folds = folds[: math.ceil(ENOUGH / len(folds[-1])) if together else max(few, min(many, ROWS_OF_MEMBERS // n))]
    rows = np.concatenate(folds)
    lowest, best = np.inf, None
    most = min(schedule.passes, math.ceil(schedule.visits / (n * (len(folds) + together) * sum(1 / t for t in TRIALS))))
    for passes in sorted({math.ceil(most / t) for t in TRIALS}) if early_stopping else [schedule.passes]:
        try:
            members = train_members(new_learner, X, Y, weight, folds, schedule._replace(passes=passes), threads, rng)
        except NotFinite:
            if best is None:
                raise
            break  # what fewer passes gave stands
        told = [member.predict_with_leverage(X[fold]) for member, fold in zip(members, folds, strict=True)]
        means, leverages = (np.concatenate(part) for part in zip(*told, strict=True))
        gain = reciprocal(moments(Y, weight)[1]) if members[0].regression else np.ones(Y.shape[1])
        error = np.average((Y[rows] - means) ** 2 @ gain, weights=weight[rows])
        if not error < TOLERANCE * lowest:
            break
        lowest, best = min(error, lowest), (passes, members, means, leverages)
    assert best is not None
    passes, members, means, leverages = best
    if together:
        chance = Chance.draw(rng, n, passes)
        members = [train(new_learner, X, Y, weight, schedule._replace(passes=passes), chance)]
    # `set_effective_samples` makes one pass of many, and B larger by as much.
    noise, inflation = likeliest(Y[rows] - means, leverages * max(1.0, members[0].engine.samples / share), weight[rows])
    for member in members:
        member.set_effective_samples(share, noise)
    return Fit(Committee(members, inflation), passes, rows, means)


def affordable_visits(features: int | None) -> int:
    """How many visits of rows a head of so many features can have at the price of `VISITS`; None: a torch body."""
    if features is None:
        return VISITS // 100  # as a step in PyTorch costs a hundred times the engine's
    return int(VISITS * min(1.0, (64 / features) ** 2))  # the curvature is p², and next to it all else is little


def batch_of(rows: int) -> int:
    """A power of two near a thirty-second of the rows: few rows need many steps in a pass."""
    least, most = BATCHES
    return min(most, max(least, 1 << (rows // 32 + 1).bit_length() - 1))


def train_members(
    new_learner: Callable[[int], Learner],
    X: Floats,
    Y: Floats,
    weight: Floats,
    folds: list[NDArray[np.intp]],
    schedule: Schedule,
    threads: int,
    rng: np.random.RandomState,
) -> list[Learner]:
    """A learner for each fold, of all other rows, several at once: the engine's kernels let other threads run."""
    chances = [Chance.draw(rng, len(X) - len(fold), schedule.passes) for fold in folds]
    stop = threading.Event()

    def member(k: int) -> Learner:
        rest = np.delete(np.arange(len(X)), folds[k])
        return train(new_learner, X[rest], Y[rest], weight[rest], schedule, chances[k], stop)

    if threads == 1 or len(folds) == 1:
        return [member(k) for k in range(len(folds))]
    with ThreadPoolExecutor(min(threads, len(folds))) as pool:
        futures = [pool.submit(member, k) for k in range(len(folds))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if not all(future.done() for future in futures):  # an error or Ctrl-C: what is in hand ends with its pass
                stop.set()
        return [future.result() for future in futures]


def train(
    new_learner: Callable[[int], Learner],
    X: Floats,
    Y: Floats,
    weight: Floats,
    schedule: Schedule,
    chance: Chance,
    stop: threading.Event | None = None,
) -> Learner:
    """A learner of these rows, in passes, each in an order of its own; unfinished where `stop` is set."""
    learner = new_learner(chance.seed)
    learner.fit_scales(X, Y, weight)
    after = learner.engine.schedule()
    batch = batch_of(len(X)) if schedule.batch is None else schedule.batch
    for done in range(schedule.passes):
        if stop is not None and stop.is_set():
            break
        rate = schedule.rate * 0.5 * (1 + math.cos(math.pi * done / schedule.passes))
        order = chance.orders[done]
        for at in range(0, len(X), batch * FORGET_EVERY):
            some = order[at : at + batch * FORGET_EVERY]
            for part, factor in ((some[:batch], schedule.forgetting ** -(-len(some) // batch)), (some[batch:], 1.0)):
                if part.size:
                    learner.engine.set_schedule(rate, factor, batch)
                    learner.learn(X[part], Y[part], weight[part])
    learner.engine.set_schedule(*after)
    return learner


def likeliest(errors: Floats, leverage: Floats, weight: Floats) -> tuple[Floats, float]:
    """σ² (outputs,) and c under which errors (n, outputs) of variance σ² (1 + c φᵀBφ) are most likely."""
    found: tuple[float, Floats, float] | None = None
    for inflation in INFLATIONS:
        growth = 1 + inflation * leverage
        noise = np.average(errors**2 / growth[:, None], axis=0, weights=weight)
        seen = noise[noise > 0]
        loss = float(len(seen) * np.average(np.log(growth), weights=weight) + np.log(seen).sum())
        if found is None or loss < found[0]:
            found = loss, noise, inflation
    assert found is not None
    return found[1], found[2]
