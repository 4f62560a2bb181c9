"""Updates outside of a captured step as CUDA graphs, which take less time to launch than their kernels.

An update has two halves, each of which becomes a graph: `look` tells the host what it must know of the samples, and
`finish` computes the new state, which `store` writes to the memory of the present one. A kind of update is recorded at
its third occurrence, after both halves have run on a copy of the state.
"""

from __future__ import annotations

import functools
import gc
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sepsa.heads.base.parameters import place_of

# A kind of update is recorded at its third occurrence, and tried again RETRY occurrences after one that left another
# kind of state than it had found. At most KEPT recordings are kept; one that UNUSED updates have not used makes room
# for another. So many kinds are counted: where there are more, each update has a size or a forgetting of its own.
OCCURRENCES, RETRY, KEPT, UNUSED, COUNTED = 3, 32, 4, 64, 64

_lock = threading.Lock()  # the streams on which updates are recorded are shared


@functools.cache
def streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Where to record: one for the kernels that others wait for, which go first, and one beside it.

    Always the same two: torch allocates a workspace of 32 MB for cuBLAS on each new stream, and never frees it.
    """
    first, aside = (torch.cuda.Stream(device, priority=priority) for priority in (-1, 0))  # type: ignore[no-untyped-call]
    return first, aside


@contextmanager
def recording(stream: torch.cuda.Stream, **options: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Record the kernels of this context. No garbage is collected meanwhile: a graph in it would end the recording."""
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, **options):
            yield graph
    finally:
        if collects:
            gc.enable()


class Halves(NamedTuple):
    """What is recorded."""

    samples: tuple[Tensor, Tensor]  # features and targets, where `look` reads them
    state: Any  # at the addresses that all recordings know
    look: Callable[[Any], Any]  # from the state
    finish: Callable[[Any, Any], Any]  # from the state and what `look` returned
    store: Callable[[Any], object]  # what `finish` returned
    repeats: Callable[[Any], bool] = lambda new: True  # whether the next update finds the same kind of state in that


class Recording:
    """The two graphs of a kind of update."""

    used = 0  # the number of the last update by them

    def __init__(self, halves: Halves, device: torch.device) -> None:
        self.samples, state, look, finish, store, _ = halves
        # Other threads may pin memory meanwhile.
        options: Any = {"stream": streams(device)[0], "capture_error_mode": "thread_local"}
        with recording(**options) as self.look:
            self._work = look(state)  # kept: the second graph reads it
        with recording(pool=self.look.pool(), **options) as self.finish:
            store(finish(state, self._work))


class Recorder:
    """The recordings of a head's updates by what each depends on."""

    def __init__(self, linear: nn.Linear, answers: int) -> None:
        """`answers` is the count of numbers by which the first half tells the host what it must know."""
        self.device, self.place = linear.weight.device, place_of(linear)
        self.recordings: dict[Hashable, Recording] = {}
        self._occurrences: dict[Hashable, int] = {}
        self._updates, self._disabled = 0, False
        self._answers = torch.empty(answers, dtype=torch.float64).pin_memory()
        self._answered: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # A graph writes where autograd does not see it; a write to no element tells it that the weight changed.
        self._version = linear.weight.detach()[:0]

    def answer(self, numbers: Tensor) -> None:
        """Tell the host these numbers; the first half of an update calls it."""
        self._answers.copy_(numbers, non_blocking=True)

    def find(self, kind: Hashable, halves: Callable[[], Halves]) -> Recording | None:
        """The recording of this kind of update, which is made of its `halves` where that is due."""
        self._updates += 1
        found = self.recordings.get(kind)
        if found is None:
            if len(self._occurrences) > COUNTED:
                self._occurrences.clear()
            self._occurrences[kind] = self._occurrences.get(kind, 0) + 1
            waits = self._disabled or torch.cuda.is_current_stream_capturing()
            if waits or self._occurrences[kind] < OCCURRENCES or not self._has_room():
                return None
            found = self._recorded(halves)
            if found is None:
                self._occurrences[kind] = OCCURRENCES - RETRY
                return None
            self.recordings[kind] = found
        found.used = self._updates
        return found

    def _has_room(self) -> bool:
        """Whether another update may be recorded, if necessary in place of one that was not used for long."""
        if len(self.recordings) < KEPT:
            return True
        kind, oldest = min(self.recordings.items(), key=lambda item: item[1].used)
        if self._updates - oldest.used < UNUSED:
            return False
        del self.recordings[kind]
        return True

    def _recorded(self, make: Callable[[], Halves]) -> Recording | None:
        try:
            here, off = torch.cuda.device(self.device), torch.autocast("cuda", enabled=False)
            with _lock, torch.inference_mode(False), torch.no_grad(), here, off:
                halves, stream = make(), streams(self.device)[0]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    trial = halves.state.copy()  # a graph needs its kernels loaded
                    repeats = halves.repeats(halves.finish(trial, halves.look(trial)))
                del trial
                torch.cuda.synchronize()  # so that what they left is free on both streams
                return Recording(halves, self.device) if repeats else None
        except RuntimeError as error:
            self._disabled = True
            warnings.warn(
                f"the update of a head could not be recorded as a CUDA graph and runs as it is, slower: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None

    def look(self, recording: Recording) -> None:
        """Run the first half."""
        recording.look.replay()
        self._answered.record()

    def answers(self) -> list[float]:
        """The numbers that the last first half told, once it has run."""
        self._answered.synchronize()
        numbers: list[float] = self._answers.tolist()
        return numbers

    def finish(self, recording: Recording) -> None:
        """Run the second half."""
        self._version.zero_()
        recording.finish.replay()
