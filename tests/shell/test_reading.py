"""What a file needs to be read: saved with a model and used by every command; rows left out are never quiet."""

import csv
import io
import random
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from breaking.test_files import forged
from sepsa.shell import cli
from sepsa.shell.options import COMMANDS, flag_of
from sepsa.shell.reading import SETTINGS
from shell.test_command import folder, run  # noqa: F401

TOWNS = ("Łódź", "Kraków", "Gdańsk")


def rows(first, last):
    rng = random.Random(0)
    for i in range(last):
        x = round(rng.gauss(20, 5), 2)
        values = datetime(2025, 1, 1) + timedelta(days=i), x, rng.choice(TOWNS), round(2 * x + rng.gauss(0, 1), 2)
        if i >= first:
            yield values if i % 9 else (values[0], None, *values[2:])


def table(name, first, last, sep=",", decimal=".", encoding="utf-8", na="", date="%Y-%m-%d"):
    """Write rows of a table in a dialect."""
    text = io.StringIO()
    out = csv.writer(text, delimiter=sep, lineterminator="\n")
    out.writerow(["day", "x", "town", "y"])
    for day, x, town, y in rows(first, last):
        numbers = [na if value is None else str(value).replace(".", decimal) for value in (x, y)]
        out.writerow([day.strftime(date), numbers[0], town, numbers[1]])
    Path(name).write_bytes(text.getvalue().encode(encoding))


DIALECTS = {
    "--decimal ,": {"sep": ";", "decimal": ","},
    "--sep ^": {"sep": "^"},
    "--encoding cp1250": {"encoding": "cp1250"},
    "--encoding utf-16": {"encoding": "utf-16"},
    "--na-values none,-999": {"na": "-999.0"},
    "--na-values brak": {"na": "brak"},
    "--date-format %d-%m-%Y": {"date": "%d-%m-%Y"},
    "--date-format %d/%m/%Y --encoding cp1250 --decimal , --na-values - --sep tab": {
        "sep": "\t", "decimal": ",", "encoding": "cp1250", "na": "-", "date": "%d/%m/%Y",
    },
}  # fmt: skip
STREAM = "stream {0}.csv --checkpoint {0}.sepsa --predictions {0}.out.csv"
FORECAST = "forecast {0}.csv --checkpoint {0}.sepsa --predictions {0}.out.csv"
FIRST = {STREAM: "--target y", FORECAST: "--target y --time day --inputs x,town --horizon 2 --lags 3 --seasons 7"}


@pytest.mark.parametrize("options", DIALECTS)
@pytest.mark.parametrize("command", FIRST)
def test_what_a_saved_model_needs_to_read_its_file_travels_with_it(command, options):
    dialect, told = DIALECTS[options], {}
    for name, how, given in (("plain", {}, ""), ("own", dialect, options)):
        table(f"{name}.csv", 0, 50, **how)
        run(f"{command.format(name)} {FIRST[command]} {given}")
        table(f"{name}.csv", 0, 80, **how)
        last = run(command.format(name)).stdout
        asked = ""
        if command == STREAM:
            table(f"{name}.new.csv", 80, 90, **how)
            asked = run(f"predict {name}.sepsa {name}.new.csv").stdout
        told[name] = Path(f"{name}.out.csv").read_text(), last, asked
    assert told["own"] == told["plain"]


def test_an_option_that_is_given_now_overrides_and_is_saved_in_its_turn():
    table("t.csv", 0, 60, sep=";", decimal=",")
    run(f"{STREAM.format('t')} --target y --decimal ,")
    table("new.csv", 60, 70, sep=";")
    wrong = run("predict t.sepsa new.csv", code=2)
    assert "line 2: 'x' is '" in wrong.stderr
    assert "', and the model has learned numbers there: give --decimal .\n" in wrong.stderr
    assert wrong.stdout == ""
    expected = run("predict t.sepsa new.csv --decimal .").stdout
    table("commas.csv", 60, 70, sep=";", decimal=",")
    assert run("predict t.sepsa commas.csv").stdout == expected
    before = Path("t.sepsa").read_bytes()
    assert "give --decimal ." in run("stream new.csv --checkpoint t.sepsa", code=2).stderr
    assert Path("t.sepsa").read_bytes() == before  # an error leaves the model
    run("stream new.csv --checkpoint t.sepsa --decimal .")
    run("predict t.sepsa new.csv")
    run("predict t.sepsa commas.csv", code=2)


