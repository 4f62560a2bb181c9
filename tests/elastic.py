"""What tests/test_distributed.py runs: training that a killed rank interrupts, from a checkpoint on.

`python elastic.py FOLDER` is `torchrun --standalone --nproc-per-node 2 --max-restarts 3` with forks for its processes.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ranks
from sepsa import RLS

STEPS, EVERY, KILLED_AT = 20, 5, 13


def build():
    model = ranks.network()
    optimizer = ranks.build(model, RLS(forgetting=0.95))
    return model, optimizer, DistributedDataParallel(model)


def undisturbed(data):
    """The same training without a checkpoint, for comparison."""
    model, optimizer, ddp = build()
    ranks.train(ddp, optimizer, data, mse_loss)
    return ranks.state(model)


def main(folder):
    torch.set_num_threads(1)
    rank, world, attempt = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    # A meeting place for each attempt: through torchrun's own store gloo finds addresses of killed processes.
    where = f"file://{folder}/rendezvous-{attempt}"
    dist.init_process_group("gloo", where, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    model, optimizer, ddp = build()
    path, done = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
        if rank == 0 and not (folder / "resumed").exists():
            (folder / "resumed").write_text(str(done))
    data = ranks.even(rank, world, ranks.batches(STEPS))
    for step in range(done, STEPS):
        if step == KILLED_AT and rank == 1 and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.train(ddp, optimizer, data[step : step + 1], mse_loss)
        if (step + 1) % EVERY == 0 and rank == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
            torch.save(saved, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
    end = {"end": ranks.state(model), "undisturbed": undisturbed(data), "steps": optimizer.solver.steps}
    torch.save(end, folder / f"end-{rank}.pt")
    # The group before its reducers would go with the last of those, which waits for gloo's threads with the
    # interpreter's lock, and one of them may wait for that.
    del model, optimizer, ddp
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    first = ranks.network()
    ranks.train(first, ranks.build(first, RLS()), ranks.batches(1), mse_loss)  # what a first step imports, once
    config = LaunchConfig(
        1, 1, 2, run_id="elastic", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=3, start_method="fork"
    )
    elastic_launch(config, main)(Path(sys.argv[1]))
