"""The command line, as a person types it."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from sepsa import __version__ as version
from sepsa import cli
from sepsa.paper import records
from sepsa.paper.experiments import EXPERIMENTS


def sepsa(*arguments):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


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


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("fig9",), f"experiment must be one of {', '.join(EXPERIMENTS)}, convergence, tuning, all, got 'fig9'"),
        (
            ("fig1", "--datasets", "energy,iris"),
            "--datasets must be one of energy, diabetes, mnist, cifar10, got 'iris'",
        ),
        (
            ("fig1", "--methods", "muon"),
            "--methods must be one of sepsa, slimtrain, sgd, nag, rmsprop, adam, sepsa-tuned, sepsa-self-tuning, "
            "adam-cross-entropy, sepsa-cross-entropy, adam-standardized-targets, sepsa-no-weight-decay, "
            "adam-no-weight-decay, slimtrain-as-published, got 'muon'",
        ),
        (("fig3", "--datasets", "energy"), "fig3 has no runs for --datasets energy and --methods all"),
        (("fig1", "--seeds", "x"), "--seeds must be a number such as 10, a range such as 200-219 or a list, got 'x'"),
        (("fig1", "--seeds", "9-7"), "--seeds must have increasing ranges, got '9-7'"),
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
        ("results/fig4/energy-mini-batch-sgd.json", "energy-mini-batch-sgd.json is not a results file"),
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


def test_a_missing_extra_is_one_line(capsys):
    for extra in ("paper", "stream"):
        with pytest.raises(typer.Exit) as refused, cli.extras(extra):
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        assert refused.value.exit_code == 1
        assert capsys.readouterr().err == (
            f"the command line needs rich, which is not installed: pip install 'sepsa[{extra}]'\n"
        )
    with pytest.raises(ModuleNotFoundError, match="absent"), cli.extras():
        raise ModuleNotFoundError("No module named 'sepsa.absent'", name="sepsa.absent")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("bench", "heads"), 2, "bench must be one of stream, got 'heads'"),
        (("bench", "stream", "--out", "x.csv"), 2, "--out must end in .json, got x.csv"),
        (("bench", "stream", "--out", "none/x.json"), 2, "--out must lie in a folder that exists, got none/x.json"),
        (("demo", "--out", "x.xyz"), 2, "--out must end in .png or .svg or .pdf, got x.xyz"),
        (("demo", "--out", "none/x.png"), 2, "--out must lie in a folder that exists, got none/x.png: make none first"),
        (("report", "--results", "none"), 2, "none"),
        (("inspect", "none.sepsa"), 1, "none.sepsa: no such file or directory: check the path"),
        (("predict", "none.sepsa", "none.csv"), 1, "none.sepsa: no such file or directory: check the path"),
        (("stream", "none.csv", "--target", "y"), 1, "none.csv: no such file or directory: check the path"),
        (("stream", ".", "--target", "y"), 1, ".: is a directory: give a file"),
        (("stream", "--sep", "::", "--target", "y"), 2, "--sep must be one character"),
        (("predict", "none.sepsa", "--decimal", "x"), 2, "--decimal must be . or ,"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(arguments, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = sepsa(*arguments)
    assert result.exit_code == code
    assert words in result.stderr
    assert len(result.stderr.strip().split("\n")) == 1
    assert isinstance(result.exception, SystemExit)


def test_the_version():
    result = sepsa("--version")
    assert result.exit_code == 0
    assert result.output == f"sepsa {version}\n"


def test_every_command_tells_its_exit_codes_or_has_none_of_its_own():
    for command in ("stream", "predict", "inspect"):
        assert "Exit codes: 0 done; 1 stopped" in " ".join(sepsa(command, "--help").output.split())
