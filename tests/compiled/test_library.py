"""The library of compiled kernels: what is loaded, what is refused and why, and what serves in its place."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sepsa.compiled import build, code, library
from sepsa.compiled.kernels import KERNELS, kernel

LIBRARY = library.find()[0]
built = pytest.mark.skipif(
    LIBRARY is None, reason="this machine has no C compiler, or no library of kernels: make kernels"
)
PROGRAM = """
import sys
from pathlib import Path
from sepsa.compiled import library
if sys.argv[1:]:
    library.FOLDER = library.Path(sys.argv[1])
from sepsa import SepSAForecaster
print(SepSAForecaster(1, lags=1, seasons=()).prequential([1.0, 2.0, 4.0]).ravel().tolist())
"""


def run(*arguments):
    """What a new process prints that calls a kernel, and its standard error."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def expected():
    code, out, err = run()
    assert (code, err) == (0, "")
    return out


@built
def test_it_needs_libm_alone_and_has_every_kernel():
    assert build.needs(LIBRARY, "-D" if sys.platform == "linux" else "-g", "-u") == []
    loaded, _ = library.load()
    assert all(hasattr(loaded, name) for name in KERNELS.values() if name.startswith("sepsa_"))


def cut_short(folder):
    (folder / LIBRARY.name).write_bytes(LIBRARY.read_bytes()[:-1000])


def of_other_sources(folder):
    shutil.copy(LIBRARY, folder / "kernels-0123456789abcdef-0123456789abcdef.so")


def for_newer_processors(folder):
    (folder / "newer.c").write_text("int sepsa_processor(void) { return 0; }")
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", folder / "newer", folder / "newer.c"]
    subprocess.run(command, check=True)
    library.store((folder / "newer").read_bytes(), folder)


def no_library(folder):
    library.store(b"no library", folder)


@built
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, "is damaged"),
        (of_other_sources, "is of other sources"),
        (for_newer_processors, "this processor lacks instructions"),
        (no_library, "cannot be loaded"),
        (Path.exists, "this installation has no library of compiled kernels"),
    ],
)
def test_one_that_does_not_serve_is_not_loaded_and_the_reason_is_told(damage, words, tmp_path, monkeypatch):
    damage(tmp_path)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    loaded, why = library.load.__wrapped__()
    assert loaded is None
    assert words in why


@built
def test_without_one_a_line_says_so_and_numba_compiles_the_same(tmp_path, expected):
    code, out, err = run(tmp_path)
    assert code == 0, err
    np.testing.assert_allclose(ast.literal_eval(out), ast.literal_eval(expected), rtol=1e-12)
    (line,) = err.splitlines()
    assert "this installation has no library of compiled kernels: numba compiles each kernel" in line
    assert line.endswith("build it: python -m sepsa.compiled.build")


@built
def test_a_folder_that_cannot_be_written_and_two_libraries_are_no_hindrance(tmp_path, expected):
    shutil.copy(LIBRARY, tmp_path)
    shutil.copy(LIBRARY, tmp_path / "kernels-0123456789abcdef-0123456789abcdef.so")
    tmp_path.chmod(0o500)
    try:
        assert run(tmp_path) == (0, expected, "")
    finally:
        tmp_path.chmod(0o700)


def test_without_library_and_numba_the_error_names_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "load", lambda: (None, "this installation has no library of compiled kernels"))
    monkeypatch.setattr(code.importlib.util, "find_spec", lambda name: None)
    code._loaded.cache_clear()
    code.available.cache_clear()
    try:
        assert not code.available()
        with pytest.raises(ImportError, match=r"no library of compiled kernels, nor is there numba.*sepsa\[jit\]"):
            code._loaded()
    finally:
        monkeypatch.undo()
        code._loaded.cache_clear()
        code.available.cache_clear()


def test_a_new_library_replaces_the_others_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    first = library.store(b"first", tmp_path)
    second = library.store(b"second", tmp_path)
    assert first != second
    assert [*tmp_path.iterdir()] == [second]
    assert library.find() == (second, "")


@built
def test_a_group_that_the_library_was_built_without_is_an_error():
    names = ["one", "two"]
    with pytest.raises(RuntimeError, match="built without a group of the frame 'engine'"):
        code.check("engine", names)
    code.check("a frame of somebody else", names)


def test_a_kernel_that_calls_python_is_refused_and_named(tmp_path):
    @kernel
    def prints(model, index):
        print(index)
        return 0

    try:
        with pytest.raises(SystemExit, match="prints"):
            build.write_object(prints, build.machine(), tmp_path / "prints.o")
    finally:
        del KERNELS[prints]


def test_threads_and_processes_use_one_code(tmp_path):
    (tmp_path / "program.py").write_text(
        "import concurrent.futures, multiprocessing\n"
        "import numpy as np\n"
        "from sepsa.learner.engine import Engine\n"
        "def job(_):\n"
        "    rows = np.arange(8.0).reshape(4, 2)\n"
        "    return Engine(2, 1, ()).learn(rows, rows[:, :1]).ravel().tolist()\n"
        "if __name__ == '__main__':\n"
        "    found = []\n"
        "    with concurrent.futures.ThreadPoolExecutor(4) as pool: found += pool.map(job, range(4))\n"
        "    for start in ('fork', 'spawn'):\n"
        "        with multiprocessing.get_context(start).Pool(1) as pool: found += pool.map(job, [0])\n"
        "    print(found)\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "program.py"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    first, *others = ast.literal_eval(done.stdout)
    assert others == [first] * 5
