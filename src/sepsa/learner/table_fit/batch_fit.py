"""Training on a table: several passes in mini-batches, by a committee of learners that each leave out a fold of rows.

The rows are cut into folds, and learner k is trained without fold k, so that the rows of the fold have a prediction by
a learner that has never seen them. These predictions determine the number of passes, the weights of the experts and the
width of intervals. Five learners leave out a fifth each, from 500 rows on a tenth; where rows are many, three are
enough. All are kept, because the mean of their predictions has a smaller error than any one of them.

A pass takes the rows in random order, in mini-batches; over T passes the body's rate falls as cos from `rate` to zero
and the head forgets by `forgetting` per mini-batch, because its curvature is that of features which have moved since.
T is tried in factors of four from 1 on, each time from the start, as a rate that has fallen cannot be continued; the
trials end with the first that raises the squared error on rows left out, or lowers neither it nor that of the networks.
These passes are the network's: the other experts learn before them, few rows twice, one row after the other as in a
stream, then trees are boosted on all rows that they keep, and targets that are numbers get a linear head whose ridge is
chosen by evidence; the mixture is that of `sepsa.learner.table_fit.stacking`.

The variance of a target about the committee's mean is σ² (1 + c φᵀBφ), with φᵀBφ of the head's curvature. c is that
under which the errors on rows left out are most likely as normal errors, and σ² holds nine tenths of them. These are
errors of one learner, made smaller by as much as the mean of all is better (`averaged`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sepsa.learner.engine.core import NINE_TENTHS
from sepsa.learner.memory.parts import Floats
from sepsa.learner.rows import row_parts
from sepsa.learner.scales import moments, plausible, quotient, reciprocal
from sepsa.learner.stream_learner import StreamLearner
from sepsa.learner.table_fit.committee import Committee
from sepsa.learner.table_fit.progress import Progress
from sepsa.learner.table_fit.stacking import Mixture
from sepsa.validation import NotFinite

FOLDS = 10  # where those of the members leave out `ENOUGH` rows; else as many as members
MEMBERS = (3, 5)  # the least and the most; ROWS_OF_MEMBERS / rows in between
ROWS_OF_MEMBERS = 15_000
VISITS = 1_200_000  # of rows, over all learners and passes, by a small compiled network: some seconds
TOLERANCE = 1.02  # of a longer trial's squared error: what makes it worse for one learner is averaged out in several
ENOUGH = 250  # rows left out determine σ to 4 %, where the folds have no other use
TRIALS = (1024, 256, 64, 16, 4, 1)  # the most passes divided by this: 1, 2, 7, 25, 100, 400
LOWER, LOWER_ALONE = 0.99, 0.95  # factors of the error, and of that of the networks alone, by which it must have fallen
COMPARED = 500  # rows on which members are compared
INFLATIONS = [2**k for k in range(17)]
LARGEST_GROWTH = 16.0  # c φᵀBφ of a typical row: from there on the variance goes with φᵀBφ alone

MANY = 3000  # rows that experts other than the network learn once
FORGET_EVERY = 8  # mini-batches, by λ⁸ at once: restoring the ridge each time costs a mini-batch or two
RATE = 0.01
FORGETTING = 0.98
BATCHES = (8, 32)

Fold = NDArray[np.intp]  # numbers of rows
NewLearner = Callable[[int], StreamLearner]  # from a seed
Draws = tuple[int, list[Fold]]  # the seed of one learner's training, and the order of the rows in each pass
Trainer = Callable[["Job", Draws, threading.Event], StreamLearner]  # `train` or `teach`


class Table(NamedTuple):
    """Rows X (n, inputs), dense or CSR, targets Y (n, outputs) and positive weights (n,)."""

    X: Any
    Y: Floats
    weight: Floats

    def rows(self, chosen: Fold) -> Table:
        """The table of these rows, in this order."""
        return Table(self.X[chosen], self.Y[chosen], self.weight[chosen])

    def without(self, fold: Fold) -> Table:
        """The table without these rows."""
        return self.rows(np.delete(np.arange(len(self.Y)), fold))


class Job(NamedTuple):
    """What the steps of a fit share.

    `new_network` makes a learner with a network alone, and `new_mixture`, if there are other experts, one with the same
    network and them; both have the options for learning after the fit. `robust` bounds the targets of rows left out.
    The result does not depend on the number of `threads`.
    """

    new_network: NewLearner
    new_mixture: NewLearner | None
    table: Table
    threads: int
    rng: np.random.RandomState
    passes: int
    rate: float = RATE  # of the first pass
    forgetting: float = FORGETTING
    batch: int | None = None  # rows; None: by the number of rows
    visits: int = VISITS
    verbose: bool = False  # whether to print a line for each pass of the first learner, and one for each trial
    robust: bool = False
    folds: Sequence[Fold] = ()
    progress: Progress | None = None  # of visits of rows

    def trials(self, learners: int) -> list[int]:
        """The numbers of passes to try, so that all trials together visit no more rows than allowed."""
        visits = len(self.table.Y) * learners * sum(1 / t for t in TRIALS)
        most = min(self.passes, math.ceil(self.visits / visits))
        return sorted({math.ceil(most / t) for t in TRIALS})

    def drawn(self, fold: Fold) -> Draws:
        """The random numbers of one training without a fold, drawn in advance: the order of threads does not matter."""
        rows = len(self.table.Y) - len(fold)
        return self.rng.randint(2**31 - 1), [self.rng.permutation(rows) for _ in range(self.passes)]


class FitResult(NamedTuple):
    """The committee, the number of passes, and predictions of rows by a learner that was not trained on them."""

    committee: Committee
    passes: int
    rows: NDArray[np.intp]  # that one learner left out
    predictions: Floats  # of these rows by that learner


class Trial(NamedTuple):
    """Learners after some number of passes, and their predictions and φᵀBφ of the rows that each left out."""

    passes: int
    networks: list[StreamLearner]
    means: Floats
    leverages: Floats
    mixture: Mixture | None  # where there are other experts than the network
    error: float  # squared, of the predictions
    alone: float  # that of the networks, without the other experts

    def improves_on(self, before: Trial | None) -> bool:
        """Whether the error has fallen, or that of the networks: they may be still too poor to count among experts."""
        if before is None or not math.isfinite(before.error):
            return True
        return self.error < LOWER * before.error or self.alone < LOWER_ALONE * before.alone


def fit(job: Job, early_stopping: bool, together: bool) -> FitResult:
    """A committee trained on the table of a job without folds.

    `together` trains one learner on all rows once the folds have decided passes and weights: for a body that does not
    learn.
    """
    table, n = job.table, len(job.table.Y)
    if n == 1:
        (learner,) = trained_on_all(job._replace(passes=1))
        learner.engine.set_effective_samples(float(table.weight.sum()), learner.noise_variance())
        return FitResult(Committee([learner]), 1, np.empty(0, np.intp), np.empty((0, table.Y.shape[1])))
    few, many = MEMBERS
    count = max(few, min(many, ROWS_OF_MEMBERS // n))
    folds = np.array_split(job.rng.permutation(n), min(n, FOLDS if together or n * count >= ENOUGH * FOLDS else count))
    share = float(table.weight.sum()) * (1.0 if together else 1 - 1 / len(folds))
    folds = folds[: math.ceil(ENOUGH / len(folds[-1])) if together else count]
    trials = job.trials(len(folds) + together) if early_stopping else [job.passes]
    job = job._replace(folds=folds)
    experts = None if job.new_mixture is None else teach_experts(job)
    progress = Progress(sum(n - len(fold) for fold in folds) * sum(trials))
    trial, left_out = best_trial(job._replace(progress=progress), experts, trials)
    members = trial.networks if experts is None else experts
    take_networks(members, trial.networks)
    if together:
        members = trained_on_all(job._replace(passes=trial.passes))
    # `set_effective_samples` makes one pass of many, and B larger by as much.
    leverages = trial.leverages * max(1.0, members[0].engine.samples / share)
    if trial.mixture is not None:
        for member in members:
            member.engine.set_mixture(trial.mixture.evidence, trial.mixture.parts)
    errors = left_out.Y - trial.means
    errors *= averaged(members, left_out.X, errors)
    noise, inflation = likeliest(errors, leverages, left_out.weight)
    for member in members:
        member.engine.set_effective_samples(share, noise)
    progress.finish()
    return FitResult(Committee(members, inflation), trial.passes, np.concatenate(folds), trial.means)


def best_trial(job: Job, experts: list[StreamLearner] | None, trials: list[int]) -> tuple[Trial, Table]:
    """Networks, trained without a fold each, of the last number of passes that did not raise the error there; the rows.

    With `experts`, it is the error of their mixture with the networks. More passes are tried while they lower it.
    """
    best: Trial | None = None
    left_out = None if experts is None else rows_left_out(job, experts)
    for passes in trials:
        mine = job._replace(passes=passes)
        try:
            networks = trained(mine, train)
        except NotFinite:
            if best is None:
                raise
            break  # the trial with fewer passes is kept
        if left_out is None:
            left_out = rows_left_out(job, networks)
        trial = judged(mine, experts, networks, left_out)
        if job.verbose:
            print(f"{passes} passes: squared error {trial.error:.4g} on rows left out")
        if not trial.error < TOLERANCE * (np.inf if best is None else best.error):
            break
        improves, best = trial.improves_on(best), trial
        if not improves:
            break
    if best is None or left_out is None:
        raise NotFinite(
            "the errors on rows left out are not finite: nothing was learned; lower learning_rate, or rescale X and y"
        )
    return best, left_out


def rows_left_out(job: Job, learners: list[StreamLearner]) -> Table:
    """The rows that learners left out, by which errors are measured; robust: with targets that are plausible."""
    rest = job.table.rows(np.concatenate(job.folds))
    if not job.robust:
        return rest
    nearest = []
    for learner, fold in zip(learners, job.folds, strict=True):
        X, Y, _ = job.table.rows(fold)
        if job.new_mixture is None:
            nearest.append(learner.predict(X))
            continue
        each = learner.answers(X) * reciprocal(np.sqrt(learner.engine.memory("GAIN", "network"))) + learner.offset
        near = np.abs(each - Y[:, None]).argmin(1)
        nearest.append(np.take_along_axis(each, near[:, None], 1)[:, 0])
    return Table(rest.X, *plausible(rest.Y, rest.weight, np.concatenate(nearest)))


def judged(job: Job, experts: list[StreamLearner] | None, networks: list[StreamLearner], left_out: Table) -> Trial:
    """What networks, with `experts` if given, predict of the rows that each left out."""
    folds = job.folds
    parts = [network.predict_with_leverage(job.table.X[fold]) for network, fold in zip(networks, folds, strict=True)]
    alone, leverages = (np.concatenate(part) for part in zip(*parts, strict=True))
    means, mixture = alone, None
    if experts is not None:
        take_networks(experts, networks)
        mixture = Mixture.of(experts, *left_out, [len(fold) for fold in folds])
        means = mixture.predictions
    gain = error_weights(networks[0], left_out)
    with np.errstate(all="ignore"):
        squares = [(left_out.Y - each) ** 2 @ gain for each in (means, alone)]
    errors = [float(np.average(each, weights=left_out.weight)) for each in squares]
    return Trial(job.passes, networks, means, leverages, mixture, *errors)


def take_networks(members: list[StreamLearner], networks: list[StreamLearner]) -> None:
    """Let each member continue with a network."""
    for member, network in zip(members, networks, strict=True):
        member.take_network(network)


def batch_size(rows: int) -> int:
    """A power of two near a thirty-second of the rows: few rows need many steps in a pass."""
    least, most = BATCHES
    return min(most, max(least, 1 << (rows // 32 + 1).bit_length() - 1))


def trained(job: Job, one: Trainer) -> list[StreamLearner]:
    """Learners that leave out a fold each, trained by `one`, in threads: the kernels release the interpreter's lock."""
    draws, stop, members = [job.drawn(fold) for fold in job.folds], threading.Event(), range(len(job.folds))

    def member(k: int) -> StreamLearner:
        mine = job._replace(table=job.table.without(job.folds[k]), verbose=job.verbose and k == 0)
        return one(mine, draws[k], stop)

    if job.threads == 1 or len(members) == 1:
        return list(map(member, members))
    with ThreadPoolExecutor(min(job.threads, len(members))) as pool:
        futures = [pool.submit(member, k) for k in members]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            if not all(future.done() for future in futures):  # an error or Ctrl-C: the others stop after their pass
                stop.set()
        return [future.result() for future in futures]


