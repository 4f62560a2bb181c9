"""What a head learned between two moments at forgetting 1, as rows that another head learns: exact, and as bytes.

Symbols as in `least_squares`; R with RᵀR = A is the inverse of Tᵀ. Nothing that is learned is ever subtracted from a
larger number: the rows come out of the share 1 - s of today's curvature that was not there at the mark, and they are
learned as rows are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sepsa.checkpoint import Saves
from sepsa.heads.base.checks import check_state_number, check_state_tensor, damaged
from sepsa.heads.base.rls_state import read_root
from sepsa.heads.math.least_squares import SAMPLES, STEPS, LeastSquaresState, fade, learn_large, square_root, start
from sepsa.heads.protocols import NotFinite

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The largest relative error that counts as exact.
_EXACT = 1e-6


@dataclass(frozen=True, eq=False)
class Delta(Saves):
    """What `RLS.delta_since` returns: all that a head learned since a mark, for `RLS.merge` in another process.

    Choose it where the data do not fit one process: `to_bytes()` makes it one blob, `Delta.from_bytes` a delta again.
    It is `features` (r, p) and `targets` (r, m) of r <= p made-up samples from which a head learns the same as from
    those that were seen, the error `energy` (m,) that these leave beyond, and where the head had started.
    """

    features: Tensor
    targets: Tensor
    energy: Tensor
    samples: float
    steps: int
    prior: Tensor
    ridge: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.prior.shape) if isinstance(self.prior, Tensor) else ()
        if len(shape) != 2:
            raise damaged("prior", "a tensor (m, p)", shape or type(self.prior).__name__)
        r, (m, p) = len(self.features) if isinstance(self.features, Tensor) and self.features.ndim else 0, shape
        shapes = {"prior": (m, p), "ridge": (p,), "features": (r, p), "targets": (r, m), "energy": (m,)}
        for name, expected in shapes.items():
            check_state_tensor(name, getattr(self, name), expected, dtype=self.prior.dtype)
        if bool((self.energy < 0).any()) or not bool((self.ridge > 0).all()):
            raise damaged("energy and ridge", "at least 0", f"{self.energy.tolist()} and {self.ridge.tolist()}")
        check_state_number("samples", self.samples, 0.0)
        check_state_number("steps", self.steps, 0, 2**53, integer=True)

    def get_params(self) -> dict[str, Any]:
        """All of it, as a checkpoint holds it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def state_dict(self) -> dict[str, Any]:
        """Empty: a delta does not change."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to take up."""

    def __repr__(self) -> str:
        m, p = self.prior.shape
        return f"Delta(samples={self.samples:g}, rows={len(self.features)}, head={p}->{m}, dtype={self.prior.dtype})"


def since(
    mark: dict[str, Any] | None,
    linear: nn.Linear,
    now: LeastSquaresState,
    counters: NDArray[np.float64],
    prior: Tensor,
    ridge: Tensor,
) -> Delta:
    """What `now` has learned since `mark`, a state of the same head; None: since it was bound."""
    if mark is None:
        before = start(prior, ridge)
        samples, steps = float(counters[SAMPLES]), int(counters[STEPS])
    else:
        before, then, settings = read_root(mark, linear, prior)
        if (
            not torch.equal(settings.prior, prior)
            or not torch.equal(before.ridge_left, ridge)
            or settings.forgetting != 1
        ):
            raise ValueError(
                "mark must be a state_dict() of this head, got one with another prior, ridge or forgetting: "
                "take the mark after bind() and before the samples that are to be merged"
            )
        samples, steps = float((counters - then)[SAMPLES]), int((counters - then)[STEPS])
    now, before = (root._replace(T=square_root(root), H=None).map(wide) for root in (now, before))
    (R, lost), (R_mark, lost_mark) = inverse(now.T), inverse(before.T)
    T, W = now.T, now.W
    noise = max(torch.finfo(prior.dtype).eps * (len(T) + max(condition(T), condition(before.T))), lost + lost_mark)
    if not noise <= (_EXACT if prior.dtype == torch.float64 else 1e-3):
        raise ValueError(
            f"the curvature reaches over so many orders of magnitude that a share of {noise:.3g} of what was learned "
            "could be lost: rescale the features, or let one head learn the samples of both"
        )
    # T A_mark Tᵀ = Q diag(s) Qᵀ, so that 1 - s is the share of today's curvature that is new.
    X = R_mark @ T.T
    s, Q = torch.linalg.eigh(X.T @ X)
    new = 1 - s
    if not bool((new > -4 * noise).all()) or samples < 0 or steps < 0:
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
    features, targets, rest = (part.to(prior.dtype).cpu() for part in (Phi, Phi @ W.T + E, energy.clamp(min=0)))
    return Delta(features, targets, rest, samples, steps, prior.cpu(), ridge.cpu())


def learn(root: LeastSquaresState, delta: Delta, prior: Tensor, ridge: Tensor, head: torch.dtype) -> LeastSquaresState:
    """The state that has learned what `delta` holds too, H = I, with a W that fits into the dtype of the head."""
    if delta.prior.shape != prior.shape:
        raise ValueError(
            f"other must have a head of shape {tuple(prior.shape)}, got {tuple(delta.prior.shape)}: "
            "outputs and features, of which the bias is one"
        )
    if delta.prior.dtype != prior.dtype:
        raise ValueError(
            f"other must compute in {prior.dtype}, as this head does, got {delta.prior.dtype}: give both RLS one dtype"
        )
    if not torch.equal(delta.ridge, ridge.cpu()) or not torch.equal(delta.prior, prior.cpu()):
        raise ValueError(
            f"other must have started from the same prior, ridge {words(ridge)} and the same initial weights, "
            f"got ridge {words(delta.ridge)} and its own: bind both to copies of one head before they learn"
        )
    Phi, Y, energy = (part.to(root.T) for part in (delta.features, delta.targets, delta.energy))
    new = learn_large(fade(root, 1.0), Phi, Y, ridge, None, prior)
    new = new._replace(energy=new.energy + energy)
    if not all(bool(torch.isfinite(part).all()) for part in (new.W.to(head), new.T, new.energy)):
        raise NotFinite("other: what it learned is too large to be added to this head: rescale features and targets")
    return new


def words(ridge: Tensor) -> str:
    """The ridge of the weights, and that of the bias where it has another."""
    first, last = float(ridge[0]), float(ridge[-1])
    return f"{first:g}" if first == last else f"{first:g} ({last:g} for the bias)"


def wide(part: Tensor) -> Tensor:
    """In float64, which MPS does not have."""
    return (part.cpu() if part.device.type == "mps" else part).double()


def condition(T: Tensor) -> float:
    """That of TᵀT, less what the units of the features contribute, which harm no digit."""
    length: Tensor = torch.linalg.vector_norm(T, dim=0)
    return float(torch.linalg.cond(T / length)) ** 2


def inverse(T: Tensor) -> tuple[Tensor, float]:
    """R, the inverse of Tᵀ, and how far RTᵀ is from the identity."""
    R: Tensor = torch.linalg.inv(T).T
    off = R @ T.T
    off.diagonal().sub_(1)
    return R, float(torch.linalg.vector_norm(off))
