"""Large blocks of a `SoftmaxNewton` on a GPU as CUDA graphs, one pair for each kind of a block.

The first half is `look_large`, whose flags go to the host. The second is `finish_large`, and stores the new state only
where the flags are good. The host may read them later; where one is bad nothing has changed, and the solver learns the
block without a graph.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from sepsa.heads.base import parameters
from sepsa.heads.cross_entropy.eager import Samples, TorchBackend, block_rows, product_precision
from sepsa.heads.cross_entropy.math import (
    CHUNK,
    CrossEntropyState,
    LargeBlock,
    UpdateSettings,
    finish_large,
    is_large,
    look_large,
)
from sepsa.heads.run.record import Halves, Recorder
from sepsa.interrupt import DeferredInterrupt

Found: TypeAlias = tuple[CrossEntropyState, CrossEntropyState, Tensor]  # the new state, the old one, and which is good
_UPDATED = ("W", "shares", "ridge_left", "counters", "A")


class GraphBackend(TorchBackend):
    """Updates of which those of large blocks are recorded, in memory that is this backend's own."""

    name = "graph"
    recorder: Recorder | None = None
    now: CrossEntropyState  # the state at fixed addresses, once there is a recorder

    def owns(self, state: CrossEntropyState) -> bool:
        """Whether recordings write into the tensors of this state."""
        return self.recorder is not None and state.W is self.now.W

    def learn(self, state: CrossEntropyState, samples: Samples) -> tuple[CrossEntropyState, bool]:
        """Learn a large block without weights by its recording where there is one, for `settle` to tell of."""
        return (self.now, True) if self._replays(state, samples) else super().learn(state, samples)

    def settle(self, state: CrossEntropyState, recorder: Recorder, samples: Samples) -> tuple[CrossEntropyState, bool]:
        """The state after the update that is `waiting`, which has changed nothing where its flags are bad."""
        self.waiting = None
        finite, lost = recorder.answers()
        return (self.now, True) if finite and not lost else super().learn(state, samples)

    def _replays(self, state: CrossEntropyState, samples: Samples) -> bool:
        features, targets, sample_weight, settings, _ = samples
        n, recorder = samples.rows, self.recorder
        slow = n * len(state.weights) > CHUNK // 2  # arithmetic takes longer than launches
        if state.A is None or sample_weight is not None or slow or not is_large(state.W.shape[1], n):
            return False
        if recorder is None or recorder.place != parameters.place_of(self.linear):
            self.now, recorder = state.copy(), Recorder(self.linear, answers=2)
            self.recorder = recorder
        given = features.detach().reshape(n, -1), targets.detach().reshape(n, *targets.shape[features.ndim - 1 :])
        kind = *((each.shape, each.dtype) for each in given), settings
        recording = recorder.find(kind, lambda: self._halves(recorder, given, settings))
        if recording is None:
            return False
        for mine, each in zip(recording.samples, given, strict=True):
            mine.copy_(each)
        if state is not self.now:
            for name in (*_UPDATED, "prior", "weights", "ridge"):
                getattr(self.now, name).copy_(getattr(state, name))
        with torch.cuda.device(recorder.device), DeferredInterrupt():
            recorder.look(recording)
            recorder.finish(recording)
            self.waiting = recorder, Samples(*recording.samples, None, settings, samples.updates)
        return True

    def _halves(self, recorder: Recorder, given: tuple[Tensor, Tensor], settings: UpdateSettings) -> Halves:
        linear, x, y = self.linear, *map(torch.zeros_like, given)

        def look(now: CrossEntropyState) -> tuple[LargeBlock, Tensor]:
            W = parameters.follow(linear, now.W)
            Phi = block_rows(linear, x, W.dtype, large=True)
            with product_precision(Phi):
                block, finite, lost = look_large(now, W, Phi, y, None, settings)
            recorder.answer(torch.stack([finite, lost]))
            return block, finite & ~lost

        def finish(now: CrossEntropyState, work: tuple[LargeBlock, Tensor]) -> Found:
            block, good = work
            return finish_large(block), now._replace(W=block.new.W), good

        def store(found: Found) -> None:
            new, old, good = found
            for name in _UPDATED:
                torch.where(good, getattr(new, name), getattr(old, name), out=getattr(self.now, name))
            parameters.store(linear, self.now.W.to(settings.head_dtype))

        return Halves((x, y), self.now, look, finish, store)