def test_a_cell_of_another_kind_than_those_learned_is_never_taken_for_missing():
    table("t.csv", 0, 60)
    run(f"{STREAM.format('t')} --target y")
    good = "2025-03-01,20,Kraków\n"
    Path("new.csv").write_text(f"day,x,town\n{good * 30}2025-03-01,n.a.,Kraków\n01.03.2025,20,Kraków\n{good}")
    told = run("predict t.sepsa new.csv --predictions p.csv", code=3)
    for words in (
        "line 32 is not predicted: 'x' is 'n.a.', and the model has learned numbers there: give --na-values n.a. if",
        "line 33 is not predicted: 'day' is '01.03.2025', and the model has learned dates there: give --date-format ",
    ):
        assert words in told.stderr
    assert len(Path("p.csv").read_text().splitlines()) == 32
    run("predict t.sepsa new.csv --na-values n.a.")
    pq.write_table(pa.table({"day": ["2025-03-01"], "x": ["20,5"], "town": ["Kraków"]}), "new.parquet")
    assert "line 1: 'x' is '20,5', and the model" in run("predict t.sepsa new.parquet", code=2).stderr
    run("predict t.sepsa new.parquet --decimal ,")


def test_a_file_in_utf_8_that_is_read_otherwise_is_named():
    table("t.csv", 0, 60, encoding="iso8859-2")
    run(f"{STREAM.format('t')} --target y --encoding iso8859-2")
    table("new.csv", 60, 70)
    said = "new.csv is read as iso8859-2, and may be in utf-8: give --encoding utf-8 if its texts look wrong"
    assert said in run("predict t.sepsa new.csv").stderr
    assert "may be in" not in run("predict t.sepsa new.csv --encoding utf-8").stderr
    assert "may be in" not in run("predict t.sepsa t.csv").stderr


@pytest.mark.parametrize("command", FIRST)
def test_models_without_the_settings_load(command):
    def of_before(own, _):
        kind, entries = own["configuration"]
        own["configuration"] = [kind, [entry for entry in entries if entry[0] not in new]]
        assert len(entries) - len(own["configuration"][1]) == len(new)

    new = set(SETTINGS) - {"date_format"}
    table("t.csv", 0, 50, date="%d.%m.%Y")
    run(f"{command.format('t')} {FIRST[command]} --date-format %d.%m.%Y")
    Path("t.sepsa").write_bytes(forged(of_before, Path("t.sepsa").read_bytes()))
    table("t.csv", 0, 60, date="%d.%m.%Y")
    assert "60 rows (10 now)" in run(command.format("t")).stderr


@pytest.mark.parametrize("name", ["stream", "forecast", "predict"])
def test_every_setting_is_an_option_of_every_command_that_reads_a_file(name):
    flags = set(cli.Parser(name, COMMANDS[name]).flags)
    assert {flag_of(setting) for setting in SETTINGS} <= flags
    assert "--reading" not in flags


BAD_LINES = {
    b"2025-03-01,\xf3,a,1": "give its encoding, such as --encoding cp1250, or convert it, as iconv -f cp1250 -t utf-8",
    b"2025-03-01,1,a": "give --sep if another character separates cells",
    b"2025-03-01,1,a,b,1": "or quote cells that contain it",
    b"2025-03-01,1\0,a,1": "give --encoding utf-16",
    b"2025-03-01,inf,a,1": "give --na-values if such a number is a missing value",
}


@pytest.mark.parametrize(("bad", "cure"), BAD_LINES.items())
@pytest.mark.parametrize(
    "command", ["stream t.csv --target y", "forecast t.csv --target y --inputs x", "predict m t.csv"]
)
def test_more_than_a_twentieth_of_the_rows_left_out_is_the_last_line_and_the_exit_code(command, bad, cure):
    good = b"".join(f"2025-01-{i:02},{i},a,{i}\n".encode() for i in range(1, 32))
    for lost in (1, 3):
        data = b"day,x,town,y\n" + good + (bad + b"\n") * lost + b"2025-02-01,5,a,5\n"
        Path("t.csv").write_bytes(data)
        if command.startswith("predict"):
            table("m.csv", 0, 40)
            run("stream m.csv --target y --checkpoint m")
        told = run(f"{command} --predictions p.csv", code=3 if lost == 3 else 0).stderr
        assert ("WARNING" in told) == (lost == 3)
    last = told.splitlines()[-1]
    assert last.startswith("WARNING: 3 of 35 rows were left out, 3 of them because ")
    assert cure in last
