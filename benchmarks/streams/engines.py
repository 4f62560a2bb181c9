"""Rows a second of one process and of each engine, with one and two workers; each engine without sepsa; memory of keys.

    python benchmarks/streams/engines.py [--rounds 3] [--only kafka ray ...]
    python benchmarks/streams/engines.py --table

Writes engines.json, where engines that are not in `--only` stay as they are: list with an engine its one process, in
whose rounds it takes turns. It needs the engines: `.ci/engines` makes an environment that has them.

Each measurement is a process of its own, in turns; seconds are those between the start and the end of the work, after a
short run that compiles and starts workers, and `start` the seconds until then. "without sepsa": the same pipeline with
a function that counts rows. Tables have 8 features and no key; streams have 10 keys, 8 features and linear models of
`sepsa.river`.
`of_one_process` is the rate over that of one process with the same learner, in the same round; `faster_from` the number
of rows from which the engine with two workers is faster, its start included, and null where its rate is not higher;
`faster_than_sepsa_stream_from` the same beside `sepsa stream`, which trains a network and predicts every row.
`others` is the number of cores that other processes used just before each measurement.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import spread, write
from sepsa.engines.shards import learned, merged, zero_head

NAMES = [f"x{j}" for j in range(8)]
PARTS, TABLE, KEYS, STREAM = 4, 1_000_000, 10, 60_000
COUNTED = zero_head(8).delta_since().to_bytes()  # what a worker returns that has learned nothing
new_head = partial(zero_head, 8)


# ---------------------------------------------------------------------- data


def write_table(folder: Path, rows: int, parts: int = PARTS) -> list[str]:
    """Parquet files of a table."""
    import pandas

    paths = [str(folder / f"part-{rows}-{part}.parquet") for part in range(parts)]
    for part, path in enumerate(paths):
        x = np.random.default_rng(part).normal(size=(rows // parts, 8))
        pandas.DataFrame(dict(zip(NAMES, x.T, strict=True)) | {"y": x.sum(1)}).to_parquet(path)
    return paths


def read(path: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=10_000):
        table = np.stack([column.to_numpy() for column in batch.columns], 1)
        yield table[:, :-1], table[:, -1:]


def count(path: str) -> bytes:
    assert sum(len(x) for x, _ in read(path))
    return COUNTED


def samples(rows: int) -> list[tuple[str, dict[str, float], float]]:
    """A stream: key, features and target."""
    X = np.random.default_rng(0).normal(size=(rows, 8))
    return [(f"key {i % KEYS}", dict(zip(NAMES, x, strict=True)), sum(x)) for i, x in enumerate(X.tolist())]


def model() -> Any:
    from sepsa.river import SepSARegressor

    return SepSARegressor(hidden=(), seed=0)


# ---------------------------------------------------------------------- contestants: (folder, rows, workers, ours)


def one_process_table(folder: Path, rows: int, workers: int, ours: bool) -> None:
    paths = write_table(folder, rows)
    with timed():
        if ours:
            merged(new_head(), [learned(new_head, (batch for path in paths for batch in read(path)))])
        else:
            list(map(count, paths))


def one_process_stream(folder: Path, rows: int, workers: int, ours: bool) -> None:
    from sepsa.interfaces.keyed import KeyedLearner

    stream = samples(rows)
    with KeyedLearner(model(), folder / f"keyed-{rows}") as learners, timed():
        for key, x, y in stream if ours else ():
            learners.predict_one(key, x)
            learners.learn_one(key, x, y)
        learners.commit()


def sepsa_stream(folder: Path, rows: int, workers: int, ours: bool) -> None:
    from sepsa.shell.command import stream
    from sepsa.shell.options import StreamOptions

    (path,) = write_table(folder, rows, parts=1)
    with timed():
        if ours:
            assert (
                stream(StreamOptions(Path(path), target="y", predictions=folder / "predictions.csv", force=True)) == 0
            )
        else:
            count(path)


def ray_table(folder: Path, rows: int, workers: int, ours: bool) -> None:
    import ray

    from sepsa.engines.ray import fit_head

    if not ray.is_initialized():
        ray.init(num_cpus=workers, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    paths = write_table(folder, rows)
    with timed():
        if ours:
            fit_head(paths, read, new_head)
        else:
            ray.get([ray.remote(count).remote(path) for path in paths])


def spark_session(workers: int) -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    built = SparkSession.builder.master(f"local[{workers}]").config("spark.ui.enabled", False)
    built = built.config("spark.sql.shuffle.partitions", workers).config("spark.driver.host", "127.0.0.1")
    return built.config("spark.driver.bindAddress", "127.0.0.1").config("spark.log.level", "ERROR").getOrCreate()


def spark_table(folder: Path, rows: int, workers: int, ours: bool) -> None:
    from sepsa.engines.spark import fit_head

    table = spark_session(workers).read.parquet(*write_table(folder, rows))

    def counted(frames: Iterator[Any]) -> Iterator[Any]:
        import pandas

        yield pandas.DataFrame({"delta": [b"counted" * bool(sum(map(len, frames)))]})

    with timed():
        if ours:
            fit_head(table, NAMES, ["y"])
        else:
            table.mapInPandas(counted, "delta binary").collect()


def spark_stream(folder: Path, rows: int, workers: int, ours: bool) -> None:
    import pandas

    from sepsa import SepSARegressor
    from sepsa.engines.spark import learn_by_key

    source = folder / f"stream-{rows}"
    source.mkdir()
    keys, X, Y = zip(*samples(rows), strict=True)
    frame = pandas.DataFrame(X).assign(key=keys, number=range(rows), y=Y)
    for part, some in enumerate(np.array_split(np.arange(rows), PARTS)):
        frame.iloc[some].to_parquet(source / f"{part}.parquet", index=False)
    spark = spark_session(workers)
    files = spark.readStream.schema(spark.read.parquet(str(source)).schema).option("maxFilesPerTrigger", 1)
    stream = files.parquet(str(source))

    def counted(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        state.update((sum(map(len, frames)),))
        yield pandas.DataFrame({"rows": [state.get[0]]})

    if ours:
        start = SepSARegressor(hidden_layer_sizes=(), random_state=0)
        told = learn_by_key(stream, "key", NAMES, "y", "number", start)
    else:
        told = stream.groupBy("key").applyInPandasWithState(counted, "rows long", "rows long", "append", "NoTimeout")
    with timed():
        query = told.writeStream.format("noop").option("checkpointLocation", str(source) + "-checkpoint")
        query.trigger(availableNow=True).start().awaitTermination()


def kafka_stream(folder: Path, rows: int, workers: int, ours: bool) -> None:
    from confluent_kafka import Producer

    producer = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "", "log_level": 0})
    for key, x, y in samples(rows):
        producer.produce("rows", json.dumps([x, y]), key)
        producer.poll(0)
    producer.flush()
    (broker,) = producer.list_topics().brokers.values()
    partitions = sorted(producer.list_topics("rows").topics["rows"].partitions)
    arguments = [f"{broker.host}:{broker.port}", str(folder), str(int(ours))]
    taken = [
        subprocess.Popen(
            [sys.executable, __file__, "--consume", *arguments, *map(str, partitions[worker::workers])],
            stdout=subprocess.PIPE, text=True,
        )
        for worker in range(workers)
    ]  # fmt: skip
    print(max(float(process.communicate()[0]) for process in taken))


def consume(broker: str, folder: str, ours: str, *partitions: str) -> None:
    """A consumer of some partitions; it prints its seconds from the first message to the last."""
    from confluent_kafka import Consumer

    from sepsa.engines.kafka import Row, learn
    from sepsa.interfaces.keyed import KeyedLearner

    learners = KeyedLearner(model(), Path(folder, f"kafka-{os.getpid()}"))
    learners.learn_one("warm", samples(1)[0][1], 0.0)
    if ours == "0":
        learners.predict_one = learners.learn_one = lambda *row: 0.0  # type: ignore[method-assign]
    settings = {"enable.auto.commit": False, "auto.offset.reset": "error", "log_level": 0}
    consumer = Consumer({"bootstrap.servers": broker, "group.id": "sepsa", **settings})
    first = last = 0.0
    own = list(map(int, partitions))
    for _ in learn(
        consumer, "rows", learners, lambda m: Row(m.key().decode(), *json.loads(m.value())), partitions=own, idle=5.0
    ):
        last = time.perf_counter()
        first = first or last
    print(last - first)


def flower_table(folder: Path, rows: int, workers: int, ours: bool) -> None:
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from sepsa.engines.flower import MergeDeltas, reply

    paths = write_table(folder, rows)
    client, server = ClientApp(), ServerApp()

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        head, path = new_head(), paths[int(context.node_config["partition-id"])]
        if ours:
            for x, y in read(path):
                head.update(*map(_tensor, (x, y)))
        else:
            count(path)
        return reply(message, head)

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        strategy = MergeDeltas(new_head(), fraction_evaluate=0.0, min_train_nodes=PARTS, min_available_nodes=PARTS)
        arrays = ArrayRecord(new_head().linear.state_dict())
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1)  # starts the workers
        with timed():
            strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": workers}}
    run_simulation(server, client, PARTS, backend_config=resources)


def _tensor(values: np.ndarray) -> Any:
    from sepsa.engines.shards import as_rows

    return as_rows(values)


TABLES: dict[str, Callable[[Path, int, int, bool], None]] = {
    "one process, table": one_process_table,
    "one process, sepsa stream": sepsa_stream,
    "ray": ray_table,
    "spark": spark_table,
    "flower": flower_table,
}
STREAMS: dict[str, Callable[[Path, int, int, bool], None]] = {
    "one process, stream": one_process_stream,
    "kafka": kafka_stream,
    "spark streaming": spark_stream,
}


class timed:
    """A context that prints the seconds inside, on a line of their own."""

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        print(f"\n{time.perf_counter() - self.start}", flush=True)


# ---------------------------------------------------------------------- keys


def memory(keys: int, in_memory: int) -> dict[str, float]:
    """Megabytes of a process and of its file with this many learners, after one row each."""
    from sepsa.interfaces.keyed import KeyedLearner

    _, x, y = samples(1)[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        KeyedLearner(model(), Path(folder, "keyed"), in_memory=in_memory) as k,
    ):
        k.learn_one(0, x, y)
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        for key in range(keys):
            k.learn_one(key, x, y)
        k.commit()
        seconds = time.perf_counter() - start
        after, file = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, os.stat(Path(folder, "keyed")).st_size
    return {"megabytes": (after - before) / 1024, "file megabytes": file / 1e6, "seconds": seconds}


def run(arguments: list[str]) -> list[float]:
    """The numbers that a process of this script prints."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
    return [float(line) for line in done.stdout.splitlines() if line.replace(".", "", 1).replace("e-", "", 1).isdigit()]


