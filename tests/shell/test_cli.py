"""The command line, as a person types it."""

import importlib
import subprocess
import sys

import pytest

from command_line import invoke
from sepsa import __version__ as version
from sepsa.shell import cli
from sepsa.shell.messages import exit_code
from sepsa.shell.options import COMMANDS


def sepsa(*arguments):
    return invoke(arguments)


def test_a_missing_extra_is_one_line(capsys, monkeypatch):
    for name, module, extra in (("demo", "sklearn", "demo"), ("stream t.csv --target y", "pyarrow", "shell")):
        monkeypatch.setattr(cli, "import_module", lambda _, module=module: importlib.import_module(module))
        monkeypatch.setitem(sys.modules, module, None)
        assert exit_code(lambda name=name: cli.run(name.split())) == 1
        assert capsys.readouterr().err == (
            f"the command line needs {module}, which is not installed: pip install 'sepsa[{extra}]'\n"
        )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("report", "none"), 1, "none: no such file or directory"),
        (("report", "."), 1, ".: is a directory"),
        (("report", "m", "--out", "-"), 2, "--out must name a file or a folder, got -, which stands for standard"),
        (("inspect", "none.sepsa"), 1, "none.sepsa: no such file or directory"),
        (("predict", "none.sepsa", "none.csv"), 1, "none.sepsa: no such file or directory"),
        (("stream", "none.csv", "--target", "y"), 1, "none.csv: no such file or directory"),
        (("stream", ".", "--target", "y"), 1, ".: is a directory"),
        (("stream", "--sep", "::", "--target", "y"), 2, "--sep must be one character"),
        (("stream", "--target", "y", "--decimal", "x"), 2, "--decimal must be . or ,"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(arguments, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = sepsa(*arguments)
    assert result.exit_code == code
    assert words in result.stderr
    assert len(result.stderr.strip().split("\n")) == 1


def test_the_version():
    result = sepsa("--version")
    assert result.exit_code == 0
    assert result.output == f"sepsa {version}\n"


def test_every_command_tells_its_exit_codes_or_has_none_of_its_own():
    for command in ("stream", "predict", "inspect"):
        assert "Exit codes: 0 done; 1 stopped" in " ".join(sepsa(command, "--help").output.split())


OPTIONS = [
    (name, flag)
    for name, parser in ((name, cli.Parser(name, kind)) for name, kind in COMMANDS.items())
    for flag in parser.flags
    if flag in parser.valued
]
BAD = {  # a wrong value of each option that takes one
    "--sep": "::", "--decimal": "x", "--encoding": "x", "--na-values": "a\nb", "--date-format": "x", "--target": "none",
    "--drop": "none", "--categorical": "none", "--categories": 0, "--forgetting": "x", "--ridge": "x", "--seed": -1,
    "--loss": "x", "--body": "x", "--predictions": "none/p.csv", "--intervals": 2, "--quarantine": "none/q.csv",
    "--save-every": 0, "--every": 0, "--start": -1,
    "--checkpoint": "none/c", "--report": "none/r.html", "--time": "none", "--inputs": "none",
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


@pytest.mark.parametrize(("command", "option"), OPTIONS)
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
        "import sys; from sepsa.shell.cli import run\n"
        "from sepsa.shell.messages import exit_code; large = {'numpy', 'pandas', 'pyarrow', 'rich', 'torch', 'typer'}\n"
        "for line in ('--help', 'stream --help', '--version', 'predict m --none', 'stream t.csv'):\n"
        "    exit_code(lambda: run(line.split()))\n"
        "    assert not large & {*sys.modules}, line\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--none" in done.stderr
    assert "--target must name" in done.stderr
