"""A network, its batches and loops over them, for the tests of SepSA."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn.functional import mse_loss


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))


def batches(count=12, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 6, generator=g), torch.randn(8, 2, generator=g)) for _ in range(count)]


def train(model, optimizer, data):
    """The contract's loop."""
    for inputs, targets in data:
        with optimizer.observe(targets):
            loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand(model, bases, solver, data):
    """The same without SepSA: features, head, loss at the new head, body."""
    body, head = model[:-1], model[-1]
    solver.bind(head)
    for inputs, targets in data:
        features = body(inputs)
        solver.update(features.detach(), targets)
        loss = mse_loss(nn.functional.linear(features, head.weight.detach(), head.bias.detach()), targets)
        model.zero_grad()
        loss.backward()
        for base in bases:
            base.step()


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.readout = nn.Linear(2, 2)
        self.body = nn.Linear(6, 2)  # registered last, but not the head

    def forward(self, x):
        return self.readout(torch.tanh(self.body(x)))


def check_gradient_scaler(model, optimizer, twin, plain):
    """Scaled losses move a model as plain ones move its twin."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for inputs, targets in batches():
        with optimizer.observe(targets):
            loss = mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        plain.learn(inputs, targets)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def in_a_thread(f):
    """What f returns or raises in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(f).result()
