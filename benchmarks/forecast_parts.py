"""What each part of `SepSAForecaster` gains at `every=1`: errors of forecasts, leaving out one at a time.

    python benchmarks/forecast_parts.py --data FOLDER [--half choose|report] [--only PART ...]
    python benchmarks/forecast_parts.py --table

Parts are left out by switches in a copy of the source, which is compiled once. The sets are those of `trends.py`,
`forecast_real.py` (without random walks) and `m4.py`, with their packages and FOLDER. The half `choose` decides what is
dropped; of M4 it has series by which something was chosen, and `report` some of the others. The gain of a part is the
mean over the series of a set, or over series and steps, of log(error without it / error with all).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).with_suffix(".json")
SETS = ("trends", "real", "M4 weekly", "M4 hourly")
M4_SERIES = {"choose": {"weekly": slice(1, None, 8), "hourly": slice(1, None, 16)}}
M4_SERIES["report"] = {"weekly": slice(3, None, 8), "hourly": slice(3, None, 16)}


class Switch(NamedTuple):
    """Where a copy of the source asks whether a part is left out, `{out}`: in a file, a text and its replacement."""

    parts: tuple[str, ...]
    file: str
    text: str
    replacement: str


def naive(part: str, condition: str) -> Switch:
    """A naive forecast that never leads: those of the places i in KNOWN that fulfil a condition."""
    text = "            leader = follow_leader("
    drop = f"            for i in range(len(own)):\n                if {{out}} and {condition}:\n"
    return Switch((part,), "choice.py", text, drop + f"                    own[i, LEAD] = -1.0\n{text}")


def of_seasons(text: str) -> Switch:
    """What the stack sees of a season's profile, filled by this call."""
    space = " " * (len(text) - len(text.lstrip()))
    drop = f"{space}for i in range(periods.size):\n{space}    if {{out}}:\n"
    drop += f"{space}        x[3 + 4 * i], x[4 + 4 * i] = 0.0, 0.0\n"
    return Switch(("profile in the stack",), "choice.py", text, f"{text}\n{drop.rstrip()}")


BASES = "periods.size + 1"  # naive forecasts by last values
WITHOUT = "given.OPTIONS(model).without"
SWITCHES = (
    Switch(
        ("own heads", "joint heads"),
        "step.py",
        "        best_losses(model, family)\n    for family in range(JOINT + 1):\n        add_forecasts(",
        f"        if {WITHOUT} != family + 1:\n            best_losses(model, family)\n"
        "    for family in range(JOINT + 1):\n"
        f"        if {WITHOUT} != family + 1:\n            add_forecasts(",
    ),
    Switch(
        ("terms times sines of a season",),
        "heads.py",
        "x[n] *= common[factor[g, n]]",
        "x[n] *= 0.0 if {out} else common[factor[g, n]]",
    ),
    Switch(
        ("stack",),
        "choice.py",
        "min(max(mean + dot(W[j, h], x), low",
        "min(max(mean + (0.0 if {out} else dot(W[j, h], x)), low",
    ),
    of_seasons(
        "            seasonal(periods, profile[j], h, phase - h - 1, last, lags[j], now - h - 1, now, off[at, j], x)"
    ),
    of_seasons(
        "                seasonal(periods, profile[j], h, phase, z[j], lags[j], now, now + h + 1, off[at, j], x)"
    ),
    naive("last values of seasons", f"0 < i < {BASES}"),
    naive("drifts", f"{BASES} <= i < 2 * ({BASES})"),
    naive("smoothing of a trend", f"i == 2 * ({BASES})"),
    naive("smoothing with a season", f"i > 2 * ({BASES})"),
    Switch(
        ("leader of the step before",), "choice.py", "if h > 0 else -1, share", "if h > 0 and not {out} else -1, share"
    ),
    Switch(
        ("guard by the latest errors",),
        "choice.py",
        "options.sure, options.guard",
        "options.sure, options.guard + (1e9 if {out} else 0.0)",
    ),
)
PARTS = tuple(dict.fromkeys(part for switch in SWITCHES for part in switch.parts))


