"""The part of the ranks in an observation: the head of every rank learns the rows of all ranks."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from torch import Tensor

from sepsa import distributed
from sepsa.distributed import Samples
from sepsa.observe.head import TrainedHead
from sepsa.observe.observation import Observation
from sepsa.observe.rows import are_labels, observed_rows


class SharedHead(TrainedHead):
    """A head that the ranks of a process group may learn together."""

    process_group: Any = "auto"
    sharded: Any = None  # the group of fully_shard, if the model is sharded
    joined: Any = None  # the DistributedDataParallel whose ranks may run out of batches
    started_together = False  # whether all ranks have had one start
    warned_alone = False

    def look(self) -> None:
        """Look up what the solver can do and what the model has; again after a copy."""
        super().look()
        self.sharded = distributed.sharded_group(self.model)

    def group(self) -> Any:
        """The process group to learn with; None, with one warning, where other ranks exist in no known group."""
        group = distributed.active_group(self.process_group, self.sharded, self.joined)
        if group is None and not self.warned_alone and distributed.has_ranks(self.process_group):
            self.warned_alone = True
            distributed.warn_alone(self.name)
        return group

    def learn_together(self, group: Any, observation: Observation, features: Tensor) -> Tensor | None:
        """Let the head learn the rows of all ranks. Returns the mask `excluded_rows` of this rank's rows."""
        own, rows, error, offered = None, None, None, 0
        try:
            own, rows = self._own_samples(observation, features)
            offered = features.numel() // features.shape[-1]
        except Exception as refused:  # raised after the exchange that the other ranks wait for
            error = refused
        place = self._learn_from_all(group, own, error, offered, observation)
        held = None if place is None else self.held_out
        return self.excluded_rows(observation, features, None if held is None else held[place], rows)

    def learn_without_batch(self, ddp: Any) -> None:
        """Let the head learn the other ranks' samples on a rank that has run out of batches."""
        group = distributed.active_group(self.process_group, ddp.process_group)
        if group is not None:
            weight = self.head.weight.detach()
            empty = Samples(weight.new_zeros(0, weight.shape[1]), weight.new_zeros(0, len(weight)), None)
            self._learn_from_all(group, empty, None, 0, None)

    def _learn_from_all(
        self, group: Any, own: Samples | None, error: Exception | None, offered: int, observation: Observation | None
    ) -> slice | None:
        """Let the head learn the samples of all ranks. Returns the place of this rank's among them; None: no samples.

        `offered` is the number of rows from which this rank's samples were drawn.
        """
        moments = isinstance(self.solver, distributed.LearnsMoments) and self.solver.learns_moments
        samples, place, offered = distributed.gather(group, own, error, moments, offered)
        if self.start_together(group) and observation is not None:
            start = self.checkpoint(statistics=False).state  # which a failed batch does not undo
            observation.before = observation.before._replace(state=start)
        if samples is None:
            return None
        self.update(*samples, offered)
        return place

    def start_together(self, group: Any) -> bool:
        """Give all ranks the first one's head and solver, once. Returns whether this was the time."""
        if self.started_together:
            return False
        distributed.share_start(group, self.head, self.solver)
        self.started_together = True
        return True

    def report_failure(self, error: Exception, trace: TracebackType | None) -> None:
        """Tell the ranks that wait at the head that this one failed on its way there; each of them raises an error.

        Not beside fully_shard: there the others may wait for parameters of layers before the head.
        """
        group, ddp = self.process_group, distributed.wrapper_of(self.head)
        if group == "auto":
            group = None if ddp is None or self.warned_alone else ddp.process_group
        if group is None or self.sharded is not None or distributed.size_of(group) == 1:
            return
        with contextlib.suppress(Exception):  # the failure itself is raised, whatever happens to the other ranks
            if ddp is not None and trace is not None and not distributed.in_forward(trace):
                # The others exchange buffers and buckets there, before they reach the head.
                ddp._pre_forward()  # type: ignore[no-untyped-call]
            distributed.share_headers(group, None, error, distributed.NOT_REACHED)

    def _own_samples(self, observation: Observation, features: Tensor) -> tuple[Samples, Tensor | None]:
        """The samples that this rank shares, as rows, and the indices of these rows; None: all rows."""
        targets, weight, rows = observation.targets, observation.sample_weight, None
        flat = features.detach().reshape(-1, self.head.in_features)
        n = len(flat)
        identity = observation.identity(n) if self.holds_out else None
        if n:
            observation.observed = observed_rows(features, targets, self.partial_targets)
            self.check_samples(observation, features, per_output_weight=False)
        if n and (observation.observed is not None or self.head_fraction < 1.0):
            (flat, targets, weight, identity), rows = self.draw(observation, features)
        elif identity is not None:
            identity = identity.repeat_interleave(n // len(identity), 0)
        if identity is not None:
            identity = identity.detach().reshape(len(flat), -1)
        labels = are_labels(features, observation.targets)
        targets = targets.detach().reshape((len(flat),) if labels else (len(flat), targets.shape[-1]))
        return Samples(flat.detach(), targets, None if weight is None else weight.reshape(-1), identity), rows
