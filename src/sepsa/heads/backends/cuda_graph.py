"""An update of recursive least squares on a GPU as two CUDA graphs, because launching often costs more than the work.

Outside of a captured step an update is some fifty kernels. They are recorded once for a number of rows, in two halves:

    look    Φ and Y are there; F = TΦᵀ, E = Y - ΦWᵀ, and their norms go to the host
    learn   `least_squares.attempt`, or of a large head `large_block`, stored in the state and the head

The second is launched when the host has seen from the norms that its numbers will be finite: the head minimizes
J(W) = λ(|W - W₀|²_A + energy) + |Y - ΦWᵀ|² + Σ q|W - prior|², and A keeps at least half of the ridge, so J(W) <= J(W₀)
bounds the new weights by

    λ ridge/2 |W - W₀|² <= |E|² + ridge (|prior| + |W₀|)².

Where that does not tell, and where H is to be absorbed or digits would be lost, the other routes of `least_squares`
learn with the same state, which the first half leaves as it is.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sepsa.heads.backends.large_block import Ridge, beside, learn_block, learn_ridge, together
from sepsa.heads.base.parameters import follow, join, samples, store
from sepsa.heads.math import least_squares
from sepsa.heads.math.least_squares import CURSOR, GROWTH, PENDING, Root
from sepsa.interrupt import DeferredInterrupt

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A number of rows is recorded when it comes for the third time, and tried again so many updates after one that left
# another kind of state than it had found. So many are kept, and one gives way to another when it has not come for long.
_SEEN, _AGAIN, _KEPT, _RESTED = 3, 32, 4, 256
# Up to this p a recording may hold a few (p, p) matrices beside the state.
_SMALL = 2048


_one_at_a_time = threading.Lock()  # records, on streams that all share


@functools.cache
def streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Where to record: one for the kernels that others wait for, which go first, and one beside it.

    Always the same two, because torch keeps 32 MB of BLAS's for each stream that there ever was.
    """
    first, aside = (torch.cuda.Stream(device, priority=priority) for priority in (-1, 0))  # type: ignore[no-untyped-call]
    return first, aside


def is_worth_recording(root: Root, n: int, lam: float) -> bool:
    """Whether to record n rows: always where T changes in place, else where a few more matrices are small."""
    return len(root.T) <= _SMALL or least_squares.is_block(root, n, lam)


def kind(root: Root) -> tuple[bool, bool, bool]:
    """What a recording takes for granted: which parts there are."""
    return root.H is None, root.whole, root.gram is None


class Recording:
    """The two graphs for n rows, and what they read and write beside the state."""

    def __init__(self, replay: Replay, n: int, lam: float) -> None:
        root, linear, device = replay.root, replay.linear, replay.root.T.device
        (m, p), dtype = root.W.shape, root.T.dtype
        self.Phi, self.Y = root.T.new_ones(n, p), root.T.new_zeros(n, m)
        self.features = self.Phi[:, : linear.in_features]
        self.kind = kind(root)
        self.used = 0
        self.seen: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.norms = torch.empty(3, dtype=dtype).pin_memory()  # of F, E and W, for the host
        self.limit = math.sqrt(least_squares.limit_of(p, n, lam, dtype))
        settings = lam, replay.ridge, replay.prior
        count = least_squares.restored(p, n, lam)
        in_place = p > _SMALL
        stream, aside = streams(device)

        def look(root: Root) -> tuple[Root, Tensor, Tensor, Ridge | None]:
            root = root._replace(W=follow(linear, root.W))
            ridge = None
            if in_place and count:
                with beside(aside):
                    at = least_squares.coordinates(p, count, replay.cursor, device)
                    ridge = learn_ridge(root, *settings, at)
            F, E = least_squares.whiten(root, self.Phi, self.Y)
            norms = torch.stack([torch.linalg.vector_norm(part) for part in (F, E, root.W)])
            self.norms.copy_(norms, non_blocking=True)
            if ridge is not None:
                together(aside)
            return root, F, E, ridge

        def learn(root: Root, F: Tensor, E: Tensor, ridge: Ridge | None) -> Root:
            if in_place:
                return learn_block(root, self.Phi, F, E, lam, ridge, aside)
            return least_squares.attempt(root, self.Phi, self.Y, F, E, *settings, replay.cursor)

        def store_all(new: Root) -> None:
            for mine, learned in zip(root[:5], new[:5], strict=True):
                if mine is not None and learned is not None and learned is not mine:
                    mine.copy_(learned)
            store(linear, root.W.to(linear.weight.dtype))
            if count % p:
                replay.cursor.add_(count).remainder_(p)

        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self.leaves = kind(learn(*look(root.map(Tensor.clone))))  # of a copy: a graph wants its kernels loaded
        torch.cuda.synchronize(device)  # so that what they left is free on both streams
        if self.leaves != self.kind:
            return  # the next update finds another kind of state
        self.look, self.learn = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        options: Any = {"stream": stream, "capture_error_mode": "thread_local"}  # others may pin memory meanwhile
        with torch.cuda.graph(self.look, **options):
            self._between = look(root)  # kept: the second graph reads them
        with torch.cuda.graph(self.learn, pool=self.look.pool(), **options):
            store_all(learn(*self._between))


