"""Checkpoints: one file that is verified before anything is touched, and replaced whole or not at all.

A file is safetensors, so that other tools can read its tensors, with a JSON header in its metadata: the format and the
library's version, the class and its configuration, the tree of the state with the shape, dtype and CRC-32 of every
tensor, and a position of the user's own; SHA-256 of that header stands beside it. Loading runs no code from the file:
there is no pickle, and the header names a class out of the few that this module knows. The checksums are against
accidents; who can write the file can write its checksums too.

A write goes to a temporary file beside the target, which is synced, renamed over it, and the folder synced: a process
that dies at any instant leaves the old checkpoint or the new one. A second process that writes to the same target at
the same time is refused.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import importlib
import io
import json
import math
import os
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sepsa._version import __version__

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = 1
LONGEST_HEADER = 100_000_000  # bytes, as safetensors has it

# The names that safetensors gives to dtypes.
NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16,
    "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
TORCH = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
CODES: dict[Any, str] = {np.dtype(kind): code for code, kind in NUMPY.items()} | {v: k for k, v in TORCH.items()}
SIZES = {code: np.dtype(kind).itemsize for code, kind in NUMPY.items()} | {"BF16": 2}

# What `load` builds by itself: every other object is given as `into`.
BUILT = {
    "sepsa.SepSARegressor": ("sepsa.stream.sklearn", "SepSARegressor"),
    "sepsa.SepSAClassifier": ("sepsa.stream.sklearn", "SepSAClassifier"),
    "sepsa.river.SepSARegressor": ("sepsa.stream.river", "SepSARegressor"),
    "sepsa.river.SepSAClassifier": ("sepsa.stream.river", "SepSAClassifier"),
    "sepsa.river.SepSAMultiTargetRegressor": ("sepsa.stream.river", "SepSAMultiTargetRegressor"),
    "sepsa.heads.Delta": ("sepsa.heads.math.delta", "Delta"),
    "sepsa stream": ("sepsa.stream.tables.model", "TableModel"),
}


class CheckpointError(ValueError):
    """A file that is no checkpoint of ours, is damaged, is too new, or belongs to something else. Nothing changed."""


class Header(NamedTuple):
    """What a checkpoint says of itself, without its tensors."""

    format: int
    library: str  # the version of sepsa that wrote it
    saved: float  # seconds since 1970
    kind: str  # the class; "dict" where several objects were saved together
    configuration: Any
    position: Any
    tensors: dict[str, dict[str, Any]]  # each with dtype, shape and crc32

    @property
    def bytes(self) -> int:
        """The size of all tensors."""
        return sum(SIZES[t["dtype"]] * math.prod(t["shape"]) for t in self.tensors.values())


# ---------------------------------------------------------------------- what users call


def save(what: Any, path: str | os.PathLike[str], *, position: Any = None, keep: int = 1) -> None:
    """Write a checkpoint of `what`, replacing the one at `path` whole or not at all.

    `what` is an estimator, one of River's faces, a SepSA (with its model), a head solver or anything else with
    `state_dict` and `load_state_dict`, or a dict of such objects and plain values. `position` is anything plain that
    you want to find again in `inspect(path).position`. With `keep=3` the two checkpoints before this one stay, as
    `path.1` and `path.2`.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep must be an integer of at least 1, got {keep!r}")
    header, tensors = pack(what, position)
    target = Path(os.path.realpath(path))
    with Lock(target):
        write(target, header, tensors, keep)


def load(path: str | os.PathLike[str], into: Any = None) -> Any:
    """The object that was saved, continuing bit for bit; the whole file is verified before anything is touched.

    Estimators and River's faces are built anew. Others need `into`, an object built as the saved one was, which takes
    up the state and is returned; for a dict that was saved, `into` is a dict of such objects under the same keys, and
    what is returned holds the plain values too.
    """
    with open(path, "rb") as file:
        return unpack(*read(file, os.fstat(file.fileno()).st_size, str(path)), into, str(path))


def to_bytes(what: Any, *, position: Any = None) -> bytes:
    """The checkpoint as bytes, for a database or a wire."""
    header, tensors = pack(what, position)
    return b"".join([header, *map(bytes, map(view, tensors))])


