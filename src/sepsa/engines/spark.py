"""Spark: a table learned in its partitions and merged exactly, and a stream with one learner for each key."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from sepsa.engines.shards import learned, merged, zero_head
from sepsa.heads import RLS
from sepsa.states.objects import from_bytes, to_bytes


def fit_head(table: Any, features: Sequence[str], targets: Sequence[str], **settings: Any) -> RLS:
    """The `RLS` with these settings that has learned all rows of a Spark DataFrame: the ridge regression on them.

    Each partition is learned by its executor into a delta of a few kilobytes, for any number of rows. Deltas are merged
    in the order of the partitions. Columns must be numeric, without nulls.
    """
    inputs, outputs = list(features), list(targets)
    new_head = partial(zero_head, len(inputs), len(outputs), **settings)

    def learn(frames: Iterator[Any]) -> Iterator[Any]:
        import pandas

        yield pandas.DataFrame({"delta": [learned(new_head, ((frame[inputs], frame[outputs]) for frame in frames))]})

    rows = table.select(*inputs, *outputs).mapInPandas(learn, "delta binary").collect()
    return merged(new_head(), (row.delta for row in rows))


def learn_by_key(stream: Any, key: str, features: Sequence[str], target: str, order: str, start: Any) -> Any:
    """A streaming DataFrame of predictions, each made before its row was learned by the learner of its key.

    `start` is a `SepSARegressor` of which every key gets a copy. Rows of one key in one micro-batch are learned in the
    order of the column `order`, because Spark gives them in none. The state of a key in Spark's checkpoint are the
    learner's safe bytes; a query that is killed and started again from its checkpoint ends with the same bits. The
    result has the columns `key`, `order`, "prediction" and `target`. Features may be null, targets may not.
    """
    inputs = list(features)
    chosen = stream.select(key, order, *inputs, target)
    types = {field.name: field.dataType.simpleString() for field in chosen.schema.fields}
    output = f"`{key}` {types[key]}, `{order}` {types[order]}, prediction double, `{target}` {types[target]}"

    def learn(_: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        import pandas

        rows = pandas.concat(list(frames)).sort_values(order, kind="stable")
        learner = from_bytes(bytes(state.get[0])) if state.exists else copy.deepcopy(start)
        told = learner.prequential(rows[inputs].to_numpy("float64"), rows[target].to_numpy("float64"))
        state.update((to_bytes(learner),))
        yield pandas.DataFrame({key: rows[key], order: rows[order], "prediction": told, target: rows[target]})

    return chosen.groupBy(key).applyInPandasWithState(learn, output, "learner binary", "append", "NoTimeout")
