"""What River's and CapyMOA's own pages print, beside our learners with default settings on the same streams.

    python benchmarks/streams/printed_pages.py --data FOLDER
    python benchmarks/streams/printed_pages.py --table

Writes printed_pages.json. The figures of others are those of their pages, not run here: River's benchmarks of October
2023 (docs/benchmarks in commit 7468665748 of github.com/online-ml/river), and the notebooks 00_getting_started and
01_evaluation of CapyMOA (commit 095caba of github.com/adaptive-machine-learning/CapyMOA). The protocol is theirs: one
pass in the stream's order, each sample predicted before it is learned, and the measure over all samples, by River's
progressive_val_score for River's streams. Three seeds; ours is the mean.

FOLDER has three files: elec2.csv, the stream Elec2 with its columns date and day (River downloads it), and
electricity.csv and fried.csv of data/ in commit 013fd49 of CapyMOA. The others come with River.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from river import datasets, evaluate, metrics

from benchmarks.measure import write
from sepsa.river import SepSAClassifier, SepSARegressor

RESULT = Path(__file__).with_suffix(".json")
SEEDS = range(3)
MAE, RMSE, ACCURACY = "mean absolute error", "root mean squared error", "accuracy"
MEASURES = {"TrumpApproval": MAE, "ChickWeights": MAE, "Fried": RMSE}  # the accuracy of all others
RIVER = """
TrumpApproval
    Adaptive Model Rules 1.39847; Adaptive Random Forest 0.800378; Aggregated Mondrian Forest 0.268533; Bagging
    0.908203; Exponentially Weighted Average 40.7546; Hoeffding Adaptive Tree 0.921313; Hoeffding Tree 0.956103;
    Linear Regression 1.31455; linear, l1 1.15377; linear, l2 1.87151; passive-aggressive 1 4.98403; passive-
    aggressive 2 31.0933; River MLP 1.58058; Stochastic Gradient Tree 9.42975; Streaming Random Patches
    0.656697; Mean predictor 1.56755; k-Nearest Neighbors 0.641679
ChickWeights
    Adaptive Model Rules 24.1943; Adaptive Random Forest 26.1016; Aggregated Mondrian Forest 25.6742; Bagging
    23.1143; Exponentially Weighted Average 121.818; Hoeffding Adaptive Tree 23.3739; Hoeffding Tree 23.1619;
    Linear Regression 23.7587; linear, l1 23.7577; linear, l2 25.2738; passive-aggressive 1 24.3423; passive-
    aggressive 2 100.624; River MLP 51.4078; Stochastic Gradient Tree 68.7588; Streaming Random Patches 23.7097;
    Mean predictor 50.2509; k-Nearest Neighbors 24.8406
Phishing
    ADWIN Bagging 0.893515; ALMA 0.8256; AdaBoost 0.878303; Adaptive Random Forest 0.907926; Aggregated Mondrian
    Forest 0.904724; Bagging 0.893515; Hoeffding Adaptive Tree 0.874299; Hoeffding Tree 0.879904; Leveraging
    Bagging 0.894315; Logistic regression 0.8872; Naive Bayes 0.884708; Stacking 0.895116; Streaming Random
    Patches 0.913531; Voting 0.896717; Vowpal Wabbit 0.7736; Last Class 0.515612; k-Nearest Neighbors 0.881505;
    sklearn SGDClassifier 0.8896
Bananas
    ADWIN Bagging 0.625967; ALMA 0.506415; AdaBoost 0.677864; Adaptive Random Forest 0.88696; Aggregated
    Mondrian Forest 0.889413; Bagging 0.634082; Hoeffding Adaptive Tree 0.616531; Hoeffding Tree 0.642197;
    Leveraging Bagging 0.828269; Logistic regression 0.543208; Naive Bayes 0.61521; Stacking 0.876203; Streaming
    Random Patches 0.871674; Voting 0.872617; Vowpal Wabbit 0.551321; Last Class 0.50953; k-Nearest Neighbors
    0.885073; sklearn SGDClassifier 0.546415
Elec2
    ADWIN Bagging 0.823773; ALMA 0.906427; AdaBoost 0.880581; Adaptive Random Forest 0.876608; Aggregated
    Mondrian Forest 0.849904; Bagging 0.840436; Hoeffding Adaptive Tree 0.821258; Hoeffding Tree 0.795635;
    Leveraging Bagging 0.892653; Logistic regression 0.822144; Naive Bayes 0.728741; Stacking 0.885458;
    Streaming Random Patches 0.868884; Voting 0.84368; Vowpal Wabbit 0.697475; Last Class 0.853303; k-Nearest
    Neighbors 0.853148; sklearn SGDClassifier 0.819099
