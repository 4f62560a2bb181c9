"""`sepsa report`: the paper's table and figures beside ours, drawn from the records under results/.

Everything here is made again from the records at every call, and the same records give the same bytes.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.figure import Figure

from sepsa.paper import figures
from sepsa.paper.data import NAMES
from sepsa.paper.experiments import (
    CLASSIFICATION_SEEDS,
    CLASSIFICATIONS,
    EXPERIMENTS,
    LEARNING_RATES,
    REGRESSION_SEEDS,
    REGRESSIONS,
    WIDE_LEARNING_RATES,
    plan,
)
from sepsa.paper.figures import Curve, Metric
from sepsa.paper.methods import slug
from sepsa.paper.records import missing as not_recorded
from sepsa.paper.records import write as write_file
from sepsa.paper.table3 import (
    METHODS,
    MODES,
    PAPER,
    Printed,
    Record,
    Row,
    Run,
    best_methods,
    read,
    table3,
    unexplained,
)

TITLES = {"energy": "Energy", "diabetes": "Diabetes", "mnist": "MNIST", "cifar10": "CIFAR-10"}
HEADINGS = {
    "fig1": "Fig. 1",
    "fig2": "Fig. 2",
    "fig3": "Fig. 3",
    "fig4": "Fig. 4",
    "convergence": "Convergence",
    "table3": "Table III",
    "augmented": "Table III with crops and flips",
    "variants": "Table III with one thing changed",
    "images": "Images as we would learn them",
    "images-augmented": "Images as we would learn them, with crops and flips",
}
IMAGES = ("augmented", "variants", "images", "images-augmented")
PAPER_SEEDS = {"mse": len(REGRESSION_SEEDS), "accuracy": len(CLASSIFICATION_SEEDS)}
BEGIN, END = "<!-- table3 begin -->", "<!-- table3 end -->"


def write(results: Path, out: Path, docs: Path | None = None) -> None:
    """Make the table, the figures and the page again from the records under `results`.

    They go to `results/table3.json` and `images.json`, `out/figures/` and `out/report.html`; `docs` is a markdown file
    whose block between the marks "table3 begin" and "table3 end" is replaced. What has not been run is named with its
    command.
    """
    if not results.is_dir():
        raise FileNotFoundError(f"results must be a folder of records, got {str(results)!r}: run `sepsa reproduce all`")
    page = docs.read_text(encoding="utf-8") if docs is not None else ""
    if docs is not None and not 0 <= page.find(BEGIN) < page.find(END):
        raise ValueError(f"docs must hold the lines {BEGIN} and {END}, got {str(docs)!r} without them: write them in")
    records = read(results)
    rows, images = table3(records), table3(records, IMAGES)
    gaps = missing(results, records)
    for name, table in (("table3", rows), ("images", images)):
        text = json.dumps([asdict(row) for row in table], indent=1, allow_nan=False)
        write_file(results / f"{name}.json", text + "\n")
    plates = draw(records, results / "convergence.json")
    for name, plate in plates.items():
        figures.save(plate.figure, out / "figures" / f"{name}.svg")
        plate.figure.set_layout_engine("none")  # it stays as it was laid out, which takes longer than drawing it
        figures.save(plate.figure, out / "figures" / f"{name}.png")
    write_file(out / "report.html", html(records, rows, images, gaps, plates, out / "figures"))
    if docs is not None:
        there = Path(os.path.relpath(results, docs.parent)).as_posix()
        before, after = page[: page.find(BEGIN) + len(BEGIN)], page[page.find(END) :]
        write_file(docs, f"{before}\n{markdown(rows, images, gaps, there)}\n{after}")


# ---------------------------------------------------------------------- what is missing


@dataclass(frozen=True)
class Gap:
    """Something that has not been run, and the command that runs it."""

    what: str
    command: str


def missing(results: Path, records: Iterable[Record]) -> list[Gap]:
    """What the paper's experiments would run and no record holds; of a folder of quick runs, what is left of those."""
    kinds = {bool(run.spec.get("quick")) for record in records for run in record.runs}
    quick = kinds == {True}
    small = " --quick" if quick else ""
    gaps = []
    for name in EXPERIMENTS:
        wanted = plan(name, quick=quick)
        lacking = not_recorded(results, wanted)
        if len(lacking) == len(wanted):
            gaps.append(Gap(HEADINGS[name], f"sepsa reproduce {name}{small}"))
            continue
        for dataset in NAMES:
            here = [run for run in lacking if run.dataset == dataset]
            if not here:
                continue
            methods = [method for method in METHODS if any(run.method == method for run in here)]
            all_methods = len(methods) == len({run.method for run in wanted if run.dataset == dataset})
            of = "all methods" if all_methods else "; ".join(methods)
            options = f" --datasets {dataset}" + ("" if all_methods else f" --methods {','.join(map(slug, methods))}")
            what = f"{HEADINGS[name]}, {TITLES[dataset]}: {_plural(len(here), 'run')} of {of}"
            gaps.append(Gap(what, f"sepsa reproduce {name}{options}{small}"))
    if not (results / "convergence.json").exists():
        gaps.append(Gap(HEADINGS["convergence"], f"sepsa reproduce convergence{small}"))
    return gaps


