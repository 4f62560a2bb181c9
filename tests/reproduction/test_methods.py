"""The methods: each has the paper's settings, learns, and reports in the units of the data."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from reproduction import methods
from reproduction.methods import (
    CROSS_ENTROPY,
    EVIDENCE,
    NAMES,
    NEWTON,
    PUBLISHED,
    STANDARDIZED,
    TUNED,
    build,
)
from reproduction.slimtik import SlimTik
from sepsa import SepSA, SoftmaxNewton

TUNING = Path(__file__).resolve().parents[2] / "results" / "tuning.json"
WITH_HEAD_SOLVER = ("SepSA", "SepSA, no weight decay", "slimTrain", PUBLISHED, TUNED, EVIDENCE, NEWTON)
WITH_LABELS = (CROSS_ENTROPY, NEWTON)


def network(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, outputs))


def samples(n=64, classes=None):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator)
    if classes:
        return x, torch.eye(classes)[x[:, :classes].argmax(1)]
    return x, 50 + 10 * torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_learns_and_moves_all_its_weights(name):
    task = "classification" if name in WITH_LABELS else "regression"
    assert methods.applies(name, task)
    x, y = samples(classes=2 if name in WITH_LABELS else None)
    model, lr = network(), 1e-3 if name == "NAG" else 1e-2
    learner = build(name, model, lr, train_targets=y)
    (group,) = learner.optimizer.param_groups  # of what the first-order method owns
    assert group["weight_decay"] == (0 if "no weight decay" in name else 1e-5)
    assert group["lr"] == lr
    assert len(group["params"]) == (2 if name in WITH_HEAD_SOLVER else 4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first = learner.loss_fn(model(x), y).item()
    for _ in range(60):
        learner.learn(x, y)
    assert learner.loss_fn(model(x), y).item() < 0.9 * first
    assert all(not torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_papers_settings():
    for name, kind, settings in (
        ("SGD", torch.optim.SGD, {"momentum": 0}),
        ("NAG", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("RMSprop", torch.optim.RMSprop, {"momentum": 0.9}),
        ("Adam", torch.optim.Adam, {"betas": (0.9, 0.999)}),
    ):
        optimizer = build(name, network(), 1e-3).optimizer
        assert type(optimizer) is kind
        assert optimizer.param_groups[0] | settings == optimizer.param_groups[0]
    sepsa, slim_train = (build(name, network(), 1e-3, body="RMSprop").optimizer for name in ("SepSA", "slimTrain"))
    assert (sepsa.solver.ridge, sepsa.solver.forgetting) == (1.0, 1.0)
    assert isinstance(sepsa.base, torch.optim.RMSprop)
    assert isinstance(slim_train.solver, SlimTik)
    assert slim_train.solver.memory == 5


def test_the_head_sees_half_as_much_in_each_epoch_where_that_is_the_rule():
    fractions = []
    for name in ("SepSA", NEWTON, TUNED, "slimTrain"):
        learner = build(name, network(), 1e-3, halving=True)
        assert isinstance(learner.optimizer, SepSA)
        learner.begin_epoch(3)
        fractions.append(learner.optimizer.head_fraction)
    assert fractions == [0.25, 0.25, 1.0, 1.0]
    build("Adam", network(), 1e-3, halving=True).begin_epoch(3)


def test_standardized_targets_equal_a_training_on_targets_standardized_by_hand():
    x, y = samples()
    learner = build(STANDARDIZED, network(), 1e-2, train_targets=y)
    other = network()
    plain = methods.Trainer(other, torch.optim.Adam(other.parameters(), lr=1e-2, weight_decay=1e-5))
    mean, std = y.mean(0), y.std(0, correction=0)
    for _ in range(30):
        learner.learn(x, y)
        plain.learn(x, (y - mean) / std)
    torch.testing.assert_close(learner.predict(x), other(x) * std + mean)
    assert mse_loss(learner.predict(x), y) < 0.5 * y.var()


def test_sepsa_with_cross_entropy_follows_the_loss_of_its_head():
    x, y = samples(classes=2)
    learner = build(NEWTON, network(), 1e-3, ridge=7.0)
    assert isinstance(learner.optimizer, SepSA)
    assert isinstance(learner.optimizer.solver, SoftmaxNewton)
    assert learner.optimizer.solver.ridge == 7.0
    loss = learner.learn(x, y)
    assert loss.item() < 0.69
    assert methods.head_settings(NEWTON, "mnist", "online") == (1000.0, 1.0)
    assert not methods.applies(NEWTON, "regression")


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"method must be one of 'SepSA', .*, got 'Adagrad'"):
        build("Adagrad", network(), 1e-3)
    with pytest.raises(ValueError, match="train_targets must be given"):
        build(STANDARDIZED, network(), 1e-3)


@pytest.mark.skipif(not TUNING.exists(), reason="results/tuning.json is not there: python -m reproduction run tuning")
def test_the_tuned_settings_are_those_that_tuning_chose():
    named = {methods.slug(name): name for name in NAMES}
    images = {}
    for key, found in json.loads(TUNING.read_text()).items():
        chosen = found["chosen"]
        if key.startswith("images"):
            experiment, dataset, mode, method = key.split()
            settings = tuple(chosen[field] for field in ("lr", "ridge", "forgetting", "smoothing"))
            images[experiment, dataset, mode, named[method]] = settings
        else:
            dataset, mode = key.split()
            assert methods.TUNED_SETTINGS[dataset, mode] == (chosen["ridge"], chosen["forgetting"]), key
    assert images == methods.IMAGE_SETTINGS
