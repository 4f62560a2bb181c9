"""Several processes with gloo: every head is that of one process with the whole batch, and the same on all ranks."""

import contextlib
import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

import rank_processes as ranks
from sepsa import RLS

TESTS = Path(__file__).parents[1]


def run(python, *arguments):
    """Run rank_processes.py to a good end, and end the processes it has started."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    command = [python, TESTS / "rank_processes.py", *arguments]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True, **streams)
    try:
        said = process.communicate(timeout=600)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said


def check_join(found):
    for result in found:
        assert "a head cannot learn inside ddp.join()" in result["in join"]["said"]
        assert "drop_last=True) and a DistributedSampler" in result["in join"]["said"]


def check_captured(found):
    for result in found:
        assert result["agreed"]
        assert result["bad"]
        same, other, alone, wrapped, gloo, unknown = result["said"]
        assert same == alone == ""
        sizes = [8 + rank for rank in range(len(found))]
        assert other == f"order's batch size must be the same on all ranks of a captured step, got {sizes}"
        assert wrapped.startswith(
            "a DistributedDataParallel cannot be captured, because its gradients belong to the stream"
        )
        assert gloo == "a captured step exchanges samples by NCCL, got a group of gloo: use optimizer.observe"
        assert unknown.startswith("a captured step cannot infer which ranks train one head together")


def alone(function, *arguments):
    """What one process gives with the whole batches."""
    return function(0, 1, None, *arguments)


def check_model(case, found, truth):
    """Every rank has the model, and all ranks have one head to the last bit."""
    for name, value in truth.items():
        for result in found:
            torch.testing.assert_close(
                result[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{case}, {name}: {m}"
            )
            assert name[:2] != "2." or torch.equal(result[name], found[0][name]), (case, name)


def check_failed(found):
    missed = "HeadNotReached", "the forward inside observe never reached the head '2': nothing was learned;"
    for rank, result in enumerate(found):
        for (fails, how), (kind, words) in zip(ranks.FAULTS, result["said"], strict=True):
            own = {"shape": ("ValueError", "targets must have shape"), "leave out": missed}.get(
                how, ("KeyError", f"'{how}'")
            )
            place = "refused its samples" if how == "shape" else "failed before its samples reached the head"
            if how == "NaN":
                assert kind == "NotFinite"
                assert "features must be finite" in words
            elif rank == fails:
                assert kind == own[0]
                assert words.startswith(own[1])
            else:
                assert kind == "RuntimeError"
                assert words.startswith(f"rank {fails} {place}, so no rank has learned: {own[0]}: {own[1]}")
        assert result["steps"] == 3


def check_kinds(found):
    for result in found:
        (features, *whole), (targets, *kept), (solver, *state), (load, *undone) = result["said"]
        assert "features (n, 9) of torch.float64, targets (n, 3) of torch.float64 on rank 0 and features" in features
        assert "(n, 3) of torch.float32 on rank 1" in features
        assert "features (n, 9) of torch.float64, targets (n, 3) of torch.float32 on rank 1: give all" in targets
        assert "RLS in torch.float64 with weight (3, 9) of torch.float64, bias (3,)" in solver
        assert "on rank 0 and RLS in torch.float32 with weight (3, 9) of torch.float64, bias (3,)" in solver
        assert load == f"rank {len(found) - 1} could not load the solver's state of rank 0: ValueError: no room"
        assert whole == kept == state == undone == [True, 0]


def check_alone(found):
    for result in found:
        (words,), *others = result["warned"]
        assert words.startswith(f"torch.distributed has {len(found)} ranks, but the model is not inside Distributed")
        assert others == [[], []]
        equal = [torch.equal(one, first) for one, first in zip(result["heads"], found[0]["heads"], strict=True)]
        assert equal == ([True] * 3 if result is found[0] else [False, False, True])


@pytest.fixture(scope="module")
def results(tmp_path_factory, preloaded_bin):
    """Of every case by two and by three ranks: all at once, because the processes take longer to start than to run."""
    folder = tmp_path_factory.mktemp("ranks")
    run(preloaded_bin / "python", folder)
    return folder, {world: [torch.load(folder / f"{world}-{rank}.pt") for rank in range(world)] for world in (2, 3)}


@pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable")  # torch's own, of the process without a group
def test_two_and_three_ranks_learn_as_one_process(results):
    folder, worlds = results
    truths = {case: alone(*arguments) for case, arguments in ranks.EXACT.items()}
    truths |= dict.fromkeys(("wrapped first", "captured"), truths["uneven"])
    truths |= {"failed": alone(ranks.solver, "RLS", ranks.ROWS, slice(1, 4))}
    checkpoint = alone(ranks.solver, "forgetting")
    for world, found in worlds.items():
        saved = alone(ranks.solver, "forgetting", ranks.ROWS, slice(ranks.SAVED_AT)) if world == 2 else checkpoint
        for case, truth in (truths | {"checkpoint": saved}).items():
            check_model(case, [result[case] for result in found], truth)
        for case in ("failed", "failed, without DDP"):
            check_failed([result[case] for result in found])
        check_kinds([result["kinds"] for result in found])
        for result in found:
            assert result["epochs"]["forgetting"] == 1 - 2 / ranks.STEPS  # of half of the batches, an epoch
            assert result["torn"]["same"] == [(True, 1, 1)] * 3
        check_alone([result["alone"] for result in found])
        check_join(found)
        check_captured([result["captured"] for result in found])
        assert "head '2' is sharded over ranks, and its solver needs it whole" in found[0]["sharded"]["said"]
    assert [(r["checkpoint"]["forgetting"], r["checkpoint"]["steps"]) for r in found] == [(0.95, ranks.STEPS)] * 3
    again = ranks.checkpoint_load(0, 1, folder)  # and in a process without a group
    check_model("loaded by one process", [again], checkpoint)


def test_a_head_beside_fully_shard_learns_as_one_process(results):
    if not ranks.leaves_whole():
        pytest.skip("fully_shard of this torch has no ignored_params for the head")
    for found in results[1].values():
        check_model("sharded", [result["sharded"] for result in found], alone(ranks.solver))


@pytest.mark.long
def test_a_killed_rank_continues_from_the_last_checkpoint(tmp_path):
    run(sys.executable, tmp_path, "elastic")
    found = [torch.load(tmp_path / f"end-{rank}.pt") for rank in range(2)]
    for result in found:  # as the same two ranks without a kill to the last bit
        assert (result["from"], result["steps"]) == (6, ranks.STEPS)
        for name, value in result["end"].items():
            assert torch.equal(value, result["undisturbed"][name]), name


@pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable")
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_state_by_names_needs_one_body_parameter_that_learns(frozen):
    """torch keeps states of parameters that learn alone, so the head's goes under the first of those."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def build():
        model = ranks.network()
        model[0].weight.requires_grad_(not frozen)
        return model, ranks.build(model, RLS())

    model, optimizer = build()
    ranks.train(model, optimizer, ranks.batches(6), mse_loss)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    assert [name for name, entry in saved["state"].items() if "sepsa" in entry] == [["0.weight", "0.bias"][frozen]]
    again, resumed = build()
    set_optimizer_state_dict(again, resumed, saved)
    again.load_state_dict(model.state_dict())
    for network, solver in ((model, optimizer), (again, resumed)):
        ranks.train(network, solver, ranks.batches(2), mse_loss)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_one_process_needs_no_group():
    model, optimizer, _ = ranks.start(1, RLS(), process_group=None)
    ranks.train(model, optimizer, ranks.batches(2), mse_loss)
    assert optimizer.solver.steps == 2
