"""Training on a table: several passes in mini-batches, by a committee of learners that each leave out a fold of rows.

The rows are cut into ten folds, and learner k is trained without fold k, so that the rows of the fold have a prediction
by a learner that has never seen them. These predictions determine the number of passes and the width of intervals. All
learners are kept, because the mean of their predictions has a smaller error than any one of them. Where rows are many,
three learners are enough, each without its tenth.

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
from sepsa.stream.committee import Committee
from sepsa.stream.engine.protocol import Floats
from sepsa.stream.learner import StreamLearner
from sepsa.stream.rows import dense, row_parts
from sepsa.stream.scales import moments, reciprocal

FOLDS = 10
MEMBERS = (3, 10)  # the least and the most; ROWS_OF_MEMBERS / rows in between
ROWS_OF_MEMBERS = 15_000
VISITS = 1_200_000  # of rows, over all learners and passes, by a small compiled network: some seconds
TOLERANCE = 1.02  # of a longer trial's squared error: what makes it worse for one learner is averaged out in several
ENOUGH = 250  # rows left out determine σ to 4 %, where the folds have no other use
TRIALS = (64, 16, 4, 1)  # the most passes divided by this
INFLATIONS = [2.0**k for k in range(17)]

FORGET_EVERY = 8  # mini-batches, by λ⁸ at once: restoring the ridge each time costs a mini-batch or two
RATE = 0.01
FORGETTING = 0.98
BATCHES = (8, 32)


class Schedule(NamedTuple):
    """The passes of a fit: their number, the first learning rate, the forgetting and the size of mini-batches."""

    passes: int
    rate: float = RATE
    forgetting: float = FORGETTING
    batch: int | None = None  # None: by the number of rows
    visits: int = VISITS
    verbose: bool = False  # whether to print a line for each pass


class RandomDraws(NamedTuple):
    """The random numbers of one learner's training, drawn in advance, so that the order of threads does not matter."""

    seed: int
    orders: list[NDArray[np.intp]]  # of the rows, in each pass

    @classmethod
    def draw(cls, rng: np.random.RandomState, rows: int, passes: int) -> RandomDraws:
        return cls(rng.randint(2**31 - 1), [rng.permutation(rows) for _ in range(passes)])


class FitResult(NamedTuple):
    """The committee, the number of passes, and predictions of rows by a learner that was not trained on them."""

    committee: Committee
    passes: int
    rows: NDArray[np.intp]  # that one learner left out
    predictions: Floats  # of these rows by that learner


def fit(
    new_learner: Callable[[int], StreamLearner],
    X: Any,
    Y: Floats,
    weight: Floats,
    schedule: Schedule,
    *,
    early_stopping: bool,
    together: bool,
    threads: int,
    rng: np.random.RandomState,
    verbose: bool = False,
) -> FitResult:
    """A committee trained on the rows of X (n, inputs), dense or CSR, and Y (n, outputs), all of positive weight.

    `new_learner` makes a learner from a seed, with the options for learning after the fit. `together` trains one
    learner on all rows once the folds have decided passes and noise: for a body that does not learn, or a slow one. The
    result does not depend on the number of `threads` that train the members. `verbose` prints a line for each pass of
    the first member, and one for each trial.
    """
    schedule = schedule._replace(verbose=verbose)
    n = len(Y)
    if n == 1:
        learner = train(new_learner, X, Y, weight, schedule._replace(passes=1), RandomDraws.draw(rng, 1, 1))
        learner.set_effective_samples(float(weight.sum()), learner.noise_variance())
        return FitResult(Committee([learner]), 1, np.empty(0, np.intp), np.empty((0, Y.shape[1])))
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
            break  # the trial with fewer passes is kept
        parts = [
            member.predict_with_leverage(part)
            for member, fold in zip(members, folds, strict=True)
            for _, part in row_parts(X[fold])
        ]
        means, leverages = (np.concatenate(part) for part in zip(*parts, strict=True))
        error = np.average((Y[rows] - means) ** 2 @ error_weights(members[0], Y, weight), weights=weight[rows])
        if verbose:
            print(f"{passes} passes: squared error {error:.4g} on rows left out")
        if not error < TOLERANCE * lowest:
            break
        lowest, best = min(error, lowest), (passes, members, means, leverages)
    assert best is not None
    passes, members, means, leverages = best
    if together:
        draws = RandomDraws.draw(rng, n, passes)
        members = [train(new_learner, X, Y, weight, schedule._replace(passes=passes), draws)]
    # `set_effective_samples` makes one pass of many, and B larger by as much.
    noise, inflation = likeliest(Y[rows] - means, leverages * max(1.0, members[0].engine.samples / share), weight[rows])
    for member in members:
        member.set_effective_samples(share, noise)
    return FitResult(Committee(members, inflation), passes, rows, means)


