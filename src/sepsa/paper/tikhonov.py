"""The mathematics of `SlimTik`, a limited-memory Tikhonov method that chooses its regularization: pure functions.

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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
