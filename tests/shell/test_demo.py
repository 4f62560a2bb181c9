"""The demo, as a person meets it."""

import numpy as np
import torch
from PIL import Image

from reproduction import methods, networks
from reproduction.data import load
from reproduction.demo_figure import draw, train
from reproduction.figures import save
from sepsa.shell import demo
from sepsa.shell.options import DemoOptions


def test_the_demo_has_the_rows_and_the_steps_of_the_papers_experiment():
    dataset, rows = load("diabetes"), demo.diabetes()
    for name, part in rows._asdict().items():
        assert torch.equal(part, getattr(dataset, name)), name
    batch = dataset.train_inputs[:1], dataset.train_targets[:1]
    for method in demo.METHODS:
        torch.manual_seed(233)
        ours = demo.network(10)
        torch.manual_seed(233)
        theirs = networks.for_dataset(dataset)
        loss = demo.learner(method, ours, 1e-4)(*batch)
        assert torch.equal(loss, methods.build(method, theirs, 1e-4).learn(*batch)), method
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other), method


def test_online_curves_start_alike_and_end_where_they_should():
    dataset = demo.diabetes()
    curves = {method: demo.online(dataset, method, 1e-4, 233) for method in demo.METHODS}
    for method, errors in curves.items():
        assert len(errors) == 283
        assert errors[0] == curves["SepSA"][0]
        if method == "NAG":
            assert np.isnan(errors[-1])  # diverges, as in the paper
        else:
            assert errors[-1] < errors[0]


def test_sepsa_beats_the_mean_and_errors_are_in_the_units_of_the_targets_also_where_these_are_standardized():
    dataset = demo.diabetes()
    mean = ((dataset.train_targets.mean() - dataset.test_targets) ** 2).mean().item()
    for lr in demo.LEARNING_RATES:
        assert demo.online(dataset, "SepSA", lr, 233)[-1] < 0.7 * mean
    raw, standardized = (
        demo.online(dataset, "Adam", 1e-4, 233, kind)[-1] for kind in ("raw targets", "standardized targets")
    )
    assert mean < standardized < 0.8 * raw  # Adam has a shorter way to standardized targets
    assert 0.3 * mean < demo.online(dataset, "SepSA", 1e-4, 233, "standardized targets")[-1] < 0.7 * mean


def test_the_command_prints_a_table_and_the_figure_is_drawn_of_its_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "LEARNING_RATES", (1e-4,))
    assert demo.run(DemoOptions(seeds=1)) == 0
    said = capsys.readouterr().out
    assert "SepSA" in said
    assert "diverged" in said
    assert "standardized" in said
    save(draw(train(seeds=1)), tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        assert image.width > 1000
        assert len(image.convert("RGB").resize((200, 80)).getcolors(16000)) > 20