def trained_on_all(job: Job) -> list[StreamLearner]:
    """One learner trained on all rows, in a list."""
    job = job._replace(folds=[np.empty(0, np.intp)])
    networks = trained(job, train)
    members = networks if job.new_mixture is None else teach_experts(job)
    take_networks(members, networks)
    return members


def teach_experts(job: Job) -> list[StreamLearner]:
    """Learners whose experts have learned all rows but a fold in passes of random order; they need a network."""
    return trained(job._replace(passes=2 if len(job.table.Y) < MANY else 1), teach)


def teach(job: Job, draws: Draws, stop: threading.Event) -> StreamLearner:
    """A learner whose experts have learned the table in passes, each in another order; unfinished if `stop` is set."""
    (seed, orders), table = draws, job.table
    assert job.new_mixture is not None
    learner = job.new_mixture(seed)
    learner.fit_scales(*table)
    X, Y, weight = table.rows(np.concatenate(orders))
    before = np.empty_like(Y)  # the predictions before a row was learned
    for some, part in row_parts(X, learner.engine.batch_size):
        if stop.is_set():
            return learner
        before[some] = learner.learn(part, Y[some], weight[some])
    if job.robust:
        first = np.argsort(orders[0])
        table = Table(table.X, *plausible(table.Y, table.weight, before[first]))
    learner.fit_experts(*table)
    return learner


