"""From least-squares scores to probabilities.

The scores s of a classifier's head estimate P(k | x) but may lie outside the probability simplex; p is the nearest
point of the simplex, and a softmax of p the probability:

    p = max(s - τ, 0)  with τ such that Σ p = 1,      P(k | x) = Σ_β π_β softmax(β p)_k,   π_β ∝ exp(-L_β),

L_β being the log-loss of softmax(β p) on rows not yet learned. Over all rows together this mixture of G inverse
temperatures β loses at most log G against the best of them, so that none has to be tuned. A learner of classes sums the
losses in its kernel (`arithmetic.robust.calibrate`). `follow` sums them for several labels, for a committee, and where
the sums before each row of a call are asked for, with rows at the weights that were given, where `loss="huber"` bounds
those of the kernel; a test holds both to each other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sepsa.learner.memory.parts import Floats

INVERSE_TEMPERATURES: Floats = 2.0 ** np.arange(-1.0, 7.5, 0.5)


def project_to_simplex(scores: Floats) -> Floats:
    """The point of the probability simplex that is nearest to each row of scores (n, K).

    The k largest scores, less τ, sum to at most 1, and to 1 if they are those above τ: so τ is the largest (Σ - 1)/k.
    A score of -∞, that of a class which is not there yet, stays -∞, so that its probability is 0.
    """
    descending = -np.sort(-scores, axis=1)
    tau = ((descending.cumsum(1) - 1) / np.arange(1, scores.shape[1] + 1)).max(1, keepdims=True)
    return np.where(scores > -np.inf, np.maximum(scores - tau, 0.0), scores)


def softmaxes(p: Floats) -> Floats:
    """softmax(βp) (n, G, K) at each inverse temperature."""
    exponentials = np.exp(INVERSE_TEMPERATURES[:, None] * (p - p.max(1, keepdims=True))[:, None, :])
    return exponentials / exponentials.sum(2, keepdims=True)


def log_losses(p: Floats, labels: NDArray[np.intp]) -> Floats:
    """The log-loss (n, G) of each row at each inverse temperature; labels (n,) are column numbers."""
    return -np.log(softmaxes(p)[np.arange(len(p)), :, labels])


def mixture(p: Floats, loss: Floats) -> Floats:
    """The softmaxes of p (n, K), weighted by exp(-loss); loss is (G,), or (n, G) where each row has its own."""
    weight = np.exp(loss.min(-1, keepdims=True) - loss)
    weight /= weight.sum(-1, keepdims=True)
    return (weight[..., None] * softmaxes(p)).sum(1)


def probabilities(scores: Floats, losses: Floats) -> Floats:
    """The probabilities (n, K) from the scores (n, K) of a head and the accumulated losses (G,) or (n, G)."""
    return mixture(project_to_simplex(scores), losses)


def best(scores: Floats) -> NDArray[np.intp]:
    """The class (n,) of the largest of its scores (n, K), the first of equal ones; -1 where none is known."""
    return np.insert(scores, 0, -np.inf, axis=1).argmax(1) - 1


def pairs(scores: Floats) -> list[Floats]:
    """The scores (n, 2) of 0 and 1 of each of L independent labels, from those (n, L) of 1."""
    return [np.stack([1 - score, score], 1) for score in scores.T]


def label_probabilities(scores: Floats, losses: Floats) -> Floats:
    """The probabilities (n, L, 2) that each of L independent labels is 0 and is 1, from scores (n, L).

    Each label has losses of its own: (L, G), or (n, L, G).
    """
    return np.stack([probabilities(pair, losses[..., k, :]) for k, pair in enumerate(pairs(scores))], 1)


def no_losses(*labels: int) -> Floats:
    """The losses before any row, of classes or of so many independent labels."""
    return np.zeros((*labels, *INVERSE_TEMPERATURES.shape))


def follow(losses: Floats, scores: Floats, Y: Floats, weight: Floats, forgetting: float) -> Floats:
    """The accumulated losses before each row and after the last one, from those before the first row.

    Losses are (G,) for indicators Y (n, K) of classes, and (L, G) for independent labels. `scores` are predictions made
    before the rows were learned; `forgetting` multiplies the losses at each row.
    """
    if losses.ndim == 1:
        return accumulate(losses, scores, Y.argmax(1), weight, forgetting)
    parts = zip(losses, pairs(scores), Y.T.astype(np.intp), strict=True)
    return np.stack([accumulate(*part, weight, forgetting) for part in parts], 1)


def accumulate(losses: Floats, scores: Floats, labels: NDArray[np.intp], weight: Floats, forgetting: float) -> Floats:
    """What `follow` returns for classes by their column numbers (n,)."""
    steps = weight[:, None] * log_losses(project_to_simplex(scores), labels)
    from scipy.signal import lfilter  # type: ignore[import-untyped]

    return lfilter([1.0], [1.0, -forgetting], np.vstack([losses, steps]), axis=0)
