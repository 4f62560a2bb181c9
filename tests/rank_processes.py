"""What the ranks of tests/ranks/test_distributed.py run: `python rank_processes.py FOLDER` forks them.

Every case trains the model of `network()` and returns what the test compares with one process.

`python rank_processes.py FOLDER elastic` is `torchrun --standalone --nproc-per-node 2 --max-restarts 3` with forks for
its processes: training that a killed rank interrupts, from a checkpoint on.
"""

import contextlib
import gc
import inspect
import os
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import portable
from reproduction.slimtik import SlimTik
from sepsa import RLS, LogisticNewton, OnlineLBFGS, PerOutput, SepSA, SoftmaxNewton
from sepsa.ranks import exchange

ROWS, STEPS, SAVED_AT = 24, 12, 8

SOLVERS = {
    "RLS": RLS,
    "forgetting": lambda: RLS(forgetting=0.95),
    "evidence": lambda: RLS(ridge="evidence"),
    "SoftmaxNewton, evidence": lambda: SoftmaxNewton(ridge="evidence"),
    "PerOutput": lambda: PerOutput(RLS(forgetting=0.95)),
    "LogisticNewton": LogisticNewton,
    "SlimTik": SlimTik,
    "OnlineLBFGS": OnlineLBFGS,
    "SoftmaxNewton": SoftmaxNewton,
    "SoftmaxNewton, forgetting": lambda: SoftmaxNewton(forgetting=0.95),
}


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def batches(count, rows=ROWS, labels=False, seed=1):
    """Half as many as `count`, twice: from then on samples come again."""
    g = torch.Generator().manual_seed(seed)
    some = []
    for _ in range((count + 1) // 2):
        x = torch.randn(rows, 6, generator=g).double()
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), x.sum(1).sin()], 1)
        some.append((x, y.argmax(1) if labels else y))
    return (some + some)[:count]


def build(model, solver, **options):
    return SepSA(model, torch.optim.SGD, lr=1e-2, momentum=0.9, solver=solver, **options)


def state(model):
    return {name.removeprefix("module."): value.detach().clone() for name, value in model.state_dict().items()}


def train(model, optimizer, data, loss_fn):
    for x, y in data:
        with optimizer.observe(y):
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def even(rank, world, data):
    n = len(data[0][0]) // world
    return [(x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]) for x, y in data]


def uneven(rank, world, empty=False):
    """Where this rank's rows of ROWS start and end."""
    cuts = {1: [0, 24], 2: [0, 10, 24], 3: [0, 5, 12, 24]}[world]
    if empty and world > 1:
        cuts = {2: [0, 24, 24], 3: [0, 0, 9, 24]}[world]
    return slice(cuts[rank], cuts[rank + 1])


def start(world, solver, seed=0, **options):
    """A model, its SepSA and what a loop calls: DDP, or the model where one process has the whole batch."""
    model = network(seed)
    optimizer = build(model, solver, **options)
    return model, optimizer, DistributedDataParallel(model) if world > 1 else model


