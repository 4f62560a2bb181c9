"""The report, from records made up here: what it counts, what it draws and what it says."""

import json
import math
import re
import shutil
import statistics
from collections import defaultdict
from dataclasses import replace

import pytest

from reproduction import formatting, records, report, table3
from reproduction.data import metric
from reproduction.experiments import EXPERIMENTS, FIGURES, plan
from reproduction.methods import NAMES as METHOD_NAMES
from reproduction.methods import slug
from reproduction.training import Outcome

ASKED_FOR = {
    "mode", "dataset", "method", "metric", "train_mean", "train_std", "test_mean", "test_std", "seconds_mean", "seeds",
    "paper_train_mean", "paper_test_mean",
}  # fmt: skip
PAGE = "# Reproduction\n\nbefore\n\n<!-- table3 begin -->\nold\n<!-- table3 end -->\n\nafter\n"


def made_up(run):
    """What a run might have given: near the paper's number, a little further with every seed; NAG diverges at 0.01."""
    good = metric(run.dataset) == "mse"
    start, end = (500.0, 5.0) if good else (10.0, 98.5 if run.dataset == "mnist" else 40.0)
    end += run.seed % 7 * 0.1 + METHOD_NAMES.index(run.method) * (1.0 if good else -1.0)
    x = [0, 1, 2, 4, 8]
    curve = [end + (start - end) * math.exp(-i) for i in x]
    outcome = Outcome(seconds=0.25, train=end, test=curve[-1], x=x, train_curve=curve, test_curve=curve)
    printed = table3.PAPER.get((run.mode, run.dataset, run.method))
    if EXPERIMENTS[run.experiment].compared and printed:
        step = (run.seed % 3 - 1) * 0.1
        outcome.train = printed.train_mean + printed.train_std * step
        outcome.test = printed.test_mean + printed.test_std * step
    if run.method == "NAG" and run.lr >= 1e-2:
        outcome.diverged, outcome.train, outcome.test = True, None, None
        outcome.train_curve = outcome.test_curve = [start, 1e9]
    return outcome


def lay_out(results, runs, outcome=made_up, note=None):
    """Records of these runs, in the files where `python -m reproduction run` would put them."""
    files = defaultdict(list)
    for run in runs:
        files[records.path(results, run)].append((run, records.record(run, outcome(run), "cpu")))
    for file, entries in files.items():
        run = entries[0][0]
        head = {key: getattr(run, key) for key in ("experiment", "dataset", "mode", "method")}
        kept = [entry | ({"note": note} if note else {}) for _, entry in entries]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(head | {"metric": metric(run.dataset), "runs": kept}), encoding="utf-8")