def with_switches(folder: str) -> None:
    """Copy the source to a folder, with a number among the options that says which part is left out."""
    shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    option = Switch((), "parts.py", "OPTIONS = Record(\n", "OPTIONS = Record(\n    without=Field(float, 0.0),\n")
    for switch in (option, *SWITCHES):
        path = Path(folder, "sepsa/stream/forecast/kernels", switch.file)
        source = path.read_text()
        if switch.text not in source:
            raise SystemExit(f"{switch.file} must have the text {switch.text!r}")
        out = f"({WITHOUT} == {PARTS.index(switch.parts[0]) + 1})" if switch.parts else ""
        path.write_text(source.replace(switch.text, switch.replacement.replace("{out}", out)))


def measured(half: str, data: Path) -> dict[str, list[float]]:
    """The errors of each set, of each series or of each step of it."""
    import forecast_real
    import m4
    import trends

    from sepsa import SepSAForecaster

    warnings.simplefilter("ignore")
    found: dict[str, list[float]] = {name: [] for name in SETS}
    found["trends"] = [trends.ours(make()) for make in trends.HALVES[half].values()]
    for name, make in forecast_real.HALVES[half].items():
        if not name.startswith("random walk"):
            real = make()
            made, first = SepSAForecaster(max(real.steps)).prequential(real.y, times=real.times), len(real.y) // 2
            found["real"] += [forecast_real.absolute_error(real.y, made[:, h - 1], h, first) for h in real.steps]
    for name, some in M4_SERIES[half].items():
        arrays = np.load(data / f"m4-{name}-even.npz")
        series = np.split(arrays["rows"].astype(float), np.cumsum(arrays["lengths"])[:-1])
        for y, test in zip(series[some], arrays["test"][some].astype(float), strict=True):
            found[f"M4 {name}"].append(m4.measured(m4.KINDS[name].season, y, test)[0][1])
    return found


def measure(half: str, data: Path, parts: list[str]) -> None:
    """Print the errors without each part, by the copy of the source that is imported."""
    from sepsa.stream.forecast import model

    for part in parts:
        model.OPTIONS["without"] = PARTS.index(part) + 1 if part in PARTS else 0
        print(json.dumps({part: measured(half, data)}), flush=True)


def gains(errors: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """The gain of each part on each set."""
    whole = errors["nothing"]
    return {
        part: {name: float(np.mean(np.log(np.array(own[name]) / whole[name]))) for name in SETS}
        for part, own in errors.items()
        if part != "nothing"
    }


def print_table(found: dict[str, Any]) -> None:
    """Print the gains in percent, a column for each set and half."""
    halves = [half for half in ("choose", "report") if half in found]
    print("| left out | " + " | ".join(f"{name}, {half}" for half in halves for name in SETS) + " |")
    print("|---|" + "---|" * len(halves) * len(SETS))
    every = {half: gains(found[half]) for half in halves}
    for part in every["choose"]:
        cells = [every[half].get(part, {}).get(name) for half in halves for name in SETS]
        print(f"| {part} | " + " | ".join("" if gain is None else f"{100 * gain:+.2f}" for gain in cells) + " |")


def main() -> None:
    """Measure the parts that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--half", choices=("choose", "report"), default="choose")
    parser.add_argument("--only", nargs="*", default=PARTS, help="parts")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.half, given.data, given.only)
        return
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if given.table:
        print_table(found)
        return
    from measure import write

    errors = found.setdefault(given.half, {})
    parts = [part for part in ("nothing", *given.only) if part not in errors]
    with tempfile.TemporaryDirectory() as folder:
        with_switches(folder)
        paths = [folder, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        command = [
            sys.executable,
            __file__,
            "--measure",
            "--half",
            given.half,
            "--data",
            str(given.data),
            "--only",
            *parts,
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                errors |= json.loads(line)
                write(__file__, found)
                part, gain = next(iter(json.loads(line))), gains(errors)
                print(f"{part:30}", *(f"{name} {100 * of:+.2f}" for name, of in gain.get(part, {}).items()), flush=True)
    if process.returncode:
        raise SystemExit(process.returncode)


if __name__ == "__main__":
    main()