# ---------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Plate:
    """A figure with what stands under it, and what is read out instead of it."""

    figure: Figure
    caption: str
    alt: str


# name: mode, data sets, splits, learning rates
GRIDS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], tuple[float, ...]]] = {
    "fig1": ("online", NAMES, ("test",), LEARNING_RATES),
    "fig2": ("mini-batch", REGRESSIONS, ("train", "test"), LEARNING_RATES),
    "fig3": ("mini-batch", CLASSIFICATIONS, ("train", "test"), LEARNING_RATES),
}
PLATES = {
    "fig1": "Fig. 1: online learning, one pass, one sample at a time",
    "fig2": "Fig. 2: regression in mini-batches of 32",
    "fig3": "Fig. 3: classification in mini-batches of 64",
    "fig4": "Fig. 4: Energy over a wide range of learning rates",
    "convergence": "Theorem 1, and the cost of a step",
}


def draw(records: Sequence[Record], convergence: Path) -> dict[str, Plate]:
    """Every figure that there are records for."""
    plates: dict[str, Plate] = {}
    for name, (mode, sets, splits, rates) in GRIDS.items():
        rows = [
            row
            for dataset in sets
            for split in splits
            if (row := _grid_row(records, name, mode, dataset, split, rates)).curves
        ]
        if rows:
            plates[name] = _grid(rows, rates)
    sweep = _curves(records, "fig4", "energy", "train", WIDE_LEARNING_RATES)
    if sweep:
        plates["fig4"] = _sweep(sweep)
    if convergence.exists():
        plates["convergence"] = _convergence(json.loads(convergence.read_text(encoding="utf-8")))
    return plates


def _curves(
    records: Iterable[Record], experiment: str, dataset: str, split: str, rates: Sequence[float]
) -> dict[float, dict[str, list[Curve]]]:
    """By learning rate and method, the runs of one figure on one data set."""
    found: dict[float, dict[str, list[Curve]]] = {}
    for record in records:
        if (record.experiment, record.dataset) != (experiment, dataset):
            continue
        for run in record.runs:
            values = run.curve.get(split, ())
            if run.lr in rates and (values or run.diverged):
                x = np.array(run.curve["x"], dtype=np.float64)
                y = np.full(len(x), np.nan)  # a run that diverged has recorded nothing more
                y[: len(values)] = np.array(values, dtype=np.float64)
                found.setdefault(run.lr, {}).setdefault(record.method, []).append(Curve(x, y, run.diverged))
    return {lr: found[lr] for lr in rates if lr in found}


def _grid_row(
    records: Iterable[Record], experiment: str, mode: str, dataset: str, split: str, rates: Sequence[float]
) -> figures.Row:
    metric: Metric = "mse" if dataset in REGRESSIONS else "accuracy"
    quantity = "mean squared error" if metric == "mse" else "accuracy, %"
    return figures.Row(
        label=f"{TITLES[dataset]}\n{split} {quantity}",
        xlabel="samples seen" if mode == "online" else "epoch",
        metric=metric,
        curves=_curves(records, experiment, dataset, split, rates),
    )