def lay_out_convergence(results):
    k = [1, 10, 100, 1000]
    curve = {name: [factor / i for i in k] for name, factor in (("mean", 1), ("low", 0.8), ("high", 1.2))}
    slope = {"gradient": [-0.5, -0.6, -0.4], "objective": [-1.0, -1.1, -0.9]}
    cost = {key: [{key: n, "seconds": n * 1e-5} for n in (10, 100)] for key in ("p", "q")}
    content = {"k": k, "gradient_norm": curve, "objective_gap": curve, "slope": slope, "seeds": 4, "cost": cost}
    (results / "convergence.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A report on everything: (results, out, docs)."""
    folder = tmp_path_factory.mktemp("whole")
    results, out, docs = folder / "results", folder / "out", folder / "docs" / "reproduction.md"
    for experiment in EXPERIMENTS:
        lay_out(results, plan(experiment, seeds=3 if experiment == "table3" else 1))
    lay_out_convergence(results)
    docs.parent.mkdir()
    docs.write_text(PAGE, encoding="utf-8")
    report.write(results, out, docs)
    return results, out, docs


def page(out):
    return (out / "report.html").read_text(encoding="utf-8")


# ---------------------------------------------------------------------- Table III


@pytest.mark.long
def test_a_row_per_mode_data_set_and_method_in_the_papers_order(whole):
    rows = json.loads((whole[0] / "table3.json").read_text(encoding="utf-8"))
    keys = [(row["mode"], row["dataset"], row["method"]) for row in rows]
    assert len(set(keys)) == len(keys) == 2 * (9 + 9 + 5 + 5)
    assert [key for key in keys if key in table3.PAPER] == list(table3.PAPER)
    assert all(set(row) >= ASKED_FOR for row in rows)
    row = rows[keys.index(("mini-batch", "diabetes", "SepSA"))]
    assert row["metric"] == "mse"
    assert row["seeds"] == 3
    assert (row["paper_train_mean"], row["paper_train_std"]) == (1291.8, 83.5)
    assert row["train_mean"] == pytest.approx(1291.8)
    assert row["train_std"] == pytest.approx(8.35)  # of −0.1, 0, 0.1 of the paper's: n − 1, not n
    lacks = rows[keys.index(("online", "mnist", "Adam, cross-entropy"))]
    assert lacks["metric"] == "accuracy"
    assert all(value is None for key, value in lacks.items() if key.startswith("paper_") or key.endswith("_difference"))


def test_diverged_runs_are_counted_and_left_out(tmp_path):
    runs = plan("table3", ["energy"], ["SepSA", "SGD"], seeds=4)

    def outcome(run):
        gone = run.seed == 200 or run.method == "SGD"
        numbers = {} if gone else {"train": float(run.seed), "test": 1.0}
        return Outcome(seconds=0.1 if gone else 3.0, diverged=gone, x=[0], test_curve=[5.0], **numbers)

    lay_out(tmp_path, runs, outcome)
    report.write(tmp_path, tmp_path / "out")
    for row in json.loads((tmp_path / "table3.json").read_text(encoding="utf-8")):
        if row["method"] == "SepSA":
            assert (row["seeds"], row["diverged"]) == (4, 1)
            assert row["train_mean"] == 202.0
            assert row["train_std"] == statistics.stdev([201, 202, 203])
            assert row["seconds_mean"] == 3.0
        else:
            assert (row["diverged"], row["train_mean"], row["test_std"]) == (4, None, None)
    text = page(tmp_path / "out")
    assert "(1 of 4 diverged, left out)" in text
    assert "all diverged" in text


def test_verdicts_know_which_way_is_better_and_numbers_are_printed_as_in_the_paper():
    mse = {0.4: "≈ 0.4 σ", 1.5: "▽ 1.5 σ worse", -3.21: "▲ 3.2 σ better", None: "–"}
    accuracy = {1.5: "△ 1.5 σ better", -250.4: "▼ 250 σ worse"}
    assert [formatting.judge(value, "mse") for value in mse] == list(mse.values())
    assert [formatting.judge(value, "accuracy") for value in accuracy] == list(accuracy.values())
    printed = {7.7356: "7.7356", 29.926: "29.926", 165.11: "165.11", 26413.9: "26,413.9", 3e12: "3e+12", None: "–"}
    assert [formatting.number(value, "mse") for value in printed] == list(printed.values())
    assert formatting.number(98.4, "accuracy") == "98.40"
    assert formatting.mean_and_std(165.11, 21.64, "mse").split() == ["165.11", "±", "21.64"]


# ---------------------------------------------------------------------- the page and what lies beside it


@pytest.mark.long
def test_everything_is_there_links_to_records_and_loads_nothing(whole):
    _, out, _ = whole
    names = {*report.FIGURE_TITLES}
    assert names == {*FIGURES, "convergence"} >= {"fig1", "fig2", "fig3", "fig4"}
    wanted = {f"{name}.{suffix}" for name in names for suffix in ("svg", "png")}
    assert {path.name for path in (out / "figures").iterdir()} == wanted
    text = page(out)
    captions = re.findall(r'<img src="data:image/svg[^"]*" alt="([^"]*)"', text)
    assert len(captions) == len(names)
    assert any("Diverged: NAG in 5 panels" in alt for alt in captions)
    links = [out / link for link in re.findall(r'<a href="([^"]*)"', text)]
    assert len(links) == len(set(links)) >= 24 + 6
    assert all(link.is_file() for link in links)
    assert {link.parent.name for link in links} == {"table3", "augmented", "variants"}
    assert not re.search(r"https?://|@import|url\(|<script", text)


@pytest.mark.long
def test_the_same_records_give_the_same_bytes_and_what_is_missing_can_be_run_as_it_is_told(whole, tmp_path):
    results, out, _ = whole
    partial = tmp_path / "results"
    for name in ("table3", "fig2", "fig4"):
        shutil.copytree(results / name, partial / name)
    shutil.copy(results / "convergence.json", partial)
    for file in [partial / "fig2" / "energy-mini-batch-nag.json", *(partial / "fig2").glob("diabetes*")]:
        file.unlink()
    report.write(partial, tmp_path / "out")
    assert (partial / "table3.json").read_bytes() == (results / "table3.json").read_bytes()
    drawn = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert drawn == {f"{name}.{suffix}" for name in ("convergence", "fig2", "fig4") for suffix in ("png", "svg")}
    for name in drawn - {"fig2.png", "fig2.svg"}:
        assert (tmp_path / "out" / "figures" / name).read_bytes() == (out / "figures" / name).read_bytes()
    told = {command: what for what, command in report.missing(partial, table3.read(partial)).items()}
    assert told["python -m reproduction run fig2 --datasets energy --methods nag"] == "Fig. 2, Energy: 3 runs of NAG"
    assert told["python -m reproduction run fig2 --datasets diabetes"] == "Fig. 2, Diabetes: 18 runs of all methods"
    assert "python -m reproduction run fig1" in told


@pytest.mark.long
def test_the_docs_keep_what_is_around_the_table(whole):
    docs = whole[2]
    text = docs.read_text(encoding="utf-8")
    assert text.startswith("# Reproduction\n\nbefore\n\n<!-- table3 begin -->\n")
    assert text.endswith("<!-- table3 end -->\n\nafter\n")
    assert "old" not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {12}
    for way in re.findall(r"\]\((.*?)\)", text):
        assert (docs.parent / way).exists()
    assert "are left without an explanation" in text


def test_what_no_experiment_meets_is_left_without_an_explanation():
    def row(experiment, method, train, test):
        run = table3.RecordedRun(1e-3, {}, 1.0, 50.0, 50.0, False, {}, None)
        made = table3._row(table3.Record(experiment, "cifar10", "mini-batch", method, "accuracy", (run,)))
        paper = table3.PAPER["mini-batch", "cifar10", method.partition(",")[0]]
        return replace(made, train_difference=train, test_difference=test, paper_test_mean=paper.test_mean)

    far, cut = row("table3", "SepSA", 9.0, 1.0), row("augmented", "SepSA", 3.0, 2.5)
    half, near = (row("variants", "SepSA, no weight decay", 1.0, test) for test in (-2.5, -1.5))
    both = [("augmented", "train"), ("augmented", "test")]
    for rows, left in (
        ([far], [("table3", "train")]),
        ([far, cut], both),
        ([far, cut, half], both),  # one mean alone does not meet the row
        ([far, cut, near], []),
    ):
        assert [(each.experiment, split) for each, split in table3.unexplained(rows)] == left


# ---------------------------------------------------------------------- what is missing, small or foreign


def test_nothing_run_yet_says_how_to_run_it(tmp_path):
    (tmp_path / "page.md").write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="docs must hold the lines <!-- table3 begin -->"):
        report.write(tmp_path, tmp_path / "out", tmp_path / "page.md")
    assert not (tmp_path / "out").exists()
    report.write(tmp_path, tmp_path / "out")
    assert json.loads((tmp_path / "table3.json").read_text(encoding="utf-8")) == []
    text = page(tmp_path / "out")
    for name in (*EXPERIMENTS, "convergence"):
        assert f"python -m reproduction run {name}<" in text


