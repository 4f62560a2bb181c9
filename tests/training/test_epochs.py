"""What SepSA does when data are passed over several times: the number of samples in an epoch is told, never guessed."""

import warnings

import pytest
import torch
from torch import nn

import sepsa
from sepsa import RLS, PerOutput, SepSA

N, BATCH, D = 200, 20, 5


def data(seed=0, n=N):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=generator)
    return x, x[:, :1] * x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=generator)


def network(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, outputs))


def pass_over(optimizer, x, y, generator=None):
    order = torch.arange(len(x)) if generator is None else torch.randperm(len(x), generator=generator)
    for rows in order.split(BATCH):
        optimizer.learn(x[rows], y[rows])


def test_the_first_epoch_is_learned_as_if_there_were_no_other():
    x, y = data()
    plain = SepSA(network(), torch.optim.Adam, lr=1e-3)
    told = SepSA(network(), torch.optim.Adam, lr=1e-3, samples_per_epoch=N)
    pass_over(plain, x, y)
    pass_over(told, x, y)
    torch.testing.assert_close(told.head.weight, plain.head.weight, rtol=0, atol=0)


@pytest.mark.parametrize("solver", [None, "given", "cross-entropy", "logistic"])
def test_from_the_second_epoch_on_the_head_remembers_about_one(solver):
    x, y = data()
    if solver in ("cross-entropy", "logistic"):
        y = (y > 0).long().reshape(-1)
        y = y if solver == "cross-entropy" else nn.functional.one_hot(y, 2).float()
    given = RLS(ridge=3.0) if solver == "given" else solver
    outputs = 1 if solver in (None, "given") else 2
    optimizer = SepSA(network(outputs), torch.optim.Adam, solver=given, lr=1e-3, samples_per_epoch=N)
    for _ in range(8):
        pass_over(optimizer, x, y)
    assert optimizer.samples_per_epoch == N
    assert optimizer.solver.forgetting == 1 - BATCH / N
    if outputs == 1:
        assert optimizer.solver.samples == pytest.approx(N, rel=0.15)
        assert optimizer.solver.ridge == (3.0 if solver == "given" else "evidence")


@pytest.mark.parametrize(
    "way", ["observe", "sepsa.observe", "compiled", "head_fraction", "missing targets", "micro-batches"]
)
def test_the_memory_is_the_same_however_the_head_learns(way):
    x, y = data()
    model = network()
    forget_per, size = ("step", BATCH // 2) if way == "micro-batches" else ("update", BATCH)
    optimizer = SepSA(model, torch.optim.SGD, lr=0.0, samples_per_epoch=N, forget_per=forget_per)
    call = torch.compile(model, backend="eager") if way == "compiled" else model
    optimizer.head_fraction = 0.5 if way == "head_fraction" else 1.0
    if way == "missing targets":
        y = y.clone()
        y[::2] = torch.nan
    for batch in [*torch.arange(N).split(BATCH)] * 3:
        for rows in batch.split(size):
            with sepsa.observe(model, y[rows]) if way == "sepsa.observe" else optimizer.observe(y[rows]) as observation:
                observation.loss(call(x[rows])).backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = SepSA(network(), torch.optim.SGD, lr=0.0, samples_per_epoch=N)
    for _ in range(3):
        pass_over(twin, *data())
    half = 0.5 if way in ("head_fraction", "missing targets") else 1.0
    assert optimizer.solver.forgetting == twin.solver.forgetting == 1 - BATCH / N
    assert optimizer.solver.samples == pytest.approx(half * twin.solver.samples, rel=1e-12)


def test_a_state_with_a_wrong_number_of_samples_is_refused():
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3, samples_per_epoch=N)
    state = optimizer.state_dict()
    state["sepsa"]["samples"] = -1
    with pytest.raises(ValueError, match=r"\['sepsa'\]\['samples'\] must be an integer of at least 0, got -1"):
        optimizer.load_state_dict(state)
    del state["sepsa"]["samples"]
    with pytest.raises(ValueError, match=r"other entries than SepSA saves: missing \['samples'\]"):
        optimizer.load_state_dict(state)