def _grid(rows: Sequence[figures.Row], rates: Sequence[float]) -> Plate:
    winners: list[str] = []
    lost: list[str] = []
    gone: dict[str, int] = {}
    for row in rows:
        for lr, methods in row.curves.items():
            ends = {name: figures.last(curves, row.metric) for name, curves in methods.items()}
            best = (min if row.metric == "mse" else max)(ends, key=lambda name: ends[name])
            winners.append(best if math.isfinite(ends[best]) else "nobody")
            if winners[-1] != "SepSA":
                lost.append(f"{winners[-1]} ({' '.join(row.label.split()[:2])}, {lr:g})")
            for name, curves in methods.items():
                if any(curve.diverged for curve in curves):
                    gone[name] = gone.get(name, 0) + 1
    ahead = f"SepSA ends ahead in {winners.count('SepSA')} of {len(winners)} panels"
    ahead += f"; elsewhere {', '.join(lost)}." if lost else "."
    away = ", ".join(f"{name} in {_plural(n, 'panel')}" for name, n in gone.items())
    scale = any(figures.near_perfect(row) for row in rows)
    told = ["On an axis that nears 100 % equal steps are equal ratios of the errors left."] if scale else []
    caption = " ".join([_lines_are(row.curves for row in rows), *told, ahead, f"Diverged: {away or 'none'}."])
    alt = f"A grid of learning curves, a row per data set and split, a column per learning rate. {caption}"
    return Plate(figures.curve_grid(rows, rates), caption, alt)


def _lines_are(panels: Iterable[Mapping[float, Mapping[str, Sequence[Curve]]]]) -> str:
    most = max(len(runs) for curves in panels for methods in curves.values() for runs in methods.values())
    return "A line is one run." if most == 1 else f"A line is the median of up to {most} runs, the shade their range."


def _sweep(curves: Mapping[float, Mapping[str, Sequence[Curve]]]) -> Plate:
    ends = {lr: {name: figures.last(runs, "mse") for name, runs in methods.items()} for lr, methods in curves.items()}
    told = []
    ours = {lr: ends[lr]["SepSA"] for lr in ends if "SepSA" in ends[lr]}
    if ours:
        worst = max(ours, key=lambda lr: ours[lr])
        said = f"{ours[worst]:.3g}" if math.isfinite(ours[worst]) else "diverged"
        told.append(f"SepSA's largest training error over {len(ours)} learning rates is {said} (at {worst:g}).")
    gone = _where(
        {
            lr: [name for name, runs in methods.items() if any(run.diverged for run in runs)]
            for lr, methods in curves.items()
        }
    )
    top = figures.top(curves)
    above = _where({lr: [name for name, end in ends[lr].items() if top < end < math.inf] for lr in ends})
    told += [f"Diverged: {gone or 'none'}."] + ([f"Ended above the panels: {above}."] if above else [])
    caption = " ".join([_lines_are([curves]), *told])
    alt = f"Training error at the end over the learning rate, and a panel of curves per learning rate. {caption}"
    return Plate(figures.rate_sweep(curves, "epoch", "training error, MSE"), caption, alt)


def _where(names: Mapping[float, Sequence[str]]) -> str:
    """The learning rates of each method, in words."""
    rates = {method: [lr for lr in names if method in names[lr]] for method in METHODS}
    return "; ".join(f"{method} at {', '.join(f'{lr:g}' for lr in at)}" for method, at in rates.items() if at)


def _convergence(raw: Mapping[str, Any]) -> Plate:
    problems = {"SepSA": _problem(raw)}
    if "overlapping" in raw:
        problems = {"bumps apart": _problem(raw), "bumps overlapping": _problem(raw["overlapping"])}
    cost = {
        key: (_floats(at[key] for at in raw["cost"][key]), _floats(at["seconds"] for at in raw["cost"][key]))
        for key in ("p", "q")
    }
    told = "; ".join(
        f"{name}: objective gap {_interval(problem.slopes['objective'])}, gradient norm "
        f"{_interval(problem.slopes['gradient'])}"
        for name, problem in problems.items()
    )
    caption = (
        f"SepSA on a synthetic separable problem with a known optimum, mean and spread over {raw['seeds']} seeds. "
        f"Slopes in log–log with their intervals, {told}. O(1/k) in the objective means O(1/√k) in the gradient norm. "
        "Below, the time of one step against the paper's O(p²) for the head and O(q) for the body."
    )
    alt = f"Four log–log panels: gradient norm, objective gap, cost over p, cost over q. {caption}"
    return Plate(figures.convergence(problems, cost), caption, alt)


