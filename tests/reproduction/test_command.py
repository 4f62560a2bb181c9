"""`python -m reproduction`, as a person types it."""

import pytest
from typer.testing import CliRunner

from reproduction import __main__ as command
from reproduction import records
from reproduction.experiments import EXPERIMENTS
from reproduction.methods import NAMES, slug


def reproduction(*arguments):
    result = CliRunner().invoke(command.app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_small_version_runs_once_and_says_that_it_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("run", "table3", "--datasets", "diabetes", "--methods", "SepSA,adam", "--quick", "--jobs", 1)
    result = reproduction(*arguments)
    assert result.exit_code == 0
    assert "a small version" in result.output
    names = [file.name for file in records.files(tmp_path / "results-quick")]
    assert names == [
        f"diabetes-{mode}-{method}.json" for mode in ("mini-batch", "online") for method in ("adam", "sepsa")
    ]
    run = records.read(tmp_path / "results-quick" / "table3" / names[1])["runs"][0]
    assert run["spec"]["quick"]
    assert "8 of 8 runs are in results-quick already" in reproduction(*arguments).output


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("fig9", f"experiment must be one of {', '.join(EXPERIMENTS)}, convergence, tuning, all, got 'fig9'"),
        ("fig1 --datasets energy,iris", "--datasets must be one of energy, diabetes, mnist, cifar10, got 'iris'"),
        ("fig1 --methods muon", f"--methods must be one of {', '.join(map(slug, NAMES))}, got 'muon'"),
        ("fig3 --datasets energy", "fig3 has no runs for --datasets energy and --methods all"),
        ("fig1 --seeds x", "--seeds must be a number such as 10, a range such as 200-219 or a list, got 'x'"),
        ("fig1 --seeds 9-7", "--seeds must have increasing ranges, got '9-7'"),
        ("fig1 --device tpu", "--device must be cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_a_wrong_name_is_one_line_with_the_right_ones(arguments, line):
    result = reproduction("run", *arguments.split())
    assert result.exit_code == 2
    assert result.output == line + "\n"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("none", "ENB2012_data.csv is missing"),
        ("energy/ENB2012_data.csv", "ENB2012_data.csv is damaged or another file"),
        ("results/fig4/energy-mini-batch-sgd.json", "energy-mini-batch-sgd.json is not a results file"),
    ],
)
def test_a_missing_or_damaged_file_is_one_line(tmp_path, monkeypatch, file, words):
    def refused(*arguments, **options):
        raise OSError("no network")

    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("half a")
    monkeypatch.setenv("SEPSA_DATA", str(tmp_path))
    monkeypatch.setattr("pooch.retrieve", refused)
    result = reproduction("run", "fig4", "--methods", "sgd", "--quick", "--jobs", 1, "--out", tmp_path / "results")
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("given", "seeds"), [("", None), ("10", 10), ("3-5", [3, 4, 5]), ("7, 9-10", [7, 9, 10])])
def test_seeds_are_parsed(given, seeds):
    assert command.parse_seeds(given) == seeds


def test_a_report_without_records_is_one_line(tmp_path):
    result = reproduction("report", "--results", tmp_path / "none")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "results must be a folder of records" in result.output
