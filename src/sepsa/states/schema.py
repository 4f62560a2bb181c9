"""The checks of saved states: entries are read by name, and a damaged one raises an error before anything changes.

A saved state is nested dicts and lists of tensors, NumPy arrays, numbers, strings, booleans and None.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Set
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sepsa.states.tree import is_tensor
from sepsa.validation import is_number

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

Shape: TypeAlias = tuple[int | None, ...]  # None: any length
DType: TypeAlias = "torch.dtype | np.dtype[Any]"
LARGEST_FLOAT = sys.float_info.max
LARGEST_INTEGER = 2**63 - 1
SMALL = 1 << 28  # bytes of a model that any checkpoint may build, as one of wide layers that has learned nothing
_most_bytes: ContextVar[float] = ContextVar("_most_bytes", default=math.inf)


@contextlib.contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Limit `check_memory` to what a checkpoint with tensors of `size` bytes can need."""
    token = _most_bytes.set(max(SMALL, 2 * size))
    try:
        yield
    finally:
        _most_bytes.reset(token)


def check_memory(name: str, size: int) -> None:
    """Raise an error if `size` bytes are more than the checkpoint being loaded can fill."""
    if size > _most_bytes.get():
        raise ValueError(f"{name} would take {size:,} bytes of memory, for which the checkpoint is too small")


class Entries:
    """The entries of a saved dict or list: each method returns a valid entry or raises a ValueError."""

    def __init__(self, name: str, values: Any) -> None:
        self.name, self.values = name, values

    def __getitem__(self, key: Any) -> Any:
        return self.values[key]

    def __len__(self) -> int:
        return len(self.values)

    def path(self, key: Any) -> str:
        """The name of an entry in an error, such as state_dict['members'][0]."""
        return f"{self.name}[{key!r}]"

    def damaged(self, key: Any, expected: str, got: object) -> ValueError:
        return damaged(self.path(key), expected, got)

    def number(self, key: Any, low: float = -LARGEST_FLOAT, high: float = LARGEST_FLOAT) -> float:
        """A finite number in [low, high], not a bool."""
        value = float(self[key]) if isinstance(self[key], np.floating) else self[key]
        if not is_number(value) or not low <= value <= high:
            least = "a finite number" if low == -LARGEST_FLOAT else f"a number of at least {low:g}"
            expected = least if high == LARGEST_FLOAT else f"a number in [{low:g}, {high:g}]"
            raise self.damaged(key, expected, brief(value))
        return float(value)

    def integer(self, key: Any, low: int = 0, high: int = LARGEST_INTEGER) -> int:
        """An integer in [low, high], not a bool."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
            valid = f"of at least {low}" if high == LARGEST_INTEGER else f"in [{low}, {high}]"
            raise self.damaged(key, f"an integer {valid}", brief(value))
        return int(value)

    def tensor(self, key: Any, shape: Shape, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """A contiguous copy of a dense, finite tensor, on `device` if given; None in a shape is any length."""
        import torch

        check_array(self.path(key), self[key], shape, dtype)
        copy: Tensor = self[key].detach().to(copy=True, memory_format=torch.contiguous_format)
        return copy if device is None else copy.to(device)

    def array(self, key: Any, shape: Shape, dtype: Any = np.float64) -> NDArray[Any]:
        """A copy of a NumPy array, of any numbers; None in a shape is any length."""
        check_array(self.path(key), self[key], shape, np.dtype(dtype))
        return self[key].copy()

    def equal(self, key: Any, wanted: object) -> None:
        """Raise an error for an entry that differs from `wanted`, the setting of this object."""
        if repr(self[key]) != repr(wanted):
            got = brief(self[key])
            raise ValueError(f"{self.path(key)} must be {wanted!r}, as this object was made, got {got}")

    def entries(self, key: Any, keys: Set[str]) -> Entries:
        """The entries of a dict that has these keys and no others."""
        return read(self.path(key), self[key], keys)

    def mapping(self, key: Any) -> Entries:
        """The entries of a dict of any keys."""
        if not isinstance(self[key], Mapping):
            raise self.damaged(key, "a dict", brief(self[key]))
        return Entries(self.path(key), self[key])

    def items(self, key: Any, count: int | None = None) -> Entries:
        """The items of a list or tuple, `count` of them if given."""
        value = self[key]
        if not isinstance(value, (list, tuple)) or count not in (None, len(value)):
            got = f"{len(value)} items" if isinstance(value, (list, tuple)) else type(value).__name__
            raise self.damaged(key, "a list" if count is None else f"a list of {count} items", got)
        return Entries(self.path(key), list(value))


def read(name: str, value: object, keys: Set[str], owner: str = "this version") -> Entries:
    """The entries of a dict of these keys, and no others; `owner` is what saves it."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict, got {type(value).__name__}")
    missing, extra = sorted(keys - set(value)), sorted(map(str, set(value) - keys))
    if missing or extra:
        raise ValueError(
            f"{name} has other entries than {owner} saves: missing {missing}, unexpected {extra}: it was saved by "
            "another development version, or is damaged"
        )
    return Entries(name, value)


def check_array(name: str, value: Any, shape: Shape, dtype: DType, *, low: float = -math.inf) -> None:
    """Check that this is a NumPy array of this shape and dtype; or a dense tensor, finite and at least `low`."""
    is_array = isinstance(dtype, np.dtype)
    kind = "an array" if is_array else "a tensor"
    fits = isinstance(value, np.ndarray) if is_array else is_tensor(value) and not value.is_nested
    if (
        not fits
        or len(value.shape) != len(shape)
        or any(n not in (None, m) for n, m in zip(shape, value.shape, strict=True))
    ):
        expected = str(shape).replace("None", "n")
        got = tuple(value.shape) if fits else kind_of(value)
        raise ValueError(
            f"{name} must be {kind} of shape {expected}, got {got}: the checkpoint belongs to a model of another size"
        )
    if value.dtype != dtype or not (is_array or (str(value.layout) == "torch.strided" and not value.is_meta)):
        raise damaged(name, f"{kind} of {dtype} in dense layout", kind_of(value))
    if is_array:
        return
    wrong = value[~((value > -math.inf) & (value < math.inf) & (value >= low))]
    if len(wrong):
        least = "" if low == -math.inf else f" and at least {low:g}"
        raise damaged(name, f"finite{least}", wrong[0].item())


@contextlib.contextmanager
def settings(name: str) -> Iterator[None]:
    """A context in which an error, as of a check of settings, becomes that of the saved entry."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name}: {error or type(error).__name__}: the checkpoint is damaged") from None


def damaged(name: str, expected: str, got: object) -> ValueError:
    """The error for an invalid entry."""
    return ValueError(f"{name} must be {expected}, got {got}: the checkpoint is damaged")


def brief(value: object) -> str:
    """The repr of a value in an error, or its type where that is long."""
    text = repr(value)
    return text if len(text) < 80 else kind_of(value)


def kind_of(value: object) -> str:
    """The type of a value in an error, with the dtype of an array or tensor."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    if is_tensor(value):
        return f"a tensor of {value.dtype}, layout {value.layout}, on {value.device}"
    return type(value).__name__
