"""`Delta`: what a head learned between two moments at forgetting 1, as rows for another head, and as bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sepsa.heads.least_squares import evidence
from sepsa.heads.least_squares.difference import difference
from sepsa.heads.least_squares.evidence import Choice
from sepsa.heads.least_squares.math import SAMPLES, STEPS, LeastSquaresState, block_by_qr, fade, start
from sepsa.heads.least_squares.state import MOST_STEPS, read_root
from sepsa.heads.protocols import NotFinite
from sepsa.states.objects import Saves, rebuilt_as
from sepsa.states.schema import Entries, kind_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
    mark: dict[str, Any] | None,
    linear: nn.Linear,
    now: LeastSquaresState,
    counters: NDArray[np.float64],
    prior: Tensor,
    ridge: Tensor,
    choice: Choice | None,
) -> Delta:
    """What `now` has learned since `mark`, a state of the same head; None: since it was bound.

    `prior` and `ridge` are those at that time; `choice` is what evidence has chosen since, where it does.
    """
    about = prior if choice is None else prior * choice.scale
    before, unit, lost = start(about, now.ridge_left), 1.0 if choice is None else choice.unit, 0.0
    samples, steps = float(counters[SAMPLES]), int(counters[STEPS])
    if mark is not None:
        before, then, settings = read_root(mark, linear, prior)
        chosen = choice is not None and settings.by_evidence is not None
        if (
            not torch.equal(settings.prior, prior)
            or not (chosen or torch.equal(before.ridge_left, ridge))
            or settings.forgetting != 1
        ):
            raise ValueError(
                "mark must be a state_dict() of this head, got one with another prior, ridge or forgetting: "
                "take the mark after bind() and before the samples that are to be merged"
            )
        squares = samples * unit
        samples, steps = samples - float(then[SAMPLES]), steps - int(then[STEPS])
        if chosen and then[STEPS]:
            was = prior * settings.scale[:, None]
            lost = torch.finfo(now.T.dtype).eps * float((before.ridge_left / now.ridge_left).max())
            before = evidence.with_ridge(before, was, now.ridge_left, about)
            squares -= float(then[SAMPLES]) * (settings.by_evidence or (0.0, 1.0))[1]
        if chosen:
            before = before if then[STEPS] else start(about, now.ridge_left)
            unit = squares / samples if samples > 0 and squares > 0 else 1.0
    rows = difference(before, now, lost)
    if samples < 0 or steps < 0:
        raise ValueError(
            f"mark: the head has learned fewer samples or updates than it had then ({samples:g} and {steps} since): "
            "samples were unlearned since, or the mark is a later state than this one"
        )
    features, targets, energy = (part.to(prior.dtype).cpu() for part in rows)
    return Delta(features, targets, energy, samples, steps, prior.cpu(), ridge.cpu(), unit)


def learn(root: LeastSquaresState, delta: Delta, prior: Tensor, ridge: Tensor, head: torch.dtype) -> LeastSquaresState:
    """The state that has learned `delta` too, H = I, with a W that fits into the dtype of the head."""
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
    new = block_by_qr(fade(root, 1.0), Phi, Y, ridge, None, prior)
    new = new._replace(energy=new.energy + energy)
    if not all(bool(torch.isfinite(part).all()) for part in (new.W.to(head), new.T, new.energy)):
        raise NotFinite("other: what it learned is too large to be added to this head: rescale features and targets")
    return new


def words(ridge: Tensor) -> str:
    """The ridge of the weights, and that of the bias where it has another."""
    first, last = float(ridge[0]), float(ridge[-1])
    return f"{first:g}" if first == last else f"{first:g} ({last:g} for the bias)"
