"""Samples without a target, and sample weights in `learn`."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from reproduction.slimtik import SlimTik
from sepsa import RLS, LogisticNewton, OnlineLBFGS, SepSA, SoftmaxNewton

NAN = float("nan")


def network(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, outputs)).double()


def batch(n=8, outputs=2, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g).double(), torch.randn(n, outputs, generator=g).double()


def close(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q)


SOLVERS = {
    "RLS": RLS,
    "RLS, evidence": lambda: RLS(ridge="evidence"),
    "SlimTik": SlimTik,
    "OnlineLBFGS": OnlineLBFGS,
}


@pytest.mark.parametrize("name", SOLVERS)
def test_nan_targets_are_samples_that_were_not_there(name):
    model, twin = network(), network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, solver=SOLVERS[name]())
    other = SepSA(twin, torch.optim.SGD, lr=1e-2, solver=SOLVERS[name]())
    for k in range(5):
        inputs, targets = batch(seed=k)
        keep = torch.rand(8) > 0.4
        keep[k] = True
        masked = torch.where(keep[:, None], targets, NAN)
        torch.testing.assert_close(optimizer.learn(inputs, masked), other.learn(inputs[keep], targets[keep]))
    close(model, twin)


def test_a_loss_of_ones_own_gets_nan_but_the_body_does_not():
    model, twin = network(), network()
    optimizer, other = (SepSA(m, torch.optim.SGD, lr=1e-2) for m in (model, twin))
    inputs, targets = batch()
    targets[2] = targets[5] = NAN
    with optimizer.observe(targets) as observation:
        loss = mse_loss(model(inputs), targets)
    assert observation.observed.tolist() == [k not in (2, 5) for k in range(8)]
    assert loss.isnan()
    loss.backward()
    optimizer.step()
    keep = observation.observed
    other.learn(inputs[keep], targets[keep], lambda o, t: mse_loss(o, t) * 6 / 8)  # the mean was over 8
    close(model, twin)


CLASSIFIERS = {
    "SoftmaxNewton": (SoftmaxNewton, 3),
    "OnlineLBFGS": (lambda: OnlineLBFGS(loss="cross-entropy", dtype=torch.float64), 3),
    "SoftmaxNewton, one output": (SoftmaxNewton, 1),
    "OnlineLBFGS, one output": (lambda: OnlineLBFGS(loss="cross-entropy", dtype=torch.float64), 1),
    "LogisticNewton, one output": (LogisticNewton, 1),
}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_class_index_that_torch_ignores(name):
    make, outputs = CLASSIFIERS[name]
    model, twin, third = network(outputs), network(outputs), network(outputs)
    optimizer, other, hot = (SepSA(m, torch.optim.SGD, lr=1e-2, solver=make()) for m in (model, twin, third))
    for k in range(5):
        classes = max(outputs, 2)
        inputs, labels = batch(seed=k)[0], torch.randint(0, classes, (8,), generator=torch.Generator().manual_seed(k))
        masked = labels.clone()
        masked[k : k + 3] = -100
        keep = masked != -100
        loss = optimizer.learn(inputs, masked, cross_entropy if k % 2 and outputs > 1 else None)
        torch.testing.assert_close(loss, other.learn(inputs[keep], labels[keep]))
        probabilities = nn.functional.one_hot(labels[keep], classes).double()[:, -outputs:]
        torch.testing.assert_close(loss, hot.learn(inputs[keep], probabilities))
        weight = torch.rand(8).double()
        torch.testing.assert_close(
            optimizer.learn(inputs, masked, sample_weight=weight),
            other.learn(inputs[keep], labels[keep], sample_weight=weight[keep]),
        )
        hot.learn(inputs[keep], probabilities, sample_weight=weight[keep])
    close(model, twin)
    close(model, third)
    labels = rf"class labels in \[0, {classes - 1}\], got -1"
    words = r"must be 0 or 1, or probabilities in \[0, 1\], got \[-1.0\]" if "Logistic" in name else labels
    with pytest.raises(ValueError, match=words):
        optimizer.learn(inputs, torch.full((8,), -1))


def test_tokens_with_shifted_labels_and_padding():
    """A head over (batch, time, features): the label of a token is the next one, padding has none."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(7, 9), nn.GRU(9, 9, batch_first=True), nn.Linear(9, 7)

        def forward(self, tokens):
            return self.head(self.mix(self.embed(tokens))[0])

    torch.manual_seed(0)
    model = Tokens()
    optimizer = SepSA(model, torch.optim.Adam, lr=1e-2, solver=SoftmaxNewton())
    tokens = torch.randint(0, 7, (4, 12))
    labels = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    labels[2, 5:] = -100
    features, seen = model.mix(model.embed(tokens))[0].detach(), labels != -100
    alone = SoftmaxNewton().bind(copy.deepcopy(model.head))
    alone.update(features[seen], labels[seen])
    with optimizer.observe(labels) as observation:
        outputs = model(tokens)
    assert torch.equal(model.head.weight, alone.linear.weight)
    # torch ignores the same tokens
    torch.testing.assert_close(observation.loss(outputs), cross_entropy(outputs.flatten(0, 1), labels.flatten()))
    assert (optimizer.solver.steps, optimizer.solver.samples) == (1, int(seen.sum()))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_nothing_observed_is_nothing_learned(fraction):
    """Rows are drawn among those that have a target, and the loss is the mean over these."""
    model = network()
    before = copy.deepcopy(model)
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    optimizer.head_fraction = fraction
    inputs, targets = batch()
    assert optimizer.learn(inputs, targets * NAN) == 0
    close(model, before)
    assert optimizer.solver.steps == 0
    targets[:2] = NAN
    assert optimizer.learn(inputs, targets).isfinite()
    assert (optimizer.solver.steps, optimizer.solver.samples) == (1, 6 * fraction)


def test_samples_observed_in_part_are_refused():
    model = network()
    before = copy.deepcopy(model)
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    inputs, targets = batch()
    targets[3, 1] = NAN
    with pytest.raises(ValueError, match=r"got 1 samples that are partly observed: .*PerOutput\(RLS\(\)\)"):
        optimizer.learn(inputs, targets)
    close(model, before)


def test_learn_weighs_samples_in_the_head_and_in_the_loss():
    model, twin = network(), network()
    optimizer, other = (SepSA(m, torch.optim.SGD, lr=1e-2) for m in (model, twin))
    weight = torch.tensor([1.0, 2, 0, 1, 3, 0.5, 1, 0]).double()
    for k in range(5):
        inputs, targets = batch(seed=k)
        loss = optimizer.learn(inputs, targets, sample_weight=weight)
        with other.observe(targets, weight):
            truth = (weight[:, None] * (twin(inputs) - targets) ** 2).mean(1).sum() / weight.sum()
        truth.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(loss, truth.detach())
    close(model, twin)
