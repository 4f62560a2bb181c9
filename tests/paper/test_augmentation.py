"""Random crops and flips: every image cut from its own, padded as asked for, and the same on every device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from sepsa.paper import experiments, training
from sepsa.paper.augmentation import MARGIN, Augmentation
from sepsa.paper.data import Dataset

SIZE = 8


def images(n=40):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n, 3, SIZE, SIZE, generator=generator)
    targets = torch.eye(10)[torch.arange(n) % 10]
    return Dataset("cifar10", "classification", inputs, targets, inputs[:10], targets[:10])


def cuts(image):
    """All images that may come of this one, the slow way."""
    padded = pad(image[None], (MARGIN,) * 4, value=-1.0)[0]
    for row in range(2 * MARGIN + 1):
        for column in range(2 * MARGIN + 1):
            cut = padded[:, row : row + SIZE, column : column + SIZE]
            yield (row, column, False), cut
            yield (row, column, True), cut.flip(-1)


def test_each_image_is_a_cut_of_its_own():
    dataset = images()
    drawn = Augmentation(dataset, seed=1).draw()
    found = set()
    for image, cut in zip(dataset.train_inputs, drawn, strict=True):
        places = [place for place, candidate in cuts(image) if torch.equal(candidate, cut)]
        assert places
        found.add(places[0])
    assert len(found) > len(drawn) / 2


def run_of(**changes):
    run = experiments.plan("augmented", ["cifar10"], ["SepSA"], 1)[-1]
    return replace(run, **{"epochs": 2, "batch": 8} | changes)


def test_training_sees_cut_images_and_testing_does_not(monkeypatch):
    seen = []
    advance = training.advance
    monkeypatch.setattr(
        training,
        "advance",
        lambda learner, inputs, *rest: (seen.append(inputs.clone()), advance(learner, inputs, *rest)),
    )
    dataset = images()
    outcome = training.train(run_of(), dataset)
    assert outcome.test is not None
    assert len(seen) == 2  # epochs of 5 whole batches
    assert not torch.equal(seen[0], seen[1])
    assert not any(torch.equal(inputs, dataset.train_inputs) for inputs in seen)


def test_a_linear_rate_falls_to_nearly_zero_and_smoothing_reaches_the_targets(monkeypatch):
    rates, targets_seen = [], []
    advance = training.advance

    def watched(learner, inputs, targets, order):
        rates.extend([learner.optimizer.param_groups[0]["lr"]] * len(order))
        targets_seen.append(targets)
        advance(learner, inputs, targets, order)

    monkeypatch.setattr(training, "advance", watched)
    training.train(run_of(padding=None, schedule="linear", smoothing=0.1), images())
    assert rates == pytest.approx([1e-3 * (1 - i / 10) for i in range(10)])
    assert all(torch.allclose(targets, 0.9 * images().train_targets + 0.01) for targets in targets_seen)


def test_variants_change_one_thing_of_the_rows_they_stand_beside():
    runs = experiments.plan("variants", seeds=1)
    assert {run.padding for run in runs if run.dataset == "mnist"} == {None}
    assert {run.padding for run in runs if run.dataset == "cifar10"} == {"black"}
    for run in runs:
        beside = "augmented" if run.dataset == "cifar10" else "table3"
        (same,) = (
            other
            for other in experiments.plan(beside, [run.dataset], [run.method.partition(",")[0]], 1)
            if other.mode == run.mode
        )
        assert replace(run, experiment=beside, method=same.method) == same
