"""Which names with an underscore does a file of the package read that another file defines?

    python tests/private_names.py

Looks at what trains: heads, observe and the files beside them. Prints each name with the file that reads it and the
files that define it, and how many there are. A name that the reading file defines too may be its own, and is left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src" / "sepsa"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a file defines: functions, classes, variables, and attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def read(tree: ast.AST) -> Iterator[str]:
    """The private names that a file reads or imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


class Reading(NamedTuple):
    """A name, the file that reads it, and those that define it."""

    name: str
    path: Path
    makers: list[Path]


def readings() -> list[Reading]:
    """All of them, by the reading file."""
    trees = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    makers: dict[str, list[Path]] = {}
    for path, tree in trees.items():
        for name in set(filter(is_private, defined(tree))):
            makers.setdefault(name, []).append(path)
    return [
        Reading(name, path, makers[name])
        for path, tree in trees.items()
        for name in sorted(set(filter(is_private, read(tree))) & set(makers))
        if path not in makers[name]
    ]


def main() -> None:
    found = readings()
    for name, path, makers in found:
        print(f"{path} reads {name} of {', '.join(map(str, makers))}")
    print(f"{len(found)} names with an underscore that another file reads")


if __name__ == "__main__":
    main()
