"""`sepsa forecast`, as a person uses it: gaps, bad rows, the page, and a run that is interrupted and resumed."""

from __future__ import annotations

import csv
import io
import math
import re
from datetime import datetime, timedelta

import pytest
from typer.testing import CliRunner

from sepsa import cli


def run(*arguments, code=0):
    """Run `sepsa forecast`; its exit code must be this."""
    result = CliRunner().invoke(cli.app, ["forecast", *(str(a) for a in arguments)])
    assert result.exit_code == code, result.output
    return result


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def lines(n, first=0):
    start = datetime(2026, 1, 1)
    for i in range(first, n):
        a = 10 + math.sin(i / 2) + 0.1 * math.sin(i * i)
        yield f"{start + timedelta(hours=i)},{a:.4f},{2 * a:.4f},{i % 5}"


def table(path, rows):
    path.write_text("\n".join(["date,a,b,x", *rows]) + "\n")
    return path


OPTIONS = ("--time", "date", "--target", "a,b", "--horizon", 3, "--lags", 8, "--seasons", 12)


def test_the_last_forecast_is_printed_and_all_are_written(tmp_path):
    source, out, page = table(tmp_path / "t.csv", lines(400)), tmp_path / "p.csv", tmp_path / "page.html"
    result = run(source, *OPTIONS, "--inputs", "x", "--predictions", out, "--report", page)
    rows = rows_of(result.stdout)
    assert [(row["step"], row["series"]) for row in rows] == [(str(h), name) for h in (1, 2, 3) for name in "ab"]
    assert rows[0]["time"] == "2026-01-17 16:00:00"
    for row in rows:
        assert float(row["low"]) < float(row["forecast"]) < float(row["high"])
    assert float(rows[0]["forecast"]) == pytest.approx(10 + math.sin(200), abs=0.3)
    made = list(csv.reader(out.read_text().splitlines()))
    assert made[0] == ["line", "a+1", "b+1", "a+2", "b+2", "a+3", "b+3"]
    assert len(made) == 401
    assert made[-1][1] == rows[0]["forecast"]
    text = page.read_text()
    assert text.count("<polygon") == 6
    assert re.search(r'id="rows">400<', text)
    assert "400 rows, mean absolute error" in result.stderr


def test_gaps_bad_numbers_and_times_that_do_not_advance_or_leap(tmp_path):
    rows = list(lines(120))
    rows[50] = rows[49]  # the row of an hour twice, and the next hour is a gap
    rows[60] = rows[60].replace(",", ",oops", 1)
    rows[70] = rows[10]
    rows[80] = rows[80].replace("2026", "2104", 1)
    result = run(table(tmp_path / "t.csv", rows), *OPTIONS, "--quarantine", tmp_path / "q.csv")
    lost = {row["line"]: row["reason"] for row in rows_of((tmp_path / "q.csv").read_text())}
    assert sorted(lost) == ["52", "62", "72", "82"]
    assert lost["52"] == "there is a row at this time, 2026-01-03 01:00:00, already"
    assert lost["62"] == "'a' is not a number"
    assert lost["82"] == "its time leaps ahead, and the rows after it do not"
    assert rows_of(result.stdout)[0]["time"] == "2026-01-06 00:00:00"
    assert "116 rows" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--target", "c"), "--target must be a column of the table, date, a, b, x, got 'c'"),
        (("--target", "a", "--time", "day"), "--time must be a column of the table"),
        ((), "--target must name the column to predict"),
        (("--target", "a", "--seasons", "1"), "--seasons must be at most 8 periods of more than 2"),
        (("--target", "a", "--step", "fortnight"), "--step must be seconds or one of second, minute"),
        (("--target", "a", "--bounds", "5,1"), "--bounds must be in order"),
    ],
)
def test_mistakes_are_one_line(options, words, tmp_path):
    result = run(table(tmp_path / "t.csv", lines(20)), *options, code=2)
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("rows", [90, 300])
def test_a_resumed_run_ends_with_the_same_bytes(rows, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def forecast(folder, every):
        files = ("--predictions", folder / "p.csv", "--checkpoint", folder / "c")
        return run(folder / "t.csv", *OPTIONS, *files, "--every", every)

    for folder, n, every in ((whole, 500, 10_000), (parts, rows, 40)):
        folder.mkdir()
        table(folder / "t.csv", lines(n))
        forecast(folder, every)
    with (parts / "p.csv").open("a") as file:
        file.write("what a killed run wrote after its last checkpoint\n" * 1000)
    with (parts / "t.csv").open("a") as file:
        file.write("\n".join(lines(500, rows)) + "\n")
    result = forecast(parts, 40)
    assert f"500 rows ({500 - rows} now)" in result.stderr
    assert (whole / "p.csv").read_bytes() == (parts / "p.csv").read_bytes()
    other = run(parts / "t.csv", "--target", "a", "--checkpoint", parts / "c", code=2)
    assert "was made with --target a,b, got a" in other.stderr


def test_a_column_without_a_number_is_an_error(tmp_path):
    source = table(tmp_path / "t.csv", (line.replace(line.split(",")[1], "", 1) for line in lines(60)))
    result = run(source, "--time", "date", "--target", "a", "--horizon", 2, code=1)
    assert "--target a has no number" in result.stderr
    assert result.stdout == ""


NUMBERS = [(0, 1, "60"), (1_700_000_000_000, 3_600_000, "1700216000000"), (-5e9, 60, "-4999996400")]


@pytest.mark.parametrize(("first", "step", "expected"), NUMBERS)
def test_numbers_stay_numbers(first, step, expected, tmp_path):
    source = tmp_path / "t.csv"
    source.write_text("t,a\n" + "".join(f"{first + step * i:.0f},{math.sin(i):.3f}\n" for i in range(60)))
    result = run(source, "--time", "t", "--target", "a", "--horizon", 2, "--lags", 4)
    assert rows_of(result.stdout)[0]["time"] == expected


def test_names_are_quoted(tmp_path):
    source, name = tmp_path / "t.csv", 'flow "north"'
    body = "".join(f"{math.sin(i):.3f}\n" for i in range(40))
    source.write_text('"' + name.replace('"', '""') + '"\n' + body)
    result = run(source, "--target", name, "--horizon", 2, "--predictions", tmp_path / "p.csv")
    assert {row["series"] for row in rows_of(result.stdout)} == {name}
    made = next(csv.reader((tmp_path / "p.csv").read_text().splitlines()))
    assert made == ["line", f"{name}+1", f"{name}+2"]


def test_texts_are_inputs_and_rows_without_a_target_at_the_end_are_known_ahead(tmp_path):
    source, rows = tmp_path / "t.csv", []
    for i in range(703):
        rest = i % 7 > 4
        value = "" if i >= 700 else f"{i % 7 + 5 * rest + 0.01 * math.sin(i * i):.3f}"
        rows.append(f"{datetime(2024, 1, 1) + timedelta(days=i):%d.%m.%Y},{'rest' if rest else 'work'},{value}")
    source.write_text("\n".join(["day,kind,a", *rows]) + "\n")
    options = ("--time", "day", "--date-format", "%d.%m.%Y", "--target", "a", "--inputs", "kind", "--horizon", 3)
    result = run(source, *options, "--known-ahead", "--lags", 8)
    assert rows_of(result.stdout)[0]["time"] == "2025-12-01 00:00:00"
    assert "700 rows" in result.stderr
    assert "best naive forecast" in result.stderr
    assert list(tmp_path.iterdir()) == [source]  # no quarantine file unasked
