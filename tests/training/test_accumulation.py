"""Micro-batches whose gradients are accumulated: the head forgets with each of them, or once a step."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from reproduction.slimtik import SlimTik
from sepsa import RLS, LogisticNewton, OnlineLBFGS, PerOutput, SepSA, SoftmaxNewton
from sepsa.heads.run.choose import force


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request):
    with force("torch" if request.param == "torch" else None):
        yield request.param


def network(hidden, outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def batches(count, n, outputs=2):
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(n, 3, generator=g).double(), torch.randn(n, outputs, generator=g).double()


def accumulate(optimizer, x, y, micro):
    for a, b in zip(x.split(micro), y.split(micro), strict=True):
        with optimizer.observe(b):
            loss = mse_loss(optimizer.model(a), b) * len(a) / len(x)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def close(one, other, **tolerance):
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)


# Features, rows of a batch and of a micro-batch: both restore all coordinates, or both one in rotation.
SIZES = [(9, 32, 8), (9, 32, 32), (120, 8, 2), (120, 8, 1)]


@pytest.mark.parametrize(("hidden", "n", "micro"), SIZES)
@pytest.mark.parametrize("make", [lambda: RLS(forgetting=0.9), lambda: PerOutput(RLS(forgetting=0.9))])
def test_forgetting_per_step_is_that_of_the_whole_batch(make, hidden, n, micro):
    """The head after micro-batches is that of an update with all their samples, which forgets once."""
    model, twin = network(hidden), network(hidden)
    optimizer = SepSA(model, torch.optim.SGD, lr=0.0, solver=make(), forget_per="step")
    whole = SepSA(twin, torch.optim.SGD, lr=0.0, solver=make())
    for x, y in batches(12, n):
        accumulate(optimizer, x, y, micro)
        accumulate(whole, x, y, n)
    close(model, twin, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(optimizer.solver.covariance(), whole.solver.covariance(), rtol=1e-8, atol=1e-12)
    assert optimizer.solver.samples == pytest.approx(whole.solver.samples, rel=1e-12)
    if isinstance(optimizer.solver, RLS):
        torch.testing.assert_close(optimizer.solver.ridge_left, whole.solver.ridge_left)
        torch.testing.assert_close(optimizer.solver.objective(), whole.solver.objective())


def test_forgetting_per_update_is_the_default():
    model, twin = network(9), network(9)
    optimizer = SepSA(model, torch.optim.SGD, lr=0.1, solver=RLS(forgetting=0.9))
    for x, y in batches(3, 12):
        accumulate(optimizer, x, y, 4)
    assert optimizer.solver.samples == pytest.approx(4 * sum(0.9**k for k in range(9)))
    stepwise = SepSA(twin, torch.optim.SGD, lr=0.1, solver=RLS(forgetting=0.9), forget_per="step")
    for x, y in batches(3, 12):
        accumulate(stepwise, x, y, 4)
    assert stepwise.solver.samples == pytest.approx(12 * sum(0.9**k for k in range(3)))
    stepwise.learn(x, y)
    stepwise.learn(x, y)  # a step each
    assert stepwise.solver.samples == pytest.approx(12 * sum(0.9**k for k in range(5)))


SOLVERS = {
    "RLS": lambda: RLS(forgetting=0.5),
    "PerOutput": lambda: PerOutput(RLS(forgetting=0.5)),
    "OnlineLBFGS": lambda: OnlineLBFGS(forgetting=0.5),
    "SoftmaxNewton": lambda: SoftmaxNewton(forgetting=0.5),
    "LogisticNewton": lambda: LogisticNewton(forgetting=0.5),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_every_solver_with_a_forgetting_can_be_told(name):
    """Told not to forget, an update is that of the same solver with forgetting 1."""
    torch.manual_seed(0)
    head = nn.Linear(4, 2, dtype=torch.float64)
    x, y = torch.randn(6, 4).double(), torch.eye(2)[torch.randint(2, (6,))].double()
    solver = SOLVERS[name]().bind(head)
    solver.update(x, y)
    told, forgetful, lasting = (copy.deepcopy(solver) for _ in range(3))
    told.forgets = False
    for one in getattr(lasting, "solvers", [lasting]):
        one.forgetting = 1.0
    for one in (told, forgetful, lasting):
        one.update(x.flip(0) + 1, y)
    assert torch.equal(told.linear.weight, lasting.linear.weight)
    assert not torch.equal(told.linear.weight, forgetful.linear.weight)


def test_a_micro_batch_without_targets_forgets_nothing():
    nan = float("nan")
    optimizer = SepSA(network(9), torch.optim.SGD, lr=0.1, solver=RLS(forgetting=0.9), forget_per="step")
    for x, y in batches(2, 12):
        y[:4] = nan  # the first micro-batch
        accumulate(optimizer, x, y, 4)
    assert optimizer.solver.samples == pytest.approx(8 * 1.9)


def test_what_is_refused():
    with pytest.raises(ValueError, match="forget_per must be one of 'update', 'step', got 'epoch'"):
        SepSA(network(9), torch.optim.SGD, lr=0.1, forget_per="epoch")
    for solver in (SlimTik(), PerOutput(SlimTik())):
        with pytest.raises(TypeError, match="needs a solver that can learn without forgetting, got"):
            SepSA(network(9), torch.optim.SGD, lr=0.1, solver=solver, forget_per="step")
        assert solver.linear is None
