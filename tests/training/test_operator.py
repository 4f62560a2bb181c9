"""A compiled model is one graph, the head's update in it, and learns as in eager."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, one_hot

from sepsa import RLS, OnlineLBFGS, SepSA, SoftmaxNewton

NETWORKS = {
    "Sequential": lambda: nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)),
    "no bias": lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3, bias=False)),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)),
}
SOLVERS = {"RLS": RLS, "forgetting": lambda: RLS(forgetting=0.9), "SoftmaxNewton": SoftmaxNewton, "L-BFGS": OnlineLBFGS}


@pytest.mark.parametrize(
    ("solver", "network"),
    [*(("RLS", network) for network in NETWORKS), *((s, "Sequential") for s in SOLVERS if s != "RLS")],
)
def test_a_compiled_model_learns_as_in_eager(solver, network):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = NETWORKS[network]()
    twin = copy.deepcopy(model)
    optimizers = [SepSA(m, torch.optim.Adam, lr=1e-2, solver=SOLVERS[solver]()) for m in (model, twin)]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(6):
        x = torch.randn(8, 6)
        y = one_hot(torch.randint(3, (8,)), 3).float() if solver == "SoftmaxNewton" else torch.randn(8, 3)
        for net, optimizer in zip((compiled, twin), optimizers, strict=True):
            with optimizer.observe(y):
                loss = optimizer.solver.loss(net(x), y)
            loss.backward()
            assert all(p.grad is None for p in optimizer.head.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert optimizers[0].solver.steps == 6


def compiled_model():
    torch._dynamo.reset()
    model = NETWORKS["Sequential"]()
    optimizer = SepSA(model, torch.optim.SGD, lr=0.1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    return model, optimizer, compiled, torch.randn(8, 6), torch.randn(8, 3)


def test_outside_observe_a_compiled_model_never_learns():
    model, optimizer, compiled, x, y = compiled_model()
    before = model[2].weight.detach().clone()
    mse_loss(compiled(x), y).backward()
    assert model[2].weight.grad is not None
    optimizer.zero_grad()
    with torch.no_grad():
        compiled(x)
    assert torch.equal(model[2].weight, before)
    assert optimizer.solver.steps == 0


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11),
    reason="tried with torch 2.11 and later; 2.6 runs the graph from outside observe again, and observe says so",
)
def test_a_model_compiled_outside_observe_learns_inside():
    model, optimizer, compiled, x, y = compiled_model()
    compiled(x)
    with torch.no_grad():
        compiled(x)
    with optimizer.observe(y):
        compiled(x)
    assert optimizer.solver.steps == 1
    assert model[2].weight.requires_grad


def test_a_copy_of_a_model_is_free_of_the_operator():
    model, optimizer, _, x, y = compiled_model()
    with optimizer.observe(y):
        torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")(x)
        model(x)
    assert optimizer.solver.steps == 1
