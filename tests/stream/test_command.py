"""`sepsa stream`, `predict` and `inspect`, as a person uses them."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from sepsa import cli
from sepsa.stream.tables import command, inspection, output, source
from sepsa.stream.tables import records as table_records


def run(*arguments, text=None):
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], input=text)


def rows(n, seed=0):
    rng = random.Random(seed)
    for i in range(n):
        x, colour = rng.gauss(0, 1), rng.choice(["red", "green", "blue"])
        yield {
            "x": round(x, 4),
            "colour": colour,
            "day": f"2026-02-{1 + i % 28:02d}",
            "y": round(3 * x + 5 * (colour == "red"), 4),
        }


def write(path, n=600, seed=0, sep=","):
    with path.open("w", newline="") as file:
        out = csv.DictWriter(file, ["x", "colour", "day", "y"], delimiter=sep)
        out.writeheader()
        out.writerows(rows(n, seed))
    return path


def records(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def predictions(path):
    return [float(row["prediction"]) for row in records(path)]


# ---------------------------------------------------------------------- formats


def make_formats(folder):
    plain = write(folder / "t.csv")
    yield plain
    write(folder / "semicolons.csv", sep=";")
    yield folder / "semicolons.csv"
    write(folder / "t.tsv", sep="\t")
    yield folder / "t.tsv"
    (folder / "bom.csv").write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    yield folder / "bom.csv"
    (folder / "crlf.csv").write_bytes(plain.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    yield folder / "crlf.csv"
    (folder / "cr.csv").write_bytes(plain.read_bytes().replace(b"\r\n", b"\r"))
    yield folder / "cr.csv"
    (folder / "t.csv.gz").write_bytes(
        gzip.compress(plain.read_bytes()[:5000]) + gzip.compress(plain.read_bytes()[5000:])
    )
    yield folder / "t.csv.gz"
    (folder / "t.csv.zst").write_bytes(pa.compress(plain.read_bytes(), "zstd", asbytes=True))
    yield folder / "t.csv.zst"
    with (folder / "quoted.csv").open("w", newline="") as file:
        out = csv.DictWriter(file, ["x", "colour", "day", "y"], quoting=csv.QUOTE_ALL)
        out.writeheader()
        out.writerows(rows(600))
    yield folder / "quoted.csv"
    (folder / "comma.csv").write_text(plain.read_text().replace(",", ";").replace(".", ","))
    yield folder / "comma.csv"


def test_every_way_to_write_a_table_gives_the_same_predictions(tmp_path):
    told = {}
    for path in make_formats(tmp_path):
        out = tmp_path / "out.csv"
        more = ["--decimal", ","] if path.name == "comma.csv" else []
        result = run("stream", path, "--target", "y", "--predictions", out, *more)
        assert result.exit_code == 0, (path.name, result.output)
        told[path.name] = out.read_text()
    assert len(told) == 10
    assert {name for name, text in told.items() if text != told["t.csv"]} == set()


def test_json_lines_parquet_and_arrow_give_what_csv_gives(tmp_path):
    plain = write(tmp_path / "t.csv")
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(row) for row in rows(600)) + "\n")
    frame = pa.table({name: [row[name] for row in rows(600)] for name in ("x", "colour", "day", "y")})
    pq.write_table(frame, tmp_path / "t.parquet", row_group_size=100)
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, frame.schema) as out:
        out.write_table(frame, max_chunksize=70)
    with pa.OSFile(str(tmp_path / "t.arrows"), "wb") as file, pa.ipc.new_stream(file, frame.schema) as out:
        out.write_table(frame, max_chunksize=70)
    dated = frame.set_column(2, "day", pa.compute.strptime(frame["day"], "%Y-%m-%d", "s"))
    pq.write_table(dated, tmp_path / "dated.parquet")
    told = {}
    for path in (
        plain,
        *(tmp_path / name for name in ("t.jsonl", "t.parquet", "t.arrow", "t.arrows", "dated.parquet")),
    ):
        result = run("stream", path, "--target", "y", "--predictions", tmp_path / "out.csv")
        assert result.exit_code == 0, (path.name, result.output)
        told[path.name] = predictions(tmp_path / "out.csv")
    # Columns of JSON lines come in the order of their names, so that its inputs are others to the body's start.
    assert np.mean(np.abs(np.array(told["t.jsonl"]) - told["t.csv"])[300:]) < 0.5
    assert all(values == told["t.csv"] for name, values in told.items() if name != "t.jsonl")


def test_standard_input_gives_a_line_for_each_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "x,y\n" + "".join(f"{i % 7},{2 * (i % 7)}\n" for i in range(300)) + "8\n6,12\n"
    result = run("stream", "--target", "y", text=text)
    lines = result.stdout.split("\n")
    assert result.exit_code == 0
    assert len(lines) == 303
    assert lines[300] == ""  # the row of one cell
    assert float(lines[301]) == pytest.approx(12, abs=1)
    assert "301 rows, mean absolute error" in result.stderr


# ---------------------------------------------------------------------- what it learns


def test_classes_numbers_texts_and_dates(tmp_path):
    lines = ["day,shape,y"]
    rng = random.Random(0)
    for _ in range(800):
        day, shape = rng.randrange(1, 29), rng.choice(["round", "square"])
        lines.append(
            f"2026-02-{day:02d}T10:00:00Z,{shape},{'weekend' if day % 7 < 2 and shape == 'round' else 'week, or not'}"
        )
    path = tmp_path / "t.csv"
    path.write_text(
        "\n".join(
            line
            if i == 0 or "," not in line.split(",", 2)[2]
            else ",".join(line.split(",", 2)[:2]) + ',"' + line.split(",", 2)[2] + '"'
            for i, line in enumerate(lines)
        )
    )
    result = run(
        "stream",
        path,
        "--target",
        "y",
        "--classify",
        "--predictions",
        tmp_path / "out.csv",
        "--checkpoint",
        tmp_path / "m.sepsa",
    )
    assert result.exit_code == 0
    assert float(re.search(r"accuracy ([\d.]+)", result.stderr)[1]) > 0.85
    assert "column 'day' holds dates: they become days, month, weekday, hour" in result.stderr
    told = [row["prediction"] for row in records(tmp_path / "out.csv")]
    assert told[0] == ""
    assert set(told[10:]) == {"weekend", "week, or not"}
    shown = json.loads(run("inspect", tmp_path / "m.sepsa", "--json").stdout)
    assert set(shown["classes"]) == {"weekend", "week, or not"}
    assert shown["inputs"] == 6


def test_an_identifier_costs_no_more_than_its_buckets(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("id,x,y\n" + "".join(f"user-{i},{i % 5},{i % 5}\n" for i in range(3000)))
    result = run(
        "stream", path, "--target", "y", "--predictions", tmp_path / "out.csv", "--checkpoint", tmp_path / "m.sepsa"
    )
    assert "column 'id' looks like an identifier, 33 different texts in 33 rows" in result.stderr
    assert json.loads(run("inspect", tmp_path / "m.sepsa", "--json").stdout)["inputs"] == 1 + 32 + 16


def test_other_dates_and_many_texts_are_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("when,city,y\n" + "".join(f"{1 + i % 28}/2/2026,city {i // 4 % 40},{i % 3}\n" for i in range(400)))
    result = run("stream", path, "--target", "y", "--predictions", tmp_path / "out.csv")
    assert "column 'when' looks like a date, '1/2/2026': write dates as 2026-01-31" in result.stderr
    assert "column 'city' has more than 32 different texts" in result.stderr


def test_dropped_and_categorical_columns(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "zip,id,y\n" + "".join(f"{(10115, 80331, 20095)[i % 3]},{i},{(5, -2, 9)[i % 3]}\n" for i in range(400))
    )
    result = run(
        "stream",
        path,
        "--target",
        "y",
        "--drop",
        "id",
        "--categorical",
        "zip",
        "--predictions",
        tmp_path / "o.csv",
        "--checkpoint",
        tmp_path / "m.sepsa",
    )
    assert result.exit_code == 0
    assert json.loads(run("inspect", tmp_path / "m.sepsa", "--json").stdout)["inputs"] == 3
    assert (
        np.abs(
            np.array(predictions(tmp_path / "o.csv"))[300:] - np.array([(5, -2, 9)[i % 3] for i in range(300, 400)])
        ).max()
        < 0.5
    )


def test_same_rows_and_same_seed_same_numbers(tmp_path):
    path = write(tmp_path / "t.csv")
    told = []
    for seed in (0, 0, 1):
        run("stream", path, "--target", "y", "--seed", seed, "--predictions", tmp_path / "out.csv")
        told.append((tmp_path / "out.csv").read_bytes())
    assert told[0] == told[1] != told[2]


# ---------------------------------------------------------------------- bad rows


BAD = [
    ("1,2,3", "the line has 3 cells where the header has 2"),
    ("1", "the line has 1 cells where the header has 2"),
    ("1,", "there is no 'y'"),
    ("1,NA", "there is no 'y'"),
    ("1,abc", "'y' is not a number: add --classify if it is a class"),
    ("1,2026-01-01", "'y' is not a number: add --classify if it is a class"),
    ("1,1e400", "'y' is not finite"),
    ("inf,1", "'x' is not finite"),
    ("1e999,1", "'x' is not finite"),
    ("1\x00,1", "the line holds a NUL byte"),
]


def test_rows_that_cannot_be_used_are_put_aside_with_line_and_reason(tmp_path):
    path, aside = tmp_path / "t.csv", tmp_path / "aside.csv"
    good = [f"{i % 9},{i % 9}" for i in range(200)]
    lines = ["x,y", *good[:50], *(line for line, _ in BAD), "", *good[50:], '1,"2']
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe,3\n")
    result = run("stream", path, "--target", "y", "--predictions", tmp_path / "out.csv", "--quarantine", aside)
    assert result.exit_code == 0
    told = [(int(row["line"]), row["reason"]) for row in records(aside)]
    expected = [(52 + i, reason) for i, (_, reason) in enumerate(BAD)]
    assert told[: len(BAD)] == expected
    assert [reason for _, reason in told[len(BAD) :]] == [
        "the line has a quote that is not closed",
        "the line is not in UTF-8",
    ]
    assert len(predictions(tmp_path / "out.csv")) == 200
    assert "200 rows, mean absolute error" in result.stderr
    assert f"12 quarantined in {aside}" in result.stderr
    assert result.stderr.count("is quarantined:") == command.SHOWN


def test_strict_stops_at_the_first(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y\n1,1\n2,2\n3\n4,4\n")
    result = run("stream", path, "--target", "y", "--strict", "--predictions", tmp_path / "out.csv")
    assert result.exit_code == 1
    assert result.stderr.startswith("line 4: the line has 1 cells where the header has 2 (--strict)\n2 rows, ")
    assert len(predictions(tmp_path / "out.csv")) == 2


def test_a_table_without_a_usable_row(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y\n1,\n2,\n")
    result = run("stream", path, "--target", "y", "--quarantine", tmp_path / "q.csv")
    assert result.exit_code == 1
    assert "none of 2 rows could be used" in result.stderr


@pytest.mark.parametrize(
    ("data", "arguments", "code", "words"),
    [
        (b"", (), 1, "is empty: its first line must name the columns"),
        (b"\n\n", (), 1, "is empty: its first line must name the columns"),
        (b"a,b\n1,2\n", (), 2, "--target must be a column of the table, a, b, got 'y'"),
        (b"x,y\n1,2\n", ("--drop", "z"), 2, "--drop must be a column of the table, x, y, got 'z'"),
        (b"x,y\n", (), 2, "holds no rows"),
        (b"x,x,y\n1,2,3\n", (), 1, "has two columns 'x': rename one of them"),
        ("x,y\n1,2\n".encode("utf-16"), (), 1, "is not UTF-8 text"),
        (b"\xe4,y\n1,2\n", (), 1, "is not in UTF-8: convert it"),
        (b'[{"x": 1, "y": 2}]', (), 1, "is one JSON array: write one object a line"),
        (b"\x1f\x8b\x08garbage garbage", (), 1, "cannot be decompressed"),
        (b"\x28\xb5\x2f\xfdgarbage garbage", (), 1, "cannot be decompressed"),
        (b"PAR1 and no more", (), 1, "cannot be read"),
        (b"x,y\n1,2\n", ("--forgetting", "1.5"), 2, "--forgetting must be in (0, 1], got 1.5"),
        (b"x,y\n1,2\n", ("--ridge", "-1"), 2, "--ridge must be in (0, inf), got -1.0"),
        (b"x,y\n1,2\n", ("--sep", "abc"), 2, "--sep must be one character"),
        (b"x,y\n1,2\n", ("--decimal", ";"), 2, "--decimal must be . or ,"),
        (b"x;y\n1;2\n", ("--sep", ","), 2, "if they are not separated rightly, give --sep"),
        (b"x,y\n1,2\n", ("--predictions", "none/out.csv"), 1, "no such file or directory: check the path"),
        (b"x,y\n1,2\n", ("--predictions", "/dev/full"), 1, "no space left on device: make room"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_the_cure(data, arguments, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_bytes(data)
    result = run("stream", "t.csv", "--target", "y", *arguments)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    # Whoever learns first on a machine is told that this compiles.
    assert len([line for line in result.stderr.splitlines() if not line.startswith("sepsa: compiling")]) == 1
    assert isinstance(result.exception, SystemExit)


def test_nothing_of_the_user_is_written_over(tmp_path):
    path = write(tmp_path / "t.csv", n=5)
    before = path.read_bytes()
    for option in ("--predictions", "--quarantine", "--checkpoint", "--report"):
        result = run("stream", path, "--target", "y", option, path)
        assert result.exit_code == 2
        assert f"{option} must be another file than the table" in result.stderr
    (tmp_path / "mine.csv").write_text("a,b\n")
    result = run(
        "stream", path, "--target", "y", "--quarantine", tmp_path / "mine.csv", "--predictions", tmp_path / "o.csv"
    )
    assert result.exit_code == 2
    assert "mine.csv is not a file of quarantined rows: choose another with --quarantine" in result.stderr
    assert (tmp_path / "mine.csv").read_text() == "a,b\n"
    assert path.read_bytes() == before


@pytest.mark.parametrize("size", [0, 3])
def test_a_quarantine_that_a_killed_run_began_is_begun_anew(size, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y\n1,2\n3\n4,5\n")
    bad = tmp_path / "bad.csv"
    arguments = ("stream", path, "--target", "y", "--quarantine", bad)
    assert run(*arguments).exit_code == 0
    whole = bad.read_bytes()
    bad.write_bytes(whole[:size])
    assert run(*arguments).exit_code == 0
    assert bad.read_bytes() == whole


def test_what_came_before_the_end_of_a_truncated_file_is_learned(tmp_path):
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"x,y\n" + b"1,2\n" * 50)[:-9])
    result = run(
        "stream", path, "--target", "y", "--predictions", tmp_path / "o.csv", "--checkpoint", tmp_path / "m.sepsa"
    )
    assert result.exit_code == 1
    assert "ends in the middle of its compressed data: it is truncated\n50 rows, " in result.stderr
    assert json.loads(run("inspect", tmp_path / "m.sepsa", "--json").stdout)["rows"] == 50


def test_a_field_of_a_megabyte_and_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(table_records, "LONGEST", 1 << 16)
    path = tmp_path / "t.csv"
    path.write_text(
        "x,y\n1,1\n" + "a" * 60_000 + ",1\n" + "b" * 300_000 + ",1\n2,2\n" + '"' + "c" * 200_000 + "\n3,3\n"
    )
    result = run(
        "stream", path, "--target", "y", "--predictions", tmp_path / "o.csv", "--quarantine", tmp_path / "q.csv"
    )
    assert result.exit_code == 0
    told = [(row["line"], row["reason"].replace("0 MiB", "n MiB")) for row in records(tmp_path / "q.csv")]
    assert [line for line, _ in told] == ["4", "6"]
    assert len(predictions(tmp_path / "o.csv")) == 4


# ---------------------------------------------------------------------- resuming


def whole_and_parts(folder, make, cuts, monkeypatch, name="t.csv", more=()):
    """The files of one run over the whole table, and of runs over a table that grows to each of the cuts."""
    out = []
    for label, sizes in (("whole", [None]), ("parts", [*cuts, None])):
        place = folder / label
        place.mkdir()
        for size in sizes:
            data = make()
            (place / name).write_bytes(data if size is None else data[:size])
            if label == "parts":
                monkeypatch.setattr(source, "CHUNK", random.Random(size).choice([97, 1000, 1 << 20]))
            result = run(
                "stream",
                place / name,
                "--target",
                "y",
                "--predictions",
                place / "out.csv",
                "--quarantine",
                place / "q.csv",
                "--checkpoint",
                place / "m.sepsa",
                *more,
            )
            assert result.exit_code == 0, result.output
        shown = json.loads(run("inspect", place / "m.sepsa", "--json").stdout)
        state = inspection.load_model(place / "m.sepsa")[0].state_dict()
        files = [(place / file).read_bytes() if (place / file).exists() else None for file in ("out.csv", "q.csv")]
        out.append((state, files, shown["position"], shown["rows"]))
    return out


def messy(n=900):
    rng = random.Random(3)
    lines = ["x,colour,day,y"]
    for i, row in enumerate(rows(n, seed=2)):
        cells = [str(row[name]) for name in ("x", "colour", "day", "y")]
        if i % 31 == 7:
            cells[rng.randrange(4)] = rng.choice(["", "NA", "odd one", "1e999"])
        if i % 53 == 9:
            cells = cells[:2]
        if i % 41 == 11:
            cells[1] = f'"of {i},\n{i} lines"'
        lines.append(",".join(cells))
    return ("\n".join(lines) + "\n").encode()


@pytest.mark.parametrize("seed", range(3))
def test_a_table_that_grows_is_resumed_at_the_exact_row(seed, tmp_path, monkeypatch):
    from breaking.damage import same

    data = messy()
    ends = [m.end() for m in re.finditer(rb"[\d.]\n(?=-?\d)", data)]
    cuts = sorted(random.Random(seed).sample(ends, 7))
    whole, parts = whole_and_parts(tmp_path, lambda: data, cuts, monkeypatch)
    assert same(whole[0], parts[0])
    assert whole[1:] == parts[1:]


def test_another_checkpoint_another_table_and_other_options(tmp_path):
    path, model = write(tmp_path / "t.csv"), tmp_path / "m.sepsa"
    base = ("stream", path, "--checkpoint", model, "--predictions", tmp_path / "out.csv")
    assert run(*base).exit_code == 2  # no --target
    assert run(*base, "--target", "y").exit_code == 0
    again = run(*base)
    assert again.exit_code == 0
    assert "no new rows behind the 600" in again.stderr
    other = run(*base, "--forgetting", "0.9")
    assert other.exit_code == 2
    assert (
        "was made with --forgetting auto, got 0.9: leave the option out, or give another --checkpoint" in other.stderr
    )
    more = write(tmp_path / "more.csv", n=50, seed=5)
    further = run("stream", more, "--checkpoint", model, "--predictions", tmp_path / "more-out.csv")
    assert "this is another table than the checkpoint's" in further.stderr
    assert "650 rows (50 now)" in further.stderr
    assert len(predictions(tmp_path / "more-out.csv")) == 50


def test_a_table_that_was_changed_behind_our_back_is_refused(tmp_path):
    path, model = write(tmp_path / "t.csv"), tmp_path / "m.sepsa"
    run("stream", path, "--target", "y", "--checkpoint", model, "--predictions", tmp_path / "out.csv")
    data = path.read_bytes()
    path.write_bytes(data[:-4] + b"9" + data[-3:])
    changed = run("stream", path, "--checkpoint", model, "--predictions", tmp_path / "out.csv")
    assert changed.exit_code == 1
    assert "has changed before line 602, where the checkpoint was" in changed.stderr
    path.write_bytes(data[:-300])
    shorter = run("stream", path, "--checkpoint", model, "--predictions", tmp_path / "out.csv")
    assert shorter.exit_code == 1
    assert "ends before line 602" in shorter.stderr
    path.write_bytes(data)
    (tmp_path / "out.csv").write_text("cut")
    lost = run("stream", path, "--checkpoint", model, "--predictions", tmp_path / "out.csv")
    assert lost.exit_code == 1
    assert "out.csv has 3 bytes where it had" in lost.stderr


def test_a_last_line_without_its_break_is_not_read_twice(tmp_path):
    path, model, out = tmp_path / "t.csv", tmp_path / "m.sepsa", tmp_path / "out.csv"
    base = ("stream", path, "--target", "y", "--checkpoint", model, "--predictions", out)
    path.write_text("x,y\n1,1\n2,2")
    assert run(*base).exit_code == 0
    path.write_text("x,y\n1,1\n2,2\n3,3\n")
    assert run(*base).exit_code == 0
    assert [row["line"] for row in records(out)] == ["2", "3", "4"]
    path.write_text("x,y\n1,1\n2,2\n3,3\n4,4")
    assert run(*base).exit_code == 0
    path.write_text("x,y\n1,1\n2,2\n3,3\n4,45\n")
    refused = run(*base)
    assert refused.exit_code == 1
    assert "has another line 5 than when the checkpoint was written" in refused.stderr


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(tmp_path):
    path, model = write(tmp_path / "t.csv"), tmp_path / "m.sepsa"
    base = (
        "stream",
        path,
        "--target",
        "y",
        "--checkpoint",
        model,
        "--predictions",
        tmp_path / "out.csv",
        "--every",
        1,
        "--keep",
        2,
    )
    table_chunk, source.CHUNK = source.CHUNK, 5000
    try:
        run(*base)
    finally:
        source.CHUNK = table_chunk
    model.write_bytes(model.read_bytes()[:-1])
    result = run(*base)
    assert result.exit_code == 1
    assert "m.sepsa is damaged" in result.stderr
    assert "m.sepsa.1 is one" in result.stderr
    shutil.move(tmp_path / "m.sepsa.1", model)
    assert run(*base).exit_code == 0


def test_a_second_run_on_the_same_checkpoint_is_refused(tmp_path):
    from sepsa.states.file import lock

    path, model = write(tmp_path / "t.csv"), tmp_path / "m.sepsa"
    with lock(model):
        result = run("stream", path, "--target", "y", "--checkpoint", model)
    assert result.exit_code == 1
    assert "is being written by another process" in result.stderr


# ---------------------------------------------------------------------- processes


def start(command, *arguments, **more):
    return subprocess.Popen(
        [*command, "stream", *map(str, arguments)],
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
def test_a_growing_file_is_followed_until_a_signal_saves_and_ends_it(number, code, tmp_path, preloaded_bin):
    path, out, model = write(tmp_path / "t.csv", n=300), tmp_path / "out.csv", tmp_path / "m.sepsa"
    process = start(
        [preloaded_bin / "sepsa"], path, "--target", "y", "--follow", "--predictions", out, "--checkpoint", model
    )
    wait_for(lambda: out.exists() and out.read_text().count("\n") == 301)
    more = write(tmp_path / "more.csv", n=300, seed=1).read_text().split("\n", 1)[1]
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
        f"written: the predictions to {out}, the model to {model}\n"
    )
    assert "Traceback" not in stderr
    assert not list(tmp_path.glob("*.lock")) + list(tmp_path.glob("*.tmp"))
    again = run("stream", path, "--checkpoint", model, "--predictions", tmp_path / "again.csv", "--target", "y")
    assert "no new rows behind the 600" in again.stderr


def open_files(pid):
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            yield os.readlink(descriptor)


def test_a_signal_ends_the_wait_for_a_header(tmp_path):
    path = tmp_path / "t.csv"
    path.touch()
    process = start([sys.executable, "-m", "sepsa"], path, "--target", "y", "--follow")
    wait_for(lambda: "t.csv" in " ".join(open_files(process.pid)))
    process.terminate()
    assert process.communicate(timeout=600) == ("", "")
    assert process.returncode == 143


def test_a_pipe_is_read_as_it_comes_and_a_broken_one_is_one_line(tmp_path, preloaded_bin):
    process = start(
        [preloaded_bin / "sepsa"], "--target", "y", "--quarantine", tmp_path / "q.csv", stdin=subprocess.PIPE
    )
    process.stdin.write("x,y\n1,1\n2,2\n")
    process.stdin.flush()
    assert process.stdout.readline() == "0.0\n"
    assert float(process.stdout.readline()) == 1.0
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("3,3\n" * 20_000)
        process.stdin.close()
    assert process.wait(600) == 141
    assert process.stderr.read() == "stopped: the reader of the predictions has closed the pipe\n"
    for pipe in (process.stdin, process.stderr):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


# ---------------------------------------------------------------------- predict and inspect


def test_a_saved_model_predicts_without_learning(tmp_path):
    path, model = write(tmp_path / "t.csv"), tmp_path / "m.sepsa"
    run("stream", path, "--target", "y", "--checkpoint", model, "--predictions", tmp_path / "out.csv")
    before = model.read_bytes()
    new = tmp_path / "new.csv"
    new.write_text("colour,x,extra\nred,1,a\nblue,1,b\npurple,,c\nred\n")
    result = run("predict", model, new)
    lines = result.stdout.split("\n")
    assert result.exit_code == 0
    assert float(lines[0]) == pytest.approx(8, abs=0.5)
    assert float(lines[1]) == pytest.approx(3, abs=0.5)
    assert lines[3] == ""
    assert "line 5 is not predicted" in result.stderr
    assert model.read_bytes() == before
    run("predict", model, new, "--out", tmp_path / "p.csv")
    assert [row["line"] for row in records(tmp_path / "p.csv")] == ["2", "3", "4"]
    (tmp_path / "other.csv").write_text("u,v\n1,2\n")
    result = run("predict", model, tmp_path / "other.csv")
    assert result.exit_code == 2
    assert "the table has none of the model's columns" in result.stderr


def test_inspect_tells_what_a_model_is_and_knows(tmp_path):
    import sepsa

    path, model = write(tmp_path / "t.csv"), tmp_path / "m.sepsa"
    run("stream", path, "--target", "y", "--checkpoint", model, "--predictions", tmp_path / "out.csv")
    text = run("inspect", model).stdout
    for words in (
        "kind               sepsa stream",
        "rows               600",
        "finite             yes",
        "target y",
        "noise",
    ):
        assert words in text
    X = np.random.default_rng(0).normal(size=(50, 2))
    sepsa.SepSARegressor().partial_fit(X, X[:, 0]).save(tmp_path / "e.sepsa")
    assert "sepsa.SepSARegressor" in run("inspect", tmp_path / "e.sepsa").stdout
    refused = run("predict", tmp_path / "e.sepsa", path)
    assert refused.exit_code == 1
    assert (
        "holds a sepsa.SepSARegressor, and this command takes what `sepsa stream --checkpoint` saves" in refused.stderr
    )
    for bad in (tmp_path / "none", path, tmp_path):
        result = run("inspect", bad)
        assert result.exit_code == 1
        assert len(result.stderr.strip().split("\n")) == 1


# ---------------------------------------------------------------------- nothing lost or wrong in silence


@pytest.mark.parametrize(
    ("data", "arguments", "words"),
    [
        (b"x,y\n1,up\n2,3\n", (), "line 2: the target 'y' is 'up', which is not a number: add --classify"),
        (b"x,y\n1,\n2,2026-01-01\n", (), "line 3: the target 'y' is a date, which is not a number: add --classify"),
        (b"x;y\n1;3,5\n2;4,5\n", (), "line 2: the target 'y' is '3,5', which is not a number: give --decimal ,"),
        (b'{"x": 1, "y": "up"}\n', (), "line 1: the target 'y' is 'up', which is not a number: add --classify"),
        (b"x,y\n1,2\n", ("--drop", "y"), "--drop must leave the target in the table, got 'y' for both"),
        (b"x,y\n1,2\n", ("--intervals", "2"), "--intervals must be a share in (0, 1) of the targets"),
        (b"x,y\n1,2\n", ("--probabilities",), "--probabilities needs a target that is a class"),
        (b"x,y\n1,2\n", ("--classify", "--intervals", ".9"), "got 0.9: --probabilities is for classes"),
    ],
)
def test_a_command_that_does_not_fit_its_table_stops_at_once(data, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_bytes(data)
    result = run("stream", "t.csv", "--target", "y", "--checkpoint", "m.sepsa", *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_a_target_that_is_a_text_later_is_one_bad_row(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,y\n,\n1,2\n2,up\n")
    result = run("stream", path, "--target", "y", "--quarantine", tmp_path / "q.csv")
    assert result.exit_code == 0
    assert [row["line"] for row in records(tmp_path / "q.csv")] == ["2", "4"]


def test_a_decimal_comma_in_a_column_is_named(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x;y\n" + "1,5;3\n" * 5)
    result = run("stream", path, "--target", "y")
    said = "column 'x' looks like a number with a decimal comma, '1,5', and is read as a text: give --decimal ,"
    assert result.stderr.count(said) == 1
    assert said not in run("stream", path, "--target", "y", "--decimal", ",").stderr


def test_the_last_line_says_what_was_written_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("t.csv"), n=50)
    with Path("t.csv").open("a") as file:
        file.write("1\n")
    told = run("stream", "t.csv", "--target", "y").stderr.splitlines()[-1]
    assert told == "written: the predictions to standard output, the bad rows to quarantine.csv; the model is not saved"
    told = run("stream", "t.csv", "--target", "y", "--predictions", "p.csv", "--checkpoint", "m", "--report", "r.html")
    assert told.stderr.splitlines()[-1] == (
        "written: the predictions to p.csv, the bad rows to m.quarantine.csv, the model to m, the report to r.html"
    )
    told = run("predict", "m", "t.csv", "--predictions", "o.csv")
    assert told.stderr.splitlines()[-1] == "50 rows predicted, 1 not, written to o.csv"
    stopped = run("stream", "t.csv", "--target", "y", "--predictions", "p.csv", "--checkpoint", "n", "--strict")
    assert stopped.stderr.splitlines()[-1] == "written: the predictions to p.csv; the model is not saved"


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(tmp_path, monkeypatch):
    path = write(tmp_path / "t.csv", n=50)
    assert "a second, recent" not in run("stream", path, "--target", "y").stderr
    monkeypatch.setattr(output, "PROGRESS", 0.0)
    told = run("stream", path, "--target", "y").stderr
    assert re.search(r"^50 rows, [\d,]+ a second, recent absolute error [\d.]+$", told, re.MULTILINE)
    assert "\x1b" not in told


def test_intervals_hold_their_share_of_targets_and_both_commands_write_alike(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.normal(size=1500)
    path, model = tmp_path / "t.csv", tmp_path / "m.sepsa"
    path.write_text("x,y\n" + "".join(f"{x},{2 * x + e}\n" for x, e in zip(X, rng.normal(size=1500), strict=True)))
    base = ("stream", path, "--target", "y", "--checkpoint", model)
    result = run(*base, "--predictions", tmp_path / "p.csv", "--intervals", 0.8)
    assert result.exit_code == 0, result.output
    rows = records(tmp_path / "p.csv")
    assert list(rows[0]) == ["line", "prediction", "low", "high"]
    assert rows[0]["low"] == rows[0]["high"] == ""  # nothing is known of errors yet
    targets = [float(row["y"]) for row in records(path)]
    inside = [float(row["low"]) <= y <= float(row["high"]) for row, y in zip(rows[500:], targets[500:], strict=True)]
    assert 0.74 < np.mean(inside) < 0.86
    # Intervals change no prediction, and no state.
    run("stream", path, "--target", "y", "--checkpoint", tmp_path / "n.sepsa", "--predictions", tmp_path / "q.csv")
    assert predictions(tmp_path / "q.csv") == predictions(tmp_path / "p.csv")
    # A resumed run keeps the columns.
    with path.open("a") as file:
        file.write("1,2\n")
    refused = run(*base, "--predictions", tmp_path / "p.csv")
    assert refused.exit_code == 1
    assert "has the columns 'line,prediction,low,high' where it had 'line,prediction'" in refused.stderr
    told = run("predict", model, path, "--out", tmp_path / "o.csv", "--intervals", 0.8)
    assert told.exit_code == 0, told.output
    assert (tmp_path / "o.csv").read_text().startswith("line,prediction,low,high\n2,")
    printed = run("predict", model, path, "--intervals", 0.8).stdout.splitlines()
    assert printed == [line.split(",", 1)[1] for line in (tmp_path / "o.csv").read_text().splitlines()[1:]]


def test_probabilities_are_those_of_the_classes_known(tmp_path):
    path, model = tmp_path / "t.csv", tmp_path / "m.sepsa"
    rng = random.Random(0)
    lines = [
        f"{x},{'up, high' if x + rng.gauss(0, 0.3) > 0 else 'down'}" for x in (rng.gauss(0, 1) for _ in range(600))
    ]
    rows = [line.split(",", 1) for line in lines]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["x", "y"], *rows])
    base = ("stream", path, "--target", "y", "--classify", "--checkpoint", model, "--probabilities")
    assert run(*base, "--predictions", tmp_path / "p.csv").exit_code == 0
    told = [json.loads(row["probabilities"]) for row in records(tmp_path / "p.csv")]
    assert told[0] == {}
    assert list(told[1]) == [rows[0][1]]
    assert all(sum(shares.values()) == pytest.approx(1) for shares in told[1:])
    likeliest = [max(shares, key=shares.get) for shares in told[1:]]
    assert likeliest == [row["prediction"] for row in records(tmp_path / "p.csv")][1:]
    loss = -np.mean([np.log(shares[label]) for shares, (_, label) in zip(told[100:], rows[100:], strict=True)])
    assert loss < 0.45
    assert run("predict", model, path, "--probabilities", "--predictions", tmp_path / "o.csv").exit_code == 0
    assert list(records(tmp_path / "o.csv")[0]) == ["line", "prediction", "probabilities"]


def test_predict_names_columns_that_are_missing_unknown_or_misspelled(tmp_path):
    path, model, new = write(tmp_path / "t.csv", n=100), tmp_path / "m.sepsa", tmp_path / "new.csv"
    run("stream", path, "--target", "y", "--checkpoint", model)
    assert "column" not in run("predict", model, path).stderr
    new.write_text("x,color,y\n1,red,2\n")
    said = run("predict", model, new)
    assert said.exit_code == 0
    assert said.stderr.splitlines()[:2] == [
        "column 'color' is not one of the model's and is ignored: is it 'colour'?",
        "2 of the model's 3 columns are absent, taken as missing values: 'day', 'colour'",
    ]
    new.write_text("x,colour,day," + ",".join(f"extra {i}" for i in range(8)) + "\n1,red,2026-01-01" + ",1" * 8 + "\n")
    said = run("predict", model, new).stderr.splitlines()
    assert said[:6] == [f"column 'extra {i}' is not one of the model's and is ignored" for i in range(5)] + [
        "3 more columns are ignored"
    ]
    new.write_text('{"x": 1, "colour": "red", "day": "2026-01-01"}\n{"X": 1}\n')
    assert "column 'X' is not one of the model's" in run("predict", model, new).stderr
    other = tmp_path / "other.csv"
    other.write_text("xs,colour,day,y\n1,red,2026-01-01,2\n")
    assert (
        "column 'xs' is not one of the model's and is ignored: is it 'x'?"
        in run("stream", other, "--checkpoint", model).stderr
    )


def test_predict_writes_over_neither_its_model_nor_its_table(tmp_path):
    path, model = write(tmp_path / "t.csv", n=50), tmp_path / "m.sepsa"
    run("stream", path, "--target", "y", "--checkpoint", model)
    for name, file in (("the model", model), ("the table", path)):
        before = file.read_bytes()
        result = run("predict", model, path, "--out", file)
        assert result.exit_code == 2
        assert f"--predictions must be another file than {name}" in result.stderr
        assert file.read_bytes() == before


CLOSED = {
    "stream --target y <&-": (1, "standard input is closed: name a file, or pipe a table into the command\n"),
    "stream t.csv --target y --drop day >&-": (2, "standard output is closed: name a file by --predictions\n"),
    "stream t.csv --target y --drop day --predictions p.csv --checkpoint m.sepsa <&- >&- 2>&-": (0, ""),
    "stream t.csv --target y --drop day 2>&-": (0, ""),
    "inspect m.sepsa >&-": (2, "standard output is closed: open it, or redirect it to a file\n"),
    "stream t.csv --target y --drop day --predictions p.csv 2>&1 >/dev/null | true": (0, ""),
    "stream long.csv --target y --drop day | head -2": (
        141,
        "stopped: the reader of the predictions has closed the pipe\n",
    ),
    "inspect m.sepsa --json 2>err | true; cat err >&2": (None, None),
}


def test_closed_streams_and_broken_pipes_end_in_one_line(tmp_path, preloaded_bin):
    write(tmp_path / "t.csv", n=50)
    write(tmp_path / "long.csv", n=60_000)
    for command_line, (code, said) in CLOSED.items():
        first, pipe, rest = command_line.partition(" | ")
        script = f"{{ {preloaded_bin}/sepsa {first}; echo $? >code; }}{pipe}{rest}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, (command_line, done.stderr)
        assert "Error" not in done.stderr, (command_line, done.stderr)
        if code is not None:
            assert int((tmp_path / "code").read_text()) == code, (command_line, done.stderr)
            assert done.stderr == said, command_line
    assert len(records(tmp_path / "p.csv")) == 50


def test_inspect_says_what_another_file_is(tmp_path):
    table = write(tmp_path / "t.csv", n=5)
    cure = f"`sepsa stream {table} --target COLUMN --checkpoint model.sepsa` learns a table and saves the model"
    for arguments in (("inspect", table), ("predict", table, table)):
        result = run(*arguments)
        assert result.exit_code == 1
        assert result.stderr == f"{table} is a text, perhaps a CSV table, not a checkpoint of sepsa: {cure}\n"
    torch.save({"a": 1}, tmp_path / "m.pt")
    assert (
        "is a zip archive, as torch.save writes, not a checkpoint of sepsa: load it with"
        in run("inspect", tmp_path / "m.pt").stderr
    )
    pq.write_table(pa.table({"a": [1]}), tmp_path / "t.parquet")
    assert "is a Parquet table, not a checkpoint" in run("inspect", tmp_path / "t.parquet").stderr
    (tmp_path / "noise").write_bytes(b"\0\xff" * 50)
    assert "noise is damaged or not a checkpoint of sepsa" in run("inspect", tmp_path / "noise").stderr
    os.mkfifo(tmp_path / "fifo")
    result = run("inspect", tmp_path / "fifo")
    assert result.exit_code == 1
    assert "fifo is a device or a FIFO, not a checkpoint: give a file" in result.stderr


def test_the_default_forgetting_is_that_of_the_estimators(tmp_path):
    import sepsa

    path, model = write(tmp_path / "t.csv", n=50), tmp_path / "m.sepsa"
    run("stream", path, "--target", "y", "--checkpoint", model)
    own = sepsa.load(model).get_params()
    estimator = sepsa.SepSARegressor().get_params()
    assert {name: own[name] for name in ("forgetting", "ridge")} == {
        name: estimator[name] for name in ("forgetting", "ridge")
    }


# ---------------------------------------------------------------------- the report


def make_report(tmp_path):
    path = tmp_path / "t.csv"
    rng = random.Random(0)
    lines = ["x,<b>y</b>"]
    for i in range(12_000):
        x = rng.gauss(0, 1)
        lines.append(
            f"{x:.4f},{(1 if i < 8000 else -4) * x + 0.1 * rng.gauss(0, 1):.4f}"
            if i != 50
            else "<script>alert(1)</script>,no"
        )
    path.write_text("\n".join(lines) + "\n")
    result = run(
        "stream",
        path,
        "--target",
        "<b>y</b>",
        "--predictions",
        tmp_path / "o.csv",
        "--quarantine",
        tmp_path / "q.csv",
        "--report",
        tmp_path / "r.html",
    )
    assert result.exit_code == 0, result.output
    return tmp_path / "r.html"


def test_the_report_needs_no_network_and_runs_nothing(tmp_path):
    page = make_report(tmp_path).read_text()
    assert not re.search(r"https?://|<script|src=|@import", page)
    assert "&lt;script&gt;alert(1)" in page
    assert page.count('stroke="var(--alarm)"') >= 1
    assert "<td>8," in page or "<td>7,9" in page  # the alarm is where the target changed its sign


def test_a_browser_opens_the_report(tmp_path):
    browser = next((b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None)
    if browser is None:
        pytest.skip("no Chromium here")
    page = make_report(tmp_path)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-dev-shm-usage",
    ]
    done = subprocess.run(
        [browser, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0
    assert 'id="rows">11,999<' in done.stdout
    assert "<polyline" in done.stdout
