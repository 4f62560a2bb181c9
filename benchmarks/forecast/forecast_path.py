"""Which mechanisms `SepSAForecaster` at `every=1` has, and why: a path of additions, from the smallest forecaster.

    git archive COMMIT src | tar x -C SOURCE
    python benchmarks/forecast/forecast_path.py --source SOURCE --data FOLDER [--processes 16] [--half choose|report]
    python benchmarks/forecast/forecast_path.py --table

COMMIT is 18fb160f, the last one with all mechanisms. They are switched on and off by a bit mask in the copy SOURCE,
which the script changes. It starts from one family of heads, the last value, that of the season, one smoothing and one
leader, and adds the mechanism that gains most on the half `choose`, until none gains more than two standard errors. A
series counts once, by the mean over its steps of log(error without / error with). The sets are those of `trends.py`,
`forecast_real.py` (without random walks), M4's hourly and weekly series of FOLDER (numbers 1, 5, 9, ... of each file to
choose, 3, 7, 11, ... to report), and seven series of each ETT set over 8,000 hours. FOLDER has also `ETTh1.csv` and
`ETTh2.csv`. What the path leaves out stays all the same where the errors of a benchmark would pass the bound of GATES
without it: the JSON has these errors, `without` each mechanism.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

RESULT = Path(__file__).with_suffix(".json")
GATES = {"M4 hourly, OWA": 0.445, "M4 weekly, OWA": 0.775, "real, largest": 1.010, "trends, median": 1.11}
GATES |= {"ETTh2, 1 ahead": 0.0628, "ETTh2, 24 ahead": 0.1607}
NAMES = {
    "own": "heads of each series",
    "joint": "heads of all series together",
    "terms": "terms times sines of a season",
    "stack": "stack",
    "profile": "profile of a season in the stack",
    "seasonal": "last values of seasons",
    "drifts": "drifts",
    "trend": "smoothing of a trend",
    "season": "smoothing with a season",
    "rates": "learned rates of smoothing",
    "near": "leader of the step before",
    "guard": "guard by the latest errors",
    "stretch": "longer memory of far steps",
    "overlap": "overlap of errors of far steps",
    "trust": "trust by regression",
    "sines": "sines of seasons",
    "lead": "significance of a leader",
    "memory": "third memory",
}
BITS = {name: bit for bit, name in enumerate(NAMES)}
START = frozenset({"own", "seasonal", "season", "lead", "sines"})
NEEDS = {"profile": "stack", "rates": "season", "guard": "trust"}
ON = "given.OPTIONS(model).mask >> {} & 1"


def on(name: str) -> str:
    return ON.format(BITS[name])


SWITCHES: list[tuple[str, str, str]] = [  # a file, a text, and what takes its place
    ("parts.py", "OPTIONS = Record(\n", "OPTIONS = Record(\n    mask=Field(int, (1 << 20) - 1),\n"),
    *(
        (
            "step.py",
            f"        {call}(model, family",
            f"        if {ON.format('family')}:\n            {call}(model, family",
        )
        for call in ("learn_inputs", "best_losses", "add_forecasts")
    ),
    (
        "step.py",
        "            learn_targets(model, family, t)\n",
        f"            if {ON.format('family')}:\n                learn_targets(model, family, t)\n",
    ),
    ("heads.py", "x[n] *= common[factor[g, n]]", f"x[n] *= common[factor[g, n]] if {on('terms')} else 0.0"),
    (
        "heads.py",
        "x[terms + n] = common[n]",
        f"x[terms + n] = common[n] if {on('sines')} or n == 0 or n > 2 * fixed.ANGLES(model).size else 0.0",
    ),
    ("choice.py", "min(t, H) if x.size > 0 else 0", f"min(t, H) if x.size > 0 and {on('stack')} else 0"),
    (
        "choice.py",
        "now - h - 1, now, off[at, j], x)\n",
        "now - h - 1, now, off[at, j], x)\n            drop_profile(x, given.OPTIONS(model).mask)\n",
    ),
    ("choice.py", "            if x.size > 0:\n", f"            if x.size > 0 and {on('stack')}:\n"),
    (
        "choice.py",
        "now, now + h + 1, off[at, j], x)\n",
        "now, now + h + 1, off[at, j], x)\n                drop_profile(x, given.OPTIONS(model).mask)\n",
    ),
    (
        "choice.py",
        "share * (stacked[j, h] - mean)\n",
        f"(share * (stacked[j, h] - mean) if {on('stack')} else 0.0)\n",
    ),
    (
        "choice.py",
        "            leader = follow_leader("
        "own, leaders[j, h], leaders[j, h - 1] if h > 0 else -1, share, options.lead)\n",
        "            for i in range(1, len(own)):\n"
        f"                bit = {BITS['seasonal']} if i < bases else {BITS['drifts']} if i < 2 * bases else 0\n"
        f"                bit = {BITS['trend']} if i == 2 * bases else {BITS['season']} if i > 2 * bases else bit\n"
        "                if not options.mask >> bit & 1:\n"
        "                    own[i, LEAD] = -1.0\n"
        f"            near = leaders[j, h - 1] if h > 0 and {on('near')} else -1\n"
        f"            least = options.lead if {on('lead')} else 0.0\n"
        "            leader = follow_leader(own, leaders[j, h], near, share, least)\n",
    ),
    (
        "choice.py",
        "            far = trust(own[leader], share, latest, options.sure, options.guard)\n",
        f"            far = trust(own[leader], share, latest, options.sure, options.guard if {on('guard')} else 1e9)\n"
        f"            if not {on('trust')}:\n"
        "                far = own[leader, GAIN] / math.sqrt(own[leader, GAIN_SQUARE] * latest + 1e-300)\n"
        "                far = min(max(far, 0.0), 1.0)\n",
    ),
    (
        "choice.py",
        "max(1.0, (1.0 + h) / options.stretch)",
        f"max(1.0, ((1.0 + h) / options.stretch) if options.mask >> {BITS['stretch']} & 1 else 1.0)",
    ),
    ("choice.py", "RISE, t - h, h), known[j, h]", f"RISE, t - h, h if {on('overlap')} else 0), known[j, h]"),
    ("choice.py", "1.0, t - h, h)", f"1.0, t - h, h if {on('overlap')} else 0)"),
    (
        "choice.py",
        "@called\ndef last_value(",
        "@called\ndef drop_profile(x, mask):\n"
        f"    for i in range((x.size - 2) // 4 if not mask >> {BITS['profile']} & 1 else 0):\n"
        "        x[3 + 4 * i], x[4 + 4 * i] = 0.0, 0.0\n\n\n@called\ndef last_value(",
    ),
    (
        "smoothing.py",
        "        if there[j]:\n            learn_rates",
        f"        if there[j] and {on('rates')}:\n            learn_rates",
    ),
    ("smoothing.py", "kernels.parts import fixed,", "kernels.parts import given, fixed,"),
]


def add_switches(source: Path) -> None:
    """Let the mechanisms of a copy of the source depend on a bit mask among the options."""
    folder = source / "src/sepsa/forecast/kernels"
    if "mask=Field" in (folder / "parts.py").read_text():
        return
    for file, text, replacement in SWITCHES:
        path = folder / file
        old = path.read_text()
        if old.count(text) != 1:
            raise SystemExit(f"{file} must have the text {text!r} once, got {old.count(text)}: take the named commit")
        path.write_text(old.replace(text, replacement))


@cache
def jobs(half: str, data: Path) -> dict[str, Callable[[Any], dict[str, list[float]]]]:
    """By name what measures the errors of the series of a job, given what makes a forecaster of a horizon."""
    from benchmarks.forecast import forecast_real, m4, trends

    found: dict[str, Callable[[Any], dict[str, list[float]]]] = {}

    def of_trend(name: str, make: Any) -> Callable[[Any], dict[str, list[float]]]:
        def measured(forecaster: Any) -> dict[str, list[float]]:
            trends.SepSAForecaster = forecaster
            return {name: [trends.ours(make())]}

        return measured

    def of_real(name: str, make: Any) -> Callable[[Any], dict[str, list[float]]]:
        def measured(forecaster: Any) -> dict[str, list[float]]:
            real = make()
            made, first = forecaster(max(real.steps)).prequential(real.y, times=real.times), len(real.y) // 2
            return {name: [forecast_real.absolute_error(real.y, made[:, h - 1], h, first) for h in real.steps]}

        return measured

    def of_m4(name: str, season: int, y: Any, test: Any) -> Callable[[Any], dict[str, list[float]]]:
        def measured(forecaster: Any) -> dict[str, list[float]]:
            made = forecaster(len(test)).fit(y).predict()
            return {name: [float(np.abs(test - made).mean() / np.abs(y[season:] - y[:-season]).mean())]}

        return measured

    def of_ett(name: str) -> Callable[[Any], dict[str, list[float]]]:
        def measured(forecaster: Any) -> dict[str, list[float]]:
            Z = np.genfromtxt(data / f"{name}.csv", delimiter=",", skip_header=1, usecols=range(1, 8))
            Z = Z[4000:12000] if half == "choose" else Z[9400:17400]
            Z = (Z - Z[:4000].mean(0)) / Z[:4000].std(0)
            made, steps = forecaster(24, lags=96, seasons=(24.0,)).prequential(Z), (1, 12, 24)
            off = {h: (Z[3999 + h + 1 :] - made[4000 : len(Z) - h, h - 1]) ** 2 for h in steps}
            return {f"{name}, {j}": [float(off[h][:, j].mean() ** 0.5) for h in steps] for j in range(7)}

        return measured

    found |= {f"trends/{name}": of_trend(f"trends/{name}", make) for name, make in trends.HALVES[half].items()}
    found |= {
        f"real/{name}": of_real(f"real/{name}", make)
        for name, make in forecast_real.HALVES[half].items()
        if not name.startswith("random walk")
    }
    for kind in ("hourly", "weekly"):
        arrays = np.load(data / f"m4-{kind}-even.npz")
        series = np.split(arrays["rows"].astype(float), np.cumsum(arrays["lengths"])[:-1])
        for i in range(1 if half == "choose" else 3, len(series), 4):
            name = f"M4 {kind}/{i}"
            found[name] = of_m4(name, m4.KINDS[kind].season, series[i], arrays["test"][i].astype(float))
    return found | {f"ETT/{name}": of_ett(name) for name in ("ETTh1", "ETTh2")}


def measured(job: tuple[str, str, Path, frozenset[str]]) -> dict[str, float]:
    """The logarithms of the mean errors of the series of a job, with these mechanisms."""
    from functools import partial

    from sepsa import SepSAForecaster
    from sepsa.forecast import model

    half, name, data, mechanisms = job
    warnings.simplefilter("ignore")
    model.OPTIONS["mask"] = sum(1 << BITS[one] for one in mechanisms)
    forgetting = (0.9995, 0.9998, 1.0) if "memory" in mechanisms else (0.9995, 1.0)
    errors = jobs(half, data)[name](partial(SepSAForecaster, forgetting=forgetting))
    return {series: float(np.log(np.maximum(values, 1e-12)).mean()) for series, values in errors.items()}


def gain(without: dict[str, float], beside: dict[str, float]) -> dict[str, Any]:
    """How much lower the logarithms of errors are with a mechanism."""
    gains = np.array([without[series] - beside[series] for series in without])
    error = float(gains.std(ddof=1) / len(gains) ** 0.5)
    return {"n": len(gains), "median": float(np.median(gains)), "mean": float(gains.mean()), "standard error": error}


def find_path(half: str, data: Path, processes: int, path: list[str] | None) -> dict[str, Any]:
    """The additions from START, or those of a given path, and what each further mechanism would have gained."""
    known: dict[frozenset[str], dict[str, float]] = {}
    with multiprocessing.get_context("fork").Pool(processes) as pool:

        def errors(mechanisms: frozenset[str]) -> dict[str, float]:
            if mechanisms not in known:
                todo = [(half, name, data, mechanisms) for name in jobs(half, data)]
                known[mechanisms] = {k: v for part in pool.imap_unordered(measured, todo) for k, v in part.items()}
            return known[mechanisms]

        now, added = START, {}
        while True:
            able = [one for one in NAMES if one not in now and NEEDS.get(one, "own") in now]
            gains = {one: gain(errors(now), errors(now | {one})) | {"mechanism": NAMES[one]} for one in able}
            best = max(gains, key=lambda one: gains[one]["mean"])
            if path is not None:
                best = next((one for one in path if one not in now), "")
            if not best or (path is None and gains[best]["mean"] <= 2 * gains[best]["standard error"]):
                return {"added": added, "left out": gains, "all": gain(errors(now), errors(frozenset(NAMES)))}
            added[best], now = gains[best], now | {best}


def print_table() -> None:
    """Print each mechanism, what it gains at the end of the path on both halves, and what the gates say."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    print("| mechanism | n | choose: median, mean | report: median, mean | it is |\n|---|---|---|---|---|")
    for name in (*found["choose"]["added"], *found["choose"]["left out"]):
        cells = []
        for half in ("choose", "report"):
            one = {**found[half]["added"], **found[half]["left out"]}.get(name)
            cells.append("" if one is None else "{:+.2f}, {:+.2f} ± {:.2f}".format(*(100 * one[key] for key in KEYS)))
        number = {**found["choose"]["added"], **found["choose"]["left out"]}[name]["n"]
        print(f"| {NAMES[name]} | {number} | {cells[0]} | {cells[1]} | {found['decided'][name]} |")


KEYS = ("median", "mean", "standard error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a copy of the source of the named commit, which is changed")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--half", choices=("choose", "report"), default="choose")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print_table()
        return
    add_switches(given.source)
    sys.path.insert(0, str(given.source / "src"))
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    path = list(found["choose"]["added"]) if given.half == "report" else None
    found[given.half] = find_path(given.half, given.data, given.processes, path)
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
