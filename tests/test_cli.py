"""The command line, as a person types it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from sepsa import cli
from sepsa.paper import demo, records


def sepsa(*arguments):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_demo_writes_a_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "LEARNING_RATES", (1e-3,))
    result = sepsa("demo", "--seeds", 1, "--out", tmp_path / "figure.png")
    assert result.exit_code == 0
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_small_version_runs_once_and_says_that_it_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("reproduce", "table3", "--datasets", "diabetes", "--methods", "SepSA,adam", "--quick", "--jobs", 1)
    result = sepsa(*arguments)
    assert result.exit_code == 0
    assert "a small version" in result.output
    names = [file.name for file in records.files(tmp_path / "results-quick")]
    assert names == [
        f"diabetes-{mode}-{method}.json" for mode in ("mini-batch", "online") for method in ("adam", "sepsa")
    ]
    run = records.read(tmp_path / "results-quick" / "table3" / names[1])["runs"][0]
    assert run["spec"]["quick"]
    assert "8 of 8 runs are in results-quick already" in sepsa(*arguments).output


def test_seeds_and_folder_are_taken_from_the_command(tmp_path):
    out = tmp_path / "there"
    result = sepsa("reproduce", "table3", "--datasets", "diabetes", "--methods", "sgd", "--seeds", "5,7-8", "--quick",
                   "--jobs", 1, "--out", out)  # fmt: skip
    assert result.exit_code == 0
    for file in records.files(out):
        assert [run["seed"] for run in json.loads(file.read_text())["runs"]] == [5, 7, 8]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("fig9",), "experiment must be one of fig1, fig2, fig3, fig4, table3, convergence, tuning, all, got 'fig9'"),
        (("fig1", "--datasets", "energy,iris"), "--datasets must be of energy, diabetes, mnist, cifar10, got 'iris'"),
        (
            ("fig1", "--methods", "muon"),
            "--methods must be of sepsa, slimtrain, sgd, nag, rmsprop, adam, sepsa-tuned, sepsa-self-tuning, "
            "adam-cross-entropy, sepsa-cross-entropy, adam-standardized-targets, got 'muon'",
        ),
        (("fig3", "--datasets", "energy"), "fig3 has no runs for --datasets energy and --methods all"),
        (("fig1", "--seeds", "x"), "--seeds must be a number such as 10, a range such as 200-219 or a list, got 'x'"),
        (("fig1", "--seeds", "9-7"), "--seeds must go up in each range, got '9-7'"),
        (("fig1", "--device", "tpu"), "--device must be cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_a_wrong_name_is_one_line_with_the_right_ones(arguments, line):
    result = sepsa("reproduce", *arguments)
    assert result.exit_code == 2
    assert result.output == line + "\n"


def test_data_that_are_not_to_be_had_are_one_line(tmp_path, monkeypatch):
    def refused(*arguments, **options):
        raise OSError("no network")

    monkeypatch.setenv("SEPSA_DATA", str(tmp_path))
    monkeypatch.setattr("pooch.retrieve", refused)
    result = sepsa("reproduce", "fig4", "--quick", "--jobs", 1, "--out", tmp_path / "results")
    assert result.exit_code == 1
    assert "ENB2012_data.csv is missing" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("energy/ENB2012_data.csv", "ENB2012_data.csv is damaged or another file"),
        ("results/fig4/energy-mini-batch-sgd.json", "energy-mini-batch-sgd.json is no results file"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, monkeypatch, file, words):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("half a")
    monkeypatch.setenv("SEPSA_DATA", str(tmp_path))
    result = sepsa("reproduce", "fig4", "--methods", "sgd", "--quick", "--jobs", 1, "--out", tmp_path / "results")
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("given", "seeds"), [("", None), ("10", 10), ("3-5", [3, 4, 5]), ("7, 9-10", [7, 9, 10])])
def test_seeds_are_parsed(given, seeds):
    assert cli.parse_seeds(given) == seeds


def test_a_missing_extra_is_one_line(monkeypatch):
    with (
        pytest.raises(SystemExit, match=r"needs rich, which is not installed: pip install 'sepsa\[paper\]'"),
        cli.extras(),
    ):
        raise ModuleNotFoundError("No module named 'rich'", name="rich")
    with pytest.raises(ModuleNotFoundError, match="absent"), cli.extras():
        raise ModuleNotFoundError("No module named 'sepsa.absent'", name="sepsa.absent")


# ---------------------------------------------------------------------- streams


def stream(text, *arguments):
    return CliRunner().invoke(cli.app, ["stream", "--target", "y", *arguments], input=text)


def test_a_table_is_predicted_row_by_row_before_it_is_learned():
    rows = [(x, ("red", "blue")[x % 2], 3.0 * x + 10 * (x % 2)) for x in range(200)]
    result = stream("a,colour,y\n" + "\n".join(f"{x},{colour},{y}" for x, colour, y in rows))
    assert result.exit_code == 0
    before = [float(line) for line in result.stdout.split()]
    assert len(before) == 200
    assert sum(abs(said - y) for said, (_, _, y) in zip(before[100:], rows[100:], strict=True)) < 100 * 10
    assert "200 rows, mean absolute error" in result.stderr


def test_a_table_of_classes():
    text = "a,y\n" + "\n".join(f"{x % 7},{'high' if x % 7 > 3 else 'low'}" for x in range(300))
    result = stream(text, "--classify")
    assert result.stdout.split("\n")[0] == ""  # before the first row no class is known
    assert float(result.stderr.split("accuracy ")[1].split(",")[0]) > 0.8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "--target must be a column of the table, a, b, got 'y'"),
        ("a,y\n1\n", "line 2 must have 2 cells, as the header has"),
        ("a,y\n1,\n", "line 2 has no y: drop the row"),
        ("a,y\n1,abc\n", "y must be a number in every row, got 'abc': or is it --classify?"),
        ("a,y\ninf,1\n", "must be a finite number, got inf"),
        ("a,y\n", "holds no rows"),
    ],
)
def test_a_bad_table_takes_one_line_to_refuse(text, words):
    result = stream(text)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().split("\n")) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("bench", "heads"), "bench must be of stream, got 'heads'"),
     (("bench", "stream", "--out", "x.csv"), "--out must end in .json, got x.csv")],
)  # fmt: skip
def test_bench_says_what_is_wrong(arguments, words):
    result = sepsa(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
