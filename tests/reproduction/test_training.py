"""The training loop: what is timed, and that timing changes no number."""

import itertools
from dataclasses import asdict

import pytest

from reproduction import training
from reproduction.data import load
from reproduction.experiments import plan


@pytest.mark.parametrize("method", ["SepSA", "slimTrain", "Adam"])
def test_what_a_process_compiles_first_is_not_in_the_seconds_of_its_first_run(method, monkeypatch):
    """The first steps of a kind take a day each on this clock, and later ones a thousandth of a second."""
    dataset, steps = load("diabetes"), []

    def advance(trainer, inputs, targets, order, own=training.advance):
        steps.append(len(order))
        own(trainer, inputs, targets, order)

    clock = itertools.count()
    monkeypatch.setattr(training, "advance", advance)
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(clock) / 1000 + 86_400 * bool(steps))
    monkeypatch.setattr(training, "_WARM", set())
    for run in plan("table3", ["diabetes"], [method], 1, quick=True):
        steps.clear()
        first, second = (training.train(run, dataset) for _ in range(2))
        assert 0 < first.seconds < 86_400
        assert asdict(first) | {"seconds": 0} == asdict(second) | {"seconds": 0}
