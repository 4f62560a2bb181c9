"""How good predicted probabilities are: the log-loss of predictions made before learning, with default settings.

    python benchmarks/probabilities.py

Writes probabilities.json: on River's streams Phishing and ImageSegments, over 5 seeds, the log-loss of
`SepSAClassifier.prequential`, of other ways from the same scores to probabilities (the nearest point of the simplex
alone with one more sample of each class, scores clipped and normalized, the softmax whose sharpness is the best of all
in hindsight) and of River's logistic regression.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from measure import write
from river import datasets, linear_model, preprocessing

from sepsa import SepSAClassifier
from sepsa.stream.calibration import log_losses, project_to_simplex

SEEDS = 5


def log_loss(proba: Any, y: Any) -> float:
    return float(-np.log(proba[np.arange(len(y)), y]).mean())


def ours(X: Any, y: Any, seed: int) -> dict[str, float]:
    classes = np.arange(y.max() + 1)
    proba = SepSAClassifier(random_state=seed).prequential(X, y, classes, method="predict_proba")
    model = SepSAClassifier(random_state=seed)
    scores, _, _ = model._learn_labels(X, y, classes, None)
    n, p, clipped = np.arange(len(y))[:, None], project_to_simplex(scores), np.clip(scores, 0.01, None)
    return {
        "accuracy": float((proba.argmax(1) == y).mean()),
        "mixture": log_loss(proba, y),
        "nearest point": log_loss((n * p + 1) / (n + len(classes)), y),
        "clipped at 0.01": log_loss(clipped / clipped.sum(1, keepdims=True), y),
        "best sharpness in hindsight": float(log_losses(p, y).mean(0).min()),
    }


def river(stream: Any, classes: int) -> dict[str, float]:
    kind = linear_model.LogisticRegression if classes == 2 else linear_model.SoftmaxRegression
    model, right, losses = preprocessing.StandardScaler() | kind(), [], []
    for x, label in stream:
        proba = model.predict_proba_one(x)
        right.append(model.predict_one(x) == label)
        losses.append(-np.log(max(proba.get(label, 1 / classes if not proba else 0.0), 1e-15)))
        model.learn_one(x, label)
    return {"accuracy": float(np.mean(right)), "log-loss": float(np.mean(losses))}


def main() -> None:
    result: dict[str, Any] = {"seeds": SEEDS}
    for stream in (datasets.Phishing(), datasets.ImageSegments()):
        rows = [(list(x.values()), label) for x, label in stream]
        X = np.array([row for row, _ in rows], float)
        names, y = np.unique([label for _, label in rows], return_inverse=True)
        runs = [ours(X, y, seed) for seed in range(SEEDS)]
        mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
        name = type(stream).__name__
        result[name] = {"SepSAClassifier": mean, "runs": runs, "River's logistic regression": river(stream, len(names))}
        print(name, {key: round(value, 3) for key, value in mean.items()}, result[name]["River's logistic regression"])
    write(__file__, result)


if __name__ == "__main__":
    main()
