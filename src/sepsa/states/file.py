"""The checkpoint file: one file that is verified before it is used, and replaced completely or not at all.

A file is safetensors, so that other tools can read its tensors, with a JSON header in its metadata: the format and the
library's version, the class and its configuration, the tree of the state with the shape, dtype and CRC-32 of every
tensor, and a position of the user's own; next to it the SHA-256 of that header. Reading runs no code from the file,
which is not a pickle. The checksums detect accidents, not forgery.

`sepsa.states.output` writes it. A second process that writes to the same target at the same time gets an error. Reading
takes memory in proportion to the file's size, whatever its header claims.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from sepsa._version import __version__
from sepsa.states.output import is_device, remove_unfinished, replace
from sepsa.states.tree import MISFITS, SIZES, Decoder, Tree, code_of, is_tensor

FORMAT = 1
FIRST = b'{"__metadata__":{"sepsa":'  # behind the length
MOST_DIMENSIONS = 64  # of NumPy's arrays
LONGEST_HEADER = 16_000_000  # bytes; reading one of this length takes some seconds


class CheckpointError(ValueError):
    """The file is not a checkpoint of sepsa, is damaged, is too new, or belongs to another object. Nothing changed."""


class Header(NamedTuple):
    """The header of a checkpoint: what was saved, when and by which version.

    Attributes:
        format: Version of the file format.
        library: Version of sepsa that wrote the file.
        saved: Time of writing, in seconds since 1970.
        kind: Name of the class; "dict" where several objects were saved together.
        configuration: Arguments with which the object was made, or its repr.
        position: The caller's own value.
        tensors: dtype, shape and crc32 of each tensor, by name.
    """

    format: int
    library: str
    saved: float
    kind: str
    configuration: Any
    position: Any
    tensors: dict[str, dict[str, Any]]

    @property
    def bytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(map(size_of, self.tensors.values()))


def size_of(entry: dict[str, Any]) -> int:
    """The bytes of a tensor with this dtype and shape."""
    return int(SIZES[entry["dtype"]] * math.prod(entry["shape"]))


# ---------------------------------------------------------------------- writing


@contextlib.contextmanager
def lock(target: Path) -> Iterator[None]:
    """Hold the right to write to `target`, for one process at a time.

    It is a lock of the operating system on a file beside the target, so a process that dies releases it.
    """
    import fcntl  # not on Windows, where only saving needs it

    path, held = target.with_name(target.name + ".lock"), False
    while not held:
        left = path.exists()  # by a process that was killed, or that holds the lock
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size:
                raise CheckpointError(f"{path} exists and is not a lock file of sepsa: move it, or choose another path")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"{target} is being written by another process: wait for it, or choose another path"
                ) from None
            # The process that held the lock before may have removed the file between open and flock.
            held = os.path.exists(path) and os.path.samestat(found, os.stat(path))
            if held:
                try:
                    if left:
                        remove_unfinished(target)
                    yield
                finally:
                    with contextlib.suppress(OSError):
                        path.unlink()  # while it is locked, so that no process waits for a removed file


def write(target: Path, header: bytes, tensors: list[Any]) -> None:
    """Replace `target` completely or not at all; the caller holds its lock."""
    replace(target, (header, *map(view, tensors)))


def view(array: Any) -> memoryview:
    """The bytes of an array or tensor, without a copy where it is contiguous and on the CPU."""
    if is_tensor(array):
        import torch

        values = array.detach().cpu().contiguous().reshape(-1)
        array = (values.view(torch.uint8) if values.numel() else values.to(torch.uint8)).numpy()
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def encode(kind: str, configuration: Any, state: Any, position: Any) -> tuple[bytes, list[Any]]:
    """The first bytes of a file, and the tensors that follow them."""
    tree = Tree()
    table = {
        "format": FORMAT,
        "library": __version__,
        "saved": time.time(),
        "kind": kind,
        "configuration": tree.encode(configuration, "configuration"),
        "position": tree.encode(position, "position"),
        "state": tree.encode(state, "state"),
        "tensors": {
            str(i): {"dtype": code_of(array), "shape": list(array.shape), "crc32": zlib.crc32(view(array))}
            for i, array in enumerate(tree.tensors)
        },
    }
    first = first_bytes(dumps(table), table["tensors"])[0]
    if len(first) - 8 > LONGEST_HEADER:
        raise CheckpointError(
            f"the state's numbers and strings outside arrays take {len(first):,} bytes, and a checkpoint holds "
            f"{LONGEST_HEADER:,}: put long lists into NumPy arrays"
        )
    return first, tree.tensors


def first_bytes(header: str, tensors: dict[str, dict[str, Any]]) -> tuple[bytes, int]:
    """The part of a file before its tensors, and the size of these."""
    table: dict[str, Any] = {"__metadata__": {"sepsa": header, "sha256": hashlib.sha256(header.encode()).hexdigest()}}
    end = 0
    for name, entry in tensors.items():
        start, end = end, end + size_of(entry)
        table[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [start, end]}
    return with_length(table), end


def with_length(table: dict[str, Any]) -> bytes:
    """The table of a safetensors file after its length, padded so that the tensors are aligned."""
    text = dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


# ---------------------------------------------------------------------- reading


def refuse_device(path: str | os.PathLike[str]) -> None:
    """Raise an error for a device or a FIFO."""
    if is_device(path):
        raise CheckpointError(f"{path} is a device or a FIFO, from which no checkpoint can be loaded: give a file")


def read_path(path: str | os.PathLike[str]) -> tuple[Header, Any]:
    """Header and state of the file at `path`, in which every byte has been verified."""
    refuse_device(path)  # to open a FIFO would wait for its writer
    with open(path, "rb") as file:
        return read(file, os.fstat(file.fileno()).st_size, str(path))


def read(file: BinaryIO, size: int, name: str) -> tuple[Header, Any]:
    """Header and state of a file in which every byte has been verified."""
    try:
        table = read_table(file, size, name)
        entries = enumerate(table["tensors"].items())
        decoded = Decoder({i: (read_tensor(file, name, key, entry), entry) for i, (key, entry) in entries})
        configuration, position, state = (decoded(table[part]) for part in ("configuration", "position", "state"))
        if decoded.tensors:
            raise damaged(name, "it has a tensor that its state does not name")
        library, saved, kind = str(table["library"]), float(table["saved"]), str(table["kind"])
        if not 0 <= saved < 1e11:
            raise damaged(name, "it has no time at which it was saved")
    except CheckpointError:
        raise
    except MISFITS:
        raise damaged(name, "its header cannot be read") from None
    return Header(table["format"], library, saved, kind, configuration, position, table["tensors"]), state


def read_table(file: BinaryIO, size: int, name: str) -> dict[str, Any]:
    """The header of a file of this size, as the dict that `encode` made."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 0 < length <= min(size - 8, LONGEST_HEADER):
        raise damaged(name, f"its header cannot have {length} bytes where the file has {size}")
    text = file.read(length)
    metadata = json.loads(text)["__metadata__"]
    table: dict[str, Any] = json.loads(metadata["sepsa"])
    version = table["format"]
    if type(version) is not int or version != FORMAT:
        raise CheckpointError(
            f"{name} has format {version}, written by sepsa {table.get('library')}, and this sepsa reads up to "
            f"{FORMAT}: upgrade sepsa to load it"
        )
    for key, entry in table["tensors"].items():
        # Before sizes are multiplied: a product of many long integers would take minutes.
        if len(entry["shape"]) > MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < 2**63 for n in entry["shape"]):
            raise damaged(name, f"tensor {key} has no shape")
    expected, total = first_bytes(metadata["sepsa"], table["tensors"])
    # The header is written again, with its checksum, and compared byte by byte: no entry can disagree with another.
    if expected != length.to_bytes(8, "little") + text:
        raise damaged(name, "the checksum of its header is wrong, or its entries contradict each other")
    if total != size - 8 - length:
        raise damaged(name, f"its tensors should have {total} bytes and have {size - 8 - length}")
    return table


def read_tensor(file: BinaryIO, name: str, key: str, entry: dict[str, Any]) -> Any:
    """The raw bytes of a tensor in memory of their own, verified."""
    raw: Any = np.empty(size_of(entry), np.uint8)
    if file.readinto(raw) < len(raw):  # type: ignore[attr-defined]
        raise damaged(name, "it ends in the middle of a tensor")
    if zlib.crc32(raw) != entry["crc32"]:
        raise damaged(name, f"the checksum of tensor {key} is wrong")
    if entry["dtype"] == "BOOL" and raw.size and raw.max() > 1:
        raise damaged(name, f"tensor {key} has booleans that are neither true nor false")
    return raw


def damaged(name: str, why: str) -> CheckpointError:
    return CheckpointError(f"{name} is damaged or not a checkpoint of sepsa: {why}; use an earlier copy")