def told(function, *arguments):
    """The class and the words of the error of a call."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# ---------------------------------------------------------------------- cases; one rank is one process without a group


def solver(rank, world, folder, name="RLS", rows=ROWS, of=slice(None)):
    model, optimizer, run = start(world, SOLVERS[name](), seed=rank)  # DDP gives all the first rank's
    data = even(rank, world, batches(STEPS, rows, labels="Softmax" in name))[of]
    train(run, optimizer, data, cross_entropy if "Softmax" in name else mse_loss)
    return state(model)


def wrapped_first(rank, world, folder):
    ddp = DistributedDataParallel(network(seed=rank))
    train(ddp, build(ddp, RLS()), even(rank, world, batches(STEPS)), mse_loss)
    return state(ddp)


def parts(rank, world, folder, solver="RLS", missing="", empty=False):
    """Shards of several sizes; the loss is the mean over all samples, as DDP takes a mean of ranks.

    Whole samples may be missing, and the others weighted by all ranks but the first; or single outputs.
    """
    model, optimizer, run = start(world, SOLVERS[solver](), forget_per="step" if missing == "outputs" else "update")
    rows = uneven(rank, world, empty)
    for k, (x, y) in enumerate(batches(STEPS)):
        weight, seen = None, torch.ones_like(y) > 0
        if missing == "outputs":
            y, seen = (y > 0).double() if "Logistic" in solver else y, x[:, :3] < 0.4
        elif missing == "samples":
            g = torch.Generator().manual_seed(k)
            seen = (torch.rand(ROWS, generator=g) > 0.3)[:, None].expand_as(y)
            weight = torch.rand(ROWS, generator=g).double() + 0.5
            weight[uneven(0, 2)] = 1  # of the first rank, which gives none
            weight = weight[rows] if rank or world == 1 else None
        targets = torch.where(seen, y, torch.nan)[rows]
        with optimizer.observe(targets, weight):
            outputs = run(x[rows])
        ((outputs - targets)[seen[rows]].square().sum() / y.numel() * world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def accumulated(rank, world, folder):
    model, optimizer, run = start(world, RLS())
    for k, (x, y) in enumerate(even(rank, world, batches(STEPS))):
        with contextlib.nullcontext() if k % 2 or world == 1 else run.no_sync():
            with optimizer.observe(y):
                loss = mse_loss(run(x), y) / 2
            loss.backward()
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


class Interrupted(nn.Sequential):
    """A network that may raise, or leave out its head, with a buffer, which DDP sends before each forward."""

    def __init__(self):
        super().__init__(*network())
        self.register_buffer("unused", torch.zeros(2))

    def forward(self, x, now="all"):
        if now == "inside the forward":
            raise KeyError(now)
        return self[0](x) if now == "leave out" else super().forward(x)


# The rank that fails, and how: in its samples, or before they reach the head.
FAULTS = (
    (0, "inside the forward"), (1, "shape"), (0, "NaN"), (1, "before the forward"), (1, "leave out"),
    (0, "before the forward"),
)  # fmt: skip


def failed(rank, world, folder, wrapped):
    """One rank fails; all are told, and go on."""
    model = Interrupted().double()
    optimizer = build(model, RLS(), process_group="auto" if wrapped else dist.group.WORLD)
    run = DistributedDataParallel(model) if wrapped else model
    (x, y), *rest = even(rank, world, batches(STEPS))[:4]

    def observe(fails, how):
        own = how if rank == fails else "all"
        with optimizer.observe(y[:, :2] if own == "shape" else y):
            if own == "before the forward":
                raise KeyError(own)
            run(x * torch.nan if own == "NaN" else x, own)

    said = [told(observe, *fault) for fault in FAULTS[:-1]]
    train(run, optimizer, rest[:1], mse_loss)
    said.append(told(observe, *FAULTS[-1]))  # DDP rebuilds its buckets here
    train(run, optimizer, rest[1:], mse_loss)
    return {"said": said, "steps": optimizer.solver.steps, **state(model)}


def epochs(rank, world, folder):
    """An epoch has the samples of all ranks: half of the batches, which then come again."""
    model, optimizer, run = start(world, RLS(), seed=rank, samples_per_epoch=ROWS * STEPS // 2)
    rows = uneven(rank, world)
    data = [(x[rows], y[rows]) for x, y in batches(STEPS)]
    train(run, optimizer, data, lambda out, y: mse_loss(out, y) * len(y) * world / ROWS)
    return {"forgetting": optimizer.solver.forgetting, **state(model)}


def torn(rank, world, folder):
    """The second head fails on one rank, after the first has learned on all: no head has learned on any."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    optimizer = build(model, [RLS(), RLS()], head=["one", "other"], process_group=dist.group.WORLD)
    (x, y), (_, bad) = even(rank, world, batches(4))[:2]
    optimizer.learn(x, (y, -y))
    before, same = state(model), []
    for fails, how in ((1, "shape"), (0, "infinite"), (1, "between")):
        model.fails = how == "between" and rank == fails
        bad = {"shape": y[:, :2], "infinite": y * torch.inf}.get(how, y) if rank == fails else y
        assert told(optimizer.learn, x, (y, bad))[0] in ("KeyError", "RuntimeError", "ValueError", "NotFinite")
        whole = all(torch.equal(value, before[name]) for name, value in state(model).items())
        same.append((whole, *(solver.steps for solver in optimizer.solvers.values())))
    return {"same": same}


class Unloadable(RLS):
    """A solver whose load fails on the last rank."""

    def load_state_dict(self, state_dict):
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("no room")
        super().load_state_dict(state_dict)


