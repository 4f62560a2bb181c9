"""Every example runs as a reader would run it, and leaves nothing behind but a figure."""

import subprocess
from pathlib import Path

import pages
import pytest

# Run where their packages are imported anyway, in tests/training/, and `serve`, which waits for clients: test_serve.py.
ELSEWHERE = {"accelerate_loop", "lightning_loop", "serve", "transformers_trainer"}
EXAMPLES = [path for path in (Path(__file__).parents[1] / "examples").glob("*.py") if path.stem not in ELSEWHERE]


@pytest.mark.parametrize("path", sorted(EXAMPLES), ids=lambda path: path.stem)
def test_example(path, tmp_path, preloaded_bin):
    done = subprocess.run([preloaded_bin / "python", path], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert {file.suffix for file in tmp_path.iterdir()} <= {".png"}
    gallery = (path.parents[1] / "docs" / "gallery.md").read_text(encoding="utf-8")
    shown = dict(pages.PROGRAM.findall(gallery)).get(f"examples/{path.name}")
    assert shown is None or pages.agree(shown, done.stdout), "run python docs/pages.py docs/gallery.md"