def train(job: Job, draws: Draws, stop: threading.Event) -> StreamLearner:
    """A network trained on the table in passes, each in another order; unfinished where `stop` is set."""
    (seed, orders), table = draws, job.table
    learner = job.new_network(seed)
    learner.fit_scales(*table)
    after = learner.engine.schedule()
    batch = batch_size(len(table.Y)) if job.batch is None else job.batch
    gain = error_weights(learner, table)
    for done in range(job.passes):
        if stop.is_set():
            break
        rate = job.rate * 0.5 * (1 + math.cos(math.pi * done / job.passes))
        X, Y, weight = table.rows(orders[done])
        loss = 0.0
        learner.engine.set_schedule(rate, after[1], batch)
        for some, part in row_parts(X, batch * FORGET_EVERY):
            before = learner.learn_pass(part, Y[some], weight[some], job.forgetting, FORGET_EVERY)
            if job.verbose:
                loss += float(weight[some] @ ((before - Y[some]) ** 2 @ gain))
        if job.progress is not None:
            job.progress.advance(len(Y))
        if job.verbose:
            print(f"-- Pass {done + 1} of {job.passes}: squared error {loss / weight.sum():.4g} before learning")
    learner.engine.set_schedule(*after)
    return learner


def error_weights(learner: StreamLearner, table: Table) -> Floats:
    """The weight (outputs,) of each output's squared error: by its variance, or 1 for indicators of classes."""
    return reciprocal(moments(table.Y, table.weight)[1]) if learner.regression else np.ones(table.Y.shape[1])