def test_an_epoch_needs_a_length_and_a_solver_whose_forgetting_is_free():
    with pytest.raises(ValueError, match="samples_per_epoch sets the forgetting of a solver that has forgetting 1"):
        SepSA(network(), torch.optim.Adam, solver=RLS(forgetting=0.99), samples_per_epoch=N)
    for bad in (0, -5):
        with pytest.raises(ValueError, match="samples_per_epoch must be an integer of at least 1"):
            SepSA(network(), torch.optim.Adam, samples_per_epoch=bad)


@pytest.mark.parametrize("solver", [RLS(), RLS(ridge="evidence")])
def test_each_output_of_its_own_remembers_about_one_epoch(solver):
    x, y = data()
    y = torch.cat([y, -y], 1)
    optimizer = SepSA(network(2), torch.optim.Adam, solver=PerOutput(solver), lr=1e-3, samples_per_epoch=N)
    pass_over(optimizer, x, y)
    state = optimizer.state_dict()
    for _ in range(7):
        pass_over(optimizer, x, y)
    assert optimizer.solver.forgetting == 1 - BATCH / N
    assert [one.samples for one in optimizer.solver.solvers] == pytest.approx([N, N], rel=0.15)
    again = SepSA(network(2), torch.optim.Adam, solver=PerOutput(solver), lr=1e-3, samples_per_epoch=N)
    again.load_state_dict(state)
    assert [one.samples for one in again.solver.solvers] == [N, N]


def repeating():
    """Few samples to repeat, an optimizer whose solver is the default, its twin that names it, and random numbers."""
    x, y = data(n=5 * BATCH)
    optimizer, twin = (SepSA(network(), torch.optim.Adam, lr=1e-3, solver=s) for s in (None, RLS(ridge="evidence")))
    return x, y, optimizer, twin, torch.Generator().manual_seed(0)


@pytest.mark.parametrize("size", [1, BATCH])
def test_repeated_samples_are_warned_of_in_a_loop_of_ones_own(size):
    x, y, optimizer, twin, generator = repeating()
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        for _ in range(5):
            for rows in torch.randperm(len(x), generator=generator).split(size):
                for one in (optimizer, twin):
                    with one.observe(y[rows]):
                        loss = nn.functional.mse_loss(one.model(x[rows]), y[rows])
                    loss.backward()
                    one.step()
                    one.zero_grad()
    assert [str(one.message) for one in recorded] == [
        "samples repeat: pass samples_per_epoch=..., see docs/how-to/overfitting.md"
    ]
    assert recorded[0].filename == __file__
    assert not optimizer.model._forward_pre_hooks
    torch.testing.assert_close(optimizer.head.weight, twin.head.weight, rtol=0, atol=0)


def test_a_model_without_passes_of_its_own_is_watched_no_longer():
    """A loop that calls parts of the model, whose hook is never called."""
    x, y = data()
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3)
    for _ in range(20):
        with optimizer.observe(y):
            optimizer.head(optimizer.model[:-1](x))
    assert not optimizer.model._forward_pre_hooks


@pytest.mark.parametrize("size", [1, BATCH])
def test_repeated_samples_are_warned_of_once_and_change_nothing(size):
    x, y, optimizer, twin, generator = repeating()
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        for _ in range(5):
            for rows in torch.randperm(len(x), generator=generator).split(size):
                optimizer.learn(x[rows], y[rows])
                twin.learn(x[rows], y[rows])
        warned = [str(one.message) for one in recorded]
    assert warned == ["samples repeat: pass samples_per_epoch=..., see docs/how-to/overfitting.md"]
    torch.testing.assert_close(optimizer.head.weight, twin.head.weight, rtol=0, atol=0)


def test_fresh_samples_are_not_warned_of():
    optimizer = SepSA(network(), torch.optim.Adam, lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(6):
            pass_over(optimizer, *data(seed))
        x, y = data()
        low = SepSA(network().bfloat16(), torch.optim.Adam, lr=1e-3)  # numpy has no such numbers
        for _ in range(3):
            pass_over(low, x.bfloat16(), y.bfloat16())
