"""Nested states as JSON beside a list of tensors, and back: numbers, strings, arrays, tensors, lists, tuples, dicts."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# The names that safetensors gives to dtypes, and those of NumPy and torch.
NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
CODES = {name: code for code, name in NAMES.items()}
SIZES = {code: 2 if code == "BF16" else np.dtype(name).itemsize for code, name in NAMES.items()}
PLAIN = {type(None), bool, int, float, str}  # JSON as they are
# The errors of a decoder, and of a `load_state_dict`, for content that is wrong.
MISFITS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError)


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor; before torch is imported, there is none."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_json(value: object) -> bool:
    """Whether JSON has this value as it is."""
    return type(value) in PLAIN and (type(value) is not float or math.isfinite(value))


def code_of(array: Any) -> str | None:
    """The code of the dtype of an array or tensor; None: none."""
    return CODES.get(str(array.dtype).removeprefix("torch."))


# The values that their tag and content alone determine.
DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "date": date.fromisoformat,
    "datetime": datetime.fromisoformat,
}


class Tree:
    """Encodes a nested state as JSON, with the index in `tensors` in place of each array and tensor.

    None, booleans, integers, strings and finite floats are JSON as they are. Any other value is a pair of a tag and its
    content, such as ["tuple", [...]].
    """

    def __init__(self) -> None:
        self.tensors: list[Any] = []

    def encode(self, value: Any, where: str) -> Any:
        """The JSON of a value, which an error calls `where`."""
        if is_json(value):
            return value
        if isinstance(value, (list, tuple)):
            items = [one if is_json(one) else self.encode(one, f"{where}[{i}]") for i, one in enumerate(value)]
            return ["tuple" if isinstance(value, tuple) else "list", items]
        if type(value) is float:
            return ["float", repr(value)]
        if isinstance(value, Mapping):
            pairs = [[self.encode(k, f"a key of {where}"), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return ["dict", pairs]
        if isinstance(value, bytes):
            return ["bytes", base64.b64encode(value).decode()]
        if is_tensor(value) and code_of(value) and str(value.layout) == "torch.strided":
            return ["tensor", self._index(value)]
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            return ["array", self._index(np.asarray(value, value.dtype.newbyteorder("="), order="C"))]
        if isinstance(value, np.generic):
            item = value.astype(np.int64).item() if value.dtype.kind in "mM" else value.item()
            if type(item) in PLAIN:
                return ["numpy", [value.dtype.str, self.encode(item, where)]]
        if isinstance(value, date):
            kind = datetime if isinstance(value, datetime) else date
            if value == value and kind.fromisoformat(value.isoformat()) == value:  # not the nanoseconds of pandas
                return [kind.__name__, value.isoformat()]
        got = f"{type(value).__module__}.{type(value).__name__}"
        if isinstance(value, np.ndarray) or is_tensor(value):
            got += f" of {value.dtype}"
        raise TypeError(
            f"{where} must be made of numbers, strings, dates, dense arrays and tensors of real numbers or booleans, "
            f"lists, tuples and dicts to be saved, got {got}: save an object with state_dict, an array of strings as "
            "a list, or pickle it"
        )

    def _index(self, value: Any) -> int:
        self.tensors.append(value)
        return len(self.tensors) - 1


class Decoder:
    """Decodes what `Tree.encode` made, from its JSON, and by index the raw bytes of each tensor and its table entry.

    A tensor that is decoded leaves `tensors`: no file takes more memory than its size.
    """

    def __init__(self, tensors: dict[int, tuple[Any, dict[str, Any]]]) -> None:
        self.tensors = tensors

    def __call__(self, value: Any) -> Any:
        """The value that `Tree.encode` was given."""
        if type(value) in PLAIN:
            return value
        tag, content = value
        if tag in DECODERS:
            return DECODERS[tag](content)
        if tag == "dict":
            return {self(key): self(item) for key, item in content}
        if tag in ("list", "tuple"):
            plain = set(map(type, content)) <= PLAIN  # most long lists are, and so take no call for each item
            return (list if tag == "list" else tuple)(content if plain else map(self, content))
        if tag == "numpy":
            dtype, item = np.dtype(content[0]), self(content[1])
            if dtype.kind in "mM":
                return np.int64(item).astype(dtype)
            if dtype.kind in "fiubU":  # numpy.void(n) takes n bytes
                return dtype.type(item)
        if tag not in ("array", "tensor"):
            raise ValueError(f"unknown tag {tag!r}")
        raw, entry = self.tensors.pop(content)
        name = NAMES[entry["dtype"]]
        if tag == "array":
            return raw.view(name).reshape(entry["shape"])
        import torch

        kind = getattr(torch, name)
        flat = torch.from_numpy(raw).view(kind) if raw.size else torch.empty(0, dtype=kind)
        return flat.reshape(entry["shape"])


# Entries that hold rows, by an entry beside them.
ROWS = {
    "engine": ("warm_up",),
    "clock": ("first", "waiting"),
    "forecaster": ("history", "next"),
    "kept": ("kept", "seen"),
}


def leaves(state: Any, path: str = "state", rows: bool = True) -> Iterator[tuple[str, Any]]:
    """Every array, tensor, number and text of a nested state with its path, also the arrays that hold `rows`."""
    if not isinstance(state, (Mapping, list, tuple)):
        yield path, state
        return
    items = dict(state if isinstance(state, Mapping) else enumerate(state))
    left = set() if rows else {name for beside, names in ROWS.items() if beside in items for name in names}
    for key in items:
        if key not in left:
            yield from leaves(items[key], f"{path}[{key!r}]", rows)


def not_finite(state: Any) -> Iterator[str]:
    """The path of every array and tensor of a nested state that has NaN or Inf.

    Rows of a stream learner and of a forecaster are left out: they are data, in which NaN is a missing value.
    """
    for path, value in leaves(state, rows=False):
        if is_tensor(value):
            finite: Any = value.isfinite()
        elif isinstance(value, np.ndarray) and value.dtype.kind == "f":
            finite = np.isfinite(value)
        else:
            continue
        if not bool(finite.all()):
            yield path


def tensors_of(state: Any) -> Iterator[Tensor]:
    """Every tensor in a nested state."""
    return (value for _, value in leaves(state) if is_tensor(value))
