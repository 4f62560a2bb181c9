"""The head of slimTrain, a limited-memory Tikhonov method that chooses its regularization.

After Newman, Chung, Chung and Ruthotto, "slimTrain", SIAM J. Sci. Comput. 44 (2022), in its symbols, and Chung, Chung,
Slagel and Tenorio, "Sampled limited memory methods for massive linear inverse problems", Inverse Problems 36 (2020).

Symbols, at step k: Z (p, n) the features in columns, with a last row of ones where the head has a bias, and C (m, n)
the targets, both divided by √n, so that squares sum to means; M (p, ·) the Z of the last r steps;
W (m, p) the head; E = C - WZ; Λ the parameter chosen now, τ = Λ + Σ Λ_i its sum with all chosen before. The head
moves by the s (m, p) that minimizes

    ½‖s [Z M] - [E 0]‖² + ½ τ‖s + (Λ/τ) W‖²,    s = (EZᵀ - ΛW)(ZZᵀ + MMᵀ + τI)⁻¹                                (*)

The zeros mean that the head fitted the old blocks as well as it could, so that their targets need not be kept. (*) is
the step from the minimizer of Σ‖WZ_i - C_i‖² + Σ Λ_i ‖W‖² without the new block to the one with it, except that blocks
older than M are forgotten.

All outputs share one thin SVD [Z M] = USVᵀ, in which (*) and the criterion for Λ are diagonal. Both are written without
the differences I - ZᵀU(...)UᵀZ and I/τ - U(...)Uᵀ/τ², which lose every digit of float32 when τ is small.

The arithmetic runs on the CPU, wherever the head is: the choice of Λ needs its numbers there, so a step waits for the
head's device once instead of at each number that is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sepsa.heads.base import checks, parameters
from sepsa.heads.base.head import OwnsHead, assign, head_of, shape_words
from sepsa.states import schema
from sepsa.validation import at_least, in_range

_SETTINGS = ("memory", "regularization", "bounds", "candidates")


class TikhonovProblem(NamedTuple):
    """(*) in the basis of the thin SVD [Z M] = USVᵀ, of q singular values."""

    W: Tensor  # (m, p)
    U: Tensor  # (p, q)
    S: Tensor  # (q,)
    V: Tensor  # (n, q): the rows of V that belong to Z, so that Z = USVᵀ
    EV: Tensor  # (m, q)
    WU: Tensor  # (m, q)
    rest: Tensor  # (m, n): E(I - VVᵀ), what no s can fit
    freedom: Tensor  # (): tr(I - VVᵀ)


def factorize(Z: Tensor, blocks: Sequence[Tensor], E: Tensor, W: Tensor) -> TikhonovProblem:
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
    return TikhonovProblem(W, U, S, V, EV, W @ U, rest, freedom)


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


def sgcv(problem: TikhonovProblem, lam: Tensor, tau: Tensor) -> Tensor:
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


def increment(problem: TikhonovProblem, lam: float, tau: float) -> Tensor:
    """The s (m, p) of (*): (EVS - ΛWU)DUᵀ in the span of U, -(Λ/τ)W across it."""
    W, U, S, _, EV, WU, _, _ = problem
    s = ((EV * S - lam * WU) / (S.square() + tau)) @ U.T
    if U.shape[1] < U.shape[0]:
        s -= (lam / tau) * (W - WU @ U.T)
    return s


class SlimTikState(NamedTuple):
    """What an update changes; each update makes a new one."""

    steps: int
    last_regularization: float  # Λ
    regularization_sum: float  # τ
    blocks: tuple[Tensor, ...]  # the columns of M, the oldest block first


class SlimTik(OwnsHead):
    """Train a linear head by sampled limited-memory Tikhonov regularization, the method of slimTrain.

    Choose it to compare with slimTrain, or where batches are large and the ridge should follow from the data. For
    single samples choose `RLS`, which remembers all of them: this method fits each step to the few blocks in memory,
    and the head oscillates. While the memory holds all blocks seen, the weights are ridge regression on all of them,
    the minimizer of

        sum_blocks mean_i ||targets_i - W features_i||^2
            + ridge ||W - (regularization / ridge) initial||^2

    where the ridge is `regularization_sum` and `initial` is the head's weights at `bind`. Older blocks are forgotten.
    Each update adds a Λ, positive or negative, to that sum: the one with the smallest sampled generalized
    cross-validation error among 0 and log-spaced candidates. The sum falls by at most half in one update.

    Args:
        memory: Number of earlier blocks that are kept.
        regularization: The initial ridge.
        bounds: Smallest and largest value of the ridge.
        candidates: Number of candidates for Λ on either side of 0.
        dtype: Dtype of the arithmetic, which runs on the CPU. Features and targets may have any floating dtype.

    Attributes:
        linear: The `nn.Linear` that the solver is bound to, or None.

    See also:
        `RLS(ridge="evidence")`, which also chooses its ridge and forgets nothing.

    Examples:
        >>> import torch
        >>> from reproduction.slimtik import SlimTik
        >>> _ = torch.manual_seed(0)
        >>> features = torch.randn(100, 2)
        >>> targets = features @ torch.tensor([[2.0], [-1.0]])
        >>> head = SlimTik().bind(torch.nn.Linear(2, 1))
        >>> for step in range(20):
        ...     head.update(features, targets)
        >>> bool(head.loss(head.predict(features), targets) < 1e-2)
        True
    """

    _replaced = ("_state", "_previous")

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
        checks.check_dtype(dtype)
        self.memory = memory
        self.regularization = float(regularization)
        self.bounds = (float(bounds[0]), float(bounds[1]))
        self.candidates = candidates
        self.dtype = dtype
        self._previous: Tensor | None = None  # the weights before the last update, for `health`

    def _start(self, linear: nn.Linear) -> None:
        self._state = SlimTikState(0, self.regularization, self.regularization, ())

    def _ready(self) -> nn.Linear:
        return head_of(self)  # the memory stays on the CPU, where the arithmetic runs

    def state_dict(self) -> dict[str, Any]:
        """Return the settings and the memory, without the head's weights, which are in the `nn.Linear`."""
        shape = self._shape()
        state = self._state._asdict() | {"blocks": [block.clone() for block in self._state.blocks]}
        return {"shape": shape} | {name: getattr(self, name) for name in _SETTINGS} | state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, with its settings.

        Args:
            state_dict: The result of `state_dict` of a solver whose head has the same shape.

        Raises:
            ValueError: An entry is missing or wrong; the message names it and nothing changed.
        """
        shape = self._shape()
        saved = schema.read("state_dict", state_dict, {"shape", *_SETTINGS, *SlimTikState._fields}, "SlimTik")
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
        state = SlimTikState(steps, last, total, tuple(copies))
        settings: dict[str, Any] = {"memory": memory, "candidates": candidates, "bounds": tuple(map(float, bounds))}
        assign(self, **settings, regularization=float(regularization), _state=state, _previous=None)

    @property
    def steps(self) -> int:
        """The number of updates that the head has learned."""
        return self._state_now().steps

    @property
    def last_regularization(self) -> float:
        """The Λ that the last update chose; `regularization` before the first update."""
        return self._state_now().last_regularization

    @property
    def regularization_sum(self) -> float:
        """The ridge: `regularization` plus every Λ chosen since."""
        return self._state_now().regularization_sum

    @property
    def samples(self) -> float:
        """The number of samples that the head remembers: those of the blocks in memory."""
        return float(sum(block.shape[1] for block in self._state_now().blocks))

    @torch.no_grad()
    def covariance(self) -> Tensor:
        """Return B (p, p), on the CPU, the inverse of the curvature MMᵀ + τI, where each block counts by its mean."""
        B: Tensor = torch.linalg.inv(self._curvature())
        return (B + B.T) / 2

    @torch.no_grad()
    def health(self) -> dict[str, float]:
        """Numbers that show why a run goes wrong, to log every hundred steps or so.

        - `condition`, the largest over the smallest eigenvalue of the curvature MMᵀ + τI. Above 1e5 in float32 digits
          are lost: normalize the features, raise the lower of `bounds`, or take dtype=torch.float64.
        - `smallest_eigenvalue` of that curvature. Near `regularization_sum`: the memory spans fewer directions than
          the head has features; raise `memory` or the batch size.
        - `effective_samples`, those in the memory.
        - `last_step`, the norm of the weights' change in the last update. It should fall as the run goes on; if it
          does not, the batches are too small for this method. NaN before an update.
        - `regularization_sum`, the ridge as chosen so far. At one of its `bounds`: widen them.
        """
        state, linear = self._state_now(), head_of(self)
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
        return f"SlimTik(memory={self.memory}, regularization={self.regularization:g}{shape_words(self.linear)})"

    def _state_now(self) -> SlimTikState:
        head_of(self)  # a head without one has no state
        return self._state

    def _shape(self) -> tuple[int, int]:
        linear = head_of(self)
        return linear.out_features, parameters.width(linear)

    def _curvature(self) -> Tensor:
        """MMᵀ + τI (p, p) in float64, of the blocks in memory."""
        state, p = self._state_now(), self._shape()[1]
        M = torch.cat([torch.zeros(p, 0, dtype=self.dtype), *state.blocks], 1).double()
        return M @ M.T + state.regularization_sum * torch.eye(p, dtype=torch.float64)

    @staticmethod
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error, the loss that the head minimizes, for the body to follow.

        Args:
            outputs: Outputs (..., out_features).
            targets: Targets of the same shape.

        Returns:
            A scalar.
        """
        checks.check_outputs(outputs, targets)
        return functional.mse_loss(outputs, targets)

    @torch.no_grad()
    def update(self, features: Tensor, targets: Tensor, sample_weight: Tensor | None = None) -> None:
        """Learn samples as one block.

        Args:
            features: Inputs of the head (..., in_features).
            targets: Targets (..., out_features).
            sample_weight: Must be None: the method has no weights.

        Raises:
            ValueError: A shape is wrong or a value is not finite; nothing was learned.
        """
        linear = head_of(self)
        if sample_weight is not None:
            raise ValueError(
                f"sample_weight must be None, got a {type(sample_weight).__name__}: "
                "slimTik weighs all samples of a batch alike; RLS takes weights"
            )
        checks.check_rows(linear, features, targets)
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
            raise checks.explain_nonfinite(features, targets, linear)

        state = self._state
        W, lam, tau = self._solve(Z, E, W)
        rounded = W.to(linear.weight.dtype)
        if not math.isfinite(float(rounded.abs().max())):
            raise checks.explain_nonfinite(features, targets, linear, W)
        head = rounded.to(linear.weight.device)
        new = SlimTikState(state.steps + 1, lam, tau, (*state.blocks, Z)[-self.memory :] if self.memory else ())
        assign(self, head, _state=new, _previous=start)

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
        """Return the head's outputs. A standard deviation is not available: it would need the targets of earlier
        blocks.

        Args:
            features: Inputs of the head (..., in_features).

        Returns:
            Outputs (..., out_features), computed in the solver's dtype.
        """
        linear = head_of(self)
        checks.check_rows(linear, features)
        Phi = parameters.rows(linear, features, self.dtype)
        if not bool(Phi.square().sum().isfinite()):
            raise checks.explain_nonfinite(features, None, linear)
        outputs = Phi @ parameters.join(linear).to(self.dtype).T
        return outputs.reshape(*features.shape[:-1], linear.out_features).to(linear.weight.dtype)


