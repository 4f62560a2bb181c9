"""Tensors in states, recognized without an import of torch: before it is imported, there is none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

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
    """Whether this is a tensor."""
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
