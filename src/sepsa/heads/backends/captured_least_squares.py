"""The state of recursive least squares inside a CUDA graph: at fixed addresses, without a look from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads.backends.memory import HeadMemory, fused_kernels
from sepsa.heads.base.parameters import rows, store
from sepsa.heads.math import least_squares
from sepsa.heads.math.least_squares import (
    CURSOR,
    SAMPLES,
    STEPS,
    Root,
    coordinates,
    fade,
    learn_rows,
    whiten,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


class CapturedState(HeadMemory):
    """Where a recording writes to. Symbols as in `least_squares`; H is the identity."""

    def __init__(self, linear: nn.Linear, root: Root) -> None:
        (m, p), device = root.W.shape, root.W.device
        self.Z = root.W.new_zeros(p + m, p)
        super().__init__(linear, self.Z)
        self.T, self.W = self.Z[:p], self.Z[p:]
        self.energy, self.left = torch.zeros_like(root.energy), torch.zeros_like(root.left)
        self.tally = torch.zeros(3, dtype=torch.float64, device=device)  # updates, samples, cursor
        kernels = fused_kernels("least_squares", self.Z, self.weight)
        self.kernels = None if kernels is None or p + m > kernels.MAX_ROWS else kernels
        # Buffers of the fused kernels, by the size of a block and whether it fades.
        self.blocks: dict[tuple[int, bool], tuple[Tensor, ...]] = {}
        self._increments: dict[tuple[int, int], Tensor] = {}
        self._fading: dict[float, Tensor] = {}
        self._unfinished: Callable[[], None] | None = None  # teaches T a block of which only W has learned

    @property
    def root(self) -> Root:
        return Root(self.T, self.W, None, self.energy, self.left)

    def load(self, root: Root, counters: NDArray[np.float64]) -> None:
        """Take over a state whose H is the identity."""
        for name in ("T", "W", "energy", "left"):
            getattr(self, name).copy_(getattr(root, name))
        self.tally.copy_(torch.as_tensor(counters[[STEPS, SAMPLES, CURSOR]]))

    def counters(self) -> NDArray[np.float64]:
        """The counters of the host, as the device has them."""
        steps, samples, cursor = self.tally.tolist()
        return np.array([steps, samples, cursor % len(self.T), 0.0, 0.0])

    def update(self, features: Tensor, targets: Tensor, lam: float, ridge: Tensor, prior: Tensor) -> Tensor:
        """Learn rows; returns whether they were finite (0-d). T's own update may be left to `finish`."""
        self.finish()
        x, y = features.detach().reshape(-1, self.k), targets.detach().reshape(-1, len(self.W))
        n, p = len(x), len(self.T)
        count = least_squares.rotation(p, lam)
        if self.kernels is not None and count <= 1:
            if n == 1:
                fine: Tensor = self.kernels.rank_one(self, x, y, lam, ridge, prior)
                return fine
            if self.kernels.takes_block(n, len(self.W), count):
                self._unfinished, fine = self.kernels.block(self, x, y, lam, ridge, prior)
                return fine
        count = least_squares.restored(p, n, lam)  # as many as an update outside of a graph
        Phi, Y = rows(self.linear, x, self.Z.dtype), y.to(self.Z.dtype)
        at = coordinates(p, count, self.tally[2].long(), x.device) if count else None
        faded = fade(self.root, lam)
        F, E = whiten(faded, Phi, Y)
        new = learn_rows(faded, F, E, ridge, at, prior)
        head = new.W.to(self.weight.dtype)
        fine = new.T.sum().isfinite() & head.isfinite().all()
        for mine, learned in ((self.T, new.T), (self.W, new.W), (self.energy, new.energy), (self.left, new.left)):
            mine.copy_(learned.where(fine, mine))
        store(self.linear, self.W.to(self.weight.dtype))
        self.tally[1].mul_(torch.where(fine, lam, 1.0))
        self.tally.add_(fine * self.increment(n, count))
        return fine

    def fading(self, lam: float) -> Tensor:
        """λ and 1/√λ where the kernels read them, which would take a number of Python's for a float32."""
        if lam not in self._fading:
            self._fading[lam] = torch.tensor([lam, lam**-0.5], dtype=torch.float64).to(self.tally.device)
        return self._fading[lam]

    def increment(self, n: int, count: int) -> Tensor:
        """What a good update adds to the tally; made before a graph is captured, which may not make it."""
        if (n, count) not in self._increments:
            values = torch.tensor([1.0, n, count], dtype=torch.float64)
            self._increments[n, count] = values.to(self.tally.device)
        return self._increments[n, count]

    def finish(self) -> None:
        """T's own update, which neither forward nor backward pass waits for."""
        if self._unfinished is not None:
            self._unfinished()
        self._unfinished = None
