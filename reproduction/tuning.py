"""A grid search for the settings of the tuned methods, on rows that neither training nor testing uses.

For the regressions it chooses the ridge and the forgetting of "SepSA, tuned" by the validation rows, which the paper
splits off and does not use. For the experiments with a falling learning rate it chooses the settings of each method by
the last 5,000 training images, which are held out here only, from equally many settings per method. No seed of the
reported runs is used.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from reproduction import records, runner, training
from reproduction.data import NAMES, REGRESSIONS, Dataset, metric
from reproduction.experiments import EXPERIMENTS, MODES, Mode, RunSpec, plan
from reproduction.methods import CROSS_ENTROPY, NEWTON, TUNED, head_settings, slug

RIDGES = (0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
FORGETTINGS = (1.0, 0.999, 0.99, 0.95, 0.9, 0.8)
SEEDS = (100, 101, 102, 103, 104)
IMAGE_SEEDS = (100,)
HELD_OUT = 5_000  # images

REGRESSION_FIELDS = ("ridge", "forgetting")
IMAGE_FIELDS = ("lr", "ridge", "forgetting", "smoothing")
# Six settings for each method: learning rate, forgetting of the head, smoothing of the labels.
IMAGE_GRID: dict[str, list[tuple[float, float | None, float]]] = {
    TUNED: [(lr, forgetting, 0.0) for lr in (1e-3, 2e-3) for forgetting in (1.0, 0.9999, 0.999)],
    CROSS_ENTROPY: [(lr, None, smoothing) for lr in (5e-4, 1e-3, 2e-3) for smoothing in (0.0, 0.1)],
    NEWTON: [(1e-3, forgetting, smoothing) for forgetting in (1.0, 0.9999, 0.999) for smoothing in (0.0, 0.1)],
}


def tune(
    results: Path,
    datasets: Sequence[str] | None = None,
    device: str = "cpu",
    jobs: int = 1,
    quick: bool = False,
    console: Console | None = None,
) -> None:
    """Search the grid of each data set and mode, and write each choice to results/tuning.json when it is made.

    Choices that the file holds already are kept. `methods.TUNED_SETTINGS` and `IMAGE_SETTINGS` repeat the choices and
    are edited by hand, so that a change of them is seen in review.
    """
    console = console or Console()
    file = results / "tuning.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    wanted = grids(datasets or NAMES, quick)
    missing = {name: runs for name, runs in wanted.items() if name not in found}
    scores: dict[str, dict[RunSpec, float | None]] = {name: {} for name in missing}
    runs = [(name, run) for name, each in missing.items() for run in each]
    done = runner.each(partial(_validate, device=device), [run for _, run in runs], jobs)
    for i, outcome, _ in track(done, "tuning", total=len(runs), console=console) if runs else ():
        name, run = runs[i]
        scores[name][run] = outcome.test
        if len(scores[name]) == len(missing[name]):
            fields = REGRESSION_FIELDS if run.dataset in REGRESSIONS else IMAGE_FIELDS
            found[name] = choose(scores[name], metric(run.dataset), fields)
            records.write_json(file, dict(sorted(found.items())))
    for name in wanted:
        chosen = {key: value for key, value in found[name]["chosen"].items() if key not in ("mean", "std")}
        settings = ", ".join(f"{key} {value:g}" for key, value in chosen.items() if value is not None)
        score = f"validation {found[name]['metric']} {found[name]['chosen']['mean']:g}"
        console.print(f"{name}: {settings}, {score}", highlight=False)


def grids(datasets: Sequence[str], quick: bool) -> dict[str, list[RunSpec]]:
    """The runs of each choice, by its name in tuning.json."""
    found: dict[str, list[RunSpec]] = {}
    for dataset, mode in product(datasets, MODES):
        if dataset in REGRESSIONS:
            found[f"{dataset} {mode}"] = grid(dataset, mode, quick)
        for experiment in EXPERIMENTS:
            for run in plan(experiment, [dataset], None, 1, quick):
                if (run.mode, run.schedule) == (mode, "linear"):
                    found[f"{experiment} {dataset} {mode} {slug(run.method)}"] = image_grid(run, quick)
    return found


def grid(dataset: str, mode: Mode, quick: bool) -> list[RunSpec]:
    """The runs of a regression: every ridge with every forgetting and every seed."""
    (run,) = (r for r in plan("table3", [dataset], [TUNED], 1, quick) if r.mode == mode)
    return [
        replace(run, experiment="tuning", ridge=ridge, forgetting=forgetting, seed=seed)
        for ridge in RIDGES
        for forgetting in FORGETTINGS
        for seed in (SEEDS[:1] if quick else SEEDS)
    ]


def image_grid(run: RunSpec, quick: bool) -> list[RunSpec]:
    """The runs of one method on images: its settings in IMAGE_GRID around those of `run`."""
    settings = IMAGE_GRID[run.method][:1] if quick else IMAGE_GRID[run.method]
    ridge, _ = head_settings(run.method, run.dataset, run.mode)
    return [
        replace(run, experiment="tuning", lr=lr, ridge=ridge, forgetting=forgetting, smoothing=smoothing, seed=seed)
        for lr, forgetting, smoothing in settings
        for seed in IMAGE_SEEDS
    ]


def choose(
    scores: dict[RunSpec, float | None], metric: str, fields: Sequence[str] = REGRESSION_FIELDS
) -> dict[str, Any]:
    """The settings with the best mean score among those without a diverged run, and the scores of all.

    `fields` are the fields of a run that the grid varies.
    """
    setting_of = {run: tuple(getattr(run, field) for field in fields) for run in scores}
    tried: list[dict[str, Any]] = []
    for setting in sorted(set(setting_of.values()), key=list(setting_of.values()).index):
        values = [score for run, score in scores.items() if setting_of[run] == setting]
        finite = [value for value in values if value is not None]
        mean = statistics.fmean(finite) if len(finite) == len(values) else None
        std = statistics.stdev(finite) if mean is not None and len(finite) > 1 else None
        known = dict(zip(fields, setting, strict=True))
        tried.append(known | {"mean": records.significant(mean), "std": records.significant(std)})
    stable = [entry for entry in tried if entry["mean"] is not None]
    if not stable:
        raise RuntimeError("every setting of the grid diverged in some run: widen the grid in reproduction.tuning")
    best = (min if metric == "mse" else max)(stable, key=lambda entry: entry["mean"] or 0.0)
    return {"metric": metric, "seeds": sorted({run.seed for run in scores}), "chosen": best, "tried": tried}


def _validate(run: RunSpec, device: str) -> training.Outcome:
    return training.train(run, held_out(runner.dataset(run.dataset)), device)


def held_out(dataset: Dataset) -> Dataset:
    """The data set with validation rows in place of the test rows."""
    if dataset.validation_inputs is not None and dataset.validation_targets is not None:
        return replace(dataset, test_inputs=dataset.validation_inputs, test_targets=dataset.validation_targets)
    inputs, targets = dataset.train_inputs, dataset.train_targets
    kept = replace(dataset, train_inputs=inputs[:-HELD_OUT], train_targets=targets[:-HELD_OUT])
    return replace(kept, test_inputs=inputs[-HELD_OUT:], test_targets=targets[-HELD_OUT:])