class PublishedSlimTik(SlimTik):
    """`SlimTik` with the arithmetic of its authors' published code, to reproduce the paper's numbers.

    Use `SlimTik` for everything else. Three things differ: GCV's trace is n - m tr H for n samples and m outputs, not
    m(n - tr H), so that it has a pole where tr H = n/m; Λ may reach the upper bound at every step, and only the lower
    one bounds its sum τ; and (USSUᵀ + τI)⁻¹ is formed as I/τ - U(...)Uᵀ/τ², which loses every digit of float32 when τ
    is small.
    """

    def _solve(self, Z: Tensor, E: Tensor, W: Tensor) -> tuple[Tensor, float, float]:
        _, U, S, V, _, WU, _, _ = factorize(Z, self._state.blocks, E, W)
        low, high = self.bounds
        eps, total = torch.finfo(self.dtype).eps, self._state.regularization_sum
        reach = total / 2 - low
        sides = [torch.logspace(math.log10(eps), math.log10(high), self.candidates)]
        if reach > 0:
            sides.append(-torch.logspace(math.log10(eps), math.log10(reach), self.candidates))
        trials = torch.cat(sides).to(W)
        ZU = V * S
        D = 1 / (S.square() + total + trials[:, None])
        residual = ((trials[:, None, None] * WU - E @ ZU) * D[:, None]) @ ZU.T + E
        trace = len(W) * (D @ ZU.square().sum(0))
        values = residual.square().sum((1, 2)) / (Z.shape[1] - trace).square()
        lam = float(trials[values.nan_to_num(nan=math.inf).argmin()])
        tau = total + lam
        inverse = torch.eye(len(U), dtype=W.dtype) / tau - ((U * (S.square() / (1 + S.square() / tau))) @ U.T) / tau**2
        return W + (E @ Z.T - lam * W) @ inverse, lam, tau


def on_host(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """The tensors on the CPU, in one transfer instead of several that each wait for the device."""
    flat = torch.cat([tensor.detach().to(dtype).reshape(-1) for tensor in tensors]).cpu()
    parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def check_settings(memory: int, regularization: float, bounds: tuple[float, float], candidates: int) -> None:
    """Check hyperparameters, given or loaded."""
    at_least("memory", memory, 0)
    at_least("candidates", candidates, 2)
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"bounds must be a pair (low, high), got {bounds!r}")
    low, high = (in_range(f"bounds[{i}]", bound, 0.0, math.inf) for i, bound in enumerate(bounds))
    if low >= high:
        raise ValueError(f"bounds must be a pair (low, high) with low < high, got {bounds!r}")
    if not low <= in_range("regularization", regularization, 0.0, math.inf) <= high:
        raise ValueError(f"regularization must be within bounds {bounds!r}, got {regularization}: widen the bounds")
