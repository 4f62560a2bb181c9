"""`sepsa stream`, `predict` and `inspect`, as a person uses them. Every test runs in a folder of its own."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pages
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import sepsa
from command_line import invoke
from sepsa.learner.columns.cells import date_formats, read_cell
from sepsa.shell import formats, inspection, messages, output, source
from sepsa.shell import records as table_records
from sepsa.shell.command import StreamRun

STREAM = "stream t.csv --target y --predictions out.csv"
SAVED = f"{STREAM} --checkpoint m.sepsa"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line, text="", code=0):
    """Run a command line; its exit code must be this."""
    result = invoke(shlex.split(line), text)
    assert code is None or result.exit_code == code, result.output
    return result


def said(line, code=0):
    return run(line, code=code).stderr


def rows(n, seed=0):
    rng = random.Random(seed)
    for i in range(n):
        x, colour = rng.gauss(0, 1), rng.choice(["red", "green", "blue"])
        y = round(3 * x + 5 * (colour == "red"), 4)
        yield {"x": round(x, 4), "colour": colour, "day": f"2026-02-{1 + i % 28:02d}", "y": y}


def write(name="t.csv", n=600, seed=0, **dialect):
    with Path(name).open("w", newline="") as file:
        out = csv.DictWriter(file, ["x", "colour", "day", "y"], **dialect)
        out.writeheader()
        out.writerows(rows(n, seed))
    return Path(name)


def table(text, name="t.csv"):
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())


def records(name):
    with Path(name).open(newline="") as file:
        return list(csv.DictReader(file))


def predictions(name="out.csv"):
    return [float(row["prediction"]) for row in records(name)]


def inspected(name="m.sepsa"):
    return json.loads(run(f"inspect {name} --json").stdout)


def test_every_way_to_write_a_table_gives_the_same_predictions():
    plain = write().read_bytes()
    write("semicolons.csv", delimiter=";")
    write("t.tsv", delimiter="\t")
    write("quoted.csv", quoting=csv.QUOTE_ALL)
    table(b"\xef\xbb\xbf" + plain, "bom.csv")
    table(plain.replace(b"\r\n", b"\n"), "lf.csv")
    table(plain.replace(b"\r\n", b"\r"), "cr.csv")
    table(gzip.compress(plain[:5000]) + gzip.compress(plain[5000:]), "t.csv.gz")
    table(pa.compress(plain, "zstd", asbytes=True), "t.csv.zst")
    table(plain.replace(b",", b";").replace(b".", b","), "comma.csv")
    table("\n".join(json.dumps(row) for row in rows(600)) + "\n", "t.jsonl")
    frame = pa.table({name: [row[name] for row in rows(600)] for name in ("x", "colour", "day", "y")})
    pq.write_table(frame, "t.parquet", row_group_size=100)
    pq.write_table(frame.set_column(2, "day", pa.compute.strptime(frame["day"], "%Y-%m-%d", "s")), "dated.parquet")
    for name, new in (("t.arrow", pa.ipc.new_file), ("t.arrows", pa.ipc.new_stream)):
        with pa.OSFile(name, "wb") as file, new(file, frame.schema) as out:
            out.write_table(frame, max_chunksize=70)
    told = {}
    for path in sorted(Path().iterdir()):
        run(f"stream {path} --target y --predictions out.txt {'--decimal ,' * (path.name == 'comma.csv')}")
        told[path.name] = predictions("out.txt")
    # Columns of JSON lines come in the order of their names, so that its inputs are others to the body's start.
    assert np.mean(np.abs(np.array(told.pop("t.jsonl")) - told["t.csv"])[300:]) < 0.5
    assert len(told) == 14
    assert {name for name, values in told.items() if values != told["t.csv"]} == set()


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_a_batch_of_arrow_may_be_larger_than_what_is_read_at_once(new, monkeypatch):
    monkeypatch.setattr(source, "CHUNK", 1000)
    frame = pyarrow.csv.read_csv(write(n=600))
    with pa.OSFile("t.arrow", "wb") as file, new(file, frame.schema) as out:
        out.write_table(frame)
    for name in ("t.csv", "t.arrow"):
        run(f"stream {name} --target y --body fourier --predictions {name}.out")
    assert predictions("t.arrow.out") == predictions("t.csv.out")


def test_standard_input_gives_a_line_for_each_row():
    text = "x,y\n" + "".join(f"{i % 7},{2 * (i % 7)}\n" for i in range(300)) + "8\n6,12\n"
    result = run("stream --target y", text=text)
    lines = result.stdout.split("\n")
    assert len(lines) == 303
    assert lines[300] == ""  # the row of one cell
    assert float(lines[301]) == pytest.approx(12, abs=1)
    assert "301 rows, mean absolute error" in result.stderr


def test_classes_numbers_texts_and_dates():
    rng, lines = random.Random(0), ["day,shape,y"]
    for _ in range(800):
        day, shape = rng.randrange(1, 29), rng.choice(["round", "square"])
        label = "weekend" if day % 7 < 2 and shape == "round" else '"week, or not"'
        lines.append(f"2026-02-{day:02d}T10:00:00Z,{shape},{label}")
    table("\n".join(lines))
    told = said(f"{SAVED} --classify")
    assert float(re.search(r"accuracy ([\d.]+)", told)[1]) > 0.85
    assert "column 'day' holds dates: they become days, month, weekday, hour" in told
    told = [row["prediction"] for row in records("out.csv")]
    assert told[0] == ""
    assert set(told[10:]) == set(inspected()["classes"]) == {"weekend", "week, or not"}
    assert inspected()["inputs"] == 6


def test_identifiers_other_dates_and_many_texts_are_named():
    table("id,x,y\n" + "".join(f"user-{i},{i % 5},{i % 5}\n" for i in range(3000)))
    assert "column 'id' looks like an identifier, with another text in almost every row: --drop it?" in said(SAVED)
    assert inspected()["inputs"] == 1 + 32  # a further text would get its input with its second row
    table("when,city,y\n" + "".join(f"{1 + i % 28}/2/2026,city {i // 4 % 40},{i % 3}\n" for i in range(400)))
    told = said(f"{STREAM} --categories 30")
    dates = "column 'when' looks like dates, as '1/2/2026', and is read as texts: give --date-format "
    assert f"{dates}'%d/%m/%Y' or '%m/%d/%Y', or --drop it" in told
    assert told.count("'when'") == 1  # not also an identifier
    given = f"{STREAM} --date-format %d/%m/%Y --checkpoint d.sepsa"
    assert "column 'when' holds dates: they become days, month, weekday, hour" in said(given)
    table("when,city,y\n15/2/2026,city 1,\n15/7/2026,city 1,\n", "new.csv")
    table("when,city,y\n2026-02-15,city 1,\n2026-07-15,city 1,\n", "iso.csv")
    assert run("predict d.sepsa new.csv").stdout == run("predict d.sepsa iso.csv").stdout
    assert "must be a format of strptime that names the year" in said(given.replace("%d/%m/%Y", "%d"), code=2)
    assert "column 'city' has more than 30 different texts: further ones share one input, the mean of" in told
    table("x;y\n" + "1,5;3\n" * 5)
    words = "column 'x' looks like a number, '1,5', and is read as a text: give --decimal ,\n"
    assert said(STREAM).count(words) == 1
    assert words not in said(f"{STREAM} --decimal ,")
    table("x;z;y\n" + "1,234.5;7;3\n" * 5)
    told = said(f"{STREAM} --categorical z")
    assert "looks like a number, '1,234.5', and is read as a text: give --thousands ,\n" in told
    assert "column 'z'" not in told
    table("x;y\n" + "1,234;3\n" * 5 + "€ 7;3\n" * 5)
    assert "'1,234', and is read as a text: give --thousands , or --decimal ,\n" in said(STREAM)


def test_dropped_and_categorical_columns():
    zips, targets = (10115, 80331, 20095), np.array([5, -2, 9])
    table("zip,id,y\n" + "".join(f"{zips[i % 3]},{i},{targets[i % 3]}\n" for i in range(400)))
    run(f"{SAVED} --drop id --categorical zip")
    assert inspected()["inputs"] == 3
    assert np.abs(np.array(predictions())[300:] - targets[np.arange(300, 400) % 3]).max() < 0.5


def test_a_column_of_numbers_that_turns_to_texts_is_named_once_and_by_inspect(monkeypatch):
    for batch in (formats.CsvReader.batch, 7):
        monkeypatch.setattr(formats.CsvReader, "batch", batch)
        table("x,z,y\n" + "1,a,2\n" * 500)
        assert "numbers and texts" not in said(SAVED)
        assert inspected()["numbers and texts"] == []
        with Path("t.csv").open("a") as file:
            file.write("oops,2,2\n" * 3 + "1,a,2\n")
        told = said(SAVED)
        for name, text in (("x", "oops"), ("z", "a")):
            cure = f"give --na-values {text} if that is a missing value, or --categorical {name} if all are names"
            assert told.count(f"column '{name}' holds numbers and texts, as '{text}': {cure}\n") == 1
        assert inspected()["numbers and texts"] == ["x", "z"]
        Path("m.sepsa").unlink()
        assert "column 'x'" not in said(f"{STREAM} --na-values oops --categorical z")


@pytest.mark.parametrize("seed", range(3))
def test_warnings_of_mixed_columns_do_not_depend_on_how_rows_are_divided(seed, monkeypatch):
    rng = random.Random(seed)
    cells = ["2.5", "", "oops", "2026-01-01", "€5", "1,5", "x y"]
    late = [str(i % 4) if i < 150 else rng.choice(cells) for i in range(300)]
    table(
        "a;b;y\n" + "".join(f"{rng.choice(cells) if rng.random() < 0.3 else i % 9};{late[i]};3\n" for i in range(300))
    )
    seen = []
    for batch in (formats.CsvReader.batch, 1, 7, 64):
        monkeypatch.setattr(formats.CsvReader, "batch", batch)
        told = [line for line in said(f"{SAVED} --body fourier").splitlines() if line.startswith("column ")]
        model = inspection.load_model(Path("m.sepsa"), "sepsa stream")[0]
        seen.append((told, model.inputs.warned, model.inputs.mixed_columns(), predictions()))
        Path("m.sepsa").unlink()
    assert all(each == seen[0] for each in seen)
    assert seen[0][2] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("01/31/2026 01:30 PM", ["%m/%d/%Y %I:%M %p"]),
        ("1.2.26 1:30:05pm", ["%d.%m.%y %I:%M:%S%p", "%m.%d.%y %I:%M:%S%p"]),
        ("2026-01-31 1 AM", ["%Y-%m-%d %I %p"]),
        ("31.01.2026 01:30 p. m.", ["%d.%m.%Y %I:%M %p"]),
        ("31/1/2026 13:30", ["%d/%m/%Y %H:%M"]),
        ("31/1/2026 13:30 PM", []),
        ("31/1/2026 1:30 XM", []),
    ],
)
def test_dates_of_twelve_hours_are_named_with_their_format(text, forms):
    assert date_formats(text) == forms
    table("when,x,y\n" + f"{text},1,2\n" * 9)
    for name in ("iso", "other"):
        hour = "13:30" if "13" in text or "01" in text else ("13:30:05" if "05" in text else "01:00")
        day = "2026-02-01" if text.startswith("1.2") else "2026-01-31"
        table("when,x,y\n" + "".join(f"{text if name == 'other' else f'{day} {hour}'},{i % 3},{i}\n" for i in range(9)))
        if forms:
            run(f"{STREAM} --date-format {shlex.quote(forms[0])}")
            Path("out.csv").rename(f"{name}.out")
    if forms:
        assert Path("other.out").read_text() == Path("iso.out").read_text()


def test_thousands_are_one_number_in_every_format():
    values = [60_000 + 7.5 * i for i in range(120)]
    spelled = {",": ("{:,.2f}", "."), ".": ("{:,.2f}", ","), " ": ("{:,.2f}", ","), "'": ("{:,.2f}", ".")}
    table("x;y\n" + "".join(f"{value:.2f};{i}\n" for i, value in enumerate(values)))
    run("stream t.csv --target y --predictions plain.csv")
    for mark, (form, decimal) in spelled.items():
        cells = [form.format(value).replace(",", "t").replace(".", decimal).replace("t", mark) for value in values]
        cells[7] = cells[7].replace(" ", "\u202f")
        table("x;y\n" + "".join(f"{cell};{i}\n" for i, cell in enumerate(cells)))
        Path("t.jsonl").write_text("".join(json.dumps({"x": cell, "y": i}) + "\n" for i, cell in enumerate(cells)))
        pq.write_table(pa.table({"x": cells, "y": np.arange(len(cells))}), "t.parquet")
        for name in ("t.csv", "t.jsonl", "t.parquet"):
            given = f"--decimal {decimal} --thousands {shlex.quote('space' if mark == ' ' else mark)}"
            assert "column 'x'" not in said(f"stream {name} --target y {given} --predictions out.csv")
            told, plain = (Path(file).read_text().splitlines() for file in ("out.csv", "plain.csv"))
            assert [line.partition(",")[2] for line in told] == [line.partition(",")[2] for line in plain], (mark, name)
    for text in ("1,2,3", "12,34", "1,2345", ",123", "1,234,", "1,23,4567"):
        assert read_cell(text, ".", None, ",")[0] == "text", text


def test_nested_json_names_the_column_to_leave_out():
    rows = [{"x": i % 5, 'its, "kind"': {"k": 1}, "more": [1], "y": 2 * (i % 5)} for i in range(50)]
    table("".join(json.dumps(row) + "\n" for row in rows), "t.jsonl")
    line = "stream t.jsonl --target y --predictions out.csv"
    told = said(line, code=1)
    assert "'more' is a list, which is not a number" in told or "is a dict, which is not a number" in told
    cure = re.search(r"leave it out by (--drop .*)", told)[1]
    told = said(f"{line} {cure}", code=1)
    assert "'more' is a list, which is not a number, a date or a text: leave it out by --drop more\n" in told
    said(f"{line} {cure.removesuffix(chr(39))},more'")
    assert len(predictions()) == 50
    pq.write_table(pa.table({"x": [1.0], "more": [[1]], "y": [1.0]}), "t.parquet")
    assert "leave it out by --drop more" in said("stream t.parquet --target y --predictions out.csv", code=1)


def test_a_hyphen_is_standard_output_and_never_a_file(folder):
    write(n=60)
    printed = run("stream t.csv --target y --checkpoint m.sepsa").stdout
    Path("m.sepsa").unlink()
    before = {path.name for path in folder.iterdir()}
    assert run("stream t.csv --target y --out -").stdout == printed
    for option in ("--checkpoint", "--quarantine", "--report"):
        told = said(f"stream t.csv --target y {option} -", code=2)
        assert told == f"{option} must name a file or a folder, got -, which stands for standard output\n"
    assert "--predictions must name a file" in said("forecast t.csv --target y --predictions -", code=2)
    assert {path.name for path in folder.iterdir()} == before


def test_a_file_in_another_encoding_stops_before_its_rows_are_put_aside(folder):
    names = ["Mayer", "Müller", "Groß"]
    text = "name,y\n" + "".join(f"{names[i % 3]},{i % 3}\n" for i in range(3000))
    for encoding in ("cp1250", "latin1"):
        table(text.encode(encoding))
        told = said(STREAM, code=1)
        assert told.count("\n") == 1, told
        assert "t.csv is not in utf-8, as line 3 and 1999 others show: give its encoding, such as --encoding" in told
        said(f"{STREAM} --encoding {encoding}")
        assert len(predictions()) == 3000
    lines = [json.dumps({"name": names[i % 3], "y": i % 3}, ensure_ascii=False) for i in range(90)]
    table("\n".join(lines).encode("latin1"), "t.jsonl")
    assert "t.jsonl is not in utf-8" in said("stream t.jsonl --target y --predictions out.csv", code=1)
    few = text.encode().replace(
        "Müller".encode(), b"M\xfcller", 30
    )  # some rows are broken, others tell that it is UTF-8
    table(few)
    assert "30 quarantined" in said(STREAM)
    table(("name,y\n" + "Mayer,1\n" * 3000).encode() + b"M\xfcller,1\n" * 30)  # and here too few are
    assert "30 quarantined" in said(STREAM)


def test_rows_a_second_are_counted_from_the_first_row(monkeypatch):
    """What comes before the first row takes a day on this clock."""
    write(n=300)
    day, begun, clock = 86_400.0, [], itertools.count()

    def check(run, block, own=StreamRun._check_first):
        begun.append(len(block))
        own(run, block)

    monkeypatch.setattr(StreamRun, "_check_first", check)
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock) / 1000 + day * bool(begun))
    told = run("stream t.csv --target y --predictions out.csv --body fourier").stderr
    assert begun
    assert int(re.search(r"([\d,]+) rows a second", told)[1].replace(",", "")) > 1000


BAD = [
    ("1,2,3", "the line has 3 cells where the header has 2"),
    ("1,", "there is no 'y'"),
    ("1,NA", "there is no 'y'"),
    ("1,abc", "'y' is 'abc', which is not a number: add --classify if it is a class"),
    ("1,1e400", "'y' is not finite"),
    ("inf,1", "'x' is not finite"),
    ("1\x00,1", "the line holds a NUL byte"),
]


def test_rows_that_cannot_be_used_are_put_aside_with_line_and_reason():
    good = [f"{i % 9},{i % 9}" for i in range(200)]
    lines = ["x,y", *good[:50], *(line for line, _ in BAD), "", *good[50:], '1,"2']
    table("\n".join(lines).encode() + b"\n\xff\xfe,3\n")
    told = said(f"{STREAM} --quarantine aside.csv")
    aside = [(int(row["line"]), row["reason"]) for row in records("aside.csv")]
    assert aside[: len(BAD)] == [(52 + i, reason) for i, (_, reason) in enumerate(BAD)]
    last = ["the line has a quote that is not closed", "the line is not in utf-8"]
    assert [reason for _, reason in aside[len(BAD) :]] == last
    assert len(predictions()) == 200
    assert "200 rows, mean absolute error" in told
    assert "9 quarantined in aside.csv" in told
    assert told.count("is quarantined:") == output.SHOWN


GOOD = b"x,y\n1,2\n"
WRONG = [  # beside test_bad_input.py: the table, further options, the exit code, and what the one line says
    (b"", "", 1, "is empty: its first line must name the columns"),
    (b"a,b\n1,2\n", "", 2, "--target must be a column of the table, a, b, got 'y'"),
    (b"x,y\n", "", 2, "holds no rows"),
    (b"x,x,y\n1,2,3\n", "", 1, "has two columns 'x': rename one of them"),
    ("x,y\n1,2\n".encode("utf-16"), "", 1, "is not utf-8 text: give --encoding utf-16 if"),
    (b"PK\x03\x04\0\0\0\0", "", 1, "a workbook or what torch.save writes: save the sheet as CSV. sepsa reads CSV"),
    (b"SQLite format 3\0", "", 1, "is a database of SQLite: convert or unpack it. sepsa reads CSV and JSON lines"),
    (b"\x1b[31m,y\n1,2\n", "--drop z", 2, "--drop must be a column of the table, \\x1b[31m, y, got 'z'"),
    (GOOD, "--date-format d.m.Y", 2, "--date-format must be a format of strptime such as %d.%m.%Y, got 'd.m.Y'"),
    (b"\xe4,y\n1,2\n", "", 1, "is not in utf-8: give its encoding, such as --encoding cp1250, or convert"),
    (GOOD, "--encoding klingon", 2, "--encoding must be one that Python knows, such as utf-8, cp1250 or latin1, got"),
    (GOOD, "--encoding hex", 2, "--encoding must be one that Python knows"),
    (GOOD, "--date-format %d.%m", 2, "a format of strptime that names the year, such as %d.%m.%Y, got '%d.%m'"),
    (b'x,"a\nb"\n1,2\n', "", 2, "--target must be a column of the table, x, a\\nb, got 'y'"),
    (b"x,y\n1,1.234.567\n", "", 2, "is '1.234.567', which is not a number: give --decimal , --thousands ."),
    (b"x,y\n1,\xe2\x82\xac 7\n", "", 2, "is '€ 7', which is not a number: remove all but digits and"),
    (GOOD, "--thousands .", 2, "--thousands must be one of , . ' _ space and not the decimal mark, got '.'"),
    (b'x,y\n1,"2,500"\n', "", 2, "is '2,500', which is not a number: give --thousands , or --decimal ,"),
    (b"x;y\n1;2,5\n", "", 2, "which is not a number: give --decimal ,"),
    (GOOD, "--drop y", 2, "--drop must leave the target in the table"),
    (b"x;y\n1;1.5\n", "--decimal ,", 2, "line 2: 'y' is '1.5', which is not a number: give --decimal ."),
    (b'[{"x": 1, "y": 2}]', "", 1, "is one JSON array: write one object a line"),
    (b"\x1f\x8b\x08garbage garbage", "", 1, "cannot be decompressed"),
    (b"\x28\xb5\x2f\xfdgarbage garbage", "", 1, "cannot be decompressed"),
    (b"PAR1 and no more", "", 1, "cannot be read"),
    (GOOD, "--forgetting 1.5", 2, "--forgetting must be in (0, 1], got 1.5"),
    (GOOD, "--sep abc", 2, "--sep must be one character"),
    (GOOD, "--decimal ';'", 2, "--decimal must be . or ,"),
    (GOOD, "--intervals 2", 2, "--intervals must be a share in (0, 1) of the targets"),
    (GOOD, "--probabilities", 2, "--probabilities needs a target that is a class"),
    (GOOD, "--classify --intervals .9", 2, "got 0.9: --probabilities is for classes"),
    (b"x;y\n1;2\n", "--sep ,", 2, "if they are not separated rightly, give --sep"),
    (GOOD, "--predictions /dev/full", 1, "no space left on device"),
    (b"x,y\n1,\n2,2026-01-01\n", "", 2, "line 3: 'y' is '2026-01-01', which is not a number: add --classify"),
    (b'{"x": 1, "y": "up"}\n', "", 2, "line 1: 'y' is 'up', which is not a number: add --classify"),
]


@pytest.mark.parametrize(("data", "options", "code", "words"), WRONG)
def test_what_is_wrong_is_one_line_with_the_cure(data, options, code, words, folder):
    table(data)
    lines = said(f"stream t.csv --target y --checkpoint m.sepsa {options}", code).splitlines()
    # Whoever learns first on a machine is told that this compiles.
    lines = [line for line in lines if " numba compiles each kernel " not in line]
    assert len(lines) == 1
    assert words in lines[0]
    if code == 2 and data != b"x,y\n":  # of a table without rows the model is saved
        assert [path.name for path in folder.iterdir()] == ["t.csv"]


def test_a_run_without_a_usable_row_fails():
    table("x,y\n1,\n2,\n")
    assert "none of 2 rows could be used" in said(STREAM, code=1)


def test_nothing_of_the_user_is_written_over():
    before = write(n=5).read_bytes()
    for option in ("--predictions", "--quarantine", "--checkpoint", "--report"):
        told = said(f"stream t.csv --target y {option} t.csv", code=2)
        assert f"{option} must be another file than the table" in told
    table("a,b\n", "mine.csv")
    told = said(f"{STREAM} --quarantine mine.csv", code=2)
    assert "mine.csv is not a file of quarantined rows: choose another with --quarantine" in told
    assert Path("mine.csv").read_text() == "a,b\n"
    run(SAVED)
    saved = Path("m.sepsa").read_bytes()
    for name, file in (("the model", "m.sepsa"), ("the table", "t.csv")):
        told = said(f"predict m.sepsa t.csv --out {file}", code=2)
        assert f"--predictions must be another file than {name}" in told
    assert "the table must be another file than the model" in said("predict t.csv t.csv", code=2)
    assert (Path("t.csv").read_bytes(), Path("m.sepsa").read_bytes()) == (before, saved)


def test_a_quarantine_that_a_killed_run_began_is_begun_anew():
    table("x,y\n3\n" + "1,2\n4,5\n" * 20)
    run(f"{STREAM} --quarantine bad.csv")
    whole = Path("bad.csv").read_bytes()
    for size in (0, 3):
        Path("bad.csv").write_bytes(whole[:size])
        run(f"{STREAM} --quarantine bad.csv")
        assert Path("bad.csv").read_bytes() == whole


def test_what_came_before_the_end_of_a_truncated_file_is_learned(monkeypatch):
    table(gzip.compress(b"x,y\n" + b"1,2\n" * 50)[:-9])
    told = said(SAVED, code=1)
    assert "is damaged or cut short and cannot be decompressed: Compressed file ended before " in told
    assert " was reached\n50 rows, " in told
    assert inspected()["rows"] == 50
    # A large cell, a quote that is not closed, and a line without end.
    monkeypatch.setattr(table_records, "LONGEST", 1 << 16)
    monkeypatch.setattr(source, "CHUNK", 1 << 14)
    table("x,y\n1,1\n" + "a" * 60_000 + ",1\n2,2\n" + '"' + ("c" * 20_000 + "\n") * 9 + "3,3\n")
    line = "stream t.csv --target y --predictions all.csv --quarantine q.csv"
    run(line, code=3)
    assert [row["line"] for row in records("q.csv")] == [str(5 + i) for i in range(9)]
    assert len(predictions("all.csv")) == 4
    table("x,y\n1,1\n" + "b" * 300_000 + ",1\n2,2\n")
    assert "t.csv has a line of more than 0 MiB behind line 2: divide or remove it" in said(line, code=1)
    assert len(predictions("all.csv")) == 1


def test_another_checkpoint_another_table_and_other_options():
    write()
    again = "stream t.csv --predictions out.csv --checkpoint m.sepsa"
    run(again, code=2)  # no --target
    run(SAVED)
    assert "no new rows behind the 600" in said(again)
    told = said(f"{again} --forgetting 0.9", code=2)
    assert "was made with --forgetting auto, got 0.9: leave the option out, or give another --checkpoint" in told
    write("more.csv", n=50, seed=5)
    told = said("stream more.csv --checkpoint m.sepsa --predictions more-out.csv")
    assert "this is another table than the checkpoint's" in told
    assert "650 rows (50 now)" in told
    assert len(predictions("more-out.csv")) == 50


def test_a_table_that_was_changed_behind_our_back_is_refused():
    data = write().read_bytes()
    run(SAVED)
    table(data[:-4] + b"9" + data[-3:])
    assert "has changed before line 602, where the checkpoint was" in said(SAVED, code=1)
    table(data[:-300])
    assert "ends before line 602" in said(SAVED, code=1)
    table(data)
    table("cut", "out.csv")
    assert "out.csv has 3 bytes and the columns" in said(SAVED, code=1)


def test_a_last_line_without_its_break_is_not_read_twice():
    for text in ("x,y\n1,1\n2,2", "x,y\n1,1\n2,2\n3,3\n"):
        table(text)
        run(SAVED)
    assert [row["line"] for row in records("out.csv")] == ["2", "3", "4"]
    table("x,y\n1,1\n2,2\n3,3\n4,4")
    run(SAVED)
    table("x,y\n1,1\n2,2\n3,3\n4,45\n")
    assert "has another line 5 than when the checkpoint was written" in said(SAVED, code=1)


def test_a_damaged_checkpoint_is_refused_and_a_copy_serves(monkeypatch):
    write()
    monkeypatch.setattr(source, "CHUNK", 5000)
    often, path = f"{SAVED} --save-every 1", Path("m.sepsa").absolute()
    run(often)
    shutil.copy(path, "m.sepsa.1")
    path.write_bytes(path.read_bytes()[:-1])
    told = said(often, code=1)
    assert "m.sepsa is damaged" in told
    assert "use an earlier copy" in told
    Path("m.sepsa.1").replace(path)
    run(often)


def start(program, *arguments, **more):
    return subprocess.Popen(
        [*program, "stream", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **more,
    )  # fmt: skip


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_a_growing_file_is_followed_until_a_signal_saves_and_ends_it(number, code, folder, preloaded_bin):
    path, out = write(n=300), Path("out.csv")
    process = start([preloaded_bin / "sepsa"], *SAVED.split()[1:], "--follow")
    wait_for(lambda: out.exists() and out.read_text().count("\n") == 301)
    more = write("more.csv", n=300, seed=1).read_text().split("\n", 1)[1]
    with path.open("a") as file:
        file.write(more[:-20])
        file.flush()
        wait_for(lambda: out.read_text().count("\n") == 600)
        file.write(more[-20:])
    wait_for(lambda: out.read_text().count("\n") == 601)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == code
    assert stdout == ""
    assert "600 rows, mean absolute error" in stderr
    assert stderr.endswith(
        "stopped behind row 600 and saved; the same command goes on from there\n"
        "written: the predictions to out.csv, the model to m.sepsa\n"
    )
    assert "Traceback" not in stderr
    assert not list(folder.glob("*.lock")) + list(folder.glob("*.tmp"))
    assert "no new rows behind the 600" in said(SAVED)


def test_a_pipe_is_read_as_it_comes(preloaded_bin):
    with start([preloaded_bin / "sepsa"], "--target", "y", stdin=subprocess.PIPE) as process:
        process.stdin.write("x,y\n1,1\n2,2\n")
        process.stdin.flush()
        assert [process.stdout.readline(), float(process.stdout.readline())] == ["0\n", 1.0]
        process.stdin.close()
        assert process.wait(600) == 0


BROKEN = "stopped: the reader of the predictions has closed the pipe\n"
CLOSED = {
    "stream --target y <&-": (1, "standard input is closed: name a file, or pipe a table into the command\n"),
    "stream t.csv --target y --drop day --predictions p.csv --checkpoint m.sepsa <&- >&- 2>&-": (0, ""),
    "stream t.csv --target y --drop day 2>&-": (0, ""),
    "stream t.csv --target y >&-": (2, "standard output is closed: name a file by --predictions\n"),
    "inspect m.sepsa >&-": (2, "standard output is closed: open it, or redirect it to a file\n"),
    "stream t.csv --target y --drop day --predictions p.csv 2>&1 >/dev/null | true": (0, ""),
    "stream long.csv --target y --drop day | head -2": (141, BROKEN),
    "inspect m.sepsa --json 2>err | true; cat err >&2": (None, None),
}


def test_closed_streams_and_broken_pipes_end_in_one_line(preloaded_bin):
    write(n=50)
    write("long.csv", n=60_000)  # more than a pipe holds
    for line, (code, words) in CLOSED.items():
        first, pipe, rest = line.partition(" | ")
        script = f"{{ {preloaded_bin}/sepsa {first}; echo $? >code; }}{pipe}{rest}"
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=300,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, (line, done.stderr)
        assert "Error" not in done.stderr, (line, done.stderr)
        if code is not None:
            assert int(Path("code").read_text()) == code, (line, done.stderr)
            assert done.stderr == words, line
    assert len(records("p.csv")) == 50


def test_the_last_line_says_what_was_written_where():
    write(n=50)
    with Path("t.csv").open("a") as file:
        file.write("1\n")
    last = {
        "stream t.csv --target y": "written: the predictions to standard output, the bad rows to quarantine.csv; the "
        "model is not saved",
        "stream t.csv --target y --predictions p.csv --checkpoint m --report r.html": "written: the predictions to "
        "p.csv, the bad rows to m.quarantine.csv, the model to m, the report to r.html",
        "predict m t.csv --predictions o.csv": "50 rows predicted, 1 not, written to o.csv",
    }
    for line, words in last.items():
        assert said(line).splitlines()[-1] == words


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_progress_has_the_share_of_the_rows_and_the_time_that_the_others_take(form, monkeypatch):
    assert "a second, recent" not in said(f"stream {write()} --target y --predictions out.csv --body fourier")
    monkeypatch.setattr(output, "PROGRESS", 0.0)
    monkeypatch.setattr(formats, "ROWS", 100)
    monkeypatch.setattr(formats.CsvReader, "batch", 100)
    clock = itertools.count()  # each look at it is a second later
    monkeypatch.setattr(output.time, "monotonic", lambda: float(next(clock)))
    pq.write_table(pyarrow.csv.read_csv(write(n=400)), "t.parquet", row_group_size=100)
    told = said(f"stream t.{form} --target y --predictions out.csv --body fourier")
    shares = [tuple(map(int, found)) for found in re.findall(r"rows, (\d+)%, (\d+) seconds left", told)]
    assert [share for share, _ in shares] == [25, 50, 75, 100]
    assert shares[-1][1] == 0
    assert all(left > later for (_, left), (_, later) in itertools.pairwise(shares))
    last = r"^400 rows, 100%, 0 seconds left, [\d,]+ a second, recent absolute error [\d.]+$"
    assert re.search(last, told, re.MULTILINE)
    assert "\x1b" not in told
    Path("t.csv.gz").write_bytes(gzip.compress(Path("t.csv").read_bytes()))
    packed = said("stream t.csv.gz --target y --predictions out.csv --body fourier")
    assert "left" not in packed
    for text in (told, packed):  # pages leave out what slow machines alone print
        assert "a second, recent" in text
        assert "a second, recent" not in pages.RUNNING.sub("", text)


def test_printed_numbers_have_six_digits_and_those_of_a_file_all():
    write()
    run(f"{SAVED} --intervals 0.8")
    ask = "predict m.sepsa t.csv --intervals 0.8"
    run(f"{ask} --out all.csv")
    exact = [[float(cell) for cell in row.values()][1:] for row in records("all.csv")]
    lines = {how: run(f"{ask} {how}").stdout.splitlines() for how in ("", "--digits 6", "--digits 2", "--digits all")}
    assert lines[""] == lines["--digits 6"] == [",".join(f"{value:.6g}" for value in row) for row in exact]
    assert lines["--digits 2"] == [",".join(f"{value:.2g}" for value in row) for row in exact]
    assert [[float(cell) for cell in line.split(",")] for line in lines["--digits all"]] == exact
    run(f"{ask} --digits 3 --out short.csv")
    assert predictions("short.csv") == [float(f"{row[0]:.3g}") for row in exact]
    spell = output.speller(3, printed=True)  # no digit before the decimal point is lost
    told = ["1234568", "-98765", "0.000123", "12", "1e+22"]
    assert [spell(value) for value in (1234567.8, -98765.4, 0.00012345, 12.0, 1e22)] == told


def test_intervals_hold_their_share_of_targets_and_both_commands_write_alike():
    rng = np.random.default_rng(0)
    X, noise = rng.normal(size=(2, 1500))
    table("x,y\n" + "".join(f"{x},{2 * x + e}\n" for x, e in zip(X, noise, strict=True)))
    run(f"{SAVED} --intervals 0.8")
    told = records("out.csv")
    assert list(told[0]) == ["line", "prediction", "low", "high"]
    assert told[0]["low"] == told[0]["high"] == ""  # nothing is known of errors yet
    targets = 2 * X + noise
    inside = [float(row["low"]) <= y <= float(row["high"]) for row, y in zip(told, targets, strict=True) if row["low"]]
    assert 0.74 < np.mean(inside[-1000:]) < 0.86
    # Intervals change no prediction, and no state.
    run("stream t.csv --target y --checkpoint n.sepsa --predictions q.csv")
    assert predictions("q.csv") == predictions()
    # A resumed run keeps the columns.
    with Path("t.csv").open("a") as file:
        file.write("1,2\n")
    assert "and the columns 'line,prediction,low,high' where it had" in said(SAVED, code=1)
    run("predict m.sepsa t.csv --out o.csv --intervals 0.8")
    written = Path("o.csv").read_text().splitlines()
    assert written[0] == "line,prediction,low,high"
    printed = run("predict m.sepsa t.csv --intervals 0.8 --digits all").stdout.splitlines()
    assert printed == [line.split(",", 1)[1] for line in written[1:]]


def test_probabilities_are_those_of_the_classes_known():
    rng = random.Random(0)
    pairs = [(x, "up, high" if x + rng.gauss(0, 0.3) > 0 else "down") for x in (rng.gauss(0, 1) for _ in range(600))]
    with Path("t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["x", "y"], *pairs])
    run(f"{SAVED} --classify --probabilities")
    told = [json.loads(row["probabilities"]) for row in records("out.csv")]
    assert told[0] == {}
    assert list(told[1]) == [pairs[0][1]]
    assert all(sum(shares.values()) == pytest.approx(1) for shares in told[1:])
    likeliest = [max(shares, key=shares.get) for shares in told[1:]]
    assert likeliest == [row["prediction"] for row in records("out.csv")][1:]
    loss = -np.mean([np.log(shares[label]) for shares, (_, label) in zip(told[100:], pairs[100:], strict=True)])
    assert loss < 0.45
    run("predict m.sepsa t.csv --probabilities --predictions o.csv")
    assert list(records("o.csv")[0]) == ["line", "prediction", "probabilities"]


def test_a_saved_model_predicts_without_learning_and_names_columns_that_it_does_not_know():
    write()
    run(SAVED)
    before = Path("m.sepsa").read_bytes()
    table("colour,x,extra\nred,1,a\nblue,1,b\npurple,,c\nred\n", "new.csv")
    result = run("predict m.sepsa new.csv", code=3)
    lines = result.stdout.split("\n")
    assert [float(lines[0]), float(lines[1])] == pytest.approx([8, 3], abs=0.5)
    assert lines[3] == ""
    assert "line 5 is not predicted" in result.stderr
    run("predict m.sepsa new.csv --out p.csv", code=3)
    assert [row["line"] for row in records("p.csv")] == ["2", "3", "4"]
    table("u,v\n1,2\n", "new.csv")
    assert "the table has none of the model's columns" in said("predict m.sepsa new.csv", code=2)
    assert "column" not in said("predict m.sepsa t.csv")
    table("x,color,y\n1,red,2\n", "new.csv")
    assert said("predict m.sepsa new.csv").splitlines()[:2] == [
        "column 'color' is not one of the model's and is ignored: is it 'colour'?",
        "2 of the model's 3 columns are absent, taken as missing values: 'colour', 'day'",
    ]
    extra = ",".join(f"extra {i}" for i in range(8))
    table(f"x,colour,day,{extra}\n1,red,2026-01-01{',1' * 8}\n", "new.csv")
    ignored = [f"column 'extra {i}' is not one of the model's and is ignored" for i in range(5)]
    assert said("predict m.sepsa new.csv").splitlines()[:6] == [*ignored, "3 more columns are ignored"]
    table('{"x": 1, "colour": "red", "day": "2026-01-01"}\n{"X": 1}\n', "new.csv")
    assert "column 'X' is not one of the model's" in said("predict m.sepsa new.csv")
    assert Path("m.sepsa").read_bytes() == before
    table("xs,colour,day,y\n1,red,2026-01-01,2\n", "new.csv")
    told = said("stream new.csv --checkpoint m.sepsa")
    assert "column 'xs' is not one of the model's and is learned from here on: is it 'x'?" in told


def test_the_share_of_bounded_rows_is_printed_and_the_loss_can_be_chosen():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(1500)
    x[rng.random(1500) < 0.08] = -9999
    Path("t.csv").write_text("x,y\n" + "".join(f"{v:g},{v / 2 if v > -99 else 0:g}\n" for v in x))
    told = said(SAVED)
    share = re.search(r"before it was learned, ([\d.]+)% bounded as outliers", told)[1]
    assert 5 < float(share) < 10
    assert told.count("--loss squared if these numbers are right, and --na-values where") == 1
    assert inspected()["bounded rows"] == f"{share}%"
    assert "bounds" not in said(SAVED)  # said once
    told = said("stream t.csv --target y --predictions out.csv --loss squared")
    assert "bound" not in told
    assert "m.sepsa was made with --loss huber" in said(f"{SAVED} --loss squared", code=2)


def test_inspect_tells_what_a_model_is_and_knows():
    write()
    run(SAVED)
    text = run("inspect m.sepsa").stdout
    for words in ("kind               sepsa stream", "rows               600", "finite             yes", "target y"):
        assert words in text
    sepsa.SepSARegressor().partial_fit([[1.0]], [1.0]).save("e.sepsa")
    assert "sepsa.SepSARegressor" in run("inspect e.sepsa").stdout
    told = said("predict e.sepsa t.csv", code=1)
    assert "holds a sepsa.SepSARegressor, and this command takes what `sepsa stream --checkpoint` saves" in told


def test_inspect_refuses_another_file():
    write(n=5)
    torch.save({"a": 1}, "m.pt")
    table(b"\0\xff" * 50, "noise")
    refused = "is damaged or not a checkpoint of sepsa"
    for line, words in (
        *((f"inspect {name}", f"{name} {refused}") for name in ("m.pt", "t.csv", "noise")),
        ("inspect none", ""),
        ("inspect .", ""),
    ):
        told = said(line, code=1)
        assert words in told
        assert len(told.strip().split("\n")) == 1


def test_labels_reach_no_terminal_with_escape_sequences(monkeypatch, capsys):
    red = "\x1b[31mred\x1b[0m\x07"
    messages.print_text(f"{red}\tlabel\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    messages.print_text(f"{red}\tlabel\n")
    messages.say(red)
    told = capsys.readouterr()
    safe = r"\x1b[31mred\x1b[0m\x07"
    assert told.out == f"{red}\tlabel\n{safe}\tlabel\n"  # a pipe gets labels as they are
    assert told.err == f"{safe}\n"


def test_the_report_needs_no_network_and_runs_nothing():
    rng, lines = random.Random(0), ["x,<b>y</b>"]
    for i in range(12_000):
        x = rng.gauss(0, 1)
        lines.append(f"{x:.4f},{(1 if i < 8000 else -4) * x + 0.1 * rng.gauss(0, 1):.4f}")
    lines[51] = "<script>alert(1)</script>,no"
    lines[60] = "1/2/2026,0"
    table("\n".join(lines) + "\n")
    run("stream t.csv --target '<b>y</b>' --predictions o.csv --quarantine q.csv --report r.html --checkpoint m.sepsa")
    page = Path("r.html").read_text()
    assert re.search(r"is a mean with these weights, by recent errors: [a-z ]+ \d+%.*led since row [\d,]+\.", page)
    # The page of the saved model differs in its source and in the time at which it was made.
    assert "the page is pages/m.html" in said("report m.sepsa --out pages")
    head = re.compile(r'<p class="sub">.*? · .*? UTC')
    assert head.sub("", Path("pages/m.html").read_text()) == head.sub("", page)
    assert "is a directory" in said("report .", code=1)
    assert not re.search(r"https?://|<script|src=|@import", page)
    assert "&lt;script&gt;alert(1)" in page
    assert 'id="rows">11,999<' in page
    assert "<polyline" in page
