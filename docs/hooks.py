"""Hooks of mkdocs: the repository's address, generated pages, linked files from outside docs/, and titles of outputs.

Each program of examples/ that a page links to becomes a page of its own.
"""

from __future__ import annotations

import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
LINK = re.compile(r"\]\(((?:\.\./)+[\w./-]+)\)")

# The places on pages for what is written here.
OPTIONS = "<!-- written by docs/hooks.py: options -->"
README = "<!-- written by docs/hooks.py: README -->"


def readme() -> str:
    """Return what README says before the part on clones, with its links as those of a page in docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text[text.index("\n") : text.index("## From a clone")]
    return unlinked(text).replace("](docs/", "](")


def unlinked(text: str) -> str:
    """Return a text without links to the READMEs of folders, which are no pages of the site."""
    return re.sub(r"\[([^\]]*)\]\([\w/]*README\.md\)", r"\1", text)


def options() -> str:
    """Return the options of each command with their help, as a list by command."""
    from sepsa.shell.cli import Parser
    from sepsa.shell.options import COMMANDS

    parts = []
    for name, kind in COMMANDS.items():
        told = [
            f"- `{flag}`: {words}" for flag, words in Parser(name, kind).flags.items()
        ]
        parts.append("\n".join([f"**`sepsa {name}`**\n", *told]))
    return "\n\n".join(parts)


def on_config(config: Any, **_: Any) -> Any:
    """Link to the repository that pyproject.toml names, if it names one, and to the source of each page."""
    found = re.search(
        r'^Repository = "(.+?)/?"$',
        (ROOT / "pyproject.toml").read_text("utf-8"),
        flags=re.MULTILINE,
    )
    if found:
        config.repo_url, config.edit_uri = f"{found[1]}/", "edit/main/docs/"
        config.repo_name = "/".join(found[1].split("/")[-2:])
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the files that pages link to, so that a number and its JSON are on one site."""
    pages = {
        page: unlinked((ROOT / source).read_text(encoding="utf-8"))
        for page, source in PAGES.items()
    }
    for name in ("map", "parts"):
        pages[f"{name}.md"] = runpy.run_path(str(ROOT / "docs" / f"{name}.py"))[
            "page"
        ]()
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    linked = {
        outside(page.src_uri, link)
        for page in files.documentation_pages()
        for link in LINK.findall(page.content_string)
    }
    for name in sorted(linked - {""}):
        # A missing file stays a broken link, which a strict build refuses.
        if (ROOT / name).is_file():
            content = (ROOT / name).read_bytes()
            if name.endswith(".py"):
                content = program_page(name, content.decode())
            files.append(File.generated(config, page_name(name), content=content))
    return files


def outside(page: str, link: str) -> str:
    """Return the file of the repository that a page in docs/ links to, if it lies outside of docs/."""
    name = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return "" if name.startswith("docs/") else name


def page_name(name: str) -> str:
    """Return where the site has a file: a program on a page, all others as they are."""
    return f"{name[:-3]}.md" if name.endswith(".py") else name


def program_page(name: str, code: str) -> str:
    """Return a page that shows a program."""
    return f"# {name}\n\n````python\n{code}````\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point these links into the site, give outputs a title, and remove the comments, which only the tests read."""
    if OPTIONS in markdown:
        markdown = markdown.replace(OPTIONS, options())
    markdown = markdown.replace(README, readme())
    markdown = re.sub(
        r"^( *```text)$", r'\1 title="Output"', markdown, flags=re.MULTILINE
    )
    uri = page.file.src_uri
    up = "../" * uri.count("/")

    def inside(link: re.Match[str]) -> str:
        name = outside(uri, link[1])
        return f"]({up}{page_name(name)})" if name else link[0]

    markdown = LINK.sub(inside, markdown)
    if uri.startswith("examples/"):
        return markdown
    return re.sub(r"<!--.*?-->\n?", "", markdown, flags=re.DOTALL)


def on_post_page(output: str, **_: Any) -> str:
    """Keep the theme's script from asking the repository's host for its number of stars."""
    return output.replace(' data-md-component="source"', "").replace(
        " data-md-component=source", ""
    )
