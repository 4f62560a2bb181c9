"""Kafka: consume, predict, learn and commit together, so that every row is learned exactly once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from sepsa.interrupt import DeferredInterrupt
from sepsa.stream.keyed import KeyedLearner
from sepsa.validation import at_least


class Row(NamedTuple):
    """A message as a sample: its key, its features by name, and its target, None where there is none to learn."""

    key: Hashable
    x: dict[Any, Any]
    y: Any = None


def learn(
    consumer: Any,
    topic: str,
    learners: KeyedLearner,
    decode: Callable[[Any], Row],
    *,
    partitions: list[int] | None = None,
    commit_every: int = 1000,
    idle: float | None = None,
) -> Iterator[tuple[Row, Any]]:
    """Predict each message of a topic, then learn it, and yield the row with its prediction.

    The offsets lie in the file of `learners`, with what was learned before them in one transaction every
    `commit_every` messages and at the end: after a crash each message is learned exactly once, with the same bits,
    and predictions since the last commit are yielded again. After you leave the loop early, call `learners.commit()`;
    another `learn` continues behind the last row. `consumer` is a `confluent_kafka.Consumer` with
    "enable.auto.commit" false and "auto.offset.reset" "error", so that offsets which the broker no longer has raise an
    error. `partitions` are those to consume, by default all that the topic has at the start: to divide a topic among
    processes, give each its own partitions and its own file. `learners` start from a model of `sepsa.river`. `decode`
    makes a message a `Row`. It ends after `idle` seconds without a message; None: never.
    """
    from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition

    commit_every = at_least("commit_every", commit_every, 1)
    if not isinstance(learners.position, (dict, type(None))):
        raise ValueError(f"learners must have the offsets as position, got {learners.position!r}: use another file")
    if partitions is None:
        found = consumer.list_topics(topic, timeout=10.0).topics[topic]
        if found.error is not None:
            raise KafkaException(found.error)
        partitions = sorted(found.partitions)
    learners.position = learners.position or {}
    offsets: dict[int, int] = learners.position.setdefault(topic, {})  # behind the last row learned
    consumer.assign([TopicPartition(topic, part, offsets.get(part, OFFSET_BEGINNING)) for part in partitions])
    since = 0
    try:
        while (message := consumer.poll(-1 if idle is None else idle)) is not None:
            if message.error() is not None:
                raise KafkaException(message.error())
            row = decode(message)
            prediction = learners.predict_one(row.key, row.x)
            with DeferredInterrupt():
                if row.y is not None:
                    learners.learn_one(row.key, row.x, row.y)
                offsets[message.partition()] = message.offset() + 1
            since += 1
            if since == commit_every:
                learners.commit()
                since = 0
            yield row, prediction
    finally:
        consumer.unassign()
    learners.commit()
