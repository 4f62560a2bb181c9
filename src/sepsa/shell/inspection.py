"""`sepsa inspect`: what a checkpoint contains."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from sepsa.shell.messages import FINISHED, check_stdout, duration, print_text
from sepsa.shell.model import TableModel
from sepsa.shell.options import InspectOptions
from sepsa.shell.output import error_of
from sepsa.states.file import CheckpointError, read_path
from sepsa.states.objects import unpack
from sepsa.states.tree import not_finite


def show(options: InspectOptions) -> int:
    """Print what a checkpoint contains."""
    check_stdout("open it, or redirect it to a file")
    contents = inspect(options.model)
    width = max(map(len, contents))
    lines = [f"{name:<{width}}  {plain(value)}\n" for name, value in contents.items()]
    print_text(json.dumps(contents, default=str) + "\n" if options.json else "".join(lines))
    return FINISHED


def plain(value: Any) -> str:
    """A value in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        shown = ", ".join(map(str, value[:12]))
        return f"{shown}, ... ({len(value)})" if len(value) > 12 else shown or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def load_model(path: Path, *kinds: str) -> tuple[Any, dict[str, Any]]:
    """A model that one of these commands has saved, and the sizes of files and the place in the table saved with it."""
    header, state = read_path(path)
    if header.kind not in kinds:
        commands = " or ".join(f"`{kind} --checkpoint`" for kind in kinds)
        raise CheckpointError(
            f"{path} holds a {header.kind}, and this command takes what {commands} saves: "
            "load it in Python by sepsa.load"
        )
    return unpack(header, state, None, str(path)), header.position if isinstance(header.position, dict) else {}


def inspect(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, when it was saved and whether its numbers are finite; it is verified."""
    header, state = read_path(path)
    contents: dict[str, Any] = {
        "file": str(path),
        "kind": header.kind,
        "format": header.format,
        "written by": f"sepsa {header.library}",
        "saved": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(header.saved)),
        "age": duration(time.time() - header.saved),
        "configuration": header.configuration,
        "tensors": len(header.tensors),
        "bytes": header.bytes,
        "checksums": "all fit",
        "finite": not any(not_finite(state)),
    }
    if header.kind == "sepsa stream":
        model: TableModel = unpack(header, state, None, str(path))
        contents |= {
            "rows": model.trace.rows,
            "quarantined": model.quarantined,
            "error": error_of(model),
            "recent error": error_of(model, recent=True),
            "columns": sorted(model.inputs.cells),
            "inputs": len(model.inputs.names),
            "numbers and texts": model.inputs.mixed_columns(),
            "position": header.position,
            "classes": list(model.learner.outputs) if model.classify else [],
            "bounded rows": f"{model.bounded:.2%}",
        }
    return contents


def spelled(value: Any) -> str:
    """The value of an option as on the command line."""
    return (",".join(map(str, value)) or "nothing") if isinstance(value, tuple) else str(value)
