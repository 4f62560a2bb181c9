"""Captured updates where there is no GPU: torch does what the kernels do, and the host's own update is the truth.

The kernels themselves are compared with it in test_gpu.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sepsa import RLS, SelfTuning, SepSA
from sepsa.observe import Observation


def drifting(N, k, m, steps, n, seed=0):
    """A data set of raw rows, some of them alike, whose features move from batch to batch."""
    g = torch.Generator().manual_seed(seed)
    raw = torch.randn(N, 5, generator=g)
    raw[1], raw[7] = raw[0], raw[3]
    features = 3 * torch.tanh(raw @ torch.randn(5, k, generator=g))
    targets = features @ torch.randn(k, m, generator=g)
    targets += 0.3 * torch.randn(N, m, generator=g)
    targets[1], targets[7] = targets[0], targets[3]
    batches = []
    for _ in range(steps):
        features = features + 0.01 * torch.randn(N, k, generator=g)
        rows = torch.randint(N, (n,), generator=g)
        batches.append((features[rows], targets[rows], rows))
    return raw, targets, batches


@pytest.mark.parametrize("settings", [{}, {"forgetting": 1.0}, {"ridge": 1.0}], ids=["both", "ridge", "forget"])
@pytest.mark.parametrize(("n", "bias"), [(1, True), (8, False), (70, True)])
def test_a_captured_self_tuning_head_holds_out_scores_and_chooses_as_the_eager_one(settings, n, bias):
    raw, targets, batches = drifting(60, 9, 2, 24, n)
    linear = nn.Linear(9, 2, bias=bias).double()
    one = SelfTuning.of(RLS, **settings).bind(linear)
    two = SelfTuning.of(RLS, **settings).bind(copy.deepcopy(linear))
    held = 0
    for i, (x, y, rows) in enumerate(batches):
        if i == 12:  # a data set that was written to is hashed anew
            raw.copy_(raw.flip(0))
        one.prepare_capture(raw, targets)
        assert one.update_captured(x, y, rows)
        two.update(x, y, identity=raw[rows])
        mask = torch.zeros(n, dtype=torch.bool) if two.held_out is None else two.held_out
        assert torch.equal(one.held_out, mask)
        held += int(mask.sum())
        if i == 9:  # somebody moves the head
            for solver in (one, two):
                solver.linear.weight.detach().mul_(1.01)
        if i == 15:  # and an update without a graph comes in between
            for solver in (one, two):
                solver.update(x, y, identity=raw[rows])
    assert held
    torch.testing.assert_close(one.covariance(), two.covariance(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one.linear.weight, two.linear.weight, rtol=1e-9, atol=1e-9)
    assert [one.steps, one._now.active] == [two.steps, two._now.active]
    assert one._seen.hashes.keys() == two._seen.hashes.keys()
    torch.testing.assert_close(torch.tensor(one.scores), torch.tensor(two.scores), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's compiler imports it
def test_a_model_around_a_captured_self_tuning_head_is_one_graph(compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)).double()
    twin = copy.deepcopy(model)
    optimizer, plain = (SepSA(net, torch.optim.SGD, solver=SelfTuning(), lr=1e-2) for net in (model, twin))
    x, y = torch.randn(40, 6).double(), torch.randn(40, 2).double()

    def loss_of(inputs, targets):
        return nn.functional.mse_loss(model(inputs), targets)

    loss_fn = torch.compile(loss_of, fullgraph=True, backend="aot_eager") if compiled else loss_of
    held = 0
    for _ in range(15):
        rows = torch.randint(40, (8,))
        optimizer.solver.prepare_capture(x, y)
        observation = Observation(optimizer._observer, y[rows])
        observation.captured, observation.rows = True, rows
        with observation, optimizer._observer.one_graph():
            loss = loss_fn(x[rows], y[rows])
        optimizer.solver.finish_captured()
        loss.backward()
        optimizer.base.step()
        optimizer.base.zero_grad()
        torch.testing.assert_close(loss.detach(), plain.learn(x[rows], y[rows]))
        held += int(optimizer.solver.held_out.sum())
    assert held  # so the body was kept from some rows
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
