"""Pages as programs: run their code, compare what it prints with what they show, and write what has changed.

    python docs/pages.py README.md docs/help/faq.md    # these pages; without names the tutorials and the gallery

A page's ```python blocks run in order, in one namespace, and its ```sh blocks in bash, all in one empty folder with
the files beside the page that np.load reads or that are named examples/NAME.csv. A block that prints is followed by a
```text block that shows it, as in doctest: "..." stands for any text, white space counts as one space, and a number
with a decimal point may differ by one percent, or by one in its last digit, because processors round differently.
Comments in a page are instructions:
    <!-- setup ... -->          run this Python here; readers do not see it
    <!-- file: name.py -->      write the next block to that file, for later blocks to import
    <!-- needs: package, ... -->  skip the next block where one of these packages is not installed
    <!-- not run: reason -->    skip the next block, which needs something that a test machine may lack

A tutorial has its figures beside it, and where it links to a notebook of its own name, that has the same code, output
and figures. docs/gallery.md shows programs: a ```text block has what the program linked before it prints.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
GALLERY = DOCS / "gallery.md"
BLOCK = re.compile(
    r"<!--\s*setup\n(?P<setup>.*?)-->"
    r"|(?:<!--\s*(?P<mark>not run|needs|file):\s*(?P<said>[^\n]*?)\s*-->\n+)?"
    r"^```(?P<kind>python|sh)\n(?P<code>.*?)^```$"
    r"(?:\n+^```text\n(?P<shown>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
PROGRAM = re.compile(
    r"\]\(\.\./(examples/[\w/]+\.py)\)(?:(?!\]\(\.\./examples/).)*?^```text\n(.*?)^```\n",
    re.DOTALL | re.MULTILINE,
)
FIGURE = re.compile(r"savefig\(\"([\w-]+\.png)\"")
DATA = re.compile(r"(?<=np\.load\(\")[\w-]+\.npz|\bexamples/[\w-]+\.csv\b")
NUMBER = r"(?:(?<![\w.])[-+])?\d+(?:\.\d*)?(?:e[-+]?\d+)?"
# The running line of the shell, which slow machines see.
RUNNING = re.compile(r"^[\d,]+ rows, ([\d,]+ a second|\d+%, ).*\n", re.MULTILINE)


def blocks(text: str) -> list[re.Match[str]]:
    """The blocks of a page that run here, in order."""
    return [
        match
        for match in BLOCK.finditer(text)
        if match["mark"] != "not run"
        and not (match["mark"] == "needs" and missing(match["said"]))
    ]


def missing(packages: str) -> str | None:
    """The first of these packages that is not installed."""
    names = packages.split(", ")
    return next((name for name in names if not importlib.util.find_spec(name)), None)


def run(page: Path, *programs: Path) -> Iterator[tuple[re.Match[str], str]]:
    """Run the blocks of a page in the present folder; yield each with what it prints.

    Shell blocks look for commands in the folders `programs` first.
    """
    text, space = page.read_text(encoding="utf-8"), {"__name__": "__main__"}
    for name in set(DATA.findall(text)):
        Path(name).parent.mkdir(exist_ok=True)
        shutil.copy(page.parent / name, name)
    folders = [*map(str, programs), str(Path(sys.executable).parent)]
    environment = os.environ | {
        "PATH": os.pathsep.join([*folders, os.environ["PATH"]]),
        "COLUMNS": "100",
    }
    for match in blocks(text):
        part = "setup" if match["setup"] is not None else "code"
        if match["mark"] == "file":
            Path(match["said"]).write_text(match["code"], encoding="utf-8")
        elif match["kind"] == "sh":
            done = subprocess.run(
                ["bash", "-euc", match["code"]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=600, env=environment,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(
                    f"{page.name}: exit code {done.returncode}\n{done.stdout}"
                )
            yield match, RUNNING.sub("", done.stdout)
        else:
            line = match.string.count("\n", 0, match.start(part))
            code = compile("\n" * line + match[part], page.name, "exec")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, space)
            yield match, printed.getvalue()


def agree(shown: str, printed: str) -> bool:
    """Whether a block of output shows what was printed."""
    pattern, numbers = r"\s*", []
    for part in re.findall(rf"\.\.\.|{NUMBER}|\s+|.", shown.strip()):
        if part == "...":
            pattern += ".*?"
        elif re.fullmatch(NUMBER, part) and re.search("[.e]", part):
            pattern += f"({NUMBER})"
            numbers.append(part)
        elif re.fullmatch(NUMBER, part):  # whole numbers are equal
            pattern += rf"(?<![\d.]){re.escape(part)}(?!\d|\.\d|e[-+\d])"
        else:
            pattern += r"\s+" if part.isspace() else re.escape(part)
    match = re.fullmatch(rf"{pattern}\s*", printed, re.DOTALL)
    return match is not None and all(map(near, numbers, match.groups()))


def near(shown: str, printed: str) -> bool:
    """Whether a number is close to the one shown."""
    digits = re.fullmatch(r"[-+]?\d+\.?(\d*)(?:e([-+]?\d+))?", shown)
    assert digits is not None
    last = 10.0 ** (int(digits[2] or 0) - max(1, len(digits[1])))
    error = abs(float(printed) - float(shown))
    return error <= max(1.01 * last, 0.01 * abs(float(shown)))


def written(page: Path) -> str:
    """The page with the outputs of its blocks as they print them now, where that differs from what it shows."""
    text, end = "", 0
    for match, printed in run(page):
        if not agree(match["shown"] or "", printed):
            text += match.string[end : match.end("code")] + "```"
            lines = (wrapped(line) for line in printed.strip("\n").split("\n"))
            if printed.strip():
                text += "\n\n```text\n{}\n```".format("\n".join(lines))
            end = match.end()
    return text + page.read_text(encoding="utf-8")[end:]


def wrapped(line: str) -> str:
    """A line of output in the width of a page."""
    return textwrap.fill(line, 88, drop_whitespace=len(line) > 88)


def notebook(text: str) -> dict[str, Any]:
    """The page as a Jupyter notebook; links to other pages become plain words, and figures the output of their code."""
    cells: list[dict[str, Any]] = []
    end = 0
    for match in blocks(text):
        cells += prose(text[end : match.start()])
        end = match.end()
        outputs: list[dict[str, Any]] = []
        if match["shown"]:
            outputs.append(
                {"output_type": "stream", "name": "stdout", "text": match["shown"]}
            )
        for name in FIGURE.findall(match["code"]):
            picture = base64.b64encode((DOCS / "tutorials" / name).read_bytes())
            data = {"image/png": picture.decode()}
            outputs.append(
                {"output_type": "display_data", "metadata": {}, "data": data}
            )
        code: dict[str, Any] = {
            "cell_type": "code",
            "metadata": {},
            "execution_count": None,
        }
        cells.append(code | {"outputs": outputs, "source": match["code"].strip()})
    cells += prose(text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 4,
    }


def prose(text: str) -> list[dict[str, Any]]:
    """A cell of Markdown, if there is anything to read."""
    text = re.sub(r"^(!\[.*\]\(.*\)|.*\.ipynb\).*)\n+", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).strip()
    return [{"cell_type": "markdown", "metadata": {}, "source": text}] if text else []


def write_gallery() -> None:
    """Run the programs whose output the gallery shows, and write their output and figures, one by one."""
    text = GALLERY.read_text(encoding="utf-8")
    for match in PROGRAM.finditer(text):
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, str(DOCS.parent / match[1])]
            done = subprocess.run(
                program, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
            )
            for figure in Path(folder).glob("*.png"):
                if f"](gallery/{figure.name})" in text:
                    shutil.copyfile(figure, DOCS / "gallery" / figure.name)
        if not agree(match[2], done.stdout):
            shown = match[0].replace(f"```text\n{match[2]}", f"```text\n{done.stdout}")
            now = GALLERY.read_text(encoding="utf-8").replace(match[0], shown)
            GALLERY.write_text(now, encoding="utf-8")


def write(page: Path) -> None:
    """Run a page and write its outputs, and of a tutorial its figures and its notebook."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.path.insert(0, folder)
        text = written(page)
        sys.path.remove(folder)
        for figure in Path(folder).glob("*.png"):
            if page.parent.name == "tutorials":
                shutil.copyfile(figure, page.with_name(figure.name))
    page.write_text(text, encoding="utf-8")
    if f"({page.stem}.ipynb)" in text:
        told = json.dumps(notebook(text), indent=1, ensure_ascii=False)
        page.with_suffix(".ipynb").write_text(told + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ |= {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    tutorials = sorted((DOCS / "tutorials").glob("*.md"))
    named = [Path(name).resolve() for name in sys.argv[1:]]
    for page in named or [*tutorials, GALLERY]:
        print(page.name)
        write_gallery() if page == GALLERY else write(page)
