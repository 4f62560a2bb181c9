"""Ray's tasks learn a table in parts, one worker is killed, and the merged head equals that of one process.

python examples/engines/ray_parts.py
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import ray
import torch

from sepsa.engines.ray import fit_head
from sepsa.engines.shards import learned, merged, zero_head

FEATURES = 8
new_head = partial(zero_head, FEATURES, ridge=1e-3)


def batches(part: int, killed: Path | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the batches of a part, which could be a file; the worker of part 1 is killed once."""
    rng = np.random.default_rng(part)
    for number in range(5):
        x = part + rng.normal(size=(500, FEATURES))
        yield x, x @ np.arange(FEATURES) + rng.normal(size=len(x))
        if killed is not None and part == 1 and number == 2 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        killed = Path(folder, "killed")
        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        head = fit_head(range(4), partial(batches, killed=killed), new_head, num_cpus=1, max_retries=1)
        ray.shutdown()
        assert killed.exists()
    same = merged(new_head(), (learned(new_head, batches(part)) for part in range(4)))
    alone = merged(new_head(), [learned(new_head, (batch for part in range(4) for batch in batches(part)))])
    weights = [torch.cat([h.linear.weight[0], h.linear.bias]).detach() for h in (head, same, alone)]  # type: ignore[union-attr]
    assert torch.equal(weights[0], weights[1])
    difference = torch.linalg.vector_norm(weights[0] - weights[2]) / torch.linalg.vector_norm(weights[2])
    print(f"a worker was killed; {head.samples:g} rows, {difference:.1e} from the head of one process")
    assert head.samples == alone.samples
    assert difference <= 1e-9


if __name__ == "__main__":
    main()