def from_bytes(data: bytes, into: Any = None) -> Any:
    """As `load`, from the bytes of `to_bytes`."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"data must be bytes, got {type(data).__name__}: to_bytes makes them, load takes a path")
    return unpack(*read(io.BytesIO(data), len(data), "these bytes"), into, "these bytes")


def inspect(path: str | os.PathLike[str]) -> Header:
    """What a checkpoint says of itself; its tensors are verified, and nothing is built."""
    with open(path, "rb") as file:
        return read(file, os.fstat(file.fileno()).st_size, str(path))[0]


class Lock:
    """The right to write to `target`, for one process at a time, for as long as the context lasts.

    It is a lock of the operating system on a file beside the target, so a process that dies gives it back.
    """

    def __init__(self, target: Path) -> None:
        self.target, self.path = target, target.with_name(target.name + ".lock")
        self._file: Any = None

    def __enter__(self) -> Lock:
        import fcntl  # not on Windows, where nothing but saving needs it

        while self._file is None:
            file = open(self.path, "ab", buffering=0)  # an interrupt lets go of it, and so of the lock
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise CheckpointError(
                    f"{self.target} is being written by another process: wait for it, or choose another path"
                ) from None
            # Who had the lock before may have removed the file that this one waited for.
            if os.path.exists(self.path) and os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()  # while it is locked, so that nobody waits for a file that is gone
        self._file.close()
        self._file = None


class Saves:
    """`save`, `load`, `to_bytes` and `from_bytes` for a class that `load` can build, and a stamp for pickles of it."""

    def save(self, path: str | os.PathLike[str], *, position: Any = None, keep: int = 1) -> None:
        """Write a checkpoint, as `sepsa.save`."""
        save(self, path, position=position, keep=keep)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The model that was saved at `path`, as `sepsa.load`."""
        return cls._own(load(path), str(path))

    def to_bytes(self, *, position: Any = None) -> bytes:
        """The checkpoint as bytes, for a database or a wire."""
        return to_bytes(self, position=position)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The model of these bytes, which `to_bytes` made."""
        return cls._own(from_bytes(data), "these bytes")

    @classmethod
    def _own(cls, made: Any, name: str) -> Self:
        if type(made) is not cls:
            raise CheckpointError(f"{name} holds a {type(made).__name__}, and this is {cls.__name__}: use sepsa.load")
        return made


def stamp(state: dict[str, Any]) -> dict[str, Any]:
    """A pickled state with the version that wrote it."""
    return state | {"_sepsa_version": __version__}


def check_stamp(state: dict[str, Any]) -> dict[str, Any]:
    """A pickled state without its stamp; warns where another version wrote it."""
    state = dict(state)
    version = state.pop("_sepsa_version", "before 0.2")
    if version != __version__:
        warnings.warn(
            f"this pickle was written by sepsa {version} and is read by {__version__}, which may take it for something "
            "else: use sepsa.save and sepsa.load between versions",
            stacklevel=3,
        )
    return state


# ---------------------------------------------------------------------- the file


def write(target: Path, header: bytes, tensors: list[Any], keep: int = 1) -> None:
    """Replace `target` whole or not at all; the caller holds its lock."""
    fresh = target.with_name(target.name + ".tmp")  # always the same name, so that a killed process leaves one at most
    try:
        with open(fresh, "wb", buffering=0) as file:
            for part in (memoryview(header), *map(view, tensors)):
                while len(part):
                    part = part[file.write(part) :]
            os.fsync(file.fileno())
        for age in range(keep - 1, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(older(target, age - 1), older(target, age))
        if keep > 1 and target.exists():
            with contextlib.suppress(FileNotFoundError):
                older(target, 1).unlink()
            os.link(target, older(target, 1))  # the target itself stays in its place until it is replaced
        os.replace(fresh, target)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def older(target: Path, age: int) -> Path:
    return target.with_name(f"{target.name}.{age}")


def view(array: Any) -> memoryview:
    """The bytes of an array or tensor, without a copy where it is contiguous and on the CPU."""
    if isinstance(array, Tensor):
        values = array.detach().cpu().contiguous().reshape(-1)
        array = (values.view(torch.uint8) if values.numel() else values.to(torch.uint8)).numpy()
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def pack(what: Any, position: Any) -> tuple[bytes, list[Any]]:
    """The file's beginning, and the tensors that follow it."""
    tree = Tree()
    kind, configuration, state = describe(what)
    own = {
        "format": FORMAT,
        "library": __version__,
        "saved": time.time(),
        "kind": kind,
        "configuration": tree.encode(configuration, "configuration"),
        "position": tree.encode(position, "position"),
        "state": tree.encode(state, "state"),
        "tensors": {
            str(i): {"dtype": CODES[array.dtype], "shape": list(array.shape), "crc32": zlib.crc32(view(array))}
            for i, array in enumerate(tree.tensors)
        },
    }
    text = dumps(own)
    table, at = {"__metadata__": {"sepsa": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}}, 0
    for name, entry in own["tensors"].items():
        size = SIZES[entry["dtype"]] * math.prod(entry["shape"])
        table[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [at, at + size]}  # type: ignore[dict-item]
        at += size
    return beginning(table), tree.tensors