ImageSegments
    ADWIN Bagging 0.777826; AdaBoost 0.804677; Adaptive Random Forest 0.818536; Aggregated Mondrian Forest
    0.901689; Bagging 0.77696; Hoeffding Adaptive Tree 0.774361; Hoeffding Tree 0.776094; Leveraging Bagging
    0.778259; Naive Bayes 0.731919; Stacking 0.867908; Streaming Random Patches 0.766999; Voting 0.80641; Last
    Class 0.148116; k-Nearest Neighbors 0.873538
"""
CAPYMOA = """
Electricity
    Online Bagging of 5 0.8206656; Online Bagging of 10 0.8241746; Hoeffding Tree 0.8166049;
    Hoeffding Adaptive Tree 0.8468618; Adaptive Random Forest of 10 0.8932954
Fried
    k-Nearest Neighbors 2.7229995; Adaptive Random Forest of 10 3.3129013; Adaptive Random Forest of 5 3.77
"""


def printed(text: str) -> dict[str, dict[str, float]]:
    """The figures of a page by stream and model."""
    found: dict[str, dict[str, float]] = {}
    for block in re.split(r"\n(?=\w)", text.strip()):
        name, _, body = block.partition("\n")
        pairs = (" ".join(part.split()).rpartition(" ") for part in body.split(";"))
        found[name] = {model: float(value) for model, _, value in pairs}
    return found


def table_of(path: Path, target: str) -> Iterator[tuple[dict[str, float], Any]]:
    """The samples of a CSV file, whose target is a number where all targets are not labels."""
    with path.open() as file:
        for row in csv.DictReader(file):
            y = row.pop(target)
            yield {name: float(value) for name, value in row.items()}, y if target == "class" else float(y)


def by_river(stream: Any, model: Any, measure: str) -> float:
    metric = metrics.Accuracy() if measure == ACCURACY else metrics.MAE()
    return float(evaluate.progressive_val_score(stream, model, metric).get())


def by_hand(stream: Any, model: Any, measure: str) -> float:
    """Test then train, with all samples counted, the first among them."""
    told = []
    for x, y in stream:
        guess = model.predict_one(x)
        told.append(float(guess == y) if measure == ACCURACY else (guess - y) ** 2)
        model.learn_one(x, y)
    return statistics.fmean(told) if measure == ACCURACY else math.sqrt(statistics.fmean(told))


def run(data: Path) -> None:
    results = []
    for page, text, evaluation in (("River", RIVER, by_river), ("CapyMOA", CAPYMOA, by_hand)):
        for name, others in printed(text).items():
            measure = MEASURES.get(name, ACCURACY)
            files = {"Elec2": ("elec2.csv", "class"), "Electricity": ("electricity.csv", "class")}
            files["Fried"] = ("fried.csv", "target")
            ours, start = [], time.process_time()
            for seed in SEEDS:
                file = files.get(name)
                stream = table_of(data / file[0], file[1]) if file else getattr(datasets, name)()
                kind = SepSAClassifier if measure == ACCURACY else SepSARegressor
                ours.append(evaluation(stream, kind(seed=seed), measure))
            seconds = (time.process_time() - start) / len(SEEDS)
            results.append(
                {"page": page, "stream": name, "measure": measure, "sepsa": ours, "seconds": seconds, "printed": others}
            )
            print(page, name, ours, f"{seconds:.0f} s")
    write(__file__, {"results": results})


def table() -> None:
    """Print a row for each stream: ours, the best figure of the page, and how many of its models are ahead."""
    print("| stream | page | measure | sepsa | best on the page | its model | models ahead of ours |")
    print("|---|---|---|---|---|---|---|")
    for one in json.loads(RESULT.read_text())["results"]:
        ours, others = statistics.fmean(one["sepsa"]), one["printed"]
        high = one["measure"] == ACCURACY
        model = (max if high else min)(others, key=others.get)
        ahead = sum(value > ours if high else value < ours for value in others.values())
        told, best = f"{ours:#.3g}", f"{others[model]:#.3g}"
        row = [one["stream"], one["page"], one["measure"], told, best, model, f"{ahead} of {len(others)}"]
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        run(given.data or parser.error("--data must name the folder of elec2.csv, electricity.csv and fried.csv"))
    table()
