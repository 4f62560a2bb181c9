"""Which form of recursive least squares to trust: covariance, information or square root, in float32 and float64.

    python benchmarks/heads/forms.py

Writes forms.json. Each form learns the same hard streams; the error is that of its predictions, relative to a least
squares solution in float64 by QR, and `lost` tells whether its curvature stopped being positive definite.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.measure import write

STEPS, P = 20_000, 16
Step = Callable[[np.ndarray, float], None]


class Covariance:
    """B <- (B - BhhᵀB/(λ + hᵀBh))/λ, made symmetric: what textbooks and the paper's code do. 4p² operations."""

    def __init__(self, dtype: type) -> None:
        self.B, self.w = np.eye(P, dtype=dtype), np.zeros(P, dtype=dtype)

    def step(self, h: np.ndarray, y: float) -> None:
        Bh = self.B @ h
        k = Bh / (1 + h @ Bh)
        self.B -= np.outer(k, Bh)
        self.B = (self.B + self.B.T) / 2
        self.w += k * (y - h @ self.w)

    def positive(self) -> bool:
        return bool(np.isfinite(self.B).all() and np.linalg.eigvalsh(self.B.astype(np.float64))[0] > 0)


class Information:
    """A <- A + hhᵀ, then a solve by Cholesky. p³/3 operations more than the others."""

    def __init__(self, dtype: type) -> None:
        self.A, self.w = np.eye(P, dtype=dtype), np.zeros(P, dtype=dtype)

    def step(self, h: np.ndarray, y: float) -> None:
        self.A += np.outer(h, h)
        try:
            L = np.linalg.cholesky(self.A)
        except np.linalg.LinAlgError:
            return
        self.w += np.linalg.solve(L.T, np.linalg.solve(L, h * (y - h @ self.w)))

    def positive(self) -> bool:
        return bool(np.isfinite(self.A).all() and np.linalg.eigvalsh(self.A.astype(np.float64))[0] > 0)


class SquareRoot:
    """T <- (I - βffᵀ)T with f = Th: what RLS does. 6p² operations."""

    def __init__(self, dtype: type) -> None:
        self.T, self.w = np.eye(P, dtype=dtype), np.zeros(P, dtype=dtype)

    def step(self, h: np.ndarray, y: float) -> None:
        f = self.T @ h
        g = 1 + f @ f
        u = f @ self.T
        self.T -= np.outer(f / (g + np.sqrt(g)), u)
        self.w += u * ((y - h @ self.w) / g)

    def positive(self) -> bool:
        s = np.linalg.svd(self.T.astype(np.float64), compute_uv=False)
        return bool(np.isfinite(s).all() and s[-1] > 0)


def streams(rng: np.random.Generator) -> dict[str, np.ndarray]:
    plain = rng.normal(size=(STEPS, P))
    correlated = plain @ np.diag(np.logspace(0, -4, P)) @ np.linalg.qr(rng.normal(size=(P, P)))[0]
    burst = plain.copy()
    burst[:50] *= 1e4
    return {
        "standard features": plain,
        "features x 1e4": 1e4 * plain,
        "one constant vector x 1e4": np.tile(1e4 * plain[:1], (STEPS, 1)),
        "scales from 1 to 1e-4, rotated": correlated,
        "50 rows x 1e4, then standard": burst,
    }


def main() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for name, H in streams(rng).items():
        y = H @ rng.normal(size=P) + rng.normal(size=STEPS)
        truth = np.linalg.lstsq(np.vstack([H, np.eye(P)]), np.concatenate([y, np.zeros(P)]), rcond=None)[0]
        expected = H[-200:] @ truth
        for dtype in (np.float32, np.float64):
            for form in (Covariance, Information, SquareRoot):
                learner = form(dtype)
                features, targets = H.astype(dtype), y.astype(dtype)
                for h, t in zip(features, targets, strict=True):
                    learner.step(h, t)
                error = float(np.linalg.norm(H[-200:] @ learner.w - expected) / np.linalg.norm(expected))
                error = error if math.isfinite(error) else None
                row = {"stream": name, "dtype": dtype.__name__, "form": form.__name__, "error": error}
                rows.append(row | {"lost": not learner.positive()})
                shown = "not finite" if error is None else f"{error:.1e}"
                print(f"{name:32s} {dtype.__name__} {form.__name__:12s} {shown}{'  LOST' if rows[-1]['lost'] else ''}")
    write(__file__, {"steps": STEPS, "p": P, "rows": rows})


if __name__ == "__main__":
    np.seterr(all="ignore")  # breaking is what is measured
    main()
