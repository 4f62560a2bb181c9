"""Random crops and flips: every image cut from its own, padded as asked for, and the same on every device."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import pad

from reproduction import experiments, training
from reproduction.augmentation import MARGIN, Augmentation
from reproduction.data import Dataset

SIZE = 8


def images():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, SIZE, SIZE, generator=generator)
    targets = torch.eye(10)[torch.arange(40) % 10]
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


def test_training_sees_cut_images_smoothed_targets_and_a_rate_that_falls_to_nearly_zero(monkeypatch):
    rates, seen = [], []
    advance = training.advance

    def watched(learner, inputs, targets, order):
        rates.extend([learner.optimizer.param_groups[0]["lr"]] * len(order))
        seen.append((inputs.clone(), targets))
        advance(learner, inputs, targets, order)

    monkeypatch.setattr(training, "_warm_up", lambda *_: None)
    monkeypatch.setattr(training, "advance", watched)
    dataset, (run,) = images(), experiments.plan("augmented", ["cifar10"], ["SepSA"], 1)[-1:]
    outcome = training.train(replace(run, epochs=2, batch=8, schedule="linear", smoothing=0.1), dataset)
    assert outcome.test is not None
    assert rates == pytest.approx([1e-3 * (1 - i / 10) for i in range(10)])  # epochs of 5 whole batches
    assert not torch.equal(seen[0][0], seen[-1][0])
    for inputs, targets in seen:
        assert not torch.equal(inputs, dataset.train_inputs)
        assert torch.allclose(targets, 0.9 * dataset.train_targets + 0.01)


def test_variants_change_one_thing_of_the_rows_they_stand_beside():
    runs = experiments.plan("variants", seeds=1)
    assert {run.padding for run in runs if run.dataset == "mnist"} == {None}
    assert {run.padding for run in runs if run.dataset == "cifar10"} == {"black"}
    for run in runs:
        beside = "augmented" if run.dataset == "cifar10" else "table3"
        others = experiments.plan(beside, [run.dataset], [run.method.partition(",")[0]], 1)
        (same,) = (other for other in others if other.mode == run.mode)
        assert replace(run, experiment=beside, method=same.method) == same
