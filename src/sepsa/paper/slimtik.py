"""The head of slimTrain: state and interface of the limited-memory Tikhonov method that `tikhonov` writes out.

The arithmetic runs on the CPU wherever the head lies: the choice of Λ is read there anyway, and so a step waits for the
head's device once, for what it needs of it, instead of at each number that is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads.base import parameters
from sepsa.heads.base.checks import (
    check_dtype,
    check_rows,
    explain_nonfinite,
    is_new_head,
    owned_head,
)
from sepsa.paper.tikhonov import factorize, increment, sgcv, trial_points
from sepsa.states import schema
from sepsa.validation import at_least, in_range

_SETTINGS = ("memory", "regularization", "bounds", "candidates")


class State(NamedTuple):
    """All that an update changes. An update makes a new one and writes into none."""

    steps: int
    last_regularization: float  # Λ
    regularization_sum: float  # τ
    blocks: tuple[Tensor, ...]  # the columns of M, the oldest block first


class SlimTik:
    """Linear head by sampled limited-memory Tikhonov regularization, the method of slimTrain.

    Choose it to compare with slimTrain, or where batches are large and the ridge should follow from the data. Single
    samples are for `RLS`, which remembers all of them: here each step fits the few it sees, and the head oscillates.

    While `memory` holds all blocks seen, the head's weights are ridge regression on all of them, the minimizer of

        sum_blocks mean_i ||targets_i - W features_i||^2 + ridge ||W - (regularization / ridge) initial||^2

    where the ridge is `regularization_sum` and `initial` is what the head held when it was bound. Older blocks are
    forgotten. Each update adds a Λ, positive or negative, to that sum: the one of smallest sampled generalized
    cross-validation error among 0 and `candidates` log-spaced points to either side. The sum starts at
    `regularization`, stays in `bounds`, and falls by at most half in one update.

    Features and targets may come in any floating dtype; the arithmetic runs in `dtype`, float32 unless given.
    """

    def __init__(
        self,
        *,
        memory: int = 5,
        regularization: float = 0.05,
        bounds: tuple[float, float] = (1e-7, 1e3),
        candidates: int = 100,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_settings(memory, regularization, bounds, candidates)
        check_dtype(dtype)
        self.memory = memory
        self.regularization = float(regularization)
        self.bounds = (float(bounds[0]), float(bounds[1]))
        self.candidates = candidates
        self.dtype = dtype
        self.linear: nn.Linear | None = None
        self._previous: Tensor | None = None  # where the last update started, for health alone

    # ------------------------------------------------------------------ state

    def bind(self, linear: nn.Linear) -> SlimTik:
        """Own the memory and the regularization of `linear`; its present weights are the start."""
        if not is_new_head("SlimTik", self.linear, linear):
            return self
        self._state = State(0, self.regularization, self.regularization, ())
        self.linear = linear
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the head itself, whose weights live in the `nn.Linear`."""
        shape = self._shape()
        state = self._state._asdict() | {"blocks": [block.clone() for block in self._state.blocks]}
        return {"shape": shape} | {name: getattr(self, name) for name in _SETTINGS} | state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same shape, hyperparameters included; anything else is refused whole."""
        shape = self._shape()
        saved = schema.read("state_dict", state_dict, {"shape", *_SETTINGS, *State._fields}, "SlimTik")
        given = saved["shape"]
        if not isinstance(given, (list, tuple)) or not all(type(n) is int for n in given) or tuple(given) != shape:
            raise ValueError(
                f"state_dict['shape'] must be {shape}, got {given!r}: the checkpoint belongs to a head of another size"
            )
        regularization, bounds = saved["regularization"], saved["bounds"]
        with schema.settings("state_dict"):
            check_settings(saved["memory"], regularization, bounds, saved["candidates"])
        memory, candidates = (saved.integer(name, 0, 2**31) for name in ("memory", "candidates"))
        steps = saved.integer("steps")
        last = saved.number("last_regularization", -bounds[1], bounds[1])
        total = saved.number("regularization_sum", *bounds)
        if not steps and not last == total == regularization:
            raise saved.damaged("regularization_sum", f"{regularization:g} before the first update", total)
        blocks = saved.items("blocks", min(steps, memory))
        copies = [blocks.tensor(i, (shape[1], None), self.dtype, torch.device("cpu")) for i in range(len(blocks))]
        if not all(block.numel() for block in copies):
            raise saved.damaged("blocks", "of one or more samples each", "an empty one")
        state = State(steps, last, total, tuple(copies))
        settings = dict(
            zip(_SETTINGS, (memory, float(regularization), tuple(map(float, bounds)), candidates), strict=True)
        )

        def write() -> None:
            self.__dict__.update(settings)
            self._state, self._previous = state, None

        parameters.commit(write)

    def to(self, device: torch.device | str | int) -> SlimTik:
        """Move the head; the memory stays on the CPU, where the arithmetic runs."""
        self._bound().to(device)
        return self

    def checkpoint(self) -> Hashable:
        """What `rollback` returns to: cheap, a copy of the head's weights and a reference to the rest."""
        return self._state_now(), self._previous, parameters.join(self._bound())

    def rollback(self, token: Any) -> None:
        """Undo every update since `checkpoint()` gave this token."""
        state, previous, head = token
        linear = self._bound()

        def write() -> None:
            self._state, self._previous = state, previous
            parameters.store(linear, head)

        parameters.commit(write)

    @property
    def steps(self) -> int:
        """How many updates the head has learned from."""
        return self._state_now().steps

    @property
    def last_regularization(self) -> float:
        """The Λ that the last update chose; before the first, `regularization`."""
        return self._state_now().last_regularization

    @property
    def regularization_sum(self) -> float:
        """The ridge: `regularization` and every Λ chosen since."""
        return self._state_now().regularization_sum

    @property
    def samples(self) -> float:
        """How many samples the head remembers: those of the blocks in its memory."""
        return float(sum(block.shape[1] for block in self._state_now().blocks))

    @torch.no_grad()
    def covariance(self) -> Tensor:
        """B (p, p), on the CPU, the inverse of the curvature MMᵀ + τI, where each block counts by its mean."""
        B: Tensor = torch.linalg.inv(self._curvature())
        return (B + B.T) / 2

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """What to look at when a run goes wrong, as numbers to log every hundred steps or so.

        - `condition`, the largest over the smallest eigenvalue of the curvature MMᵀ + τI. Above 1e5 in float32 digits
          are lost: normalize the features, raise the lower of `bounds`, or take dtype=torch.float64.
        - `smallest_eigenvalue` of that curvature. Near `regularization_sum`: the memory spans fewer directions than
          the head has features; raise `memory` or the batch size.
        - `effective_samples`, those in the memory.
        - `last_step`, the norm of the weights' change in the last update. It should fall as the run goes on; if it
          does not, the batches are too small for this method. NaN before an update.
        - `regularization_sum`, the ridge as chosen so far. At one of its `bounds`: widen them.
        """
        state, linear = self._state_now(), self._bound()
        eigenvalues = torch.linalg.eigvalsh(self._curvature())
        low, high = max(float(eigenvalues[0]), state.regularization_sum), float(eigenvalues[-1])
        step = math.nan
        if self._previous is not None:
            step = float(torch.linalg.vector_norm(parameters.join(linear).cpu().to(self.dtype) - self._previous))
        return {
            "condition": high / low,
            "smallest_eigenvalue": low,
            "effective_samples": self.samples,
            "last_step": step,
            "regularization_sum": state.regularization_sum,
        }

    def __repr__(self) -> str:
        head = "" if self.linear is None else f", head={self.linear.in_features}->{self.linear.out_features}"
        return f"SlimTik(memory={self.memory}, regularization={self.regularization:g}{head})"

    def _bound(self) -> nn.Linear:
        return owned_head("SlimTik", self.linear)

    def _state_now(self) -> State:
        self._bound()
        return self._state

    def _shape(self) -> tuple[int, int]:
        linear = self._bound()
        return linear.out_features, parameters.width(linear)

    def _curvature(self) -> Tensor:
        """MMᵀ + τI (p, p) in float64, of the blocks in memory."""
        state, p = self._state_now(), self._shape()[1]
        M = torch.cat([torch.zeros(p, 0, dtype=self.dtype), *state.blocks], 1).double()
        return M @ M.T + state.regularization_sum * torch.eye(p, dtype=torch.float64)

    # ------------------------------------------------------------------ learning

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss this head minimizes, for the body to follow: mean squared error."""
        return functional.mse_loss(outputs, targets)

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block: features (..., in_features), targets (..., out_features).

        `sample_weight` must be None: the method has none. On bad input an error is raised and nothing changes.
        """
        linear = self._bound()
        if sample_weight is not None:
            raise ValueError(
                f"sample_weight must be None, got a {type(sample_weight).__name__}: "
                "slimTik weighs all samples of a batch alike; RLS takes weights"
            )
        check_rows(linear, features, targets)
        with torch.autocast("cpu", enabled=False):
            self._learn(linear, features, targets)

    def _learn(self, linear: nn.Linear, features: Tensor, targets: Tensor) -> None:
        m, k = linear.weight.shape
        x, y, start = on_host(self.dtype, features.reshape(-1, k), targets.reshape(-1, m), parameters.join(linear))
        n, W = len(x), start
        if linear.bias is not None:
            x = torch.cat([x, x.new_ones(n, 1)], 1)
        Z = x.T / math.sqrt(n)
        C = y.T / math.sqrt(n)
        E = C - W @ Z
        if not math.isfinite(float(Z.square().sum() + E.square().sum())):
            raise explain_nonfinite(features, targets, linear)

        state = self._state
        W, lam, tau = self._solve(Z, E, W)
        rounded = W.to(linear.weight.dtype)
        if not math.isfinite(float(rounded.abs().max())):
            raise explain_nonfinite(features, targets, linear, W)
        head = rounded.to(linear.weight.device)
        new = State(state.steps + 1, lam, tau, (*state.blocks, Z)[-self.memory :] if self.memory else ())

        def write() -> None:
            self._state, self._previous = new, start
            parameters.store(linear, head)

        parameters.commit(write)

    def _solve(self, Z: Tensor, E: Tensor, W: Tensor) -> tuple[Tensor, float, float]:
        """The new head, its Λ and τ, from the block Z (p, n) with residuals E (m, n)."""
        state, eps = self._state, torch.finfo(self.dtype).eps
        problem = factorize(Z, state.blocks, E, W)
        trials, sums = trial_points(state.regularization_sum, self.bounds, self.candidates, eps)
        values = sgcv(problem, trials.to(W), sums.to(W))
        best = int(values.nan_to_num(nan=math.inf).argmin())  # argmin would take a NaN for the least
        lam, tau = float(trials[best]), float(sums[best])
        return W + increment(problem, lam, tau), lam, tau

    @torch.no_grad()
    def predict(self, features: Tensor) -> Tensor:
        """The head's outputs (..., out_features); what would tell their deviation, old targets, is not kept."""
        linear = self._bound()
        check_rows(linear, features)
        Phi = parameters.rows(linear, features, self.dtype)
        if not bool(Phi.square().sum().isfinite()):
            raise explain_nonfinite(features, None, linear)
        outputs = Phi @ parameters.join(linear).to(self.dtype).T
        return outputs.reshape(*features.shape[:-1], linear.out_features).to(linear.weight.dtype)


def on_host(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """The tensors on the CPU in one transfer, where each of their own would wait for the device."""
    flat = torch.cat([tensor.detach().to(dtype).reshape(-1) for tensor in tensors]).cpu()
    parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def check_settings(memory: int, regularization: float, bounds: tuple[float, float], candidates: int) -> None:
    """The hyperparameters, given or loaded."""
    at_least("memory", memory, 0)
    at_least("candidates", candidates, 2)
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"bounds must be a pair (low, high), got {bounds!r}")
    low, high = (in_range(f"bounds[{i}]", bound, 0.0, math.inf) for i, bound in enumerate(bounds))
    if low >= high:
        raise ValueError(f"bounds must be a pair (low, high) with low < high, got {bounds!r}")
    if not low <= in_range("regularization", regularization, 0.0, math.inf) <= high:
        raise ValueError(f"regularization must be within bounds {bounds!r}, got {regularization}: widen the bounds")