def test_quick_runs_are_called_so_and_notes_are_told(tmp_path):
    runs = plan("table3", ["energy"], ["SepSA"], quick=True)
    lay_out(tmp_path, runs, note="<b>a copy</b> & no original")
    report.write(tmp_path, tmp_path / "out")
    text = page(tmp_path / "out")
    assert f"{len(runs)} of {len(runs)} runs are quick ones" in text
    assert text.count("<li>&lt;b&gt;a copy&lt;/b&gt; &amp; no original</li>") == 1
    ran = {run.method for run in plan("table3", ["energy"], quick=True)} - {"SepSA"}
    others = ",".join(slug(name) for name in table3.METHODS if name in ran)
    assert f"python -m reproduction run table3 --datasets energy --methods {others} --quick" in text


@pytest.mark.parametrize(("key", "value", "message"), [
    ("method", "Lion", r"method must be one of .*'SepSA'.*, got 'Lion' in .*energy-online-sepsa.json"),
    ("runs", [{"lr": 1}], r"energy-online-sepsa\.json holds an invalid run"),
])  # fmt: skip
def test_foreign_records_are_refused_by_name(tmp_path, key, value, message):
    lay_out(tmp_path, plan("table3", ["energy"], ["SepSA"], seeds=1))
    file = tmp_path / "table3" / "energy-online-sepsa.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | {key: value}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        report.write(tmp_path, tmp_path / "out")
