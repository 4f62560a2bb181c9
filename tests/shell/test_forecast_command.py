"""`sepsa forecast`, as a person uses it: gaps, bad rows, the page, and a run that is interrupted and resumed."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import re
import shlex
from datetime import datetime, timedelta

import numpy as np
import pytest

from breaking.damage import same
from command_line import invoke
from sepsa.learner.columns.reader import Column
from sepsa.shell.cells import RowBlock
from sepsa.shell.inspection import load_model
from sepsa.shell.series import ForecastTable


def run(*arguments, code=0):
    """Run `sepsa forecast`; its exit code must be this."""
    result = invoke(["forecast", *arguments])
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
    assert f"{float(made[-1][1]):.6g}" == rows[0]["forecast"]
    exact = rows_of(run(source, *OPTIONS, "--inputs", "x", "--digits", "all").stdout)
    assert made[-1][1] == exact[0]["forecast"]
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
    assert lost["52"].endswith("after that of the last row, 2026-01-03 01:00:00, got 2026-01-03 01:00:00")
    assert lost["62"].startswith("'a' is 'oops8.9858', which is not a number: give --na-values oops")
    assert lost["82"].startswith("time must not leap far beyond all others")
    assert rows_of(result.stdout)[0]["time"] == "2026-01-06 00:00:00"
    assert "116 rows" in result.stderr


ENGLISH = "\n".join(["date,a,b,x", *lines(20)]) + "\n"
GERMAN = "tag;wert;hilfe\n" + "".join(f"{1 + i:02}.01.2026;{i % 5},5;{i},5\n" for i in range(28))
MISTAKES = [
    (ENGLISH, "--target c", "--target must be a column of the table, date, a, b, x, got 'c'"),
    (ENGLISH, "--target a --time day", "--time must be a column of the table"),
    (ENGLISH, "", "--target must name the column to predict"),
    (ENGLISH, "--target a --seasons 1", "--seasons must be at most 8 periods of more than 2"),
    (ENGLISH, "--target a --step fortnight", "--step must be seconds or one of second, minute"),
    (ENGLISH, "--target a --bounds 5,1", "--bounds must be in order"),
    (ENGLISH, "--target 'a\nb'", "must be a list with commas between, with quotes around a name that has a line"),
    (ENGLISH, "--target '\"a\nb\"'", "--target must be a column of the table, date, a, b, x, got 'a\\nb'"),
    (GERMAN, "--target wert --time tag", "line 2: 'wert' is '0,5', which is not a number: give --decimal ,"),
    (GERMAN, "--target tag", "which is not a number: give --na-values 01.01.2026 if it is a missing value"),
    (GERMAN, "--target hilfe --decimal . --inputs wert", "'hilfe' is '0,5', which is not a number: give --decimal ,"),
    (GERMAN, "--target wert --decimal , --time tag", "is '01.01.2026', which is not a date as 2026-01-31: give "),
    (
        GERMAN,
        "--target wert --decimal , --time tag --date-format %d/%m/%Y",
        "'tag' is '01.01.2026', which is not in the --date-format %d/%m/%Y: give --date-format '%d.%m.%Y' or ",
    ),
]


@pytest.mark.parametrize(("text", "options", "words"), MISTAKES)
def test_mistakes_are_one_line_with_the_cure(text, options, words, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    told = run(tmp_path / "t.csv", *shlex.split(options), code=2).stderr
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("form", "step"),
    [("%Y%m", 31), ("%Y%m%d", 1), ("%Y%m%d%H", 1 / 24), ("%Y%m%d%H%M", 1 / 96), ("%Y%m%d%H%M%S", 1 / 96)],
)
def test_dates_written_as_integers_are_never_taken_for_seconds(form, step, tmp_path):
    days = [datetime(2026, 1, 1) + timedelta(days=step * i) for i in range(30)]
    written = {form: tmp_path / "t.csv", "%Y-%m-%d %H:%M": tmp_path / "iso.csv"}
    for how, path in written.items():
        days = [day.replace(day=1) if form == "%Y%m" else day for day in days]
        path.write_text("t,v\n" + "".join(f"{day.strftime(how)},{i % 7}\n" for i, day in enumerate(days)))
    source, *options = tmp_path / "t.csv", "--time", "t", "--target", "v", "--horizon", 2
    for files in ((), ("--checkpoint", tmp_path / "c")):
        told = run(source, *options, *files, code=2)
        first = days[0].strftime(form)
        cure = f"give --date-format {form}, or leave --time out if its numbers count rows\n"
        assert told.stderr == f"'t' has dates without marks between their parts, as {first}: {cure}"
        assert told.stdout == ""
        assert not (tmp_path / "c").exists()
    read = run(source, *options, "--date-format", form).stdout
    assert read == run(tmp_path / "iso.csv", *options).stdout
    one = source.read_text().splitlines()
    source.write_text("\n".join(one[:2]) + "\n")  # a single number may be seconds
    run(source, *options, "--checkpoint", tmp_path / "c")
    source.write_text("\n".join(one) + "\n")
    assert f"give --date-format {form}" in run(source, "--checkpoint", tmp_path / "c", code=2).stderr


def test_seconds_and_counts_are_no_dates(tmp_path):
    for first, step in ((1_767_225_600, 3600), (1, 1), (202_601, 60), (0, 0.5), (20_260_101, 3600)):
        times = "".join(f"{first + step * i},{i % 5}\n" for i in range(40))
        (tmp_path / "t.csv").write_text(f"t,v\n{times}")
        rows = rows_of(run(tmp_path / "t.csv", "--time", "t", "--target", "v", "--horizon", 1).stdout)
        assert float(rows[0]["time"]) == pytest.approx(first + 40 * step)


def test_a_single_bound_is_the_least_value_as_help_says(tmp_path):
    source = table(tmp_path / "t.csv", lines(120))
    told = {given: run(source, *OPTIONS, "--bounds", given).stdout for given in ("0", "0,", ",12", "0,12")}
    assert told["0"] == told["0,"] != told[",12"]
    assert all(float(row["high"]) <= 12 for row in rows_of(told[",12"]) if row["series"] == "a")


def test_columns_that_are_not_asked_for_may_hold_anything(tmp_path):
    source = tmp_path / "t.jsonl"
    plain = [{"a": i % 5, "b": 1.0} for i in range(60)]
    source.write_text("".join(json.dumps(row) + "\n" for row in plain))
    expected = run(source, "--target", "a", "--horizon", 2).stdout
    source.write_text("".join(json.dumps(row | {"meta": {"k": [1]}}) + "\n" for row in plain))
    assert run(source, "--target", "a", "--horizon", 2).stdout == expected


def test_a_table_that_is_newest_first_is_an_error_with_the_cure(tmp_path):
    source = table(tmp_path / "t.csv", list(lines(60))[::-1])
    result = run(source, *OPTIONS, "--checkpoint", tmp_path / "c", code=4)
    assert result.stdout == ""
    cure = "sort it by 'date', oldest first"
    assert result.stderr == f"{source} is newest first (line 3 is earlier than line 2): {cure}\n"
    assert list(tmp_path.iterdir()) == [source]


def test_rows_in_no_order_are_left_out_loudly(tmp_path):
    rows = list(lines(60))
    random.Random(1).shuffle(rows)
    result = run(table(tmp_path / "t.csv", rows), *OPTIONS, code=3)
    assert result.stderr.splitlines()[-1].endswith(": sort the table by time, oldest first")


def test_there_is_no_interval_without_an_error_that_was_measured(tmp_path):
    for count in (1, 2, 3):
        rows = rows_of(run(table(tmp_path / "t.csv", lines(count)), "--target", "a", "--horizon", 3).stdout)
        assert all(row["forecast"] for row in rows)
        assert [bool(row["low"]) for row in rows] == [bool(row["high"]) for row in rows]
        for row in rows:
            assert row["low"] == "" or float(row["low"]) < float(row["high"])
        assert not rows[-1]["low"]
    source = table(tmp_path / "t.csv", (line.replace(line.split(",")[1], "", 1) for line in lines(60)))
    rows = rows_of(run(source, *OPTIONS, "--report", tmp_path / "page.html").stdout)
    assert [(row["forecast"], row["low"], row["high"]) for row in rows if row["series"] == "a"] == [("", "", "")] * 3
    assert all(float(row["low"]) < float(row["high"]) for row in rows if row["series"] == "b")
    assert not re.search(r"\bnan\b", (tmp_path / "page.html").read_text())
    result = run(source, "--time", "date", "--target", "a", "--horizon", 2, code=1)
    assert ("--target a has no number" in result.stderr, result.stdout) == (True, "")


@pytest.mark.parametrize("rows", [90, 300])
def test_a_resumed_run_ends_with_the_same_bytes(rows, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def forecast(folder, every):
        files = ("--predictions", folder / "p.csv", "--checkpoint", folder / "c")
        return run(folder / "t.csv", *OPTIONS, *files, "--save-every", every)

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


TIMES = [  # in cells, options, and the first time ahead
    ((f"{i}" for i in range(60)), (), "60"),
    ((f"{1_700_000_000_000 + 3_600_000 * i}" for i in range(60)), (), "1700216000000"),
    ((f"{-5_000_000_000 + 60 * i}" for i in range(60)), (), "-4999996400"),
    ((f"{1 + i:02}022026" for i in range(28)), ("--date-format", "%d%m%Y"), "2026-03-01 00:00:00"),
]


@pytest.mark.parametrize(("cells", "options", "expected"), TIMES)
def test_numbers_stay_numbers_unless_they_are_dates_without_marks_between(cells, options, expected, tmp_path):
    source = tmp_path / "t.csv"
    source.write_text("t,a\n" + "".join(f"{cell},{math.sin(i):.3f}\n" for i, cell in enumerate(cells)))
    result = run(source, "--time", "t", "--target", "a", "--horizon", 2, "--lags", 4, *options)
    assert rows_of(result.stdout)[0]["time"] == expected


def test_a_constant_series_has_a_page_whatever_its_size(tmp_path):
    for value in (0, 7, 1e9):
        (tmp_path / "t.csv").write_text("a\n" + f"{value}\n" * 60)
        run(tmp_path / "t.csv", "--target", "a", "--horizon", 2, "--report", tmp_path / "page.html")
        assert (tmp_path / "page.html").read_text().count("<polyline") == 2


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


def test_blocks_are_forecast_with_inputs_known_ahead(tmp_path):
    """The last day has no target yet, and its inputs are known."""
    start, cells = datetime(2026, 1, 5), []
    for i in range(24 * 16):
        x = math.sin(i * i)
        cells.append(f"{start + timedelta(hours=i)},{10 + math.sin(i / 4) + 2 * x if i < 24 * 15 else ''},{x}")
    source = tmp_path / "t.csv"
    source.write_text("\n".join(["date,y,x", *cells]) + "\n")
    options = ("--target", "y", "--time", "date", "--inputs", "x", "--every", 24, "--known-ahead")
    rows = rows_of(run(source, *options, "--checkpoint", tmp_path / "m.sepsa").stdout)
    assert [row["time"][-8:-6] for row in rows] == [f"{hour:02}" for hour in range(24)]
    assert rows[0]["time"].startswith("2026-01-20")
    for row in rows:
        assert float(row["low"]) < float(row["forecast"]) < float(row["high"])
    assert rows_of(run(source, "--checkpoint", tmp_path / "m.sepsa").stdout) == rows
    rows = rows_of(run(source, *options, "--inputs", "").stdout)  # nothing is known ahead but the rows themselves
    assert rows[0]["time"].startswith("2026-01-20")
    message = run(source, *options, "--predictions", tmp_path / "p.csv", code=2).stderr
    assert "--predictions must be left out with --every and --known-ahead" in message
    source.write_text("\n".join(["date,y,x", *cells[:-5]]) + "\n")
    assert "needs 24 rows without a target at the end" in run(source, *options, code=2).stderr
    for every in (24, 1):  # an hour that is left out ahead would move the inputs of all later ones
        later = f"{start + timedelta(hours=24 * 16)},,0.5"
        source.write_text("\n".join(["date,y,x", *cells[:-20], *cells[-19:], later]) + "\n")
        message = run(source, *options, "--every", every, code=2).stderr
        assert "row 5 of them must be at 2026-01-20 04:00:00, got 2026-01-20 05:00:00" in message


def day_cells(days, known, first=0):
    """Hours of days with an input; those from the day `known` on have no target yet."""
    for i in range(24 * first, 24 * days):
        x = math.sin(i * i)
        y = f"{10 + math.sin(i / 4) + 2 * x:.4f}" if i < 24 * known else ""
        yield f"{datetime(2026, 1, 5) + timedelta(hours=i)},{y},{x:.4f}"


@pytest.mark.parametrize("how", ["filled in", "new file", "json"])
@pytest.mark.parametrize("every", [24, 1])
def test_each_day_targets_are_filled_in_and_a_day_is_added(how, every, tmp_path):
    """Runs from day to day end with the bytes and the state of one run over the last file."""
    options = ("--target", "y", "--time", "date", "--inputs", "x", "--known-ahead", "--every", every, "--lags", 24)
    source, parts, whole = tmp_path / "t.csv", tmp_path / "parts.sepsa", tmp_path / "whole.sepsa"
    for day in range(5, 9):
        cells = list(day_cells(day + 1, day))
        if how == "new file" and day > 5:
            cells = list(day_cells(day + 1, day, day - 1))
        rows = ["date,y,x", *cells]
        if how == "json":
            rows = [json.dumps(dict(zip(("date", "y", "x"), cell.split(","), strict=True))) for cell in cells]
        source.write_text("\n".join(rows) + "\n")
        daily = run(source, *options, "--checkpoint", parts)
        assert "left out" not in daily.stderr
    table_of = tmp_path / "u.csv"
    table_of.write_text("\n".join(["date,y,x", *day_cells(9, 8)]) + "\n")
    once = run(table_of, *options, "--checkpoint", whole)
    assert rows_of(daily.stdout) == rows_of(once.stdout)
    assert len(rows_of(once.stdout)) == 24
    one, two = (load_model(path, "sepsa forecast")[0].state_dict() for path in (parts, whole))
    assert same(one, two)


def test_a_value_that_is_missing_after_a_checkpoint_does_not_hinder_the_next(tmp_path):
    source, rows, files = tmp_path / "t.csv", list(lines(120)), ("--checkpoint", tmp_path / "c")
    rows[110] = rows[110].split(",")[0] + ",,,1"
    run(table(source, rows[:100]), *OPTIONS, *files)
    assert "120 rows (20 now)" in run(table(source, rows), *OPTIONS, *files).stderr


@pytest.mark.parametrize("count", [100, 600])
def test_rows_without_a_value_do_not_count_as_forecast_without_error(count, tmp_path):
    rows = [line if i % 3 else line.split(",")[0] + ",,,1" for i, line in enumerate(lines(count))]
    result = run(table(tmp_path / "t.csv", rows), *OPTIONS, "--predictions", tmp_path / "p.csv")
    made = [list(map(float, row[1:3])) for row in list(csv.reader((tmp_path / "p.csv").read_text().splitlines()))[1:-1]]
    values = [list(map(float, row.split(",")[1:3])) if i % 3 else [math.nan] * 2 for i, row in enumerate(rows)]
    errors = np.abs(np.array(values[1:]) - made).mean(1)
    said = float(re.search("mean absolute error ([0-9.]+)", result.stderr)[1])
    assert said == pytest.approx(np.nanmean(errors), rel=0.02)  # each window of 256 rows counts alike


def test_a_row_with_a_target_replaces_the_one_that_waits_for_it(tmp_path):
    """Blocks of rows as they come while a file grows; the hours that are not yet there stay ahead."""
    model = ForecastTable(("y",), time="date", inputs=("x",), known_ahead=True, horizon=3, lags=4)

    def block(first, values):
        names = {"date": first + np.arange(len(values)), "y": values, "x": 2.0 * np.arange(len(values)) + first}
        columns = {name: Column(np.array(cells, float)) for name, cells in names.items()}
        return RowBlock(columns, np.arange(len(values)) + 1, str, [], {})

    assert model.learn(block(0, [1.0, 2.0, 1.0, 2.0, None, None])).lines.tolist() == [1, 2, 3, 4]
    assert model.ahead[:, 0].tolist() == [4, 5]
    result = model.learn(block(4, [1.0]))
    assert (result.lines.tolist(), result.bad, model.ahead[:, 0].tolist()) == ([1], [], [5])
    model.learn(block(6, [2.0]))
    assert model.forecaster.rows == 7
    np.testing.assert_array_equal(model.history[:, 0], [1, 2, 1, 2, 1, np.nan, 2])
