"""Print the page of files: those of the package and of the paper, with the first sentence of each docstring.

    python docs/map.py

The site's build adds it as map.md. A folder is described by its `__init__.py`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (ROOT / "src" / "sepsa", ROOT / "reproduction")
HEAD = """# The files of the project

Where is what? Each file with the first sentence of its docstring.

"""
COLUMN = 34  # where the descriptions begin
WIDTH = 88


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


def page() -> str:
    """Return the page with the present files."""
    trees = ("\n".join(tree(folder)) for folder in FOLDERS)
    return HEAD + "\n\n".join(f"```\n{files}\n```" for files in trees) + "\n"


if __name__ == "__main__":
    print(page(), end="")
