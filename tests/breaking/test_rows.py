"""Fuzzed tables: no traceback, and every record is learned or quarantined, once."""

import csv
import json
import random
import string

import pytest

from reference import csv_records
from sepsa.shell import command, source
from sepsa.shell.messages import exit_code
from sepsa.shell.options import StreamOptions

ODD = [
    "", " ", "NA", "nan", "inf", "-inf", "1e400", "1e-400", "-0", "+1", " 7 ", "1_000", "0x10", "1,5", "1.5.2", "--3",
    "2026-02-30", "2026-02-28", "2026-02-28T25:00", "31/12/2025", "TRUE", "null", "\0", "\x1a", "\ufeff", "é", "e5",
    ".", "ｘ", "𝟘", "\u2028", "'", '""', '"', 'a"b', '"a"b"', "a\tb", ";", "|", "#", "=1+1", "9" * 400, "1e5000",
    "x" * 3000, "\\", "%s", "{}", "../../x", "\ud800",
]  # fmt: skip
ENDS = ["\n", "\r\n", "\r", "\n\n", "\r\n\r\n"]


def cell(rng):
    kind = rng.random()
    if kind < 0.6:
        return f"{rng.gauss(0, 10 ** rng.randint(-3, 6)):.6g}"
    if kind < 0.75:
        return rng.choice(["red", "green", f"id-{rng.randrange(10**6)}"])
    if kind < 0.9:
        return rng.choice(ODD)
    return "".join(rng.choices(string.printable, k=rng.randrange(12)))


def quoted(text, rng):
    if rng.random() < 0.1:
        text = text + rng.choice(["\n", "\r\n", ",", '"']) + text
    return '"' + text.replace('"', '""') + '"'


def fuzzed(rng, rows):
    """A table with everything in it that went wrong somewhere."""
    width = rng.randint(1, 6)
    end = rng.choice(ENDS[:3])
    lines = [",".join([*(f"c{i}" for i in range(width)), "y"])]
    for _ in range(rows):
        cells = [cell(rng) for _ in range(width)] + [f"{rng.gauss(0, 1):.4f}" if rng.random() < 0.8 else cell(rng)]
        cells = [quoted(c, rng) if rng.random() < 0.1 else c for c in cells]
        if rng.random() < 0.05:
            cells = cells[: rng.randrange(len(cells) + 1)] + [cell(rng) for _ in range(rng.randrange(3))]
        lines.append(",".join(cells) + (rng.choice(ENDS) if rng.random() < 0.03 else end))
    data = (lines[0] + end + "".join(lines[1:])).encode(errors="surrogatepass")
    if rng.random() < 0.3:
        at = rng.randrange(len(data))
        data = data[:at] + rng.randbytes(rng.randrange(1, 5)) + data[at + rng.randrange(3) :]
    return data.rstrip(b"\r\n") if rng.random() < 0.2 else data


def read(path):
    csv.field_size_limit(10**8)
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def stream(folder, data, rng, name="t.csv", **more):
    """The exit code, and the lines that were predicted and put aside."""
    for old in folder.iterdir():
        old.unlink()
    (folder / name).write_bytes(data)
    source.CHUNK = rng.choice([13, 200, 5000, 1 << 20])
    files = {"predictions": folder / "out.csv", "quarantine": folder / "q.csv"}
    options = StreamOptions(folder / name, target="y", sep=",", **files, **more)
    code = exit_code(lambda: command.stream(options))
    return code, [int(r["line"]) for r in read(folder / "out.csv")], [int(r["line"]) for r in read(folder / "q.csv")]


@pytest.fixture(autouse=True)
def chunk(monkeypatch):
    monkeypatch.setattr(source, "CHUNK", source.CHUNK)  # it is put back after each test


FUZZED = [(0, 15, 60), *(pytest.param(seed, 115, 100, marks=pytest.mark.long) for seed in range(1, 11))]


@pytest.mark.parametrize(("seed", "tables", "rows"), FUZZED)
def test_every_record_of_a_fuzzed_table_is_learned_or_quarantined_once(seed, tables, rows, tmp_path, capsys, tally):
    rng = random.Random(seed)
    done = learned = 0
    for i in range(tables):
        data = fuzzed(rng, rows)
        code, told, aside = stream(tmp_path, data, rng, classify=rng.random() < 0.3 or None)
        said = capsys.readouterr().err
        assert "Traceback" not in said
        expected = [record.line for record in csv_records(data, ",") if not record.blank]
        if code == 2 or (code == 1 and not told and not aside):  # the header was hit, or the first target is a text
            *notices, error = said.strip().split("\n")
            assert error, i
            assert all(" is quarantined: " in notice for notice in notices), (i, said)
            continue
        assert code in (0, 1, 3), (i, said)
        both = sorted(told + aside)
        assert both == expected[1:], (i, seed, set(expected[1:]) ^ set(both))
        done += len(both)
        learned += len(told)
    tally("fuzzed rows", done, learned=learned)
    assert done > 0.87 * tables * rows
    assert learned > 0.2 * done


def fuzzed_json(rng):
    """A line that may be no row, or one with odd values."""
    odd = [rng.choice(ODD), None, True, 10**400, {"a": 1}, [1]]
    row = {f"c{i}": rng.choice(odd) if rng.random() < 0.1 else rng.gauss(0, 1) for i in range(3)}
    row["y"] = rng.gauss(0, 1) if rng.random() < 0.9 else rng.choice(ODD)
    text = json.dumps(row)
    broken = [text[: rng.randrange(1, len(text))], "[]", "3", '"', "{}", "[" * 5000, text * 2]
    return text if rng.random() < 0.9 else rng.choice(broken)


def test_fuzzed_json_lines(tmp_path, capsys, tally):
    rng = random.Random(5)
    for _ in range(5):
        data = "\n".join(["{}", *(fuzzed_json(rng) for _ in range(59))]).encode()
        code, told, aside = stream(tmp_path, data, rng, "t.jsonl")
        assert code == (3 if len(aside) > 3 else 0), capsys.readouterr().err
        assert sorted(told + aside) == list(range(1, 61))
        tally("fuzzed rows", 60, learned=len(told))


def test_files_that_are_no_tables(tmp_path, capsys, tally):
    rng = random.Random(7)
    for _ in range(30):
        kind = rng.randrange(5)
        start = [b"", b"PAR1", b"ARROW1\0\0", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"][kind]
        code, *_ = stream(tmp_path, start + rng.randbytes(rng.randrange(400)), rng)
        said = capsys.readouterr().err
        assert code in (1, 2), said
        assert "Traceback" not in said
        assert said
    tally("files of random bytes", 30)