def averaged(members: list[StreamLearner], X: Any, errors: Floats) -> Floats:
    """The factor (outputs,) by which errors of the members' mean are smaller than errors (n, outputs) of one of them.

    A member differs from their mean by some variance v, and M of them average it to v/M: e² becomes e² - (1 - 1/M) v.
    """
    some = np.linspace(0, len(errors) - 1, min(len(errors), COMPARED)).astype(int)
    predicted = np.array([member.predict(X[some]) for member in members])
    less = (1 - 1 / len(members)) * predicted.var(0, ddof=min(1, len(members) - 1)).mean(0)
    square = (errors**2).mean(0)
    factor: Floats = np.sqrt(np.maximum(1 - quotient(less, square), 0.25))
    return factor


def likeliest(errors: Floats, leverage: Floats, weight: Floats) -> tuple[Floats, int]:
    """σ² (outputs,) and c for errors (n, outputs) of variance σ² (1 + c φᵀBφ).

    c is that under which they are most likely as normal errors. With it, nine tenths of them lie within 1.645 σ.
    """

    def loss(inflation: int) -> float:
        growth = 1 + inflation * leverage
        noise = np.average(errors**2 / growth[:, None], axis=0, weights=weight)
        seen = noise[noise > 0]
        return float(len(seen) * np.average(np.log(growth), weights=weight) + np.log(seen).sum())

    typical = float(np.median(leverage))
    inflation = min((c for c in INFLATIONS if c == 1 or c * typical <= LARGEST_GROWTH), key=loss)
    sizes = np.abs(errors) / np.sqrt(1 + inflation * leverage)[:, None]
    quantiles = np.quantile(sizes, 0.9, axis=0, weights=weight, method="inverted_cdf")
    return (quantiles / NINE_TENTHS) ** 2, inflation
