"""A topic of Kafka is predicted and learned, a process is killed in the middle, and no row is learned twice or lost.

    python examples/engines/kafka_topic.py

The broker is the mock cluster inside the client library: give a Consumer the address of your own cluster instead.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Consumer, Producer

from sepsa.engines.kafka import Row, learn
from sepsa.interfaces.keyed import KeyedLearner
from sepsa.river import SepSARegressor

SENSORS = ("kitchen", "cellar", "roof")


def decode(message: Any) -> Row:
    sample = json.loads(message.value())
    return Row(message.key().decode(), {"a": sample["a"], "b": sample["b"]}, sample["y"])


def consume(broker: str, path: Path, rows: int | None) -> None:
    """Learn the topic from the last commit at `path` on; the process is killed after this many rows."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker,
            "group.id": "sepsa",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
        }
    )
    with KeyedLearner(SepSARegressor(hidden=(), seed=0), path, in_memory=2) as learners:
        for n, _ in enumerate(learn(consumer, "sensors", learners, decode, commit_every=50, idle=5.0), start=1):
            if n == rows:
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"offsets {learners.position['sensors']}")
    consumer.close()


def produce(rows: int) -> tuple[Producer, str]:
    """Start the mock cluster with a topic of this many rows; return it and its address."""
    producer = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": ""})
    rng = np.random.default_rng(0)
    for number in range(rows):
        a, b = rng.normal(size=2).tolist()
        sensor = number % len(SENSORS)
        sample = {"a": a, "b": b, "y": a * sensor + b + 20}
        producer.produce("sensors", json.dumps(sample), SENSORS[sensor])
    producer.flush()
    (broker,) = producer.list_topics().brokers.values()
    return producer, f"{broker.host}:{broker.port}"


def states(path: Path) -> dict[Any, bytes]:
    """Return every learner in a file as bytes."""
    with KeyedLearner(SepSARegressor(hidden=(), seed=0), path) as learners:
        return {key: pickle.dumps(learners[key].state_dict()) for key in learners}


def main() -> None:
    _producer, broker = produce(rows=400)  # the mock cluster lives as long as the producer
    with tempfile.TemporaryDirectory() as folder:
        killed, whole = Path(folder, "killed"), Path(folder, "whole")
        done = subprocess.run([sys.executable, __file__, broker, killed, "170"])
        assert done.returncode == -signal.SIGKILL
        with KeyedLearner(SepSARegressor(hidden=(), seed=0), killed) as learners:
            print(f"killed after 170 rows, {sum(learners.position['sensors'].values())} of them committed")
        consume(broker, killed, None)
        consume(broker, whole, None)
        assert states(killed) == states(whole)
        assert len(states(whole)) == len(SENSORS)
    print("the learners of the killed process and of one that was not killed have the same bits")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        consume(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
