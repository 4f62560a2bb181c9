"""benchmarks/streams/stream_speed.py: who takes part, and that what is timed is what is judged."""

import json
import subprocess
import sys

import numpy as np
import pytest

from river_models import THERE


@pytest.fixture(scope="module")
def bench():
    from benchmarks.streams import stream_speed

    return stream_speed


@pytest.fixture
def rows():
    chance = np.random.default_rng(0)
    X = chance.standard_normal((40, 8))
    return X, 20 + X[:, :2] + X[:, 2:4]


@pytest.fixture
def installed(bench):
    """The contestants that the test extras bring: River needs a newer Python than the oldest."""
    brought = ("numpy", *["river"][:THERE], "torch", "sklearn")
    return [c for c in bench.CONTESTANTS if c.package in brought]


@pytest.mark.parametrize(
    ("cpuinfo", "lscpu", "name"),
    [
        ("vendor_id\t: GenuineIntel\nmodel\t\t: 207\nmodel name\t: Some Xeon\n", "", "Some Xeon"),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", "Architecture: aarch64\nModel name:   Neoverse-N1\n", "Neoverse-N1"),
        ("processor\t: 0\nModel\t\t: Some Board Rev 1.0\n", "", "Some Board Rev 1.0"),
    ],
    ids=["x86", "arm", "board"],
)
def test_the_processor_is_called_by_its_name(cpuinfo, lscpu, name, bench, monkeypatch):
    from benchmarks import measure

    monkeypatch.setattr(measure.Path, "read_text", lambda self, **options: cpuinfo)
    monkeypatch.setattr(measure.subprocess, "run", lambda *a, **options: subprocess.CompletedProcess(a, 0, lscpu))
    assert measure.processor() == name


def test_every_contestant_learns_the_stream(rows, installed):
    X, Y = rows
    for contestant in installed:
        before = contestant.fresh(X, Y)()
        assert before.shape == (40,), contestant.name
        assert np.isfinite(before).all(), contestant.name
        assert before[0] != before[-1], contestant.name


def test_results_have_times_errors_and_ratios(bench, rows, installed, tmp_path, monkeypatch, capsys):
    items = list(bench.compare(*rows, 2, installed))
    assert items[:3] == [-1, 0, 1]
    results = dict(items[3:])
    assert set(results) == {c.name for c in installed}
    assert results[bench.OURS]["times_ours"]["median"] == 1.0
    assert all(len(result["rounds"]) == 2 for result in results.values())
    monkeypatch.setattr(bench, "stream", lambda: rows)
    monkeypatch.setattr(sys, "argv", ["stream_speed.py", "--rounds", "1", "--out", str(tmp_path / "stream.json")])
    bench.main()
    assert set(json.loads((tmp_path / "stream.json").read_text())["contestants"]) == set(results)
    assert "sepsa engine" in capsys.readouterr().out


def test_a_contestant_that_is_not_installed_stays_away(bench, rows):
    contestants = [bench.CONTESTANTS[0], bench.Contestant("nobody", "no_such_package", bench.sklearn_interface)]
    assert [item[0] for item in bench.compare(*rows, 1, contestants) if isinstance(item, tuple)] == [bench.OURS]
