"""The part of the ranks in an observation: the head of every rank learns the rows of all ranks."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from torch import Tensor

from sepsa import distributed
from sepsa.distributed import Samples
from sepsa.observe.observation import Observation
from sepsa.observe.rows import are_labels, check_samples, draw, observed_rows


def learn(observer: Any, group: Any, observation: Observation, features: Tensor) -> None:
    """Let the head learn the rows of all ranks."""
    own, error, offered = None, None, 0
    try:
        own = _own_samples(observer, observation, features)
        offered = features.numel() // features.shape[-1]
    except Exception as refused:  # raised after the exchange that the other ranks wait for
        error = refused
    _learn_from_all(observer, group, own, error, offered, observation)


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
) -> None:
    """Let the head learn the samples of all ranks.

    `offered` is the number of rows from which this rank's samples were drawn.
    """
    moments = getattr(observer.solver, "learns_moments", False)
    samples, offered = distributed.gather(group, own, error, moments, offered)
    if observer.start_together(group) and observation is not None:
        start = observer.checkpoint(statistics=False).state  # which a failed batch does not undo
        observation.before = observation.before._replace(state=start)
    if samples is not None:
        observer.update(*samples, offered)


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


def _own_samples(observer: Any, observation: Observation, features: Tensor) -> Samples:
    """The samples that this rank shares, as rows."""
    targets, weight = observation.targets, observation.sample_weight
    flat = features.detach().reshape(-1, observer.head.in_features)
    n = len(flat)
    if n:
        observation.observed = observed_rows(features, targets, observer.partial_targets)
        check_samples(observer, observation, features, per_output_weight=False)
    if n and (observation.observed is not None or observer.head_fraction < 1.0):
        flat, targets, weight = draw(observer, observation, features)
    labels = are_labels(features, observation.targets)
    targets = targets.detach().reshape((len(flat),) if labels else (len(flat), targets.shape[-1]))
    return Samples(flat.detach(), targets, None if weight is None else weight.reshape(-1))
