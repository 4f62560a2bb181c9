"""The command line, as a person types it."""

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from sepsa import __version__ as version
from sepsa.shell import cli


def sepsa(*arguments):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_missing_extra_is_one_line(capsys):
    for missing, extra in (("rich", "demo"), ("pyarrow.csv", "shell"), ("sklearn", "stream")):
        with pytest.raises(typer.Exit) as refused, cli.extras("demo" if missing == "rich" else "shell"):
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        assert refused.value.exit_code == 1
        assert capsys.readouterr().err == (
            f"the command line needs {missing.partition('.')[0]}, which is not installed: "
            f"pip install 'sepsa[{extra}]'\n"
        )
    with pytest.raises(ModuleNotFoundError, match="absent"), cli.extras():
        raise ModuleNotFoundError("No module named 'sepsa.absent'", name="sepsa.absent")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("report", "none"), 1, "none: no such file or directory: check the path"),
        (("report", "."), 2, ". is a folder: give a saved model"),
        (("report", "m", "--out", "-"), 2, "--out must name a file or a folder, got -, which stands for standard"),
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


COMMANDS = typer.main.get_command(cli.app).commands
OPTIONS = [(name, one) for name, command in COMMANDS.items() for one in command.params if one.opts[0].startswith("--")]
BAD = {  # a wrong value of each option that takes one
    "--sep": "::", "--decimal": "x", "--encoding": "x", "--na-values": "a\nb", "--date-format": "x", "--target": "none",
    "--drop": "none", "--categorical": "none", "--categories": 0, "--forgetting": "x", "--ridge": "x", "--seed": -1,
    "--loss": "x", "--body": "x", "--predictions": "none/p.csv", "--intervals": 2, "--quarantine": "none/q.csv",
    "--save-every": 0, "--every": 0, "--start": -1,
    "--checkpoint": "none/c", "--keep": 0, "--report": "none/r.html", "--time": "none", "--inputs": "none",
    "--horizon": 0, "--lags": 0, "--seasons": "x", "--step": "3x", "--bounds": "x", "--seeds": 0,
    "--out": "t.csv", "--to": "t.csv", "--processes": 0, "--digits": "x", "--thousands": "x",
}  # fmt: skip
GIVEN = {
    "stream": ("t.csv", "--target", "y"), "forecast": ("t.csv", "--target", "y"), "predict": ("m.sepsa", "t.csv"),
    "report": ("m.sepsa",),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table, and a model that has learned it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "t.csv").write_text("x,y\n1,2\n2,3\n3,5\n")
    arguments = "--target", "y", "--body", "fourier", "--checkpoint", folder / "m.sepsa", "--out", folder / "p.csv"
    assert sepsa("stream", folder / "t.csv", *arguments).exit_code == 0
    return folder


@pytest.mark.parametrize(
    ("command", "option"), [(name, option.opts[0]) for name, option in OPTIONS if not option.is_flag]
)
def test_a_bad_value_of_every_option_is_one_line(command, option, folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    result = sepsa(command, *GIVEN.get(command, ()), option, BAD[option])
    assert result.exit_code in (1, 2)
    (line,) = result.stderr.strip().split("\n")
    assert option in line or str(BAD[option]) in line
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_an_option_that_there_is_not_is_one_line():
    result = sepsa("stream", "--evry", 3)
    assert result.exit_code == 2
    assert "--evry" in result.stderr
    assert result.stderr.endswith(": see sepsa stream --help\n")
    assert result.stderr.count("\n") == 1


def test_help_the_version_and_errors_of_usage_import_no_large_package():
    code = (
        "import sys; from sepsa.shell.cli import app\n"
        "large = {'numpy', 'pandas', 'pydantic', 'rich', 'torch'}\n"
        "for words in (['--help'], ['stream', '--help'], ['--version'], ['predict', '--none'], ['stream', 't.csv']):\n"
        "    if words[-1] == 't.csv': large.remove('pydantic')  # typer converts words by it\n"
        "    try: app(words)\n"
        "    except SystemExit: pass\n"
        "    assert not large & {*sys.modules}, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--none" in done.stderr
    assert "--target must name" in done.stderr
