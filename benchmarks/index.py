"""The tables of benchmarks/README.md: each script with its question, its JSON files, and the pages that quote them.

python benchmarks/index.py      # writes them
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SUBJECTS = {
    "heads": "Head solvers",
    "loops": "Training loops in PyTorch",
    "streams": "Streams",
    "tables": "Tables in memory",
    "forecast": "Forecasts",
    "reliability": "Reliability, installation and tests",
}
BEGIN, END = "<!-- written by benchmarks/index.py -->", "<!-- end -->"


def question(script: Path) -> str:
    """The first paragraph of its docstring."""
    told = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return " ".join(told.split("\n\n")[0].split())


@cache
def pages() -> dict[str, str]:
    """The text of each page, by its name."""
    names = ("README.md", "CONTRIBUTING.md", "reproduction/README.md")
    files = [*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))]
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def row(script: Path) -> str:
    """The row of a script, which writes the JSON files that begin with its name, or that it names and no other has."""
    text, folder = script.read_text(encoding="utf-8"), script.parent
    files = [
        file.name
        for file in sorted(folder.glob("*.json"))
        if re.fullmatch(rf"{script.stem}(-.*)?", file.stem)
        or (f'"{file.stem}"' in text and not file.with_suffix(".py").exists())
    ]
    names = "|".join(re.escape(f"benchmarks/{folder.name}/{name}") for name in (script.name, *files))
    quoted = [name for name, page in pages().items() if re.search(names, page)]
    results = ", ".join(f"[{Path(name).stem}]({folder.name}/{name})" for name in files)
    told = ", ".join(f"[{name}](../{name})" for name in quoted)
    return f"| [{script.stem}]({folder.name}/{script.name}) | {question(script)} | {results or '-'} | {told or '-'} |"


def tables() -> str:
    """The tables, a section for each subject."""
    parts = []
    for folder, title in SUBJECTS.items():
        rows = [row(script) for script in sorted((HERE / folder).glob("*.py"))]
        head = [f"## {title}\n", "| script | question | JSON | quoted by |", "|---|---|---|---|"]
        parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts)


def written(text: str) -> str:
    """The page with the tables as they are now."""
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return f"{text[:start]}\n\n{tables()}\n\n{text[end:]}"


if __name__ == "__main__":
    page = HERE / "README.md"
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
