"""Large blocks of a `SoftmaxNewton` on a GPU as CUDA graphs, one for each size of a block.

Two graphs run one after the other. The first is `look_large`, and sends its flags to the host, which waits for them
alone. The second is `finish_large`, and stores the new state only where the flags are good; while it runs, the host
launches the rest of the forward pass. Where a flag is bad nothing has changed, and the solver learns the block without
a graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepsa.heads.backends.cuda_graph import recording_lock, streams
from sepsa.heads.backends.memory import HeadMemory
from sepsa.heads.base import parameters
from sepsa.heads.math.cross_entropy import (
    CHUNK,
    CrossEntropyState,
    LargeBlock,
    UpdateSettings,
    finish_large,
    look_large,
)
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


def block_rows(linear: nn.Linear, features: Tensor, dtype: torch.dtype, large: bool) -> Tensor:
    """Φ (n, p) for an update: a large block of features in half precision on a GPU in float32, else in `dtype`."""
    half = features.dtype in (torch.float16, torch.bfloat16) and features.is_cuda
    return parameters.rows(linear, features, torch.float32 if large and half else dtype)


@contextmanager
def product_precision(Phi: Tensor) -> Iterator[None]:
    """Let products of float32 rows, which came in half precision, run in TF32, which has more digits than they."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        if Phi.is_cuda and Phi.dtype == torch.float32:
            matmul.allow_tf32 = True
        yield
    finally:
        matmul.allow_tf32 = before


class RecordedBlocks(HeadMemory):
    """The state at fixed addresses, and the recordings that change it."""

    def __init__(self, linear: nn.Linear, state: CrossEntropyState) -> None:
        self.now = state.copy()
        super().__init__(linear, self.now.W)
        self.previous = torch.empty_like(self.now.W)  # W before the last block
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
        too_many = kind.rows * len(self.now.weights) > CHUNK // 2  # arithmetic takes longer than launches
        if self.occurrences[kind] < OCCURRENCES or too_many or torch.cuda.is_current_stream_capturing():
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
            self.previous.copy_(block.W)
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
