"""The mixture of experts after several passes: its weights by the answers to rows that the experts have not learned.

In a stream the weights come from predictions made before each row (`experts.stack`). A table is learned in
several passes, after which errors on its rows say nothing; so they come from learners that left out a fold each. The
stack of a fold is fitted to the other folds, so that its losses compare with those of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sepsa.learner.arithmetic.weigh import weigh
from sepsa.learner.experts.stack import FLOOR, PRIOR, RIDGE, STACK_FORGETTING, strength
from sepsa.learner.memory.parts import Floats
from sepsa.learner.scales import quotient, reciprocal
from sepsa.learner.stream_learner import StreamLearner


class Mixture(NamedTuple):
    """What a mixture stores, by the names of its parts, the rows that it sums, and its predictions of rows left out."""

    parts: dict[str, Floats]
    evidence: float
    predictions: Floats

    @staticmethod
    def of(learners: Sequence[StreamLearner], X: Any, Y: Floats, weight: Floats, folds: Sequence[int]) -> Mixture:
        """The mixture of learners that left out one part of these rows each; `folds` are the lengths of the parts."""
        units = [np.sqrt(learner.engine.memory("GAIN", "network")) for learner in learners]  # in which each answers
        unit = units[0]
        offset = np.repeat([learner.offset for learner in learners], folds, axis=0)
        ends = np.cumsum(folds)[:-1]
        parts = [
            learner.answers(X[rows]) * (unit * reciprocal(own))
            for learner, own, rows in zip(learners, units, np.split(np.arange(len(Y)), ends), strict=True)
        ]
        answers, targets = np.concatenate(parts), (Y - offset) * unit
        made = mixture_of(answers, targets, weight, np.repeat(np.arange(len(folds)), folds))
        return made._replace(predictions=quotient(made.predictions, unit) + offset)


def mixture_of(answers: Floats, targets: Floats, weight: Floats, fold: Any) -> Mixture:
    """The mixture by answers (n, experts, m) and targets (n, m) in one unit, in which it has its predictions.

    `fold` (n,) is the number of the fold of each row. The normal equations count as many rows as a stream remembers.
    """
    off, left = answers[:, 1:] - answers[:, :1], targets - answers[:, 0]
    folds = range(int(fold.max()) + 1)
    grams, moments = [], []
    for k in folds:
        mine, weights = off[fold == k], weight[fold == k]
        grams.append(np.einsum("i,ijk,ilk->jl", weights, mine, mine, optimize=True))
        moments.append(np.einsum("i,ijk,ik->j", weights, mine, left[fold == k], optimize=True))
    gram, moment = np.sum(grams, 0), np.sum(moments, 0)
    others = np.array([solved(gram - grams[k], moment - moments[k]) for k in folds])
    stacked = answers[:, 0] + np.einsum("ijk,ij->ik", off, others[fold])
    candidates = np.concatenate([answers, stacked[:, None]], 1)
    losses = weight @ ((candidates - targets[:, None]) ** 2).sum(2)
    evidence = float(weight.sum())
    shares = np.empty_like(losses)
    weigh(losses, strength(evidence), FLOOR, PRIOR, shares)
    kept = min(1.0, 1 / ((1 - STACK_FORGETTING) * evidence))
    stored = {"GRAM": kept * gram, "MOMENT": kept * moment, "STACK": solved(gram, moment)}
    stored |= {"LOSS": losses, "WEIGHT": shares}
    return Mixture(stored, evidence, np.einsum("ijk,j->ik", candidates, shares))


def solved(gram: Floats, moment: Floats) -> Floats:
    """The weights of the stack, (gram + RIDGE·1)⁻¹ moment."""
    return np.linalg.solve(gram + RIDGE * np.eye(len(moment)), moment).astype(np.float64)
