"""Results in files: complete, sorted, replaced whole."""

import json
import math
import threading
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reproduction import records
from reproduction.experiments import RunSpec, plan
from reproduction.training import Outcome

RUN = RunSpec("fig1", "diabetes", "online", "SepSA", 1e-3, 233, 1, 1, 1.0, 1.0)
OUTCOME = Outcome(1.23456789, 2500.123456, 3000.0, False, [0, 282], [], [26000.987654, 3000.0])


def entry(run=RUN, outcome=OUTCOME):
    return records.record(run, outcome, "cpu")


def put(results, *runs):
    for run in runs:
        records.add(results, run, entry(run))


def test_a_record_holds_everything():
    made = entry()
    assert made["spec"] == asdict(RUN)
    assert (made["lr"], made["seed"], made["device"], made["diverged"]) == (1e-3, 233, "cpu", False)
    assert made["final"] == {"train": 2500.12, "test": 3000.0}
    assert made["curve"] == {"x": [0, 282], "test": [26001.0, 3000.0]}
    assert made["seconds"] == 1.23457
    assert set(made["versions"]) == {"sepsa", "torch", "numpy", "python"}


def test_a_diverged_run_is_null_in_the_file(tmp_path):
    outcome = Outcome(0.1, None, None, True, [1, 2], [5.0, None], [6.0, None])
    records.add(tmp_path, RUN, entry(RUN, outcome))
    (run,) = records.read(records.path(tmp_path, RUN))["runs"]
    assert run["diverged"]
    assert run["final"] == {"train": None, "test": None}
    assert run["curve"] == {"x": [1, 2], "train": [5.0, None], "test": [6.0, None]}


@given(st.floats(allow_subnormal=False))
def test_numbers_keep_six_digits(value):
    kept = records.significant(value)
    if not math.isfinite(value):
        assert kept is None
    else:
        assert kept == pytest.approx(value, rel=5.1e-6, abs=0)
        assert f"{kept:.6g}" == f"{value:.6g}"
        assert json.loads(json.dumps(kept)) == kept == records.significant(kept)


def test_one_file_per_experiment_data_set_and_method_with_one_run_in_each_line(tmp_path):
    runs = [replace(RUN, lr=lr, seed=seed) for seed in (235, 233) for lr in (1e-2, 1e-4, 1e-3)]
    put(tmp_path, *runs, replace(RUN, method="Adam, cross-entropy"))
    assert [str(file.relative_to(tmp_path)) for file in records.files(tmp_path)] == [
        "fig1/diabetes-online-adam-cross-entropy.json",
        "fig1/diabetes-online-sepsa.json",
    ]
    file = records.path(tmp_path, RUN)
    content = json.loads(file.read_text())
    assert list(content) == ["experiment", "dataset", "mode", "method", "metric", "runs"]
    assert (content["metric"], content["method"]) == ("mse", "SepSA")
    assert [(r["lr"], r["seed"]) for r in content["runs"]] == sorted((r.lr, r.seed) for r in runs)
    lines = file.read_text().splitlines()
    assert sum('"spec"' in line for line in lines) == len(runs)
    assert all(json.loads(line.strip().rstrip(",")) for line in lines if '"spec"' in line)


def test_what_is_there_with_the_same_specification_is_not_missing(tmp_path):
    runs = plan("fig2", ["diabetes"], ["SepSA", "Adam"], 3)
    put(tmp_path, *runs[::2])
    assert records.missing(tmp_path, runs) == runs[1::2]
    changed = [replace(run, epochs=run.epochs + 1) for run in runs]
    assert records.missing(tmp_path, changed) == changed
    put(tmp_path, *changed)  # takes the place of the others
    assert records.missing(tmp_path, changed) == []
    assert records.missing(tmp_path, runs) == runs


def test_two_writers_into_one_file(tmp_path):
    def write(seeds):
        put(tmp_path, *(replace(RUN, seed=seed) for seed in seeds))

    writers = [threading.Thread(target=write, args=(range(i, 40, 2),)) for i in (0, 1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [run["seed"] for run in records.read(records.path(tmp_path, RUN))["runs"]] == list(range(40))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"runs": []}', "\udcff"])
def test_a_file_that_is_none_is_named(tmp_path, content):
    file = records.path(tmp_path, RUN)
    file.parent.mkdir(parents=True)
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"diabetes-online-sepsa\.json is not a results file"):
        records.missing(tmp_path, [RUN])