def busy_cores() -> float:
    """How many cores other processes use, over half a second in which this one waits."""

    def busy() -> float:
        counters = list(
            map(int, Path("/proc/stat").read_text().split()[1:9])
        )  # idle and waiting are the fourth and fifth
        return (sum(counters) - counters[3] - counters[4]) / os.sysconf("SC_CLK_TCK")

    before, start = busy(), time.perf_counter()
    time.sleep(0.5)
    return (busy() - before) / (time.perf_counter() - start)


def measured(name: str, workers: int, ours: bool) -> None:
    """Run a contestant twice, with few rows and with all."""
    contestant, rows = (TABLES | STREAMS)[name], TABLE if name in TABLES else STREAM
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        contestant(Path(folder), 100 * KEYS, workers, ours)
        print(f"\n{time.perf_counter() - start}", flush=True)
        contestant(Path(folder), rows, workers, ours)


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[*TABLES, *STREAMS, "memory"])
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--measure", nargs=3, help="a contestant, its workers, and 1 for sepsa")
    parser.add_argument("--memory", nargs=2, type=int, help="keys, and how many in memory")
    parser.add_argument("--consume", nargs="+", help="what the contestant kafka runs")
    parser.add_argument("--table", action="store_true", help="print what engines.json has")
    options = parser.parse_args()
    if options.table:
        table()
    elif options.measure:
        name, workers, ours = options.measure
        measured(name, int(workers), ours == "1")
    elif options.memory:
        print("\n".join(map(repr, memory(*options.memory).values())))
    elif options.consume:
        consume(*options.consume)
    else:
        compare(options.rounds, options.only, options.keys)


