"""Ray: a table in parts, each learned by a task, and the deltas merged exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sepsa.engines.shards import Batches, learned, merged
from sepsa.heads import RLS


def fit_head(parts: Iterable[Any], read: Callable[[Any], Batches], new_head: Callable[[], RLS], **options: Any) -> RLS:
    """The head that `new_head` makes, after it has learned all parts, each in a task of Ray.

    `read(part)` yields batches of features and targets; it runs in the task, so that parts may be names of files. A
    task whose worker dies is run again by Ray and counts once. Deltas are merged in the order of the parts, so that
    the result has the same bits however the tasks end. `options` are those of `ray.remote`, such as `num_cpus`.
    """
    import ray

    def task(part: Any) -> bytes:
        return learned(new_head, read(part))

    remote = ray.remote(task).options(**options)
    return merged(new_head(), map(ray.get, [remote.remote(part) for part in parts]))
