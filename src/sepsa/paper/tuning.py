"""The ridge and the forgetting of "SepSA, tuned", chosen on rows that neither training nor testing sees.

For the regressions these are the validation rows that the paper splits off and leaves unused; for the classifications
the last 5,000 training images, held out here alone. The seeds are none of those reported.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from sepsa.paper import experiments, records, runner
from sepsa.paper.data import Dataset
from sepsa.paper.experiments import CLASSIFICATIONS, REGRESSIONS, Mode, Outcome, Run
from sepsa.paper.methods import TUNED

MODES: tuple[Mode, ...] = ("online", "mini-batch")
RIDGES = {"regression": (0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4), "classification": (1.0, 100.0)}
FORGETTINGS = {"regression": (1.0, 0.999, 0.99, 0.95, 0.9, 0.8), "classification": (1.0, 0.9999, 0.999, 0.99)}
SEEDS = {"regression": (100, 101, 102, 103, 104), "classification": (100,)}
HELD_OUT = 5_000  # images


def tune(
    results: Path,
    datasets: Sequence[str] | None = None,
    device: str = "cpu",
    jobs: int = 1,
    quick: bool = False,
    console: Console | None = None,
) -> None:
    """Try the grid on each data set in each mode, and write the choices to results/tuning.json as they are made.

    What the file holds already stays. The choices themselves are in `methods.TUNED_SETTINGS`, to be brought up to date
    by hand: so a change of them is one that somebody sees.
    """
    console = console or Console()
    file = results / "tuning.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for dataset in datasets or (*REGRESSIONS, *CLASSIFICATIONS):
        for mode in MODES:
            name = f"{dataset} {mode}"
            if name not in found:
                runs = grid(dataset, mode, quick)
                each = runner.each(partial(_validate, device=device), runs, jobs)
                scores: dict[Run, float | None] = {}
                for i, outcome, _ in track(each, name, total=len(runs), console=console):
                    scores[runs[i]] = outcome.test
                found[name] = verdict(scores, experiments.metric(dataset))
                lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(found[key])}" for key in sorted(found))
                records.write(file, f"{{\n{lines}\n}}\n")
            chosen = found[name]["chosen"]
            console.print(
                f"{name}: ridge {chosen['ridge']:g}, forgetting {chosen['forgetting']:g}, "
                f"validation {found[name]['metric']} {chosen['mean']:g}",
                highlight=False,
            )


def grid(dataset: str, mode: Mode, quick: bool) -> list[Run]:
    """The runs to choose from: every ridge with every forgetting and every seed."""
    task = "regression" if dataset in REGRESSIONS else "classification"
    seeds = SEEDS[task][:1] if quick else SEEDS[task]
    (run,) = (r for r in experiments.plan("table3", [dataset], [TUNED], 1, quick) if r.mode == mode)
    return [
        replace(run, experiment="tuning", ridge=ridge, forgetting=forgetting, seed=seed)
        for ridge in RIDGES[task]
        for forgetting in FORGETTINGS[task]
        for seed in seeds
    ]


def verdict(scores: dict[Run, float | None], metric: str) -> dict[str, Any]:
    """The settings with the best mean, among those of which no run diverged, and how all did."""
    settings = dict.fromkeys((run.ridge, run.forgetting) for run in scores)
    tried = []
    for ridge, forgetting in settings:
        values = [score for run, score in scores.items() if (run.ridge, run.forgetting) == (ridge, forgetting)]
        finite = [value for value in values if value is not None]
        mean = statistics.fmean(finite) if len(finite) == len(values) else None
        std = statistics.stdev(finite) if mean is not None and len(finite) > 1 else None
        tried.append(
            {
                "ridge": ridge,
                "forgetting": forgetting,
                "mean": records.significant(mean),
                "std": records.significant(std),
            }
        )
    whole = [entry for entry in tried if entry["mean"] is not None]
    if not whole:
        raise RuntimeError("every setting of the grid diverged in some run: widen the grid in sepsa.paper.tuning")
    best = (min if metric == "mse" else max)(whole, key=lambda entry: entry["mean"] or 0.0)
    return {"metric": metric, "seeds": sorted({run.seed for run in scores}), "chosen": best, "tried": tried}


def _validate(run: Run, device: str) -> Outcome:
    return experiments.train(run, held_out(runner.dataset(run.dataset)), device)


def held_out(dataset: Dataset) -> Dataset:
    """The same set with its validation rows in place of the test rows."""
    if dataset.validation_inputs is not None and dataset.validation_targets is not None:
        return replace(dataset, test_inputs=dataset.validation_inputs, test_targets=dataset.validation_targets)
    inputs, targets = dataset.train_inputs, dataset.train_targets
    return replace(
        dataset,
        train_inputs=inputs[:-HELD_OUT],
        train_targets=targets[:-HELD_OUT],
        test_inputs=inputs[-HELD_OUT:],
        test_targets=targets[-HELD_OUT:],
    )
