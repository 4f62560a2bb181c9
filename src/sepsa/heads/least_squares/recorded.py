"""An update of recursive least squares on a GPU as two CUDA graphs, which take less time to launch than kernels.

Outside of a captured step an update is some fifty kernels. They are recorded once for a number of rows, in two halves:

    look    Φ and Y are there; F = TΦᵀ, E = Y - ΦWᵀ, and their norms go to the host
    learn   `least_squares.attempt`, or of a large head `large_block`, stored in the state and the head

The second is launched when the host knows from the norms that its numbers will be finite: the head minimizes
J(W) = λ(|W - W₀|²_A + energy) + |Y - ΦWᵀ|² + Σ q|W - prior|², and A keeps at least the share `LEAST_SHARE` of the
ridge, so J(W) <= J(W₀) bounds the new weights by

    λ share ridge |W - W₀|² <= |E|² + ridge (|prior| + |W₀|)².

Where that bound does not suffice, where T must absorb H and where digits would be lost, `TorchBackend` learns with the
same state, which the first half leaves as it is.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sepsa.heads.base.parameters import follow, store
from sepsa.heads.base.ridge import coordinates, due, next_cursor
from sepsa.heads.least_squares import math as least_squares
from sepsa.heads.least_squares.eager import TorchBackend
from sepsa.heads.least_squares.large_block import RidgeUpdate, beside, learn_block, learn_ridge, together
from sepsa.heads.least_squares.math import CURSOR, GROWTH, PENDING, LeastSquaresState
from sepsa.heads.run import choose
from sepsa.heads.run.choose import Counters, Problem
from sepsa.interrupt import DeferredInterrupt
from sepsa.restoration import LEAST_SHARE

# A number of rows is recorded at its third update, and tried again _RETRY updates after one that left another kind of
# state than it had found. At most _KEPT recordings are kept; one not used for _UNUSED updates makes room for another.
_OCCURRENCES, _RETRY, _KEPT, _UNUSED = 3, 32, 4, 64

recording_lock = threading.Lock()  # the streams on which updates are recorded are shared


@functools.cache
def streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Where to record: one for the kernels that others wait for, which go first, and one beside it.

    Always the same two: torch allocates a workspace of 32 MB for cuBLAS on each new stream, and never frees it.
    """
    first, aside = (torch.cuda.Stream(device, priority=priority) for priority in (-1, 0))  # type: ignore[no-untyped-call]
    return first, aside


class RecordedUpdate:
    """The two graphs for n rows, and what they read and write beside the state."""

    def __init__(self, backend: GraphBackend, n: int, lam: float) -> None:
        state, linear, device = backend.state, backend.linear, backend.state.T.device
        (m, p), dtype = state.W.shape, state.T.dtype
        self.Phi, self.Y = state.T.new_ones(n, p), state.T.new_zeros(n, m)
        self.features = self.Phi[:, : linear.in_features]
        self.gathered = state.H is not None  # what the recording assumes
        self.used = 0
        self.seen: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.norms = torch.empty(3, dtype=dtype).pin_memory()  # of F, E and W, for the host
        self.limit = math.sqrt(least_squares.limit_of(p, n, lam, dtype))
        settings = lam, backend.ridge, backend.prior
        count = due(p, lam)
        in_place = p > choose.RECORDED_COPIES
        stream, aside = streams(device)

        def look(state: LeastSquaresState) -> tuple[LeastSquaresState, Tensor, Tensor, RidgeUpdate | None]:
            state = state._replace(W=follow(linear, state.W))
            ridge = None
            if in_place and count:
                with beside(aside):
                    at = coordinates(p, count, backend.cursor, device)
                    ridge = learn_ridge(state, *settings, at)
            F, E = least_squares.whiten(state, self.Phi, self.Y)
            norms = torch.stack([torch.linalg.vector_norm(part) for part in (F, E, state.W)])
            self.norms.copy_(norms, non_blocking=True)
            if ridge is not None:
                together(aside)
            return state, F, E, ridge

        def learn(state: LeastSquaresState, F: Tensor, E: Tensor, ridge: RidgeUpdate | None) -> LeastSquaresState:
            if in_place:
                return learn_block(state, self.Phi, F, E, lam, ridge, aside)
            return least_squares.attempt(state, self.Phi, self.Y, F, E, *settings, backend.cursor)

        def store_all(new: LeastSquaresState) -> None:
            for mine, learned in zip(state, new, strict=True):
                if mine is not None and learned is not None and learned is not mine:
                    mine.copy_(learned)
            store(linear, state.W.to(linear.weight.dtype))
            if count % p:
                backend.cursor.copy_(next_cursor(backend.cursor, count, p))

        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            new = learn(*look(state.copy()))  # on a copy: a graph needs its kernels loaded
            self.leaves_gathered = new.H is not None
        del new
        torch.cuda.synchronize(device)  # so that what they left is free on both streams
        if self.leaves_gathered != self.gathered:
            return  # the next update finds another kind of state
        self.look, self.learn = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        options: Any = {"stream": stream, "capture_error_mode": "thread_local"}  # others may pin memory meanwhile
        with torch.cuda.graph(self.look, **options):
            self._between = look(state)  # kept: the second graph reads them
        with torch.cuda.graph(self.learn, pool=self.look.pool(), **options):
            store_all(learn(*self._between))


