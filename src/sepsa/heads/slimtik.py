"""slimTik: the head of slimTrain, a limited-memory Tikhonov method that chooses its own regularization.

After Newman, Chung, Chung and Ruthotto, "slimTrain", SIAM J. Sci. Comput. 44 (2022), in its symbols, and Chung, Chung,
Slagel and Tenorio, "Sampled limited memory methods for massive linear inverse problems", Inverse Problems 36 (2020).

Symbols, at step k: Z (p, n) the features in columns, with a last row of ones where the head has a bias, and C (m, n)
the targets, both divided by √n, so that squares sum to means; M (p, ·) the Z of the last r steps, as they were seen;
W (m, p) the head; E = C - WZ; Λ the parameter chosen now, τ = Λ + Σ Λ_i its sum with all chosen before. The head
moves by the s (m, p) that minimizes

    ½‖s [Z M] - [E 0]‖² + ½ τ‖s + (Λ/τ) W‖²,    s = (EZᵀ - ΛW)(ZZᵀ + MMᵀ + τI)⁻¹                                (*)

The zeros say that the head fitted the old blocks as well as it could, so only the increment meets them: their targets
are not kept. (*) is the step from the minimizer of Σ‖WZ_i - C_i‖² + Σ Λ_i ‖W‖² without the new block to the one with
it, except that blocks older than M are forgotten.

All outputs share one thin SVD [Z M] = USVᵀ, in which (*) and the criterion for Λ are diagonal. Both are written without
the differences I - ZᵀU(...)UᵀZ and I/τ - U(...)Uᵀ/τ², which lose every digit of float32 when τ is small.

The arithmetic runs on the CPU wherever the head lies: the choice of Λ is read there anyway, and so a step waits for the
head's device once, for what it needs of it, instead of at each number that is looked at.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads._checks import (
    at_least,
    check_keys,
    check_rows,
    explain_nonfinite,
    in_range,
    is_new_head,
    owned_head,
)


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
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        self.memory = memory
        self.regularization = float(regularization)
        self.bounds = (float(bounds[0]), float(bounds[1]))
        self.candidates = candidates
        self.dtype = dtype
        self.linear: nn.Linear | None = None

    # ------------------------------------------------------------------ state

    def bind(self, linear: nn.Linear) -> SlimTik:
        """Own the memory and the regularization of `linear`; its present weights are the start."""
        if not is_new_head("SlimTik", self.linear, linear):
            return self
        self.linear = linear
        self.steps = 0
        self.chosen = self.regularization  # the last Λ
        self.regularization_sum = self.regularization
        self._blocks: list[Tensor] = []  # the columns of M, the oldest block first
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the head itself, whose weights live in the `nn.Linear`."""
        return {
            "shape": self._shape(),
            "memory": self.memory,
            "regularization": self.regularization,
            "bounds": self.bounds,
            "candidates": self.candidates,
            "steps": self.steps,
            "chosen": self.chosen,
            "regularization_sum": self.regularization_sum,
            "blocks": [block.clone() for block in self._blocks],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of the same shape, hyperparameters included; anything else is refused whole."""
        shape = self._shape()
        keys = set(self.state_dict())
        check_keys("SlimTik", state_dict, keys)
        if state_dict["shape"] not in (shape, list(shape)):
            raise ValueError(
                f"state_dict['shape'] must be {shape}, got {state_dict['shape']}: "
                "the checkpoint belongs to a head of another size"
            )
        memory, regularization, bounds = (state_dict[name] for name in ("memory", "regularization", "bounds"))
        check_settings(memory, regularization, bounds, state_dict["candidates"])
        steps, chosen, total = (state_dict[name] for name in ("steps", "chosen", "regularization_sum"))
        at_least("state_dict['steps']", steps, 0)
        if not isinstance(chosen, float) or not math.isfinite(chosen):
            raise ValueError(f"state_dict['chosen'] must be a finite number, got {chosen!r}: the checkpoint is damaged")
        if not isinstance(total, float) or not bounds[0] <= total <= bounds[1]:
            raise ValueError(
                f"state_dict['regularization_sum'] must be a number in {list(bounds)}, got {total!r}: "
                "the checkpoint is damaged"
            )
        blocks = state_dict["blocks"]
        if not isinstance(blocks, (list, tuple)) or len(blocks) != min(steps, memory):
            came = f"{len(blocks)} blocks" if isinstance(blocks, (list, tuple)) else type(blocks).__name__
            raise ValueError(
                f"state_dict['blocks'] must be a list of {min(steps, memory)} tensors after {steps} updates "
                f"with memory {memory}, got {came}: the checkpoint is damaged"
            )
        for i, block in enumerate(blocks):
            if not isinstance(block, Tensor) or block.ndim != 2 or block.shape[0] != shape[1] or not block.numel():
                came = str(tuple(block.shape)) if isinstance(block, Tensor) else type(block).__name__
                raise ValueError(f"state_dict['blocks'][{i}] must be a tensor of shape ({shape[1]}, n), got {came}")
            if not bool(torch.isfinite(block).all()):
                raise ValueError(f"state_dict['blocks'][{i}] must be finite, got NaN or Inf: the checkpoint is damaged")
        self.memory, self.regularization, self.candidates = memory, float(regularization), state_dict["candidates"]
        self.bounds = (float(bounds[0]), float(bounds[1]))
        self.steps, self.chosen, self.regularization_sum = steps, chosen, total
        self._blocks = [block.detach().to(device="cpu", dtype=self.dtype, copy=True) for block in blocks]

    def __repr__(self) -> str:
        head = "" if self.linear is None else f", head={self.linear.in_features}->{self.linear.out_features}"
        return f"SlimTik(memory={self.memory}, regularization={self.regularization:g}{head})"

    def _bound(self) -> nn.Linear:
        return owned_head("SlimTik", self.linear)

    def _shape(self) -> tuple[int, int]:
        linear = self._bound()
        return linear.out_features, linear.in_features + (linear.bias is not None)

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
        weight, bias, k = linear.weight, linear.bias, linear.in_features
        columns = [weight] if bias is None else [weight, bias[:, None]]
        x, y, *columns = on_host(self.dtype, features.reshape(-1, k), targets.reshape(-1, len(weight)), *columns)
        n, W = len(x), torch.cat(columns, 1)
        if bias is not None:
            x = torch.cat([x, x.new_ones(n, 1)], 1)
        Z = x.T / math.sqrt(n)
        C = y.T / math.sqrt(n)
        E = C - W @ Z
        if not math.isfinite(float(Z.square().sum() + E.square().sum())):
            raise explain_nonfinite(features, targets, linear)

        problem = factorize(Z, self._blocks, E, W)
        eps = torch.finfo(self.dtype).eps
        trials, sums = trial_points(self.regularization_sum, self.bounds, self.candidates, eps)
        values = sgcv(problem, trials.to(W), sums.to(W))
        best = int(values.nan_to_num(nan=math.inf).argmin())  # argmin would take a NaN for the least
        lam, tau = float(trials[best]), float(sums[best])
        W = (W + increment(problem, lam, tau)).to(weight.dtype)
        if not math.isfinite(float(W.abs().max())):
            raise explain_nonfinite(features, targets, linear)

        # From here on nothing can fail, so the state changes.
        weight.copy_(W[:, :k])
        if bias is not None:
            bias.copy_(W[:, k])
        self._blocks = [*self._blocks, Z][-self.memory :] if self.memory else []
        self.chosen, self.regularization_sum = lam, tau
        self.steps += 1


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


class Problem(NamedTuple):
    """(*) in the basis of the thin SVD [Z M] = USVᵀ, of q singular values."""

    W: Tensor  # (m, p)
    U: Tensor  # (p, q)
    S: Tensor  # (q,)
    V: Tensor  # (n, q): the rows of V that belong to Z, so that Z = USVᵀ
    EV: Tensor  # (m, q)
    WU: Tensor  # (m, q)
    rest: Tensor  # (m, n): E(I - VVᵀ), what no s can fit
    freedom: Tensor  # (): tr(I - VVᵀ)


def factorize(Z: Tensor, blocks: list[Tensor], E: Tensor, W: Tensor) -> Problem:
    """One SVD for all outputs, all trial points and the step."""
    M = torch.cat([Z, *blocks], 1)
    try:
        U, S, Vt = one_column(M) if M.shape[1] == 1 else torch.linalg.svd(M, full_matrices=False)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise RuntimeError(
            f"the SVD of features and memory, {tuple(M.shape)} in {M.dtype}, did not converge: nothing was learned; "
            "take dtype=torch.float64, a smaller memory, or rescale the features"
        ) from error
    n, (p, N) = Z.shape[1], M.shape
    V = Vt[:, :n].T
    EV = E @ V
    if p >= N:  # V is square, its rows are orthonormal
        rest, freedom = torch.zeros_like(E), E.new_zeros(())
    else:
        rest, freedom = E - EV @ V.T, (n - V.square().sum()).clamp(min=0)
    return Problem(W, U, S, V, EV, W @ U, rest, freedom)


def one_column(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The SVD of a single column, (z/|z|)|z| 1; a column of zeros has a U of zeros, which serves (*) as well."""
    length = torch.linalg.vector_norm(z)
    return z / length.clamp(min=torch.finfo(z.dtype).tiny), length[None], z.new_ones(1, 1)


def trial_points(total: float, bounds: tuple[float, float], count: int, eps: float) -> tuple[Tensor, Tensor]:
    """Values for Λ (float64): 0 and up to `count` to either side, and for each the sum τ = total + Λ it makes."""
    reaches = {-1: total / 2 - bounds[0], 1: bounds[1] - total}  # half: τ = total + Λ must not cancel
    sides = [
        sign * torch.logspace(math.log10(eps), math.log10(reach), count, dtype=torch.float64).clamp(max=reach)
        for sign, reach in reaches.items()
        if reach > eps
    ]
    trials = torch.cat([torch.zeros(1, dtype=torch.float64), *sides])
    return trials, (total + trials).clamp(*bounds)


def sgcv(problem: Problem, lam: Tensor, tau: Tensor) -> Tensor:
    """The sampled GCV function ‖C - W(Λ)Z‖² / tr(I - H(Λ))² at each Λ (t,) with its sum τ (t,), W(Λ) = W + s(Λ).

    H (nm, nm) takes the targets of this block to the predictions for them. With D = (S² + τI)⁻¹,
    C - W(Λ)Z = E(I - VVᵀ) + (τEV + ΛWUS)DVᵀ and tr(I - H) = m(tr(I - VVᵀ) + Σ_j τ D_j ‖V_j‖²).
    """
    _, _, S, V, EV, WU, rest, freedom = problem
    D = 1 / (S.square() + tau[:, None])
    inner = tau[:, None, None] * EV + lam[:, None, None] * (WU * S)
    residual = rest + (inner * D[:, None]) @ V.T
    trace = EV.shape[0] * (freedom + (tau[:, None] * D) @ V.square().sum(0))
    root: Tensor = torch.linalg.vector_norm(residual, dim=(1, 2)) / trace
    return root.square()


def increment(problem: Problem, lam: float, tau: float) -> Tensor:
    """The s (m, p) of (*): (EVS - ΛWU)DUᵀ in the span of U, -(Λ/τ)W across it."""
    W, U, S, _, EV, WU, _, _ = problem
    s = ((EV * S - lam * WU) / (S.square() + tau)) @ U.T
    if U.shape[1] < U.shape[0]:
        s -= (lam / tau) * (W - WU @ U.T)
    return s
