"""Nested states as JSON beside a list of tensors, and back: numbers, strings, arrays, tensors, lists, tuples, dicts."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# The names that safetensors gives to dtypes, and those of NumPy and torch.
NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
NUMPY_ALONE = {"U64", "U32", "U16"}  # torch computes little with them
CODES = {name: code for code, name in NAMES.items()}


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor; before torch is imported, there is none."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def is_torch_dtype(value: object) -> bool:
    """Whether this is a dtype of torch."""
    return isinstance(value, getattr(sys.modules.get("torch"), "dtype", ()))


def code_of(dtype: Any) -> str | None:
    """The code of a dtype of NumPy or torch; None: none."""
    if not is_torch_dtype(dtype):
        return CODES.get(dtype.name)
    code = CODES.get(str(dtype).removeprefix("torch."))
    return None if code in NUMPY_ALONE else code


def torch_dtype(code: str) -> Any:
    """The dtype of torch with this code; a KeyError where there is none."""
    import torch

    return {each: getattr(torch, name) for each, name in NAMES.items() if each not in NUMPY_ALONE}[code]


NUMPY = {code: np.dtype(name).type for code, name in NAMES.items() if code != "BF16"}
SIZES = {code: np.dtype(kind).itemsize for code, kind in NUMPY.items()} | {"BF16": 2}
PLAIN = {type(None), bool, int, float, str}  # JSON as they are
TYPES = {"bool": bool, "int": int, "float": float, "str": str}
# The values that their tag and content alone determine.
DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "str_": np.str_,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "torch.dtype": torch_dtype,
    "numpy.dtype": NUMPY.__getitem__,
    "type": TYPES.__getitem__,
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
        if type(value) in PLAIN:
            return ["float", repr(value)] if type(value) is float and not math.isfinite(value) else value
        if isinstance(value, Mapping):
            pairs = [[self.encode(k, f"a key of {where}"), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return ["dict", pairs]
        if isinstance(value, (list, tuple)):
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return ["tuple" if isinstance(value, tuple) else "list", items]
        if isinstance(value, bytes):
            return ["bytes", base64.b64encode(value).decode()]
        if is_tensor(value):
            if code_of(value.dtype) is None or str(value.layout) != "torch.strided":
                raise TypeError(f"{where} must be a dense real tensor to be saved, got {value.dtype}, {value.layout}")
            return ["tensor", self._index(value)]
        if isinstance(value, np.ndarray):
            return self._array(value, where)
        if type(value) is np.str_:
            return ["str_", str(value)]
        if isinstance(value, np.generic):
            return ["generic", self.encode(np.asarray(value), where)]
        if is_torch_dtype(value) and code_of(value):
            return ["torch.dtype", code_of(value)]
        if isinstance(value, type) and issubclass(value, np.generic) and code_of(np.dtype(value)):
            return ["numpy.dtype", code_of(np.dtype(value))]
        if isinstance(value, type) and value in TYPES.values():
            return ["type", value.__name__]
        raise TypeError(
            f"{where} must be made of numbers, strings, arrays, tensors, lists, tuples and dicts to be saved, "
            f"got {type(value).__module__}.{type(value).__name__}: save an object with state_dict, or pickle it"
        )

    def _array(self, value: np.ndarray[Any, Any], where: str) -> Any:
        native = value.dtype.newbyteorder("=")
        if code_of(native):
            return ["array", self._index(np.asarray(value, native, order="C"))]
        if native.kind == "U":
            width = native.itemsize // 4 or 1
            codes = np.ascontiguousarray(value, f"=U{width}").reshape(-1).view(np.uint32)
            return ["text", [list(value.shape), width, self._index(codes)]]
        if native.hasobject:
            items = [self.encode(item, f"{where}[{i}]") for i, item in enumerate(value.reshape(-1))]
            return ["objects", [list(value.shape), items]]
        raise TypeError(f"{where} must be an array of numbers, booleans or strings to be saved, got {value.dtype}")

    def _index(self, value: Any) -> int:
        self.tensors.append(value)
        return len(self.tensors) - 1


class Decoder:
    """Decodes what `Tree.encode` made, from its JSON, the raw bytes of the tensors and their table entries.

    Each tensor is decoded once, as it was encoded, and then None in `tensors`: no file takes more memory than its size.
    """

    def __init__(self, tensors: list[Any], entries: dict[str, dict[str, Any]]) -> None:
        self.tensors, self.entries = tensors, entries

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
        if tag == "tensor":
            import torch

            raw, entry = self._raw(content)
            dtype = torch_dtype(entry["dtype"])
            flat = torch.from_numpy(raw).view(dtype) if raw.size else torch.empty(0, dtype=dtype)
            return flat.reshape(entry["shape"])
        if tag == "array":
            raw, entry = self._raw(content)
            return raw.view(NUMPY[entry["dtype"]]).reshape(entry["shape"])
        if tag == "text":
            shape, width, index = content
            return self._raw(index)[0].view(f"<U{width}").reshape(shape)
        if tag == "objects":
            shape, items = content
            array = np.empty(len(items), object)
            array[:] = list(map(self, items))
            return array.reshape(shape)
        if tag == "generic":
            return self(content)[()]
        raise ValueError(f"unknown tag {tag!r}")

    def _raw(self, index: int) -> tuple[Any, dict[str, Any]]:
        """The bytes of a tensor, and its entry in the table."""
        raw, self.tensors[index] = self.tensors[index], None
        if raw is None:
            raise ValueError(f"tensor {index} is named twice")
        return raw, self.entries[str(index)]


# Entries that hold rows, by an entry beside them.
ROWS = {
    "engine": ("warm_up",),
    "clock": ("first", "waiting"),
    "forecaster": ("history", "next"),
    "kept": ("kept", "seen"),
}


def not_finite(state: Any, path: str = "state") -> Iterator[str]:
    """The path of every array and tensor of a nested state that has NaN or Inf.

    Rows of a stream learner and of a forecaster are left out: they are data, in which NaN is a missing value.
    """
    if is_tensor(state):
        if not bool(state.isfinite().all()):
            yield path
    elif isinstance(state, np.ndarray):
        if state.dtype.kind == "f" and not bool(np.isfinite(state).all()):
            yield path
    elif isinstance(state, (Mapping, list, tuple)):
        items = dict(state if isinstance(state, Mapping) else enumerate(state))
        rows = {name for beside, names in ROWS.items() if beside in items for name in names}
        for key in items:
            if key not in rows:
                yield from not_finite(items[key], f"{path}[{key!r}]")


def tensors_of(state: Any) -> Iterator[Any]:
    """Every array and tensor in a nested state."""
    if isinstance(state, np.ndarray) or is_tensor(state):
        yield state
    elif isinstance(state, (Mapping, list, tuple)):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from tensors_of(value)
