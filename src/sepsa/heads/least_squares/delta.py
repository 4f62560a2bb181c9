"""`Delta`: what a head learned between two moments at forgetting 1, as rows for another head, and as bytes.

Symbols as in `least_squares.math`; R with RᵀR = A is the inverse of Tᵀ. Nothing is subtracted from a larger number: the
rows follow from the share 1 - s of the present curvature that is new since the mark, and another head learns them as
rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepsa.heads.least_squares import evidence
from sepsa.heads.least_squares.evidence import Choice
from sepsa.heads.least_squares.math import (
    SAMPLES,
    LeastSquaresState,
    block_by_qr,
    fade,
    identity,
    square_root,
    start,
    triangular,
)
from sepsa.heads.least_squares.state import MOST_STEPS, SavedRLS
from sepsa.heads.protocols import NotFinite
from sepsa.states.objects import Saves, rebuilt_as
from sepsa.states.schema import Entries, kind_of

# The largest relative error of a difference.
_LARGEST_ERROR = {torch.float64: 1e-6, torch.float32: 1e-3}
# The largest relative error that `unlearn` may leave.
UNLEARN_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
@rebuilt_as("sepsa.heads.Delta")
class Delta(Saves):
    """What a head has learned since an earlier state, for `RLS.merge` in another process.

    Choose it where the data do not fit into one process: `RLS.delta_since` returns it, `to_bytes` converts it to bytes
    and `Delta.from_bytes` back. It consists of r <= p artificial samples from which a head learns the same as from
    those that were seen, the part of the squared error that they leave out, and the state from which the head started.

    Args:
        features: Features (r, p) of the artificial samples, the bias as a last column.
        targets: Their targets (r, m).
        energy: Squared error (m,) that no weights remove, beyond that of the artificial samples.
        samples: Number of samples that were learned, by their weights.
        steps: Number of updates.
        prior: Weights (m, p) from which the head started.
        ridge: Ridge (p,) of each coordinate.
        unit: The squares of the samples' weights over their sum; 1 without weights.

    Examples:
        >>> import copy, torch
        >>> from sepsa import RLS
        >>> from sepsa.heads import Delta
        >>> start = torch.nn.Linear(2, 1)
        >>> one, other = RLS().bind(copy.deepcopy(start)), RLS().bind(start)
        >>> other.update(torch.ones(5, 2), torch.ones(5, 1))
        >>> one.merge(Delta.from_bytes(other.delta_since().to_bytes()))
        >>> torch.allclose(one.linear.weight, other.linear.weight)
        True
    """

    features: Tensor
    targets: Tensor
    energy: Tensor
    samples: float
    steps: int
    prior: Tensor
    ridge: Tensor
    unit: float = 1.0

    def __post_init__(self) -> None:
        state = Entries("state_dict", self.get_params())
        prior, features = self.prior, self.features
        shape = (
            tuple(prior.shape) if isinstance(prior, Tensor) and prior.dtype in (torch.float32, torch.float64) else ()
        )
        if len(shape) != 2:
            raise state.damaged("prior", "a tensor (m, p) of float32 or float64", shape or kind_of(prior))
        r, (m, p) = len(features) if isinstance(features, Tensor) and features.ndim else 0, shape
        shapes = {"prior": (m, p), "ridge": (p,), "features": (r, p), "targets": (r, m), "energy": (m,)}
        for name, expected in shapes.items():
            state.tensor(name, expected, prior.dtype)
        if bool((self.energy < 0).any()) or not bool((self.ridge > 0).all()):
            raise state.damaged("energy", "at least 0 and the ridge above", [self.energy.tolist(), self.ridge.tolist()])
        state.number("samples", 0.0)
        state.integer("steps", 0, MOST_STEPS)
        if not state.number("unit", 0.0) > 0:
            raise state.damaged("unit", "above 0", self.unit)

    def get_params(self) -> dict[str, Any]:
        """Return all fields by name, as a checkpoint stores them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict: all fields are arguments of the constructor."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: all fields are arguments of the constructor.

        Args:
            state_dict: The result of `state_dict`.
        """

    def __repr__(self) -> str:
        m, p = self.prior.shape
        return f"Delta(samples={self.samples:g}, rows={len(self.features)}, head={p}->{m}, dtype={self.prior.dtype})"


def since(
    mark: SavedRLS | None,
    now: LeastSquaresState,
    initial: Tensor,
    ridge: Tensor,
    choice: Choice | None,
) -> Delta:
    """What `now` has learned since `mark`, a state of the same head; None: since it was bound.

    `initial` and `ridge` are prior and ridge at that time; `choice` is what evidence has chosen since, where it does.
    """
    before, unit, lost = start(now.prior, now.ridge_left), 1.0 if choice is None else choice.unit, 0.0
    steps, samples = now.counters[:2].tolist()
    if mark is not None:
        then, settings = mark.state, mark.settings
        chosen = choice is not None and settings.ridge == "evidence"
        same_ridge = chosen or torch.equal(then.ridge_left, ridge)
        if not torch.equal(mark.initial, initial) or not same_ridge or settings.forgetting != 1:
            raise ValueError(
                "mark must be a state_dict() of this head, got one with another prior, ridge or forgetting: "
                "take the mark after bind() and before the samples that are to be merged"
            )
        steps_then, samples_then = then.counters[:2].tolist()
        squares = samples * unit
        samples, steps = samples - samples_then, steps - steps_then
        if not chosen:
            before = then
        elif steps_then:
            lost = torch.finfo(now.T.dtype).eps * float((then.ridge_left / now.ridge_left).max())
            before = evidence.with_ridge(then, now.ridge_left, now.prior)
            squares -= samples_then * mark.choice.unit
        if chosen:
            unit = squares / samples if samples > 0 and squares > 0 else 1.0
    rows = difference(before, now, lost)
    if samples < 0 or steps < 0:
        raise ValueError(
            f"mark: the head has learned fewer samples or updates than it had then ({samples:g} and {steps:g} since): "
            "samples were unlearned since, or the mark is a later state than this one"
        )
    features, targets, energy = (part.to(initial.dtype).cpu() for part in rows)
    return Delta(features, targets, energy, samples, int(steps), initial.cpu(), ridge.cpu(), unit)


def learn(
    state: LeastSquaresState, delta: Delta, initial: Tensor, ridge: Tensor, head: torch.dtype
) -> LeastSquaresState:
    """The state that has learned `delta` too, H = I, with a W that fits into the dtype of the head.

    `initial` and `ridge` are prior and ridge before any sample, in which both must agree.
    """
    if delta.prior.shape != initial.shape:
        raise ValueError(
            f"other must have a head of shape {tuple(initial.shape)}, got {tuple(delta.prior.shape)}: "
            "outputs and features, of which the bias is one"
        )
    if delta.prior.dtype != initial.dtype:
        raise ValueError(
            f"other must compute in {initial.dtype}, as this head does, got {delta.prior.dtype}: "
            "give both RLS one dtype"
        )
    if not torch.equal(delta.ridge, ridge.cpu()) or not torch.equal(delta.prior, initial.cpu()):
        raise ValueError(
            f"other must have started from the same prior, ridge {words(ridge)} and the same initial weights, "
            f"got ridge {words(delta.ridge)} and its own: bind both to copies of one head before they learn"
        )
    Phi, Y, energy = (part.to(state.T) for part in (delta.features, delta.targets, delta.energy))
    new = block_by_qr(fade(state, 1.0), Phi, Y)
    steps, samples, cursor, _, _ = state.counters
    counters = np.array([steps + delta.steps, samples + delta.samples, cursor, 0.0, 0.0])
    new = new._replace(energy=new.energy + energy, counters=counters)
    if not all(bool(torch.isfinite(part).all()) for part in (new.W.to(head), new.T, new.energy)):
        raise NotFinite("other: what it learned is too large to be added to this head: rescale features and targets")
    return new


def words(ridge: Tensor) -> str:
    """The ridge of the weights, and that of the bias where it has another."""
    first, last = float(ridge[0]), float(ridge[-1])
    return f"{first:g}" if first == last else f"{first:g} ({last:g} for the bias)"


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


def unlearn(state: LeastSquaresState, Phi: Tensor, Y: Tensor, samples: float) -> LeastSquaresState:
    """The state without rows of weight `samples` in all; H = I.

    Subtracting from a curvature loses digits where these rows made it many orders larger. The share that is lost is
    known: eps over the smallest eigenvalue that remains of 1, times 10p or, for large rows, times |F| for the F of a
    head that knows its ridge alone, by which learning them rounded. Above UNLEARN_TOLERANCE an error is raised.
    Where the rows are all that was learned, the state is that before any data.
    """
    T, W, prior, ridge = square_root(state), state.W, state.prior, state.ridge
    seen, (steps, _, cursor, _, _) = float(state.counters[SAMPLES]), state.counters
    counters = np.array([steps, max(0.0, seen - samples), cursor, 0.0, 0.0])
    F, E = Phi @ T.T, Y - Phi @ W.T
    H = identity(len(T), T) - F.T @ F
    eps = torch.finfo(T.dtype).eps
    tolerance = math.sqrt(eps)
    excess, moved = H - (T * ridge) @ T.T, W - prior  # beyond the ridge alone
    if abs(samples - seen) <= tolerance * seen and float(torch.linalg.matrix_norm(excess)) <= tolerance * len(T):
        pulled = (Y - Phi @ prior.T).T @ F @ T  # by which samples move the weights of a head that knows these alone
        if torch.allclose(moved, pulled, rtol=0.0, atol=tolerance * float(moved.abs().max() + pulled.abs().max())):
            return start(prior, ridge)._replace(counters=counters)
    smallest = float(torch.linalg.eigvalsh(excess)[0])  # below 0: less than the ridge alone
    C, info = torch.linalg.cholesky_ex(H)
    if int(info) or not smallest >= -tolerance or samples > (1 + tolerance) * seen:
        raise ValueError(
            f"features: removing these {len(Phi)} samples would leave less curvature than the prior has (the head "
            f"remembers {seen:g} samples): unlearn only what this head learned, with the same features and weights"
        )
    remains = float(torch.linalg.eigvalsh(H)[0])
    size = float((Phi.square() / ridge).sum())
    if max(10 * len(T), math.sqrt(size)) * eps > UNLEARN_TOLERANCE * remains:
        raise ValueError(
            "features: these samples are so large beside the ridge and the other samples that too few digits of the "
            "rest are left to remove them exactly: rescale the features, or train a new head on the rest"
        )
    T = triangular(C, T).contiguous()
    step = (T @ (Phi.T @ E)).T @ T
    before = E + Phi @ step.T  # the errors of a head that never saw these rows
    energy, W = state.energy - (E * before).sum(0), W - step
    # The objective is at least its ridge term. Its rounding: that of E, 10p eps |Y|, times that of `before`.
    least = (ridge * (W - prior).square()).sum(1)
    rounding = (10 * len(T) * eps * Y.square().sum(0).sqrt()) ** 2 * (1 / tolerance + 1 / remains)
    if bool((energy < least - tolerance * (state.energy + least + before.square().sum(0)) - rounding).any()):
        raise ValueError(
            f"targets: removing these {len(Phi)} samples would leave a sum of squared errors below 0, so they were not "
            "learned with these targets: unlearn samples with the targets and weights of their update"
        )
    return state._replace(T=T, W=W, H=None, energy=energy.clamp(min=0), counters=counters)
