"""Kafka, against the mock cluster of its client library: each row is learned once, wherever a process stops."""

import json

import numpy as np
import pytest

from sepsa.interfaces.keyed import KeyedLearner
from sepsa.states.tree import leaves

pytest.importorskip("confluent_kafka", reason="the client is not installed: pip install 'sepsa[kafka]'")
pytest.importorskip("river", reason="River is not installed: pip install 'sepsa[river]'")

import confluent_kafka as kafka

from sepsa.engines.kafka import Row, learn
from sepsa.river import SepSARegressor

ROWS = [(f"key {i % 3}", {"a": float(np.sin(i)), "b": i % 7}, None if i % 10 == 9 else i / 5) for i in range(90)]


@pytest.fixture(scope="module")
def cluster():
    """The address of a broker that has the rows in a topic of several partitions."""
    producer = kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "", "log_level": 0})
    for key, x, y in ROWS:
        producer.produce("rows", json.dumps([x, y]), key)
    producer.flush()
    (broker,) = producer.list_topics().brokers.values()
    yield f"{broker.host}:{broker.port}"
    del producer


@pytest.fixture
def consumer(cluster):
    settings = {"enable.auto.commit": False, "auto.offset.reset": "error", "log_level": 0}
    made = kafka.Consumer({"bootstrap.servers": cluster, "group.id": "sepsa", **settings})
    yield made
    made.close()


def decode(message):
    return Row(message.key().decode(), *json.loads(message.value()))


def model():
    return SepSARegressor(hidden=(), seed=0)


def arrays(learners):
    return {
        key: [(path, np.asarray(each).tobytes()) for path, each in leaves(learners[key].state_dict())]
        for key in learners
    }


def test_a_topic_is_learned_as_its_rows_are(consumer):
    with KeyedLearner(model()) as learners, KeyedLearner(model()) as direct:
        told = [(row, prediction) for row, prediction in learn(consumer, "rows", learners, decode, idle=2.0)]
        for key in {key for key, _, _ in ROWS}:
            expected = []
            for row in (Row(*row) for row in ROWS if row[0] == key):
                expected.append((row, direct.predict_one(key, row.x)))
                if row.y is not None:
                    direct.learn_one(*row)
            assert [pair for pair in told if pair[0].key == key] == expected
        assert arrays(learners) == arrays(direct)
        assert sum(learners.position["rows"].values()) == len(ROWS)


def test_a_row_is_learned_once_wherever_the_loop_and_the_process_stop(consumer, tmp_path):
    seen = 0
    with KeyedLearner(model()) as whole:
        for _ in learn(consumer, "rows", whole, decode, idle=2.0):
            seen += 1
        assert seen == len(ROWS)
        with KeyedLearner(model(), tmp_path / "a") as learners:
            for stop in (5, 17):  # in one process: the next loop continues behind the last row
                for n, _ in enumerate(learn(consumer, "rows", learners, decode, commit_every=10, idle=2.0), start=1):
                    if n == stop:
                        break
            assert sum(learners.position["rows"].values()) == 22
        with KeyedLearner(model(), tmp_path / "a") as learners:  # in another: from the last commit
            assert sum(learners.position["rows"].values()) == 15
            list(learn(consumer, "rows", learners, decode, idle=2.0))
            assert arrays(learners) == arrays(whole)
        with KeyedLearner(model(), tmp_path / "a") as learners:
            assert not list(learn(consumer, "rows", learners, decode, idle=1.0))
            assert arrays(learners) == arrays(whole)


def test_processes_divide_a_topic_by_its_partitions(consumer, tmp_path):
    partitions = sorted(consumer.list_topics("rows", timeout=10.0).topics["rows"].partitions)
    assert len(partitions) > 1
    keys = []
    for part in partitions:
        with KeyedLearner(model(), tmp_path / str(part)) as learners:
            list(learn(consumer, "rows", learners, decode, partitions=[part], idle=1.0))
            keys.extend(learners)
    assert sorted(keys) == ["key 0", "key 1", "key 2"]


def test_a_message_that_cannot_be_decoded_is_not_passed_over(consumer, tmp_path):
    def fail(message):
        row = decode(message)
        if row.x["b"] == 2:
            raise ValueError("no sample")
        return row

    with KeyedLearner(model(), tmp_path / "a") as learners:
        with pytest.raises(ValueError, match="no sample"):
            list(learn(consumer, "rows", learners, fail, commit_every=1, idle=2.0))
        list(learn(consumer, "rows", learners, decode, idle=2.0))
        with KeyedLearner(model()) as whole:
            list(learn(consumer, "rows", whole, decode, idle=2.0))
            assert arrays(learners) == arrays(whole)
    with pytest.raises(ValueError, match="commit_every must be an integer of at least 1, got 0"):
        next(learn(consumer, "rows", learners, decode, commit_every=0))


def test_a_topic_or_a_position_that_cannot_be_is_an_error(consumer):
    with KeyedLearner(model()) as learners:
        with pytest.raises(kafka.KafkaException, match="UNKNOWN_TOPIC"):
            list(learn(consumer, "no such topic", learners, decode, idle=1.0))
        assert learners.position is None
        learners.position = 300
        with pytest.raises(ValueError, match="learners must have the offsets as position, got 300: use another file"):
            list(learn(consumer, "rows", learners, decode, idle=1.0))