def compare(rounds: int, only: list[str], keys: int) -> None:
    """Measure all in turns, and write what was found after each round."""
    kept = (keys // 100, keys) if "memory" in only else ()
    fields = ("megabytes", "file_megabytes", "seconds")
    memories = {
        f"{keys:,} keys, {n:,} in memory": dict(zip(fields, run(["--memory", str(keys), str(n)]), strict=True))
        for n in kept
    }
    cases = [
        (name, workers, ours)
        for name in only
        if name != "memory"
        for workers in ((1,) if name.startswith("one process") else (1, 2))
        for ours in (True, False)
    ]
    seconds: dict[tuple[str, int, bool], list[float]] = {case: [] for case in cases}
    starts: dict[tuple[str, int, bool], list[float]] = {case: [] for case in cases}
    others = []
    for _ in range(rounds):
        for case in cases:
            others.append(busy_cores())
            numbers = run(["--measure", case[0], str(case[1]), str(int(case[2]))])
            starts[case].append(numbers[-2])
            seconds[case].append(numbers[-1])
            print(case, numbers, flush=True)
        engines = {name: entry | {"others": spread(others)} for name, entry in summary(seconds, starts).items()}
        record(engines, memories)
    record({}, memories)


def table() -> None:
    """Print the rates, in thousand rows a second, with medians of the rounds."""
    engines = json.loads(Path(__file__).with_suffix(".json").read_text())["engines"]
    for names in (TABLES, STREAMS):
        print("| | 1 worker | 2 workers | 1, without sepsa | 2, without sepsa | 2 of one process | start, s |")
        print("|---|--:|--:|--:|--:|--:|--:|")
        for name in names:
            entries = [
                engines[name].get(f"{workers}, {what}")
                for what in ("with sepsa", "without sepsa")
                for workers in ("1 worker", "2 workers")
            ]
            medians = [None if e is None else e["thousand_rows_per_second"]["median"] for e in entries]
            rates = ["" if m is None else f"{m:,.0f}" if m >= 100 else f"{m:.1f}" for m in medians]
            last = entries[1] or entries[0]
            share = f"{last['of_one_process']['median']:.2g}" if "of_one_process" in last else ""
            print(f"| {name} | {' | '.join(rates)} | {share} | {last['start']['median']:.1f} |")
        print()


def record(engines: dict[str, Any], memories: dict[str, Any]) -> None:
    """Write what was measured; what the file has of other engines stays, so that they can be measured one by one."""
    path = Path(__file__).with_suffix(".json")
    known = json.loads(path.read_text()) if path.exists() else {}
    result = {"table_rows": TABLE, "stream_rows": STREAM, "keys": KEYS, "cores": os.cpu_count()}
    write(
        __file__,
        result | {"engines": known.get("engines", {}) | engines, "memory": known.get("memory", {}) | memories},
    )


def summary(
    seconds: dict[tuple[str, int, bool], list[float]], starts: dict[tuple[str, int, bool], list[float]]
) -> dict[str, Any]:
    """Rates of each contestant, and beside those of one process."""
    found: dict[str, Any] = {}
    for (name, workers, ours), taken in seconds.items():
        rows, one = (TABLE, "one process, table") if name in TABLES else (STREAM, "one process, stream")
        entry: dict[str, Any] = {
            "rounds": len(taken),
            "thousand_rows_per_second": spread([rows / t / 1e3 for t in taken]),
            "start": spread(starts[name, workers, ours]),
        }
        alone = seconds.get((one, 1, ours))
        if alone and name != one:
            entry["of_one_process"] = spread([a / t for a, t in zip(alone, taken, strict=True)])
        if ours and workers == 2:
            for key, other in (("faster_from", one), ("faster_than_sepsa_stream_from", "one process, sepsa stream")):
                if (other, 1, True) in seconds and (other in TABLES) == (name in TABLES):
                    later = float(np.median(starts[name, 2, True]) - np.median(starts[other, 1, True]))
                    saved = float(np.median(seconds[other, 1, True]) - np.median(taken)) / rows  # seconds a row
                    found[name][key] = max(0, round(later / saved)) if saved > 0 else None
        what = "with sepsa" if ours else "without sepsa"
        found.setdefault(name, {})[f"{workers} worker{'s' * (workers > 1)}, {what}"] = entry
    return found


if __name__ == "__main__":
    main()