def beginning(table: dict[str, Any]) -> bytes:
    text = dumps(table).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned, as safetensors asks
    return len(text).to_bytes(8, "little") + text


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def read(file: BinaryIO, size: int, name: str) -> tuple[Header, Any]:
    """Header and state of a file that has been verified to the last byte."""

    def damaged(why: str) -> CheckpointError:
        return CheckpointError(f"{name} is damaged or no checkpoint of sepsa: {why}; take an earlier copy")

    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 0 < length <= min(size - 8, LONGEST_HEADER):
        raise damaged(f"its header cannot have {length} bytes where the file has {size}")
    text = file.read(length)
    try:
        table = json.loads(text)
        own = json.loads(table["__metadata__"]["sepsa"])
        version = own["format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged("its header is not to be read") from None
    if type(version) is int and version > FORMAT:
        raise CheckpointError(
            f"{name} has format {version}, written by sepsa {own.get('library')}, and this sepsa reads up to {FORMAT}: "
            "upgrade sepsa to load it"
        )
    try:
        told = table["__metadata__"]["sepsa"]
        if table["__metadata__"]["sha256"] != hashlib.sha256(told.encode()).hexdigest():
            raise damaged("the checksum of its header does not fit")
        entries, at = own["tensors"], 0
        expected: dict[str, Any] = {"__metadata__": {"sepsa": told, "sha256": table["__metadata__"]["sha256"]}}
        for key, entry in entries.items():
            if not all(type(n) is int and n >= 0 for n in entry["shape"]):
                raise damaged(f"tensor {key} has no shape")
            end = at + SIZES[entry["dtype"]] * math.prod(entry["shape"])
            expected[key] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": [at, end]}
            at = end
        # Written anew it must be the same to the byte: then nothing in it can have been another's.
        if type(version) is not int or version < 1 or beginning(expected) != len(text).to_bytes(8, "little") + text:
            raise damaged("its header contradicts itself")
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise error if isinstance(error, CheckpointError) else damaged("its header is not to be read") from None
    if at != size - 8 - length:
        raise damaged(f"its tensors should have {at} bytes and have {size - 8 - length}")
    tensors = [read_tensor(file, key, entry, damaged) for key, entry in entries.items()]
    try:
        configuration, position, state = (
            decode(own[part], tensors, entries) for part in ("configuration", "position", "state")
        )
        header = Header(
            version, str(own["library"]), float(own["saved"]), str(own["kind"]), configuration, position, entries
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError):
        raise damaged("its header is not to be read") from None
    return header, state


def read_tensor(file: BinaryIO, key: str, entry: dict[str, Any], damaged: Any) -> Any:
    """The raw bytes of a tensor in memory of their own, verified."""
    raw: Any = np.empty(SIZES[entry["dtype"]] * math.prod(entry["shape"]), np.uint8)
    whole = memoryview(raw)
    filled = 0
    while filled < len(raw):
        got = file.readinto(whole[filled:])  # type: ignore[attr-defined]
        if not got:
            raise damaged("it ends in the middle of a tensor")
        filled += got
    if zlib.crc32(raw) != entry["crc32"]:
        raise damaged(f"the checksum of tensor {key} does not fit")
    if entry["dtype"] == "BOOL" and raw.size and raw.max() > 1:
        raise damaged(f"tensor {key} has booleans that are neither true nor false")
    return raw


# ---------------------------------------------------------------------- nested states as JSON beside tensors


class Tree:
    """Encodes a nested state as JSON; arrays and tensors are put aside and stand in it by their number.

    Plain values stand for themselves. A list of two with a string first, such as ["tuple", [...]], is all the rest.
    """

    def __init__(self) -> None:
        self.tensors: list[Any] = []

    def encode(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if isinstance(value, Mapping):
            pairs = [[self.encode(k, f"a key of {where}"), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return ["dict", pairs]
        if isinstance(value, (list, tuple)):
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return ["tuple" if isinstance(value, tuple) else "list", items]
        if isinstance(value, bytes):
            return ["bytes", base64.b64encode(value).decode()]
        if isinstance(value, Tensor):
            if value.dtype not in CODES or value.layout != torch.strided:
                raise TypeError(f"{where} must be a dense real tensor to be saved, got {value.dtype}, {value.layout}")
            return ["tensor", self._aside(value)]
        if isinstance(value, np.ndarray):
            return self._array(value, where)
        if isinstance(value, np.generic):
            if type(value) is np.str_:
                return ["str_", str(value)]
            return ["generic", self.encode(np.asarray(value), where)]
        if isinstance(value, torch.dtype) and value in CODES:
            return ["torch.dtype", CODES[value]]
        if isinstance(value, type) and issubclass(value, np.generic) and np.dtype(value) in CODES:
            return ["numpy.dtype", CODES[np.dtype(value)]]
        if isinstance(value, type) and value in (bool, int, float, str):
            return ["type", value.__name__]
        raise TypeError(
            f"{where} must be made of numbers, strings, arrays, tensors, lists, tuples and dicts to be saved, "
            f"got {type(value).__module__}.{type(value).__name__}"
        )

    def _array(self, value: np.ndarray[Any, Any], where: str) -> Any:
        native = value.dtype.newbyteorder("=")
        if native in CODES:
            return ["array", self._aside(np.asarray(value, native, order="C"))]
        if native.kind == "U":
            width = native.itemsize // 4
            codes = np.ascontiguousarray(value, native).reshape(-1).view(np.uint32)
            return ["text", [list(value.shape), width, self._aside(codes)]]
        if native.hasobject:
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value.reshape(-1))]
            return ["objects", [list(value.shape), items]]
        raise TypeError(f"{where} must be an array of numbers, booleans or strings to be saved, got {value.dtype}")

    def _aside(self, value: Any) -> int:
        self.tensors.append(value)
        return len(self.tensors) - 1


def decode(value: Any, tensors: list[Any], entries: dict[str, dict[str, Any]]) -> Any:
    """What `Tree.encode` was given."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    tag, content = value
    if tag == "float":
        return float(content)
    if tag == "dict":
        return {decode(k, tensors, entries): decode(v, tensors, entries) for k, v in content}
    if tag in ("list", "tuple"):
        items = [decode(item, tensors, entries) for item in content]
        return items if tag == "list" else tuple(items)
    if tag == "bytes":
        return base64.b64decode(content, validate=True)
    if tag == "tensor":
        entry = entries[str(content)]
        kind = TORCH[entry["dtype"]]
        raw = tensors[content]
        flat = torch.from_numpy(raw).view(kind) if raw.size else torch.empty(0, dtype=kind)
        return flat.reshape(entry["shape"])
    if tag == "array":
        entry = entries[str(content)]
        return tensors[content].view(NUMPY[entry["dtype"]]).reshape(entry["shape"])
    if tag == "text":
        shape, width, number = content
        codes = tensors[number]
        return codes.view(f"<U{width}").reshape(shape) if width else np.zeros(shape, "<U0")
    if tag == "objects":
        shape, items = content
        array = np.empty(len(items), object)
        array[:] = [decode(item, tensors, entries) for item in items]
        return array.reshape(shape)
    if tag == "str_":
        return np.str_(content)
    if tag == "generic":
        return decode(content, tensors, entries)[()]
    if tag == "torch.dtype":
        return TORCH[content]
    if tag == "numpy.dtype":
        return NUMPY[content]
    if tag == "type":
        return {"bool": bool, "int": int, "float": float, "str": str}[content]
    raise ValueError(f"unknown tag {tag!r}")


# ---------------------------------------------------------------------- objects


def describe(what: Any) -> tuple[str, Any, Any]:
    """Kind, configuration and state of an object, or of several in a dict."""
    if type(what) is dict:
        parts = {key: describe(value) if has_state(value) else ("", None, value) for key, value in what.items()}
        return "dict", {key: part[:2] for key, part in parts.items()}, {key: part[2] for key, part in parts.items()}
    if not has_state(what):
        raise TypeError(
            f"what is saved must have state_dict and load_state_dict, or be a dict, got {type(what).__name__}: "
            "put plain values into a dict"
        )
    kind = kind_of(what)
    if kind in BUILT:
        parameters = what._get_params() if hasattr(what, "_get_params") else what.get_params()
        return kind, parameters, what.state_dict()
    if kind == "sepsa.SepSA":
        return kind, repr(what), {"model": what.model.state_dict(), "optimizer": what.state_dict()}
    return kind, repr(what) if kind.startswith("sepsa.") else None, what.state_dict()


def has_state(what: Any) -> bool:
    return hasattr(what, "state_dict") and hasattr(what, "load_state_dict") and not isinstance(what, type)


def kind_of(what: Any) -> str:
    """The class by its public name."""
    cls = type(what)
    for kind, (module, name) in BUILT.items():
        if (cls.__module__, cls.__qualname__) == (module, name):
            return kind
    if cls.__module__.startswith("sepsa."):
        return f"sepsa.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def unpack(header: Header, state: Any, into: Any, name: str) -> Any:
    """Build what was saved, or let `into` take it up, whole or not at all."""
    if header.kind != "dict":
        if into is None:
            return build(header.kind, header.configuration, state, name)
        check_kind(header.kind, into, name)
        take_up(into, state)
        return into
    into = {} if into is None else into
    if not isinstance(into, Mapping):
        raise CheckpointError(f"{name} holds {list(state)}: into must be a dict of objects under such keys")
    wanted = {key for key, (kind, _) in header.configuration.items() if kind and kind not in BUILT}
    if not wanted <= set(into) or not set(into) <= {key for key, (kind, _) in header.configuration.items() if kind}:
        raise CheckpointError(f"{name} holds the states of {sorted(map(str, wanted))}: into must be a dict with these")
    for key, live in into.items():
        check_kind(header.configuration[key][0], live, name)
    out = {}
    for key, (kind, configuration) in header.configuration.items():
        if key not in into:
            out[key] = build(kind, configuration, state[key], name) if kind else state[key]
    before = {key: copy.deepcopy(full_state(live)) for key, live in into.items()} if len(into) > 1 else {}
    done = []
    try:
        for key, live in into.items():
            done.append(key)
            take_up(live, state[key])
    except BaseException:
        for key in before and reversed(done):
            take_up(into[key], before[key])
        raise
    return {key: into.get(key, out.get(key)) for key in header.configuration}


def build(kind: str, configuration: Any, state: Any, name: str) -> Any:
    if kind not in BUILT:
        raise CheckpointError(f"{name} holds a {kind}: build one as it was built then, and give it as into=")
    module, cls = BUILT[kind]
    made = getattr(importlib.import_module(module), cls)(**configuration)
    made.load_state_dict(state)
    return made


def check_kind(kind: str, live: Any, name: str) -> None:
    if not has_state(live) or kind_of(live) != kind:
        raise CheckpointError(f"{name} holds a {kind}, and into is a {type(live).__name__}")


def full_state(live: Any) -> Any:
    return describe(live)[2]


def take_up(live: Any, state: Any) -> None:
    """Let a live object take up a state, whole or not at all."""
    if kind_of(live) != "sepsa.SepSA":
        live.load_state_dict(state)
        return
    own = live.model.state_dict()
    given = state["model"]
    if list(own) != list(given):
        odd = sorted(set(own) ^ set(given))
        raise CheckpointError(f"the checkpoint belongs to another model: {odd or 'its parts in another order'}")
    for key, value in own.items():
        if isinstance(value, Tensor) and (value.shape != given[key].shape or value.dtype != given[key].dtype):
            raise CheckpointError(
                f"the checkpoint has {key} as {given[key].dtype} {tuple(given[key].shape)}, "
                f"this model as {value.dtype} {tuple(value.shape)}"
            )
    live.load_state_dict(state["optimizer"])  # whole or not at all; after it nothing can fail
    live.model.load_state_dict(given)


def tensors_of(state: Any) -> Iterator[Any]:
    """Every array and tensor in a nested state."""
    if isinstance(state, (Tensor, np.ndarray)):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors_of(value)
