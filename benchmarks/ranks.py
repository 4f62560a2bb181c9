"""What many processes gain, and what keeping one head on all of them costs: gloo, one thread a process.

    python benchmarks/ranks.py

Writes ranks.json. Two processes with the paper's CNN at batch 64 each, beside one process and beside Adam under
DistributedDataParallel; then the exchange alone, by rows and by moments, for heads of p = 129, 1,024 and 4,096, and the
rows from which moments are fewer bytes. Needs two idle cores.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measure import ratio, spread, write
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from reproduction.networks import cnn, initialize
from sepsa import RLS, SepSA
from sepsa.distributed import Samples, gather, gather_moments

BATCH, OUTPUTS, ROUNDS = 64, 10, 25
# p, the rows a rank has, and how often each is measured.
SIZES = {129: ([32, 64, 128, 256, 512, 1024], 21), 1024: ([64, 512, 1536, 2560, 4096], 5), 4096: ([64, 1024, 9216], 3)}


def step_of(kind: str, ranks: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model: nn.Module = cnn(3, 32, OUTPUTS)
    initialize(model)
    x, y = torch.randn(BATCH, 3, 32, 32), torch.eye(OUTPUTS)[torch.randint(OUTPUTS, (BATCH,))]
    if kind == "SepSA":
        optimizer: Any = SepSA(model, torch.optim.Adam, lr=1e-3)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    network = DistributedDataParallel(model) if ranks > 1 else model

    def sepsa() -> None:
        with optimizer.observe(y):
            loss = mse_loss(network(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def adam() -> None:
        mse_loss(network(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return sepsa if kind == "SepSA" else adam


def clock(run: Callable[[], Any]) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    run()
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start


def steps(ranks: int) -> dict[str, list[float]]:
    """Seconds of steps, in turns."""
    contestants = {kind: step_of(kind, ranks) for kind in ("SepSA", "Adam")}
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {kind: [] for kind in contestants}
    for _ in range(ROUNDS):
        for kind, run in contestants.items():
            times[kind].append(clock(run))
    return times


def exchange(p: int, n: int, rounds: int) -> dict[str, Any]:
    """Seconds to bring the rows of all ranks to each, by both routes, and of the head's update with them."""
    torch.manual_seed(dist.get_rank())
    rows = Samples(torch.randn(n, p - 1), torch.randn(n, OUTPUTS), None)

    def by_rows() -> Samples:
        found, _ = gather(dist.group.WORLD, rows, None, False)
        assert found is not None
        return found

    def by_moments() -> Samples:
        return gather_moments(dist.group.WORLD, rows, [n] * dist.get_world_size())

    def update(found: Samples) -> Callable[[], None]:
        solver = RLS().bind(nn.Linear(p - 1, OUTPUTS))
        return lambda: solver.update(found.features, found.targets, found.sample_weight)

    contestants: dict[str, Callable[[], Any]] = {
        "rows": by_rows,
        "update with rows": update(by_rows()),
        "moments": by_moments,
        "update with moments": update(by_moments()),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(clock(run))
    median = {name: statistics.median(values) for name, values in times.items()}
    share = {route: median[route] / (median[route] + median[f"update with {route}"]) for route in ("rows", "moments")}
    return {"seconds": {name: spread(values) for name, values in times.items()}, "share of the head's step": share}


def predicted(p: int) -> int:
    """Rows a rank from which two ranks receive fewer bytes by moments, in float64, than by rows in float32."""
    r = p + OUTPUTS
    return -(-8 * r * r // (4 * (r - 1)))


def rank_main(rank: int, ranks: int, folder: str, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    found: dict[str, Any] = {"steps": steps(ranks)}
    for p, (counts, rounds) in SIZES.items():
        found[str(p)] = {n: exchange(p, n, rounds) for n in counts}
    if rank == 0:
        queue.put(found)
    dist.barrier()
    dist.destroy_process_group()


def crossing(cases: dict[int, Any]) -> int | None:
    """The fewest rows measured with which exchange and update took less by moments."""
    for n, case in cases.items():
        s = {name: value["median"] for name, value in case["seconds"].items()}
        if s["moments"] + s["update with moments"] < s["rows"] + s["update with rows"]:
            return n
    return None


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    one = steps(1)
    context = mp.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=rank_main, args=(rank, 2, folder, queue)) for rank in range(2)]
        for worker in workers:
            worker.start()
        two = queue.get()
        for worker in workers:
            worker.join()
    result: dict[str, Any] = {}
    speedup = 2 * statistics.median(one["SepSA"]) / statistics.median(two["steps"]["SepSA"])
    cost = ratio(two["steps"], "SepSA", "Adam")
    print(f"two processes / one, samples a second: {speedup:.2f}, wanted >= 1.7")
    print(f"SepSA / Adam under DDP: {cost['median']:.3f} [{cost['q25']:.3f}, {cost['q75']:.3f}], wanted <= 1.1")
    result["steps"] = {
        "one process": {kind: spread(values) for kind, values in one.items()},
        "two processes": {kind: spread(values) for kind, values in two["steps"].items()},
        "samples a second, two over one": {"ratio": speedup, "wanted": 1.7},
        "SepSA over Adam under DDP": cost | {"wanted": 1.1},
    }
    for p in SIZES:
        cases = two[str(p)]
        result[f"p = {p}"] = {"cases": cases, "fewer bytes from": predicted(p), "faster from": crossing(cases)}
        print(
            f"p = {p}: moments are fewer bytes from {predicted(p)} rows a rank, measured faster from {crossing(cases)}"
        )
        for n, case in cases.items():
            s = {name: value["median"] for name, value in case["seconds"].items()}
            shares = ", ".join(f"{100 * v:.0f} % by {k}" for k, v in case["share of the head's step"].items())
            print(f"  {n} rows: " + ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in s.items()) + f"; exchange {shares}")
    write(__file__, result)


if __name__ == "__main__":
    main()
