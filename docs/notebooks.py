"""The tutorials: run a page's code, write what it prints and draws into the page, and make a notebook of the page.

    python docs/notebooks.py                  # every page of docs/tutorials/, then the gallery
    python docs/notebooks.py drift gallery    # these pages

A page is Markdown. Its ```python blocks run in one namespace and its ```sh blocks in bash, in order, in an empty
folder with the file that np.load reads. The ```text block behind one of them holds what that block printed, and the
files that a page loads or saves are beside it. A page that links to the notebook of its own name gets one, with the
same code, output and figures.
docs/gallery.md shows the programs of examples/: a ```text block holds what the program linked before it prints.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent / "tutorials"
BLOCK = re.compile(
    r"^```(?P<kind>python|sh)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
PROGRAM = re.compile(
    r"\]\(\.\./(examples/[\w/]+\.py)\)(?:(?!\]\(\.\./examples/).)*?^```text\n(.*?)^```\n",
    re.DOTALL | re.MULTILINE,
)
FIGURE = re.compile(r"savefig\(\"([\w-]+\.png)\"")
DATA = re.compile(r"np\.load\(\"([\w-]+\.npz)\"")
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
# Lines of the shell that appear on slow machines, or where kernels are not built, only.
SLOW = re.compile(
    r"^(sepsa: .* numba compiles |[\d,]+ rows, ([\d,]+ a second|\d+%, )).*\n",
    re.MULTILINE,
)
CLOSE = 0.1  # relative difference of two printed numbers that versions and processors may cause


class Cell(NamedTuple):
    """A piece of a page: kind "markdown", "python" or "sh", its source, and the output that the page shows."""

    kind: str
    source: str
    output: str = ""


def cells(text: str) -> Iterator[Cell]:
    """The pieces of a page in order."""
    end = 0
    for block in BLOCK.finditer(text):
        yield Cell("markdown", text[end : block.start()])
        yield Cell(block["kind"], block["code"], block["output"] or "")
        end = block.end()
    yield Cell("markdown", text[end:])


def run(page: Path, *programs: Path) -> list[str]:
    """Run the blocks of a page in the current folder; return what each printed.

    Shell blocks look for commands in the folders `programs` first. Data that the page loads is beside it.
    """
    printed, namespace = [], {"__name__": "__main__"}
    folders = [
        *map(str, programs),
        str(Path(sys.executable).parent),
        os.environ["PATH"],
    ]
    text = page.read_text(encoding="utf-8")
    for name in DATA.findall(text):
        shutil.copy(page.with_name(name), name)
    for cell in cells(text):
        if cell.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(cell.source, page.name, "exec"), namespace)
            printed.append(out.getvalue())
        elif cell.kind == "sh":
            done = subprocess.run(
                ["bash", "-euc", cell.source], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=600, env=os.environ | {"PATH": os.pathsep.join(folders), "COLUMNS": "100"},
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(
                    f"{page.name}: exit code {done.returncode}\n{done.stdout}"
                )
            printed.append(SLOW.sub("", done.stdout))
    return printed


def agree(printed: str, shown: str) -> bool:
    """Whether the output that a page shows is what was printed: equal words, close numbers; "..." is any text.

    White space counts as one space, so that a page may wrap long lines.
    """
    printed, shown = (" ".join(text.split()) for text in (printed, shown))
    pieces = [
        piece for piece in re.split(rf"({NUMBER.pattern}|\.\.\.)", shown) if piece
    ]
    pattern = "".join(
        ".*"
        if piece == "..."
        else f"({NUMBER.pattern})"
        if NUMBER.fullmatch(piece)
        else re.escape(piece)
        for piece in pieces
    )
    found = re.fullmatch(pattern, printed)
    numbers = [piece for piece in pieces if NUMBER.fullmatch(piece)]
    return found is not None and all(map(_close, found.groups(), numbers))


def _close(one: str, other: str) -> bool:
    a, b = (float(number.replace(",", "")) for number in (one, other))
    last = 2 * 10.0 ** -len(other.partition(".")[2])  # two units of the last digit
    return math.isclose(a, b, rel_tol=CLOSE, abs_tol=last if "." in other else 0.0)


def with_outputs(text: str, printed: list[str]) -> str:
    """The page with these outputs; one that agrees with what the page shows already stays as it is."""
    outputs = iter(printed)

    def block(match: re.Match[str]) -> str:
        new, old = next(outputs), match["output"] or ""
        shown = (
            old
            if agree(new, old)
            else "".join(f"{line.rstrip()}\n" for line in new.strip("\n").split("\n"))
        )
        code = f"```{match['kind']}\n{match['code']}```\n"
        return f"{code}\n```text\n{shown}```\n" if shown.strip() else code

    return BLOCK.sub(block, text)


def notebook(text: str) -> dict[str, Any]:
    """The page as a Jupyter notebook; links to other pages become plain words, and figures the output of their code."""
    content: list[dict[str, Any]] = []
    for cell in cells(text):
        if cell.kind == "markdown":
            prose = re.sub(
                r"^(!\[.*\]\(.*\)|.*\.ipynb\).*)\n+",
                "",
                cell.source,
                flags=re.MULTILINE,
            )
            prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose).strip()
            if prose:
                content.append(
                    {"cell_type": "markdown", "metadata": {}, "source": prose}
                )
            continue
        outputs: list[dict[str, Any]] = []
        if cell.output:
            outputs.append(
                {"output_type": "stream", "name": "stdout", "text": cell.output}
            )
        for name in FIGURE.findall(cell.source):
            picture = base64.b64encode((FOLDER / name).read_bytes()).decode()
            outputs.append(
                {
                    "output_type": "display_data",
                    "metadata": {},
                    "data": {"image/png": picture},
                }
            )
        code = {
            "cell_type": "code",
            "metadata": {},
            "execution_count": None,
            "outputs": outputs,
        }
        content.append(code | {"source": cell.source.strip()})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": content,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 4,
    }


def write_gallery() -> None:
    """Run the programs whose output docs/gallery.md shows, and write their output and figures, one by one."""
    page = FOLDER.parent / "gallery.md"
    text = page.read_text(encoding="utf-8")
    for match in PROGRAM.finditer(text):
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, FOLDER.parents[1] / match[1]]
            done = subprocess.run(
                program, cwd=folder, stdout=subprocess.PIPE, text=True, check=True
            )
            for figure in Path(folder).glob("*.png"):
                if f"](gallery/{figure.name})" in text:
                    shutil.copyfile(figure, page.with_name("gallery") / figure.name)
        if not agree(done.stdout, match[2]):
            shown = match[0].replace(f"```text\n{match[2]}", f"```text\n{done.stdout}")
            page.write_text(
                page.read_text(encoding="utf-8").replace(match[0], shown),
                encoding="utf-8",
            )


def write(page: Path) -> None:
    """Run the page and write its outputs, its figures and its notebook."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        new = with_outputs(text, run(page))
        for figure in Path(folder).glob("*.png"):
            shutil.copyfile(figure, FOLDER / figure.name)
        os.chdir(FOLDER)
    page.write_text(new, encoding="utf-8")
    if f"({page.stem}.ipynb)" in new:
        told = json.dumps(notebook(new), indent=1, ensure_ascii=False)
        page.with_suffix(".ipynb").write_text(told + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ |= {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    for name in sys.argv[1:] or [
        *sorted(page.stem for page in FOLDER.glob("*.md")),
        "gallery",
    ]:
        print(name)
        write_gallery() if name == "gallery" else write(FOLDER / f"{name}.md")
