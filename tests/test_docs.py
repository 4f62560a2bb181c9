"""The site builds without a warning, and every block of code on it and in the README runs.

A page's ```python blocks run in order, in one namespace, in an empty folder; so do its ```sh blocks. Comments steer that:
    <!-- setup ... -->          Python that readers need not see, run in its place
    <!-- file: name.py -->      the next block is written to that file, for later blocks to import
    <!-- not run: reason -->    the next block needs what a test machine may lack, or shows what not to do
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Pages whose blocks another test runs, because it asks more of them.
ELSEWHERE = {"docs/solvers.md": "tests/test_testing.py"}

BLOCK = re.compile(
    r"<!--\s*setup\n(?P<setup>.*?)-->"
    r"|(?:<!--\s*(?P<mark>not run|file):\s*(?P<said>[^\n]*?)\s*-->\n+)?^```(?P<kind>python|sh)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


def name(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page):
    """What is to be run, in order: the language, the file it goes to or None, and the code at its own line numbers."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match["mark"] == "not run":
            continue
        part = "setup" if match["setup"] is not None else "code"
        code = "\n" * text.count("\n", 0, match.start(part)) + match[part]
        yield match["kind"] or "python", match["said"], code


RUN = [page for page in PAGES if name(page) not in ELSEWHERE and any(blocks(page))]


@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_code_on_a_page_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    space = {"__name__": "__main__"}
    for kind, file, code in blocks(page):
        if file:
            Path(file).write_text(code.lstrip("\n"), encoding="utf-8")
        elif kind == "sh":
            done = subprocess.run(["bash", "-euc", code], capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr
        else:
            exec(compile(code, name(page), "exec"), space)


def test_every_page_that_another_test_runs_is_there():
    assert all((ROOT / page).is_file() and (ROOT / test).is_file() for page, test in ELSEWHERE.items())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_not_run_has_a_reason_and_no_comment_is_misspelt(page):
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)$", text, flags=re.MULTILINE)
    assert set(fences[::2]) <= {"", "python", "sh", "diff", "json"}, "a block in a language that no test runs"
    assert set(fences[1::2]) <= {""}
    for mark in re.finditer(r"<!--\s*(.*?)-->", text, flags=re.DOTALL):
        known = re.match(r"(setup\n|not run: \w{3,}|file: \w+\.py|results: |[\w ]+ (begin|end)|written by)", mark[1])
        assert known, f"no test reads this comment: {mark[0]}"


def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    assert not done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        # A reader without a network sees the same page: what it loads lies beside it.
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*?(?:src|href)="?([^" >]+)', page.read_text("utf-8"))
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], page.name
