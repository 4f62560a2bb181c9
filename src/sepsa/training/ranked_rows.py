"""The part of the ranks in an observation: the head of every rank learns the rows of all ranks."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from torch import Tensor

from sepsa.ranks import exchange
from sepsa.ranks.exchange import Samples
from sepsa.training.observation import Observation
from sepsa.training.rows import are_labels, check_samples, draw, observed_rows


def learn(observer: Any, group: Any, observation: Observation, features: Tensor) -> None:
    """Let the head learn the rows of all ranks."""
    own, error, offered = None, None, 0
    try:
        own = _own_samples(observer, observation, features)
        offered = features.numel() // features.shape[-1]
    except Exception as refused:  # raised after the exchange that the other ranks wait for
        error = refused
    samples, offered = exchange.gather(group, own, error, offered)
    if observer.start_together(group):
        start = observer.checkpoint(statistics=False).state  # which a failed batch does not undo
        observation.before = observation.before._replace(state=start)
    if samples is not None:
        observer.update(*samples, offered)


def report_failure(observer: Any, error: Exception, trace: TracebackType | None) -> None:
    """Tell the ranks that wait at the head that this one failed on its way there; each of them raises an error.

    Not beside fully_shard: there the others may wait for parameters of layers before the head. Nor before the first
    forward of a DistributedDataParallel, which is known from then on.
    """
    inside = exchange.ddp_in(trace)
    group, ddp = observer.process_group, inside or observer.ddp()
    if group == "auto":
        group = None if ddp is None or observer.warned_alone else ddp.process_group
    if group is None or observer.sharded is not None or exchange.size_of(group) == 1:
        return
    with contextlib.suppress(Exception):  # the failure itself is raised, whatever happens to the other ranks
        if ddp is not None and trace is not None and inside is None:
            exchange.enter_forward(ddp)  # as the others do, before they reach the head
        exchange.share_headers(group, None, error, exchange.NOT_REACHED)


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
