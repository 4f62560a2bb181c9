"""The cache of compiled code: numba's, where a damaged, full or read-only folder costs time and stops nothing.

`SEPSA_CACHE` names a folder that travels, with a container's image or on the disk that a cluster shares: it may be
read-only, and the content of the package's modules, not their times, decides whether its code is current.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from sepsa._version import __version__

VARIABLE = "SEPSA_CACHE"
PACKAGE = Path(__file__).parent
_warned: list[str] = []


def travels(source: Path) -> bool:
    """Whether code of this file lies in the folder that SEPSA_CACHE names."""
    return bool(os.environ.get(VARIABLE)) and source.is_relative_to(PACKAGE)


@cache
def content() -> str:
    """The version of the package, and a digest of all its modules."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return f"{__version__}-{digest.hexdigest()[:16]}"


class TravellingLocator(_CacheLocator):
    """Where numba stores the code of a function of this package if SEPSA_CACHE is set."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self.line = function.__code__.co_firstlineno
        self.path = Path(os.environ[VARIABLE], content(), *Path(file).relative_to(PACKAGE).parent.parts)

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> TravellingLocator | None:
        return cls(py_func, py_file) if travels(Path(py_file)) else None

    def ensure_cache_path(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self.path)

    def get_source_stamp(self) -> str:
        return content()

    def get_disambiguator(self) -> str:
        return str(self.line)


class Places(CompileResultCacheImpl):
    """What is stored, and where: in SEPSA_CACHE, or where numba would."""

    _locator_classes = [TravellingLocator, *CompileResultCacheImpl._locator_classes]  # noqa: RUF012


class CodeCache(FunctionCache):
    """A cache from which code that cannot be read is compiled again, and where code that cannot be written is kept."""

    _impl_class = Places

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)

    def holds(self, signature: Any, target_context: Any) -> bool:
        """Whether there is code for this signature, processor and version of numba."""
        try:
            return self._index_key(signature, target_context.codegen()) in self._cache_file._load_index()
        except Exception:  # a damaged file, from which pickle may raise anything
            return False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            try:
                super().save_overload(sig, data)
            except OSError:
                raise
            except Exception:  # the list of what is stored is damaged: begin a new one
                self.flush()
                super().save_overload(sig, data)
        except OSError as error:
            warn_without_cache(f" ({self.cache_path}: {error.strerror})")


def warn_without_cache(reason: str = "") -> None:
    """Print once that every process compiles again, and how to avoid it."""
    if not _warned:
        _warned.append(reason)
        warnings.warn(
            f"sepsa: no folder for compiled code is writable{reason}, so each process compiles it again, for some "
            f"seconds: set {VARIABLE} to a folder that can be written, or that `sepsa compile --to FOLDER` has filled",
            RuntimeWarning,
            stacklevel=2,
        )
