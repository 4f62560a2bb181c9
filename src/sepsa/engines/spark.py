"""Spark: a table learned in its partitions and merged exactly, and a stream with one learner per key."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from sepsa.engines.shards import learned, merged, zero_head
from sepsa.heads import RLS
from sepsa.states.objects import from_bytes, to_bytes


def fit_head(table: Any, features: Sequence[str], targets: Sequence[str], **settings: Any) -> RLS:
    """Learn all rows of a Spark DataFrame in its partitions, and merge the results exactly.

    Choose it where Spark has the data: each executor sends a few kilobytes, whatever the number of rows. The result is
    ridge regression on all rows. Results are merged in the order of the partitions.

    Args:
        table: The DataFrame.
        features: Numeric columns without nulls.
        targets: Numeric columns without nulls.
        **settings: Arguments of `RLS`.

    Returns:
        The head that has learned all rows.
    """
    inputs, outputs = list(features), list(targets)
    new_head = partial(zero_head, len(inputs), len(outputs), **settings)

    def learn(frames: Iterator[Any]) -> Iterator[Any]:
        import pandas

        yield pandas.DataFrame({"delta": [learned(new_head, ((frame[inputs], frame[outputs]) for frame in frames))]})

    rows = table.select(*inputs, *outputs).mapInPandas(learn, "delta binary").collect()
    return merged(new_head(), (row.delta for row in rows))


def learn_by_key(stream: Any, key: str, features: Sequence[str], target: str, order: str, start: Any) -> Any:
    """Predict each row of a streaming DataFrame by the learner of its key, then learn it.

    Choose it for structured streaming with a key. The learners are in Spark's checkpoint; a query that is killed and
    started again from its checkpoint ends with the same bits.

    Args:
        stream: The streaming DataFrame.
        key: Column of the key.
        features: Numeric columns; they may be null.
        target: Column of the target, never null.
        order: Column by which the rows of one key in one micro-batch are sorted, because Spark gives them in any order.
        start: A `SepSARegressor`, of which every key gets a copy.

    Returns:
        A streaming DataFrame with the columns `key`, `order`, "prediction" and `target`.
    """
    inputs = list(features)
    chosen = stream.select(key, order, *inputs, target)
    types = {field.name: field.dataType.simpleString() for field in chosen.schema.fields}
    output = f"`{key}` {types[key]}, `{order}` {types[order]}, prediction double, `{target}` {types[target]}"

    def learn(_: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        import pandas

        rows = pandas.concat(list(frames)).sort_values(order, kind="stable")
        learner = from_bytes(bytes(state.get[0])) if state.exists else copy.deepcopy(start)
        predictions = learner.prequential(rows[inputs].to_numpy("float64"), rows[target].to_numpy("float64"))
        state.update((to_bytes(learner),))
        yield pandas.DataFrame({key: rows[key], order: rows[order], "prediction": predictions, target: rows[target]})

    return chosen.groupBy(key).applyInPandasWithState(learn, output, "learner binary", "append", "NoTimeout")
