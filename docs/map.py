"""Print the tree of src/sepsa with the first sentence of each docstring: the map in CONTRIBUTING.md.

    python docs/map.py [--write]

`--write` replaces the block between the two markers in CONTRIBUTING.md. A folder is described by its `__init__.py`.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- map begin -->\n```\n", "```\n<!-- map end -->"
COLUMN = 34  # where the descriptions begin
WIDTH = 120


def description(file: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0].rstrip(".:")


def entry(depth: int, name: str, text: str) -> str:
    """Return one entry of the tree, wrapped at the page's width."""
    label = "  " * depth + name
    start, further = f"{label:<{COLUMN}}", " " * COLUMN
    return (
        textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=further)
        or label
    )


def tree(folder: Path, depth: int = 0) -> Iterator[str]:
    """Yield the entries of a package: its own, its modules in alphabetical order, then its subpackages."""
    name = folder.relative_to(ROOT).as_posix() if depth == 0 else folder.name
    yield entry(depth, f"{name}/", description(folder / "__init__.py"))
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            yield entry(depth + 1, file.name, description(file))
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from tree(package, depth + 1)


def written(page: str) -> str:
    """Return the page with the map of the present files between its markers."""
    head, rest = page.split(BEGIN)
    return (
        head
        + BEGIN
        + "\n".join(tree(ROOT / "src" / "sepsa"))
        + "\n"
        + END
        + rest.split(END, 1)[1]
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print("\n".join(tree(ROOT / "src" / "sepsa")))
