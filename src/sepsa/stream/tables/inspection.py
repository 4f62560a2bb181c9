"""`sepsa inspect`: the contents of a checkpoint; and models that `sepsa stream` has saved."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from sepsa.states.file import CheckpointError, Header, older, read_path
from sepsa.states.objects import build
from sepsa.states.tree import tensors_of
from sepsa.stream.tables.model import TableModel
from sepsa.stream.tables.output import error_of


def load_model(path: Path, kind: str = "sepsa stream") -> tuple[Any, Header]:
    """A model that the command `kind` has saved."""
    try:
        header, state = read_path(path)
        if header.kind != kind:
            raise CheckpointError(
                f"{path} holds a {header.kind}, and this command takes what `{kind} --checkpoint` saves: "
                "load it in Python by sepsa.load"
            )
        model = build(header.kind, header.configuration, state, str(path))
    except CheckpointError as error:
        earlier = older(path, 1)
        raise CheckpointError(f"{error}{f' ({earlier} is one)' if earlier.exists() else ''}") from None
    return model, header


def inspect(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, when it was saved and whether its numbers are finite; it is verified."""
    header, state = read_path(path)
    arrays = list(tensors_of(state))
    contents: dict[str, Any] = {
        "file": str(path),
        "kind": header.kind,
        "format": header.format,
        "written by": f"sepsa {header.library}",
        "saved": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(header.saved)),
        "age": age(time.time() - header.saved),
        "configuration": header.configuration,
        "tensors": len(header.tensors),
        "bytes": header.bytes,
        "checksums": "all fit",
        "finite": all(finite(array) for array in arrays),
    }
    if header.kind == "sepsa stream":
        model: TableModel = build(header.kind, header.configuration, state, str(path))
        contents |= describe_model(model, header)
    return contents


def describe_model(model: TableModel, header: Header) -> dict[str, Any]:
    """Rows, errors, columns and position of a model that `sepsa stream` has saved."""
    learner = model.learner
    contents: dict[str, Any] = {
        "rows": model.trace.rows,
        "quarantined": model.quarantined,
        "error": error_of(model),
        "recent error": error_of(model, recent=True),
        "alarms": model.trace.alarm_count,
        "columns": column_names(model),
        "inputs": len(model.inputs.names),
        "position": (header.position or {}).get("table"),
    }
    if model.classify:
        contents["classes"] = list(model.classes)
    if learner is not None:
        contents["effective samples"] = learner.engine.samples
        if not model.classify:
            contents["noise"] = float(np.sqrt(learner.noise_variance()[0]))
    return contents


def column_names(model: TableModel) -> list[str]:
    """The columns that the model's inputs encode."""
    inputs = model.inputs
    names = [name for name in inputs.names if name not in inputs.indicators]
    return list(dict.fromkeys([*(name.rpartition(":")[0] or name for name in names), *names, *inputs.texts]))


def spelled(value: Any) -> str:
    """The value of an option as on the command line."""
    return (",".join(map(str, value)) or "nothing") if isinstance(value, tuple) else str(value)


def finite(array: Any) -> bool:
    """Whether an array or tensor has no NaN or Inf."""
    values = np.asarray(array.detach().cpu().float() if hasattr(array, "detach") else array)
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


def age(seconds: float) -> str:
    """A duration in its largest unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} seconds"
