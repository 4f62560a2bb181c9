"""From least-squares scores to probabilities.

The scores s of a classifier's head estimate P(k | x) but may leave the simplex; p is the point of it nearest to s, and
a softmax of p the probability:

    p = max(s - τ, 0)  with τ such that Σ p = 1,      P(k | x) = Σ_β π_β softmax(β p)_k,   π_β ∝ exp(-L_β),

L_β being the log-loss of softmax(β p) on rows not yet learned. This mixture of G inverse temperatures β loses at most
log G, in all and not per row, against the best of them, so nothing is to be tuned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

INVERSE_TEMPERATURES: Floats = 2.0 ** np.arange(-1.0, 7.5, 0.5)


def project_to_simplex(scores: Floats) -> Floats:
    """The point of the probability simplex that is nearest to each row of scores (n, K).

    The k largest, less τ, sum to at most 1, and to 1 if they are those above τ: so τ is the largest (Σ - 1)/k.
    """
    descending = -np.sort(-scores, axis=1)
    tau = ((descending.cumsum(1) - 1) / np.arange(1, scores.shape[1] + 1)).max(1, keepdims=True)
    p: Floats = np.maximum(scores - tau, 0.0)
    return p


def softmaxes(p: Floats) -> Floats:
    """softmax(βp) (n, G, K) at each inverse temperature."""
    exponentials = np.exp(INVERSE_TEMPERATURES[:, None] * (p - p.max(1, keepdims=True))[:, None, :])
    probabilities: Floats = exponentials / exponentials.sum(2, keepdims=True)
    return probabilities


def log_losses(p: Floats, labels: NDArray[np.intp]) -> Floats:
    """The log-loss (n, G) of each row at each inverse temperature; labels (n,) are column numbers."""
    return -np.log(softmaxes(p)[np.arange(len(p)), :, labels])


def mixture(p: Floats, loss: Floats) -> Floats:
    """The softmaxes of p, weighted by exp(-loss); loss is (G,), or (n, G) for one of each row."""
    weight = np.exp(loss.min(-1, keepdims=True) - loss)
    weight /= weight.sum(-1, keepdims=True)
    mixed: Floats = (weight[..., None] * softmaxes(p)).sum(1)
    return mixed
