"""A table with a category: a scikit-learn pipeline that predicts with intervals and keeps learning in production.

python examples/sklearn_pipeline.py
"""

from __future__ import annotations

from sklearn.compose import make_column_transformer
from sklearn.datasets import load_diabetes
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

from sepsa import SepSARegressor


def main() -> None:
    table, target = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    old, new, y_old, y_new = train_test_split(table, target, random_state=0)
    encode = make_column_transformer((OneHotEncoder(), ["sex"]), remainder="passthrough")
    model = make_pipeline(encode, SepSARegressor(random_state=0))
    print(f"R² in cross-validation: {cross_val_score(model, old, y_old).mean():.2f}")

    model.fit(old, y_old)
    mean, std = model.predict(new, return_std=True)
    inside = ((y_new - mean).abs() <= 1.645 * std).mean()
    print(f"90 % intervals of unseen patients: {mean[0]:.0f} ± {1.645 * std[0]:.0f} for the first, {inside:.0%} hold")

    # New patients arrive one by one: each is predicted, then learned.
    before = model[-1].prequential(model[0].transform(new), y_new)
    print(f"mean absolute error on them as they come: {(y_new - before).abs().mean():.1f}")


if __name__ == "__main__":
    main()