def _problem(raw: Mapping[str, Any]) -> figures.Problem:
    named = {"gradient": raw["gradient_norm"], "objective": raw["objective_gap"]}
    bands = {name: {key: _floats(band[key]) for key in ("mean", "low", "high")} for name, band in named.items()}
    return figures.Problem(_floats(raw["k"]), bands, raw["slope"])


def _floats(values: Iterable[float]) -> figures.Floats:
    return np.array(list(values), dtype=np.float64)


def _interval(slope: Sequence[float]) -> str:
    estimate, low, high = (f"{value:.2f}".replace("-", "−") for value in slope)
    return f"{estimate} [{low}, {high}]"


# ---------------------------------------------------------------------- words


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


_PLUS_MINUS = "±\N{NO-BREAK SPACE}"  # a narrow cell breaks before it


def number(value: float | None, metric: str) -> str:
    """As the paper prints it: accuracies with two decimals, errors with about five digits."""
    if value is None:
        return "–"
    if metric == "mse" and not 1e-4 < abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:,.{_decimals(value, metric)}f}"


def mean_and_std(mean: float | None, std: float | None, metric: str) -> str:
    if mean is None or std is None:
        return number(mean, metric)
    if metric == "mse" and not 1e-4 < abs(mean) < 1e6:
        return f"{mean:.3g} {_PLUS_MINUS}{std:.2g}"
    return f"{number(mean, metric)} {_PLUS_MINUS}{std:,.{_decimals(mean, metric)}f}"


def _decimals(value: float, metric: str) -> int:
    return 2 if metric == "accuracy" else max(1, 5 - len(str(int(abs(value)))))


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


@dataclass(frozen=True)
class Verdict:
    """How far ours is from the paper's number, in the paper's standard deviations."""

    kind: str
    mark: str
    text: str
    spoken: str


def judge(difference: float | None, metric: str) -> Verdict | None:
    if difference is None:
        return None
    far = f"{abs(difference):.1f} σ" if abs(difference) < 100 else f"{abs(difference):.0f} σ"
    if abs(difference) <= 1:
        return Verdict("near", "≈", far, "within one of the paper's standard deviations")
    better = (difference < 0) == (metric == "mse")
    word = "better" if better else "worse"
    if abs(difference) <= 2:
        return Verdict(f"mid {word}", "△" if better else "▽", f"{far} {word}", "within two standard deviations")
    return Verdict(f"far {word}", "▲" if better else "▼", f"{far} {word}", "beyond two standard deviations")


def ours(mean: float | None, std: float | None, row: Row) -> str:
    return "all diverged" if row.diverged == row.seeds else mean_and_std(mean, std, row.metric)


def _diverged(row: Row) -> str:
    return f"{row.diverged} of {row.seeds} diverged, left out" if 0 < row.diverged < row.seeds else ""


def _seeds(row: Row) -> str:
    """How many, and how many the paper has where that is more."""
    paper = PAPER_SEEDS[row.metric]
    return str(row.seeds) if row.seeds >= paper else f"{row.seeds} of {paper}"


def against(ours: float | None, reference: float | None, metric: str) -> str:
    """An error as a multiple of the reference's, an accuracy as points above or below it."""
    if ours is None or reference is None:
        return "–"
    return f"× {ours / reference:.2f}" if metric == "mse" else f"{ours - reference:+.2f} points".replace("-", "−")


# ---------------------------------------------------------------------- the page


