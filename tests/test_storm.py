"""STORM against its equation, and beside a head that learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from sepsa import RLS, STORM, SepSA


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batches(count, n=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(n, k, generator=generator, dtype=torch.float64) for k in (3, 2)] for _ in range(count)]


def teach(optimizer, model, x, y):
    with optimizer.observe(y):
        loss = mse_loss(model(x), y)
    loss.backward()
    optimizer.step(lambda: mse_loss(model(x), y))
    optimizer.zero_grad()


def together(seed=0, **options):
    model = network(seed)
    return model, SepSA(model, STORM, solver=RLS(), **options)


def test_it_is_the_equation_with_both_gradients_at_the_new_head():
    model, optimizer = together(lr=0.1, mixing=0.3)
    body, past = list(model[0].parameters()), None

    def gradients(weights, x, y):
        twin = network()
        twin.load_state_dict(weights)
        return torch.autograd.grad(mse_loss(twin(x), y), list(twin[0].parameters()))

    for x, y in batches(12):
        before = [p.detach().clone() for p in body]
        teach(optimizer, model, x, y)
        now = model.state_dict() | {"0.weight": before[0], "0.bias": before[1]}  # at the head that has just learned
        d = gradients(now, x, y)
        if past is not None:
            previous, estimate = past
            old = gradients(now | previous, x, y)
            d = [g + 0.7 * (e - o) for g, e, o in zip(d, estimate, old, strict=True)]
        past = ({"0.weight": before[0], "0.bias": before[1]}, d)
        for p, b, e in zip(body, before, d, strict=True):
            torch.testing.assert_close(p.detach(), b - 0.1 * e, rtol=1e-10, atol=1e-12)
    assert optimizer.solver.steps == 12


@pytest.mark.parametrize(("mixing", "same_samples"), [(1.0, False), (0.2, True)])
def test_it_equals_sgd_with_mixing_1_or_all_samples_in_each_batch(mixing, same_samples):
    storm, sgd = network(), network()
    one, other = STORM(storm.parameters(), lr=0.1, mixing=mixing), torch.optim.SGD(sgd.parameters(), lr=0.1)
    for i in range(10):
        x, y = batches(1, seed=0 if same_samples else i)[0]
        for model in (storm, sgd):
            model.zero_grad()
            mse_loss(model(x), y).backward()
        one.step(lambda x=x, y=y: mse_loss(storm(x), y))
        other.step()
    for p, q in zip(storm.parameters(), sgd.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_a_layer_without_a_gradient_stays():
    model = network()
    optimizer = STORM(model.parameters(), lr=0.1)
    model[0].requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    for x, y in batches(3):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step(lambda x=x, y=y: mse_loss(model(x), y))
    assert torch.equal(model[0].weight, frozen)


def test_bad_use_is_refused_and_the_parameters_are_back():
    model, optimizer = together(lr=0.1)
    (x, y), (x2, y2) = batches(2)
    teach(optimizer, model, x, y)
    with optimizer.observe(y2):
        loss = mse_loss(model(x2), y2)
    loss.backward()
    body = [p.detach().clone() for p in model[0].parameters()]
    with pytest.raises(TypeError, match=r"STORM\.step needs a closure"):
        optimizer.step()
    with pytest.raises(TypeError, match=r"the loss as a tensor to differentiate, got 1\.5"):
        optimizer.step(lambda: 1.5)
    assert all(torch.equal(p, q) for p, q in zip(model[0].parameters(), body, strict=True))
    with pytest.raises(ValueError, match=r"mixing must be in \(0, 1\], got 0"):
        STORM(model.parameters(), mixing=0)
    with pytest.raises(ValueError, match="lr must be at least 0, got -1"):
        STORM(model.parameters(), lr=-1)


def test_learn_evaluates_again_where_the_base_asks_and_a_state_goes_on_bit_by_bit():
    (model, one), (twin, by_hand) = (together(lr=0.1, mixing=0.3) for _ in range(2))
    for i, (x, y) in enumerate(batches(6)):
        if i == 3:
            state, weights = one.state_dict(), model.state_dict()
            model, one = together(seed=1, lr=0.5, mixing=0.9)
            model.load_state_dict(weights)
            one.load_state_dict(state)
        one.learn(x, y)
        teach(by_hand, twin, x, y)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
