"""What a root learned between two moments at forgetting 1, as rows that another root learns.

Symbols as in `least_squares`; R with RᵀR = A is the inverse of Tᵀ. Nothing is subtracted from a larger number: the
rows follow from the share 1 - s of the present curvature that is new since the mark, and another head learns them as
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sepsa.heads.least_squares.math import LeastSquaresState, square_root

# The largest relative error of a difference.
_LARGEST_ERROR = {torch.float64: 1e-6, torch.float32: 1e-3}


def difference(
    before: LeastSquaresState, now: LeastSquaresState, known_lost: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Features (r, p), targets (r, m) and the error (m,) beyond them of what `now` learned since `before`, of whose
    curvature the share `known_lost` may be wrong.
    """
    dtype = now.T.dtype
    now, before = (root._replace(T=square_root(root), H=None).map(wide) for root in (now, before))
    (R, lost), (R_mark, lost_mark) = inverse(now.T), inverse(before.T)
    T, W = now.T, now.W
    noise = known_lost
    if noise <= _LARGEST_ERROR[dtype]:
        rounding = torch.finfo(dtype).eps * (len(T) + max(condition(T), condition(before.T)))
        noise = max(rounding, lost + lost_mark, known_lost)
    if not noise <= _LARGEST_ERROR[dtype]:
        raise ValueError(
            f"the curvature has so large a condition number that a share of {noise:.3g} of what was learned "
            "could be lost: rescale the features, or let one head learn the samples of both"
        )
    # T A_mark Tᵀ = Q diag(s) Qᵀ, so that 1 - s is the share of the present curvature that is new.
    X = R_mark @ T.T
    s, Q = torch.linalg.eigh(X.T @ X)
    new = 1 - s
    if not bool((new > -4 * noise).all()):
        raise ValueError(
            f"mark: the head has less curvature than it had then (a share of {float(new.min()):.3g} is new): "
            "samples were unlearned since, or the mark is a later state than this one"
        )
    moved = R_mark @ (W - before.W).T  # (p, m)
    pull = Q.T @ (X.T @ moved)  # of the new samples, which can pull only in directions that they know something of
    kept = new > 4 * noise
    astray = torch.linalg.vector_norm(pull[~kept])
    if not bool(astray <= 4 * noise**0.5 * (torch.linalg.vector_norm(R @ W.T) + now.energy.sum().sqrt())):
        raise ValueError(
            "the head's weights were set by something other than this solver since the mark, so they are not what it "
            "learned: take the mark after that"
        )
    size = new[kept].sqrt()[:, None]
    Phi, E = size * (Q.T[kept] @ R), pull[kept] / size
    energy = now.energy - before.energy - moved.square().sum(0) - E.square().sum(0)
    return Phi, Phi @ W.T + E, energy.clamp(min=0)


def wide(part: Tensor) -> Tensor:
    """The tensor in float64; on the CPU where it is on MPS, which has no float64."""
    return (part.cpu() if part.device.type == "mps" else part).double()


def condition(T: Tensor) -> float:
    """The condition number of TᵀT with its features scaled to one length: their units cost no digits."""
    length: Tensor = torch.linalg.vector_norm(T, dim=0)
    return float(torch.linalg.cond(T / length)) ** 2


def inverse(T: Tensor) -> tuple[Tensor, float]:
    """R, the inverse of Tᵀ, and how far RTᵀ is from the identity."""
    R: Tensor = torch.linalg.inv(T).T
    off = R @ T.T
    off.diagonal().sub_(1)
    return R, float(torch.linalg.vector_norm(off))
