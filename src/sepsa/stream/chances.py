"""From least-squares scores to probabilities.

The scores s of a classifier's head estimate P(k | x) but may leave the simplex; p is the point of it nearest to s, and
a softmax of p the probability:

    p = max(s - τ, 0)  with τ such that Σ p = 1,      P(k | x) = Σ_β π_β softmax(β p)_k,   π_β ∝ exp(-L_β),

L_β being the log-loss of softmax(β p) on rows not yet learned. This mixture of G sharpnesses β loses at most log G, in
all and not per row, against the best of them, so nothing is to be tuned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SHARPNESS: Floats = 2.0 ** np.arange(-1.0, 7.5, 0.5)


def nearest(scores: Floats) -> Floats:
    """The point of the probability simplex that is nearest to each row of scores (n, K).

    The k largest, less τ, sum to at most 1, and to 1 if they are those above τ: so τ is the largest (Σ - 1)/k.
    """
    falling = -np.sort(-scores, axis=1)
    tau = ((falling.cumsum(1) - 1) / np.arange(1, scores.shape[1] + 1)).max(1, keepdims=True)
    p: Floats = np.maximum(scores - tau, 0.0)
    return p


def sharpened(p: Floats) -> Floats:
    """softmax(βp) (n, G, K) at each sharpness."""
    shares = np.exp(SHARPNESS[:, None] * (p - p.max(1, keepdims=True))[:, None, :])
    chances: Floats = shares / shares.sum(2, keepdims=True)
    return chances


def losses(p: Floats, places: NDArray[np.intp]) -> Floats:
    """The log-loss (n, G) of each row at each sharpness."""
    return -np.log(sharpened(p)[np.arange(len(p)), :, places])


def blend(p: Floats, loss: Floats) -> Floats:
    """The softmaxes of p, weighted by exp(-loss); loss is (G,), or (n, G) for one of each row."""
    share = np.exp(loss.min(-1, keepdims=True) - loss)
    share /= share.sum(-1, keepdims=True)
    mixed: Floats = (share[..., None] * sharpened(p)).sum(1)
    return mixed
