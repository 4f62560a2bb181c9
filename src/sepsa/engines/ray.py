"""Ray: a table in parts, each learned by a task, merged exactly into one head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sepsa.engines.shards import Batches, learned, merged
from sepsa.heads import RLS


def fit_head(parts: Iterable[Any], read: Callable[[Any], Batches], new_head: Callable[[], RLS], **options: Any) -> RLS:
    """Learn a table in parts, each in a task of Ray, and merge the results exactly.

    Choose it where a Ray cluster has the data. A task whose worker dies is run again by Ray and counts once. Results
    are merged in the order of the parts, so that the head has the same bits however the tasks end.

    Args:
        parts: Parts of the table, such as names of files.
        read: A function of a part that yields batches of features (n, d) and targets (n, m); it runs in the task.
        new_head: A function that makes the head from which every task starts, such as
            `partial(sepsa.engines.shards.zero_head, features)`.
        **options: Options of `ray.remote`, such as `num_cpus`.

    Returns:
        The head that has learned all parts.
    """
    import ray

    def task(part: Any) -> bytes:
        return learned(new_head, read(part))

    remote = ray.remote(task).options(**options)
    return merged(new_head(), map(ray.get, [remote.remote(part) for part in parts]))
