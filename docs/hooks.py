"""Hooks of mkdocs: add the changelog, CONTRIBUTING.md and linked files from outside docs/ to the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
# A link or picture that leaves docs/: from a page in docs/, or in a folder of it.
OUTSIDE = re.compile(r"\]\((?:\.\./)+((?:results|benchmarks|examples)/[\w./-]+)\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the files that pages link to, so that a number and its JSON are on one site."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    linked = set()
    for page in files.documentation_pages():
        linked.update(OUTSIDE.findall(page.content_string))
    for name in sorted(linked):
        if (ROOT / name).is_file():  # a missing file stays a broken link, which a strict build refuses
            files.append(File.generated(config, name, content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point these links into the site, and remove the comments, which only the tests read."""
    up = "../" * page.file.src_uri.count("/")
    markdown = OUTSIDE.sub(lambda link: f"]({up}{link[1]})", markdown)
    return re.sub(r"<!--.*?-->\n?", "", markdown, flags=re.DOTALL)