def html(
    records: Sequence[Record],
    rows: Sequence[Row],
    images: Sequence[Row],
    gaps: Sequence[Gap],
    plates: Mapping[str, Plate],
    drawn: Path,
) -> str:
    """The page as one text that needs no other file; `drawn` is the folder with the figures."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    source = resources.files("sepsa.paper").joinpath("report.html.jinja").read_text(encoding="utf-8")
    best = best_methods(rows)
    verdicts = [
        verdict
        for row in rows
        for difference in (row.train_difference, row.test_difference)
        if (verdict := judge(difference, row.metric))
    ]
    kinds = [verdict.kind for verdict in verdicts]
    behind = [record for record in records if record.experiment in ("table3", *IMAGES)]
    runs = [run for record in records for run in record.runs]
    return environment.from_string(source).render(
        printed=2 * len(PAPER),
        compared=len(kinds),
        tally={
            "near": kinds.count("near"),
            "mid": sum(kind.startswith("mid") for kind in kinds),
            "better": kinds.count("far better"),
            "worse": kinds.count("far worse"),
        },
        quick=sum(bool(run.spec.get("quick")) for run in runs),
        total=len(runs),
        notes=list(dict.fromkeys(run.note for run in runs if run.note)),
        gaps=gaps,
        sections=[{"title": _mode(mode), "groups": _paper_groups(rows, mode, best)} for mode in MODES],
        augmented=[
            {"title": _mode(mode), "groups": groups}
            for mode in MODES
            if (groups := _paper_groups([row for row in images if row.experiment == "augmented"], mode, set(), False))
        ],
        variants=[
            {"title": _mode(mode), "groups": groups}
            for mode in MODES
            if (groups := _variant_groups([row for row in images if row.experiment == "variants"], mode))
        ],
        unexplained=len(unexplained([*rows, *images])),
        extras=_extra_groups(rows, best),
        images=_image_groups(images),
        plates=[_plate(name, plates.get(name), gaps, drawn) for name in PLATES],
        records=[_behind(record) for record in behind],
    )


def _mode(mode: str) -> str:
    return "Online: one sample at a time, one pass" if mode == "online" else "Mini-batches"


def _metric(metric: str) -> str:
    return "mean squared error, less is better" if metric == "mse" else "accuracy in %, more is better"


def _paper_groups(
    rows: Iterable[Row], mode: str, best: set[tuple[str, str, str]], whole: bool = True
) -> list[dict[str, Any]]:
    """The paper's rows of one mode, each with ours if it has been run; unless `whole`, of data sets with ours alone."""
    ours = {(row.mode, row.dataset, row.method): row for row in rows}
    groups = []
    for dataset in NAMES:
        metric = "mse" if dataset in REGRESSIONS else "accuracy"
        lines = []
        for key, printed in PAPER.items():
            if key[:2] == (mode, dataset):
                line = _cells(ours[key], best) if key in ours else {"anchor": "", "best": False}
                lines.append(line | {"method": key[2]} | _printed(printed, metric))
        if whole or any(line["anchor"] for line in lines):
            groups.append({"title": TITLES[dataset], "metric": _metric(metric), "rows": lines})
    return groups


def _variant_groups(rows: Iterable[Row], mode: str) -> list[dict[str, Any]]:
    """The rows of "variants", each beside the paper's row of which it changes one thing."""
    groups = []
    for dataset in CLASSIFICATIONS:
        lines = [
            _cells(row, set())
            | {"method": row.method}
            | _printed(PAPER[mode, dataset, row.method.partition(",")[0]], row.metric)
            for row in rows
            if (row.mode, row.dataset) == (mode, dataset)
        ]
        if lines:
            groups.append({"title": TITLES[dataset], "metric": _metric("accuracy"), "rows": lines})
    return groups


def _printed(printed: Printed, metric: str) -> dict[str, Any]:
    return {
        "paper_train": mean_and_std(printed.train_mean, printed.train_std, metric),
        "paper_test": mean_and_std(printed.test_mean, printed.test_std, metric),
        "paper_seconds": seconds(printed.seconds),
    }


def _image_groups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of "images" and "images-augmented", against the paper's SepSA as it is printed."""
    groups = []
    for experiment, told in (("images", ""), ("images-augmented", ", crops and flips")):
        for dataset, mode in product(CLASSIFICATIONS, MODES):
            here = [row for row in rows if (row.experiment, row.dataset, row.mode) == (experiment, dataset, mode)]
            best = best_methods(here)
            lines = [
                _cells(row, best)
                | {
                    "method": row.method,
                    "against_paper": against(row.test_mean, PAPER[mode, dataset, "SepSA"].test_mean, row.metric),
                }
                for row in here
            ]
            if lines:
                title = f"{TITLES[dataset]}, {'online' if mode == 'online' else 'mini-batches'}{told}"
                groups.append({"title": title, "metric": _metric(here[0].metric), "rows": lines})
    return groups