def kinds(rank, world, folder):
    """Ranks that differ in the dtype of model, targets or solver, or cannot load a solver: all are told."""
    x, y = even(rank, world, batches(1))[0]

    def error_of(solver, dtype=torch.float64, targets=y):
        model = network().to(dtype)
        optimizer = build(model, solver, process_group=dist.group.WORLD)
        before = state(model)
        _, words = told(optimizer.learn, x.to(dtype), targets)
        same = all(torch.equal(value, before[name]) for name, value in state(model).items())
        return words, same, optimizer.solver.steps

    own = torch.float32 if rank == 1 else torch.float64
    settings = (RLS(), own, y.to(own)), (RLS(), torch.float64, y.to(own)), (RLS(dtype=own),), (Unloadable(),)
    return {"said": [error_of(*each) for each in settings]}


class TwoHeads(nn.Module):
    """With buffers, which DDP sends before each forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh())
        self.one, self.other = nn.Linear(9, 3), nn.Linear(9, 3)
        self.fails = False  # between its heads

    def forward(self, x):
        features = self.body(x)
        one = self.one(features)
        if self.fails:
            raise KeyError("between the heads")
        return one, self.other(features)


def in_join(rank, world, folder):
    """What all ranks refuse before they wait for each other."""
    _, optimizer, ddp = start(world, RLS())
    x, y = even(rank, world, batches(1))[0]

    def joined():
        with ddp.join(), optimizer.observe(y):
            ddp(x)

    return {"said": told(joined)[1]}


def alone(rank, world, folder):
    """Without DDP: each learns its own, with a warning, or none where it was told so; or one head by its group."""
    warned, models = [], [network() for _ in range(3)]
    for model, group in zip(models, ("auto", None, dist.group.WORLD), strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = build(model, RLS(), process_group=group)
            for x, y in even(rank, world, batches(4)):
                optimizer.learn(x, y)
        warned.append([str(warning.message) for warning in caught if warning.category is UserWarning])  # not torch's
    return {"warned": warned, "heads": [model[2].weight.detach().clone() for model in models]}


def leaves_whole():
    """Whether fully_shard can leave out the head, which it cannot in torch 2.6."""
    from torch.distributed.fsdp import fully_shard

    return "ignored_params" in inspect.signature(fully_shard).parameters


def sharded(rank, world, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (world,))
    whole = network()
    fully_shard(whole, mesh=mesh)
    _, said = told(build, whole, RLS())
    if not leaves_whole():
        return {"said": said}
    model = network()
    fully_shard(model, mesh=mesh, ignored_params=set(model[2].parameters()))
    optimizer = build(model, RLS())
    train(model, optimizer, even(rank, world, batches(STEPS)), mse_loss)
    found = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state(model).items()}
    return {"said": said, **found}


def checkpoint_save(rank, world, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    model, optimizer, ddp = start(world, RLS(forgetting=0.95))
    train(ddp, optimizer, even(rank, world, batches(STEPS))[:SAVED_AT], mse_loss)
    saved = {"model": get_model_state_dict(ddp), "optimizer": get_optimizer_state_dict(ddp, optimizer)}
    dcp.save(saved, checkpoint_id=folder / "checkpoint")
    return state(model)


def checkpoint_load(rank, world, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    model, optimizer, ddp = start(world, RLS(forgetting=0.5), seed=5)
    loaded = {"model": get_model_state_dict(ddp), "optimizer": get_optimizer_state_dict(ddp, optimizer)}
    dcp.load(loaded, checkpoint_id=folder / "checkpoint")
    set_model_state_dict(ddp, loaded["model"])
    set_optimizer_state_dict(ddp, optimizer, loaded["optimizer"])
    train(ddp, optimizer, even(rank, world, batches(STEPS))[SAVED_AT:], mse_loss)
    return state(model) | {"forgetting": optimizer.solver.forgetting, "steps": optimizer.solver.steps}


def captured(rank, world, folder):
    """What a captured step does with other ranks, step by step: a CUDA graph of it needs NCCL and a GPU for each rank.

    On the wrapped model's own module, as the step runs it, so that DDP's hooks are there and nobody waits for them.
    """
    model = network(seed=rank)
    ddp = DistributedDataParallel(model)
    optimizer = build(ddp, RLS())
    group = dist.group.WORLD
    exchange.broadcast_first(group, (*model.parameters(), *model.buffers()))
    (observer,) = optimizer._observers
    observer.ranks.start_together(group)
    agreed = []
    for x, y in even(rank, world, batches(STEPS)):
        optimizer.solver.prepare_capture()
        observation = optimizer.observe(y)
        observation.captured, observation.group = True, group
        with observation:
            loss = mse_loss(model(x), y)
        optimizer.solver.finish_captured()
        loss.backward()
        exchange.average_gradients(group, model.parameters())
        agreed.append(bool(exchange.on_all_ranks(group, observation.finite)))
        optimizer.step()
        optimizer.zero_grad()
    one_is_bad = exchange.on_all_ranks(group, torch.tensor(rank != 1))
    wrong = (model, None, None), (ddp, "auto", None), (model, group, None), (model, "auto", None)
    said = [
        *(told(exchange.check_same, group, "order's batch size", size, x.device)[1] for size in (8, 8 + rank)),
        *(told(exchange.capture_group, *arguments)[1] for arguments in wrong),
    ]
    return {"agreed": all(agreed), "bad": not one_is_bad, "said": said, **state(model)}


# What one process gives too.
EXACT = {f"solver {name}": (solver, name) for name in SOLVERS if name != "LogisticNewton"} | {
    "many rows": (solver, "forgetting", 40 * 6),
    "uneven": (parts,),
    "an empty rank": (parts, "RLS", "", True),
    "accumulated": (accumulated,),
    "masked": (parts, "RLS", "samples"),
    "gaps": (parts, "PerOutput", "outputs"),
    "labels with gaps": (parts, "LogisticNewton", "outputs"),
    "epochs": (epochs,),
}
CASES = EXACT | {
    "wrapped first": (wrapped_first,),
    "failed": (failed, True),
    "failed, without DDP": (failed, False),
    "torn": (torn,),
    "kinds": (kinds,),
    "alone": (alone,),
    "in join": (in_join,),
    "captured": (captured,),
    "sharded": (sharded,),
}
# Two ranks save what three load.
CHECKPOINTS = {2: {"checkpoint": (checkpoint_save,)}, 3: {"checkpoint": (checkpoint_load,)}}


def run(rank, world, folder):
    """Write what every case gives on this rank to FOLDER/WORLD-RANK.pt."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch.*")  # torch's own
    dist.init_process_group(
        "gloo", f"file://{folder}/rendezvous-{world}", rank=rank, world_size=world, timeout=timedelta(seconds=180)
    )
    results = {
        name: function(rank, world, folder, *arguments)
        for name, (function, *arguments) in (CASES | CHECKPOINTS[world]).items()
    }
    torch.save(results, folder / f"{world}-{rank}.pt")
    dist.barrier()
    end()