class Replay:
    """The state of a head, at fixed addresses once something is recorded, and its recordings."""

    def __init__(
        self, linear: nn.Linear, root: Root, counters: NDArray[np.float64], prior: Tensor, ridge: Tensor
    ) -> None:
        self.linear, self.prior, self.ridge = linear, prior, ridge
        self.root, self.counters = root, counters.copy()
        self._recorded: dict[tuple[int, float], Recording] = {}
        self._occurrences: dict[tuple[int, float], int] = {}
        self._updates, self._disabled = 0, False
        self._memory: dict[str, Tensor] = {}  # of H and gram, which are not always there
        # A graph writes behind autograd's back; a write to no element tells it that the weight changed.
        self.version = linear.weight.detach()[:0]

    @property
    def in_place(self) -> bool:
        """Whether an update writes into the tensors of the state, and does not make others."""
        return bool(self._recorded)

    def checkpoint(self) -> tuple[Root, NDArray[np.float64], Tensor]:
        """The state, its counters and the head as they are now."""
        return self.root.map(Tensor.clone), self.counters.copy(), join(self.linear)

    def load(self, root: Root, counters: NDArray[np.float64]) -> None:
        """Take over a state; where graphs know the memory, it stays."""
        if not self._recorded:
            self.root, self.counters = root, counters.copy()
            return
        T, W, _, energy, left, _, _ = self.root
        for mine, other in ((T, root.T), (W, root.W), (energy, root.energy), (left, root.left)):
            mine.copy_(other)
        self.root = Root(T, W, self._keep("H", root.H), energy, left, root.whole, self._keep("gram", root.gram))
        self.counters[:] = counters
        self.cursor.fill_(int(counters[CURSOR]))

    def learn(
        self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, lam: float
    ) -> tuple[bool | None, Tensor, Tensor, float]:
        """Learn samples by a recording. False: they are not finite; None: another route must.

        Returns Φ, Y, each row scaled by the root of its sample's weight, and the sum of the weights as well.
        """
        self._updates += 1
        n, k = features.numel() // self.linear.in_features, self.linear.in_features
        recording = self._recording(n, lam) if sample_weight is None else None
        if recording is None:
            return None, *samples(self.linear, features, targets, sample_weight, self.root.T.dtype)
        recording.features.copy_(features.detach().reshape(-1, k))
        recording.Y.copy_(targets.detach().reshape(n, -1))
        with torch.cuda.device(self.prior.device), DeferredInterrupt():
            return self._replay(recording, n, lam), recording.Phi, recording.Y, float(n)

    def _replay(self, recording: Recording, n: int, lam: float) -> bool | None:
        recording.look.replay()
        recording.seen.record()
        recording.seen.synchronize()
        size, error, weight = recording.norms.tolist()
        if not math.isfinite(size * size + error * error):
            return False
        p, dtype = len(self.ridge), self.ridge.dtype
        counters = least_squares.advance_counters(self.counters.tolist(), p, n, float(n), lam, size * size)
        if size > recording.limit or not self._is_certain(counters, error, weight, lam, size):
            return None
        self.version.zero_()
        recording.learn.replay()
        self.counters[:] = counters
        if counters[PENDING] and least_squares.must_absorb(counters, p, lam, dtype):
            counters[PENDING] = counters[GROWTH] = 0.0
            self.load(least_squares.fade(self.root, 1.0), np.array(counters))
        return True

    def _is_certain(self, counters: list[float], error: float, weight: float, lam: float, size: float) -> bool:
        """Whether the numbers that the host has seen say that the new weights are finite."""
        pull = self._strongest * (self._held + weight) ** 2 if lam < 1.0 else 0.0
        step = math.sqrt(2.0 * (error * error + pull) / (lam * self._weakest))
        fits = weight + step < torch.finfo(self.linear.weight.dtype).max / 16
        # No factor fails: H, or I + FᵀF, lies between λ^updates and what was added to it.
        condition = (3.0 + counters[GROWTH] + size * size) / lam ** counters[PENDING]
        return fits and condition * len(self.ridge) * torch.finfo(self.ridge.dtype).eps < 1e-2

    def _recording(self, n: int, lam: float) -> Recording | None:
        """The recording for n rows, if there is one and the state is of the kind that it knows."""
        key = n, lam
        recording = self._recorded.get(key)
        if recording is None:
            if len(self._occurrences) > _RESTED:  # each update has a size or a forgetting of its own
                self._occurrences.clear()
            self._occurrences[key] = self._occurrences.get(key, 0) + 1
            waits = (
                self._disabled or torch.cuda.is_current_stream_capturing() or not is_worth_recording(self.root, n, lam)
            )
            if waits or self._occurrences[key] < _SEEN or not self._has_room():
                return None
            try:
                here, off = torch.cuda.device(self.prior.device), torch.autocast("cuda", enabled=False)
                with _one_at_a_time, torch.inference_mode(False), torch.no_grad(), here, off:
                    self._fix_addresses()
                    recording = Recording(self, n, lam)
            except RuntimeError as error:
                self._disabled = True
                warnings.warn(
                    f"the update of a head could not be recorded as a CUDA graph and runs as it is, slower: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None
            if recording.leaves != recording.kind:
                self._occurrences[key] = _SEEN - _AGAIN
                return None
            self._recorded[key] = recording
        recording.used = self._updates
        return recording if recording.kind == kind(self.root) else None

    def _has_room(self) -> bool:
        """Whether one more may be recorded; one that rests gives way."""
        if len(self._recorded) < _KEPT:
            return True
        key, oldest = min(self._recorded.items(), key=lambda item: item[1].used)
        if self._updates - oldest.used < _RESTED:
            return False
        del self._recorded[key]
        return True

    def _fix_addresses(self) -> None:
        """Give the state the memory that all recordings share."""
        if self._recorded:
            return
        root = self.root.map(torch.clone)
        self.root = root._replace(H=self._keep("H", root.H), gram=self._keep("gram", self.root.gram))
        self.cursor = torch.tensor(int(self.counters[CURSOR]), device=self.prior.device)
        self._held = float(torch.linalg.vector_norm(self.prior))
        self._weakest, self._strongest = float(self.ridge.min()), float(self.ridge.max())

    def _keep(self, name: str, value: Tensor | None) -> Tensor | None:
        """A copy in the memory that recordings know."""
        if value is None:
            return None
        if name not in self._memory:
            self._memory[name] = torch.empty_like(value, memory_format=torch.contiguous_format)
        return self._memory[name].copy_(value)
