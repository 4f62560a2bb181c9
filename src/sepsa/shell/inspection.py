"""What is known of a model: `sepsa inspect`, which shows a checkpoint, and the HTML report of `sepsa stream`."""

from __future__ import annotations

import csv
import math
import time
from collections import Counter
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sepsa.learner.columns.inputs import DATE_PARTS, date_names
from sepsa.shell.formats import kind_of_file
from sepsa.shell.model import TableModel
from sepsa.shell.options import TableOptions
from sepsa.shell.output import duration, error_of
from sepsa.shell.reading import Reading
from sepsa.shell.trace import WINDOW, ErrorTrace
from sepsa.states.file import FIRST, CheckpointError, Header, older, read_path
from sepsa.states.objects import unpack
from sepsa.states.output import replace
from sepsa.states.tree import not_finite


def what_it_is(path: Path) -> str:
    """The error for a file that is not a checkpoint: what it seems to be and what to do; empty if that is unknown."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start[8:].startswith(FIRST):  # a damaged checkpoint
        return ""
    kind = kind_of_file(start)
    if not kind and start and b"\0" not in start and start[:1].isascii():
        kind = "JSON" if start.lstrip().startswith((b"{", b"[")) else "a text, perhaps a CSV table"
    if "pickle" in kind or "torch" in kind:
        return (
            f"{path} is {kind}, not a checkpoint of sepsa: load it with the library that wrote it, and save it with "
            "sepsa.save"
        )
    learn = f"`sepsa stream {path} --target COLUMN --checkpoint model.sepsa` learns a table and saves the model"
    return kind and f"{path} is {kind}, not a checkpoint of sepsa: {learn}"


def read_checkpoint(path: Path) -> tuple[Header, Any]:
    """Header and state of a checkpoint; the error for another file says what kind of file it is."""
    try:
        return read_path(path)
    except CheckpointError as error:
        earlier = older(path, 1)
        other = what_it_is(path) if path.is_file() and not earlier.exists() else ""
        raise CheckpointError(other or f"{error}{f' ({earlier} is one)' if earlier.exists() else ''}") from None


def load_model(path: Path, *kinds: str) -> tuple[Any, Header]:
    """A model that one of these commands has saved."""
    header, state = read_checkpoint(path)
    if header.kind not in kinds:
        commands = " or ".join(f"`{kind} --checkpoint`" for kind in kinds)
        raise CheckpointError(
            f"{path} holds a {header.kind}, and this command takes what {commands} saves: "
            "load it in Python by sepsa.load"
        )
    return unpack(header, state, None, str(path)), header


def inspect(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, when it was saved and whether its numbers are finite; it is verified."""
    header, state = read_checkpoint(path)
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
        contents |= describe_model(unpack(header, state, None, str(path)), header)
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
        "numbers and texts": model.inputs.mixed_columns(),
        "position": header.position.get("table") if isinstance(header.position, dict) else None,
    }
    if model.classify:
        contents["classes"] = list(model.classes)
    if learner is not None:
        contents["effective samples"] = learner.engine.samples
        contents["bounded rows"] = f"{model.bounded:.2%}"
        if not model.classify:
            contents["noise"] = float(np.sqrt(learner.noise_variance()[0]))
    return contents


def column_names(model: TableModel) -> list[str]:
    """The columns that the model's inputs encode."""
    inputs = model.inputs
    names = dict.fromkeys(name for name in inputs.names if name not in inputs.indicators)
    days = f":{DATE_PARTS[0]}"
    for column in [name.removesuffix(days) for name in names if name.endswith(days)]:
        if names.keys() >= {*date_names(column)}:
            names = {name: None for name in names if name.rpartition(":")[0] != column} | {column: None}
    return list(names | dict.fromkeys(inputs.texts))


def spelled(value: Any) -> str:
    """The value of an option as on the command line."""
    return (",".join(map(str, value)) or "nothing") if isinstance(value, tuple) else str(value)


# ---------------------------------------------------------------------- the report