def end():
    """Reducers go first: with the interpreter's lock they wait for gloo's threads, and one of those may wait for it."""
    gc.collect()
    dist.destroy_process_group()


def restarted(folder):
    """Training for STEPS with a checkpoint in every third, of which the last rank is killed once."""
    torch.set_num_threads(1)
    rank, world, attempt = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    # A meeting place for each attempt: through torchrun's own store gloo finds addresses of killed processes.
    where = f"file://{folder}/rendezvous-{attempt}"
    dist.init_process_group("gloo", where, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    model, optimizer, ddp = start(world, RLS(forgetting=0.95))
    path, done = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    data = even(rank, world, batches(STEPS))
    for step in range(done, STEPS):
        if step == SAVED_AT and rank == 1 and attempt == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        train(ddp, optimizer, data[step : step + 1], mse_loss)
        if step % 3 == 2 and rank == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": step + 1}
            torch.save(saved, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
    undisturbed = solver(rank, world, folder, "forgetting")
    found = {"from": done, "end": state(model), "undisturbed": undisturbed, "steps": optimizer.solver.steps}
    torch.save(found, folder / f"end-{rank}.pt")
    del model, optimizer, ddp
    end()


def fork(rank, world, folder):
    """Run a rank in a child, which needs no import of its own, and return the child's id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run(rank, world, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    portable.perturb_as_told()
    first = network()
    train(first, build(first, RLS()), batches(1), mse_loss)  # what a first step imports, before every rank would
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["elastic"]:
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
        config = LaunchConfig(1, 1, 2, run_id="elastic", max_restarts=3, start_method="fork", **rendezvous)
        elastic_launch(config, restarted)(folder)
        sys.exit()
    for world in CHECKPOINTS:
        children = [fork(rank, world, folder) for rank in range(world)]
        failed = [os.waitpid(pid, 0)[1] for pid in children]
        if any(failed):
            sys.exit(1)
