"""A River pipeline with a category and missing values, evaluated prequentially, with a drift detector.

python examples/river_pipeline.py
"""

from __future__ import annotations

import random

from river import compose, datasets, drift, evaluate, linear_model, metrics, preprocessing

from sepsa.river import SepSARegressor


def main() -> None:
    # Weights of growing chicks on four diets; a linear model needs a scaler, this one does not.
    encode = compose.Select("time") + (compose.Select("diet") | preprocessing.OneHotEncoder())
    for name, model in {
        "SepSARegressor": encode.clone() | SepSARegressor(seed=0),
        "LinearRegression": encode.clone() | preprocessing.StandardScaler() | linear_model.LinearRegression(),
    }.items():
        error = evaluate.progressive_val_score(datasets.ChickWeights(), model, metrics.MAE())
        print(f"{name:17s} {error}")

    # A tenth of the features are removed at random: a missing feature counts as its mean.
    chance, model, error = random.Random(0), SepSARegressor(seed=0), metrics.MAE()
    for x, y in datasets.TrumpApproval():
        x = {name: value for name, value in x.items() if chance.random() > 0.1}
        error.update(y, model.predict_one(x))
        model.learn_one(x, y)
    print(f"approval rates, a tenth of the features missing: {error}")

    # The relationship changes its sign in mid-stream. ADWIN detects it by the errors, and a new learner starts.
    model, detector = SepSARegressor(seed=0), drift.ADWIN()
    for t in range(4000):
        x = {"a": chance.uniform(-2, 2), "b": chance.uniform(-2, 2)}
        y = (1 if t < 2000 else -1) * (x["a"] * x["b"] + x["a"])
        detector.update(abs(y - model.predict_one(x)))
        if detector.drift_detected and t > 500:  # before that the errors fall because the model learns
            print(f"drift found at sample {t}")
            model = model.clone()
        model.learn_one(x, y)


if __name__ == "__main__":
    main()
