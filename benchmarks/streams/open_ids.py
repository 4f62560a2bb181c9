"""What samples that wait for their targets cost: memory, time and bytes of the file with 100,000 identifiers.

    python benchmarks/streams/open_ids.py

Writes open_ids.json. Samples have ten features with float values; identifiers are texts of 36 characters.
"""

from __future__ import annotations

import copy
import tempfile
import time
import tracemalloc
import uuid
from pathlib import Path

import numpy as np

from benchmarks.measure import write
from sepsa.river import Delayed, SepSARegressor

OPEN, FEATURES, LEARNED = 100_000, 10, 1000


def main() -> None:
    rng = np.random.default_rng(0)
    model = Delayed(SepSARegressor(seed=0, body="fourier"))

    def samples(count: int) -> list[dict[str, float]]:
        names = [f"feature {j}" for j in range(FEATURES)]
        return [dict(zip(names, row, strict=True)) for row in rng.normal(size=(count, FEATURES)).tolist()]

    for x in samples(LEARNED):
        model.learn_one(x, sum(x.values()))
    ids = [str(uuid.UUID(int=i)) for i in rng.integers(2**62, size=OPEN).tolist()]
    xs = samples(OPEN)
    watched = copy.deepcopy(model)
    tracemalloc.start()
    for id, x in zip(ids, xs, strict=True):
        watched.predict_one(x, id=id)
    held = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    start = time.process_time()
    for id, x in zip(ids, xs, strict=True):
        model.predict_one(x, id=id)
    opened = time.process_time() - start
    start = time.process_time()
    for x in xs:
        model.predict_one(x)
    plain = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.sepsa"
        start = time.process_time()
        model.save(path)
        saved = time.process_time() - start
        loaded = Delayed.load(path)
        took = {"save_s": saved, "load_s": time.process_time() - start - saved, "file_MB": path.stat().st_size / 1e6}
    start = time.process_time()
    for id, x in zip(ids, xs, strict=True):
        loaded.learn_one(y=sum(x.values()), id=id)
    learned = time.process_time() - start
    start = time.process_time()
    for x in xs:
        model.learn_one(x, sum(x.values()))
    at_once = time.process_time() - start
    assert loaded.predict_one(xs[0]) == model.predict_one(xs[0])
    told = {"open ids": OPEN, "features": FEATURES, "memory_MB": held, "memory_bytes_per_id": 1e6 * held / OPEN, **took}
    each = {"predict with id": opened, "predict": plain, "learn by id": learned, "learn": at_once}
    told["microseconds"] = {name: 1e6 * seconds / OPEN for name, seconds in each.items()}
    write(__file__, told)


if __name__ == "__main__":
    main()