def batch_size(rows: int) -> int:
    """A power of two near a thirty-second of the rows: few rows need many steps in a pass."""
    least, most = BATCHES
    return min(most, max(least, 1 << (rows // 32 + 1).bit_length() - 1))


def train_members(
    new_learner: Callable[[int], StreamLearner],
    X: Any,
    Y: Floats,
    weight: Floats,
    folds: list[NDArray[np.intp]],
    schedule: Schedule,
    threads: int,
    rng: np.random.RandomState,
) -> list[StreamLearner]:
    """A learner for each fold, trained on all other rows, in threads: the kernels release the interpreter's lock."""
    draws = [RandomDraws.draw(rng, len(Y) - len(fold), schedule.passes) for fold in folds]
    stop = threading.Event()

    def member(k: int) -> StreamLearner:
        rest = np.delete(np.arange(len(Y)), folds[k])
        mine = schedule._replace(verbose=schedule.verbose and k == 0)
        return train(new_learner, X[rest], Y[rest], weight[rest], mine, draws[k], stop)

    if threads == 1 or len(folds) == 1:
        return [member(k) for k in range(len(folds))]
    with ThreadPoolExecutor(min(threads, len(folds))) as pool:
        futures = [pool.submit(member, k) for k in range(len(folds))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if not all(future.done() for future in futures):  # an error or Ctrl-C: the others stop after their pass
                stop.set()
        return [future.result() for future in futures]


def train(
    new_learner: Callable[[int], StreamLearner],
    X: Any,
    Y: Floats,
    weight: Floats,
    schedule: Schedule,
    draws: RandomDraws,
    stop: threading.Event | None = None,
) -> StreamLearner:
    """A learner trained on these rows in passes, each in another order; unfinished where `stop` is set."""
    learner = new_learner(draws.seed)
    learner.fit_scales(X, Y, weight)
    after = learner.engine.schedule()
    batch = batch_size(len(Y)) if schedule.batch is None else schedule.batch
    gain = error_weights(learner, Y, weight)
    for done in range(schedule.passes):
        if stop is not None and stop.is_set():
            break
        rate = schedule.rate * 0.5 * (1 + math.cos(math.pi * done / schedule.passes))
        order = draws.orders[done]
        loss = 0.0
        for at in range(0, len(Y), batch * FORGET_EVERY):
            some = order[at : at + batch * FORGET_EVERY]
            for part, factor in ((some[:batch], schedule.forgetting ** -(-len(some) // batch)), (some[batch:], 1.0)):
                if part.size:
                    learner.engine.set_schedule(rate, factor, batch)
                    before = learner.learn(dense(X[part]), Y[part], weight[part])
                    if schedule.verbose:
                        loss += float(weight[part] @ ((before - Y[part]) ** 2 @ gain))
        if schedule.verbose:
            print(f"-- Pass {done + 1} of {schedule.passes}: squared error {loss / weight.sum():.4g} before learning")
    learner.engine.set_schedule(*after)
    return learner


def error_weights(learner: StreamLearner, Y: Floats, weight: Floats) -> Floats:
    """The weight (outputs,) of each output's squared error: by its variance, or 1 for indicators of classes."""
    return reciprocal(moments(Y, weight)[1]) if learner.regression else np.ones(Y.shape[1])


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
