"""Workflows, templates, versions, linters, the list of commands and the map of files agree with the code."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import portable
import sepsa
from sepsa.compiled import library
from sepsa.learner.experts import EXPERTS

ROOT = Path(__file__).parents[1]
SCHEMAS = {  # schemas that check-jsonschema includes: nothing is downloaded
    "github-workflows": sorted((ROOT / ".github" / "workflows").glob("*.yml")),
    "github-actions": sorted((ROOT / ".github" / "actions").glob("*/action.yml")),
    "github-issue-config": [ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"],
    "github-issue-forms": [ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("bug", "feature")],
    "citation-file-format": [ROOT / "CITATION.cff"],
}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def pins(name):
    """Return the version of each pinned package."""
    lines = re.findall(r"^([\w.-]+)==([^\s;]+)", read(name), flags=re.MULTILINE)
    return {package.lower().replace("_", "-"): version for package, version in lines}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_for_others_keep_their_schema(schema):
    assert SCHEMAS[schema]
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, SCHEMAS[schema])],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_cache_of_kernels_has_the_key_of_their_sources():
    key = re.search(r"hashFiles\((.*?)\)", read(".github/actions/kernels/action.yml"))[1]
    sources = [f"src/sepsa/{name}" if name.endswith(".py") else f"src/sepsa/{name}/*.py" for name in library.SOURCES]
    assert re.findall(r"'(.*?)'", key) == ["constraints.txt", *sources]


def test_one_version_everywhere():
    assert f"version: {sepsa.__version__}\n" in read("CITATION.cff")


def test_the_oldest_versions_are_those_that_are_promised():
    promised = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', read("pyproject.toml")))
    for package, version in pins("oldest.txt").items():
        given = [int(part) for part in version.split(".")]
        least = [int(part) for part in promised[package].split(".")]
        assert given[: len(least)] == least, package


def test_the_page_on_versions_says_the_same():
    rows = re.findall(
        r"^\| ([\w-]+).*?\| `([\d.]+)` \| `([\d.]+)` \|$", read("docs/project/policy.md"), flags=re.MULTILINE
    )
    assert len(rows) == 6
    oldest, newest = pins("oldest.txt"), pins("constraints.txt")
    for package, old, new in rows:
        if package == "Python":
            assert f'requires-python = ">={old}"' in read("pyproject.toml")
            continue
        assert newest[package.lower()].startswith(f"{new}.")
        if package == "River":  # needs a newer numpy than the oldest, so it is not tested with that
            assert f'"river>={old}"' in read("pyproject.toml")
        else:
            assert oldest[package.lower()].startswith(f"{old}.")


def test_the_lock_holds_what_the_constraints_say():
    locked, wanted = pins("requirements.lock"), pins("constraints.txt")
    optional = {"jax", "padasip", "vowpalwabbit"}  # the extra bench, which the tests do not need
    assert {package: locked.get(package) for package in wanted.keys() - optional} == {
        package: version for package, version in wanted.items() if package not in optional
    }


def test_a_published_package_links_to_its_repository(tmp_path):
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, tmp_path)
    command = [sys.executable, ROOT / ".ci" / "links", "https://github.com/Owner/name/", tmp_path]
    subprocess.run(command, check=True, timeout=600)
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    assert urls["Repository"] == "https://github.com/Owner/name"
    assert urls["Documentation"] == "https://owner.github.io/name/"
    links = re.findall(r"\]\((.*?)\)", (tmp_path / "README.md").read_text("utf-8"))
    assert "https://github.com/Owner/name/raw/main/docs/first.png" in links
    assert all(link.startswith(("https://", "#")) for link in links)
    again = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert again.returncode == 1
    assert "has project.urls already" in again.stderr


def test_the_wheel_is_tried_with_code_that_pages_show():
    wheel = runpy.run_path(str(ROOT / ".ci" / "wheel"))
    for title in {what for shown in wheel["SHOWN"].values() for what in shown} - set(wheel["COMMANDS"]):
        assert "sepsa" in wheel["section"](title)[1], title


def test_the_page_on_the_command_line_lists_every_command():
    from sepsa.shell.options import COMMANDS

    listed = re.findall(r"^\| `sepsa (\w+)` \|", read("docs/api/cli.md"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


def test_pre_commit_runs_the_commands_of_make_lint():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", read("Makefile"), flags=re.MULTILINE)[1]
    commands = [line.strip() for line in recipe.replace("$(BIN)", ".venv/bin").splitlines()]
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [hook["entry"] for hook in repository["hooks"]] == commands


def test_the_files_of_make_check_and_make_portable_exist():
    slow = re.search(r"^SLOW := ((?:.*\\\n)*.*)$", read("Makefile"), flags=re.MULTILINE)[1]
    files = {*(f"tests/{file}" for file in slow.replace("\\\n", " ").split()), *portable.NUMERICAL, *portable.SHORT}
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file.partition("::")[0]).exists()] == []


def test_every_room_of_the_package_has_a_folder_of_tests():
    rooms = {path.parent.name for path in (ROOT / "src" / "sepsa").glob("*/__init__.py")}
    assert len(rooms) > 8
    assert [room for room in rooms if not list((ROOT / "tests" / room).glob("test_*.py"))] == []


def test_the_index_of_benchmarks_has_every_script_and_json():
    from benchmarks import index

    page = read("benchmarks/README.md")
    folders = {path.name for path in (ROOT / "benchmarks").iterdir() if any(path.glob("*.py"))}
    assert folders == set(index.SUBJECTS)
    links = set(re.findall(r"\]\(([\w/.-]+)\)", page))
    assert {link for link in links if not (ROOT / "benchmarks" / link).exists()} == set()
    files = [path for folder in folders for path in (ROOT / "benchmarks" / folder).iterdir()]
    listed = [path for path in files if path.suffix in (".py", ".json") and path.stem != "vocabulary"]
    assert len(listed) > 80
    assert {path.relative_to(ROOT / "benchmarks").as_posix() for path in listed} <= links, "run benchmarks/index.py"
    rows = [index.row(path).split("|")[2] for path in listed if path.suffix == ".py"]
    assert not [row for row in rows if row not in page], "run benchmarks/index.py"


def test_the_map_of_files_is_that_of_the_docstrings():
    page = runpy.run_path(str(ROOT / "docs" / "map.py"))["page"]()
    assert page.startswith("# The files of the project\n")  # the title in the navigation
    described = re.findall(r"^ +(\w+\.py) +\S", page, flags=re.MULTILINE)
    files = [*(ROOT / "src" / "sepsa").rglob("*.py"), *(ROOT / "reproduction").rglob("*.py")]
    assert sorted(described) == sorted(file.name for file in files if file.name != "__init__.py")
    assert re.search(r"^  validation\.py +Checks of what users give and have installed$", page, flags=re.MULTILINE)


def test_the_page_of_parts_has_what_files_of_learners_hold():
    page = runpy.run_path(str(ROOT / "docs" / "parts.py"))["page"]()
    assert page.startswith("# What a learner stores\n")  # the title in the navigation
    for expert in EXPERTS:
        assert (f"### {expert.name}\n" in page) == any(part.kept for part in expert.group.parts)
    assert "| `ORDER` | uint32 | room | 0 | 0 … room - 1 |  |" in page