def _extra_groups(rows: Sequence[Row], best: set[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """The rows that the paper lacks, against SepSA."""
    sepsa = {(row.mode, row.dataset): row for row in rows if row.method == "SepSA"}
    groups = []
    for mode in MODES:
        for dataset in NAMES:
            here = [row for row in rows if (row.mode, row.dataset) == (mode, dataset) and row.paper_test_mean is None]
            reference = sepsa.get((mode, dataset))
            printed = PAPER[mode, dataset, "SepSA"].test_mean
            lines = [
                _cells(row, best)
                | {
                    "method": row.method,
                    "against_ours": against(row.test_mean, reference.test_mean if reference else None, row.metric),
                    "against_paper": against(row.test_mean, printed, row.metric),
                }
                for row in here
            ]
            if lines:
                title = f"{TITLES[dataset]}, {'online' if mode == 'online' else 'mini-batches'}"
                groups.append({"title": title, "metric": _metric(here[0].metric), "rows": lines})
    return groups


def _cells(row: Row, best: set[tuple[str, str, str]]) -> dict[str, Any]:
    """What stands in the cells of our own numbers."""
    return {
        "anchor": _anchor(row.name),
        "best": (row.mode, row.dataset, row.method) in best,
        "train": ours(row.train_mean, row.train_std, row),
        "test": ours(row.test_mean, row.test_std, row),
        "diverged": _diverged(row),
        "train_verdict": judge(row.train_difference, row.metric),
        "test_verdict": judge(row.test_difference, row.metric),
        "seeds": _seeds(row),
        "seconds": seconds(row.seconds_mean),
    }


def _anchor(name: str) -> str:
    return f"runs-{name.replace('/', '-')}"


def _plate(name: str, plate: Plate | None, gaps: Sequence[Gap], drawn: Path) -> dict[str, Any]:
    view = {
        "name": name,
        "short": HEADINGS[name],
        "title": PLATES[name],
        "command": f"sepsa reproduce {name}",
        "uri": "",
    }
    if plate is None:
        return view
    width, height = (round(float(inches) * 96) for inches in plate.figure.get_size_inches())
    code = base64.b64encode((drawn / f"{name}.svg").read_bytes()).decode("ascii")
    picture = {"uri": f"data:image/svg+xml;base64,{code}", "width": width, "height": height}
    return view | picture | {"caption": plate.caption, "alt": plate.alt}


def _behind(record: Record) -> dict[str, Any]:
    """The runs of one row, with the settings that all of them share."""
    first = record.runs[0]
    settings = {**first.spec, **{f"{name} version": version for name, version in first.versions.items()}}
    told = ("experiment", "dataset", "mode", "method", "seed", "note")
    spec = [
        (key, f"{value:g}" if isinstance(value, float) else value)
        for key, value in settings.items()
        if key not in told and value not in (None, False) and all(_setting(run, key) == value for run in record.runs)
    ]
    return {
        "anchor": _anchor(record.name),
        "title": f"{HEADINGS[record.experiment]}: {TITLES[record.dataset]}, {record.mode}, {record.method}",
        "count": _plural(len(record.runs), "run"),
        "spec": spec,
        "runs": [
            {
                "seed": run.seed,
                "train": "diverged" if run.diverged else number(run.train, record.metric),
                "test": "diverged" if run.diverged else number(run.test, record.metric),
                "seconds": seconds(run.seconds),
                "device": run.device,
            }
            for run in record.runs
        ],
    }


def _setting(run: Run, key: str) -> Any:
    return run.versions.get(key.removesuffix(" version")) if key.endswith(" version") else run.spec.get(key)


# ---------------------------------------------------------------------- docs/reproduction.md


def markdown(rows: Sequence[Row], images: Sequence[Row], gaps: Sequence[Gap], results: str) -> str:
    """Table III side by side, the rows the paper lacks, and what differs; `results` is the way to the records."""
    best = best_methods(rows)
    parts = ["<!-- written by `sepsa report`: change the records or the code, not this block -->"]
    augmented = [row for row in images if row.experiment == "augmented"]
    variants = [row for row in images if row.experiment == "variants"]
    for table, heading in (
        (rows, "{mode}"),
        (augmented, "CIFAR-10 with random crops and flips, {mode}"),
        (variants, "One thing more changed, {mode}"),
    ):
        for mode in MODES:
            lines = [
                _line(row, f"{results}/{row.name}.json", best)
                for row in table
                if row.mode == mode and row.paper_test_mean is not None
            ]
            if lines:
                head = "| | method | train, paper | ours | | test, paper | ours | | seeds | seconds, paper | ours |"
                rule = "|---|---|--:|--:|---|--:|--:|---|--:|--:|--:|"
                title = heading.format(mode=_mode(mode) if table is rows else mode)
                parts += ["", f"### {title}", "", head, rule, *lines]
    groups = _image_groups(images)
    if groups:
        parts += ["", "### Images as we would learn them", ""]
        parts.append("| | method | train | test | test against SepSA, printed | seeds | seconds |")
        parts.append("|---|---|--:|--:|--:|--:|--:|")
        parts += [
            f"| {group['title']} | {line['method']}{' ★' if line['best'] else ''} | {_told(line, 'train')} "
            f"| {_told(line, 'test')} | {line['against_paper']} | {line['seeds']} | {line['seconds']} |"
            for group in groups
            for line in group["rows"]
        ]
    extras = _extra_groups(rows, best)
    if extras:
        parts += ["", "### Which comparison the paper left out", ""]
        parts.append(
            "| | method | train | test | test against SepSA, ours | against SepSA, printed | seeds | seconds |"
        )
        parts.append("|---|---|--:|--:|--:|--:|--:|--:|")
        parts += [
            f"| {group['title']} | {line['method']}{' ★' if line['best'] else ''} | {_told(line, 'train')} "
            f"| {_told(line, 'test')} | {line['against_ours']} | {line['against_paper']} | {line['seeds']} "
            f"| {line['seconds']} |"
            for group in extras
            for line in group["rows"]
        ]
    if rows:
        parts += [
            "",
            "Mean squared error on Energy and Diabetes, accuracy in percent on MNIST and CIFAR-10; ± is the standard "
            "deviation over seeds (ours of the sample, n − 1), σ the one that the paper prints. ≈ within one σ, △ ▽ "
            "within two, ▲ ▼ beyond, pointing up where ours is better. ★ best test result of all our rows for that "
            "data set and mode.",
            "",
            "### Rows beyond two standard deviations",
            "",
            *(_beyond([*rows, *augmented]) or ["None."]),
            "",
            f"{_plural(len(unexplained([*rows, *images])), 'mean')} of {2 * len(PAPER)} are left without an "
            "explanation: no experiment here, with crops and flips or with one thing more changed, has both means of "
            "the row within two σ of what the paper prints.",
        ]
    if gaps:
        parts += ["", "### Not run yet", "", *(f"- {gap.what}: `{gap.command}`" for gap in gaps)]
    return "\n".join([*parts, ""])


def _line(row: Row, record: str, best: set[tuple[str, str, str]]) -> str:
    cells = _cells(row, best)
    method = f"[{row.method}]({record}){' ★' if cells['best'] else ''}"
    numbers = []
    for split, mean, std in (
        ("train", row.paper_train_mean, row.paper_train_std),
        ("test", row.paper_test_mean, row.paper_test_std),
    ):
        verdict = cells[f"{split}_verdict"]
        told = f"{verdict.mark} {verdict.text}" if verdict else "–"
        numbers += [mean_and_std(mean, std, row.metric), _told(cells, split), told]
    times = [cells["seeds"], seconds(row.paper_seconds_mean), cells["seconds"]]
    return f"| {TITLES[row.dataset]} | {' | '.join([method, *numbers, *times])} |"


def _told(cells: Mapping[str, Any], split: str) -> str:
    return f"{cells[split]} ({cells['diverged']})" if cells["diverged"] else str(cells[split])


def _beyond(rows: Iterable[Row]) -> list[str]:
    lines = []
    for row in rows:
        for split, mean, printed, difference in (
            ("train", row.train_mean, row.paper_train_mean, row.train_difference),
            ("test", row.test_mean, row.paper_test_mean, row.test_difference),
        ):
            verdict = judge(difference, row.metric)
            if verdict and verdict.kind.startswith("far"):
                cut = ", with crops and flips" if row.experiment == "augmented" else ""
                where = f"{TITLES[row.dataset]}, {row.mode}{cut}, {row.method}, {split}"
                values = f"{number(mean, row.metric)} where the paper has {number(printed, row.metric)}"
                lines.append(f"- {where}: {values}, {verdict.text}.")
    return lines