class GraphBackend(TorchBackend):
    """The state of a head, at fixed addresses once an update is recorded, and its recordings."""

    name = "graph"
    _smallest_ridge = math.inf

    def __init__(self, problem: Problem, state: LeastSquaresState, counters: Counters) -> None:
        super().__init__(problem, state, counters.copy())
        self._recorded: dict[tuple[int, float], RecordedUpdate] = {}
        self._occurrences: dict[tuple[int, float], int] = {}
        self._updates, self._disabled = 0, False
        self._H: Tensor | None = None  # the memory of H, which is not always there
        # A graph writes where autograd does not see it; a write to no element tells it that the weight changed.
        self.version = problem.linear.weight.detach()[:0]

    def load(self, state: LeastSquaresState, counters: Counters) -> None:
        """Continue from this state; memory that a recording knows stays."""
        if not self._recorded:
            self.state, self.counters = state, counters.copy()
            return
        T, W, _, energy, ridge_left = self.state
        for mine, other in ((T, state.T), (W, state.W), (energy, state.energy), (ridge_left, state.ridge_left)):
            mine.copy_(other)
        self.state = LeastSquaresState(T, W, self._in_fixed_memory(state.H), energy, ridge_left)
        self.counters[:] = counters
        self.cursor.fill_(int(counters[CURSOR]))

    def penalize(self, prior: Tensor, ridge: Tensor) -> None:
        """Restore these ridges (p,) about this prior (m, p) from now on, in place: recordings know both."""
        super().penalize(prior, ridge)
        self._note_penalty()

    def _note_penalty(self) -> None:
        """Note on the host how large the prior and the ridges are."""
        self._prior_norm = float(torch.linalg.vector_norm(self.prior))
        self._largest_ridge = float(self.ridge.max())
        self._smallest_ridge = min(
            self._smallest_ridge, float(self.ridge.min())
        )  # a larger one is restored in rotation

    def learn(
        self, features: Tensor, targets: Tensor, sample_weight: Tensor | None, forgetting: float, plain: bool = False
    ) -> bool:
        """Learn samples by a recording where there is one."""
        self._updates += 1
        n, k = features.numel() // self.linear.in_features, self.linear.in_features
        recording = self._recording(n, forgetting) if sample_weight is None else None
        if recording is None:
            return super().learn(features, targets, sample_weight, forgetting)
        recording.features.copy_(features.detach().reshape(-1, k))
        recording.Y.copy_(targets.detach().reshape(n, -1))
        with torch.cuda.device(self.prior.device), DeferredInterrupt():
            learned = self._replay(recording, n, forgetting)
        return self.learn_rows(recording.Phi, recording.Y, float(n), forgetting) if learned is None else learned

    def _replay(self, recording: RecordedUpdate, n: int, lam: float) -> bool | None:
        """Learn what the recording holds. False: not finite; None: another route must learn it."""
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
            self.load(least_squares.fade(self.state, 1.0), np.array(counters))
        return True

    def _is_certain(self, counters: list[float], error: float, weight: float, lam: float, size: float) -> bool:
        """Whether the norms that the host has seen prove that the new weights are finite."""
        pull = self._largest_ridge * (self._prior_norm + weight) ** 2 if lam < 1.0 else 0.0
        step = math.sqrt((error * error + pull) / (lam * LEAST_SHARE * self._smallest_ridge))
        fits = weight + step < torch.finfo(self.linear.weight.dtype).max / 16
        # No factor fails: H, or I + FᵀF, lies between λ^updates and what was added to it.
        condition = (3.0 + counters[GROWTH] + size * size) / lam ** counters[PENDING]
        return fits and condition * len(self.ridge) * torch.finfo(self.ridge.dtype).eps < 1e-2

    def _recording(self, n: int, lam: float) -> RecordedUpdate | None:
        """The recording for n rows, if there is one and the state is of the kind that it knows."""
        key = n, lam
        recording = self._recorded.get(key)
        if recording is None:
            if len(self._occurrences) > _UNUSED:  # each update has a size or a forgetting of its own
                self._occurrences.clear()
            self._occurrences[key] = self._occurrences.get(key, 0) + 1
            waits = self._disabled or torch.cuda.is_current_stream_capturing() or not choose.records(self.state, n, lam)
            if waits or self._occurrences[key] < _OCCURRENCES or not self._has_room():
                return None
            try:
                here, off = torch.cuda.device(self.prior.device), torch.autocast("cuda", enabled=False)
                with recording_lock, torch.inference_mode(False), torch.no_grad(), here, off:
                    self._fix_addresses()
                    recording = RecordedUpdate(self, n, lam)
            except RuntimeError as error:
                self._disabled = True
                warnings.warn(
                    f"the update of a head could not be recorded as a CUDA graph and runs as it is, slower: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None
            if recording.leaves_gathered != recording.gathered:
                self._occurrences[key] = _OCCURRENCES - _RETRY
                return None
            self._recorded[key] = recording
            self.in_place = True
        recording.used = self._updates
        return recording if recording.gathered == (self.state.H is not None) else None

    def _has_room(self) -> bool:
        """Whether another update may be recorded, if necessary in place of one that was not used for long."""
        if len(self._recorded) < _KEPT:
            return True
        key, oldest = min(self._recorded.items(), key=lambda item: item[1].used)
        if self._updates - oldest.used < _UNUSED:
            return False
        del self._recorded[key]
        return True

    def _fix_addresses(self) -> None:
        """Give the state the memory that all recordings share."""
        if self._recorded:
            return
        state, _ = self.read()
        state = state.copy()
        self.state = state._replace(H=self._in_fixed_memory(state.H))
        self.cursor = torch.tensor(int(self.counters[CURSOR]), device=self.prior.device)
        self._note_penalty()

    def _in_fixed_memory(self, H: Tensor | None) -> Tensor | None:
        """A copy of H in the memory that recordings know."""
        if H is None:
            return None
        if self._H is None:
            self._H = torch.empty_like(H, memory_format=torch.contiguous_format)
        return self._H.copy_(H)
