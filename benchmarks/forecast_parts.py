"""What each part of `SepSAForecaster` gains at `every=1`: errors of forecasts, leaving out one at a time.

    python benchmarks/forecast_parts.py --data FOLDER [--half choose|report] [--only NAME]
    python benchmarks/forecast_parts.py --table

A part is left out by a change of a few lines in a copy of the source. The sets are those of `trends.py`,
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
KERNELS = "stream/forecast/kernels"
SETS = ("trends", "real", "M4 weekly", "M4 hourly")
M4_SERIES = {"choose": {"weekly": slice(1, None, 8), "hourly": slice(1, None, 16)}}
M4_SERIES["report"] = {"weekly": slice(3, None, 8), "hourly": slice(3, None, 16)}
BASES = "(len(known) - 1) // 2"  # the last value and that of each season


class Without(NamedTuple):
    """A part, and the change that leaves it out: in a file of the package, a text and its replacement."""

    part: str
    file: str = ""
    text: str = ""
    replacement: str = ""


def naive(part: str, condition: str) -> Without:
    """A naive forecast that is never used: that of the places i in KNOWN which fulfil a condition."""
    text = "for i in range(len(known)):\n        gain, square"
    replacement = f"for i in range(len(known)):\n        if {condition}:\n            continue\n        gain, square"
    return Without(part, f"{KERNELS}/choice.py", text, replacement)


PARTS = (
    Without("nothing"),
    Without(
        "own heads",
        f"{KERNELS}/step.py",
        "for family in range(JOINT + 1):\n        learn_inputs(model, family, t, now)\n"
        "        best_losses(model, family)\n    for family in range(JOINT + 1):",
        "for family in range(JOINT + 1):\n        learn_inputs(model, family, t, now)\n"
        "    for family in range(JOINT, JOINT + 1):\n        best_losses(model, family)\n"
        "    for family in range(JOINT, JOINT + 1):",
    ),
    Without(
        "joint heads",
        f"{KERNELS}/step.py",
        "for family in range(JOINT + 1):\n        learn_inputs(model, family, t, now)\n"
        "        best_losses(model, family)\n    for family in range(JOINT + 1):",
        "for family in range(JOINT + 1):\n        learn_inputs(model, family, t, now)\n"
        "    for family in range(JOINT):\n        best_losses(model, family)\n    for family in range(JOINT):",
    ),
    Without(
        "terms times sines of a season",
        "stream/forecast/model.py",
        "for factor in (range(1, 5) if season else ())]",
        "for factor in ()]",
    ),
    Without("stack", f"{KERNELS}/choice.py", "min(max(mean + dot(W[j, h], x), low", "min(max(mean, low"),
    Without("profile in the stack", f"{KERNELS}/choice.py", "= profile[i, int((phase + h + 1) % period)] - last", "= 0.0"),
    Without("distance from the profile in the stack", f"{KERNELS}/choice.py", "x[4 + 4 * i] = off[i]", "x[4 + 4 * i] = 0.0"),
    Without(
        "change over a season in the stack",
        f"{KERNELS}/choice.py",
        "x[5 + 4 * i] = last - lags[now - math.floor(period + 0.5)]",
        "x[5 + 4 * i] = 0.0",
    ),
    naive("last values of seasons", f"0 < i < {BASES}"),
    naive("drifts", f"{BASES} <= i < 2 * {BASES}"),
    naive("smoothing of a trend", f"i == 2 * {BASES}"),
    naive("smoothing with a season", f"i > 2 * {BASES}"),
    Without(
        "leader of the step before",
        f"{KERNELS}/choice.py",
        "certainty = 0.5 * least if i == near else least",
        "certainty = least",
    ),
    Without("guard by the latest errors", f"{KERNELS}/choice.py", " * min(max(worse, 0.0), 1.0)", ""),
    Without(
        "standard error farther towards the heads",
        f"{KERNELS}/choice.py",
        "min(slope + math.sqrt(rest * share / change), 1.0)",
        "min(slope, 1.0)",
    ),
)


def measured(half: str, data: Path) -> dict[str, list[float]]:
    """The errors of each set, of each series or of each step of it."""
    import forecast_real
    import m4
    import trends

    from sepsa import SepSAForecaster

    warnings.simplefilter("ignore")
    found = {name: [] for name in SETS}
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


def run(without: Without, half: str, data: Path) -> dict[str, list[float]]:
    """The errors of a copy of the source without a part."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True)
        if without.text:
            path = Path(folder, "sepsa", without.file)
            source = path.read_text()
            if source.count(without.text) != 1:
                raise SystemExit(f"{without.file} must have the text of {without.part!r} once")
            path.write_text(source.replace(without.text, without.replacement))
        paths = [folder, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, __file__, "--measure", "--half", half, "--data", str(data)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(answer.stdout.splitlines()[-1])


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
    parser.add_argument("--only", default="", help="parts whose names begin with this")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measured(given.half, given.data)))
        return
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if given.table:
        print_table(found)
        return
    from measure import write

    for without in PARTS:
        errors = found.setdefault(given.half, {})
        if without.part in errors or not without.part.startswith((given.only, "nothing")):
            continue
        errors[without.part] = run(without, given.half, given.data)
        write(__file__, found)
        gain = gains(errors).get(without.part, {})
        print(f"{without.part:45}", "  ".join(f"{name} {100 * value:+.2f}" for name, value in gain.items()), flush=True)


if __name__ == "__main__":
    main()
