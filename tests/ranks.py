"""What the ranks of tests/test_distributed.py run: `python ranks.py FOLDER` forks them, by two and by three.

Every case trains the model of `network()` and returns what the test compares with one process.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

import portable
from sepsa import RLS, LogisticNewton, OnlineLBFGS, PerOutput, SelfTuning, SepSA, SoftmaxNewton, distributed
from sepsa.paper.slimtik import SlimTik

ROWS, STEPS, SAVED_AT = 24, 12, 8
DECAY = 0.93  # of the rate in a step, so that heads anneal
LEAVES_WHOLE = "ignored_params" in inspect.signature(fully_shard).parameters  # not in torch 2.6

SOLVERS = {
    "RLS": RLS,
    "forgetting": lambda: RLS(forgetting=0.95),
    "auto": lambda: SelfTuning(),
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


def loss_of(name):
    return cross_entropy if "Softmax" in name else mse_loss


def state(model):
    return {name.removeprefix("module."): value.detach().clone() for name, value in model.state_dict().items()}


def train(model, optimizer, data, loss_fn, decay=1.0):
    for x, y in data:
        with optimizer.observe(y):
            loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= decay


def even(rank, world, data):
    n = len(data[0][0]) // world
    return [(x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]) for x, y in data]


def uneven(rank, world, empty):
    """Where this rank's rows of ROWS start and end."""
    cuts = {2: [0, 10, 24], 3: [0, 5, 12, 24]}[world]
    if empty:
        cuts = {2: [0, 24, 24], 3: [0, 0, 9, 24]}[world]
    return slice(cuts[rank], cuts[rank + 1])


# ---------------------------------------------------------------------- cases


def solver(rank, world, folder, name):
    model = network(seed=rank)  # DDP gives all the first rank's
    optimizer = build(model, SOLVERS[name]())
    ddp = DistributedDataParallel(model)
    train(ddp, optimizer, even(rank, world, batches(STEPS, labels="Softmax" in name)), loss_of(name), DECAY)
    return state(model)


def wrapped_first(rank, world, folder):
    ddp = DistributedDataParallel(network(seed=rank))
    optimizer = build(ddp, RLS())
    train(ddp, optimizer, even(rank, world, batches(STEPS)), mse_loss)
    return state(ddp)


def moments(rank, world, folder):
    """So many rows that their moments are sent instead."""
    model = network()
    optimizer = build(model, RLS(forgetting=0.9))
    ddp = DistributedDataParallel(model)
    train(ddp, optimizer, even(rank, world, batches(STEPS, rows=40 * 6)), mse_loss)
    return state(model)


def parts(rank, world, folder, empty):
    """Shards of several sizes; the loss is the mean over all samples, as DDP takes a mean of ranks."""
    model = network()
    optimizer = build(model, RLS())
    ddp = DistributedDataParallel(model)
    rows = uneven(rank, world, empty)
    for x, y in batches(STEPS):
        with optimizer.observe(y[rows]):
            loss = (ddp(x[rows]) - y[rows]).square().sum() / y.numel() * world
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def accumulated(rank, world, folder):
    model = network()
    optimizer = build(model, RLS())
    ddp = DistributedDataParallel(model)
    for k, (x, y) in enumerate(even(rank, world, batches(STEPS))):
        last = k % 2 == 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            with optimizer.observe(y):
                loss = mse_loss(ddp(x), y) / 2
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


def missing(k):
    """Samples of step k without a target, and all weights."""
    g = torch.Generator().manual_seed(k)
    return torch.rand(ROWS, generator=g) < 0.3, torch.rand(ROWS, generator=g).double() + 0.5


