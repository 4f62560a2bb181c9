"""Kafka: consume, predict, learn and commit together, so that every message is learned exactly once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from sepsa.interfaces.keyed import KeyedLearner
from sepsa.interrupt import DeferredInterrupt
from sepsa.validation import at_least


class Row(NamedTuple):
    """A message as a sample.

    Attributes:
        key: The key of its learner.
        x: Features by name.
        y: The target; None to predict without learning.
    """

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

    Choose it to learn a topic exactly once: the offsets are in the file of `learners`, and every commit writes them in
    one transaction with what was learned. After a crash each message is learned exactly once, with the same bits, and
    the predictions since the last commit are yielded again. If you leave the loop early, call `learners.commit()`;
    another `learn` continues after the last row.

    Args:
        consumer: A `confluent_kafka.Consumer` with "enable.auto.commit" false and "auto.offset.reset" "error", so that
            offsets that the broker no longer has raise an error.
        topic: Name of the topic.
        learners: A `KeyedLearner` that starts from a model of `sepsa.river`.
        decode: A function that converts a message to a `Row`.
        partitions: Partitions to consume; None for all that the topic has at the start. To divide a topic among
            processes, give each its own partitions and its own file.
        commit_every: Messages between two commits.
        idle: Seconds without a message after which the loop ends; None for never.

    Yields:
        Pairs of a row and its prediction.
    """
    from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition

    commit_every = at_least("commit_every", commit_every, 1)
    if not isinstance(learners.position, (dict, type(None))):
        raise ValueError(f"learners must have the offsets as position, got {learners.position!r}: use another file")
    if partitions is None:
        partitions = _partitions_of(consumer, topic)
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


def _partitions_of(consumer: Any, topic: str) -> list[int]:
    """The partitions that a topic has now."""
    from confluent_kafka import KafkaException

    found = consumer.list_topics(topic, timeout=10.0).topics[topic]
    if found.error is not None:
        raise KafkaException(found.error)
    return sorted(found.partitions)
