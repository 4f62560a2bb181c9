"""Large blocks of a `SoftmaxNewton` on a GPU as CUDA graphs, one for each size of a block.

Two graphs run one after the other. The first is `look_large`, and sends its flags to the host, which waits for them
alone. The second is `finish_large`, and stores the new state only where the flags are good; while it runs, the host
launches the rest of the forward pass. Where a flag is bad nothing has changed, and the solver learns the block without
a graph.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepsa.heads.base import parameters
from sepsa.heads.cross_entropy.eager import Learned, Samples, TorchBackend, block_rows, product_precision
from sepsa.heads.cross_entropy.math import (
    CHUNK,
    CrossEntropyState,
    LargeBlock,
    UpdateSettings,
    finish_large,
    is_large,
    look_large,
)
from sepsa.heads.least_squares.recorded import recording_lock, streams
from sepsa.heads.run.memory import HeadMemory
from sepsa.interrupt import DeferredInterrupt

OCCURRENCES, KEPT = 3, 4  # a size is recorded at its third block; at most so many are
_UPDATED = ("W", "shares", "ridge_left", "counters", "A")


class Kind(NamedTuple):
    """What a recording depends on."""

    rows: int
    features: torch.dtype
    targets: tuple[int, ...]  # their shape behind the rows; () for labels
    target_dtype: torch.dtype
    settings: UpdateSettings


class Recording(NamedTuple):
    """The two graphs, and where they find a block."""

    look: torch.cuda.CUDAGraph
    finish: torch.cuda.CUDAGraph
    features: Tensor
    targets: Tensor


class RecordedBlocks(HeadMemory):
    """The state at fixed addresses, and the recordings that change it."""

    def __init__(self, linear: nn.Linear, state: CrossEntropyState) -> None:
        self.now = state.copy()
        super().__init__(linear, self.now.W)
        self.flags = torch.empty(2, dtype=torch.float64).pin_memory()
        self.seen: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.version = self.weight[:0]  # a write to it tells autograd that the weight has changed
        self.graphs: dict[Kind, Recording] = {}
        self.occurrences: dict[Kind, int] = {}
        self.between: list[tuple[LargeBlock, Tensor]] = []
        self.disabled = False

    def load(self, state: CrossEntropyState) -> None:
        """Take over a state of the same shapes that has A."""
        for name in (*_UPDATED, "prior", "weights", "ridge"):
            getattr(self.now, name).copy_(getattr(state, name))

    def learn(self, state: CrossEntropyState, features: Tensor, targets: Tensor, kind: Kind) -> bool:
        """Learn a block by its recording, from this state. False: nothing was learned, or there is no recording."""
        graph = self._graph(kind)
        if graph is None:
            return False
        look, finish, x, y = graph
        x.copy_(features.detach().reshape(x.shape))
        y.copy_(targets.detach().reshape(y.shape))
        if state is not self.now:
            self.load(state)
        with torch.cuda.device(x.device), DeferredInterrupt():
            self.version.zero_()
            look.replay()
            self.seen.record()
            finish.replay()
            self.seen.synchronize()
        finite, lost = self.flags.tolist()
        return bool(finite and not lost)

    def _graph(self, kind: Kind) -> Recording | None:
        graph = self.graphs.get(kind)
        if graph is not None or self.disabled or len(self.graphs) >= KEPT:
            return graph
        self.occurrences[kind] = self.occurrences.get(kind, 0) + 1
        if self.occurrences[kind] < OCCURRENCES or torch.cuda.is_current_stream_capturing():
            return None
        try:
            device = self.weight.device
            here, off = torch.cuda.device(device), torch.autocast("cuda", enabled=False)
            with recording_lock, torch.inference_mode(False), torch.no_grad(), here, off:
                graph = self.graphs[kind] = self._record(kind, device)
        except RuntimeError as error:
            self.disabled = True
            warnings.warn(
                f"the update of a head could not be recorded as a CUDA graph and runs as it is, slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        return graph

    def _record(self, kind: Kind, device: torch.device) -> Recording:
        x = torch.zeros(kind.rows, self.k, dtype=kind.features, device=device)
        y = torch.zeros(kind.rows, *kind.targets, dtype=kind.target_dtype, device=device)
        linear, stream = self.linear, streams(device)[0]

        def look(now: CrossEntropyState) -> tuple[LargeBlock, Tensor]:
            W = parameters.follow(linear, now.W)
            Phi = block_rows(linear, x, W.dtype, large=True)
            with product_precision(Phi):
                block, finite, lost = look_large(now, W, Phi, y, None, kind.settings)
            self.flags.copy_(torch.stack([finite, lost]), non_blocking=True)
            return block, finite & ~lost

        def finish(now: CrossEntropyState, block: LargeBlock, good: Tensor) -> None:
            new, old = finish_large(now, block), now._replace(W=block.W)
            for name in _UPDATED:
                torch.where(good, getattr(new, name), getattr(old, name), out=getattr(now, name))
            parameters.store(linear, now.W.to(kind.settings.head_dtype))

        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            trial = self.now.copy()
            finish_large(trial, look(trial)[0])  # a graph needs its kernels loaded
        torch.cuda.synchronize(device)
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        options: Any = {"stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graphs[0], **options):
            block, good = look(self.now)
        with torch.cuda.graph(graphs[1], pool=graphs[0].pool(), **options):
            finish(self.now, block, good)
        self.between.append((block, good))  # kept: the second graph reads them
        return Recording(*graphs, x, y)


class GraphBackend(TorchBackend):
    """Updates of which those of large blocks are recorded, in memory that is this backend's own."""

    name = "graph"
    memory: RecordedBlocks | None = None

    def owns(self, state: CrossEntropyState) -> bool:
        """Whether recordings write into the tensors of this state."""
        return self.memory is not None and state.W is self.memory.now.W

    def learn(self, state: CrossEntropyState, samples: Samples) -> Learned:
        """Learn a large block without weights by its recording where there is one, and store its result."""
        return self._replayed(state, samples) or super().learn(state, samples)

    def _replayed(self, state: CrossEntropyState, samples: Samples) -> Learned | None:
        features, targets, sample_weight, settings, _ = samples
        n = samples.rows
        slow = n * len(state.weights) > CHUNK // 2  # arithmetic takes longer than launches
        if state.A is None or sample_weight is not None or slow or not is_large(state.W.shape[1], n):
            return None
        memory = self.memory
        if memory is None or not memory.lies_in(self.linear):
            memory = self.memory = RecordedBlocks(self.linear, state)
        shape = (targets.numel() // n,) if targets.is_floating_point() else ()
        kind = Kind(n, features.dtype, shape, targets.dtype, settings)
        return Learned(memory.now) if memory.learn(state, features, targets, kind) else None
