"""The choice of ridge and forgetting: by rows that nothing else sees, and the best of them."""

import json

import pytest
import torch
from rich.console import Console

from reproduction import experiments, training, tuning
from reproduction.data import Dataset, load

QUIET = Console(quiet=True)


def test_the_regressions_validate_on_the_rows_the_paper_leaves_and_the_classifications_on_the_last_images():
    dataset = load("diabetes")
    held_out = tuning.held_out(dataset)
    assert held_out.test_inputs is dataset.validation_inputs
    assert held_out.train_inputs is dataset.train_inputs
    rows = torch.arange(6000.0)[:, None]
    dataset = tuning.held_out(Dataset("mnist", "classification", rows, rows, rows[:9], rows[:9]))
    assert torch.equal(dataset.train_inputs, rows[:1000])
    assert torch.equal(dataset.test_targets, rows[1000:])


@pytest.mark.parametrize("name", ["energy", "diabetes", "mnist", "cifar10"])
def test_no_reported_seed_takes_part(name):
    reported = {run.seed for each in experiments.EXPERIMENTS for run in experiments.plan(each)}
    for choice, runs in tuning.grids([name], quick=False).items():
        assert not reported & {run.seed for run in runs}
        assert len(set(runs)) == len(runs)
        assert {run.dataset for run in runs} == {name}
        assert all(run.mode in choice for run in runs)


def test_every_method_on_images_tries_as_many_settings():
    grids = tuning.grids(["mnist", "cifar10"], quick=False)
    assert len(grids) == 3 * (2 + 4)  # methods; MNIST in two modes, CIFAR-10 in two with crops and flips and without
    assert {len(runs) for runs in grids.values()} == {6}
    assert {run.padding for name, runs in grids.items() for run in runs if "augmented" in name} == {"black"}


def test_the_best_mean_wins_and_a_diverged_setting_never():
    runs = tuning.grid("diabetes", "online", quick=False)
    scores = {run: 100.0 + run.seed for run in runs}
    for run in runs:
        if (run.ridge, run.forgetting) == (10.0, 0.99):
            scores[run] -= 5
        if (run.ridge, run.forgetting) == (1.0, 0.9):
            scores[run] = None if run.seed == 102 else 0.0
    for metric, ridge, forgetting in (("mse", 10.0, 0.99), ("accuracy", 0.01, 1.0)):
        chosen = tuning.choose(scores, metric)["chosen"]
        assert (chosen["ridge"], chosen["forgetting"]) == (ridge, forgetting)
    with pytest.raises(RuntimeError, match="every setting of the grid diverged"):
        tuning.choose(dict.fromkeys(runs), "mse")


def test_choices_are_recorded_and_made_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "RIDGES", (1.0, 1000.0))
    monkeypatch.setattr(tuning, "FORGETTINGS", (1.0,))
    tuning.tune(tmp_path, ["diabetes"], quick=True, console=QUIET)
    found = json.loads((tmp_path / "tuning.json").read_text())
    assert sorted(found) == ["diabetes mini-batch", "diabetes online"]
    for entry in found.values():
        assert len(entry["tried"]) == 2
        assert entry["chosen"]["mean"] == min(tried["mean"] for tried in entry["tried"])
    monkeypatch.setattr(training, "train", None)
    tuning.tune(tmp_path, ["diabetes"], quick=True, console=QUIET)
