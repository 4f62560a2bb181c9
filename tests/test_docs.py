"""The site builds, without a dead link; blocks of code print what their page shows; every result has a JSON.

docs/pages.py runs a page, says what agrees, and writes the outputs into a page.
"""

import html
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pages
import pytest
import yaml

from sepsa.shell import cli
from sepsa.shell.options import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "reproduction" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page):
    return page.relative_to(ROOT).as_posix()


RUN = [
    page for page in PAGES if page.parent.name != "tutorials" and pages.blocks(page.read_text("utf-8"))
]  # those: test_tutorials.py


@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_code_on_a_page_prints_what_the_page_shows(page, tmp_path, monkeypatch, preloaded_bin):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # The commands of the README start as a reader starts them.
    for match, printed in pages.run(page, *([] if name(page) == "README.md" else [preloaded_bin])):
        line = match.string.count("\n", 0, match.end()) + 1
        shows = pages.agree(match["shown"] or "", printed)
        assert shows, f"{name(page)}, line {line}: a ```text block must show\n{printed}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("error 0.330\n", "error 0.331\n", True),
        ("error 0.330\n", "error 0.335\n", False),
        ("error 45.6\n", "error 45.9\n", True),
        ("2000 rows\n", "2001 rows\n", False),
        ("a\n...\nz 1.5e-03\n", "a\nb 7\nc\nz 0.0015\n", True),
        ("a ... z\n", "a b\n", False),
        ("...\n6 ahead 1.34\n", "3 ahead 0.90\n6 ahead 1.337\n", True),
        ("... 12 rows\n", "at 112 rows\n", False),
        ("12 rows\n", "12.5 rows\n", False),
        ("[[1.0,  2.5]]\n", "[[1.0, 2.5]]\n", True),
        ("", "", True),
        ("", "a block that prints\n", False),
        ("text that nothing prints\n", "", False),
    ],
)
def test_output_agrees_up_to_rounding(shown, printed, same):
    assert pages.agree(shown, printed) is same


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_not_run_has_a_reason_and_no_comment_is_misspelt(page):
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^ *```(\w*)$", text, flags=re.MULTILINE)
    found = [match["kind"] for match in pages.BLOCK.finditer(text) if match["kind"]]
    assert found == [kind for kind in fences if kind in ("python", "sh")], "an indented block, which no test runs"
    assert set(fences[::2]) <= {"", "python", "sh", "diff", "json", "text"}, "a block in a language that no test runs"
    shown = [match for match in pages.BLOCK.finditer(text) if match["shown"] is not None and match["mark"] != "not run"]
    if name(page) != "docs/gallery.md":  # which shows what programs print: tests/test_examples.py
        assert len(shown) == fences.count("text"), "output that is not directly below the block that prints it"
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE):
        assert max(map(len, block.splitlines())) <= 88, f"wider than the column of a screen of 1,280 pixels:\n{block}"
    assert set(fences[1::2]) <= {""}
    for mark in re.finditer(r"<!--\s*(.*?)-->", text, flags=re.DOTALL):
        known = r"(setup\n|not run: \w{3,}|needs: \w+|file: \w+\.py|results: |[\w ]+ (begin|end)|written by)"
        assert re.match(known, mark[1]), f"no test reads this comment: {mark[0]}"


def titles(entries):
    """Yield the title and the file of every page that mkdocs.yml lists."""
    for entry in entries:
        ((title, page),) = entry.items()
        if isinstance(page, str):
            yield title, page
        else:
            yield from titles(page)


def test_a_page_has_the_title_that_the_navigation_gives_it():
    nav = list(titles(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert len(nav) > 10
    for title, page in nav:
        if page in ("map.md", "parts.md"):  # generated: tests/test_project.py
            continue
        source = ROOT / (f"{page[:-3].upper()}.md" if page in ("changelog.md", "contributing.md") else f"docs/{page}")
        assert source.read_text(encoding="utf-8").startswith(f"# {title}\n"), page


def test_pages_link_to_the_repository_that_pyproject_names(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    config = SimpleNamespace(repo_url=None)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert hooks.on_config(config).repo_url is None
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://host/owner/name"\n')
    assert vars(hooks.on_config(config)) == {
        "repo_url": "https://host/owner/name/", "repo_name": "owner/name", "edit_uri": "edit/main/docs/"
    }  # fmt: skip
    # The theme's script would ask the host for the number of stars.
    assert "data-md-component" not in hooks.on_post_page('<a class="md-source" data-md-component="source">')


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; a strict build refuses links and anchors that lead nowhere."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_a_page_loads_nothing_from_the_network_and_shows_its_tables(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*?(?:src|href)="?([^" >]+)', text)
        assert not [url for url in loaded if re.match(r"(https?:)?//", url)], page.name
        prose = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        assert "|---" not in prose, f"{page.name} shows the source of a table: leave a line free before it"


def test_the_site_has_the_linked_programs_as_pages_and_no_file_of_the_build(site):
    linked = {
        name for page in PAGES for name in re.findall(r"\]\([./]*(examples/[\w/]+)\.py\)", page.read_text("utf-8"))
    }
    assert len(linked) > 10
    assert all((site / f"{name}.html").is_file() for name in linked)
    assert (site / "play" / "play.js").is_file()  # the only link that is HTML
    assert not [
        path for path in site.rglob("*") if path.suffix in (".py", ".pyc", ".toml") or path.name == "__pycache__"
    ]


def test_the_page_on_the_command_line_has_every_option(site):
    options = {flag for name, kind in COMMANDS.items() for flag in cli.Parser(name, kind).flags}
    page = (site / "api" / "cli.html").read_text("utf-8")
    assert len(options) > 30
    assert not {option for option in options if f"<code>{option}</code>: " not in page}


@pytest.mark.parametrize(
    ("page", "sentence", "argument", "paragraph"),
    [
        ("sepsa", "Train a model's linear head", "model,", "Choose it wherever the last layer"),
        ("stream", "Regress tables and streams", 'hidden_layer_sizes="auto",', "Choose it where rows come"),
    ],
)
def test_the_reference_has_parameters_first_and_a_line_for_each_argument(site, page, sentence, argument, paragraph):
    source = (site / "api" / f"{page}.html").read_text("utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", source))
    assert 0 < text.index(sentence) < text.index("Parameters:") < text.index(paragraph)
    assert re.search(rf"\(\s*\n\s+{re.escape(argument)}\n", text)
    assert "doc-label-" not in source  # as "class-attribute" and "property"


# ---------------------------------------------------------------------- numbers


@pytest.fixture(scope="module")
def numbers(preloaded_bin):
    """benchmarks/check_numbers.py"""
    spec = importlib.util.spec_from_file_location("check_numbers", ROOT / "benchmarks" / "check_numbers.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PYTHON = preloaded_bin / "python"
    return module


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_result_stands_in_a_committed_json(numbers, page):
    assert not list(numbers.unfounded(name(page), page.read_text(encoding="utf-8")))


def test_a_result_without_a_source_is_found(numbers):
    (told,) = numbers.unfounded("docs/cost.md", "# Cost\n\nA step takes 1.11 times as long.\n")
    assert "docs/cost.md:3: 1.11 names no JSON" in told


def test_a_row_is_rewritten_where_its_script_prints_one_row_of_that_name(numbers, monkeypatch):
    head = ("| method | loss |", "|---|---|")
    told = ("to zero", *head, "| AdamW | 0.9 |", "| Muon | 0.8 |", "", "to a tenth", *head, "| AdamW | 0.7 |")
    monkeypatch.setattr(numbers, "output", lambda source: told)
    page = "# GPT\n\n`benchmarks/loops/language.py`\n\n" + "\n".join([*head, "| AdamW | 0.9 |", "| Muon | 0.1 |"])
    assert numbers.rewritten(page) == page.replace("0.1", "0.8")


def test_nearly_every_changed_digit_on_the_pages_is_found(numbers):
    """Raise each digit by one; a change is missed where it gives another number of the same row, column and JSON."""
    changed = missed = 0
    for page in PAGES:
        computed = numbers.derived(name(page))
        for result in numbers.results(name(page), page.read_text(encoding="utf-8")):
            if any(number in numbers.CONSTANTS.get(name(page), {}) for number in result.numbers):
                continue
            known = numbers.known(result)
            for n, number in enumerate(result.numbers):
                for k in (k for k, digit in enumerate(number) if digit.isdigit()):
                    wrong = f"{number[:k]}{(int(number[k]) + 1) % 10}{number[k + 1 :]}"
                    other = result._replace(numbers=(*result.numbers[:n], wrong, *result.numbers[n + 1 :]))
                    changed += 1
                    missed += numbers.stands(other, known) or numbers.stands(other, computed)
    assert changed > 500
    assert missed < 0.08 * changed


def test_every_constant_is_still_on_its_page(numbers):
    for page, constants in numbers.CONSTANTS.items():
        stated = {n for r in numbers.results(page, (ROOT / page).read_text(encoding="utf-8")) for n in r.numbers}
        assert not set(constants) - stated, f"{page} no longer states these constants"


def test_the_generated_tables_are_those_of_the_records():
    from reproduction import report, table3

    page = (ROOT / "reproduction" / "README.md").read_text(encoding="utf-8")
    block = page[page.index(report.BEGIN) + len(report.BEGIN) : page.index(report.END)].strip("\n")
    records = table3.read(ROOT / "results")
    gaps = report.missing(ROOT / "results", records)
    rows, images = table3.table3(records), table3.table3(records, report.IMAGES)
    told = report.markdown(report.tables(rows, images), report.differences(rows, images), gaps, "../results")
    assert block == told.strip("\n")


def test_generated_tables_are_what_the_script_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prequential.py", "--table"])
    monkeypatch.delitem(sys.modules, "benchmarks.streams.prequential", raising=False)  # another test may import it
    runpy.run_module("benchmarks.streams.prequential", run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    for page in ("docs/benchmarks/streams.md", "docs/how-to/choose.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for part in re.findall("<!-- prequential begin -->(.*?)<!-- prequential end -->", text, re.DOTALL):
            lines = [line for line in part.splitlines() if line.startswith("|")]
            assert lines
            assert set(lines) <= set(printed)
