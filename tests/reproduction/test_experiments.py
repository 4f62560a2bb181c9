"""The experiments: the runs that each consists of, and the loop that trains them."""

import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reproduction import training
from reproduction.data import Dataset, load
from reproduction.experiments import plan
from reproduction.methods import CROSS_ENTROPY, EVIDENCE, PAPER, STANDARDIZED, TUNED
from reproduction.training import train

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
beside = pytest.mark.skipif(not SHARED.exists(), reason="the data sets are not beside the repository")


@pytest.fixture(scope="module")
def diabetes():
    return load("diabetes")


@pytest.fixture(scope="module")
def energy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "energy").mkdir()
    (folder / "energy" / "ENB2012_data.csv").write_bytes((SHARED / "ENB2012_data.csv").read_bytes())
    return load("energy", folder)


def images(n_train=70, n_test=40):
    """A classification that can be learned: the class is the row of the bright line."""
    generator = torch.Generator().manual_seed(0)

    def part(n):
        labels = torch.randint(10, (n,), generator=generator)
        inputs = 0.1 * torch.randn(n, 1, 12, 12, generator=generator)
        inputs[torch.arange(n), 0, labels] += 1
        return inputs, torch.eye(10)[labels]

    return Dataset("mnist", "classification", *part(n_train), *part(n_test))


def one(experiment, dataset, method, **changes):
    """The run of the experiment at lr 1e-3 and its first seed."""
    mode = changes.pop("mode", None)
    runs = plan(experiment, [dataset], [method], 1)
    (run,) = (r for r in runs if r.lr == changes.get("lr", 1e-3) and mode in (None, r.mode))
    return replace(run, **changes)


# ---------------------------------------------------------------------- plans


def test_the_figures_have_the_papers_runs():
    fig1, fig2, fig3, fig4 = (plan(name) for name in ("fig1", "fig2", "fig3", "fig4"))
    assert [len(runs) for runs in (fig1, fig2, fig3, fig4)] == [4 * 3 * 6, 2 * 3 * 6, 2 * 3 * 6, 7 * 6]
    assert {(r.mode, r.seed, r.epochs, r.batch) for r in fig1} == {("online", 233, 1, 1)}
    assert {(r.dataset, r.epochs, r.batch) for r in fig2} == {("energy", 50, 32), ("diabetes", 50, 32)}
    assert {(r.dataset, r.epochs, r.batch) for r in fig3} == {("mnist", 20, 64), ("cifar10", 20, 64)}
    assert sorted({r.lr for r in fig4}) == [1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0]
    assert {r.dataset for r in fig4} == {"energy"}
    assert {r.method for r in fig1} == set(PAPER)


