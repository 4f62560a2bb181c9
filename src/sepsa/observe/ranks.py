"""The part of the ranks in an observation: the head of every rank learns the rows of all ranks."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from torch import Tensor

from sepsa import distributed
from sepsa.distributed import Samples
from sepsa.observe.observation import Observation
from sepsa.observe.rows import are_labels, check_samples, draw, excluded_rows, observed_rows


def learn(observer: Any, group: Any, observation: Observation, features: Tensor) -> Tensor | None:
    """Let the head learn the rows of all ranks. Returns the mask `excluded_rows` of this rank's rows."""
    own, rows, error, offered = None, None, None, 0
    try:
        own, rows = _own_samples(observer, observation, features)
        offered = features.numel() // features.shape[-1]
    except Exception as refused:  # raised after the exchange that the other ranks wait for
        error = refused
    place = _learn_from_all(observer, group, own, error, offered, observation)
    held = None if place is None else observer.held_out
    return excluded_rows(observation, features, None if held is None else held[place], rows)


def learn_without_batch(observer: Any, ddp: Any) -> None:
    """Let the head learn the other ranks' samples on a rank that has run out of batches."""
    group = distributed.active_group(observer.process_group, ddp.process_group)
    if group is not None and not observer.is_frozen():
        weight = observer.head.weight.detach()
        empty = Samples(weight.new_zeros(0, weight.shape[1]), weight.new_zeros(0, len(weight)), None)
        _learn_from_all(observer, group, empty, None, 0, None)


def _learn_from_all(
    observer: Any,
    group: Any,
    own: Samples | None,
    error: Exception | None,
    offered: int,
    observation: Observation | None,
) -> slice | None:
    """Let the head learn the samples of all ranks. Returns the place of this rank's among them; None: no samples.

    `offered` is the number of rows from which this rank's samples were drawn.
    """
    moments = isinstance(observer.solver, distributed.LearnsMoments) and observer.solver.learns_moments
    samples, place, offered = distributed.gather(group, own, error, moments, offered)
    if observer.start_together(group) and observation is not None:
        start = observer.checkpoint(statistics=False).state  # which a failed batch does not undo
        observation.before = observation.before._replace(state=start)
    if samples is None:
        return None
    observer.update(*samples, offered)
    return place


def report_failure(observer: Any, error: Exception, trace: TracebackType | None) -> None:
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


def _own_samples(observer: Any, observation: Observation, features: Tensor) -> tuple[Samples, Tensor | None]:
    """The samples that this rank shares, as rows, and the indices of these rows; None: all rows."""
    targets, weight, rows = observation.targets, observation.sample_weight, None
    flat = features.detach().reshape(-1, observer.head.in_features)
    n = len(flat)
    identity = observation.identity(n) if observer.holds_out else None
    if n:
        observation.observed = observed_rows(features, targets, observer.partial_targets)
        check_samples(observer, observation, features, per_output_weight=False)
    if n and (observation.observed is not None or observer.head_fraction < 1.0):
        (flat, targets, weight, identity), rows = draw(observer, observation, features)
    elif identity is not None:
        identity = identity.repeat_interleave(n // len(identity), 0)
    if identity is not None:
        identity = identity.detach().reshape(len(flat), -1)
    labels = are_labels(features, observation.targets)
    targets = targets.detach().reshape((len(flat),) if labels else (len(flat), targets.shape[-1]))
    return Samples(flat.detach(), targets, None if weight is None else weight.reshape(-1), identity), rows
