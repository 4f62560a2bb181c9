"""The results of runs in files: results/<experiment>/<dataset>-<mode>-<method>.json, with all its runs inside.

Files are replaced atomically, so a process killed while writing leaves the old file; several processes may write at the
same time.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sepsa
from reproduction.data import metric
from reproduction.experiments import RunSpec
from reproduction.methods import slug
from reproduction.training import Outcome
from sepsa.states.output import replace

_DIGITS = 6  # significant ones
_KEYS = ("experiment", "dataset", "mode", "method", "metric", "runs")


def path(results: Path, run: RunSpec) -> Path:
    """The file that holds this run."""
    return results / run.experiment / f"{run.dataset}-{run.mode}-{slug(run.method)}.json"


def record(run: RunSpec, outcome: Outcome, device: str) -> dict[str, Any]:
    """One entry of a file's "runs"."""
    curve: dict[str, Any] = {"x": outcome.x}
    if outcome.train_curve:
        curve["train"] = [significant(value) for value in outcome.train_curve]
    curve["test"] = [significant(value) for value in outcome.test_curve]
    return {
        "lr": run.lr,
        "seed": run.seed,
        "spec": asdict(run),
        "device": device,
        "versions": versions(),
        "seconds": significant(outcome.seconds),
        "final": {"train": significant(outcome.train), "test": significant(outcome.test)},
        "diverged": outcome.diverged,
        **({"note": outcome.note} if outcome.note else {}),
        "curve": curve,
    }


def significant(value: float | None) -> float | None:
    """The number with six significant digits; None where it is not finite, which JSON cannot express."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


def versions() -> dict[str, str]:
    return {
        "sepsa": sepsa.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def read(file: Path) -> dict[str, Any]:
    """The content of a results file; raises ValueError if it is not one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} is not a results file ({error}): remove it, and `python -m reproduction run` makes it again"
        ) from None
    if not isinstance(content, dict) or set(_KEYS) - set(content):
        raise ValueError(
            f"{file} is not a results file: it must hold {', '.join(_KEYS)}; remove it, or put it elsewhere"
        )
    return content


def files(results: Path) -> list[Path]:
    """All files of runs under a results folder, sorted by name."""
    return sorted(results.glob("*/*.json"))


def missing(results: Path, runs: list[RunSpec]) -> list[RunSpec]:
    """The runs that are not recorded with exactly this specification."""
    known: dict[Path, list[Any]] = {}
    for file in {path(results, run) for run in runs}:
        # Through RunSpec, because a record older than a field of it means that field's default.
        known[file] = [_specification(entry["spec"]) for entry in read(file)["runs"]] if file.exists() else []
    return [run for run in runs if run not in known[path(results, run)]]


def _specification(spec: dict[str, Any]) -> RunSpec | None:
    try:
        return RunSpec(**spec)
    except TypeError:  # written by another version, with fields of its own
        return None


def add(results: Path, run: RunSpec, entry: dict[str, Any]) -> None:
    """Put an entry into the file of its run, in place of one with the same learning rate and seed."""
    file = path(results, run)
    content = {key: getattr(run, key) for key in _KEYS[:4]} | {"metric": metric(run.dataset), "runs": []}
    with _locked(file.parent):
        _store(file, read(file) if file.exists() else content, [entry])


def _store(file: Path, content: dict[str, Any], entries: list[dict[str, Any]]) -> None:
    runs = {(entry["lr"], entry["seed"]): entry for entry in [*content["runs"], *entries]}
    head = "".join(f" {json.dumps(key)}: {json.dumps(content[key])},\n" for key in _KEYS[:-1])
    # One run per line, so that a diff shows runs.
    lines = [json.dumps(runs[key], separators=(",", ":"), allow_nan=False) for key in sorted(runs)]
    write(file, "{\n" + head + ' "runs": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one writer, where the system can; the lock ends with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Replace a file by JSON with one line per key."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    write(file, f"{{\n{lines}\n}}\n")


def write(file: Path, text: str) -> None:
    """Replace a file, in a folder that is made, completely or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace(file, [text.encode()])