def write_report(path: Path, source: str, model: TableModel, quarantine: Path) -> None:
    """Write a page that needs no network; `quarantine` is the file of rows that could not be used."""
    lost = []
    if quarantine.is_file() and model.quarantined:
        with open(quarantine, encoding="utf-8", newline="") as lines:
            lost = list(islice(csv.reader(lines), 1, 21))  # behind the header
    options = model.get_params()
    write_template(
        path,
        "report.html.jinja",
        source=source,
        model=model,
        curve=error_curve(model.trace),
        latest=by_class(model) if model.classify else actual_and_predicted(model),
        window=WINDOW,
        lost=lost,
        settings=[
            (each.name, spelled(options[each.name]), each.metadata["help"])
            for each in (*fields(TableOptions), *fields(Reading))
        ],
        columns=column_names(model),
        quarantine=quarantine,
        chosen={} if model.learner is None else model.learner.engine.chosen,
    )


def write_template(path: Path, name: str, **values: Any) -> None:
    """Write a page with these values, and the time as `when`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sepsa.shell", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.globals["ticks"] = ticks
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    replace(path, [environment.get_template(name).render(**values, when=when).encode()])


@dataclass
class Chart:
    """A plane of numbers as SVG coordinates, with room for the labels of its ticks."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: int = 300
    WIDTH, LEFT, RIGHT, TOP, BOTTOM = 700, 92, 40, 16, 62

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The place of a pair of numbers."""
        right, down = self.WIDTH - self.LEFT - self.RIGHT, self.height - self.TOP - self.BOTTOM
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return round(self.LEFT + across * right, 1), round(self.TOP + (1 - up) * down, 1)


def error_curve(trace: ErrorTrace) -> dict[str, Any]:
    """The mean error over rows: the chart, the line, its points where these are few, and the places of alarms."""
    points = [*trace.points, *([math.fsum(trace.part) / len(trace.part)] if trace.part else [])] or [trace.mean]
    chart = Chart((0.0, max(1, trace.rows)), (0.0, max(max(points), 1e-12) * 1.08))
    step = trace.rows / len(points)
    places = [chart.at((i + 0.5) * step, value) for i, value in enumerate(points)]
    line = " ".join(f"{x},{y}" for x, y in places)
    dots = places if len(places) < 3 else []
    return {"chart": chart, "line": line, "dots": dots, "alarms": [chart.at(alarm[0], 0.0) for alarm in trace.alarms]}


def actual_and_predicted(model: TableModel) -> dict[str, Any]:
    """The last rows as points, with their mean absolute error and that of their mean as the prediction."""
    if not model.latest:
        return {}
    actual, predicted = np.array(model.latest, np.float64).T
    low, high = float(min(actual.min(), predicted.min())), float(max(actual.max(), predicted.max()))
    room = 0.04 * (high - low) or max(abs(low), 1.0)
    ends = low - room, high + room
    chart = Chart(ends, ends, height=460)
    return {
        "chart": chart,
        "dots": [chart.at(a, p) for a, p in zip(actual.tolist(), predicted.tolist(), strict=True)],
        "ends": (chart.at(ends[0], ends[0]), chart.at(ends[1], ends[1])),
        "error": np.abs(actual - predicted).mean(),
        "of_mean": np.abs(actual - actual.mean()).mean(),
    }


def by_class(model: TableModel) -> list[tuple[str, int, float, list[tuple[str, int]]]]:
    """The last rows by class: the class, its rows, the share predicted right, and the most frequent mistake."""
    rows = []
    for label, count in Counter(actual for actual, _ in model.latest).most_common(20):
        wrong = Counter(predicted for actual, predicted in model.latest if actual == label and predicted != label)
        rows.append((label, count, 1 - wrong.total() / count, wrong.most_common(1)))
    return rows


def ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers from `low` to `high`."""
    span = high - low
    if not 0 < span < math.inf:
        return [low]
    step = 10 ** math.floor(math.log10(span))
    step = next(step * f for f in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if span / (step * f) <= 7)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