def masked(rank, world, folder):
    model = network()
    optimizer = build(model, RLS())
    ddp = DistributedDataParallel(model)
    rows = uneven(rank, world, False)
    for k, (x, y) in enumerate(batches(STEPS)):
        gone, weight = missing(k)
        seen, targets = ~gone[rows], torch.where(gone[:, None], torch.nan, y)[rows]
        with optimizer.observe(targets, weight[rows] if rank else None):
            outputs = ddp(x[rows])
        ((outputs - targets)[seen].square().sum() / y.numel() * world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def gaps(rank, world, folder, solver, whole=False):
    """Single outputs that were not observed; `whole` is one process with the whole batch."""
    model = network()
    optimizer = build(model, SOLVERS[solver](), forget_per="step")
    run = model if whole else DistributedDataParallel(model)
    rows = slice(None) if whole else uneven(rank, world, False)
    for x, y in batches(STEPS):
        seen = (x[:, :3] < 0.4)[rows]
        targets = torch.where(seen, (y > 0).double()[rows] if "Logistic" in solver else y[rows], torch.nan)
        with optimizer.observe(targets):
            outputs = run(x[rows])
        ((outputs[seen] - targets[seen]).square().sum() / y.numel() * world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def refused(rank, world, folder):
    """One rank's bad samples are refused by all, and then all go on."""
    model = network()
    optimizer = build(model, RLS())
    ddp = DistributedDataParallel(model)
    (x, y), *rest = even(rank, world, batches(4))

    def error_of(inputs, targets):
        try:
            with optimizer.observe(targets):
                ddp(inputs)
        except (ValueError, RuntimeError) as error:
            return type(error).__name__, str(error)

    said = [error_of(x, y[:, :2] if rank == 1 else y), error_of(x * torch.nan if rank == 0 else x, y)]
    train(ddp, optimizer, rest, mse_loss)
    return {"said": said, **state(model)}


class Interrupted(nn.Sequential):
    """A network that may raise, or leave out its head, with a buffer, which DDP sends before each forward."""

    def __init__(self):
        super().__init__(*network())
        self.register_buffer("unused", torch.zeros(2))

    def forward(self, x, now="all"):
        if now == "raise":
            raise KeyError("inside the forward")
        return super().forward(x) if now == "all" else self[0](x)


def failed(rank, world, folder, wrapped):
    """One rank fails before its forward reaches the head; all are told, and go on."""
    model = Interrupted().double()
    optimizer = build(model, RLS(), process_group="auto" if wrapped else dist.group.WORLD)
    run = DistributedDataParallel(model) if wrapped else model
    (x, y), *rest = even(rank, world, batches(4))

    def error_of(fails, how):
        try:
            with optimizer.observe(y):
                if rank == fails and how == "before":
                    raise KeyError("before the forward")
                run(x, how if rank == fails else "all")
        except (KeyError, RuntimeError) as error:
            return type(error).__name__, str(error)

    said = [error_of(1, "before"), error_of(0, "raise"), error_of(1, "leave out")]
    train(run, optimizer, rest[:1], mse_loss)
    said.append(error_of(0, "before"))  # DDP rebuilds its buckets here
    train(run, optimizer, rest[1:], mse_loss)
    return {"said": said, "steps": optimizer.solver.steps, **state(model)}


def epochs(rank, world, folder):
    """An epoch has the samples of all ranks: half of the batches, which then come again."""
    model = network(seed=rank)
    optimizer = build(model, RLS(), samples_per_epoch=ROWS * STEPS // 2)
    ddp = DistributedDataParallel(model)
    for x, y in batches(STEPS):
        rows = uneven(rank, world, False)
        train(ddp, optimizer, [(x[rows], y[rows])], lambda out, y: mse_loss(out, y) * len(y) * world / ROWS)
    return {"samples": optimizer.solver.samples, "forgetting": optimizer.solver.forgetting, **state(model)}


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
        try:
            optimizer.learn(x, (y, bad))
        except (KeyError, RuntimeError, ValueError):
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
        try:
            optimizer.learn(x.to(dtype), targets)
        except (ValueError, RuntimeError) as error:
            same = all(torch.equal(value, before[name]) for name, value in state(model).items())
            return str(error), same, optimizer.solver.steps

    own = torch.float32 if rank == 1 else torch.float64
    return {
        "said": [
            error_of(RLS(), own, y.to(own)),
            error_of(RLS(), targets=y.to(own)),
            error_of(RLS(dtype=own)),
            error_of(Unloadable()),
        ]
    }


def lasts(world):
    """How many batches each rank has: one has none, or less, and the last has all."""
    return {2: [STEPS - 7, STEPS], 3: [0, STEPS - 5, STEPS]}[world]


def joined(rank, world, folder):
    """Ranks that run out of batches, one after the other."""
    model = network()
    optimizer = build(model, RLS(forgetting=0.95))
    ddp = DistributedDataParallel(model)
    with optimizer.join(ddp):
        train(ddp, optimizer, even(rank, world, batches(STEPS))[: lasts(world)[rank]], mse_loss)
    assert optimizer.solver.steps == STEPS
    after = even(rank, world, batches(STEPS))[:1]  # and all go on together
    with optimizer.observe(after[0][1]):
        ddp(after[0][0])
    return state(model)


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


def joined_heads(rank, world, folder):
    torch.manual_seed(0)
    model = TwoHeads().double()
    optimizer = build(model, [RLS(), SlimTik()], head=["one", "other"])
    ddp = DistributedDataParallel(model)
    with optimizer.join(ddp, divide_by_initial_world_size=False):
        for k, (x, y) in enumerate(even(rank, world, batches(STEPS))[: lasts(world)[rank]]):
            with ddp.no_sync() if k % 2 == 0 else contextlib.nullcontext():
                with optimizer.observe((y, -y)):
                    one, other = ddp(x)
                (mse_loss(one, y) + mse_loss(other, -y)).backward()
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()
    return {"steps": optimizer.solvers["one"].steps, **state(model)}


def refused_joins(rank, world, folder):
    """What all ranks refuse before they wait for each other."""
    model = network()
    optimizer = build(model, RLS())
    ddp, unrelated = DistributedDataParallel(model), DistributedDataParallel(network())
    x, y = even(rank, world, batches(1))[0]

    def error_of(join, *arguments, observation):
        try:
            with join(*arguments), observation:
                ddp(x)
        except (RuntimeError, TypeError, ValueError) as error:
            return str(error)

    unobserved = contextlib.nullcontext()
    return {
        "said": [
            error_of(ddp.join, observation=optimizer.observe(y)),
            *(error_of(optimizer.join, other, observation=unobserved) for other in (ddp, model, unrelated)),
        ]
    }


def alone(rank, world, folder):
    model = network()
    optimizer = build(model, RLS())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, even(rank, world, batches(4)), mse_loss)
        silent = build(network(), RLS(), process_group=None)
        train(silent.model, silent, even(rank, world, batches(4)), mse_loss)
    named = network()
    together = build(named, RLS(), process_group=dist.group.WORLD)
    for x, y in even(rank, world, batches(4)):
        with together.observe(y):
            named(x)
    return {"warned": [str(w.message) for w in caught], "named": named[2].weight.detach().clone(), **state(model)}


def sharded(rank, world, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (world,))
    whole = network()
    fully_shard(whole, mesh=mesh)
    try:
        build(whole, RLS())
        said = ""
    except ValueError as error:
        said = str(error)
    if not LEAVES_WHOLE:
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

    model = network()
    optimizer = build(model, RLS(forgetting=0.95))
    ddp = DistributedDataParallel(model)
    train(ddp, optimizer, even(rank, world, batches(STEPS)[:SAVED_AT]), mse_loss)
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

    model = network(seed=5)
    optimizer = build(model, RLS(forgetting=0.5))
    ddp = DistributedDataParallel(model) if world > 1 else model
    loaded = {"model": get_model_state_dict(ddp), "optimizer": get_optimizer_state_dict(ddp, optimizer)}
    dcp.load(loaded, checkpoint_id=folder / "checkpoint")
    set_model_state_dict(ddp, loaded["model"])
    set_optimizer_state_dict(ddp, optimizer, loaded["optimizer"])
    train(ddp, optimizer, even(rank, world, batches(STEPS)[SAVED_AT:]), mse_loss)
    return state(model) | {"forgetting": optimizer.solver.forgetting, "steps": optimizer.solver.steps}


def captured(rank, world, folder):
    """What a captured step does with other ranks, step by step: a CUDA graph of it needs NCCL and a GPU for each rank.

    On the wrapped model's own module, as the step runs it, so that DDP's hooks are there and nobody waits for them.
    """
    model = network(seed=rank)
    ddp = DistributedDataParallel(model)
    optimizer = build(ddp, RLS())
    group = dist.group.WORLD
    distributed.broadcast_first(group, (*model.parameters(), *model.buffers()))
    (observer,) = optimizer._observers
    observer.start_together(group)
    agreed = []
    for x, y in even(rank, world, batches(STEPS)):
        optimizer.solver.prepare_capture()
        observation = optimizer.observe(y)
        observation.captured, observation.group = True, group
        with observation:
            loss = mse_loss(model(x), y)
        optimizer.solver.finish_captured()
        loss.backward()
        distributed.average_gradients(group, model.parameters())
        agreed.append(bool(distributed.on_all_ranks(group, observation.finite)))
        optimizer.step()
        optimizer.zero_grad()
    one_is_bad = distributed.on_all_ranks(group, torch.tensor(rank != 1))
    said = [
        error_of(distributed.check_same, group, "order's batch size", 8, x.device),
        error_of(distributed.check_same, group, "order's batch size", 8 + rank, x.device),
        *(
            error_of(distributed.capture_group, *arguments)
            for arguments in ((model, None, None), (ddp, "auto", None), (model, group, None), (model, "auto", None))
        ),
    ]
    return {"agreed": all(agreed), "bad": not one_is_bad, "said": said, **state(model)}


def error_of(function, *arguments):
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return ""


CASES = {f"solver {name}": (solver, name) for name in SOLVERS if name != "LogisticNewton"} | {
    "wrapped first": (wrapped_first,),
    "moments": (moments,),
    "uneven": (parts, False),
    "an empty rank": (parts, True),
    "accumulated": (accumulated,),
    "masked": (masked,),
    "gaps": (gaps, "PerOutput"),
    "labels with gaps": (gaps, "LogisticNewton"),
    "refused": (refused,),
    "failed": (failed, True),
    "failed, without DDP": (failed, False),
    "epochs": (epochs,),
    "torn": (torn,),
    "kinds": (kinds,),
    "alone": (alone,),
    "joined": (joined,),
    "joined heads": (joined_heads,),
    "refused joins": (refused_joins,),
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
    gc.collect()  # no reducer may be left: see elastic.py
    dist.destroy_process_group()


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
    for world in CHECKPOINTS:
        children = [fork(rank, world, Path(sys.argv[1])) for rank in range(world)]
        failed = [os.waitpid(pid, 0)[1] for pid in children]
        if any(failed):
            sys.exit(1)
