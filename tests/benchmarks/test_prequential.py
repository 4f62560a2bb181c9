"""benchmarks/streams/prequential.py: who takes part, what is measured, and how results are counted."""

import importlib
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("river")

NUMBERS = ("UCI yacht", "heavy tails")  # regressions of the report half
LABELS = ("wine", "digits")  # classifications of it


@pytest.fixture
def script():
    return importlib.import_module("benchmarks.streams.prequential")


def result(stream, model, error, seed=0, **more):
    return {"stream": stream, "model": model, "seed": seed, "rows": 100, "error": error} | more


def test_summary_counts_places_and_what_is_missing(script):
    told = script.averages(
        [
            result("UCI yacht", "sepsa", 1.0),
            result("UCI yacht", "sepsa", 3.0, seed=1),  # the mean is 2
            result("UCI yacht", "linear", 2.2),
            result("UCI yacht", "VW", 1.95),
            result("heavy tails", "sepsa", 4.0),
            result("heavy tails", "linear", 3.0),
            result("heavy tails", "ARF", 5.0),
            result("heavy tails", "CapyMOA KNN", 2.0),
            result("heavy tails", "CapyMOA MVE", 0.1),  # an interval learner is no peer of its own
            result("chaotic map", "linear", 1.0),  # without ours: not counted
            result("Friedman", "sepsa", 9.0),
            result("Friedman", "linear", 1.0),  # of the other half
        ]
    )
    river = script.summary(told, "report")
    assert river == {
        "streams": 2,
        "first": 1,
        "second": 1,
        "more than 5 % behind": 1,
        "ratio to the best peer": pytest.approx(math.sqrt(2 / 2.2 * 4 / 3)),
        "results missing": 2 * len(script.peers("regression", False)) - 3,
    }
    everyone = script.summary(told, "report", further=True)
    assert (everyone["first"], everyone["second"], everyone["more than 5 % behind"]) == (0, 1, 1)
    assert everyone["results missing"] == 2 * len(script.peers("regression", True)) - 5
    assert script.summary(told, "report", kind="classification") == {}
    assert script.summary(told, "report", ours="sepsa, experts") == {}


def test_summary_adds_one_wrong_row_and_takes_the_log_loss_on_request(script):
    told = script.averages(
        [
            result("wine", "sepsa", 0.0, **{"log loss": 0.3, "error 50": 0.04}),
            result("wine", "KNN", 0.0, **{"log loss": 0.2, "error 50": 0.02}),
        ]
    )
    assert script.summary(told, "report")["first"] == 1
    assert script.summary(told, "report")["ratio to the best peer"] == 1
    assert script.summary(told, "report", what="error 50")["ratio to the best peer"] == pytest.approx(0.06 / 0.04)
    assert script.summary(told, "report", what="loss")["ratio to the best peer"] == pytest.approx(1.5)


def test_rivals_are_ahead_by_any_margin_and_by_more_than_five_percent(script):
    errors = {"sepsa": (1.0, 1.0, 0.2, 0.2), "linear": (0.9, 0.99, 0.5, 0.1), "VW": (2.0, 2.0, 2.0, None)}
    told = script.averages(
        [
            result(stream, model, error)
            for model, values in errors.items()
            for stream, error in zip((*NUMBERS, *LABELS), values, strict=True)
            if error is not None
        ]
    )
    rivals = script.rivals(told, "report")
    assert list(rivals) == ["linear", "VW"]
    assert [rivals["linear"][what] for what in ("streams", "missing", "ahead", "by more than 5 %")] == [4, 0, 3, 2]
    assert [rivals["VW"][what] for what in ("streams", "missing", "ahead", "by more than 5 %")] == [3, 1, 0, 0]


def test_intervals_are_measured_by_coverage_and_width(script):
    class Known:
        def predict_one(self, x, with_dist=False):
            return SimpleNamespace(mu=0.0, sigma=2.0) if with_dist else 0.0

        def learn_one(self, x, y):
            pass

    rows = [({"a": 0.0}, y) for y in (0.0, 1.0, -1.0, 100.0, 3.0)]
    told = script.measure(Known(), True, rows, script.STREAMS["heavy tails"])
    assert told["coverage"] == 0.75  # the first row has no interval
    assert told["width"] == pytest.approx(2 * 1.6449 * 2.0, rel=1e-4)
    assert told["relative width"] == pytest.approx(told["width"] / np.std([y for _, y in rows]), rel=1e-4)


def test_results_of_another_file_are_put_over_ours(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "RESULT", tmp_path / "mine.json")
    script.store(result("wine", "KNN", 0.5, width=2.0), result("digits", "KNN", 0.25))
    (tmp_path / "other.json").write_text(json.dumps({"rows": [result("wine", "KNN", 0.75)]}))
    monkeypatch.setattr(sys, "argv", ["prequential.py", "--merge", str(tmp_path / "other.json")])
    script.main()
    assert script.known() == [result("digits", "KNN", 0.25), result("wine", "KNN", 0.75, width=2.0)]


def test_peers_outside_river_run_once_for_each_seed_that_is_missing(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "RESULT", tmp_path / "results.json")
    monkeypatch.setenv("SEPSA_DATA", str(tmp_path))
    made = []

    def make(title):
        return lambda seed: made.append((title, seed)) or script.Simple(False)

    random, still = script.Model(make("random"), True), script.Model(make("still"), False)
    found = {"random peer": random, "peer": still, "another": still}
    monkeypatch.setattr(script, "further_peers", lambda stream, rows: found)
    for _ in range(2):
        script.run_further("report", "wine", "peer", [0, 1])
    assert made == [("random", 0), ("still", 0), ("random", 1)]
    assert [(row["model"], row["seed"]) for row in script.known()] == [
        ("peer", 0),
        ("random peer", 0),
        ("random peer", 1),
    ]
