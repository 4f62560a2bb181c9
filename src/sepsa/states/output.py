"""Files that sepsa writes: replaced completely or not at all; a device or a FIFO is written to, never replaced.

A write goes to a new file beside the target, with a random name and the target's permissions, which is synced, renamed
over the target, and the folder synced: a process that dies at any instant leaves the old file or the new one. Nothing
is deleted that sepsa did not make.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

Buffer = bytes | memoryview


def is_device(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a character device or a FIFO; a folder, a disk and a socket raise an OSError."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise error(errno.EISDIR, path)
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise OSError(errno.EINVAL, "is a disk or a socket, which sepsa does not write to", str(path))
    return not stat.S_ISREG(mode)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise the OSError with which `replace` would fail, if that is known beforehand."""
    if is_device(path):
        if not os.access(path, os.W_OK):
            raise error(errno.EACCES, path)
        return
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise error(errno.ENOENT, path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise error(errno.EACCES, path)


def replace(path: str | os.PathLike[str], parts: Iterable[Buffer]) -> None:
    """Write a complete file, with the permissions of the one it replaces."""
    if is_device(path):
        with open(path, "wb", buffering=0) as file:
            write_all(file.fileno(), parts)
        return
    target = Path(os.path.realpath(path))
    new = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        old = os.stat(target) if target.exists() else None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(new, flags, 0o666 if old is None else 0o600)
        try:
            write_all(descriptor, parts)
            if old is not None and os.name == "posix":
                with contextlib.suppress(PermissionError):  # only root may give a file to another user
                    os.fchown(descriptor, old.st_uid, old.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(new, target)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_all(descriptor: int, parts: Iterable[Buffer]) -> None:
    """Write all bytes; the system may take fewer at once."""
    for part in parts:
        rest = memoryview(part)
        while len(rest):
            rest = rest[os.write(descriptor, rest) :]


def remove_unfinished(target: Path) -> None:
    """Remove what `replace` left beside `target` in processes that were killed; nobody else may write to it now."""
    name = re.compile(re.escape(target.name) + r"\.[0-9a-f]{16}\.tmp")
    with os.scandir(target.parent) as entries:
        for entry in entries:
            if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)


def error(number: int, path: str | os.PathLike[str]) -> OSError:
    """The system's error of this number."""
    return OSError(number, os.strerror(number), str(path))