def test_the_table_has_the_papers_seeds_and_more_rows():
    runs = plan("table3")
    assert {r.lr for r in runs} == {1e-3}
    seeds = defaultdict(list)
    for run in runs:
        if run.mode == "online":
            seeds[run.dataset, run.method].append(run.seed)
    for dataset in ("energy", "diabetes"):
        for method in (*PAPER, TUNED, EVIDENCE, STANDARDIZED):
            assert seeds.pop((dataset, method)) == list(range(200, 300))
    for dataset in ("mnist", "cifar10"):
        for method in ("SepSA", "Adam", TUNED, CROSS_ENTROPY):
            assert seeds.pop((dataset, method)) == [699, 822, 644, 179, 538, 237, 820, 871, 496, 565]
        assert seeds.pop((dataset, "slimTrain")) == [699, 822, 644]
    assert not seeds
    assert Counter(r.mode for r in runs) == {"online": len(runs) // 2, "mini-batch": len(runs) // 2}


@pytest.mark.parametrize(("arguments", "message"), [
    (("fig9",), "experiment must be one of 'fig1', .* got 'fig9'"),
    (("fig1", ["iris"]), "dataset must be one of 'energy', .* got 'iris'"),
    (("fig1", None, ["adam"]), "method must be one of 'SepSA', .* got 'adam'"),
    (("table3", ["mnist"], ["SepSA"], 11), "seeds must be a number of 1 to 10 for table3 on mnist, got 11"),
])  # fmt: skip
def test_wrong_names_are_refused_with_the_right_ones(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(*arguments)


# ---------------------------------------------------------------------- training


# Two of the paper's standard deviations over 100 seeds about its means, for means over 3.
@pytest.mark.parametrize(("name", "mode", "train_range", "test_range"), [
    pytest.param("energy", "online", (7.0264, 8.4448), (7.2163, 9.3935), marks=beside),
    ("diabetes", "online", (2351.1, 2611.5), (2681.0, 3199.4)),
    pytest.param("energy", "mini-batch", (1.6973, 3.0765), (2.1596, 4.3956), marks=beside),
    ("diabetes", "mini-batch", (1124.8, 1458.8), (2733.4, 3418.6)),
])  # fmt: skip
def test_sepsa_comes_to_the_papers_errors(name, mode, train_range, test_range, request):
    dataset = request.getfixturevalue(name)
    outcomes = [train(r, dataset) for r in plan("table3", [name], ["SepSA"], 3) if r.mode == mode]
    assert len(outcomes) == 3
    assert train_range[0] < sum(o.train for o in outcomes) / 3 < train_range[1]
    assert test_range[0] < sum(o.test for o in outcomes) / 3 < test_range[1]


@pytest.mark.parametrize("method", [*PAPER, TUNED, STANDARDIZED])
def test_a_run_is_decided_by_its_specification_alone(diabetes, method):
    run = one("fig2", "diabetes", method, epochs=2)
    torch.manual_seed(99)
    first = train(run, diabetes)
    train(one("fig1", "diabetes", "Adam", seed=5), diabetes)
    second = train(run, diabetes)
    assert replace(first, seconds=0) == replace(second, seconds=0)
    assert replace(first, seconds=0) != replace(train(replace(run, seed=4), diabetes), seconds=0)


@pytest.mark.parametrize("mode", ["online", "mini-batch"])
def test_every_epoch_shows_every_row_once_in_a_new_order(diabetes, monkeypatch, mode):
    orders = []
    monkeypatch.setattr(training, "advance", lambda learner, x, y, order: orders.append(order))
    count, n = 1 if mode == "online" else 3, len(diabetes.train_inputs)
    train(replace(one("table3", "diabetes", "Adam", mode=mode), epochs=count), diabetes)
    shapes = [(n, 1)] if mode == "online" else 3 * [(n // 32, 32), (1, n % 32)]
    assert [tuple(order.shape) for order in orders] == shapes
    epochs = torch.cat([order.flatten() for order in orders]).reshape(count, n).tolist()
    assert all(sorted(rows) == list(range(n)) for rows in epochs)
    assert len(set(map(tuple, epochs))) == count


def test_the_curves_have_a_point_where_they_should_and_are_of_one_training_with_the_table(diabetes):
    online = train(one("fig1", "diabetes", "SepSA", seed=200), diabetes)
    assert online.x == [*range(0, 283, 2)]
    assert len(online.x) == len(online.test_curve) <= 150
    assert online.train_curve == []
    assert online.test_curve[-1] == online.test
    epochs = train(one("fig2", "diabetes", "SepSA", epochs=3), diabetes)
    assert epochs.x == [1, 2, 3]
    assert epochs.train_curve[-1] == epochs.train
    assert epochs.test_curve[-1] == epochs.test
    table = train(one("table3", "diabetes", "SepSA", mode="online"), diabetes)
    assert (table.x, table.test_curve) == ([], [])
    assert (table.train, table.test) == (online.train, online.test)


@pytest.mark.parametrize("experiment", ["fig1", "fig2"])
def test_a_diverged_run_is_null_from_there_on(diabetes, experiment):
    outcome = train(one(experiment, "diabetes", "NAG", lr=1e-2), diabetes)
    assert outcome.diverged
    assert outcome.train is outcome.test is outcome.test_curve[-1] is None
    assert outcome.x == train(one(experiment, "diabetes", "SepSA"), diabetes).x
    at = outcome.test_curve.index(None)
    assert outcome.test_curve[at:] == [None] * (len(outcome.x) - at)
    assert all(math.isfinite(value) for value in outcome.test_curve[:at])


@pytest.mark.parametrize("method", ["SepSA", "slimTrain", TUNED])
def test_a_head_that_meets_numbers_beyond_it_ends_the_run_and_nothing_else(diabetes, method):
    outcome = train(replace(one("fig1", "diabetes", method), lr=1e36), diabetes)
    assert outcome.diverged
    assert outcome.test is None


# ---------------------------------------------------------------------- images


@pytest.mark.parametrize("method", ["SepSA", TUNED, CROSS_ENTROPY, "Adam"])
def test_images_are_learned_and_measured_in_percent(method):
    outcome = train(one("table3", "mnist", method, mode="mini-batch", epochs=6), images(n_train=200))
    assert outcome.test > 60
    assert 0 <= outcome.train <= 100


@pytest.mark.parametrize(("dataset", "mode", "body", "memory", "halving"), [
    ("diabetes", "online", torch.optim.Adam, 5, False),
    ("diabetes", "mini-batch", torch.optim.RMSprop, 5, True),
    ("mnist", "online", torch.optim.Adam, 0, False),
    ("mnist", "mini-batch", torch.optim.Adam, 5, True),
])  # fmt: skip
def test_the_settings_that_differ_from_case_to_case(diabetes, dataset, mode, body, memory, halving):
    data = diabetes if dataset == "diabetes" else images()
    sepsa = training._build(one("table3", dataset, "SepSA", mode=mode), data, torch.device("cpu"))
    assert type(sepsa.optimizer.base) is body
    assert sepsa.halving is halving
    slimtrain = training._build(one("table3", dataset, "slimTrain", mode=mode), data, torch.device("cpu"))
    assert type(slimtrain.optimizer.base) is torch.optim.Adam
    assert slimtrain.optimizer.solver.memory == memory


def test_quick_takes_few_images_from_all_over_the_set(monkeypatch):
    seen = []
    monkeypatch.setattr(training, "_warm_up", lambda *run: None)
    monkeypatch.setattr(training, "advance", lambda learner, x, y, order: seen.append((x, order.numel())))
    dataset = images(n_train=2500, n_test=20)
    outcome = train(one("fig1", "mnist", "SGD", quick=True), dataset)
    assert outcome.x == [0, 160, 320, 480, 640]
    assert [steps for _, steps in seen] == [160] * 4
    assert torch.equal(seen[0][0], dataset.train_inputs[:1920:3])
