"""The library of compiled kernels: found by the digest of their sources, checked, and loaded.

Its name has that digest and the hash of the file, so that no library of other sources, and no damaged one, is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import zlib
from functools import cache
from pathlib import Path
from typing import Any

FOLDER, PACKAGE = Path(__file__).parent, Path(__file__).parents[1]
# The modules that define kernels, and all files of which their code is made.
DEFINING: tuple[str, ...] = ("sepsa.compiled.cross_entropy", "sepsa.compiled.least_squares", "sepsa.learner.experts")
DEFINING += ("sepsa.learner.experts.step", "sepsa.forecast.kernels.step")
SOURCES = ("restoration.py", "compiled", "learner/arithmetic", "learner/experts", "learner/memory", "forecast/kernels")


def digest() -> str:
    """What tells the sources of kernels from others."""
    files = [file for name in SOURCES for file in (sorted((PACKAGE / name).glob("*.py")) or [PACKAGE / name])]
    files = [file for file in files if file.name not in ("code.py", "library.py")]  # which make none
    found = hashlib.sha256()
    for file in files:
        found.update(file.relative_to(PACKAGE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def store(content: bytes, folder: Path) -> Path:
    """Write a library into a folder, whole or not at all, and remove the others there; returns its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"kernels-{digest()}-{hashlib.sha256(content).hexdigest()[:16]}.so"
    unfinished = folder / f"kernels-{secrets.token_hex(8)}.part"
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    for other in folder.glob("kernels-*.so"):
        if other != path:
            other.unlink(missing_ok=True)
    return path


def find() -> tuple[Path | None, str]:
    """The library of these sources, or None and why there is none."""
    files = sorted(FOLDER.glob("kernels-*.so"))
    own = [file for file in files if file.name.startswith(f"kernels-{digest()}-")]
    for file in own:
        if hashlib.sha256(file.read_bytes()).hexdigest()[:16] == file.stem.rpartition("-")[2]:
            return file, ""
    if own:
        return None, f"the library of compiled kernels {own[0]} is damaged"
    if files:
        return None, f"the library of compiled kernels {files[0]} is of other sources"
    return None, "this installation has no library of compiled kernels"


@cache
def load() -> tuple[Any, str]:
    """The library of these sources, loaded, or None and why it is not."""
    file, why = find()
    if file is None:
        return None, why
    try:
        loaded = ctypes.CDLL(str(file))
    except OSError as error:
        return None, f"the library of compiled kernels {file} cannot be loaded ({error})"
    if not loaded.sepsa_processor():
        return None, f"this processor lacks instructions that the library of compiled kernels {file} uses"
    return loaded, ""


def checksum(names: Any) -> int:
    """A number that tells the names in a layout from others."""
    return zlib.crc32(repr([*names]).encode()) & 0x7FFFFFFF
