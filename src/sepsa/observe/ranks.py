"""The part of the ranks in an observation: the head of every rank learns the rows of all ranks."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sepsa import distributed
from sepsa.distributed import Samples
from sepsa.observe.rows import are_labels, observed_rows

if TYPE_CHECKING:
    from sepsa.observe.observation import Observation
    from sepsa.observe.observer import Observer


def group_of(observer: Observer) -> Any:
    """The process group to learn with; None, with one warning, where other ranks exist in no known group."""
    group = distributed.active_group(observer.process_group, observer.sharded, observer.joined)
    if group is None and not observer.warned_alone and distributed.has_ranks(observer.process_group):
        observer.warned_alone = True
        distributed.warn_alone(observer.name)
    return group


def learn_together(observer: Observer, group: Any, observation: Observation, features: Tensor) -> Tensor | None:
    """Let the head learn the rows of all ranks. Returns the mask `excluded_rows` of this rank's rows."""
    own, rows, error = None, None, None
    try:
        own, rows = own_samples(observer, observation, features)
    except Exception as refused:  # raised after the exchange that the other ranks wait for
        error = refused
    place = learn_from_all(observer, group, own, error)
    held = None if place is None else observer.held_out
    return observer.excluded_rows(observation, features, None if held is None else held[place], rows)


def learn_from_all(observer: Observer, group: Any, own: Samples | None, error: Exception | None) -> slice | None:
    """Let the head learn the samples of all ranks. Returns the place of this rank's among them; None: no samples."""
    solver = observer.solver
    moments = isinstance(solver, distributed.LearnsMoments) and solver.learns_moments
    samples, place = distributed.gather(group, own, error, moments)
    start_together(observer, group)
    if samples is None:
        return None
    observer.update(*samples)
    return place


def start_together(observer: Observer, group: Any) -> None:
    """Give all ranks the first one's head and solver, once."""
    if not observer.started_together:
        distributed.share_start(group, observer.head, observer.solver)
        observer.started_together = True


def report_failure(observer: Observer, error: Exception, trace: TracebackType | None) -> None:
    """Tell the ranks that wait at the head that this one failed on its way there; each of them raises an error.

    Not beside fully_shard: there the others may wait for parameters of layers before the head.
    """
    group, ddp = observer.process_group, distributed.wrapper_of(observer.head)
    if group == "auto":
        group = None if ddp is None or observer.warned_alone else ddp.process_group
    if group is None or observer.sharded is not None or distributed.size_of(group) == 1:
        return
    with contextlib.suppress(Exception):  # the failure itself is raised, whatever happens to the other ranks
        if ddp is not None and trace is not None and not distributed.in_forward(trace):
            # The others exchange buffers and buckets there, before they reach the head.
            ddp._pre_forward()  # type: ignore[no-untyped-call]
        distributed.share_headers(group, None, error, distributed.NOT_REACHED)


def learn_without_batch(observer: Observer, ddp: Any) -> None:
    """Let the head learn the other ranks' samples on a rank that has run out of batches."""
    group = distributed.active_group(observer.process_group, ddp.process_group)
    if group is not None:
        weight = observer.head.weight.detach()
        empty = Samples(weight.new_zeros(0, weight.shape[1]), weight.new_zeros(0, len(weight)), None)
        learn_from_all(observer, group, empty, None)


def own_samples(observer: Observer, observation: Observation, features: Tensor) -> tuple[Samples, Tensor | None]:
    """The samples that this rank shares, as rows, and the indices of these rows; None: all rows."""
    targets, weight, rows = observation.targets, observation.sample_weight, None
    flat = features.detach().reshape(-1, observer.head.in_features)
    n = len(flat)
    identity = observation.identity(n) if observer.holds_out else None
    if n:
        observation.observed = observed_rows(features, targets, observer.partial_targets)
        observer.check_samples(observation, features, per_output_weight=False)
    if n and (observation.observed is not None or observer.head_fraction < 1.0):
        (flat, targets, weight, identity), rows = observer.draw(observation, features)
    elif identity is not None:
        identity = identity.repeat_interleave(n // len(identity), 0)
    if identity is not None:
        identity = identity.detach().reshape(len(flat), -1)
    labels = are_labels(features, observation.targets)
    targets = targets.detach().reshape((len(flat),) if labels else (len(flat), targets.shape[-1]))
    return Samples(flat.detach(), targets, None if weight is None else weight.reshape(-1), identity), rows
