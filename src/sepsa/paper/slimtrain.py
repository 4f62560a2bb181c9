"""slimTrain's head in the arithmetic of its published code, to find out what the paper's figures were made with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sepsa.paper.slimtik import SlimTik
from sepsa.paper.tikhonov import factorize


class PublishedSlimTik(SlimTik):
    """`SlimTik` as its authors' script has it; `SlimTik` itself is the one to use.

    Three things differ: GCV's trace is n - m tr H for n samples and m outputs, not m(n - tr H), so that it has a pole
    where tr H = n/m; Λ may reach the upper bound at every step, and only the lower one bounds its sum τ; and
    (USSUᵀ + τI)⁻¹ is formed as I/τ - U(...)Uᵀ/τ², which loses every digit of float32 when τ is small.
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
